// One transformer block in UP (Ulysses parallelism): activations stay sharded by sequence, weights are whole on every rank,
// and attention is sharded by heads, with an all-to-all before and after it. Each is a fused operation of commfuse
// (arXiv 2604.24013, Algorithm 5):
//
//   forward    layer norm → (QKV per destination's heads, its own last ▸ all-to-all)
//              → (attention per query slice, its own last ▸ all-to-all to the slice's owner ▸ out-projection
//                 accumulating per head group, its own first) → residual
//              → the MLP half (block.c): nothing travels
//   backward   the mirror: (projection dgrad per destination's heads, its own last ▸ all-to-all ▸ attention
//              backward per query slice, its own first), hidden by the projection's wgrad,
//              (all-to-all ▸ QKV dgrad accumulating per head group, its own first)
//
// N = tp ranks, Ts = T / N, Hl = H / N heads of D channels and Cl = C / N channels per head group. QKV and projection
// weights are stored head group by head group (params.h).
//
// A slice of an all-to-all is a range of time steps of one rank's shard with the channels of one head group. On the side of
// attention slices differ in their time steps, which are side by side; on the side of the linear layers in their head
// group, and each group is a product of its own, accumulated where groups meet (work() cuts a span that covers
// several). A group's product is narrower than the whole layer's by the number of ranks: the price of sending and receiving
// without packing, paid by every mode alike.
#include "../commfuse/die.h"
#include "attention.h"
#include "block.h"
#include "linear.h"
#include <stdlib.h>

typedef struct up {
    block b;
    int64_t N, own, C, Cl, Hl, D; // own: this rank
    cf_fuse *qkv_forward, *att_forward, *att_backward, *qkv_backward;
    real *qkv_out;                 // (N, Ts, B, 3 Cl) by destination; in backward the memory of dqkv
    real *dheads_out;              // (N, Ts, B, Cl) by destination
    real *dqkv_groups;             // (N, Ts, B, 3 Cl) arrived, by head group
    const real **ready, **dy, **x; // [N] head group by head group: prepared weights; factors of weight gradients
} up;

// One operation.
typedef struct job job;
struct job {
    up *u;
    const block_layer *s;
    // On this side of the all-to-all, with head groups of `width` channels: rows [first, first + rows) of a shard, at data.
    cf_side side;
    void (*linear)(job *j, int64_t shard, int64_t first, int64_t rows, real *data);
    int64_t width;
    // On the other side: attention of rows from time step t0 on; data: where step 0 would be.
    void (*attend)(job *j, int64_t t0, int64_t rows, real *data);
    const real *in;   // (Ts, B, C) what the linear layer reads, or NULL
    const real *bias; // of QKV
    bool continues;   // attention backward: a range has been done
    int64_t Ts, B;
    cf_stream *stream;
};

static job make_job(block *b, int layer, job j) {
    j.u = (up *)b, j.s = &b->layer[layer], j.Ts = b->pass->Ts, j.B = b->pass->B, j.stream = b->pass->context->stream;
    return j;
}

// The linear layer works on pieces of the span that are of one shard, this rank's first.
static void work(void *argument, const cf_span *span, cf_stream *stream) {
    job *j = (job *)argument;
    const int64_t row_elements = j->B * j->width;
    (void)stream;
    for (int k = 0; k < span->blocks && span->side != j->side; k++) {
        int64_t t0 = span->row + k * span->row_stride;
        j->attend(j, t0, span->rows, (real *)(span->data + k * span->data_stride) - t0 * row_elements);
    }
    for (int64_t i = 0; i < j->u->N && span->side == j->side; i++)
        for (int k = 0; k < span->blocks; k++) {
            int64_t shard = (j->u->own + i) % j->u->N, row = span->row + k * span->row_stride;
            int64_t begin = larger(row, shard * j->Ts), end = smaller(row + span->rows, (shard + 1) * j->Ts);
            real *data = (real *)(span->data + k * span->data_stride); // of `row`
            if (begin < end) j->linear(j, shard, begin - shard * j->Ts, end - begin, data + (begin - row) * row_elements);
        }
}

// --- forward ---

// Weights (OC, IC) of each head group for products group by group: QKV (N, 3Cl, C), projection (N, C, Cl).
static void prepare_groups(up *u, linear_prepare *prepare, const real *w, int64_t IC, int64_t OC) {
    int64_t size = linear_prepared_size(IC, OC);
    for (int64_t i = 0; i < u->N; i++)
        u->ready[i] = prepare(u->b.prepared + i * size, w + i * IC * OC, IC, OC, u->b.pass->context->stream);
}

// The queries, keys and values of one head group for some rows of this rank's shard.
static void qkv(job *j, int64_t group, int64_t first, int64_t rows, real *out) {
    linear_forward(out, j->in + first * j->B * j->u->C, j->u->ready[group], j->bias + group * 3 * j->u->Cl, rows * j->B, j->u->C,
                   3 * j->u->Cl, j->stream);
}

