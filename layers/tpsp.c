// The transformer block in TPSP (see tpsp.h for the order of operations). Each fused operation has a
// callback that does with one slice of rows what the block does with all of them; what it needs stands in
// a `job`. Layer norms, biases of row-parallel layers and residuals work on the own shard, between the
// operations; their weight gradients are partial sums that the optimizer adds up over the tp group.
//
// Layer-norm outputs and GELU may be computed again in backward: they cost little next to the products they feed and
// would take more than a third of the activation memory. Where they are kept, by each layer, the scratch of all is not used.
#include "tpsp.h"
#include "attention.h"
#include "buffers.h"
#include "elementwise.h"
#include "layernorm.h"
#include "linear.h"
#include "weight_gradient.h"

typedef struct job {
    tpsp *t;
    tpsp_saved *s;
    const real *w;      // of the row-parallel layer (C, columns); prepared
    real *hidden;       // (T, B, Fl) GELU
    bool first;         // attention backward: no range has been done
    matrix_gradient dw; // at NULL: computed afterwards
    int64_t C, Cl, Fl, Hl, D;
} job;

static job make_job(tpsp *t, tpsp_saved *s, const parameters *p, int tensor, int layer) {
    int64_t N = t->group->size;
    return (job){.t = t,
                 .s = s,
                 .w = params_weight(p, tensor, layer),
                 .hidden = kept(s->hidden, t->hidden),
                 .first = true,
                 .C = p->shape.C,
                 .Cl = p->shape.C / N,
                 .Fl = 4 * p->shape.C / N,
                 .Hl = p->shape.H / N,
                 .D = p->shape.C / p->shape.H};
}

// --- planning ---

// flops: of the product with this rank's columns, and of what is computed with it.
static cf_fuse *plan_row(tpsp *t, const char *name, int64_t capacity, double flops, overlap o, bool forward) {
    cf_fuse_plan plan = {.name = name,
                         .group = t->group,
                         .mode = o.mode,
                         .route = o.route,
                         .slices = o.slices,
                         .dtype = REAL_DTYPE,
                         .capacity = capacity,
                         .flops = flops};
    plan.operation = forward ? CF_REDUCE_SCATTER : CF_ALLGATHER;
    plan.side = forward ? CF_COMPUTE_BEFORE : CF_COMPUTE_AFTER;
    plan.folds = forward;
    return cf_fuse_create(t->context, plan);
}

void tpsp_create(tpsp *t, cf_context *context, const cf_group *group, const backward_pass *pass,
                 gpt_shape shape, int64_t T, int64_t B, overlap o, bool recompute) {
    int64_t N = group->size, C = shape.C, rows = T * B, shard = rows / N * C;
    double product = 2.0 * (double)(rows * C * C) / (double)N,
           attention = attention_flops(T, B, shape.H / N, C / shape.H);
    *t = (tpsp){.context = context, .group = group, .pass = pass, .T = T, .B = B};
    column_create(&t->qkv, context, group, "att.qkv", shard, C, 3 * C / N, o, true);
    column_create(&t->fc, context, group, "mlp.fc1", shard, C, 4 * C / N, o, true);
    t->attproj_forward = plan_row(t, "att.proj", shard, product + attention, o, true);
    t->attproj_backward = plan_row(t, "att.proj", shard, 2 * product + 2.5 * attention, o, false);
    t->fcproj_forward = plan_row(t, "mlp.fc2", shard, 4 * product, o, true);
    t->fcproj_backward = plan_row(t, "mlp.fc2", shard, 8 * product, o, false);
    t->wide = take_real(rows * C, "activations, shared");
    t->wide2 = take_real(rows * C, "activations, shared");
    t->partial = take_real(rows * C, "activations, shared");
    if (recompute) t->hidden = take_real(rows * 4 * C / N, "activations, shared");
    t->dhidden = take_real(rows * 4 * C / N, "activations, shared");
    t->dheads = take_real(rows * C / N, "activations, shared");
    t->dqkv = take_real(rows * 3 * C / N, "activations, shared");
    t->prepared =
        take_real(linear_prepared_size(4 * C / N, C), "weights, prepared"); // the projection's is smaller
    t->norm_scratch = take_precise(layernorm_scratch(C), "activations, shared");
    t->attention_scratch =
        take_precise(attention_scratch(T, B, shape.H / N, C / shape.H), "activations, shared");
}

