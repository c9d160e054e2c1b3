// See optimizer.h. Life of one bucket in a step:
//
//   ready     (backward has completed its gradient)   reduce-scatter begun, advanced at every later `ready`
//   step      finished in the order begun; norm of the own shards; AdamW on the own shard; all-gather begun
//   need      (next forward is about to use it)       all-gather finished
//
// A bucket whose group has a single member never travels. Every element of every tensor is owned by exactly
// one rank of the world, so the global norm is the sum of the ranks' own sums, added in rank order.
#include "optimizer.h"
#include "../commfuse/die.h"
#include <math.h>
#include <stdlib.h>

// --- life ---

static cf_fuse *plan_bucket(zero_optimizer *o, const param_bucket *b, cf_operation operation, overlap how) {
    if (b->group->size == 1) return NULL;
    return cf_fuse_create(o->context,
                          (cf_fuse_plan){.name = operation == CF_ALLGATHER ? "weights" : "gradients",
                                         .group = b->group,
                                         .operation = operation,
                                         .side = CF_NO_COMPUTE,
                                         .mode = how.mode,
                                         .route = how.route,
                                         .slices = 1,
                                         .dtype = REAL_DTYPE,
                                         .capacity = b->shard});
}

static void *array(int count, size_t size) {
    void *memory = calloc((size_t)count, size);
    if (!memory) cf_die(NULL, "out of memory for %d buckets", count);
    return memory;
}

void optimizer_create(zero_optimizer *o, cf_context *context, const cf_mesh *mesh, parameters *p,
                      overlap how) {
    int n = p->buckets;
    *o = (zero_optimizer){.context = context, .mesh = mesh, .params = p, .eager = how.mode != CF_MODE_NONE};
    o->state = array(n, sizeof *o->state);
    o->reduce = array(n, sizeof *o->reduce);
    o->gather = array(n, sizeof *o->gather);
    o->reducing = array(n, sizeof *o->reducing);
    o->gathering = array(n, sizeof *o->gathering);
    o->shard = array(n, sizeof *o->shard);
    int64_t owned = 0;
    for (int i = 0; i < n; i++) {
        o->state[i] = owned;
        owned += p->bucket[i].shard;
        o->reduce[i] = plan_bucket(o, &p->bucket[i], CF_REDUCE_SCATTER, how);
        o->gather[i] = plan_bucket(o, &p->bucket[i], CF_ALLGATHER, how);
    }
    o->m = cf_alloc(owned * (int64_t)sizeof(real), "optimizer state");
    o->v = cf_alloc(owned * (int64_t)sizeof(real), "optimizer state");
    int world = mesh->world_group.size;
    if (how.mode == CF_MODE_NOWIRE) how.mode = CF_MODE_COMMFUSE; // figures about a run are never left out
    o->report = cf_alloc(world * REPORT * (int64_t)sizeof(double), "optimizer state");
    o->exchange_report = cf_fuse_create(context, (cf_fuse_plan){.name = "report",
                                                                .group = &mesh->world_group,
                                                                .operation = CF_ALLGATHER,
                                                                .side = CF_NO_COMPUTE,
                                                                .mode = how.mode,
                                                                .route = how.route,
                                                                .slices = 1,
                                                                .dtype = CF_FP64,
                                                                .capacity = REPORT});
}

void optimizer_free(zero_optimizer *o) {
    for (int i = 0; i < o->params->buckets; i++) {
        cf_fuse_free(o->reduce[i]);
        cf_fuse_free(o->gather[i]);
    }
    cf_fuse_free(o->exchange_report);
    cf_free(o->m);
    cf_free(o->v);
    cf_free(o->report);
    free(o->state);
    free(o->reduce);
    free(o->gather);
    free(o->reducing);
    free(o->gathering);
    free(o->shard);
}

// First local element of the shard of a bucket that this rank owns.
static int64_t first_owned(const param_bucket *b) {
    return b->first + (b->group->size == 1 ? 0 : b->group->rank * b->shard);
}

// --- transfers ---

static void begin_reduce(zero_optimizer *o, int i) {
    const param_bucket *b = &o->params->bucket[i];
    if (o->reduce[i])
        cf_fuse_begin(o->reduce[i], o->params->grad + b->first, b->shard, 1, NULL, NULL, b->layer);
    o->reducing[i] = true;
}

