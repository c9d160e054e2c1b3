// ranks: 1
//
// The trace: the two figures of a step, the events, and the file for chrome://tracing and Perfetto.
#include "tests/death.h"
#include <cjson/cJSON.h>
#include <errno.h>
#include <malloc.h>
#include <math.h>
#include <sys/resource.h>
#include "commfuse/device.h"
#include "commfuse/base/die.h"
#include "commfuse/trace.h"

static const double TOLERANCE_MS = 1e-6;
#define LONG_NAME "a name longer than the forty bytes that an event has for it"

static void assert_near(double a, double b) {
    if (fabs(a - b) > TOLERANCE_MS) fail_msg("%.9f is not %.9f", a, b);
}

typedef struct interval {
    double begin, end;
} interval;

static cf_event at(double ms) {
    return (cf_event){.ms = ms};
}

static void transfer(cf_trace *trace, const char *name, int slice, double begin, double end) {
    cf_trace_transfer(trace, name, slice % 12, slice, slice % 8, 3 * (int64_t)slice, at(begin), at(begin), at(end));
}

static double union_of(const interval *intervals, int count) {
    cf_trace *trace = cf_trace_create();
    double now = cf_now_ms();
    cf_trace_step(trace, 1, NULL);
    for (int i = 0; i < count; i++) transfer(trace, "send", i, now + intervals[i].begin, now + intervals[i].end);
    cf_trace_step(trace, 2, NULL);
    cf_trace_figures figures = cf_trace_last(trace), again = cf_trace_last(trace);
    assert_near(again.comm_ms, figures.comm_ms); // reading changes nothing
    assert_near(figures.exposed_ms, 0);
    cf_trace_free(trace);
    return figures.comm_ms;
}
#define UNION_OF(...) union_of((const interval[]){__VA_ARGS__}, (int)(sizeof((const interval[]){__VA_ARGS__}) / sizeof(interval)))

TEST(comm_is_a_union) {
    assert_near(UNION_OF({0, 10}), 10);
    assert_near(UNION_OF({0, 10}, {5, 15}), 15);
    assert_near(UNION_OF({0, 10}, {10, 12}), 12);
    assert_near(UNION_OF({0, 10}, {20, 25}), 15);
    assert_near(UNION_OF({0, 10}, {2, 3}, {4, 5}), 10);
    assert_near(UNION_OF({0, 10}, {0, 10}, {0, 10}), 10);
    assert_near(UNION_OF({3, 3}), 0);
}

// Transfers are noted after the wait for them, not in the order in which they began.
TEST(comm_is_a_union_in_any_order) {
    assert_near(UNION_OF({20, 25}, {0, 10}), 15);
    assert_near(UNION_OF({4, 5}, {2, 3}, {0, 10}), 10);
    assert_near(UNION_OF({20, 30}, {0, 10}, {5, 25}), 30);
    assert_near(UNION_OF({20, 30}, {0, 10}, {40, 50}, {9, 41}), 50);
    interval scattered[200];
    for (int i = 0; i < 200; i++) { // tenths that overlap their neighbours, shuffled: 0 … 20.5
        int k = i * 77 % 200;
        scattered[i] = (interval){k * 0.1, k * 0.1 + 0.6};
    }
    assert_near(union_of(scattered, 200), 20.5);
    for (int i = 0; i < 200; i++) scattered[i].end = scattered[i].begin + 0.05; // no longer
    assert_near(union_of(scattered, 200), 10);
}

TEST(exposed_is_a_sum_of_waits) {
    cf_trace *trace = cf_trace_create();
    double now = cf_now_ms();
    cf_trace_step(trace, 1, NULL);
    cf_trace_wait(trace, "wait", 0, at(now), at(now + 2));
    cf_trace_end(trace, (cf_trace_work){"gemm", 0, at(now + 2)}, 0, NULL);
    cf_trace_wait(trace, "wait", 0, at(now + 9), at(now + 9.5));
    cf_trace_step(trace, 2, NULL);
    assert_near(cf_trace_last(trace).exposed_ms, 2.5);
    assert_near(cf_trace_last(trace).comm_ms, 0); // neither waiting nor computing is communication
    cf_trace_free(trace);
}

