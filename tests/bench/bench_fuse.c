// What the schedules do to one operation, by size, over whatever transport the ranks have:
//     mpirun -np N bench_fuse [--repetitions R]
//     mpirun -np N bench_fuse --op NAME --shape T,B,C,COLUMNS,H [--only VARIANT] [--repetitions R] [--json]
//
// The first form prints a table of fixed shapes, a line each, below what its columns are (`definitions`). The second form
// measures one operation by every schedule of the table (commfuse/schedule.h), in 1, 2, 4 and 8 slices of a shard, or by those
// of one name alone, and prints a line for each, as JSON if asked: it draws no conclusion. nowire:n is what n slices cost to
// compute by any schedule.
//
// Before each repetition a barrier; the time is the maximum over ranks; printed is the median. All variants
// take turns within one repetition, so that a drift of the machine meets all of them, and each time in another order, so
// that none profits or suffers from the one before it. The monolithic computation, which all others are set against, has
// four turns in each, so that its error adds little to theirs.
#include "../../commfuse/base/die.h"
#include "../../commfuse/fuse.h"
#include "../../layers/kernels/attention.h"
#include "../../layers/kernels/linear.h"
#include "../../layers/random.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WARM_UPS = 2, COMPUTE_TURNS = 4, REPETITIONS_MIN = 10, REPETITIONS_MAX = 10000, SIZE_MAX_EACH = 1 << 16 };

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

typedef struct variant {
    const char *name; // "ring:2"; "compute", "comm"
    enum { FUSED, MONOLITHIC, NATIVE } what;
    int turns; // in one repetition
} variant;

typedef struct result {
    double *samples;           // [repetitions][turns], ms
    int count;                 // of samples
    double ms, p10_ms, p90_ms; // median and percentiles
} result;

static const char definitions[] =
    "compute     the computation alone, in one piece, ms\n"
    "comm        its collective alone, by the library, ms; ratio: comm / compute\n"
    "none ...    both, by each schedule, ms: none one after the other, slice:4 data slicing in four, ring CommFuse,\n"
    "            direct the same with each slice straight to its owner\n"
    "hidden      1 - (both - compute) / comm: the share of the collective that adds nothing to the computation; below 0: the\n"
    "            operation takes longer than one after the other\n"
    "chunking    (nowire - compute) / compute: what computing in slices costs without any transfer; it lowers `hidden`, too\n"
    "spread      (90th - 10th percentile) / median of ring\n"
    "A time is the maximum over ranks, the median of all repetitions; schedules take turns in each.\n";
static const char usage[] = "bench_fuse [--op NAME --shape T,B,C,COLUMNS,H [--only compute|comm|none|slice|ring|…] [--json]] "
                            "[--repetitions R], NAME one of gather_gemm gemm_scatter attention_scatter gemm_alltoall "
                            "attention_alltoall alltoall_gemm wgrad_scatter";

enum { VARIANTS = 64, TURNS_MAX = VARIANTS + COMPUTE_TURNS }; // at most

typedef struct work {
    shape s;
    int64_t N, D, Hl, local;    // local: columns of this rank
    int64_t rows, row_elements; // of a shard of the payload
    real *full, *out, *w, *prepared, *qkv, *heads, *lse;
    int64_t groups, IC, OC; // of the weights of a forward product
    const real **ready;     // [groups] prepared
} work;

// --- computations ---

static void gather_gemm(void *argument, const cf_span *span, cf_stream *stream) {
    work *k = (work *)argument;
    for (int i = 0; i < span->blocks; i++) {
        int64_t row = (span->row + i * span->row_stride) * k->s.B;
        linear_forward(k->out + row * k->local, NULL, (const real *)(span->data + i * span->data_stride), k->ready[0], NULL, NULL,
                       linear_all(span->rows * k->s.B), k->s.C, k->local, stream);
    }
}

// A product for rows that travel.
static void project(work *k, real *out, const real *x, int64_t rows, cf_stream *stream) {
    linear_forward(out, NULL, x, k->ready[0], NULL, NULL, linear_all(rows), k->local, k->s.C, stream);
}

