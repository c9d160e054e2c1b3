// See tune.h.
#include "tune.h"
#include "die.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OPERATIONS_MAX = 64, WARM_STEPS = 2, WAY_REPEATS = 3, PLAN_REPEATS = 5, FINALISTS = 2, PLANS = 7 };
_Static_assert((int)PLANS <= (int)CF_CHOICES, "plans are candidates, as ways are");
_Static_assert(WARM_STEPS + CF_CHOICES + (WAY_REPEATS - 1) * (1 + FINALISTS) + PLANS + (PLAN_REPEATS - 1) * (1 + FINALISTS) <=
                   CF_TRIAL_STEPS,
               "trials are bounded");
static const double FAR = 1.3;    // from the best: tried no more
static const double HOPELESS = 2; // times the shortest, by arithmetic: not tried
static const double CLEAR = 0.02; // of an operation's time, at least: what another way must save
static const double WORTH = 0.01; // of a step: what another plan must save, at least

// Candidates that are measured in turns: ways of an operation, whole plans.
typedef struct trial {
    int repeats; // of each
    double ms[CF_CHOICES][PLAN_REPEATS];
    int tried[CF_CHOICES];
    bool out[CF_CHOICES]; // left out
} trial;

typedef struct operation {
    char name[96];
    cf_fuse *fuse;
    bool set; // by a plan
    cf_choice way[CF_CHOICES];
    int ways, chosen;
    trial trial; // of ways
} operation;

typedef enum { PLAN_FOUND, PLAN_FIRST, PLAN_NONE, PLAN_SLICE, PLAN_ROUNDS, PLAN_ROUNDS_2, PLAN_ROUNDS_4 } plan_kind;
static const char *const plan_names[PLANS] = {"found", "predicted", "none", "slice", "commfuse", "commfuse:2", "commfuse:4"};

typedef enum { DONE, WARM, SEARCH, COMPARE } phase;

struct cf_tuner {
    cf_context *context;
    const cf_group *world;
    operation *operation;
    int operations;
    phase phase;
    int step;    // of this phase
    bool inside; // a step
    cf_moment begin;
    int way[OPERATIONS_MAX]; // of this step
    // Comparison: way of each operation in each plan; left out are those that cannot be had, or are the same as another
    int planned[PLANS][OPERATIONS_MAX];
    trial trial; // of plans
    int current, taken, left_out;
    double *all; // (ranks, operations + 1) what all ranks have measured
};

// --- trials ---

static double median_ms(const trial *t, int i) { // NAN: it has not been tried, or there is none
    double sorted[PLAN_REPEATS];
    if (i >= 0) memcpy(sorted, t->ms[i], sizeof sorted);
    return cf_median(sorted, i < 0 ? 0 : t->tried[i]);
}

static void note(trial *t, int i, double ms) {
    if (t->tried[i] < t->repeats) t->ms[i][t->tried[i]++] = ms;
}

// Of those that are left, from `first` on in a circle, the one tried least; -1: all have been tried often enough.
static int least_tried(const trial *t, int count, int first) {
    int best = -1;
    for (int k = 0; k < count; k++) {
        int i = (first + k) % count;
        if (!t->out[i] && t->tried[i] < t->repeats && (best < 0 || t->tried[i] < t->tried[best])) best = i;
    }
    return best;
}

// Once each has been tried: only the first and the best others go on.
static void drop_the_far(trial *t, int count) {
    double best = INFINITY;
    for (int k = 0; k < count; k++) {
        if (!t->out[k] && t->tried[k] == 0) return;
        best = fmin(best, median_ms(t, k));
    }
    for (int k = 1; k < count; k++) {
        int better = 0;
        for (int i = 1; i < count; i++) better += !t->out[i] && median_ms(t, i) < median_ms(t, k);
        if (median_ms(t, k) > FAR * best || better >= FINALISTS) t->out[k] = true;
    }
}

