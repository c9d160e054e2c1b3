// See state.h. The copy has the order of the optimizer's state, bucket by bucket, so that moments and masters are copied in
// one piece.
#include "state.h"

void state_create(rank_state *s, const zero_shards *z) {
    const parameters *p = z->params;
    int64_t room = 1;
    *s = (rank_state){.elements = p->owned,
                      .kinds = optimizer_kinds(z->optimizer),
                      .run = cf_host_alloc(room, sizeof *s->run, "a copy of the state")};
    for (const param_tensor *t = p->placed; t < p->placed + p->tensors; t++)
        for (int64_t i = 0; i < params_runs(p, t->tensor); i++) {
            const param_bucket *b = &p->bucket[t->bucket];
            const param_run r = params_run(p, t->tensor, p->tp_rank, i);
            const int64_t first = t->first + r.local;
            int64_t begin = first, end = first + r.count;
            if (!params_owned(b, &begin, &end)) continue;
            s->run = cf_host_grow(s->run, &room, s->runs + 1, sizeof *s->run, "a copy of the state");
            const int64_t whole = r.whole + begin - first, at = b->owned_before + begin - params_first_owned(b);
            s->run[s->runs++] = (state_run){t->tensor, t->layer, whole, end - begin, at};
        }
    for (int kind = 0; kind < s->kinds.count; kind++)
        s->value[kind] = cf_host_alloc(s->elements, sizeof *s->value[kind], "a copy of the state");
}

void state_free(rank_state *s) {
    free(s->run);
    for (int kind = 0; kind < STATE_KINDS_MAX; kind++) free(s->value[kind]);
    *s = (rank_state){.elements = 0};
}

void state_copy(rank_state *s, const zero_shards *z) {
    if (!s->run) state_create(s, z);
    const int64_t size = (int64_t)sizeof(accum), bytes = s->elements * size;
    cf_stream *stream = z->context->stream;
    for (int i = 0; !z->master && i < z->params->buckets; i++) { // the weights themselves are accum
        const param_bucket *b = &z->params->bucket[i];
        cf_copy(s->value[STATE_WEIGHT] + b->owned_before, z->params->weight + params_first_owned(b), b->shard * size, stream);
    }
    if (z->master) cf_copy(s->value[STATE_WEIGHT], z->master, bytes, stream);
    for (int k = 0; k + 1 < s->kinds.count; k++) {
        const int64_t from = z->state_from[k]; // before it, zero
        cf_copy(s->value[1 + k] + from, z->state[k], bytes - from * size, stream);
    }
    cf_stream_sync(stream);
}

// --- restore ---

void state_restore(zero_shards *z, int kinds, params_reader *read, void *argument) {
    rank_state s;
    params_read(z->params, read, argument, z->context->stream);
    state_create(&s, z);
    for (int kind = 0; kind < kinds; kind++) {
        accum *into = kind == STATE_WEIGHT ? z->master : z->state[kind - 1];
        if (!into) continue; // there are no masters: params_read() has filled the weights
        for (const state_run *r = s.run; r < s.run + s.runs; r++)
            read(argument, kind, (int)r->tensor, r->layer, r->whole, r->count, (float *)(s.value[kind] + r->at));
        const int64_t begin = kind == STATE_WEIGHT ? 0 : z->state_from[kind - 1];
        cf_copy(into, s.value[kind] + begin, (s.elements - begin) * (int64_t)sizeof(accum), z->context->stream);
    }
    cf_stream_sync(z->context->stream);
    state_free(&s);
}

// --- the whole model ---

// pieces: the host's copy of g->pieces.
static void collect_tensor(gpt *g, const real *local, int tensor, real *pieces, float *whole) {
    int64_t count = params_local_count(&g->params, tensor), size = (int64_t)sizeof *pieces;
    for (int64_t first = 0; first < count; first += COLLECT) {
        int64_t n = smaller(count - first, COLLECT);
        cf_copy(g->pieces + g->split->rank * n, local + first, n * size, g->context->stream);
        cf_fuse_run(g->collect, g->pieces, n, 1, NULL, NULL, -1);
        if (whole) cf_copy(pieces, g->pieces, g->split->size * n * size, g->context->stream);
        cf_stream_sync(g->context->stream);
        for (int rank = 0; whole && rank < g->split->size; rank++)
            params_place(&g->params, tensor, rank, first, n, pieces + rank * n, whole);
    }
}

void gpt_collect(gpt *g, void (*append)(void *argument, const float *values, int64_t count), void *argument) {
    const gpt_shape *shape = &g->params.shape;
    real *pieces = cf_host_alloc(g->split->size * COLLECT, sizeof *pieces, "pieces of the model");
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        int64_t count = params_rows(shape, tensor) * params_columns(shape, tensor);
        if (params_layers(shape, tensor) == 0) continue;
        float *whole = g->mesh->tp_group.rank == 0 ? cf_host_alloc(count, sizeof *whole, params_name(tensor)) : NULL;
        for (int64_t layer = 0; layer < params_layers(shape, tensor); layer++) {
            collect_tensor(g, params_weight(&g->params, tensor, layer), tensor, pieces, whole);
            if (whole) append(argument, whole, count);
        }
        free(whole);
    }
    free(pieces);
}
