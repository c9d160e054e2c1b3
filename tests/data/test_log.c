// ranks: 1
#include "tests/death.h"
#include "tests/data/scratch.h"
#include "data/log.h"
#include <cjson/cJSON.h>
#include <float.h>
#include <math.h>

// The whole log so far, which is complete after each log_end; the caller frees it.
static char *written(void) {
    size_t size;
    char *text = scratch_read(scratch_path("log"), &size);
    assert_non_null(text);
    assert_int_equal(strlen(text), size);
    return text;
}

static void test_lines(void **state) {
    (void)state;
    logfile *log = log_open(scratch_path("log"));
    log_begin(log, "step");
    log_int(log, "step", 7);
    log_real(log, "loss", 3.25);
    log_text(log, "note", "a \"quoted\" \\ line\nand\ttab\x01");
    log_end(log);
    char *text = written(); // flushed before it is closed
    assert_string_equal(text, "{\"event\":\"step\",\"step\":7,\"loss\":3.25,"
                              "\"note\":\"a \\\"quoted\\\" \\\\ line\\nand\\ttab\\u0001\"}\n");
    free(text);
    log_begin(log, "end");
    log_end(log);
    log_close(log);
    text = written();
    assert_string_equal(strchr(text, '\n') + 1, "{\"event\":\"end\"}\n");
    free(text);
    log_close(log_open(scratch_path("log"))); // truncates
    text = written();
    assert_string_equal(text, "");
    free(text);
}

static void test_null_log(void **state) {
    (void)state;
    assert_null(log_open(NULL));
    assert_null(log_open(""));
    log_begin(NULL, "step");
    log_int(NULL, "a", 1);
    log_real(NULL, "a", 1);
    log_text(NULL, "a", "b");
    log_end(NULL);
    log_close(NULL);
}

// Every number comes back bit for bit.
static void test_numbers(void **state) {
    (void)state;
    const double reals[] = {0.1,    1.0 / 3,         3e-4,    1e300,           -2.5e-300, DBL_MIN,
                            5e-324, 1 + DBL_EPSILON, DBL_MAX, 123456789.0 / 7, 0.1 + 0.2, -0.0};
    const int64_t ints[] = {0, -1, INT64_MAX, INT64_MIN, INT64_C(9007199254740993)};
    logfile *log = log_open(scratch_path("log"));
    for (size_t i = 0; i < sizeof reals / sizeof *reals; i++) {
        log_begin(log, "x");
        log_real(log, "v", reals[i]);
        log_end(log);
    }
    for (size_t i = 0; i < sizeof ints / sizeof *ints; i++) {
        log_begin(log, "x");
        log_int(log, "v", ints[i]);
        log_end(log);
    }
    log_close(log);
    char *text = written(), *at = text;
    for (size_t i = 0; i < sizeof reals / sizeof *reals; i++, at = strchr(at, '\n') + 1) {
        cJSON *line = cJSON_ParseWithLength(at, strcspn(at, "\n"));
        assert_true(cJSON_IsNumber(cJSON_GetObjectItem(line, "v")));
        cJSON_Delete(line);
        double value = strtod(strstr(at, "\"v\":") + 4, NULL);
        assert_memory_equal(&value, &reals[i], sizeof value);
    }
    for (size_t i = 0; i < sizeof ints / sizeof *ints; i++, at = strchr(at, '\n') + 1)
        assert_true(strtoll(strstr(at, "\"v\":") + 4, NULL, 10) == ints[i]);
    assert_string_equal(at, "");
    assert_non_null(strstr(text, "\"v\":0.1}")); // no more digits than needed
    assert_non_null(strstr(text, "\"v\":0.0003}"));
    free(text);
}

static void test_not_finite(void **state) {
    (void)state;
    logfile *log = log_open(scratch_path("log"));
    log_begin(log, "x");
    log_real(log, "a", NAN);
    log_real(log, "b", INFINITY);
    log_real(log, "c", -INFINITY);
    log_end(log);
    log_close(log);
    char *text = written();
    assert_string_equal(text, "{\"event\":\"x\",\"a\":null,\"b\":null,\"c\":null}\n");
    free(text);
}

static void test_utf8(void **state) {
    (void)state;
#define BAD "\xEF\xBF\xBD"
    static const char *const text_and_clean[][2] = {
        {"", ""},
        {"plain", "plain"},
        {"\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80", "\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80"}, // 2, 3, 4 bytes
        {"a\xFFz", "a" BAD "z"},
        {"\x80", BAD},
        {"\xC3", BAD},                                            // cut
        {"\xE2\x82", BAD BAD},                                    // cut
        {"\xF0\x9F\x98", BAD BAD BAD},                            // cut
        {"\xC0\xAF", BAD BAD},                                    // overlong
        {"\xE0\x9F\xBF", BAD BAD BAD},                            // overlong
        {"\xF0\x8F\xBF\xBF", BAD BAD BAD BAD},                    // overlong
        {"\xED\xA0\x80", BAD BAD BAD},                            // surrogate
        {"\xED\x9F\xBF\xEE\x80\x80", "\xED\x9F\xBF\xEE\x80\x80"}, // the last before, the first after
        {"\xF4\x90\x80\x80", BAD BAD BAD BAD},                    // past U+10FFFF
        {"\xF4\x8F\xBF\xBF", "\xF4\x8F\xBF\xBF"},                 // U+10FFFF
        {"\xF5\x80\x80\x80", BAD BAD BAD BAD},
        {"\xC3\xC3\xA9", BAD "\xC3\xA9"},
    };
    logfile *log = log_open(scratch_path("log"));
    for (size_t i = 0; i < sizeof text_and_clean / sizeof *text_and_clean; i++) {
        log_begin(log, "x");
        log_text(log, "t", text_and_clean[i][0]);
        log_end(log);
    }
    log_close(log);
    char *text = written(), *at = text;
    for (size_t i = 0; i < sizeof text_and_clean / sizeof *text_and_clean; i++, at = strchr(at, '\n') + 1) {
        char expected[128];
        snprintf(expected, sizeof expected, "{\"event\":\"x\",\"t\":\"%s\"}\n", text_and_clean[i][1]);
        assert_memory_equal(at, expected, strlen(expected));
    }
    free(text);
}

static void test_errors(void **state) {
    (void)state;
    ASSERT_DIES(log_open(scratch_path("nowhere/log")), "nowhere/log cannot be written", "No such file",
                "--log");
    logfile *log = log_open(scratch_path("log"));
    ASSERT_DIES(log_int(log, "loss", 1), "loss outside log_begin and log_end");
    ASSERT_DIES(log_end(log), "outside");
    log_begin(log, "x");
    ASSERT_DIES(log_begin(log, "y"), "y begins within another line");
    log_close(log); // an open line is given up
    if (access("/dev/full", W_OK) != 0) return;
    log = log_open("/dev/full");
    log_begin(log, "x");
    ASSERT_DIES(log_end(log), "/dev/full cannot be written", "No space left");
    log_close(log);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lines),      cmocka_unit_test(test_null_log), cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_not_finite), cmocka_unit_test(test_utf8),     cmocka_unit_test(test_errors),
    };
    return cmocka_run_group_tests(tests, scratch_make, scratch_remove);
}
