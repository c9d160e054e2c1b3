// ranks: 1
#define _GNU_SOURCE
#include "tests/death.h"
#include "tests/data/scratch.h"
#include "data/run/accounts.h"
#include "commfuse/device.h"
#include <cjson/cJSON.h>
#include <math.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>

static const double close_ms = 1e-3; // what a number may lose in the file

static void write_accounts(const char *text) {
    scratch_write("accounts.json", text, strlen(text));
}

static char *stored(void) {
    size_t size;
    return scratch_read(scratch_path("accounts.json"), &size);
}

static void assert_close(double value, double expected, double tolerance) {
    if (!(fabs(value - expected) <= tolerance)) fail_msg("%.9g is not %.9g", value, expected);
}

static double unix_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static time_t put_back_s; // how far the calendar's clock has been put back

int clock_gettime(clockid_t clock, struct timespec *t) {
    if (syscall(SYS_clock_gettime, clock, t) != 0) return -1;
    if (clock == CLOCK_REALTIME) t->tv_sec -= put_back_s;
    return 0;
}

static int clean(void **state) {
    (void)state;
    unlink(scratch_path("accounts.json"));
    return 0;
}

static void a_start_without_a_directory_keeps_its_own(void **state) {
    (void)state;
    accounts a;
    accounts_open(&a, "");
    assert_int_equal(a.starts, 1);
    assert_true(accounts_goodput(&a) == 0); // nothing was spent on anything
    a.ms[TIME_START] += 250;
    accounts_step(&a, 0, 750);
    assert_close(accounts_goodput(&a), 0.75, 1e-12);
    accounts_store(&a, true);
    assert_int_equal(scratch_entries(), 0);
}

static void starts_add_up(void **state) {
    (void)state;
    accounts a, b;
    accounts_open(&a, scratch);
    for (int i = 0; i < TIMES; i++) a.ms[(time_purpose)i] += 100 * (i + 1);
    for (int64_t step = 0; step < 7; step++) accounts_step(&a, step, 10);
    accounts_store(&a, true);
    assert_int_equal(scratch_entries(), 1); // nothing beside it
    accounts_open(&b, scratch);
    assert_int_equal(b.starts, 2);
    assert_int_equal(b.steps, 7);
    for (int i = 0; i < TIMES; i++) assert_close(b.ms[i], a.ms[i], close_ms); // down too: the end was told
}

static void steps_taken_again_are_no_gain(void **state) {
    (void)state;
    accounts a;
    accounts_open(&a, scratch);
    for (int64_t step = 0; step < 5; step++) accounts_step(&a, step, 10);
    accounts_store(&a, true);
    accounts_open(&a, scratch); // goes on from step 3
    for (int64_t step = 3; step < 8; step++) accounts_step(&a, step, 10);
    assert_close(a.ms[TIME_TRAIN], 80, close_ms);
    assert_close(a.ms[TIME_REDO], 20, close_ms);
    assert_int_equal(a.steps, 8);
    assert_close(accounts_goodput(&a), 0.8, 1e-6);
}

static void a_start_that_was_killed_was_down_since(void **state) {
    (void)state;
    char text[256];
    accounts a;
    snprintf(text, sizeof text, "{\"starts\": 3, \"steps\": 9, \"down\": 5, \"written_unix_s\": %.6f, \"ended\": false}",
             unix_s() - 1e5);
    write_accounts(text);
    accounts_open(&a, scratch);
    assert_int_equal(a.starts, 4);
    assert_close(a.ms[TIME_DOWN], 100005e3, 1000e3);
    accounts_open(&a, scratch);
    accounts_store(&a, false);
    accounts b;
    accounts_open(&b, scratch); // at once: the same, and no more
    assert_close(b.ms[TIME_DOWN], a.ms[TIME_DOWN], 1000e3);
    snprintf(text, sizeof text, "{\"down\": 5, \"written_unix_s\": %.6f, \"ended\": false}", unix_s() + 1000);
    write_accounts(text);
    accounts_open(&a, scratch); // a clock that was put back takes nothing away
    assert_close(a.ms[TIME_DOWN], 5e3, close_ms);
}

