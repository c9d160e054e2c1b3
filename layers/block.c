// See block.h. The MLP half in both strategies, and what the attention halves have in common.
//
//   forward    layer norm → (all-gather ▸ fc1, GELU) → (fc2 ▸ reduce-scatter) → residual
//   backward   the mirror: (all-gather of dY ▸ dgrad, wgrad per slice) for the row-parallel layer, and (dgrad ▸
//              reduce-scatter) with the all-gather of the saved input during it, wgrad as its slices arrive, for the
//              column-parallel one
//
// In UP one rank holds the whole MLP and nothing travels. Layer norms, biases of row-parallel layers and residuals work on
// this rank's shard, between the operations; their weight gradients are partial sums that the optimizer adds up over the tp
// group.
//
// The gather of a saved input waits for nothing that backward computes. It is posted one operation ahead, where there is
// spare computation: fc1's during fc2's backward, QKV's during fc1's, since QKV's can hide no more than its sums.
//
// Layer-norm outputs and GELU may be computed again in backward: they cost little next to the products they feed and would
// take more than a third of the activation memory. Where they are kept, by each layer, the scratch of all is not used.
#include "block.h"
#include "../commfuse/die.h"
#include "attention.h"
#include "elementwise.h"
#include "layernorm.h"
#include "linear.h"
#include <stdlib.h>

static const int norm_w[HALVES] = {LN1W, LN2W}, norm_b[HALVES] = {LN1B, LN2B};

// --- life ---

static void create_layer(block *b, block_layer *s, int64_t T, int64_t B, bool recompute) {
    const char *purpose = "activations, per layer";
    const gpt_shape *shape = &b->pass->params->shape;
    int64_t C = shape->C, N = b->tp->size, S = b->fc.group->size, rows = T * B, shard_rows = rows / N;
    for (int half = 0; half < HALVES; half++) {
        s->mean[half] = alloc_precise(shard_rows, purpose);
        s->rstd[half] = alloc_precise(shard_rows, purpose);
        // Several ranks gather them again in any case.
        if (!recompute && S == 1) s->norm[half] = alloc_real(shard_rows * C, purpose);
    }
    s->x2 = alloc_real(shard_rows * C, purpose);
    s->qkv = alloc_real(rows * 3 * C / N, purpose);
    s->heads = alloc_real(rows * C / N, purpose);
    s->lse = alloc_precise(rows * shape->H / N, purpose);
    s->fch = alloc_real(shard_rows * 4 * C, purpose);
    if (!recompute) s->hidden = alloc_real(shard_rows * 4 * C, purpose);
}

block_exchanges block_pair(const parallel_linear *column, const parallel_linear *row) {
    return (block_exchanges){{column->forward, row->forward}, {row->backward, column->gather, column->backward}};
}

void *block_create(size_t size, const block_strategy *strategy, const model_pass *pass, const cf_group *tp, const cf_group *split,
                   int64_t T, int64_t B, overlap how, bool recompute, int64_t prepared) {
    const parameters *p = pass->params;
    const char *shared = "activations, shared";
    int64_t C = p->shape.C, N = tp->size, S = split->size, rows = T * B, shard = rows / N * C;
    double product = 2.0 * (double)(shard * 4 * C); // of this rank's columns
    block *b = calloc(1, size);
    block_layer *layer = calloc((size_t)p->shape.L, sizeof *layer);
    if (!b || !layer) cf_die(NULL, "out of memory for %lld layers", (long long)p->shape.L);
    *b = (block){.strategy = strategy, .pass = pass, .tp = tp, .layer = layer};
    prepared = larger(prepared, larger(linear_prepared_size(C, 4 * C / S), linear_prepared_size(4 * C / S, C)));
    b->prepared = alloc_real(prepared, "weights, prepared");
    column_create(&b->fc, pass, split, "mlp.fc1", FCW, FCB, shard, how, true, b->prepared);
    row_create(&b->fcproj, pass, split, "mlp.fc2", FCPROJW, FCPROJB, shard, how, product, 2 * product, b->prepared);
    b->operations[MLP] = block_pair(&b->fc, &b->fcproj);
    b->norm1 = alloc_real(S * shard, shared);
    b->norm2 = S == 1 && N > 1 ? b->norm1 : alloc_real(S * shard, shared); // where no gather is begun ahead
    b->sums = alloc_real(S * shard, shared);
    if (recompute) b->hidden = alloc_real(shard * 4, shared);
    b->dhidden = alloc_real(shard * 4, shared);
    b->dheads = alloc_real(rows * C / N, shared);
    b->dqkv = alloc_real(rows * 3 * C / N, shared);
    b->norm_scratch = alloc_precise(layernorm_scratch(C), shared);
    b->attention_scratch = alloc_precise(attention_scratch(T, B, p->shape.H / N, C / p->shape.H), shared);
    for (int64_t l = 0; l < p->shape.L; l++) create_layer(b, &layer[l], T, B, recompute);
    return b;
}

void block_free(block *b) {
    if (b->strategy->free) b->strategy->free(b);
    parallel_linear *linear[] = {&b->qkv, &b->attproj, &b->fc, &b->fcproj};
    for (int i = 0; i < 4; i++) parallel_linear_free(linear[i]);
    void *shared[] = {b->norm1,        b->norm2 == b->norm1 ? NULL : b->norm2,
                      b->sums,         b->hidden,
                      b->dhidden,      b->dheads,
                      b->dqkv,         b->prepared,
                      b->norm_scratch, b->attention_scratch};
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++) cf_free(shared[i]);
    for (int64_t l = 0; l < b->pass->params->shape.L; l++) {
        const block_layer *s = &b->layer[l];
        void *memory[] = {s->mean[0], s->mean[1], s->rstd[0], s->rstd[1], s->norm[0], s->norm[1], s->x2,
                          s->qkv,     s->heads,   s->lse,     s->groups,  s->fch,     s->hidden};
        for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) cf_free(memory[i]);
    }
    free(b->layer);
    free(b);
}

