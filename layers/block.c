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
#include "buffers.h"
#include "elementwise.h"
#include "layernorm.h"
#include "linear.h"
#include <stdlib.h>

static const int matrices[] = {QKVW, ATTPROJW, FCW, FCPROJW};

// Tensors of a half: layer norm, column-parallel layer, row-parallel layer.
static const struct {
    int norm_w, norm_b, w, bias, row_w, row_bias;
} of_half[HALVES] = {{LN1W, LN1B, QKVW, QKVB, ATTPROJW, ATTPROJB}, {LN2W, LN2B, FCW, FCB, FCPROJW, FCPROJB}};

// --- life ---

static void create_layer(block *b, block_layer *s, int64_t T, int64_t B, bool recompute) {
    const char *purpose = "activations, per layer";
    int64_t C = b->params->shape.C, N = b->tp->size, S = b->fc.group->size, rows = T * B, shard_rows = rows / N;
    for (int half = 0; half < HALVES; half++) {
        s->mean[half] = alloc_precise(shard_rows, purpose);
        s->rstd[half] = alloc_precise(shard_rows, purpose);
        // Several ranks gather them again in any case.
        if (!recompute && S == 1) s->norm[half] = alloc_real(shard_rows * C, purpose);
    }
    s->x2 = alloc_real(shard_rows * C, purpose);
    s->qkv = alloc_real(rows * 3 * C / N, purpose);
    s->heads = alloc_real(rows * C / N, purpose);
    s->lse = alloc_precise(rows * b->params->shape.H / N, purpose);
    s->fch = alloc_real(shard_rows * 4 * C, purpose);
    if (!recompute) s->hidden = alloc_real(shard_rows * 4 * C, purpose);
}

block_exchanges block_pair(const parallel_linear *column, const parallel_linear *row) {
    return (block_exchanges){{column->forward, row->forward}, {row->backward, column->gather, column->backward}};
}

