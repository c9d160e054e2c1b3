// ranks: 1
#include "tests/death.h"
#include "tests/data/says.h"
#include "tests/data/scratch.h"
#include "data/checkpoint.h"
#include "tests/data/kinds.h"
#include "data/atomic_file.h"
#include "data/input.h"
#include <sys/stat.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

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
    assert_true(atomic_file_remove_directory(path));
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

static bool fits(const state_run *r) {
    return r->tensor >= 0 && r->tensor < 100 && r->layer >= 0 && r->layer < 100 && r->whole >= 0 && r->whole < 100 && r->at >= 0 &&
           r->at < 64;
}

static void write_rank(int64_t rank, const state_run *run, int64_t runs, int64_t elements) {
    float value[STATE_KINDS][64];
    rank_state held = {elements, runs, (state_run *)run, {value[0], value[1], value[2]}, kinds_of_adamw};
    file_hash file;
    memset(value, 0x7f, sizeof value);
    for (const state_run *r = run; r < run + runs; r++)
        for (int64_t n = 0; fits(r) && n < r->count && n < 64 - r->at; n++) // but for what is damaged on purpose
            for (int kind = STATE_WEIGHT; kind < STATE_KINDS; kind++)
                value[kind][r->at + n] = value_of(kind, r->tensor, r->layer, r->whole + n);
    if (!saved_state_write(path_of(rank), &held, &file, &why)) fail_msg("%s", why.what);
}

// Tensor 3 has two layers of eight elements, tensor 5 one of four; parts of a layer are in turn with either rank.
static const state_run first_rank[] = {{3, 0, 0, 3, 1}, {3, 0, 5, 3, 4}, {3, 1, 2, 2, 7}, {5, 0, 3, 1, 9}},
                       second_rank[] = {{5, 0, 0, 3, 0}, {3, 1, 4, 4, 6}, {3, 1, 0, 2, 4}, {3, 0, 3, 2, 10}};
enum { FIRST = sizeof first_rank / sizeof *first_rank, SECOND = sizeof second_rank / sizeof *second_rank };

static saved_state *open_ranks(int64_t ranks) {
    manifest m = {.step = STEP, .ranks = ranks};
    why = (problem){.what = ""};
    return saved_state_open(scratch, &m, kinds_of_adamw, &why);
}

static saved_state *open_sound(void) {
    write_rank(0, first_rank, FIRST, ELEMENTS);
    write_rank(1, second_rank, SECOND, ELEMENTS + 2);
    saved_state *s = open_ranks(2);
    if (!s) fail_msg("%s", why.what);
    return s;
}

#define STATE_TEST(name) TEST_BETWEEN(begin, name, NULL)

STATE_TEST(everything_comes_back) {
    static const int64_t sizes[][3] = {{3, 0, 8}, {3, 1, 8}, {5, 0, 4}};
    saved_state *s = open_sound();
    for (int kind = STATE_WEIGHT; kind < STATE_KINDS; kind++)
        for (int i = 0; i < 3; i++)
            for (int64_t first = 0; first < sizes[i][2]; first++) // every range, across runs and files
                for (int64_t count = 0; first + count <= sizes[i][2]; count++) {
                    float out[9] = {0};
                    if (!saved_state_read(s, kind, sizes[i][0], sizes[i][1], first, count, out, &why)) fail_msg("%s", why.what);
                    for (int64_t n = 0; n < count; n++)
                        if (out[n] != value_of(kind, sizes[i][0], sizes[i][1], first + n))
                            fail_msg("kind %d, tensor %lld: element %lld is %g", kind, (long long)sizes[i][0],
                                     (long long)(first + n), (double)out[n]);
                    assert_true(out[count] == 0); // and no more
                }
    saved_state_close(s);
}

