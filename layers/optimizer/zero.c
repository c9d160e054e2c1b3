// See zero.h.
#include "zero.h"
#include "../kernels/elementwise.h"
#include "../kernels/linear.h"

// --- life ---

// Are two buckets communicated in the same way?
static bool alike(const zero_bucket *s, const zero_bucket *other) {
    const bool of_layers = s->of->layer >= 0 && other->of->layer >= 0;
    return s == other || (of_layers && s->of->tensor == other->of->tensor && s->by_owners == other->by_owners);
}

// Chooses the buckets whose gradient is computed owner by owner: matrices of which each owner has enough rows for a good product;
// the token table only if the lookup's gradient is sent separately. A product in parts takes longer than in one. So policy auto
// chooses only buckets after which the rest of backward (the matrices before this one) takes less time than the transfers that are
// left: the last ones or, on a slow link, all; none whose group has cheaper collectives (hierarchy); and all where no core is
// left to move bytes, which makes transfers longer than estimated.
static void choose_owners(zero_shards *z, int64_t rows, gradients_policy policy) {
    const cf_costs *costs = z->context->transport ? &z->context->transport->costs : NULL;
    double computed_s = 0, sent_s = 0; // from this bucket's gradient on
    for (zero_bucket *s = z->bucket; s < z->end && s->of->kind <= BUCKET_TABLE && costs; s++) {
        const param_bucket *b = s->of;
        sent_s += (double)((b->count - b->shard) * (int64_t)sizeof(accum)) / cf_bytes_per_s(costs, b->group);
        s->by_owners = policy >= GRADIENTS_OWNERS && b->group->size > 1 && b->tensor >= 0 &&
                       (b->kind != BUCKET_TABLE || z->rows_travel) && b->shard / b->row >= linear_wgrad_rows_min(b->row) &&
                       (policy == GRADIENTS_OWNERS || !costs->spare || (sent_s > computed_s && !b->group->hierarchy));
        computed_s += 4.0 * (double)(rows * b->count) / costs->flops_per_s; // dgrad and wgrad
    }
}

// The bucket whose reduction, and staging memory, this one shares, NULL: none. While the table's reduction, the first and longest, is
// in flight, a window of those of each kind are begun; the next one then uses the memory of the first. Only where the result is
// not in that memory.
static const zero_bucket *bucket_to_share(const zero_shards *z, const zero_bucket *s) {
    const param_bucket *b = s->of, *table = &z->params->bucket[z->params->table];
    int64_t layer = table->first / z->params->shape.L; // elements of a layer: all layers are before the table
    int64_t window = 2 + ceil_div(table->count, layer);
    for (const zero_bucket *before = s - 1; before >= z->bucket && b->layer >= 0; before--) {
        if (!alike(s, before) || before->of->count != b->count || before->of->group != b->group) continue;
        if (--window > 0) continue;
        return before->reduce && (before->rounded || cf_fuse_schedule(before->reduce)->result.buffer == CF_FULL) ? before : NULL;
    }
    return NULL;
}

static void create_bucket(zero_shards *z, zero_bucket *s, int64_t rows, const overlap *how) {
    const param_bucket *b = s->of;
    static const char *const shared[] = {
        [BUCKET_THIN] = "thin matrices", [BUCKET_VECTORS_DP] = "split vectors", [BUCKET_VECTORS] = "wpe, vectors"};
    snprintf(s->name, sizeof s->name, "%s", b->tensor >= 0 ? params_name(b->tensor) : shared[b->kind]);
    if (b->group->size == 1) return;
    cf_fuse_config config =
        overlap_config(how, s->name, b->group, CF_REDUCE_SCATTER, s->by_owners ? CF_COMPUTE_BEFORE : CF_NO_COMPUTE,
                       how->round_gradients ? REAL_DTYPE : ACCUM_DTYPE, b->shard);
    config.slices = 1, config.urgency = CF_BULK;
    if (s->by_owners) config.flops = 2.0 * (double)(rows * b->count), config.independent = true;
    const zero_bucket *lender = bucket_to_share(z, s);
    s->shares_staging = lender != NULL;
    s->reduce = lender ? lender->reduce : cf_fuse_create(z->context, config);
    if (how->round_gradients) s->rounded = lender ? lender->rounded : cf_alloc(b->count * (int64_t)sizeof(real), "gradients sent");
    config = overlap_config(how, s->name, b->group, CF_ALLGATHER, CF_NO_COMPUTE, REAL_DTYPE, b->shard);
    config.urgency = CF_BULK;
    s->gather = cf_fuse_create(z->context, config);
}

