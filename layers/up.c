// The transformer block in UP (see up.h for the order of operations). A slice of an all-to-all is a range of
// time steps of one rank's shard with the channels of one head group. On the side of attention, slices are
// told apart by their time steps, which lie side by side; on the side of the linear layers by their head
// group, and each group is a product of its own, accumulated where groups meet (own_first() cuts a span that
// covers several). A group's product is narrower than the whole layer's by the number of ranks: the price of
// sending and receiving without packing, paid by every mode alike.
#include "up.h"
#include "../commfuse/die.h"
#include "attention.h"
#include "buffers.h"
#include "elementwise.h"
#include "layernorm.h"
#include "linear.h"
#include "weight_gradient.h"
#include <stdlib.h>

typedef struct job {
    up *u;
    up_saved *s;
    const parameters *p;
    int layer;
    real *norm; // (Ts, B, C) output of the layer norm
    const real *bias;
    const real *dx; // (Ts, B, C)
    bool first;     // attention backward: no range has been done
    int64_t N, own, Ts, B, C, Cl, Hl, D;
} job;

static job make_job(up *u, up_saved *s, const parameters *p, int layer) {
    int64_t N = u->group->size;
    return (job){.u = u,
                 .s = s,
                 .p = p,
                 .layer = layer,
                 .first = true,
                 .N = N,
                 .own = u->group->rank,
                 .Ts = u->T / N,
                 .B = u->B,
                 .C = p->shape.C,
                 .Cl = p->shape.C / N,
                 .Hl = p->shape.H / N,
                 .D = p->shape.C / p->shape.H};
}

// --- planning ---

static cf_fuse *plan_alltoall(up *u, const char *name, cf_side side, int64_t capacity, double flops,
                              overlap o) {
    return cf_fuse_create(u->context, (cf_fuse_plan){.name = name,
                                                     .group = u->group,
                                                     .operation = CF_ALLTOALL,
                                                     .side = side,
                                                     .mode = o.mode,
                                                     .route = o.route,
                                                     .slices = o.slices,
                                                     .dtype = REAL_DTYPE,
                                                     .capacity = capacity,
                                                     .flops = flops,
                                                     .result_given = true});
}

static const real **pointers(int64_t count) {
    const real **array = calloc((size_t)count, sizeof *array);
    if (!array) cf_die(NULL, "out of memory for %lld head groups", (long long)count);
    return array;
}

// Of QKV's and the projection's head groups and the MLP's matrices.
static int64_t largest_prepared(int64_t C, int64_t N) {
    int64_t sizes[] = {N * linear_prepared_size(C, 3 * C / N), N * linear_prepared_size(C / N, C),
                       linear_prepared_size(C, 4 * C), linear_prepared_size(4 * C, C)};
    int64_t most = 0;
    for (int i = 0; i < 4; i++) most = sizes[i] > most ? sizes[i] : most;
    return most;
}

void up_create(up *u, cf_context *context, const cf_group *group, const backward_pass *pass, gpt_shape shape,
               int64_t T, int64_t B, overlap o, bool recompute) {
    const char *shared = "activations, shared";
    int64_t N = group->size, C = shape.C, rows = T * B, shard_rows = rows / N, Cl = C / N;
    double product = 2.0 * (double)(shard_rows * C * C),
           attention = attention_flops(T, B, shape.H / N, C / shape.H);
    *u = (up){.context = context, .group = group, .pass = pass, .T = T, .B = B};
    u->qkv_forward = plan_alltoall(u, "att.qkv", CF_COMPUTE_BEFORE, shard_rows * 3 * Cl, 3 * product, o);
    u->att_forward = plan_alltoall(u, "att", CF_COMPUTE_BOTH, shard_rows * Cl, product + attention, o);
    u->att_backward = plan_alltoall(u, "att", CF_COMPUTE_BOTH, shard_rows * Cl, product + 2.5 * attention, o);
    u->qkv_backward = plan_alltoall(u, "att.qkv", CF_COMPUTE_AFTER, shard_rows * 3 * Cl, 3 * product, o);
    u->norm = take_real(shard_rows * C, shared);
    u->dnorm = take_real(shard_rows * C, shared);
    u->y = take_real(shard_rows * C, shared);
    u->qkv_out = take_real(rows * 3 * Cl, shared);
    u->dheads_out = take_real(rows * Cl, shared);
    u->dheads = take_real(rows * Cl, shared);
    u->dqkv = take_real(rows * 3 * Cl, shared);
    if (recompute) u->hidden = take_real(shard_rows * 4 * C, shared);
    u->dhidden = take_real(shard_rows * 4 * C, shared);
    u->prepared = take_real(largest_prepared(C, N), "weights, prepared");
    u->ready = pointers(N);
    u->dy = pointers(N);
    u->x = pointers(N);
    u->norm_scratch = take_precise(layernorm_scratch(C), shared);
    u->attention_scratch = take_precise(attention_scratch(T, B, shape.H / N, C / shape.H), shared);
}

