// See choice.h.
#include "choice.h"
#include "replay.h"
#include <math.h>

// Slices tried; ranks up to which more than one is tried (schedules grow with both); ranks that are replayed one by one.
enum { SLICES_MOST = 4, SLICES_RANKS = 64, REPLAYED_RANKS = 64 };
// Costs are rough, and only rounds hide transfers on a link that is slower than assumed. So another choice, or more slices, must
// take less than this share of the time.
static const double WORTH = 0.9;
// Without computation, larger messages are exchanged: unlike a collective they keep the program's order, in which bulk gives way.
static const double SMALL_BYTES = 32 << 10;
// Bytes/s of a link beside whose transfers the additions of parts take little time.
static const double SLOW_LINK = 50e9;

// --- the predicted time of a choice ---

typedef struct estimate {
    const cf_work *work;
    const cf_costs *costs;
    int places; // of a host
} estimate;

static double compute_ms(const void *argument, const cf_schedule *s, const cf_step *step) {
    const estimate *e = argument;
    if (step->kind != CF_COMPUTE) return 0; // an addition costs little compared with its product
    double share = (double)step->count / (s->ranks * s->slices);
    if (s->side == CF_COMPUTE_BOTH) share /= 2;
    return 1e3 * (share * e->work->flops / e->costs->flops_per_s + e->costs->piece_s);
}

enum { IN_HOST, NETWORK, LINKS };
static int link_of(const void *argument, const cf_schedule *s, int from, int to) {
    const estimate *e = argument;
    (void)s;
    return from / e->places == to / e->places ? IN_HOST : NETWORK;
}

// Of a rank between hosts, where so many of its group's ranks on each send at the same time.
static double network_rate(const estimate *e, int senders) {
    return fmin(e->costs->network_bytes_per_s, e->costs->shared_bytes_per_s * e->places / senders);
}

// A library's ring sends a shard to a host once; MPI sends one to each rank.
static double collective_s(const estimate *e, const cf_schedule *s) {
    const cf_costs *c = e->costs;
    const bool ring = c->serial && s->operation != CF_ALLTOALL;
    const double shard = e->work->bytes / s->slices, others = s->ranks - 1, far = s->ranks - e->places;
    const double host_s = (ring ? others : e->places - 1) * shard / c->bytes_per_s;
    const double network_s = (!ring ? far : far > 0 ? others / e->places : 0) * shard / network_rate(e, e->places);
    const double share = c->share_1mb + (c->share_100mb - c->share_1mb) * log10(fmax(others * shard, 1) / 1e6) / 2;
    return 2 * ceil(log2(s->ranks)) * c->message_s + fmax(host_s, network_s) / fmin(1, fmax(0.1, share));
}

static double transfer_ms(const void *argument, const cf_schedule *s, const cf_step *step) {
    const estimate *e = argument;
    const cf_costs *c = e->costs;
    if (step->kind == CF_COLLECTIVE) return 1e3 * collective_s(e, s);
    const bool far = link_of(e, s, s->rank, step->send.rank) == NETWORK;
    int senders = abs(step->send.rank - s->rank); // of a host, as many ranks further on the circle
    if (senders > s->ranks - senders) senders = s->ranks - senders;
    const double rate = far ? network_rate(e, senders < e->places ? senders : e->places) : c->bytes_per_s;
    const double begin_s = !c->serial || step->joined ? c->message_s : far ? c->network_latency_s : c->latency_s;
    return 1e3 * (e->work->bytes / s->slices / rate + begin_s);
}

static cf_schedule *schedule_of(cf_choice choice, const cf_work *w, int rank) {
    return cf_schedule_create(w->operation, w->side, choice.algorithm, w->ranks, w->hosts, rank, choice.slices);
}

// One rank stands for all if the exchanges of others are its own, shifted: the last of a host, which a ring leaves there. Else all
// are replayed, or the choice counts as endless.
static double replayed_ms(cf_choice choice, const cf_work *w, const cf_costs *c) {
    const estimate e = {w, c, w->ranks / (w->hosts > 1 ? w->hosts : 1)};
    const double latency_s = c->serial ? 0 : w->hosts > 1 ? c->network_latency_s : c->latency_s;
    const cf_machine machine = {compute_ms, transfer_ms, &e, 1e3 * latency_s, c->serial, LINKS, link_of};
    cf_schedule *all[REPLAYED_RANKS] = {schedule_of(choice, w, e.places - 1)};
    const int ranks = all[0]->algorithm->rank_symmetric ? 1 : w->ranks;
    const bool few = ranks <= REPLAYED_RANKS;
    for (int r = 0; r < ranks && few && ranks > 1; r++) {
        cf_schedule_free(all[r]);
        all[r] = schedule_of(choice, w, r);
    }
    const double ms = few ? cf_replay(all, ranks, &machine).finished_ms : INFINITY;
    for (int r = 0; r < REPLAYED_RANKS; r++) cf_schedule_free(all[r]);
    return ms;
}

