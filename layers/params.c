// See params.h. Local memory order: for each layer its split tensors, padding, its whole tensors, padding;
// then wte, padding, wpe, lnfw, lnfb, padding. So a bucket is always one run.
#include "params.h"
#include "../commfuse/die.h"
#include "random.h"
#include <math.h>
#include <stdlib.h>

typedef enum { WHOLE, ROWS, COLUMNS, HEADS } split;

typedef struct kind {
    const char *name;
    split split;
    bool per_layer, decays;
    double init; // standard deviation; < 0: constant −init; the residual projections are scaled down further
} kind;

static const kind kinds[TENSORS] = {
    [WTE] = {"wte", ROWS, false, true, 0.02},
    [WPE] = {"wpe", WHOLE, false, true, 0.02},
    [LN1W] = {"ln1w", WHOLE, true, false, -1},
    [LN1B] = {"ln1b", WHOLE, true, false, 0},
    [QKVW] = {"qkvw", HEADS, true, true, 0.02},
    [QKVB] = {"qkvb", HEADS, true, false, 0},
    [ATTPROJW] = {"attprojw", COLUMNS, true, true, 0.02},
    [ATTPROJB] = {"attprojb", WHOLE, true, false, 0},
    [LN2W] = {"ln2w", WHOLE, true, false, -1},
    [LN2B] = {"ln2b", WHOLE, true, false, 0},
    [FCW] = {"fcw", ROWS, true, true, 0.02},
    [FCB] = {"fcb", ROWS, true, false, 0},
    [FCPROJW] = {"fcprojw", COLUMNS, true, true, 0.02},
    [FCPROJB] = {"fcprojb", WHOLE, true, false, 0},
    [LNFW] = {"lnfw", WHOLE, false, false, -1},
    [LNFB] = {"lnfb", WHOLE, false, false, 0},
};

// --- whole tensors ---

const char *params_name(int tensor) {
    return kinds[tensor].name;
}
bool params_decays(int tensor) {
    return kinds[tensor].decays;
}
int64_t params_layers(const gpt_shape *s, int tensor) {
    return kinds[tensor].per_layer ? s->L : 1;
}

int64_t params_rows(const gpt_shape *s, int tensor) {
    switch (tensor) {
    case WTE:
        return s->Vp;
    case WPE:
        return s->maxT;
    case QKVW:
    case QKVB:
        return 3 * s->C;
    case FCW:
    case FCB:
        return 4 * s->C;
    default:
        return s->C;
    }
}

int64_t params_columns(const gpt_shape *s, int tensor) {
    switch (tensor) {
    case WTE:
    case WPE:
    case QKVW:
    case ATTPROJW:
    case FCW:
        return s->C;
    case FCPROJW:
        return 4 * s->C;
    default:
        return 1;
    }
}

int64_t params_count(const gpt_shape *s) {
    int64_t total = 0;
    for (int i = 0; i < TENSORS; i++) total += params_layers(s, i) * params_rows(s, i) * params_columns(s, i);
    return total;
}

// --- the local part ---

static int64_t local_rows(const parameters *p, int tensor) {
    int64_t rows = params_rows(&p->shape, tensor);
    bool cut = kinds[tensor].split == ROWS || kinds[tensor].split == HEADS;
    return cut ? (rows + p->tp - 1) / p->tp : rows;
}

static int64_t local_columns(const parameters *p, int tensor) {
    int64_t columns = params_columns(&p->shape, tensor);
    return kinds[tensor].split == COLUMNS ? columns / p->tp : columns;
}

int64_t params_local_count(const parameters *p, int tensor) {
    return local_rows(p, tensor) * local_columns(p, tensor);
}

real *params_weight(const parameters *p, int tensor, int64_t layer) {
    return p->weight + p->first[tensor][0] + layer * p->first[tensor][1];
}

real *params_grad(const parameters *p, int tensor, int64_t layer) {
    return p->grad + p->first[tensor][0] + layer * p->first[tensor][1];
}

int64_t params_runs(const parameters *p, int tensor) {
    split s = kinds[tensor].split;
    return s == HEADS ? 3 : s == COLUMNS ? params_rows(&p->shape, tensor) : 1;
}

param_run params_run(const parameters *p, int tensor, int tp_rank, int64_t run) {
    int64_t rows = params_rows(&p->shape, tensor), columns = params_columns(&p->shape, tensor);
    int64_t mine = local_rows(p, tensor), width = local_columns(p, tensor);
    switch (kinds[tensor].split) {
    case ROWS: { // the last ranks may hold fewer rows than the others
        int64_t from = tp_rank * mine < rows ? tp_rank * mine : rows,
                to = from + mine < rows ? from + mine : rows;
        return (param_run){from * columns, 0, (to - from) * columns};
    }
    case HEADS: // run 0: queries, 1: keys, 2: values
        return (param_run){(run * rows / 3 + tp_rank * mine / 3) * columns, run * mine / 3 * columns,
                           mine / 3 * columns};
    case COLUMNS:
        return (param_run){run * columns + tp_rank * width, run * width, width};
    case WHOLE:
        break;
    }
    return (param_run){0, 0, rows * columns};
}

bool params_find(const parameters *p, int64_t element, int *tensor, int64_t *layer, int64_t *remaining) {
    for (int i = 0; i < TENSORS; i++) {
        int64_t behind = element - p->first[i][0], step = p->first[i][1], count = params_local_count(p, i);
        if (behind < 0) continue;
        int64_t l = step > 0 ? behind / step : 0;
        if (l >= params_layers(&p->shape, i) || behind - l * step >= count) continue;
        *tensor = i, *layer = l, *remaining = count - (behind - l * step);
        return true;
    }
    return false;
}