static void gemm_scatter(void *argument, const cf_span *span, cf_stream *stream) {
    work *k = (work *)argument;
    for (int i = 0; i < span->blocks; i++) {
        int64_t row = (span->row + i * span->row_stride) * k->s.B;
        project(k, (real *)(span->data + i * span->data_stride), k->out + row * k->local, span->rows * k->s.B, stream);
    }
}

static void attention_scatter(void *argument, const cf_span *span, cf_stream *stream) {
    work *k = (work *)argument;
    for (int i = 0; i < span->blocks; i++) {
        int64_t t0 = span->row + i * span->row_stride;
        attention_forward(k->heads, k->lse, k->qkv, t0, span->rows, k->s.T, k->s.B, k->Hl, k->Hl, k->D, stream);
        project(k, (real *)(span->data + i * span->data_stride), k->heads + t0 * k->s.B * k->local, span->rows * k->s.B, stream);
    }
}

// Slices of a span that lie in one shard: f(k, shard, row in the shard, rows, data).
typedef void on_piece(work *k, int64_t shard, int64_t row, int64_t rows, real *data);

static void each_piece(work *k, const cf_span *span, on_piece *f) {
    for (int i = 0; i < span->blocks; i++)
        for (int64_t row = span->row + i * span->row_stride, end = row + span->rows, n; row < end; row += n) {
            n = k->rows - row % k->rows < end - row ? k->rows - row % k->rows : end - row;
            int64_t behind = row - span->row - i * span->row_stride;
            f(k, row / k->rows, row % k->rows, n, (real *)(span->data + i * span->data_stride) + behind * k->row_elements);
        }
}

// Own rows (rows, B, C) in out, weights of all head groups (N, 3Cl, C).
static void qkv_piece(work *k, int64_t shard, int64_t row, int64_t rows, real *data) {
    linear_forward(data, NULL, k->out + row * k->s.B * k->s.C, k->ready[shard], NULL, NULL, linear_all(rows * k->s.B), k->s.C,
                   k->local, NULL);
}

static void qkv_dgrad_piece(work *k, int64_t shard, int64_t row, int64_t rows, real *data) {
    linear_dgrad(k->out + row * k->s.B * k->s.C, data, k->ready[shard], NULL, true, linear_all(rows * k->s.B), k->s.C, k->local,
                 NULL);
}

static void projection_piece(work *k, int64_t shard, int64_t row, int64_t rows, real *data) {
    real *out = k->out + row * k->s.B * k->s.C;
    linear_forward(out, NULL, data, k->ready[shard], NULL, out, linear_all(rows * k->s.B), k->local, k->s.C, NULL);
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
        attention_forward((real *)(span->data + i * span->data_stride) - t0 * k->row_elements, k->lse, k->qkv, t0, span->rows,
                          k->s.T, k->s.B, k->Hl, k->Hl, k->D, stream);
    }
}

static void wgrad_scatter(void *argument, const cf_span *span, cf_stream *stream) {
    work *k = (work *)argument;
    for (int i = 0; i < span->blocks; i++)
        linear_wgrad((real *)(span->data + i * span->data_stride), NULL, k->out + span->row + i * span->row_stride, k->s.columns,
                     k->heads, k->s.T * k->s.B, k->s.C, span->rows, false, stream);
}

