// See schedule_check.h.
//
// Races. A transfer may write its destination as soon as it is posted, and nothing orders two transfers, or a
// transfer and a computation, but the waits named. To wait for an exchange is to wait for what it brings; what
// it sends it may read until the end of the run, so nothing may be written there any more.
// Only computations are ordered among themselves: they share a stream. So step b is "after" step a exactly if
// a path of waits and of stream order leads from a to b, and any two conflicting steps must be so ordered.
// Every rank must be able to show this from its own list; order that only messages imply is not accepted.
//
// Deadlock. Strict rendezvous: each rank has one communication queue; only its head may be active, once
// posted (the host walks the list, and stands still before a COMPUTE, ADD or COPY whose waits are not complete) and
// once its own waits are complete; it completes when both its halves have met the active head of the peer.
// No action that can be taken is ever made impossible by another one: a head stays active until it completes,
// complete steps stay complete. Hence all maximal runs take the same steps, and one run decides for all
// interleavings. As conflicting steps are ordered, that one run also shows the data of every other run.
//
// Data are tracked by name. The value of a slice is its number and the run of contributors summed in it, in
// the order of the sum: contributor number (p - j - 1) mod N of a slice that rank j owns is rank p.
#include "schedule_check.h"
#include "die.h"
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum {
    RANKS_MAX = CF_CHECKED_RANKS,
    SLICES_MAX = CF_CHECKED_SLICES,
    STEPS_MAX = CF_CHECKED_STEPS,
    PLACES_MAX = 3 * SLICES_MAX, // of each buffer as many
    TOUCHES_MAX = 4 * STEPS_MAX + 4 * SLICES_MAX,
    SEND = 0,
    RECV = 1
};

typedef struct value { // slice < 0: nothing is there
    int slice;
    int from, count; // contributors from, from + 1, … (reduce-scatter); source rank, 1 (all-to-all); 0, 1 (all-gather)
} value;

typedef struct touched { // a step reads or writes a place, for this slice or one of the same size
    cf_place at;
    int slice;
    bool writes;
    int step, earlier; // races: the access to the same place before this one; -1 none
} touched;

typedef struct checker {
    cf_schedule *const *schedule; // of every rank
    cf_operation operation;
    cf_side side;
    cf_mode mode;
    int ranks, slices, total; // N, m, N · m

    int travelled[RANKS_MAX][SLICES_MAX], stamp; // stamp: this rank has sent the slice to this peer
    touched access[TOUCHES_MAX];                 // of one step, or of the rank that is looked at
    int last_access[PLACES_MAX];
    uint64_t before[STEPS_MAX][STEPS_MAX / 64]; // steps of that rank that precede step i

    // The run: what is where; the host stands before step `host`; first transfer that is not complete, and which halves of it have
    // met those of peers
    value held[RANKS_MAX][PLACES_MAX];
    int host[RANKS_MAX], head[RANKS_MAX];
    bool met[RANKS_MAX][2];
    const char *wrong; // what it has shown first, but for matching
} checker;

static char found_at[CF_WHERE_TEXT];

static const char *violated(const char *property, int rank, int step, const char *format, ...) CF_PRINTF(4, 5);
static const char *violated(const char *property, int rank, int step, const char *format, ...) {
    char text[160];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    snprintf(found_at, sizeof found_at, "rank %d step %d: %s", rank, step, text);
    return property;
}

// --- places ---

static bool place_exists(const checker *c, const cf_schedule *s, cf_place place) {
    const int slots[] = {[CF_FULL] = c->total,
                         [CF_STAGE] = s->stage_slots,
                         [CF_RESULT] = c->operation == CF_ALLGATHER        ? 0
                                       : c->operation == CF_REDUCE_SCATTER ? c->slices
                                                                           : c->total};
    return place.buffer <= CF_RESULT && place.slot >= 0 && place.slot < slots[place.buffer];
}

static int place_number(cf_place place) {
    return place.slot + (int)place.buffer * SLICES_MAX;
}

static bool computes(const checker *c, cf_side side) {
    return c->side == side || (c->side == CF_COMPUTE_BOTH && side != CF_NO_COMPUTE);
}

