// See choice.h.
#include "choice.h"
#include "replay.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

// Slices tried; ranks up to which more than one is tried (schedules grow with both); slices that a plan file may name.
enum { SLICES_MOST = 4, SLICES_RANKS = 64, SLICES_GIVEN = 1 << 16 };
// Costs are rough, and only rounds hide transfers on a link that is slower than assumed. So another choice, or more slices, must
// take less than this share of the time.
static const double WORTH = 0.9;
// Without computation, larger messages are exchanged: unlike a collective they keep the program's order, in which bulk gives way.
static const double SMALL_BYTES = 32 << 10;

// --- the predicted time of a choice ---

typedef struct estimate {
    const cf_work *work;
    const cf_costs *costs;
} estimate;

static double compute_ms(const void *argument, const cf_schedule *s, const cf_step *step) {
    const estimate *e = argument;
    if (step->kind != CF_COMPUTE) return 0; // an addition costs little compared with its product
    double share = (double)step->count / (s->ranks * s->slices);
    if (s->side == CF_COMPUTE_BOTH) share /= 2;
    return 1e3 * (share * e->work->flops / e->costs->flops_per_s + e->costs->piece_s);
}

static double transfer_ms(const void *argument, const cf_schedule *s, const cf_step *step) {
    const estimate *e = argument;
    const cf_costs *c = e->costs;
    double wire = e->work->bytes / s->slices / c->bytes_per_s;
    if (step->kind == CF_COLLECTIVE) return 1e3 * (2 * ceil(log2(s->ranks)) * c->message_s + (s->ranks - 1) * wire);
    bool unit = s->route == CF_ONCE && step != s->step && step->joined;
    return 1e3 * (wire + (c->in_order && !unit ? c->latency_s : c->message_s));
}

double cf_choice_ms(cf_choice choice, const cf_work *w, const cf_costs *c) {
    cf_schedule *s = cf_schedule_create(w->operation, w->side, choice.mode, choice.route, w->ranks, 0, choice.slices, w->folds);
    estimate e = {w, c};
    cf_machine machine = {compute_ms, transfer_ms, &e, c->in_order ? 0 : 1e3 * c->latency_s, c->in_order};
    double ms = cf_replay(&s, 1, &machine).finished_ms;
    cf_schedule_free(s);
    return ms;
}

// --- choices ---

// The first is one slice in rounds by the transport's route.
int cf_choices(const cf_work *w, const cf_costs *c, cf_choice list[CF_CHOICES]) {
    bool alone = w->side == CF_NO_COMPUTE;
    const cf_route first = w->operation == CF_ALLTOALL ? CF_DIRECT : c->route;
    const cf_route second = w->operation == CF_ALLTOALL || first == CF_RING ? CF_DIRECT : CF_RING;
    const cf_choice native = {w->early ? CF_MODE_SLICE : CF_MODE_NONE, c->route, 1};
    int count = 0;
    if (alone && w->native && c->in_order) { // messages keep their order anyway, and the library's sums take no kernels
        list[0] = native;
        return 1;
    }
    for (int m = 1; m <= SLICES_MOST && !alone; m *= 2)
        for (int other = 0; other < (first == second ? 1 : 2); other++)
            if ((m == 1 && !other) || w->ranks <= SLICES_RANKS)
                list[count++] = (cf_choice){CF_MODE_COMMFUSE, other ? second : first, m};
    list[count++] = (cf_choice){CF_MODE_COMMFUSE, CF_ONCE, 1};
    if (!w->native || (alone && w->bytes > SMALL_BYTES)) return count;
    list[count++] = native;
    for (int m = 2; m <= SLICES_MOST && !alone; m *= 2) list[count++] = (cf_choice){CF_MODE_SLICE, c->route, m};
    return count;
}

cf_choice cf_choose(const cf_work *w, const cf_costs *c) {
    cf_choice list[CF_CHOICES], best = {CF_MODE_COMMFUSE, c->route, 1};
    if (w->ranks == 1) return best;
    int count = cf_choices(w, c, list);
    double best_ms = INFINITY;
    for (int i = 0; i < count; i++) {
        double ms = cf_choice_ms(list[i], w, c);
        if (ms < WORTH * best_ms) best = list[i], best_ms = ms;
    }
    return best;
}

// --- names ---

void cf_choice_print(cf_choice c, char name[CF_CHOICE_NAME]) {
    const char *word = c.mode == CF_MODE_COMMFUSE ? cf_route_name(c.route) : cf_mode_name(c.mode);
    const bool whole = c.slices == 1 && c.mode != CF_MODE_SLICE;
    snprintf(name, CF_CHOICE_NAME, whole ? "%s" : "%s:%d", word, c.slices);
}

bool cf_choice_parse(const char *name, cf_choice *choice) {
    char word[CF_CHOICE_NAME], colon, rest;
    cf_choice c = {CF_MODE_COMMFUSE, CF_RING, 1};
    int parts = sscanf(name, "%31[^:]%c%6d%c", word, &colon, &c.slices, &rest);
    if ((parts != 1 && parts != 3) || c.slices < 1 || c.slices > SLICES_GIVEN) return false;
    if (!cf_route_parse(word, &c.route) && (!cf_mode_parse(word, &c.mode) || c.mode > CF_MODE_SLICE)) return false;
    *choice = c;
    return true;
}

// --- costs ---

void cf_costs_agree(cf_transport *t, int threads) {
    cf_costs *c = &t->costs;
    *c = t->set_threads(t, threads);
    cf_costs *all = cf_allgather_alloc(t, c, (int64_t)sizeof *c);
    for (int i = 0; i < t->size; i++) {
        c->latency_s = fmax(c->latency_s, all[i].latency_s);
        c->message_s = fmax(c->message_s, all[i].message_s);
        c->piece_s = fmax(c->piece_s, all[i].piece_s);
        c->bytes_per_s = fmin(c->bytes_per_s, all[i].bytes_per_s);
        c->flops_per_s = fmin(c->flops_per_s, all[i].flops_per_s);
        c->spare &= all[i].spare;
    }
    free(all);
}
