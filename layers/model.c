// See model.h. Order of things in a step, for one replica:
//
//   forward    (rows from their owners, an update during it; lookup ▸ reduce-scatter) + positions → L blocks
//              → layer norm → (all-gather ▸ head) → three numbers per token gathered over the ranks that split the
//              vocabulary → loss; if backward follows, logits turn into their gradient
//   backward   (dgrad ▸ reduce-scatter) with wgrad during it, on the input that forward has gathered → layer norm
//              → L blocks; inside the first block, as soon as the gradient of its input is complete, (all-gather ▸
//              scatter-add; rows to their owners) and positions are begun; what is left of that block's weight
//              gradients comes last, so that these transfers are hidden by it
//
// Weights arrive, and gradients leave, as zero.h describes: the loops over layers call it.
#include "model.h"
#include "../commfuse/die.h"
#include "crossentropy.h"
#include "embedding.h"
#include "layernorm.h"
#include "linear.h"
#include <stdlib.h>

enum { PASS_UNIT = 64 }; // tokens of a rank

// In a timeline the parts of a pass enclose their operations; what is between those is work on this rank's shard.
static cf_moment trace_begin(gpt *g, const char *name) {
    return cf_trace_begin(g->context->trace, CF_TRACE_COMPUTE, name, g->context->stream);
}

static void trace_end(gpt *g, const char *name, int64_t layer, cf_moment begin) {
    cf_trace_end(g->context->trace, CF_TRACE_COMPUTE, name, (int)layer, -1, begin, g->context->stream);
}

// --- life ---

static void *table_of(int64_t count, size_t size) {
    void *memory = calloc((size_t)count, size);
    if (!memory) cf_die(NULL, "out of memory for a table of %lld", (long long)count);
    return memory;
}

static cf_fuse *plan_gather(gpt *g, const char *name, const cf_group *group, cf_dtype dtype, int64_t capacity, overlap how) {
    return cf_fuse_create(g->context, overlap_plan(how, name, group, CF_ALLGATHER, CF_NO_COMPUTE, dtype, capacity));
}

static void alloc_memory(gpt *g) {
    int64_t L = g->params.shape.L, C = g->params.shape.C, shard_rows = g->T * g->B / g->mesh->tp, N = g->split->size,
            rows = N * shard_rows;
    const char *shared = "activations, shared";
    g->x = table_of(L + 1, sizeof *g->x);
    for (int64_t l = 0; l <= L; l++) g->x[l] = alloc_real(shard_rows * C, "activations, per layer");
    g->mean = alloc_precise(shard_rows, shared);
    g->rstd = alloc_precise(shard_rows, shared);
    g->prepared = alloc_real(linear_prepared_size(C, g->vocabulary_rows), "weights, prepared");
    g->logits = alloc_real(rows * g->vocabulary_rows, "logits");
    g->stats = alloc_precise(N * rows * 3, shared);
    g->total = alloc_precise(rows * 2, shared);
    g->losses = alloc_precise(rows, shared);
    g->dx = alloc_real(shard_rows * C, shared);
    g->next = alloc_real(g->mesh->tp * g->vocabulary_rows, shared);
    g->pieces = alloc_real(N * COLLECT, shared);
    g->inputs = cf_alloc(g->T * g->B * (int64_t)sizeof(int32_t), shared);
    g->targets = cf_alloc(g->T * g->B * (int64_t)sizeof(int32_t), shared);
    g->loss = cf_alloc((int64_t)sizeof *g->loss, shared);
    g->host_inputs = table_of(2 * g->T * g->B, sizeof *g->host_inputs);
    g->host_targets = g->host_inputs + g->T * g->B;
}

