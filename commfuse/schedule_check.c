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
    STAGE_MAX = CF_CHECKED_SLICES,
    STEPS_MAX = CF_CHECKED_STEPS,
    PLACES_MAX = 2 * SLICES_MAX + STAGE_MAX,
    ACCESSES_MAX = 2 * SLICES_MAX,
    SEND = 0,
    RECV = 1
};

typedef struct value { // slice < 0: nothing is there
    int slice;
    int from,
        count; // contributors from, from + 1, … (reduce-scatter); source rank, 1 (all-to-all); 0, 1 (all-gather)
} value;

typedef struct touched { // a step touches a place
    cf_place at;
    int place, step; // place: its number
    bool writes;
    bool sends;  // read by the sending half of a transfer
    int earlier; // the access to the same place before this one; -1 none
} touched;

typedef struct checker {
    cf_schedule *const *schedule; // of every rank
    cf_operation operation;
    cf_side side;
    cf_mode mode;
    int ranks, slices, total; // N, m, N · m

    int partner[RANKS_MAX][STEPS_MAX][2]; // step of the peer that holds the other half of this half
    int first_send[RANKS_MAX][RANKS_MAX], next_send[RANKS_MAX][STEPS_MAX]; // to each peer, in order; -1: no more
    int travelled[RANKS_MAX][SLICES_MAX], stamp;                           // stamp: this rank has sent the slice to this peer

    uint64_t before[STEPS_MAX][STEPS_MAX / 64]; // of the rank being looked at: steps that precede step i
    touched access[STEPS_MAX * 4 + ACCESSES_MAX * 2];
    int last_access[PLACES_MAX];

    value held[RANKS_MAX][PLACES_MAX];
    bool complete[RANKS_MAX][STEPS_MAX], met[RANKS_MAX][STEPS_MAX][2], waiting[RANKS_MAX];
    int host[RANKS_MAX], head[RANKS_MAX];           // the host stands before this step; first incomplete transfer
    int collectives[RANKS_MAX], arrived[STEPS_MAX]; // taken by a rank; ranks that have reached the k-th
    bool at_collective[RANKS_MAX];
    const char *wrong; // first violation seen by the run
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
    if (place.slot < 0) return false;
    switch (place.buffer) {
    case CF_FULL:
        return place.slot < c->total;
    case CF_STAGE:
        return place.slot < s->stage_slots;
    case CF_RESULT:
        if (c->operation == CF_ALLGATHER) return false;
        return place.slot < (c->operation == CF_REDUCE_SCATTER ? c->slices : c->total);
    }
    return false;
}

static int place_number(cf_place place) {
    return place.slot + (place.buffer == CF_FULL ? 0 : place.buffer == CF_RESULT ? SLICES_MAX : 2 * SLICES_MAX);
}

static cf_place place_ahead(cf_place place, int slots) {
    return (cf_place){place.buffer, place.slot + slots};
}

static bool computes(const checker *c, cf_side side) {
    return c->side == side || (c->side == CF_COMPUTE_BOTH && side != CF_NO_COMPUTE);
}

static touched *touch(touched *list, cf_place place, bool writes) {
    *list = (touched){.at = place, .place = place_number(place), .writes = writes};
    return list + 1;
}

// What a step reads and writes; returns how many.
static int accesses(const checker *c, int rank, const cf_step *step, touched *list) {
    touched *end = list;
    switch (step->kind) {
    case CF_COMPUTE:
        for (int i = 0; i < step->count; i++)
            end = touch(end, place_ahead(step->at, i * step->stride), step->side == CF_COMPUTE_BEFORE);
        break;
    case CF_ADD:
    case CF_COPY:
        end = touch(end, step->from, false);
        end = touch(end, step->at, true);
        break;
    case CF_EXCHANGE:
        if (step->send_to >= 0) {
            end = touch(end, step->from, false);
            end[-1].sends = true;
        }
        if (step->recv_from >= 0) end = touch(end, step->at, true);
        break;
    case CF_COLLECTIVE:
        if (c->operation == CF_ALLGATHER)
            end = touch(end, step->from, false);
        else
            for (int i = 0; i < step->count; i++) end = touch(end, place_ahead(step->from, i * step->stride), false);
        if (c->operation == CF_REDUCE_SCATTER)
            end = touch(end, step->at, true);
        else
            for (int i = 0; i < step->count; i++) { // all-gather: the own block is in place
                if (c->operation == CF_ALLGATHER && i == rank) continue;
                end = touch(end, place_ahead(step->at, i * step->stride), true);
            }
        break;
    }
    return (int)(end - list);
}