static const struct {
    const char *op, *name;
    cf_compute *compute;
    cf_operation operation;
    cf_side side;
    linear_prepare *prepare; // the weights of its product
} works[WORK_KINDS] = {
    [GATHER_GEMM] = {"gather_gemm", "all-gather > GEMM", gather_gemm, CF_ALLGATHER, CF_COMPUTE_AFTER, linear_prepare_forward},
    [GEMM_SCATTER] = {"gemm_scatter", "GEMM > reduce-scatter", gemm_scatter, CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE,
                      linear_prepare_forward},
    [ATTENTION_SCATTER] = {"attention_scatter", "attention > reduce-sc.", attention_scatter, CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE,
                           linear_prepare_forward},
    [GEMM_ALLTOALL] = {"gemm_alltoall", "GEMM > all-to-all", gemm_alltoall, CF_ALLTOALL, CF_COMPUTE_BEFORE, linear_prepare_forward},
    [ATTENTION_ALLTOALL] = {"attention_alltoall", "att. > a-to-a > GEMM", attention_alltoall, CF_ALLTOALL, CF_COMPUTE_BOTH,
                            linear_prepare_forward},
    [ALLTOALL_GEMM] = {"alltoall_gemm", "all-to-all > GEMM", alltoall_gemm, CF_ALLTOALL, CF_COMPUTE_AFTER, linear_prepare_dgrad},
    [WGRAD_SCATTER] = {"wgrad_scatter", "wgrad > reduce-scatter", wgrad_scatter, CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE, NULL},
};

// Once per operation, as layers do.
static void prepare(work *k, cf_stream *stream) {
    if (!k->prepared) return;
    int64_t size = linear_prepared_size(k->IC, k->OC);
    for (int64_t i = 0; i < k->groups; i++)
        k->ready[i] = works[k->s.kind].prepare(k->prepared + i * size, k->w + i * k->IC * k->OC, k->IC, k->OC, stream);
}

// --- one shape ---

static real *filled(int64_t elements) {
    real *memory = cf_alloc(elements * (int64_t)sizeof(real), "benchmark");
    for (int64_t i = 0; i < elements; i++) memory[i] = (real)((i * 7919) % 1000) / 1000 - (real)0.5;
    return memory;
}

static bool is_attention(work_kind kind) {
    return kind == ATTENTION_SCATTER || kind == ATTENTION_ALLTOALL;
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
    k.groups = exchanged ? N : 1;
    bool widens = s.kind == GATHER_GEMM || s.kind == GEMM_ALLTOALL || s.kind == ALLTOALL_GEMM;
    k.IC = widens ? s.C : k.local, k.OC = widens ? k.local : s.C;
    k.ready = calloc((size_t)k.groups, sizeof *k.ready);
    if (!k.ready) cf_die(NULL, "out of memory for %lld head groups", (long long)k.groups);
    k.prepared =
        works[s.kind].prepare ? cf_alloc(k.groups * linear_prepared_size(k.IC, k.OC) * (int64_t)sizeof(real), "benchmark") : NULL;
    if (s.kind == WGRAD_SCATTER) k.heads = filled(all * s.C);
    if (!is_attention(s.kind)) return k;
    k.qkv = filled(all * 3 * k.local);
    k.heads = filled(all * k.local);
    k.lse = filled(all * k.Hl);
    return k;
}

static void free_work(work *k) {
    real *memory[] = {k->full, k->out, k->w, k->prepared, k->qkv, k->heads, k->lse};
    for (int i = 0; i < 7; i++) cf_free(memory[i]);
    free(k->ready);
}

static cf_choice schedule_of(const variant *v) {
    cf_choice choice;
    if (!cf_choice_parse(v->what == FUSED ? v->name : "none", &choice)) cf_die(NULL, "a bug: there is no schedule %s", v->name);
    return choice;
}

static cf_fuse *make_operation(bench *b, const work *k, const variant *v) {
    if (v->what == MONOLITHIC) return NULL;
    const cf_choice choice = schedule_of(v);
    return cf_fuse_create(&b->context, (cf_fuse_config){.name = "bench",
                                                        .group = &b->mesh.tp_group,
                                                        .operation = works[k->s.kind].operation,
                                                        .side = v->what == NATIVE ? CF_NO_COMPUTE : works[k->s.kind].side,
                                                        .algorithm = choice.algorithm,
                                                        .slices = choice.slices,
                                                        .dtype = REAL_DTYPE,
                                                        .capacity = k->rows * k->row_elements});
}

