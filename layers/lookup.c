// See lookup.h.
#include "lookup.h"
#include "../commfuse/die.h"
#include "embedding.h"
#include <stdlib.h>
#include <string.h>

static const param_bucket *table_bucket(const lookup *l) {
    return &l->p->bucket[l->p->table];
}

static int64_t owned_rows(const lookup *l) {
    return table_bucket(l)->shard / l->p->shape.C;
}

// --- life ---

static cf_fuse *plan(const lookup *l, const cf_group *group, cf_operation operation, cf_side side, overlap o,
                     cf_dtype dtype, int64_t capacity) {
    return cf_fuse_create(l->context, (cf_fuse_plan){.name = "embedding",
                                                     .group = group,
                                                     .operation = operation,
                                                     .side = side,
                                                     .mode = o.mode,
                                                     .route = o.route,
                                                     .slices = o.slices,
                                                     .dtype = dtype,
                                                     .capacity = capacity,
                                                     .result_given = operation == CF_ALLTOALL,
                                                     .early = dtype != CF_BYTE});
}

static int32_t *host_memory(int64_t count) {
    int32_t *memory = calloc((size_t)count, sizeof *memory);
    if (!memory) cf_die(NULL, "out of memory for lists of %lld tokens", (long long)count);
    return memory;
}

// tokens: of the ranks that hold a copy.
static void create_exchange(lookup *l, int64_t tokens, overlap o) {
    const cf_group *owners = table_bucket(l)->group;
    int64_t N = owners->size, list = l->rows_most * l->p->shape.C, held = params_local_rows(l->p, WTE);
    int64_t each = (int64_t)sizeof(int32_t), bytes = N * list * (int64_t)sizeof(precise);
    l->ids = plan(l, owners, CF_ALLGATHER, CF_NO_COMPUTE, o, CF_BYTE, tokens * each);
    l->fetch = plan(l, owners, CF_ALLTOALL, CF_NO_COMPUTE, o, REAL_DTYPE, list);
    l->deliver = plan(l, owners, CF_ALLTOALL, CF_NO_COMPUTE, o, PRECISE_DTYPE, list);
    l->all_tokens = cf_alloc(N * tokens * each, "activations, shared");
    l->wanted = cf_alloc(N * l->rows_most * each, "activations, shared");
    l->leaving = cf_alloc(bytes, "rows of the token table");
    l->arrived = cf_alloc(bytes, "rows of the token table");
    l->host_tokens = host_memory(N * tokens);
    l->host_wanted = host_memory(N * l->rows_most);
    l->named_by = host_memory(held);
    l->number = host_memory(held);
    l->list_lengths = host_memory(N);
}

void lookup_create(lookup *l, cf_context *context, const parameters *p, const cf_group *split, int64_t Ts,
                   int64_t B, overlap o) {
    int64_t shard = Ts * B * p->shape.C, tokens = split->size * Ts * B;
    *l = (lookup){.context = context, .p = p, .split = split};
    l->forward = plan(l, split, CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE, o, REAL_DTYPE, shard);
    l->backward = plan(l, split, CF_ALLGATHER, CF_COMPUTE_AFTER, o, REAL_DTYPE, shard);
    l->rows_most = tokens < owned_rows(l) ? tokens : owned_rows(l);
    // Rows travel besides the table, which then hides behind the layers. Where nothing can hide they are only more bytes; and
    // the baselines send the table.
    bool hides = o.mode != CF_MODE_AUTO || (context->transport && context->transport->costs.spare);
    l->by_rows = cf_mode_is_fused(o.mode) && hides && table_bucket(l)->group->size > 1;
    if (l->by_rows) create_exchange(l, tokens, o);
}

void lookup_free(lookup *l) {
    cf_fuse *operations[] = {l->forward, l->backward, l->ids, l->fetch, l->deliver};
    for (int i = 0; i < 5; i++) cf_fuse_free(operations[i]);
    void *memory[] = {l->all_tokens, l->wanted, l->leaving, l->arrived};
    for (int i = 0; i < 4; i++) cf_free(memory[i]);
    int32_t *host[] = {l->host_tokens, l->host_wanted, l->named_by, l->number, l->list_lengths};
    for (int i = 0; i < 5; i++) free(host[i]);
}

