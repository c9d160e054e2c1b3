// The attention half of a block in UP (Ulysses parallelism): activations stay sharded by sequence, weights are whole on every
// rank, and attention is sharded by heads, with an all-to-all before and after it. Each is a fused operation of commfuse
// (arXiv 2604.24013, Algorithm 5). README.md, "What overlaps with what", has their order.
//
// QKV and projection weights are stored head group by head group (params.h).
//
// A slice of an all-to-all is a range of time steps of one rank's shard with the channels of one head group. Attention sees the
// slices as time steps, side by side (each_range()). The linear layers see them as head groups: each group is a separate product
// (each_group() cuts a span that covers several), and the projection adds them up. Such a product is narrower than the whole layer's
// by the number of ranks: the price of sending and receiving without packing, paid in every mode.
#include "up.h"
#include "block.h"
#include "kernels/attention.h"
#include "kernels/linear.h"

// The linear layer of one head group, of rows [first, first + rows) of a shard, at data.
struct job;
typedef void group_rows(const struct job *j, int64_t group, int64_t first, int64_t rows, real *data, cf_stream *stream);

// One operation.
typedef struct job {
    gpt *g;
    int layer;
    int64_t width;      // channels of a head group that are sent
    group_rows *linear; // is computed on one side of the communication,
    time_steps *attend; // and this on the other; NULL: nothing is
    cf_side linear_side;
    const real *in;          // (Ts, B, C) of the linear layer: its input or, backward of QKV, what its input was in forward
    gradient_destination dw; // backward of QKV, if group by group
    bool begun;     // an earlier slice was enqueued behind the communication, where head groups or time steps are added up:
    cf_event added; // when it has added to the sums
} job;

// Attention of the time steps of a span.
static void each_range(const job *j, const cf_span *span, cf_stream *stream) {
    for (int k = 0; k < span->blocks; k++) {
        const int64_t t0 = span->row + k * span->row_stride;
        real *data = (real *)(span->data + k * span->data_stride);
        j->attend(j->g, j->layer, data - t0 * j->g->pass.B * j->width, t0, span->rows, stream); // from time step 0 on
    }
}

// The linear layer works on one shard of the span at a time, this rank's first.
static void each_group(const job *j, const cf_span *span, cf_stream *stream) {
    const cf_group *tp = &j->g->mesh->tp_group;
    const int64_t Ts = j->g->pass.Ts, row_elements = j->g->pass.B * j->width;
    for (int64_t i = 0; i < tp->size; i++)
        for (int k = 0; k < span->blocks; k++) {
            int64_t shard = (tp->rank + i) % tp->size, row = span->row + k * span->row_stride;
            int64_t begin = larger(row, shard * Ts), end = smaller(row + span->rows, (shard + 1) * Ts);
            real *data = (real *)(span->data + k * span->data_stride); // of `row`
            if (begin < end) j->linear(j, shard, begin - shard * Ts, end - begin, data + (begin - row) * row_elements, stream);
        }
}

// Slices may run on two streams, but they add to sums one after another.
static void compute(void *argument, const cf_span *span, cf_stream *stream) {
    job *j = (job *)argument;
    const bool linear = span->side == j->linear_side, adds = span->side == CF_COMPUTE_AFTER;
    if (!linear && !j->attend) return;
    if (adds && j->begun) cf_stream_after(stream, j->added);
    (linear ? each_group : each_range)(j, span, stream);
    if (adds) j->added = cf_event_record_untimed(stream), j->begun = true;
}

// Weights (OC, IC) of each head group for products group by group: QKV (N, Ql, C), projection (N, C, Cl).
static void prepare_groups(gpt *g, linear_prepare *prepare, int tensor, int layer, int64_t IC, int64_t OC) {
    const real *w = params_weight(&g->params, tensor, layer);
    int64_t size = linear_prepared_size(IC, OC);
    for (int64_t i = 0; i < g->mesh->tp; i++)
        g->up.ready[i] = prepare(g->prepared + i * size, w + i * IC * OC, IC, OC, g->context->stream);
}

// --- forward ---