static void is_stored_a_few_times_a_second_and_at_the_end(void **state) {
    (void)state;
    accounts a, b;
    accounts_open(&a, scratch);
    double begin = cf_now_ms();
    int64_t writes = 0, steps = 0;
    char *before = NULL;
    while (writes < 4) {
        accounts_step(&a, steps++, 1);
        accounts_store(&a, false);
        char *now = stored();
        assert_non_null(now);
        writes += !before || strcmp(before, now) != 0;
        free(before);
        before = now;
        usleep(1000);
    }
    free(before);
    double took = cf_now_ms() - begin; // three pauses; longer where others use the machine
    if (took < 450) fail_msg("stored %lld times in %g ms", (long long)writes, took);
    accounts_step(&a, steps++, 1);
    accounts_store(&a, true);
    accounts_open(&b, scratch);
    assert_int_equal(b.steps, steps);
}

static void a_clock_that_is_put_back_does_not_hold_them_up(void **state) {
    (void)state;
    accounts a, b;
    accounts_open(&a, scratch);
    accounts_store(&a, false);
    put_back_s = 3600;
    usleep(300000);
    accounts_step(&a, 0, 5);
    accounts_store(&a, false);
    accounts_open(&b, scratch);
    put_back_s = 0;
    assert_int_equal(b.steps, 1);
}

// A link that waits where the file beside comes to be is not followed, and a pipe is not waited for.
static void links_and_pipes(void **state) {
    (void)state;
    accounts a;
    char *victim = scratch_write("victim", "dear", 4);
    assert_int_equal(symlink(victim, scratch_path("accounts.json.tmp.0123456789abcdef")), 0);
    accounts_open(&a, scratch);
    accounts_store(&a, true);
    char *text = stored();
    assert_non_null(strstr(text, "\"ended\":\ttrue"));
    free(text);
    size_t size;
    victim = scratch_read(scratch_path("victim"), &size);
    assert_string_equal(victim, "dear");
    free(victim);
    unlink(scratch_path("victim"));
    unlink(scratch_path("accounts.json"));
    assert_int_equal(mkfifo(scratch_path("accounts.json"), 0600), 0);
    accounts_open(&a, scratch);
    assert_int_equal(a.starts, 1);
    assert_int_equal(scratch_entries(), 1);
}

static void what_cannot_be_read_is_begun_anew(void **state) {
    (void)state;
    static const char *const texts[] = {
        "",
        "\n",
        "{",
        "nonsense",
        "[]",
        "null",
        "7",
        "\"text\"",
        "{\"starts\": 3, \"train\"",
        "{\"train\": \"much\", \"starts\": [], \"steps\": {}, \"written_unix_s\": null, \"ended\": 3}",
        "{\"train\": -4, \"starts\": -1, \"steps\": -1, \"written_unix_s\": -1}",
        "{\"train\": 1e999, \"starts\": 1e999, \"steps\": -1e999, \"written_unix_s\": 1e999}",
        "{\"train\": 1e300, \"starts\": 1e300, \"steps\": 1e300, \"written_unix_s\": 1e300}",
    };
    accounts a;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        write_accounts(texts[i]);
        accounts_open(&a, scratch);
        if (a.starts != 1 || a.steps != 0 || a.ms[TIME_TRAIN] != 0 || !isfinite(accounts_goodput(&a)))
            fail_msg("%s: %lld starts, %lld steps, %g ms", texts[i], (long long)a.starts, (long long)a.steps, a.ms[TIME_TRAIN]);
    }
    enum { LONG = 1 << 16 };
    char *large = malloc(LONG + 1);
    memset(large, '[', LONG);
    large[LONG] = 0;
    write_accounts(large);
    free(large);
    accounts_open(&a, scratch);
    assert_int_equal(a.starts, 1);
    accounts_step(&a, 0, 5);
    accounts_store(&a, true);
    accounts_open(&a, scratch);
    assert_int_equal(a.starts, 2);
    assert_close(a.ms[TIME_TRAIN], 5, close_ms);
}

