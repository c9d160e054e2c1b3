// See optimizer.h. Life of one bucket in a step:
//
//   compute   (backward computes its gradient, owner by owner)   reduce-scatter, all but its last additions
//   ready     (backward has completed its gradient otherwise)    reduce-scatter begun, once one some layers later, whose
//             staging memory it takes over, is finished
//   step      reductions are finished in the order in which they were begun, last layer first; norm of the own
//             shards; AdamW on the own shards of vectors, positions and table, with which forward begins
//   meanwhile (next forward waits for the rows looked up)        AdamW on the other own shards
//   gather    begun for the first layers while the rest is updated, then a few layers ahead of forward
//   need      (next forward is about to use it)                  all-gather finished
//
// Gathers are begun no earlier because transfers queue: what forward needs at once must not stand behind all the
// weights. (Over MPI it passes them; on GPUs it does so only in another group.)
//
// A bucket whose group has a single member never travels. Every element of every tensor is owned by exactly
// one rank of the world, so the global norm is the sum of the ranks' own sums, added in rank order.
#include "optimizer.h"
#include "../commfuse/die.h"
#include "buffers.h"
#include "linear.h"
#include <math.h>
#include <stdlib.h>

enum { LAYERS_AHEAD = 4 }; // whose weights are on their way while a layer is computed

// --- life ---

static bool overlaps(const zero_optimizer *o) {
    return cf_mode_is_fused(o->mode);
}

// flops: of the weight gradient that is computed inside.
static cf_fuse *plan_bucket(zero_optimizer *o, const param_bucket *b, const char *name,
                            cf_operation operation, cf_side side, cf_dtype dtype, double flops, overlap how) {
    if (b->group->size == 1) return NULL;
    return cf_fuse_create(o->context, (cf_fuse_plan){.name = name,
                                                     .group = b->group,
                                                     .operation = operation,
                                                     .side = side,
                                                     .mode = how.mode,
                                                     .route = how.route,
                                                     .slices = 1,
                                                     .dtype = dtype,
                                                     .flops = flops,
                                                     .capacity = b->shard,
                                                     .bulk = true});
}

// A matrix of its own computes its gradient inside the reduce-scatter; the tied table only if the lookup's part
// goes another way and its owners have enough rows, which those of other matrices do (params.c).
static bool computes(const zero_optimizer *o, const param_bucket *b) {
    return overlaps(o) && b->tensor >= 0 && (b->tensor != WTE || o->embedding->by_rows) &&
           b->shard / b->row >= linear_wgrad_rows_min(b->row);
}

// Of reductions of one kind so many are under way that the table's, which leaves first of all, may take its time; the next
// one takes over the staging memory of the first. Not where its result is in memory of its own. NULL: nothing to share.
static cf_fuse *reduction_to_share(const zero_optimizer *o, int i) {
    const parameters *p = o->params;
    const param_bucket *b = &p->bucket[i];
    int64_t layer =
        p->bucket[p->table].first / p->shape.L; // elements of one, all layers lie before the table
    int64_t window = 2 + (p->bucket[p->table].count + layer - 1) / layer;
    for (int j = i - 1; j >= 0 && b->layer >= 0; j--) {
        const param_bucket *before = &p->bucket[j];
        if (before->tensor != b->tensor || before->count != b->count || before->group != b->group) continue;
        if (--window > 0) continue;
        cf_fuse *reduce = o->bucket[j].reduce;
        return reduce && cf_fuse_schedule(reduce)->result.buffer == CF_FULL ? reduce : NULL;
    }
    return NULL;
}

// rows: of activations from which a weight gradient is computed.
static void create_bucket(zero_optimizer *o, int i, int64_t state, int64_t rows, overlap how) {
    const param_bucket *b = &o->params->bucket[i];
    bucket_sync *s = &o->bucket[i];
    snprintf(s->name, sizeof s->name, "%s",
             b->tensor >= 0               ? params_name(b->tensor)
             : b->layer >= 0              ? "thin matrices"
             : i < o->params->buckets - 1 ? "split vectors"
                                          : "wpe, vectors");
    s->state = state;
    s->fused = computes(o, b) && b->group->size > 1;
    cf_side side = s->fused ? CF_COMPUTE_BEFORE : CF_NO_COMPUTE;
    double flops = s->fused ? 2.0 * (double)(rows * b->count) : 0;
    s->reduce = reduction_to_share(o, i);
    s->borrows = s->reduce != NULL;
    if (!s->reduce)
        s->reduce = plan_bucket(o, b, s->name, CF_REDUCE_SCATTER, side, PRECISE_DTYPE, flops, how);
    s->gather = plan_bucket(o, b, s->name, CF_ALLGATHER, CF_NO_COMPUTE, REAL_DTYPE, 0, how);
}

