// See model.h; README.md, "What overlaps with what", lists the operations of a step. up.c is UP's attention half. Layer norms, biases
// of row-parallel layers and residuals work on this rank's shard: forward's norms between the operations, the others in the operation
// whose sum they use (where one rank has all of a row-parallel layer, its product adds both). Their weight gradients are partial
// sums, which zero.c adds up over the world.
//
// With recompute in TPSP, the gather of a saved input depends on nothing that backward computes. It is posted one operation early,
// where computation is left to hide it: fc's during fcproj's backward, QKV's during fc's, since QKV's own backward can hide only
// its reduce-scatter. A weight gradient that is sent owner by owner (zero.h) is computed after these. QKV's comes last, after the
// gradient of the block's input; in the first block it always does, to hide the transfers of the embedding's backward (all-gather ▸
// scatter-add, then rows to their owners), which has begun by then.
//
// The loops over layers call zero.h, which says how weights arrive and gradients leave.
#include "model.h"
#include "block.h"
#include "up.h"
#include "kernels/attention.h"
#include "kernels/crossentropy.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/layernorm.h"
#include "kernels/linear.h"

// In the timeline each part of a pass encloses its operations; between these is the work on this rank's shard.
static cf_trace_work trace_begin(const gpt *g, const char *name, int64_t layer) {
    return cf_trace_begin(g->context->trace, name, (int)layer, g->context->stream);
}

static void trace_end(gpt *g, cf_trace_work work) {
    cf_trace_end(g->context->trace, work, -1, g->context->stream);
}

// --- life ---

static void *host_table(gpt *g, int64_t count, size_t size) {
    return g->tables[g->table_count++] = cf_host_alloc(count, size, "tables of the model");
}

static void *gpt_alloc(gpt *g, int64_t elements, size_t size, const char *purpose) {
    return g->memory[g->memory_count++] = cf_alloc(elements * (int64_t)size, purpose);
}

// The addresses of `count` tensors, which use the memory of `different` ones in turn. One allocation, because a GPU rounds each
// up to 2 MiB. Each tensor begins on a boundary of 256 bytes.
static void *alloc_each(gpt *g, int64_t count, int64_t different, int64_t elements, size_t size) {
    const int64_t step = ceil_div(elements * (int64_t)size, 256) * 256;
    char *memory = gpt_alloc(g, different * step, 1, different == count ? "activations, per layer" : "activations, shared");
    void **tensor = host_table(g, count, sizeof *tensor);
    for (int64_t i = 0; i < count; i++) tensor[i] = memory + i % different * step;
    return tensor;
}

static bool is_up(const gpt *g) {
    return g->params.strategy == STRATEGY_UP;
}

// Memory that is used twice. Each use ends before the next begins; T=gradients compares with buffers apart (gpt_setup).
//
//   memory                     used as                     from                              until
//   norms kept: the last one   the last norm's output      gpt_norm_forward()                the head's weight gradient
//                              mlp_dy                      row_begin_backward(fcproj)        fcproj's weight gradient
//                              attention_dy                row_begin_backward(attproj)       attproj's weight gradient
//   recompute: attention's     output of attention's norm  gpt_norm_forward(), gpt_norm_again()  QKV's weight gradient
//                              mlp_dy                      row_begin_backward(fcproj)        fcproj's weight gradient
//   recompute: the MLP's       output of the MLP's norm    gpt_norm_forward(), gpt_norm_again()  fc's weight gradient
//                              attention_dy                row_begin_backward(attproj)       attproj's weight gradient
//   SwiGLU: fch                its input                   forward                           the pass behind fcproj's dgrad
//                              its gradient                that pass                         fc's weight gradient
//   recompute: hidden          GELU's output of a layer    forward, row_begin_backward()     fcproj's product, weight gradient
//   dqkv                       up.qkv                      up_forward(), QKV's product       the end of its all-to-all
//                              the gradient of QKV         attention's backward              QKV's weight gradient
//   sums                       the result of an operation  its begin                         the kernel that reads it next
//   prepared                   weights of a product        linear_prepare_…()                the next product's preparation
static real *shared_with(gpt *g, real *memory, int64_t elements) {
    return g->setup.apart ? gpt_alloc(g, elements, sizeof *memory, "activations, shared") : memory;
}

