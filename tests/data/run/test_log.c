// ranks: 1
#define _GNU_SOURCE
#include "tests/death.h"
#include "tests/data/scratch.h"
#include "commfuse/base/streams.h"
#include "data/run/log.h"
#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <math.h>

#define RUN "00000000deadbeef"

// The whole log so far, which is complete after each log_end; the caller frees it.
static char *written(void) {
    size_t size;
    char *text = scratch_read(scratch_path("log"), &size);
    assert_non_null(text);
    assert_int_equal(strlen(text), size);
    return text;
}

static int no_log(void **state) {
    (void)state;
    static const char *const names[] = {"log", "log.1", "log.2", "log.3"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) unlink(scratch_path(names[i]));
    return 0;
}

static void write_log(const char *text) {
    scratch_write("log", text, strlen(text));
}

static void assert_holds(const char *name, const char *expected) {
    size_t size;
    char *text = scratch_read(scratch_path(name), &size);
    assert_non_null(text);
    assert_string_equal(text, expected);
    free(text);
}

#define LOG_TEST(name) TEST_BETWEEN(no_log, name, NULL)

LOG_TEST(test_lines) {
    logfile *log = log_open(scratch_path("log"), NULL, 0);
    const char *const absent = NULL;
    LOG_LINE(log, "step", FIELD("step", 7), FIELD("loss", 3.25), FIELD("note", "a \"quoted\" \\ line\nand\ttab\x01"),
             FIELD(absent, 5));
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
}

// A log that is there stays, under another name.
LOG_TEST(test_an_earlier_log) {
    write_log("first\n");
    log_close(log_open(scratch_path("log"), NULL, 0));
    assert_holds("log", "");
    assert_holds("log.1", "first\n");
    log_close(log_open(scratch_path("log"), NULL, 0)); // an empty one is taken
    write_log("second\n");
    logfile *log = log_open(scratch_path("log"), NULL, 0);
    assert_true(log_empty(log));
    assert_holds("log.1", "first\n");
    assert_holds("log.2", "second\n");
    LOG_LINE(log, "third", FIELD("step", 1));
    logfile *next = log_open(scratch_path("log"), NULL, 0); // of another run, while this one still writes
    LOG_LINE(log, "third", FIELD("step", 1));
    LOG_LINE(next, "fourth", FIELD("step", 2));
    log_close(log);
    log_close(next);
    assert_holds("log.3", "{\"event\":\"third\",\"step\":1}\n{\"event\":\"third\",\"step\":1}\n");
    assert_holds("log", "{\"event\":\"fourth\",\"step\":2}\n");
    assert_int_equal(scratch_entries(), 4);
}

// Of a line that cannot be written nothing is left, and the next one is tried again.
LOG_TEST(test_no_room) {
    struct rlimit before, tight = {40, RLIM_INFINITY};
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    signal(SIGXFSZ, SIG_IGN);
    tight.rlim_max = before.rlim_max;
    logfile *log = log_open(scratch_path("log"), NULL, 0);
    for (int line = 0; line < 4; line++) {
        setrlimit(RLIMIT_FSIZE, line == 1 || line == 2 ? &tight : &before);
        LOG_LINE(log, "some line", FIELD("number", line));
    }
    setrlimit(RLIMIT_FSIZE, &before);
    assert_false(log_complete(log));
    log_close(log);
    assert_holds("log", "{\"event\":\"some line\",\"number\":0}\n"
                        "{\"event\":\"some line\",\"number\":3}\n");
    if (access("/dev/full", W_OK) != 0) return;
    log = log_open("/dev/full", NULL, 0);
    log_begin(log, "x");
    log_end(log);
    assert_false(log_complete(log));
    log_close(log);
}