// The layer with which a bucket's gather begins. Forward needs positions and vectors first, then layer by layer, then, for the
// head, the table. The table is as large as five layers of GPT-2 124M, so its gather begins halfway; unless the lookup exchanges
// rows, it needs the whole table first.
static int64_t gather_layer(const zero_shards *z, const zero_bucket *s) {
    if (s->of->layer >= 0) return s->of->layer;
    return s->of->kind == BUCKET_TABLE && z->rows_travel ? z->params->shape.L / 2 : 0;
}

// Backward completes the last layer first, and the embeddings last.
static void order_buckets(zero_shards *z) {
    const int64_t L = z->params->shape.L;
    zero_bucket *table = &z->bucket[z->params->table], **forward = z->forward, **backward = z->backward;
    for (zero_bucket *s = z->end - 1; s > table; s--) *forward++ = s; // vectors
    for (int64_t l = 0; l <= L; l++) {
        if (l == gather_layer(z, table)) *forward++ = table;
        for (zero_bucket *s = z->bucket; s < table; s++)
            if (s->of->layer == l) *forward++ = s;
    }
    for (int64_t l = L - 1; l >= 0; l--)
        for (zero_bucket *s = z->bucket; s < table; s++)
            if (s->of->layer == l) *backward++ = s;
    for (zero_bucket *s = table; s < z->end; s++) *backward++ = s;
}

void zero_create(zero_shards *z, cf_context *context, parameters *p, const optimizer_row *o, bool rows_travel, int64_t rows,
                 const overlap *how) {
    *z = (zero_shards){.context = context, .params = p, .optimizer = o, .gradients = how->gradients, .prefetch = how->prefetch};
    z->rows_travel = rows_travel, z->gathers_begun = p->buckets;
    z->bucket = cf_host_alloc(p->buckets, sizeof *z->bucket, "buckets"), z->end = z->bucket + p->buckets;
    for (int i = 0; i < p->buckets; i++) z->bucket[i].of = &p->bucket[i];
    z->forward = cf_host_alloc(p->buckets, sizeof *z->forward, "buckets");
    z->backward = cf_host_alloc(p->buckets, sizeof *z->backward, "buckets");
    z->destination = cf_host_alloc(p->tensors, sizeof *z->destination, "places of gradients");
    order_buckets(z);
    choose_owners(z, rows, how->round_gradients ? GRADIENTS_READY : how->gradients);
    for (zero_bucket *s = z->bucket; s < z->end; s++) create_bucket(z, s, rows, how);
    const int64_t bytes = p->owned * (int64_t)sizeof(accum);
    for (int k = 0; k + 1 < optimizer_kinds(o).count; k++) {
        z->state_from[k] = k < o->states ? 0 : p->bucket[p->table].owned_before;
        z->state[k] = cf_alloc(bytes - z->state_from[k] * (int64_t)sizeof(accum), "optimizer state");
    }
    if (o->others) z->homes = homes_create(z, how);
    if (REAL_DTYPE != ACCUM_DTYPE) z->master = cf_alloc(bytes, "master weights");
    z->squares = cf_alloc(SQUARES_SCRATCH * (int64_t)sizeof(double), "optimizer state");
}

void zero_free(zero_shards *z) {
    for (const zero_bucket *s = z->bucket; s < z->end; s++) {
        if (!s->shares_staging) cf_fuse_free(s->reduce), cf_free(s->rounded);
        cf_fuse_free(s->gather);
    }
    free(z->bucket), free(z->forward), free(z->backward), free(z->destination);
    for (int k = 0; k < OPTIMIZER_STATES; k++) cf_free(z->state[k]);
    cf_free(z->master), cf_free(z->squares);
    homes_free(z->homes);
}

