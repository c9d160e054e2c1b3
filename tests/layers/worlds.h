// Every rank of a mesh in one process, and the places that params.h's table gives its parameters, for tests without transport.
// Expected places come from independent formulas, element by element.
#pragma once

#include "kernels/kernel_testing.h"
#include "commfuse/base/die.h"
#include "layers/params.h"

enum { RANKS_MAX = 12 };

// Every rank of one mesh.
typedef struct world {
    gpt_shape shape;
    parallel_strategy strategy;
    int tp, dp, ranks;
    cf_mesh mesh[RANKS_MAX];
    parameters rank[RANKS_MAX];
} world;

// Of no model: without biases and learned positions, two products side by side, keys narrower than queries.
static const block_row other_block = {"other", RMSNORM, ROTARY, SWIGLU, .units = 4};

// Vocabularies that do not divide, one of them so small that only the first ranks have some of it; matrices
// that are buckets of their own on all meshes, on some, and on hardly any.
static const gpt_shape shapes[] = {
    {.maxT = 6, .V = 131, .Vp = 133, .L = 3, .H = 12, .C = 24},
    {.maxT = 7, .V = 5, .Vp = 5, .L = 2, .H = 12, .C = 96},
    {.maxT = 5, .V = 127, .Vp = 128, .L = 1, .H = 12, .C = 204},
    {.maxT = 5, .V = 30, .Vp = 32, .L = 2, .H = 24, .C = 48, .KV = 12, .F = 60, .block = &other_block},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static inline void open_world(world *w, gpt_shape shape, parallel_strategy strategy, int tp, int dp) {
    w->shape = shape, w->strategy = strategy, w->tp = tp, w->dp = dp, w->ranks = tp * dp;
    for (int r = 0; r < w->ranks; r++) {
        cf_mesh_init(&w->mesh[r], w->ranks, r, tp, dp);
        params_create(&w->rank[r], shape, &w->mesh[r], strategy, 0);
    }
}

static inline void close_world(world *w) {
    for (int r = 0; r < w->ranks; r++) {
        params_free(&w->rank[r]);
        cf_mesh_free(&w->mesh[r]);
    }
}

typedef void check_rank(const world *w, int rank);

static inline void on_every_rank(const gpt_shape *of, int shapes_count, check_rank *check) {
    static world w;
    for (int s = 0; s < shapes_count; s++)
        for (int strategy = STRATEGY_TPSP; strategy <= STRATEGY_UP; strategy++)
            for (int tp = 1; tp <= 4; tp++)
                for (int dp = 1; dp <= 3; dp++) {
                    open_world(&w, of[s], (parallel_strategy)strategy, tp, dp);
                    for (int r = 0; r < w.ranks; r++) {
                        check(&w, r);
                        release_buffers(NULL);
                    }
                    close_world(&w);
                }
}

CF_NORETURN static inline void fail_at(const world *w, int rank, const char *what, int tensor, int64_t element) {
    fail_msg("%s, C %lld, tp %d, dp %d, rank %d: %s: %s[%lld]", w->strategy == STRATEGY_UP ? "UP" : "TPSP", (long long)w->shape.C,
             w->tp, w->dp, rank, what, tensor < 0 ? "element" : params_name(tensor), (long long)element);
    abort();
}

// --- the table of params.h, written again ---

static inline bool is_split(int tensor) {
    return tensor == WTE || tensor == QKVW || tensor == QKVB || tensor == ATTPROJW || tensor == FCW || tensor == FCB ||
           tensor == FCPROJW;
}

static inline bool is_attention(int tensor) {
    return tensor == QKVW || tensor == QKVB || tensor == ATTPROJW;
}

static inline int64_t whole_count(const gpt_shape *s, int tensor) {
    return params_rows(s, tensor) * params_columns(s, tensor);
}

// Size of part `part` of `parts` and, for each of its elements, the element of the whole tensor; −1: padding.
static inline int64_t part_of(const gpt_shape *s, int tensor, int64_t part, int64_t parts, int64_t *whole) {
    int64_t columns = params_columns(s, tensor), keys = s->C / s->H * (s->KV ? s->KV : s->H), n = 0, before = 0;
    int64_t section[] = {params_rows(s, tensor), 0, 0};
    bool by_columns = tensor == ATTPROJW || tensor == FCPROJW, by_rows = is_split(tensor) && !by_columns;
    if (tensor == QKVW || tensor == QKVB) section[0] = s->C, section[1] = section[2] = keys;
    if ((tensor == FCW || tensor == FCB) && s->F) section[0] = section[1] = s->F;
    int64_t width = by_columns ? columns / parts : columns, left = by_columns ? part * width : 0;
    for (int k = 0; k < 3; before += section[k++]) {
        int64_t mine = by_rows ? (section[k] + parts - 1) / parts : section[k];
        while (tensor == WTE && mine % 8 != 0) mine++;
        for (int64_t i = 0; i < mine; i++) {
            int64_t row = by_rows ? part * mine + i : i;
            for (int64_t j = 0; j < width; j++) whole[n++] = row < section[k] ? (before + row) * columns + left + j : -1;
        }
    }
    return n;
}

// The same of all that a rank holds; whole: as large as room() says.
static inline int64_t expected_map(const world *w, int tensor, int tp_rank, int64_t *whole) {
    bool parts = is_attention(tensor) && w->strategy == STRATEGY_UP;
    if (!parts && w->strategy == STRATEGY_UP) return part_of(&w->shape, tensor, 0, 1, whole);
    if (!parts) return part_of(&w->shape, tensor, tp_rank, w->tp, whole);
    int64_t n = 0;
    for (int64_t part = 0; part < w->tp; part++) n += part_of(&w->shape, tensor, part, w->tp, whole + n);
    return n;
}

static inline int64_t *index_buffer(int64_t n) {
    return test_buffer(n * (int64_t)sizeof(int64_t));
}

static inline int64_t room(const gpt_shape *s, int tensor) {
    return whole_count(s, tensor) + 4 * 8 * params_columns(s, tensor);
}

// Where a local element belongs in the whole model; whole −1: padding.
typedef struct element_place {
    int64_t tensor, layer, whole;
} element_place;

// (elements) of one rank
static inline element_place *expected_places(const world *w, int rank) {
    const parameters *p = &w->rank[rank];
    element_place *place = test_buffer((p->elements + 1) * (int64_t)sizeof *place);
    for (int64_t e = 0; e < p->elements; e++) place[e] = (element_place){-1, -1, -1};
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        int64_t *whole = index_buffer(room(&w->shape, tensor));
        int64_t count = expected_map(w, tensor, rank % w->tp, whole);
        for (int64_t layer = 0; layer < params_layers(&w->shape, tensor); layer++)
            for (int64_t i = 0; i < count; i++)
                place[params_weight(p, tensor, layer) - p->weight + i] = (element_place){tensor, layer, whole[i]};
    }
    return place;
}