void tpsp_free(tpsp *t) {
    column_free(&t->qkv);
    column_free(&t->fc);
    cf_fuse *operations[] = {t->attproj_forward, t->attproj_backward, t->fcproj_forward, t->fcproj_backward};
    for (int i = 0; i < 4; i++) cf_fuse_free(operations[i]);
    void *memory[] = {t->wide,   t->wide2, t->partial,  t->hidden,       t->dhidden,
                      t->dheads, t->dqkv,  t->prepared, t->norm_scratch, t->attention_scratch};
    for (int i = 0; i < (int)(sizeof memory / sizeof *memory); i++) cf_free(memory[i]);
}

void tpsp_saved_create(tpsp_saved *s, gpt_shape shape, int tp, int64_t T, int64_t B, bool recompute) {
    const char *purpose = "activations, per layer";
    int64_t C = shape.C, rows = T * B, shard_rows = rows / tp;
    s->mean1 = take_precise(shard_rows, purpose);
    s->rstd1 = take_precise(shard_rows, purpose);
    s->qkv = take_real(rows * 3 * C / tp, purpose);
    s->heads = take_real(rows * C / tp, purpose);
    s->lse = take_precise(rows * shape.H / tp, purpose);
    s->x2 = take_real(shard_rows * C, purpose);
    s->mean2 = take_precise(shard_rows, purpose);
    s->rstd2 = take_precise(shard_rows, purpose);
    s->fch = take_real(rows * 4 * C / tp, purpose);
    if (recompute) return;
    s->hidden = take_real(rows * 4 * C / tp, purpose);
    if (tp > 1) return;
    s->norm1 = take_real(rows * C, purpose);
    s->norm2 = take_real(rows * C, purpose);
}

void tpsp_saved_free(tpsp_saved *s) {
    void *memory[] = {s->mean1, s->rstd1, s->qkv, s->heads,  s->lse,   s->x2,
                      s->mean2, s->rstd2, s->fch, s->hidden, s->norm1, s->norm2};
    for (int i = 0; i < (int)(sizeof memory / sizeof *memory); i++) cf_free(memory[i]);
}

// --- forward ---

// A row-parallel product of the span's rows of x, of which that is the first: for rows that travel, or onto what has arrived.
static void project(const cf_span *span, const job *j, const real *x, int64_t IC, cf_stream *stream) {
    real *out = (real *)span->data; // (rows, C)
    linear_rows r = {.blocks = span->blocks,
                     .rows = span->rows * j->t->B,
                     .in = span->row_stride * j->t->B,
                     .out = span->data_stride / (j->C * (int64_t)sizeof(real))};
    if (!span->accumulate) linear_forward_blocks(out, x, j->w, NULL, r, IC, j->C, stream);
    for (int i = 0; span->accumulate && i < r.blocks; i++)
        linear_forward_add(out + i * r.out * j->C, x + i * r.in * IC, j->w, r.rows, IC, j->C, stream);
}

// Query-Split: attention of these query rows against all keys before them, and their projection.
static void attention_slice(void *argument, const cf_span *span, cf_stream *stream) {
    job *j = (job *)argument;
    tpsp *t = j->t;
    for (int i = 0; i < span->blocks; i++) {
        int64_t t0 = span->row + i * span->row_stride, n = span->rows;
        attention_forward(j->s->heads, j->s->lse, j->s->qkv, t0, n, t->T, t->B, j->Hl, j->D, stream);
    }
    project(span, j, j->s->heads + span->row * t->B * j->Cl, j->Cl, stream);
}

static void mlp_slice(void *argument, const cf_span *span, cf_stream *stream) {
    job *j = (job *)argument;
    project(span, j, j->hidden + span->row * j->t->B * j->Fl, j->Fl, stream);
}

