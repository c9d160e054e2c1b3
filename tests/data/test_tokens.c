// ranks: 1
#include "tests/death.h"
#include "tests/data/scratch.h"
#include "data/tokens.h"
#include <fcntl.h>
#include <stdbool.h>
#include <sys/resource.h>
#include <sys/stat.h>

enum { HEADER = 256 };

// A token file of `count` tokens: first, first + 1, … modulo 65536. Header as given, bytes added or cut.
static char *write_file(const char *name, int magic, int version, int claimed, int count, int first, int extra_bytes) {
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

// The same in 32 bits, not modulo 65536.
static char *write_wide(const char *name, int version, int claimed, int count, int first, int extra_bytes) {
    size_t size = HEADER * 4 + (size_t)count * 4 + (size_t)extra_bytes;
    char *bytes = calloc(1, HEADER * 4 + (size_t)count * 4 + 64);
    int32_t header[3] = {20240801, version, claimed};
    memcpy(bytes, header, sizeof header);
    for (int i = 0; i < count; i++) memcpy(bytes + HEADER * 4 + i * 4, &(int){first + i}, 4);
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

TEST(test_headers) {
    empty_scratch();
    ASSERT_REFUSED(tokens_open(scratch_path("none_*.bin"), 4, 65536), "no token file matches", "none_*.bin", "data/prepare.py");
    ASSERT_REFUSED(tokens_open(scratch_path("none.bin"), 4, 65536), "no token file matches", "none.bin");
    ASSERT_REFUSED(tokens_open(scratch, 4, 65536), scratch, "not a regular file", "--train");
    assert_int_equal(mkfifo(scratch_path("fifo"), 0600), 0); // nobody writes into it
    ASSERT_REFUSED(tokens_open(scratch_path("fifo"), 4, 65536), "fifo", "not a regular file");
    ASSERT_REFUSED(tokens_open(scratch_write("a", "", 0), 4, 65536), "has 0 bytes", "1024");
    ASSERT_REFUSED(tokens_open(scratch_write("a", "hello", 5), 4, 65536), "has 5 bytes", "1024");
    ASSERT_REFUSED(tokens_open(write_file("a", 7, 1, 10, 10, 0, 0), 4, 65536), "not a token file", "7", "20240520");
    ASSERT_REFUSED(tokens_open(write_file("a", 20240328, 1, 10, 20, 0, 0), 4, 65536), "not a token file", "20240328", "prepare.py");
    ASSERT_REFUSED(tokens_open(write_file("a", 20240520, 2, 10, 10, 0, 0), 4, 65536), "version is 2, allowed is 1 to 1");
    ASSERT_REFUSED(tokens_open(write_file("a", 20240520, 1, -1, 10, 0, 0), 4, 65536), "number of tokens is -1");
    ASSERT_REFUSED(tokens_open(write_file("a", 20240520, 1, 11, 10, 0, 0), 4, 65536), "truncated", "11 tokens", "1046 bytes",
                   "has 1044");
    ASSERT_REFUSED(tokens_open(write_file("a", 20240520, 1, 10, 10, 0, -1), 4, 65536), "truncated", "has 1043");
    ASSERT_REFUSED(tokens_open(write_file("a", 20240520, 1, 10, 10, 0, 1), 4, 65536), "too long", "has 1045");
    ASSERT_REFUSED(tokens_open(write_file("a", 20240520, 1, INT32_MAX, 10, 0, 0), 4, 65536), "truncated", "4294968318 bytes");
    write_good("b1", 100, 0); // one bad file among good ones is an error too
    write_file("b2", 20240520, 1, 10, 10, 0, 1);
    ASSERT_REFUSED(tokens_open(scratch_path("b*"), 4, 65536), "b2", "too long");
    ASSERT_REFUSED(tokens_open(write_good("a", 10, 0), 10, 65536), "takes 11 tokens", "longest of 1 has 10", "--seq");
    ASSERT_REFUSED(tokens_open(write_good("a", 0, 0), 1, 65536), "takes 2 tokens", "longest of 1 has 0");
    if (geteuid() != 0) { // root may read everything
        chmod(write_good("a", 10, 0), 0);
        ASSERT_REFUSED(tokens_open(scratch_path("a"), 1, 65536), "cannot be opened", "Permission denied");
    }
}

// Every boundary of T in one file: a sample needs T + 1 tokens, the last being a target only.
TEST(test_sample_counts) {
    empty_scratch();
    for (int T = 1; T <= 5; T++)
        for (int count = T + 1; count <= 4 * T + 3; count++) {
            tokens *t = tokens_open(write_good("a", count, 0), T, 65536);
            int fits = 0;
            while ((fits + 1) * T + 1 <= count) fits++;
            assert_int_equal(t->samples, fits);
            assert_int_equal(t->count, count);
            assert_int_equal(t->files, 1);
            tokens_close(t);
        }
}

// Llama 3's, of 32 bits, alone and beside one of 16.
TEST(test_wide_tokens) {
    enum { T = 4, V = 128256 };
    int32_t inputs[T], targets[T];
    empty_scratch();
    ASSERT_REFUSED(tokens_open(write_wide("a", 1, 10, 10, 0, 0), T, V), "version is 1, allowed is 7 to 7");
    ASSERT_REFUSED(tokens_open(write_wide("a", 7, -1, 10, 0, 0), T, V), "number of tokens is -1");
    ASSERT_REFUSED(tokens_open(write_wide("a", 7, 11, 10, 0, 0), T, V), "truncated", "11 tokens", "1068 bytes", "has 1064");
    ASSERT_REFUSED(tokens_open(write_wide("a", 7, 10, 10, 0, 2), T, V), "too long", "has 1066");
    ASSERT_REFUSED(tokens_open(write_wide("a", 7, 10, 10, V - 9, 0), T, V), "/a: token 9 is 128256, at byte 1060", "has 128256");
    ASSERT_REFUSED(tokens_open(write_wide("a", 7, 10, 10, -3, 0), T, V), "/a: token 0 is 4294967293, at byte 1024");
    write_wide("a", 7, 9, 9, V - 9, 0);
    write_good("b", 9, 60000);
    tokens *t = tokens_open(scratch_path("*"), T, V);
    assert_int_equal(t->samples, 4);
    for (int sample = 0; sample < 4; sample++) {
        tokens_load(t, sample, 0, 1, inputs, targets);
        const int first = (sample < 2 ? V - 9 : 60000) + sample % 2 * T;
        for (int i = 0; i < T; i++) assert_true(inputs[i] == first + i && targets[i] == first + i + 1);
    }
    ASSERT_DIES((t->vocab = V - 1, tokens_load(t, 1, 0, 1, inputs, targets)), "token 8 is 128255, at byte 1056");
    assert_int_equal(truncate(scratch_path("a"), HEADER * 4 + 20), 0);
    ASSERT_DIES(tokens_load(t, 1, 0, 1, inputs, targets), "/a cannot be read at byte 1044", "has become shorter");
    const uint64_t print = t->fingerprint;
    tokens_close(t);
    write_wide("a", 7, 9, 9, V - 10, 0);
    t = tokens_open(scratch_path("*"), T, V);
    assert_true(t->fingerprint != print);
    tokens_close(t);
}

TEST(test_several_files) {
    enum { T = 4, B = 3 };
    empty_scratch();
    // In byte order of names: B (2 samples), a (none), a1 (none: too short), c (3), d (none).
    write_good("t_c", 13, 3000);
    write_good("t_B", 12, 1000);
    write_good("t_a", 0, 2000);
    write_good("t_a1", 4, 2500);
    write_good("t_d", 1, 4000);
    tokens *t = tokens_open(scratch_path("t_*"), T, 65536);
    assert_int_equal(t->files, 5);
    assert_int_equal(t->count, 30);
    assert_int_equal(t->samples, 5);
    const int start[5] = {1000, 1004, 3000, 3004, 3008};
    for (int sample = 0; sample < 5; sample++)
        for (int b = 0; b < B; b++) {
            int32_t inputs[T * B], targets[T * B];
            for (int i = 0; i < T * B; i++) inputs[i] = targets[i] = -7;
            tokens_load(t, sample, b, B, inputs, targets);
            for (int i = 0; i < T * B; i++) {
                assert_int_equal(inputs[i], i % B == b ? start[sample] + i / B : -7);
                assert_int_equal(targets[i], i % B == b ? start[sample] + i / B + 1 : -7);
            }
        }
    tokens_close(t);
    tokens_close(NULL);
}

TEST(test_vocabulary) {
    enum { T = 4 };
    empty_scratch();
    tokens *t = tokens_open(write_good("a", 13, 100), T, 65536);
    int32_t inputs[T], targets[T];
    t->vocab = 109, tokens_load(t, 1, 0, 1, inputs, targets); // 104 … 108
    assert_int_equal(targets[T - 1], 108);
    ASSERT_DIES((t->vocab = 108, tokens_load(t, 1, 0, 1, inputs, targets)), "/a:", "token 8 is 108", "vocabulary has 108",
                "--vocab");
    tokens_close(t);
    t = tokens_open(write_good("a", 5, 65534), T, 65536); // all of 16 bits, unsigned: 65534, 65535, 0, 1, 2
    tokens_load(t, 0, 0, 1, inputs, targets);
    assert_int_equal(inputs[1], 65535);
    assert_int_equal(targets[0], 65535);
    assert_int_equal(inputs[2], 0);
    ASSERT_DIES((t->vocab = 65535, tokens_load(t, 0, 0, 1, inputs, targets)), "token 1 is 65535");
    tokens_close(t);
}

TEST(test_tokens_beyond_are_found_at_start) {
    empty_scratch();
    write_good("a", 100000, 0); // 0 … 65535, 0 …
    write_good("b", 100, 300);
    tokens_close(tokens_open(scratch_path("*"), 4, 65536));
    ASSERT_REFUSED(tokens_open(scratch_path("*"), 4, 50257), "/a: token 50257 is 50257, at byte 101538", "vocabulary has 50257",
                   "--vocab");
    ASSERT_REFUSED(tokens_open(scratch_path("b"), 4, 399), "/b: token 99 is 399, at byte 1222");
    tokens_close(tokens_open(scratch_path("b"), 4, 400));
}

// Its first token, as a pattern finds it.
static int first_token(const char *pattern) {
    int32_t inputs[4], targets[4];
    tokens *t = tokens_open(scratch_path(pattern), 4, 65536);
    tokens_load(t, 0, 0, 1, inputs, targets);
    assert_int_equal(t->files, 1);
    char *first = tokens_first_file(scratch_path(pattern));
    assert_memory_equal(first, scratch, strlen(scratch));
    free(first);
    tokens_close(t);
    return inputs[0];
}

TEST(test_names_that_look_like_patterns) {
    static const char *const names[] = {"[ab]", "a", "wiki[en]/t_1", "wikie/t_1", "back\\slash*", "backslashes"};
    empty_scratch();
    assert_int_equal(mkdir(scratch_path("wiki[en]"), 0700), 0);
    assert_int_equal(mkdir(scratch_path("wikie"), 0700), 0);
    for (int i = 0; i < 6; i++) write_good(names[i], 5, 10 * i);
    for (int i = 0; i < 6; i++) assert_int_equal(first_token(names[i]), 10 * i);
    assert_int_equal(first_token("wiki[en]/t_*"), 20); // as data/prepare.py prints it
    assert_int_equal(first_token("wiki[en]/[st]_[0-9]"), 20);
    assert_int_equal(first_token("wiki?/t_*"), 30);
    assert_int_equal(first_token("[a]"), 10);
    assert_null(tokens_first_file(scratch_path("[b]")));
    assert_null(tokens_first_file(""));
    unlink(scratch_path("wiki[en]/t_1"));
    assert_int_equal(first_token("wiki[e]/t_1"), 30);
    unlink(scratch_path("wikie/t_1"));
}

// However many files there are, few are open, and none is mapped.
TEST(test_many_files) {
    enum { FILES = 300, T = 4 };
    empty_scratch();
    for (int i = 0; i < FILES; i++) {
        char name[16];
        snprintf(name, sizeof name, "%03d", i);
        write_good(name, 2 * T + 1, 100 * i);
    }
    struct rlimit before, few = {100, 100};
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    few.rlim_max = before.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    size_t size;
    tokens *t = tokens_open(scratch_path("*"), T, 65536);
    char *maps = scratch_read("/proc/self/maps", &size);
    assert_null(strstr(maps, scratch));
    free(maps);
    assert_int_equal(t->samples, 2 * FILES);
    for (int i = 0; i < 3 * FILES; i++) {
        int32_t inputs[T], targets[T];
        int sample = (int)tokens_shuffled(t, 1, i);
        tokens_load(t, sample, 0, 1, inputs, targets);
        assert_int_equal(inputs[0], 100 * (sample / 2) + T * (sample % 2));
    }
    // A file that is replaced meanwhile is read as it was.
    int32_t column[T];
    rename(scratch_path("000"), scratch_path("001"));
    tokens_load(t, 2, 0, 1, column, column);
    assert_int_equal(column[0], 101);
    tokens_close(t);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST(test_a_file_becomes_shorter) {
    enum { T = 4 };
    int32_t column[T];
    empty_scratch();
    char *path = write_good("a", 100000, 0);
    tokens *t = tokens_open(path, T, 65536);
    assert_int_equal(truncate(path, HEADER * 4 + 50000 * 2), 0);
    tokens_load(t, 12000, 0, 1, column, column);
    ASSERT_DIES(tokens_load(t, 20000, 0, 1, column, column), "/a cannot be read at byte 161024", "has become shorter");
    ASSERT_DIES(tokens_load(t, 12499, 0, 1, column, column), "/a cannot be read at byte 101024");
    tokens_close(t);
}

static void put_tokens(const char *path, int64_t first, int64_t count, uint16_t token) {
    uint16_t *buffer = malloc((size_t)count * sizeof *buffer);
    for (int64_t i = 0; i < count; i++) buffer[i] = token;
    int fd = open(path, O_WRONLY);
    assert_int_equal(pwrite(fd, buffer, (size_t)count * 2, HEADER * 4 + first * 2), count * 2);
    close(fd);
    free(buffer);
}

static uint64_t print_of(const char *pattern) {
    tokens *t = tokens_open(pattern, 1024, 65536);
    uint64_t print = t->fingerprint;
    assert_in_range(print, 1, (UINT64_C(1) << 53) - 1);
    tokens_close(t);
    return print;
}

// In files so large that not all is read, a thousandth that has changed is seen wherever it is.
TEST(test_fingerprint_of_large_files) {
    const int count = (1 << 27) + 12345, part = count / 1000;
    empty_scratch();
    char *path = write_file("a", 20240520, 1, count, 0, 0, 0);
    assert_int_equal(truncate(path, HEADER * 4 + (int64_t)count * 2), 0); // zeros that take no space
    uint64_t print = print_of(path);
    srand(1);
    for (int i = 0; i < 40; i++) {
        int64_t first = i == 0 ? 0 : i == 1 ? count - part : (int64_t)rand() % (count - part);
        put_tokens(path, first, part, 1);
        assert_int_not_equal(print_of(path), print);
        put_tokens(path, first, part, 0);
    }
    assert_int_equal(print_of(path), print);
    put_tokens(path, 100000000, 1, 1); // it does not see everything
    assert_int_equal(print_of(path), print);
}

// Of small ones every token is seen, and so is where a file ends.
TEST(test_fingerprint_of_small_files) {
    empty_scratch();
    write_good("a", 3000, 0);
    write_good("b", 5000, 0);
    uint64_t print = print_of(scratch_path("*"));
    for (int i = 0; i < 5000; i += 499) {
        put_tokens(scratch_path("b"), i, 1, (uint16_t)(i + 1));
        assert_int_not_equal(print_of(scratch_path("*")), print);
        put_tokens(scratch_path("b"), i, 1, (uint16_t)i);
    }
    assert_int_equal(print_of(scratch_path("*")), print);
    write_good("a", 3001, 0);
    write_good("b", 4999, 0);
    assert_int_not_equal(print_of(scratch_path("*")), print);
}

static tokens *open_samples(int samples) {
    return tokens_open(write_good("p", samples + 1, 0), 1, 65536);
}

TEST(test_permutation) {
    const int counts[] = {1, 2, 3, 4, 5, 7, 15, 16, 17, 63, 64, 65, 97, 255, 257, 1000, 4096, 4097, 10007};
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        int n = counts[c];
        tokens *t = open_samples(n);
        assert_int_equal(t->samples, n);
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
    for (int64_t i = 0; i < t->samples; i++)
        equal += tokens_shuffled(t, seed_a, from_a + i) == tokens_shuffled(t, seed_b, from_b + i);
    return equal;
}

TEST(test_orders_differ) {
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
    tokens_close(t);
}

// Over many epochs each position is given to each sample about equally often (chi squared, 5 sigma).
TEST(test_uniform) {
    enum { N = 13, EPOCHS = 13000 };
    tokens *t = open_samples(N);
    for (int position = 0; position < N; position++) {
        int hits[N] = {0};
        for (int64_t epoch = 0; epoch < EPOCHS; epoch++) hits[tokens_shuffled(t, 1337, epoch * N + position)]++;
        double chi2 = 0, mean = (double)EPOCHS / N;
        for (int i = 0; i < N; i++) chi2 += (hits[i] - mean) * (hits[i] - mean) / mean;
        assert_true(chi2 < (N - 1) + 5 * 4.9); // N - 1 degrees of freedom: mean 12, deviation sqrt(24)
    }
    tokens_close(t);
}

// The order is a contract: a run is repeated by its seed, with any version of this program.
TEST(test_order_is_pinned) {
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

int main(void) {
    return cmocka_run_group_tests(all_tests, scratch_make, scratch_remove);
}
