// What the schedules do to one operation, by size, over whatever transport the ranks have:
//     mpirun -np N bench_fuse [repetitions]
//
// For every operation and shape:
//   compute     one monolithic computation, no communication (ms)
//   comm        the native collective alone (ms)
//   none …      the fused operation in each mode (ms)
//   hidden      1 − (fused − compute) / comm: the share of the communication that costs no time
//   chunking    (nowire − compute) / compute: what cutting the computation into slices costs by itself; it
//               is part of the fused times and therefore also lowers "hidden"
// Before each repetition a barrier; the time is the maximum over ranks; printed is the median, the spread in
// the last column is (90th − 10th percentile) / median of commfuse by ring. All modes take turns within one
// repetition, so that a drift of the machine meets all of them.
#include "../../commfuse/die.h"
#include "../../commfuse/fuse.h"
#include "../../layers/attention.h"
#include "../../layers/linear.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VARIANTS = 7, MONOLITH = 0, NATIVE, NONE, SLICE, RING, DIRECT, NOWIRE, REPETITIONS_MIN = 10 };

typedef enum {
    GATHER_GEMM,
    GEMM_SCATTER,
    ATTENTION_SCATTER,
    GEMM_ALLTOALL,      // UP: QKV per destination's heads
    ATTENTION_ALLTOALL, // UP: attention per query slice, projection per head group
    ALLTOALL_GEMM,      // UP, backward: QKV dgrad per head group
    WGRAD_SCATTER,      // data parallel: weight gradient owner by owner
    WORK_KINDS
} work_kind;

typedef struct shape {
    work_kind kind;
    const char *model; // whose layer this is
    const char *place;
    int64_t T, B, C, columns,
        H; // columns: of the whole layer, all ranks; of WGRAD_SCATTER: rows of the weight
} shape;

typedef struct bench {
    cf_context context;
    cf_mesh mesh;
    cf_fuse *times; // gathers every rank's time
    double *all;    // [ranks]
    int repetitions;
} bench;

typedef struct work {
    shape s;
    int64_t N, D, Hl, local;    // local: columns of this rank
    int64_t rows, row_elements; // of a shard of the payload
    real *full, *out, *w, *qkv, *heads, *lse;
} work;

// --- computations ---

static void gather_gemm(void *argument, const cf_span *span, cf_stream *stream) {
    work *k = (work *)argument;
    for (int i = 0; i < span->blocks; i++) {
        int64_t row = (span->row + i * span->row_stride) * k->s.B;
        linear_forward(k->out + row * k->local, (const real *)(span->data + i * span->data_stride), k->w,
                       NULL, span->rows * k->s.B, k->s.C, k->local, stream);
    }
}

static void gemm_scatter(void *argument, const cf_span *span, cf_stream *stream) {
    work *k = (work *)argument;
    for (int i = 0; i < span->blocks; i++) {
        int64_t row = (span->row + i * span->row_stride) * k->s.B;
        linear_forward((real *)(span->data + i * span->data_stride), k->out + row * k->local, k->w, NULL,
                       span->rows * k->s.B, k->local, k->s.C, stream);
    }
}

static void attention_scatter(void *argument, const cf_span *span, cf_stream *stream) {
    work *k = (work *)argument;
    for (int i = 0; i < span->blocks; i++) {
        int64_t t0 = span->row + i * span->row_stride;
        attention_forward(k->heads, k->lse, k->qkv, t0, span->rows, k->s.T, k->s.B, k->Hl, k->D, stream);
        linear_forward((real *)(span->data + i * span->data_stride), k->heads + t0 * k->s.B * k->local, k->w,
                       NULL, span->rows * k->s.B, k->local, k->s.C, stream);
    }
}

// Slices of a span that lie in one shard: f(k, shard, row in the shard, rows, data).
typedef void on_piece(work *k, int64_t shard, int64_t row, int64_t rows, real *data);

static void each_piece(work *k, const cf_span *span, on_piece *f) {
    for (int i = 0; i < span->blocks; i++)
        for (int64_t row = span->row + i * span->row_stride, end = row + span->rows, n; row < end; row += n) {
            n = k->rows - row % k->rows < end - row ? k->rows - row % k->rows : end - row;
            int64_t behind = row - span->row - i * span->row_stride;
            f(k, row / k->rows, row % k->rows, n,
              (real *)(span->data + i * span->data_stride) + behind * k->row_elements);
        }
}

// Own rows (rows, B, C) in out, weights of all head groups (N, 3Cl, C).
static void qkv_piece(work *k, int64_t shard, int64_t row, int64_t rows, real *data) {
    linear_forward(data, k->out + row * k->s.B * k->s.C, k->w + shard * k->local * k->s.C, NULL,
                   rows * k->s.B, k->s.C, k->local, NULL);
}