void up_free(up *u) {
    cf_fuse *operations[] = {u->qkv_forward, u->att_forward, u->att_backward, u->qkv_backward};
    for (int i = 0; i < 4; i++) cf_fuse_free(operations[i]);
    void *memory[] = {u->norm, u->dnorm,  u->y,       u->qkv_out,  u->dheads_out,   u->dheads,
                      u->dqkv, u->hidden, u->dhidden, u->prepared, u->norm_scratch, u->attention_scratch};
    for (int i = 0; i < (int)(sizeof memory / sizeof *memory); i++) cf_free(memory[i]);
    free(u->ready);
    free(u->dy);
    free(u->x);
}

void up_saved_create(up_saved *s, gpt_shape shape, int tp, int64_t T, int64_t B, bool recompute) {
    const char *purpose = "activations, per layer";
    int64_t C = shape.C, rows = T * B, shard_rows = rows / tp;
    s->mean1 = take_precise(shard_rows, purpose);
    s->rstd1 = take_precise(shard_rows, purpose);
    s->qkv = take_real(rows * 3 * C / tp, purpose);
    s->heads = take_real(rows * C / tp, purpose);
    s->lse = take_precise(rows * shape.H / tp, purpose);
    s->groups = take_real(rows * C / tp, purpose);
    s->x2 = take_real(shard_rows * C, purpose);
    s->mean2 = take_precise(shard_rows, purpose);
    s->rstd2 = take_precise(shard_rows, purpose);
    s->fch = take_real(shard_rows * 4 * C, purpose);
    if (recompute) return;
    s->hidden = take_real(shard_rows * 4 * C, purpose);
    s->norm1 = take_real(shard_rows * C, purpose);
    s->norm2 = take_real(shard_rows * C, purpose);
}

void up_saved_free(up_saved *s) {
    void *memory[] = {s->mean1, s->rstd1, s->qkv, s->heads,  s->lse,   s->groups, s->x2,
                      s->mean2, s->rstd2, s->fch, s->hidden, s->norm1, s->norm2};
    for (int i = 0; i < (int)(sizeof memory / sizeof *memory); i++) cf_free(memory[i]);
}

// --- pieces of a span ---

// Rows [first, first + rows) of shard number `shard`, at data.
typedef void work_on(job *j, int64_t shard, int64_t first, int64_t rows, real *data);

static int64_t min(int64_t a, int64_t b) {
    return a < b ? a : b;
}
static int64_t max(int64_t a, int64_t b) {
    return a > b ? a : b;
}

// Calls work for each piece of the span that lies in one shard, those of the own shard first.
static void own_first(job *j, const cf_span *span, int64_t row_elements, work_on *work) {
    for (int64_t i = 0; i < j->N; i++)
        for (int block = 0; block < span->blocks; block++) {
            int64_t shard = (j->own + i) % j->N, row = span->row + block * span->row_stride;
            int64_t begin = max(row, shard * j->Ts), end = min(row + span->rows, (shard + 1) * j->Ts);
            real *data = (real *)(span->data + block * span->data_stride);
            if (begin < end)
                work(j, shard, begin - shard * j->Ts, end - begin, data + (begin - row) * row_elements);
        }
}

// --- forward ---

