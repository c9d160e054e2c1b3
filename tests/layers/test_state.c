// ranks: 1
// A run's state, from any mesh to any other: copied rank by rank, written, read back, restored on every rank of the other mesh,
// and compared bit by bit, weights and moments. The test fills and compares by its own formulas of places (worlds.h), so the
// code under test cannot undo its own mistakes.
#include "worlds.h"
#include "../data/scratch.h"
#include "data/atomic_file.h"
#include "data/checkpoint.h"
#include "../data/kinds.h"
#include "layers/state.h"
#include <sys/stat.h>

enum { STEP = 7, MESHES_MAX = 24 };
static cf_context context; // the default stream

// Exact in single precision; different for neighbours, layers, tensors and kinds.
static float value_of(int kind, int64_t tensor, int64_t layer, int64_t element) {
    return (float)((element * 7 + layer * 100003 + tensor * 10007 + kind * 1299709) % 8388593 + 1);
}

// --- shards without transport ---

typedef struct states {
    world w;
    bool master;
    zero_shards rank[RANKS_MAX];
} states;

static int64_t owned(const zero_shards *o) {
    int64_t count = 0;
    for (int i = 0; i < o->params->buckets; i++) count += o->params->bucket[i].shard;
    return count;
}

static void open_shards(zero_shards *o, world *w, int rank, bool master) {
    *o = (zero_shards){.context = &context, .params = &w->rank[rank], .optimizer = optimizers};
    const int64_t bytes = (owned(o) + 1) * (int64_t)sizeof **o->state;
    for (int k = 0; k < o->optimizer->states; k++) o->state[k] = cf_alloc(bytes, "test");
    if (master) o->master = cf_alloc(bytes, "test");
}

static void open_states(states *s, gpt_shape shape, parallel_strategy strategy, int tp, int dp, bool master) {
    open_world(&s->w, shape, strategy, tp, dp);
    s->master = master;
    for (int r = 0; r < s->w.ranks; r++) open_shards(&s->rank[r], &s->w, r, master);
}

static void close_states(states *s) {
    for (int r = 0; r < s->w.ranks; r++) {
        for (int k = 0; k < OPTIMIZER_STATES; k++) cf_free(s->rank[r].state[k]);
        cf_free(s->rank[r].master);
    }
    close_world(&s->w);
}

// A rank's value at each place: in its parameters or, for those that it owns, in the optimizer's state.
typedef void visit_value(const states *s, int rank, element_place place, int kind, real *value);

static void each_value(states *s, int rank, visit_value *visit) {
    zero_shards *o = &s->rank[rank];
    const parameters *p = o->params;
    const element_place *place = expected_places(&s->w, rank);
    for (int64_t e = 0; e < p->elements; e++) visit(s, rank, place[e], STATE_WEIGHT, &p->weight[e]);
    for (int i = 0, before = 0; i < p->buckets; before += (int)p->bucket[i++].shard) {
        const param_bucket *b = &p->bucket[i];
        int64_t first = b->first + b->group->rank * b->shard;
        for (int64_t n = 0; n < b->shard; n++) {
            int64_t at = before + n; // shards follow one another
            visit(s, rank, place[first + n], STATE_M, &o->state[0][at]);
            visit(s, rank, place[first + n], STATE_V, &o->state[1][at]);
            if (s->master) visit(s, rank, place[first + n], STATE_WEIGHT, &o->master[at]);
        }
    }
}

static void fill(const states *s, int rank, element_place place, int kind, real *value) {
    (void)s, (void)rank;
    *value = place.whole < 0 ? 0 : value_of(kind, place.tensor, place.layer, place.whole);
}

// Weights' padding is zero from the start, and never written.
static void poison(const states *s, int rank, element_place place, int kind, real *value) {
    (void)s, (void)rank;
    *value = place.whole < 0 && kind == STATE_WEIGHT ? 0 : (real)NAN;
}

static void compare(const states *s, int rank, element_place place, int kind, real *value) {
    static const char *const names[] = {"another weight", "another m", "another v"};
    real expected;
    fill(s, rank, place, kind, &expected);
    // Where a vocabulary is padded, weights are read as zero.
    bool padding = place.tensor == WTE && place.whole >= s->w.shape.V * s->w.shape.C;
    if (kind == STATE_WEIGHT && padding && value >= s->w.rank[rank].weight &&
        value < s->w.rank[rank].weight + s->w.rank[rank].elements)
        expected = 0;
    if (memcmp(value, &expected, sizeof expected) != 0) fail_at(&s->w, rank, names[kind], (int)place.tensor, place.whole);
}

// --- to the disk and back ---

static void save_rank(const states *s, int rank, file_hash *file) {
    char path[PATH_MAX];
    problem why;
    rank_state copy;
    state_create(&copy, &s->rank[rank]);
    state_copy(&copy, &s->rank[rank]);
    assert_int_equal(copy.elements, owned(&s->rank[rank]));
    checkpoint_file_path(scratch, STEP, rank, false, path);
    if (!saved_state_write(path, &copy, file, &why)) fail_msg("%s", why.what);
    state_free(&copy);
}

