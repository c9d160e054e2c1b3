// A column-parallel linear layer through schedules : QKV, the MLP's first layer, the head.
//
// Backward has two transfers and two computations that do not depend on one another's transfers:
//     gather  all-gather of the saved input              (its slices travel behind whatever comes before)
//     begin   dgrad ▸ reduce-scatter, own slice last     (sums travel behind dgrad and wgrad)
//     finish  wgrad of each input slice as it arrives    (hides what is left of both; of thin slices together, at the end)
//     finish  the reduce-scatter's last addition (with slices, the own slices' dgrad, onto what has arrived)
//
// Where wgrad is left to the caller, the input goes on arriving behind what comes before it: column_input().
#include "column_linear.h"
#include "buffers.h"
#include "linear.h"
#include "weight_gradient.h"

void column_create(column_linear *c, cf_context *context, const cf_group *group, const char *name,
                   int64_t capacity, int64_t IC, int64_t OC, overlap o, bool gathers) {
    cf_fuse_plan plan = {.name = name,
                         .group = group,
                         .mode = o.mode,
                         .route = o.route,
                         .slices = o.slices,
                         .dtype = REAL_DTYPE,
                         .capacity = capacity,
                         .flops = 2.0 * (double)(group->size * capacity * OC)};
    plan.operation = CF_ALLGATHER, plan.side = CF_COMPUTE_AFTER;
    c->forward = cf_fuse_create(context, plan);
    plan.early = true;
    c->gather = gathers ? cf_fuse_create(context, plan) : NULL;
    plan.operation = CF_REDUCE_SCATTER, plan.side = CF_COMPUTE_BEFORE, plan.folds = true;
    c->dgrad = cf_fuse_create(context, plan);
    c->IC = IC, c->OC = OC;
    c->prepared = take_real(linear_prepared_size(IC, OC), "weights, prepared");
}

void column_free(column_linear *c) {
    cf_fuse_free(c->forward);
    cf_fuse_free(c->gather);
    cf_fuse_free(c->dgrad);
    cf_free(c->prepared);
}

static void forward_slice(void *argument, const cf_span *span, cf_stream *stream) {
    column_job *j = (column_job *)argument;
    int64_t row = span->row * j->B; // of (T·B)
    const real *x = (const real *)span->data;
    real *out = j->out + row * j->OC;
    linear_rows r = {.blocks = span->blocks,
                     .rows = span->rows * j->B,
                     .in = span->data_stride / (j->IC * (int64_t)sizeof(real)),
                     .out = span->row_stride * j->B};
    if (j->activated)
        linear_forward_gelu_blocks(j->activated + row * j->OC, out, x, j->w, j->bias, r, j->IC, j->OC,
                                   stream);
    else
        linear_forward_blocks(out, x, j->w, j->bias, r, j->IC, j->OC, stream);
}

static void dgrad_slice(void *argument, const cf_span *span, cf_stream *stream) {
    column_job *j = (column_job *)argument;
    const real *dy = j->in + span->row * j->B * j->OC;
    real *dx = (real *)span->data;
    linear_rows r = {.blocks = span->blocks,
                     .rows = span->rows * j->B,
                     .in = span->row_stride * j->B,
                     .out = span->data_stride / (j->IC * (int64_t)sizeof(real))};
    if (!span->accumulate) linear_dgrad_blocks(dx, dy, j->w, r, j->IC, j->OC, stream);
    for (int i = 0; span->accumulate && i < r.blocks; i++)
        linear_dgrad_add(dx + i * r.out * j->IC, dy + i * r.in * j->OC, j->w, r.rows, j->IC, j->OC, stream);
}

static void wgrad_slice(void *argument, const cf_span *span, cf_stream *stream) {
    column_job *j = (column_job *)argument;
    for (int i = 0; i < span->blocks && j->dw.at; i++) {
        int64_t row = (span->row + i * span->row_stride) * j->B;
        const real *x = (const real *)(span->data + i * span->data_stride);
        linear_wgrad(j->dw.at, j->in + row * j->OC, x, span->rows * j->B, j->IC, j->OC, j->dw.add, stream);
        j->dw.add = true;
    }
}

void column_forward(column_linear *c, cf_stream *stream, real *out, real *activated, real *full,
                    const real *w, const real *bias, int64_t Ts, int64_t B, int layer) {
    column_job j = {.out = out, .activated = activated, .bias = bias, .B = B, .IC = c->IC, .OC = c->OC};
    cf_fuse_begin(c->forward, full, Ts, B * c->IC, forward_slice, &j, layer);
    j.w = linear_prepare_forward(c->prepared, w, c->IC, c->OC, stream); // behind the first transfers
    cf_fuse_finish(c->forward);
}

void column_gather(column_linear *c, real *full, int64_t Ts, int64_t B, int layer) {
    cf_fuse_begin(c->gather, full, Ts, B * c->IC, wgrad_slice, &c->wgrad, layer);
    c->gathering = true;
}

real *column_backward(column_linear *c, cf_stream *stream, matrix_gradient dw, const real *dy, real *full,
                      real *partial, const real *w, int64_t Ts, int64_t B, int layer) {
    column_job dgrad = {.in = dy, .B = B, .IC = c->IC, .OC = c->OC};
    bool by_slices = c->gather && weight_gradient_by_slices(c->gather, Ts * B);
    c->wgrad = (column_job){.in = dy, .B = B, .IC = c->IC, .OC = c->OC};
    if (by_slices) c->wgrad.dw = dw;
    dgrad.w = linear_prepare_dgrad(c->prepared, w, c->IC, c->OC, stream);
    cf_fuse_begin(c->dgrad, partial, Ts, B * c->IC, dgrad_slice, &dgrad, layer);
    if (dw.at && c->gather) column_input(c);
    if (dw.at && !by_slices) {
        const cf_fuse_plan *plan = cf_fuse_get_plan(c->dgrad);
        cf_span all = {.row = 0, .rows = plan->group->size * Ts, .blocks = 1, .data = (char *)full};
        c->wgrad.dw = dw;
        wgrad_slice(&c->wgrad, &all, stream);
    }
    return (real *)cf_fuse_finish(c->dgrad);
}

void column_input(column_linear *c) {
    if (c->gathering) cf_fuse_finish(c->gather);
    c->gathering = false;
}