static void finish_reduce(zero_optimizer *o, int i) {
    if (!o->reducing[i]) begin_reduce(o, i);
    o->shard[i] = o->reduce[i] ? cf_fuse_finish(o->reduce[i]) : o->params->grad + o->params->bucket[i].first;
    o->reducing[i] = false;
}

static void advance(zero_optimizer *o) {
    for (int i = 0; i < o->params->buckets; i++) {
        if (o->reducing[i] && o->reduce[i]) cf_fuse_advance(o->reduce[i]);
    }
}

static void begin_gather(zero_optimizer *o, int i) {
    const param_bucket *b = &o->params->bucket[i];
    if (!o->gather[i]) return;
    cf_fuse_begin(o->gather[i], o->params->weight + b->first, b->shard, 1, NULL, NULL, b->layer);
    o->gathering[i] = true;
}

static void finish_gather(void *argument, int i) {
    zero_optimizer *o = (zero_optimizer *)argument;
    if (!o->gathering[i]) return;
    cf_fuse_finish(o->gather[i]);
    o->gathering[i] = false;
}

static void gradient_ready(void *argument, int i) {
    zero_optimizer *o = (zero_optimizer *)argument;
    if (!o->eager) return;
    begin_reduce(o, i);
    advance(o);
}

gpt_hooks optimizer_hooks(zero_optimizer *o) {
    return (gpt_hooks){.argument = o, .need = finish_gather, .ready = gradient_ready};
}

void optimizer_settle(zero_optimizer *o) {
    for (int i = 0; i < o->params->buckets; i++) finish_gather(o, i);
}

// The order in which backward completes buckets: layers from the last to the first, then the embeddings.
static int backward_order(const zero_optimizer *o, int i) {
    int n = o->params->buckets;
    return i < n - 2 ? (n - 4 - i / 2 * 2) + i % 2 : i;
}

// The order in which forward needs them: embeddings, then layers.
static int forward_order(const zero_optimizer *o, int i) {
    int n = o->params->buckets;
    return i < 2 ? n - 2 + i : i - 2;
}

// --- reports ---

static double *own_report(zero_optimizer *o) {
    return o->report + o->mesh->world_group.rank * REPORT;
}

static void exchange_reports(zero_optimizer *o) {
    cf_fuse_run(o->exchange_report, o->report, 1, REPORT, NULL, NULL, -1);
    cf_stream_sync(o->context->stream);
}

void optimizer_maximum(zero_optimizer *o, double *values, int count) {
    for (int j = 0; j < count; j++) own_report(o)[j] = values[j];
    exchange_reports(o);
    for (int rank = 0; rank < o->mesh->world_group.size; rank++)
        for (int j = 0; j < count; j++) values[j] = fmax(values[j], o->report[rank * REPORT + j]);
}

// Sum over replicas of column j of the reports: the ranks of one tp group hold the same number.
static double sum_replicas(const zero_optimizer *o, int j) {
    double sum = 0;
    for (int rank = 0; rank < o->mesh->world_group.size; rank += o->mesh->tp)
        sum += o->report[rank * REPORT + j];
    return sum;
}

double optimizer_sum(zero_optimizer *o, double value) {
    own_report(o)[0] = value;
    exchange_reports(o);
    double sum = 0;
    for (int rank = 0; rank < o->mesh->world_group.size; rank++) sum += o->report[rank * REPORT];
    return sum;
}

double optimizer_sum_replicas(zero_optimizer *o, double value) {
    own_report(o)[0] = value;
    exchange_reports(o);
    return sum_replicas(o, 0);
}

// --- the step ---

// Number of the first tensor with a non-finite gradient in the own shards: tensor + TENSORS · layer; -1: none.
static double first_bad_tensor(zero_optimizer *o) {
    for (int i = 0; i < o->params->buckets; i++) {
        const param_bucket *b = &o->params->bucket[i];
        int64_t at = first_nonfinite(o->shard[i], b->shard, o->context->stream), layer = 0, rest = 0;
        int tensor = 0;
        if (at < 0) continue;
        if (params_find(o->params, first_owned(b) + at, &tensor, &layer, &rest))
            return (double)(tensor + TENSORS * layer);
    }
    return -1;
}

