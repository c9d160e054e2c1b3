// ranks: 1 2 4
// quick: 2
//
// The tuner on real ranks. The test decides how long each computation takes, so that one choice is clearly the best. The results of
// each step are compared with == while choices change, and all ranks must find the same plan.
#include "tests/commfuse/ranks.h"
#include "tests/death.h"
#include "commfuse/tune.c" // its contests are also judged without a clock
#include <string.h>
#include <time.h>

enum { ROWS = 24, COLUMNS = 5, PATIENCE_S = 60, LAYERS = 3 };

static cf_context context;
static cf_mesh mesh;

// The time of a call of the callback: for each call, for each row, and noise.
typedef struct work {
    double call_ms, row_ms, noise_ms;
    uint32_t noise;
    int64_t *full;
} work;

// Asleep: other processes on the cores do not change what it costs.
static void spend(double ms) {
    struct timespec time = {0, (long)(ms * 1e6)};
    if (ms > 0) nanosleep(&time, NULL);
}

static void compute(void *argument, const cf_span *span, cf_stream *stream) {
    work *w = argument;
    (void)stream;
    w->noise = w->noise * 1664525u + 1013904223u;
    spend(w->call_ms + w->row_ms * (double)(span->rows * span->blocks) + w->noise_ms * (w->noise >> 8) / (1 << 24));
    for (int b = 0; b < span->blocks; b++)
        for (int64_t r = 0; r < span->rows * COLUMNS && span->side == CF_COMPUTE_BEFORE; r++) {
            int64_t *at = (int64_t *)(span->data + b * span->data_stride) + r;
            *at = (span->row + b * span->row_stride) * COLUMNS + r + mesh.tp_group.rank;
        }
}

typedef struct bench {
    cf_fuse *gather, *scatter;
    cf_tuner *tuner;
    work of_gather, of_scatter;
    int64_t *full;
} bench;

static cf_fuse *plan_operation(cf_operation kind, cf_side side) {
    return cf_fuse_create(&context, (cf_fuse_config){.name = "test",
                                                     .group = &mesh.tp_group,
                                                     .operation = kind,
                                                     .side = side,
                                                     .slices = 1,
                                                     .dtype = CF_INT64,
                                                     .capacity = ROWS * COLUMNS,
                                                     .flops = 1e9});
}

static bench make_bench(void) {
    bench b = {.gather = plan_operation(CF_ALLGATHER, CF_COMPUTE_AFTER),
               .scatter = plan_operation(CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE)};
    b.full = cf_alloc(mesh.tp * ROWS * COLUMNS * (int64_t)sizeof *b.full, "test");
    b.tuner = cf_tuner_create(&context, &mesh.tp_group);
    cf_tuner_add(b.tuner, "forward", b.gather);
    cf_tuner_add(b.tuner, "forward, again", b.scatter);
    return b;
}

static void free_bench(bench *b) {
    cf_tuner_free(b->tuner);
    cf_fuse_free(b->gather);
    cf_fuse_free(b->scatter);
    cf_free(b->full);
}

TEST(no_choice_is_tried_twice) {
    bench b = make_bench();
    for (const operation *o = b.tuner->operation; o < b.tuner->operation + b.tuner->operations; o++)
        for (int k = 0; k < o->contest.candidates; k++)
            CHECK(find_choice(o, o->choice[k]) == k, "%s: %d is %d", o->name, k, find_choice(o, o->choice[k]));
    free_bench(&b);
}

// A choice that leaves its computation until after the operation is not shorter.
TEST(extended_timing_counts) {
    cf_choice choices[] = {{cf_algorithm_find("ring"), 1}, {cf_algorithm_find("ring"), 2}};
    int64_t bytes = 0;
    bench b = make_bench();
    cf_fuse_set_choices(b.gather, choices, 2, &bytes);
    context.timed = true;
    cf_fuse_run(b.gather, b.full, ROWS, COLUMNS, compute, &b.of_gather, 0);
    spend(20);
    cf_fuse_extend_timing(b.gather);
    context.timed = false;
    const double ms = cf_fuse_median_ms(b.gather);
    CHECK(ms >= 20, "a run took %.1f ms, without the 20 ms that were added", ms);
    free_bench(&b);
}

