// ranks: 1
#include "tests/death.h"
#include "tests/data/scratch.h"
#include "data/tokens.h"
#include <stdbool.h>
#include <sys/stat.h>

enum { HEADER = 256 };

// A token file of `count` tokens: first, first + 1, … modulo 65536. Header as given, bytes added or cut.
static char *write_file(const char *name, int magic, int version, int claimed, int count, int first,
                        int extra_bytes) {
    size_t size = HEADER * 4 + (size_t)count * 2 + (size_t)extra_bytes;
    char *bytes = calloc(1, HEADER * 4 + (size_t)count * 2 + 64);
    assert_non_null(bytes);
    int32_t header[3] = {magic, version, claimed};
    memcpy(bytes, header, sizeof header);
    for (int i = 0; i < count; i++) {
        uint16_t token = (uint16_t)(first + i);
        memcpy(bytes + HEADER * 4 + i * 2, &token, 2);
    }
    char *path = scratch_write(name, bytes, size);
    free(bytes);
    return path;
}

static char *write_good(const char *name, int count, int first) {
    return write_file(name, 20240520, 1, count, count, first, 0);
}

static void empty_scratch(void) {
    scratch_remove(NULL);
    assert_int_equal(mkdir(scratch, 0700), 0);
}

static void test_headers(void **state) {
    (void)state;
    empty_scratch();
    ASSERT_REFUSED(tokens_open(scratch_path("none_*.bin"), 4), "no token file matches", "none_*.bin",
                   "data/prepare.py");
    ASSERT_REFUSED(tokens_open(scratch_path("none.bin"), 4), "no token file matches", "none.bin");
    ASSERT_REFUSED(tokens_open(scratch, 4), scratch, "a directory", "--train");
    ASSERT_REFUSED(tokens_open(scratch_write("a", "", 0), 4), "has 0 bytes", "1024");
    ASSERT_REFUSED(tokens_open(scratch_write("a", "hello", 5), 4), "has 5 bytes", "1024");
    ASSERT_REFUSED(tokens_open(write_file("a", 7, 1, 10, 10, 0, 0), 4), "not a token file", "7", "20240520");
    ASSERT_REFUSED(tokens_open(write_file("a", 20240801, 1, 10, 20, 0, 0), 4), "32-bit tokens");
    ASSERT_REFUSED(tokens_open(write_file("a", 20240520, 2, 10, 10, 0, 0), 4), "version 2, expected 1");
    ASSERT_REFUSED(tokens_open(write_file("a", 20240520, 1, -1, 10, 0, 0), 4), "says it holds -1 tokens");
    ASSERT_REFUSED(tokens_open(write_file("a", 20240520, 1, 11, 10, 0, 0), 4), "truncated", "11 tokens",
                   "1046 bytes", "has 1044");
    ASSERT_REFUSED(tokens_open(write_file("a", 20240520, 1, 10, 10, 0, -1), 4), "truncated", "has 1043");
    ASSERT_REFUSED(tokens_open(write_file("a", 20240520, 1, 10, 10, 0, 1), 4), "too long", "has 1045");
    ASSERT_REFUSED(tokens_open(write_file("a", 20240520, 1, INT32_MAX, 10, 0, 0), 4), "truncated",
                   "4294968318 bytes");
    write_good("b1", 100, 0); // one bad file among good ones is an error too
    write_file("b2", 20240520, 1, 10, 10, 0, 1);
    ASSERT_REFUSED(tokens_open(scratch_path("b*"), 4), "b2", "too long");
    ASSERT_REFUSED(tokens_open(write_good("a", 10, 0), 0), "samples of 0 tokens");
    ASSERT_REFUSED(tokens_open(write_good("a", 10, 0), 10), "takes 11 tokens", "longest of 1 has 10",
                   "--seq");
    ASSERT_REFUSED(tokens_open(write_good("a", 0, 0), 1), "takes 2 tokens", "longest of 1 has 0");
    if (geteuid() != 0) { // root may read everything
        chmod(write_good("a", 10, 0), 0);
        ASSERT_REFUSED(tokens_open(scratch_path("a"), 1), "cannot be opened", "Permission denied");
    }
}

