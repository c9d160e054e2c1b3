// ranks: 1
//
// The overlap audit: what bounds an operation, by what transfers cost and how much of them waited. A step's line in the log: which
// of the ranks computes longest. Its line on the terminal: the time that is left.
#include "tests/death.h"
#include "tests/data/scratch.h"
#include "data/run/report.h"
#include <fcntl.h>

enum { BYTES = 1000000, TRANSFERS = 4 };

static void copy(cf_transport *t, const void *mine, void *all, int64_t bytes) {
    (void)t;
    memcpy(all, mine, (size_t)bytes);
}

static cf_event at(double ms) {
    return (cf_event){.ms = ms};
}

// An operation that travels for 4 ms a step, two steps, and waits so long.
static void assert_bound(const char *words, cf_costs costs, double waits_ms, const char *bound, const char *option) {
    char *argv[16] = {(char *)"train_gpt"}, line[256], *path = scratch_path("log"), expected[256];
    int argc = 1;
    snprintf(line, sizeof line, "%s", words);
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) argv[argc++] = word;
    options o;
    options_parse(&o, argc, argv);
    cf_transport transport = {.size = 1, .costs = costs, .gather = copy};
    cf_trace *trace = cf_trace_create();
    unlink(path);
    logfile *log = log_open(path, NULL, 0);
    for (int step = 0; step < 2; step++) {
        const double now = cf_now_ms();
        cf_trace_step(trace, step, NULL);
        for (int i = 0; i < TRANSFERS; i++)
            cf_trace_transfer(trace, "all-gather x", 0, i, 1, BYTES / TRANSFERS, at(now), at(now + i), at(now + i + 1));
        cf_trace_wait(trace, "all-gather x", 0, at(now), at(now + waits_ms));
        cf_trace_step(trace, step + 1, NULL);
        cf_trace_last(trace);
        cf_trace_add_totals(trace);
    }
    audit(trace, &transport, &o, log);
    log_close(log);
    cf_trace_free(trace);
    size_t size;
    char *text = scratch_read(path, &size);
    snprintf(expected, sizeof expected, "\"transfers\":4,\"bytes\":1000000,\"bound\":\"%s\",\"try\":\"%s\"}", bound, option);
    if (!strstr(text, expected)) fail_msg("%s: '%s' has no '%s'", words, text, expected);
    assert_non_null(strstr(text, "{\"event\":\"audit\",\"operation\":\"all-gather x\","));
    free(text);
}

TEST(test_bounds) {
    const cf_costs wire = {.latency_s = 1e-6, .bytes_per_s = 1e9, .spare = true},
                   slow = {.latency_s = 1e-3, .bytes_per_s = 1e9, .spare = true}, crowded = {.latency_s = 1e-6, .bytes_per_s = 1e9};
    assert_bound("", wire, 0.1, "nothing", "");
    assert_bound("", wire, 2, "bandwidth", "--micro-batch 8");
    assert_bound("--micro-batch 3", wire, 5, "bandwidth", "--micro-batch 6");
    assert_bound("--dp 2 --micro-batch 4 --batch 8", wire, 2, "bandwidth", "--micro-batch 8 --batch 16"); // which divides
    assert_bound("--dp 2 --micro-batch 4 --batch 16", wire, 2, "bandwidth", "--micro-batch 8");
    assert_bound("", slow, 2, "latency", "--micro-batch 8");
    assert_bound("--overlap commfuse:8", slow, 2, "latency", "--overlap ring:4");
    assert_bound("--overlap once", slow, 2, "latency", "--micro-batch 8");
    assert_bound("--overlap slice:4", wire, 2, "chunking", "--overlap auto");
    assert_bound("--overlap none", wire, 2, "blocking", "--overlap auto");
    assert_bound("--threads 4", crowded, 2, "no core to spare", "--threads 3");
    assert_bound("--threads 1", crowded, 2, "no core to spare", "fewer ranks on a host");
}

// Ranks compute for step minus exposed time: 60, 30, 100, 90 and 80 ms. The slowest does so for 20 ms longer than the median.
TEST(test_slowest_rank) {
    static const double ms[] = {100, 100, 101, 100, 100}, exposed[] = {40, 70, 1, 10, 20}, comm[] = {50, 80, 90, 20, 30};
    char *argv[] = {(char *)"train_gpt"}, *path = scratch_path("log");
    options o;
    options_parse(&o, 1, argv);
    const cf_mesh mesh = {.world_group = {.size = 5}};
    run_report r = {.opt = &o, .mesh = &mesh, .last = {.step = 7, .ms = 100, .loss = 1}};
    double all[5 * FIGURES] = {0};
    for (int rank = 0; rank < 5; rank++) {
        double *of = &all[rank * FIGURES];
        of[FIGURE_STEP] = 7, of[FIGURE_MS] = ms[rank], of[FIGURE_EXPOSED] = exposed[rank], of[FIGURE_COMM] = comm[rank];
    }
    unlink(path);
    r.log = log_open(path, NULL, 0);
    report_step(&r, all, FIGURES);
    log_close(r.log);
    size_t size;
    char *text = scratch_read(path, &size);
    const char *expected = "\"comm_ms\":90,\"exposed_comm_ms\":70,\"exposed_mean_ms\":28.2,\"slowest_rank\":2,\"lag_ms\":20}";
    if (!strstr(text, expected)) fail_msg("'%s' has no '%s'", text, expected);
    free(text);
}

// Of a run that has resumed at step 20 of 40 and has reported six steps before this one.
static void assert_left(double step_ms, const char *expected) {
    char *argv[] = {(char *)"train_gpt", (char *)"--sample-every", (char *)"9"}, *path = scratch_path("shown");
    options o;
    options_parse(&o, 3, argv);
    const cf_mesh mesh = {.world_group = {.size = 1}};
    run_report r = {.opt = &o, .mesh = &mesh, .first = 20, .stepped_ms = 6 * step_ms, .last = {.step = 26, .ms = step_ms}};
    r.paused_ms[SAMPLE] = 2 * 30e3, r.pauses[SAMPLE] = 2;
    const double all[FIGURES] = {[FIGURE_STEP] = 26};
    fflush(stdout);
    const int kept = dup(STDOUT_FILENO), file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    dup2(file, STDOUT_FILENO);
    report_step(&r, all, FIGURES);
    dup2(kept, STDOUT_FILENO);
    close(file), close(kept);
    size_t size;
    char *text = scratch_read(path, &size);
    if (!strstr(text, expected)) fail_msg("'%s' has no '%s'", text, expected);
    free(text);
}

// 13 steps, and samples of 30 s before steps 27, 36 and 40.
TEST(test_time_left) {
    assert_left(10e3, "  ETA 3:40  ");
    assert_left(1000e3, "  ETA 3:38:10  ");
    assert_left(0, "  ETA 1:30  ");
}

int main(void) {
    return cmocka_run_group_tests(all_tests, scratch_make, scratch_remove);
}
