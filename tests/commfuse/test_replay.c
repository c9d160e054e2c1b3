// ranks: 1
//
// Replays of schedules over given costs.
#include <math.h>
#include <stdlib.h>
#include "tests/cases.h"
#include "commfuse/choice.h"
#include "commfuse/replay.h"
#include "tests/commfuse/rows.h"

typedef struct prices {
    double compute, wire; // of a shard
} prices;

static double compute_ms(const void *argument, const cf_schedule *s, const cf_step *step) {
    const prices *p = argument;
    return step->kind == CF_COMPUTE ? p->compute * step->count / s->slices : 0.01;
}

static double wire_ms(const void *argument, const cf_schedule *s, const cf_step *step) {
    const prices *p = argument;
    return p->wire / s->slices * (step->kind == CF_COLLECTIVE ? s->ranks - 1 : 1);
}

// Links: one; one for each distance on the circle of ranks; one within a host and one between hosts, where a shard takes longer.
static int by_distance(const void *argument, const cf_schedule *s, int from, int to) {
    (void)argument;
    return (to - from + s->ranks) % s->ranks;
}
static int by_host(const void *argument, const cf_schedule *s, int from, int to) {
    (void)argument;
    return from / (s->ranks / s->hosts) != to / (s->ranks / s->hosts);
}
static double wire_by_host_ms(const void *argument, const cf_schedule *s, const cf_step *step) {
    const bool far = step->kind == CF_EXCHANGE && by_host(argument, s, s->rank, step->send.rank);
    return wire_ms(argument, s, step) * (far ? 4 : 1);
}

// One rank stands for all where the row promises that every rank's schedule is its neighbour's with all ranks shifted.
static bool one_stands_for_all(cf_operation operation, cf_side side, cf_choice c, int ranks, int hosts) {
    cf_schedule *first = cf_schedule_create(operation, side, c.algorithm, ranks, hosts, 0, c.slices);
    const bool promised = first->algorithm->rank_symmetric;
    for (int r = 1; r < ranks && promised; r++) {
        cf_schedule *other = cf_schedule_create(operation, side, c.algorithm, ranks, hosts, r, c.slices);
        assert_true(is_shifted(first, other));
        cf_schedule_free(other);
    }
    cf_schedule_free(first);
    return promised;
}

static cf_replayed replayed(cf_operation operation, cf_side side, cf_choice c, int ranks, int hosts, const cf_machine *machine,
                            bool symmetric) {
    cf_schedule *s[64] = {NULL};
    for (int r = 0; r < ranks; r++) s[r] = cf_schedule_create(operation, side, c.algorithm, ranks, hosts, r, c.slices);
    cf_replayed result = symmetric ? cf_replay(&s[ranks / 2], 1, machine) : cf_replay(s, ranks, machine);
    for (int r = 0; r < ranks; r++) cf_schedule_free(s[r]);
    return result;
}

static const struct {
    cf_operation operation;
    cf_side side;
} kinds[] = {{CF_ALLGATHER, CF_NO_COMPUTE},          {CF_ALLGATHER, CF_COMPUTE_AFTER}, {CF_REDUCE_SCATTER, CF_NO_COMPUTE},
             {CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE}, {CF_ALLTOALL, CF_NO_COMPUTE},     {CF_ALLTOALL, CF_COMPUTE_BEFORE},
             {CF_ALLTOALL, CF_COMPUTE_AFTER},        {CF_ALLTOALL, CF_COMPUTE_BOTH}};
enum { KINDS = sizeof kinds / sizeof *kinds };

// Every row in one and in three slices, where it serves, or is a bound of what serves.
enum { SLICES = 2 };
static bool way(int w, int kind, cf_choice *c) {
    *c = (cf_choice){&cf_algorithms[w / SLICES], 1 + w % SLICES * 2};
    return row_is_own(c->algorithm, kinds[kind].operation, kinds[kind].side);
}
static int ways(void) {
    return cf_algorithm_count * SLICES;
}

static void assert_one_is_all(int kind, cf_choice c, int ranks, int hosts, const cf_machine *machine) {
    cf_replayed one = replayed(kinds[kind].operation, kinds[kind].side, c, ranks, hosts, machine, true);
    cf_replayed all = replayed(kinds[kind].operation, kinds[kind].side, c, ranks, hosts, machine, false);
    assert_true(fabs(one.finished_ms - all.finished_ms) < 1e-9 * all.finished_ms + 1e-12);
    assert_true(fabs(one.exposed_ms - all.exposed_ms) < 1e-9 * all.finished_ms + 1e-12);
}