STATE_TEST(what_is_not_there_is_named) {
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
        if (saved_state_read(s, STATE_M, reads[i].tensor, reads[i].layer, reads[i].first, reads[i].count, out, &why))
            fail_msg("read %zu is answered", i);
        snprintf(text, sizeof text, "element %lld of layer %lld of tensor %lld is not in the checkpoint",
                 (long long)reads[i].missing, (long long)reads[i].layer, (long long)reads[i].tensor);
        ASSERT_SAYS(text);
        assert_true(*why.hint);
    }
    saved_state_close(s);
}

STATE_TEST(a_hole_in_the_middle_is_found) {
    float out[8];
    write_rank(0, first_rank, FIRST, ELEMENTS);
    saved_state *s = open_ranks(1); // the other rank's file is not asked for
    assert_non_null(s);
    assert_true(saved_state_read(s, STATE_V, 3, 0, 0, 3, out, &why));
    assert_true(saved_state_read(s, STATE_V, 3, 0, 5, 3, out, &why));
    assert_false(saved_state_read(s, STATE_V, 3, 0, 0, 8, out, &why));
    ASSERT_SAYS("element 3 of layer 0 of tensor 3");
    assert_false(saved_state_read(s, STATE_V, 3, 0, 4, 2, out, &why));
    ASSERT_SAYS("element 4 of layer 0 of tensor 3");
    assert_false(saved_state_read(s, STATE_V, 3, 1, 0, 1, out, &why));
    ASSERT_SAYS("element 0 of layer 1 of tensor 3");
    saved_state_close(s);
}

STATE_TEST(a_rank_that_owns_nothing) {
    float out[4];
    write_rank(0, first_rank, 0, 0);
    saved_state *s = open_ranks(1);
    assert_non_null(s);
    assert_false(saved_state_read(s, STATE_WEIGHT, 0, 0, 0, 1, out, &why));
    ASSERT_SAYS("element 0 of layer 0 of tensor 0");
    assert_true(saved_state_read(s, STATE_WEIGHT, 0, 0, 0, 0, out, &why)); // nothing is always there
    saved_state_close(s);
}

// --- damage ---

static void assert_refused(const char *what) {
    saved_state *s = open_ranks(2);
    if (s) fail_msg("%s is taken", what);
    if (!*why.what) fail_msg("%s is refused without a word", what);
}