static touched *touch(touched *list, cf_place at, int ahead, int slice, bool writes) {
    *list = (touched){.at = {at.buffer, at.slot + ahead}, .slice = slice, .writes = writes};
    return list + 1;
}

// What a step reads, then what it writes; returns how many. What a transfer sends is what it reads.
static int accesses(const checker *c, int rank, const cf_step *step, touched *list) {
    const bool collective = step->kind == CF_COLLECTIVE, gather = c->operation == CF_ALLGATHER;
    touched *end = list;
    for (int k = 0; k < step->count && step->kind == CF_COMPUTE; k++)
        end = touch(end, step->at, k * step->stride, step->first + k * step->stride, step->side == CF_COMPUTE_BEFORE);
    if (step->kind == CF_ADD || step->kind == CF_COPY) end = touch(end, step->from, 0, step->at.slot, false);
    if (step->kind == CF_EXCHANGE && step->send_to >= 0) end = touch(end, step->from, 0, step->send_slice, false);
    for (int k = 0; k < step->count && collective && (k == 0 || !gather); k++)
        end = touch(end, step->from, k * step->stride, step->first, false);
    if (step->kind == CF_ADD || step->kind == CF_COPY) end = touch(end, step->at, 0, step->at.slot, true);
    if (step->kind == CF_EXCHANGE && step->recv_from >= 0) end = touch(end, step->at, 0, step->recv_slice, true);
    for (int k = 0; k < step->count && collective && (k == 0 || c->operation != CF_REDUCE_SCATTER); k++)
        if (!gather || k != rank) // the own block of a gathered payload is in place
            end = touch(end, step->at, k * step->stride, step->first, true);
    return (int)(end - list);
}

// --- form, side, unit, coverage, volume ---

static const char *check_step(checker *c, int r, int i) {
    const cf_step *step = &c->schedule[r]->step[i];
    const bool compute = step->kind == CF_COMPUTE, collective = step->kind == CF_COLLECTIVE;
    for (int w = 0; w < 2; w++)
        if (step->wait[w] < -1 || step->wait[w] >= i) return violated("form", r, i, "waits for step %d", step->wait[w]);
    if (step->range && (!compute || step->wait[0] < 0 || step->wait[1] < step->wait[0]))
        return violated("form", r, i, "waits for steps %d to %d", step->wait[0], step->wait[1]);
    if (compute && c->side == CF_NO_COMPUTE) return violated("form", r, i, "COMPUTE of nothing");
    if (compute && ((step->side != CF_COMPUTE_BEFORE && step->side != CF_COMPUTE_AFTER) || !computes(c, step->side)))
        return violated("side", r, i, "computes on side %d, the operation on %d", step->side, c->side);
    if (step->kind == CF_ADD && c->operation != CF_REDUCE_SCATTER) return violated("form", r, i, "ADD of what?");
    if (step->kind == CF_COPY && c->operation != CF_ALLTOALL) return violated("form", r, i, "COPY of what?");
    if (step->kind == CF_EXCHANGE && (step->send_to < -1 || step->send_to >= c->ranks || step->recv_from < -1 ||
                                      step->recv_from >= c->ranks || step->send_to + step->recv_from == -2))
        return violated("form", r, i, "exchange with ranks %d and %d", step->send_to, step->recv_from);
    if ((compute || collective) && (step->first < 0 || step->first >= c->total || step->count < 1 || step->count > c->ranks ||
                                    (collective && step->count != c->ranks) ||
                                    (step->count > 1 && (step->stride != c->slices || step->at.slot != step->first ||
                                                         step->first + (step->count - 1) * step->stride >= c->total))))
        return violated("form", r, i, "slices %d + i·%d, i < %d, at slot %d", step->first, step->stride, step->count,
                        step->at.slot);
    if (step->at.slot >= PLACES_MAX || step->from.slot >= PLACES_MAX)
        return violated("form", r, i, "slots %d and %d", step->at.slot, step->from.slot);
    const int touches = accesses(c, r, step, c->access);
    for (const touched *t = c->access; t < c->access + touches; t++) {
        if (!place_exists(c, c->schedule[r], t->at)) return violated("form", r, i, "no place %d:%d", t->at.buffer, t->at.slot);
        if (t->slice < 0 || t->slice >= c->total || t->at.slot % c->slices != t->slice % c->slices)
            return violated("form", r, i, "slice %d at slot %d", t->slice, t->at.slot);
    }
    return NULL;
}

