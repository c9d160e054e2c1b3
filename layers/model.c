// See model.h. Order of things in a step, for one replica:
//
//   forward    (rows from their owners, an update behind them; lookup ▸ reduce-scatter) + positions → L blocks
//              → layer norm → (all-gather ▸ head) → three numbers per token gathered over the ranks that split the
//              vocabulary → loss; if backward follows, logits turn into their gradient
//   backward   (dgrad ▸ reduce-scatter) with wgrad behind it, on the input that forward has gathered → layer norm
//              → L blocks; inside the first block, as soon as the gradient of its input is complete, (all-gather ▸
//              scatter-add; rows to their owners) and positions are begun; what is left of that block's weight
//              gradients comes last, so that these transfers hide behind it
//
// The model announces through its hooks when it needs a bucket of parameters and when a bucket's gradient is
// complete; who moves buckets, and when, is the optimizer's affair.
#include "model.h"
#include "../commfuse/die.h"
#include "buffers.h"
#include "crossentropy.h"
#include "embedding.h"
#include "layernorm.h"
#include "weight_gradient.h"
#include <stdlib.h>

// --- hooks ---

static bool up_strategy(const gpt *g) {
    return g->params.strategy == STRATEGY_UP;
}

static void need(gpt *g, int bucket) {
    if (g->pass.hooks.need) g->pass.hooks.need(g->pass.hooks.argument, bucket);
}

static void need_layer(gpt *g, int64_t layer) {
    static const int matrices[] = {QKVW, ATTPROJW, FCW, FCPROJW};
    for (int i = 0; i < 4; i++) need(g, params_bucket_of(&g->params, matrices[i], layer));
}

static void ready(gpt *g, int bucket) {
    if (g->pass.last && g->pass.hooks.ready) g->pass.hooks.ready(g->pass.hooks.argument, bucket);
}

static int table(const gpt *g) {
    return g->params.table;
}

// Of positions and of the vectors of all layers: behind the table's.
static void each_small(gpt *g, void (*announce)(gpt *g, int bucket)) {
    for (int i = table(g) + 1; i < g->params.buckets; i++) announce(g, i);
}

// In a timeline the parts of a pass enclose their operations; what is between those is work on the own shard.
static cf_moment trace_begin(gpt *g, const char *name) {
    return cf_trace_begin(g->context->trace, CF_TRACE_COMPUTE, name, g->context->stream);
}

static void trace_end(gpt *g, const char *name, int64_t layer, cf_moment begin) {
    cf_trace_end(g->context->trace, CF_TRACE_COMPUTE, name, (int)layer, -1, begin, g->context->stream);
}

// --- life ---

static void plan_operations(gpt *g, overlap o) {
    int64_t shard = g->T / g->mesh->tp * g->B * g->params.shape.C;
    cf_fuse_plan plan = {.group = g->split,
                         .operation = CF_ALLGATHER,
                         .side = CF_NO_COMPUTE,
                         .mode = o.mode,
                         .route = o.route,
                         .slices = 1,
                         .dtype = REAL_DTYPE};
    plan.name = "loss", plan.capacity = g->T * g->B * 3, plan.dtype = PRECISE_DTYPE;
    g->gather_stats = cf_fuse_create(g->context, plan);
    plan.dtype = REAL_DTYPE;
    plan.name = "save", plan.capacity = COLLECT;
    g->collect = cf_fuse_create(g->context, plan);
    plan.name = "sample", plan.capacity = g->vocabulary_rows, plan.group = &g->mesh->tp_group;
    g->gather_logits = cf_fuse_create(g->context, plan);
    column_create(&g->head, g->context, g->split, "head", shard, g->params.shape.C, g->vocabulary_rows, o,
                  false);
    lookup_create(&g->embedding, g->context, &g->params, g->split, g->T / g->mesh->tp, g->B, o);
}

static void *table_of(int64_t count, size_t size) {
    void *memory = calloc((size_t)count, size);
    if (!memory) cf_die(NULL, "out of memory for a table of %lld", (long long)count);
    return memory;
}

