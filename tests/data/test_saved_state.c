// ranks: 1
#include "tests/death.h"
#include "tests/data/says.h"
#include "tests/data/scratch.h"
#include "data/checkpoint.h"
#include "data/durable.h"
#include "data/safetensors.h"
#include "data/saved_state.h"
#include <sys/stat.h>

enum { STEP = 12, ELEMENTS = 10 };

// --- a checkpoint of two ranks ---

static const char *path_of(int64_t rank) {
    static char path[PATH_MAX];
    checkpoint_file_path(scratch, STEP, rank, false, path);
    return path;
}

static void remove_directory(void) {
    char path[PATH_MAX];
    strcpy(path, path_of(0));
    *strrchr(path, '/') = 0;
    assert_true(durable_remove_directory(path));
}

static int begin(void **state) {
    (void)state;
    char path[PATH_MAX];
    remove_directory();
    strcpy(path, path_of(0));
    *strrchr(path, '/') = 0;
    return mkdir(path, 0777);
}

static int end(void **state) {
    remove_directory();
    return scratch_remove(state);
}

// Different for every kind, tensor, layer and element.
static float value_of(int kind, int64_t tensor, int64_t layer, int64_t element) {
    return (float)(((kind * 100 + tensor) * 100 + layer) * 100 + element);
}

static bool fits(const saved_run *r) {
    return r->tensor >= 0 && r->tensor < 100 && r->layer >= 0 && r->layer < 100 && r->whole >= 0 &&
           r->whole < 100 && r->at >= 0 && r->at < 64;
}

static void write_rank(int64_t rank, const saved_run *run, int64_t runs, int64_t elements) {
    float value[SAVED_KINDS][64];
    const float *values[SAVED_KINDS] = {value[0], value[1], value[2]};
    manifest_file file;
    memset(value, 0x7f, sizeof value);
    for (const saved_run *r = run; r < run + runs; r++)
        for (int64_t n = 0; fits(r) && n < r->count && n < 64 - r->at;
             n++) // but for what is damaged on purpose
            for (int kind = 0; kind < SAVED_KINDS; kind++)
                value[kind][r->at + n] = value_of(kind, r->tensor, r->layer, r->whole + n);
    if (!saved_state_write(path_of(rank), run, runs, values, elements, &file, &why)) fail_msg("%s", why.what);
}

// Tensor 3 has two layers of eight elements, tensor 5 one of four; parts of a layer are in turn with either rank.
static const saved_run first_rank[] = {{3, 0, 0, 3, 1}, {3, 0, 5, 3, 4}, {3, 1, 2, 2, 7}, {5, 0, 3, 1, 9}},
                       second_rank[] = {{5, 0, 0, 3, 0}, {3, 1, 4, 4, 6}, {3, 1, 0, 2, 4}, {3, 0, 3, 2, 10}};
enum { FIRST = sizeof first_rank / sizeof *first_rank, SECOND = sizeof second_rank / sizeof *second_rank };

static saved_state *open_ranks(int64_t ranks) {
    manifest m = {.step = STEP, .ranks = ranks};
    why = (problem){.what = ""};
    return saved_state_open(scratch, &m, &why);
}

static saved_state *open_sound(void) {
    write_rank(0, first_rank, FIRST, ELEMENTS);
    write_rank(1, second_rank, SECOND, ELEMENTS + 2);
    saved_state *s = open_ranks(2);
    if (!s) fail_msg("%s", why.what);
    return s;
}

static void everything_comes_back(void **state) {
    (void)state;
    static const int64_t sizes[][3] = {{3, 0, 8}, {3, 1, 8}, {5, 0, 4}};
    saved_state *s = open_sound();
    for (int kind = 0; kind < SAVED_KINDS; kind++)
        for (int i = 0; i < 3; i++)
            for (int64_t first = 0; first < sizes[i][2]; first++) // every range, across runs and files
                for (int64_t count = 0; first + count <= sizes[i][2]; count++) {
                    float out[9] = {0};
                    if (!saved_state_read(s, kind, sizes[i][0], sizes[i][1], first, count, out, &why))
                        fail_msg("%s", why.what);
                    for (int64_t n = 0; n < count; n++)
                        if (out[n] != value_of(kind, sizes[i][0], sizes[i][1], first + n))
                            fail_msg("kind %d, tensor %lld: element %lld is %g", kind, (long long)sizes[i][0],
                                     (long long)(first + n), (double)out[n]);
                    assert_true(out[count] == 0); // and no more
                }
    saved_state_close(s);
}