// Slices with equal k are equal in size, and so are slots.
static const char *check_form(checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    if (s->operation != c->operation || s->side != c->side || s->mode != c->mode || s->ranks != c->ranks || s->rank != r ||
        s->slices != c->slices)
        return violated("form", r, -1, "not a schedule of the same operation");
    if (s->count < 0 || s->count > STEPS_MAX || s->stage_slots < 0 || s->stage_slots > SLICES_MAX ||
        s->stage_slots % c->slices != 0)
        return violated("form", r, -1, "%d steps, %d slots", s->count, s->stage_slots);
    if (s->begin < 0 || s->begin > s->count) return violated("form", r, -1, "begin %d of %d", s->begin, s->count);
    if (s->slice_major && (c->operation != CF_REDUCE_SCATTER || (c->mode != CF_MODE_SLICE && c->mode != CF_MODE_OWN)))
        return violated("form", r, -1, "slice-major payload outside of a sliced reduce-scatter");
    if (c->operation == CF_REDUCE_SCATTER && // m slices side by side
        (s->result.slot % c->slices != 0 || !place_exists(c, s, s->result)))
        return violated("form", r, -1, "result at place %d:%d", s->result.buffer, s->result.slot);
    const char *property = NULL;
    for (int i = 0; i < s->count && !property; i++) property = check_step(c, r, i);
    return property;
}

static const char *check_units(checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    bool one = c->mode == CF_MODE_COMMFUSE && (s->route == CF_ONCE || c->side == CF_NO_COMPUTE);
    int met[2][RANKS_MAX] = {{0}}, units = 0; // met[half][peer]: in which unit, last of all
    for (int i = 0, first = 0; i < s->count; i++) {
        const cf_step *step = &s->step[i];
        bool exchange = step->kind == CF_EXCHANGE;
        if (step->joined && (!exchange || i == 0 || s->step[i - 1].kind != CF_EXCHANGE))
            return violated("unit", r, i, "joined to what is no exchange");
        if (!exchange) continue;
        if (!step->joined) first = i, units++;
        const int peer[2] = {[SEND] = step->send_to, [RECV] = step->recv_from};
        for (int w = 0; w < 2; w++) {
            if (step->wait[w] >= first) return violated("unit", r, i, "waits for step %d of its unit", step->wait[w]);
            if (peer[w] < 0) continue;
            if (met[w][peer[w]] == units) return violated("unit", r, i, "meets rank %d twice", peer[w]);
            met[w][peer[w]] = units;
        }
    }
    if (one && units != (c->ranks > 1)) return violated("unit", r, -1, "%d of them", units);
    return NULL;
}

// Computations of each side, and native collectives, name every slice once.
static const char *check_counts(checker *c, int r) {
    enum { BEFORE, AFTER, NATIVE, LISTS };
    const cf_schedule *s = c->schedule[r];
    const bool native = c->mode == CF_MODE_NONE || c->mode == CF_MODE_SLICE;
    bool seen[LISTS][SLICES_MAX] = {{false}};
    int named[LISTS] = {0}, sent = 0, received = 0;
    for (int i = 0; i < s->count; i++) {
        const cf_step *step = &s->step[i];
        const int list = step->kind == CF_COLLECTIVE ? NATIVE : step->side == CF_COMPUTE_AFTER ? AFTER : BEFORE;
        for (int k = 0; k < step->count && (list == NATIVE || step->kind == CF_COMPUTE); k++) {
            const int slice = step->first + k * step->stride;
            if (seen[list][slice] && (list != NATIVE || native))
                return violated(list == NATIVE ? "volume" : "coverage", r, i, "slice %d a second time", slice);
            seen[list][slice] = true, named[list]++;
        }
        sent += step->kind == CF_EXCHANGE && step->send_to >= 0 && step->send_to != r; // what a rank sends itself does not travel
        received += step->kind == CF_EXCHANGE && step->recv_from >= 0 && step->recv_from != r;
    }
    for (int list = BEFORE; list <= AFTER; list++)
        if (named[list] != (computes(c, list == BEFORE ? CF_COMPUTE_BEFORE : CF_COMPUTE_AFTER) ? c->total : 0))
            return violated("coverage", r, -1, "%d of %d slices", named[list], c->total);
    const int exchanged = c->mode == CF_MODE_COMMFUSE ? (c->ranks - 1) * c->slices : 0;
    const int collected = native && (c->ranks > 1 || named[NATIVE] > 0) ? c->total : 0;
    if (c->mode == CF_MODE_OWN) return NULL;
    if (sent != exchanged || received != exchanged)
        return violated("volume", r, -1, "%d slices sent, %d received, not %d", sent, received, exchanged);
    return named[NATIVE] == collected ? NULL
                                      : violated("volume", r, -1, "%d slices in collectives, not %d", named[NATIVE], collected);
}

