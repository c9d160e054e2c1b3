// What causal attention does to hiding: with query slices in sequence order, the cost of a slice grows with
// its place, but its transfer does not.
//     bench_causal [repetitions]                    measures slices, then simulates links of several speeds
//     mpirun -np N bench_causal [repetitions]       measures slices, link and the real operations, and
//                                                   simulates the latter from the former: is the simulator right?
//
// Three operations: Query-Split attention (attention + projection ▸ reduce-scatter) by ring and direct, and UP's
// (attention ▸ all-to-all ▸ projection per head group). Two layouts of the shards:
//   sequence  rank j has queries j of N
//   pairs     rank j has half-slices j and 2N − 1 − j: every shard costs the same. With m slices per shard, each
//             is a pair again: piece k from the front of the one half and piece k from the back of the other
// and m = 1, 2, 4 slices per shard. The model has the sequence layout; pairs are what it would give. "coupled" is the
// sequence layout on a transport whose transfers end as one, both halves together, where a rank with cheap slices
// stands waiting until one with expensive slices is ready to receive. The costs of all slices are measured, on
// one thread, as they are computed in the model; the order of things comes from the schedules (replay.h).
//
// Each cell: (time − compute) / compute, and the share of T_comm that is hidden, 1 − (time − compute) / T_comm.
// compute is one monolithic computation, T_comm the (N − 1) transfers of a shard one after another. Cutting
// costs something by itself ("chunking", printed per layout and m, additions included); as part of the time it
// lowers what is hidden.
#include "../../commfuse/base/die.h"
#include "../../commfuse/fuse.h"
#include "../../commfuse/replay.h"
#include "../../layers/kernels/attention.h"
#include "../../layers/kernels/linear.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum { SEQUENCE, PAIRS, LAYOUTS } layout;
typedef enum { QUERY_SPLIT, ULYSSES, KINDS } kind;
enum { CUTS = 3, RANKS_MAX = 8, SLICES_MAX = RANKS_MAX * 4, REPETITIONS_MIN = 10 };
static const int cut[CUTS] = {1, 2, 4}; // slices per shard

typedef struct shape {
    const char *model;
    int64_t T, B, C, H;
} shape;

typedef struct work {
    shape s;
    kind kind;
    layout layout;
    int N, rank;
    int64_t D, Hl, Cl; // per head; heads and channels of this rank
    real *qkv, *heads, *lse, *w, *full,
        *out; // w: prepared weights, as numbers do not matter; full: the payload
} work;

// Milliseconds. An array of doubles throughout, so that medians and ranks can be gone through alike.
typedef struct costs {
    double whole;
    double before[LAYOUTS][CUTS][SLICES_MAX], after[LAYOUTS][CUTS][SLICES_MAX], add[CUTS];
} costs;
enum { COSTS = sizeof(costs) / sizeof(double) };

typedef struct bench {
    cf_context context;
    cf_mesh mesh;
    cf_fuse *gather; // of every rank's figures
    double *all;     // [ranks][COSTS]
    int repetitions;
} bench;

// --- the computation ---

static void attend(work *k, char *to, int64_t t0, int64_t n, cf_stream *stream) {
    int64_t B = k->s.B, row = t0 * B * k->Cl;
    attention_forward(k->heads, k->lse, k->qkv, t0, n, k->s.T, B, k->Hl, k->Hl, k->D, stream);
    if (k->kind == QUERY_SPLIT)
        linear_forward((real *)to, NULL, k->heads + row, k->w, NULL, NULL, linear_all(n * B), k->Cl, k->s.C, stream);
    else
        cf_copy(to, k->heads + row, n * B * k->Cl * (int64_t)sizeof(real), stream);
}

// Elements of one row of the payload.
static int64_t width(const work *k) {
    return k->s.B * (k->kind == QUERY_SPLIT ? k->s.C : k->Cl);
}

