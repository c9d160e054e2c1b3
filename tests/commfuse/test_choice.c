// ranks: 1
//
// The choice for each operation: rounds where a slice hides a transfer, never where it does not; names of choices; agreed costs.
#include <math.h>
#include "tests/cases.h"
#include <stdio.h>
#include <string.h>
#include "commfuse/choice.h"
#include "commfuse/schedule_check.h"
#include "commfuse/transport.h"
#include "tests/commfuse/rows.h"

static const cf_costs cpu = {30e-6, 2e-6, 3e-6, 4e9, 60e9, "ring", 60e-6, 1e9, 25e7, 1, 1, true, false, false};
static const cf_costs wide = {30e-6, 2e-6, 3e-6, 4e9, 60e9, "ring", 60e-6, 1e12, 1e12, 1, 1, true, false, false}; // network
static const cf_costs gpu = {12e-6, 1e-6, 20e-6, 300e9, 400e12, "direct", 20e-6, 40e9, 40e9, 0.5, 0.95, true, true, false};

// By the row whose rounds suit the transport, N − 1 transfers one after another.
static bool is_rounds(const cf_work *w, const cf_costs *c) {
    return cf_choose(w, c).algorithm == cf_algorithm_serving(cf_algorithm_find(c->rounds), w->operation, w->side);
}

static cf_work product(int ranks, double rows, double in, double out) { // a gathered product of a tp group
    return (cf_work){CF_ALLGATHER, CF_COMPUTE_AFTER, ranks, 1, rows / ranks * in * 4, 2 * rows * in * out / ranks, false, true};
}

TEST(large_slices_travel_in_rounds) {
    for (int ranks = 2; ranks <= 8; ranks *= 2) {
        cf_work w = product(ranks, 4096, 768, 2304);
        const cf_algorithm *chosen = cf_choose(&w, &cpu).algorithm;
        assert_true(!chosen->native && chosen->max_slices > 1);
        w.flops *= 1000, w.native = false; // a GPU's, by ipc
        chosen = cf_choose(&w, &gpu).algorithm;
        assert_true(!chosen->native && chosen->max_slices > 1);
    }
}

TEST(small_slices_do_not) {
    for (int ranks = 8; ranks <= 4096; ranks *= 2) {
        cf_work w = product(ranks, 512, 128, 384);
        assert_false(is_rounds(&w, &cpu));
        w.native = false;
        assert_false(is_rounds(&w, &gpu));
    }
}

TEST(without_compute_all_travels_at_once_or_natively) {
    for (int ranks = 2; ranks <= 4096; ranks *= 2)
        for (double bytes = 8; bytes < 1e9; bytes *= 10) {
            cf_work w = {CF_REDUCE_SCATTER, CF_NO_COMPUTE, ranks, 1, bytes, 0, true, true};
            cf_choice c = cf_choose(&w, &cpu);
            assert_true(c.algorithm->max_slices == 1 || c.algorithm->native);
            assert_false(c.algorithm->blocking);               // it is begun early
            if (bytes > 1e5) assert_true(c.algorithm->native); // another core adds up
            cf_costs busy = cpu;
            busy.spare = false;
            if (bytes > 1e5) assert_false(cf_choose(&w, &busy).algorithm->native);
            c = cf_choose(&w, &gpu);
            assert_true(c.algorithm->native && !c.algorithm->blocking); // NCCL adds within its one kernel
            w.native = false;                                           // by ipc
            assert_false(cf_choose(&w, &gpu).algorithm->native);
        }
    cf_work report = {CF_ALLGATHER, CF_NO_COMPUTE, 1000, 1, 64, 0, false, true};
    assert_true(cf_choose(&report, &cpu).algorithm->blocking); // log2(N) messages rather than N - 1
}