static void create_blocks(gpt *g, overlap o, bool recompute) {
    const gpt_shape *s = &g->params.shape;
    const cf_group *tp = &g->mesh->tp_group;
    if (up_strategy(g)) {
        up_create(&g->up_block, g->context, tp, &g->pass, *s, g->T, g->B, o, recompute);
        g->up_layers = table_of(s->L, sizeof *g->up_layers);
        for (int64_t l = 0; l < s->L; l++)
            up_saved_create(&g->up_layers[l], *s, tp->size, g->T, g->B, recompute);
        for (int64_t l = 0; l < s->L; l++) g->up_layers[l].x = g->x[l];
        g->wide = g->up_block.norm, g->partial = g->up_block.dnorm,
        g->norm_scratch = g->up_block.norm_scratch;
    } else {
        tpsp_create(&g->tpsp_block, g->context, tp, &g->pass, *s, g->T, g->B, o, recompute);
        g->tpsp_layers = table_of(s->L, sizeof *g->tpsp_layers);
        for (int64_t l = 0; l < s->L; l++)
            tpsp_saved_create(&g->tpsp_layers[l], *s, tp->size, g->T, g->B, recompute);
        for (int64_t l = 0; l < s->L; l++) g->tpsp_layers[l].x = g->x[l];
        g->wide = g->tpsp_block.wide, g->partial = g->tpsp_block.partial,
        g->norm_scratch = g->tpsp_block.norm_scratch;
    }
}

static void free_blocks(gpt *g) {
    for (int64_t l = 0; l < g->params.shape.L; l++) {
        if (up_strategy(g))
            up_saved_free(&g->up_layers[l]);
        else
            tpsp_saved_free(&g->tpsp_layers[l]);
    }
    free(g->up_layers);
    free(g->tpsp_layers);
    if (up_strategy(g))
        up_free(&g->up_block);
    else
        tpsp_free(&g->tpsp_block);
}

static void take_memory(gpt *g) {
    int64_t L = g->params.shape.L, shard_rows = g->T * g->B / g->mesh->tp, N = g->split->size,
            rows = N * shard_rows;
    const char *shared = "activations, shared";
    g->x = table_of(L + 1, sizeof *g->x);
    for (int64_t l = 0; l <= L; l++)
        g->x[l] = take_real(shard_rows * g->params.shape.C, "activations, per layer");
    g->mean = take_precise(shard_rows, shared);
    g->rstd = take_precise(shard_rows, shared);
    g->logits = take_real(rows * g->vocabulary_rows, "logits");
    g->stats = take_precise(N * rows * 3, shared);
    g->total = take_precise(rows * 2, shared);
    g->losses = take_precise(rows, shared);
    g->dx = take_real(shard_rows * g->params.shape.C, shared);
    g->next = take_real(g->mesh->tp * g->vocabulary_rows, shared);
    g->pieces = take_real(N * COLLECT, shared);
    g->inputs = cf_alloc(g->T * g->B * (int64_t)sizeof(int32_t), shared);
    g->targets = cf_alloc(g->T * g->B * (int64_t)sizeof(int32_t), shared);
}

void gpt_create(gpt *g, cf_context *context, const cf_mesh *mesh, gpt_shape shape, parallel_strategy strategy,
                int64_t T, int64_t B, overlap o, bool recompute) {
    if (T % mesh->tp != 0)
        cf_die_together("choose --seq as a multiple of --tp", "--seq %lld does not divide over --tp %d",
                        (long long)T, mesh->tp);
    if (T > shape.maxT)
        cf_die_together("lower --seq, or start from a model with more positions",
                        "--seq %lld is longer than the model's %lld positions", (long long)T,
                        (long long)shape.maxT);
    *g = (gpt){.context = context, .mesh = mesh, .T = T, .B = B};
    params_create(&g->params, shape, mesh, strategy);
    g->split = up_strategy(g) ? &mesh->self_group : &mesh->tp_group;
    int64_t rows = params_local_rows(&g->params, WTE), first = g->split->rank * rows, valid = shape.V - first;
    g->vocabulary_rows = rows;
    g->vocabulary_first = first;
    g->vocabulary_valid = valid < 0 ? 0 : valid > rows ? rows : valid;
    take_memory(g);
    create_blocks(g, o, recompute);
    plan_operations(g, o);
}

