// See model.h. Order of things in a step, for one replica:
//
//   forward    (lookup ▸ reduce-scatter) + positions → L blocks → layer norm → (all-gather ▸ head)
//              → three numbers per token gathered over tp → loss
//   backward   logits turn into their gradient → (dgrad ▸ reduce-scatter) with wgrad behind it, on the input
//              that forward has gathered → layer norm → L blocks → (all-gather ▸ scatter-add), positions
//
// The model announces through its hooks when it needs a bucket of parameters and when a bucket's gradient is
// complete; who moves buckets, and when, is the optimizer's affair.
#include "model.h"
#include "../commfuse/die.h"
#include "crossentropy.h"
#include "embedding.h"
#include "layernorm.h"
#include <stdlib.h>

static void need(gpt *g, int number) {
    if (g->hooks.need) g->hooks.need(g->hooks.argument, number);
}

static void ready(gpt *g, int number, bool last) {
    if (last && g->hooks.ready) g->hooks.ready(g->hooks.argument, number);
}

// Buckets come in pairs, split and whole; the embeddings' pair is the last.
static int pair(const gpt *g, int64_t layer) {
    return 2 * (int)(layer < 0 ? g->params.shape.L : layer);
}

static void need_pair(gpt *g, int64_t layer) {
    need(g, pair(g, layer));
    need(g, pair(g, layer) + 1);
}

static void ready_pair(gpt *g, int64_t layer, bool last) {
    ready(g, pair(g, layer), last);
    ready(g, pair(g, layer) + 1, last);
}

// In a timeline the parts of a pass enclose their operations; what is between those is work on the own shard.
static void trace(gpt *g, const char *name, int64_t layer, double begin_ms) {
    cf_trace_add(g->context->trace, CF_TRACE_COMPUTE, name, (int)layer, -1, -1, 0, begin_ms, cf_now_ms());
}

// --- life ---

static real *take(int64_t elements, const char *purpose) {
    return cf_alloc(elements * (int64_t)sizeof(real), purpose);
}

static void plan_operations(gpt *g, overlap o) {
    const cf_group *tp = &g->mesh->tp_group;
    int64_t shard = g->T / tp->size * g->B * g->params.shape.C;
    cf_fuse_plan plan = {.group = tp,
                         .mode = o.mode,
                         .route = o.route,
                         .slices = o.slices,
                         .dtype = REAL_DTYPE,
                         .capacity = shard};
    plan.name = "embedding", plan.operation = CF_REDUCE_SCATTER, plan.side = CF_COMPUTE_BEFORE;
    g->lookup = cf_fuse_create(g->context, plan);
    plan.operation = CF_ALLGATHER, plan.side = CF_COMPUTE_AFTER;
    g->scatter = cf_fuse_create(g->context, plan);
    plan.side = CF_NO_COMPUTE;
    plan.name = "loss", plan.capacity = g->T * g->B * 3;
    g->gather_stats = cf_fuse_create(g->context, plan);
    plan.name = "sample", plan.capacity = g->vocabulary_rows;
    g->gather_logits = cf_fuse_create(g->context, plan);
    plan.name = "save", plan.capacity = COLLECT;
    g->collect = cf_fuse_create(g->context, plan);
    column_create(&g->head, g->context, tp, "head", shard, o, false);
}

static void take_memory(gpt *g) {
    int64_t L = g->params.shape.L, rows = g->T * g->B, N = g->mesh->tp, shard_rows = rows / N;
    const char *shared = "activations, shared";
    g->saved = calloc((size_t)L, sizeof *g->saved);
    g->x = calloc((size_t)L + 1, sizeof *g->x);
    if (!g->saved || !g->x) cf_die(NULL, "out of memory for %lld layers", (long long)L);
    for (int64_t l = 0; l < L; l++) tpsp_saved_create(&g->saved[l], g->params.shape, (int)N, g->T, g->B);
    for (int64_t l = 0; l <= L; l++) g->x[l] = take(shard_rows * g->params.shape.C, "activations, per layer");
    for (int64_t l = 0; l < L; l++) g->saved[l].x = g->x[l];
    g->mean = take(shard_rows, shared);
    g->rstd = take(shard_rows, shared);
    g->logits = take(rows * g->vocabulary_rows, "logits");
    g->stats = take(N * rows * 3, shared);
    g->total = take(rows * 2, shared);
    g->losses = take(rows, shared);
    g->dx = take(shard_rows * g->params.shape.C, shared);
    g->next = take(N * g->vocabulary_rows, shared);
    g->pieces = take(N * COLLECT, shared);
    g->inputs = cf_alloc(rows * (int64_t)sizeof(int32_t), shared);
    g->targets = cf_alloc(rows * (int64_t)sizeof(int32_t), shared);
}

