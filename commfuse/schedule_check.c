// See schedule_check.h. First come the properties of a single step and of one rank's list, then races, then a run of all ranks.
//
// Races. A transfer may write its destination as soon as it is posted. Only waits order two transfers, or a transfer and a
// computation. A wait for an exchange is a wait for the data that it receives; it may read the data that it sends until the end of
// the run, so nothing may be written there any more. Computations share a stream, so they are ordered. Step b is "after" step a
// exactly if a path of waits and of stream order leads from a to b, and any two conflicting steps must be ordered so by the rank's
// own list; an order that only messages imply is not accepted.
//
// Deadlock. Strict rendezvous: each rank has one communication queue, and only its head may be active, once it is posted and its
// waits are complete. (The host posts as it walks the list; it stops before a COMPUTE, ADD or COPY whose waits are not complete.)
// The head completes when both its halves have met the active head of the peer. No action prevents another: a head stays active
// until it completes, and complete steps stay complete. So all maximal runs take the same steps, and one run decides for all
// interleavings. As conflicting steps are ordered, that run also shows the data of all others.
//
// Data are tracked by name. The value of a slice is its number and the contributors summed in it, in the order of the sum:
// contributor (p - j - 1) mod N of a slice that rank j owns is rank p; of two levels hosts and places are counted so.
#include "schedule_check.h"
#include "base/die.h"
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum {
    PLACES_MAX = 3 * CF_CHECKED_SLICES, // of each buffer as many
    ACCESSES_MAX = 4 * CF_CHECKED_STEPS + 4 * CF_CHECKED_SLICES,
    SEND = 0,
    RECV = 1
};

typedef struct value { // slice < 0: empty
    int slice;
    int from, count; // contributors from, from + 1, … (reduce-scatter); source rank, 1 (all-to-all); 0, 1 (all-gather)
} value;

typedef struct access { // a step reads or writes a place, for this slice or one of equal size
    cf_place at;
    int slice;
    bool writes;
    int step, earlier; // races: the access to the same place before this one; -1: none
} access;

typedef struct checker {
    cf_schedule *const *schedule; // of every rank
    cf_operation operation;
    cf_side side;
    int ranks, slices, total; // N, m, N · m
    char *where;              // text of the first violation, which
    jmp_buf first;            // ends the check
    const char *found;        // property; NULL: none

    bool computed[CF_COMPUTE_BOTH][CF_CHECKED_SLICES]; // on a side, by the rank that is checked
    int slices_computed[CF_COMPUTE_BOTH];
    access access[ACCESSES_MAX]; // of one step, or of the rank that is checked
    int last_access[PLACES_MAX];
    uint64_t before[CF_CHECKED_STEPS][CF_CHECKED_STEPS / 64]; // steps of that rank that precede step i

    // The run: data; the next step of the host; the first incomplete transfer, and whether its halves have met those of peers
    value held[CF_CHECKED_RANKS][PLACES_MAX];
    int host[CF_CHECKED_RANKS], head[CF_CHECKED_RANKS];
    bool met[CF_CHECKED_RANKS][2];
} checker;

CF_NORETURN CF_PRINTF(5, 6) static void violated(checker *c, const char *property, int rank, int step, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const int length = snprintf(c->where, CF_WHERE_TEXT, "rank %d step %d: ", rank, step);
    vsnprintf(c->where + length, CF_WHERE_TEXT - (size_t)length, format, arguments);
    va_end(arguments);
    c->found = property;
    longjmp(c->first, 1);
}

// --- places ---

static bool place_exists(const checker *c, const cf_schedule *s, cf_place place) {
    const int results[] = {[CF_ALLGATHER] = 0, [CF_REDUCE_SCATTER] = c->slices, [CF_ALLTOALL] = c->total};
    const int slots[] = {[CF_FULL] = c->total, [CF_STAGE] = s->stage_slots, [CF_RESULT] = results[c->operation]};
    return place.buffer <= CF_RESULT && place.slot >= 0 && place.slot < slots[place.buffer];
}

