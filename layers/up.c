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
#include "buffers.h"
#include "elementwise.h"
#include "linear.h"
#include <stdlib.h>

typedef struct up {
    block b;
    cf_fuse *qkv_forward, *att_forward, *att_backward, *qkv_backward;
    real *qkv_out;        // (N, Ts, B, 3 Cl) by destination; in backward the memory of dqkv
    real *dheads_out;     // (N, Ts, B, Cl) by destination
    real *dqkv_groups;    // (N, Ts, B, 3 Cl) arrived, by head group
    const real **ready;   // [N] prepared weights of QKV or projection, head group by head group
    const real **dy, **x; // [N] head group by head group, for the weight gradients
} up;

typedef struct job job;
// Rows [first, first + rows) of shard number `shard`, at data.
typedef void work_on_shard(job *j, int64_t shard, int64_t first, int64_t rows, real *data);
// Attention of rows from time step t0 on; data: where step 0 would be.
typedef void work_on_time(job *j, int64_t t0, int64_t rows, real *data);

// One operation.
struct job {
    up *u;
    const block_layer *s;
    work_on_shard *linear; // on this side of the all-to-all, with head groups of `width` channels
    work_on_time *attend;  // on the other side
    cf_side side;
    int64_t width;
    const real *in;   // (Ts, B, C) what the linear layer reads, or NULL
    const real *bias; // of QKV
    bool first;       // attention backward: no range has been done
    int64_t N, own, Ts, B, C, Cl, Hl, D;
    cf_stream *stream;
};

static job make_job(up *u, int layer, cf_side side, int64_t width, work_on_shard *linear, work_on_time *attend) {
    const block *b = &u->b;
    const gpt_shape *shape = &b->params->shape;
    int64_t N = b->tp->size;
    return (job){.u = u,
                 .s = &b->layer[layer],
                 .linear = linear,
                 .attend = attend,
                 .side = side,
                 .width = width,
                 .first = true,
                 .N = N,
                 .own = b->tp->rank,
                 .Ts = b->Ts,
                 .B = b->B,
                 .C = shape->C,
                 .Cl = shape->C / N,
                 .Hl = shape->H / N,
                 .D = shape->C / shape->H,
                 .stream = b->context->stream};
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
    for (int64_t i = 0; i < j->N && span->side == j->side; i++)
        for (int k = 0; k < span->blocks; k++) {
            int64_t shard = (j->own + i) % j->N, row = span->row + k * span->row_stride;
            int64_t begin = larger(row, shard * j->Ts), end = smaller(row + span->rows, (shard + 1) * j->Ts);
            real *data = (real *)(span->data + k * span->data_stride); // of `row`
            if (begin < end) j->linear(j, shard, begin - shard * j->Ts, end - begin, data + (begin - row) * row_elements);
        }
}

// --- forward ---

// Weights (OC, IC) of each head group for products group by group: QKV (N, 3Cl, C), projection (N, C, Cl).
static void prepare_groups(up *u, linear_prepare *prepare, const real *w, int64_t IC, int64_t OC) {
    int64_t size = linear_prepared_size(IC, OC);
    for (int64_t i = 0; i < u->b.tp->size; i++)
        u->ready[i] = prepare(u->b.prepared + i * size, w + i * IC * OC, IC, OC, u->b.context->stream);
}

// The queries, keys and values of one head group for some rows of this rank's shard.
static void qkv(job *j, int64_t group, int64_t first, int64_t rows, real *out) {
    linear_forward(out, j->in + first * j->B * j->C, j->u->ready[group], j->bias + group * 3 * j->Cl, rows * j->B, j->C, 3 * j->Cl,
                   j->stream);
}

static void attend(job *j, int64_t t0, int64_t rows, real *out) {
    attention_forward(out, j->s->lse, j->s->qkv, t0, rows, j->N * j->Ts, j->B, j->Hl, j->D, j->stream);
}

// Out-projection of one head group, added to those before: this rank's group starts the sum.
static void project(job *j, int64_t group, int64_t first, int64_t rows, real *heads) {
    real *y = j->u->b.sums + first * j->B * j->C;
    const real *w = j->u->ready[group];
    if (group == j->own)
        linear_forward(y, heads, w, NULL, rows * j->B, j->Cl, j->C, j->stream);
    else
        linear_forward_add(y, heads, w, rows * j->B, j->Cl, j->C, j->stream);
}