static void create_report(zero_optimizer *o, overlap how) {
    int world = o->mesh->world_group.size;
    how.mode = cf_mode_for_figures(how.mode);
    o->report = cf_alloc(world * REPORT * (int64_t)sizeof(double), "optimizer state");
    o->squares = cf_alloc(SQUARES_SCRATCH * (int64_t)sizeof(double), "optimizer state");
    o->told = calloc((size_t)(world * REPORT), sizeof *o->told);
    if (!o->told) cf_die(NULL, "out of memory for the reports of %d ranks", world);
    o->exchange_report = cf_fuse_create(o->context, (cf_fuse_plan){.name = "report",
                                                                   .group = &o->mesh->world_group,
                                                                   .operation = CF_ALLGATHER,
                                                                   .side = CF_NO_COMPUTE,
                                                                   .mode = how.mode,
                                                                   .route = how.route,
                                                                   .slices = 1,
                                                                   .dtype = CF_FP64,
                                                                   .capacity = REPORT});
}

// Forward needs positions and vectors first, then layer by layer, then, for the head, the table. That is as large as five
// layers of GPT-2 124M, so it leaves halfway; where the whole table travels, the lookup needs it before anything else.
// Backward completes the last layer first, and the embeddings last.
static void order_buckets(zero_optimizer *o) {
    const parameters *p = o->params;
    int n = 0, m = 0;
    o->forward = calloc((size_t)p->buckets, sizeof *o->forward);
    o->backward = calloc((size_t)p->buckets, sizeof *o->backward);
    if (!o->forward || !o->backward) cf_die(NULL, "out of memory for %d buckets", p->buckets);
    for (int i = p->buckets - 1; i > p->table; i--) o->forward[n++] = i;
    for (int64_t l = 0; l <= p->shape.L; l++) {
        if (l == (o->embedding->by_rows ? p->shape.L / 2 : 0)) o->forward[n++] = p->table;
        for (int i = 0; i < p->table; i++)
            if (p->bucket[i].layer == l) o->forward[n++] = i;
    }
    for (int64_t l = p->shape.L - 1; l >= 0; l--)
        for (int i = 0; i < p->table; i++)
            if (p->bucket[i].layer == l) o->backward[m++] = i;
    for (int i = p->table; i < p->buckets; i++) o->backward[m++] = i;
}

static void take_part(zero_optimizer *o, gpt *model);

void optimizer_create(zero_optimizer *o, gpt *model, overlap how) {
    parameters *p = &model->params;
    *o = (zero_optimizer){.context = model->context,
                          .mesh = model->mesh,
                          .params = p,
                          .embedding = &model->embedding,
                          .mode = how.mode};
    o->bucket = calloc((size_t)p->buckets, sizeof *o->bucket);
    if (!o->bucket) cf_die(NULL, "out of memory for %d buckets", p->buckets);
    order_buckets(o);
    int64_t owned = 0;
    for (int i = 0; i < p->buckets; i++) {
        create_bucket(o, i, owned, model->T * model->B * p->ways / o->mesh->tp, how);
        owned += p->bucket[i].shard;
    }
    o->gathers_begun = p->buckets;
    o->m = take_precise(owned, "optimizer state");
    o->v = take_precise(owned, "optimizer state");
    if (REAL_DTYPE != PRECISE_DTYPE) o->master = take_precise(owned, "master weights");
    create_report(o, how);
    take_part(o, model);
}

void optimizer_free(zero_optimizer *o) {
    for (int i = 0; i < o->params->buckets; i++) {
        if (!o->bucket[i].borrows) cf_fuse_free(o->bucket[i].reduce);
        cf_fuse_free(o->bucket[i].gather);
    }
    cf_fuse_free(o->exchange_report);
    cf_free(o->m);
    cf_free(o->v);
    cf_free(o->master);
    cf_free(o->report);
    cf_free(o->squares);
    free(o->told);
    free(o->bucket);
    free(o->forward);
    free(o->backward);
}