static int place_number(cf_place place) {
    return place.slot + (int)place.buffer * CF_CHECKED_SLICES;
}

static access *append(access *list, cf_place at, int ahead, int slice, bool writes) {
    *list = (access){.at = {at.buffer, at.slot + ahead}, .slice = slice, .writes = writes};
    return list + 1;
}

// Lists the places that a step reads, then those that it writes; returns their number. A transfer reads what it sends.
static int accesses(const checker *c, int rank, const cf_step *step, access *list) {
    const bool exchange = step->kind == CF_EXCHANGE, adds = step->kind == CF_ADD, moves = exchange || adds || step->kind == CF_COPY;
    const bool collective = step->kind == CF_COLLECTIVE, gather = c->operation == CF_ALLGATHER;
    const int m = c->slices;
    access *end = list;
    for (int k = 0; k < step->count && step->kind == CF_COMPUTE; k++)
        end = append(end, step->at, k * m, step->first + k * m, step->side == CF_COMPUTE_BEFORE);
    for (int k = 0; k < step->count && collective && (k == 0 || !gather); k++)
        end = append(end, step->from, k * m, step->first, false);
    for (int k = 0; k < step->count && collective && (k == 0 || c->operation != CF_REDUCE_SCATTER); k++)
        if (!gather || k != rank) // the own block of a gathered payload is in place
            end = append(end, step->at, k * m, step->first, true);
    for (int k = 0; k < (adds ? step->count : moves && (!exchange || step->send.rank >= 0)); k++)
        end = append(end, step->from, k * m, exchange ? step->send.slice : step->at.slot, false);
    if (moves && (!exchange || step->recv.rank >= 0))
        end = append(end, step->at, 0, exchange ? step->recv.slice : step->at.slot, true);
    return (int)(end - list);
}

// --- form, side, unit, coverage ---

static void check_step(checker *c, int r, int i) {
    const cf_step *step = &c->schedule[r]->step[i];
    const int first = step->first, count = step->count, wait0 = step->wait[0], wait1 = step->wait[1];
    const bool compute = step->kind == CF_COMPUTE, collective = step->kind == CF_COLLECTIVE, exchange = step->kind == CF_EXCHANGE;
    const bool none = first < 0 || first >= c->total || count < 1 || count > c->ranks || (collective && count != c->ranks);
    const bool apart = !none && count > 1 && (step->at.slot != first || first + (count - 1) * c->slices >= c->total);
    const struct {
        bool broken;
        const char *property, *how;
    } rules[] = {
        {wait0 < 0 || wait0 > i || wait1 < 0 || wait1 > i, "form", "waits for a step that is not earlier"},
        {step->range && ((!compute && step->kind != CF_ADD) || wait0 == 0 || wait1 < wait0), "form", "waits for an empty range"},
        {compute && c->side == CF_NO_COMPUTE, "form", "computes, but the operation does not"},
        {compute && ((step->side != CF_COMPUTE_BEFORE && step->side != CF_COMPUTE_AFTER) || !(c->side & step->side)), "side",
         "computes on a side on which the operation does not"},
        {step->kind == CF_ADD && c->operation != CF_REDUCE_SCATTER, "form", "adds, but the operation does not"},
        {step->kind == CF_ADD && (count < 1 || count > c->ranks), "form", "adds a wrong number of parts"},
        {step->kind == CF_COPY && c->operation != CF_ALLTOALL, "form", "copies, but the operation does not"},
        {exchange && (step->send.rank < -1 || step->send.rank >= c->ranks || step->recv.rank < -1 || step->recv.rank >= c->ranks ||
                      step->send.rank + step->recv.rank == -2),
         "form", "names no peer, or one that does not exist"},
        {(compute || collective) && (none || apart), "form", "its slices do not exist, or are not of one k"},
        {step->at.slot >= PLACES_MAX || step->from.slot >= PLACES_MAX, "form", "slots that do not exist"},
    };
    for (size_t k = 0; k < sizeof rules / sizeof *rules; k++)
        if (rules[k].broken) violated(c, rules[k].property, r, i, "%s", rules[k].how);
    const int all = accesses(c, r, step, c->access);
    for (const access *a = c->access; a < c->access + all; a++) {
        if (!place_exists(c, c->schedule[r], a->at)) violated(c, "form", r, i, "no place %d:%d", a->at.buffer, a->at.slot);
        if (a->slice < 0 || a->slice >= c->total || a->at.slot % c->slices != a->slice % c->slices)
            violated(c, "form", r, i, "slice %d at slot %d", a->slice, a->at.slot);
        if (!compute) continue;
        if (c->computed[step->side][a->slice]) violated(c, "coverage", r, i, "slice %d a second time", a->slice);
        c->computed[step->side][a->slice] = true, c->slices_computed[step->side]++;
    }
}