// The rest of matching is seen by the run, in which the k-th send to a rank meets the k-th receive there.
static const char *check_tags(checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    c->stamp++;
    for (int i = 0; i < s->count; i++) {
        const cf_step *step = &s->step[i];
        if (step->kind != CF_EXCHANGE || step->send_to < 0) continue;
        if (c->travelled[step->send_to][step->send_slice] == c->stamp)
            return violated("matching", r, i, "slice %d goes to rank %d twice", step->send_slice, step->send_to);
        c->travelled[step->send_to][step->send_slice] = c->stamp;
    }
    return NULL;
}

// --- data by name ---

// What this rank computes or starts with. The owner of a sum is its last contributor.
static value own_value(const checker *c, int rank, int slice) {
    const int contributor = (rank - slice / c->slices - 1 + 2 * c->ranks) % c->ranks;
    return (value){slice, c->operation == CF_ALLGATHER ? 0 : c->operation == CF_ALLTOALL ? rank : contributor, 1};
}

// What the rank must find in slice `slice` after the communication.
static value arrived_value(const checker *c, int rank, int slice) {
    int owner = slice / c->slices, k = slice % c->slices;
    if (c->operation == CF_ALLTOALL) return (value){rank * c->slices + k, owner, 1};
    return (value){slice, 0, c->operation == CF_REDUCE_SCATTER ? c->ranks : 1};
}

static void expect(checker *c, int r, int i, const char *where, value found, value expected) {
    if (c->wrong || (found.slice == expected.slice && found.from == expected.from && found.count == expected.count)) return;
    c->wrong = violated("data", r, i, "%s slice %d of contributors %d…%d, finds slice %d of %d…%d", where, expected.slice,
                        expected.from, expected.from + expected.count - 1, found.slice, found.from, found.from + found.count - 1);
}

// Addition commutes but does not associate: a sum is right if it only ever grows by one contributor, the
// next one (or if two single ones meet).
static void add(checker *c, int r, int i, value *to, value from) {
    if (c->wrong) return;
    if (to->slice < 0 || to->slice != from.slice)
        c->wrong = violated("data", r, i, "adds slice %d to slice %d", from.slice, to->slice);
    else if (from.count == 1 && from.from == to->from + to->count)
        to->count++;
    else if (to->count == 1 && to->from == from.from + from.count)
        *to = (value){to->slice, from.from, from.count + 1};
    else
        c->wrong = violated("sum order", r, i, "slice %d: %d…%d plus %d…%d", to->slice, to->from, to->from + to->count - 1,
                            from.from, from.from + from.count - 1);
}

static void start_data(checker *c, int r) {
    for (int p = 0; p < PLACES_MAX; p++) c->held[r][p] = (value){-1, 0, 0};
    for (int slice = 0; slice < c->total && !computes(c, CF_COMPUTE_BEFORE); slice++)
        if (c->operation != CF_ALLGATHER || slice / c->slices == r) c->held[r][slice] = own_value(c, r, slice);
}

