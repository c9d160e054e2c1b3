// ranks: 1
#include "tests/death.h"
#include "tests/data/scratch.h"
#include "data/hellaswag.h"

// Two examples, of which a test changes one number.
enum { T = 8, V = 1000, HEADER = 512, BYTES_OF_FIRST = HEADER + 1, FIRST = HEADER, SECOND = HEADER + 18 }; // in numbers of 16 bits
static const uint16_t examples[] = {65535, 36, 0, 2, 4, 3, 10, 11, 12, 1, 20, 2, 30, 31, 1, 40, 1, 50,     //
                                    65535, 42, 1, 0, 4, 1, 7,  5,  1,  2, 3,  4, 5,  3,  9, 8,  7, 1,  999, 1, 2, 0};

static char *write_file(int at, int value, int extra) {
    uint16_t number[HEADER + 64] = {0};
    const int32_t header[] = {20240522, 1, 2, 42};
    memcpy(number, header, sizeof header);
    memcpy(number + HEADER, examples, sizeof examples);
    number[at] = (uint16_t)value;
    return scratch_write("h", number, (size_t)(2 * HEADER + 36 + 42 + extra));
}

static void test_rows(void **state) {
    (void)state;
    hellaswag *h = hellaswag_open(write_file(HEADER, 65535, 0), T, V);
    assert_int_equal(h->count, 2);
    assert_int_equal(h->longest, 5);
    int32_t inputs[T * 2] = {0}, targets[T * 2] = {0};
    int64_t first, end;
    hellaswag_load(h, 1, 1, 2, inputs, targets, &first, &end); // the first example's second ending, in column 1 of 2
    assert_true(first == 2 && end == 4);
    const int32_t in[] = {10, 11, 12, 30}, out[] = {0, 0, 30, 31};
    for (int t = 0; t < 4; t++) assert_true(inputs[t * 2 + 1] == in[t] && targets[t * 2 + 1] == out[t] && inputs[t * 2] == 0);
    hellaswag_load(h, 4, 0, 1, inputs, targets, &first, &end);
    assert_true(first == 0 && end == 5 && inputs[0] == 7 && targets[0] == 1 && inputs[4] == 4 && targets[4] == 5);
    const double right[] = {2, 3, 1, 9, 4.9, 3, 1, 1}, equal[] = {1, 2, 1, 1, 5, 3, 1, 1};
    assert_int_equal(hellaswag_correct(h, right), 2); // by means: 2, 1.5, 1, 9; 0.98, 1, 1, 1
    assert_int_equal(hellaswag_correct(h, equal), 1); // the first of equals
    hellaswag_close(h);
}

#define REFUSED(at, value, extra, ...)                                                                                             \
    ASSERT_REFUSED(hellaswag_open(write_file(at, value, extra), T, V), "--hellaswag", __VA_ARGS__)

static void test_every_field(void **state) {
    (void)state;
    ASSERT_REFUSED(hellaswag_open("/nowhere", T, V), "--hellaswag file /nowhere", "cannot be opened");
    ASSERT_REFUSED(hellaswag_open(write_file(0, 0, 0), T, V), "its first number is", "expected 20240522");
    REFUSED(2, 2, 0, "version is 2, allowed is 1 to 1");
    REFUSED(4, 0, 0, "number of examples is 0, allowed is 1 to 65535");
    REFUSED(5, 1, 0, "number of examples is 65538");
    REFUSED(4, 3, 0, "example 2 of 3, at byte 1102, is damaged");
    REFUSED(4, 1, 0, "its 1 examples end at byte 1060, but it has 1102");
    static const int first[][2] = {{0, 7}, {1, 38}, {1, 37}, {1, 34}, {1, 8}, {2, 1}, {5, 0}, {5, 65535}},
                     second[][2] = {{1, 44}, {3, 4}, {4, 3}, {7, 0}};
    for (size_t i = 0; i < sizeof first / sizeof *first; i++)
        REFUSED(FIRST + first[i][0], first[i][1], 0, "example 0 of 2, at byte 1024, is damaged");
    for (size_t i = 0; i < sizeof second / sizeof *second; i++)
        REFUSED(SECOND + second[i][0], second[i][1], 0, "example 1 of 2, at byte 1060, is damaged");
    REFUSED(FIRST + 7, V, 0, "a token of example 0 is 1000, but the vocabulary has 1000");
    REFUSED(FIRST + 17, 65535, 0, "a token of example 0 is 65535");
    REFUSED(HEADER, 65535, -2, "example 1 of 2, at byte 1060, is damaged");
    REFUSED(HEADER, 65535, -38, "example 1 of 2, at byte 1060, is damaged");
    REFUSED(HEADER, 65535, 1, "its 2 examples end at byte 1102, but it has 1103");
    REFUSED(HEADER, 65535, -100, "bytes, less than the 1024 of a header");
    ASSERT_REFUSED(hellaswag_open(write_file(HEADER, 65535, 0), 4, V), "example 1 takes 5 tokens, more than --seq 4",
                   "raise --seq");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_every_field),
    };
    return cmocka_run_group_tests(tests, scratch_make, scratch_remove);
}
