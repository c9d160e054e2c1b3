// A transformer's MLP, Y = max(0, X · A) · B, on any number of ranks: X and Y are split by rows, A by columns, B by rows. Each rank
// gathers X while it computes the first product, and scatters the partial sums of Y while it computes the second one. The program
// runs the same two operations by several schedules and prints the time that communication adds to the computation.
//
//     cc -O3 mlp.c $(pkg-config --cflags --libs commfuse) -o mlp && mpirun -np 2 ./mlp
#include <commfuse/fuse.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 512, C = 256, HIDDEN = 1024, RUNS = 5 };
static const char *const schedules[] = {"none", "slice:4", "ring"};

// --- the model: X[i][c] = i % 7 - 3, A[c][j] = a(j), B[j][k] = a(j) + k % 3, and so Y, whole numbers that sums of floats reach ---

static int a(int j) {
    return 1 + 4 * j / HIDDEN; // 1 to 4, so that another rank's columns give another sum
}

static float y(int64_t i, int64_t k) {
    return i < ROWS && i % 7 > 3 ? (float)(C * (i % 7 - 3) * (HIDDEN / 4) * (30 + 10 * (k % 3))) : 0;
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

// Called for a part of the rows: of X as soon as these have arrived, of Y before they are sent. A part is a number of blocks with
// other rows between them. (On CPUs a stream runs at once.)
static void compute(void *argument, const cf_span *span, cf_stream *stream) {
    const mlp *m = argument;
    (void)stream;
    for (int block = 0; block < span->blocks; block++)
        for (int64_t i = 0; i < span->rows; i++) {
            float *row = (float *)(span->data + block * span->data_stride) + i * C;
            float *h = m->H + (span->row + block * span->row_stride + i) * m->hidden;
            if (span->side == CF_COMPUTE_BEFORE) {
                multiply(h, m->B, row, m->hidden, C);
                continue;
            }
            multiply(row, m->A, h, C, m->hidden);
            for (int j = 0; j < m->hidden; j++) h[j] = h[j] > 0 ? h[j] : 0;
        }
}

// --- the program ---

static void *must(void *made) { // functions of the library return NULL or false on an error
    if (made) return made;
    fprintf(stderr, "%s\n", cf_error());
    exit(1);
}

// Computes Y a few times by one schedule, prints what is exposed, and returns whether this rank's rows are right. The first run warms
// up; the others are one step of the trace. X and Y have `rows` rows of each rank.
static bool run(cf_context *context, const cf_group *group, mlp *m, float *X, float *Y, int64_t rows, const char *schedule) {
    cf_choice choice;
    if (!cf_choice_parse(schedule, &choice)) exit(2);
    cf_fuse_config config = {.group = group, .algorithm = choice.algorithm, .slices = choice.slices, .capacity = rows * C};
    config.dtype = CF_FP32;
    config.name = "up", config.operation = CF_ALLGATHER, config.side = CF_COMPUTE_AFTER;
    cf_fuse *gather = must(cf_fuse_create(context, config));
    config.name = "down", config.operation = CF_REDUCE_SCATTER, config.side = CF_COMPUTE_BEFORE;
    cf_fuse *scatter = must(cf_fuse_create(context, config));
    const float *mine = NULL; // this rank's rows of Y
    for (int i = 0; i <= RUNS; i++) {
        if (i < 2) cf_trace_step(context->trace, i, context->stream);
        must(cf_fuse_run(gather, X, rows, C, compute, m, -1));
        mine = must(cf_fuse_run(scatter, Y, rows, C, compute, m, -1));
    }
    cf_trace_step(context->trace, RUNS, context->stream);
    bool exact = true;
    for (int64_t i = 0; i < rows * C; i++) exact &= mine[i] == y(group->rank * rows + i / C, i % C);
    printf("rank %d of %d, %s: exposed %.3f ms, %s\n", group->rank, group->size, schedule,
           cf_trace_last(context->trace).exposed_ms / RUNS, exact ? "exact" : "wrong");
    cf_fuse_free(gather);
    cf_fuse_free(scatter);
    return exact;
}

int main(void) {
    cf_errors_return(true);
    cf_context *context = must(cf_open("auto", 1, 60));
    cf_group *all = must(cf_group_create(context, "all", NULL, 0));
    const int N = all->size, r = all->rank;

    // Every rank has as many rows; those behind the last row of X are zero. Columns of A need not divide.
    const int64_t rows = (ROWS + N - 1) / N;
    const int from = HIDDEN * r / N, hidden = HIDDEN * (r + 1) / N - from;
    float *X = must(calloc(N * rows * C, sizeof *X));
    float *Y = must(calloc(N * rows * C, sizeof *Y));
    mlp m = {.hidden = hidden};
    m.A = must(calloc(C * HIDDEN, sizeof *m.A));
    m.B = must(calloc(HIDDEN * C, sizeof *m.B));
    m.H = must(calloc(N * rows * HIDDEN, sizeof *m.H));
    for (int64_t i = r * rows * C; i < (r + 1) * rows * C && i < ROWS * C; i++) X[i] = (float)(i / C % 7 - 3);
    for (int i = 0; i < C * hidden; i++) m.A[i] = (float)a(from + i % hidden);
    for (int i = 0; i < hidden * C; i++) m.B[i] = (float)(a(from + i / C) + i % C % 3);

    bool exact = true;
    for (int i = 0; i < 3; i++) exact &= run(context, all, &m, X, Y, rows, schedules[i]);
    float *memory[] = {X, Y, m.A, m.B, m.H};
    for (int i = 0; i < 5; i++) free(memory[i]);
    cf_group_free(all);
    return cf_close(context) && exact ? 0 : 1;
}