// Byte for byte, but for the padding behind the last members.
static bool same(const cf_work *w, const cf_costs *c, const cf_work *v, const cf_costs *d) {
    return memcmp((const void *)w, (const void *)v, offsetof(cf_work, early)) == 0 && w->early == v->early &&
           w->native == v->native && memcmp((const void *)c, (const void *)d, offsetof(cf_costs, spare)) == 0 &&
           c->spare == d->spare && c->serial == d->serial;
}

// All layers ask the same, and --predict for all ranks: the last answers are kept, but not of a caller's own algorithm. Not in the
// thread's own memory, which is part of its stack.
double cf_choice_ms(cf_choice choice, const cf_work *w, const cf_costs *c) {
    enum { ANSWERS = 4096 }; // a prediction at tp 64 asks for 800, in turn: fewer would keep none
    typedef struct answer {
        cf_choice choice;
        cf_work work;
        cf_costs costs;
        double ms;
    } answer;
    static _Thread_local answer *kept;
    static _Thread_local int answers;
    if (cf_algorithm_find(choice.algorithm->name) != choice.algorithm) return replayed_ms(choice, w, c);
    if (!kept) kept = cf_host_alloc(ANSWERS, sizeof *kept, "estimates");
    for (answer *k = kept; k < kept + ANSWERS && k < kept + answers; k++)
        if (k->choice.algorithm == choice.algorithm && k->choice.slices == choice.slices && same(&k->work, &k->costs, w, c))
            return k->ms;
    answer *k = &kept[answers++ % ANSWERS];
    *k = (answer){choice, *w, *c, replayed_ms(choice, w, c)};
    return k->ms;
}

// --- choices ---

// Several ranks on each of several hosts.
static bool is_levelled(const cf_work *w) {
    return w->hosts > 1 && w->hosts < w->ranks;
}

const cf_algorithm *cf_choice_rounds(const cf_work *w, const cf_costs *c) {
    const bool levels = is_levelled(w) && w->operation != CF_ALLTOALL;
    const char *rounds = w->early ? "direct" : c->rounds ? c->rounds : "ring"; // of several in flight none waits for another's turn
    return cf_algorithm_serving(cf_algorithm_find(levels ? "levels" : rounds), w->operation, w->side);
}

// Alone: a library that keeps messages in order anyway, and whose sums take no kernels; or one that adds up on the spare core of a
// host, where compute threads add up the parts of rounds.
static bool suits_collective(const cf_work *w, const cf_costs *c) {
    const double rate = w->hosts > 1 ? c->shared_bytes_per_s : c->bytes_per_s;
    return w->side == CF_NO_COMPUTE && w->native && !c->one_order &&
           (c->serial ? is_levelled(w) || rate > SLOW_LINK : c->spare && w->hosts == 1);
}

// All ranks compute on the cores that move their bytes.
static bool nothing_hides(const cf_work *w, const cf_costs *c) {
    return !c->spare && w->hosts == 1 && w->native;
}

static bool is_candidate(const cf_algorithm *a, const cf_work *w, const cf_costs *c, int slices) {
    const bool alone = w->side == CF_NO_COMPUTE, collective = suits_collective(w, c);
    if (!(a->serves & CF_SERVES(w->operation, w->side)) || slices > (alone ? 1 : a->max_slices)) return false;
    if (a->levels && !is_levelled(w)) return false;
    if (c->one_order && (!a->same_bits || strcmp(a->same_bits, cf_choice_rounds(w, c)->same_bits) != 0)) return false;
    if (!a->native)
        return (!collective || a->levels) &&
               (w->ranks <= SLICES_RANKS || a->max_slices == 1 || (slices == 1 && a == cf_choice_rounds(w, c)));
    if (!w->native || (alone && !collective && w->bytes > SMALL_BYTES)) return false;
    const bool early = w->early && (alone || !nothing_hides(w, c)); // must not block
    return a->blocking ? !early : early || slices > 1;
}

enum { ROUNDS, AT_ONCE, NATIVE, KINDS, NATIVES = 3 /* choices: none, and slice with each number of slices but one */ };