// Choices that need more memory than the first one and the bytes left are removed from the list; the others' memory is allocated.
TEST(what_does_not_fit_is_left_out) {
    const cf_choice list[] = {{cf_algorithm_find("direct"), 1}, {cf_algorithm_find("none"), 1}, {cf_algorithm_find("direct"), 3}};
    bench b = make_bench();
    int64_t before = cf_memory_bytes(), took[2];
    for (int large = 0; large < 2; large++) {
        cf_choice choices[3];
        int64_t bytes = large ? 1 << 20 : 0, had = bytes;
        memcpy(choices, list, sizeof choices);
        int left = cf_fuse_set_choices(b.scatter, choices, 1, &bytes);
        before = cf_memory_bytes();
        left = cf_fuse_set_choices(b.scatter, choices, 3, &bytes);
        took[large] = cf_memory_bytes() - before;
        CHECK(left == (large || mesh.tp == 1 ? 3 : 2) && choices[left - 1].slices == 3, "%d choices are left", left);
        CHECK(bytes == had - took[large], "%lld bytes are left", (long long)bytes);
    }
    CHECK(took[0] == 0 && (mesh.tp == 1 || took[1] > 0), "%lld and %lld bytes", (long long)took[0], (long long)took[1]);
    free_bench(&b);
}

static void take_step(bench *b) {
    const int N = mesh.tp, me = mesh.tp_group.rank;
    for (int layer = 0; layer < LAYERS; layer++) {
        for (int i = 0; i < ROWS * COLUMNS; i++) b->full[me * ROWS * COLUMNS + i] = 100 * me + i + layer;
        cf_fuse_run(b->gather, b->full, ROWS, COLUMNS, compute, &b->of_gather, layer);
        for (int i = 0; i < N * ROWS * COLUMNS; i++)
            CHECK(b->full[i] == 100 * (i / (ROWS * COLUMNS)) + i % (ROWS * COLUMNS) + layer, "element %d", i);
        const int64_t *sum = cf_fuse_run(b->scatter, b->full, ROWS, COLUMNS, compute, &b->of_scatter, layer);
        for (int i = 0; i < ROWS * COLUMNS; i++)
            CHECK(sum[i] == (int64_t)N * (me * ROWS * COLUMNS + i) + N * (N - 1) / 2, "sum %d: %lld", i, (long long)sum[i]);
    }
}

// Plans take turns: those between the one before and this one are dropped, or have had theirs.
static void check_turn(const cf_tuner *t, int before) {
    const contest *c = &t->plans;
    for (int p = (before + 1) % PLANS; before >= 0 && p != t->current_plan; p = (p + 1) % PLANS)
        CHECK(c->dropped[p] || c->measured[p] > c->measured[t->current_plan], "plan %d waits, %d runs", p, t->current_plan);
}

static int take_trials(bench *b) {
    int steps = 0, plan = -1;
    for (cf_tuner_begin_step(b->tuner); cf_tuner_trying(b->tuner); cf_tuner_begin_step(b->tuner), steps++) {
        if (b->tuner->phase == COMPARE) check_turn(b->tuner, plan), plan = b->tuner->current_plan;
        take_step(b);
        if (steps % 5 == 4) cf_tuner_end_step(b->tuner); // as before work that is not part of a step
        CHECK(steps % 5 != 4 || !context.timed, "runs between steps would count as the next step's");
        CHECK(steps < CF_TRIAL_STEPS, "%d steps are not enough", steps);
    }
    return steps;
}

