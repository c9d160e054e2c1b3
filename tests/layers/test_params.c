// ranks: 1
// Places of parameters: which part of every tensor each rank holds, in which bucket, and who owns it. All ranks of a mesh are
// made in this process (worlds.h).
#include "worlds.h"
#include "../death.h"

// For each local element its place in the whole tensor, by params_run. Runs must not meet or leave the part.
static void map_of_runs(const world *w, int rank, int tensor, int tp_rank, int64_t *whole) {
    const parameters *p = &w->rank[rank];
    int64_t count = params_local_count(p, tensor);
    for (int64_t i = 0; i < count; i++) whole[i] = -1;
    for (int64_t run = 0; run < params_runs(p, tensor); run++) {
        param_run r = params_run(p, tensor, tp_rank, run);
        if (r.whole < 0 || r.local < 0 || r.count < 0 || r.local + r.count > count ||
            r.whole + r.count > whole_count(&w->shape, tensor))
            fail_at(w, rank, "a run leaves the tensor", tensor, r.local);
        for (int64_t i = 0; i < r.count; i++) {
            if (whole[r.local + i] >= 0) fail_at(w, rank, "two runs meet in", tensor, r.local + i);
            whole[r.local + i] = r.whole + i;
        }
    }
}

// --- runs ---

// On every rank once; or, in TPSP, split tensors once over the ranks of the tp group.
static void check_cover(const world *w, int rank) {
    bool over_ranks = w->strategy == STRATEGY_TPSP;
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        bool split = over_ranks && is_split(tensor);
        int64_t count = whole_count(&w->shape, tensor), *whole = index_buffer(room(&w->shape, tensor));
        int64_t *seen = index_buffer(count);
        for (int tp_rank = split ? 0 : rank % w->tp; tp_rank < (split ? w->tp : rank % w->tp + 1); tp_rank++) {
            map_of_runs(w, rank, tensor, tp_rank, whole);
            for (int64_t i = 0; i < params_local_count(&w->rank[rank], tensor); i++)
                if (whole[i] >= 0) seen[whole[i]]++;
        }
        for (int64_t i = 0; i < count; i++)
            if (seen[i] != 1) fail_at(w, rank, seen[i] ? "held twice" : "held by no rank", tensor, i);
    }
}

KERNEL_TEST(runs_cover_every_tensor_once) {
    on_every_rank(shapes, SHAPES, check_cover);
}

static void check_places(const world *w, int rank) {
    const parameters *p = &w->rank[rank];
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        int64_t *expected = index_buffer(room(&w->shape, tensor)), *whole = index_buffer(room(&w->shape, tensor));
        int64_t count = expected_map(w, tensor, rank % w->tp, expected);
        assert_int_equal(params_local_count(p, tensor), count);
        assert_int_equal(params_local_rows(p, tensor) * params_local_columns(p, tensor), count);
        map_of_runs(w, rank, tensor, rank % w->tp, whole);
        for (int64_t i = 0; i < count; i++)
            if (whole[i] != expected[i]) fail_at(w, rank, "not where the table says", tensor, i);
    }
}

KERNEL_TEST(runs_are_where_the_table_says) {
    on_every_rank(shapes, SHAPES, check_places);
}

KERNEL_TEST(up_holds_the_parts_of_tpsp_one_after_another) {
    static const int tensors[] = {QKVW, QKVB, ATTPROJW};
    static world up, tpsp;
    for (int tp = 1; tp <= 4; tp++) {
        open_world(&up, shapes[1], STRATEGY_UP, tp, 1);
        open_world(&tpsp, shapes[1], STRATEGY_TPSP, tp, 1);
        for (int i = 0; i < 3; i++) {
            int64_t count = whole_count(&up.shape, tensors[i]), *together = index_buffer(count);
            int64_t part = count / tp, *parts = index_buffer(count);
            map_of_runs(&up, tp - 1, tensors[i], tp - 1, together);
            for (int r = 0; r < tp; r++) map_of_runs(&tpsp, r, tensors[i], r, parts + r * part);
            assert_memory_equal(together, parts, (size_t)count * sizeof *parts);
        }
        close_world(&up);
        close_world(&tpsp);
    }
}

