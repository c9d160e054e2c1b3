// ranks: 1
//
// The choice for each operation: rounds where a slice hides a transfer, never where it does not; names of choices; agreed costs.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "commfuse/choice.h"
#include "commfuse/transport.h"

static const cf_costs cpu = {30e-6, 2e-6, 3e-6, 4e9, 60e9, CF_RING, true, false};
static const cf_costs gpu = {12e-6, 1e-6, 20e-6, 300e9, 400e12, CF_DIRECT, true, true};

static bool is_rounds(cf_choice c) {
    return c.mode == CF_MODE_COMMFUSE && c.route != CF_ONCE;
}

static cf_work product(int ranks, double rows, double in, double out) { // a gathered product of a tp group
    return (cf_work){CF_ALLGATHER, CF_COMPUTE_AFTER, ranks, rows / ranks * in * 4, 2 * rows * in * out / ranks, false, true, false};
}

static void large_slices_travel_in_rounds(void **state) {
    (void)state;
    for (int ranks = 2; ranks <= 8; ranks *= 2) {
        cf_work w = product(ranks, 4096, 768, 2304);
        cf_choice c = cf_choose(&w, &cpu);
        assert_true(is_rounds(c));
        assert_int_equal(c.route, CF_RING);
        w.flops *= 1000, w.native = false; // a GPU's, by ipc
        assert_int_equal(cf_choose(&w, &gpu).route, CF_DIRECT);
    }
}

static void small_slices_do_not(void **state) {
    (void)state;
    for (int ranks = 8; ranks <= 4096; ranks *= 2) {
        cf_work w = product(ranks, 512, 128, 384);
        assert_false(is_rounds(cf_choose(&w, &cpu)));
        w.native = false;
        assert_false(is_rounds(cf_choose(&w, &gpu)));
    }
}

static void without_compute_all_travels_at_once_or_natively(void **state) {
    (void)state;
    for (int ranks = 2; ranks <= 4096; ranks *= 2)
        for (double bytes = 8; bytes < 1e9; bytes *= 10) {
            cf_work w = {CF_REDUCE_SCATTER, CF_NO_COMPUTE, ranks, bytes, 0, true, true, false};
            cf_choice c = cf_choose(&w, &cpu);
            assert_false(is_rounds(c));
            assert_int_not_equal(c.mode, CF_MODE_NONE); // it is begun early, and must not block
            if (bytes > 1e5) assert_int_equal(c.mode, CF_MODE_COMMFUSE);
            assert_int_equal(cf_choose(&w, &gpu).mode, CF_MODE_SLICE); // NCCL adds within its one kernel
            w.native = false;                                          // by ipc
            assert_int_equal(cf_choose(&w, &gpu).mode, CF_MODE_COMMFUSE);
        }
    cf_work report = {CF_ALLGATHER, CF_NO_COMPUTE, 1000, 64, 0, false, true, false};
    assert_int_equal(cf_choose(&report, &cpu).mode, CF_MODE_NONE); // log2(N) messages rather than N - 1
}

// The longer the latency or the more the ranks, the less work is worth a transfer of its own.
static void the_choice_is_monotone(void **state) {
    (void)state;
    for (double flops = 1e5; flops < 1e13; flops *= 3) {
        bool rounds = true;
        for (double latency = 1e-6; latency < 1; latency *= 2) {
            cf_costs c = cpu;
            c.latency_s = latency;
            cf_work w = {CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE, 8, 1e5, flops, false, true, false};
            bool now = is_rounds(cf_choose(&w, &c));
            assert_true(rounds || !now);
            rounds = now;
        }
    }
}

static void one_rank_needs_no_costs(void **state) {
    (void)state;
    const cf_costs nothing = {0};
    cf_work w = {CF_ALLTOALL, CF_COMPUTE_BOTH, 1, 1e6, 1e9, false, true, false};
    assert_int_equal(cf_choose(&w, &nothing).mode, CF_MODE_COMMFUSE);
}

static void names_of_choices(void **state) {
    (void)state;
    static const char *const good[] = {"ring", "ring:2", "direct:65536", "once", "none", "slice:1", "slice:4"};
    static const char *const bad[] = {"",
                                      ":2",
                                      "ring:",
                                      "ring:0",
                                      "ring:-1",
                                      "ring:2x",
                                      "ring:65537",
                                      "ring:2:2",
                                      "ring ",
                                      "RING",
                                      "ring:4294967298",
                                      "commfuse",
                                      "nowire",
                                      "auto",
                                      "own",
                                      "slice:x",
                                      "once:2 ",
                                      "ring:1e3",
                                      "ring.2",
                                      "a name that is much too long for the name of a choice"};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        cf_choice c;
        char name[CF_CHOICE_NAME];
        assert_true(cf_choice_parse(good[i], &c));
        cf_choice_print(c, name);
        assert_string_equal(name, good[i]);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        cf_choice c = {CF_MODE_AUTO, CF_ROUTES, -7};
        if (cf_choice_parse(bad[i], &c)) fail_msg("'%s' is taken for a choice", bad[i]);
        assert_true(c.mode == CF_MODE_AUTO && c.route == CF_ROUTES && c.slices == -7);
    }
}

// Costs of three ranks; each is the worst in something.
static const cf_costs costs_of[] = {{3e-5, 2e-6, 3e-6, 4e9, 9e10, CF_RING, true, false},
                                    {1e-5, 5e-6, 1e-6, 8e9, 6e10, CF_RING, false, false},
                                    {2e-5, 1e-6, 7e-6, 2e9, 8e10, CF_RING, true, false}};

static cf_costs set_threads(cf_transport *t, int threads) {
    (void)threads;
    return costs_of[t->rank];
}

static void gather(cf_transport *t, const void *mine, void *all, int64_t bytes) {
    assert_memory_equal(mine, &costs_of[t->rank], bytes);
    memcpy(all, costs_of, sizeof costs_of);
}

static void the_worst_costs_are_everybodys(void **state) {
    (void)state;
    for (int rank = 0; rank < 3; rank++) {
        cf_transport t = {.rank = rank, .size = 3, .set_threads = set_threads, .gather = gather};
        cf_costs_agree(&t, 1);
        const cf_costs *c = &t.costs;
        assert_true(c->latency_s == 3e-5 && c->message_s == 5e-6 && c->piece_s == 7e-6);
        assert_true(c->bytes_per_s == 2e9 && c->flops_per_s == 6e10);
        assert_false(c->spare);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(large_slices_travel_in_rounds),
        cmocka_unit_test(small_slices_do_not),
        cmocka_unit_test(without_compute_all_travels_at_once_or_natively),
        cmocka_unit_test(the_choice_is_monotone),
        cmocka_unit_test(one_rank_needs_no_costs),
        cmocka_unit_test(names_of_choices),
        cmocka_unit_test(the_worst_costs_are_everybodys),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