static void run_on_stream(checker *c, int r, int i) {
    const cf_step *step = &c->schedule[r]->step[i];
    const int touches = accesses(c, r, step, c->access);
    const value from = c->held[r][place_number(c->access[0].at)];
    for (const touched *t = c->access; t < c->access + touches; t++) {
        value *at = &c->held[r][place_number(t->at)];
        if (step->kind == CF_COMPUTE && step->accumulate)
            add(c, r, i, at, own_value(c, r, t->slice));
        else if (step->kind == CF_COMPUTE && t->writes)
            *at = own_value(c, r, t->slice);
        else if (step->kind == CF_COMPUTE)
            expect(c, r, i, "works on", *at, arrived_value(c, r, t->slice));
        else if (t->writes && step->kind == CF_ADD)
            add(c, r, i, at, from);
        else if (t->writes)
            *at = from;
    }
}

// Step `send` of rank r meets step `receive` of rank p.
static const char *deliver(checker *c, int r, int send, int p, int receive) {
    const cf_step *out = &c->schedule[r]->step[send], *in = &c->schedule[p]->step[receive];
    value sent = c->held[r][place_number(out->from)];
    if (out->send_slice != in->recv_slice)
        return violated("matching", p, receive, "slice %d expected, rank %d sends %d", in->recv_slice, r, out->send_slice);
    if (!c->wrong && sent.slice != out->send_slice)
        c->wrong = violated("data", r, send, "sends slice %d, finds slice %d", out->send_slice, sent.slice);
    c->held[p][place_number(in->at)] = sent;
    return NULL;
}

// All ranks' collectives meet.
static const char *collect(checker *c) {
    const bool gather = c->operation == CF_ALLGATHER, reduce = c->operation == CF_REDUCE_SCATTER;
    for (int r = 0; r < c->ranks; r++) {
        const cf_step *step = &c->schedule[r]->step[c->head[r]], *first = &c->schedule[0]->step[c->head[0]];
        if (step->first != first->first || step->stride != first->stride)
            return violated("matching", r, c->head[r], "rank 0 calls another collective");
        const int at = place_number(step->at), number = step->first + r * step->stride;
        for (int i = 0; i < c->ranks; i++) {
            const cf_step *other = &c->schedule[i]->step[c->head[i]];
            value sent = c->held[i][place_number(other->from) + (gather ? 0 : r * other->stride)];
            if (reduce)
                expect(c, i, c->head[i], "reduces", sent, own_value(c, i, number));
            else
                c->held[r][at + i * step->stride] = sent;
        }
        if (reduce) c->held[r][at] = arrived_value(c, r, number);
    }
    return NULL;
}

static void check_result(checker *c, int r) {
    const bool reduce = c->operation == CF_REDUCE_SCATTER, all_to_all = c->operation == CF_ALLTOALL;
    const bool stays = all_to_all && c->side == CF_COMPUTE_AFTER && (c->mode == CF_MODE_COMMFUSE || c->ranks == 1);
    for (int slice = 0; slice < c->total; slice++) {
        const bool own = slice / c->slices == r; // own slices that stay are computed on where they were
        cf_place place = {all_to_all && !(stays && own) ? CF_RESULT : CF_FULL, slice};
        if (reduce) place = c->schedule[r]->result, place.slot += slice % c->slices;
        if (own || !reduce) expect(c, r, -1, "result:", c->held[r][place_number(place)], arrived_value(c, r, slice));
    }
}

// --- the run ---

static bool waits_complete(const checker *c, int r, const cf_step *step) {
    for (int n = 0, wait = 0; (wait = cf_nth_wait(step, n)) >= 0; n++)
        if (wait >= (cf_on_wire(&c->schedule[r]->step[wait]) ? c->head[r] : c->host[r])) return false;
    return true;
}

// The transfer in front of the queue, if it may be active. The host has posted what it has reached.
static const cf_step *active_head(const checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    const cf_step *step = &s->step[c->head[r]];
    return c->head[r] < s->count && c->head[r] <= c->host[r] && waits_complete(c, r, step) ? step : NULL;
}