STATE_TEST(a_file_that_is_missing_or_another) {
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

// The second rank's file with another text for its header, and so many bytes of data, all zero.
static void write_header(const char *text, size_t data) {
    char bytes[4096] = {0};
    size_t length = strlen(text), padded = (8 + length + 63) / 64 * 64 - 8;
    for (int i = 0; i < 8; i++) bytes[i] = (char)((uint64_t)padded >> 8 * i);
    memset(bytes + 8, ' ', padded);
    memcpy(bytes + 8, text, length);
    scratch_write("step_00000012/rank_00001.safetensors", bytes, 8 + padded + data);
}

#define TENSOR(name, dtype, shape, begin, end)                                                                                     \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" begin "," end "]}"
#define R        TENSOR("runs", "I64", "0,5", "0", "0")
#define W        TENSOR("weight", "F32", "8", "0", "32")
#define M        TENSOR("m", "F32", "8", "32", "64")
#define V        TENSOR("v", "F32", "8", "64", "96")
#define SOUND(x) "{" R "," W "," M "," V x "}"

// The bytes on the disk, against the format's description rather than the reader.
STATE_TEST(the_bytes_of_a_file) {
    static const state_run run[] = {{1, 2, 3, 2, 0}};
    float value[STATE_KINDS][2] = {{1, 2}, {3, 4}, {5, 6}};
    const rank_state held = {2, 1, (state_run *)run, {value[0], value[1], value[2]}, kinds_of_adamw};
    file_hash file;
    size_t size;
    char text[376 + 1];
    assert_true(saved_state_write(path_of(1), &held, &file, &why));
    char *bytes = scratch_read(path_of(1), &size);
    snprintf(text, sizeof text, "%-248s",
             "{" TENSOR("runs", "I64", "1,5", "0",
                        "40") "," TENSOR("weight", "F32", "2", "40",
                                         "48") "," TENSOR("m", "F32", "2", "48", "56") "," TENSOR("v", "F32", "2", "56", "64") "}");
    assert_int_equal(size, 8 + 248 + 64);
    assert_true(file.bytes == (int64_t)size && file.hash == XXH64(bytes, size, 0));
    assert_memory_equal(bytes, "\xf8\0\0\0\0\0\0\0", 8);
    assert_memory_equal(bytes + 8, text, 248);
    assert_memory_equal(bytes + 256, run, 40);
    assert_memory_equal(bytes + 296, value, 24);
    free(bytes);
}

// More than one piece of what is hashed and written at a time.
STATE_TEST(a_large_file) {
    enum { MANY = 500000 };
    static state_run run[] = {{1, 0, 0, MANY, 0}};
    float *value = malloc(MANY * sizeof *value), found[2];
    const rank_state held = {MANY, 1, run, {value, value, value}, kinds_of_adamw};
    file_hash file, again;
    for (int i = 0; i < MANY; i++) value[i] = (float)i;
    assert_true(saved_state_write(path_of(0), &held, &file, &why));
    assert_true(input_hash(path_of(0), &again, &why));
    assert_true(again.bytes == file.bytes && again.hash == file.hash && again.bytes > 6000000);
    saved_state *s = open_ranks(1);
    assert_true(saved_state_read(s, STATE_V, 1, 0, MANY - 2, 2, found, &why));
    assert_true(found[0] == MANY - 2 && found[1] == MANY - 1);
    saved_state_close(s);
    free(value);
}

// There is one right header: all others are damage, or another program's.
STATE_TEST(headers_that_are_others) {
    static const struct {
        const char *text;
        size_t data;
        const char *says;
    } headers[] = {
        {"", 0, "does not say how many"},
        {"{", 0, "does not say how many"},
        {"[]", 0, "does not say how many"},
        {"{}", 0, "does not say how many"},
        {" " SOUND(""), 96, "does not say how many"},
        {"{" R "," W "," M "}", 64, "does not fit its"},
        {"{" R "," W "," V "}", 64, "does not fit its"},
        {"{" W "," M "," V "}", 96, "does not say how many"},
        {"{" R "," W "," V "," M "}", 96, "does not fit its"},
        {SOUND("," TENSOR("x", "F32", "8", "96", "128")), 128, "does not fit its"},
        {SOUND(",\"__metadata__\":{\"format\":\"pt\"}"), 96, "does not fit its"},
        {SOUND("") "{}", 96, "does not fit its"},
        {"{" TENSOR("run", "I64", "0,5", "0", "0") "," W "," M "," V "}", 96, "does not say how many"},
        {"{" TENSOR("runs", "F64", "0,5", "0", "0") "," W "," M "," V "}", 96, "does not say how many"},
        {"{" TENSOR("runs", "I64", "0", "0", "0") "," W "," M "," V "}", 96, "does not say how many"},
        {"{" TENSOR("runs", "I64", "0,4", "0", "0") "," W "," M "," V "}", 96, "does not say how many"},
        {"{" TENSOR("runs", "I64", "-1,5", "0", "0") "," W "," M "," V "}", 96, "does not say how many"},
        {"{" TENSOR("runs", "I64", "00,5", "0", "0") "," W "," M "," V "}", 96, "does not fit its"},
        {"{" TENSOR("runs", "I64", "9999999999999,5", "0", "0") "," W "," M "," V "}", 96, "does not say how many"},
        {"{" TENSOR("runs", "I64", "10000000000000,5", "0", "0") "," W "," M "," V "}", 96, "does not say how many"},
        {"{" TENSOR("runs", "I64", "0,5", "0", "40") "," W "," M "," V "}", 136, "does not fit its"},
        {"{" R "," TENSOR("weight", "I64", "4", "0", "32") "," M "," V "}", 96, "does not say how many"},
        {"{" R "," TENSOR("weight", "F32", "8,1", "0", "32") "," M "," V "}", 96, "does not fit its"},
        {"{" R "," TENSOR("weight", "F32", "1.5", "0", "32") "," M "," V "}", 96, "does not fit its"},
        {"{" R "," TENSOR("weight", "F32", "1e1", "0", "32") "," M "," V "}", 96, "does not fit its"},
        {"{" R "," TENSOR("weight", "F32", "8", "0", "36") "," M "," V "}", 96, "does not fit its"},
        {"{" R "," W "," TENSOR("m", "F32", "9", "32", "68") "," V "}", 96, "does not fit its"},
        {"{" R "," W "," M "," TENSOR("v", "BF16", "8", "64", "96") "}", 96, "does not fit its"},
        {SOUND(""), 95, "truncated"},
        {SOUND(""), 97, "too long"},
        {"{" TENSOR("runs", "I64", "1000000000000,5", "0", "40000000000000") "," TENSOR(
             "weight", "F32", "0", "40000000000000",
             "40000000000000") "," TENSOR("m", "F32", "0", "40000000000000",
                                          "40000000000000") "," TENSOR("v", "F32", "0", "40000000000000", "40000000000000") "}",
         0, "which is 40000000000384 bytes, but it has 384"},
    };
    write_rank(0, first_rank, FIRST, ELEMENTS);
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++) {
        write_header(headers[i].text, headers[i].data);
        assert_refused(headers[i].text);
        if (!strstr(why.what, headers[i].says)) fail_msg("%s: '%s' does not say '%s'", headers[i].text, why.what, headers[i].says);
        ASSERT_SAYS("rank_00001.safetensors");
    }
    write_header(SOUND(""), 96);
    saved_state *s = open_ranks(2);
    if (!s) fail_msg("%s", why.what);
    saved_state_close(s);
}