// Ranks that share their cores: within a host nothing hides, between hosts it must be clearly worth it.
TEST(without_a_core_to_spare_the_librarys_collective_is_first) {
    const cf_algorithm *none = cf_algorithm_find("none"), *slice = cf_algorithm_find("slice");
    int rounds = 0;
    for (int ranks = 2; ranks <= 32; ranks *= 4)
        for (double tokens = 16; tokens < 1e6; tokens *= 16)
            for (int of = 0; of < 12 * 4; of++) {
                cf_work w = product(ranks, tokens, 128, 384); // of a layer of 128 channels
                w.operation = (cf_operation)(of % 3), w.side = (cf_side)(of / 3 % 4), w.early = of / 12 % 2, w.hosts = 1 + of / 24;
                if (!row_serves(none, w.operation, w.side) || (w.side == CF_NO_COMPUTE && w.bytes > 1e4)) continue;
                cf_costs busy = cpu;
                busy.latency_s *= ranks, busy.message_s *= ranks, busy.piece_s *= ranks, busy.bytes_per_s /= ranks;
                busy.network_latency_s *= ranks, busy.flops_per_s *= 2.0 / ranks, busy.spare = false;
                const cf_choice chosen = cf_choose(&w, &busy),
                                native = {w.early && (w.hosts > 1 || w.side == CF_NO_COMPUTE) ? slice : none, 1};
                if (chosen.algorithm == native.algorithm && chosen.slices == 1) continue;
                assert_int_equal(w.hosts, 2);
                assert_true(cf_choice_ms(chosen, &w, &busy) < 0.9 * cf_choice_ms(native, &w, &busy));
                rounds++;
            }
    assert_true(rounds > 0);
}

// Where ranks are on several hosts, a shard crosses the network to each of them once, not to each of their ranks.
TEST(between_hosts_a_shard_crosses_once) {
    for (int places = 2; places <= 8; places *= 2)
        for (int hosts = 2; hosts <= 4; hosts *= 2)
            for (double rows = 4096; rows < 1e6; rows *= 4) {
                cf_work w = product(hosts * places, rows, 1600, 4800);
                w.hosts = hosts;
                cf_costs slow = gpu;
                slow.network_bytes_per_s = slow.shared_bytes_per_s = 3e9;
                const cf_algorithm *chosen[] = {cf_choose(&w, &gpu).algorithm, cf_choose(&w, &slow).algorithm};
                for (int i = 0; i < 2; i++) assert_true(chosen[i]->levels || chosen[i]->native);
                w.native = false;
                assert_true(cf_choose(&w, &slow).algorithm->levels);
            }
}