void block_place_weight_gradients(const block *b) {
    linear_place_gradients(&b->fc, false);
    linear_place_gradients(&b->fcproj, false);
    if (b->qkv.forward) linear_place_gradients(&b->qkv, true);
    if (b->attproj.forward) linear_place_gradients(&b->attproj, false);
}

void block_operations(const block *b, bool forward, visit_operation *visit, void *argument) {
    for (int i = 0; i < HALVES; i++)
        for (int k = 0; k < 3; k++) {
            cf_fuse *f = forward ? b->operations[i].forward[k] : b->operations[HALVES - 1 - i].backward[k];
            if (f) visit(argument, forward ? "forward" : "backward", f, b->pass->params->shape.L);
        }
}

// --- layer norms ---

real *block_norm_buffer(const block *b, int layer, block_half half) {
    real *kept = b->layer[layer].norm[half];
    return kept ? kept : half == MLP ? b->norm2 : b->norm1;
}

static real *compute_norm(block *b, int layer, block_half half, precise *mean, precise *rstd) {
    const model_pass *pass = b->pass;
    const parameters *p = pass->params;
    real *norm = block_norm_buffer(b, layer, half);
    layernorm_forward(linear_own_shard(&b->fc, norm, p->shape.C), mean, rstd, b->layer[layer].x[half],
                      params_weight(p, norm_w[half], layer), params_weight(p, norm_b[half], layer), pass->Ts * pass->B, p->shape.C,
                      pass->context->stream);
    return norm;
}

real *block_norm_again(block *b, int layer, block_half half) {
    return b->layer[layer].norm[half] ? b->layer[layer].norm[half] : compute_norm(b, layer, half, NULL, NULL);
}

// dx (Ts, B, C) += its gradient through a half's layer norm.
static void norm_backward(block *b, int layer, block_half half, const real *dnorm, real *dx) {
    const model_pass *pass = b->pass;
    const parameters *p = pass->params;
    const block_layer *s = &b->layer[layer];
    layernorm_backward(dx, params_grad(p, norm_w[half], layer), params_grad(p, norm_b[half], layer), dnorm, s->x[half],
                       params_weight(p, norm_w[half], layer), s->mean[half], s->rstd[half], b->norm_scratch, pass->Ts * pass->B,
                       p->shape.C, pass->context->stream);
}

// --- passes ---

void block_forward(block *b, int layer, const real *x, real *out) {
    const model_pass *pass = b->pass;
    const parameters *p = pass->params;
    block_layer *s = &b->layer[layer];
    real *hidden = s->hidden ? s->hidden : b->hidden;
    s->x[ATTENTION] = x, s->x[MLP] = s->x2;
    real *norm = compute_norm(b, layer, ATTENTION, s->mean[ATTENTION], s->rstd[ATTENTION]);
    const real *y = b->strategy->forward(b, layer, norm);
    residual_forward(s->x2, x, y, params_weight(p, ATTPROJB, layer), pass->Ts * pass->B, p->shape.C, pass->context->stream);
    column_forward(&b->fc, layer, s->fch, hidden, compute_norm(b, layer, MLP, s->mean[MLP], s->rstd[MLP]));
    y = row_forward(&b->fcproj, layer, b->sums, hidden, NULL, NULL);
    residual_forward(out, s->x2, y, params_weight(p, FCPROJB, layer), pass->Ts * pass->B, p->shape.C, pass->context->stream);
}

typedef struct gelu_job {
    const block *b;
    const real *fch;
} gelu_job;

static void gelu_again(void *argument, int64_t t0, int64_t n) {
    const gelu_job *j = (const gelu_job *)argument;
    int64_t row = j->b->pass->B * j->b->fcproj.IC;
    gelu_forward(j->b->hidden + t0 * row, j->fch + t0 * row, n * row, j->b->pass->context->stream);
}

// While a rank's shard of the output's gradient is gathered, the saved inputs of both column-parallel layers are, too.
void block_backward(block *b, int layer, real *dx) {
    const block_layer *s = &b->layer[layer];
    gelu_job again = {b, s->fch};
    linear_job job = {.x = s->hidden ? s->hidden : b->hidden,
                      .pre = s->fch,
                      .rows = s->hidden ? NULL : gelu_again,
                      .argument = &again};
    row_begin_backward(&b->fcproj, layer, b->dhidden, dx, b->mlp_dy, job);
    real *norm = block_norm_again(b, layer, MLP);
    column_begin_gather(&b->fc, layer, norm, b->dhidden);
    row_finish_backward(&b->fcproj, layer);
    if (b->qkv.gather) column_begin_gather(&b->qkv, layer, block_norm_again(b, layer, ATTENTION), b->dqkv);
    norm_backward(b, layer, MLP, column_backward(&b->fc, layer, b->sums, b->dhidden, norm), dx);
    if (column_owes_gradient(&b->fc, layer)) column_gradient(&b->fc, layer, b->dhidden, norm);
    norm_backward(b, layer, ATTENTION, b->strategy->backward(b, layer, dx), dx);
}

void block_backward_late(block *b, int layer) {
    gradient_place place = zero_place(b->pass->zero, QKVW, layer, b->pass->last);
    if (place == GRADIENT_LATER || place == GRADIENT_OWNERS) b->strategy->late(b, layer);
}