static void alloc_rotary(gpt *g) {
    const gpt_shape *s = &g->params.shape;
    const int64_t T = g->setup.T, half = s->C / s->H / 2;
    if (params_block(s)->positions != ROTARY) return;
    g->rotary = gpt_alloc(g, T * 2 * half, sizeof *g->rotary, "activations, shared");
    if (cf_memory_is_reserved(g->rotary)) return;
    accum *table = host_table(g, T * 2 * half, sizeof *table);
    for (int64_t t = 0; t < T; t++)
        for (int64_t i = 0; i < half; i++) {
            const double angle = (double)t * params_angle(s, i);
            table[t * 2 * half + i] = (accum)cos(angle), table[t * 2 * half + half + i] = (accum)sin(angle);
        }
    cf_copy(g->rotary, table, T * 2 * half * (int64_t)sizeof *table, g->context->stream);
}

static void alloc_activations(gpt *g) {
    const char *shared = "activations, shared";
    const gpt_shape *s = &g->params.shape;
    const int64_t L = s->L, C = s->C, N = g->mesh->tp, S = g->split->size, rows = g->setup.T * g->setup.B, shard_rows = rows / N;
    const int64_t halves = 2 * L + 1, norms = is_up(g) && N > 1 ? 1 : 2; // in UP no gather begins early
    const bool again = g->setup.recompute && !g->setup.apart;
    g->norm = alloc_each(g, halves, again ? norms : halves, S * shard_rows * C, sizeof(real));
    g->mlp_dy = shared_with(g, g->norm[again ? 0 : 2 * L], S * shard_rows * C);
    g->attention_dy = shared_with(g, g->norm[again ? 1 : 2 * L], S * shard_rows * C);
    g->x = alloc_each(g, halves, halves, shard_rows * C, sizeof(real));
    g->mean = alloc_each(g, halves, halves, shard_rows, sizeof(accum));
    g->rstd = alloc_each(g, halves, halves, shard_rows, sizeof(accum));
    g->acts.qkv = alloc_each(g, L, L, rows * g->Ql, sizeof(real));
    g->acts.attended = alloc_each(g, L, L, rows * g->Cl, sizeof(real));
    g->acts.lse = alloc_each(g, L, L, rows * s->H / N, sizeof(accum));
    g->acts.fch = alloc_each(g, L, L, S * shard_rows * g->FCl, sizeof(real));
    g->acts.hidden = alloc_each(g, L, again ? 1 : L, S * shard_rows * g->Fl, sizeof(real));
    g->dx = gpt_alloc(g, shard_rows * C, sizeof(real), shared);
    g->sums = gpt_alloc(g, S * shard_rows * C, sizeof(real), shared);
    g->dhidden = gpt_alloc(g, S * shard_rows * g->Fl, sizeof(real), shared);
    g->dattended = gpt_alloc(g, rows * g->Cl, sizeof(real), shared);
    g->dqkv = gpt_alloc(g, rows * g->Ql, sizeof(real), shared);
    if (is_up(g)) {
        g->acts.groups = alloc_each(g, L, L, rows * g->Cl, sizeof(real));
        g->up.qkv = shared_with(g, g->dqkv, rows * g->Ql);
        g->up.dattended = gpt_alloc(g, rows * g->Cl, sizeof(real), shared);
        g->up.dqkv = gpt_alloc(g, rows * g->Ql, sizeof(real), shared);
        g->up.ready = host_table(g, 3 * N, sizeof *g->up.ready);
        g->up.dy = g->up.ready + N, g->up.x = g->up.dy + N;
        g->up.arrived = host_table(g, N, sizeof *g->up.arrived);
    }
    g->norm_scratch = gpt_alloc(g, layernorm_scratch(C), sizeof(accum), shared);
    g->attention_scratch =
        gpt_alloc(g, attention_scratch(g->setup.T, g->setup.B, s->H / N, s->KV / N, C / s->H), sizeof(accum), shared);
}