// --- in and out ---

// Exact in single precision, and different for neighbours, layers and tensors.
static float value_of(int tensor, int64_t layer, int64_t element) {
    return (float)((element * 7 + layer * 100003 + tensor * 10007) % 8388593);
}

static bool is_padding(const gpt_shape *s, int tensor, int64_t element) {
    return tensor == WTE && element >= s->V * s->C;
}

// A file's values in the padding must not be used.
static void read_value(void *argument, int kind, int tensor, int64_t layer, int64_t first, int64_t count, float *out) {
    const gpt_shape *s = argument;
    assert_int_equal(kind, STATE_WEIGHT);
    if (first < 0 || first + count > whole_count(s, tensor))
        fail_msg("%s is read to %lld", params_name(tensor), (long long)(first + count));
    for (int64_t i = 0; i < count; i++) out[i] = is_padding(s, tensor, first + i) ? (float)NAN : value_of(tensor, layer, first + i);
}

// The parts of a whole tensor, placed in pieces that begin and end anywhere, from the last to the first;
// elements after a piece are NaN, which would stay.
static void place_tensor(const world *w, int tensor, int64_t layer, int64_t most, float *whole) {
    int last = w->strategy == STRATEGY_TPSP && is_split(tensor) ? w->tp : 1;
    for (int r = 0; r < last; r++) {
        const parameters *p = &w->rank[r];
        int64_t count = params_local_count(p, tensor);
        real *piece = poisoned_buffer(count);
        for (int64_t first = (count - 1) / most * most; first >= 0; first -= most) {
            int64_t n = count - first < most ? count - first : most;
            cf_copy(piece, params_weight(p, tensor, layer) + first, n * (int64_t)sizeof *piece, NULL);
            params_place(p, tensor, r, first, n, piece, whole);
            for (int64_t i = 0; i < n; i++) piece[i] = (real)NAN;
        }
    }
}

static void check_round_trip(const world *w, int rank) {
    static const int64_t pieces[] = {1 << 20, 1009, 30};
    if (rank > 0) return; // all ranks at once
    gpt_shape shape = w->shape;
    for (int r = 0; r < w->ranks; r++) params_read((parameters *)&w->rank[r], read_value, &shape, NULL);
    for (int tensor = 0; tensor < TENSORS; tensor++)
        for (int64_t layer = 0; layer < params_layers(&shape, tensor); layer++) {
            int64_t count = whole_count(&shape, tensor);
            float *whole = test_buffer((count + 1) * (int64_t)sizeof *whole);
            for (int64_t i = 0; i <= count; i++) whole[i] = -1;
            place_tensor(w, tensor, layer, pieces[(tensor + layer) % 3], whole);
            for (int64_t i = 0; i < count; i++)
                if (whole[i] != (is_padding(&shape, tensor, i) ? 0 : value_of(tensor, layer, i)))
                    fail_at(w, rank, "not what was read", tensor, i);
            assert_true(whole[count] == -1);
        }
}

KERNEL_TEST(params_read_and_params_place_are_inverse) {
    on_every_rank(shapes, SHAPES, check_round_trip);
}

// --- buckets ---

static const cf_group *expected_group(const world *w, int rank, int tensor) {
    bool matrix = tensor == WTE || tensor == QKVW || tensor == ATTPROJW || tensor == FCW || tensor == FCPROJW;
    bool replicas = w->strategy == STRATEGY_TPSP && is_split(tensor) && (matrix || w->mesh[rank].tp > 1);
    return replicas ? &w->mesh[rank].dp_group : &w->mesh[rank].world_group;
}