void zero_start(zero_shards *z) {
    const parameters *p = z->params;
    for (const param_bucket *b = p->bucket; z->master && b < p->bucket + p->buckets; b++)
        convert_to_accum(z->master + b->owned_before, p->weight + params_first_owned(b), b->shard, z->context->stream);
}

// --- weights ---

static void begin_gather(zero_shards *z, zero_bucket *s) {
    if (s->weights == WEIGHTS_NOT_UPDATED) homes_finish(z);
    if (s->weights != WEIGHTS_UPDATED) return;
    cf_fuse_begin(s->gather, z->params->weight + s->of->first, s->of->shard, 1, NULL, NULL, s->of->layer);
    s->weights = WEIGHTS_IN_FLIGHT;
}

// The last layer whose gathers begin before `layer` is computed, if all of this bucket's kind do: few layers at first, because posting
// one takes the host as long as computing one takes a GPU.
static int64_t last_to_prefetch(const zero_shards *z, const zero_bucket *s, int64_t layer) {
    const int64_t L = z->params->shape.L, native = s->gather && cf_fuse_schedule(s->gather)->algorithm->native;
    const int64_t ahead = z->prefetch != PREFETCH_AUTO ? z->prefetch : native ? L : PREFETCH_SOME;
    return ahead >= L ? L : smaller(2 * layer + 1, layer + ahead);
}

void zero_prefetch(zero_shards *z, int64_t layer) {
    for (; z->gathers_begun < z->params->buckets; z->gathers_begun++) {
        zero_bucket *s = z->forward[z->gathers_begun];
        if (gather_layer(z, s) > last_to_prefetch(z, s, layer)) return;
        begin_gather(z, s);
    }
}

static void finish_gather(zero_bucket *s) {
    if (s->weights == WEIGHTS_HERE) return;
    if (s->weights != WEIGHTS_IN_FLIGHT)
        cf_die(NULL, "internal error: %s is needed before its %s", s->name,
               s->weights == WEIGHTS_NOT_UPDATED ? "update" : "gather has begun");
    cf_fuse_finish(s->gather);
    s->weights = WEIGHTS_HERE;
}

// Thin matrices may have come with an earlier layer.
void zero_wait(zero_shards *z, int64_t layer) {
    for (zero_bucket *s = z->bucket; s < z->end; s++)
        if (s->of->layer == layer) finish_gather(s);
}

bool zero_table_is_here(const zero_shards *z) {
    return z->bucket[z->params->table].weights == WEIGHTS_HERE;
}

// --- where gradients are computed ---

// Are the slices that arrive large enough to add to a gradient one by one?
static bool slices_pay(const parameters *p, const cf_fuse *arrives) {
    const cf_fuse_config *config = cf_fuse_get_config(arrives);
    if (p->strategy == STRATEGY_UP) return true;                              // up.c waits for all of a part
    if (config->group->size == 1 || config->algorithm->blocking) return true; // all of the factor
    return config->capacity / p->shape.C / config->slices >= linear_wgrad_depth_min();
}

static gradient_place choose_place(const zero_shards *z, const param_tensor *t) {
    const parameters *p = z->params;
    const param_bucket *b = &p->bucket[t->bucket];
    const bool alone = b->tensor == t->tensor;
    const bool may_wait = t->tensor == QKVW && t->layer == 0 && p->strategy == STRATEGY_TPSP; // nothing needs it soon
    if (z->last && alone && z->bucket[t->bucket].by_owners) return GRADIENT_OWNERS;
    if (may_wait && (alone || b->group->size == 1)) return GRADIENT_AFTER; // in a bucket with others these would wait, too
    return z->arrives[t->tensor] && slices_pay(p, z->arrives[t->tensor]) ? GRADIENT_BY_SLICES : GRADIENT_WHOLE;
}