// The queries, keys and values of one head group for some rows of this rank's shard.
static void qkv(const job *j, int64_t group, int64_t first, int64_t rows, real *out, cf_stream *stream) {
    const int64_t B = j->g->pass.B, C = j->g->params.shape.C;
    const real *bias = params_weight(&j->g->params, j->g->qkv.bias, j->layer);
    linear_forward(out, NULL, j->in + first * B * C, j->g->up.ready[group], bias ? bias + group * j->width : NULL, NULL,
                   linear_all(rows * B), C, j->width, stream);
}

// Out-projection of one head group, added to those before: this rank's group starts the sum.
static void project(const job *j, int64_t group, int64_t first, int64_t rows, real *attended, cf_stream *stream) {
    const int64_t B = j->g->pass.B, C = j->g->params.shape.C;
    real *sum = j->g->sums + first * B * C;
    linear_forward(sum, NULL, attended, j->g->up.ready[group], NULL, group != j->g->mesh->tp_group.rank ? sum : NULL,
                   linear_all(rows * B), j->width, C, stream);
}

const real *up_forward(gpt *g, int layer, real *norm) {
    const model_pass *pass = &g->pass;
    const int64_t C = g->params.shape.C, Cl = g->Cl, Ql = g->Ql, rows = pass->Ts * pass->B;
    job j = {.g = g, .layer = layer, .width = Ql, .linear = qkv, .linear_side = CF_COMPUTE_BEFORE, .in = norm};
    prepare_groups(g, linear_prepare_forward, QKVW, layer, C, Ql);
    cf_fuse_set_result(g->qkv.forward, g->acts.qkv[layer]);
    cf_fuse_run(g->qkv.forward, g->up.qkv, pass->Ts, pass->B * Ql, compute, &j, layer);
    gpt_turn(g, g->acts.qkv[layer], false);
    j = (job){.g = g, .layer = layer, .width = Cl, .linear = project, .linear_side = CF_COMPUTE_AFTER, .attend = gpt_attend};
    cf_fuse_set_result(g->attproj.forward, g->acts.groups[layer]);
    cf_fuse_begin(g->attproj.forward, g->acts.attended[layer], pass->Ts, pass->B * Cl, compute, &j, layer);
    prepare_groups(g, linear_prepare_forward, ATTPROJW, layer, Cl, C); // during the last transfers
    cf_fuse_finish(g->attproj.forward);
    const int64_t own = g->mesh->tp_group.rank * rows * Cl;
    // This rank's rows may have been computed in place among the arrivals, but backward reads them in attended.
    cf_copy(g->acts.attended[layer] + own, g->acts.groups[layer] + own, rows * Cl * (int64_t)sizeof(real), g->context->stream);
    return g->sums;
}

// --- backward ---

// The gradient of one head group's output for some rows of this rank's shard.
static void projection_dgrad(const job *j, int64_t group, int64_t first, int64_t rows, real *dattended, cf_stream *stream) {
    const int64_t B = j->g->pass.B, C = j->g->params.shape.C;
    linear_dgrad(dattended, j->in + first * B * C, j->g->up.ready[group], NULL, false, linear_all(rows * B), j->width, C, stream);
}

// Gradient of the layer norm's output from one head group, added to those before: this rank's group starts the sum. When all of
// a group has arrived, its part of the weight gradient, which hides what still arrives of others.
static void qkv_backward(const job *j, int64_t group, int64_t first, int64_t rows, real *dqkv, cf_stream *stream) {
    const int64_t B = j->g->pass.B, C = j->g->params.shape.C, width = j->width;
    const gradient_destination dw = j->dw;
    linear_dgrad(j->g->sums + first * B * C, dqkv, j->g->up.ready[group], NULL, group != j->g->mesh->tp_group.rank,
                 linear_all(rows * B), C, width, stream);
    j->g->up.dy[group] = dqkv - first * B * width; // the group's shard
    j->g->up.arrived[group] += rows;
    if (dw.place == GRADIENT_BY_SLICES && j->g->up.arrived[group] == j->g->pass.Ts)
        linear_wgrad(dw.at + group * width * C, dw.db ? dw.db + group * width : NULL, j->g->up.dy[group], width, j->in,
                     j->g->pass.Ts * B, C, width, dw.add, stream);
}

// From g->up.dy and g->up.x, group by group.
static void weight_gradients(gpt *g, const parallel_linear *l, int layer) {
    weight_gradient w = {.dy = g->up.dy, .x = g->up.x, .R = g->pass.Ts * g->pass.B, .parts = g->mesh->tp};
    zero_weight_gradient(g->pass.zero, l->w, layer, w);
}