static void check_partition(const world *w, int rank) {
    const parameters *p = &w->rank[rank];
    int64_t end = 0;
    int layer = 0;
    for (int i = 0; i < p->buckets; i++) {
        const param_bucket *b = &p->bucket[i];
        if (b->first != end) fail_at(w, rank, "buckets overlap or leave a gap", -1, b->first);
        end = b->first + b->count;
        assert_int_equal(b->count, b->shard * b->group->size);
        if (i < p->table ? b->layer < layer : b->layer >= 0) fail_at(w, rank, "bucket of layer", -1, b->layer);
        layer = b->layer;
        assert_int_equal(b->shard % b->row, 0);
        assert_int_equal(b->row, b->tensor < 0 ? 1 : params_local_columns(p, b->tensor));
        if (b->tensor >= 0) {
            assert_ptr_equal(b->group, expected_group(w, rank, b->tensor));
            assert_int_equal(b->first, params_weight(p, b->tensor, b->layer) - p->weight);
        }
    }
    assert_int_equal(end, p->elements);
}

KERNEL_TEST(buckets_partition_the_memory) {
    on_every_rank(shapes, SHAPES, check_partition);
}

// Padding is less than the shard that each member would have anyway, and a row of it at most per member, or eight elements.
static void check_padding(const world *w, int rank) {
    const parameters *p = &w->rank[rank];
    for (int i = 0; i < p->buckets; i++) {
        const param_bucket *b = &p->bucket[i];
        if (b->count - b->used >= (b->tensor < 0 ? 8 : b->row) * b->group->size)
            fail_at(w, rank, "more padding than needed in bucket", -1, i);
    }
}

KERNEL_TEST(padding_is_no_more_than_needed) {
    on_every_rank(shapes, 1, check_padding);
}

// For each local element tensor + TENSORS · layer; −1: padding.
static int64_t *names_of(const world *w, int rank) {
    const parameters *p = &w->rank[rank];
    int64_t *name = index_buffer(p->elements);
    for (int64_t e = 0; e < p->elements; e++) name[e] = -1;
    for (int tensor = 0; tensor < TENSORS; tensor++)
        for (int64_t layer = 0; layer < params_layers(&w->shape, tensor); layer++) {
            int64_t first = params_weight(p, tensor, layer) - p->weight, n = params_local_count(p, tensor);
            assert_int_equal(params_grad(p, tensor, layer) - p->grad, first);
            assert_true(first >= 0 && first + n <= p->elements);
            for (int64_t e = first; e < first + n; e++) {
                if (name[e] >= 0) fail_at(w, rank, "shared with another tensor", tensor, e - first);
                name[e] = tensor + TENSORS * layer;
            }
        }
    return name;
}

// By the list of tensors, which is in memory order, and by what buckets say of their elements.
static void check_list(const world *w, int rank) {
    const parameters *p = &w->rank[rank];
    const int64_t *name = names_of(w, rank);
    int64_t e = 0;
    for (const param_tensor *t = p->placed; t < p->placed + p->tensors; t++) {
        for (; e < t->first; e++)
            if (name[e] >= 0) fail_at(w, rank, "not in the list", -1, e);
        for (; e < t->first + t->count; e++)
            if (name[e] != t->tensor + TENSORS * t->layer) fail_at(w, rank, "has another's name", t->tensor, e - t->first);
    }
    for (; e < p->elements; e++)
        if (name[e] >= 0) fail_at(w, rank, "not in the list", -1, e);
    for (int i = 0; i < p->buckets; i++)
        for (int64_t k = 0; k < p->bucket[i].count; k++) {
            const int64_t found = name[p->bucket[i].first + k];
            if ((found >= 0) != (k < p->bucket[i].used)) fail_at(w, rank, "padding and elements mixed in bucket", -1, i);
            if (found >= 0 && params_decays((int)(found % TENSORS)) != (k < p->bucket[i].decayed))
                fail_at(w, rank, "decays, or does not, in bucket", -1, i);
        }
}