// --- form, unit, coverage, volume ---

static const char *check_step(checker *c, int r, int i) {
    const cf_schedule *s = c->schedule[r];
    const cf_step *step = &s->step[i];
    for (int w = 0; w < 2; w++)
        if (step->wait[w] < -1 || step->wait[w] >= i) return violated("form", r, i, "waits for step %d", step->wait[w]);
    if (step->range && (step->kind != CF_COMPUTE || step->wait[0] < 0 || step->wait[1] < step->wait[0]))
        return violated("form", r, i, "waits for steps %d to %d", step->wait[0], step->wait[1]);
    if (step->at.slot >= PLACES_MAX || step->from.slot >= PLACES_MAX)
        return violated("form", r, i, "slots %d and %d", step->at.slot, step->from.slot);
    switch (step->kind) {
    case CF_COMPUTE:
        if (c->side == CF_NO_COMPUTE) return violated("form", r, i, "COMPUTE of nothing");
        if ((step->side != CF_COMPUTE_BEFORE && step->side != CF_COMPUTE_AFTER) || !computes(c, step->side))
            return violated("side", r, i, "computes on side %d, the operation on %d", step->side, c->side);
        break;
    case CF_ADD:
        if (c->operation != CF_REDUCE_SCATTER) return violated("form", r, i, "ADD of what?");
        break;
    case CF_COPY:
        if (c->operation != CF_ALLTOALL) return violated("form", r, i, "COPY of what?");
        break;
    case CF_EXCHANGE:
        if (step->send_to < -1 || step->send_to >= c->ranks || step->recv_from < -1 || step->recv_from >= c->ranks)
            return violated("form", r, i, "exchange with ranks %d and %d", step->send_to, step->recv_from);
        if (step->send_to < 0 && step->recv_from < 0) return violated("form", r, i, "exchange without halves");
        if ((step->send_to >= 0 && (step->send_slice < 0 || step->send_slice >= c->total)) ||
            (step->recv_from >= 0 && (step->recv_slice < 0 || step->recv_slice >= c->total)))
            return violated("form", r, i, "sends slice %d, receives slice %d", step->send_slice, step->recv_slice);
        break;
    case CF_COLLECTIVE:
        if (step->count != c->ranks) return violated("form", r, i, "collective of %d slices among %d ranks", step->count, c->ranks);
        break;
    }
    const bool many = step->kind == CF_COMPUTE || step->kind == CF_COLLECTIVE;
    if (many && (step->first < 0 || step->first >= c->total || step->count < 1 || step->count > c->ranks ||
                 (step->count > 1 && (step->stride != c->slices || step->at.slot != step->first ||
                                      step->first + (step->count - 1) * step->stride >= c->total))))
        return violated("form", r, i, "slices %d + i·%d, i < %d, at slot %d", step->first, step->stride, step->count,
                        step->at.slot);
    const int touches = accesses(c, r, step, c->access);
    for (const touched *t = c->access; t < c->access + touches; t++) {
        if (!place_exists(c, s, t->at)) return violated("form", r, i, "no place %d:%d", t->at.buffer, t->at.slot);
        const int slice = many                        ? step->first
                          : step->kind != CF_EXCHANGE ? step->at.slot
                          : t->sends                  ? step->send_slice
                                                      : step->recv_slice;
        if (t->at.slot % c->slices != slice % c->slices) return violated("form", r, i, "slice %d at slot %d", slice, t->at.slot);
    }
    return NULL;
}