static void qkv_dgrad_piece(work *k, int64_t shard, int64_t row, int64_t rows, real *data) {
    linear_dgrad_add(k->out + row * k->s.B * k->s.C, data, k->w + shard * k->local * k->s.C, rows * k->s.B,
                     k->s.C, k->local, NULL);
}

static void projection_piece(work *k, int64_t shard, int64_t row, int64_t rows, real *data) {
    linear_forward_add(k->out + row * k->s.B * k->s.C, data, k->w + shard * k->local * k->s.C, rows * k->s.B,
                       k->local, k->s.C, NULL);
}

static void gemm_alltoall(void *argument, const cf_span *span, cf_stream *stream) {
    (void)stream;
    each_piece((work *)argument, span, qkv_piece);
}

static void alltoall_gemm(void *argument, const cf_span *span, cf_stream *stream) {
    (void)stream;
    each_piece((work *)argument, span, qkv_dgrad_piece);
}

static void attention_alltoall(void *argument, const cf_span *span, cf_stream *stream) {
    work *k = (work *)argument;
    if (span->side == CF_COMPUTE_AFTER) {
        each_piece(k, span, projection_piece);
        return;
    }
    for (int i = 0; i < span->blocks; i++) {
        int64_t t0 = span->row + i * span->row_stride;
        attention_forward((real *)(span->data + i * span->data_stride) - t0 * k->row_elements, k->lse, k->qkv,
                          t0, span->rows, k->s.T, k->s.B, k->Hl, k->D, stream);
    }
}

static void wgrad_scatter(void *argument, const cf_span *span, cf_stream *stream) {
    work *k = (work *)argument;
    for (int i = 0; i < span->blocks; i++)
        linear_wgrad_rows((real *)(span->data + i * span->data_stride),
                          k->out + span->row + i * span->row_stride, k->s.columns, k->heads, k->s.T * k->s.B,
                          k->s.C, span->rows, stream);
}

static const struct {
    const char *name;
    cf_compute *compute;
    cf_operation operation;
    cf_side side;
} works[WORK_KINDS] = {
    [GATHER_GEMM] = {"all-gather > GEMM", gather_gemm, CF_ALLGATHER, CF_COMPUTE_AFTER},
    [GEMM_SCATTER] = {"GEMM > reduce-scatter", gemm_scatter, CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE},
    [ATTENTION_SCATTER] = {"attention > reduce-sc.", attention_scatter, CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE},
    [GEMM_ALLTOALL] = {"GEMM > all-to-all", gemm_alltoall, CF_ALLTOALL, CF_COMPUTE_BEFORE},
    [ATTENTION_ALLTOALL] = {"att. > a-to-a > GEMM", attention_alltoall, CF_ALLTOALL, CF_COMPUTE_BOTH},
    [ALLTOALL_GEMM] = {"all-to-all > GEMM", alltoall_gemm, CF_ALLTOALL, CF_COMPUTE_AFTER},
    [WGRAD_SCATTER] = {"wgrad > reduce-scatter", wgrad_scatter, CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE},
};

// --- one shape ---

static real *filled(int64_t elements) {
    real *memory = cf_alloc(elements * (int64_t)sizeof(real), "benchmark");
    for (int64_t i = 0; i < elements; i++) memory[i] = (real)((i * 7919) % 1000) / 1000 - (real)0.5;
    return memory;
}

static work make_work(const bench *b, shape s) {
    int64_t N = b->mesh.tp, all = s.T * s.B;
    work k = {.s = s, .N = N, .local = s.columns / N, .D = s.C / s.H, .Hl = s.H / N};
    bool exchanged = works[s.kind].operation == CF_ALLTOALL;
    k.rows = s.kind == WGRAD_SCATTER ? s.columns / N : s.T / N;
    k.row_elements = s.kind == WGRAD_SCATTER ? s.C : exchanged ? s.B * k.local : s.B * s.C;
    k.full = filled(N * k.rows * k.row_elements);
    k.out = filled(s.kind == WGRAD_SCATTER ? all * s.columns : exchanged ? all / N * s.C : all * k.local);
    k.w = filled((exchanged ? s.columns : k.local) * s.C);
    if (s.kind == WGRAD_SCATTER) k.heads = filled(all * s.C);
    if (s.kind != ATTENTION_SCATTER && s.kind != ATTENTION_ALLTOALL) return k;
    k.qkv = filled(all * 3 * k.local);
    k.heads = filled(all * k.local);
    k.lse = filled(all * k.Hl);
    return k;
}