// The next transfer of a rank, from step i on.
static void find_head(checker *c, int r, int i) {
    const cf_schedule *s = c->schedule[r];
    while (i < s->count && !cf_on_wire(&s->step[i])) i++;
    c->head[r] = i;
    c->met[r][SEND] = c->met[r][RECV] = false;
}

static bool walk_host(checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    int start = c->host[r];
    for (; c->host[r] < s->count; c->host[r]++) {
        const cf_step *step = &s->step[c->host[r]];
        if (!cf_on_wire(step)) {
            if (!waits_complete(c, r, step)) break;
            run_on_stream(c, r, c->host[r]);
        } else if (step->kind == CF_COLLECTIVE && s->blocking && c->host[r] >= c->head[r])
            break;
    }
    return c->host[r] > start;
}

// Takes what rank r can take; true if it took something. Of two halves that meet the sender looks for the other one.
static bool take(checker *c, int r, const char **property) {
    bool moved = walk_host(c, r);
    const cf_step *step = active_head(c, r);
    if (step && step->kind == CF_COLLECTIVE) {
        for (int p = 0; p < c->ranks; p++) {
            const cf_step *other = r == 0 ? active_head(c, p) : NULL;
            if (!other || other->kind != CF_COLLECTIVE) return moved;
        }
        *property = collect(c);
        for (int p = 0; p < c->ranks; p++) find_head(c, p, c->head[p] + 1);
        return true;
    }
    if (step && step->send_to >= 0 && !c->met[r][SEND]) {
        const int p = step->send_to;
        const cf_step *other = active_head(c, p);
        if (other && other->kind == CF_EXCHANGE && other->recv_from == r && !c->met[p][RECV]) {
            *property = deliver(c, r, c->head[r], p, c->head[p]);
            c->met[r][SEND] = c->met[p][RECV] = moved = true;
        }
    }
    if (!step || (step->send_to >= 0 && !c->met[r][SEND]) || (step->recv_from >= 0 && !c->met[r][RECV])) return moved;
    find_head(c, r, c->head[r] + 1);
    return true;
}

// Rank r's transfer waits for one of rank p, which has none left.
static bool waits_in_vain(const checker *c, int r, int p, int half) {
    const cf_schedule *theirs = p < 0 || c->met[r][half] ? NULL : c->schedule[p];
    const cf_step_kind kind = c->schedule[r]->step[c->head[r]].kind;
    for (int i = theirs ? c->head[p] + c->met[p][1 - half] : 0; theirs && i < theirs->count; i++) {
        const cf_step *step = &theirs->step[i];
        if (step->kind == kind && (kind == CF_COLLECTIVE || (half == SEND ? step->recv_from : step->send_to) == r)) return false;
    }
    return theirs != NULL;
}

static const char *check_stuck(checker *c) {
    for (int r = 0; r < c->ranks; r++) {
        const cf_step *step = &c->schedule[r]->step[c->head[r]];
        if (c->head[r] == c->schedule[r]->count) continue;
        for (int p = 0; p < c->ranks && step->kind == CF_COLLECTIVE; p++)
            if (waits_in_vain(c, r, p, SEND)) return violated("matching", r, c->head[r], "rank %d calls no other collective", p);
        if (step->kind == CF_EXCHANGE && waits_in_vain(c, r, step->send_to, SEND))
            return violated("matching", r, c->head[r], "rank %d does not receive this", step->send_to);
        if (step->kind == CF_EXCHANGE && waits_in_vain(c, r, step->recv_from, RECV))
            return violated("matching", r, c->head[r], "rank %d sends nothing more", step->recv_from);
    }
    for (int r = 0; r < c->ranks; r++)
        if (c->host[r] < c->schedule[r]->count || c->head[r] < c->schedule[r]->count) {
            c->wrong = violated("deadlock", r, c->host[r] < c->head[r] ? c->host[r] : c->head[r], "never completes");
            break;
        }
    return NULL;
}