static double maximum(bench *b, double ms) {
    b->all[b->mesh.world_group.rank] = ms;
    cf_fuse_run(b->times, b->all, 1, 1, NULL, NULL, -1);
    for (int i = 0; i < b->mesh.world_group.size; i++)
        if (b->all[i] > ms) ms = b->all[i];
    return ms;
}

static void monolith(bench *b, work *k) {
    prepare(k, b->context.stream);
    cf_side side = works[k->s.kind].side;
    cf_span all = {.rows = k->N * k->rows, .blocks = 1, .row_stride = k->N * k->rows, .data = (char *)k->full};
    for (all.side = CF_COMPUTE_BEFORE; all.side <= CF_COMPUTE_AFTER; all.side++)
        if (side == all.side || side == CF_COMPUTE_BOTH) works[k->s.kind].compute(k, &all, b->context.stream);
}

// Weights are prepared where layers do it: behind the first transfers of what comes in, else in front.
static void fused(bench *b, work *k, cf_fuse *operation) {
    cf_stream *stream = b->context.stream;
    if (works[k->s.kind].side == CF_COMPUTE_BEFORE) prepare(k, stream);
    cf_fuse_begin(operation, k->full, k->rows, k->row_elements, works[k->s.kind].compute, k, -1);
    if (works[k->s.kind].side != CF_COMPUTE_BEFORE) prepare(k, stream);
    cf_fuse_finish(operation);
}

static double run_once(bench *b, work *k, const variant *v, cf_fuse *operation) {
    cf_barrier(&b->context, &b->mesh.world_group);
    double begin = cf_now_ms();
    if (v->what == MONOLITHIC)
        monolith(b, k);
    else if (v->what == NATIVE)
        cf_fuse_run(operation, k->full, k->rows, k->row_elements, NULL, NULL, -1);
    else
        fused(b, k, operation);
    cf_stream_sync(b->context.stream);
    return maximum(b, cf_now_ms() - begin);
}

static int ascending(const void *x, const void *y) {
    double a = *(const double *)x, b = *(const double *)y;
    return (a > b) - (a < b);
}

static double percentile(double *sorted, int n, int percent) {
    return sorted[(n - 1) * percent / 100];
}

static double *memory_for(int samples) {
    double *memory = malloc((size_t)samples * sizeof *memory);
    if (!memory) cf_die(NULL, "out of memory for %d times", samples);
    return memory;
}

static void summarize(result *r, double *sorted) {
    int n = r->count;
    memcpy(sorted, r->samples, (size_t)n * sizeof *sorted);
    qsort(sorted, (size_t)n, sizeof *sorted, ascending);
    r->ms = percentile(sorted, n, 50);
    r->p10_ms = percentile(sorted, n, 10);
    r->p90_ms = percentile(sorted, n, 90);
}

static void free_results(result *results, int count) {
    for (int v = 0; v < count; v++) free(results[v].samples);
}

// Whose turn it is, all in some order, the same on all ranks. Returns how many turns there are.
static int draw_order(int order[TURNS_MAX], const variant *variants, int count, int repetition) {
    int turns = 0;
    for (int v = 0; v < count; v++)
        for (int n = 0; n < variants[v].turns; n++) order[turns++] = v;
    for (int i = turns - 1; i > 0; i--) {
        uint32_t bits[4];
        random_bits(0, (uint64_t)repetition, (uint64_t)i, bits);
        int other = (int)(bits[0] % (uint32_t)(i + 1)), swapped = order[i];
        order[i] = order[other];
        order[other] = swapped;
    }
    return turns;
}

static void measure(bench *b, work *k, const variant *variants, int count, result *results) {
    cf_fuse *operation[VARIANTS];
    int order[TURNS_MAX];
    double *scratch = memory_for(b->repetitions * COMPUTE_TURNS);
    for (int v = 0; v < count; v++) operation[v] = make_operation(b, k, &variants[v]);
    for (int v = 0; v < count; v++) results[v] = (result){.samples = memory_for(b->repetitions * COMPUTE_TURNS)};
    for (int i = -WARM_UPS; i < b->repetitions; i++) {
        int turns = draw_order(order, variants, count, i + WARM_UPS);
        for (int n = 0; n < turns; n++) {
            int v = order[n];
            double ms = run_once(b, k, &variants[v], operation[v]);
            if (i >= 0) results[v].samples[results[v].count++] = ms;
        }
    }
    for (int v = 0; v < count; v++) {
        summarize(&results[v], scratch);
        cf_fuse_free(operation[v]);
    }
    free(scratch);
}