// All ranks have the same plan (as one number).
static void check_agreement(const cf_tuner *t) {
    double mine = 0, all[64];
    for (int i = 0; i < cf_tuner_operations(t); i++) {
        cf_choice c = cf_tuner_operation(t, i).choice;
        mine = mine * 1000 + 100 * (double)(c.algorithm - cf_algorithms) + c.slices;
    }
    context.transport->gather(context.transport, &mine, all, (int64_t)sizeof mine);
    for (int r = 0; r < mesh.tp; r++) CHECK(all[r] == mine, "rank %d has plan %.0f, this rank %.0f", r, all[r], mine);
}

// A call takes the same time for any number of rows, so fewer calls are better. Does the plan have few?
static bool finds_few_calls(void) {
    bench b = make_bench();
    b.of_gather = (work){.call_ms = 20};
    b.of_scatter = (work){.row_ms = 0.05};
    cf_tuner_start(b.tuner, true);
    int steps = take_trials(&b);
    bool found = mesh.tp == 1;
    CHECK(mesh.tp == 1 || steps > 10, "only %d steps", steps);
    for (int i = 0; i < cf_tuner_operations(b.tuner); i++) {
        cf_tuned o = cf_tuner_operation(b.tuner, i);
        found |= strncmp(o.name, "forward all-gather", 18) == 0 && o.choice.algorithm->blocking && o.ms < o.first_ms;
    }
    check_agreement(b.tuner);
    take_step(&b);
    free_bench(&b);
    return found;
}

// On a shared machine the difference may drown in noise: one attempt in ten must find it.
TEST(the_plan_suits_the_costs) {
    bool found = false;
    for (int attempt = 0; attempt < 10 && !found; attempt++) found = finds_few_calls();
    CHECK(found, "a gather whose calls take 20 ms each is still in slices");
}

TEST(ranks_agree_under_noise) {
    for (uint32_t seed = 1; seed <= 3; seed++) {
        bench b = make_bench();
        b.of_gather = (work){.noise_ms = 0.4, .noise = seed * 7919 + (uint32_t)mesh.tp_group.rank * 104729};
        b.of_scatter = (work){.noise_ms = 0.4, .noise = seed * 31 + (uint32_t)mesh.tp_group.rank};
        cf_tuner_start(b.tuner, true);
        take_trials(&b);
        check_agreement(b.tuner);
        free_bench(&b);
    }
}

TEST(a_known_plan_is_taken) {
    bench b = make_bench();
    for (int i = 0; i < cf_tuner_operations(b.tuner); i++)
        cf_tuner_set(b.tuner, cf_tuner_operation(b.tuner, i).name, (cf_choice){cf_algorithm_find("direct"), 3});
    cf_tuner_start(b.tuner, false);
    CHECK(!cf_tuner_trying(b.tuner), "nothing is left to try");
    if (mesh.tp > 1) CHECK(cf_fuse_get_config(b.gather)->slices == 3, "%d slices", cf_fuse_get_config(b.gather)->slices);
    take_step(&b);
    free_bench(&b);
}