// Times in ms, by hand: cpu takes 1 ms for 4 MB, or 60 Mflop, 0.003 a piece, 0.002 a message, 0.03 until it arrives (0.06 on the
// network); gpu 1 ms for 300 MB, 400 Gflop, 0.02 a piece, 0.012 an exchange (0.02), 0.001 a message, and a collective reaches half
// of the rate with 1 MB and 0.95 of it with 100.
TEST(times_are_those_of_a_hand_count) {
    enum { GATHER = CF_ALLGATHER, SCATTER = CF_REDUCE_SCATTER, EXCHANGE = CF_ALLTOALL };
    enum { AFTER = CF_COMPUTE_AFTER, BEFORE = CF_COMPUTE_BEFORE, BOTH = CF_COMPUTE_BOTH };
    static const struct {
        const char *choice;
        const cf_costs *costs;
        int operation, side, ranks, hosts;
        double bytes, flops, ms;
    } rows[] = {
        {"none", &cpu, GATHER, AFTER, 2, 1, 4e6, 240e6, 1.034 + 4.003},
        {"ring", &cpu, GATHER, AFTER, 2, 1, 4e6, 240e6, 2.003 + 2.003}, // the shard comes at 1.032
        {"ring", &cpu, GATHER, AFTER, 2, 1, 4e6, 24e6, 1.032 + 0.203},
        {"ring:2", &cpu, GATHER, AFTER, 2, 1, 4e6, 24e6, 1.034 + 0.103},  // its second half
        {"slice:2", &cpu, GATHER, AFTER, 2, 1, 4e6, 24e6, 1.038 + 0.203}, // two messages there and back
        {"none", &cpu, SCATTER, BEFORE, 2, 1, 4e6, 240e6, 4.003 + 1.034},
        {"ring", &cpu, SCATTER, BEFORE, 2, 1, 4e6, 240e6, 2.003 + 2.003},
        {"ring", &cpu, SCATTER, BEFORE, 2, 1, 4e6, 24e6, 0.203 + 1.032},
        {"none", &cpu, EXCHANGE, BOTH, 2, 1, 4e6, 240e6, 2.003 + 1.034 + 2.003}, // each side is half of the work
        {"direct", &cpu, EXCHANGE, BOTH, 2, 1, 4e6, 240e6, 4 * 1.003},
        {"direct", &cpu, EXCHANGE, BOTH, 2, 1, 4e6, 24e6, 0.103 + 1.032 + 0.103},
        {"direct", &cpu, EXCHANGE, BEFORE, 2, 1, 4e6, 24e6, 0.203 + 1.032},
        {"direct", &cpu, EXCHANGE, AFTER, 2, 1, 4e6, 24e6, 1.032 + 0.203},
        {"none", &cpu, GATHER, AFTER, 8, 1, 4e6, 0, 7 + 3 * 0.004 + 0.03 + 0.003}, // 7 shards; log2(8) messages there and back
        {"ring", &cpu, GATHER, AFTER, 4, 1, 4e6, 0, 3 * 1.032 + 0.003},
        {"none", &cpu, GATHER, AFTER, 4, 2, 1e6, 0, 8.008 + 0.06 + 0.003}, // two shards; both ranks of a host share 500 MB/s
        {"ring", &cpu, GATHER, AFTER, 4, 2, 1e6, 0, 3 * 2.062 + 0.003},    // one of them has it alone
        {"direct", &cpu, GATHER, AFTER, 4, 2, 1e6, 0, 2.062 + 4.062 + 0.312 + 0.003},     // then both, then none
        {"direct", &cpu, GATHER, AFTER, 6, 3, 1e6, 0, 2.062 + 3 * 4.062 + 0.312 + 0.003}, // never more than a host has
        {"none", &wide, GATHER, AFTER, 4, 2, 4e6, 0, 1.008 + 0.06 + 0.003},               // the other shard of this host
        {"none", &gpu, GATHER, AFTER, 2, 1, 1e6, 400e6, 0.002 + 1 / 300.0 / 0.5 + 0.021},
        {"none", &gpu, GATHER, AFTER, 2, 1, 1e7, 400e6, 0.002 + 10 / 300.0 / 0.725 + 0.021},
        {"none", &gpu, GATHER, AFTER, 2, 1, 1e8, 400e6, 0.002 + 100 / 300.0 / 0.95 + 0.021},
        {"none", &gpu, GATHER, AFTER, 2, 1, 1e9, 400e6, 0.002 + 1000 / 300.0 + 0.021},           // all of the rate, not more
        {"none", &gpu, GATHER, AFTER, 2, 1, 1e3, 400e6, 0.002 + 0.001 / 300 / 0.1 + 0.021},      // and a tenth, not less
        {"none", &gpu, GATHER, AFTER, 4, 2, 1e8 / 3, 0, 0.004 + 50 / 40.0 / 0.95 + 0.02},        // a shard comes to a host once
        {"none", &gpu, EXCHANGE, AFTER, 4, 2, 1e8 / 3, 0, 0.004 + 200 / 3.0 / 40 / 0.95 + 0.02}, // from two other ranks for each
        {"ring", &gpu, GATHER, AFTER, 2, 1, 3e8, 400e6, 1.012 + 0.0205},
        {"direct", &gpu, GATHER, AFTER, 2, 2, 4e7, 400e6, 1.02 + 0.0205},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const cf_work w = {(cf_operation)rows[i].operation,
                           (cf_side)rows[i].side,
                           rows[i].ranks,
                           rows[i].hosts,
                           rows[i].bytes,
                           rows[i].flops,
                           false,
                           true};
        cf_choice c;
        assert_true(cf_choice_parse(rows[i].choice, &c));
        const double ms = cf_choice_ms(c, &w, rows[i].costs);
        if (!(fabs(ms - rows[i].ms) < 1e-9)) fail_msg("row %zu, %s: %.6f ms, by hand %.6f", i, rows[i].choice, ms, rows[i].ms);
    }
}

// The longer the latency or the more the ranks, the less work is worth a transfer of its own.
TEST(the_choice_is_monotone) {
    for (double flops = 1e5; flops < 1e13; flops *= 3) {
        bool rounds = true;
        for (double latency = 1e-6; latency < 1; latency *= 2) {
            cf_costs c = cpu;
            c.latency_s = latency;
            cf_work w = {CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE, 8, 1, 1e5, flops, false, true};
            bool now = is_rounds(&w, &c);
            assert_true(rounds || !now);
            rounds = now;
        }
    }
}

