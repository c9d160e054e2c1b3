// See tune.h.
#include "tune.h"
#include <math.h>

enum { OPERATIONS_MAX = 64, WARM_STEPS = 2, CHOICE_REPEATS = 3, PLAN_REPEATS = 5, FINALISTS = 2 };
static const double HOPELESS = 2; // times the shortest prediction: not tried
static const double FAR = 1.3;    // times the best: dropped after one measurement
static const double BEHIND = 1.1; // times the best: dropped after two
static const double CLEAR = 0.02; // of an operation's time: another choice must save at least this
static const double WORTH = 0.01; // of a step: another plan must save at least this

// The plans that are compared; behind the first two the name is the choice of all operations.
enum { FOUND, PREDICTED, PLANS = CF_PLANS };
static const char *const plan_names[PLANS] = {"found", "predicted", "none", "slice", "ring", "ring:2", "ring:4", "direct"};
_Static_assert((int)PLANS <= (int)CF_CHOICES, "a contest has room for all choices and for all plans");
_Static_assert(2 * CF_CHOICES + (CHOICE_REPEATS - 1) * (1 + FINALISTS) + PLANS + (PLAN_REPEATS - 1) * (1 + FINALISTS) <=
                   CF_TRIAL_STEPS,
               "trials are bounded");

// Candidates measured in turn: the choices of an operation, or the plans. Candidate 0 stays unless another one is clearly better.
typedef struct contest {
    int candidates, repeats; // measurements of each
    double ms[CF_CHOICES][PLAN_REPEATS];
    int measured[CF_CHOICES];
    bool dropped[CF_CHOICES];
} contest;

typedef struct operation {
    char name[96];
    cf_fuse *fuse;
    cf_choice choice[CF_CHOICES];
    contest contest; // of its choices
    int best;        // choice
    int current;     // choice of this step
} operation;

struct cf_tuner {
    cf_context *context;
    const cf_group *world;
    operation operation[OPERATIONS_MAX];
    int operations;
    enum { DONE, WARM, SEARCH, COMPARE } phase;
    bool set;       // cf_tuner_set() has set choices: they are only compared with other plans
    int warm_steps; // left
    bool in_step;
    cf_event begin; // of the step
    contest plans;
    int current_plan, winner; // -1: none yet
    int left_out;
};

// --- contests ---

static double median_ms(const contest *c, int i) { // NAN: not measured, or i is -1
    double sorted[PLAN_REPEATS];
    if (i >= 0) memcpy(sorted, c->ms[i], sizeof sorted);
    return cf_median(sorted, i < 0 ? 0 : c->measured[i]);
}

// The candidate measured least, searching from `first` and wrapping around; -1: all have been measured often enough.
static int least_measured(const contest *c, int first) {
    int least = -1;
    for (int k = 0; k < c->candidates; k++) {
        int i = (first + k) % c->candidates;
        if (!c->dropped[i] && c->measured[i] < c->repeats && (least < 0 || c->measured[i] < c->measured[least])) least = i;
    }
    return least;
}

// Notes a measurement. Once each candidate has one, only candidate 0 and the best others remain.
static void measure(contest *c, int i, double ms) {
    if (c->measured[i] < c->repeats) c->ms[i][c->measured[i]++] = ms;
    double best = INFINITY;
    for (int k = 0; k < c->candidates; k++) {
        if (!c->dropped[k] && c->measured[k] == 0) return;
        best = fmin(best, median_ms(c, k));
    }
    for (int k = 1; k < c->candidates; k++) {
        int better = 0;
        for (int other = 1; other < c->candidates; other++) better += !c->dropped[other] && median_ms(c, other) < median_ms(c, k);
        if (median_ms(c, k) > (c->measured[k] > 1 ? BEHIND : FAR) * best || better >= FINALISTS) c->dropped[k] = true;
    }
}

// What candidate k saves over candidate 0, the median over turns, and its error. A machine's speed drifts, so only measurements of
// the same turn are compared.
static double saved_ms(const contest *c, int k, double *error) {
    double saved[PLAN_REPEATS], low = INFINITY, high = -INFINITY;
    const int turns = c->measured[k] < c->measured[0] ? c->measured[k] : c->measured[0];
    for (int i = 0; i < turns; i++) {
        saved[i] = c->ms[0][i] - c->ms[k][i];
        low = fmin(low, saved[i]), high = fmax(high, saved[i]);
    }
    *error = turns > 0 ? (high - low) / (turns + 1) : INFINITY;
    return cf_median(saved, turns);
}

