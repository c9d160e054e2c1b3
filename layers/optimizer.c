// See optimizer.h. Every element of every tensor is owned by one rank of the world, so the global norm is the sum of the ranks'
// sums, added in rank order.
#include "optimizer.h"
#include "../commfuse/die.h"
#include <math.h>
#include <stdlib.h>

// --- life ---

void optimizer_create(zero_optimizer *o, gpt *model, const overlap *how) {
    parameters *p = &model->params;
    *o = (zero_optimizer){
        .context = model->context, .mesh = model->mesh, .params = p, .zero = &model->zero, .embedding = &model->embedding};
    const int64_t bytes = p->owned * (int64_t)sizeof(precise);
    o->m = cf_alloc(bytes, "optimizer state");
    o->v = cf_alloc(bytes, "optimizer state");
    if (REAL_DTYPE != PRECISE_DTYPE) o->master = cf_alloc(bytes, "master weights");
    o->squares = cf_alloc(SQUARES_SCRATCH * (int64_t)sizeof(double), "optimizer state");
    const int64_t reports = model->mesh->world_group.size * REPORT;
    o->device = cf_alloc(reports * (int64_t)sizeof(double), "optimizer state");
    o->all = cf_host_alloc(reports, sizeof *o->all, "figures of all ranks");
    cf_fuse_plan plan = overlap_plan(how, "report", &model->mesh->world_group, CF_ALLGATHER, CF_NO_COMPUTE, CF_FP64, REPORT);
    if (plan.algorithm && plan.algorithm->bound) plan.algorithm = cf_algorithm_find("once"); // reports travel always
    o->gather = cf_fuse_create(model->context, plan);
}

void optimizer_free(zero_optimizer *o) {
    cf_fuse_free(o->gather);
    cf_free(o->device);
    free(o->all);
    cf_free(o->m);
    cf_free(o->v);
    cf_free(o->master);
    cf_free(o->squares);
}

void optimizer_start(zero_optimizer *o) {
    for (int i = 0; i < o->params->buckets && o->master; i++) {
        const param_bucket *b = &o->params->bucket[i];
        adamw_master(o->master + b->owned, o->params->weight + params_first_owned(b), b->shard, o->context->stream);
    }
}

// --- update ---

// AdamW on this rank's shard of one bucket, once. Only matrices and embeddings decay; padding does not change.
static void update(zero_optimizer *o, int i) {
    const param_bucket *b = &o->params->bucket[i];
    const precise *shard = o->zero->bucket[i].shard;
    cf_stream *stream = o->context->stream;
    if (!shard) return;
    cf_moment start = cf_trace_begin(o->context->trace, "update", stream);
    for (int decays = 1; decays >= 0; decays--) {
        int64_t begin = b->first + (decays ? 0 : b->decayed), end = b->first + (decays ? b->decayed : b->used);
        adamw a = o->update;
        if (!params_owned(b, &begin, &end)) continue;
        if (!decays) a.weight_decay = 0;
        const int64_t done = begin - params_first_owned(b), at = b->owned + done;
        adamw_update(o->params->weight + begin, o->master ? o->master + at : NULL, o->m + at, o->v + at, shard + done, end - begin,
                     a, stream);
    }
    cf_trace_end(o->context->trace, "update", b->layer, -1, start, stream);
    zero_updated(o->zero, i);
}

// In the order in which forward needs them; the gathers of those needed first begin at once.
void optimizer_finish_update(zero_optimizer *o) {
    for (int place = 0; place < o->params->buckets; place++) {
        update(o, o->zero->forward[place]);
        zero_send_first(o->zero, o->zero->forward[place]);
    }
}

void optimizer_wait_for_weights(zero_optimizer *o) {
    optimizer_finish_update(o);
    zero_wait_for_everything(o->zero);
    cf_check_verdict(o->context->check, o->context->stream);
}

// --- the step ---

// Finishes all reductions, adds the rows of the lookup to the table's, and sums the squares of this rank's shards: of the first
// while the last still travel, always in this order. A single rank owns everything, side by side.
static void finish_reductions(zero_optimizer *o, double *sum) {
    const parameters *p = o->params;
    bool whole = o->mesh->world_group.size == 1;
    for (int place = 0; place < p->buckets; place++) {
        int i = o->zero->backward[place];
        precise *shard = zero_finish_gradient(o->zero, i);
        if (i == p->table) lookup_finish_delivery(o->embedding, shard);
        if (!whole) sum_of_squares(sum, o->squares, shard, p->bucket[i].shard, o->context->stream);
    }
    if (whole) sum_of_squares(sum, o->squares, p->grad, p->elements, o->context->stream);
}