// With other whole plans, those that equal none before them and that all operations can run; it is the first, or equals the second.
TEST(a_known_plan_is_compared) {
    for (int known = 0; known < 2; known++) {
        bench b = make_bench();
        b.of_gather.row_ms = b.of_scatter.row_ms = 0.01;
        for (int i = 0; i < cf_tuner_operations(b.tuner); i++) {
            const cf_tuned o = cf_tuner_operation(b.tuner, i);
            cf_tuner_set(b.tuner, o.name, known ? o.choice : (cf_choice){cf_algorithm_find("direct"), 12});
        }
        cf_tuner_start(b.tuner, true);
        if (mesh.tp > 1 && !known)
            CHECK(cf_tuner_operation(b.tuner, 0).choice.slices == 12, "%d slices", cf_tuner_operation(b.tuner, 0).choice.slices);
        bool another[PLANS];
        for (int i = 0; i < PLANS; i++) another[i] = mesh.tp > 1 && is_another(b.tuner, i);
        CHECK(mesh.tp == 1 || another[PREDICTED] == !known, "the second plan is the first");
        int steps = take_trials(&b), plans = 0, taken = 0;
        for (int i = 0; i < cf_tuner_plans(b.tuner); i++) {
            const cf_compared plan = cf_tuner_plan(b.tuner, i);
            CHECK((plan.step_ms > 0) == another[i], "plan %s: %g ms", plan.name, plan.step_ms);
            plans += plan.step_ms > 0, taken += plan.taken;
        }
        if (mesh.tp > 1)
            CHECK(plans >= 3 && taken == 1 && steps >= plans + 4 && steps <= plans + 12, "%d plans, %d taken, %d steps", plans,
                  taken, steps);
        check_agreement(b.tuner);
        free_bench(&b);
    }
}

// Where the first run of a choice takes longer, as on GPUs, each is run before any is measured.
TEST(every_choice_is_warmed) {
    if (mesh.tp == 1) return;
    context.transport->in_order = true;
    bench b = make_bench();
    cf_tuner_start(b.tuner, true);
    const operation *o = b.tuner->operation;
    bool ran[CF_CHOICES] = {0};
    int steps = 0;
    for (cf_tuner_begin_step(b.tuner); b.tuner->phase == WARM; cf_tuner_begin_step(b.tuner), steps++) {
        ran[o->current] = true;
        context.transport->in_order = false; // which it is for operations
        take_step(&b);
        context.transport->in_order = true;
    }
    for (int k = 0; k < o->contest.candidates; k++) CHECK(ran[k] && o->contest.measured[k] == 0, "choice %d", k);
    CHECK(steps >= o->contest.candidates && o->contest.candidates > WARM_STEPS, "%d steps", steps);
    context.transport->in_order = false;
    free_bench(&b);
}

// Exchanges far behind the best choice take those with them that are predicted to be no shorter, but no native collective.
TEST(a_bad_choice_takes_its_kind_with_it) {
    if (mesh.tp == 1) return;
    bench b = make_bench();
    operation *o = b.tuner->operation;
    int bad = -1, exchanges = 0, slower = 0; // the exchanges that are predicted to be shortest, but for choice 0
    for (int k = 1; k < o->contest.candidates; k++)
        if (!o->choice[k].algorithm->native &&
            (bad < 0 || predicted_ms(b.tuner, o, o->choice[k]) < predicted_ms(b.tuner, o, o->choice[bad])))
            bad = k;
    measure(&o->contest, 0, 10), measure(&o->contest, bad, 12.9);
    drop_worse(b.tuner, o, bad);
    for (int k = 0; k < o->contest.candidates; k++) CHECK(!o->contest.dropped[k], "choice %d is dropped, though none is far", k);
    o->contest.ms[bad][0] = 13.1;
    drop_worse(b.tuner, o, bad);
    for (int k = 1; k < o->contest.candidates; k++) {
        const bool native = o->choice[k].algorithm->native;
        CHECK(o->contest.dropped[k] == (k != bad && !native), "choice %d", k);
        exchanges += k != bad && !native;
        slower +=
            native && k != find_native(o) && predicted_ms(b.tuner, o, o->choice[k]) >= predicted_ms(b.tuner, o, o->choice[bad]);
    }
    CHECK(exchanges > 0 && slower > 0, "%d other exchanges, %d native choices predicted to be slower", exchanges, slower);
    free_bench(&b);
}

