// One transformer block in TPSP: heads and MLP columns are split over the tp group, and between them everything is split by
// sequence. Every exchange is a fused operation of commfuse:
//
//   forward    layer norm → (all-gather ▸ QKV) → (attention ▸ projection ▸ reduce-scatter) → residual
//              → the MLP half (block.c)
//   backward   the mirror
//
// A weight gradient that is sent owner by owner (zero.h) is computed after these, from the gathered inputs; QKV's
// last of all, when the gradient of the block's input is already in flight. In layer 0 it is always last, to hide the
// embedding's transfers.
#include "attention.h"
#include "block.h"
#include "linear.h"

// Query-Split: attention of these query rows against all keys before them.
typedef struct attention_job {
    const block *b;
    const block_layer *s;
    bool first; // backward: no range has been done
} attention_job;

static void attend(void *argument, int64_t t0, int64_t n) {
    const attention_job *j = (const attention_job *)argument;
    const model_pass *pass = j->b->pass;
    const gpt_shape *shape = &pass->params->shape;
    int N = j->b->tp->size;
    attention_forward(j->s->heads, j->s->lse, j->s->qkv, t0, n, N * pass->Ts, pass->B, shape->H / N, shape->C / shape->H,
                      pass->context->stream);
}

static void attend_backward(void *argument, int64_t t0, int64_t n) {
    attention_job *j = (attention_job *)argument;
    const model_pass *pass = j->b->pass;
    const gpt_shape *shape = &pass->params->shape;
    int N = j->b->tp->size;
    attention_backward(j->b->dqkv, j->b->dheads, j->s->heads, j->s->lse, j->s->qkv, j->b->attention_scratch, t0, n, N * pass->Ts,
                       pass->B, shape->H / N, shape->C / shape->H, j->first, pass->context->stream);
    j->first = false;
}

static const real *tpsp_forward(block *b, int layer, real *norm) {
    const block_layer *s = &b->layer[layer];
    attention_job job = {.b = b, .s = s};
    column_forward(&b->qkv, layer, s->qkv, NULL, norm);
    return row_forward(&b->attproj, layer, b->sums, s->heads, attend, &job);
}

static const real *tpsp_backward(block *b, int layer, real *dx) {
    const block_layer *s = &b->layer[layer];
    attention_job attention = {.b = b, .s = s, .first = true};
    linear_job job = {.x = s->heads, .rows = attend_backward, .argument = &attention};
    row_begin_backward(&b->attproj, layer, b->dheads, dx, b->attention_dy, job);
    row_finish_backward(&b->attproj, layer);
    return column_backward(&b->qkv, layer, b->sums, b->dqkv, block_norm_buffer(b, layer, ATTENTION));
}

static void tpsp_late(block *b, int layer) {
    column_gradient(&b->qkv, layer, b->dqkv, block_norm_buffer(b, layer, ATTENTION));
}

block *tpsp_create(const model_pass *pass, const cf_mesh *mesh, int64_t T, int64_t B, overlap how, bool recompute) {
    static const block_strategy strategy = {tpsp_forward, tpsp_backward, tpsp_late, NULL};
    const cf_group *tp = &mesh->tp_group;
    const gpt_shape *shape = &pass->params->shape;
    int64_t N = tp->size, C = shape->C, shard = T * B / N * C;
    int64_t prepared = larger(linear_prepared_size(C, 3 * C / N), linear_prepared_size(C / N, C));
    block *b = block_create(sizeof *b, &strategy, pass, tp, tp, T, B, how, recompute, prepared);
    double product = 2.0 * (double)(T * B * C * C) / (double)N, attention = attention_flops(T, B, shape->H / N, C / shape->H);
    column_create(&b->qkv, pass, tp, "att.qkv", QKVW, QKVB, shard, how, true, b->prepared);
    row_create(&b->attproj, pass, tp, "att.proj", ATTPROJW, ATTPROJB, shard, how, product + attention,
               2 * product + 2.5 * attention, b->prepared);
    b->operations[ATTENTION] = block_pair(&b->qkv, &b->attproj);
    return b;
}