// Lengths of the header that are not its own; files that end within it.
STATE_TEST(lengths_that_are_wrong) {
    size_t size;
    write_rank(0, first_rank, FIRST, ELEMENTS);
    write_header(SOUND(""), 96);
    char *bytes = scratch_read(path_of(1), &size);
    for (int at = 0; at < 8; at++)
        for (int value = 0; value < 256; value++) {
            char right = bytes[at];
            if ((char)value == right) continue;
            bytes[at] = (char)value;
            scratch_write("step_00000012/rank_00001.safetensors", bytes, size);
            bytes[at] = right;
            assert_refused("a wrong length");
            ASSERT_SAYS("does not fit its");
        }
    for (size_t length = 0; length < size; length++) {
        scratch_write("step_00000012/rank_00001.safetensors", bytes, length);
        assert_refused("a part of a file");
        ASSERT_SAYS("rank_00001.safetensors");
    }
    free(bytes);
}

// The second rank's file with one run that is not right, among others that are.
static void assert_run_refused(state_run damaged, const char *says) {
    char text[160];
    for (int place = 0; place < SECOND + 1; place++) {
        state_run run[SECOND + 1];
        for (int i = 0; i < SECOND + 1; i++) run[i] = i == place ? damaged : second_rank[i < place ? i : i - 1];
        write_rank(1, run, SECOND + 1, ELEMENTS + 2);
        snprintf(text, sizeof text, "run {%lld, %lld, %lld, %lld, %lld}", (long long)damaged.tensor, (long long)damaged.layer,
                 (long long)damaged.whole, (long long)damaged.count, (long long)damaged.at);
        assert_refused(text);
        ASSERT_SAYS(says);
    }
}

STATE_TEST(runs_outside_of_the_file) {
    static const int64_t numbers[] = {-1, INT64_MIN, INT64_MAX, INT64_MAX - 3, (INT64_C(1) << 50) + 1};
    const state_run sound = {7, 1, 4, 2, 3};
    write_rank(0, first_rank, FIRST, ELEMENTS);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        for (int field = 0; field < 5; field++) {
            state_run r = sound;
            ((int64_t *)&r)[field] = numbers[i];
            assert_run_refused(r, "a run outside of the file");
        }
    const state_run others[] = {{7, 1, 4, 0, 3},  {7, 1, 4, 13, 0}, {7, 1, 4, 1, 12},
                                {7, 1, 4, 2, 11}, {7, 1, 4, 9, 4},  {7, 1, 4, INT64_C(1) << 50, INT64_C(1) << 50}};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) assert_run_refused(others[i], "a run outside of the file");
}