static void up_forward(block *b, int layer) {
    up *u = (up *)b;
    const parameters *p = b->params;
    const block_layer *s = &b->layer[layer];
    cf_stream *stream = b->context->stream;
    int64_t C = p->shape.C, Cl = C / b->tp->size, own = b->tp->rank * b->Ts * b->B * Cl;
    job j = make_job(u, layer, CF_COMPUTE_BEFORE, 3 * Cl, qkv, NULL);
    j.bias = params_weight(p, QKVB, layer);
    j.in = block_norm(b, layer, ATTENTION);
    prepare_groups(u, linear_prepare_forward, params_weight(p, QKVW, layer), C, 3 * Cl);
    cf_fuse_result(u->qkv_forward, s->qkv);
    cf_fuse_run(u->qkv_forward, u->qkv_out, b->Ts, b->B * 3 * Cl, work, &j, layer);
    j = make_job(u, layer, CF_COMPUTE_AFTER, Cl, project, attend);
    cf_fuse_result(u->att_forward, s->groups);
    cf_fuse_begin(u->att_forward, s->heads, b->Ts, b->B * Cl, work, &j, layer);
    // During the last transfers:
    prepare_groups(u, linear_prepare_forward, params_weight(p, ATTPROJW, layer), Cl, C);
    cf_fuse_finish(u->att_forward);
    // In commfuse this rank's rows are computed among the arrivals; backward looks for them here.
    cf_copy(s->heads + own, s->groups + own, b->Ts * b->B * Cl * (int64_t)sizeof(real), stream);
    residual_forward(s->x2, s->x[ATTENTION], b->sums, params_weight(p, ATTPROJB, layer), b->Ts * b->B, C, stream);
}

// --- backward ---

// The gradient of one head group's output for some rows of this rank's shard.
static void projection_dgrad(job *j, int64_t group, int64_t first, int64_t rows, real *dheads) {
    linear_dgrad(dheads, j->in + first * j->B * j->C, j->u->ready[group], rows * j->B, j->Cl, j->C, j->stream);
}

static void attend_backward(job *j, int64_t t0, int64_t rows, real *dheads) {
    const block *b = &j->u->b;
    attention_backward(b->dqkv, dheads, j->s->heads, j->s->lse, j->s->qkv, b->attention_scratch, t0, rows, j->N * j->Ts, j->B,
                       j->Hl, j->D, j->first, j->stream);
    j->first = false;
}

// Gradient of the layer norm's output from one head group, added to those before; this rank's group starts it.
static void qkv_dgrad(job *j, int64_t group, int64_t first, int64_t rows, real *dqkv) {
    real *dnorm = j->u->b.sums + first * j->B * j->C;
    const real *w = j->u->ready[group];
    if (group == j->own)
        linear_dgrad(dnorm, dqkv, w, rows * j->B, j->C, 3 * j->Cl, j->stream);
    else
        linear_dgrad_add(dnorm, dqkv, w, rows * j->B, j->C, 3 * j->Cl, j->stream);
    j->u->dy[group] = dqkv - first * j->B * 3 * j->Cl; // the group's shard, for the weight gradient
}

static void up_late(block *b, int layer) {
    up *u = (up *)b;
    block_weight_gradient(b, QKVW, layer, u->dy, u->x, b->Ts * b->B, b->tp->size);
}