void optimizer_start(zero_optimizer *o) {
    for (int i = 0; i < o->params->buckets && o->master; i++) {
        const param_bucket *b = &o->params->bucket[i];
        adamw_master(o->master + o->bucket[i].state, o->params->weight + params_first_owned(b), b->shard,
                     o->context->stream);
    }
}

// --- gradients ---

static void finish_reduce(zero_optimizer *o, int i) {
    bucket_sync *s = &o->bucket[i];
    s->shard = s->reduce ? cf_fuse_finish(s->reduce) : o->params->grad + o->params->bucket[i].first;
    s->gradient = GRADIENT_REDUCED;
}

static void begin_reduce(zero_optimizer *o, int i, cf_compute *wgrad, void *job) {
    const param_bucket *b = &o->params->bucket[i];
    bucket_sync *s = &o->bucket[i];
    for (int j = 0; j < o->params->buckets && s->reduce; j++)
        if (o->bucket[j].reduce == s->reduce && o->bucket[j].gradient == GRADIENT_LEAVING)
            finish_reduce(o, j);
    if (s->reduce)
        cf_fuse_begin(s->reduce, o->params->grad + b->first, b->shard / b->row, b->row, wgrad, job, b->layer);
    s->gradient = GRADIENT_LEAVING;
}

static bool gradient_fuses(void *argument, int i) {
    return ((zero_optimizer *)argument)->bucket[i].fused;
}

static void gradient_compute(void *argument, int i, cf_compute *wgrad, void *job) {
    begin_reduce((zero_optimizer *)argument, i, wgrad, job);
}

static void gradient_ready(void *argument, int i) {
    zero_optimizer *o = (zero_optimizer *)argument;
    if (o->mode == CF_MODE_NONE) return;
    if (o->bucket[i].gradient == GRADIENT_PARTIAL) begin_reduce(o, i, NULL, NULL);
}

// --- weights ---

// The layer with which a bucket's gather is begun.
static int64_t turn_of(const zero_optimizer *o, int i) {
    const param_bucket *b = &o->params->bucket[i];
    if (b->layer >= 0) return b->layer;
    return b->tensor == WTE && o->embedding->by_rows ? o->params->shape.L / 2 : 0;
}

static void begin_gather(zero_optimizer *o, int i) {
    const param_bucket *b = &o->params->bucket[i];
    bucket_sync *s = &o->bucket[i];
    if (s->weights != WEIGHTS_OWN) return;
    cf_fuse_begin(s->gather, o->params->weight + b->first, b->shard, 1, NULL, NULL, b->layer);
    s->weights = WEIGHTS_COMING;
}

// Begins the gathers of all buckets whose turn comes with a layer up to this one.
static void begin_gathers(zero_optimizer *o, int64_t layer) {
    for (; o->gathers_begun < o->params->buckets; o->gathers_begun++) {
        int i = o->forward[o->gathers_begun];
        if (turn_of(o, i) > layer) return;
        begin_gather(o, i);
    }
}

// How many elements from this one, at most `limit`, belong to tensors that decay if it does; 0: padding, which lies behind
// the last tensor of a bucket.
static int64_t decays_alike(const parameters *p, int64_t element, int64_t limit, bool *decays) {
    int64_t run = 0, layer = 0, rest = 0;
    int tensor = 0;
    while (run < limit && params_find(p, element + run, &tensor, &layer, &rest)) {
        if (run == 0) *decays = params_decays(tensor);
        if (params_decays(tensor) != *decays) break;
        run += rest;
    }
    return run < limit ? run : limit;
}

// AdamW on the own shard of one bucket. Only matrices and embeddings decay.
static void update_bucket(zero_optimizer *o, int i) {
    const param_bucket *b = &o->params->bucket[i];
    const bucket_sync *s = &o->bucket[i];
    int64_t first = params_first_owned(b), count = 0;
    adamw a = o->update;
    bool decays = false;
    for (int64_t done = 0; done < b->shard; done += count) {
        count = decays_alike(o->params, first + done, b->shard - done, &decays);
        if (count == 0) break;
        a.weight_decay = decays ? o->update.weight_decay : 0;
        int64_t at = s->state + done;
        adamw_update(o->params->weight + first + done, o->master ? o->master + at : NULL, o->m + at,
                     o->v + at, s->shard + done, count, a, o->context->stream);
    }
}