// Weights (OC, IC) of each head group for products group by group: QKV (N, 3Cl, C), projection (N, C, Cl).
static void prepare_groups(up *u, linear_prepare *prepare, const real *w, int64_t IC, int64_t OC) {
    int64_t size = linear_prepared_size(IC, OC);
    for (int64_t i = 0; i < u->group->size; i++)
        u->ready[i] = prepare(u->prepared + i * size, w + i * IC * OC, IC, OC, u->context->stream);
}

// The queries, keys and values of one head group for some rows of the own shard.
static void qkv_piece(job *j, int64_t group, int64_t first, int64_t rows, real *out) {
    linear_forward(out, j->norm + first * j->B * j->C, j->u->ready[group], j->bias + group * 3 * j->Cl,
                   rows * j->B, j->C, 3 * j->Cl, j->u->context->stream);
}

static void qkv_slice(void *argument, const cf_span *span, cf_stream *stream) {
    (void)stream;
    own_first((job *)argument, span, 3 * ((job *)argument)->B * ((job *)argument)->Cl, qkv_piece);
}

// Out-projection of one head group, added to those before: the own group starts the sum.
static void projection_piece(job *j, int64_t group, int64_t first, int64_t rows, real *heads) {
    real *y = j->u->y + first * j->B * j->C;
    const real *w = j->u->ready[group];
    if (group == j->own)
        linear_forward(y, heads, w, NULL, rows * j->B, j->Cl, j->C, j->u->context->stream);
    else
        linear_forward_add(y, heads, w, rows * j->B, j->Cl, j->C, j->u->context->stream);
}

static void attention_slice(void *argument, const cf_span *span, cf_stream *stream) {
    job *j = (job *)argument;
    if (span->side == CF_COMPUTE_AFTER) {
        own_first(j, span, j->B * j->Cl, projection_piece);
        return;
    }
    for (int i = 0; i < span->blocks; i++) {
        int64_t t0 = span->row + i * span->row_stride;
        real *out = (real *)(span->data + i * span->data_stride) - t0 * j->B * j->Cl; // time step 0
        attention_forward(out, j->s->lse, j->s->qkv, t0, span->rows, j->N * j->Ts, j->B, j->Hl, j->D, stream);
    }
}

static void attention_half_forward(up *u, up_saved *s, const parameters *p, int layer) {
    cf_stream *stream = u->context->stream;
    job j = make_job(u, s, p, layer);
    prepare_groups(u, linear_prepare_forward, params_weight(p, QKVW, layer), j.C, 3 * j.Cl);
    j.bias = params_weight(p, QKVB, layer);
    j.norm = kept(s->norm1, u->norm);
    layernorm_forward(j.norm, s->mean1, s->rstd1, s->x, params_weight(p, LN1W, layer),
                      params_weight(p, LN1B, layer), j.Ts * j.B, j.C, stream);
    cf_fuse_result(u->qkv_forward, s->qkv);
    cf_fuse_run(u->qkv_forward, u->qkv_out, j.Ts, j.B * 3 * j.Cl, qkv_slice, &j, layer);
    cf_fuse_result(u->att_forward, s->groups);
    cf_fuse_begin(u->att_forward, s->heads, j.Ts, j.B * j.Cl, attention_slice, &j, layer);
    // behind the last transfers
    prepare_groups(u, linear_prepare_forward, params_weight(p, ATTPROJW, layer), j.Cl, j.C);
    cf_fuse_finish(u->att_forward);
    // In commfuse the own rows are computed among the arrivals; backward looks for them here.
    int64_t own = j.own * j.Ts * j.B * j.Cl;
    cf_copy(s->heads + own, s->groups + own, j.Ts * j.B * j.Cl * (int64_t)sizeof(real), stream);
    residual_forward(s->x2, s->x, u->y, params_weight(p, ATTPROJB, layer), j.Ts * j.B, j.C, stream);
}