// --- the table of fixed shapes ---

enum { COLUMN_COMPUTE, COLUMN_COMM, COLUMN_NONE, COLUMN_SLICE, COLUMN_RING, COLUMN_DIRECT, COLUMN_NOWIRE };
static const variant columns[] = {{"compute", MONOLITHIC, COMPUTE_TURNS},
                                  {"comm", NATIVE, 1},
                                  {"none", FUSED, 1},
                                  {"slice:4", FUSED, 1},
                                  {"ring", FUSED, 1},
                                  {"direct", FUSED, 1},
                                  {"nowire", FUSED, 1}};
enum { COLUMNS = sizeof columns / sizeof *columns };

static void print_heading(const bench *b) {
    const cf_transport *t = b->context.transport;
    printf("%d ranks of one compute thread and one progress thread on %d cores%s; fp32, ms, median of %d\n", t->size,
           t->local_cores,
           2 * t->local_size > t->local_cores ? " (shared: with fewer than one a thread, transfers slow down the computation)" : "",
           b->repetitions);
    printf("%s\n", definitions);
    printf("%-22s %-4s %-9s %9s %8s %7s %5s %8s %8s %8s %8s %7s %7s %7s %8s %6s\n", "operation", "", "", "T x B", "compute", "comm",
           "ratio", "none", "slice:4", "ring", "direct", "hidden:", "ring", "direct", "chunking", "spread");
}

static void print_row(const shape *s, const result r[COLUMNS]) {
    double compute = r[COLUMN_COMPUTE].ms, comm = r[COLUMN_COMM].ms;
    printf("%-22s %-4s %-9s %5lld x %lld %8.2f %7.2f %5.2f", works[s->kind].name, s->model, s->place, (long long)s->T,
           (long long)s->B, compute, comm, comm / compute);
    for (int c = COLUMN_NONE; c <= COLUMN_DIRECT; c++) printf(" %8.2f", r[c].ms);
    for (int c = COLUMN_SLICE; c <= COLUMN_DIRECT; c++) printf(" %6.1f%%", 100 * (1 - (r[c].ms - compute) / comm));
    printf(" %7.1f%% %5.1f%%\n", 100 * (r[COLUMN_NOWIRE].ms - compute) / compute,
           100 * (r[COLUMN_RING].p90_ms - r[COLUMN_RING].p10_ms) / r[COLUMN_RING].ms);
    fflush(stdout);
}

static void print_table(bench *b) {
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
    bool speaks = b->mesh.world_group.rank == 0;
    if (speaks) print_heading(b);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        if (shapes[i].H % b->mesh.tp) continue;
        work k = make_work(b, shapes[i]);
        result results[COLUMNS];
        measure(b, &k, columns, COLUMNS, results);
        if (speaks) print_row(&shapes[i], results);
        free_results(results, COLUMNS);
        free_work(&k);
    }
}

// --- one operation in every variant ---

// The name of a row of the table, without slices, or of a variant that is none.
static bool is_named(const variant *v, const char *name) {
    const size_t length = strcspn(v->name, ":");
    return strlen(name) == length && strncmp(v->name, name, length) == 0;
}

static void add_schedule(cf_choice choice, variant *list, int *count) {
    static char names[VARIANTS][CF_CHOICE_NAME];
    if (*count == VARIANTS) cf_die(NULL, "more than %d variants", VARIANTS);
    cf_choice_print(choice, names[*count]);
    list[*count] = (variant){names[*count], FUSED, 1};
    ++*count;
}