static void update(zero_optimizer *o, int i) {
    bucket_sync *s = &o->bucket[i];
    if (!s->due) return;
    cf_stream *stream = o->context->stream;
    cf_moment begin = cf_trace_begin(o->context->trace, CF_TRACE_COMPUTE, "update", stream);
    update_bucket(o, i);
    cf_trace_end(o->context->trace, CF_TRACE_COMPUTE, "update", o->params->bucket[i].layer, -1, begin,
                 stream);
    s->due = false;
    if (s->gather) s->weights = WEIGHTS_OWN;
}

// Own shards in the order in which forward needs them; the first are sent off at once.
static void update_rest(void *argument) {
    zero_optimizer *o = (zero_optimizer *)argument;
    for (int place = 0; place < o->params->buckets; place++) {
        int i = o->forward[place];
        update(o, i);
        if (!overlaps(o) || turn_of(o, i) < LAYERS_AHEAD) begin_gather(o, i);
    }
}

static bool weights_pending(void *argument, int i) {
    return ((zero_optimizer *)argument)->bucket[i].weights != WEIGHTS_HERE;
}

static void finish_gather(void *argument, int i) {
    zero_optimizer *o = (zero_optimizer *)argument;
    if (!o->bucket[i].due && o->bucket[i].weights == WEIGHTS_HERE) return;
    update_rest(o);
    if (o->bucket[i].weights == WEIGHTS_HERE) return;
    begin_gathers(o, turn_of(o, i) + LAYERS_AHEAD);
    cf_fuse_finish(o->bucket[i].gather);
    o->bucket[i].weights = WEIGHTS_HERE;
}

void optimizer_complete(zero_optimizer *o) {
    update_rest(o);
}

void optimizer_settle(zero_optimizer *o) {
    optimizer_complete(o);
    for (int i = 0; i < o->params->buckets; i++) finish_gather(o, o->forward[i]);
    cf_check_verdict(o->context->check, o->context->stream);
}

static void take_part(zero_optimizer *o, gpt *model) {
    model->pass.hooks = (gpt_hooks){.argument = o,
                                    .pending = weights_pending,
                                    .need = finish_gather,
                                    .meanwhile = update_rest,
                                    .ready = gradient_ready,
                                    .fuses = gradient_fuses,
                                    .compute = gradient_compute};
}

// --- reports ---

static double *own_report(zero_optimizer *o) {
    return o->report + o->mesh->world_group.rank * REPORT;
}

static void exchange_reports(zero_optimizer *o) {
    cf_fuse_run(o->exchange_report, o->report, 1, REPORT, NULL, NULL, -1);
    int64_t bytes = o->mesh->world_group.size * REPORT * (int64_t)sizeof(double);
    cf_copy(o->told, o->report, bytes, o->context->stream);
    cf_stream_sync(o->context->stream);
}

static void report(zero_optimizer *o, const double *values, int count) {
    cf_copy(own_report(o), values, count * (int64_t)sizeof(double), o->context->stream);
    exchange_reports(o);
}

const double *optimizer_exchange(zero_optimizer *o, const double *values, int count) {
    report(o, values, count);
    return o->told;
}

void optimizer_maximum(zero_optimizer *o, double *values, int count) {
    report(o, values, count);
    for (int rank = 0; rank < o->mesh->world_group.size; rank++)
        for (int j = 0; j < count; j++) values[j] = fmax(values[j], o->told[rank * REPORT + j]);
}

// Sum over all ranks of column j of the reports.
static double sum_reports(const zero_optimizer *o, int j) {
    double sum = 0;
    for (int rank = 0; rank < o->mesh->world_group.size; rank++) sum += o->told[rank * REPORT + j];
    return sum;
}

double optimizer_sum(zero_optimizer *o, double value) {
    report(o, &value, 1);
    return sum_reports(o, 0);
}

// --- the step ---