// The own shard's place in a whole (T, B, C) buffer.
static real *own(const tpsp *t, real *full, int64_t C) {
    return full + t->group->rank * (t->T / t->group->size) * t->B * C;
}

void tpsp_forward(tpsp *t, tpsp_saved *s, const parameters *p, int layer, real *out) {
    cf_stream *stream = t->context->stream;
    int64_t C = p->shape.C, N = t->group->size, B = t->B, Ts = t->T / N, rows = Ts * B;

    real *norm = kept(s->norm1, t->wide);
    layernorm_forward(own(t, norm, C), s->mean1, s->rstd1, s->x, params_weight(p, LN1W, layer),
                      params_weight(p, LN1B, layer), rows, C, stream);
    column_forward(&t->qkv, stream, s->qkv, NULL, norm, params_weight(p, QKVW, layer),
                   params_weight(p, QKVB, layer), Ts, B, layer);
    job attention = make_job(t, s, p, ATTPROJW, layer);
    attention.w = linear_prepare_forward(t->prepared, attention.w, attention.Cl, C, stream);
    const real *y =
        cf_fuse_run(t->attproj_forward, t->partial, Ts, B * C, attention_slice, &attention, layer);
    residual_forward(s->x2, s->x, y, params_weight(p, ATTPROJB, layer), rows, C, stream);

    norm = kept(s->norm2, t->wide);
    job mlp = make_job(t, s, p, FCPROJW, layer);
    layernorm_forward(own(t, norm, C), s->mean2, s->rstd2, s->x2, params_weight(p, LN2W, layer),
                      params_weight(p, LN2B, layer), rows, C, stream);
    column_forward(&t->fc, stream, s->fch, mlp.hidden, norm, params_weight(p, FCW, layer),
                   params_weight(p, FCB, layer), Ts, B, layer);
    mlp.w = linear_prepare_forward(t->prepared, mlp.w, mlp.Fl, C, stream);
    y = cf_fuse_run(t->fcproj_forward, t->partial, Ts, B * C, mlp_slice, &mlp, layer);
    residual_forward(out, s->x2, y, params_weight(p, FCPROJB, layer), rows, C, stream);
}

// --- backward ---

// The share of some rows in the weights' gradient, unless that is left to later.
static void add_weight_gradient(job *j, const real *dy, const real *x, int64_t rows, int64_t IC,
                                cf_stream *stream) {
    if (!j->dw.at) return;
    linear_wgrad(j->dw.at, dy, x, rows, IC, j->C, j->dw.add, stream);
    j->dw.add = true;
}

// Of a span that is read, whose rows of what is written are those of the whole.
static linear_rows rows_read(const job *j, const cf_span *span) {
    return (linear_rows){.blocks = span->blocks,
                         .rows = span->rows * j->t->B,
                         .in = span->data_stride / (j->C * (int64_t)sizeof(real)),
                         .out = span->row_stride * j->t->B};
}

static void mlp_slice_backward(void *argument, const cf_span *span, cf_stream *stream) {
    job *j = (job *)argument;
    tpsp *t = j->t;
    int64_t first = span->row * t->B * j->Fl;
    linear_dgrad_gelu_blocks(t->dhidden + first, (const real *)span->data, j->w, j->s->fch + first,
                             rows_read(j, span), j->Fl, j->C, stream);
    for (int i = 0; i < span->blocks; i++) {
        int64_t row = (span->row + i * span->row_stride) * t->B, rows = span->rows * t->B;
        const real *dy = (const real *)(span->data + i * span->data_stride);    // (rows, C)
        real *fch = j->s->fch + row * j->Fl, *hidden = j->hidden + row * j->Fl; // (rows, Fl)
        if (!j->s->hidden) gelu_forward(hidden, fch, rows * j->Fl, stream);
        add_weight_gradient(j, dy, hidden, rows, j->Fl, stream);
    }
}

