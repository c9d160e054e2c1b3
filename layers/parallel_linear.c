// See parallel_linear.h. Each callback does with the rows of one span what the layer does with all of them.
//
// A column layer's backward has two operations, and each can compute while the other's data is communicated:
//     begin gather     all-gather of the saved input, with --recompute 1    (during earlier operations)
//     begin backward   dgrad ▸ reduce-scatter, this rank's slice last       (sums are sent during dgrad and wgrad)
//     finish gather    wgrad of each input slice as it arrives              (hides the rest of both)
//     finish backward  the last additions, in the computation that uses the result
#include "parallel_linear.h"
#include "kernels/elementwise.h"
#include "kernels/linear.h"

// --- gradients ---

static void compute_weight_gradient(const parallel_linear *l, int layer, const real *dy, const real *x) {
    const model_pass *pass = l->pass;
    zero_weight_gradient(pass->zero, l->w, layer,
                         (weight_gradient){.dy = &dy, .x = &x, .R = l->group->size * pass->Ts * pass->B, .parts = 1});
}

// --- life ---

static cf_fuse *create(const parallel_linear *l, const char *name, cf_operation operation, int64_t capacity, const overlap *how,
                       double flops, bool early, bool independent) {
    const bool sums = operation == CF_REDUCE_SCATTER;
    cf_fuse_config p =
        overlap_config(how, name, l->group, operation, sums ? CF_COMPUTE_BEFORE : CF_COMPUTE_AFTER, REAL_DTYPE, capacity);
    p.flops = flops, p.urgency = early ? CF_EARLY : CF_URGENT, p.independent = independent, p.callback_adds_last = sums;
    return cf_fuse_create(l->pass->context, p);
}

void column_create(parallel_linear *l, const char *name, int64_t capacity, const overlap *how, bool gathers) {
    l->IC = params_local_columns(l->pass->params, l->w), l->OC = params_local_rows(l->pass->params, l->w);
    const double flops = 2.0 * (double)(l->group->size * capacity * l->OC);
    l->forward = create(l, name, CF_ALLGATHER, capacity, how, flops, false, true);
    if (gathers) l->arrives = l->gather = create(l, name, CF_ALLGATHER, capacity, how, flops, true, false);
    l->backward = create(l, name, CF_REDUCE_SCATTER, capacity, how, flops, true, true);
}

void row_create(parallel_linear *l, const char *name, int64_t capacity, const overlap *how, double forward_flops,
                double backward_flops) {
    l->IC = params_local_columns(l->pass->params, l->w), l->OC = params_local_rows(l->pass->params, l->w);
    const double product = 2.0 * (double)(l->group->size * capacity * l->IC);
    l->forward = create(l, name, CF_REDUCE_SCATTER, capacity, how, product + forward_flops, false, true);
    l->arrives = l->backward = create(l, name, CF_ALLGATHER, capacity, how, 2 * product + backward_flops, false, true);
}

void parallel_linear_free(parallel_linear *l) {
    cf_fuse_free(l->forward);
    cf_fuse_free(l->gather);
    cf_fuse_free(l->backward);
}

// --- computation of a span ---

// Rows that are communicated are at span->data, `columns` wide; the others are rows of the whole.
static linear_rows rows_of(const parallel_linear *l, const cf_span *span, int64_t columns) {
    int64_t travel = span->data_stride / (columns * (int64_t)sizeof(real)), stay = span->row_stride * l->pass->B;
    linear_rows r = {.blocks = span->blocks, .rows = span->rows * l->pass->B, .in = stay, .out = travel};
    if (span->side == CF_COMPUTE_AFTER) r.in = travel, r.out = stay;
    return r;
}

static void column_forward_rows(void *argument, const cf_span *span, cf_stream *stream) {
    const linear_forward_job *j = (const linear_forward_job *)argument;
    const parallel_linear *l = j->linear;
    const real *bias = params_weight(l->pass->params, l->bias, j->layer);
    const linear_rows r = rows_of(l, span, l->IC);
    const int64_t first = span->row * l->pass->B, F = l->OC / 2;
    real *pre = j->pre ? j->pre + first * l->OC : NULL, *out = l->gated ? pre : j->out + first * l->OC;
    linear_forward(out, l->gated ? NULL : pre, (const real *)span->data, l->ready, bias, NULL, r, l->IC, l->OC, stream);
    for (int64_t i = 0; i < r.blocks && l->gated; i++)
        gated_forward(j->out + (first + i * r.out) * F, pre + i * r.out * l->OC, r.rows, F, stream);
}

