// See lookup.h.
#include "lookup.h"
#include "embedding.h"

static const param_bucket *table_bucket(const lookup *l) {
    return &l->p->bucket[l->p->table];
}

// --- life ---

static cf_fuse *plan(const lookup *l, const char *name, const cf_group *group, cf_operation operation,
                     cf_side side, overlap o, cf_dtype dtype, int64_t capacity) {
    return cf_fuse_create(l->context, (cf_fuse_plan){.name = name,
                                                     .group = group,
                                                     .operation = operation,
                                                     .side = side,
                                                     .mode = o.mode,
                                                     .route = o.route,
                                                     .slices = o.slices,
                                                     .dtype = dtype,
                                                     .capacity = capacity,
                                                     .early = side != CF_NO_COMPUTE});
}

// Bytes that one rank receives at both ends of a step, where little is left to hide behind, if rows travel or if the
// table does.
// (The table travels in both cases, but in the first one behind other computation.)
static void count_bytes(lookup *l, int64_t shard) {
    const param_bucket *b = table_bucket(l);
    int64_t world = l->mesh->world_group.size;
    int64_t here = (int64_t)sizeof(real), both = (int64_t)(sizeof(real) + sizeof(precise));
    l->sparse = 2 * (world - 1) * shard * here;
    l->dense = 2 * (l->near->size - 1) * shard * here + (b->group->size - 1) * b->shard * both;
}

static void create_far(lookup *l, int64_t T, int64_t B, overlap o) {
    const cf_group *world = &l->mesh->world_group;
    int64_t shard_rows = T / l->mesh->tp * B, C = l->p->shape.C;
    overlap once = {o.mode, o.route, 1};
    l->ids = plan(l, "embedding", world, CF_ALLGATHER, CF_NO_COMPUTE, once, CF_BYTE,
                  shard_rows * (int64_t)sizeof(int32_t));
    l->far_forward =
        plan(l, "embedding", world, CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE, o, REAL_DTYPE, shard_rows * C);
    l->far_backward =
        plan(l, "embedding", world, CF_ALLGATHER, CF_COMPUTE_AFTER, o, REAL_DTYPE, shard_rows * C);
    l->tokens = cf_alloc(world->size * shard_rows * (int64_t)sizeof(int32_t), "activations, shared");
    l->rows = cf_alloc(world->size * shard_rows * C * (int64_t)sizeof(real), "activations, shared");
}

void lookup_create(lookup *l, cf_context *context, const cf_mesh *mesh, const parameters *p,
                   const cf_group *near, int64_t T, int64_t B, overlap o) {
    int64_t shard = T / mesh->tp * B * p->shape.C;
    *l = (lookup){.context = context, .mesh = mesh, .p = p, .near = near};
    l->near_forward = plan(l, "embedding", near, CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE, o, REAL_DTYPE, shard);
    l->near_backward = plan(l, "embedding", near, CF_ALLGATHER, CF_COMPUTE_AFTER, o, REAL_DTYPE, shard);
    count_bytes(l, shard);
    bool order_is_ours = cf_mode_is_fused(o.mode); // the baselines send the table
    // Rows travel besides the table, which then hides behind the layers. Where nothing can hide they are only more bytes.
    bool hides = o.mode != CF_MODE_AUTO || (context->transport && context->transport->costs.spare);
    l->far = order_is_ours && hides && table_bucket(l)->group->size > 1 && l->sparse <= l->dense;
    if (l->far) create_far(l, T, B, o);
}

void lookup_free(lookup *l) {
    cf_fuse *operations[] = {l->near_forward, l->near_backward, l->ids, l->far_forward, l->far_backward};
    for (int i = 0; i < 5; i++) cf_fuse_free(operations[i]);
    cf_free(l->tokens);
    cf_free(l->rows);
}

// --- what is computed ---

static void lookup_slice(void *argument, const cf_span *span, cf_stream *stream) {
    lookup *l = (lookup *)argument;
    for (int i = 0; i < span->blocks; i++)
        embedding_forward((real *)(span->data + i * span->data_stride),
                          l->inputs + (span->row + i * span->row_stride) * l->B, l->table, l->first, l->count,
                          span->rows * l->B, l->p->shape.C, stream);
}

static void scatter_slice(void *argument, const cf_span *span, cf_stream *stream) {
    lookup *l = (lookup *)argument;
    for (int i = 0; i < span->blocks; i++)
        embedding_backward(l->gradient, (const real *)(span->data + i * span->data_stride),
                           l->inputs + (span->row + i * span->row_stride) * l->B, l->first, l->count,
                           span->rows * l->B, l->p->shape.C, stream);
}