// Candidate 0, unless another saves more than this share of its time and more than the measurements vary.
static int winner_of(const contest *c, double share) {
    double most = share * median_ms(c, 0), error = 0;
    int winner = 0;
    for (int k = 1; k < c->candidates; k++) {
        const double saved = c->dropped[k] ? 0 : saved_ms(c, k, &error);
        if (saved > most && saved > error) winner = k, most = saved;
    }
    return winner;
}

// --- operations and their choices ---

cf_tuner *cf_tuner_create(cf_context *context, const cf_group *world) {
    cf_tuner *t = cf_host_alloc(1, sizeof *t, "the tuner");
    t->context = context, t->world = world, t->winner = -1;
    t->plans.candidates = PLANS, t->plans.repeats = PLAN_REPEATS;
    return t;
}

void cf_tuner_free(cf_tuner *t) {
    free(t);
}

static operation *find(const cf_tuner *t, const char *name) { // NULL: none has this name
    for (int i = 0; i < t->operations; i++)
        if (strcmp(t->operation[i].name, name) == 0) return (operation *)&t->operation[i];
    return NULL;
}

static int find_choice(const operation *o, cf_choice c) { // -1: the operation does not have it
    for (int i = 0; i < o->contest.candidates; i++)
        if (o->choice[i].algorithm == c.algorithm && o->choice[i].slices == c.slices) return i;
    return -1;
}

static int find_native(const operation *o) {
    int blocking = find_choice(o, (cf_choice){cf_algorithm_find("none"), 1});
    return blocking >= 0 ? blocking : find_choice(o, (cf_choice){cf_algorithm_find("slice"), 1}); // begun early: must not block
}

// Native collectives that costs do not choose may still be tried.
static cf_work work_of(const cf_fuse *fuse) {
    cf_work work = cf_fuse_work(fuse);
    work.native |= cf_fuse_get_config(fuse)->group->collectives == CF_TRIED;
    return work;
}

static double predicted_ms(const cf_tuner *t, const operation *o, cf_choice c) {
    const cf_work work = work_of(o->fuse);
    return cf_choice_ms(c, &work, &t->context->transport->costs);
}

// Its first choice is the one that it was created with. Rounds that are predicted to be hopeless (small slices, many ranks) would
// make trials too expensive; the simplest rounds and the baselines are always tried.
void cf_tuner_add(cf_tuner *t, const char *pass, cf_fuse *fuse) {
    const cf_fuse_config *config = cf_fuse_get_config(fuse);
    char name[sizeof t->operation->name];
    if (config->side == CF_NO_COMPUTE || config->group->size == 1) return;
    snprintf(name, sizeof name, "%.*s %s %s", (int)strcspn(pass, ","), pass, cf_operation_name(config->operation), config->name);
    if (t->operations == OPERATIONS_MAX || find(t, name))
        cf_die(NULL, "operation %s is added twice, or is one more than %d", name, OPERATIONS_MAX);
    operation *o = &t->operation[t->operations++];
    snprintf(o->name, sizeof o->name, "%s", name);
    o->fuse = fuse, o->contest.repeats = CHOICE_REPEATS;
    o->choice[o->contest.candidates++] = (cf_choice){config->algorithm, config->slices};
    const cf_work work = work_of(fuse);
    cf_choice list[CF_CHOICES];
    double best = INFINITY;
    const int count = cf_choices(&work, &t->context->transport->costs, list, CF_CHOICES - 1);
    for (int i = 0; i < count; i++) best = fmin(best, predicted_ms(t, o, list[i]));
    for (int i = 0; i < count; i++)
        if (find_choice(o, list[i]) != 0 && (i == 0 || list[i].algorithm->native || predicted_ms(t, o, list[i]) < HOPELESS * best))
            o->choice[o->contest.candidates++] = list[i];
}

int cf_tuner_operations(const cf_tuner *t) {
    return t->operations;
}

cf_tuned cf_tuner_operation(const cf_tuner *t, int i) {
    const operation *o = &t->operation[i];
    return (cf_tuned){.name = o->name,
                      .choice = o->choice[o->best],
                      .ms = median_ms(&o->contest, o->best),
                      .first_ms = median_ms(&o->contest, 0),
                      .native_ms = median_ms(&o->contest, find_native(o))};
}