// Number of the first tensor with a non-finite gradient in the own shards: tensor + TENSORS · layer; -1: none.
static double first_bad_tensor(zero_optimizer *o) {
    for (int i = 0; i < o->params->buckets; i++) {
        const param_bucket *b = &o->params->bucket[i];
        int64_t at = first_nonfinite(o->bucket[i].shard, b->shard, o->context->stream), layer = 0, rest = 0;
        int tensor = 0;
        if (at < 0) continue;
        if (params_find(o->params, params_first_owned(b) + at, &tensor, &layer, &rest))
            return (double)(tensor + TENSORS * layer);
    }
    return -1;
}

// The first rank that has such a tensor, and the tensor's name; false if none has. Collective.
static bool find_nonfinite(zero_optimizer *o, int *rank, char name[static NONFINITE_NAME]) {
    double mine = first_bad_tensor(o);
    report(o, &mine, 1);
    for (*rank = 0; *rank < o->mesh->world_group.size; ++*rank) {
        int bad = (int)o->told[*rank * REPORT];
        if (bad < 0) continue;
        bool layered = params_layers(&o->params->shape, bad % TENSORS) > 1;
        snprintf(name, NONFINITE_NAME, layered ? "%s of layer %d" : "%s", params_name(bad % TENSORS),
                 bad / TENSORS);
        return true;
    }
    return false;
}

// Says what is not finite. Ends the run unless this step may be left out.
static void meet_nonfinite(zero_optimizer *o, step_result *r, bool may_skip) {
    const char *hint = "lower --lr, raise --warmup, or look at the data of this step; nothing was written by "
                       "this step; --skip-nonfinite N leaves such steps out";
    bool named = find_nonfinite(o, &r->nonfinite_rank, r->nonfinite);
    if (!named) r->nonfinite_rank = -1, snprintf(r->nonfinite, sizeof r->nonfinite, "the loss alone");
    r->skipped = true;
    if (may_skip) return;
    if (named)
        cf_die_together(hint,
                        "step %d: loss %g, gradient norm %g: the gradient of %s on rank %d is not finite",
                        o->context->step, r->loss, r->grad_norm, r->nonfinite, r->nonfinite_rank);
    cf_die_together(hint, "step %d: loss %g, gradient norm %g: not finite, though every gradient tensor is",
                    o->context->step, r->loss, r->grad_norm);
}

void optimizer_zero_grad(zero_optimizer *o) {
    optimizer_complete(o);
    params_zero_grad(o->params, o->context->stream);
}

// Finishes all reductions, adds the looked-up rows to the table's, and sums the squares of the own shards: of those
// that are here while the last are on their way, so in this order always. One rank owns all there is, side by side.
static void finish_reductions(zero_optimizer *o, double *sum) {
    bool whole = o->mesh->world_group.size == 1;
    for (int place = 0; place < o->params->buckets; place++) {
        int i = o->backward[place];
        if (o->bucket[i].gradient == GRADIENT_PARTIAL) begin_reduce(o, i, NULL, NULL);
        if (o->bucket[i].gradient == GRADIENT_LEAVING) finish_reduce(o, i);
        o->bucket[i].gradient = GRADIENT_PARTIAL; // of the next step
        if (i == o->params->table) lookup_finish_delivery(o->embedding, o->bucket[i].shard);
        if (!whole)
            sum_of_squares(sum, o->squares, o->bucket[i].shard, o->params->bucket[i].shard,
                           o->context->stream);
    }
    if (whole) sum_of_squares(sum, o->squares, o->params->grad, o->params->elements, o->context->stream);
}

// What forward begins with: rows of the table are looked up at once, and where they come from far away the positions
// travel behind the update of all else.
static void update_first(zero_optimizer *o, adamw a) {
    o->update = a;
    o->gathers_begun = 0;
    for (int i = 0; i < o->params->buckets; i++) o->bucket[i].due = true;
    for (int i = o->params->buckets - 1; i >= o->params->table; i--) update(o, i);
}

const double *optimizer_reduce(zero_optimizer *o, const double *loss_sum, const double *values, int count) {
    enum { LOSS, NORM2, VALUES };
    double *mine = own_report(o);
    cf_copy(&mine[LOSS], loss_sum, (int64_t)sizeof *mine, o->context->stream);
    cf_zero(&mine[NORM2], (int64_t)sizeof *mine, o->context->stream);
    if (count > 0) cf_copy(&mine[VALUES], values, count * (int64_t)sizeof *mine, o->context->stream);
    finish_reductions(o, &mine[NORM2]);
    exchange_reports(o); // here, and for the tokens of all ranks (lookup.c), the host waits for the device
    cf_check_verdict(o->context->check, o->context->stream);
    o->loss = sum_reports(o, LOSS), o->norm2 = sum_reports(o, NORM2);
    return o->told + VALUES;
}

