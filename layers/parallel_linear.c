// See parallel_linear.h. Each callback does with the rows of one span what the layer does with all of them.
//
// A column layer's backward has two transfers and two computations that do not depend on one another's transfers:
//     begin gather     all-gather of the saved input            (its slices travel during whatever comes before)
//     begin backward   dgrad ▸ reduce-scatter, its slice last   (sums travel during dgrad and wgrad)
//     finish gather    wgrad of each input slice as it arrives  (hides what is left of both)
//     finish backward  the last addition (with slices, this rank's slices' dgrad, onto what has arrived)
#include "parallel_linear.h"
#include "buffers.h"
#include "elementwise.h"
#include "linear.h"

// --- life ---

static parallel_linear without_operations(cf_context *context, const cf_group *group, int64_t IC, int64_t OC, real *prepared) {
    return (parallel_linear){.context = context, .group = group, .IC = IC, .OC = OC, .prepared = prepared};
}

static cf_fuse *plan(const parallel_linear *l, const char *name, cf_operation operation, int64_t capacity, overlap how,
                     double flops, bool early) {
    bool sums = operation == CF_REDUCE_SCATTER;
    cf_fuse_plan p =
        overlap_plan(how, name, l->group, operation, sums ? CF_COMPUTE_BEFORE : CF_COMPUTE_AFTER, REAL_DTYPE, capacity);
    p.flops = flops, p.early = early, p.folds = sums;
    return cf_fuse_create(l->context, p);
}

void column_create(parallel_linear *l, cf_context *context, const cf_group *group, const char *name, int64_t capacity, int64_t IC,
                   int64_t OC, overlap how, bool gathers, real *prepared) {
    double flops = 2.0 * (double)(group->size * capacity * OC);
    *l = without_operations(context, group, IC, OC, prepared);
    l->forward = plan(l, name, CF_ALLGATHER, capacity, how, flops, false);
    if (gathers) l->gather = plan(l, name, CF_ALLGATHER, capacity, how, flops, true);
    l->backward = plan(l, name, CF_REDUCE_SCATTER, capacity, how, flops, true);
}

void row_create(parallel_linear *l, cf_context *context, const cf_group *group, const char *name, int64_t capacity, int64_t IC,
                int64_t OC, overlap how, double forward_flops, double backward_flops, real *prepared) {
    *l = without_operations(context, group, IC, OC, prepared);
    l->forward = plan(l, name, CF_REDUCE_SCATTER, capacity, how, forward_flops, false);
    l->backward = plan(l, name, CF_ALLGATHER, capacity, how, backward_flops, false);
}

void parallel_linear_free(parallel_linear *l) {
    cf_fuse_free(l->forward);
    cf_fuse_free(l->gather);
    cf_fuse_free(l->backward);
}

real *linear_own_shard(const parallel_linear *l, real *full, int64_t Ts, int64_t B, int64_t columns) {
    return full + l->group->rank * Ts * B * columns;
}

// --- what is computed for a span ---

// Rows that travel are at span->data, `columns` wide; the others are those of the whole.
static linear_rows rows_of(const linear_job *j, const cf_span *span, int64_t columns) {
    int64_t travel = span->data_stride / (columns * (int64_t)sizeof(real)), stay = span->row_stride * j->B;
    linear_rows r = {.blocks = span->blocks, .rows = span->rows * j->B, .in = stay, .out = travel};
    if (span->side == CF_COMPUTE_AFTER) r.in = travel, r.out = stay;
    return r;
}

static void column_forward_rows(void *argument, const cf_span *span, cf_stream *stream) {
    const linear_job *j = (const linear_job *)argument;
    const parallel_linear *l = j->layer;
    int64_t first = span->row * j->B * l->OC;
    const real *x = (const real *)span->data;
    linear_rows r = rows_of(j, span, l->IC);
    if (j->activated)
        linear_forward_gelu_blocks(j->activated + first, j->out + first, x, l->ready, j->bias, r, l->IC, l->OC, stream);
    else
        linear_forward_blocks(j->out + first, x, l->ready, j->bias, r, l->IC, l->OC, stream);
}

static void add_weight_gradient(linear_job *j, const real *dy, const real *x, int64_t rows, cf_stream *stream) {
    if (!j->dw.at) return;
    linear_wgrad(j->dw.at, dy, x, rows, j->layer->IC, j->layer->OC, j->dw.add, stream);
    j->dw.add = true;
}

static void column_wgrad_rows(void *argument, const cf_span *span, cf_stream *stream) {
    linear_job *j = (linear_job *)argument;
    for (int i = 0; i < span->blocks; i++)
        add_weight_gradient(j, j->in + (span->row + i * span->row_stride) * j->B * j->layer->OC,
                            (const real *)(span->data + i * span->data_stride), span->rows * j->B, stream);
}