// --- which rows travel ---

// Lists, for every rank and owner, the rows that the rank's tokens name, in the order in which they first do; keeps those
// of this owner, and their greatest length as l->rows. This rank comes last, so that l->number is where a row is in its lists.
static void list_rows(lookup *l, int64_t tokens) {
    int64_t owned = owned_rows(l), held = params_local_rows(l->p, WTE), first = l->split->rank * held;
    int N = table_bucket(l)->group->size, here = table_bucket(l)->group->rank;
    memset(l->named_by, 0, (size_t)held * sizeof *l->named_by);
    memset(l->host_wanted, 0xff, (size_t)(N * l->rows_most) * sizeof *l->host_wanted); // −1
    l->rows = 0;
    for (int turn = 1; turn <= N; turn++) {
        int rank = (here + turn) % N;
        memset(l->list_lengths, 0, (size_t)N * sizeof *l->list_lengths);
        for (int64_t i = 0; i < tokens; i++) {
            int64_t row = l->host_tokens[rank * tokens + i] - first;
            if (row < 0 || row >= held || l->named_by[row] == turn) continue;
            int64_t owner = row / owned;
            l->named_by[row] = turn;
            l->number[row] = l->list_lengths[owner]++;
            if (owner == here) l->host_wanted[rank * l->rows_most + l->number[row]] = (int32_t)row;
            if (l->list_lengths[owner] > l->rows) l->rows = l->list_lengths[owner];
        }
    }
}

// Every rank's tokens go to every rank that owns rows of the same part of the table.
static void find_rows(lookup *l, const int32_t *inputs) {
    const cf_group *owners = table_bucket(l)->group;
    cf_stream *stream = l->context->stream;
    int64_t tokens = l->split->size * l->Ts * l->B, bytes = tokens * (int64_t)sizeof *inputs;
    int64_t owned = owned_rows(l), held = params_local_rows(l->p, WTE), first = l->split->rank * held;
    cf_copy(l->all_tokens + owners->rank * tokens, inputs, bytes, stream);
    cf_fuse_run(l->ids, l->all_tokens, bytes, 1, NULL, NULL, -1);
    cf_copy(l->host_tokens, l->all_tokens, owners->size * bytes, stream);
    cf_stream_sync(stream);
    list_rows(l, tokens);
    for (int rank = 1; rank < owners->size; rank++) // lists of rows_most become lists of rows
        memmove(l->host_wanted + rank * l->rows, l->host_wanted + rank * l->rows_most,
                (size_t)l->rows * sizeof *l->wanted);
    int32_t *place = l->host_tokens + owners->rank * tokens;
    for (int64_t i = 0; i < tokens; i++) {
        int64_t row = place[i] - first;
        bool held_here = row >= 0 && row < held;
        place[i] = held_here ? (int32_t)(row / owned * l->rows + l->number[row]) : -1;
    }
    cf_copy(l->wanted, l->host_wanted, owners->size * l->rows * (int64_t)sizeof *l->wanted, stream);
    cf_copy(l->all_tokens + owners->rank * tokens, place, bytes, stream);
    l->rows_known = true;
}

// --- what is computed ---

static void lookup_slice(void *argument, const cf_span *span, cf_stream *stream) {
    lookup *l = (lookup *)argument;
    for (int i = 0; i < span->blocks; i++)
        embedding_forward((real *)(span->data + i * span->data_stride),
                          l->tokens + (span->row + i * span->row_stride) * l->B, l->table, l->first, l->count,
                          span->rows * l->B, l->p->shape.C, stream);
}