void gpt_free(gpt *g) {
    free_blocks(g);
    for (int64_t l = 0; l <= g->params.shape.L; l++) cf_free(g->x[l]);
    free(g->x);
    void *memory[] = {g->mean, g->rstd, g->logits, g->stats, g->total, g->losses, g->dx, g->next, g->pieces};
    for (int i = 0; i < (int)(sizeof memory / sizeof *memory); i++) cf_free(memory[i]);
    cf_free(g->inputs);
    cf_free(g->targets);
    cf_fuse_free(g->gather_stats);
    cf_fuse_free(g->gather_logits);
    cf_fuse_free(g->collect);
    lookup_free(&g->embedding);
    column_free(&g->head);
    params_free(&g->params);
}

// --- embedding ---

static int64_t shard_rows(const gpt *g) {
    return g->pass_T / g->mesh->tp;
} // Ts

// Tokens of the rows that head and lookup work on: all, or those of the own shard.
static int64_t first_token(const gpt *g) {
    return (g->mesh->tp_group.rank - g->split->rank) * shard_rows(g) * g->pass_B;
}

static real *own_wide(gpt *g) {
    return g->wide + g->split->rank * shard_rows(g) * g->pass_B * g->params.shape.C;
}

static void embed(gpt *g) {
    const gpt_hooks *hooks = &g->pass.hooks;
    int64_t C = g->params.shape.C, Ts = shard_rows(g), B = g->pass_B;
    bool only_owned = g->embedding.by_rows && hooks->pending && hooks->pending(hooks->argument, table(g));
    if (!only_owned) need(g, table(g));
    lookup_forward(&g->embedding, g->inputs + first_token(g), Ts, B, only_owned, g->partial);
    if (hooks->meanwhile) hooks->meanwhile(hooks->argument);
    lookup_finish_forward(&g->embedding, g->x[0]);
    each_small(g, need);
    position_forward(g->x[0], params_weight(&g->params, WPE, 0), g->mesh->tp_group.rank * Ts, Ts, B, C,
                     g->context->stream);
}

// Does what the lookup adds up travel on to owners, as rows or with the table? Then it needs what is left to compute more
// than the lookup does.
static bool table_is_next(const gpt *g) {
    return g->pass.last && g->params.bucket[table(g)].group->size > 1;
}

static void table_backward(gpt *g) {
    lookup_finish_backward(&g->embedding);
    if (!g->embedding.by_rows) ready(g, table(g));
}

static void embed_backward(gpt *g) {
    int64_t C = g->params.shape.C, Ts = shard_rows(g), B = g->pass_B;
    lookup_backward(&g->embedding, g->dx, g->inputs + first_token(g), g->pass.last, g->partial);
    position_backward(params_grad(&g->params, WPE, 0), g->dx, g->mesh->tp_group.rank * Ts, Ts, B, C,
                      g->context->stream);
    if (table_is_next(g)) table_backward(g);
    each_small(g, ready);
}

// Behind what else there is to compute.
static void embed_backward_rest(gpt *g) {
    if (!table_is_next(g)) table_backward(g);
}

// --- head and loss ---

static void head_forward(gpt *g) {
    const parameters *p = &g->params;
    int64_t C = p->shape.C, Ts = shard_rows(g), B = g->pass_B;
    need(g, table(g));
    layernorm_forward(own_wide(g), g->mean, g->rstd, g->x[p->shape.L], params_weight(p, LNFW, 0),
                      params_weight(p, LNFB, 0), Ts * B, C, g->context->stream);
    column_forward(&g->head, g->context->stream, g->logits, NULL, g->wide, params_weight(p, WTE, 0), NULL, Ts,
                   B, -1);
}

// scale 0: no backward follows.
static void add_loss(gpt *g, double *sum, double scale) {
    int64_t own = shard_rows(g) * g->pass_B, rows = g->split->size * own, V = g->vocabulary_rows;
    int64_t first = g->vocabulary_first, valid = g->vocabulary_valid;
    const int32_t *targets = g->targets + first_token(g);
    cf_stream *stream = g->context->stream;
    if (g->split->size == 1 && scale != 0) {
        crossentropy_fused(g->losses, g->logits, targets, scale, valid, rows, V, stream);
    } else {
        crossentropy_stats(g->stats + g->split->rank * rows * 3, g->logits, targets, first, valid, rows, V,
                           stream);
        cf_fuse_run(g->gather_stats, g->stats, rows, 3, NULL, NULL, -1);
        crossentropy_combine(g->losses, g->total, g->stats, g->split->size, rows, stream);
        if (scale != 0)
            crossentropy_backward(g->logits, g->total, targets, scale, first, valid, rows, V, stream);
    }
    crossentropy_sum(sum, g->losses + g->split->rank * own, own, stream);
}