// The first is one slice in rounds. However many rows there are, native collectives have their places.
int cf_choices(const cf_work *w, const cf_costs *c, cf_choice *list, int most) {
    const cf_algorithm *first = cf_choice_rounds(w, c);
    int count = 0;
    for (int kind = ROUNDS; kind < KINDS; kind++)
        for (int m = 1; m <= SLICES_MOST; m *= 2)
            for (int i = -1; i < cf_algorithm_count && count < most - (kind < NATIVE ? NATIVES : 0); i++) {
                const cf_algorithm *a = i < 0 ? first : &cf_algorithms[i];
                const int is = a->native ? NATIVE : a->max_slices == 1 ? AT_ONCE : ROUNDS;
                if (is == kind && (i < 0 || a != first) && is_candidate(a, w, c, m)) list[count++] = (cf_choice){a, m};
            }
    return count;
}

cf_choice cf_choose(const cf_work *w, const cf_costs *c) {
    cf_choice list[CF_CHOICES], best = {cf_choice_rounds(w, c), 1};
    if (w->ranks == 1) return best;
    int count = cf_choices(w, c, list, CF_CHOICES - 1);
    const bool collective = suits_collective(w, c); // first; then levels, if few hosts make its bytes much fewer
    double best_ms = INFINITY;
    int from = 0; // without a core to spare a native collective is first, if there is one
    while (!c->spare && from < count && !list[from].algorithm->native) from++;
    if (nothing_hides(w, c) && from < count) return list[from];
    for (int i = 0; i < count; i++) {
        const cf_choice next = list[collective ? count - 1 - i : (from + i) % count];
        const double ms = cf_choice_ms(next, w, c);
        if (ms < WORTH * best_ms) best = next, best_ms = ms;
    }
    return best;
}

// --- names ---

void cf_choice_print(cf_choice c, char name[CF_CHOICE_NAME]) {
    const cf_algorithm *a = c.algorithm;
    const bool whole = !a || (c.slices == 1 && a->slices == 1);
    snprintf(name, CF_CHOICE_NAME, whole ? "%.16s" : "%.16s:%d", a ? a->name : "auto", c.slices);
}

// An alias is the row that it names.
bool cf_choice_parse(const char *name, cf_choice *choice) {
    char word[CF_CHOICE_NAME], digits[7] = "0", colon, rest;
    const int parts = sscanf(name, "%31[^:]%c%6[0-9]%c", word, &colon, digits, &rest), slices = atoi(digits);
    const cf_algorithm *a = parts > 0 ? cf_algorithm_find(word) : NULL;
    if ((parts != 1 && parts != 3) || (parts == 3 && slices < 1)) return false;
    if (parts == 1 && strcmp(word, "auto") == 0) return *choice = (cf_choice){NULL, 1}, true;
    if (!a || slices > a->max_slices) return false;
    *choice = (cf_choice){a->serves || a->bound ? a : cf_algorithm_find(a->fallback), slices ? slices : a->slices};
    return true;
}

// --- costs ---

// The numbers of cf_costs. The worst of all ranks is the most of SECONDS, of the others the least.
enum { SECONDS = 4, NUMBERS = 10 };
static double *number(cf_costs *c, int n) {
    double *const numbers[NUMBERS] = {&c->latency_s,           &c->message_s,          &c->piece_s,
                                      &c->network_latency_s,   &c->bytes_per_s,        &c->flops_per_s,
                                      &c->network_bytes_per_s, &c->shared_bytes_per_s, &c->share_1mb,
                                      &c->share_100mb};
    return numbers[n];
}

void cf_costs_print(cf_costs c, char text[CF_COSTS_TEXT]) {
    int length = snprintf(text, CF_COSTS_TEXT, "%d", c.spare);
    for (int n = 0; n < NUMBERS; n++) length += snprintf(text + length, (size_t)(CF_COSTS_TEXT - length), " %.17g", *number(&c, n));
}

bool cf_costs_parse(const char *text, cf_costs *costs) {
    cf_costs c = *costs;
    char *end;
    c.spare = strtol(text, &end, 10) != 0;
    for (int n = 0; n < NUMBERS; n++) {
        *number(&c, n) = strtod(text = end, &end);
        if (end == text || !(*number(&c, n) > 0) || isinf(*number(&c, n))) return false;
    }
    if (!*end) *costs = c;
    return !*end;
}

void cf_costs_agree(cf_transport *t, int threads) {
    cf_costs *c = &t->costs;
    *c = t->set_threads(t, threads);
    c->one_order = threads == 0;
    cf_costs *all = cf_allgather_alloc(t, c, (int64_t)sizeof *c);
    for (int i = 0; i < t->size; i++) {
        for (int n = 0; n < NUMBERS; n++) {
            double *mine = number(c, n), other = *number(&all[i], n);
            *mine = n < SECONDS ? fmax(*mine, other) : fmin(*mine, other);
        }
        c->spare &= all[i].spare;
    }
    free(all);
}