static saved_state *save(const states *s) {
    char path[PATH_MAX];
    problem why;
    file_hash file[RANKS_MAX];
    manifest m = {.step = STEP, .ranks = s->w.ranks, .file = file};
    checkpoint_file_path(scratch, STEP, 0, false, path);
    *strrchr(path, '/') = 0;
    assert_true(atomic_file_remove_directory(path) && mkdir(path, 0777) == 0);
    for (int r = 0; r < s->w.ranks; r++) save_rank(s, r, &file[r]);
    saved_state *saved = saved_state_open(scratch, &m, kinds_of_adamw, &why);
    if (!saved) fail_msg("%s", why.what);
    return saved;
}

static void read_saved(void *saved, int kind, int tensor, int64_t layer, int64_t first, int64_t count, float *out) {
    problem why;
    if (!saved_state_read(saved, kind, tensor, layer, first, count, out, &why)) fail_msg("%s", why.what);
}

static void give_and_compare(states *to, saved_state *saved) {
    for (int r = 0; r < to->w.ranks; r++) {
        each_value(to, r, poison);
        state_restore(&to->rank[r], STATE_KINDS, read_saved, saved);
        each_value(to, r, compare);
        release_buffers(NULL);
    }
}

// --- the copies of all ranks together ---

static void assemble_rank(const states *s, int rank, int kind, float *const *whole) {
    rank_state copy;
    state_create(&copy, &s->rank[rank]);
    state_copy(&copy, &s->rank[rank]);
    for (int64_t i = 0; i < copy.runs; i++) {
        state_run r = copy.run[i];
        float *to = whole[r.tensor] + r.layer * whole_count(&s->w.shape, (int)r.tensor) + r.whole;
        for (int64_t n = 0; n < r.count; n++) {
            if (to[n] != 0) fail_at(&s->w, rank, "saved twice", (int)r.tensor, r.whole + n);
            to[n] = copy.value[kind][r.at + n];
        }
    }
    state_free(&copy);
}

static void check_assembled(const states *s) {
    const gpt_shape *shape = &s->w.shape;
    for (int kind = 0; kind < STATE_KINDS; kind++) {
        float *whole[TENSORS];
        for (int tensor = 0; tensor < TENSORS; tensor++)
            whole[tensor] = test_buffer((params_layers(shape, tensor) * whole_count(shape, tensor) + 1) * (int64_t)sizeof(float));
        for (int r = 0; r < s->w.ranks; r++) assemble_rank(s, r, kind, whole);
        for (int tensor = 0; tensor < TENSORS; tensor++)
            for (int64_t i = 0; i < params_layers(shape, tensor) * whole_count(shape, tensor); i++) {
                int64_t count = whole_count(shape, tensor);
                if (whole[tensor][i] != value_of(kind, tensor, i / count, i % count))
                    fail_at(&s->w, 0, "not saved as it is", tensor, i);
            }
        release_buffers(NULL);
    }
}

// --- tests ---

typedef struct mesh_size {
    parallel_strategy strategy;
    int tp, dp;
} mesh_size;

static int list_meshes(int tp_max, int dp_max, mesh_size *list) {
    int count = 0;
    for (int strategy = STRATEGY_TPSP; strategy <= STRATEGY_UP; strategy++)
        for (int tp = 1; tp <= tp_max; tp++)
            for (int dp = 1; dp <= dp_max; dp++) list[count++] = (mesh_size){(parallel_strategy)strategy, tp, dp};
    return count;
}

static void fill_all(states *s) {
    for (int r = 0; r < s->w.ranks; r++) {
        each_value(s, r, fill);
        release_buffers(NULL);
    }
}

// From every mesh to every mesh.
static void check_all_pairs(gpt_shape shape, int tp_max, int dp_max, bool from_master, bool to_master) {
    static states from, to;
    mesh_size mesh[MESHES_MAX];
    int meshes = list_meshes(tp_max, dp_max, mesh);
    for (int i = 0; i < meshes; i++) {
        open_states(&from, shape, mesh[i].strategy, mesh[i].tp, mesh[i].dp, from_master);
        fill_all(&from);
        saved_state *saved = save(&from);
        close_states(&from);
        for (int j = 0; j < meshes; j++) {
            open_states(&to, shape, mesh[j].strategy, mesh[j].tp, mesh[j].dp, to_master);
            give_and_compare(&to, saved);
            close_states(&to);
        }
        saved_state_close(saved);
    }
}

KERNEL_TEST(state_goes_from_every_mesh_to_every_mesh) {
    check_all_pairs(shapes[0], 4, 2, false, false);
}

KERNEL_TEST(state_of_matrices_with_buckets_of_their_own) {
    check_all_pairs(shapes[1], 2, 2, false, false);
    check_all_pairs(shapes[2], 3, 1, false, false);
}