// Rows [row, row + rows) of the payload in pairs: half of them from the front of half-slice j, half from the back
// of half-slice 2N − 1 − j.
static void attend_pair(work *k, const cf_span *span, cf_stream *stream) {
    int64_t shard = k->s.T / k->N, half = shard / 2, n = span->rows / 2;
    int64_t j = span->row / shard, at = span->row % shard / 2;
    attend(k, span->data, j * half + at, n, stream);
    attend(k, span->data + n * width(k) * (int64_t)sizeof(real), (2 * k->N - j) * half - at - n, n, stream);
}

// out (rows of the own shard, C) += one head group of them (rows, Cl) · its columns of the weights (C, C)
static void project(work *k, const cf_span *span, cf_stream *stream) {
    int64_t shard = k->s.T / k->N, group = span->row / shard, row = span->row % shard * k->s.B;
    int64_t rows = span->rows * k->s.B;
    real *out = k->out + row * k->s.C, *w = k->w + group * linear_prepared_size(k->Cl, k->s.C);
    if (group == k->rank)
        linear_forward(out, NULL, (const real *)span->data, w, NULL, NULL, linear_all(rows), k->Cl, k->s.C, stream);
    else
        linear_forward(out, NULL, (const real *)span->data, w, NULL, out, linear_all(rows), k->Cl, k->s.C, stream);
}

static void compute(void *argument, const cf_span *span, cf_stream *stream) {
    work *k = (work *)argument;
    if (span->side == CF_COMPUTE_AFTER)
        project(k, span, stream);
    else if (k->layout == PAIRS)
        attend_pair(k, span, stream);
    else
        attend(k, span->data, span->row, span->rows, stream);
}

static void compute_whole(work *k, cf_stream *stream) {
    attend(k, (char *)k->full, 0, k->s.T, stream);
    if (k->kind == ULYSSES)
        linear_forward(k->out, NULL, k->full, k->w, NULL, NULL, linear_all(k->s.T / k->N * k->s.B), k->s.C, k->s.C, stream);
}

static real *filled(int64_t elements) {
    real *memory = cf_alloc(elements * (int64_t)sizeof(real), "benchmark");
    for (int64_t i = 0; i < elements; i++) memory[i] = (real)((i * 7919) % 1000) / 1000 - (real)0.5;
    return memory;
}

static work make_work(shape s, kind what, int N, int rank) {
    work k = {.s = s, .kind = what, .N = N, .rank = rank, .D = s.C / s.H, .Hl = s.H / N, .Cl = s.C / N};
    int64_t rows = s.T * s.B;
    k.qkv = filled(rows * 3 * k.Cl);
    k.heads = filled(rows * k.Cl);
    k.lse = filled(rows * k.Hl);
    k.w = filled(linear_prepared_size(s.C, s.C));
    k.full = filled(rows * s.C);
    k.out = filled(rows / N * s.C);
    return k;
}

static void free_work(work *k) {
    real *memory[] = {k->qkv, k->heads, k->lse, k->w, k->full, k->out};
    for (int i = 0; i < 6; i++) cf_free(memory[i]);
}

// --- what slices cost ---

static double time_slice(work *k, cf_side side, int number, int m, cf_stream *stream) {
    int64_t shard = k->s.T / k->N;
    cf_span span = {.side = side, .row = number * shard / m, .rows = shard / m, .blocks = 1, .row_stride = shard};
    span.data = (char *)(k->full + span.row * width(k));
    double begin = cf_now_ms();
    compute(k, &span, stream);
    return cf_now_ms() - begin;
}

static double time_add(work *k, int m, cf_stream *stream) {
    int64_t elements = k->s.T / k->N / m * width(k);
    double begin = cf_now_ms();
    cf_add(k->full, k->full + elements, 1, 0, elements, REAL_DTYPE, stream);
    return cf_now_ms() - begin;
}

static void time_all(work *k, costs *c, cf_stream *stream) {
    double begin = cf_now_ms();
    compute_whole(k, stream);
    c->whole = cf_now_ms() - begin;
    for (int l = 0; l < LAYOUTS; l++)
        for (int i = 0; i < CUTS; i++) {
            int slices = k->N * cut[i];
            k->layout = (layout)l;
            for (int s = 0; s < slices; s++) // in the order of a schedule: downwards, pieces of a shard upwards
                c->before[l][i][slices - 1 - s] = time_slice(k, CF_COMPUTE_BEFORE, slices - 1 - s, cut[i], stream);
            for (int s = 0; s < slices && k->kind == ULYSSES; s++)
                c->after[l][i][s] = time_slice(k, CF_COMPUTE_AFTER, s, cut[i], stream);
            c->add[i] = time_add(k, cut[i], stream);
        }
}