KERNEL_TEST(the_list_has_every_element) {
    on_every_rank(shapes, SHAPES, check_list);
}

// The bucket that contains all of a tensor.
static const param_bucket *bucket_around(const world *w, int rank, int tensor, int64_t layer) {
    const parameters *p = &w->rank[rank];
    int64_t first = params_weight(p, tensor, layer) - p->weight, end = first + params_local_count(p, tensor);
    for (int i = 0; i < p->buckets; i++)
        if (p->bucket[i].first <= first && end <= p->bucket[i].first + p->bucket[i].count) return &p->bucket[i];
    fail_at(w, rank, "not in one bucket", tensor, 0);
}

static bool in_layer(int tensor) {
    return tensor != WTE && tensor != WPE && tensor < LNFW;
}

static int own_buckets, shared_buckets; // of matrices, over all meshes

static bool large_enough(const world *w, int rank, int tensor) {
    if (tensor == WTE) return true;
    bool matrix = tensor == QKVW || tensor == ATTPROJW || tensor == FCW || tensor == FCPROJW;
    if (!matrix) return false;
    bool own = params_local_rows(&w->rank[rank], tensor) >= 64 * (int64_t)expected_group(w, rank, tensor)->size;
    own_buckets += own, shared_buckets += !own;
    return own;
}

static void check_own(const world *w, int rank) {
    const parameters *p = &w->rank[rank];
    for (int tensor = 0; tensor < TENSORS; tensor++)
        for (int64_t i = 0; i < params_layers(&w->shape, tensor); i++) {
            int64_t layer = in_layer(tensor) ? i : -1;
            const param_bucket *b = bucket_around(w, rank, tensor, i);
            int number = (int)(b - p->bucket);
            bool alone = large_enough(w, rank, tensor);
            if (alone ? b->layer != layer : b->layer > layer) fail_at(w, rank, "layer of its bucket", tensor, b->layer);
            assert_int_equal(number, params_find(p, tensor, layer)->bucket);
            assert_ptr_equal(b->group, expected_group(w, rank, tensor));
            assert_int_equal(b->tensor, alone ? tensor : -1);
        }
}

KERNEL_TEST(large_matrices_are_buckets_of_their_own) {
    own_buckets = shared_buckets = 0;
    on_every_rank(shapes, SHAPES, check_own);
    assert_true(own_buckets > 100 && shared_buckets > 100); // both are met, often
}

// A bucket more for each layer would be a transfer more for each layer, however small.
static void check_small(const world *w, int rank) {
    const parameters *p = &w->rank[rank];
    int vectors = p->buckets - p->table - 1;
    assert_int_equal(p->bucket[p->table].tensor, WTE);
    assert_int_equal(vectors, w->strategy == STRATEGY_TPSP && w->mesh[rank].tp > 1 ? 2 : 1);
    assert_ptr_equal(bucket_around(w, rank, WPE, 0), &p->bucket[p->buckets - 1]);
    assert_ptr_equal(bucket_around(w, rank, LN1W, w->shape.L - 1), &p->bucket[p->buckets - 1]);
    assert_ptr_equal(bucket_around(w, rank, QKVB, w->shape.L - 1), &p->bucket[p->table + 1]);
    for (int i = 0, last = -1; i < p->table; i++) {
        if (p->bucket[i].tensor >= 0) continue; // of thin matrices, all but the last bucket are large enough
        if (last >= 0 && p->bucket[last].shard * (int64_t)sizeof(accum) < 64 << 10)
            fail_at(w, rank, "small bucket of matrices of layer", -1, p->bucket[last].layer);
        last = i;
    }
}

KERNEL_TEST(small_tensors_share_buckets) {
    on_every_rank(shapes, SHAPES - 1, check_small); // the last one has no such vectors
}