// The winner of a contest of three measurements each, by hand: what another saves is the median over turns, its error their range
// divided by one more than their number.
TEST(a_winner_saves_more_than_its_error) {
    static const struct {
        double ms[3][3]; // of each candidate; the second takes part from 2 candidates on
        int candidates, winner;
    } rows[] = {
        {{{20, 20, 20}, {19, 19, 19}}, 2, 1},
        {{{20, 20, 20}, {21, 21, 21}}, 2, 0},
        {{{20, 20, 20}, {19.7, 19.7, 19.7}}, 2, 0},            // less than the share of 2 %
        {{{20, 20, 60}, {19, 19, 19}}, 2, 0},                  // saves 1, 1, 41: 1, and its error is 10
        {{{20, 20, 20}, {17, 12, 21.5}}, 2, 1},                // 3, 8, -1.5: 3, and 2.375
        {{{20, 20, 20}, {17, 12, 24.1}}, 2, 0},                // 3, 8, -4.1: 3, and 3.025
        {{{10, 20, 30}, {9, 19, 29}}, 2, 1},                   // a machine that slows down: 1, 1, 1
        {{{20, 20, 20}, {19, 19, 19}, {18, 18, 18}}, 3, 2},    // the best of those that win,
        {{{20, 20, 20}, {18, 18, 18}, {19, 19, 19}}, 3, 1},    // in either place,
        {{{20, 20, 20}, {18, 18, 18}, {18, 18, 18}}, 3, 1},    // the first of equals,
        {{{20, 20, 20}, {19, 19, 19}, {18, 22, 14}}, 3, 1},    // and of these alone: 2, -2, 6, and 2
        {{{20, 20, 20}, {NAN, NAN, NAN}, {19, 19, 19}}, 3, 2}, // NAN: dropped after one measurement
        {{{20, 20, 20}, {1, NAN, NAN}, {21, 21, 21}}, 3, 0},
        {{{20, NAN, NAN}, {19, 19, 19}}, 2, 1}, // of turns that both have
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        contest c = {.candidates = rows[i].candidates, .repeats = 3};
        for (int k = 0; k < c.candidates; k++)
            for (int turn = 0; turn < 3; turn++) {
                c.dropped[k] |= isnan(rows[i].ms[k][turn]);
                if (!c.dropped[k]) c.ms[k][c.measured[k]++] = rows[i].ms[k][turn];
            }
        CHECK(winner_of(&c, CLEAR) == rows[i].winner, "row %zu: candidate %d wins", i, winner_of(&c, CLEAR));
        if (i == 2) CHECK(winner_of(&c, WORTH) == 1, "1.5 %% of a step are worth it");
    }
    contest little = {.candidates = 2, .measured = {1, 1}, .ms = {{20}, {19.9}}};
    CHECK(winner_of(&little, WORTH) == 0, "0.5 %% of a step are not worth it");
}

// Which candidates remain: the first, and the two best others unless they are 1.3 times the best, after a second turn 1.1 times.
TEST(the_far_and_the_many_are_dropped) {
    static const double ms[2][6] = {{20, 11.5, 10, 13.1, 12, 12.9}, {20, 11.2, 10, 0, 12, 0}};
    static const bool dropped[2][6] = {{false, false, false, true, true, true}, {false, true, false, true, true, true}};
    contest c = {.candidates = 6, .repeats = 3};
    for (int turn = 0; turn < 2; turn++) {
        for (int i = 0, first = 4, k; turn == 0 && i < 6; i++, first = k + 1) { // from where it is asked to begin, in turns
            k = least_measured(&c, first);
            CHECK(k == (4 + i) % 6, "candidate %d is the next of %d", k, i);
            measure(&c, k, ms[turn][k]);
            for (int other = 0; other < 6 && i < 5; other++) CHECK(!c.dropped[other], "%d is dropped too early", other);
        }
        for (int k = 0; turn > 0 && k < 6; k++)
            if (!c.dropped[k]) measure(&c, k, ms[turn][k]);
        for (int k = 0; k < 6; k++) CHECK(c.dropped[k] == dropped[turn][k], "turn %d: %d", turn, k);
    }
    measure(&c, 2, 12), measure(&c, 2, 99); // once too often: not taken
    CHECK(least_measured(&c, 2) == 0 && median_ms(&c, 2) == 10, "the first is measured least");
    measure(&c, 0, 20);
    CHECK(least_measured(&c, 0) == -1, "all that remain are measured");
}