static void free_work(work *k) {
    real *memory[] = {k->full, k->out, k->w, k->qkv, k->heads, k->lse};
    for (int i = 0; i < 6; i++) cf_free(memory[i]);
}

static void make_operations(bench *b, const work *k, cf_fuse *operation[VARIANTS]) {
    cf_fuse_plan plan = {.name = "bench",
                         .group = &b->mesh.tp_group,
                         .dtype = REAL_DTYPE,
                         .slices = 1,
                         .operation = works[k->s.kind].operation,
                         .capacity = k->rows * k->row_elements};
    plan.side = CF_NO_COMPUTE, plan.mode = CF_MODE_NONE;
    operation[NATIVE] = cf_fuse_create(&b->context, plan);
    plan.side = works[k->s.kind].side;
    operation[NONE] = cf_fuse_create(&b->context, plan);
    plan.mode = CF_MODE_SLICE, plan.slices = 4;
    operation[SLICE] = cf_fuse_create(&b->context, plan);
    plan.mode = CF_MODE_COMMFUSE, plan.slices = 1;
    operation[RING] = cf_fuse_create(&b->context, plan);
    plan.route = CF_DIRECT;
    operation[DIRECT] = cf_fuse_create(&b->context, plan);
    plan.mode = CF_MODE_NOWIRE, plan.route = CF_RING;
    operation[NOWIRE] = cf_fuse_create(&b->context, plan);
}

static double maximum(bench *b, double ms) {
    b->all[b->mesh.world_group.rank] = ms;
    cf_fuse_run(b->times, b->all, 1, 1, NULL, NULL, -1);
    for (int i = 0; i < b->mesh.world_group.size; i++)
        if (b->all[i] > ms) ms = b->all[i];
    return ms;
}

static void monolith(bench *b, work *k) {
    cf_side side = works[k->s.kind].side;
    cf_span all = {.rows = k->N * k->rows,
                   .blocks = 1,
                   .row_stride = k->N * k->rows,
                   .data = (char *)k->full};
    for (all.side = CF_COMPUTE_BEFORE; all.side <= CF_COMPUTE_AFTER; all.side++)
        if (side == all.side || side == CF_COMPUTE_BOTH) works[k->s.kind].compute(k, &all, b->context.stream);
}

static double run_once(bench *b, work *k, cf_fuse *operation, int variant) {
    cf_compute *compute = works[k->s.kind].compute;
    cf_barrier(&b->context, &b->mesh.world_group);
    double begin = cf_now_ms();
    if (variant == MONOLITH)
        monolith(b, k);
    else
        cf_fuse_run(operation, k->full, k->rows, k->row_elements, variant == NATIVE ? NULL : compute, k, -1);
    return maximum(b, cf_now_ms() - begin);
}

static int ascending(const void *x, const void *y) {
    double a = *(const double *)x, b = *(const double *)y;
    return (a > b) - (a < b);
}

static double percentile(double *sorted, int n, int percent) {
    return sorted[(n - 1) * percent / 100];
}

static void print_row(const shape *s, const double ms[VARIANTS], double spread) {
    printf("%-22s %-4s %-9s %5lld x %lld %8.2f %7.2f %5.2f %8.2f %8.2f %8.2f %8.2f", works[s->kind].name,
           s->model, s->place, (long long)s->T, (long long)s->B, ms[MONOLITH], ms[NATIVE],
           ms[NATIVE] / ms[MONOLITH], ms[NONE], ms[SLICE], ms[RING], ms[DIRECT]);
    for (int v = SLICE; v <= DIRECT; v++) printf(" %6.1f%%", 100 * (1 - (ms[v] - ms[MONOLITH]) / ms[NATIVE]));
    printf(" %7.1f%% %5.1f%%\n", 100 * (ms[NOWIRE] - ms[MONOLITH]) / ms[MONOLITH], 100 * spread);
    fflush(stdout);
}

static void measure(bench *b, shape s) {
    work k = make_work(b, s);
    cf_fuse *operation[VARIANTS] = {NULL};
    make_operations(b, &k, operation);
    double *samples = malloc((size_t)(VARIANTS * b->repetitions) * sizeof *samples), median[VARIANTS],
           spread = 0;
    if (!samples) cf_die(NULL, "out of memory for %d repetitions", b->repetitions);
    for (int i = -2; i < b->repetitions; i++) // two to warm up
        for (int v = 0; v < VARIANTS; v++) {
            double ms = run_once(b, &k, operation[v], v);
            if (i >= 0) samples[v * b->repetitions + i] = ms;
        }
    for (int v = 0; v < VARIANTS; v++) {
        double *mine = samples + v * b->repetitions;
        qsort(mine, (size_t)b->repetitions, sizeof *mine, ascending);
        median[v] = percentile(mine, b->repetitions, 50);
        if (v == RING)
            spread =
                (percentile(mine, b->repetitions, 90) - percentile(mine, b->repetitions, 10)) / median[v];
    }
    if (b->mesh.world_group.rank == 0) print_row(&s, median, spread);
    for (int v = 0; v < VARIANTS; v++) cf_fuse_free(operation[v]);
    free(samples);
    free_work(&k);
}