void gpt_create(gpt *g, cf_context *context, const cf_mesh *mesh, gpt_shape shape, int64_t T, int64_t B,
                overlap o) {
    if (T % mesh->tp != 0)
        cf_die_together("choose --seq as a multiple of --tp", "--seq %lld does not divide over --tp %d",
                        (long long)T, mesh->tp);
    if (T > shape.maxT)
        cf_die_together("lower --seq, or start from a model with more positions",
                        "--seq %lld is longer than the model's %lld positions", (long long)T,
                        (long long)shape.maxT);
    *g = (gpt){.context = context, .mesh = mesh, .T = T, .B = B};
    params_create(&g->params, shape, mesh);
    int64_t rows = (shape.Vp + mesh->tp - 1) / mesh->tp, first = mesh->tp_group.rank * rows,
            valid = shape.V - first;
    g->vocabulary_rows = rows;
    g->vocabulary_first = first;
    g->vocabulary_valid = valid < 0 ? 0 : valid > rows ? rows : valid;
    tpsp_create(&g->block, context, &mesh->tp_group, shape, T, B, o);
    take_memory(g);
    plan_operations(g, o);
}

void gpt_free(gpt *g) {
    for (int64_t l = 0; l < g->params.shape.L; l++) tpsp_saved_free(&g->saved[l]);
    for (int64_t l = 0; l <= g->params.shape.L; l++) cf_free(g->x[l]);
    free(g->saved);
    free(g->x);
    real *memory[] = {g->mean, g->rstd, g->logits, g->stats, g->total, g->losses, g->dx, g->next, g->pieces};
    for (int i = 0; i < 9; i++) cf_free(memory[i]);
    cf_free(g->inputs);
    cf_free(g->targets);
    cf_fuse *operations[] = {g->lookup, g->scatter, g->gather_stats, g->gather_logits, g->collect};
    for (int i = 0; i < 5; i++) cf_fuse_free(operations[i]);
    column_free(&g->head);
    tpsp_free(&g->block);
    params_free(&g->params);
}

// --- embedding ---

static void lookup_slice(void *argument, const cf_span *span, cf_stream *stream) {
    gpt *g = (gpt *)argument;
    for (int i = 0; i < span->blocks; i++) {
        int64_t row = (span->row + i * span->row_stride) * g->pass_B;
        embedding_forward((real *)(span->data + i * span->data_stride), g->inputs + row,
                          params_weight(&g->params, WTE, 0), g->vocabulary_first, g->vocabulary_rows,
                          span->rows * g->pass_B, g->params.shape.C, stream);
    }
}

static void scatter_slice(void *argument, const cf_span *span, cf_stream *stream) {
    gpt *g = (gpt *)argument;
    for (int i = 0; i < span->blocks; i++) {
        int64_t row = (span->row + i * span->row_stride) * g->pass_B;
        embedding_backward(params_grad(&g->params, WTE, 0),
                           (const real *)(span->data + i * span->data_stride), g->inputs + row,
                           g->vocabulary_first, g->vocabulary_rows, span->rows * g->pass_B, g->params.shape.C,
                           stream);
    }
}

static int64_t shard_rows(const gpt *g) {
    return g->pass_T / g->mesh->tp;
} // Ts

static real *own_wide(gpt *g) {
    return g->block.wide + g->mesh->tp_group.rank * shard_rows(g) * g->pass_B * g->params.shape.C;
}