// Returns "matching"; what else is wrong is the verdict if no race is.
static const char *check_run(checker *c) {
    const char *property = NULL;
    c->wrong = NULL;
    for (int r = 0; r < c->ranks; r++) {
        c->host[r] = 0;
        find_head(c, r, 0);
        start_data(c, r);
    }
    for (bool moved = true; moved && !property;) {
        moved = false;
        for (int r = 0; r < c->ranks && !property; r++)
            while (!property && take(c, r, &property)) moved = true;
    }
    if (c->mode == CF_MODE_NOWIRE) c->wrong = NULL; // wrong by construction
    if (!property) property = check_stuck(c);
    for (int r = 0; r < c->ranks && c->mode != CF_MODE_NOWIRE; r++) check_result(c, r);
    return property;
}

static const char *check_outcome(checker *c) {
    return c->wrong;
}

// --- races ---

static void add_before(checker *c, int step, int earlier) {
    if (earlier < 0) return;
    for (int w = 0; w <= earlier / 64; w++) c->before[step][w] |= c->before[earlier][w];
    c->before[step][earlier / 64] |= UINT64_C(1) << (earlier % 64);
}

// An access conflicts with those since the last write before it, and with that write; what is older is
// ordered before that write, or was reported.
static const char *check_access(checker *c, int r, touched *mine) {
    int *last = &c->last_access[place_number(mine->at)];
    mine->earlier = *last;
    *last = (int)(mine - c->access);
    for (const touched *theirs = mine; theirs->earlier >= 0;) {
        theirs = &c->access[theirs->earlier];
        const bool sent = c->schedule[r]->step[theirs->step].kind == CF_EXCHANGE && !theirs->writes;
        const bool ordered = c->before[mine->step][theirs->step / 64] >> (theirs->step % 64) & 1;
        if ((mine->writes || theirs->writes) && (sent || !ordered))
            return violated("race", r, mine->step, "not ordered behind step %d", theirs->step);
        if (theirs->writes) return NULL;
    }
    return NULL;
}

static const char *check_races(checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    const char *property = NULL;
    int on_stream = -1, blocking = -1;
    if (c->mode == CF_MODE_NOWIRE) return NULL; // nothing moves
    for (int p = 0; p < PLACES_MAX; p++) c->last_access[p] = -1;
    touched *end = c->access;
    for (int i = 0; i < s->count && !property; i++) {
        const cf_step *step = &s->step[i];
        memset(c->before[i], 0, sizeof c->before[i]);
        for (int n = 0, wait = 0; (wait = cf_nth_wait(step, n)) >= 0; n++) add_before(c, i, wait);
        add_before(c, i, blocking);
        if (!cf_on_wire(step)) add_before(c, i, on_stream), on_stream = i;
        if (step->kind == CF_COLLECTIVE && s->blocking) blocking = i;
        if (end + 2 * c->ranks > c->access + TOUCHES_MAX) return violated("form", r, i, "more than %d places", TOUCHES_MAX);
        for (touched *last = end + accesses(c, r, step, end); end < last && !property; end++)
            end->step = i, property = check_access(c, r, end);
    }
    return property;
}

// --- order ---

