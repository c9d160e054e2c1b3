// ranks: 1
#include "tests/death.h"
#include "tests/data/scratch.h"
#include "data/vocabulary.h"
#include <errno.h>
#include <sys/stat.h>

enum { HEADER = 256 };

// A vocabulary file of `count` tokens "0", "1", … with header fields as given, and bytes added or cut.
static char *write_file(const char *name, uint32_t magic, uint32_t version, uint32_t claimed, uint32_t end, int count,
                        int extra_bytes) {
    size_t size = HEADER * 4;
    char *bytes = calloc(1, size + (size_t)count * 8 + 64);
    assert_non_null(bytes);
    uint32_t header[4] = {magic, version, claimed, end};
    memcpy(bytes, header, sizeof header);
    for (int token = 0; token < count; token++) {
        int length = sprintf(bytes + size + 1, "%d", token);
        bytes[size] = (char)length;
        size += 1 + (size_t)length;
    }
    bytes[size] = 0; // one byte more would be an empty token
    char *path = scratch_write(name, bytes, (size_t)((int64_t)size + extra_bytes));
    free(bytes);
    return path;
}

TEST(test_bytes_without_file) {
    char text[256];
    assert_int_equal(vocabulary_size(NULL), 256);
    assert_int_equal(vocabulary_first(NULL, 256), '\n');
    assert_int_equal(vocabulary_first(NULL, '\n'), 0); // a model without that byte
    for (int token = 0; token < 256; token++) {
        assert_int_equal(vocabulary_bytes(NULL, token, text), 1);
        assert_int_equal((unsigned char)text[0], token);
    }
    assert_int_equal(vocabulary_bytes(NULL, 256, text), 3);
    assert_memory_equal(text, "\xEF\xBF\xBD", 3);
    assert_int_equal(vocabulary_bytes(NULL, -1, text), 3);
    vocabulary_close(NULL);
}

TEST(test_tokens) {
    char text[256];
    vocabulary *v = vocabulary_open(write_file("v", 20240328, 2, 1234, 7, 1234, 0));
    assert_int_equal(vocabulary_size(v), 1234);
    assert_int_equal(vocabulary_first(v, 1234), 7);
    assert_int_equal(vocabulary_first(v, 7), 0);
    for (int token = 0; token < 1234; token++) {
        char expected[16];
        int length = sprintf(expected, "%d", token);
        assert_int_equal(vocabulary_bytes(v, token, text), length);
        assert_memory_equal(text, expected, (size_t)length);
    }
    assert_int_equal(vocabulary_bytes(v, 1234, text), 3); // a padded model may sample what is no token
    assert_int_equal(vocabulary_bytes(v, -1, text), 3);
    assert_int_equal(vocabulary_bytes(v, INT64_MAX, text), 3);
    vocabulary_close(v);
}

// The longest word counts, also where the text then needs more of them: "1234" is 123, 4.
TEST(test_encode) {
    vocabulary *v = vocabulary_open(write_file("v", 20240328, 2, 1234, 7, 1234, 0));
    int32_t token[8] = {0};
    assert_int_equal(vocabulary_encode(v, "1234", 4, token), 2);
    assert_int_equal(token[0], 123);
    assert_int_equal(token[1], 4);
    assert_int_equal(vocabulary_encode(v, "123307", 6, token), 3);
    assert_int_equal(token[0], 1233);
    assert_int_equal(token[1], 0);
    assert_int_equal(token[2], 7);
    assert_int_equal(vocabulary_encode(v, "12", 1, token), 1); // what follows the text is not read
    assert_int_equal(token[0], 1);
    assert_int_equal(vocabulary_encode(v, "", 0, token), 0);
    ASSERT_REFUSED(vocabulary_encode(v, "12x", 3, token), "no word for byte 2", "--prompt-tokens");
    vocabulary_close(v);
    assert_int_equal(vocabulary_encode(NULL, "a\xFF", 2, token), 2);
    assert_int_equal(token[0], 'a');
    assert_int_equal(token[1], 255);
}