const double *optimizer_reduce(zero_optimizer *o, const double *loss_sum, const double *values, int count) {
    enum { LOSS, NORM2, VALUES };
    const cf_group *world = &o->mesh->world_group;
    double *mine = o->device + world->rank * REPORT;
    cf_copy(&mine[LOSS], loss_sum, (int64_t)sizeof *mine, o->context->stream);
    cf_zero(&mine[NORM2], (int64_t)sizeof *mine, o->context->stream);
    if (count > 0) cf_copy(&mine[VALUES], values, count * (int64_t)sizeof *mine, o->context->stream);
    finish_reductions(o, &mine[NORM2]);
    cf_fuse_run(o->gather, o->device, 1, REPORT, NULL, NULL, -1);
    cf_copy(o->all, o->device, world->size * REPORT * (int64_t)sizeof *o->all, o->context->stream);
    cf_stream_sync(o->context->stream); // here, and for all tokens (lookup.c), the host waits for the device
    cf_check_verdict(o->context->check, o->context->stream);
    o->loss = o->norm2 = 0;
    for (int rank = 0; rank < world->size; rank++)
        o->loss += o->all[rank * REPORT + LOSS], o->norm2 += o->all[rank * REPORT + NORM2];
    return o->all + VALUES;
}

const double *optimizer_exchange(zero_optimizer *o, const double *values, int count) {
    double mine[REPORT] = {0};
    memcpy(mine, values, (size_t)count * sizeof *mine);
    cf_allgather_host(o->context->transport, mine, o->all, (int64_t)sizeof mine);
    return o->all;
}

int64_t optimizer_nonfinite(zero_optimizer *o) {
    const parameters *p = o->params;
    for (const param_tensor *t = p->placed; t < p->placed + p->tensors; t++) {
        const param_bucket *b = &p->bucket[t->bucket];
        int64_t begin = t->first, end = t->first + t->count;
        double sum = 0; // of squares
        if (!params_owned(b, &begin, &end)) continue;
        cf_zero(o->device, (int64_t)sizeof sum, o->context->stream);
        sum_of_squares(o->device, o->squares, o->zero->bucket[t->bucket].shard + begin - params_first_owned(b), end - begin,
                       o->context->stream);
        cf_copy(&sum, o->device, (int64_t)sizeof sum, o->context->stream);
        cf_stream_sync(o->context->stream);
        if (!isfinite(sum)) return t->tensor + TENSORS * t->layer;
    }
    return -1;
}

// Finds the first rank with such a tensor. Ends the run unless this step may be skipped. Collective.
static void report_nonfinite(zero_optimizer *o, step_result *r, bool may_skip) {
    const char *hint = "lower --lr, raise --warmup, or look at the data of this step; nothing was written by "
                       "this step; --skip-nonfinite N leaves such steps out";
    const double mine = (double)optimizer_nonfinite(o);
    const double *all = optimizer_exchange(o, &mine, 1);
    r->skipped = true, r->nonfinite_rank = -1;
    snprintf(r->nonfinite, sizeof r->nonfinite, "the loss alone");
    for (int rank = o->mesh->world_group.size - 1; rank >= 0; rank--) {
        int bad = (int)all[rank * REPORT];
        if (bad < 0) continue;
        bool layered = params_layers(&o->params->shape, bad % TENSORS) > 1;
        r->nonfinite_rank = rank;
        snprintf(r->nonfinite, sizeof r->nonfinite, layered ? "%s of layer %d" : "%s", params_name(bad % TENSORS), bad / TENSORS);
    }
    for (int i = 0; i < o->params->buckets; i++) o->zero->bucket[i].shard = NULL;
    if (may_skip) return;
    if (r->nonfinite_rank >= 0)
        cf_die_together(hint, "step %d: loss %g, gradient norm %g: the gradient of %s on rank %d is not finite", o->context->step,
                        r->loss, r->grad_norm, r->nonfinite, r->nonfinite_rank);
    cf_die_together(hint, "step %d: loss %g, gradient norm %g: not finite, though every gradient tensor is", o->context->step,
                    r->loss, r->grad_norm);
}

// Updates what the next forward needs first: positions, vectors and rows of the table. Where these come from other ranks, they
// travel during the update of all other weights.
const step_result *optimizer_begin_update(zero_optimizer *o, adamw a, double clip, int64_t tokens, bool may_skip) {
    step_result *r = &o->result;
    *r = (step_result){.loss = o->loss / (double)tokens, .grad_norm = sqrt(o->norm2)};
    if (!isfinite(r->loss) || !isfinite(r->grad_norm)) {
        report_nonfinite(o, r, may_skip);
        return r;
    }
    a.scale = clip > 0 && r->grad_norm > clip ? clip / r->grad_norm : 1;
    o->update = a;
    zero_begin_update(o->zero);
    for (int i = o->params->buckets - 1; i >= o->params->table; i--) update(o, i);
    return r;
}

void optimizer_operations(zero_optimizer *o, visit_operation *visit, void *argument) {
    zero_operations(o->zero, visit, argument);
    visit(argument, "figures of all ranks", o->gather, 1);
}
