// See lookup.h.
#include "lookup.h"
#include "../kernels/embedding.h"
#include <math.h>

// --- life ---

static cf_fuse *create(const lookup *l, const cf_group *group, cf_operation operation, cf_side side, const overlap *o,
                       cf_dtype dtype, int64_t capacity) {
    cf_fuse_config p = overlap_config(o, "embedding", group, operation, side, dtype, capacity);
    p.result_given = operation == CF_ALLTOALL, p.urgency = dtype == CF_BYTE ? CF_URGENT : CF_EARLY;
    return cf_fuse_create(l->context, p);
}

// tokens: of the ranks that hold a copy.
static void create_exchange(lookup *l, int64_t tokens, const overlap *o) {
    int64_t N = l->owners->size, each = (int64_t)sizeof(int32_t), list = l->rows_most * l->p->shape.C;
    l->ids = create(l, l->owners, CF_ALLGATHER, CF_NO_COMPUTE, o, CF_BYTE, tokens * each);
    l->fetch = create(l, l->owners, CF_ALLTOALL, CF_NO_COMPUTE, o, REAL_DTYPE, list);
    l->deliver = create(l, l->owners, CF_ALLTOALL, CF_NO_COMPUTE, o, ACCUM_DTYPE, list);
    l->all_tokens = cf_alloc(N * tokens * each, "activations, shared");
    l->wanted = cf_alloc(N * l->rows_most * each, "activations, shared");
    l->leaving = cf_alloc(N * list * (int64_t)sizeof(accum), "rows of the token table");
    l->arrived = cf_alloc(N * list * (int64_t)sizeof(accum), "rows of the token table");
    int64_t numbers = N * tokens + N * l->rows_most + 2 * l->part + N;
    l->host_tokens = cf_host_alloc(numbers, sizeof *l->host_tokens, "lists of tokens");
    l->host_wanted = l->host_tokens + N * tokens;
    l->named_by = l->host_wanted + N * l->rows_most;
    l->number = l->named_by + l->part;
    l->length = l->number + l->part;
}

// Rows are more bytes, and their lists take time. In exchange nothing waits for the table's transfers, as far as the layers hide
// them: beside the products' time, in which the layers' own transfers come first; on GPUs these have a layer's other kernels, too.
// Where activations are communicated for longer than products take (eight times, README.md), the layers take as long as they do.
// One layer's time is left in any case: its gradients come before the first transfer of backward, its weights with forward's last.
// Many tokens name a large part of an owner's rows: an eighth with as many tokens as it has rows, a third with eight times as many
// (counted in tiny Shakespeare). The ranks of a host each fetch theirs from other hosts, where a collective fetches each row once.
static bool rows_pay(const lookup *l, int64_t tokens, bool rounded) {
    const cf_transport *t = l->context->transport;
    const double lists = 0.02, others = t && t->costs.serial ? 0.5 : 0; // of a step's products: other kernels, too
    const int places = l->owners->hierarchy ? l->owners->size / l->owners->hosts : 1;
    const param_bucket *table = &l->p->bucket[l->p->table];
    if (!t || (!t->costs.spare && t->local_size == t->size)) return false; // no core is left to move bytes meanwhile
    const double products_s = 6 * (double)tokens / t->costs.flops_per_s;   // of an element; its transfers:
    const double bytes = (double)((rounded ? sizeof(real) : sizeof(accum)) + sizeof(real));
    const double transfers_s = bytes / places / cf_bytes_per_s(&t->costs, l->owners);
    double layers_s = 0, before_s = 0;
    for (const param_bucket *b = l->p->bucket; b < table; b++)
        layers_s += products_s * (double)b->count, before_s += transfers_s * (double)(b->count - b->shard);
    const double moved = 8 * (1 - 1.0 / l->split->size) * (double)tokens * (double)(l->p->shape.C * l->p->shape.L);
    const double hiding_s = fmax(layers_s, moved * sizeof(real) / cf_bytes_per_s(&t->costs, l->split));
    const double others_s = others * layers_s;
    const double left_s = fmax(hiding_s - fmax(0, before_s - others_s), (hiding_s + others_s) / (double)l->p->shape.L);
    const double table_s = transfers_s * (double)(table->count - table->shard);
    const double named = 1 - exp(-0.135 * sqrt((double)tokens / (double)l->owned)); // share of the rows
    return fmin(table_s, left_s) > named * places * table_s + lists * (layers_s + products_s * (double)table->count);
}