// The second of two waits for one transfer finds it arrived; a GPU knows this only when both events have passed.
TEST(a_wait_that_ends_before_it_begins_takes_no_time) {
    cf_trace *trace = cf_trace_create();
    cf_stream *stream = cf_stream_create();
    cf_trace_record(trace, true);
    cf_trace_step(trace, 1, stream);
    cf_event first = cf_event_record(stream), last = first;
    while (cf_event_ms(last) - cf_event_ms(first) < 1) last = cf_event_record(stream);
    cf_trace_wait(trace, "waits", 3, first, last);
    cf_trace_wait(trace, "has nothing to wait for", 3, last, first);
    cf_trace_wait(trace, "has nothing to wait for", 3, last, last);
    cf_trace_step(trace, 2, stream);
    assert_near(cf_trace_last(trace).exposed_ms, cf_event_ms(last) - cf_event_ms(first));
    const cf_trace_event *events = cf_trace_events(trace)->event;
    assert_int_equal(cf_trace_events(trace)->count, 1);
    assert_string_equal(events[0].name, "waits");
    assert_int_equal(events[0].layer, 3);
    cf_stream_free(stream);
    cf_trace_free(trace);
}

// The figures of a step may be read during the next one, or not at all.
TEST(a_step_has_its_own_figures) {
    cf_trace *trace = cf_trace_create();
    cf_stream *stream = cf_stream_create();
    for (int step = 0; step < 50; step++) {
        double now = cf_now_ms();
        cf_trace_step(trace, 3 * step, stream);
        transfer(trace, "send", 0, now, now + 1 + step);
        cf_trace_wait(trace, "wait", 0, at(now), at(now + 0.5));
        if (step % 5 == 4) continue;
        assert_near(cf_trace_last(trace).comm_ms, step);
        assert_near(cf_trace_last(trace).exposed_ms, step > 0 ? 0.5 : 0);
    }
    cf_stream_free(stream);
    assert_int_equal(cf_trace_events(trace)->count, 0); // events are recorded only on demand
    cf_trace_free(trace);
}

static size_t allocated(void) {
    const struct mallinfo2 m = mallinfo2(); // nothing under a sanitizer
    return m.uordblks + m.hblkhd;
}

// Transfers that are not noted in the order in which they begin: all have their place in the figures, and take no memory.
TEST(runs_do_not_grow) {
    enum { TRANSFERS = 100000 };
    cf_trace *trace = cf_trace_create();
    cf_stream *stream = cf_stream_create();
    const size_t before = allocated();
    const double now = cf_now_ms();
    for (int step = -1; step < 4; step++) { // at first there is no step, as in a program that never begins one
        if (step >= 0) cf_trace_step(trace, step, stream);
        for (int i = 0; i < TRANSFERS; i++) {
            const double begin = now + (i ^ 1) * 2;
            transfer(trace, i % 4 < 2 ? "even" : "odd", i, begin, begin + (i % 8 < 4 ? 1 : 3)); // 3: over the next one
            cf_trace_wait(trace, "even", 0, at(begin), at(begin + 0.25));
        }
        assert_int_equal(allocated(), before);
        if (step % 2 == 0) continue; // nobody asks
        assert_near(cf_trace_last(trace).comm_ms, step < 0 ? 0 : 1.5 * TRANSFERS + 1);
        assert_near(cf_trace_last(trace).exposed_ms, step < 0 ? 0 : TRANSFERS / 4.0);
        if (step > 0) cf_trace_add_totals(trace);
    }
    assert_int_equal(allocated(), before);
    const cf_trace_sums *sums = cf_trace_totals(trace);
    assert_int_equal(sums->count, 2);
    assert_int_equal(sums->steps, 2);
    assert_int_equal(sums->total[0].transfers + sums->total[1].transfers, 2 * TRANSFERS);
    assert_near(sums->total[0].exposed_ms + sums->total[1].exposed_ms, TRANSFERS / 2.0);
    cf_stream_free(stream);
    cf_trace_free(trace);
}