static int ascending(const void *x, const void *y) {
    double a = *(const double *)x, b = *(const double *)y;
    return (a > b) - (a < b);
}

// Of n samples that lie `stride` doubles apart.
static double median(const double *sample, int n, int stride) {
    double *sorted = malloc((size_t)n * sizeof *sorted);
    if (!sorted) cf_die(NULL, "out of memory for %d samples", n);
    for (int i = 0; i < n; i++) sorted[i] = sample[i * stride];
    qsort(sorted, (size_t)n, sizeof *sorted, ascending);
    double middle = (sorted[(n - 1) / 2] + sorted[n / 2]) / 2;
    free(sorted);
    return middle;
}

// A byte from the right neighbour, or to the left one.
static cf_request byte_request(bench *b, char *byte, bool send) {
    const cf_group *group = &b->mesh.world_group;
    cf_request r = {.kind = CF_REQUEST_EXCHANGE, .group = group, .dtype = CF_BYTE, .label = "byte", .layer = -1};
    r.send_to = send ? (group->rank + group->size - 1) % group->size : -1;
    r.recv_from = send ? -1 : (group->rank + 1) % group->size;
    r.send = r.recv = byte;
    r.send_count = r.recv_count = 1;
    r.step = -1;
    return r;
}

// Every rank's costs, side by side in b->all. All ranks measure at the same time, and with a request in flight, so
// that the progress thread works beside them as it does in the real thing.
static void measure_costs(bench *b, work *k) {
    costs *sample = calloc((size_t)b->repetitions + 1, sizeof *sample);
    if (!sample) cf_die(NULL, "out of memory for %d repetitions", b->repetitions);
    cf_transport *t = b->context.transport;
    char bytes[2] = {0};
    cf_request pending = byte_request(b, &bytes[0], false), release = byte_request(b, &bytes[1], true);
    cf_barrier(&b->context, &b->mesh.world_group);
    if (t->size > 1) t->post(t, &pending, 1, b->context.stream);
    for (int i = 0; i <= b->repetitions; i++) time_all(k, &sample[i], b->context.stream); // 0 is to warm up
    if (t->size > 1) {
        t->post(t, &release, 1, b->context.stream);
        t->wait(t, &release, CF_COMPLETE, b->context.stream);
        t->wait(t, &pending, CF_COMPLETE, b->context.stream);
    }
    double *mine = b->all + b->mesh.world_group.rank * COSTS;
    for (int i = 0; i < COSTS; i++) mine[i] = median((double *)(sample + 1) + i, b->repetitions, COSTS);
    free(sample);
    cf_fuse_run(b->gather, b->all, COSTS, 1, NULL, NULL, -1);
}

// --- simulation ---

typedef struct setting { // of one simulated operation
    const costs *of;     // of every rank
    int ranks_measured;
    layout layout;
    int cut;
    double shard_ms; // a shard's transfer, without latency
    bool coupled;    // machine.coupled
} setting;

static double cost_of(const void *argument, const cf_schedule *s, const cf_step *step) {
    const setting *set = (const setting *)argument;
    const costs *c = &set->of[s->rank % set->ranks_measured];
    if (step->kind != CF_COMPUTE) return c->add[set->cut];
    return (step->side == CF_COMPUTE_BEFORE ? c->before : c->after)[set->layout][set->cut][step->first];
}

static double transfer_of(const void *argument, const cf_schedule *s, const cf_step *step) {
    (void)step;
    return ((const setting *)argument)->shard_ms / s->slices;
}

static cf_operation operation_of(kind what) {
    return what == QUERY_SPLIT ? CF_REDUCE_SCATTER : CF_ALLTOALL;
}
static cf_side side_of(kind what) {
    return what == QUERY_SPLIT ? CF_COMPUTE_BEFORE : CF_COMPUTE_BOTH;
}