void up_forward(up *u, up_saved *s, const parameters *p, int layer, real *out) {
    cf_stream *stream = u->context->stream;
    int64_t C = p->shape.C, rows = u->T / u->group->size * u->B;
    real *norm = kept(s->norm2, u->norm), *hidden = kept(s->hidden, u->hidden);
    attention_half_forward(u, s, p, layer);
    layernorm_forward(norm, s->mean2, s->rstd2, s->x2, params_weight(p, LN2W, layer),
                      params_weight(p, LN2B, layer), rows, C, stream);
    const real *w = linear_prepare_forward(u->prepared, params_weight(p, FCW, layer), C, 4 * C, stream);
    linear_forward_gelu(hidden, s->fch, norm, w, params_weight(p, FCB, layer), rows, C, 4 * C, stream);
    w = linear_prepare_forward(u->prepared, params_weight(p, FCPROJW, layer), 4 * C, C, stream);
    linear_forward(u->y, hidden, w, NULL, rows, 4 * C, C, stream);
    residual_forward(out, s->x2, u->y, params_weight(p, FCPROJB, layer), rows, C, stream);
}

// --- backward ---

static void take_weight_gradient(const up *u, const parameters *p, int tensor, int layer, int parts) {
    weight_gradient g = {.dy = u->dy,
                         .x = u->x,
                         .R = u->T / u->group->size * u->B,
                         .OC = params_local_rows(p, tensor) / parts,
                         .IC = params_local_columns(p, tensor),
                         .parts = parts};
    weight_gradient_take(u->pass, p, tensor, layer, g, u->context->stream);
}

static void mlp_backward(up *u, up_saved *s, const parameters *p, int layer, real *dx) {
    cf_stream *stream = u->context->stream;
    int64_t C = p->shape.C, rows = u->T / u->group->size * u->B;
    const real *ln_w = params_weight(p, LN2W, layer), *ln_b = params_weight(p, LN2B, layer);
    linear_bias_grad(params_grad(p, FCPROJB, layer), dx, rows, C, stream);
    const real *w = linear_prepare_dgrad(u->prepared, params_weight(p, FCPROJW, layer), 4 * C, C, stream);
    linear_dgrad_gelu(u->dhidden, dx, w, s->fch, rows, 4 * C, C, stream);
    if (!s->hidden) gelu_forward(u->hidden, s->fch, rows * 4 * C, stream);
    u->dy[0] = dx, u->x[0] = kept(s->hidden, u->hidden);
    take_weight_gradient(u, p, FCPROJW, layer, 1);
    linear_bias_grad(params_grad(p, FCB, layer), u->dhidden, rows, 4 * C, stream);
    w = linear_prepare_dgrad(u->prepared, params_weight(p, FCW, layer), C, 4 * C, stream);
    linear_dgrad(u->dnorm, u->dhidden, w, rows, C, 4 * C, stream);
    if (!s->norm2) layernorm_forward(u->norm, NULL, NULL, s->x2, ln_w, ln_b, rows, C, stream);
    u->dy[0] = u->dhidden, u->x[0] = kept(s->norm2, u->norm);
    take_weight_gradient(u, p, FCW, layer, 1);
    layernorm_backward(dx, params_grad(p, LN2W, layer), params_grad(p, LN2B, layer), u->dnorm, s->x2, ln_w,
                       s->mean2, s->rstd2, u->norm_scratch, rows, C, stream);
}

// The gradient of one head group's output for some rows of the own shard.
static void projection_dgrad_piece(job *j, int64_t group, int64_t first, int64_t rows, real *dheads) {
    linear_dgrad(dheads, j->dx + first * j->B * j->C, j->u->ready[group], rows * j->B, j->Cl, j->C,
                 j->u->context->stream);
}

static void attention_slice_backward(void *argument, const cf_span *span, cf_stream *stream) {
    job *j = (job *)argument;
    up *u = j->u;
    if (span->side == CF_COMPUTE_BEFORE) {
        own_first(j, span, j->B * j->Cl, projection_dgrad_piece);
        return;
    }
    for (int i = 0; i < span->blocks; i++) {
        int64_t t0 = span->row + i * span->row_stride;
        const real *dheads =
            (const real *)(span->data + i * span->data_stride) - t0 * j->B * j->Cl; // time step 0
        attention_backward(u->qkv_out, dheads, j->s->heads, j->s->lse, j->s->qkv, u->attention_scratch, t0,
                           span->rows, u->T, j->B, j->Hl, j->D, j->first, stream);
        j->first = false;
    }
}