// A pipe without a reader is refused, one whose reader has stopped holds up nothing for long; what a terminal obeys is left out.
LOG_TEST(test_pipes) {
    enum { LINES = 2000 }; // more than a pipe holds
    char *path = scratch_path("log"), text[4096] = "";
    assert_int_equal(mkfifo(path, 0600), 0);
    ASSERT_DIES(log_open(path, NULL, 0), "cannot be written", "nobody reads this pipe");
    const int reader = open(path, O_RDONLY | O_NONBLOCK);
    logfile *log = log_open(path, NULL, 0);
    LOG_LINE(log, "config",
             FIELD("out", "a\x1b\x7f\xc2\x9b"
                          "2J"));
    assert_true(read(reader, text, sizeof text - 1) > 0);
    assert_string_equal(text, "{\"event\":\"config\",\"out\":\"a\\u001b???2J\"}\n");
    alarm(30);
    for (int line = 0; line < LINES; line++) LOG_LINE(log, "step", FIELD("text", "some forty bytes, so that pipes are soon full"));
    alarm(0);
    assert_false(log_complete(log));
    log_close(log);
    close(reader);
}

// A pipe that has the standard output, too: each line is whole, although a thread writes that piece by piece.
LOG_TEST(test_a_pipe_that_is_shared) {
    enum { LINES = 20, LONG = 60000 };
    int ends[2], status, lines[2] = {0, 0};
    assert_int_equal(pipe(ends), 0);
    const pid_t child = fork();
    if (child == 0) {
        if (dup2(ends[1], STDOUT_FILENO) < 0) _exit(1);
        close(ends[0]), close(ends[1]);
        cf_streams_open();
        logfile *log = log_open("/dev/stdout", NULL, 0);
        for (int line = 0; line < LINES; line++) {
            cf_print(stdout, "%0*d\n", LONG, line);
            LOG_LINE(log, "step", FIELD("step", line));
        }
        exit(0); // writes what waits
    }
    close(ends[1]);
    FILE *from = fdopen(ends[0], "r");
    char *text = NULL;
    size_t room = 0;
    for (ssize_t length; (length = getline(&text, &room, from)) > 0; lines[*text == '{']++)
        assert_int_equal(*text == '{' ? (ssize_t)strcspn(text, "}") + 2 : LONG + 1, length);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_true(lines[0] == LINES && lines[1] == LINES);
    free(text);
    fclose(from);
}

TEST(test_null_log) {
    assert_null(log_open(NULL, NULL, 0));
    assert_null(log_open("", NULL, 0));
    log_begin(NULL, "step");
    LOG_ADD(NULL, FIELD("a", 1), FIELD("a", "b"));
    log_end(NULL);
    log_close(NULL);
}