static void attend(job *j, int64_t t0, int64_t rows, real *out) {
    attention_forward(out, j->s->lse, j->s->qkv, t0, rows, j->u->N * j->Ts, j->B, j->u->Hl, j->u->D, j->stream);
}

// Out-projection of one head group, added to those before: this rank's group starts the sum.
static void project(job *j, int64_t group, int64_t first, int64_t rows, real *heads) {
    real *y = j->u->b.sums + first * j->B * j->u->C;
    const real *w = j->u->ready[group];
    if (group == j->u->own)
        linear_forward(y, heads, w, NULL, rows * j->B, j->u->Cl, j->u->C, j->stream);
    else
        linear_forward_add(y, heads, w, rows * j->B, j->u->Cl, j->u->C, j->stream);
}

static const real *up_forward(block *b, int layer, real *norm) {
    up *u = (up *)b;
    const model_pass *pass = b->pass;
    const block_layer *s = &b->layer[layer];
    int64_t C = u->C, Cl = u->Cl, rows = pass->Ts * pass->B, own = u->own * rows * Cl;
    job j = make_job(b, layer, (job){.side = CF_COMPUTE_BEFORE, .linear = qkv, .width = 3 * Cl});
    j.bias = params_weight(pass->params, QKVB, layer);
    j.in = norm;
    prepare_groups(u, linear_prepare_forward, params_weight(pass->params, QKVW, layer), C, 3 * Cl);
    cf_fuse_result(u->qkv_forward, s->qkv);
    cf_fuse_run(u->qkv_forward, u->qkv_out, pass->Ts, pass->B * 3 * Cl, work, &j, layer);
    j = make_job(b, layer, (job){.side = CF_COMPUTE_AFTER, .linear = project, .width = Cl, .attend = attend});
    cf_fuse_result(u->att_forward, s->groups);
    cf_fuse_begin(u->att_forward, s->heads, pass->Ts, pass->B * Cl, work, &j, layer);
    // During the last transfers:
    prepare_groups(u, linear_prepare_forward, params_weight(pass->params, ATTPROJW, layer), Cl, C);
    cf_fuse_finish(u->att_forward);
    // In commfuse this rank's rows are computed among the arrivals; backward looks for them here.
    cf_copy(s->heads + own, s->groups + own, rows * Cl * (int64_t)sizeof(real), j.stream);
    return b->sums;
}

// --- backward ---

// The gradient of one head group's output for some rows of this rank's shard.
static void projection_dgrad(job *j, int64_t group, int64_t first, int64_t rows, real *dheads) {
    linear_dgrad(dheads, j->in + first * j->B * j->u->C, j->u->ready[group], rows * j->B, j->u->Cl, j->u->C, j->stream);
}

static void attend_backward(job *j, int64_t t0, int64_t rows, real *dheads) {
    const block *b = &j->u->b;
    attention_backward(b->dqkv, dheads, j->s->heads, j->s->lse, j->s->qkv, b->attention_scratch, t0, rows, j->u->N * j->Ts, j->B,
                       j->u->Hl, j->u->D, !j->continues, j->stream);
    j->continues = true;
}

// Gradient of the layer norm's output from one head group, added to those before; this rank's group starts it.
static void qkv_dgrad(job *j, int64_t group, int64_t first, int64_t rows, real *dqkv) {
    real *dnorm = j->u->b.sums + first * j->B * j->u->C;
    const real *w = j->u->ready[group];
    if (group == j->u->own)
        linear_dgrad(dnorm, dqkv, w, rows * j->B, j->u->C, 3 * j->u->Cl, j->stream);
    else
        linear_dgrad_add(dnorm, dqkv, w, rows * j->B, j->u->C, 3 * j->u->Cl, j->stream);
    j->u->dy[group] = dqkv - first * j->B * 3 * j->u->Cl; // the group's shard, for the weight gradient
}

static void up_late(block *b, int layer) {
    up *u = (up *)b;
    weight_gradient g = {.dy = u->dy, .x = u->x, .R = b->pass->Ts * b->pass->B, .parts = (int)u->N};
    weight_gradient_compute(b->pass, QKVW, layer, g);
}