// Slices with equal k are equal in size, and so are slots.
static const char *check_form(checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    if (s->operation != c->operation || s->side != c->side || s->mode != c->mode || s->ranks != c->ranks || s->rank != r ||
        s->slices != c->slices)
        return violated("form", r, -1, "not a schedule of the same operation");
    if (s->count < 0 || s->count > STEPS_MAX || s->stage_slots < 0 || s->stage_slots > STAGE_MAX || s->stage_slots % c->slices != 0)
        return violated("form", r, -1, "%d steps, %d slots", s->count, s->stage_slots);
    if (s->begin < 0 || s->begin > s->count) return violated("form", r, -1, "begin %d of %d", s->begin, s->count);
    if (s->slice_major && (c->operation != CF_REDUCE_SCATTER || (c->mode != CF_MODE_SLICE && c->mode != CF_MODE_OWN)))
        return violated("form", r, -1, "slice-major payload outside of a sliced reduce-scatter");
    if (c->operation == CF_REDUCE_SCATTER && // m slices side by side
        (s->result.slot >= PLACES_MAX || s->result.slot % c->slices != 0 || !place_exists(c, s, s->result)))
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

// Steps of one kind and side (transfers have none) name every slice once.
static const char *check_once(const checker *c, int r, cf_step_kind kind, cf_side side, const char *property) {
    const cf_schedule *s = c->schedule[r];
    bool seen[SLICES_MAX] = {false};
    int sum = 0;
    for (int i = 0; i < s->count; i++) {
        const cf_step *step = &s->step[i];
        if (step->kind != kind || step->side != side) continue;
        for (int k = 0; k < step->count; k++, sum++) {
            int slice = step->first + k * step->stride;
            if (seen[slice]) return violated(property, r, i, "slice %d a second time", slice);
            seen[slice] = true;
        }
    }
    if (sum != c->total) return violated(property, r, -1, "%d of %d slices", sum, c->total);
    return NULL;
}

static const char *check_coverage(checker *c, int r) {
    const char *property = NULL;
    for (cf_side side = CF_COMPUTE_BEFORE; side <= CF_COMPUTE_AFTER && !property; side++)
        if (computes(c, side)) property = check_once(c, r, CF_COMPUTE, side, "coverage");
    return property;
}

static const char *check_volume(checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    int sent = 0, received = 0, collectives = 0;
    if (c->mode == CF_MODE_OWN) return NULL;
    for (int i = 0; i < s->count; i++) {
        collectives += s->step[i].kind == CF_COLLECTIVE;
        if (s->step[i].kind != CF_EXCHANGE) continue;
        sent += s->step[i].send_to >= 0 && s->step[i].send_to != r; // what a rank sends itself does not travel
        received += s->step[i].recv_from >= 0 && s->step[i].recv_from != r;
    }
    int expected = c->mode == CF_MODE_COMMFUSE ? (c->ranks - 1) * c->slices : 0;
    if (sent != expected || received != expected)
        return violated("volume", r, -1, "%d slices sent, %d received, not %d", sent, received, expected);
    bool native = c->mode == CF_MODE_NONE || c->mode == CF_MODE_SLICE;
    if (!native && collectives > 0) return violated("volume", r, -1, "%d collectives", collectives);
    return native && (c->ranks > 1 || collectives > 0) ? check_once(c, r, CF_COLLECTIVE, CF_NO_COMPUTE, "volume") : NULL;
}

// --- matching ---

// From the last on, so that each list begins with its first.
static const char *list_sends(checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    c->stamp++;
    for (int p = 0; p < c->ranks; p++) c->first_send[r][p] = -1;
    for (int i = s->count - 1; i >= 0; i--) {
        const cf_step *step = &s->step[i];
        int p = step->send_to;
        if (step->kind != CF_EXCHANGE || p < 0) continue;
        if (c->travelled[p][step->send_slice] == c->stamp)
            return violated("matching", r, i, "slice %d goes to rank %d twice", step->send_slice, p);
        c->travelled[p][step->send_slice] = c->stamp;
        c->next_send[r][i] = c->first_send[r][p];
        c->first_send[r][p] = i;
    }
    return NULL;
}

static const char *match_receives(checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    for (int i = 0; i < s->count; i++) {
        const cf_step *step = &s->step[i];
        if (step->kind != CF_EXCHANGE || step->recv_from < 0) continue;
        int p = step->recv_from, j = c->first_send[p][r];
        if (j < 0) return violated("matching", r, i, "rank %d sends nothing more", p);
        if (c->schedule[p]->step[j].send_slice != step->recv_slice)
            return violated("matching", r, i, "slice %d expected, rank %d sends %d", step->recv_slice, p,
                            c->schedule[p]->step[j].send_slice);
        c->partner[r][i][RECV] = j;
        c->partner[p][j][SEND] = i;
        c->first_send[p][r] = c->next_send[p][j];
    }
    return NULL;
}

static const char *match_collectives(const checker *c) {
    for (int r = 1; r < c->ranks; r++) {
        const cf_schedule *a = c->schedule[0], *b = c->schedule[r];
        int i = 0;
        for (int j = 0; j < b->count; j++) {
            const cf_step *mine = &b->step[j];
            if (mine->kind != CF_COLLECTIVE) continue;
            while (i < a->count && a->step[i].kind != CF_COLLECTIVE) i++;
            if (i == a->count || a->step[i].first != mine->first || a->step[i].stride != mine->stride)
                return violated("matching", r, j, "rank 0 calls another collective");
            i++;
        }
    }
    return NULL;
}

static const char *check_matching(checker *c) {
    const char *property = NULL;
    for (int r = 0; r < c->ranks && !property; r++) property = list_sends(c, r);
    for (int r = 0; r < c->ranks && !property; r++) property = match_receives(c, r);
    if (property) return property;
    for (int r = 0; r < c->ranks; r++)
        for (int p = 0; p < c->ranks; p++)
            if (c->first_send[r][p] >= 0) return violated("matching", r, c->first_send[r][p], "rank %d does not receive this", p);
    return match_collectives(c);
}

// --- races ---

static void add_before(checker *c, int step, int earlier, int words) {
    for (int w = 0; w < words; w++) c->before[step][w] |= c->before[earlier][w];
    c->before[step][earlier / 64] |= UINT64_C(1) << (earlier % 64);
}

static bool is_before(const checker *c, int earlier, int step) {
    return c->before[step][earlier / 64] >> (earlier % 64) & 1;
}

static void order_steps(checker *c, const cf_schedule *s) {
    int words = (s->count + 63) / 64, last_compute = -1, last_blocking = -1;
    for (int i = 0; i < s->count; i++) {
        const cf_step *step = &s->step[i];
        memset(c->before[i], 0, (size_t)words * sizeof c->before[i][0]);
        for (int n = 0, wait = 0; (wait = cf_nth_wait(step, n)) >= 0; n++) add_before(c, i, wait, words);
        if (last_blocking >= 0) add_before(c, i, last_blocking, words);
        if (!cf_on_wire(step)) {
            if (last_compute >= 0) add_before(c, i, last_compute, words);
            last_compute = i;
        }
        if (step->kind == CF_COLLECTIVE && s->blocking) last_blocking = i;
    }
}

// An access conflicts with those since the last write before it, and with that write; what is older is
// ordered before that write, or was reported.
static const char *check_access(checker *c, int rank, int number) {
    touched *mine = &c->access[number];
    mine->earlier = c->last_access[mine->place];
    c->last_access[mine->place] = number;
    for (int other = mine->earlier; other >= 0; other = c->access[other].earlier) {
        const touched *theirs = &c->access[other];
        if (mine->writes || theirs->writes)
            if (theirs->step == mine->step || theirs->sends || !is_before(c, theirs->step, mine->step))
                return violated("race", rank, mine->step, "not ordered behind step %d", theirs->step);
        if (theirs->writes) return NULL;
    }
    return NULL;
}

static const char *check_races(checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    if (c->mode == CF_MODE_NOWIRE) return NULL; // nothing moves
    order_steps(c, s);
    for (int p = 0; p < PLACES_MAX; p++) c->last_access[p] = -1;
    for (int i = 0, number = 0; i < s->count; i++)
        for (int end = number + accesses(c, r, &s->step[i], &c->access[number]); number < end; number++) {
            c->access[number].step = i;
            const char *property = check_access(c, r, number);
            if (property) return property;
        }
    return NULL;
}

// --- data by name ---

// Contributor number of rank p to a slice: the owner comes last.
static int contributor(const checker *c, int slice, int p) {
    return (p - slice / c->slices - 1 + 2 * c->ranks) % c->ranks;
}

static value own_value(const checker *c, int rank, int slice) { // what this rank computes or starts with
    switch (c->operation) {
    case CF_ALLGATHER:
        return (value){slice, 0, 1};
    case CF_REDUCE_SCATTER:
        return (value){slice, contributor(c, slice, rank), 1};
    case CF_ALLTOALL:
        return (value){slice, rank, 1};
    }
    return (value){-1, 0, 0};
}

// What the rank must find in slice `slice` after the communication.
static value arrived_value(const checker *c, int rank, int slice) {
    int owner = slice / c->slices, k = slice % c->slices;
    if (c->operation == CF_ALLTOALL) return (value){rank * c->slices + k, owner, 1};
    return (value){slice, 0, c->operation == CF_REDUCE_SCATTER ? c->ranks : 1};
}

static bool same(value a, value b) {
    return a.slice == b.slice && a.from == b.from && a.count == b.count;
}

static void note(checker *c, const char *property) {
    if (!c->wrong) c->wrong = property;
}

// Addition commutes but does not associate: a sum is right if it only ever grows by one contributor, the
// next one (or if two single ones meet).
static value add(checker *c, int r, int i, value to, value from) {
    if (c->wrong) return to;
    if (to.slice < 0 || to.slice != from.slice)
        return note(c, violated("data", r, i, "adds slice %d to slice %d", from.slice, to.slice)), to;
    if (from.count == 1 && from.from == to.from + to.count) return (value){to.slice, to.from, to.count + 1};
    if (to.count == 1 && to.from == from.from + from.count) return (value){to.slice, from.from, from.count + 1};
    note(c, violated("sum order", r, i, "slice %d: %d…%d plus %d…%d", to.slice, to.from, to.from + to.count - 1, from.from,
                     from.from + from.count - 1));
    return to;
}

static void start_data(checker *c) {
    for (int r = 0; r < c->ranks; r++) {
        for (int p = 0; p < PLACES_MAX; p++) c->held[r][p] = (value){-1, 0, 0};
        if (computes(c, CF_COMPUTE_BEFORE)) continue;
        for (int slice = 0; slice < c->total; slice++)
            if (c->operation != CF_ALLGATHER || slice / c->slices == r) c->held[r][slice] = own_value(c, r, slice);
    }
}

static void run_compute(checker *c, int r, int i) {
    const cf_step *step = &c->schedule[r]->step[i];
    if (step->kind == CF_ADD) {
        value *to = &c->held[r][place_number(step->at)];
        *to = add(c, r, i, *to, c->held[r][place_number(step->from)]);
        return;
    }
    if (step->kind == CF_COPY) c->held[r][place_number(step->at)] = c->held[r][place_number(step->from)];
    if (step->kind == CF_COPY) return;
    for (int k = 0; k < step->count; k++) {
        int slice = step->first + k * step->stride;
        value *place = &c->held[r][place_number(place_ahead(step->at, k * step->stride))];
        if (step->accumulate)
            *place = add(c, r, i, *place, own_value(c, r, slice));
        else if (step->side == CF_COMPUTE_BEFORE)
            *place = own_value(c, r, slice);
        else if (!c->wrong && !same(*place, arrived_value(c, r, slice)))
            note(c, violated("data", r, i, "computes on slice %d, finds slice %d", slice, place->slice));
    }
}

static void deliver(checker *c, int from, int send, int to, int receive) {
    const cf_step *out = &c->schedule[from]->step[send], *in = &c->schedule[to]->step[receive];
    value sent = c->held[from][place_number(out->from)];
    if (!c->wrong && sent.slice < 0) note(c, violated("data", from, send, "sends a place that holds nothing"));
    if (!c->wrong && sent.slice != out->send_slice)
        note(c, violated("data", from, send, "sends slice %d as slice %d", sent.slice, out->send_slice));
    c->held[to][place_number(in->at)] = sent;
}

// step[r]: the collective of rank r.
static void take_collective(checker *c, const cf_step *const *step) {
    for (int r = 0; r < c->ranks; r++) {
        value result = arrived_value(c, r, step[r]->first + r * step[r]->stride);
        for (int i = 0; i < c->ranks; i++) {
            bool gather = c->operation == CF_ALLGATHER;
            cf_place source = place_ahead(step[i]->from, gather ? 0 : r * step[i]->stride);
            value sent = c->held[i][place_number(source)];
            if (c->operation != CF_REDUCE_SCATTER) {
                c->held[r][place_number(place_ahead(step[r]->at, i * step[r]->stride))] = sent;
            } else if (!c->wrong && !same(sent, own_value(c, i, result.slice)))
                note(c, violated("data", i, -1, "reduces slice %d, finds slice %d", result.slice, sent.slice));
        }
        if (c->operation == CF_REDUCE_SCATTER) c->held[r][place_number(step[r]->at)] = result;
    }
}

static void check_result(checker *c) {
    for (int r = 0; r < c->ranks; r++)
        for (int slice = 0; slice < c->total; slice++) {
            cf_place place = {c->operation == CF_ALLTOALL ? CF_RESULT : CF_FULL, slice};
            if (c->operation == CF_REDUCE_SCATTER) {
                if (slice / c->slices != r) continue;
                place = place_ahead(c->schedule[r]->result, slice % c->slices);
            }
            bool stays =
                c->operation == CF_ALLTOALL && c->side == CF_COMPUTE_AFTER && (c->mode == CF_MODE_COMMFUSE || c->ranks == 1);
            if (stays && slice / c->slices == r) place.buffer = CF_FULL; // computed on where they were
            value held = c->held[r][place_number(place)];
            if (!c->wrong && !same(held, arrived_value(c, r, slice)))
                note(c, violated("data", r, -1, "result slice %d holds slice %d, contributors %d, %d of them", slice, held.slice,
                                 held.from, held.count));
        }
}

// --- the run ---

static bool waits_complete(const checker *c, int r, const cf_step *step) {
    for (int n = 0, wait = 0; (wait = cf_nth_wait(step, n)) >= 0; n++)
        if (!c->complete[r][wait]) return false;
    return true;
}

// The transfer in front of the queue, if it may be active; -1 if not. The host has posted what it has reached.
static int active_head(const checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    int i = c->head[r];
    return i < s->count && i <= c->host[r] && waits_complete(c, r, &s->step[i]) ? i : -1;
}

static void find_head(checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    while (c->head[r] < s->count && (!cf_on_wire(&s->step[c->head[r]]) || c->complete[r][c->head[r]])) c->head[r]++;
}

static bool walk_host(checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    int start = c->host[r];
    for (; c->host[r] < s->count; c->host[r]++) {
        const cf_step *step = &s->step[c->host[r]];
        if (!cf_on_wire(step)) {
            if (!waits_complete(c, r, step)) break;
            run_compute(c, r, c->host[r]);
            c->complete[r][c->host[r]] = true;
        } else if (step->kind == CF_COLLECTIVE && s->blocking && !c->complete[r][c->host[r]])
            break;
    }
    return c->host[r] > start;
}

static bool meet(checker *c, int r, int i, int half, int peer) {
    if (peer < 0 || c->met[r][i][half]) return true;
    int j = c->partner[r][i][half];
    if (active_head(c, peer) != j) return false;
    c->met[r][i][half] = c->met[peer][j][1 - half] = true;
    if (half == SEND)
        deliver(c, r, i, peer, j);
    else
        deliver(c, peer, j, r, i);
    c->waiting[peer] = true; // look at it again: this may have been all it waited for
    return true;
}

static bool arrive(checker *c, int r) {
    const cf_step *step[RANKS_MAX];
    int number = c->collectives[r];
    if (!c->at_collective[r]) c->arrived[number]++;
    c->at_collective[r] = true;
    if (c->arrived[number] < c->ranks) return false;
    for (int p = 0; p < c->ranks; p++) step[p] = &c->schedule[p]->step[c->head[p]];
    take_collective(c, step);
    for (int p = 0; p < c->ranks; p++) {
        c->complete[p][c->head[p]] = c->waiting[p] = true;
        c->at_collective[p] = false;
        c->collectives[p]++;
        find_head(c, p);
    }
    return true;
}

// Take what rank r can take; true if it took something.
static bool take(checker *c, int r) {
    bool moved = walk_host(c, r);
    int i = active_head(c, r);
    if (i < 0) return moved;
    const cf_step *step = &c->schedule[r]->step[i];
    if (step->kind == CF_COLLECTIVE) return arrive(c, r) || moved;
    bool sent = meet(c, r, i, SEND, step->send_to), received = meet(c, r, i, RECV, step->recv_from);
    if (!sent || !received) return moved;
    c->complete[r][i] = true;
    find_head(c, r);
    return true;
}

static const char *check_run(checker *c) {
    memset(c->arrived, 0, sizeof c->arrived);
    for (int r = 0; r < c->ranks; r++) {
        int count = c->schedule[r]->count;
        memset(c->complete[r], 0, (size_t)count * sizeof c->complete[r][0]);
        memset(c->met[r], 0, (size_t)count * sizeof c->met[r][0]);
        c->host[r] = c->head[r] = c->collectives[r] = 0;
        c->at_collective[r] = false;
        c->waiting[r] = true;
        find_head(c, r);
    }
    c->wrong = NULL;
    start_data(c);
    for (bool moved = true; moved;) {
        moved = false;
        for (int r = 0; r < c->ranks; r++)
            while (c->waiting[r]) {
                c->waiting[r] = false;
                if (take(c, r)) c->waiting[r] = moved = true;
            }
    }
    for (int r = 0; r < c->ranks; r++)
        if (c->host[r] < c->schedule[r]->count || c->head[r] < c->schedule[r]->count)
            return violated("deadlock", r, c->host[r] < c->head[r] ? c->host[r] : c->head[r], "never completes");
    if (c->mode == CF_MODE_NOWIRE) return NULL; // wrong by construction
    check_result(c);
    return c->wrong;
}

// --- order ---

static bool fused(const checker *c) {
    return c->mode == CF_MODE_COMMFUSE || c->mode == CF_MODE_NOWIRE;
}

static const char *check_own_slice_of(const checker *c, int r, cf_side side) {
    const cf_schedule *s = c->schedule[r];
    bool after = side == CF_COMPUTE_AFTER, wire = c->mode == CF_MODE_COMMFUSE && c->ranks > 1;
    int first_exchange = -1, taken = 0, first_own = after ? 0 : c->total - c->slices;
    for (int i = 0; i < s->count; i++) {
        const cf_step *step = &s->step[i];
        if (step->kind == CF_EXCHANGE && first_exchange < 0) first_exchange = i;
        if (step->kind != CF_COMPUTE || step->side != side) continue;
        bool own = taken >= first_own && taken < first_own + c->slices;
        for (int k = 0; k < step->count; k++, taken++)
            if ((step->first / c->slices == r) != own || (step->count > 1 && (own || s->route != CF_ONCE)))
                return violated("own slice", r, i, "slice %d is computed as number %d", step->first, taken);
        if (own && after && (step->wait[0] >= 0 || step->wait[1] >= 0))
            return violated("own slice", r, i, "waits, though it is here");
        if (taken == 1 && after && wire && first_exchange < 0)
            return violated("own slice", r, i, "no transfer runs behind the first computation");
    }
    return NULL;
}

static const char *check_own_slice(checker *c, int r) {
    const char *property = NULL;
    for (cf_side side = CF_COMPUTE_BEFORE; side <= CF_COMPUTE_AFTER && fused(c) && !property; side++)
        if (computes(c, side)) property = check_own_slice_of(c, r, side);
    return property;
}

// Who works on what was posted later first stands and waits while something to work on is there.
static const char *check_arrival(checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    for (int i = 0, newest = -1; i < s->count; i++) {
        const cf_step *step = &s->step[i];
        int awaited = step->wait[0] > step->wait[1] ? step->wait[0] : step->wait[1];
        if (step->kind != CF_COMPUTE || step->side != CF_COMPUTE_AFTER) continue;
        if (awaited >= 0 && awaited < newest)
            return violated("arrival", r, i, "waits for step %d, the one before for %d", awaited, newest);
        if (awaited >= 0) newest = awaited;
    }
    return NULL;
}

// A computation may add up what it is given (wgrad), and all routes promise the same bits.
static const char *check_work_order(checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    if (!fused(c) || c->operation != CF_ALLGATHER || s->route == CF_ONCE) return NULL;
    for (int i = 0, taken = 0; i < s->count; i++) {
        const cf_step *step = &s->step[i];
        if (step->kind != CF_COMPUTE || step->side != CF_COMPUTE_AFTER) continue;
        int owner = (r - taken / c->slices + c->ranks) % c->ranks;
        if (step->first != owner * c->slices + taken % c->slices)
            return violated("work order", r, i, "slice %d is number %d", step->first, taken);
        taken++;
    }
    return NULL;
}

static const char *check_tail(checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    cf_side last = computes(c, CF_COMPUTE_BEFORE) ? CF_COMPUTE_BEFORE : CF_COMPUTE_AFTER;
    if (!fused(c) || c->side == CF_NO_COMPUTE) return NULL;
    for (int i = s->count - 1; i >= 0 && (s->step[i].kind != CF_COMPUTE || s->step[i].side != last); i--)
        if (s->step[i].kind == CF_EXCHANGE) return violated("tail", r, i, "posted behind the last computation");
    return NULL;
}

static const char *check_begin(checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    for (int i = 0; i < s->count && c->side != CF_NO_COMPUTE; i++) {
        const cf_step *step = &s->step[i];
        if (step->kind == CF_ADD) continue; // on either side, as needed
        bool first = cf_on_wire(step) || (step->side == CF_COMPUTE_BEFORE && !step->accumulate);
        if (first != (i < s->begin)) return violated("begin", r, i, "begin takes %d steps", s->begin);
    }
    return NULL;
}

static const char *check_fold(checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    if (s->folds && (c->operation != CF_REDUCE_SCATTER || c->side != CF_COMPUTE_BEFORE))
        return violated("fold", r, -1, "an operation without sums of computations");
    for (int i = 0; i < s->count; i++) {
        const cf_step *step = &s->step[i];
        bool own = step->kind == CF_COMPUTE && step->first / c->slices == r, last = step->first % c->slices == c->slices - 1;
        if (step->accumulate != (s->folds && own && !last))
            return violated("fold", r, i, "slice %d is %scomputed onto another", step->first, step->accumulate ? "" : "not ");
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
    } checks[] = {{NULL, check_form},     {NULL, check_units},      {NULL, check_coverage}, {NULL, check_volume},
                  {check_matching, NULL}, {NULL, check_races},      {check_run, NULL},      {NULL, check_own_slice},
                  {NULL, check_arrival},  {NULL, check_work_order}, {NULL, check_tail},     {NULL, check_begin},
                  {NULL, check_fold}};
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