static void alloc_ends(gpt *g) {
    const int64_t N = g->mesh->tp, S = g->split->size, rows = S * g->setup.T * g->setup.B / N;
    const char *shared = "activations, shared";
    g->logits = gpt_alloc(g, rows * g->Vl, sizeof(real), "logits");
    g->stats = gpt_alloc(g, S * rows * 3, sizeof(accum), shared);
    g->losses = gpt_alloc(g, rows, sizeof(accum), shared);
    g->loss = gpt_alloc(g, 1, sizeof *g->loss, shared);
    g->next = gpt_alloc(g, N * g->Vl, sizeof(real), shared);
    g->pieces = gpt_alloc(g, S * COLLECT, sizeof(real), shared);
    g->inputs = gpt_alloc(g, g->setup.T * g->setup.B, sizeof *g->inputs, shared);
    g->targets = gpt_alloc(g, g->setup.T * g->setup.B, sizeof *g->targets, shared);
    g->host_inputs = host_table(g, 2 * g->setup.T * g->setup.B, sizeof *g->host_inputs);
    g->host_targets = g->host_inputs + g->setup.T * g->setup.B;
}

static parallel_linear linear_of(const gpt *g, const cf_group *group, int w) {
    const int bias = params_bias(&g->params.shape, w);
    return (parallel_linear){.pass = &g->pass, .group = group, .w = w, .bias = bias, .prepared = g->prepared};
}

static void create_layers(gpt *g) {
    const overlap *how = &g->setup.how;
    const gpt_shape *s = &g->params.shape;
    const cf_group *tp = &g->mesh->tp_group;
    const int64_t C = s->C, N = tp->size, shard = g->setup.T * g->setup.B / N * C;
    const double attention = attention_flops(g->setup.T, g->setup.B, s->H / N, C / s->H);
    const int64_t attention_weights = larger(linear_prepared_size(C, g->Ql), linear_prepared_size(g->Cl, C)) * (is_up(g) ? N : 1);
    const int64_t weights = larger(linear_prepared_size(C, g->FCl), linear_prepared_size(g->Fl, C));
    const int64_t prepared = larger(larger(weights, attention_weights), linear_prepared_size(C, g->Vl));
    g->prepared = gpt_alloc(g, prepared, sizeof(real), "weights, prepared");
    g->fc = linear_of(g, g->split, FCW);
    g->fcproj = linear_of(g, g->split, FCPROJW);
    g->qkv = linear_of(g, tp, QKVW);
    g->attproj = linear_of(g, tp, ATTPROJW);
    g->head = linear_of(g, g->split, WTE);
    g->fc.gated = g->fcproj.gated = params_block(s)->activation == SWIGLU;
    column_create(&g->fc, "mlp.fc1", shard, how, g->setup.recompute);
    row_create(&g->fcproj, "mlp.fc2", shard, how, 0, 0);
    if (is_up(g)) {
        up_create(g);
    } else {
        column_create(&g->qkv, "att.qkv", shard, how, g->setup.recompute);
        const double ranges = attention_backward_by_ranges() ? 2.5 * attention : 0;
        row_create(&g->attproj, "att.proj", shard, how, attention, ranges);
    }
    column_create(&g->head, "head", shard, how, false);
}

static cf_fuse *create_gather(gpt *g, const char *name, const cf_group *group, cf_dtype dtype, int64_t capacity) {
    return cf_fuse_create(g->context, overlap_config(&g->setup.how, name, group, CF_ALLGATHER, CF_NO_COMPUTE, dtype, capacity));
}

// Between the hosts of GPUs a bucket's transfer takes at least this many times its latency.
static double shard_bytes(const cf_transport *t, const cf_mesh *mesh) {
    const double times = 6;
    if (!t || !t->costs.serial || mesh->dp_group.hosts == 1) return 0;
    return times * t->costs.network_latency_s * cf_bytes_per_s(&t->costs, &mesh->dp_group);
}

// Do transfers between replicas take much of a pass over so many tokens? To leave them all multiprocessors slows all products, not to
// do so only those that meet a transfer, twice as much as they take.
static bool busy(const cf_transport *t, const cf_group *replicas, double tokens) {
    const int places = replicas->hosts > 1 ? replicas->size / replicas->hosts : 1;
    const double rate = places * cf_bytes_per_s(&t->costs, replicas), passes = 4;
    return 6 * tokens / t->costs.flops_per_s < passes * (double)(sizeof(real) + sizeof(accum)) / rate;
}