TEST(events_are_kept_on_demand) {
    double before = cf_now_ms();
    cf_trace *trace = cf_trace_create();
    double now = cf_now_ms();
    cf_trace_step(trace, 1, NULL);
    transfer(trace, "unseen", 0, now, now + 1);
    cf_trace_record(trace, true);
    for (int i = 0; i < 5000; i++) {
        cf_trace_step(trace, 2 + i / 1000, NULL);
        if (i % 3 == 0)
            cf_trace_end(trace, (cf_trace_work){LONG_NAME, i % 12, at(now)}, i, NULL);
        else if (i % 3 == 1)
            cf_trace_wait(trace, LONG_NAME, i % 12, at(now + i), at(now + i + 0.25));
        else
            transfer(trace, LONG_NAME, i, now + i, now + i + 0.25);
    }
    cf_trace_record(trace, false);
    transfer(trace, "unseen", 0, now, now + 1);
    const cf_trace_event *events = cf_trace_events(trace)->event;
    assert_int_equal(cf_trace_events(trace)->count, 5000);
    for (int i = 0; i < 5000; i++) {
        assert_int_equal(events[i].row, i % 3 == 0 ? CF_TRACE_COMPUTE : i % 3 == 1 ? CF_TRACE_WAIT : CF_TRACE_COMM);
        assert_memory_equal(events[i].name, "a name longer than the forty bytes", 34);
        assert_true(memchr(events[i].name, 0, sizeof events[i].name) != NULL);
        assert_int_equal(events[i].layer, i % 12);
        assert_int_equal(events[i].slice, i % 3 == 1 ? -1 : i);
        assert_int_equal(events[i].peer, i % 3 == 2 ? i % 8 : -1);
        assert_int_equal(events[i].step, 2 + i / 1000);
        assert_int_equal(events[i].bytes, i % 3 == 2 ? 3 * i : 0);
        assert_near(events[i].begin_ms - events[0].begin_ms, i % 3 == 0 ? 0 : i);
        if (i % 3 != 0) assert_near(events[i].end_ms - events[i].begin_ms, 0.25);
        assert_true(events[i].end_ms >= events[i].begin_ms);
    }
    assert_true(events[0].begin_ms >= -TOLERANCE_MS); // since cf_trace_create
    assert_true(events[0].begin_ms <= now - before + TOLERANCE_MS);
    cf_trace_free(trace);
}

// ------------------------------------------------------------------------------------------- the file

static cJSON *trace_json(int ranks, const cf_trace_list *lists) {
    size_t size = 0;
    char *text = cf_trace_text(ranks, lists, &size);
    assert_int_equal(strlen(text), size);
    cJSON *json = cJSON_Parse(text);
    if (!json) fail_msg("not JSON, at: %.60s", cJSON_GetErrorPtr());
    free(text);
    return json;
}

// The n-th event with a duration ("ph": "X") of a process; metadata is left out.
static const cJSON *find_event(const cJSON *json, int rank, int n) {
    const cJSON *events = cJSON_IsArray(json) ? json : cJSON_GetObjectItem(json, "traceEvents"), *event;
    assert_true(cJSON_IsArray(events));
    cJSON_ArrayForEach(event, events) {
        const char *phase = cJSON_GetStringValue(cJSON_GetObjectItem(event, "ph"));
        assert_non_null(phase);
        const cJSON *process = cJSON_GetObjectItem(event, "pid");
        if (strcmp(phase, "X") == 0 && process && process->valueint == rank && n-- == 0) return event;
    }
    return NULL;
}

static double number(const cJSON *event, const char *name) {
    const cJSON *item = cJSON_GetObjectItem(event, name);
    assert_true(cJSON_IsNumber(item));
    return item->valuedouble;
}

static const char *const awkward[] = {"mlp.fc2",      "a \"quoted\" name", "back\\slash \\", "line\nbreak\ttab",
                                      "\x01\x1f\x7f", "Größe → λ",         "%s%n%d",         ""};