// Every boundary of T in one file: a sample needs T + 1 tokens, the last being a target only.
static void test_sample_counts(void **state) {
    (void)state;
    empty_scratch();
    for (int T = 1; T <= 5; T++)
        for (int count = T + 1; count <= 4 * T + 3; count++) {
            tokens *t = tokens_open(write_good("a", count, 0), T);
            int fits = 0;
            while ((fits + 1) * T + 1 <= count) fits++;
            assert_int_equal(tokens_samples(t), fits);
            assert_int_equal(tokens_count(t), count);
            assert_int_equal(tokens_files(t), 1);
            tokens_close(t);
        }
}

static void test_several_files(void **state) {
    (void)state;
    enum { T = 4, B = 3 };
    empty_scratch();
    // In byte order of names: B (2 samples), a (none), a1 (none: too short), c (3), d (none).
    write_good("t_c", 13, 3000);
    write_good("t_B", 12, 1000);
    write_good("t_a", 0, 2000);
    write_good("t_a1", 4, 2500);
    write_good("t_d", 1, 4000);
    tokens *t = tokens_open(scratch_path("t_*"), T);
    assert_int_equal(tokens_files(t), 5);
    assert_int_equal(tokens_count(t), 30);
    assert_int_equal(tokens_samples(t), 5);
    const int start[5] = {1000, 1004, 3000, 3004, 3008};
    for (int sample = 0; sample < 5; sample++)
        for (int b = 0; b < B; b++) {
            int32_t inputs[T * B], targets[T * B];
            for (int i = 0; i < T * B; i++) inputs[i] = targets[i] = -7;
            tokens_read(t, sample, 65536, b, B, inputs, targets);
            for (int i = 0; i < T * B; i++) {
                assert_int_equal(inputs[i], i % B == b ? start[sample] + i / B : -7);
                assert_int_equal(targets[i], i % B == b ? start[sample] + i / B + 1 : -7);
            }
        }
    int32_t column[T];
    ASSERT_DIES(tokens_read(t, 5, 65536, 0, 1, column, column), "sample 5 of 5");
    ASSERT_DIES(tokens_read(t, -1, 65536, 0, 1, column, column), "sample -1 of 5");
    ASSERT_DIES(tokens_read(t, 0, 65536, 1, 1, column, column), "column 1 of 1");
    tokens_close(t);
    tokens_close(NULL);
}

static void test_vocabulary(void **state) {
    (void)state;
    enum { T = 4 };
    empty_scratch();
    tokens *t = tokens_open(write_good("a", 13, 100), T);
    int32_t inputs[T], targets[T];
    tokens_read(t, 1, 109, 0, 1, inputs, targets); // 104 … 108
    assert_int_equal(targets[T - 1], 108);
    ASSERT_DIES(tokens_read(t, 1, 108, 0, 1, inputs, targets), "/a:", "token 8 is 108", "vocabulary has 108",
                "--vocab");
    tokens_close(t);
    t = tokens_open(write_good("a", 5, 65534), T); // all of 16 bits, unsigned: 65534, 65535, 0, 1, 2
    tokens_read(t, 0, 65536, 0, 1, inputs, targets);
    assert_int_equal(inputs[1], 65535);
    assert_int_equal(targets[0], 65535);
    assert_int_equal(inputs[2], 0);
    ASSERT_DIES(tokens_read(t, 0, 65535, 0, 1, inputs, targets), "token 1 is 65535");
    tokens_close(t);
}

static tokens *open_samples(int samples) {
    return tokens_open(write_good("p", samples + 1, 0), 1);
}

static void test_permutation(void **state) {
    (void)state;
    const int counts[] = {1, 2, 3, 4, 5, 7, 15, 16, 17, 63, 64, 65, 97, 255, 257, 1000, 4096, 4097, 10007};
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        int n = counts[c];
        tokens *t = open_samples(n);
        assert_int_equal(tokens_samples(t), n);
        for (uint64_t seed = 0; seed < 3; seed++)
            for (int64_t epoch = 0; epoch < 3; epoch++) {
                char *seen = calloc((size_t)n, 1);
                for (int i = 0; i < n; i++) {
                    int64_t sample = tokens_shuffled(t, seed, epoch * n + i);
                    assert_in_range(sample, 0, n - 1);
                    assert_int_equal(seen[sample]++, 0);
                }
                free(seen);
            }
        tokens_close(t);
    }
}

// How many of the first n positions of two orders agree; 1 in the mean for unrelated ones.
static int agreements(const tokens *t, uint64_t seed_a, int64_t from_a, uint64_t seed_b, int64_t from_b) {
    int equal = 0;
    for (int64_t i = 0; i < tokens_samples(t); i++)
        equal += tokens_shuffled(t, seed_a, from_a + i) == tokens_shuffled(t, seed_b, from_b + i);
    return equal;
}