static bool differ(cf_choice a, cf_choice b) {
    return a.algorithm != b.algorithm || a.slices != b.slices;
}

// Of the plans that a prediction takes, no two are the same. Where the rounds of an operation are direct already, as of one that is
// begun early, all the others may still be.
TEST(whole_plans_differ) {
    bool direct = false;
    cf_choice seen[CF_PLANS][2];
    int plans = 0;
    for (int plan = 0; plan < CF_PLANS && mesh.tp > 1; plan++) {
        bench b = make_bench();
        cf_fuse_config early = *cf_fuse_get_config(b.gather);
        early.name = "early", early.urgency = CF_EARLY;
        cf_fuse *fuse = cf_fuse_create(&context, early);
        cf_tuner *t = cf_tuner_create(&context, &mesh.tp_group);
        cf_tuner_add(t, "forward", fuse);
        cf_tuner_add(t, "forward", b.scatter);
        if (cf_tuner_take(t, plan)) {
            bool all_direct = true;
            for (int i = 0; i < 2; i++) {
                seen[plans][i] = cf_tuner_operation(t, i).choice;
                all_direct &= strcmp(seen[plans][i].algorithm->name, "direct") == 0 && seen[plans][i].slices == 1;
            }
            for (int before = 0; before < plans; before++)
                CHECK(differ(seen[before][0], seen[plans][0]) || differ(seen[before][1], seen[plans][1]),
                      "plan %d is one before it", plan);
            direct |= all_direct;
            plans++;
        }
        cf_tuner_free(t);
        cf_fuse_free(fuse);
        free_bench(&b);
    }
    CHECK(direct || mesh.tp == 1, "none of %d plans is direct for all", plans);
}

// Where costs do not know them, trials measure native collectives, and nothing else chooses one.
TEST(native_collectives_may_be_tried_only) {
    cf_group *group = &mesh.tp_group;
    const cf_choice none = {cf_algorithm_find("none"), 1};
    for (int tries = 0; tries < 2 && group->size > 1; tries++) {
        group->collectives = tries ? CF_TRIED : CF_NEVER;
        bench b = make_bench();
        bool first = false, any = false;
        double ms;
        cf_choice c;
        for (int k = 0; cf_tuner_choice(b.tuner, 0, k, &c, &ms); k++)
            first |= k == 0 && c.algorithm->native, any |= c.algorithm->native;
        CHECK(!first && any == tries, "native collectives: the first choice %d, any %d", first, any);
        CHECK(cf_tuner_can(b.tuner, cf_tuner_operation(b.tuner, 0).name, none) == tries, "a plan's choice: not %d", tries);
        for (int plan = PREDICTED + 1; plan < PLANS; plan++)
            if (strcmp(plan_names[plan], "none") == 0) CHECK(cf_tuner_take(b.tuner, plan) == tries, "the plan: not %d", tries);
        free_bench(&b);
    }
    group->collectives = CF_CHOSEN;
}

int main(int argc, char **argv) {
    cf_transport *transport = cf_transport_create("auto", &argc, &argv, 60);
    *transport->timeout_s = PATIENCE_S;
    cf_costs_agree(transport, 1);
    transport->costs.spare = true; // rounds are predicted, whatever cores there are
    cf_device_threads(1);
    mesh = ranks_mesh(transport, transport->size, 1);
    context = (cf_context){.transport = transport, .stream = cf_stream_create(), .trace = cf_trace_create(), .step = 41};
    int status = ranks_run(transport->rank);
    cf_trace_free(context.trace);
    cf_stream_free(context.stream);
    cf_mesh_free(&mesh);
    transport->close(transport);
    return status;
}