bool cf_tuner_choice(const cf_tuner *t, int i, int k, cf_choice *choice, double *ms) {
    const operation *o = &t->operation[i];
    if (k >= o->contest.candidates) return false;
    *choice = o->choice[k], *ms = median_ms(&o->contest, k);
    return true;
}

bool cf_tuner_can(const cf_tuner *t, const char *name, cf_choice c) {
    const operation *o = find(t, name);
    return o && c.algorithm && !c.algorithm->bound && (!c.algorithm->native || work_of(o->fuse).native);
}

void cf_tuner_set(cf_tuner *t, const char *name, cf_choice c) {
    operation *o = find(t, name);
    if (!cf_tuner_can(t, name, c)) cf_die(NULL, "%s cannot be set", name);
    const cf_work work = cf_fuse_work(o->fuse);
    c.algorithm = cf_algorithm_serving(c.algorithm, work.operation, work.side);
    int i = find_choice(o, c);
    if (i < 0) i = o->contest.candidates < CF_CHOICES ? o->contest.candidates++ : CF_CHOICES - 1;
    o->choice[i] = c, o->best = i, t->set = true;
}

int cf_tuner_left_out(const cf_tuner *t) {
    return t->left_out;
}

// --- comparison of plans ---

int cf_tuner_plans(const cf_tuner *t) {
    return t->winner >= 0 ? PLANS : 0;
}

cf_compared cf_tuner_plan(const cf_tuner *t, int i) {
    return (cf_compared){plan_names[i], median_ms(&t->plans, i), i == t->winner};
}

// The choice of an operation in a plan; -1: it has no such choice.
static int choice_in(const cf_tuner *t, const operation *o, int plan) {
    if (plan == FOUND) return o->best;
    if (plan == PREDICTED) return 0;
    cf_choice c;
    const cf_work work = cf_fuse_work(o->fuse);
    cf_choice_parse(plan_names[plan], &c);
    const bool ring = c.algorithm == cf_algorithm_find("ring"); // stands for the rounds that suit operation and links
    c.algorithm = ring ? cf_choice_rounds(&work, &t->context->transport->costs)
                       : cf_algorithm_serving(c.algorithm, work.operation, work.side);
    const int choice = find_choice(o, c);
    return choice < 0 && c.algorithm->native ? find_native(o) : choice;
}

// false: some operation cannot run the plan, or it equals one before it.
static bool is_another(const cf_tuner *t, int plan) {
    bool same[PLANS];
    memset(same, true, sizeof same);
    for (const operation *o = t->operation; o < t->operation + t->operations; o++) {
        const int choice = choice_in(t, o, plan);
        if (choice < 0) return false;
        for (int before = 0; before < plan; before++) same[before] &= choice_in(t, o, before) == choice;
    }
    return !memchr(same, true, (size_t)plan);
}

static void begin_comparison(cf_tuner *t) {
    for (int p = 0; p < PLANS; p++) t->plans.dropped[p] = !is_another(t, p);
    t->phase = COMPARE, t->current_plan = FOUND;
}

bool cf_tuner_take(cf_tuner *t, int plan) {
    if (!is_another(t, plan)) return false;
    for (operation *o = t->operation; o < t->operation + t->operations; o++) o->best = choice_in(t, o, plan);
    return true;
}

// --- steps ---

void cf_tuner_start(cf_tuner *t, bool search) {
    t->warm_steps = WARM_STEPS;
    search &= t->operations > 0;
    cf_transport *transport = t->context->transport;
    int64_t bytes = 0; // half of the memory that is left: libraries take more as a run goes on
    if (search) bytes = cf_allreduce_min(transport, (cf_device_memory(transport->local_size) - cf_memory_bytes()) / 2);
    for (operation *o = t->operation; o < t->operation + t->operations; o++) {
        const cf_choice best = o->choice[o->best];
        int fitting =
            cf_fuse_set_choices(o->fuse, search ? o->choice : &o->choice[o->best], search ? o->contest.candidates : 1, &bytes);
        if (!search) continue;
        t->left_out += o->contest.candidates - fitting, o->contest.candidates = fitting;
        o->best = find_choice(o, best) >= 0 ? find_choice(o, best) : 0;
        cf_fuse_choose(o->fuse, o->best);
        // On GPUs the first run of a choice times products and opens the memory of peers.
        if (transport->in_order && o->contest.candidates > t->warm_steps) t->warm_steps = o->contest.candidates;
    }
    if (!search) return;
    t->phase = WARM;
    if (t->set) begin_comparison(t);
}