static void attention_slice_backward(void *argument, const cf_span *span, cf_stream *stream) {
    job *j = (job *)argument;
    tpsp *t = j->t;
    linear_dgrad_blocks(t->dheads + span->row * t->B * j->Cl, (const real *)span->data, j->w,
                        rows_read(j, span), j->Cl, j->C, stream);
    for (int i = 0; i < span->blocks; i++) {
        int64_t t0 = span->row + i * span->row_stride, n = span->rows, rows = n * t->B, row = t0 * t->B;
        const real *dy = (const real *)(span->data + i * span->data_stride); // (n, B, C)
        attention_backward(t->dqkv, t->dheads, j->s->heads, j->s->lse, j->s->qkv, t->attention_scratch, t0, n,
                           t->T, t->B, j->Hl, j->D, j->first, stream);
        j->first = false;
        add_weight_gradient(j, dy, j->s->heads + row * j->Cl, rows, j->Cl, stream);
    }
}

// Is this weight gradient computed when the rest of its half is done? In layer 0 QKV's is, unless others would wait for
// it to travel with it.
static bool comes_later(const tpsp *t, const parameters *p, int tensor, int layer) {
    bool alone = params_own_bucket(p, tensor, layer) >= 0 ||
                 p->bucket[params_bucket_of(p, tensor, layer)].group->size == 1;
    return weight_gradient_fuses(t->pass, p, tensor, layer) || (tensor == QKVW && layer == 0 && alone);
}

// The weight gradient of a whole local matrix from dy (T·B, OC) and x (T·B, IC).
static void take_weight_gradient(const tpsp *t, const parameters *p, int tensor, int layer, const real *dy,
                                 const real *x) {
    const real *dys[1] = {dy}, *xs[1] = {x};
    weight_gradient g = {.dy = dys,
                         .x = xs,
                         .R = t->T * t->B,
                         .OC = params_local_rows(p, tensor),
                         .IC = params_local_columns(p, tensor),
                         .parts = 1};
    weight_gradient_take(t->pass, p, tensor, layer, g, t->context->stream);
}

// dy (T, B, C) of a row-parallel layer, to be gathered: the own shard is in its place. A single rank has all of it in dx,
// which changes only when the half is done with it.
static real *place_gradient(const tpsp *t, real *full, real *dx, int64_t C) {
    if (t->group->size == 1) return dx;
    cf_copy(own(t, full, C), dx, t->T / t->group->size * t->B * C * (int64_t)sizeof(real),
            t->context->stream);
    return full;
}

// Layer norm, column-parallel layer and its bias.
static const int first_half[4] = {LN1W, LN1B, QKVW, QKVB}, second_half[4] = {LN2W, LN2B, FCW, FCB};

// Starts to gather in full what all ranks need for wgrad, the layer norm's output; the own shard is computed again, unless
// all of it is here.
static void gather_norm(tpsp *t, column_linear *c, const parameters *p, int layer, const int tensor[4],
                        const real *x, real *full, bool here) {
    int64_t C = p->shape.C, Ts = t->T / t->group->size;
    if (!here)
        layernorm_forward(own(t, full, C), NULL, NULL, x, params_weight(p, tensor[0], layer),
                          params_weight(p, tensor[1], layer), Ts * t->B, C, t->context->stream);
    column_gather(c, full, Ts, t->B, layer);
}

// dx += gradient through layer norm and column-parallel layer, from dy (T·B, OC) of its output; full: what
// gather_norm was given.
static void norm_column_backward(tpsp *t, column_linear *c, const parameters *p, int layer,
                                 const int tensor[4], const real *x, const precise *mean, const precise *rstd,
                                 const real *dy, real *full, real *dx) {
    cf_stream *stream = t->context->stream;
    int64_t C = p->shape.C, Ts = t->T / t->group->size, rows = Ts * t->B;
    const real *ln_w = params_weight(p, tensor[0], layer);
    matrix_gradient dw = {0};
    if (!comes_later(t, p, tensor[2], layer)) dw = params_matrix_grad(p, tensor[2], layer, t->pass->first);
    linear_bias_grad(params_grad(p, tensor[3], layer), dy, t->T * t->B, c->OC, stream);
    const real *dnorm = column_backward(c, stream, dw, dy, full, t->partial,
                                        params_weight(p, tensor[2], layer), Ts, t->B, layer);
    layernorm_backward(dx, params_grad(p, tensor[0], layer), params_grad(p, tensor[1], layer), dnorm, x, ln_w,
                       mean, rstd, t->norm_scratch, rows, C, stream);
}