static void column_dgrad_rows(void *argument, const cf_span *span, cf_stream *stream) {
    const linear_job *j = (const linear_job *)argument;
    const parallel_linear *l = j->layer;
    const real *dy = j->in + span->row * j->B * l->OC;
    real *dx = (real *)span->data;
    linear_rows r = rows_of(j, span, l->IC);
    if (!span->accumulate) linear_dgrad_blocks(dx, dy, l->ready, r, l->IC, l->OC, stream);
    for (int64_t i = 0; span->accumulate && i < r.blocks; i++)
        linear_dgrad_add(dx + i * r.out * l->IC, dy + i * r.in * l->OC, l->ready, r.rows, l->IC, l->OC, stream);
}

static void row_forward_rows(void *argument, const cf_span *span, cf_stream *stream) {
    const linear_job *j = (const linear_job *)argument;
    const parallel_linear *l = j->layer;
    const real *x = j->in + span->row * j->B * l->IC;
    real *out = (real *)span->data;
    linear_rows r = rows_of(j, span, l->OC);
    for (int i = 0; j->rows && i < span->blocks; i++) j->rows(j->argument, span->row + i * span->row_stride, span->rows);
    if (!span->accumulate) linear_forward_blocks(out, x, l->ready, NULL, r, l->IC, l->OC, stream);
    for (int64_t i = 0; span->accumulate && i < r.blocks; i++)
        linear_forward_add(out + i * r.out * l->OC, x + i * r.in * l->IC, l->ready, r.rows, l->IC, l->OC, stream);
}

static void row_backward_rows(void *argument, const cf_span *span, cf_stream *stream) {
    linear_job *j = (linear_job *)argument;
    const parallel_linear *l = j->layer;
    const real *dy = (const real *)span->data;
    int64_t first = span->row * j->B * l->IC;
    linear_rows r = rows_of(j, span, l->OC);
    if (j->pre)
        linear_dgrad_gelu_blocks(j->out + first, dy, l->ready, j->pre + first, r, l->IC, l->OC, stream);
    else
        linear_dgrad_blocks(j->out + first, dy, l->ready, r, l->IC, l->OC, stream);
    for (int64_t i = 0; i < r.blocks; i++) {
        if (j->rows) j->rows(j->argument, span->row + i * span->row_stride, span->rows);
        add_weight_gradient(j, dy + i * r.in * l->OC, j->x + first + i * r.out * l->IC, r.rows, stream);
    }
}

// --- the column-parallel layer ---

void column_forward(parallel_linear *l, real *out, real *activated, real *x, const real *w, const real *bias, int64_t Ts, int64_t B,
                    int layer) {
    linear_job j = {.layer = l, .B = B, .out = out, .activated = activated, .bias = bias};
    cf_fuse_begin(l->forward, x, Ts, B * l->IC, column_forward_rows, &j, layer);
    l->ready = linear_prepare_forward(l->prepared, w, l->IC, l->OC,
                                      l->context->stream); // during the first transfers
    cf_fuse_finish(l->forward);
}

void column_begin_gather(parallel_linear *l, real *x, const real *dy, matrix_gradient dw, int64_t Ts, int64_t B, int layer) {
    l->gather_job = (linear_job){.layer = l, .B = B, .in = dy, .dw = dw};
    cf_fuse_begin(l->gather, x, Ts, B * l->IC, column_wgrad_rows, &l->gather_job, layer);
    l->gathering = true;
}

void column_finish_gather(parallel_linear *l) {
    if (l->gathering) cf_fuse_finish(l->gather);
    l->gathering = false;
}

void column_begin_backward(parallel_linear *l, real *dx, const real *dy, const real *w, int64_t Ts, int64_t B, int layer) {
    l->ready = linear_prepare_dgrad(l->prepared, w, l->IC, l->OC, l->context->stream);
    l->backward_job = (linear_job){.layer = l, .B = B, .in = dy};
    cf_fuse_begin(l->backward, dx, Ts, B * l->IC, column_dgrad_rows, &l->backward_job, layer);
}

real *column_finish_backward(parallel_linear *l) {
    return (real *)cf_fuse_finish(l->backward);
}

// --- the row-parallel layer ---

const real *row_forward(parallel_linear *l, real *out, const real *x, const real *w, int64_t Ts, int64_t B, int layer,
                        time_steps *rows, void *argument) {
    linear_job j = {.layer = l, .B = B, .in = x, .rows = rows, .argument = argument};
    l->ready = linear_prepare_forward(l->prepared, w, l->IC, l->OC, l->context->stream);
    cf_fuse_begin(l->forward, out, Ts, B * l->OC, row_forward_rows, &j, layer);
    return (const real *)cf_fuse_finish(l->forward);
}

void row_begin_backward(parallel_linear *l, real *dx, real *dy, linear_job job, int64_t Ts, int64_t B, int layer) {
    l->backward_job = job;
    l->backward_job.layer = l, l->backward_job.B = B, l->backward_job.out = dx;
    cf_fuse_begin(l->backward, dy, Ts, B * l->OC, row_backward_rows, &l->backward_job, layer);
}

void row_finish_backward(parallel_linear *l, const real *w) {
    l->ready = linear_prepare_dgrad(l->prepared, w, l->IC, l->OC, l->context->stream); // during the first transfers
    cf_fuse_finish(l->backward);
}