static void add_weight_gradient(linear_backward_job *j, const real *dy, const real *x, int64_t rows, cf_stream *stream) {
    const parallel_linear *l = j->linear;
    if (j->dw.place != GRADIENT_BY_SLICES) return;
    linear_wgrad(j->dw.at, j->dw.db, dy, l->OC, x, rows, l->IC, l->OC, j->dw.add, stream);
    j->dw.add = true;
}

static void column_wgrad_rows(void *argument, const cf_span *span, cf_stream *stream) {
    linear_backward_job *j = (linear_backward_job *)argument;
    const parallel_linear *l = j->linear;
    linear_rows r = rows_of(l, span, l->IC);
    for (int64_t i = 0; i < r.blocks; i++)
        add_weight_gradient(j, j->dy + (span->row * l->pass->B + i * r.out) * l->OC,
                            (const real *)(span->data + i * span->data_stride), r.rows, stream);
}

// The first time step of this rank's shard.
static int64_t own_step(const parallel_linear *l) {
    return l->group->rank * l->pass->Ts;
}

static void column_dgrad_rows(void *argument, const cf_span *span, cf_stream *stream) {
    const linear_backward_job *j = (const linear_backward_job *)argument;
    const parallel_linear *l = j->linear;
    if (span->side == CF_COMPUTE_AFTER) return j->use_sum(j->argument, span->sum, span->row - own_step(l), span->rows, stream);
    const real *dy = j->dy + span->row * l->pass->B * l->OC;
    linear_dgrad((real *)span->data, dy, l->ready, NULL, false, rows_of(l, span, l->IC), l->IC, l->OC, stream);
}

static void row_forward_rows(void *argument, const cf_span *span, cf_stream *stream) {
    const linear_forward_job *j = (const linear_forward_job *)argument;
    const parallel_linear *l = j->linear;
    const real *bias = params_weight(l->pass->params, l->bias, j->layer);
    const bool alone = l->group->size == 1; // then the product adds
    const int64_t shard = (span->row - own_step(l)) * l->pass->B * l->OC;
    if (span->side == CF_COMPUTE_AFTER && !alone)
        residual_forward(j->out + shard, j->residual + shard, span->sum, bias, span->rows * l->pass->B, l->OC, stream);
    if (span->side == CF_COMPUTE_AFTER) return;
    const real *x = j->x + span->row * l->pass->B * l->IC;
    for (int i = 0; j->compute_x && i < span->blocks; i++)
        j->compute_x(j->argument, j->layer, j->x, span->row + i * span->row_stride, span->rows, stream);
    linear_forward((real *)span->data, NULL, x, l->ready, alone ? bias : NULL, alone ? j->residual + shard : NULL,
                   rows_of(l, span, l->OC), l->IC, l->OC, stream);
}

static void row_backward_rows(void *argument, const cf_span *span, cf_stream *stream) {
    linear_backward_job *j = (linear_backward_job *)argument;
    const parallel_linear *l = j->linear;
    const real *dy = (const real *)span->data;
    const bool adds = j->dw.place == GRADIENT_BY_SLICES;
    const int64_t first = span->row * l->pass->B * l->IC;
    linear_rows r = rows_of(l, span, l->OC);
    const real *pre = j->pre && !l->gated ? j->pre + first : NULL;
    linear_dgrad(j->dx + first, dy, l->ready, pre, false, r, l->IC, l->OC, stream);
    for (int64_t i = 0, at = first; i < r.blocks && l->gated; i++, at += r.out * l->IC)
        gated_backward(j->pre + 2 * at, j->again ? j->x + at : NULL, j->dx + at, r.rows, l->IC, stream);
    // Slices may run on two streams, but they add to the gradients one after another.
    if (j->use_dx && j->begun) cf_stream_after(stream, j->used);
    for (int64_t i = 0; i < r.blocks && j->use_dx; i++)
        j->use_dx(j->argument, j->layer, j->dx, span->row + i * span->row_stride, span->rows, stream);
    if (j->use_dx) j->used = cf_event_record_untimed(stream);
    if (adds && j->begun) cf_stream_after(stream, j->added);
    for (int64_t i = 0; i < r.blocks; i++) {
        const int64_t at = first + i * r.out * l->IC;
        if (j->again && !l->gated) activation_forward(j->x + at, j->pre + at, r.rows * l->IC, stream);
        add_weight_gradient(j, dy + i * r.in * l->OC, j->x + at, r.rows, stream);
    }
    if (adds) j->added = cf_event_record_untimed(stream);
    j->begun = true;
}