static void mlp_backward(tpsp *t, tpsp_saved *s, const parameters *p, int layer, real *dx) {
    cf_stream *stream = t->context->stream;
    int64_t C = p->shape.C, N = t->group->size, Ts = t->T / N, rows = Ts * t->B;
    linear_bias_grad(params_grad(p, FCPROJB, layer), dx, rows, C, stream);
    real *dy = place_gradient(t, t->wide, dx, C);
    job j = make_job(t, s, p, FCPROJW, layer);
    if (weight_gradient_by_slices(t->fcproj_backward, rows))
        j.dw = weight_gradient_now(t->pass, p, FCPROJW, layer);
    cf_fuse_begin(t->fcproj_backward, dy, Ts, t->B * C, mlp_slice_backward, &j, layer);
    real *norm2 = kept(s->norm2, t->wide2);
    gather_norm(t, &t->fc, p, layer, second_half, s->x2, norm2, s->norm2 != NULL);
    j.w = linear_prepare_dgrad(t->prepared, j.w, j.Fl, C, stream); // behind the first transfers
    cf_fuse_finish(t->fcproj_backward);
    if (!j.dw.at) take_weight_gradient(t, p, FCPROJW, layer, dy, j.hidden);
    gather_norm(t, &t->qkv, p, layer, first_half, s->x, kept(s->norm1, t->wide), s->norm1 != NULL);
    norm_column_backward(t, &t->fc, p, layer, second_half, s->x2, s->mean2, s->rstd2, t->dhidden, norm2, dx);
    if (!comes_later(t, p, FCW, layer)) return;
    column_input(&t->fc);
    take_weight_gradient(t, p, FCW, layer, t->dhidden, norm2);
}

static void attention_half_backward(tpsp *t, tpsp_saved *s, const parameters *p, int layer, real *dx) {
    cf_stream *stream = t->context->stream;
    int64_t C = p->shape.C, N = t->group->size, Ts = t->T / N, rows = Ts * t->B;
    linear_bias_grad(params_grad(p, ATTPROJB, layer), dx, rows, C, stream);
    real *dy = place_gradient(t, t->wide2, dx, C);
    job j = make_job(t, s, p, ATTPROJW, layer);
    if (weight_gradient_by_slices(t->attproj_backward, rows))
        j.dw = weight_gradient_now(t->pass, p, ATTPROJW, layer);
    cf_fuse_begin(t->attproj_backward, dy, Ts, t->B * C, attention_slice_backward, &j, layer);
    j.w = linear_prepare_dgrad(t->prepared, j.w, j.Cl, C, stream); // behind the first transfers
    cf_fuse_finish(t->attproj_backward);
    if (!j.dw.at) take_weight_gradient(t, p, ATTPROJW, layer, dy, s->heads);
    norm_column_backward(t, &t->qkv, p, layer, first_half, s->x, s->mean1, s->rstd1, t->dqkv,
                         kept(s->norm1, t->wide), dx);
}

void tpsp_backward(tpsp *t, tpsp_saved *s, const parameters *p, int layer, real *dx) {
    mlp_backward(t, s, p, layer, dx);
    attention_half_backward(t, s, p, layer, dx);
}

void tpsp_backward_qkvw(tpsp *t, const tpsp_saved *s, const parameters *p, int layer) {
    if (!comes_later(t, p, QKVW, layer)) return;
    column_input(&t->qkv);
    take_weight_gradient(t, p, QKVW, layer, t->dqkv, kept(s->norm1, t->wide));
}