// own slice, tail, begin and fold
static const char *check_order(checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    const bool fused = c->mode == CF_MODE_COMMFUSE || c->mode == CF_MODE_NOWIRE;
    const cf_side last = computes(c, CF_COMPUTE_BEFORE) ? CF_COMPUTE_BEFORE : CF_COMPUTE_AFTER;
    int taken[CF_COMPUTE_BOTH] = {0}, exchanges = 0; // taken: slices that have been computed, by side
    if (s->folds && (c->operation != CF_REDUCE_SCATTER || c->side != CF_COMPUTE_BEFORE))
        return violated("fold", r, -1, "an operation without sums of computations");
    for (int i = 0; i < s->count; i++) {
        const cf_step *step = &s->step[i];
        const bool compute = step->kind == CF_COMPUTE, own = compute && step->first / c->slices == r;
        const bool after = step->side == CF_COMPUTE_AFTER, number_m = step->first % c->slices == c->slices - 1;
        const int number = compute ? taken[step->side] : -1;
        const bool now_own = after ? number < c->slices : number + step->count > c->total - c->slices;
        if (compute && fused) {
            if (own != now_own || (step->count > 1 && (own || s->route != CF_ONCE)))
                return violated("own slice", r, i, "slice %d is computed as number %d", step->first, number);
            if (own && after && (step->wait[0] >= 0 || step->wait[1] >= 0))
                return violated("own slice", r, i, "waits, though it is here");
            if (number == 0 && after && c->mode == CF_MODE_COMMFUSE && c->ranks > 1 && exchanges == 0)
                return violated("own slice", r, i, "no transfer runs behind the first computation");
        }
        exchanges += step->kind == CF_EXCHANGE;
        if (step->kind == CF_EXCHANGE && fused && c->side != CF_NO_COMPUTE && taken[last] == c->total)
            return violated("tail", r, i, "posted behind the last computation");
        const bool first = cf_on_wire(step) || (step->side == CF_COMPUTE_BEFORE && !step->accumulate);
        if (c->side != CF_NO_COMPUTE && step->kind != CF_ADD && first != (i < s->begin)) // an ADD: on either side, as needed
            return violated("begin", r, i, "begin takes %d steps", s->begin);
        if (step->accumulate != (s->folds && own && !number_m))
            return violated("fold", r, i, "slice %d is %scomputed onto another", step->first, step->accumulate ? "" : "not ");
        if (compute) taken[step->side] += step->count;
    }
    return NULL;
}

// Who works on what was posted later first stands and waits while something to work on is there.
static const char *check_arrival(checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    for (int i = 0, newest = -1; i < s->count; i++) {
        const cf_step *step = &s->step[i];
        int awaited = step->wait[0] > step->wait[1] ? step->wait[0] : step->wait[1];
        if (step->kind != CF_COMPUTE || step->side != CF_COMPUTE_AFTER || awaited < 0) continue;
        if (awaited < newest) return violated("arrival", r, i, "waits for step %d, the one before for %d", awaited, newest);
        newest = awaited;
    }
    return NULL;
}

// A computation may add up what it is given (wgrad), and all routes promise the same bits.
static const char *check_work_order(checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    const bool asked = (c->mode == CF_MODE_COMMFUSE || c->mode == CF_MODE_NOWIRE) && c->operation == CF_ALLGATHER;
    for (int i = 0, taken = 0; i < s->count && asked && s->route != CF_ONCE; i++) {
        const cf_step *step = &s->step[i];
        if (step->kind != CF_COMPUTE) continue;
        int owner = (r - taken / c->slices + c->ranks) % c->ranks;
        if (step->first != owner * c->slices + taken % c->slices)
            return violated("work order", r, i, "slice %d is number %d", step->first, taken);
        taken++;
    }
    return NULL;
}

// --- verdict ---

const char *cf_schedule_check(cf_schedule *const *schedule, char where[CF_WHERE_TEXT]) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static checker c; // large, and one is enough
    static const struct {
        const char *(*of_all)(checker *);
        const char *(*of_rank)(checker *, int rank);
    } checks[] = {{NULL, check_form},    {NULL, check_units},     {NULL, check_counts},  {NULL, check_tags},
                  {check_run, NULL},     {NULL, check_races},     {check_outcome, NULL}, {NULL, check_order},
                  {NULL, check_arrival}, {NULL, check_work_order}};
    pthread_mutex_lock(&lock);
    const cf_schedule *s = schedule[0];
    c.schedule = schedule;
    c.operation = s->operation, c.side = s->side, c.mode = s->mode;
    c.ranks = s->ranks, c.slices = s->slices, c.total = s->ranks * s->slices;
    const char *property = NULL;
    if (c.ranks < 1 || c.ranks > RANKS_MAX || c.slices < 1 || c.slices > SLICES_MAX / c.ranks)
        property = violated("form", 0, -1, "%d ranks, %d slices", c.ranks, c.slices);
    for (size_t i = 0; i < sizeof checks / sizeof *checks && !property; i++) {
        if (checks[i].of_all) property = checks[i].of_all(&c);
        for (int r = 0; r < c.ranks && checks[i].of_rank && !property; r++) property = checks[i].of_rank(&c, r);
    }
    if (property) memcpy(where, found_at, sizeof found_at);
    pthread_mutex_unlock(&lock);
    return property;
}