// The tuner may have chosen other schedules since the last step.
void zero_begin_backward(zero_shards *z, bool first, bool last) {
    const parameters *p = z->params;
    z->last = last;
    for (zero_bucket *s = z->bucket; s < z->end; s++) s->missing = 0;
    for (int i = 0; i < p->tensors; i++) {
        const param_tensor *t = &p->placed[i];
        const int bias = params_bias(&p->shape, t->tensor); // one that is not split is layer norm's backward's
        if (p->bucket[t->bucket].kind > BUCKET_TABLE) continue;
        gradient_destination to = {.place = choose_place(z, t), .at = p->grad + t->first, .add = !first};
        if (bias >= 0 && params_is_split(bias) && to.place < GRADIENT_AFTER) to.db = params_grad(p, bias, t->layer);
        z->destination[i] = to;
        z->bucket[t->bucket].missing++;
    }
}

const gradient_destination *zero_decided(const zero_shards *z, int tensor, int64_t layer) {
    return &z->destination[params_find(z->params, tensor, layer) - z->params->placed];
}

// --- gradients ---

static void finish_reduce(zero_shards *z, zero_bucket *s) {
    s->reduced = z->params->grad + params_first_owned(s->of);
    if (s->rounded)
        convert_to_accum(s->reduced, cf_fuse_finish(s->reduce), s->of->shard, z->context->stream);
    else if (s->reduce)
        s->reduced = cf_fuse_finish(s->reduce);
    s->reduction = GRADIENT_REDUCED;
}

// Finishes an earlier reduction that uses the same staging memory first.
static void begin_reduce(zero_shards *z, zero_bucket *s, weight_gradient *computed) {
    const param_bucket *b = s->of;
    for (zero_bucket *earlier = z->bucket; earlier < z->end && s->reduce; earlier++)
        if (earlier->reduce == s->reduce && earlier->reduction == GRADIENT_IN_FLIGHT) finish_reduce(z, earlier);
    void *gradient = z->params->grad + b->first;
    if (s->rounded) {
        convert_to_real(s->rounded, gradient, b->count, z->context->stream);
        gradient = s->rounded;
    }
    if (s->reduce)
        cf_fuse_begin(s->reduce, gradient, b->shard / b->row, b->row, computed ? zero_gradient_rows : NULL, computed, b->layer);
    s->reduction = GRADIENT_IN_FLIGHT;
}

// Rows [first, first + rows) of the local matrix may belong to several parts; those after the last part are padding.
void zero_gradient_rows(void *argument, const cf_span *span, cf_stream *stream) {
    const weight_gradient *g = (const weight_gradient *)argument;
    for (int i = 0; i < span->blocks; i++) {
        int64_t first = span->row + i * span->row_stride;
        accum *dw = (accum *)(span->data + i * span->data_stride);
        for (int part = 0; part < g->parts; part++) {
            int64_t begin = larger(first, part * g->OC), end = smaller(first + span->rows, (part + 1) * g->OC);
            if (begin < end)
                linear_wgrad(dw + (begin - first) * g->IC, g->to.db ? g->to.db + begin : NULL, g->dy[part] + begin - part * g->OC,
                             g->OC, g->x[part], g->R, g->IC, end - begin, g->to.add, stream);
        }
    }
}

void zero_weight_gradient(zero_shards *z, int tensor, int64_t layer, weight_gradient g) {
    zero_bucket *s = &z->bucket[params_find(z->params, tensor, layer)->bucket];
    cf_fuse *arrives = z->arrives[tensor];
    g.to = *zero_decided(z, tensor, layer);
    g.OC = params_local_rows(z->params, tensor) / g.parts, g.IC = params_local_columns(z->params, tensor);
    cf_span all = {.rows = g.parts * g.OC, .blocks = 1, .data = (char *)g.to.at};
    if (g.to.place == GRADIENT_OWNERS) begin_reduce(z, s, &g);
    if (g.to.place == GRADIENT_WHOLE || g.to.place == GRADIENT_AFTER) zero_gradient_rows(&g, &all, z->context->stream);
    // Had its slices been thicker, the operation would have computed it: to the tuner this product is part of that choice.
    if (g.to.place == GRADIENT_WHOLE && arrives) cf_fuse_extend_timing(arrives);
    s->missing--;
}