void gpt_create(gpt *g, cf_context *context, const cf_mesh *mesh, const gpt_setup *setup) {
    const int64_t T = setup->T, B = setup->B;
    const gpt_shape shape = setup->shape;
    if (T % mesh->tp != 0)
        cf_die_together("choose --seq as a multiple of --tp", "--seq %ld does not divide over --tp %d", T, mesh->tp);
    if (T > shape.maxT)
        cf_die_together("lower --seq, or start from a model with more positions",
                        "--seq %ld is longer than the model's %ld positions", T, shape.maxT);
    *g = (gpt){.setup = *setup, .context = context, .mesh = mesh};
    const overlap *how = &setup->how;
    g->split = setup->strategy == STRATEGY_UP ? &mesh->self_group : &mesh->tp_group;
    g->pass = (model_pass){.context = context, .params = &g->params, .zero = &g->zero};
    params_create(&g->params, shape, mesh, setup->strategy,
                  setup->optimizer->others ? NO_THIN : shard_bytes(context->transport, mesh));
    if (context->transport) context->transport->leave_for_all = busy(context->transport, &mesh->dp_group, (double)(T * B));
    g->Ql = params_local_rows(&g->params, QKVW) / g->params.parts, g->Cl = params_local_columns(&g->params, ATTPROJW);
    g->FCl = params_local_rows(&g->params, FCW), g->Fl = params_local_columns(&g->params, FCPROJW);
    g->Vl = params_local_rows(&g->params, WTE);
    g->first = g->split->rank * g->Vl;
    g->valid = smaller(larger(shape.V - g->first, 0), g->Vl);
    alloc_activations(g);
    alloc_rotary(g);
    alloc_ends(g);
    create_layers(g);
    g->gather_stats = create_gather(g, "loss", g->split, ACCUM_DTYPE, T * B * 3);
    g->collect = create_gather(g, "save", g->split, REAL_DTYPE, COLLECT);
    g->gather_logits = create_gather(g, "sample", &mesh->tp_group, REAL_DTYPE, g->Vl);
    lookup_create(&g->embedding, context, &g->params, g->split, T / mesh->tp, B, how);
    zero_create(&g->zero, context, &g->params, setup->optimizer, g->embedding.by_rows, g->split->size * T * B / mesh->tp, how);
    const parallel_linear *linear[] = {&g->qkv, &g->attproj, &g->fc, &g->fcproj, &g->head};
    for (int i = 0; i < 5; i++) g->zero.arrives[linear[i]->w] = linear[i]->arrives;
}

void gpt_free(gpt *g) {
    zero_free(&g->zero);
    lookup_free(&g->embedding);
    parallel_linear *linear[] = {&g->qkv, &g->attproj, &g->fc, &g->fcproj, &g->head};
    for (int i = 0; i < 5; i++) parallel_linear_free(linear[i]);
    cf_fuse *gathers[] = {g->gather_stats, g->gather_logits, g->collect};
    for (int i = 0; i < 3; i++) cf_fuse_free(gathers[i]);
    while (g->memory_count > 0) cf_free(g->memory[--g->memory_count]);
    while (g->table_count > 0) free(g->tables[--g->table_count]);
    params_free(&g->params);
}

// --- embedding ---

int64_t gpt_first_row(const gpt *g) {
    return (g->mesh->tp_group.rank - g->split->rank) * g->pass.Ts * g->pass.B;
}

void gpt_begin_forward(gpt *g, const int32_t *inputs, const int32_t *targets, int64_t T, int64_t B) {
    g->pass.Ts = T / g->mesh->tp, g->pass.B = B;
    g->has_targets = targets != NULL;
    cf_copy(g->inputs, inputs, T * B * (int64_t)sizeof *inputs, g->context->stream);
    if (targets) cf_copy(g->targets, targets, T * B * (int64_t)sizeof *targets, g->context->stream);
    g->begun = trace_begin(g, "embedding forward", -1);
    bool here = zero_table_is_here(&g->zero);
    g->lookup_begun = here || g->embedding.by_rows;
    if (g->lookup_begun) lookup_forward(&g->embedding, g->inputs + gpt_first_row(g), g->pass.Ts, B, !here, g->sums);
    zero_update_layers(&g->zero);
}