enum { AWKWARD = sizeof awkward / sizeof awkward[0], RANKS = 3 };

// Control characters in a name may become spaces; all other characters stay.
static bool same_name(const char *given, const char *written) {
    for (; *given; given++, written++) {
        bool control = (unsigned char)*given < ' ';
        if (*written != *given && !(control && *written == ' ')) return false;
    }
    return *written == 0;
}

TEST(file_is_a_chrome_trace) {
    cf_trace_event events[RANKS][AWKWARD] = {0};
    cf_trace_list lists[RANKS];
    for (int r = 0; r < RANKS; r++) {
        for (int i = 0; i < AWKWARD; i++) {
            cf_trace_event *e = &events[r][i];
            *e = (cf_trace_event){.row = i % 3,
                                  .layer = i - 1,
                                  .slice = i,
                                  .peer = r - 1,
                                  .step = 9,
                                  .bytes = (int64_t)5 << 32,
                                  .begin_ms = 1.5 * i + 1e6 * r,
                                  .end_ms = 1.5 * i + 1e6 * r + 0.75};
            snprintf(e->name, sizeof e->name, "%s", awkward[i]);
        }
        lists[r] = (cf_trace_list){events[r], r == 1 ? 0 : AWKWARD, AWKWARD}; // a rank may have no events
    }
    cJSON *json = trace_json(RANKS, lists);
    for (int r = 0; r < RANKS; r++) {
        for (int i = 0; i < lists[r].count; i++) {
            const cJSON *event = find_event(json, r, i);
            assert_non_null(event);
            const char *name = cJSON_GetStringValue(cJSON_GetObjectItem(event, "name"));
            assert_non_null(name);
            if (!same_name(awkward[i], name)) fail_msg("'%s' became '%s'", awkward[i], name);
            assert_true(fabs(number(event, "ts") - 1e3 * events[r][i].begin_ms) < 0.01); // microseconds
            assert_true(fabs(number(event, "dur") - 750) < 0.01);
            assert_int_equal((int)number(event, "tid"), (int)number(find_event(json, r, i % 3), "tid")); // its row
            const cJSON *about = cJSON_GetObjectItem(event, "args");
            assert_int_equal((int)number(about, "step"), 9);
            assert_true(number(about, "bytes") == 5.0 * 4294967296.0);
        }
        assert_null(find_event(json, r, (int)lists[r].count));
    }
    assert_true(number(find_event(json, 0, 0), "tid") != number(find_event(json, 0, 1), "tid"));
    assert_true(number(find_event(json, 0, 1), "tid") != number(find_event(json, 0, 2), "tid"));
    cJSON_Delete(json);
}

// Events of one row must not overlap, whatever their order. Each of these nine begins while two others run.
TEST(transfers_at_the_same_time_have_rows_of_their_own) {
    enum { EVENTS = 9 };
    cf_trace_event events[EVENTS] = {0};
    for (int i = 0; i < EVENTS; i++) {
        int k = i * 4 % EVENTS; // not in order
        events[i] = (cf_trace_event){.row = CF_TRACE_COMM, .layer = -1, .begin_ms = k, .end_ms = k + 2.5};
    }
    cJSON *json = trace_json(1, &(cf_trace_list){events, EVENTS, EVENTS});
    for (int i = 0; i < EVENTS; i++)
        for (int j = 0; j < i; j++) {
            const cJSON *a = find_event(json, 0, i), *b = find_event(json, 0, j);
            if (fabs(number(a, "ts") - number(b, "ts")) < 2500) assert_true(number(a, "tid") != number(b, "tid"));
            assert_true(number(a, "tid") < CF_TRACE_COMM + 3); // and three are enough
        }
    cJSON_Delete(json);
}

// All ranks are like this one, or the others have no events.
static int64_t most_bytes; // of all ranks in an exchange
static bool alone;
static void gather(cf_transport *t, const void *mine, void *all, int64_t bytes) {
    memset(all, 0, (size_t)(t->size * bytes));
    for (int rank = 0; rank < (alone && bytes > 8 ? 1 : t->size); rank++) memcpy((char *)all + rank * bytes, mine, (size_t)bytes);
    if (most_bytes < t->size * bytes) most_bytes = t->size * bytes;
}