void gpt_create(gpt *g, cf_context *context, const cf_mesh *mesh, gpt_shape shape, parallel_strategy strategy, int64_t T, int64_t B,
                overlap how, bool recompute) {
    if (T % mesh->tp != 0)
        cf_die_together("choose --seq as a multiple of --tp", "--seq %lld does not divide over --tp %d", (long long)T, mesh->tp);
    if (T > shape.maxT)
        cf_die_together("lower --seq, or start from a model with more positions",
                        "--seq %lld is longer than the model's %lld positions", (long long)T, (long long)shape.maxT);
    const bool up = strategy == STRATEGY_UP;
    *g = (gpt){.context = context, .mesh = mesh, .T = T, .B = B};
    g->pass = (model_pass){.context = context, .params = &g->params, .zero = &g->zero};
    params_create(&g->params, shape, mesh, strategy);
    g->split = up ? &mesh->self_group : &mesh->tp_group;
    int64_t rows = params_local_rows(&g->params, WTE), shard_rows = T * B / mesh->tp, shard = shard_rows * shape.C;
    g->vocabulary_rows = rows;
    g->vocabulary_first = g->split->rank * rows;
    g->vocabulary_valid = smaller(larger(shape.V - g->vocabulary_first, 0), rows);
    alloc_memory(g);
    g->blocks = (up ? up_create : tpsp_create)(&g->pass, mesh, T, B, how, recompute);
    g->gather_stats = plan_gather(g, "loss", g->split, PRECISE_DTYPE, T * B * 3, how);
    g->collect = plan_gather(g, "save", g->split, REAL_DTYPE, COLLECT, how);
    g->gather_logits = plan_gather(g, "sample", &mesh->tp_group, REAL_DTYPE, rows, how);
    column_create(&g->head, &g->pass, g->split, "head", WTE, -1, shard, how, false, g->prepared);
    lookup_create(&g->embedding, context, &g->params, g->split, T / mesh->tp, B, how);
    zero_create(&g->zero, context, &g->params, g->embedding.by_rows, g->split->size * shard_rows, how);
    gpt_place_weight_gradients(g);
}

void gpt_free(gpt *g) {
    zero_free(&g->zero);
    block_free(g->blocks);
    for (int64_t l = 0; l <= g->params.shape.L; l++) cf_free(g->x[l]);
    free(g->x);
    void *memory[] = {g->mean, g->rstd, g->prepared, g->logits, g->stats,   g->total, g->losses,
                      g->dx,   g->next, g->pieces,   g->inputs, g->targets, g->loss};
    for (int i = 0; i < (int)(sizeof memory / sizeof *memory); i++) cf_free(memory[i]);
    free(g->host_inputs);
    cf_fuse_free(g->gather_stats);
    cf_fuse_free(g->gather_logits);
    cf_fuse_free(g->collect);
    lookup_free(&g->embedding);
    parallel_linear_free(&g->head);
    params_free(&g->params);
}

void gpt_place_weight_gradients(gpt *g) {
    block_place_weight_gradients(g->blocks);
}

// --- embedding ---

// Tokens of the rows that head and lookup work on: all, or those of this rank's shard.
static int64_t first_token(const gpt *g) {
    return (g->mesh->tp_group.rank - g->split->rank) * g->pass.Ts * g->pass.B;
}

void gpt_begin_forward(gpt *g, const int32_t *inputs, const int32_t *targets, int64_t T, int64_t B) {
    if (T < 1 || B < 1 || T > g->T || B > g->B || T % g->mesh->tp != 0)
        cf_die(NULL, "forward of %lld x %lld tokens on a model made for %lld x %lld", (long long)T, (long long)B, (long long)g->T,
               (long long)g->B);
    g->pass.Ts = T / g->mesh->tp, g->pass.B = B;
    g->has_targets = targets != NULL;
    cf_copy(g->inputs, inputs, T * B * (int64_t)sizeof *inputs, g->context->stream);
    if (targets) cf_copy(g->targets, targets, T * B * (int64_t)sizeof *targets, g->context->stream);
    g->begun = trace_begin(g, "embedding forward");
    bool here = zero_table_is_here(&g->zero);
    g->looking = here || g->embedding.by_rows;
    if (g->looking) lookup_forward(&g->embedding, g->inputs + first_token(g), g->pass.Ts, B, !here, g->blocks->sums);
}