// --- owned elements ---

// Marks what a rank owns in (layers, elements) of every tensor; no rank owns padding.
static void mark_owned(const world *w, int rank, int64_t *const *seen) {
    const parameters *p = &w->rank[rank];
    const element_place *expected = expected_places(w, rank);
    for (int i = 0; i < p->buckets; i++) {
        const param_bucket *b = &p->bucket[i];
        int64_t begin = b->first, end = b->first + b->count;
        assert_true(params_owned(b, &begin, &end));
        assert_int_equal(begin, params_first_owned(b));
        assert_int_equal(end - begin, b->shard);
        if (begin < b->first || end > b->first + b->count)
            fail_at(w, rank, "owns elements that it does not hold", b->tensor, begin);
        for (int64_t e = begin; e < end; e++)
            if (expected[e].whole >= 0)
                seen[expected[e].tensor][expected[e].layer * whole_count(&w->shape, (int)expected[e].tensor) + expected[e].whole]++;
        assert_false(params_owned(b, &(int64_t){end}, &(int64_t){b->first + b->count}));
        assert_false(params_owned(b, &(int64_t){b->first}, &(int64_t){begin}));
    }
}

static void check_owners(const world *w, int rank) {
    int64_t *seen[TENSORS];
    if (rank > 0) return; // all ranks at once
    for (int tensor = 0; tensor < TENSORS; tensor++)
        seen[tensor] = index_buffer(params_layers(&w->shape, tensor) * whole_count(&w->shape, tensor));
    for (int r = 0; r < w->ranks; r++) mark_owned(w, r, seen);
    for (int tensor = 0; tensor < TENSORS; tensor++)
        for (int64_t i = 0; i < params_layers(&w->shape, tensor) * whole_count(&w->shape, tensor); i++)
            if (seen[tensor][i] != 1) fail_at(w, rank, seen[tensor][i] ? "owned twice" : "owned by no rank", tensor, i);
}

KERNEL_TEST(every_element_is_owned_once) {
    on_every_rank(shapes, SHAPES, check_owners);
}

// --- initial weights ---

static bool is_product(int tensor) {
    return tensor == WTE || tensor == QKVW || tensor == ATTPROJW || tensor == FCW || tensor == FCPROJW;
}

// Gradients of the step before: the first product of a layer's matrix, or of the token table, is written over it; all else is zero.
static void check_step_begins(const world *w, int rank) {
    const parameters *p = &w->rank[rank];
    for (int64_t i = 0; i < p->elements; i++) p->grad[i] = 7;
    params_zero_grad(p, NULL);
    const int64_t *name = names_of(w, rank);
    for (int64_t i = 0; i < p->elements; i++) {
        if (name[i] < 0) continue;
        const int tensor = (int)(name[i] % TENSORS);
        const bool writes = is_product(tensor);
        if (writes && p->grad[i] != 7) fail_at(w, rank, "needlessly zeroed", tensor, i);
        if (!writes && p->grad[i] != 0) fail_at(w, rank, "of the step before", tensor, i);
    }
}

KERNEL_TEST(a_step_begins_without_the_last_one) {
    on_every_rank(shapes, SHAPES, check_step_begins);
}

static const uint64_t SEED = 11;
static float *reference[TENSORS]; // of one rank alone: layer after layer

static void make_reference(const gpt_shape *shape) {
    static world alone;
    open_world(&alone, *shape, STRATEGY_TPSP, 1, 1);
    params_init(&alone.rank[0], SEED, NULL);
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        int64_t count = whole_count(shape, tensor), layers = params_layers(shape, tensor);
        reference[tensor] = malloc((size_t)(count * layers) * sizeof(float));
        for (int64_t l = 0; l < layers; l++)
            for (int64_t i = 0; i < count; i++)
                reference[tensor][l * count + i] = (float)params_weight(&alone.rank[0], tensor, l)[i];
    }
    close_world(&alone);
}

