// ranks: 1
#include "tests/death.h"
#include "tests/data/says.h"
#include "tests/data/scratch.h"
#include "data/input.h"
#include <errno.h>
#include <sys/resource.h>
#include <sys/stat.h>

TEST(test_hash) {
    // The values of xxHash's own documentation and of xxh64sum.
    file_hash found;
    assert_true(input_hash(scratch_write("hashed", "", 0), &found, &why));
    assert_true(found.bytes == 0 && found.hash == UINT64_C(0xef46db3751d8e999));
    assert_true(input_hash(scratch_write("hashed", "abc", 3), &found, &why));
    assert_true(found.bytes == 3 && found.hash == UINT64_C(0x44bc2cf5ad770999));
    assert_false(input_hash(scratch_path("none"), &found, &why));
    ASSERT_SAYS("/none cannot be opened", "No such file");
}

TEST(test_whole_files) {
    int64_t bytes = 0;
    char *text = input_read_all("some text", scratch_write("text", "some text", 9), 9, &bytes, &why);
    assert_int_equal(bytes, 9);
    assert_string_equal(text, "some text");
    free(text);
    assert_null(input_read_all("some text", scratch_path("text"), 8, &bytes, &why));
    ASSERT_SAYS("/text has 9 bytes, more than the 8 that it may have");
    assert_int_not_equal(errno, ENOENT);
    assert_null(input_read_all("some text", scratch_path("none"), 8, &bytes, &why));
    assert_int_equal(errno, ENOENT);
    ASSERT_SAYS("/none cannot be opened", "No such file");
}

TEST(test_what_is_no_file) {
    int64_t bytes;
    file_hash found;
    input file;
    const char *const names[] = {"/dev/zero", scratch, scratch_path("pipe")};
    assert_int_equal(mkfifo(names[2], 0600), 0); // which nobody waits for
    for (int i = 0; i < 3; i++) {
        assert_null(input_read_all("some text", names[i], 100, &bytes, &why));
        ASSERT_SAYS("not a regular file", names[i]);
        assert_int_not_equal(errno, ENOENT);
        assert_false(input_hash(names[i], &found, &why));
        ASSERT_SAYS("not a regular file", names[i]);
        assert_false(input_open(&file, "some file", names[i], &why));
        ASSERT_SAYS("not a regular file", names[i]);
        input_close(&file); // which was not opened
    }
    assert_true(input_open(&file, "some file", scratch_write("sound", "abc", 3), &why));
    assert_string_equal(file.path, scratch_path("sound"));
    assert_int_equal(file.bytes, 3);
    input_close(&file);
    unlink(names[2]);
}

// More than may be open at first. What has been replaced is read as it was; what has become shorter is named.
TEST(test_many_files) {
    enum { FILES = 150 };
    static input file[FILES];
    char name[32], byte;
    for (int i = 0; i < FILES; i++) {
        const char content[2] = {(char)i, (char)(i + 1)};
        snprintf(name, sizeof name, "many_%d", i);
        scratch_write(name, content, 2);
    }
    struct rlimit before, few = {100, 100};
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    few.rlim_max = before.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    for (int i = 0; i < FILES; i++) {
        snprintf(name, sizeof name, "many_%d", i);
        assert_true(input_open(&file[i], "some file", scratch_path(name), &why));
    }
    for (int turn = 0; turn < 2; turn++)
        for (int i = 0; i < FILES; i++) {
            assert_true(input_read(&file[i], turn, &byte, 1, &why));
            assert_int_equal(byte, (char)(i + turn));
        }
    assert_false(input_read(&file[100], 1, name, 2, &why));
    ASSERT_SAYS("/many_100 cannot be read at byte 2", "has become shorter");
    scratch_write("another", "xy", 2);
    assert_int_equal(rename(scratch_path("another"), scratch_path("many_5")), 0);
    assert_true(input_read(&file[5], 0, &byte, 1, &why));
    assert_int_equal(byte, 5);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    for (int i = 0; i < FILES; i++) input_close(&file[i]);
}

// The first numbers of a header, one by one below, at and above what they may be.
TEST(test_headers) {
    static const header_field field[] = {{"magic", 7, 7}, {"version", 2, 3}, {"count", 0, INT32_MAX}};
    int32_t header[INPUT_HEADER] = {7, 2, 5}, found[INPUT_HEADER];
    input file;
    static const struct {
        int32_t number[3];
        const char *says; // NULL: sound
    } cases[] = {{{7, 2, 0}, NULL},
                 {{7, 3, INT32_MAX}, NULL},
                 {{6, 2, 5}, "is not a some file: its first number is 6, expected 7"},
                 {{7, 1, 5}, "its version is 1, allowed is 2 to 3"},
                 {{7, 4, 5}, "its version is 4, allowed is 2 to 3"},
                 {{7, 2, -1}, "its count is -1, allowed is 0 to 2147483647"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        memcpy(header, cases[i].number, sizeof cases[i].number);
        assert_true(input_open(&file, "some file", scratch_write("header", header, sizeof header), &why));
        assert_int_equal(input_header(&file, field, 3, found, &why), !cases[i].says);
        if (cases[i].says)
            ASSERT_SAYS(cases[i].says, "/header");
        else
            assert_memory_equal(found, header, sizeof header);
        input_close(&file);
    }
    assert_true(input_open(&file, "some file", scratch_write("header", header, sizeof header - 1), &why));
    assert_false(input_header(&file, field, 3, found, &why));
    ASSERT_SAYS("/header has 1023 bytes, less than the 1024 of a header");
    assert_true(input_check_size(&file, 1023, "many", &why));
    assert_false(input_check_size(&file, 1024, "1 token", &why));
    ASSERT_SAYS("/header is truncated: its header says 1 token, which is 1024 bytes, but it has 1023");
    assert_false(input_check_size(&file, 1022, "1 token", &why));
    ASSERT_SAYS("/header is too long");
    input_close(&file);
}

int main(void) {
    return cmocka_run_group_tests(all_tests, scratch_make, scratch_remove);
}