void zero_reduce(zero_shards *z, int64_t layer) {
    for (zero_bucket *s = z->bucket; s < z->end && z->last && z->gradients != GRADIENTS_END; s++)
        if (s->of->layer == layer && s->missing == 0 && s->reduction == GRADIENT_PARTIAL) begin_reduce(z, s, NULL);
}

// The squares of the first shards are summed while the last are still being reduced, always in this order. A single rank owns
// everything, side by side.
void zero_finish_gradients(zero_shards *z, lookup *embedding, double *sum) {
    const parameters *p = z->params;
    const bool alone = p->bucket[p->buckets - 1].group->size == 1;
    for (int n = 0; n < p->buckets; n++) {
        zero_bucket *s = z->backward[n];
        if (s->reduction == GRADIENT_PARTIAL) begin_reduce(z, s, NULL);
        if (s->reduction == GRADIENT_IN_FLIGHT) finish_reduce(z, s);
        s->reduction = GRADIENT_PARTIAL; // in the next step
        if (s->of->kind == BUCKET_TABLE) lookup_finish_delivery(embedding, s->reduced);
        if (!alone) sum_of_squares(sum, z->squares, s->reduced, s->of->shard, z->context->stream);
    }
    if (alone) sum_of_squares(sum, z->squares, p->grad, p->elements, z->context->stream);
}

int64_t zero_nonfinite(zero_shards *z, double *scratch) {
    const parameters *p = z->params;
    for (const param_tensor *t = p->placed; t < p->placed + p->tensors; t++) {
        const param_bucket *b = &p->bucket[t->bucket];
        int64_t begin = t->first, end = t->first + t->count;
        double sum = 0; // of squares
        if (!params_owned(b, &begin, &end)) continue;
        cf_zero(scratch, (int64_t)sizeof sum, z->context->stream);
        sum_of_squares(scratch, z->squares, z->bucket[t->bucket].reduced + begin - params_first_owned(b), end - begin,
                       z->context->stream);
        cf_copy(&sum, scratch, (int64_t)sizeof sum, z->context->stream);
        cf_stream_sync(z->context->stream);
        if (!isfinite(sum)) return t->tensor + TENSORS * t->layer;
    }
    return -1;
}

// --- update ---

// Does the next bucket continue this one in memory, one owner's like it, and do all elements of both decay?
static bool continues(const zero_bucket *s) {
    return s->of->layer >= 0 && s->of->group->size == 1 && s[1].of->group->size == 1 && s[1].reduced;
}

// The optimizer's step on this rank's shard of one bucket, once, and, in the same call, on the buckets that continue it: a layer's matrices apart
// reach half of the GPU's memory rate, whole it is 97 %. Only matrices and embeddings decay; padding does not change.
static void update(zero_shards *z, zero_bucket *s) {
    const param_bucket *b = s->of;
    cf_stream *stream = z->context->stream;
    const accum *gradient = s->reduced;
    zero_bucket *last = s;
    if (!gradient) return;
    while (continues(last)) last++;
    const cf_trace_work work = cf_trace_begin(z->context->trace, "update", b->layer, stream);
    for (int decays = 1; decays >= 0; decays--) {
        int64_t begin = b->first + (decays ? 0 : b->decayed), end = b->first + (decays ? b->decayed : b->used);
        optimizer_settings settings = z->update;
        if (!params_owned(b, &begin, &end)) continue;
        if (last > s) end = last->of->first + last->of->used;
        if (!decays) settings.weight_decay = 0;
        const int64_t done = begin - params_first_owned(b), at = b->owned_before + done;
        accum *state[OPTIMIZER_STATES] = {NULL};
        const optimizer_row *o = z->homes ? z->optimizer->others : z->optimizer;
        for (int k = 0; k < o->states; k++) state[k] = z->state[k] + (at - z->state_from[k]);
        optimizer_update(o, z->params->weight + begin, z->master ? z->master + at : NULL, state, gradient + done, end - begin,
                         settings, stream);
    }
    cf_trace_end(z->context->trace, work, -1, stream);
    for (; s <= last; s++) {
        s->reduced = NULL;
        s->weights = s->gather ? WEIGHTS_UPDATED : WEIGHTS_HERE;
    }
}