// Masters are saved instead of weights; reading them back fills both.
KERNEL_TEST(state_between_programs_with_masters_and_without) {
    check_all_pairs(shapes[0], 2, 2, true, true);
    check_all_pairs(shapes[0], 2, 2, true, false);
    check_all_pairs(shapes[0], 2, 2, false, true);
}

KERNEL_TEST(masters_are_saved_in_place_of_weights) {
    static states s;
    open_states(&s, shapes[0], STRATEGY_TPSP, 2, 1, true);
    fill_all(&s);
    for (int r = 0; r < s.w.ranks; r++) // as if rounded
        for (int64_t e = 0; e < s.w.rank[r].elements; e++) s.w.rank[r].weight[e] = -1;
    check_assembled(&s);
    close_states(&s);
}

KERNEL_TEST(every_element_is_saved_once) {
    static states s;
    mesh_size mesh[MESHES_MAX];
    for (int i = 0; i < SHAPES; i++)
        for (int j = 0, meshes = list_meshes(4, 3, mesh); j < meshes; j++) {
            open_states(&s, shapes[i], mesh[j].strategy, mesh[j].tp, mesh[j].dp, false);
            fill_all(&s);
            check_assembled(&s);
            close_states(&s);
        }
}

// Training continues during the use of a copy.
KERNEL_TEST(a_copy_does_not_change) {
    static states s;
    rank_state copy, again;
    open_states(&s, shapes[0], STRATEGY_UP, 2, 2, false);
    fill_all(&s);
    state_create(&copy, &s.rank[3]);
    state_create(&again, &s.rank[3]);
    state_copy(&copy, &s.rank[3]);
    state_copy(&again, &s.rank[3]);
    each_value(&s, 3, poison);
    release_buffers(NULL);
    for (int kind = 0; kind < STATE_KINDS; kind++)
        assert_memory_equal(copy.value[kind], again.value[kind], (size_t)copy.elements * sizeof(accum));
    state_copy(&again, &s.rank[3]); // a second copy replaces the first
    for (int kind = 0; kind < STATE_KINDS; kind++)
        for (int64_t i = 0; i < again.runs; i++) assert_true(isnan(again.value[kind][again.run[i].at]));
    state_free(&copy);
    state_free(&again);
    close_states(&s);
}

// --- gradients that are not finite ---

// Element n of all that a rank owns, and where it belongs.
static accum *gradient_at(const zero_shards *o, const element_place *places, int64_t n, element_place *place) {
    int i = o->params->buckets - 1;
    while (o->params->bucket[i].owned_before > n) i--;
    const param_bucket *b = &o->params->bucket[i];
    *place = places[b->first + b->group->rank * b->shard + n - b->owned_before];
    return &o->bucket[i].reduced[n - b->owned_before];
}

// Two are not finite; the first is named, unless it is padding.
static void check_nonfinite(zero_shards *o, const element_place *places) {
    double *sum = test_buffer((int64_t)sizeof *sum);
    const int64_t count = owned(o);
    element_place one, other;
    for (int trial = 0; trial < 40; trial++) {
        const int64_t at = trial ? random_size(0, count - 1) : 0, later = random_size(at, count - 1);
        accum *first = gradient_at(o, places, at, &one), *second = gradient_at(o, places, later, &other);
        const accum before = *first, before_second = *second;
        *second = -(accum)INFINITY, *first = (accum)NAN;
        const element_place named = one.tensor >= 0 ? one : other;
        assert_int_equal(zero_nonfinite(o, sum), named.tensor >= 0 ? named.tensor + TENSORS * named.layer : -1);
        *second = before_second, *first = before;
        assert_int_equal(zero_nonfinite(o, sum), -1);
    }
}

KERNEL_TEST(the_first_gradient_that_is_not_finite_is_named) {
    static states s;
    for (int strategy = STRATEGY_TPSP; strategy <= STRATEGY_UP; strategy++) {
        open_states(&s, shapes[0], (parallel_strategy)strategy, 2, 2, false);
        for (int r = 0; r < s.w.ranks; r++) {
            zero_shards *o = &s.rank[r];
            zero_bucket *bucket = test_buffer(o->params->buckets * (int64_t)sizeof *bucket);
            for (int i = 0; i < o->params->buckets; i++) {
                bucket[i].reduced = random_buffer(o->params->bucket[i].shard);
                bucket[i].reduced[0] = 3e38f; // large, but finite
            }
            o->bucket = bucket;
            o->squares = test_buffer(SQUARES_SCRATCH * (int64_t)sizeof *o->squares);
            check_nonfinite(o, expected_places(&s.w, r));
            release_buffers(NULL);
        }
        close_states(&s);
    }
}

static int remove_all(void **state) {
    char path[PATH_MAX];
    checkpoint_file_path(scratch, STEP, 0, false, path);
    *strrchr(path, '/') = 0;
    atomic_file_remove_directory(path);
    return scratch_remove(state);
}

int main(void) {
    return cmocka_run_group_tests(all_tests, scratch_make, remove_all);
}