// One rank's schedule gives the same times as those of all ranks, whatever the links are, if all ranks have the same.
TEST(one_rank_replays_as_all_do) {
    for (int k = 0; k < KINDS; k++)
        for (int w = 0; w < ways(); w++) {
            cf_choice c;
            for (int ranks = 2; ranks <= 24 && way(w, k, &c); ranks += ranks < 6 ? 1 : 9)
                for (int coupled = 0; coupled < 2 && one_stands_for_all(kinds[k].operation, kinds[k].side, c, ranks, 1); coupled++)
                    for (double wire = 0.1; wire < 20; wire *= 7) {
                        prices p = {1, wire};
                        cf_machine machine = {compute_ms, wire_ms, &p, 0.05, coupled, 1, NULL};
                        assert_one_is_all(k, c, ranks, 1, &machine);
                        machine.links = ranks, machine.link_of = by_distance;
                        assert_one_is_all(k, c, ranks, 1, &machine);
                    }
            for (int hosts = 2; hosts <= 5 && way(w, k, &c) && c.algorithm->levels; hosts++)
                for (int places = 2; places <= 4; places++)
                    for (int coupled = 0; coupled < 2; coupled++) {
                        prices p = {1, 0.3};
                        cf_machine machine = {compute_ms, wire_by_host_ms, &p, 0.05, coupled, 2, by_host};
                        assert_true(one_stands_for_all(kinds[k].operation, kinds[k].side, c, hosts * places, hosts));
                        assert_one_is_all(k, c, hosts * places, hosts, &machine);
                    }
        }
}

// By hand, on two ranks, with ADDs of 0.01 and arrivals 0.1 after a transfer's end. Exposed is every wait, that for what nothing is
// computed from too, after the last computation.
TEST(waits_are_those_of_a_hand_count) {
    enum { GATHER = CF_ALLGATHER, SCATTER = CF_REDUCE_SCATTER, EXCHANGE = CF_ALLTOALL };
    enum { ALONE = CF_NO_COMPUTE, AFTER = CF_COMPUTE_AFTER, BEFORE = CF_COMPUTE_BEFORE, BOTH = CF_COMPUTE_BOTH };
    static const struct {
        const char *choice;
        int operation, side;
        double wire, finished, exposed; // a shard's computation takes 1
        double later;                   // coupled, where a unit waits until the one before has arrived
    } rows[] = {
        {"direct", GATHER, ALONE, 3, 3.1, 3.1, 0},
        {"direct", GATHER, AFTER, 3, 3.1 + 1, 2.1, 0},
        {"direct", GATHER, AFTER, 0.5, 2, 0, 0},
        {"direct:2", GATHER, AFTER, 3, 3.1 + 0.5, 1.6, 0.1}, // the second half; one half's computation meets no wait
        {"direct", SCATTER, ALONE, 3, 3.1 + 0.01, 3.1, 0},
        {"direct", SCATTER, BEFORE, 3, 1 + 3.1 + 0.01, 2.1, 0},
        {"direct", SCATTER, BEFORE, 0.5, 2.01, 0, 0},
        {"direct", EXCHANGE, ALONE, 3, 3.1, 3.09, 0},     // its own part is copied meanwhile
        {"direct", EXCHANGE, BEFORE, 3, 1 + 3.1, 2.1, 0}, // nothing on the stream waits for it
        {"direct", EXCHANGE, AFTER, 3, 3.1 + 1, 2.1, 0},
        {"direct", EXCHANGE, BOTH, 3, 1 + 3.1 + 1, 1.1, 0},
        {"direct", EXCHANGE, BOTH, 0.5, 4, 0, 0},
        {"none", GATHER, AFTER, 3, 3.1 + 2, 3.1, 0},
        {"none", EXCHANGE, BEFORE, 3, 2 + 3.1, 3.1, 0},
        {"none", EXCHANGE, BOTH, 3, 2 + 3.1 + 2, 3.1, 0},
        {"slice:2", GATHER, AFTER, 3, 3.1 + 1, 2.1, 0.1}, // the first half comes at 1.6
        {"slice:2", GATHER, AFTER, 1, 0.6 + 2, 0.6, 0},
        {"slice:2", EXCHANGE, BEFORE, 3, 1 + 3.1, 2.1, 0.1},
        {"ideal", GATHER, AFTER, 3, 2, 0, 0},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int coupled = 0; coupled < 2; coupled++) {
            prices p = {1, rows[i].wire};
            const cf_machine machine = {compute_ms, wire_ms, &p, 0.1, coupled, 1, NULL};
            cf_choice c;
            assert_true(cf_choice_parse(rows[i].choice, &c));
            const double later = coupled ? rows[i].later : 0;
            const cf_replayed r = replayed((cf_operation)rows[i].operation, (cf_side)rows[i].side, c, 2, 1, &machine, false);
            if (!(fabs(r.finished_ms - rows[i].finished - later) < 1e-9 && fabs(r.exposed_ms - rows[i].exposed - later) < 1e-9))
                fail_msg("row %zu, %s, coupled %d: %.3f ms, %.3f exposed, by hand %.3f, %.3f", i, rows[i].choice, coupled,
                         r.finished_ms, r.exposed_ms, rows[i].finished, rows[i].exposed);
        }
}