static void embed(gpt *g) {
    zero_shards *z = &g->zero;
    int64_t Ts = g->pass.Ts, B = g->pass.B;
    if (!g->lookup_begun) {
        zero_prefetch(z, 0);
        zero_wait(z, LAYER_TABLE);
        lookup_forward(&g->embedding, g->inputs + gpt_first_row(g), Ts, B, false, g->sums);
    }
    lookup_finish_forward(&g->embedding, g->x[0]);
    g->lookup_begun = false;
    zero_prefetch(z, 0);
    zero_wait(z, LAYER_VECTORS);
    if (params_block(&g->params.shape)->positions != LEARNED) return;
    position_forward(g->x[0], params_weight(&g->params, WPE, 0), g->mesh->tp_group.rank * Ts, Ts, B, g->params.shape.C,
                     g->context->stream);
}

static void finish_table(gpt *g) {
    lookup_finish_backward(&g->embedding);
    if (!g->embedding.by_rows) zero_reduce(&g->zero, LAYER_TABLE);
}

// Does the lookup's gradient go on to owners, as rows or with the table? Then finish the lookup early, so that the remaining
// computation hides that transfer rather than the lookup's.
static bool table_gradient_travels(const gpt *g) {
    return g->zero.last && g->params.bucket[g->params.table].group->size > 1;
}

static void embed_backward(gpt *g) {
    int64_t Ts = g->pass.Ts, B = g->pass.B;
    lookup_backward(&g->embedding, g->dx, g->inputs + gpt_first_row(g), g->zero.last, g->sums);
    if (params_block(&g->params.shape)->positions == LEARNED)
        position_backward(params_grad(&g->params, WPE, 0), g->dx, g->mesh->tp_group.rank * Ts, Ts, B, g->params.shape.C,
                          g->context->stream);
    if (table_gradient_travels(g)) finish_table(g);
    zero_reduce(&g->zero, LAYER_VECTORS);
}

// --- loss ---

// scale 0: no backward follows.
static void compute_loss(gpt *g, double scale) {
    const int64_t own = g->pass.Ts * g->pass.B, rows = g->split->size * own, Vl = g->Vl;
    const int32_t *targets = g->targets + gpt_first_row(g);
    const double z = g->setup.z_loss;
    cf_stream *stream = g->context->stream;
    if (g->split->size == 1 && scale != 0) {
        crossentropy_fused(g->losses, g->logits, targets, scale, z, g->valid, rows, Vl, stream);
    } else {
        crossentropy_stats(g->stats + g->split->rank * rows * 3, g->logits, targets, g->first, g->valid, rows, Vl, stream);
        cf_fuse_run(g->gather_stats, g->stats, rows, 3, NULL, NULL, -1);
        crossentropy_combine(g->losses, g->logits, g->stats, g->split->size, targets, scale, z, g->first, g->valid, rows, Vl,
                             stream);
    }
    if (scale != 0) crossentropy_sum(g->loss, g->losses + g->split->rank * own, own, stream);
}

// --- passes ---