// Every number comes back bit for bit.
LOG_TEST(test_numbers) {
    const double reals[] = {0.1,    1.0 / 3,         3e-4,    1e300,           -2.5e-300, DBL_MIN,
                            5e-324, 1 + DBL_EPSILON, DBL_MAX, 123456789.0 / 7, 0.1 + 0.2, -0.0};
    const int64_t ints[] = {0, -1, 123456789012345, -999999999999999, INT64_C(9007199254740991)};
    logfile *log = log_open(scratch_path("log"), NULL, 0);
    for (size_t i = 0; i < sizeof reals / sizeof *reals; i++) {
        LOG_LINE(log, "x", FIELD("v", reals[i]));
    }
    for (size_t i = 0; i < sizeof ints / sizeof *ints; i++) {
        LOG_LINE(log, "x", FIELD("v", ints[i]));
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

LOG_TEST(test_not_finite) {
    logfile *log = log_open(scratch_path("log"), NULL, 0);
    LOG_LINE(log, "x", FIELD("a", NAN), FIELD("b", INFINITY), FIELD("c", -INFINITY));
    log_close(log);
    char *text = written();
    assert_string_equal(text, "{\"event\":\"x\",\"a\":null,\"b\":null,\"c\":null}\n");
    free(text);
}

LOG_TEST(test_utf8) {
#define BAD "?"
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
    logfile *log = log_open(scratch_path("log"), NULL, 0);
    for (size_t i = 0; i < sizeof text_and_clean / sizeof *text_and_clean; i++) {
        LOG_LINE(log, "x", FIELD("t", text_and_clean[i][0]));
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

LOG_TEST(test_errors) {
    ASSERT_DIES(log_open(scratch_path("nowhere/log"), NULL, 0), "nowhere/log cannot be written", "No such file", "--log");
    logfile *log = log_open(scratch_path("log"), NULL, 0);
    log_begin(log, "x");
    log_close(log); // an open line is given up
    assert_true(log_complete(NULL));
}

// --- going on ---

// What is left of a log when the run goes on, and one line more.
static void assert_continues(const char *before, int64_t step, const char *kept) {
    write_log(before);
    logfile *log = log_open(scratch_path("log"), RUN, step);
    assert_int_equal(log_empty(log), !*kept);
    char *text = written();
    assert_string_equal(text, kept);
    free(text);
    log_begin(log, "resume");
    log_end(log);
    assert_false(log_empty(log));
    log_close(log);
    text = written();
    assert_memory_equal(text, kept, strlen(kept));
    assert_string_equal(text + strlen(kept), "{\"event\":\"resume\"}\n");
    free(text);
    assert_int_equal(scratch_entries(), 1); // nothing beside it
    unlink(scratch_path("log"));
}

#define CONFIG    "{\"event\":\"config\",\"run\":\"" RUN "\",\"version\":\"x\"}\n"
#define STEP(n)   "{\"event\":\"step\",\"step\":" #n ",\"loss\":0.1}\n"
#define VAL(n)    "{\"event\":\"val\",\"step\":" #n ",\"loss\":0.2}\n"
#define TEXT(n)   "{\"event\":\"sample\",\"step\":" #n ",\"text\":\"\\n\"}\n"
#define SAVE(n)   "{\"event\":\"save\",\"step\":" #n ",\"bytes\":1}\n"
#define RESUME(n) "{\"event\":\"resume\",\"step\":" #n ",\"host\":\"h\"}\n"
#define AUDIT     "{\"event\":\"audit\",\"operation\":\"all-gather\"}\n"
#define END       "{\"event\":\"end\",\"steps\":3}\n"

LOG_TEST(test_continue) {
    assert_continues(CONFIG STEP(0) STEP(1) STEP(2) AUDIT END, 3, CONFIG STEP(0) STEP(1) STEP(2));
    assert_continues(CONFIG STEP(0) STEP(1) STEP(2), 1, CONFIG STEP(0));
    assert_continues(CONFIG STEP(0) STEP(1), 7, CONFIG STEP(0) STEP(1));
    // Validation and samples belong before the step that they are numbered with, and are done again.
    assert_continues(CONFIG STEP(0) VAL(1) TEXT(1) SAVE(1) STEP(1) VAL(2) SAVE(2) STEP(2), 1, CONFIG STEP(0) SAVE(1));
    assert_continues(CONFIG VAL(0) STEP(0) VAL(1) STEP(1), 2, CONFIG VAL(0) STEP(0) VAL(1) STEP(1));
    // A checkpoint is logged once it is written, some steps later.
    assert_continues(CONFIG STEP(0) STEP(1) SAVE(1) STEP(2) SAVE(2), 1, CONFIG STEP(0) SAVE(1));
    assert_continues(CONFIG STEP(0) RESUME(1) STEP(1) STEP(2) RESUME(2) STEP(2) END, 2, CONFIG STEP(0) RESUME(1) STEP(1) RESUME(2));
}

LOG_TEST(test_continue_damaged) {
    assert_continues("", 3, "");
    assert_continues(CONFIG STEP(0) "{\"event\":\"step\",\"step\":1,\"lo", 3, CONFIG STEP(0));
    assert_continues(CONFIG STEP(0) "{\"event\":\"step\",\"step\":1,\"loss\":2}", 3, CONFIG STEP(0));
    // What this program has not written is not its to remove.
    assert_continues("# a note\n" CONFIG "\n[]\n7\n{}\n{\"event\":7,\"step\":9}\n{\"event\":\"step\"}\n"
                     "{\"event\":\"step\",\"step\":\"9\"}\n" STEP(9),
                     3,
                     "# a note\n" CONFIG "\n[]\n7\n{}\n{\"event\":7,\"step\":9}\n{\"event\":\"step\"}\n"
                     "{\"event\":\"step\",\"step\":\"9\"}\n");
}

// Of a log that is another run's, or may be, nothing is lost.
LOG_TEST(test_continue_anothers) {
    static const char *const logs[] = {
        "{\"event\":\"config\",\"run\":\"0000000000000001\"}\n" STEP(0) STEP(1) STEP(2) END CONFIG,
        "{\"event\":\"config\",\"version\":\"before runs had names\"}\n" STEP(0) STEP(1) STEP(2) RESUME(1),
        "{\"event\":\"config\",\"run\":7}\n" STEP(2),
        STEP(0) STEP(1),
        "{\"event\":\"con", // cut short: not even a first line
        "dear diary",
    };
    for (size_t i = 0; i < sizeof logs / sizeof *logs; i++) {
        write_log(logs[i]);
        logfile *log = log_open(scratch_path("log"), RUN, 1);
        assert_true(log_empty(log));
        log_begin(log, "config");
        log_end(log);
        log_close(log);
        assert_holds("log", "{\"event\":\"config\"}\n");
        assert_holds("log.1", logs[i]);
        assert_int_equal(scratch_entries(), 2);
        unlink(scratch_path("log.1"));
    }
}

// A link that lies where the file beside the log comes to be is not followed.
LOG_TEST(test_what_others_can_do) {
    scratch_write("victim", "dear", 4);
    write_log(CONFIG STEP(0) STEP(1));
    assert_int_equal(symlink(scratch_path("victim"), scratch_path("log.tmp.0123456789abcdef")), 0);
    log_close(log_open(scratch_path("log"), RUN, 1));
    assert_holds("log", CONFIG STEP(0));
    assert_holds("victim", "dear");
    assert_int_equal(scratch_entries(), 2);
    unlink(scratch_path("victim"));
}

static bool no_sync;

int fsync(int fd) {
    if (!no_sync) return (int)syscall(SYS_fsync, fd);
    errno = EIO;
    return -1;
}

LOG_TEST(test_sync_that_fails) {
    logfile *log = log_open(scratch_path("log"), NULL, 0);
    log_sync(log);
    assert_true(log_complete(log));
    no_sync = true;
    log_sync(log);
    no_sync = false;
    log_sync(log); // what the disk has lost it does not give back
    assert_false(log_complete(log));
    log_close(log);
    log_sync(NULL);
    log = log_open("/dev/null", NULL, 0); // is not synced
    no_sync = true;
    log_sync(log);
    no_sync = false;
    assert_true(log_complete(log));
    log_close(log);
}

// Whoever has the old file open, or is killed while the new one is written, has all of it.
LOG_TEST(test_continue_replaces_as_a_whole) {
    size_t size;
    write_log(CONFIG STEP(0) STEP(1) END);
    assert_int_equal(link(scratch_path("log"), scratch_path("old")), 0);
    scratch_write("log.tmp.0123456789abcdef", "left behind", 11);
    log_close(log_open(scratch_path("log"), RUN, 1));
    char *text = scratch_read(scratch_path("old"), &size);
    assert_string_equal(text, CONFIG STEP(0) STEP(1) END);
    free(text);
    text = written();
    assert_string_equal(text, CONFIG STEP(0));
    free(text);
    assert_int_equal(scratch_entries(), 2);
    unlink(scratch_path("old"));
    unlink(scratch_path("log"));
}

LOG_TEST(test_continue_nothing) {
    assert_null(log_open(NULL, RUN, 3));
    assert_null(log_open("", RUN, 3));
    assert_true(log_empty(NULL));
    logfile *log = log_open(scratch_path("log"), RUN, 3); // there is none yet
    assert_true(log_empty(log));
    log_begin(log, "config");
    log_end(log);
    log_close(log);
    char *text = written();
    assert_string_equal(text, "{\"event\":\"config\"}\n");
    free(text);
    log_close(log_open("/dev/null", RUN, 3)); // no file to be replaced
    ASSERT_DIES(log_open(scratch_path("nowhere/log"), RUN, 3), "nowhere/log cannot be written");
}

int main(void) {
    return cmocka_run_group_tests(all_tests, scratch_make, scratch_remove);
}