// Records so many events, 100 a step, and gathers them.
static char *gathered(int ranks, int events, size_t *size) {
    cf_transport transport = {.size = ranks, .gather = gather};
    cf_trace *trace = cf_trace_create();
    const double now = cf_now_ms();
    cf_trace_record(trace, true);
    for (int i = 0; i < events; i++) {
        if (i % 100 == 0) cf_trace_step(trace, i / 100, NULL);
        transfer(trace, "send", i, now + (i ^ 1), now + (i ^ 1) + 0.5);
    }
    most_bytes = 0;
    char *text = cf_trace_gather(trace, &transport, size);
    cf_trace_free(trace);
    return text;
}

TEST(ranks_send_their_events_in_parts) {
    enum { EVENTS = 12001 };
    int count[RANKS] = {0};
    double last[RANKS] = {-INFINITY, -INFINITY, -INFINITY};
    size_t size = 0;
    char *text = gathered(RANKS, EVENTS, &size);
    cJSON *json = cJSON_Parse(text);
    assert_int_equal(strlen(text), size);
    assert_true(most_bytes < RANKS * EVENTS * (int64_t)sizeof(cf_trace_event) / 2);
    const cJSON *event;
    cJSON_ArrayForEach(event, cJSON_GetObjectItem(json, "traceEvents")) {
        if (strcmp(cJSON_GetStringValue(cJSON_GetObjectItem(event, "ph")), "X") != 0) continue;
        const int rank = (int)number(event, "pid");
        assert_true(number(event, "ts") > last[rank]);
        last[rank] = number(event, "ts"), count[rank]++;
    }
    for (int rank = 0; rank < RANKS; rank++) assert_int_equal(count[rank], EVENTS);
    cJSON_Delete(json);
    free(text);
}

static void say_what_is_kept(int ranks, int events, int64_t more_memory) {
    size_t size = 0;
    long pages = 0;
    int kept = 0;
    FILE *mine = fopen("/proc/self/statm", "r");
    if (mine && fscanf(mine, "%ld", &pages) == 1 && more_memory > 0) {
        const rlim_t most = (rlim_t)(pages * sysconf(_SC_PAGESIZE) + more_memory);
        setrlimit(RLIMIT_AS, &(struct rlimit){most, most});
    }
    alone = true;
    char *text = gathered(ranks, events, &size);
    // Not strstr(): a sanitizer's measures the whole text at each call.
    for (const char *at = text; at && *at; at++) kept += *at == '"' && strncmp(at, "\"ph\":\"X\"", 8) == 0;
    fprintf(stderr, "%s kept %d events", text ? "a trace" : "no trace", kept);
    _exit(1); // as ASSERT_DIES has it
}

// The first ones stay, and the run goes on.
TEST_FIRST(events_that_are_too_many_are_left_out) { // others leave memory to it
    ASSERT_DIES(say_what_is_kept(1, 131072, 0), "a trace kept 131072 events");
    ASSERT_DIES(say_what_is_kept(1, 200000, 0), "full: events from step 1310 on are not in it", "a trace kept 131072 events");
    ASSERT_DIES(say_what_is_kept(4096, 1500, 0), "full: events from step 10 on are not in it", "a trace kept 1024 events");
#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__ // which end the program themselves
    ASSERT_DIES(say_what_is_kept(1, 1500, 8 << 20), "full: events from step 0 on are not in it", "a trace kept 0 events");
    ASSERT_DIES(say_what_is_kept(1, 100000, 24 << 20), "no trace");
#endif
}

TEST(an_empty_trace_is_a_trace) {
    cJSON *json = trace_json(1, &(cf_trace_list){NULL, 0, 0});
    assert_null(find_event(json, 0, 0));
    cJSON_Delete(json);
}

int main(void) {
    return cmocka_run_group_tests(all_tests, NULL, NULL);
}