static void scatter_slice(void *argument, const cf_span *span, cf_stream *stream) {
    lookup *l = (lookup *)argument;
    for (int i = 0; i < span->blocks; i++)
        embedding_backward(l->gradient, (const real *)(span->data + i * span->data_stride),
                           l->tokens + (span->row + i * span->row_stride) * l->B, l->first, l->count,
                           span->rows * l->B, l->p->shape.C, stream);
}

// This rank's part of the table.
static void use_table(lookup *l, const int32_t *inputs) {
    l->tokens = inputs;
    l->table = params_weight(l->p, WTE, 0);
    l->gradient = params_grad(l->p, WTE, 0);
    l->count = params_local_rows(l->p, WTE);
    l->first = l->split->rank * l->count;
}

// The rows that its tokens name: those that have arrived, and a gradient that will leave.
static void use_rows(lookup *l) {
    const cf_group *owners = table_bucket(l)->group;
    l->tokens = l->all_tokens + owners->rank * l->split->size * l->Ts * l->B;
    l->table = l->arrived;
    l->gradient = l->leaving;
    l->count = owners->size * l->rows;
    l->first = 0;
}

static void exchange_rows(lookup *l, cf_fuse *operation) {
    cf_fuse_result(operation, l->arrived);
    cf_fuse_begin(operation, l->leaving, l->rows, l->p->shape.C, NULL, NULL, -1);
}

void lookup_forward(lookup *l, const int32_t *inputs, int64_t Ts, int64_t B, bool only_owned, real *scratch) {
    l->Ts = Ts, l->B = B, l->scratch = scratch;
    l->rows_known = false;
    if (only_owned) {
        const param_bucket *b = table_bucket(l);
        int64_t owned = owned_rows(l), C = l->p->shape.C;
        find_rows(l, inputs);
        embedding_forward(l->leaving, l->wanted, l->p->weight + params_first_owned(b), b->group->rank * owned,
                          owned, b->group->size * l->rows, C, l->context->stream);
        exchange_rows(l, l->fetch);
    } else {
        use_table(l, inputs);
        cf_fuse_begin(l->forward, scratch, Ts, B * l->p->shape.C, lookup_slice, l, -1);
    }
}

void lookup_finish_forward(lookup *l, real *x) {
    int64_t row = l->B * l->p->shape.C;
    if (l->rows_known) {
        cf_fuse_finish(l->fetch);
        use_rows(l);
        cf_fuse_begin(l->forward, l->scratch, l->Ts, row, lookup_slice, l, -1);
    }
    const real *found = cf_fuse_finish(l->forward);
    cf_copy(x, found, l->Ts * row * (int64_t)sizeof(real), l->context->stream);
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

void lookup_finish_delivery(lookup *l, precise *shard) {
    if (!l->delivering) return;
    const cf_group *owners = table_bucket(l)->group;
    const precise *rows = cf_fuse_finish(l->deliver);
    embedding_add(shard, rows, l->wanted, owners->rank * owned_rows(l), owned_rows(l), owners->size * l->rows,
                  l->p->shape.C, l->context->stream);
    l->delivering = false;
}

void lookup_explain(const lookup *l, FILE *out) {
    const param_bucket *b = table_bucket(l);
    double row = (double)(l->p->shape.C * (int64_t)(sizeof(real) + sizeof(precise))) / (1 << 20); // both ways
    double rows = (b->group->size - 1) * (double)l->rows_most * row;
    double table = (b->group->size - 1) * (double)owned_rows(l) * row;
    fprintf(out, "token embedding: ");
    if (b->group->size == 1)
        fprintf(out, "one copy, nothing to keep equal\n");
    else if (l->by_rows)
        fprintf(out,
                "rows travel, each that a rank's tokens name once, behind an update and the last weight "
                "gradient: at "
                "most %.2f MiB to each rank in a step; the table would be %.2f MiB that nothing hides. The "
                "head's "
                "gradient leaves at the start of backward\n",
                rows, table);
    else
        fprintf(
            out,
            "the table travels after backward: %.2f MiB to each rank in a step. Rows would travel besides "
            "it, at most %.2f MiB, which pays only where the table can hide\n",
            table, rows);
}
