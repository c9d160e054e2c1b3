// See choice.h.
#include "choice.h"
#include "die.h"
#include <math.h>
#include <stdlib.h>

enum { SLICES_MOST = 4 };
// The costs are rough, and only rounds hide transfers on a link that is slower than thought: so another way, or more slices
// of a shard, must save this much.
static const double WORTH = 0.9;
// A native collective moves what nothing hides only while messages are this small: larger ones keep to the order of the
// program, in which bulk gives way.
static const double SMALL_BYTES = 32 << 10;

static double rounds_s(const cf_work *w, const cf_costs *c, int slices) {
    double all = (double)w->ranks * slices, slice = w->flops / c->flops_per_s / all + c->piece_s;
    double transfers = (w->ranks - 1) * (c->latency_s + w->bytes / c->bytes_per_s);
    return slice + fmax((all - 1) * slice, transfers);
}

static double at_once_s(const cf_work *w, const cf_costs *c) {
    double all = w->flops / c->flops_per_s, own = all / w->ranks;
    double transfers = c->latency_s + (w->ranks - 1) * (c->message_s + w->bytes / c->bytes_per_s);
    return fmax(own, transfers) + all - own + (w->side == CF_NO_COMPUTE ? 0 : 2 * c->piece_s);
}

static double native_s(const cf_work *w, const cf_costs *c) {
    double messages = 2 * ceil(log2(w->ranks)) * c->message_s;
    return w->flops / c->flops_per_s + c->latency_s + messages + (w->ranks - 1) * w->bytes / c->bytes_per_s;
}

cf_choice cf_choose(const cf_work *w, const cf_costs *c) {
    cf_choice best = {CF_MODE_COMMFUSE, c->route, 1};
    if (w->ranks == 1) return best;
    bool alone = w->side == CF_NO_COMPUTE, may = c->native && (!alone || w->bytes <= SMALL_BYTES);
    double best_s = alone ? INFINITY : rounds_s(w, c, 1);
    for (int m = 2; m <= SLICES_MOST && !alone; m *= 2)
        if (rounds_s(w, c, m) < WORTH * best_s) best.slices = m, best_s = rounds_s(w, c, m);
    if (at_once_s(w, c) < WORTH * best_s) best = (cf_choice){CF_MODE_COMMFUSE, CF_ONCE, 1}, best_s = at_once_s(w, c);
    if (may && native_s(w, c) < WORTH * best_s) best = (cf_choice){w->early ? CF_MODE_SLICE : CF_MODE_NONE, c->route, 1};
    return best;
}

void cf_costs_agree(cf_transport *t, int threads) {
    cf_costs *all = calloc((size_t)t->size, sizeof *all), *c = &t->costs;
    *c = t->reckon(t, threads);
    if (!all) cf_die(NULL, "out of memory for the costs of %d ranks", t->size);
    t->gather(t, c, all, (int64_t)sizeof *all);
    for (int i = 0; i < t->size; i++) {
        c->latency_s = fmax(c->latency_s, all[i].latency_s);
        c->message_s = fmax(c->message_s, all[i].message_s);
        c->piece_s = fmax(c->piece_s, all[i].piece_s);
        c->bytes_per_s = fmin(c->bytes_per_s, all[i].bytes_per_s);
        c->flops_per_s = fmin(c->flops_per_s, all[i].flops_per_s);
        c->native &= all[i].native;
        c->spare &= all[i].spare;
    }
    free(all);
}