static void embed(gpt *g) {
    zero_shards *z = &g->zero;
    int64_t Ts = g->pass.Ts, B = g->pass.B;
    if (!g->looking) {
        zero_prefetch(z, 0);
        zero_wait(z, ZERO_TABLE);
        lookup_forward(&g->embedding, g->inputs + first_token(g), Ts, B, false, g->blocks->sums);
    }
    lookup_finish_forward(&g->embedding, g->x[0]);
    g->looking = false;
    zero_prefetch(z, 0);
    zero_wait(z, ZERO_VECTORS);
    position_forward(g->x[0], params_weight(&g->params, WPE, 0), g->mesh->tp_group.rank * Ts, Ts, B, g->params.shape.C,
                     g->context->stream);
}

static void finish_table(gpt *g) {
    lookup_finish_backward(&g->embedding);
    if (g->pass.last && !g->embedding.by_rows) zero_ready(&g->zero, ZERO_TABLE);
}

// Does what the lookup adds up travel on to owners, as rows or with the table? Then it needs what is left to compute more
// than the lookup does.
static bool table_is_next(const gpt *g) {
    return g->pass.last && g->params.bucket[g->params.table].group->size > 1;
}

static void embed_backward(gpt *g) {
    int64_t Ts = g->pass.Ts, B = g->pass.B;
    lookup_backward(&g->embedding, g->dx, g->inputs + first_token(g), g->pass.last, g->blocks->sums);
    position_backward(params_grad(&g->params, WPE, 0), g->dx, g->mesh->tp_group.rank * Ts, Ts, B, g->params.shape.C,
                      g->context->stream);
    if (table_is_next(g)) finish_table(g);
    if (g->pass.last) zero_ready(&g->zero, ZERO_VECTORS);
}

// --- head and loss ---

static void head_forward(gpt *g) {
    const parameters *p = &g->params;
    int64_t Ts = g->pass.Ts, B = g->pass.B;
    real *x = g->blocks->head_input;
    zero_wait(&g->zero, ZERO_TABLE);
    layernorm_forward(linear_own_shard(&g->head, x, p->shape.C), g->mean, g->rstd, g->x[p->shape.L], params_weight(p, LNFW, 0),
                      params_weight(p, LNFB, 0), Ts * B, p->shape.C, g->context->stream);
    column_forward(&g->head, -1, g->logits, NULL, x);
}

// scale 0: no backward follows.
static void add_loss(gpt *g, double scale) {
    int64_t own = g->pass.Ts * g->pass.B, rows = g->split->size * own, V = g->vocabulary_rows;
    int64_t first = g->vocabulary_first, valid = g->vocabulary_valid;
    const int32_t *targets = g->targets + first_token(g);
    cf_stream *stream = g->context->stream;
    if (g->split->size == 1 && scale != 0) {
        crossentropy_fused(g->losses, g->logits, targets, scale, valid, rows, V, stream);
    } else {
        crossentropy_stats(g->stats + g->split->rank * rows * 3, g->logits, targets, first, valid, rows, V, stream);
        cf_fuse_run(g->gather_stats, g->stats, rows, 3, NULL, NULL, -1);
        crossentropy_combine(g->losses, g->total, g->stats, g->split->size, rows, stream);
        if (scale != 0) crossentropy_backward(g->logits, g->total, targets, scale, first, valid, rows, V, stream);
    }
    if (scale != 0) crossentropy_sum(g->loss, g->losses + g->split->rank * own, own, stream);
}