void lookup_create(lookup *l, cf_context *context, const parameters *p, const cf_group *split, int64_t Ts, int64_t B,
                   const overlap *o) {
    int64_t shard = Ts * B * p->shape.C, tokens = split->size * Ts * B;
    const param_bucket *table = &p->bucket[p->table];
    *l = (lookup){.context = context, .p = p, .split = split, .owners = table->group};
    l->part = params_local_rows(p, WTE);
    l->owned = table->shard / p->shape.C;
    l->rows_most = smaller(tokens, l->owned);
    l->forward = create(l, split, CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE, o, REAL_DTYPE, shard);
    l->backward = create(l, split, CF_ALLGATHER, CF_COMPUTE_AFTER, o, REAL_DTYPE, shard);
    l->by_rows = l->owners->size > 1 &&
                 (o->embedding == EMBEDDING_AUTO ? rows_pay(l, tokens, o->round_gradients) : o->embedding == EMBEDDING_ROWS);
    if (l->by_rows) create_exchange(l, tokens, o);
}

void lookup_free(lookup *l) {
    cf_fuse *operations[] = {l->forward, l->backward, l->ids, l->fetch, l->deliver};
    for (int i = 0; i < 5; i++) cf_fuse_free(operations[i]);
    void *memory[] = {l->all_tokens, l->wanted, l->leaving, l->arrived};
    for (int i = 0; i < 4; i++) cf_free(memory[i]);
    free(l->host_tokens);
}

// --- which rows are sent ---

// For each rank in turn, lists the rows of each owner that its tokens name, in the order of their first use. Keeps the lists of
// rows that this rank owns (host_wanted), the length of the longest list (rows), and the places of this rank's rows in its lists
// (number), because it comes last.
static void list_rows(lookup *l, int64_t tokens) {
    int N = l->owners->size, here = l->owners->rank;
    memset(l->named_by, 0, (size_t)l->part * sizeof *l->named_by);
    memset(l->host_wanted, 0xff, (size_t)(N * l->rows_most) * sizeof *l->host_wanted); // −1
    l->rows = 0;
    for (int turn = 1; turn <= N; turn++) {
        int rank = (here + turn) % N;
        memset(l->length, 0, (size_t)N * sizeof *l->length);
        for (int64_t i = 0; i < tokens; i++) {
            int64_t row = l->host_tokens[rank * tokens + i] - l->split->rank * l->part, owner = row / l->owned;
            if (row < 0 || row >= l->part || l->named_by[row] == turn) continue;
            l->named_by[row] = turn;
            l->number[row] = l->length[owner]++;
            if (owner == here) l->host_wanted[rank * l->rows_most + l->number[row]] = (int32_t)row;
            if (l->length[owner] > l->rows) l->rows = l->length[owner];
        }
    }
}

// Sends every rank's tokens to all owners of rows of the same part of the table.
static void find_rows(lookup *l, const int32_t *inputs) {
    int N = l->owners->size;
    int64_t tokens = l->split->size * l->Ts * l->B, bytes = tokens * (int64_t)sizeof *inputs;
    int32_t *mine = l->all_tokens + l->owners->rank * tokens, *place = l->host_tokens + l->owners->rank * tokens;
    cf_stream *stream = l->context->stream;
    cf_copy(mine, inputs, bytes, stream);
    cf_fuse_run(l->ids, l->all_tokens, bytes, 1, NULL, NULL, -1);
    cf_copy(l->host_tokens, l->all_tokens, N * bytes, stream);
    cf_stream_sync(stream);
    list_rows(l, tokens);
    for (int64_t i = 0; i < tokens; i++) {
        int64_t row = place[i] - l->split->rank * l->part;
        place[i] = row < 0 || row >= l->part ? -1 : (int32_t)(row / l->owned * l->rows + l->number[row]);
    }
    cf_copy(mine, place, bytes, stream);
    for (int rank = 1; rank < N; rank++) // without gaps: lists of `rows`, not `rows_most`
        memmove(l->host_wanted + rank * l->rows, l->host_wanted + rank * l->rows_most, (size_t)l->rows * sizeof *l->wanted);
    cf_copy(l->wanted, l->host_wanted, N * l->rows * (int64_t)sizeof *l->wanted, stream);
    l->rows_known = true;
}

// --- computation ---

static void lookup_slice(void *argument, const cf_span *span, cf_stream *stream) {
    lookup *l = (lookup *)argument;
    for (int i = 0; i < span->blocks; i++)
        embedding_forward((real *)(span->data + i * span->data_stride), l->tokens + (span->row + i * span->row_stride) * l->B,
                          l->table, l->first, l->count, span->rows * l->B, l->p->shape.C, stream);
}