static void embed(gpt *g) {
    int64_t C = g->params.shape.C, Ts = shard_rows(g), B = g->pass_B;
    need_pair(g, -1);
    const real *mine = cf_fuse_run(g->lookup, g->block.partial, Ts, B * C, lookup_slice, g, -1);
    cf_copy(g->x[0], mine, Ts * B * C * (int64_t)sizeof(real), g->context->stream);
    position_forward(g->x[0], params_weight(&g->params, WPE, 0), g->mesh->tp_group.rank * Ts, Ts, B, C,
                     g->context->stream);
}

static void embed_backward(gpt *g) {
    int64_t C = g->params.shape.C, Ts = shard_rows(g), B = g->pass_B;
    position_backward(params_grad(&g->params, WPE, 0), g->dx, g->mesh->tp_group.rank * Ts, Ts, B, C,
                      g->context->stream);
    cf_copy(own_wide(g), g->dx, Ts * B * C * (int64_t)sizeof(real), g->context->stream);
    cf_fuse_run(g->scatter, g->block.wide, Ts, B * C, scatter_slice, g, -1);
}

// --- head and loss ---

static void head_forward(gpt *g) {
    const parameters *p = &g->params;
    int64_t C = p->shape.C, Ts = shard_rows(g), B = g->pass_B;
    layernorm_forward(own_wide(g), g->mean, g->rstd, g->x[p->shape.L], params_weight(p, LNFW, 0),
                      params_weight(p, LNFB, 0), Ts * B, C, g->context->stream);
    column_forward(&g->head, g->logits, g->block.wide, params_weight(p, WTE, 0), NULL, Ts, B, C,
                   g->vocabulary_rows, -1);
}

static double loss(gpt *g) {
    int64_t rows = g->pass_T * g->pass_B;
    cf_stream *stream = g->context->stream;
    crossentropy_stats(g->stats + g->mesh->tp_group.rank * rows * 3, g->logits, g->targets,
                       g->vocabulary_first, g->vocabulary_valid, rows, g->vocabulary_rows, stream);
    cf_fuse_run(g->gather_stats, g->stats, rows, 3, NULL, NULL, -1);
    crossentropy_combine(g->losses, g->total, g->stats, g->mesh->tp, rows, stream);
    return crossentropy_sum(g->losses, rows, stream);
}

static void head_backward(gpt *g, double scale) {
    const parameters *p = &g->params;
    int64_t C = p->shape.C, Ts = shard_rows(g), B = g->pass_B, rows = g->pass_T * B;
    cf_stream *stream = g->context->stream;
    crossentropy_backward(g->logits, g->total, g->targets, (real)scale, g->vocabulary_first,
                          g->vocabulary_valid, rows, g->vocabulary_rows, stream);
    const real *dnorm =
        column_backward(&g->head, params_grad(p, WTE, 0), g->logits, g->block.wide, g->block.partial,
                        params_weight(p, WTE, 0), Ts, B, C, g->vocabulary_rows, -1);
    cf_zero(g->dx, Ts * B * C * (int64_t)sizeof(real), stream);
    layernorm_backward(g->dx, params_grad(p, LNFW, 0), params_grad(p, LNFB, 0), dnorm, g->x[p->shape.L],
                       params_weight(p, LNFW, 0), g->mean, g->rstd, g->block.norm_scratch, Ts * B, C, stream);
}

// --- passes ---

double gpt_forward(gpt *g, const int32_t *inputs, const int32_t *targets, int64_t T, int64_t B) {
    if (T < 1 || B < 1 || T > g->T || B > g->B || T % g->mesh->tp != 0)
        cf_die(NULL, "forward of %lld x %lld tokens on a model made for %lld x %lld", (long long)T,
               (long long)B, (long long)g->T, (long long)g->B);
    g->pass_T = g->block.T = T;
    g->pass_B = g->block.B = B;
    cf_copy(g->inputs, inputs, T * B * (int64_t)sizeof *inputs, g->context->stream);
    if (targets) cf_copy(g->targets, targets, T * B * (int64_t)sizeof *targets, g->context->stream);
    double begin = cf_now_ms();
    embed(g);
    trace(g, "embedding forward", -1, begin);
    for (int64_t l = 0; l < g->params.shape.L; l++) {
        need_pair(g, l);
        begin = cf_now_ms();
        tpsp_forward(&g->block, &g->saved[l], &g->params, (int)l, g->x[l + 1]);
        trace(g, "block forward", l, begin);
    }
    begin = cf_now_ms();
    head_forward(g);
    double sum = targets ? loss(g) : 0;
    trace(g, "head forward", -1, begin);
    return sum;
}