static const real *up_backward(block *b, int layer, real *dx) {
    up *u = (up *)b;
    const model_pass *pass = b->pass;
    const parameters *p = pass->params;
    int64_t N = u->N, C = u->C, Cl = u->Cl, rows = pass->Ts * pass->B;
    job j =
        make_job(b, layer,
                 (job){.side = CF_COMPUTE_BEFORE, .linear = projection_dgrad, .width = Cl, .attend = attend_backward, .in = dx});
    prepare_groups(u, linear_prepare_dgrad, params_weight(p, ATTPROJW, layer), Cl, C);
    linear_bias_grad(params_grad(p, ATTPROJB, layer), dx, rows, C, j.stream);
    cf_fuse_result(u->att_backward, b->dheads);
    cf_fuse_begin(u->att_backward, u->dheads_out, pass->Ts, pass->B * Cl, work, &j, layer);
    for (int64_t i = 0; i < N; i++) u->dy[i] = dx, u->x[i] = j.s->groups + i * rows * Cl;
    weight_gradient g = {.dy = u->dy, .x = u->x, .R = rows, .parts = (int)N};
    weight_gradient_compute(pass, ATTPROJW, layer, g); // during the all-to-all
    cf_fuse_finish(u->att_backward);

    j = make_job(b, layer, (job){.side = CF_COMPUTE_AFTER, .linear = qkv_dgrad, .width = 3 * Cl});
    cf_fuse_result(u->qkv_backward, u->dqkv_groups);
    cf_fuse_begin(u->qkv_backward, b->dqkv, pass->Ts, pass->B * 3 * Cl, work, &j, layer);
    const real *norm = block_norm_again(b, layer, ATTENTION);
    prepare_groups(u, linear_prepare_dgrad, params_weight(p, QKVW, layer), C, 3 * Cl);
    cf_fuse_finish(u->qkv_backward);
    for (int64_t i = 0; i < N; i++) {
        u->x[i] = norm;
        linear_bias_grad(params_grad(p, QKVB, layer) + i * 3 * Cl, u->dy[i], rows, 3 * Cl, j.stream);
    }
    if (zero_place(pass->zero, QKVW, layer, pass->last) == GRADIENT_NOW) up_late(b, layer);
    return b->sums;
}

// --- life ---

static void up_free(block *b) {
    up *u = (up *)b;
    cf_fuse *operations[] = {u->qkv_forward, u->att_forward, u->att_backward, u->qkv_backward};
    for (int i = 0; i < 4; i++) cf_fuse_free(operations[i]);
    cf_free(u->dheads_out);
    cf_free(u->dqkv_groups);
    free(u->ready);
}

static cf_fuse *plan_alltoall(const up *u, const char *name, cf_side side, int64_t capacity, double flops, overlap how) {
    cf_fuse_plan plan = overlap_plan(how, name, u->b.tp, CF_ALLTOALL, side, REAL_DTYPE, capacity);
    plan.flops = flops, plan.result_given = true;
    return cf_fuse_create(u->b.pass->context, plan);
}

block *up_create(const model_pass *pass, const cf_mesh *mesh, int64_t T, int64_t B, overlap how, bool recompute) {
    static const block_strategy strategy = {up_forward, up_backward, up_late, up_free};
    const gpt_shape *shape = &pass->params->shape;
    int64_t N = mesh->tp, C = shape->C, Cl = C / N, shard_rows = T * B / N;
    int64_t prepared = N * larger(linear_prepared_size(C, 3 * Cl), linear_prepared_size(Cl, C));
    up *u = (up *)block_create(sizeof *u, &strategy, pass, &mesh->tp_group, &mesh->self_group, T, B, how, recompute, prepared);
    u->N = N, u->own = mesh->tp_group.rank, u->C = C, u->Cl = Cl, u->Hl = shape->H / N, u->D = C / shape->H;
    double product = 2.0 * (double)(shard_rows * C * C), attention = attention_flops(T, B, u->Hl, u->D);
    u->qkv_forward = plan_alltoall(u, "att.qkv", CF_COMPUTE_BEFORE, shard_rows * 3 * Cl, 3 * product, how);
    u->att_forward = plan_alltoall(u, "att", CF_COMPUTE_BOTH, shard_rows * Cl, product + attention, how);
    u->att_backward = plan_alltoall(u, "att", CF_COMPUTE_BOTH, shard_rows * Cl, product + 2.5 * attention, how);
    u->qkv_backward = plan_alltoall(u, "att.qkv", CF_COMPUTE_AFTER, shard_rows * 3 * Cl, 3 * product, how);
    u->b.operations[ATTENTION] = (block_exchanges){{u->qkv_forward, u->att_forward}, {u->att_backward, NULL, u->qkv_backward}};
    u->qkv_out = u->b.dqkv;
    u->dheads_out = alloc_real(N * shard_rows * Cl, "activations, shared");
    u->dqkv_groups = alloc_real(N * shard_rows * 3 * Cl, "activations, shared");
    for (int64_t l = 0; l < shape->L; l++) u->b.layer[l].groups = alloc_real(N * shard_rows * Cl, "activations, per layer");
    u->ready = calloc((size_t)(3 * N), sizeof *u->ready);
    if (!u->ready) cf_die(NULL, "out of memory for %lld head groups", (long long)N);
    u->dy = u->ready + N, u->x = u->dy + N;
    return &u->b;
}
