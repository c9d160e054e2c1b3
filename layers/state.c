// See state.h. The copy has the order of the optimizer's own state, bucket by bucket, so that moments and masters
// are copied in one piece.
#include "state.h"
#include "../commfuse/die.h"
#include <stdlib.h>
#include <string.h>

static int64_t owned_elements(const zero_optimizer *o) {
    int64_t owned = 0;
    for (int i = 0; i < o->params->buckets; i++) owned += o->params->bucket[i].shard;
    return owned;
}

// Calls visit for each run of the shards that this rank owns.
static void each_run(const zero_optimizer *o, void (*visit)(void *argument, state_run run), void *argument) {
    for (int i = 0; i < o->params->buckets; i++) {
        const param_bucket *b = &o->params->bucket[i];
        param_place place;
        for (int64_t done = 0; done < b->shard; done += place.count) {
            bool real_elements = params_locate(o->params, params_first_owned(b) + done, &place);
            if (place.count > b->shard - done) place.count = b->shard - done;
            if (!real_elements) continue;
            visit(argument, (state_run){place.tensor, place.layer, place.whole, place.count,
                                        o->bucket[i].state + done});
        }
    }
}

static void count_run(void *argument, state_run run) {
    (void)run;
    ++*(int64_t *)argument;
}

static void keep_run(void *argument, state_run run) {
    rank_state *s = argument;
    s->run[s->runs++] = run;
}

void state_create(rank_state *s, const zero_optimizer *o) {
    int64_t runs = 0;
    *s = (rank_state){.elements = owned_elements(o)};
    each_run(o, count_run, &runs);
    s->run = malloc((size_t)(runs + 1) * sizeof *s->run);
    bool room = s->run != NULL;
    for (int kind = 0; kind < STATE_KINDS; kind++) {
        s->value[kind] = calloc((size_t)s->elements + 1, sizeof *s->value[kind]);
        room &= s->value[kind] != NULL;
    }
    if (!room)
        cf_die("give the hosts more memory, or use more ranks",
               "out of memory for a copy of the state, %.1f MiB",
               (double)(STATE_KINDS * s->elements * (int64_t)sizeof(precise)) / 1048576);
    each_run(o, keep_run, s);
}

void state_free(rank_state *s) {
    free(s->run);
    for (int kind = 0; kind < STATE_KINDS; kind++) free(s->value[kind]);
    *s = (rank_state){.elements = 0};
}

// Weights and moments of the same type lie bucket by bucket; masters lie like moments.
static void take_weights(rank_state *s, const zero_optimizer *o) {
    int64_t size = (int64_t)sizeof(precise);
    if (o->master) {
        cf_copy(s->value[STATE_WEIGHT], o->master, s->elements * size, o->context->stream);
        return;
    }
    for (int i = 0; i < o->params->buckets; i++) {
        const param_bucket *b = &o->params->bucket[i];
        cf_copy(s->value[STATE_WEIGHT] + o->bucket[i].state, o->params->weight + params_first_owned(b),
                b->shard * size, o->context->stream);
    }
}

void state_take(rank_state *s, const zero_optimizer *o) {
    int64_t bytes = s->elements * (int64_t)sizeof(precise);
    take_weights(s, o);
    cf_copy(s->value[STATE_M], o->m, bytes, o->context->stream);
    cf_copy(s->value[STATE_V], o->v, bytes, o->context->stream);
    cf_stream_sync(o->context->stream);
}

// --- the other way ---

typedef struct giving {
    state_reader *read;
    void *argument;
    state_kind kind;
    precise *value; // (elements) on its way to the optimizer
    precise *piece; // (AT_ONCE)
} giving;

enum { AT_ONCE = 1 << 16 };

static void read_weights(void *argument, int tensor, int64_t layer, int64_t first, int64_t count,
                         float *out) {
    giving *g = argument;
    for (int64_t done = 0; done < count; done += AT_ONCE) {
        int64_t n = count - done < AT_ONCE ? count - done : AT_ONCE;
        g->read(g->argument, STATE_WEIGHT, tensor, layer, first + done, n, g->piece);
        for (int64_t i = 0; i < n; i++) out[done + i] = (float)g->piece[i];
    }
}

static void read_run(void *argument, state_run run) {
    giving *g = argument;
    g->read(g->argument, g->kind, (int)run.tensor, run.layer, run.whole, run.count, g->value + run.at);
}

void state_give(zero_optimizer *o, state_reader *read, void *argument) {
    int64_t elements = owned_elements(o);
    giving g = {.read = read, .argument = argument};
    precise *into[STATE_KINDS] = {o->master, o->m, o->v};
    g.value = calloc((size_t)elements + 1, sizeof *g.value);
    g.piece = malloc(AT_ONCE * sizeof *g.piece);
    if (!g.value || !g.piece) cf_die(NULL, "out of memory for reading the state");
    params_read(o->params, read_weights, &g, o->context->stream);
    for (g.kind = STATE_WEIGHT; g.kind < STATE_KINDS; g.kind = (state_kind)(g.kind + 1)) {
        if (!into[g.kind]) continue;
        each_run(o, read_run, &g);
        cf_copy(into[g.kind], g.value, elements * (int64_t)sizeof *g.value, o->context->stream);
    }
    cf_stream_sync(o->context->stream);
    free(g.value);
    free(g.piece);
}