static double simulated(kind what, const char *algorithm, int N, const setting *set, double latency_ms) {
    cf_schedule *schedule[RANKS_MAX] = {NULL};
    for (int r = 0; r < N; r++)
        schedule[r] = cf_schedule_create(operation_of(what), side_of(what), cf_algorithm_find(algorithm), N, 1, r, cut[set->cut]);
    cf_machine imagined = {cost_of, transfer_of, set, latency_ms, set->coupled, 1, NULL};
    double ms = cf_replay(schedule, N, &imagined).finished_ms;
    for (int r = 0; r < N; r++) cf_schedule_free(schedule[r]);
    return ms;
}

// --- tables ---

static void print_name(kind what, const char *algorithm) {
    char name[32];
    snprintf(name, sizeof name, "Query-Split %s", algorithm);
    printf("  %-19s", what == ULYSSES ? "UP attention" : name);
}

static void print_costs(const work *k, const setting *set) {
    const costs *c = set->of;
    printf("\n%s, T %lld x B %lld, tp %d, %s: compute %.2f ms\n", k->s.model, (long long)k->s.T, (long long)k->s.B, k->N,
           k->kind == QUERY_SPLIT ? "Query-Split" : "UP", c->whole);
    printf("  cost of a slice, mean of all = 1:");
    for (int l = 0; l < LAYOUTS; l++) {
        double sum = 0;
        for (int j = 0; j < k->N; j++) sum += c->before[l][0][j];
        printf("  %s", l == SEQUENCE ? "sequence" : "pairs");
        for (int j = 0; j < k->N; j++) printf(" %.2f", c->before[l][0][j] * k->N / sum);
    }
    printf("\n  chunking with m = 1, 2, 4:");
    for (int l = 0; l < LAYOUTS; l++) {
        printf("  %s", l == SEQUENCE ? "sequence" : "pairs");
        for (int i = 0; i < CUTS; i++) {
            setting s = *set;
            s.layout = (layout)l, s.cut = i;
            double ms = simulated(k->kind, "nowire", k->N, &s, 0);
            printf(" %+.1f%%", 100 * (ms / c->whole - 1));
        }
    }
    printf("\n");
}

typedef struct column {
    layout layout;
    int cut;
    bool coupled; // simulated alone
} column;
static const column columns[] = {
    {SEQUENCE, 0, false}, {SEQUENCE, 1, false}, {SEQUENCE, 2, false}, {PAIRS, 0, false},
    {PAIRS, 1, false},    {SEQUENCE, 0, true},  {SEQUENCE, 1, true},  {SEQUENCE, 2, true},
};
enum { COLUMNS = sizeof columns / sizeof *columns, REAL_COLUMNS = 5 };

static void print_head(const char *first, const char *second, int shown) {
    printf("  %-19s %6s", first, second);
    for (const column *c = columns; c < columns + shown; c++)
        printf("  %8s m=%d", c->coupled ? "coupled" : c->layout == SEQUENCE ? "sequence" : "pairs", cut[c->cut]);
    printf("\n");
}

static void print_cell(double over, double whole, double comm) {
    printf(" %+6.1f%% %3.0f%%", 100 * over / whole, 100 * (1 - over / comm));
}

// Links of several speeds: T_comm is a given share of compute.
static void table_of_links(const work *k, setting set, const char *algorithm) {
    static const double ratios[] = {0.1, 0.25, 0.5, 0.75, 1.0};
    static const double latency_ms = 0.01;
    double whole = set.of->whole;
    for (size_t i = 0; i < sizeof ratios / sizeof *ratios; i++) {
        double comm = ratios[i] * whole;
        set.shard_ms = fmax(0, comm / (k->N - 1) - latency_ms);
        print_name(k->kind, algorithm);
        printf(" %6.2f", ratios[i]);
        for (const column *c = columns; c < columns + COLUMNS; c++) {
            set.layout = c->layout, set.cut = c->cut, set.coupled = c->coupled;
            print_cell(simulated(k->kind, algorithm, k->N, &set, latency_ms) - whole, whole, comm);
        }
        printf("\n");
    }
}

