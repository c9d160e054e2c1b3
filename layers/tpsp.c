// One transformer block in TPSP: heads and MLP columns are split over the tp group, and between them everything is split by
// sequence. Every exchange is a fused operation of commfuse:
//
//   forward    layer norm → (all-gather ▸ QKV) → (attention ▸ projection ▸ reduce-scatter) → residual
//              → the MLP half (block.c)
//   backward   the mirror
//
// A weight gradient that is sent owner by owner (weight_gradient.h) is computed after these, from the gathered inputs; QKV's
// last of all, when the gradient of the block's input is already in flight. In layer 0 it is always last, to hide the
// embedding's transfers.
#include "attention.h"
#include "block.h"
#include "buffers.h"
#include "elementwise.h"
#include "linear.h"

typedef struct tpsp {
    block b;
    parallel_linear qkv, attproj;
} tpsp;

// Query-Split: attention of these query rows against all keys before them.
typedef struct attention_job {
    const block *b;
    const block_layer *s;
    bool first; // backward: no range has been done
} attention_job;

static void attend(void *argument, int64_t t0, int64_t n) {
    const attention_job *j = (const attention_job *)argument;
    const gpt_shape *shape = &j->b->params->shape;
    int N = j->b->tp->size;
    attention_forward(j->s->heads, j->s->lse, j->s->qkv, t0, n, N * j->b->Ts, j->b->B, shape->H / N, shape->C / shape->H,
                      j->b->context->stream);
}

static void attend_backward(void *argument, int64_t t0, int64_t n) {
    attention_job *j = (attention_job *)argument;
    const gpt_shape *shape = &j->b->params->shape;
    int N = j->b->tp->size;
    attention_backward(j->b->dqkv, j->b->dheads, j->s->heads, j->s->lse, j->s->qkv, j->b->attention_scratch, t0, n, N * j->b->Ts,
                       j->b->B, shape->H / N, shape->C / shape->H, j->first, j->b->context->stream);
    j->first = false;
}

static void tpsp_forward(block *b, int layer) {
    tpsp *t = (tpsp *)b;
    const parameters *p = b->params;
    const block_layer *s = &b->layer[layer];
    attention_job job = {.b = b, .s = s};
    real *norm = block_norm(b, layer, ATTENTION);
    column_forward(&t->qkv, s->qkv, NULL, norm, params_weight(p, QKVW, layer), params_weight(p, QKVB, layer), b->Ts, b->B, layer);
    const real *y =
        row_forward(&t->attproj, b->sums, s->heads, params_weight(p, ATTPROJW, layer), b->Ts, b->B, layer, attend, &job);
    residual_forward(s->x2, s->x[ATTENTION], y, params_weight(p, ATTPROJB, layer), b->Ts * b->B, p->shape.C, b->context->stream);
}

static void tpsp_backward(block *b, int layer, real *dx) {
    tpsp *t = (tpsp *)b;
    const block_layer *s = &b->layer[layer];
    attention_job attention = {.b = b, .s = s, .first = true};
    linear_job job = {.x = s->heads, .rows = attend_backward, .argument = &attention};
    block_row_backward(b, &t->attproj, layer, ATTENTION, b->dheads, dx, job);
    block_column_backward(b, &t->qkv, layer, ATTENTION, b->dqkv, dx);
}

static void tpsp_late(block *b, int layer) {
    block_column_gradient(b, b->qkv, layer, ATTENTION, b->dqkv);
}

static void tpsp_free(block *b) {
    parallel_linear_free(&((tpsp *)b)->qkv);
    parallel_linear_free(&((tpsp *)b)->attproj);
}

block *tpsp_create(cf_context *context, const cf_mesh *mesh, const parameters *p, const backward_pass *pass, int64_t T, int64_t B,
                   overlap how, bool recompute) {
    static const block_strategy strategy = {tpsp_forward, tpsp_backward, tpsp_late, tpsp_free};
    const cf_group *tp = &mesh->tp_group;
    int64_t N = tp->size, C = p->shape.C, shard = T * B / N * C;
    int64_t prepared = larger(linear_prepared_size(C, 3 * C / N), linear_prepared_size(C / N, C));
    tpsp *t = (tpsp *)block_create(sizeof *t, &strategy, context, tp, tp, p, pass, T, B, how, recompute, prepared);
    double product = 2.0 * (double)(T * B * C * C) / (double)N, attention = attention_flops(T, B, p->shape.H / N, C / p->shape.H);
    column_create(&t->qkv, context, tp, "att.qkv", shard, C, 3 * C / N, how, true, t->b.prepared);
    row_create(&t->attproj, context, tp, "att.proj", shard, C / N, C, how, product + attention, 2 * product + 2.5 * attention,
               t->b.prepared);
    t->b.qkv = &t->qkv, t->b.qkv_may_wait = true;
    t->b.operations[ATTENTION] = block_pair(&t->qkv, &t->attproj);
    return &t->b;
}