// The longest token has 255 bytes, any of them may be 0; an empty one is legal.
TEST(test_extreme_lengths) {
    char bytes[HEADER * 4 + 256 + 1] = {0}, text[255];
    uint32_t header[4] = {20240328, 2, 2, 1};
    memcpy(bytes, header, sizeof header);
    bytes[HEADER * 4] = (char)255;
    for (int i = 0; i < 255; i++) bytes[HEADER * 4 + 1 + i] = (char)i;
    vocabulary *v = vocabulary_open(scratch_write("v", bytes, sizeof bytes));
    assert_int_equal(vocabulary_bytes(v, 0, text), 255);
    for (int i = 0; i < 255; i++) assert_int_equal((unsigned char)text[i], i);
    assert_int_equal(vocabulary_bytes(v, 1, text), 0);
    vocabulary_close(v);
}

TEST(test_damage) {
    assert_null(vocabulary_open(scratch_path("none")));
    ASSERT_REFUSED(vocabulary_open(scratch_write("v", "", 0)), "/v has 0 bytes");
    ASSERT_REFUSED(vocabulary_open(scratch_write("v", "short", 5)), "/v has 5 bytes");
    ASSERT_REFUSED(vocabulary_open(scratch), "it is not a regular file");
    ASSERT_REFUSED(vocabulary_open(write_file("v", 20240520, 2, 10, 0, 10, 0)), "not a vocabulary file", "20240520");
    ASSERT_REFUSED(vocabulary_open(write_file("v", 20240328, 3, 10, 0, 10, 0)), "version is 3");
    ASSERT_REFUSED(vocabulary_open(write_file("v", 20240328, 1, 10, 0, 10, 0)), "version is 1", "prepare.py");
    ASSERT_REFUSED(vocabulary_open(write_file("v", 20240328, 2, 0, 0, 10, 0)), "number of tokens is 0");
    ASSERT_REFUSED(vocabulary_open(write_file("v", 20240328, 2, UINT32_MAX, 0, 10, 0)), "number of tokens is -1");
    ASSERT_REFUSED(vocabulary_open(write_file("v", 20240328, 2, 10, 10, 10, 0)), "end of text is token 10 of 10");
    ASSERT_REFUSED(vocabulary_open(write_file("v", 20240328, 2, 11, 0, 10, 0)), "ends within token 10 of 11", "prepare.py");
    ASSERT_REFUSED(vocabulary_open(write_file("v", 20240328, 2, 10, 0, 10, -1)), "ends within token 9 of 10");
    ASSERT_REFUSED(vocabulary_open(write_file("v", 20240328, 2, 10, 0, 10, -2)), "ends within token 9 of 10");
    ASSERT_REFUSED(vocabulary_open(write_file("v", 20240328, 2, 10, 0, 10, 1)), "end at byte 1044", "has 1045");
    assert_int_equal(mkfifo(scratch_path("fifo"), 0600), 0); // nobody writes into it
    ASSERT_REFUSED(vocabulary_open(scratch_path("fifo")), "fifo", "not a regular file");
    if (geteuid() != 0) { // root may read everything
        chmod(write_file("v", 20240328, 2, 10, 0, 10, 0), 0);
        ASSERT_REFUSED(vocabulary_open(scratch_path("v")), "Permission denied");
    }
}

TEST(test_beside) {
    scratch_write("train_0.bin", "x", 1);
    assert_null(vocabulary_beside(scratch_path("train_0.bin")));
    assert_null(vocabulary_beside(""));
    assert_null(vocabulary_beside(NULL));
    write_file("tokenizer.bin", 20240328, 2, 42, 0, 42, 0);
    vocabulary *v = vocabulary_beside(scratch_path("train_0.bin"));
    assert_int_equal(vocabulary_size(v), 42);
    vocabulary_close(v);
    char here[PATH_MAX]; // a name without a directory
    assert_non_null(getcwd(here, sizeof here));
    assert_int_equal(chdir(scratch), 0);
    v = vocabulary_beside("train_0.bin");
    assert_int_equal(chdir(here), 0);
    assert_int_equal(vocabulary_size(v), 42);
    vocabulary_close(v);
}

int main(void) {
    return cmocka_run_group_tests(all_tests, scratch_make, scratch_remove);
}