void gpt_backward(gpt *g, double scale, bool last) {
    double begin = cf_now_ms();
    head_backward(g, scale);
    trace(g, "head backward", -1, begin);
    for (int64_t l = g->params.shape.L - 1; l >= 0; l--) {
        begin = cf_now_ms();
        tpsp_backward(&g->block, &g->saved[l], &g->params, (int)l, g->dx);
        trace(g, "block backward", l, begin);
        ready_pair(g, l, last);
    }
    begin = cf_now_ms();
    embed_backward(g);
    trace(g, "embedding backward", -1, begin);
    ready_pair(g, -1, last);
}

void gpt_next_logits(gpt *g, int64_t t, int64_t b, float *out) {
    int64_t rows = g->vocabulary_rows, V = g->params.shape.V;
    cf_copy(g->next + g->mesh->tp_group.rank * rows, g->logits + (t * g->pass_B + b) * rows,
            rows * (int64_t)sizeof(real), g->context->stream);
    cf_fuse_run(g->gather_logits, g->next, 1, rows, NULL, NULL, -1);
    cf_stream_sync(g->context->stream);
    for (int64_t v = 0; v < V; v++) out[v] = (float)g->next[v];
}

static void collect_tensor(gpt *g, const real *local, int tensor, float *whole) {
    int64_t count = params_local_count(&g->params, tensor);
    for (int64_t first = 0; first < count; first += COLLECT) {
        int64_t n = count - first < COLLECT ? count - first : COLLECT;
        cf_copy(g->pieces + g->mesh->tp_group.rank * n, local + first, n * (int64_t)sizeof(real),
                g->context->stream);
        cf_fuse_run(g->collect, g->pieces, n, 1, NULL, NULL, -1);
        cf_stream_sync(g->context->stream);
        for (int rank = 0; whole && rank < g->mesh->tp; rank++)
            params_place(&g->params, tensor, rank, first, n, g->pieces + rank * n, whole);
    }
}

void gpt_collect(gpt *g, const real *values,
                 void (*append)(void *argument, const float *values, int64_t count), void *argument) {
    const gpt_shape *shape = &g->params.shape;
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        int64_t count = params_rows(shape, tensor) * params_columns(shape, tensor);
        float *whole = g->mesh->tp_group.rank == 0 ? calloc((size_t)count, sizeof *whole) : NULL;
        if (g->mesh->tp_group.rank == 0 && !whole)
            cf_die(NULL, "out of memory for collecting %s", params_name(tensor));
        for (int64_t layer = 0; layer < params_layers(shape, tensor); layer++) {
            const real *local = values + (params_weight(&g->params, tensor, layer) - g->params.weight);
            collect_tensor(g, local, tensor, whole);
            if (whole) append(argument, whole, count);
        }
        free(whole);
    }
}

void gpt_operations(gpt *g, void (*visit)(void *argument, const char *place, const cf_fuse *fuse),
                    void *argument) {
    visit(argument, "forward", g->lookup);
    visit(argument, "forward", g->block.qkv.forward);
    visit(argument, "forward", g->block.attproj_forward);
    visit(argument, "forward", g->block.fc.forward);
    visit(argument, "forward", g->block.fcproj_forward);
    visit(argument, "forward", g->head.forward);
    visit(argument, "forward", g->gather_stats);
    visit(argument, "backward", g->head.dgrad);
    visit(argument, "backward", g->block.fcproj_backward);
    visit(argument, "backward", g->block.fc.gather);
    visit(argument, "backward", g->block.fc.dgrad);
    visit(argument, "backward", g->block.attproj_backward);
    visit(argument, "backward", g->block.qkv.gather);
    visit(argument, "backward", g->block.qkv.dgrad);
    visit(argument, "backward", g->scatter);
}