// What candidate k saves: of what one turn after the other says, the median and how far that may be wrong. A machine's speed
// drifts, so only what was measured in the same turn is compared.
static double saved_ms(const trial *t, int k, double *error) {
    double saved[PLAN_REPEATS], low = INFINITY, high = -INFINITY;
    const int turns = t->tried[k] < t->tried[0] ? t->tried[k] : t->tried[0];
    for (int i = 0; i < turns; i++) {
        saved[i] = t->ms[0][i] - t->ms[k][i];
        low = fmin(low, saved[i]), high = fmax(high, saved[i]);
    }
    *error = turns > 0 ? (high - low) / (turns + 1) : INFINITY;
    return cf_median(saved, turns);
}

// The first, unless another one is shorter: by a share of it at least, and by more than measurements vary.
static int shortest(const trial *t, int count, double share) {
    double most = share * median_ms(t, 0), error = 0;
    int chosen = 0;
    for (int k = 1; k < count; k++) {
        const double saved = t->out[k] ? 0 : saved_ms(t, k, &error);
        if (saved > most && saved > error) chosen = k, most = saved;
    }
    return chosen;
}

// --- life ---

cf_tuner *cf_tuner_create(cf_context *context, const cf_group *world) {
    cf_tuner *t = calloc(1, sizeof *t);
    operation *operations = calloc(OPERATIONS_MAX, sizeof *operations);
    if (!t || !operations) cf_die(NULL, "out of memory for the tuner");
    *t = (cf_tuner){.context = context, .world = world, .operation = operations, .taken = -1, .trial.repeats = PLAN_REPEATS};
    return t;
}

void cf_tuner_free(cf_tuner *t) {
    if (!t) return;
    free(t->all);
    free(t->operation);
    free(t);
}

static operation *find(const cf_tuner *t, const char *name) {
    for (int i = 0; i < t->operations; i++)
        if (strcmp(t->operation[i].name, name) == 0) return &t->operation[i];
    return NULL;
}

static int find_way(const operation *o, cf_choice c) {
    for (int i = 0; i < o->ways; i++) {
        const cf_choice *w = &o->way[i];
        if (w->mode == c.mode && w->slices == c.slices && (w->route == c.route || c.mode != CF_MODE_COMMFUSE)) return i;
    }
    return -1;
}

// The choice that the operation was created with comes first. Rounds that the arithmetic calls hopeless, where slices are small
// and ranks many, would cost more to try than the trials may; the simplest rounds and the baselines are always tried.
static void list_ways(const cf_tuner *t, operation *o) {
    const cf_fuse_plan *plan = cf_fuse_get_plan(o->fuse);
    const cf_costs *costs = &t->context->transport->costs;
    cf_work work = cf_fuse_work(o->fuse);
    cf_choice list[CF_CHOICES];
    double ms[CF_CHOICES], best = INFINITY;
    int count = cf_choices(&work, costs, list);
    for (int i = 0; i < count; i++) ms[i] = cf_choice_ms(list[i], &work, costs), best = fmin(best, ms[i]);
    o->way[o->ways++] = (cf_choice){plan->mode, plan->route, plan->slices};
    for (int i = 0; i < count && o->ways < CF_CHOICES; i++)
        if (find_way(o, list[i]) != 0 && (i == 0 || list[i].mode != CF_MODE_COMMFUSE || ms[i] < HOPELESS * best))
            o->way[o->ways++] = list[i];
}

void cf_tuner_add(cf_tuner *t, const char *place, cf_fuse *fuse) {
    const cf_fuse_plan *plan = cf_fuse_get_plan(fuse);
    char name[sizeof t->operation->name];
    if (plan->side == CF_NO_COMPUTE || plan->group->size == 1) return;
    snprintf(name, sizeof name, "%.*s %s %s", (int)strcspn(place, ","), place, cf_operation_name(plan->operation), plan->name);
    if (t->operations == OPERATIONS_MAX || find(t, name))
        cf_die(NULL, "%s is there twice, or there are more than %d operations", name, OPERATIONS_MAX);
    operation *o = &t->operation[t->operations++];
    snprintf(o->name, sizeof o->name, "%s", name);
    o->fuse = fuse, o->trial.repeats = WAY_REPEATS;
    list_ways(t, o);
}