static void simulate_shape(bench *b, shape s, int N) {
    if (s.H % N != 0) return;
    for (int what = 0; what < KINDS; what++) {
        work k = make_work(s, (kind)what, N, 0);
        measure_costs(b, &k);
        setting set = {.of = (const costs *)b->all, .ranks_measured = 1};
        print_costs(&k, &set);
        print_head("", "ratio", COLUMNS);
        table_of_links(&k, set, "ring");
        if (what == QUERY_SPLIT) table_of_links(&k, set, "direct");
        free_work(&k);
        fflush(stdout);
    }
}

// --- the real thing ---

static double time_run(bench *b, cf_fuse *fuse, work *k, cf_compute *with) {
    double *all = b->all + b->mesh.world_group.size * COSTS; // one per rank, behind the costs
    double latest = 0;
    cf_barrier(&b->context, &b->mesh.world_group);
    double begin = cf_now_ms();
    cf_fuse_run(fuse, k->full, k->s.T / k->N, width(k), with, with ? k : NULL, -1);
    all[b->mesh.world_group.rank] = cf_now_ms() - begin;
    cf_fuse_run(b->gather, all, 1, 1, NULL, NULL, -1);
    for (int i = 0; i < k->N; i++) latest = fmax(latest, all[i]);
    return latest;
}

typedef struct link_speed { // transfers of a shard and of nearly nothing
    double shard_ms, latency_ms;
} link_speed;

// The N - 1 transfers of an all-gather by ring, as one by one as those of the operations measured.
static link_speed measure_link(bench *b, work *k) {
    cf_fuse_config plan = {.name = "link",
                           .group = &b->mesh.tp_group,
                           .operation = CF_ALLGATHER,
                           .algorithm = cf_algorithm_find("ring"),
                           .slices = 1,
                           .dtype = REAL_DTYPE,
                           .capacity = k->s.T / k->N * width(k)};
    cf_fuse *shards = cf_fuse_create(&b->context, plan);
    double *ms = malloc(2 * (size_t)b->repetitions * sizeof *ms);
    if (!ms) cf_die(NULL, "out of memory for %d repetitions", b->repetitions);
    for (int i = -1; i < b->repetitions; i++) {
        work tiny = *k;
        tiny.s.T = k->N, tiny.s.B = 1;
        double shard = time_run(b, shards, k, NULL), nothing = time_run(b, shards, &tiny, NULL);
        if (i >= 0) ms[i] = shard, ms[b->repetitions + i] = nothing;
    }
    link_speed link = {.latency_ms = median(ms + b->repetitions, b->repetitions, 1) / (k->N - 1)};
    link.shard_ms = median(ms, b->repetitions, 1) / (k->N - 1) - link.latency_ms;
    free(ms);
    cf_fuse_free(shards);
    return link;
}

static void measure(bench *b, work *k, const char *algorithm, double ms[LAYOUTS][CUTS]) {
    cf_fuse *fuse[CUTS];
    for (int m = 0; m < CUTS; m++)
        fuse[m] = cf_fuse_create(&b->context, (cf_fuse_config){.name = "bench",
                                                               .group = &b->mesh.tp_group,
                                                               .operation = operation_of(k->kind),
                                                               .side = side_of(k->kind),
                                                               .algorithm = cf_algorithm_find(algorithm),
                                                               .slices = cut[m],
                                                               .dtype = REAL_DTYPE,
                                                               .capacity = k->s.T / k->N * width(k)});
    double *sample = malloc((size_t)(LAYOUTS * CUTS * b->repetitions) * sizeof *sample);
    if (!sample) cf_die(NULL, "out of memory for %d repetitions", b->repetitions);
    for (int i = -1; i < b->repetitions; i++) // one to warm up; layouts and cuts take turns
        for (int v = 0; v < LAYOUTS * CUTS; v++) {
            k->layout = (layout)(v / CUTS);
            double one = time_run(b, fuse[v % CUTS], k, compute);
            if (i >= 0) sample[v * b->repetitions + i] = one;
        }
    for (int v = 0; v < LAYOUTS * CUTS; v++) ms[v / CUTS][v % CUTS] = median(sample + v * b->repetitions, b->repetitions, 1);
    for (int m = 0; m < CUTS; m++) cf_fuse_free(fuse[m]);
    free(sample);
}