static void test_orders_differ(void **state) {
    (void)state;
    enum { N = 1000 };
    tokens *t = open_samples(N);
    assert_int_equal(agreements(t, 5, 0, 5, 0), N);
    for (uint64_t seed = 0; seed < 20; seed++) {
        assert_true(agreements(t, seed, 0, seed, N) < 10);     // epochs
        assert_true(agreements(t, seed, 0, seed + 1, 0) < 10); // seeds
        assert_true(agreements(t, seed, N, seed + 1, 0) < 10); // epoch and seed are not added up
        int in_place = 0;
        for (int64_t i = 0; i < N; i++) in_place += tokens_shuffled(t, seed, i) == i;
        assert_true(in_place < 10);
    }
    assert_true(tokens_shuffled(t, 1, INT64_MAX) < N);
    ASSERT_DIES(tokens_shuffled(t, 1, -1), "position -1");
    tokens_close(t);
}

// Over many epochs each position is given to each sample about equally often (chi squared, 5 sigma).
static void test_uniform(void **state) {
    (void)state;
    enum { N = 13, EPOCHS = 13000 };
    tokens *t = open_samples(N);
    for (int position = 0; position < N; position++) {
        int hits[N] = {0};
        for (int64_t epoch = 0; epoch < EPOCHS; epoch++)
            hits[tokens_shuffled(t, 1337, epoch * N + position)]++;
        double chi2 = 0, mean = (double)EPOCHS / N;
        for (int i = 0; i < N; i++) chi2 += (hits[i] - mean) * (hits[i] - mean) / mean;
        assert_true(chi2 < (N - 1) + 5 * 4.9); // N - 1 degrees of freedom: mean 12, deviation sqrt(24)
    }
    tokens_close(t);
}

// The order is a contract: a run is repeated by its seed, with any version of this program.
static void test_order_is_pinned(void **state) {
    (void)state;
    // clang-format off
    static const struct { int samples; uint64_t seed; int64_t position, sample; } known[] = {
        {1, UINT64_C(0), INT64_C(0), 0},
        {2, UINT64_C(1337), INT64_C(0), 1},
        {2, UINT64_C(1337), INT64_C(1), 0},
        {10, UINT64_C(1337), INT64_C(0), 7},
        {10, UINT64_C(1337), INT64_C(9), 8},
        {10, UINT64_C(1337), INT64_C(10), 9},
        {1000, UINT64_C(1337), INT64_C(0), 371},
        {1000, UINT64_C(1337), INT64_C(1), 439},
        {1000, UINT64_C(1337), INT64_C(2), 722},
        {1000, UINT64_C(1338), INT64_C(0), 921},
        {1000, UINT64_C(1337), INT64_C(123456789012), 341},
        {100003, UINT64_C(18446744073709551615), INT64_C(0), 76056},
        {100003, UINT64_C(0), INT64_C(100003), 47296},
        {1048577, UINT64_C(42), INT64_C(7), 288189},
    };
    // clang-format on
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        tokens *t = open_samples(known[i].samples);
        assert_int_equal(tokens_shuffled(t, known[i].seed, known[i].position), known[i].sample);
        tokens_close(t);
    }
}

static bool look_like_bytes(int count, int first) {
    empty_scratch();
    write_good("a", 20, 100);
    write_good("b", count, first);
    tokens *t = tokens_open(scratch_path("*"), 4);
    bool they_do = tokens_look_like_bytes(t);
    tokens_close(t);
    return they_do;
}

static void bytes_look_like_bytes(void **state) {
    (void)state;
    assert_true(look_like_bytes(256, 0));
    assert_false(look_like_bytes(257, 0));
    assert_false(look_like_bytes(10, 256));
    assert_false(look_like_bytes(10, 65535)); // the first alone
    assert_false(look_like_bytes(5000, 62000));
    empty_scratch();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_look_like_bytes), cmocka_unit_test(test_headers),
        cmocka_unit_test(test_sample_counts),    cmocka_unit_test(test_several_files),
        cmocka_unit_test(test_vocabulary),       cmocka_unit_test(test_permutation),
        cmocka_unit_test(test_orders_differ),    cmocka_unit_test(test_uniform),
        cmocka_unit_test(test_order_is_pinned),
    };
    return cmocka_run_group_tests(tests, scratch_make, scratch_remove);
}