static void head_backward(gpt *g) {
    const parameters *p = &g->params;
    int64_t C = p->shape.C, Ts = shard_rows(g), B = g->pass_B, rows = g->split->size * Ts * B;
    cf_stream *stream = g->context->stream;
    matrix_gradient dw = weight_gradient_now(&g->pass, p, WTE, -1);
    const real *dnorm = column_backward(&g->head, stream, dw, g->logits, g->wide, g->partial,
                                        params_weight(p, WTE, 0), Ts, B, -1);
    cf_zero(g->dx, Ts * B * C * (int64_t)sizeof(real), stream);
    layernorm_backward(g->dx, params_grad(p, LNFW, 0), params_grad(p, LNFB, 0), dnorm, g->x[p->shape.L],
                       params_weight(p, LNFW, 0), g->mean, g->rstd, g->norm_scratch, Ts * B, C, stream);
    const real *dy[1] = {g->logits}, *x[1] = {g->wide};
    weight_gradient w = {.dy = dy, .x = x, .R = rows, .OC = g->vocabulary_rows, .IC = C, .parts = 1};
    if (!dw.at) weight_gradient_take(&g->pass, p, WTE, -1, w, stream);
    if (g->embedding.by_rows) ready(g, table(g)); // the lookup's part goes its own way
}

// --- passes ---

static void block_forward(gpt *g, int64_t l) {
    if (up_strategy(g))
        up_forward(&g->up_block, &g->up_layers[l], &g->params, (int)l, g->x[l + 1]);
    else
        tpsp_forward(&g->tpsp_block, &g->tpsp_layers[l], &g->params, (int)l, g->x[l + 1]);
}

static void block_backward(gpt *g, int64_t l) {
    if (up_strategy(g))
        up_backward(&g->up_block, &g->up_layers[l], &g->params, (int)l, g->dx);
    else
        tpsp_backward(&g->tpsp_block, &g->tpsp_layers[l], &g->params, (int)l, g->dx);
}

// What block_backward has left to do, behind the transfers of the embedding and of the layer's other buckets.
static void block_backward_rest(gpt *g, int64_t l) {
    if (up_strategy(g))
        up_backward_qkvw(&g->up_block, &g->params, (int)l);
    else
        tpsp_backward_qkvw(&g->tpsp_block, &g->tpsp_layers[l], &g->params, (int)l);
}

static void layer_backward(gpt *g, int64_t l) {
    int rest = params_own_bucket(&g->params, QKVW, l);
    cf_moment begin = trace_begin(g, "block backward");
    block_backward(g, l);
    for (int i = 0; i < table(g); i++)
        if (i != rest && g->params.bucket[i].layer == l) ready(g, i);
    if (l == 0) embed_backward(g);
    block_backward_rest(g, l);
    if (rest >= 0) ready(g, rest);
    if (l == 0) embed_backward_rest(g);
    trace_end(g, "block backward", l, begin);
}

void gpt_forward(gpt *g, const int32_t *inputs, const int32_t *targets, int64_t T, int64_t B, double scale,
                 double *loss_sum) {
    if (T < 1 || B < 1 || T > g->T || B > g->B || T % g->mesh->tp != 0)
        cf_die(NULL, "forward of %lld x %lld tokens on a model made for %lld x %lld", (long long)T,
               (long long)B, (long long)g->T, (long long)g->B);
    g->pass_T = g->tpsp_block.T = g->up_block.T = T;
    g->pass_B = g->tpsp_block.B = g->up_block.B = B;
    cf_copy(g->inputs, inputs, T * B * (int64_t)sizeof *inputs, g->context->stream);
    if (targets) cf_copy(g->targets, targets, T * B * (int64_t)sizeof *targets, g->context->stream);
    cf_moment begin = trace_begin(g, "embedding forward");
    embed(g);
    trace_end(g, "embedding forward", -1, begin);
    for (int64_t l = 0; l < g->params.shape.L; l++) {
        need_layer(g, l);
        begin = trace_begin(g, "block forward");
        block_forward(g, l);
        trace_end(g, "block forward", l, begin);
    }
    begin = trace_begin(g, "head forward");
    head_forward(g);
    if (targets) add_loss(g, loss_sum, scale);
    trace_end(g, "head forward", -1, begin);
}