// --- the column-parallel layer ---

void column_forward(parallel_linear *l, int layer, real *out, real *pre, real *x) {
    const model_pass *pass = l->pass;
    linear_forward_job j = {.linear = l, .layer = layer, .out = out, .pre = pre};
    cf_fuse_begin(l->forward, x, pass->Ts, pass->B * l->IC, column_forward_rows, &j, layer);
    const real *w = params_weight(pass->params, l->w, layer);
    l->ready = linear_prepare_forward(l->prepared, w, l->IC, l->OC, pass->context->stream); // during the first transfers
    cf_fuse_finish(l->forward);
}

void column_begin_gather(parallel_linear *l, int layer, real *x, const real *dy) {
    if (!l->gather) return; // x is still here
    l->gather_job = (linear_backward_job){.linear = l, .layer = layer, .dy = dy, .dw = *zero_decided(l->pass->zero, l->w, layer)};
    cf_fuse_begin(l->gather, x, l->pass->Ts, l->pass->B * l->IC, column_wgrad_rows, &l->gather_job, layer);
}

static void column_gradient(parallel_linear *l, int layer, const real *dy, const real *x) {
    if (l->gather) cf_fuse_finish(l->gather);
    compute_weight_gradient(l, layer, dy, x);
}

void column_gradient_after(parallel_linear *l, int layer, const real *dy, const real *x) {
    if (zero_decided(l->pass->zero, l->w, layer)->place >= GRADIENT_AFTER) column_gradient(l, layer, dy, x);
}

void column_backward(parallel_linear *l, int layer, real *dx, const real *dy, const real *x, sum_steps *use_sum, void *argument) {
    const model_pass *pass = l->pass;
    const real *w = params_weight(pass->params, l->w, layer);
    const bool after = zero_decided(pass->zero, l->w, layer)->place >= GRADIENT_AFTER;
    if (l->bias >= 0 && after)
        linear_bias_grad(params_grad(pass->params, l->bias, layer), dy, l->group->size * pass->Ts * pass->B, l->OC,
                         pass->context->stream);
    l->ready = linear_prepare_dgrad(l->prepared, w, l->IC, l->OC, pass->context->stream);
    l->backward_job = (linear_backward_job){.linear = l, .layer = layer, .dy = dy, .use_sum = use_sum, .argument = argument};
    cf_fuse_begin(l->backward, dx, pass->Ts, pass->B * l->IC, column_dgrad_rows, &l->backward_job, layer);
    if (!after) column_gradient(l, layer, dy, x);
    cf_fuse_finish(l->backward);
}

// --- the row-parallel layer ---

void row_forward(parallel_linear *l, int layer, real *out, const real *residual, real *sums, real *x, time_steps *compute_x,
                 void *argument) {
    const model_pass *pass = l->pass;
    const real *w = params_weight(pass->params, l->w, layer);
    const bool alone = l->group->size == 1;
    linear_forward_job j = {.linear = l, .layer = layer, .x = x, .out = out, .residual = residual};
    j.compute_x = compute_x, j.argument = argument;
    l->ready = linear_prepare_forward(l->prepared, w, l->IC, l->OC, pass->context->stream);
    cf_fuse_begin(l->forward, alone ? out : sums, pass->Ts, pass->B * l->OC, row_forward_rows, &j, layer);
    cf_fuse_finish(l->forward);
}

void row_begin_backward(parallel_linear *l, int layer, real *shard, real *whole, linear_backward_job job) {
    const model_pass *pass = l->pass;
    int64_t rows = pass->Ts * pass->B;
    real *dy = l->group->size == 1 ? shard : whole;
    if (dy != shard)
        cf_copy(dy + l->group->rank * rows * l->OC, shard, rows * l->OC * (int64_t)sizeof(real), pass->context->stream);
    job.linear = l, job.layer = layer, job.dy = dy, job.dw = *zero_decided(pass->zero, l->w, layer);
    l->backward_job = job;
    cf_fuse_begin(l->backward, dy, pass->Ts, pass->B * l->OC, row_backward_rows, &l->backward_job, layer);
}

void row_finish_backward(parallel_linear *l, int layer) {
    const real *w = params_weight(l->pass->params, l->w, layer);
    l->ready = linear_prepare_dgrad(l->prepared, w, l->IC, l->OC, l->pass->context->stream); // during the first transfers
    cf_fuse_finish(l->backward);
    compute_weight_gradient(l, layer, l->backward_job.dy, l->backward_job.x);
}