// All but `ideal`, which is `compute`. only: those of this name; NULL: all.
static int choose_variants(const cf_group *group, work_kind kind, const char *only, variant list[VARIANTS]) {
    int count = 0, kept = 0;
    list[count++] = (variant){"compute", MONOLITHIC, COMPUTE_TURNS};
    list[count++] = (variant){"comm", NATIVE, 1};
    const bool levels = group->hosts > 1 && group->hosts < group->size; // else they are direct
    for (const cf_algorithm *a = cf_algorithms; a < cf_algorithms + cf_algorithm_count; a++)
        for (int m = 1; (!a->levels || levels) && m <= 8 && m <= a->max_slices && (a->serves || (a->bound && a->max_slices > 1));
             m *= 2)
            if (cf_algorithm_serving(a, works[kind].operation, works[kind].side)) add_schedule((cf_choice){a, m}, list, &count);
    for (int v = 0; v < count; v++)
        if (!only || is_named(&list[v], only)) list[kept++] = list[v];
    if (kept == 0) cf_die_together(usage, "--only %s: there is no such variant", only);
    return kept;
}

// json: with every sample, as they came; of each repetition as many as the variant has turns.
static void print_variant(const variant *v, const result *r, int64_t bytes, bool json) {
    if (v->what == MONOLITHIC || schedule_of(v).algorithm->bound) bytes = 0;
    printf(json ? "{\"variant\":\"%s\",\"ms\":%.4f,\"p10_ms\":%.4f,\"p90_ms\":%.4f,\"bytes\":%lld"
                : "%-12s %10.3f ms (%.3f to %.3f), %lld bytes sent by each rank",
           v->name, r->ms, r->p10_ms, r->p90_ms, (long long)bytes);
    for (int i = 0; i < r->count && json; i++) printf(i ? ",%.4f" : ",\"samples_ms\":[%.4f", r->samples[i]);
    puts(json ? "]}" : "");
    fflush(stdout);
}

static void print_variants(bench *b, shape s, const char *only, bool json) {
    work k = make_work(b, s);
    variant chosen[VARIANTS];
    result results[VARIANTS];
    const int count = choose_variants(&b->mesh.world_group, s.kind, only, chosen);
    measure(b, &k, chosen, count, results);
    int64_t bytes = (k.N - 1) * k.rows * k.row_elements * (int64_t)sizeof(real);
    if (b->mesh.world_group.rank == 0)
        for (int v = 0; v < count; v++) print_variant(&chosen[v], &results[v], bytes, json);
    free_results(results, count);
    free_work(&k);
}

// --- command line ---

typedef struct choice {
    bool op_given, shape_given, json;
    const char *only;
    shape s;
    int repetitions;
} choice;

// Exactly `count` numbers from 1 to `most`, separated by commas.
static void parse_numbers(const char *option, const char *text, int count, int64_t most, int64_t *numbers) {
    const char *at = text;
    for (int i = 0; i < count; i++) {
        char *end;
        errno = 0;
        numbers[i] = *at >= '0' && *at <= '9' ? strtoll(at, &end, 10) : 0;
        if (numbers[i] < 1 || numbers[i] > most || errno || *end != (i + 1 < count ? ',' : 0))
            cf_die_together(usage, "%s %s: not %d whole number%s from 1 to %lld", option, text, count,
                            count > 1 ? "s, separated by commas," : "", (long long)most);
        at = end + 1;
    }
}

static work_kind parse_op(const char *text) {
    for (int kind = 0; kind < WORK_KINDS; kind++)
        if (strcmp(text, works[kind].op) == 0) return (work_kind)kind;
    cf_die_together(usage, "--op %s: there is no such operation", text);
}