void *block_create(size_t size, const block_strategy *strategy, cf_context *context, const cf_group *tp, const cf_group *split,
                   const parameters *p, const backward_pass *pass, int64_t T, int64_t B, overlap how, bool recompute,
                   int64_t prepared) {
    const char *shared = "activations, shared";
    int64_t C = p->shape.C, N = tp->size, S = split->size, rows = T * B, shard = rows / N * C;
    double product = 2.0 * (double)(shard * 4 * C); // of this rank's columns
    block *b = calloc(1, size);
    block_layer *layer = calloc((size_t)p->shape.L, sizeof *layer);
    if (!b || !layer) cf_die(NULL, "out of memory for %lld layers", (long long)p->shape.L);
    *b = (block){.strategy = strategy, .context = context, .tp = tp, .params = p, .pass = pass, .layer = layer};
    prepared = larger(prepared, larger(linear_prepared_size(C, 4 * C / S), linear_prepared_size(4 * C / S, C)));
    b->prepared = alloc_real(prepared, "weights, prepared");
    column_create(&b->fc, context, split, "mlp.fc1", shard, C, 4 * C / S, how, true, b->prepared);
    row_create(&b->fcproj, context, split, "mlp.fc2", shard, 4 * C / S, C, how, product, 2 * product, b->prepared);
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

static void free_layer(block_layer *s) {
    void *memory[] = {s->x2, s->qkv, s->heads, s->lse, s->groups, s->fch, s->hidden};
    for (int i = 0; i < (int)(sizeof memory / sizeof *memory); i++) cf_free(memory[i]);
    for (int half = 0; half < HALVES; half++) {
        cf_free(s->mean[half]);
        cf_free(s->rstd[half]);
        cf_free(s->norm[half]);
    }
}

void block_free(block *b) {
    b->strategy->free(b);
    parallel_linear_free(&b->fc);
    parallel_linear_free(&b->fcproj);
    void *memory[] = {b->norm1,        b->norm2 == b->norm1 ? NULL : b->norm2,
                      b->sums,         b->hidden,
                      b->dhidden,      b->dheads,
                      b->dqkv,         b->prepared,
                      b->norm_scratch, b->attention_scratch};
    for (int i = 0; i < (int)(sizeof memory / sizeof *memory); i++) cf_free(memory[i]);
    for (int64_t l = 0; l < b->params->shape.L; l++) free_layer(&b->layer[l]);
    free(b->layer);
    free(b);
}

// --- where weight gradients are computed ---

void block_place_weight_gradients(block *b) {
    for (int64_t l = 0; l < b->params->shape.L; l++)
        for (int i = 0; i < 4; i++)
            for (int last = 0; last <= 1; last++) {
                // What brings a factor of it, where that travels.
                const block_exchanges *e = &b->operations[i / 2];
                const cf_fuse *arrives = e->backward[1] ? e->backward[i % 2 == 0] : NULL;
                int64_t rows = arrives ? cf_fuse_get_plan(arrives)->capacity / b->params->shape.C : 0;
                bool may_wait = b->qkv_may_wait && matrices[i] == QKVW && l == 0;
                b->layer[l].place[matrices[i]][last] =
                    weight_gradient_place(b->pass->zero, matrices[i], l, last == 1, arrives, rows, may_wait);
            }
}

gradient_place block_gradient_place(const block *b, int tensor, int layer) {
    return b->layer[layer].place[tensor][b->pass->last];
}

void block_explain(const block *b, FILE *out) {
    fprintf(out, "Weight gradients of the last micro-batch (and of those before it) are computed\n");
    for (int i = 0; i < 4; i++)
        for (int64_t l = 0; l < b->params->shape.L; l++) {
            const gradient_place *place = b->layer[l].place[matrices[i]];
            if (l > 0 && memcmp(place, b->layer[l - 1].place[matrices[i]], 2 * sizeof *place) == 0) continue;
            fprintf(out, "  %-8s from layer %lld on: %s (%s)\n", params_name(matrices[i]), (long long)l,
                    gradient_place_name(place[1]), gradient_place_name(place[0]));
        }
}

static matrix_gradient gradient_by_slices(const block *b, int tensor, int layer) {
    if (block_gradient_place(b, tensor, layer) != GRADIENT_BY_SLICES) return (matrix_gradient){0};
    return params_matrix_grad(b->params, tensor, layer, b->pass->first);
}

void block_weight_gradient(const block *b, int tensor, int layer, const real *const *dy, const real *const *x, int64_t R,
                           int parts) {
    weight_gradient g = {.dy = dy,
                         .x = x,
                         .R = R,
                         .OC = params_local_rows(b->params, tensor) / parts,
                         .IC = params_local_columns(b->params, tensor),
                         .parts = parts};
    weight_gradient_compute(b->pass, tensor, layer, block_gradient_place(b, tensor, layer), g);
}

// arrived: the operation that has brought a factor of it. Where its slices were too thin to compute it then, the tuner is to
// see what that costs.
static void whole_gradient(const block *b, const parallel_linear *l, cf_fuse *arrived, int tensor, int layer, const real *dy,
                           const real *x) {
    block_weight_gradient(b, tensor, layer, &dy, &x, l->group->size * b->Ts * b->B, 1);
    if (block_gradient_place(b, tensor, layer) == GRADIENT_NOW) cf_fuse_include(arrived);
}

// --- layer norms and the column-parallel layers after them ---

static real *norm_buffer(const block *b, int layer, block_half half) {
    real *kept = b->layer[layer].norm[half];
    return kept ? kept : half == MLP ? b->norm2 : b->norm1;
}

static void compute_norm(block *b, int layer, block_half half, precise *mean, precise *rstd) {
    const parameters *p = b->params;
    real *norm = linear_own_shard(&b->fc, norm_buffer(b, layer, half), b->Ts, b->B, p->shape.C);
    layernorm_forward(norm, mean, rstd, b->layer[layer].x[half], params_weight(p, of_half[half].norm_w, layer),
                      params_weight(p, of_half[half].norm_b, layer), b->Ts * b->B, p->shape.C, b->context->stream);
}

real *block_norm(block *b, int layer, block_half half) {
    compute_norm(b, layer, half, b->layer[layer].mean[half], b->layer[layer].rstd[half]);
    return norm_buffer(b, layer, half);
}

real *block_norm_again(block *b, int layer, block_half half) {
    if (!b->layer[layer].norm[half]) compute_norm(b, layer, half, NULL, NULL);
    return norm_buffer(b, layer, half);
}

static void gather_norm(block *b, parallel_linear *l, int layer, block_half half, const real *dy) {
    real *norm = block_norm_again(b, layer, half);
    column_begin_gather(l, norm, dy, gradient_by_slices(b, of_half[half].w, layer), b->Ts, b->B, layer);
}

void block_norm_backward(block *b, int layer, block_half half, const real *dnorm, real *dx) {
    const parameters *p = b->params;
    const block_layer *s = &b->layer[layer];
    int norm_w = of_half[half].norm_w, norm_b = of_half[half].norm_b;
    layernorm_backward(dx, params_grad(p, norm_w, layer), params_grad(p, norm_b, layer), dnorm, s->x[half],
                       params_weight(p, norm_w, layer), s->mean[half], s->rstd[half], b->norm_scratch, b->Ts * b->B, p->shape.C,
                       b->context->stream);
}

void block_column_gradient(block *b, parallel_linear *l, int layer, block_half half, const real *dy) {
    column_finish_gather(l);
    whole_gradient(b, l, l->gather, of_half[half].w, layer, dy, norm_buffer(b, layer, half));
}

void block_column_backward(block *b, parallel_linear *l, int layer, block_half half, const real *dy, real *dx) {
    const parameters *p = b->params;
    int w = of_half[half].w;
    gradient_place place = block_gradient_place(b, w, layer);
    linear_bias_grad(params_grad(p, of_half[half].bias, layer), dy, l->group->size * b->Ts * b->B, l->OC, b->context->stream);
    column_begin_backward(l, b->sums, dy, params_weight(p, w, layer), b->Ts, b->B, layer);
    if (place == GRADIENT_BY_SLICES) column_finish_gather(l);
    if (place == GRADIENT_NOW) block_column_gradient(b, l, layer, half, dy);
    block_norm_backward(b, layer, half, column_finish_backward(l), dx);
    if (place == GRADIENT_OWNERS && half == MLP) block_column_gradient(b, l, layer, half, dy);
}

// --- passes ---

// While a rank's shard of the output's gradient is gathered, the saved input of the MLP's other layer may be, too. A single
// rank has all of it in dx, which changes only when the half is done with it.
void block_row_backward(block *b, parallel_linear *l, int layer, block_half half, real *din, real *dx, linear_job job) {
    const parameters *p = b->params;
    int64_t C = p->shape.C, rows = b->Ts * b->B;
    int w = of_half[half].row_w;
    real *dy = l->group->size == 1 ? dx : half == MLP ? b->mlp_dy : b->attention_dy;
    linear_bias_grad(params_grad(p, of_half[half].row_bias, layer), dx, rows, C, b->context->stream);
    if (dy != dx) cf_copy(linear_own_shard(l, dy, b->Ts, b->B, C), dx, rows * C * (int64_t)sizeof(real), b->context->stream);
    job.dw = gradient_by_slices(b, w, layer);
    row_begin_backward(l, din, dy, job, b->Ts, b->B, layer);
    if (half == MLP) gather_norm(b, &b->fc, layer, MLP, b->dhidden);
    row_finish_backward(l, params_weight(p, w, layer));
    if (!job.dw.at) whole_gradient(b, l, l->backward, w, layer, dy, job.x);
}

typedef struct gelu_job {
    const block *b;
    const real *fch;
} gelu_job;

static void gelu_again(void *argument, int64_t t0, int64_t n) {
    const gelu_job *j = (const gelu_job *)argument;
    int64_t row = j->b->B * j->b->fcproj.IC;
    gelu_forward(j->b->hidden + t0 * row, j->fch + t0 * row, n * row, j->b->context->stream);
}

void block_backward(block *b, int layer, real *dx) {
    const block_layer *s = &b->layer[layer];
    gelu_job again = {b, s->fch};
    linear_job job = {.x = s->hidden ? s->hidden : b->hidden,
                      .pre = s->fch,
                      .rows = s->hidden ? NULL : gelu_again,
                      .argument = &again};
    block_row_backward(b, &b->fcproj, layer, MLP, b->dhidden, dx, job);
    if (b->qkv) gather_norm(b, b->qkv, layer, ATTENTION, b->dqkv);
    block_column_backward(b, &b->fc, layer, MLP, b->dhidden, dx);
    b->strategy->backward(b, layer, dx);
}

void block_forward(block *b, int layer, const real *x, real *out, int64_t Ts, int64_t B) {
    const parameters *p = b->params;
    block_layer *s = &b->layer[layer];
    real *hidden = s->hidden ? s->hidden : b->hidden;
    b->Ts = Ts, b->B = B;
    s->x[ATTENTION] = x, s->x[MLP] = s->x2;
    b->strategy->forward(b, layer);
    real *norm = block_norm(b, layer, MLP);
    column_forward(&b->fc, s->fch, hidden, norm, params_weight(p, FCW, layer), params_weight(p, FCB, layer), Ts, B, layer);
    const real *y = row_forward(&b->fcproj, b->sums, hidden, params_weight(p, FCPROJW, layer), Ts, B, layer, NULL, NULL);
    residual_forward(out, s->x2, y, params_weight(p, FCPROJB, layer), Ts * B, p->shape.C, b->context->stream);
}

void block_backward_late(block *b, int layer) {
    gradient_place place = block_gradient_place(b, QKVW, layer);
    if (place == GRADIENT_LATER || place == GRADIENT_OWNERS) b->strategy->late(b, layer);
}

void block_operations(const block *b, bool forward, visit_operation *visit, void *argument) {
    for (int i = 0; i < HALVES; i++)
        for (int k = 0; k < 3; k++) {
            cf_fuse *f = forward ? b->operations[i].forward[k] : b->operations[HALVES - 1 - i].backward[k];
            if (f) visit(argument, forward ? "forward" : "backward", f, b->params->shape.L);
        }
}
