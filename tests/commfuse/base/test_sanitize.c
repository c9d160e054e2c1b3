// ranks: 1
//
// Text from elsewhere is printed without control characters.
#include "tests/death.h"
#include "commfuse/base/die.h"
#include "commfuse/base/sanitize.h"

TEST(what_drives_a_terminal_is_not_printed) {
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
    return cmocka_run_group_tests(all_tests, NULL, NULL);
}