CF_NORETURN static void die_nonfinite(zero_optimizer *o, double loss, double norm) {
    const char *hint =
        "lower --lr, raise --warmup, or look at the data of this step; nothing was written by this step";
    for (int rank = 0; rank < o->mesh->world_group.size; rank++) {
        int bad = (int)o->report[rank * REPORT + 2];
        if (bad < 0) continue;
        char layer[32] = "";
        if (params_layers(&o->params->shape, bad % TENSORS) > 1)
            snprintf(layer, sizeof layer, " of layer %d", bad / TENSORS);
        cf_die_together(hint,
                        "step %d: loss %g, gradient norm %g: the gradient of %s%s on rank %d is not finite",
                        o->context->step, loss, norm, params_name(bad % TENSORS), layer, rank);
    }
    cf_die_together(hint, "step %d: loss %g, gradient norm %g: not finite, though every gradient tensor is",
                    o->context->step, loss, norm);
}

// AdamW on the own shard of one bucket, tensor by tensor, since only matrices and embeddings decay.
static void update_bucket(zero_optimizer *o, int i, adamw a) {
    const param_bucket *b = &o->params->bucket[i];
    int64_t first = first_owned(b), count = 0;
    double decay = a.weight_decay;
    for (int64_t done = 0; done < b->shard; done += count) {
        int tensor = 0;
        int64_t layer = 0;
        count = b->shard - done;
        bool found = params_find(o->params, first + done, &tensor, &layer, &count);
        if (!found) break; // padding lies behind the last tensor of a bucket
        if (count > b->shard - done) count = b->shard - done;
        a.weight_decay = params_decays(tensor) ? decay : 0;
        adamw_update(o->params->weight + first + done, o->m + o->state[i] + done, o->v + o->state[i] + done,
                     o->shard[i] + done, count, a, o->context->stream);
    }
}

void optimizer_zero_grad(zero_optimizer *o) {
    cf_zero(o->params->grad, o->params->elements * (int64_t)sizeof(real), o->context->stream);
}

step_result optimizer_step(zero_optimizer *o, adamw a, double clip, double loss_sum, int64_t tokens) {
    int n = o->params->buckets, world = o->mesh->world_group.size;
    double squares = 0;
    for (int i = 0; i < n; i++) {
        finish_reduce(o, backward_order(o, i));
        advance(o);
    }
    for (int i = 0; i < n; i++)
        squares += sum_of_squares(o->shard[i], o->params->bucket[i].shard, o->context->stream);
    own_report(o)[0] = loss_sum;
    own_report(o)[1] = squares;
    own_report(o)[2] = isfinite(squares) ? -1 : first_bad_tensor(o);
    exchange_reports(o);

    step_result result = {.loss = sum_replicas(o, 0) / (double)tokens};
    for (int rank = 0; rank < world; rank++) result.grad_norm += o->report[rank * REPORT + 1];
    result.grad_norm = sqrt(result.grad_norm);
    if (!isfinite(result.loss) || !isfinite(result.grad_norm))
        die_nonfinite(o, result.loss, result.grad_norm);

    a.scale = clip > 0 && result.grad_norm > clip ? clip / result.grad_norm : 1;
    for (int i = 0; i < n; i++) {
        int b = forward_order(o, i);
        double begin = cf_now_ms();
        update_bucket(o, b, a);
        cf_trace_add(o->context->trace, CF_TRACE_COMPUTE, "update", o->params->bucket[b].layer, -1, -1, 0,
                     begin, cf_now_ms());
        begin_gather(o, b);
    }
    return result;
}

void optimizer_operations(zero_optimizer *o,
                          void (*visit)(void *argument, const char *place, const cf_fuse *fuse),
                          void *argument) {
    int n = o->params->buckets; // the first layer's pair and the embeddings' stand for all
    for (int i = 0; i < n; i++) {
        if (!o->reduce[i] || (i >= 2 && i < n - 2)) continue;
        visit(argument, i < 2 ? "behind backward, each layer" : "behind backward, embeddings", o->reduce[i]);
        visit(argument, i < 2 ? "behind forward, each layer" : "behind forward, embeddings", o->gather[i]);
    }
}