// What comes from other ranks and is needed first is communicated during the update of all other weights.
void zero_update_embeddings_and_vectors(zero_shards *z, optimizer_settings settings) {
    z->update = settings, z->gathers_begun = 0;
    for (zero_bucket *s = z->bucket; s < z->end; s++) s->weights = WEIGHTS_NOT_UPDATED;
    if (z->homes) homes_begin(z);
    for (zero_bucket *s = z->end - 1; s->of->layer < 0; s--) update(z, s);
}

// In the order in which forward needs them; the gathers of those needed first begin at once.
void zero_update_layers(zero_shards *z) {
    do {
        for (int n = 0; n < z->params->buckets; n++) {
            zero_bucket *s = z->forward[n];
            if (!z->homes) update(z, s);
            if (s->weights == WEIGHTS_UPDATED && gather_layer(z, s) <= last_to_prefetch(z, s, 0)) begin_gather(z, s);
        }
    } while (homes_continue(z));
}

void zero_finish_weights(zero_shards *z) {
    zero_prefetch(z, z->params->shape.L);
    for (int n = 0; n < z->params->buckets; n++) finish_gather(z->forward[n]);
}

// --- for --dry-run ---

// The number of buckets that are communicated like this one; 0: an earlier one has counted it.
static int64_t how_many_alike(const zero_shards *z, const zero_bucket *s) {
    int64_t count = 0;
    for (const zero_bucket *other = z->bucket; other < z->end; other++) {
        if (other < s && alike(s, other)) return 0;
        count += alike(s, other);
    }
    return count;
}

void zero_operations(const zero_shards *z, visit_operation *visit, void *argument) {
    for (const zero_bucket *s = z->bucket; s < z->end; s++) {
        int64_t times = how_many_alike(z, s);
        if (!s->reduce || times == 0) continue;
        const char *each = times > 1 ? ", each layer" : "";
        char place[80];
        snprintf(place, sizeof place, "%s%s", s->by_owners ? "gradient computed owner by owner" : "gradient", each);
        visit(argument, place, s->reduce, times);
        snprintf(place, sizeof place, "weights, during update and forward%s", each);
        visit(argument, place, s->gather, times);
    }
    homes_operations(z->homes, visit, argument);
}

static void explain_bucket(const zero_shards *z, const zero_bucket *s, FILE *out) {
    const param_bucket *b = s->of;
    const int N = b->group->size;
    const char *when = z->gradients == GRADIENTS_END ? "at the end of backward"
                       : b->kind == BUCKET_TABLE && !z->rows_travel
                           ? "complete only at the end of backward, since the whole table is sent"
                           : "sent when complete, during the rest of backward";
    fprintf(out, "  %-20s %8.2f MiB over %-5s ", s->name, (double)(b->count * (int64_t)sizeof(real)) / (1 << 20), b->group->name);
    if (b->layer > 0) fprintf(out, "from layer %d on ", b->layer);
    if (N == 1)
        fprintf(out, "one owner, not communicated\n");
    else if (s->by_owners)
        fprintf(out, "%d owners of %ld rows: wgrad owner by owner > reduce-scatter, own rows last\n", N, b->shard / b->row);
    else
        fprintf(out, "%d owners; %s\n", N, when);
}

void zero_explain(const zero_shards *z, FILE *out) {
    const parameters *p = z->params;
    fprintf(out, "Gradients and weights of each layer, and of the embeddings\n");
    for (const zero_bucket *s = z->bucket; s->of->layer >= 0; s++)
        if (how_many_alike(z, s) > 0) explain_bucket(z, s, out);
    for (const param_tensor *t = p->placed; t < p->placed + p->tensors; t++) {
        const param_bucket *b = &p->bucket[t->bucket];
        if (t->layer == 0 && b->layer == 0 && b->tensor < 0 && b->group->size > 1)
            fprintf(out, "  %-20s in thin matrices: %ld rows are fewer than %ld for each of %d owners\n", params_name(t->tensor),
                    params_local_rows(p, t->tensor), linear_wgrad_rows_min(params_local_columns(p, t->tensor)), b->group->size);
    }
    for (int i = p->table; i < p->buckets; i++) explain_bucket(z, &z->bucket[i], out);
}