static void head_backward(gpt *g) {
    const parameters *p = &g->params;
    int64_t C = p->shape.C, Ts = g->pass.Ts, B = g->pass.B;
    cf_stream *stream = g->context->stream;
    const real *dnorm = column_backward(&g->head, -1, g->blocks->sums, g->logits, g->blocks->head_input);
    cf_zero(g->dx, Ts * B * C * (int64_t)sizeof(real), stream);
    layernorm_backward(g->dx, params_grad(p, LNFW, 0), params_grad(p, LNFB, 0), dnorm, g->x[p->shape.L], params_weight(p, LNFW, 0),
                       g->mean, g->rstd, g->blocks->norm_scratch, Ts * B, C, stream);
    if (column_owes_gradient(&g->head, -1)) column_gradient(&g->head, -1, g->logits, g->blocks->head_input);
    // The lookup's part goes its own way.
    if (g->pass.last && g->embedding.by_rows) zero_ready(&g->zero, ZERO_TABLE);
}

// --- passes ---

void gpt_forward(gpt *g, double scale) {
    embed(g);
    trace_end(g, "embedding forward", -1, g->begun);
    for (int l = 0; l < g->params.shape.L; l++) {
        zero_prefetch(&g->zero, l);
        zero_wait(&g->zero, l);
        cf_moment begin = trace_begin(g, "block forward");
        block_forward(g->blocks, l, g->x[l], g->x[l + 1]);
        trace_end(g, "block forward", l, begin);
    }
    cf_moment begin = trace_begin(g, "head forward");
    head_forward(g);
    if (g->has_targets) add_loss(g, scale);
    trace_end(g, "head forward", -1, begin);
}

void gpt_backward(gpt *g, bool first, bool last) {
    cf_moment begin = trace_begin(g, "head backward");
    g->pass.first = first, g->pass.last = last;
    if (first) params_zero_grad(&g->params, g->context->stream);
    head_backward(g);
    trace_end(g, "head backward", -1, begin);
    for (int l = (int)g->params.shape.L - 1; l >= 0; l--) {
        begin = trace_begin(g, "block backward");
        block_backward(g->blocks, l, g->dx);
        if (last) zero_ready(&g->zero, l);
        if (l == 0) embed_backward(g);
        block_backward_late(g->blocks, l);
        if (last) zero_ready_late(&g->zero, l);
        trace_end(g, "block backward", l, begin);
    }
    if (!table_is_next(g)) finish_table(g);
}

int64_t gpt_pass_tokens(const gpt *g, int64_t length) {
    const int64_t unit = PASS_UNIT * g->mesh->tp;
    return smaller(ceil_div(length, unit) * unit, g->T);
}

void gpt_sum_losses(gpt *g, const int64_t *first, const int64_t *end, double *sums) {
    int64_t Ts = g->pass.Ts, B = g->pass.B, from = g->mesh->tp_group.rank * Ts;
    precise *losses = table_of(Ts * B, sizeof *losses);
    cf_copy(losses, g->losses + g->split->rank * Ts * B, Ts * B * (int64_t)sizeof *losses, g->context->stream);
    cf_stream_sync(g->context->stream);
    for (int64_t b = 0; b < B; b++) {
        sums[b] = 0;
        for (int64_t t = larger(first[b] - from, 0); t < Ts && from + t < end[b]; t++) sums[b] += (double)losses[t * B + b];
    }
    free(losses);
}

void gpt_next_logits(gpt *g, int64_t t, int64_t b, float *out) {
    int64_t rows = g->vocabulary_rows, V = g->params.shape.V;
    int64_t row = t * g->pass.B + b - first_token(g), all = g->split->size * g->pass.Ts * g->pass.B;
    if (row >= 0 && row < all)
        cf_copy(g->next + g->mesh->tp_group.rank * rows, g->logits + row * rows, rows * (int64_t)sizeof(real), g->context->stream);
    cf_fuse_run(g->gather_logits, g->next, 1, rows, NULL, NULL, -1);
    // The vocabulary's parts side by side or, with UP, the whole of it from the rank that has the position.
    const real *found = g->next + (g->split->size == 1 ? t / g->pass.Ts * rows : 0);
    real *logits = table_of(V, sizeof *logits);
    cf_copy(logits, found, V * (int64_t)sizeof *logits, g->context->stream);
    cf_stream_sync(g->context->stream);
    for (int64_t v = 0; v < V; v++) out[v] = (float)precise_of(logits[v]);
    free(logits);
}