static void what_is_not_there_is_named(void **state) {
    (void)state;
    static const struct {
        int64_t tensor, layer, first, count, missing;
    } reads[] = {{3, 0, 0, 9, 8}, {3, 0, 8, 1, 8}, {3, 0, -1, 2, -1}, {3, 2, 0, 1, 0},
                 {4, 0, 0, 1, 0}, {2, 0, 7, 1, 7}, {6, 0, 0, 1, 0},   {3, -1, 0, 1, 0},
                 {5, 0, 3, 2, 4}, {5, 1, 0, 1, 0}, {-1, 0, 0, 1, 0},  {3, 1, 2, INT64_C(1) << 40, 8},
                 {5, 0, 4, 1, 4}};
    float out[16];
    saved_state *s = open_sound();
    for (size_t i = 0; i < sizeof reads / sizeof *reads; i++) {
        char text[100];
        if (saved_state_read(s, SAVED_M, reads[i].tensor, reads[i].layer, reads[i].first, reads[i].count, out,
                             &why))
            fail_msg("read %zu is answered", i);
        snprintf(text, sizeof text, "element %lld of layer %lld of tensor %lld is not in the checkpoint",
                 (long long)reads[i].missing, (long long)reads[i].layer, (long long)reads[i].tensor);
        ASSERT_SAYS(text);
        assert_true(*why.hint);
    }
    saved_state_close(s);
}

static void a_hole_in_the_middle_is_found(void **state) {
    (void)state;
    float out[8];
    write_rank(0, first_rank, FIRST, ELEMENTS);
    saved_state *s = open_ranks(1); // the other rank's file is not asked for
    assert_non_null(s);
    assert_true(saved_state_read(s, SAVED_V, 3, 0, 0, 3, out, &why));
    assert_true(saved_state_read(s, SAVED_V, 3, 0, 5, 3, out, &why));
    assert_false(saved_state_read(s, SAVED_V, 3, 0, 0, 8, out, &why));
    ASSERT_SAYS("element 3 of layer 0 of tensor 3");
    assert_false(saved_state_read(s, SAVED_V, 3, 0, 4, 2, out, &why));
    ASSERT_SAYS("element 4 of layer 0 of tensor 3");
    assert_false(saved_state_read(s, SAVED_V, 3, 1, 0, 1, out, &why));
    ASSERT_SAYS("element 0 of layer 1 of tensor 3");
    saved_state_close(s);
}

static void a_rank_that_owns_nothing(void **state) {
    (void)state;
    float out[4];
    write_rank(0, first_rank, 0, 0);
    saved_state *s = open_ranks(1);
    assert_non_null(s);
    assert_false(saved_state_read(s, SAVED_WEIGHT, 0, 0, 0, 1, out, &why));
    ASSERT_SAYS("element 0 of layer 0 of tensor 0");
    assert_true(saved_state_read(s, SAVED_WEIGHT, 0, 0, 0, 0, out, &why)); // nothing is always there
    saved_state_close(s);
}

// --- damage ---

static void assert_refused(const char *what) {
    saved_state *s = open_ranks(2);
    if (s) fail_msg("%s is taken", what);
    if (!*why.what) fail_msg("%s is refused without a word", what);
}

static void a_file_that_is_missing_or_another(void **state) {
    (void)state;
    saved_state_close(open_sound());
    assert_int_equal(unlink(path_of(1)), 0);
    assert_refused("a missing file");
    ASSERT_SAYS("rank_00001.safetensors", "No such file");
    scratch_write("step_00000012/rank_00001.safetensors", "", 0);
    assert_refused("an empty file");
    ASSERT_SAYS("rank_00001.safetensors");
    scratch_write("step_00000012/rank_00001.safetensors", "something else altogether", 25);
    assert_refused("another file");
    ASSERT_SAYS("rank_00001.safetensors");
}

// The second rank's file with other tensors than it should have: all are zero.
static void write_table(const tensor_entry *table, int64_t count) {
    static const char zeros[4096];
    manifest_file file;
    safetensors_writer *w = safetensors_create(path_of(1), table, count);
    for (int64_t i = 0; i < count; i++) safetensors_append(w, zeros, tensor_entry_bytes(&table[i]));
    if (!safetensors_commit(w, &file.bytes, &file.hash, &why)) fail_msg("%s", why.what);
}