// --- layout ---

// Lay the tensors of one layer (or the embeddings) that are split or whole side by side, as one bucket.
static void lay_bucket(parameters *p, const cf_group *group, int layer, bool whole) {
    param_bucket *b = &p->bucket[p->buckets++];
    *b = (param_bucket){.group = group, .layer = layer, .first = p->elements};
    for (int i = 0; i < TENSORS; i++) {
        if (kinds[i].per_layer != (layer >= 0) || (kinds[i].split == WHOLE) != whole) continue;
        if (layer <= 0) p->first[i][0] = p->elements;
        if (layer == 1) p->first[i][1] = p->elements - p->first[i][0];
        p->elements += params_local_count(p, i);
    }
    int64_t count = p->elements - b->first;
    b->shard = (count + group->size - 1) / group->size;
    b->count = b->shard * group->size;
    p->elements = b->first + b->count;
}

static void check_shape(gpt_shape s, const cf_mesh *mesh) {
    if (s.C % s.H != 0)
        cf_die_together("--channels must be a multiple of --heads", "%lld channels in %lld heads",
                        (long long)s.C, (long long)s.H);
    if (s.H % mesh->tp != 0)
        cf_die_together("choose --tp so that it divides the number of heads",
                        "%lld heads do not divide over --tp %d", (long long)s.H, mesh->tp);
}

void params_create(parameters *p, gpt_shape shape, const cf_mesh *mesh) {
    check_shape(shape, mesh);
    *p = (parameters){.shape = shape, .tp = mesh->tp, .tp_rank = mesh->tp_group.rank};
    p->bucket = calloc((size_t)(2 * shape.L + 2), sizeof *p->bucket);
    if (!p->bucket) cf_die(NULL, "out of memory for %lld buckets", (long long)(2 * shape.L + 2));
    for (int l = 0; l < shape.L; l++) {
        lay_bucket(p, &mesh->dp_group, l, false);
        lay_bucket(p, &mesh->world_group, l, true);
    }
    lay_bucket(p, &mesh->dp_group, -1, false);
    lay_bucket(p, &mesh->world_group, -1, true);
    p->weight = cf_alloc(p->elements * (int64_t)sizeof(real), "weights");
    p->grad = cf_alloc(p->elements * (int64_t)sizeof(real), "gradients");
}

void params_free(parameters *p) {
    cf_free(p->weight);
    cf_free(p->grad);
    free(p->bucket);
}

// --- in and out ---

enum { READ_AT_ONCE = 4096 };

static void read_run(real *out, params_reader *read, void *argument, int tensor, int64_t layer, int64_t first,
                     int64_t count) {
    float piece[READ_AT_ONCE];
    for (int64_t done = 0; done < count; done += READ_AT_ONCE) {
        int64_t n = count - done < READ_AT_ONCE ? count - done : READ_AT_ONCE;
        read(argument, tensor, layer, first + done, n, piece);
        for (int64_t i = 0; i < n; i++) out[done + i] = (real)piece[i];
    }
}

void params_read(parameters *p, params_reader *read, void *argument) {
    for (int tensor = 0; tensor < TENSORS; tensor++)
        for (int64_t layer = 0; layer < params_layers(&p->shape, tensor); layer++)
            for (int64_t run = 0; run < params_runs(p, tensor); run++) {
                param_run r = params_run(p, tensor, p->tp_rank, run);
                read_run(params_weight(p, tensor, layer) + r.local, read, argument, tensor, layer, r.whole,
                         r.count);
            }
}

void params_place(const parameters *p, int tensor, int tp_rank, int64_t first, int64_t n, const real *piece,
                  float *out) {
    for (int64_t run = 0; run < params_runs(p, tensor); run++) {
        param_run r = params_run(p, tensor, tp_rank, run);
        int64_t end = r.local + r.count, from = r.local > first ? r.local : first,
                to = end < first + n ? end : first + n;
        for (int64_t i = from; i < to; i++) out[r.whole + i - r.local] = (float)piece[i - first];
    }
}

// --- initial weights ---

static void init_run(real *out, const kind *k, double deviation, uint64_t seed, uint64_t stream,
                     int64_t whole, int64_t count) {
#pragma omp parallel for
    for (int64_t i = 0; i < count; i++)
        out[i] = k->init <= 0 ? (real)-k->init
                              : (real)(deviation * random_normal(seed, stream, (uint64_t)(whole + i)));
}

static void init_tensor(parameters *p, int tensor, uint64_t seed) {
    const kind *k = &kinds[tensor];
    bool residual = tensor == ATTPROJW || tensor == FCPROJW; // GPT-2: L layers add 2L times to the residual
    double deviation = residual ? k->init / sqrt(2.0 * (double)p->shape.L) : k->init;
    int64_t real_elements = tensor == WTE ? p->shape.V * p->shape.C : INT64_MAX; // padding stays zero
    for (int64_t l = 0; l < params_layers(&p->shape, tensor); l++)
        for (int64_t r = 0; r < params_runs(p, tensor); r++) {
            param_run run = params_run(p, tensor, p->tp_rank, r);
            int64_t rest = run.whole < real_elements ? real_elements - run.whole : 0;
            uint64_t stream = (uint64_t)tensor + (uint64_t)TENSORS * (uint64_t)l;
            init_run(params_weight(p, tensor, l) + run.local, k, deviation, seed, stream, run.whole,
                     run.count < rest ? run.count : rest);
        }
}

void params_init(parameters *p, uint64_t seed) {
    for (int i = 0; i < TENSORS; i++) init_tensor(p, i, seed);
}