// Gradient of the layer norm's output from one head group, added to those before; the own group starts it.
static void qkv_dgrad_piece(job *j, int64_t group, int64_t first, int64_t rows, real *dqkv) {
    real *dnorm = j->u->dnorm + first * j->B * j->C;
    const real *w = j->u->ready[group];
    if (group == j->own)
        linear_dgrad(dnorm, dqkv, w, rows * j->B, j->C, 3 * j->Cl, j->u->context->stream);
    else
        linear_dgrad_add(dnorm, dqkv, w, rows * j->B, j->C, 3 * j->Cl, j->u->context->stream);
    j->u->dy[group] = dqkv - first * j->B * 3 * j->Cl; // the group's shard, for the weight gradient
}

static void qkv_slice_backward(void *argument, const cf_span *span, cf_stream *stream) {
    (void)stream;
    own_first((job *)argument, span, 3 * ((job *)argument)->B * ((job *)argument)->Cl, qkv_dgrad_piece);
}

static void attention_and_projection_backward(up *u, job *j, const real *dx) {
    cf_stream *stream = u->context->stream;
    prepare_groups(u, linear_prepare_dgrad, params_weight(j->p, ATTPROJW, j->layer), j->Cl, j->C);
    j->dx = dx;
    linear_bias_grad(params_grad(j->p, ATTPROJB, j->layer), dx, j->Ts * j->B, j->C, stream);
    cf_fuse_result(u->att_backward, u->dheads);
    cf_fuse_begin(u->att_backward, u->dheads_out, j->Ts, j->B * j->Cl, attention_slice_backward, j, j->layer);
    for (int64_t i = 0; i < j->N; i++) u->dy[i] = dx, u->x[i] = j->s->groups + i * j->Ts * j->B * j->Cl;
    take_weight_gradient(u, j->p, ATTPROJW, j->layer, (int)j->N); // behind the all-to-all
    cf_fuse_finish(u->att_backward);
}

static void norm_and_qkv_backward(up *u, job *j, real *dx) {
    cf_stream *stream = u->context->stream;
    const parameters *p = j->p;
    int64_t rows = j->Ts * j->B;
    const real *ln_w = params_weight(p, LN1W, j->layer), *ln_b = params_weight(p, LN1B, j->layer);
    cf_fuse_result(u->qkv_backward, u->dqkv);
    cf_fuse_begin(u->qkv_backward, u->qkv_out, j->Ts, j->B * 3 * j->Cl, qkv_slice_backward, j, j->layer);
    if (!j->s->norm1) // for wgrad
        layernorm_forward(u->norm, NULL, NULL, j->s->x, ln_w, ln_b, rows, j->C, stream);
    prepare_groups(u, linear_prepare_dgrad, params_weight(p, QKVW, j->layer), j->C, 3 * j->Cl);
    cf_fuse_finish(u->qkv_backward);
    for (int64_t i = 0; i < j->N; i++) {
        u->x[i] = kept(j->s->norm1, u->norm);
        linear_bias_grad(params_grad(p, QKVB, j->layer) + i * 3 * j->Cl, u->dy[i], rows, 3 * j->Cl, stream);
    }
    if (!weight_gradient_fuses(u->pass, p, QKVW, j->layer))
        take_weight_gradient(u, p, QKVW, j->layer, (int)j->N);
    layernorm_backward(dx, params_grad(p, LN1W, j->layer), params_grad(p, LN1B, j->layer), u->dnorm, j->s->x,
                       ln_w, j->s->mean1, j->s->rstd1, u->norm_scratch, rows, j->C, stream);
}

void up_backward(up *u, up_saved *s, const parameters *p, int layer, real *dx) {
    mlp_backward(u, s, p, layer, dx);
    job j = make_job(u, s, p, layer);
    attention_and_projection_backward(u, &j, dx);
    norm_and_qkv_backward(u, &j, dx);
}

void up_backward_qkvw(up *u, const parameters *p, int layer) {
    if (weight_gradient_fuses(u->pass, p, QKVW, layer))
        take_weight_gradient(u, p, QKVW, layer, u->group->size);
}
