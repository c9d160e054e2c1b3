// A transformer's MLP, Y = max(0, X · A) · B, on several ranks: X and Y are split by rows, A by columns, B by rows. The all-gather
// of X runs with the first product, the reduce-scatter of Y with the second. Prints the exposed communication time of each mode.
//
//     cc -O3 mlp.c $(pkg-config --cflags --libs commfuse) -lm -o mlp && mpirun -np 2 ./mlp
#include <commfuse/fuse.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 512, C = 256, HIDDEN = 1024, RUNS = 5 };
static float X[ROWS * C], A[C * HIDDEN], B[HIDDEN * C], H[ROWS * HIDDEN], Y[ROWS * C]; // A, B and H: this rank's part
static int hidden;                                                                     // columns of A and H on this rank

static float number(int64_t i) { // the same on all ranks: X from 0 on, then A and B
    return (float)((i * 2654435761u >> 7) % 1000) / 1000 - 0.5f;
}

// out (outer) = in (inner) · weight (inner, outer)
static void multiply(const float *in, const float *weight, float *out, int inner, int outer) {
    for (int j = 0; j < outer; j++) out[j] = 0;
    for (int i = 0; i < inner; i++)
        for (int j = 0; j < outer; j++) out[j] += in[i] * weight[i * outer + j];
}

// Computes with rows of X that have arrived, or rows of Y to be sent. (On CPUs a stream runs at once.)
static void compute(void *argument, const cf_span *span, cf_stream *stream) {
    for (int64_t i = 0; i < span->rows * span->blocks; i++) {
        int64_t block = i / span->rows, row = span->row + block * span->row_stride + i % span->rows;
        float *data = (float *)(span->data + block * span->data_stride) + i % span->rows * C, *h = H + row * hidden;
        if (span->side == CF_COMPUTE_AFTER) multiply(data, A, h, C, hidden);
        for (int j = 0; j < hidden && span->side == CF_COMPUTE_AFTER; j++) h[j] = fmaxf(0, h[j]);
        if (span->side == CF_COMPUTE_BEFORE) multiply(h, B, data, hidden, C);
    }
    (void)argument, (void)stream;
}

static double error_of(const float *y, int64_t row) { // of one row, compared with the whole product
    double error = 0, h[HIDDEN] = {0}, exact;
    for (int64_t i = 0; i < C * HIDDEN; i++) h[i % HIDDEN] += (double)number(row * C + i / HIDDEN) * number(ROWS * C + i);
    for (int64_t j = 0; j < C; j++, error = fmax(error, fabs(exact - y[j - 1])))
        for (int64_t i = exact = 0; i < HIDDEN; i++) exact += fmax(0, h[i]) * number((ROWS + HIDDEN + i) * C + j);
    return error;
}

static void *must(void *made) {
    if (!made) fprintf(stderr, "%s\n", cf_error()), exit(1);
    return made;
}

int main(void) {
    cf_errors_return(true);
    cf_context *context = must(cf_open("auto", 1, 60));
    cf_group *tp = must(cf_group_create(context, "tp", NULL, 0));
    int64_t rows = ROWS / tp->size, first = tp->rank * rows, from = tp->rank * (hidden = HIDDEN / tp->size);
    for (int64_t i = 0; i < C * hidden; i++) A[i] = number(ROWS * C + i / hidden * HIDDEN + from + i % hidden);
    for (int64_t i = 0; i < C * hidden; i++) B[i] = number((ROWS + HIDDEN + from) * C + i);
    double exposed_ms[3], error = 0;
    for (cf_mode mode = CF_MODE_NONE; mode <= CF_MODE_COMMFUSE; mode++) {
        cf_fuse_plan plan = {.name = "up", .group = tp, .dtype = CF_FP32, .capacity = rows * C, .mode = mode};
        plan.slices = mode == CF_MODE_SLICE ? 4 : 1, plan.operation = CF_ALLGATHER, plan.side = CF_COMPUTE_AFTER;
        cf_fuse *up = must(cf_fuse_create(context, plan));
        plan.name = "down", plan.operation = CF_REDUCE_SCATTER, plan.side = CF_COMPUTE_BEFORE;
        cf_fuse *down = must(cf_fuse_create(context, plan));
        for (int run = 0; run <= RUNS; run++) { // the first warms up; the others are one step of the trace
            if (run < 2) cf_trace_step(context->trace, run, context->stream);
            for (int64_t i = first * C; i < (first + rows) * C; i++) X[i] = number(i);
            must(cf_fuse_run(up, X, rows, C, compute, NULL, -1));
            error = fmax(error, error_of(must(cf_fuse_run(down, Y, rows, C, compute, NULL, -1)), first));
        }
        cf_trace_step(context->trace, RUNS, context->stream);
        exposed_ms[mode] = cf_trace_last(context->trace).exposed_ms / RUNS;
        cf_fuse_free(up), cf_fuse_free(down);
    }
    printf("rank %d exposed, ms: none %.3f, slice %.3f, commfuse %.3f; error %.1e\n", tp->rank, exposed_ms[0], exposed_ms[1],
           exposed_ms[2], error);
    cf_group_free(tp);
    return error < 1e-3 && cf_close(context) ? 0 : 1;
}