// --- the plan ---

static int native_way(const operation *o) {
    int blocking = find_way(o, (cf_choice){CF_MODE_NONE, CF_RING, 1});
    return blocking >= 0 ? blocking : find_way(o, (cf_choice){CF_MODE_SLICE, CF_RING, 1}); // begun early: must not block
}

int cf_tuner_operations(const cf_tuner *t) {
    return t->operations;
}

cf_tuned cf_tuner_operation(const cf_tuner *t, int i) {
    const operation *o = &t->operation[i];
    int way = t->taken >= 0 ? t->planned[t->taken][i] : o->chosen;
    return (cf_tuned){.name = o->name,
                      .choice = o->way[way],
                      .ms = median_ms(&o->trial, way),
                      .first_ms = median_ms(&o->trial, 0),
                      .native_ms = median_ms(&o->trial, native_way(o))};
}

bool cf_tuner_can(const cf_tuner *t, cf_choice c) {
    return cf_mode_is_fused(c.mode) || (t->context->transport->costs.native && !t->context->check);
}

void cf_tuner_set(cf_tuner *t, const char *name, cf_choice c) {
    operation *o = find(t, name);
    if (!o || !cf_tuner_can(t, c)) cf_die(NULL, "%s cannot be set", name);
    int way = find_way(o, c);
    if (way < 0) way = o->ways < CF_CHOICES ? o->ways++ : o->ways - 1;
    o->way[way] = c, o->chosen = way, o->set = true;
}

int cf_tuner_plans(const cf_tuner *t) {
    return t->taken >= 0 ? PLANS : 0;
}

cf_compared cf_tuner_plan(const cf_tuner *t, int i) {
    return (cf_compared){plan_names[i], median_ms(&t->trial, i), i == t->taken};
}

// --- comparison of plans ---

static bool plan_ways(const cf_tuner *t, plan_kind p, int *ways) {
    bool differs = p == PLAN_FOUND;
    for (int i = 0; i < t->operations; i++) {
        const operation *o = &t->operation[i];
        cf_route route = t->context->transport->costs.route;
        if (cf_fuse_get_plan(o->fuse)->operation == CF_ALLTOALL) route = CF_DIRECT;
        int slice = find_way(o, (cf_choice){CF_MODE_SLICE, CF_RING, 4});
        ways[i] = p == PLAN_FOUND   ? o->chosen
                  : p == PLAN_FIRST ? 0
                  : p == PLAN_NONE  ? native_way(o)
                  : p == PLAN_SLICE ? (slice >= 0 ? slice : native_way(o))
                                    : find_way(o, (cf_choice){CF_MODE_COMMFUSE, route, 1 << (p - PLAN_ROUNDS)});
        if (ways[i] < 0) return false;
        differs |= ways[i] != o->chosen;
    }
    return differs;
}

static void begin_comparison(cf_tuner *t) {
    for (int p = 0; p < PLANS; p++) {
        bool *out = t->trial.out;
        out[p] = !plan_ways(t, (plan_kind)p, t->planned[p]);
        for (int q = 0; q < p; q++)
            out[p] |= !out[q] && memcmp(t->planned[p], t->planned[q], (size_t)t->operations * sizeof(int)) == 0;
    }
    t->phase = COMPARE, t->current = 0;
}

static void end_comparison(cf_tuner *t) {
    t->taken = shortest(&t->trial, PLANS, WORTH);
    for (int i = 0; i < t->operations; i++) cf_fuse_take(t->operation[i].fuse, t->planned[t->taken][i]);
    t->phase = DONE;
    t->context->timed = false;
}

// --- steps ---