// --- near and far ---

// The rows held here are those of this rank's part of the vocabulary.
static void look_near(lookup *l, const int32_t *inputs) {
    l->table = params_weight(l->p, WTE, 0);
    l->gradient = params_grad(l->p, WTE, 0);
    l->inputs = inputs;
    l->count = params_local_rows(l->p, WTE);
    l->first = l->near->rank * l->count;
}

// The rows owned here are those of this rank's shard of the bucket. gradient: of the shard.
static void look_far(lookup *l, precise *gradient) {
    const param_bucket *b = table_bucket(l);
    int64_t rows = b->shard / l->p->shape.C, held = params_local_rows(l->p, WTE),
            begin = b->group->rank * rows;
    l->table = l->p->weight + b->first + b->group->rank * b->shard;
    l->gradient = gradient;
    l->inputs = l->tokens;
    l->first = l->near->rank * held + begin;
    l->count = begin + rows <= held ? rows : begin < held ? held - begin : 0;
}

// Every rank's tokens, to every rank.
static void gather_tokens(lookup *l, const int32_t *inputs) {
    int64_t rows = l->Ts * l->B, bytes = rows * (int64_t)sizeof *inputs;
    cf_copy(l->tokens + l->mesh->world_group.rank * rows, inputs + l->near->rank * rows, bytes,
            l->context->stream);
    cf_fuse_run(l->ids, l->tokens, bytes, 1, NULL, NULL, -1);
}

void lookup_forward(lookup *l, const int32_t *inputs, int64_t Ts, int64_t B, bool fresh, real *scratch) {
    l->Ts = Ts, l->B = B;
    l->have_tokens = fresh;
    l->looking = fresh ? l->far_forward : l->near_forward;
    if (fresh) {
        gather_tokens(l, inputs);
        look_far(l, NULL);
    } else {
        look_near(l, inputs);
    }
    cf_fuse_begin(l->looking, fresh ? l->rows : scratch, Ts, B * l->p->shape.C, lookup_slice, l, -1);
}

void lookup_finish_forward(lookup *l, real *x) {
    const real *found = cf_fuse_finish(l->looking);
    cf_copy(x, found, l->Ts * l->B * l->p->shape.C * (int64_t)sizeof(real), l->context->stream);
    l->looking = NULL;
}

void lookup_backward(lookup *l, const real *dx, const int32_t *inputs, bool last, real *scratch) {
    int64_t row = l->B * l->p->shape.C, shard = l->Ts * row, bytes = shard * (int64_t)sizeof(real);
    real *all = scratch;
    int rank = l->near->rank;
    l->scattering = l->near_backward;
    if (last && l->far) {
        if (!l->have_tokens) gather_tokens(l, inputs);
        all = l->rows;
        rank = l->mesh->world_group.rank;
        l->scattering = l->far_backward;
    } else {
        look_near(l, inputs);
    }
    cf_copy(all + rank * shard, dx, bytes, l->context->stream);
    cf_fuse_begin(l->scattering, all, l->Ts, row, scatter_slice, l, -1);
}

void lookup_finish_near(lookup *l) {
    if (l->scattering != l->near_backward) return;
    cf_fuse_finish(l->scattering);
    l->scattering = NULL;
}

void lookup_finish_far(lookup *l, precise *shard) {
    if (!l->scattering || l->scattering != l->far_backward) return;
    look_far(l, shard);
    cf_fuse_finish(l->scattering);
    l->scattering = NULL;
}

bool lookup_holds_up_table(const lookup *l) {
    return !l->far && table_bucket(l)->group->size > 1;
}

void lookup_explain(const lookup *l, FILE *out) {
    double mib = 1.0 / (1 << 20), rows = (double)l->sparse * mib, table = (double)l->dense * mib;
    fprintf(out, "token embedding: ");
    if (table_bucket(l)->group->size == 1)
        fprintf(out, "one copy, nothing to keep equal\n");
    else if (l->far)
        fprintf(out,
                "rows travel: %.2f MiB to each rank in a step; the table would be %.2f MiB that nothing "
                "hides. The head's gradient leaves at the start of backward\n",
                rows, table);
    else if (l->sparse <= l->dense)
        fprintf(out,
                "the table travels after backward: rows travel besides it, and pay only where it can hide\n");
    else
        fprintf(out,
                "the table travels after backward: %.2f MiB to each rank in a step; rows: %.2f "
                "MiB\n",
                table, rows);
}