// Recursive doubling: rank r exchanges with r ^ 1, r ^ 2, r ^ 4, …, which is no neighbour's schedule shifted.
static bool doubling(cf_schedule *s, const void *argument) {
    int last = 0;
    (void)argument;
    for (int d = 1; d < s->ranks; d *= 2)
        for (int j = 0; j < d; j++) {
            const int peer = s->rank ^ d, mine = s->rank / d * d + j, theirs = peer / d * d + j;
            last = cf_append(s, (cf_step){.kind = CF_EXCHANGE,
                                          .send = {peer, mine},
                                          .from = {CF_FULL, mine},
                                          .recv = {peer, theirs},
                                          .at = {CF_FULL, theirs},
                                          .wait = {last}});
        }
    s->split = s->count;
    for (int i = 0; i < s->ranks; i++)
        cf_append(s, (cf_step){.kind = CF_COMPUTE,
                               .side = CF_COMPUTE_AFTER,
                               .at = {CF_FULL, s->rank ^ i},
                               .first = s->rank ^ i,
                               .count = 1,
                               .wait = {i > 0 ? last : 0}});
    return true;
}

TEST(a_schedule_need_not_be_its_neighbours) {
    const cf_algorithm row = {.name = "doubling",
                              .serves = CF_SERVES(CF_ALLGATHER, CF_COMPUTE_AFTER),
                              .generate = doubling,
                              .slices = 1,
                              .max_slices = 1};
    for (int ranks = 2; ranks <= 64; ranks *= 2) {
        cf_schedule *all[64];
        char where[CF_WHERE_TEXT];
        for (int r = 0; r < ranks; r++) all[r] = cf_schedule_create(CF_ALLGATHER, CF_COMPUTE_AFTER, &row, ranks, 1, r, 1);
        assert_null(cf_schedule_check(all, where));
        assert_int_equal(is_shifted(all[0], all[1]), ranks == 2);
        for (int r = 0; r < ranks; r++) cf_schedule_free(all[r]);
        const cf_work w = product(ranks, 4096, 768, 2304);
        const double ms = cf_choice_ms((cf_choice){&row, 1}, &w, &cpu), wire_ms = 1e3 * (ranks - 1) * w.bytes / cpu.bytes_per_s;
        assert_true(ms >= wire_ms && ms >= 1e3 * w.flops / cpu.flops_per_s);
        assert_true(ms < wire_ms + 1e3 * w.flops / cpu.flops_per_s + 1e3 * ranks * (cpu.latency_s + cpu.message_s + cpu.piece_s));
    }
    const cf_work many = product(128, 4096, 768, 2304);
    assert_true(isinf(cf_choice_ms((cf_choice){&row, 1}, &many, &cpu))); // too many to be replayed: never the choice
}

TEST(one_rank_needs_no_costs) {
    const cf_costs nothing = {0};
    cf_work w = {CF_ALLTOALL, CF_COMPUTE_BOTH, 1, 1, 1e6, 1e9, false, true};
    assert_false(cf_choose(&w, &nothing).algorithm->native);
}

static int natives_in(const cf_choice *list, int count) {
    int natives = 0;
    for (int i = 0; i < count; i++) natives += list[i].algorithm->native;
    return natives;
}

// Replays of many ranks take long, so above 64 exchanges are in one slice each, in the rounds that suit or all at once.
TEST(many_ranks_have_few_choices) {
    for (int ranks = 64; ranks <= 128; ranks *= 2) {
        const cf_work w = product(ranks, 1e6, 4096, 16384);
        cf_choice list[64];
        int cut = 0, others = 0;
        for (int i = cf_choices(&w, &cpu, list, 64) - 1; i >= 0; i--) {
            const cf_algorithm *a = list[i].algorithm;
            cut += !a->native && list[i].slices > 1, others += !a->native && a->max_slices > 1 && a != list[0].algorithm;
        }
        assert_true(ranks > 64 ? cut + others == 0 : cut > 0 && others > 0);
    }
}