// Slices of equal k have equal sizes, and so have slots. Computations of each side cover every slice once.
static void check_form(checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    const cf_schedule *first = c->schedule[0];
    if (s->operation != c->operation || s->side != c->side || s->algorithm != first->algorithm || s->bound != first->bound ||
        s->ranks != c->ranks || s->hosts != first->hosts || s->rank != r || s->slices != c->slices)
        violated(c, "form", r, -1, "not a schedule of the same operation");
    if (s->count < 0 || s->count > CF_CHECKED_STEPS || s->split < 0 || s->split > s->count || s->stage_slots < 0 ||
        s->stage_slots > CF_CHECKED_SLICES || s->stage_slots % c->slices != 0)
        violated(c, "form", r, -1, "begin %d of %d steps, %d slots", s->split, s->count, s->stage_slots);
    if (s->slice_major && c->operation != CF_REDUCE_SCATTER)
        violated(c, "form", r, -1, "slice-major payload outside of a reduce-scatter");
    if (c->operation == CF_REDUCE_SCATTER && // m slices side by side
        (s->result.slot % c->slices != 0 || !place_exists(c, s, s->result)))
        violated(c, "form", r, -1, "result at place %d:%d", s->result.buffer, s->result.slot);
    memset(c->computed, 0, sizeof c->computed);
    memset(c->slices_computed, 0, sizeof c->slices_computed);
    for (int i = 0; i < s->count; i++) check_step(c, r, i);
    for (cf_side side = CF_COMPUTE_BEFORE; side <= CF_COMPUTE_AFTER; side++)
        if ((c->side & side) && c->slices_computed[side] < c->total)
            violated(c, "coverage", r, -1, "%d of %d slices", c->slices_computed[side], c->total);
}

static void check_units(checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    int met[2][CF_CHECKED_RANKS] = {{0}}, units = 0; // met[half][peer]: the latest unit with that peer
    for (int i = 0, first = 0; i < s->count; i++) {
        const cf_step *step = &s->step[i];
        bool exchange = step->kind == CF_EXCHANGE;
        if (step->joined && (!exchange || i == 0 || s->step[i - 1].kind != CF_EXCHANGE))
            violated(c, "unit", r, i, "joined to a step that is not an exchange");
        if (!exchange) continue;
        if (!step->joined) first = i, units++;
        const int peer[2] = {[SEND] = step->send.rank, [RECV] = step->recv.rank};
        for (int w = 0; w < 2; w++) {
            if (step->wait[w] > first) violated(c, "unit", r, i, "waits for step %d of its unit", step->wait[w] - 1);
            if (peer[w] < 0) continue;
            if (met[w][peer[w]] == units) violated(c, "unit", r, i, "meets rank %d twice", peer[w]);
            met[w][peer[w]] = units;
        }
    }
}

// --- data by name ---

// The value that this rank computes or starts with. The owner of a sum is its last contributor.
static value own_value(const checker *c, int rank, int slice) {
    const int contributor = cf_schedule_shifted(c->schedule[rank], rank, slice / c->slices, c->ranks - 1);
    return (value){slice, c->operation == CF_ALLGATHER ? 0 : c->operation == CF_ALLTOALL ? rank : contributor, 1};
}

