// ranks: 1
//
// The peak is the machine's: what ranks count while they take turns on its cores adds up to what the cores do, however
// many they are. Turns are imagined here, as a scheduler with slices of a few milliseconds would give them, so nothing
// depends on what else this machine does.
#include "tests/death.h"
#include <math.h>
#include "layers/peak.c" // rate_in_window is its own

enum { RANKS_MAX = 16, CORES_MAX = 4 };
static const double SLICE_MS = 4, PRODUCT_MS = 9; // of a core

static double waiting(void *argument, double mine) {
    (void)argument;
    return mine;
}

typedef struct worker {
    double ends[PRODUCTS_MAX], done_ms, window_ms; // done: of the product it is in
    int count;
    bool ended;
} worker;

// As multiply() does: it stops by itself.
static void work(worker *w, double now_ms, double took_ms) {
    for (w->done_ms += took_ms; w->done_ms >= PRODUCT_MS && !w->ended;) {
        w->done_ms -= PRODUCT_MS;
        w->ends[w->count++] = now_ms + took_ms - w->done_ms;
        if (w->count == 1) w->window_ms = fmax(window_ms_min, PRODUCTS_MIN * w->ends[0]);
        w->ended = w->ends[w->count - 1] >= w->ends[0] + (1 + behind_window) * w->window_ms;
    }
}

// The next `cores` of the ranks that have not ended, in turn, get a slice; `unfair`: every core has ranks of its own.
static double counted(int ranks, int cores, bool unfair) {
    static worker w[RANKS_MAX];
    memset(w, 0, sizeof w);
    int next[CORES_MAX] = {0}, left = ranks;
    for (double now = 0; left > 0; now += SLICE_MS) {
        for (int core = 0; core < cores; core++)
            for (int tried = 0; tried < ranks; tried++) {
                int *turn = unfair ? &next[core] : &next[0], rank = (*turn)++ % ranks;
                if (w[rank].ended || (unfair && rank % cores != core)) continue;
                work(&w[rank], now, SLICE_MS);
                left -= w[rank].ended;
                break;
            }
    }
    double sum = 0;
    for (int rank = 0; rank < ranks; rank++)
        sum += rate_in_window(w[rank].ends, w[rank].count, w[rank].window_ms);
    return sum;
}

static void ranks_that_take_turns_count_as_the_cores_do(void **state) {
    (void)state;
    for (int cores = 1; cores <= CORES_MAX; cores++)
        for (int ranks = cores; ranks <= RANKS_MAX; ranks++)
            for (int unfair = 0; unfair < 2; unfair++) {
                double found = counted(ranks, cores, unfair) * PRODUCT_MS / cores;
                if (fabs(found - 1) > 0.05)
                    fail_msg("%d ranks on %d cores count %.3f of what the cores do", ranks, cores, found);
            }
}

static void a_product_across_the_end_counts_in_part(void **state) {
    (void)state;
    const double ends[] = {10, 20, 40, 50};
    assert_true(fabs(rate_in_window(ends, 4, 20) - 1.5 / 20) < 1e-12);
    assert_true(fabs(rate_in_window(ends, 4, 40) - 3.0 / 40) < 1e-12);
    assert_true(rate_in_window(ends, 4, 41) == 0);
}

// However much others disturb it, it is measured, and named.
static void a_machine_has_a_peak(void **state) {
    (void)state;
    const char *source = NULL;
    cf_stream *stream = cf_stream_create();
    assert_true(peak_flops(&source, 1, waiting, NULL, stream) > 1e7);
    assert_non_null(strstr(source, "all cores"));
    cf_stream_free(stream);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_that_take_turns_count_as_the_cores_do),
        cmocka_unit_test(a_product_across_the_end_counts_in_part),
        cmocka_unit_test(a_machine_has_a_peak),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