// Rank 0 sends for four times as long as rank 1, which computes five times as long: coupled, rank 0 waits 3 until it has sent before
// it goes on; else it goes on at once, and at the end waits 2.
static double slower_ms(const void *argument, const cf_schedule *s, const cf_step *step) {
    (void)argument, (void)step;
    return s->rank == 1 ? 5 : 1;
}
static double longer_ms(const void *argument, const cf_schedule *s, const cf_step *step) {
    (void)argument, (void)step;
    return s->rank == 0 ? 4 : 1;
}
TEST(coupled_halves_end_together) {
    for (int coupled = 0; coupled < 2; coupled++) {
        const cf_machine machine = {slower_ms, longer_ms, NULL, 0, coupled, 1, NULL};
        const cf_choice direct = {cf_algorithm_find("direct"), 1};
        const cf_replayed r = replayed(CF_ALLGATHER, CF_COMPUTE_AFTER, direct, 2, 1, &machine, false);
        assert_true(r.finished_ms == 10 && r.exposed_ms == (coupled ? 3 : 2));
    }
}

// Transfers with different peers run at the same time on links of their own, and one after another on a shared one.
TEST(links_of_peers_work_at_the_same_time) {
    const cf_choice once = {cf_algorithm_find("once"), 1};
    prices p = {1, 2};
    for (int coupled = 0; coupled < 2; coupled++)
        for (int ranks = 2; ranks <= 16; ranks *= 2) {
            cf_machine shared = {compute_ms, wire_ms, &p, 0.5, coupled, 1, NULL}, own = shared;
            own.links = ranks, own.link_of = by_distance;
            cf_replayed slow = replayed(CF_ALLGATHER, CF_NO_COMPUTE, once, ranks, 1, &shared, false);
            cf_replayed fast = replayed(CF_ALLGATHER, CF_NO_COMPUTE, once, ranks, 1, &own, false);
            assert_true(fabs(slow.finished_ms - (2 * (ranks - 1) + 0.5)) < 1e-9);
            assert_true(fabs(fast.finished_ms - 2.5) < 1e-9);
        }
}

// While a shard crosses the network, others travel within the host; then it is passed on.
TEST(hosts_have_links_beside_the_network) {
    const cf_choice levels = {cf_algorithm_find("levels"), 1};
    prices p = {1, 1};
    for (int places = 2; places <= 8; places++) {
        cf_machine both = {compute_ms, wire_by_host_ms, &p, 0, false, 2, by_host}, one = both;
        one.links = 1, one.link_of = NULL;
        cf_replayed apart = replayed(CF_ALLGATHER, CF_NO_COMPUTE, levels, 2 * places, 2, &both, false);
        cf_replayed together = replayed(CF_ALLGATHER, CF_NO_COMPUTE, levels, 2 * places, 2, &one, false);
        assert_true(fabs(apart.finished_ms - (fmax(4, places - 1) + places - 1)) < 1e-9);
        assert_true(fabs(together.finished_ms - (4 + 2 * (places - 1))) < 1e-9);
    }
}

// Rounds whose transfers are shorter than a slice expose nothing but the share of the additions.
TEST(short_transfers_hide) {
    const cf_choice ring = {cf_algorithm_find("ring"), 1}, blocking = {cf_algorithm_find("none"), 1};
    prices p = {1, 0.5};
    cf_machine machine = {compute_ms, wire_ms, &p, 0.01, false, 1, NULL};
    for (int ranks = 2; ranks <= 16; ranks *= 2) {
        cf_replayed gather = replayed(CF_ALLGATHER, CF_COMPUTE_AFTER, ring, ranks, 1, &machine, true);
        assert_true(fabs(gather.finished_ms - ranks) < 1e-9 && gather.exposed_ms < 1e-9);
        cf_replayed none = replayed(CF_ALLGATHER, CF_COMPUTE_AFTER, blocking, ranks, 1, &machine, true);
        assert_true(fabs(none.exposed_ms - (0.5 * (ranks - 1) + 0.01)) < 1e-9);
        cf_replayed scatter = replayed(CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE, ring, ranks, 1, &machine, true);
        assert_true(scatter.exposed_ms < 1e-9);
    }
}

// A faster link or a shorter latency never makes an operation longer.
TEST(time_falls_with_the_link) {
    for (int k = 0; k < KINDS; k++)
        for (int w = 0; w < ways(); w++) {
            cf_choice c;
            double before = 0;
            for (double wire = 0.01; wire < 50 && way(w, k, &c); wire *= 1.5) {
                prices p = {1, wire};
                cf_machine machine = {compute_ms, wire_ms, &p, wire / 10, false, 1, NULL};
                double ms = replayed(kinds[k].operation, kinds[k].side, c, 6, 1, &machine, false).finished_ms;
                assert_true(ms >= before - 1e-9);
                before = ms;
            }
        }
}

int main(void) {
    return cmocka_run_group_tests(all_tests, NULL, NULL);
}