// Of each row that serves, without being told of it: in a group that may call native collectives, begun early or not, some work has
// it among its choices, and the first is one slice in the rounds that suit it.
TEST(every_row_is_a_choice) {
    for (EVERY_ROW(row)) {
        bool listed = false;
        for (int of = 0; of < 12 * 2; of++) {
            cf_work w = {(cf_operation)(of % 3), (cf_side)(of / 3 % 4), 4, row_hosts(row, 4), 1e4, 1e9, of >= 12, true};
            cf_choice list[CF_CHOICES], all[64];
            if (!row_serves(row, w.operation, w.side)) continue;
            int count = cf_choices(&w, &cpu, list, CF_CHOICES - 1);
            assert_int_equal(natives_in(list, count), natives_in(all, cf_choices(&w, &cpu, all, 64))); // rows do not push them out
            for (int i = 0; i < count; i++) {
                listed |= list[i].algorithm == row;
                assert_true(!list[i].algorithm->levels || row->levels); // not on one host
                assert_true(row_serves(list[i].algorithm, w.operation, w.side) && list[i].slices <= list[i].algorithm->max_slices);
                assert_false(w.early && list[i].algorithm->blocking);
            }
            const char *rounds = row->levels ? "levels" : w.early ? "direct" : "ring";
            if (w.side != CF_NO_COMPUTE)
                assert_ptr_equal(list[0].algorithm, cf_algorithm_serving(cf_algorithm_find(rounds), w.operation, w.side));
            assert_int_equal(list[0].slices, 1);
        }
        if (row->serves && !listed) fail_msg("%s is never a choice", row->name);
    }
}

static void assert_name(const char *name, const char *printed, const cf_algorithm *algorithm, int slices) {
    cf_choice c;
    char text[CF_CHOICE_NAME];
    if (!cf_choice_parse(name, &c)) fail_msg("'%s' is not taken for a choice", name);
    assert_ptr_equal(c.algorithm, algorithm);
    assert_int_equal(c.slices, slices);
    cf_choice_print(c, text);
    assert_string_equal(text, printed);
}

static void assert_no_name(const char *name) {
    cf_choice c = {cf_algorithm_find("once"), -7};
    if (cf_choice_parse(name, &c)) fail_msg("'%s' is taken for a choice", name);
    assert_true(c.algorithm == cf_algorithm_find("once") && c.slices == -7);
}

TEST(names_of_choices) {
    static const char *const bad[] = {"",
                                      ":2",
                                      "ring:",
                                      "ring:0",
                                      "ring:-1",
                                      "ring:+2",
                                      "ring: 2",
                                      "ring:2x",
                                      "ring:2:2",
                                      "ring ",
                                      "RING",
                                      "ring:4294967298",
                                      "own",
                                      "auto:2",
                                      "slice:x",
                                      "once:2",
                                      "none:3",
                                      "ring:1e3",
                                      "ring.2",
                                      "commfuse:ring:2",
                                      "a name that is much too long for the name of a choice"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) assert_no_name(bad[i]);
    assert_name("auto", "auto", NULL, 1);
    assert_name("slice", "slice:4", cf_algorithm_find("slice"), 4);
    assert_name("slice:1", "slice:1", cf_algorithm_find("slice"), 1);
    assert_name("commfuse:2", "ring:2", cf_algorithm_find("ring"), 2);
    for (EVERY_ROW(row)) {
        const cf_algorithm *named = row->serves || row->bound ? row : cf_algorithm_find(row->fallback); // an alias is another row
        char name[64], printed[64];
        snprintf(name, sizeof name, "%s:%d", row->name, row->max_slices + 1);
        assert_no_name(name);
        snprintf(name, sizeof name, "%s:%d", row->name, row->max_slices);
        snprintf(printed, sizeof printed, row->max_slices > 1 ? "%s:%d" : "%s", named->name, row->max_slices);
        assert_name(name, printed, named, row->max_slices);
        snprintf(printed, sizeof printed, row->slices > 1 ? "%s:%d" : "%s", named->name, row->slices);
        assert_name(row->name, printed, named, row->slices);
    }
}