void gpt_backward(gpt *g, bool first, bool last) {
    cf_moment begin = trace_begin(g, "head backward");
    g->pass.first = first, g->pass.last = last;
    head_backward(g);
    trace_end(g, "head backward", -1, begin);
    for (int64_t l = g->params.shape.L - 1; l >= 0; l--) layer_backward(g, l);
}

void gpt_next_logits(gpt *g, int64_t t, int64_t b, float *out) {
    int64_t rows = g->vocabulary_rows, V = g->params.shape.V;
    int64_t row = t * g->pass_B + b - first_token(g), all = g->split->size * shard_rows(g) * g->pass_B;
    if (row >= 0 && row < all)
        cf_copy(g->next + g->mesh->tp_group.rank * rows, g->logits + row * rows, rows * (int64_t)sizeof(real),
                g->context->stream);
    cf_fuse_run(g->gather_logits, g->next, 1, rows, NULL, NULL, -1);
    // The vocabulary's parts side by side or, with UP, the whole of it from the rank that has the position.
    const real *found = g->next + (up_strategy(g) ? t / shard_rows(g) * rows : 0);
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
        int64_t n = count - first < COLLECT ? count - first : COLLECT;
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
        if (g->mesh->tp_group.rank == 0 && !whole)
            cf_die(NULL, "out of memory for collecting %s", params_name(tensor));
        for (int64_t layer = 0; layer < params_layers(shape, tensor); layer++) {
            collect_tensor(g, params_weight(&g->params, tensor, layer), tensor, pieces, whole);
            if (whole) append(argument, whole, count);
        }
        free(whole);
    }
    free(pieces);
}

static void tpsp_operations(gpt *g, visit_operation *visit, void *argument) {
    const tpsp *t = &g->tpsp_block;
    int64_t L = g->params.shape.L;
    visit(argument, "forward", t->qkv.forward, L);
    visit(argument, "forward", t->attproj_forward, L);
    visit(argument, "forward", t->fc.forward, L);
    visit(argument, "forward", t->fcproj_forward, L);
    visit(argument, "forward", g->head.forward, 1);
    visit(argument, "forward", g->gather_stats, 1);
    visit(argument, "backward", g->head.dgrad, 1);
    visit(argument, "backward", t->fcproj_backward, L);
    visit(argument, "backward", t->fc.gather, L);
    visit(argument, "backward", t->fc.dgrad, L);
    visit(argument, "backward", t->attproj_backward, L);
    visit(argument, "backward", t->qkv.gather, L);
    visit(argument, "backward", t->qkv.dgrad, L);
}

static void up_operations(gpt *g, visit_operation *visit, void *argument) {
    int64_t L = g->params.shape.L;
    visit(argument, "forward", g->up_block.qkv_forward, L);
    visit(argument, "forward", g->up_block.att_forward, L);
    visit(argument, "backward", g->up_block.att_backward, L);
    visit(argument, "backward", g->up_block.qkv_backward, L);
}

void gpt_operations(gpt *g, visit_operation *visit, void *argument) {
    const lookup *l = &g->embedding;
    if (l->by_rows) visit(argument, "tokens of all ranks", l->ids, 1);
    if (l->by_rows) visit(argument, "rows, during an update", l->fetch, 1);
    visit(argument, "forward", l->forward, 1);
    if (up_strategy(g))
        up_operations(g, visit, argument);
    else
        tpsp_operations(g, visit, argument);
    visit(argument, "backward", l->backward, 1);
    if (l->by_rows) visit(argument, "rows of gradient, during the last weight gradient", l->deliver, 1);
}
