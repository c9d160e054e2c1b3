// A transformer's MLP, Y = max(0, X · A) · B, on any number of ranks: X and Y are split by rows, A by columns, B by rows. Each rank
// gathers X while it computes the first product, and scatters the partial sums of Y while it computes the second one. The program
// runs the same two operations by several schedules and prints the time that communication adds to the computation.
//
//     cc -O3 mlp.c $(pkg-config --cflags --libs commfuse) -lm -o mlp && mpirun -np 2 ./mlp
#include <commfuse/fuse.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 512, C = 256, HIDDEN = 1024, RUNS = 5 };
static const char *const schedules[] = {"none", "slice:4", "ring"};

// --- the model: numbers that are the same on all ranks, those of X, then of A, then of B ---

enum { A_AT = ROWS * C, B_AT = A_AT + C * HIDDEN };
static float number(int64_t i) {
    return (float)((i * 2654435761u >> 7) % 1000) / 1000 - 0.5f;
}

// --- this rank's part of the computation ---

typedef struct mlp {
    int hidden;   // columns of A, and of H, and rows of B on this rank
    float *A, *B; // its part of the weights
    float *H;     // max(0, X · A), all rows
} mlp;

// out = in · weight, which has `inner` rows and `outer` columns
static void multiply(const float *in, const float *weight, float *out, int inner, int outer) {
    for (int j = 0; j < outer; j++) out[j] = 0;
    for (int i = 0; i < inner; i++)
        for (int j = 0; j < outer; j++) out[j] += in[i] * weight[i * outer + j];
}

// Both are called for a part of the rows, as soon as these have arrived, or before they are sent. A part is a number of blocks with
// other rows between them. (On CPUs a stream runs at once.)
static void up(void *argument, const cf_span *span, cf_stream *stream) {
    const mlp *m = argument;
    (void)stream;
    for (int block = 0; block < span->blocks; block++)
        for (int64_t i = 0; i < span->rows; i++) {
            const float *x = (const float *)(span->data + block * span->data_stride) + i * C;
            float *h = m->H + (span->row + block * span->row_stride + i) * m->hidden;
            multiply(x, m->A, h, C, m->hidden);
            for (int j = 0; j < m->hidden; j++) h[j] = fmaxf(0, h[j]);
        }
}

static void down(void *argument, const cf_span *span, cf_stream *stream) {
    const mlp *m = argument;
    (void)stream;
    for (int block = 0; block < span->blocks; block++)
        for (int64_t i = 0; i < span->rows; i++) {
            const float *h = m->H + (span->row + block * span->row_stride + i) * m->hidden;
            float *y = (float *)(span->data + block * span->data_stride) + i * C;
            multiply(h, m->B, y, m->hidden, C);
        }
}

// The largest error of one row of Y.
static double error_of(const float *y, int64_t row) {
    double h[HIDDEN] = {0}, error = 0;
    for (int i = 0; i < C; i++)
        for (int j = 0; j < HIDDEN; j++) h[j] += (double)number(row * C + i) * number(A_AT + i * HIDDEN + j);
    for (int j = 0; j < C; j++) {
        double exact = 0;
        for (int i = 0; i < HIDDEN; i++) exact += fmax(0, h[i]) * number(B_AT + i * C + j);
        error = fmax(error, fabs(exact - y[j]));
    }
    return error;
}

// --- the program ---

static void *must(void *made) { // functions of the library return NULL or false on an error
    if (!made) fprintf(stderr, "%s\n", cf_error()), exit(1);
    return made;
}

int main(void) {
    cf_errors_return(true);
    cf_context *context = must(cf_open("auto", 1, 60));
    cf_group *tp = must(cf_group_create(context, "tp", NULL, 0)); // all ranks
    const int N = tp->size, rank = tp->rank;

    // A shard has as many rows on every rank: rows behind the last one are zero. Columns of A need not divide.
    const int64_t rows = (ROWS + N - 1) / N, first = rank * rows, last = first + rows < ROWS ? first + rows : ROWS;
    const int from = HIDDEN * rank / N, hidden = HIDDEN * (rank + 1) / N - from;
    float *X = must(calloc(N * rows * C, sizeof *X)), *Y = must(calloc(N * rows * C, sizeof *Y));
    mlp m = {.hidden = hidden,
             .A = must(calloc(C * HIDDEN, sizeof *m.A)),
             .B = must(calloc(HIDDEN * C, sizeof *m.B)),
             .H = must(calloc(N * rows * HIDDEN, sizeof *m.H))};
    for (int64_t i = first * C; i < last * C; i++) X[i] = number(i);
    for (int i = 0; i < C * hidden; i++) m.A[i] = number(A_AT + i / hidden * HIDDEN + from + i % hidden);
    for (int i = 0; i < hidden * C; i++) m.B[i] = number(B_AT + from * C + i);

    double worst = 0;
    for (int s = 0; s < (int)(sizeof schedules / sizeof *schedules); s++) {
        cf_choice choice;
        if (!cf_choice_parse(schedules[s], &choice)) return fprintf(stderr, "there is no schedule %s\n", schedules[s]), 1;
        cf_fuse_config plan = {.group = tp, .dtype = CF_FP32, .capacity = rows * C};
        plan.algorithm = choice.algorithm, plan.slices = choice.slices;
        plan.name = "up", plan.operation = CF_ALLGATHER, plan.side = CF_COMPUTE_AFTER;
        cf_fuse *gather = must(cf_fuse_create(context, plan));
        plan.name = "down", plan.operation = CF_REDUCE_SCATTER, plan.side = CF_COMPUTE_BEFORE;
        cf_fuse *scatter = must(cf_fuse_create(context, plan));

        const float *mine = NULL;               // this rank's rows of Y
        for (int run = 0; run <= RUNS; run++) { // the first one warms up; the others are one step of the trace
            if (run < 2) cf_trace_step(context->trace, run, context->stream);
            must(cf_fuse_run(gather, X, rows, C, up, &m, -1));
            mine = must(cf_fuse_run(scatter, Y, rows, C, down, &m, -1));
        }
        cf_trace_step(context->trace, RUNS, context->stream);

        double error = 0;
        if (first < last) error = fmax(error_of(mine, first), error_of(mine + (last - 1 - first) * C, last - 1));
        printf("rank %d of %d, %s: exposed %.3f ms, error %.1e\n", rank, N, schedules[s],
               cf_trace_last(context->trace).exposed_ms / RUNS, error);
        worst = fmax(worst, error);
        cf_fuse_free(gather), cf_fuse_free(scatter);
    }
    free(X), free(Y), free(m.A), free(m.B), free(m.H);
    cf_group_free(tp);
    return cf_close(context) && worst < 1e-3 ? 0 : 1;
}