// Costs of three ranks; each is the worst in something.
static const cf_costs costs_of[] = {{3e-5, 2e-6, 3e-6, 4e9, 9e10, "ring", 1e-4, 2e9, 1e9, 1, 0.9, true, false, false},
                                    {1e-5, 5e-6, 1e-6, 8e9, 6e10, "ring", 3e-4, 1e9, 9e8, 0.5, 1, false, false, false},
                                    {2e-5, 1e-6, 7e-6, 2e9, 8e10, "ring", 2e-4, 3e9, 7e8, 1, 1, true, false, false}};

static cf_costs set_threads(cf_transport *t, int threads) {
    (void)threads;
    return costs_of[t->rank];
}

static void gather(cf_transport *t, const void *mine, void *all, int64_t bytes) {
    assert_memory_equal(mine, &costs_of[t->rank], bytes);
    memcpy(all, costs_of, sizeof costs_of);
}

TEST(the_worst_costs_are_everybodys) {
    for (int rank = 0; rank < 3; rank++) {
        cf_transport t = {.rank = rank, .size = 3, .set_threads = set_threads, .gather = gather};
        cf_costs_agree(&t, 1);
        const cf_costs *c = &t.costs;
        assert_true(c->latency_s == 3e-5 && c->message_s == 5e-6 && c->piece_s == 7e-6);
        assert_true(c->bytes_per_s == 2e9 && c->flops_per_s == 6e10);
        assert_true(c->network_latency_s == 3e-4 && c->network_bytes_per_s == 1e9 && c->shared_bytes_per_s == 7e8);
        assert_true(c->share_1mb == 0.5 && c->share_100mb == 0.9);
        assert_false(c->spare);
    }
}

// Every row that --reproducible may choose has the sums of rounds, and there is always one.
TEST(one_order_of_sums) {
    static const cf_side sides[] = {CF_NO_COMPUTE, CF_COMPUTE_BEFORE, CF_COMPUTE_AFTER};
    int chosen = 0;
    for (int i = 0; i < 2 * 3 * 3 * 4 * 3; i++) {
        cf_costs c = i % 2 ? gpu : cpu;
        cf_work w = {(cf_operation)(i / 2 % 3), sides[i / 6 % 3], 8, 1 << i / 18 % 4, pow(1e3, i / 72 + 1), 1e9, i / 72 == 1, true};
        if (!cf_algorithm_serving(cf_algorithm_find("once"), w.operation, w.side)) continue;
        c.one_order = true;
        cf_choice list[CF_CHOICES], choice = cf_choose(&w, &c);
        const cf_algorithm *rounds = cf_choice_rounds(&w, &c);
        const int count = cf_choices(&w, &c, list, CF_CHOICES);
        assert_true(count > 0);
        for (int k = 0; k < count; k++) {
            assert_string_equal(list[k].algorithm->same_bits, rounds->same_bits);
            chosen += list[k].algorithm == choice.algorithm && list[k].slices == choice.slices;
        }
        chosen--;
        assert_true(!choice.algorithm->native && chosen == 0);
    }
}

TEST(costs_as_text_are_the_same_costs) {
    static const char *const wrong[] = {"",
                                        "1",
                                        "1 1e-6",
                                        "1 1 1 1 1 1 1 1 1 1",
                                        "1 1 1 1 1 1 1 1 1 1 0",
                                        "1 1 1 1 1 1 1 1 1 1 1 1",
                                        "1 1 1 1 1 1 1 1 1 1 x",
                                        "1 1 1 1 1 1 1 1 1 1 inf"};
    char text[CF_COSTS_TEXT], again[CF_COSTS_TEXT];
    cf_costs c = gpu, mine = {.rounds = "ring"};
    c.latency_s = 1.0 / 3, c.spare = false;
    cf_costs_print(c, text);
    assert_true(cf_costs_parse(text, &mine));
    cf_costs_print(mine, again);
    assert_string_equal(again, text);
    assert_true(mine.latency_s == c.latency_s && mine.share_100mb == c.share_100mb && !mine.spare);
    assert_string_equal(mine.rounds, "ring"); // a transport's own
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) assert_false(cf_costs_parse(wrong[i], &mine));
    cf_costs_print(mine, again);
    assert_string_equal(again, text);
}

int main(void) {
    return cmocka_run_group_tests(all_tests, NULL, NULL);
}