void up_gradient_after(gpt *g, int layer) {
    if (zero_decided(&g->zero, QKVW, layer)->place >= GRADIENT_AFTER) weight_gradients(g, &g->qkv, layer);
}

const real *up_backward(gpt *g, int layer, real *dx) {
    const model_pass *pass = &g->pass;
    const parameters *p = &g->params;
    const int64_t N = g->mesh->tp, C = p->shape.C, Cl = g->Cl, Ql = g->Ql, rows = pass->Ts * pass->B;
    job j = {.g = g, .layer = layer, .width = Cl, .linear = projection_dgrad, .linear_side = CF_COMPUTE_BEFORE, .in = dx};
    if (attention_backward_by_ranges()) j.attend = gpt_attend_backward; // adds to the gradients of earlier keys; else below
    prepare_groups(g, linear_prepare_dgrad, ATTPROJW, layer, Cl, C);
    cf_fuse_set_result(g->attproj.backward, g->dattended);
    cf_fuse_begin(g->attproj.backward, g->up.dattended, pass->Ts, pass->B * Cl, compute, &j, layer);
    for (int64_t i = 0; i < N; i++) g->up.dy[i] = dx, g->up.x[i] = g->acts.groups[layer] + i * rows * Cl;
    weight_gradients(g, &g->attproj, layer); // during the all-to-all
    cf_fuse_finish(g->attproj.backward);
    gpt_attend_backward_whole(g, layer);

    j = (job){.g = g, .layer = layer, .width = Ql, .linear = qkv_backward, .linear_side = CF_COMPUTE_AFTER};
    j.dw = *zero_decided(&g->zero, QKVW, layer);
    for (int64_t i = 0; i < N; i++) g->up.arrived[i] = 0;
    cf_fuse_set_result(g->qkv.backward, g->up.dqkv);
    cf_fuse_begin(g->qkv.backward, g->dqkv, pass->Ts, pass->B * Ql, compute, &j, layer);
    j.in = gpt_norm_again(g, 2 * layer);
    prepare_groups(g, linear_prepare_dgrad, QKVW, layer, C, Ql);
    cf_fuse_finish(g->qkv.backward);
    const bool later = j.dw.place >= GRADIENT_AFTER;
    for (int64_t i = 0; i < N; i++) {
        g->up.x[i] = j.in;
        if (later && g->qkv.bias >= 0)
            linear_bias_grad(params_grad(p, g->qkv.bias, layer) + i * Ql, g->up.dy[i], rows, Ql, g->context->stream);
    }
    if (!later) weight_gradients(g, &g->qkv, layer);
    return g->sums;
}

// --- life ---

static cf_fuse *create_alltoall(const gpt *g, const char *name, cf_side side, int64_t capacity, double flops) {
    cf_fuse_config config = overlap_config(&g->setup.how, name, &g->mesh->tp_group, CF_ALLTOALL, side, REAL_DTYPE, capacity);
    config.flops = flops, config.result_given = true, config.independent = true;
    return cf_fuse_create(g->context, config);
}

void up_create(gpt *g) {
    const gpt_shape *shape = &g->params.shape;
    const int64_t N = g->mesh->tp, C = shape->C, shard_rows = g->setup.T * g->setup.B / N;
    const double qkv_flops = 2.0 * (double)(shard_rows * C * N * g->Ql), product = 2.0 * (double)(shard_rows * C * N * g->Cl),
                 attention = attention_flops(g->setup.T, g->setup.B, shape->H / N, C / shape->H);
    const double ranges = attention_backward_by_ranges() ? 2.5 * attention : 0;
    g->qkv.forward = create_alltoall(g, "att.qkv", CF_COMPUTE_BEFORE, shard_rows * g->Ql, qkv_flops);
    g->attproj.forward = create_alltoall(g, "att", CF_COMPUTE_BOTH, shard_rows * g->Cl, product + attention);
    g->attproj.backward = create_alltoall(g, "att", CF_COMPUTE_BOTH, shard_rows * g->Cl, product + ranges);
    g->qkv.arrives = g->qkv.backward = create_alltoall(g, "att.qkv", CF_COMPUTE_AFTER, shard_rows * g->Ql, 2 * qkv_flops);
}