void cf_tuner_start(cf_tuner *t, bool search) {
    bool set = false;
    const int ranks = t->world->size, count = t->operations + 1;
    search &= t->operations > 0 && !t->context->check; // checksums are made for one schedule
    cf_transport *transport = t->context->transport;
    int64_t room = 0; // half of what is left: libraries take more as a run goes on
    if (search) room = cf_least_host(transport, (cf_device_memory(transport->local_size) - cf_memory_bytes()) / 2);
    for (int i = 0; i < t->operations; i++) {
        operation *o = &t->operation[i];
        const cf_choice chosen = o->way[o->chosen];
        int ways = cf_fuse_offer(o->fuse, search ? o->way : &o->way[o->chosen], search ? o->ways : 1, &room);
        set |= o->set;
        if (!search) continue;
        t->left_out += o->ways - ways, o->ways = ways;
        o->chosen = find_way(o, chosen) >= 0 ? find_way(o, chosen) : 0;
        cf_fuse_take(o->fuse, o->chosen);
    }
    if (!search) return;
    t->phase = set ? COMPARE : WARM;
    if (set) begin_comparison(t);
    t->all = calloc((size_t)(ranks * count), sizeof *t->all);
    if (!t->all) cf_die(NULL, "out of memory for the trials of %d ranks", ranks);
}

int cf_tuner_left_out(const cf_tuner *t) {
    return t->left_out;
}

bool cf_tuner_trying(const cf_tuner *t) {
    return t && t->phase != DONE;
}

// What all ranks have measured becomes the maximum of all.
static void agree(cf_tuner *t, double *ms) {
    const int count = t->operations + 1, ranks = t->world->size;
    cf_allgather_host(t->context->transport, ms, t->all, count * (int64_t)sizeof *ms);
    for (int r = 0; r < ranks; r++) // fmax passes over NAN: not measured
        for (int i = 0; i < count; i++) ms[i] = fmax(ms[i], t->all[r * count + i]);
}

static void record(cf_tuner *t, const double *ms) {
    if (t->phase == COMPARE) {
        note(&t->trial, t->current, ms[t->operations]);
        drop_the_far(&t->trial, PLANS);
        int next = least_tried(&t->trial, PLANS, t->current + 1); // plans take turns
        if (next >= 0)
            t->current = next;
        else
            end_comparison(t);
        return;
    }
    if (t->phase == WARM) {
        if (++t->step == WARM_STEPS) t->phase = SEARCH;
        return;
    }
    bool more = false;
    for (int i = 0; i < t->operations; i++) {
        operation *o = &t->operation[i];
        note(&o->trial, t->way[i], isnan(ms[i]) ? INFINITY : ms[i]);
        drop_the_far(&o->trial, o->ways);
        more |= least_tried(&o->trial, o->ways, i) >= 0;
    }
    if (more) return;
    for (operation *o = t->operation; o < t->operation + t->operations; o++) o->chosen = shortest(&o->trial, o->ways, CLEAR);
    begin_comparison(t);
}

void cf_tuner_end_step(cf_tuner *t) {
    if (!cf_tuner_trying(t) || !t->inside) return;
    double ms[OPERATIONS_MAX + 1];
    cf_moment end = cf_moment_now(t->context->stream);
    cf_stream_sync(t->context->stream);
    for (int i = 0; i < t->operations; i++) ms[i] = cf_fuse_spent_ms(t->operation[i].fuse);
    ms[t->operations] = cf_moment_ms(end) - cf_moment_ms(t->begin);
    t->inside = false;
    agree(t, ms);
    record(t, ms);
}

void cf_tuner_begin_step(cf_tuner *t) {
    if (!cf_tuner_trying(t)) return;
    cf_tuner_end_step(t);
    if (!cf_tuner_trying(t)) return;
    for (int i = 0; i < t->operations; i++) {
        operation *o = &t->operation[i];
        // Neighbours in the list begin with different ways, so that a slow moment or a way that disturbs others does not always
        // meet the same.
        int way = t->phase == COMPARE ? t->planned[t->current][i] : o->chosen, next = least_tried(&o->trial, o->ways, i);
        if (t->phase == SEARCH && next >= 0) way = next;
        cf_fuse_take(o->fuse, t->way[i] = way);
    }
    t->context->timed = t->phase == SEARCH;
    t->inside = true;
    t->begin = cf_moment_now(t->context->stream);
}