static void scatter_slice(void *argument, const cf_span *span, cf_stream *stream) {
    lookup *l = (lookup *)argument;
    for (int i = 0; i < span->blocks; i++)
        embedding_backward(l->gradient, span->data + i * span->data_stride, false,
                           l->tokens + (span->row + i * span->row_stride) * l->B, l->first, l->count, span->rows * l->B,
                           l->p->shape.C, stream);
}

// Work on this rank's part of the table.
static void use_table(lookup *l, const int32_t *inputs) {
    l->tokens = inputs;
    l->table = params_weight(l->p, WTE, 0);
    l->gradient = params_grad(l->p, WTE, 0);
    l->first = l->split->rank * l->part;
    l->count = l->part;
}

// Work on the rows that this rank's tokens name: those that have arrived, and a gradient that will leave.
static void use_rows(lookup *l) {
    l->tokens = l->all_tokens + l->Ts * l->B * l->split->size * l->owners->rank;
    l->table = l->arrived;
    l->gradient = l->leaving;
    l->first = 0;
    l->count = l->owners->size * l->rows;
}

static void exchange_rows(lookup *l, cf_fuse *operation) {
    cf_fuse_set_result(operation, l->arrived);
    cf_fuse_begin(operation, l->leaving, l->rows, l->p->shape.C, NULL, NULL, -1);
}

void lookup_forward(lookup *l, const int32_t *inputs, int64_t Ts, int64_t B, bool only_owned, real *scratch) {
    l->Ts = Ts, l->B = B, l->scratch = scratch;
    l->rows_known = false;
    if (only_owned) {
        find_rows(l, inputs);
        embedding_forward(l->leaving, l->wanted, l->p->weight + params_first_owned(&l->p->bucket[l->p->table]),
                          l->owners->rank * l->owned, l->owned, l->owners->size * l->rows, l->p->shape.C, l->context->stream);
        exchange_rows(l, l->fetch);
    } else {
        use_table(l, inputs);
        cf_fuse_begin(l->forward, scratch, Ts, B * l->p->shape.C, lookup_slice, l, -1);
    }
}

void lookup_finish_forward(lookup *l, real *x) {
    if (l->rows_known) {
        cf_fuse_finish(l->fetch);
        use_rows(l);
        cf_fuse_begin(l->forward, l->scratch, l->Ts, l->B * l->p->shape.C, lookup_slice, l, -1);
    }
    const real *found = cf_fuse_finish(l->forward);
    cf_copy(x, found, l->Ts * l->B * l->p->shape.C * (int64_t)sizeof(real), l->context->stream);
}

void lookup_backward(lookup *l, const real *dx, const int32_t *inputs, bool last, real *scratch) {
    int64_t row = l->B * l->p->shape.C, shard = l->Ts * row;
    l->delivering = last && l->by_rows;
    if (l->delivering) {
        if (!l->rows_known) find_rows(l, inputs);
        use_rows(l);
        cf_zero(l->gradient, l->count * l->p->shape.C * (int64_t)sizeof *l->gradient, l->context->stream);
    } else {
        use_table(l, inputs);
    }
    cf_copy(scratch + l->split->rank * shard, dx, shard * (int64_t)sizeof *dx, l->context->stream);
    cf_fuse_begin(l->backward, scratch, l->Ts, row, scatter_slice, l, -1);
}

void lookup_finish_backward(lookup *l) {
    cf_fuse_finish(l->backward);
    if (l->delivering) exchange_rows(l, l->deliver);
}

void lookup_finish_delivery(lookup *l, accum *shard) {
    if (!l->delivering) return;
    embedding_backward(shard, cf_fuse_finish(l->deliver), true, l->wanted, l->owners->rank * l->owned, l->owned,
                       l->owners->size * l->rows, l->p->shape.C, l->context->stream);
    l->delivering = false;
}

void lookup_explain(const lookup *l, FILE *out) {
    const int64_t others = l->owners->size - 1, row = l->p->shape.C * (int64_t)(sizeof(real) + sizeof(accum)); // bytes, both ways
    const char *how = l->by_rows ? "rows are sent, each that a rank's tokens name once" : "the whole table is sent";
    if (others == 0)
        fprintf(out, "token embedding: one copy, nothing to keep equal\n");
    else
        fprintf(out, "token embedding: %s: in a step to each rank at most %.2f MiB of rows, or %.2f MiB of the whole table\n", how,
                (double)(others * l->rows_most * row) / (1 << 20), (double)(others * l->owned * row) / (1 << 20));
}