// Returns how many arguments the option took.
static int parse_option(choice *c, const char *option, const char *value) {
    int64_t n[5];
    if (!strcmp(option, "--json")) {
        c->json = true;
        return 1;
    }
    if (strcmp(option, "--op") && strcmp(option, "--shape") && strcmp(option, "--only") && strcmp(option, "--repetitions"))
        cf_die_together(usage, "unknown option %s", option);
    if (!value) cf_die_together(usage, "%s needs a value", option);
    if (!strcmp(option, "--op")) {
        c->s.kind = parse_op(value), c->op_given = true;
    } else if (!strcmp(option, "--only")) {
        c->only = value;
    } else if (!strcmp(option, "--shape")) {
        parse_numbers(option, value, 5, SIZE_MAX_EACH, n);
        c->s.T = n[0], c->s.B = n[1], c->s.C = n[2], c->s.columns = n[3], c->s.H = n[4];
        c->shape_given = true;
    } else {
        parse_numbers(option, value, 1, REPETITIONS_MAX, n);
        c->repetitions = (int)n[0];
    }
    return 2;
}

static choice parse(int argc, char **argv) {
    choice c = {.s = {.model = "", .place = ""}, .repetitions = 2 * REPETITIONS_MIN};
    for (int i = 1; i < argc;) i += parse_option(&c, argv[i], i + 1 < argc ? argv[i + 1] : NULL);
    if (c.repetitions < REPETITIONS_MIN) cf_die_together(usage, "--repetitions %d: at least %d", c.repetitions, REPETITIONS_MIN);
    if (c.op_given != c.shape_given) cf_die_together(usage, "--op and --shape go together");
    if ((c.json || c.only) && !c.op_given) cf_die_together(usage, "--json and --only are for one operation: --op and --shape");
    return c;
}

static void check_shape(const shape *s, int ranks) {
    if (ranks < 2) cf_die_together("start it by scripts/mpirun.sh -np 2", "one rank has nobody to communicate with");
    if ((s->kind != WGRAD_SCATTER && s->T % ranks) || s->columns % ranks)
        cf_die_together(usage, "--shape: T %lld and COLUMNS %lld cannot be shared by %d ranks", (long long)s->T,
                        (long long)s->columns, ranks);
    if (is_attention(s->kind) && (s->columns != s->C || s->C % s->H || s->H % ranks))
        cf_die_together(usage,
                        "--shape: attention wants COLUMNS = C, and heads that divide C and can be shared "
                        "by %d ranks; these are %lld, %lld and %lld heads",
                        ranks, (long long)s->columns, (long long)s->C, (long long)s->H);
}

int main(int argc, char **argv) {
    static bench b;
    if (argc == 2 && strcmp(argv[1], "--help") == 0) {
        printf(
            "Time one operation, by each schedule, on the ranks that mpirun starts (scripts/mpirun.sh -np 2 ...):\n\n"
            "    %s\n\nWithout --op a table of the operations of d6 to d24:\n\n%s\n"
            "With --op and --shape (T,B,C: of the activation; COLUMNS: of the weight; H: heads) a line for each schedule, in 1,\n"
            "2, 4 and 8 slices of a shard, or for those of --only: the median and the 10th and 90th percentile; --json adds\n"
            "each time.\n",
            usage, definitions);
        return 0;
    }
    cf_transport *transport = cf_transport_create("auto", &argc, &argv, 60);
    choice c = parse(argc, argv);
    if (c.op_given) check_shape(&c.s, transport->size);
    b.repetitions = c.repetitions;
    cf_device_threads(1);
    b.context = (cf_context){.transport = transport, .stream = cf_stream_create(), .trace = cf_trace_create(), .step = -1};
    cf_mesh_init(&b.mesh, transport->size, transport->rank, transport->size, 1);
    cf_mesh_bind(transport, &b.mesh);
    b.times = cf_fuse_create(&b.context, (cf_fuse_config){.name = "times",
                                                          .group = &b.mesh.world_group,
                                                          .algorithm = cf_algorithm_find("ring"),
                                                          .slices = 1,
                                                          .dtype = CF_FP64,
                                                          .capacity = 1});
    b.all = cf_alloc(transport->size * (int64_t)sizeof *b.all, "benchmark");
    if (c.op_given)
        print_variants(&b, c.s, c.only, c.json);
    else
        print_table(&b);
    cf_fuse_free(b.times);
    transport->close(transport);
    return 0;
}