bool cf_tuner_trying(const cf_tuner *t) {
    return t && t->phase != DONE;
}

// If the choice that was just measured is far from the best, others of its mode that are predicted to take as long are not tried.
static void drop_worse(const cf_tuner *t, operation *o, int measured) {
    double best = INFINITY;
    for (int k = 0; k < o->contest.candidates; k++) best = fmin(best, median_ms(&o->contest, k)); // fmin ignores NAN
    if (!(median_ms(&o->contest, measured) > FAR * best)) return;
    for (int k = 1; k < o->contest.candidates; k++)
        o->contest.dropped[k] |= o->contest.measured[k] == 0 && k != find_native(o) &&
                                 o->choice[k].algorithm->native == o->choice[measured].algorithm->native &&
                                 predicted_ms(t, o, o->choice[k]) >= predicted_ms(t, o, o->choice[measured]);
}

// ms: of each operation and of the step, the same on all ranks.
static void end_search_step(cf_tuner *t, const double *ms) {
    bool more = false;
    for (int i = 0; i < t->operations; i++) {
        operation *o = &t->operation[i];
        measure(&o->contest, o->current, isnan(ms[i]) ? INFINITY : ms[i]);
        drop_worse(t, o, o->current);
        more |= least_measured(&o->contest, 0) >= 0;
    }
    if (more) return;
    for (operation *o = t->operation; o < t->operation + t->operations; o++) o->best = winner_of(&o->contest, CLEAR);
    begin_comparison(t);
}

static void end_compare_step(cf_tuner *t, double step_ms) {
    measure(&t->plans, t->current_plan, step_ms);
    t->current_plan = least_measured(&t->plans, t->current_plan + 1); // plans take turns
    if (t->current_plan >= 0) return;
    t->winner = winner_of(&t->plans, WORTH);
    for (operation *o = t->operation; o < t->operation + t->operations; o++)
        cf_fuse_choose(o->fuse, o->best = choice_in(t, o, t->winner));
    t->phase = DONE;
}

void cf_tuner_end_step(cf_tuner *t) {
    if (!cf_tuner_trying(t) || !t->in_step) return;
    const int count = t->operations + 1;
    double ms[OPERATIONS_MAX + 1] = {0};
    cf_event end = cf_event_record(t->context->stream);
    cf_stream_sync(t->context->stream);
    for (int i = 0; i < t->operations; i++) ms[i] = cf_fuse_median_ms(t->operation[i].fuse);
    ms[t->operations] = cf_event_ms(end) - cf_event_ms(t->begin);
    t->in_step = t->context->timed = false;
    double *all = cf_allgather_alloc(t->context->transport, ms, count * (int64_t)sizeof *ms);
    for (int r = 0; r < t->world->size; r++) // fmax ignores NAN: not measured on that rank
        for (int i = 0; i < count; i++) ms[i] = fmax(ms[i], all[r * count + i]);
    free(all);
    if (t->phase == COMPARE)
        end_compare_step(t, ms[t->operations]);
    else if (t->phase == SEARCH)
        end_search_step(t, ms);
    else if (--t->warm_steps == 0)
        t->phase = SEARCH;
}

void cf_tuner_begin_step(cf_tuner *t) {
    cf_tuner_end_step(t);
    if (!cf_tuner_trying(t)) return;
    for (int i = 0; i < t->operations; i++) {
        operation *o = &t->operation[i];
        // Operations search from different choices on, so that a slow moment, or a choice that slows others, does not always hit
        // the same choice.
        const int warm = t->context->transport->in_order ? t->warm_steps % o->contest.candidates : -1;
        const int next = t->phase == SEARCH ? least_measured(&o->contest, i) : t->phase == WARM ? warm : -1;
        o->current = t->phase == COMPARE ? choice_in(t, o, t->current_plan) : next >= 0 ? next : o->best;
        cf_fuse_choose(o->fuse, o->current);
    }
    t->context->timed = t->phase == SEARCH;
    t->in_step = true;
    t->begin = cf_event_record(t->context->stream);
}