// pieces: the host's copy of g->pieces.
static void collect_tensor(gpt *g, const real *local, int tensor, real *pieces, float *whole) {
    int64_t count = params_local_count(&g->params, tensor), size = (int64_t)sizeof *pieces;
    for (int64_t first = 0; first < count; first += COLLECT) {
        int64_t n = smaller(count - first, COLLECT);
        cf_copy(g->pieces + g->split->rank * n, local + first, n * size, g->context->stream);
        cf_fuse_run(g->collect, g->pieces, n, 1, NULL, NULL, -1);
        if (whole) cf_copy(pieces, g->pieces, g->split->size * n * size, g->context->stream);
        cf_stream_sync(g->context->stream);
        for (int rank = 0; whole && rank < g->split->size; rank++)
            params_place(&g->params, tensor, rank, first, n, pieces + rank * n, whole);
    }
}

void gpt_collect(gpt *g, void (*append)(void *argument, const float *values, int64_t count), void *argument) {
    const gpt_shape *shape = &g->params.shape;
    real *pieces = table_of(g->split->size * COLLECT, sizeof *pieces);
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        int64_t count = params_rows(shape, tensor) * params_columns(shape, tensor);
        float *whole = g->mesh->tp_group.rank == 0 ? calloc((size_t)count, sizeof *whole) : NULL;
        if (g->mesh->tp_group.rank == 0 && !whole) cf_die(NULL, "out of memory for collecting %s", params_name(tensor));
        for (int64_t layer = 0; layer < params_layers(shape, tensor); layer++) {
            collect_tensor(g, params_weight(&g->params, tensor, layer), tensor, pieces, whole);
            if (whole) append(argument, whole, count);
        }
        free(whole);
    }
    free(pieces);
}

void gpt_operations(gpt *g, visit_operation *visit, void *argument) {
    const lookup *l = &g->embedding;
    if (l->by_rows) visit(argument, "tokens of all ranks", l->ids, 1);
    if (l->by_rows) visit(argument, "rows, during an update", l->fetch, 1);
    visit(argument, "forward", l->forward, 1);
    block_operations(g->blocks, true, visit, argument);
    visit(argument, "forward", g->head.forward, 1);
    visit(argument, "forward", g->gather_stats, 1);
    visit(argument, "backward", g->head.backward, 1);
    block_operations(g->blocks, false, visit, argument);
    visit(argument, "backward", l->backward, 1);
    if (l->by_rows) visit(argument, "rows of gradient, during the last weight gradient", l->deliver, 1);
}

static void add_operation(void *tuner, const char *place, cf_fuse *fuse, int64_t times) {
    (void)times;
    cf_tuner_add(tuner, place, fuse);
}

cf_tuner *gpt_create_tuner(gpt *g) {
    cf_tuner *tuner = cf_tuner_create(g->context, &g->mesh->world_group);
    gpt_operations(g, add_operation, tuner);
    return tuner;
}

void gpt_try_ways(gpt *g, cf_tuner *tuner, bool begins) {
    if (!cf_tuner_trying(tuner)) return;
    if (begins)
        cf_tuner_begin_step(tuner);
    else
        cf_tuner_end_step(tuner);
    gpt_place_weight_gradients(g);
}

void gpt_explain(const gpt *g, FILE *out) {
    zero_explain(&g->zero, out);
    fprintf(out, "  ");
    lookup_explain(&g->embedding, out);
    zero_explain_places(&g->zero, out);
}