// The largest numbers that a run may have are taken for what they are.
STATE_TEST(runs_at_the_limits) {
    const int64_t most = INT64_C(1) << 50;
    const state_run runs[] = {{most, most, most, 2, 10}, {0, 0, 0, 12, 0}, {most, most, most - 5, 5, 0}};
    float out[12];
    write_rank(0, runs, 3, 12);
    saved_state *s = open_ranks(1);
    if (!s) fail_msg("%s", why.what);
    assert_true(saved_state_read(s, STATE_M, most, most, most - 5, 7, out, &why));
    assert_false(saved_state_read(s, STATE_M, most, most, most - 5, 8, out, &why));
    assert_true(saved_state_read(s, STATE_M, 0, 0, 0, 12, out, &why));
    saved_state_close(s);
}

STATE_TEST(elements_that_are_there_twice) {
    write_rank(0, first_rank, FIRST, ELEMENTS);
    const state_run again[] = {{3, 0, 0, 3, 1}, // the other rank's own
                               {3, 0, 2, 1, 0}, // its last element
                               {3, 0, 3, 1, 0}, // this rank's first
                               {3, 1, 4, 4, 6}, // this rank's own
                               {3, 1, 7, 1, 0}, {3, 1, 0, 8, 0}, {5, 0, 0, 4, 0}, {5, 0, 2, 1, 0}};
    for (size_t i = 0; i < sizeof again / sizeof *again; i++) assert_run_refused(again[i], "an element appears twice");
    const state_run other[] = {{3, 2, 0, 3, 1}, {4, 0, 0, 8, 1}, {5, 1, 0, 4, 0}};
    for (size_t i = 0; i < sizeof other / sizeof *other; i++) { // the same numbers of another layer or tensor
        state_run run[SECOND + 1];
        memcpy(run, second_rank, sizeof second_rank);
        run[SECOND] = other[i];
        write_rank(1, run, SECOND + 1, ELEMENTS + 2);
        saved_state *s = open_ranks(2);
        if (!s) fail_msg("%s", why.what);
        saved_state_close(s);
    }
}

// Nothing is mapped: what is gone is an error, not SIGBUS.
STATE_TEST(a_file_that_becomes_shorter) {
    float out[8];
    saved_state *s = open_sound();
    assert_int_equal(truncate(path_of(1), 400), 0);
    assert_true(saved_state_read(s, STATE_WEIGHT, 3, 0, 0, 3, out, &why));
    assert_false(saved_state_read(s, STATE_V, 3, 0, 0, 8, out, &why));
    ASSERT_SAYS("rank_00001.safetensors cannot be read at byte", "has become shorter");
    saved_state_close(s);
}

// Any single byte of a file may be damaged: whatever opens then, no read goes astray. The hash in the manifest tells in
// the first place, but a file may have been written wrong.
STATE_TEST(any_byte_may_be_damaged) {
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
                for (int64_t layer = 0; layer < 3; layer++) saved_state_read(s, STATE_V, tensor, layer, 0, 8, out, &why);
            saved_state_close(s);
        }
    free(bytes);
    assert_true(refused > 100); // of the header most
}

STATE_TEST(a_file_that_cannot_be_written) {
    float zeros[ELEMENTS] = {0};
    const rank_state held = {ELEMENTS, FIRST, (state_run *)first_rank, {zeros, zeros, zeros}, kinds_of_adamw};
    file_hash file;
    const char *path = scratch_path("nowhere/rank");
    assert_false(saved_state_write(path, &held, &file, &why));
    ASSERT_SAYS("nowhere/rank", "No such file");
}

int main(void) {
    return cmocka_run_group_tests(all_tests, scratch_make, end);
}