// The value that the rank must find in a slice after the communication.
static value arrived_value(const checker *c, int rank, int slice) {
    int owner = slice / c->slices, k = slice % c->slices;
    if (c->operation == CF_ALLTOALL) return (value){rank * c->slices + k, owner, 1};
    return (value){slice, 0, c->operation == CF_REDUCE_SCATTER ? c->ranks : 1};
}

static void expect(checker *c, int r, int i, const char *how, value found, value expected) {
    if (found.slice != expected.slice || found.from != expected.from || found.count != expected.count)
        violated(c, "data", r, i, "%s slice %d of contributors %d…%d, finds slice %d of %d…%d", how, expected.slice, expected.from,
                 expected.from + expected.count - 1, found.slice, found.from, found.from + found.count - 1);
}

// Addition commutes but does not associate: a sum may only grow by one contributor at a time, the next one (or two single ones
// meet), or, of two levels, by the sum of the next host.
static void add(checker *c, int r, int i, value *to, value from) {
    const int P = c->schedule[r]->algorithm->levels ? c->ranks / c->schedule[r]->hosts : 1;
    const bool host = from.count == P && from.from % P == 0;
    if (to->slice < 0 || to->slice != from.slice)
        violated(c, "data", r, i, "adds slice %d to slice %d", from.slice, to->slice);
    else if ((from.count == 1 || host) && from.from == to->from + to->count)
        to->count += from.count;
    else if (to->count == 1 && to->from == from.from + from.count)
        *to = (value){to->slice, from.from, from.count + 1};
    else
        violated(c, "sum order", r, i, "slice %d: %d…%d plus %d…%d", to->slice, to->from, to->from + to->count - 1, from.from,
                 from.from + from.count - 1);
}

static void run_on_stream(checker *c, int r, int i) {
    const cf_step *step = &c->schedule[r]->step[i];
    const int all = accesses(c, r, step, c->access);
    value from = c->held[r][place_number(step->kind == CF_ADD ? step->from : c->access[0].at)]; // of an ADD the sum of its parts
    for (const access *a = c->access; a < c->access + all; a++) {
        value *at = &c->held[r][place_number(a->at)];
        if (step->kind == CF_COMPUTE && a->writes)
            *at = own_value(c, r, a->slice);
        else if (step->kind == CF_COMPUTE)
            expect(c, r, i, "works on", *at, arrived_value(c, r, a->slice));
        else if (step->kind == CF_ADD && !a->writes && a > c->access)
            add(c, r, i, &from, *at);
        else if (step->kind == CF_ADD && a->writes)
            add(c, r, i, at, from);
        else if (a->writes)
            *at = from;
    }
}

// Runs the collective at the head of all ranks' queues.
static void collect(checker *c) {
    const bool gather = c->operation == CF_ALLGATHER, reduce = c->operation == CF_REDUCE_SCATTER;
    for (int r = 0; r < c->ranks; r++) {
        const cf_step *step = &c->schedule[r]->step[c->head[r]], *first = &c->schedule[0]->step[c->head[0]];
        if (step->first != first->first) violated(c, "matching", r, c->head[r], "rank 0 calls another collective");
        const int at = place_number(step->at), number = step->first + r * c->slices;
        for (int i = 0; i < c->ranks; i++) {
            const cf_step *other = &c->schedule[i]->step[c->head[i]];
            value sent = c->held[i][place_number(other->from) + (gather ? 0 : r * c->slices)];
            if (reduce)
                expect(c, i, c->head[i], "reduces", sent, own_value(c, i, number));
            else
                c->held[r][at + i * c->slices] = sent;
        }
        if (reduce) c->held[r][at] = arrived_value(c, r, number);
    }
}

static void check_result(checker *c, int r) {
    const bool reduce = c->operation == CF_REDUCE_SCATTER, all_to_all = c->operation == CF_ALLTOALL;
    const bool stays = all_to_all && c->side == CF_COMPUTE_AFTER && !c->schedule[r]->algorithm->native;
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
        if (wait >= (cf_is_transfer(&c->schedule[r]->step[wait]) ? c->head[r] : c->host[r])) return false;
    return true;
}