static void up_backward(block *b, int layer, real *dx) {
    up *u = (up *)b;
    const parameters *p = b->params;
    int64_t N = b->tp->size, C = p->shape.C, Cl = C / N, rows = b->Ts * b->B;
    job j = make_job(u, layer, CF_COMPUTE_BEFORE, Cl, projection_dgrad, attend_backward);
    j.in = dx;
    prepare_groups(u, linear_prepare_dgrad, params_weight(p, ATTPROJW, layer), Cl, C);
    linear_bias_grad(params_grad(p, ATTPROJB, layer), dx, rows, C, j.stream);
    cf_fuse_result(u->att_backward, b->dheads);
    cf_fuse_begin(u->att_backward, u->dheads_out, b->Ts, b->B * Cl, work, &j, layer);
    for (int64_t i = 0; i < N; i++) u->dy[i] = dx, u->x[i] = j.s->groups + i * rows * Cl;
    block_weight_gradient(b, ATTPROJW, layer, u->dy, u->x, rows, (int)N); // during the all-to-all
    cf_fuse_finish(u->att_backward);

    j = make_job(u, layer, CF_COMPUTE_AFTER, 3 * Cl, qkv_dgrad, NULL);
    cf_fuse_result(u->qkv_backward, u->dqkv_groups);
    cf_fuse_begin(u->qkv_backward, b->dqkv, b->Ts, b->B * 3 * Cl, work, &j, layer);
    const real *norm = block_norm_again(b, layer, ATTENTION);
    prepare_groups(u, linear_prepare_dgrad, params_weight(p, QKVW, layer), C, 3 * Cl);
    cf_fuse_finish(u->qkv_backward);
    for (int64_t i = 0; i < N; i++) {
        u->x[i] = norm;
        linear_bias_grad(params_grad(p, QKVB, layer) + i * 3 * Cl, u->dy[i], rows, 3 * Cl, j.stream);
    }
    if (block_gradient_place(b, QKVW, layer) == GRADIENT_NOW) up_late(b, layer);
    block_norm_backward(b, layer, ATTENTION, b->sums, dx);
}

// --- life ---

static void up_free(block *b) {
    up *u = (up *)b;
    cf_fuse *operations[] = {u->qkv_forward, u->att_forward, u->att_backward, u->qkv_backward};
    for (int i = 0; i < 4; i++) cf_fuse_free(operations[i]);
    cf_free(u->dheads_out);
    cf_free(u->dqkv_groups);
    free(u->ready);
    free(u->dy);
    free(u->x);
}

static cf_fuse *plan_alltoall(const up *u, const char *name, cf_side side, int64_t capacity, double flops, overlap how) {
    cf_fuse_plan plan = overlap_plan(how, name, u->b.tp, CF_ALLTOALL, side, REAL_DTYPE, capacity);
    plan.flops = flops, plan.result_given = true;
    return cf_fuse_create(u->b.context, plan);
}

static const real **pointers(int64_t count) {
    const real **array = calloc((size_t)count, sizeof *array);
    if (!array) cf_die(NULL, "out of memory for %lld head groups", (long long)count);
    return array;
}

block *up_create(cf_context *context, const cf_mesh *mesh, const parameters *p, const backward_pass *pass, int64_t T, int64_t B,
                 overlap how, bool recompute) {
    static const block_strategy strategy = {up_forward, up_backward, up_late, up_free};
    int64_t N = mesh->tp, C = p->shape.C, Cl = C / N, shard_rows = T * B / N;
    int64_t prepared = N * larger(linear_prepared_size(C, 3 * Cl), linear_prepared_size(Cl, C));
    up *u = (up *)block_create(sizeof *u, &strategy, context, &mesh->tp_group, &mesh->self_group, p, pass, T, B, how, recompute,
                               prepared);
    double product = 2.0 * (double)(shard_rows * C * C), attention = attention_flops(T, B, p->shape.H / N, C / p->shape.H);
    u->qkv_forward = plan_alltoall(u, "att.qkv", CF_COMPUTE_BEFORE, shard_rows * 3 * Cl, 3 * product, how);
    u->att_forward = plan_alltoall(u, "att", CF_COMPUTE_BOTH, shard_rows * Cl, product + attention, how);
    u->att_backward = plan_alltoall(u, "att", CF_COMPUTE_BOTH, shard_rows * Cl, product + 2.5 * attention, how);
    u->qkv_backward = plan_alltoall(u, "att.qkv", CF_COMPUTE_AFTER, shard_rows * 3 * Cl, 3 * product, how);
    u->b.operations[ATTENTION] = (block_exchanges){{u->qkv_forward, u->att_forward}, {u->att_backward, NULL, u->qkv_backward}};
    u->qkv_out = u->b.dqkv;
    u->dheads_out = alloc_real(N * shard_rows * Cl, "activations, shared");
    u->dqkv_groups = alloc_real(N * shard_rows * 3 * Cl, "activations, shared");
    for (int64_t l = 0; l < p->shape.L; l++) u->b.layer[l].groups = alloc_real(N * shard_rows * Cl, "activations, per layer");
    u->ready = pointers(N), u->dy = pointers(N), u->x = pointers(N);
    return &u->b;
}