// The years since 1970 are not how long a run was down that has not written when it was there last.
static void an_unknown_time_is_no_time_down(void **state) {
    (void)state;
    accounts a;
    static const char *const texts[] = {"{\"train\": 1}", "{}", "{\"written_unix_s\": \"noon\", \"ended\": false}"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        write_accounts(texts[i]);
        accounts_open(&a, scratch);
        if (a.ms[TIME_DOWN] != 0) fail_msg("%s: down for %g s", texts[i], a.ms[TIME_DOWN] * 1e-3);
    }
}

static void what_cannot_be_written_is_left_out(void **state) {
    (void)state;
    accounts a;
    accounts_open(&a, scratch_path("nowhere"));
    accounts_step(&a, 0, 5);
    accounts_store(&a, true);
    assert_int_equal(scratch_entries(), 0);
    assert_int_equal(mkdir(scratch_path("accounts.json"), 0777), 0); // cannot be replaced by a file
    accounts_open(&a, scratch);
    assert_int_equal(a.starts, 1);
    accounts_store(&a, true);
    assert_int_equal(scratch_entries(), 1); // the file beside is gone again
    rmdir(scratch_path("accounts.json"));
}

static void is_printed_and_logged(void **state) {
    (void)state;
    static const char *const names[] = {"start_s", "train_s", "redo_s", "save_s", "watch_s", "down_s"};
    accounts a;
    char text[512] = "";
    accounts_open(&a, "");
    for (int i = 0; i < TIMES; i++) a.ms[(time_purpose)i] += 1000 * (i + 1);
    logfile *log = log_open(scratch_path("log"), NULL);
    log_begin(log, "end");
    accounts_log(&a, log);
    log_end(log);
    log_close(log);
    size_t size;
    char *line = scratch_read(scratch_path("log"), &size);
    cJSON *object = cJSON_Parse(line);
    for (int i = 0; i < TIMES; i++) assert_close(cJSON_GetObjectItem(object, names[i])->valuedouble, i + 1, 1e-9);
    assert_close(cJSON_GetObjectItem(object, "goodput")->valuedouble, 2.0 / 21, 1e-12);
    assert_close(cJSON_GetObjectItem(object, "starts")->valuedouble, 1, 0);
    cJSON_Delete(object);
    free(line);
    FILE *file = fopen(scratch_path("log"), "w+");
    accounts_print(&a, file);
    rewind(file);
    assert_non_null(fgets(text, sizeof text, file));
    fclose(file);
    assert_string_equal(text, "goodput   9.5 % of 21.0 s: start 1.0 s, train 2.0 s, redo 3.0 s, save 4.0 s, "
                              "watch 5.0 s, down 6.0 s; 1 start\n");
    unlink(scratch_path("log"));
}

#define ACCOUNTS_TEST(function) cmocka_unit_test_setup_teardown(function, NULL, clean)

int main(void) {
    const struct CMUnitTest tests[] = {
        ACCOUNTS_TEST(a_start_without_a_directory_keeps_its_own),
        ACCOUNTS_TEST(starts_add_up),
        ACCOUNTS_TEST(steps_taken_again_are_no_gain),
        ACCOUNTS_TEST(a_start_that_was_killed_was_down_since),
        ACCOUNTS_TEST(is_stored_a_few_times_a_second_and_at_the_end),
        ACCOUNTS_TEST(a_clock_that_is_put_back_does_not_hold_them_up),
        ACCOUNTS_TEST(links_and_pipes),
        ACCOUNTS_TEST(what_cannot_be_read_is_begun_anew),
        ACCOUNTS_TEST(an_unknown_time_is_no_time_down),
        ACCOUNTS_TEST(what_cannot_be_written_is_left_out),
        ACCOUNTS_TEST(is_printed_and_logged),
    };
    return cmocka_run_group_tests(tests, scratch_make, scratch_remove);
}