static void tensors_that_are_missing_or_others(void **state) {
    (void)state;
    static const struct {
        tensor_entry table[4];
        int64_t count;
        const char *says;
    } tables[] = {
#define R {"runs", TENSOR_I64, 2, {0, 5}}
#define W                                                                                                    \
    {                                                                                                        \
        "weight", TENSOR_F32, 1, {                                                                           \
            8                                                                                                \
        }                                                                                                    \
    }
#define M                                                                                                    \
    {                                                                                                        \
        "m", TENSOR_F32, 1, {                                                                                \
            8                                                                                                \
        }                                                                                                    \
    }
#define V                                                                                                    \
    {                                                                                                        \
        "v", TENSOR_F32, 1, {                                                                                \
            8                                                                                                \
        }                                                                                                    \
    }
        {{R, W, M}, 3, "missing"},
        {{R, W, V}, 3, "missing"},
        {{R, M, V}, 3, "missing"},
        {{W, M, V}, 3, "no table of runs"},
        {{{"run", TENSOR_I64, 2, {0, 5}}, W, M, V}, 4, "no table of runs"},
        {{{"runs", TENSOR_F64, 2, {2, 5}}, W, M, V}, 4, "no table of runs"},
        {{{"runs", TENSOR_I64, 1, {10}}, W, M, V}, 4, "no table of runs"},
        {{{"runs", TENSOR_I64, 0, {0}}, W, M, V}, 4, "no table of runs"},
        {{{"runs", TENSOR_I64, 2, {2, 4}}, W, M, V}, 4, "no table of runs"},
        {{{"runs", TENSOR_I64, 2, {5, 6}}, W, M, V}, 4, "no table of runs"},
        {{{"runs", TENSOR_I64, 3, {2, 5, 1}}, W, M, V}, 4, "no table of runs"},
        {{R, {"weight", TENSOR_I64, 1, {4}}, M, V}, 4, "missing"},
        {{R, W, M, {"v", TENSOR_BF16, 1, {8}}}, 4, "missing"},
        {{R, W, M, {"v", TENSOR_U8, 1, {32}}}, 4, "missing"},
        {{R, W, {"m", TENSOR_F32, 2, {8, 1}}, V}, 4, "missing"},
        {{R, W, {"m", TENSOR_F32, 0, {0}}, V}, 4, "missing"},
        {{R, W, M, {"v", TENSOR_F32, 1, {7}}}, 4, "not as many"},
        {{R, W, {"m", TENSOR_F32, 1, {9}}, V}, 4, "not as many"},
        {{R, {"weight", TENSOR_F32, 1, {0}}, M, V}, 4, "not as many"},
#undef R
#undef W
#undef M
#undef V
    };
    write_rank(0, first_rank, FIRST, ELEMENTS);
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        char name[32];
        snprintf(name, sizeof name, "table %zu", i);
        write_table(tables[i].table, tables[i].count);
        assert_refused(name);
        ASSERT_SAYS("rank_00001.safetensors", tables[i].says);
    }
}

// The second rank's file with one run that is not right, among others that are.
static void assert_run_refused(saved_run damaged, const char *says) {
    char text[160];
    for (int place = 0; place < SECOND + 1; place++) {
        saved_run run[SECOND + 1];
        for (int i = 0; i < SECOND + 1; i++)
            run[i] = i == place ? damaged : second_rank[i < place ? i : i - 1];
        write_rank(1, run, SECOND + 1, ELEMENTS + 2);
        snprintf(text, sizeof text, "run {%lld, %lld, %lld, %lld, %lld}", (long long)damaged.tensor,
                 (long long)damaged.layer, (long long)damaged.whole, (long long)damaged.count,
                 (long long)damaged.at);
        assert_refused(text);
        ASSERT_SAYS(says);
    }
}

static void runs_outside_of_the_file(void **state) {
    (void)state;
    static const int64_t numbers[] = {-1, INT64_MIN, INT64_MAX, INT64_MAX - 3, (INT64_C(1) << 50) + 1};
    const saved_run sound = {7, 1, 4, 2, 3};
    write_rank(0, first_rank, FIRST, ELEMENTS);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        for (int field = 0; field < 5; field++) {
            saved_run r = sound;
            ((int64_t *)&r)[field] = numbers[i];
            assert_run_refused(r, "a run outside of the file");
        }
    const saved_run others[] = {{7, 1, 4, 0, 3},  {7, 1, 4, 13, 0},
                                {7, 1, 4, 1, 12}, {7, 1, 4, 2, 11},
                                {7, 1, 4, 9, 4},  {7, 1, 4, INT64_C(1) << 50, INT64_C(1) << 50}};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        assert_run_refused(others[i], "a run outside of the file");
}