int main(int argc, char **argv) {
    static const shape shapes[] = {
        {GATHER_GEMM, "d6", "att.qkv", 256, 4, 384, 3 * 384, 6},
        {GATHER_GEMM, "d12", "att.qkv", 1024, 4, 768, 3 * 768, 12},
        {GATHER_GEMM, "d12", "mlp.fc1", 1024, 4, 768, 4 * 768, 12},
        {GATHER_GEMM, "d24", "mlp.fc1", 1024, 4, 1024, 4 * 1024, 16},
        {GEMM_SCATTER, "d12", "att.proj", 1024, 4, 768, 768, 12},
        {GEMM_SCATTER, "d6", "mlp.fc2", 256, 4, 384, 4 * 384, 6},
        {GEMM_SCATTER, "d12", "mlp.fc2", 1024, 4, 768, 4 * 768, 12},
        {GEMM_SCATTER, "d24", "mlp.fc2", 1024, 4, 1024, 4 * 1024, 16},
        {ATTENTION_SCATTER, "d6", "att", 256, 4, 384, 384, 6},
        {ATTENTION_SCATTER, "d12", "att", 1024, 4, 768, 768, 12},
        {ATTENTION_SCATTER, "d24", "att", 1024, 4, 1024, 1024, 16},
        {GEMM_ALLTOALL, "d12", "att.qkv", 1024, 4, 768, 3 * 768, 12},
        {ATTENTION_ALLTOALL, "d12", "att", 1024, 4, 768, 768, 12},
        {ALLTOALL_GEMM, "d12", "att.qkv", 1024, 4, 768, 3 * 768, 12},
        {WGRAD_SCATTER, "d12", "attprojw", 256, 2, 768, 768, 12},
        {WGRAD_SCATTER, "d12", "fcw", 256, 2, 768, 4 * 768, 12},
        {WGRAD_SCATTER, "d12", "fcw", 1024, 2, 768, 4 * 768, 12},
        // The smallest share of an owner that is still computed on its own (params.h), and half of it.
        {WGRAD_SCATTER, "64 r.", "owner", 1024, 2, 768, 128, 12},
        {WGRAD_SCATTER, "32 r.", "owner", 1024, 2, 768, 64, 12},
    };
    static bench b;
    cf_transport *transport = cf_transport_create("auto", &argc, &argv, 60);
    b.repetitions = argc > 1 ? atoi(argv[1]) : 2 * REPETITIONS_MIN;
    if (b.repetitions < REPETITIONS_MIN) cf_die_together(NULL, "at least %d repetitions", REPETITIONS_MIN);
    cf_device_threads(1);
    transport->configure(transport, 1, 60);
    b.context = (cf_context){.transport = transport,
                             .stream = cf_stream_create(),
                             .trace = cf_trace_create(),
                             .step = -1};
    cf_mesh_init(&b.mesh, transport->size, transport->rank, transport->size, 1);
    transport->bind(transport, &b.mesh.world_group);
    transport->bind(transport, &b.mesh.tp_group);
    b.times = cf_fuse_create(&b.context, (cf_fuse_plan){.name = "times",
                                                        .group = &b.mesh.world_group,
                                                        .mode = CF_MODE_COMMFUSE,
                                                        .slices = 1,
                                                        .dtype = CF_FP64,
                                                        .capacity = 1});
    b.all = cf_alloc(transport->size * (int64_t)sizeof *b.all, "benchmark");
    if (transport->rank == 0) {
        printf(
            "%d ranks of one compute thread and one progress thread on %d cores%s; fp32, ms, median of %d\n",
            transport->size, transport->local_cores,
            2 * transport->local_size > transport->local_cores
                ? " (TOO FEW: a core per thread is needed to conclude anything)"
                : "",
            b.repetitions);
        printf("%-22s %-4s %-9s %9s %8s %7s %5s %8s %8s %8s %8s %7s %7s %7s %8s %6s\n", "operation", "", "",
               "T x B", "compute", "comm", "ratio", "none", "slice 4", "ring", "direct", "hidden:", "ring",
               "direct", "chunking", "spread");
    }
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        if (shapes[i].H % transport->size == 0) measure(&b, shapes[i]);
    cf_fuse_free(b.times);
    transport->close(transport);
    return 0;
}
