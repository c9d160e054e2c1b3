// See params.h. Local memory has the order of the buckets, each followed by its padding, so that a bucket is always one run.
#include "params.h"
#include "kernels/linear.h"
#include "../commfuse/base/die.h"
#include "kernels/attention.h"
#include "random.h"
#include <math.h>
#include <stdlib.h>

// What no kernel computes, and a first number of two blocks, do not compile.
#define CHECK(name, norm, positions, activation, biases, units, magic)                                                             \
    _Static_assert((norm) <= RMSNORM && (positions) <= ROTARY && (activation) <= SWIGLU, #name ": a kind is not computed");        \
    _Static_assert((activation) != GELU || (biases), #name ": linear_forward() has GELU of a product with a bias alone");          \
    enum { MODEL_FILES_##magic };
BLOCKS(CHECK)

#define ROW(name, ...) {#name, __VA_ARGS__},
const block_row block_rows[] = {BLOCKS(ROW){0}};

typedef enum { WHOLE, ROWS, COLUMNS } split;
// Rows or columns: of queries, keys and values; of attention's output; of the MLP's first products; of its units.
typedef enum { ONE, VOCABULARY, POSITIONS, CHANNELS, QKV, HEADS, FC, UNITS } extent;
typedef enum { ALWAYS, IF_BIASES, IF_LAYERNORM, IF_LEARNED } presence;

typedef struct tensor_kind {
    const char *name;
    split split;
    bool per_layer;
    extent rows, columns; // ONE column: a vector
    double init;          // standard deviation, scaled down further for residual projections; <= 0: the constant −init
    int bias;             // added to the product with these weights; 0: none
    presence there;
} tensor_kind;

static const tensor_kind kinds[TENSORS] = {
    [WTE] = {"wte", ROWS, false, VOCABULARY, CHANNELS, 0.02},
    [WPE] = {"wpe", WHOLE, false, POSITIONS, CHANNELS, 0.02, 0, IF_LEARNED},
    [LN1W] = {"ln1w", WHOLE, true, CHANNELS, ONE, -1, LN1B},
    [LN1B] = {"ln1b", WHOLE, true, CHANNELS, ONE, 0, 0, IF_LAYERNORM},
    [QKVW] = {"qkvw", ROWS, true, QKV, CHANNELS, 0.02, QKVB},
    [QKVB] = {"qkvb", ROWS, true, QKV, ONE, 0, 0, IF_BIASES},
    [ATTPROJW] = {"attprojw", COLUMNS, true, CHANNELS, HEADS, 0.02, ATTPROJB},
    [ATTPROJB] = {"attprojb", WHOLE, true, CHANNELS, ONE, 0, 0, IF_BIASES},
    [LN2W] = {"ln2w", WHOLE, true, CHANNELS, ONE, -1, LN2B},
    [LN2B] = {"ln2b", WHOLE, true, CHANNELS, ONE, 0, 0, IF_LAYERNORM},
    [FCW] = {"fcw", ROWS, true, FC, CHANNELS, 0.02, FCB},
    [FCB] = {"fcb", ROWS, true, FC, ONE, 0, 0, IF_BIASES},
    [FCPROJW] = {"fcprojw", COLUMNS, true, CHANNELS, UNITS, 0.02, FCPROJB},
    [FCPROJB] = {"fcprojb", WHOLE, true, CHANNELS, ONE, 0, 0, IF_BIASES},
    [LNFW] = {"lnfw", WHOLE, false, CHANNELS, ONE, -1, LNFB},
    [LNFB] = {"lnfb", WHOLE, false, CHANNELS, ONE, 0, 0, IF_LAYERNORM},
};

// --- whole tensors ---

const char *params_name(int tensor) {
    return kinds[tensor].name;
}
const block_row *params_block(const gpt_shape *s) {
    return s->block ? s->block : block_rows;
}
const block_row *params_block_named(const char *name) {
    for (const block_row *b = block_rows; b->name; b++)
        if (strcmp(b->name, name) == 0) return b;
    return NULL;
}
bool params_decays(int tensor) {
    return kinds[tensor].columns != ONE;
}
bool params_is_split(int tensor) {
    return kinds[tensor].split != WHOLE;
}
int params_bias(const gpt_shape *s, int tensor) {
    const int bias = kinds[tensor].bias;
    return bias > 0 && params_layers(s, bias) > 0 ? bias : -1;
}
int64_t params_layers(const gpt_shape *s, int tensor) {
    const block_row *block = params_block(s);
    const bool has[] = {true, block->biases, block->norm == LAYERNORM, block->positions == LEARNED}; // by presence
    return !has[kinds[tensor].there] ? 0 : kinds[tensor].per_layer ? s->L : 1;
}

// Rows are split section by section: queries, keys, values; each of the MLP's products.
static int sections(const gpt_shape *s, int tensor) {
    const int products = params_block(s)->activation == SWIGLU ? 2 : 1; // of the MLP's first layer
    return kinds[tensor].rows == QKV ? 3 : kinds[tensor].rows == FC ? products : 1;
}

static int64_t length(const gpt_shape *s, extent e, int section) {
    const int64_t keys = s->C / s->H * (s->KV > 0 ? s->KV : s->H), usual = params_block(s)->units * s->C;
    const int64_t units = s->F > 0 ? s->F : usual > 0 ? usual : ceil_div(8 * s->C, 3 * 128) * 128;
    const int64_t lengths[] = {[ONE] = 1,         [VOCABULARY] = s->Vp, [POSITIONS] = s->maxT,
                               [CHANNELS] = s->C, [HEADS] = s->C,       [QKV] = section == 0 ? s->C : keys,
                               [FC] = units,      [UNITS] = units};
    return lengths[e];
}

int64_t params_rows(const gpt_shape *s, int tensor) {
    int64_t rows = length(s, kinds[tensor].rows, 0);
    for (int i = 1; i < sections(s, tensor); i++) rows += length(s, kinds[tensor].rows, i);
    return rows;
}
int64_t params_section_rows(const gpt_shape *s, int tensor, int section) {
    return section < sections(s, tensor) ? length(s, kinds[tensor].rows, section) : 0;
}
int64_t params_columns(const gpt_shape *s, int tensor) {
    return length(s, kinds[tensor].columns, 0);
}

int64_t params_count(const gpt_shape *s) {
    int64_t total = -(s->Vp - s->V) * s->C;
    for (int i = 0; i < TENSORS; i++) total += params_layers(s, i) * params_rows(s, i) * params_columns(s, i);
    return total;
}

double params_flops(const gpt_shape *s, int64_t T) {
    double P = (double)(params_count(s) - params_layers(s, WPE) * s->maxT * s->C);
    return 6 * P + 6 * (double)(s->L * s->C * T);
}

gpt_shape params_named(const char *model) {
    const block_row *llama = params_block_named("llama");
    const struct {
        const char *name;
        gpt_shape shape; // positions, vocabulary, -, layers, heads, channels, heads of keys, units
    } named[] = {
        {"d6", {.L = 6, .C = 384, .H = 6}},
        {"d12", {.L = 12, .C = 768, .H = 12}},
        {"d24", {.L = 24, .C = 1024, .H = 16}},
        {"d36", {.L = 36, .C = 1280, .H = 20}},
        {"d48", {.L = 48, .C = 1600, .H = 25}},
        {"smollm2-135m", {8192, 49152, 0, 30, 9, 576, 3, 1536, llama, .rotary.theta = 100000}},
        {"smollm2-360m", {8192, 49152, 0, 32, 15, 960, 5, 2560, llama, .rotary.theta = 100000}},
        {"smollm2-1.7b", {8192, 49152, 0, 24, 32, 2048, 32, 8192, llama, .rotary.theta = 130000}},
        {"llama3.2-1b", {131072, 128256, 0, 16, 32, 2048, 8, 8192, llama, .rotary = {500000, 32, 1, 4, 8192}}},
    };
    for (size_t i = 0; i < sizeof named / sizeof *named; i++)
        if (strcmp(model, named[i].name) == 0) return named[i].shape;
    return (gpt_shape){0};
}

gpt_shape params_filled(gpt_shape s) {
    if (s.KV == 0) s.KV = s.H;
    s.F = length(&s, UNITS, 0);
    if (s.norm_eps == 0) s.norm_eps = 1e-5;
    if (s.rotary.theta == 0) s.rotary.theta = 10000;
    return s;
}

// Stretched, a pair that turns less than `low` times within the original positions is slower by the factor, one that turns more
// than `high` times is as it was, and between them it is between both.
double params_angle(const gpt_shape *s, int64_t pair) {
    const rotary_settings *r = &s->rotary;
    const int64_t D = s->C / s->H;
    const double angle = pow(r->theta, -2.0 * (double)pair / (double)D), turns = r->original * angle / (2 * M_PI);
    if (r->factor == 0) return angle;
    const double kept = fmin(fmax((turns - r->low) / (r->high - r->low), 0), 1);
    return kept * angle + (1 - kept) * angle / r->factor;
}

// --- the local part ---

enum { SHARD_BYTES_MIN = 64 << 10 }; // of thin matrices: a CPU's link moves as much in the latency of a message

// The number of parts of a tensor that this rank holds, and that there are.
static int held(const parameters *p, int tensor) {
    return kinds[tensor].rows == QKV || kinds[tensor].columns == HEADS ? p->parts : 1;
}
static int cuts(const parameters *p, int tensor) {
    return p->splits * held(p, tensor);
}

static int64_t part_of_section(const parameters *p, int tensor, int section) { // rows
    int64_t rows = length(&p->shape, kinds[tensor].rows, section);
    if (kinds[tensor].split == ROWS) rows = ceil_div(rows, cuts(p, tensor));
    return tensor == WTE ? params_aligned(rows) : rows; // this is the length of a row of logits
}

static int64_t part_rows(const parameters *p, int tensor) {
    int64_t rows = 0;
    for (int i = 0; i < sections(&p->shape, tensor); i++) rows += part_of_section(p, tensor, i);
    return rows;
}

int64_t params_local_rows(const parameters *p, int tensor) {
    return held(p, tensor) * part_rows(p, tensor);
}

int64_t params_local_columns(const parameters *p, int tensor) {
    int64_t columns = params_columns(&p->shape, tensor);
    return kinds[tensor].split == COLUMNS ? columns / cuts(p, tensor) : columns;
}

int64_t params_local_count(const parameters *p, int tensor) {
    return params_local_rows(p, tensor) * params_local_columns(p, tensor);
}

const param_tensor *params_find(const parameters *p, int tensor, int64_t layer) {
    return &p->placed[p->place[(kinds[tensor].per_layer ? layer : 0) * TENSORS + tensor]];
}

real *params_weight(const parameters *p, int tensor, int64_t layer) {
    return tensor < 0 ? NULL : p->weight + params_find(p, tensor, layer)->first;
}

accum *params_grad(const parameters *p, int tensor, int64_t layer) {
    return tensor < 0 ? NULL : p->grad + params_find(p, tensor, layer)->first;
}

void params_zero_grad(const parameters *p, cf_stream *stream) {
    for (const param_bucket *b = p->bucket; b < p->bucket + p->buckets; b++)
        if (b->kind >= BUCKET_VECTORS_DP) cf_zero(p->grad + b->first, b->count * (int64_t)sizeof(accum), stream);
}

static int64_t runs_of_part(const parameters *p, int tensor) {
    return kinds[tensor].split == COLUMNS ? params_rows(&p->shape, tensor) : sections(&p->shape, tensor);
}

int64_t params_runs(const parameters *p, int tensor) {
    return held(p, tensor) * runs_of_part(p, tensor);
}

// Of columns a run is a row of the part. Otherwise the whole tensor has a section for each run of a part, and a section has the
// runs of all parts side by side. Local memory has the runs of a part side by side, part after part.
param_run params_run(const parameters *p, int tensor, int tp_rank, int64_t run) {
    const int64_t all = params_columns(&p->shape, tensor), width = params_local_columns(p, tensor), runs = runs_of_part(p, tensor);
    const int64_t part = kinds[tensor].split == WHOLE ? 0 : p->splits > 1 ? tp_rank : run / runs;
    const int section = (int)(run % runs);
    if (kinds[tensor].split == COLUMNS) return (param_run){section * all + part * width, run * width, width};
    int64_t whole = 0, local = run / runs * part_rows(p, tensor); // rows before this one
    for (int i = 0; i < section; i++) whole += length(&p->shape, kinds[tensor].rows, i), local += part_of_section(p, tensor, i);
    const int64_t size = part_of_section(p, tensor, section), rows = length(&p->shape, kinds[tensor].rows, section);
    const int64_t first = smaller(part * size, rows); // the last parts may have fewer rows, and padding that the whole lacks
    return (param_run){(whole + first) * all, local * all, smaller(size, rows - first) * all};
}

int64_t params_first_owned(const param_bucket *b) {
    return b->first + (b->group->size == 1 ? 0 : b->group->rank * b->shard);
}

bool params_owned(const param_bucket *b, int64_t *first, int64_t *end) {
    *first = larger(*first, params_first_owned(b)), *end = smaller(*end, params_first_owned(b) + b->shard);
    return *first < *end;
}

// --- layout ---

// The ranks whose gradients of a tensor must be summed.
static const cf_group *group_of(const parameters *p, int tensor, const cf_mesh *mesh) {
    return kinds[tensor].split == WHOLE || p->strategy == STRATEGY_UP ? &mesh->world_group : &mesh->dp_group;
}

// A matrix has a bucket alone if each owner's part of its weight-gradient product is large enough to be efficient.
static bucket_kind bucket_kind_of(const parameters *p, int tensor, const cf_mesh *mesh) {
    const cf_group *group = group_of(p, tensor, mesh);
    if (tensor == WTE) return BUCKET_TABLE;
    if (kinds[tensor].per_layer && params_decays(tensor)) {
        int64_t rows = params_local_rows(p, tensor) / group->size;
        return p->no_thin || rows >= linear_wgrad_rows_min(params_local_columns(p, tensor)) ? BUCKET_MATRIX : BUCKET_THIN;
    }
    return mesh->tp == 1 || group == &mesh->world_group ? BUCKET_VECTORS
                                                        : BUCKET_VECTORS_DP; // without tp the replicas are the world
}

// Adds a bucket of all tensors of one kind, or of the one given, of layers [first, end); no bucket if there are none.
static void add_bucket(parameters *p, const cf_mesh *mesh, bucket_kind which, const cf_group *group, int tensor, int64_t first,
                       int64_t end) {
    param_bucket *b = &p->bucket[p->buckets];
    const int layer = which <= BUCKET_THIN ? (int)first : which == BUCKET_TABLE ? LAYER_TABLE : LAYER_VECTORS, before = p->tensors;
    *b = (param_bucket){.kind = which, .group = group, .layer = layer, .tensor = tensor, .first = p->elements, .row = 1};
    if (tensor >= 0) b->row = params_local_columns(p, tensor);
    for (int64_t l = first; l < end; l++)
        for (int i = 0; i < TENSORS; i++) {
            if (bucket_kind_of(p, i, mesh) != which || (tensor >= 0 && i != tensor)) continue;
            if (l >= params_layers(&p->shape, i)) continue;
            int64_t count = params_local_count(p, i);
            p->place[l * TENSORS + i] = p->tensors;
            p->placed[p->tensors++] = (param_tensor){i, p->buckets, l, p->elements, count};
            p->elements += count;
            b->used = p->elements - b->first;
            if (params_decays(i)) b->decayed = b->used; // such tensors are the first of a bucket
        }
    if (p->tensors == before) return;
    b->shard = ceil_div(ceil_div(b->used, b->row), group->size) * b->row;
    if (tensor < 0) b->shard = params_aligned(b->shard);
    b->count = b->shard * group->size;
    b->owned_before = p->owned, p->owned += b->shard;
    p->elements = b->first + b->count;
    p->buckets++;
}

// Where buckets are large, few layers share one at first, because forward waits for it, and nothing hides the last gradients.
static void add_buckets(parameters *p, const cf_mesh *mesh, double shard_bytes) {
    const int64_t L = p->shape.L;
    const cf_group *matrices = group_of(p, FCW, mesh); // the same for all matrices of layers
    int64_t thin = 0, enough = matrices->size * (int64_t)fmax(shard_bytes, SHARD_BYTES_MIN) / (int64_t)sizeof(accum);
    for (int i = 0; i < TENSORS; i++)
        if (params_layers(&p->shape, i) > 0 && bucket_kind_of(p, i, mesh) == BUCKET_THIN) thin += params_local_count(p, i);
    const int64_t most = thin > 0 ? ceil_div(enough, thin) : L; // layers whose thin matrices share a bucket
    for (int64_t l = 0, end = 0; l < L; l++) {
        for (int i = 0; i < TENSORS; i++) add_bucket(p, mesh, BUCKET_MATRIX, matrices, i, l, l + 1);
        if (l < end) continue;
        end = smaller(l + (shard_bytes > 0 ? smaller(l + 1, most) : most), L);
        add_bucket(p, mesh, BUCKET_THIN, matrices, -1, l, end);
    }
    p->table = p->buckets;
    add_bucket(p, mesh, BUCKET_TABLE, group_of(p, WTE, mesh), WTE, 0, 1);
    add_bucket(p, mesh, BUCKET_VECTORS_DP, &mesh->dp_group, -1, 0, L);
    add_bucket(p, mesh, BUCKET_VECTORS, &mesh->world_group, -1, 0, L);
}

// tp must divide the heads of keys, with which those of queries are split, and the units that are split, too.
static void check_groups(gpt_shape s, int64_t units, int64_t tp) {
    int64_t most = s.KV;
    if (s.KV < 1 || s.H % s.KV != 0)
        cf_die_together("choose --kv-heads so that it divides --heads",
                        "%ld heads cannot share %ld heads of keys and values evenly", s.H, s.KV);
    while (units % most != 0 || s.KV % most != 0) most--;
    if (s.KV % tp != 0)
        cf_die_together("choose a --tp that divides them",
                        "%ld heads of keys and values do not divide over --tp %ld; at most --tp %ld", s.KV, tp, most);
    if (units % tp != 0)
        cf_die_together("choose --ffn as a multiple of --tp, or --strategy up, which does not split the MLP",
                        "%ld units of the MLP do not divide over --tp %ld", units, tp);
}

static void check_shape(gpt_shape s, const cf_mesh *mesh) {
    if (s.C % s.H != 0) cf_die_together("--channels must be a multiple of --heads", "%ld channels in %ld heads", s.C, s.H);
    if (params_block(&s)->positions == ROTARY && s.C / s.H % 2 != 0)
        cf_die_together("choose --heads so that channels / heads is even",
                        "rotary positions turn pairs of channels, but a head has %ld", s.C / s.H);
    if (s.C / s.H > attention_channels_max())
        cf_die_together("use more --heads", "%ld channels in %ld heads: %ld per head, at most %ld", s.C, s.H, s.C / s.H,
                        attention_channels_max());
    if (s.H % mesh->tp != 0)
        cf_die_together("choose --tp so that it divides the number of heads", "%ld heads do not divide over --tp %d", s.H,
                        mesh->tp);
}

void params_create(parameters *p, gpt_shape shape, const cf_mesh *mesh, parallel_strategy strategy, double shard_bytes) {
    const bool up = strategy == STRATEGY_UP;
    shape = params_filled(shape);
    check_shape(shape, mesh);
    check_groups(shape, up ? 0 : shape.F, mesh->tp);
    *p = (parameters){.shape = shape, .strategy = strategy, .tp_rank = mesh->tp_group.rank};
    p->splits = up ? 1 : mesh->tp, p->parts = up ? mesh->tp : 1, p->no_thin = shard_bytes == NO_THIN;
    p->bucket = cf_host_alloc(TENSORS * shape.L, sizeof *p->bucket, "places of tensors");
    p->placed = cf_host_alloc(TENSORS * shape.L, sizeof *p->placed, "places of tensors");
    p->place = cf_host_alloc(TENSORS * shape.L, sizeof *p->place, "places of tensors");
    add_buckets(p, mesh, shard_bytes);
    p->weight = cf_alloc(p->elements * (int64_t)sizeof(real), "weights");
    p->grad = cf_alloc(p->elements * (int64_t)sizeof(accum), "gradients");
}

void params_free(parameters *p) {
    cf_free(p->weight);
    cf_free(p->grad);
    free(p->bucket);
    free(p->placed);
    free(p->place);
}

// --- in and out ---

enum { AT_ONCE = 1 << 16 }; // elements that are read and copied to the device at a time

// The vocabulary's padding becomes zero, whatever a file has there: its gradient is zero, but zero times NaN would not be.
void params_read(parameters *p, params_reader *read, void *argument, cf_stream *stream) {
    real *piece = cf_host_alloc(AT_ONCE, sizeof *piece, "weights to copy");
    float *values = cf_host_alloc(AT_ONCE, sizeof *values, "weights to copy");
    for (int tensor = 0; tensor < TENSORS; tensor++)
        for (int64_t layer = 0; layer < params_layers(&p->shape, tensor); layer++)
            for (int64_t i = 0; i < params_runs(p, tensor); i++) {
                const param_run run = params_run(p, tensor, p->tp_rank, i);
                const int64_t used = tensor == WTE ? p->shape.V * p->shape.C : INT64_MAX;
                for (int64_t done = 0; done < run.count; done += AT_ONCE) {
                    int64_t n = smaller(run.count - done, AT_ONCE), from = run.whole + done;
                    read(argument, STATE_WEIGHT, tensor, layer, from, n, values);
                    for (int64_t k = 0; k < n; k++) piece[k] = real_of(from + k < used ? (double)values[k] : 0);
                    cf_copy(params_weight(p, tensor, layer) + run.local + done, piece, n * (int64_t)sizeof *piece, stream);
                }
            }
    cf_stream_sync(stream);
    free(piece);
    free(values);
}

void params_place(const parameters *p, int tensor, int tp_rank, int64_t first, int64_t n, const real *piece, float *out) {
    for (int64_t run = 0; run < params_runs(p, tensor); run++) {
        param_run r = params_run(p, tensor, tp_rank, run);
        int64_t from = larger(r.local, first), to = smaller(r.local + r.count, first + n);
        for (int64_t i = from; i < to; i++) out[r.whole + i - r.local] = (float)accum_of(piece[i - first]);
    }
}

// --- initial weights ---

typedef struct initial {
    uint64_t seed;
    int64_t layers;
} initial;

// GPT-2 divides the deviation of residual projections by sqrt(2L), because L layers add to the residual 2L times.
static void initial_values(void *argument, int kind, int tensor, int64_t layer, int64_t first, int64_t count, float *out) {
    const initial *of = argument;
    (void)kind;
    const bool residual = kinds[tensor].split == COLUMNS;
    const double init = kinds[tensor].init, deviation = residual ? init / sqrt(2.0 * (double)of->layers) : init;
    const uint64_t stream = (uint64_t)tensor + (uint64_t)TENSORS * (uint64_t)layer;
#pragma omp parallel for
    for (int64_t i = 0; i < count; i++)
        out[i] = (float)(init <= 0 ? -init : deviation * random_normal(of->seed, stream, (uint64_t)(first + i)));
}

void params_init(parameters *p, uint64_t seed, cf_stream *stream) {
    initial of = {seed, p->shape.L};
    params_read(p, initial_values, &of, stream);
}