static void compare(bench *b, work *k, setting set, const char *algorithm, link_speed link) {
    double ms[LAYOUTS][CUTS], whole = set.of->whole, comm = (k->N - 1) * (link.shard_ms + link.latency_ms);
    measure(b, k, algorithm, ms);
    if (b->mesh.world_group.rank != 0) return;
    for (int measured = 1; measured >= 0; measured--) {
        print_name(k->kind, algorithm);
        printf(" %6s", measured ? "real" : "simul.");
        for (const column *c = columns; c < columns + REAL_COLUMNS; c++) {
            set.layout = c->layout, set.cut = c->cut;
            print_cell((measured ? ms[c->layout][c->cut] : simulated(k->kind, algorithm, k->N, &set, link.latency_ms)) - whole,
                       whole, comm);
        }
        printf("\n");
    }
    fflush(stdout);
}

static void compare_shape(bench *b, shape s) {
    int N = b->mesh.tp;
    if (s.H % N != 0) return;
    for (int what = 0; what < KINDS; what++) {
        work k = make_work(s, (kind)what, N, b->mesh.tp_group.rank);
        measure_costs(b, &k);
        link_speed link = measure_link(b, &k);
        setting set = {.of = (const costs *)b->all, .ranks_measured = N, .shard_ms = link.shard_ms};
        if (b->mesh.world_group.rank == 0) {
            print_costs(&k, &set);
            printf("  link: %.2f ms per shard + %.3f ms, T_comm / compute = %.2f\n", link.shard_ms, link.latency_ms,
                   (N - 1) * (link.shard_ms + link.latency_ms) / set.of->whole);
            print_head("", "", REAL_COLUMNS);
        }
        compare(b, &k, set, "ring", link);
        if (what == QUERY_SPLIT) compare(b, &k, set, "direct", link);
        free_work(&k);
    }
}

int main(int argc, char **argv) {
    static const shape d12[] = {{"d12", 1024, 1, 768, 12}, {"d12", 1024, 4, 768, 12}, {"d12", 4096, 1, 768, 12}};
    static const shape d24 = {"d24", 4096, 1, 1024, 16};
    static bench b;
    cf_transport *transport = cf_transport_create("auto", &argc, &argv, 60);
    int N = transport->size;
    b.repetitions = argc > 1 ? atoi(argv[1]) : REPETITIONS_MIN;
    if (b.repetitions < REPETITIONS_MIN) cf_die_together(NULL, "at least %d repetitions", REPETITIONS_MIN);
    if (N > RANKS_MAX) cf_die_together(NULL, "at most %d ranks", RANKS_MAX);
    cf_device_threads(1);
    b.context = (cf_context){.transport = transport, .stream = cf_stream_create(), .trace = cf_trace_create(), .step = -1};
    cf_mesh_init(&b.mesh, N, transport->rank, N, 1);
    cf_mesh_bind(transport, &b.mesh);
    b.gather = cf_fuse_create(&b.context, (cf_fuse_config){.name = "times",
                                                           .group = &b.mesh.world_group,
                                                           .algorithm = cf_algorithm_find("ring"),
                                                           .slices = 1,
                                                           .dtype = CF_FP64,
                                                           .capacity = COSTS});
    b.all = cf_alloc(N * (COSTS + 1) * (int64_t)sizeof *b.all, "benchmark");
    if (transport->rank == 0)
        printf("causal balance; per cell: time beyond compute, share of T_comm hidden; median of %d; %s\n", b.repetitions,
               N == 1 ? "imagined links" : "the link between these ranks");
    for (size_t i = 0; i < sizeof d12 / sizeof *d12; i++) {
        if (N > 1 && d12[i].T == 1024) compare_shape(&b, d12[i]);
        if (N == 1) simulate_shape(&b, d12[i], 2), simulate_shape(&b, d12[i], 4);
    }
    if (N == 1) simulate_shape(&b, d24, 8);
    cf_fuse_free(b.gather);
    transport->close(transport);
    return 0;
}