// The head of the queue, if it is active: the host has reached it, so it is posted, and its waits are complete.
static const cf_step *active_head(const checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    const cf_step *step = &s->step[c->head[r]];
    return c->head[r] < s->count && c->head[r] <= c->host[r] && waits_complete(c, r, step) ? step : NULL;
}

// Makes the first transfer from step i on the head of a rank's queue.
static void find_head(checker *c, int r, int i) {
    const cf_schedule *s = c->schedule[r];
    while (i < s->count && !cf_is_transfer(&s->step[i])) i++;
    c->head[r] = i;
    c->met[r][SEND] = c->met[r][RECV] = false;
}

static bool walk_host(checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    int start = c->host[r];
    for (; c->host[r] < s->count; c->host[r]++) {
        const cf_step *step = &s->step[c->host[r]];
        if (!cf_is_transfer(step)) {
            if (!waits_complete(c, r, step)) break;
            run_on_stream(c, r, c->host[r]);
        } else if (step->kind == CF_COLLECTIVE && s->algorithm->blocking && c->host[r] >= c->head[r])
            break;
    }
    return c->host[r] > start;
}

// Moves rank r as far as it gets; returns whether it moved. When two halves meet, the sender transfers the data.
static bool advance(checker *c, int r) {
    bool moved = walk_host(c, r);
    const cf_step *step = active_head(c, r);
    if (step && step->kind == CF_COLLECTIVE) {
        for (int p = 0; p < c->ranks; p++) {
            const cf_step *other = r == 0 ? active_head(c, p) : NULL;
            if (!other || other->kind != CF_COLLECTIVE) return moved;
        }
        collect(c);
        for (int p = 0; p < c->ranks; p++) find_head(c, p, c->head[p] + 1);
        return true;
    }
    if (step && step->send.rank >= 0 && !c->met[r][SEND]) {
        const int p = step->send.rank;
        const cf_step *other = active_head(c, p);
        if (other && other->kind == CF_EXCHANGE && other->recv.rank == r && !c->met[p][RECV]) {
            const value sent = c->held[r][place_number(step->from)];
            if (step->send.slice != other->recv.slice)
                violated(c, "matching", p, c->head[p], "slice %d expected, rank %d sends %d", other->recv.slice, r,
                         step->send.slice);
            if (sent.slice != step->send.slice)
                violated(c, "data", r, c->head[r], "sends slice %d, finds slice %d", step->send.slice, sent.slice);
            c->held[p][place_number(other->at)] = sent;
            c->met[r][SEND] = c->met[p][RECV] = moved = true;
        }
    }
    if (!step || (step->send.rank >= 0 && !c->met[r][SEND]) || (step->recv.rank >= 0 && !c->met[r][RECV])) return moved;
    find_head(c, r, c->head[r] + 1);
    return true;
}

// matching, deadlock, data, sum order
static void check_run(checker *c) {
    for (int r = 0; r < c->ranks; r++) {
        c->host[r] = 0;
        find_head(c, r, 0);
        for (int p = 0; p < PLACES_MAX; p++) c->held[r][p] = (value){-1, 0, 0};
        for (int slice = 0; slice < c->total && !(c->side & CF_COMPUTE_BEFORE); slice++)
            if (c->operation != CF_ALLGATHER || slice / c->slices == r) c->held[r][slice] = own_value(c, r, slice);
    }
    for (bool moved = true; moved;) {
        moved = false;
        for (int r = 0; r < c->ranks; r++)
            while (advance(c, r)) moved = true;
    }
    for (int r = 0; r < c->ranks; r++)
        if (c->host[r] < c->schedule[r]->count || c->head[r] < c->schedule[r]->count)
            violated(c, "deadlock", r, c->host[r] < c->head[r] ? c->host[r] : c->head[r], "never completes");
    for (int r = 0; r < c->ranks; r++) check_result(c, r);
}

// --- races ---