// The largest numbers that a run may have are taken for what they are.
static void runs_at_the_limits(void **state) {
    (void)state;
    const int64_t most = INT64_C(1) << 50;
    const saved_run runs[] = {{most, most, most, 2, 10}, {0, 0, 0, 12, 0}, {most, most, most - 5, 5, 0}};
    float out[12];
    write_rank(0, runs, 3, 12);
    saved_state *s = open_ranks(1);
    if (!s) fail_msg("%s", why.what);
    assert_true(saved_state_read(s, SAVED_M, most, most, most - 5, 7, out, &why));
    assert_false(saved_state_read(s, SAVED_M, most, most, most - 5, 8, out, &why));
    assert_true(saved_state_read(s, SAVED_M, 0, 0, 0, 12, out, &why));
    saved_state_close(s);
}

static void elements_that_are_there_twice(void **state) {
    (void)state;
    write_rank(0, first_rank, FIRST, ELEMENTS);
    const saved_run again[] = {{3, 0, 0, 3, 1}, // the other rank's own
                               {3, 0, 2, 1, 0}, // its last element
                               {3, 0, 3, 1, 0}, // this rank's first
                               {3, 1, 4, 4, 6}, // this rank's own
                               {3, 1, 7, 1, 0}, {3, 1, 0, 8, 0}, {5, 0, 0, 4, 0}, {5, 0, 2, 1, 0}};
    for (size_t i = 0; i < sizeof again / sizeof *again; i++)
        assert_run_refused(again[i], "an element is there twice");
    const saved_run other[] = {{3, 2, 0, 3, 1}, {4, 0, 0, 8, 1}, {5, 1, 0, 4, 0}};
    for (size_t i = 0; i < sizeof other / sizeof *other; i++) { // the same numbers of another layer or tensor
        saved_run run[SECOND + 1];
        memcpy(run, second_rank, sizeof second_rank);
        run[SECOND] = other[i];
        write_rank(1, run, SECOND + 1, ELEMENTS + 2);
        saved_state *s = open_ranks(2);
        if (!s) fail_msg("%s", why.what);
        saved_state_close(s);
    }
}

// Any single byte of a file may be damaged: whatever opens then, no read goes astray. The hash in the manifest tells in
// the first place, but a file may have been written wrong.
static void any_byte_may_be_damaged(void **state) {
    (void)state;
    size_t size;
    float out[16];
    int64_t refused = 0;
    saved_state_close(open_sound());
    char *bytes = scratch_read(path_of(1), &size);
    for (size_t at = 0; at < size; at++)
        for (int bit = 0; bit < 8; bit++) {
            bytes[at] ^= (char)(1 << bit);
            scratch_write("step_00000012/rank_00001.safetensors", bytes, size);
            bytes[at] ^= (char)(1 << bit);
            saved_state *s = open_ranks(2);
            refused += !s;
            for (int64_t tensor = 0; s && tensor < 8; tensor++)
                for (int64_t layer = 0; layer < 3; layer++)
                    saved_state_read(s, SAVED_V, tensor, layer, 0, 8, out, &why);
            saved_state_close(s);
        }
    free(bytes);
    assert_true(refused > 100); // of the header most
}

static void a_file_that_cannot_be_written(void **state) {
    (void)state;
    const float zeros[ELEMENTS] = {0}, *values[SAVED_KINDS] = {zeros, zeros, zeros};
    manifest_file file;
    const char *path = scratch_path("nowhere/rank");
    assert_false(saved_state_write(path, first_rank, FIRST, values, ELEMENTS, &file, &why));
    ASSERT_SAYS("nowhere/rank", "No such file");
}

#define STATE_TEST(function) cmocka_unit_test_setup(function, begin)

int main(void) {
    const struct CMUnitTest tests[] = {
        STATE_TEST(everything_comes_back),
        STATE_TEST(what_is_not_there_is_named),
        STATE_TEST(a_hole_in_the_middle_is_found),
        STATE_TEST(a_rank_that_owns_nothing),
        STATE_TEST(a_file_that_is_missing_or_another),
        STATE_TEST(tensors_that_are_missing_or_others),
        STATE_TEST(runs_outside_of_the_file),
        STATE_TEST(runs_at_the_limits),
        STATE_TEST(elements_that_are_there_twice),
        STATE_TEST(any_byte_may_be_damaged),
        STATE_TEST(a_file_that_cannot_be_written),
    };
    return cmocka_run_group_tests(tests, scratch_make, end);
}