void gpt_forward(gpt *g, double scale) {
    const parameters *p = &g->params;
    const int64_t L = p->shape.L, C = p->shape.C, rows = g->pass.Ts * g->pass.B;
    cf_stream *stream = g->context->stream;
    embed(g);
    trace_end(g, g->begun);
    for (int l = 0; l < L; l++) {
        const int64_t attention_norm = 2 * l, mlp_norm = 2 * l + 1;
        zero_prefetch(&g->zero, l);
        zero_wait(&g->zero, l);
        const cf_trace_work block = trace_begin(g, "block forward", l);
        real *norm = gpt_norm_forward(g, attention_norm);
        if (is_up(g)) {
            const real *sum = up_forward(g, l, norm); // (Ts, B, C)
            residual_forward(g->x[mlp_norm], g->x[attention_norm], whole_sum(sum), params_weight(p, g->attproj.bias, l), rows, C,
                             stream);
        } else {
            column_forward(&g->qkv, l, g->acts.qkv[l], NULL, norm);
            gpt_turn(g, g->acts.qkv[l], false);
            row_forward(&g->attproj, l, g->x[mlp_norm], g->x[attention_norm], g->sums, g->acts.attended[l], gpt_attend, g);
        }
        column_forward(&g->fc, l, g->acts.hidden[l], g->acts.fch[l], gpt_norm_forward(g, mlp_norm));
        row_forward(&g->fcproj, l, g->x[mlp_norm + 1], g->x[mlp_norm], g->sums, g->acts.hidden[l], NULL, NULL);
        trace_end(g, block);
    }
    const cf_trace_work head = trace_begin(g, "head forward", -1);
    zero_wait(&g->zero, LAYER_TABLE);
    column_forward(&g->head, -1, g->logits, NULL, gpt_norm_forward(g, 2 * L));
    if (g->has_targets) compute_loss(g, scale);
    trace_end(g, head);
}

void gpt_backward(gpt *g, bool first, bool last) {
    const int64_t L = g->params.shape.L, C = g->params.shape.C;
    real *norm = g->norm[2 * L], *dx = g->dx;
    const bool gated = g->fc.gated;
    const cf_trace_work head = trace_begin(g, "head backward", -1);
    zero_begin_backward(&g->zero, first, last);
    if (first) params_zero_grad(&g->params, g->context->stream);
    cf_zero(dx, g->pass.Ts * g->pass.B * C * (int64_t)sizeof *dx, g->context->stream);
    column_backward(&g->head, -1, g->sums, g->logits, norm, gpt_norm_backward, &(norm_use){g, 2 * L});
    column_gradient_after(&g->head, -1, g->logits, norm);
    if (g->embedding.by_rows) zero_reduce(&g->zero, LAYER_TABLE); // the lookup's part is sent separately
    trace_end(g, head);
    for (int l = (int)L - 1; l >= 0; l--) {
        const int64_t attention_norm = 2 * l, mlp_norm = 2 * l + 1;
        const cf_trace_work block = trace_begin(g, "block backward", l);
        linear_backward_job job = {.dx = g->dhidden, .pre = g->acts.fch[l], .x = g->acts.hidden[l], .again = g->setup.recompute};
        real *dfch = gated ? g->acts.fch[l] : g->dhidden;
        row_begin_backward(&g->fcproj, l, dx, g->mlp_dy, job);
        norm = gpt_norm_again(g, mlp_norm);
        column_begin_gather(&g->fc, l, norm, dfch);
        row_finish_backward(&g->fcproj, l);
        if (!is_up(g)) column_begin_gather(&g->qkv, l, gpt_norm_again(g, attention_norm), g->dqkv);
        column_backward(&g->fc, l, g->sums, dfch, norm, gpt_norm_backward, &(norm_use){g, mlp_norm});
        column_gradient_after(&g->fc, l, dfch, norm); // unless column_backward() has computed it
        g->dqkv_begun = false;
        norm_use before = {g, attention_norm};
        if (is_up(g)) {
            gpt_norm_backward(&before, whole_sum(up_backward(g, l, dx)), 0, g->pass.Ts, g->context->stream);
        } else {
            job = (linear_backward_job){.dx = g->dattended, .x = g->acts.attended[l], .argument = g};
            if (attention_backward_by_ranges()) job.use_dx = gpt_attend_backward;
            row_begin_backward(&g->attproj, l, dx, g->attention_dy, job);
            row_finish_backward(&g->attproj, l);
            gpt_attend_backward_whole(g, l);
            column_backward(&g->qkv, l, g->sums, g->dqkv, g->norm[attention_norm], gpt_norm_backward, &before);
        }
        zero_reduce(&g->zero, l); // what is complete so far
        if (l == 0) embed_backward(g);
        if (is_up(g))
            up_gradient_after(g, l);
        else
            column_gradient_after(&g->qkv, l, g->dqkv, g->norm[attention_norm]);
        zero_reduce(&g->zero, l); // QKV's, whose gradient may have come last
        trace_end(g, block);
    }
    if (!table_gradient_travels(g)) finish_table(g);
}