step_result optimizer_update(zero_optimizer *o, adamw a, double clip, int64_t tokens, bool may_skip) {
    step_result result = {.loss = o->loss / (double)tokens, .grad_norm = sqrt(o->norm2)};
    if (!isfinite(result.loss) || !isfinite(result.grad_norm)) {
        meet_nonfinite(o, &result, may_skip);
        return result;
    }
    a.scale = clip > 0 && result.grad_norm > clip ? clip / result.grad_norm : 1;
    update_first(o, a);
    return result;
}

// --- for --dry-run ---

// Buckets that hold the same of other layers.
static int64_t alike(const parameters *p, int bucket) {
    int64_t count = 0;
    for (int i = 0; i < p->table; i++) count += p->bucket[i].tensor == p->bucket[bucket].tensor;
    return bucket < p->table ? count : 1;
}

void optimizer_operations(zero_optimizer *o, visit_operation *visit, void *argument) {
    for (int i = 0; i < o->params->buckets; i++) {
        const bucket_sync *s = &o->bucket[i];
        if (!s->reduce || o->params->bucket[i].layer > 0) continue; // the first layer stands for all
        int64_t times = alike(o->params, i);
        const char *each = times > 1 ? ", each layer" : "";
        char place[80];
        snprintf(place, sizeof place, "%s%s", s->fused ? "gradient computed owner by owner" : "gradient",
                 each);
        visit(argument, place, s->reduce, times);
        snprintf(place, sizeof place, "weights, during update and forward%s", each);
        visit(argument, place, s->gather, times);
    }
    visit(argument, "figures of all ranks", o->exchange_report, 1);
}

static void explain_bucket(const zero_optimizer *o, int i, FILE *out) {
    const param_bucket *b = &o->params->bucket[i];
    int64_t rows = b->shard / b->row;
    int N = b->group->size;
    double mib = (double)(b->count * (int64_t)sizeof(real)) / (1 << 20);
    fprintf(out, "  %-20s %8.2f MiB over %-5s ", o->bucket[i].name, mib, b->group->name);
    if (N == 1)
        fprintf(out, "one owner, does not travel\n");
    else if (o->mode == CF_MODE_NONE)
        fprintf(out, "%d owners; native collectives at the end of backward\n", N);
    else if (o->bucket[i].fused)
        fprintf(out, "%d owners of %lld rows: wgrad owner by owner > reduce-scatter, own rows last\n", N,
                (long long)rows);
    else if (b->tensor == WTE && !o->embedding->by_rows)
        fprintf(out, "%d owners; complete only at the end of backward, since the whole table travels\n", N);
    else
        fprintf(out, "%d owners; sent when complete, during the rest of backward\n", N);
}

static void explain_thin(const zero_optimizer *o, FILE *out) {
    static const int matrices[] = {QKVW, ATTPROJW, FCW, FCPROJW};
    const parameters *p = o->params;
    for (int i = 0; i < 4; i++) {
        const param_bucket *b = &p->bucket[params_bucket_of(p, matrices[i], 0)];
        if (params_own_bucket(p, matrices[i], 0) >= 0) continue;
        if (b->group->size > 1)
            fprintf(out, "  %-20s in thin matrices: %lld rows are fewer than %lld for each of %d owners\n",
                    params_name(matrices[i]), (long long)params_local_rows(p, matrices[i]),
                    (long long)linear_wgrad_rows_min(params_local_columns(p, matrices[i])), b->group->size);
    }
}

void optimizer_explain(const zero_optimizer *o, FILE *out) {
    fprintf(out, "Gradients and weights of each layer, and of the embeddings\n");
    for (int i = 0; i < o->params->table; i++)
        if (o->params->bucket[i].layer == 0) explain_bucket(o, i, out);
    explain_thin(o, out);
    for (int i = o->params->table; i < o->params->buckets; i++) explain_bucket(o, i, out);
    fprintf(out, "  ");
    lookup_explain(o->embedding, out);
}
