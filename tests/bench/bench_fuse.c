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

typedef enum { GATHER_GEMM, GEMM_SCATTER, ATTENTION_SCATTER } work_kind;

typedef struct shape {
    work_kind kind;
    const char *model; // whose layer this is
    const char *place;
    int64_t T, B, C, columns, H; // columns: of the whole layer, all ranks
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
    int64_t N, D, Hl, local; // local: columns of this rank
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

static cf_compute *computation(work_kind kind) {
    static cf_compute *const all[] = {gather_gemm, gemm_scatter, attention_scatter};
    return all[kind];
}

// --- one shape ---

static real *filled(int64_t elements) {
    real *memory = cf_alloc(elements * (int64_t)sizeof(real), "benchmark");
    for (int64_t i = 0; i < elements; i++) memory[i] = (real)((i * 7919) % 1000) / 1000 - (real)0.5;
    return memory;
}

static work make_work(const bench *b, shape s) {
    int64_t N = b->mesh.tp, rows = s.T * s.B;
    work k = {.s = s, .N = N, .local = s.columns / N, .D = s.C / s.H, .Hl = s.H / N};
    k.full = filled(rows * s.C);
    k.out = filled(rows * k.local);
    k.w = filled(k.local * s.C);
    if (s.kind != ATTENTION_SCATTER) return k;
    k.qkv = filled(rows * 3 * k.local);
    k.heads = filled(rows * k.local);
    k.lse = filled(rows * k.Hl);
    return k;
}

static void free_work(work *k) {
    real *memory[] = {k->full, k->out, k->w, k->qkv, k->heads, k->lse};
    for (int i = 0; i < 6; i++) cf_free(memory[i]);
}

static void make_operations(bench *b, const work *k, cf_fuse *operation[VARIANTS]) {
    bool gather = k->s.kind == GATHER_GEMM;
    cf_fuse_plan plan = {.name = "bench",
                         .group = &b->mesh.tp_group,
                         .dtype = REAL_DTYPE,
                         .slices = 1,
                         .operation = gather ? CF_ALLGATHER : CF_REDUCE_SCATTER,
                         .capacity = k->s.T / k->N * k->s.B * k->s.C};
    plan.side = CF_NO_COMPUTE, plan.mode = CF_MODE_NONE;
    operation[NATIVE] = cf_fuse_create(&b->context, plan);
    plan.side = gather ? CF_COMPUTE_AFTER : CF_COMPUTE_BEFORE;
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

static double run_once(bench *b, work *k, cf_fuse *operation, int variant) {
    int64_t Ts = k->s.T / k->N, width = k->s.B * k->s.C;
    cf_barrier(&b->context, &b->mesh.world_group);
    double begin = cf_now_ms();
    if (variant == MONOLITH) {
        cf_span all = {.row = 0, .rows = k->s.T, .blocks = 1, .row_stride = k->s.T, .data = (char *)k->full};
        computation(k->s.kind)(k, &all, b->context.stream);
    } else if (variant == NATIVE)
        cf_fuse_run(operation, k->full, Ts, width, NULL, NULL, -1);
    else
        cf_fuse_run(operation, k->full, Ts, width, computation(k->s.kind), k, -1);
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
    static const char *const kinds[] = {"all-gather > GEMM", "GEMM > reduce-scatter",
                                        "attention > reduce-sc."};
    printf("%-22s %-4s %-9s %5lld x %lld %8.2f %7.2f %5.2f %8.2f %8.2f %8.2f %8.2f", kinds[s->kind], s->model,
           s->place, (long long)s->T, (long long)s->B, ms[MONOLITH], ms[NATIVE], ms[NATIVE] / ms[MONOLITH],
           ms[NONE], ms[SLICE], ms[RING], ms[DIRECT]);
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
    };
    static bench b;
    cf_transport *transport = cf_transport_mpi_create(&argc, &argv);
    b.repetitions = argc > 1 ? atoi(argv[1]) : 2 * REPETITIONS_MIN;
    if (b.repetitions < REPETITIONS_MIN) cf_die_together(NULL, "at least %d repetitions", REPETITIONS_MIN);
    cf_device_threads(1);
    cf_transport_mpi_configure(transport, 1, 60);
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
