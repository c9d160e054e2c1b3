// ranks: 1
//
// Codes are standard HMAC-SHA256, and text from elsewhere is printed without control characters.
#include "tests/death.h"
#include "commfuse/base/die.h"
#include "commfuse/base/sanitize.h"
#include "commfuse/launch/secret.h"

static void a_code_is_what_rfc_4231_says(void **state) {
    (void)state;
    // Its test case 1: a key of twenty bytes is one of 32 that ends in zeros.
    static const unsigned char expected[32] = {0xb0, 0x34, 0x4c, 0x61, 0xd8, 0xdb, 0x38, 0x53, 0x5c, 0xa8, 0xaf,
                                               0xce, 0xaf, 0x0b, 0xf1, 0x2b, 0x88, 0x1d, 0xc2, 0x00, 0xc9, 0x83,
                                               0x3d, 0xa7, 0x26, 0xe9, 0x37, 0x6c, 0x2e, 0x32, 0xcf, 0xf7};
    cf_mac key = {{0}}, right, wrong;
    memset(key.bytes, 0x0b, 20);
    memcpy(right.bytes, expected, sizeof expected);
    wrong = right;
    wrong.bytes[31] ^= 1;
    cf_mac found = cf_mac_of(&key, "Hi There", 8);
    assert_true(cf_mac_equal(&found, &right));
    assert_false(cf_mac_equal(&found, &wrong));
}

static void a_secret_makes_a_key(void **state) {
    (void)state;
    static const cf_mac nobody;
    unsetenv("COMMFUSE_SECRET");
    unsetenv("COMMFUSE_SECRET_FILE");
    cf_mac none = cf_secret();
    assert_true(cf_mac_equal(&none, &nobody));
    setenv("COMMFUSE_SECRET", "correct horse battery staple", 1);
    cf_mac one = cf_secret();
    setenv("COMMFUSE_SECRET", "correct horse battery stable", 1);
    cf_mac other = cf_secret();
    assert_false(cf_mac_equal(&one, &nobody));
    assert_false(cf_mac_equal(&one, &other));
}

static void random_bytes_differ(void **state) {
    (void)state;
    cf_mac a, b;
    cf_random(&a, sizeof a);
    cf_random(&b, sizeof b);
    assert_false(cf_mac_equal(&a, &b));
}

static void what_drives_a_terminal_is_not_printed(void **state) {
    (void)state;
    static const char *const pairs[][2] = {
        {"plain\ttext\nand more ~", "plain\ttext\nand more ~"},
        {"\033[2Jgone\a\b\r\177", "?[2Jgone????"},
        {"C1 \xc2\x9b"
         "2J, \xc2\x80 \xc2\x9f",
         "C1 ??2J, ?? ??"},
        {"of one byte: \x9b"
         "2J",
         "of one byte: ?2J"},
        {"Z\xc3\xbcrich \xc2\xa0 \xe2\x80\xa6 \xf0\x9f\x90\xb4", "Z\xc3\xbcrich \xc2\xa0 \xe2\x80\xa6 \xf0\x9f\x90\xb4"},
        {"cut \xe2\x80", "cut ??"},
        {"\xc0\x9b overlong", "?? overlong"},
        {"", ""},
    };
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        char text[64];
        strcpy(text, pairs[i][0]);
        assert_string_equal(cf_sanitize(text), pairs[i][1]);
    }
    ASSERT_DIES(cf_die(NULL, "tensor '%s'", "a\033]0;b\a\xc2\x9b"), "tensor 'a?]0;b?");
    ASSERT_DIES(cf_die("look at a\033]0;b", "b"), "hint:  look at a?]0;b");
    ASSERT_DIES(cf_die("", "no hint is no line"), "no hint is no line\n");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_code_is_what_rfc_4231_says),
        cmocka_unit_test(a_secret_makes_a_key),
        cmocka_unit_test(random_bytes_differ),
        cmocka_unit_test(what_drives_a_terminal_is_not_printed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