static void add_before(checker *c, int step, int earlier) {
    if (earlier < 0) return;
    for (int w = 0; w <= earlier / 64; w++) c->before[step][w] |= c->before[earlier][w];
    c->before[step][earlier / 64] |= UINT64_C(1) << (earlier % 64);
}

// Compares an access with those since the last write before it, and with that write. Older ones are ordered before that write, or
// were reported.
static void check_access(checker *c, int r, access *mine) {
    int *last = &c->last_access[place_number(mine->at)];
    mine->earlier = *last;
    *last = (int)(mine - c->access);
    for (const access *theirs = mine; theirs->earlier >= 0;) {
        theirs = &c->access[theirs->earlier];
        const bool sent = c->schedule[r]->step[theirs->step].kind == CF_EXCHANGE && !theirs->writes;
        const bool ordered = c->before[mine->step][theirs->step / 64] >> (theirs->step % 64) & 1;
        if ((mine->writes || theirs->writes) && (sent || !ordered))
            violated(c, "race", r, mine->step, "not ordered after step %d", theirs->step);
        if (theirs->writes) return;
    }
}

static void check_races(checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    int on_stream = -1, blocking = -1;
    for (int p = 0; p < PLACES_MAX; p++) c->last_access[p] = -1;
    access *end = c->access;
    for (int i = 0; i < s->count; i++) {
        const cf_step *step = &s->step[i];
        memset(c->before[i], 0, sizeof c->before[i]);
        for (int n = 0, wait = 0; (wait = cf_nth_wait(step, n)) >= 0; n++) add_before(c, i, wait);
        add_before(c, i, blocking);
        if (!cf_is_transfer(step)) add_before(c, i, on_stream), on_stream = i;
        if (step->kind == CF_COLLECTIVE && s->algorithm->blocking) blocking = i;
        if (end + 2 * c->ranks > c->access + ACCESSES_MAX) violated(c, "form", r, i, "more than %d places", ACCESSES_MAX);
        for (access *last = end + accesses(c, r, step, end); end < last; end++) {
            end->step = i;
            check_access(c, r, end);
        }
    }
}

// --- order ---

// begin
static void check_order(checker *c, int r) {
    const cf_schedule *s = c->schedule[r];
    for (int i = 0; i < s->count; i++) {
        const cf_step *step = &s->step[i];
        const bool begins = cf_is_transfer(step) || step->side == CF_COMPUTE_BEFORE;
        if (c->side != CF_NO_COMPUTE && step->kind != CF_ADD && begins != (i < s->split)) // an ADD: on either side, as needed
            violated(c, "begin", r, i, "begin takes %d steps", s->split);
    }
}

// --- verdict ---

static void check_all(checker *c) {
    const cf_schedule *s = c->schedule[0];
    c->operation = s->operation, c->side = s->side;
    c->ranks = s->ranks, c->slices = s->slices;
    if (c->ranks < 1 || c->ranks > CF_CHECKED_RANKS || s->hosts < 1 || c->ranks % s->hosts != 0 || c->slices < 1 ||
        c->slices > CF_CHECKED_SLICES / c->ranks)
        violated(c, "form", 0, -1, "%d ranks, %d slices", c->ranks, c->slices);
    c->total = c->ranks * c->slices;
    for (int r = 0; r < c->ranks; r++) {
        check_form(c, r);
        check_units(c, r);
    }
    const bool moves = !s->bound; // whose data are wrong by construction
    for (int r = 0; r < c->ranks && moves; r++) check_races(c, r);
    if (moves) check_run(c);
    for (int r = 0; r < c->ranks; r++) check_order(c, r);
}

const char *cf_schedule_check(cf_schedule *const *schedule, char where[CF_WHERE_TEXT]) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static checker c; // large, and one is enough
    pthread_mutex_lock(&lock);
    c.schedule = schedule, c.where = where, c.found = NULL;
    if (setjmp(c.first) == 0) check_all(&c);
    const char *property = c.found;
    pthread_mutex_unlock(&lock);
    return property;
}