static void check_init(const world *w, int rank) {
    parameters *p = (parameters *)&w->rank[rank];
    params_init(p, SEED, NULL);
    for (int tensor = 0; tensor < TENSORS; tensor++)
        for (int64_t layer = 0; layer < params_layers(&w->shape, tensor); layer++) {
            int64_t *whole = index_buffer(room(&w->shape, tensor));
            int64_t count = expected_map(w, tensor, rank % w->tp, whole);
            const float *expected = reference[tensor] + layer * whole_count(&w->shape, tensor);
            const real *weight = params_weight(p, tensor, layer);
            for (int64_t i = 0; i < count; i++)
                if ((float)weight[i] != (whole[i] < 0 ? 0 : expected[whole[i]]))
                    fail_at(w, rank, "another initial weight", tensor, i);
        }
}

static double deviation_of(int tensor, int64_t first, int64_t count) {
    double sum = 0, squares = 0;
    for (int64_t i = first; i < first + count; i++)
        sum += reference[tensor][i], squares += (double)reference[tensor][i] * reference[tensor][i];
    double mean = sum / (double)count;
    assert_true(fabs(mean) < 0.02 * 5 / sqrt((double)count));
    return sqrt(squares / (double)count - mean * mean);
}

// GPT-2's: 0.02, residual projections by 1 / sqrt(2 L) of it, norms 1, biases 0, padded words 0.
static void check_distribution(const gpt_shape *s) {
    int64_t C = s->C, residual = s->L * C * C;
    assert_true(fabs(deviation_of(WTE, 0, s->V * C) - 0.02) < 1e-3);
    assert_true(fabs(deviation_of(QKVW, 0, 3 * residual) - 0.02) < 1e-3);
    assert_true(fabs(deviation_of(ATTPROJW, 0, residual) - 0.02 / sqrt(2.0 * (double)s->L)) < 1e-3);
    assert_true(fabs(deviation_of(FCPROJW, 0, 4 * residual) - 0.02 / sqrt(2.0 * (double)s->L)) < 1e-3);
    for (int64_t i = s->V * C; i < s->Vp * C; i++) assert_true(reference[WTE][i] == 0);
    for (int64_t i = 0; i < s->L * C; i++) assert_true(reference[LN1W][i] == 1 && reference[LN2W][i] == 1);
    for (int64_t i = 0; i < s->L * C; i++) assert_true(reference[QKVB][i] == 0 && reference[FCB][i] == 0);
    int64_t equal = 0; // layers and tensors draw from streams of their own
    for (int64_t i = 0; i < C * C; i++)
        equal += (reference[QKVW][i] == reference[QKVW][3 * C * C + i]) + (reference[QKVW][i] == reference[FCW][i]);
    assert_true(equal < 10);
}

KERNEL_TEST(initial_weights_do_not_depend_on_the_mesh) {
    make_reference(&shapes[0]);
    check_distribution(&shapes[0]);
    on_every_rank(shapes, 1, check_init);
    for (int tensor = 0; tensor < TENSORS; tensor++) free(reference[tensor]);
}

// --- refusals ---

static void create(int64_t C, int64_t H, int tp) {
    cf_mesh mesh;
    parameters p;
    cf_mesh_init(&mesh, tp, 0, tp, 1);
    params_create(&p, (gpt_shape){.maxT = 4, .V = 8, .Vp = 8, .L = 1, .H = H, .C = C}, &mesh, STRATEGY_UP, 0);
}

TEST_FIRST(heads_that_do_not_divide_are_refused) { // before there are threads: it forks
    ASSERT_DIES(create(26, 12, 1), "26 channels in 12 heads", "--channels");
    ASSERT_DIES(create(24, 12, 5), "12 heads do not divide over --tp 5", "--tp");
}

int main(void) {
    return cmocka_run_group_tests(all_tests, NULL, NULL);
}
