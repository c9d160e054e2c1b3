// The generators: Algorithms 1–5 of the paper, their baselines, and nothing else.
//
// N ranks, this one is r, m slices per shard. Ranks are counted on a circle: left(i) = r − i and right(i) = r + i modulo N. The
// idea is the same everywhere: the last computation of a rank needs no communication afterwards, the first needs none before.
//
//   all-gather       compute own, r−1, r−2, …   slices arrive in that order while the one before is computed
//   reduce-scatter   compute r−1, r−2, …, own   partial sums leave as soon as they are computed
//   all-to-all       after: own first, as all-gather; before: own last, as reduce-scatter; both: the one
//                    follows the other, and the own slices, last and first, hide what is still on its way
//
// Ring: every transfer is with a neighbour, data of distant ranks is forwarded (all-gather) or summed up on the way
// (reduce-scatter). Direct: the same slices at the same time, but straight between the rank that has them and the one that
// needs them. The slice of owner j is summed in the order ((p[j+1] + p[j+2]) + …) + p[j] on both routes: on the ring because that
// is its way round, on the direct route because the owner adds in that order. Addition commutes bit by bit, so both give the
// same bits.
//
// Once: where the latency of a transfer is longer than the computation of a slice, and where nothing is computed at all, one
// transfer after another would cost N − 1 latencies. All transfers are one unit, beside the computation of the own shard, and
// everything else is computed together, before or after.
#include "schedule.h"
#include "die.h"
#include "memory.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int left(const cf_schedule *s, int i) {
    return ((s->rank - i) % s->ranks + s->ranks) % s->ranks;
}
static int right(const cf_schedule *s, int i) {
    return (s->rank + i) % s->ranks;
}
static int slice(const cf_schedule *s, int owner, int k) {
    return owner * s->slices + k;
}

// --- appending steps ---

// Room doubles at 64, 128, …
static cf_step *append(cf_schedule *s, cf_step_kind kind, cf_place at, cf_place from, int wait0, int wait1) {
    if (s->count == 0 || (s->count >= 64 && (s->count & (s->count - 1)) == 0)) {
        cf_step *more = realloc(s->step, (size_t)(s->count ? 2 * s->count : 64) * sizeof *more);
        if (!more) cf_die(NULL, "out of memory for a schedule of more than %d steps", s->count);
        s->step = more;
    }
    cf_step *step = &s->step[s->count++];
    *step = (cf_step){.kind = kind, .at = at, .from = from, .wait = {wait0, wait1}, .stride = 1};
    step->send_to = step->recv_from = step->send_slice = step->recv_slice = -1;
    return step;
}

int cf_append_compute(cf_schedule *s, cf_side side, cf_place at, int first, int count, int wait) {
    cf_step *step = append(s, CF_COMPUTE, at, (cf_place){CF_FULL, 0}, wait, -1);
    step->side = side, step->first = first, step->count = count, step->stride = s->slices;
    return s->count - 1;
}

int cf_append_exchange(cf_schedule *s, int send_to, cf_place from, int send_slice, int recv_from, cf_place at, int recv_slice,
                       int wait0, int wait1) {
    cf_step *step = append(s, CF_EXCHANGE, at, from, wait0, wait1);
    step->send_to = send_to, step->send_slice = send_slice, step->recv_from = recv_from, step->recv_slice = recv_slice;
    return s->count - 1;
}

int cf_append_add(cf_schedule *s, cf_place at, cf_place from, int parts, int wait0, int wait1) {
    cf_step *step = append(s, CF_ADD, at, from, wait0, wait1);
    step->count = parts, step->stride = s->slices, step->range = parts > 1;
    return s->count - 1;
}

int cf_append_copy(cf_schedule *s, cf_place at, cf_place from, int wait) {
    append(s, CF_COPY, at, from, wait, -1);
    return s->count - 1;
}

int cf_append_collective(cf_schedule *s, cf_place from, cf_place at, int first, int wait) {
    cf_step *step = append(s, CF_COLLECTIVE, at, from, wait, -1);
    step->first = first, step->count = s->ranks, step->stride = s->slices;
    return s->count - 1;
}

static int compute_before(cf_schedule *s, cf_buffer buffer, int number) {
    return cf_append_compute(s, CF_COMPUTE_BEFORE, (cf_place){buffer, number}, number, 1, -1);
}

static int compute_after(cf_schedule *s, cf_buffer buffer, int number, int wait) {
    return cf_append_compute(s, CF_COMPUTE_AFTER, (cf_place){buffer, number}, number, 1, wait);
}

// The newest step on the compute stream, -1: there is none.
static int last_on_stream(const cf_schedule *s) {
    int i = s->count - 1;
    while (i >= 0 && cf_on_wire(&s->step[i])) i--;
    return i;
}

// A generator notes in sent[i · m + k] which step is the transfer of round i, slice k. The one of the round before; -1: none.
static int sent_before(const cf_schedule *s, const int *sent, int round, int k) {
    return round > 0 ? sent[(round - 1) * s->slices + k] : -1;
}

// Sends slice `number` from where it is in FULL.
static int exchange(cf_schedule *s, int to, int number, int from, cf_place at, int recv, int wait0, int wait1) {
    return cf_append_exchange(s, to, (cf_place){CF_FULL, number}, number, from, at, recv, wait0, wait1);
}

// --- all-gather (Algorithm 1), and an all-to-all with compute after ---

// Round i brings slices of rank r − 1 − i. Nothing here depends on a computation of this operation, so all transfers are posted
// at once, in the order in which slices are worked on: to one peer they travel in that order. Ring: a slice is forwarded when it
// is here. Direct: a round, to the next peer, starts when the last has brought what it brings, rather than sharing the wire with
// it, so that both arrive together at the end.
static void compute_as_slices_arrive(cf_schedule *s, int *sent) {
    const bool gather = s->operation == CF_ALLGATHER, ring = gather && s->route == CF_RING;
    const cf_buffer arrival = gather ? CF_FULL : CF_RESULT;
    for (int i = 0; i < s->ranks - 1; i++)
        for (int k = 0; k < s->slices; k++) {
            int by = ring ? 1 : i + 1, to = right(s, by), owner = left(s, i + 1);
            int send = slice(s, ring ? left(s, i) : gather ? s->rank : to, k), recv = slice(s, gather ? owner : s->rank, k);
            sent[i * s->slices + k] = exchange(s, to, send, left(s, by), (cf_place){arrival, slice(s, owner, k)}, recv,
                                               sent_before(s, sent, i, ring ? k : s->slices - 1), -1);
        }
    s->begin = s->count;
    for (int i = 0; i < s->ranks; i++)
        for (int k = 0; k < s->slices; k++)
            compute_after(s, i == 0 ? CF_FULL : arrival, slice(s, left(s, i), k), sent_before(s, sent, i, k));
}

// --- reduce-scatter (Algorithms 2–4) ---

// Is slice k of `owner` computed before any sum has arrived for it?
static bool computed_early(const cf_schedule *s, int owner, int k) {
    return !s->folds || owner != s->rank || k == s->slices - 1;
}

// What is done with own slice k once what all other ranks have for it is in `parts` slots of the stage, from slot k on, m apart,
// brought by steps first … last. If own slices are computed onto their sums, the result is wanted there.
static void finish_own(cf_schedule *s, int k, int parts, int first, int last) {
    cf_place own = {CF_FULL, slice(s, s->rank, k)}, sum = {CF_STAGE, k};
    if (s->folds && parts > 1) first = cf_append_add(s, sum, sum, parts, first, last), parts = 1;
    if (!computed_early(s, s->rank, k)) {
        int index = cf_append_compute(s, CF_COMPUTE_BEFORE, sum, own.slot, 1, first);
        s->step[index].accumulate = true;
    } else if (s->folds)
        cf_append_add(s, sum, own, 1, first, -1);
    else
        cf_append_add(s, own, sum, parts, first, parts > 1 ? last : -1);
}

// Ring. Round i: compute the slice of rank r − 1 − i, add the running sum that came from the left
// neighbour, send it on to the right. One stage slot per k is enough: it is free again once added.
static void ring_reduce_scatter(cf_schedule *s, int *sent) {
    s->stage_slots = s->ranks > 1 ? s->slices : 0;
    for (int i = 0; i < s->ranks; i++)
        for (int k = 0; k < s->slices; k++) {
            int owner = left(s, i + 1), number = slice(s, owner, k), arrived = sent_before(s, sent, i, k);
            cf_place here = {CF_FULL, number}, staged = {CF_STAGE, k};
            if (computed_early(s, owner, k)) compute_before(s, CF_FULL, number);
            if (i == s->ranks - 1) continue; // own slices: finished below, after all else
            if (i > 0) cf_append_add(s, here, staged, 1, arrived, -1);
            sent[i * s->slices + k] =
                exchange(s, right(s, 1), number, left(s, 1), staged, slice(s, left(s, i + 2), k), last_on_stream(s), arrived);
        }
    s->begin = s->count;
    for (int k = 0; k < s->slices && s->ranks > 1; k++) finish_own(s, k, 1, sent_before(s, sent, s->ranks - 1, k), -1);
}

// Where round i's part arrives.
static cf_place window_slot(const cf_schedule *s, int round, int window, int k) {
    int slot = round == 0 ? 0 : 1 + (round - 1) % (window - 1);
    return (cf_place){CF_STAGE, slot * s->slices + k};
}

// sum += the part of that round
static void add_part(cf_schedule *s, const int *sent, int round, int window, int k) {
    cf_append_add(s, window_slot(s, 0, window, k), window_slot(s, round, window, k), 1, sent[round * s->slices + k], sent[k]);
}

// Direct. Round i: compute the slice of rank r − 1 − i and send it there; what arrives is rank r + 1 + i's
// part of the own slice, into a slot of a window. Slot 0 holds the sum so far; another is used again once what
// it brought has been added. Where a rank's slices cost more than another's, its parts come late: the wider the window, the
// later a rank waits for them. Where it has room for all parts, one step adds them up.
enum { WINDOW = 8 };

static void direct_reduce_scatter(cf_schedule *s, int *sent) {
    int N = s->ranks, m = s->slices;
    int window = N - 1 > WINDOW ? WINDOW : N - 1;
    s->stage_slots = window * m;
    for (int i = 0; i < N; i++)
        for (int k = 0; k < m; k++) {
            int owner = left(s, i + 1), own = slice(s, s->rank, k), number = slice(s, owner, k);
            if (computed_early(s, owner, k)) compute_before(s, CF_FULL, number);
            if (i == N - 1) continue;
            int before = i - (window - 1); // the round whose slot this one takes
            if (before > 0) add_part(s, sent, before, window, k);
            sent[i * m + k] = exchange(s, owner, number, right(s, i + 1), window_slot(s, i, window, k), own, last_on_stream(s), -1);
        }
    s->begin = s->count;
    const bool all = window == N - 1;
    for (int k = 0; k < m && N > 1; k++) {
        for (int i = N - window; i <= N - 2 && !all; i++) add_part(s, sent, i, window, k);
        finish_own(s, k, all ? window : 1, sent[k], sent[(N - 2) * m + k]);
    }
}

// --- all-to-all with compute before, or on both sides (Algorithm 5) ---

// Round i computes for rank r − 1 − i and sends; what arrives comes from r + 1 + i. Own slices last,
// computed where the result is wanted. With compute on both sides, the own slices are then the first to be
// worked on, and the others follow in the order in which they were sent.
static void alltoall(cf_schedule *s, int *sent) {
    for (int i = 0; i < s->ranks; i++)
        for (int k = 0; k < s->slices; k++) {
            int to = left(s, i + 1), from = right(s, i + 1);
            bool own = i == s->ranks - 1;
            compute_before(s, own ? CF_RESULT : CF_FULL, slice(s, to, k));
            if (!own)
                sent[i * s->slices + k] = exchange(s, to, slice(s, to, k), from, (cf_place){CF_RESULT, slice(s, from, k)},
                                                   slice(s, s->rank, k), last_on_stream(s), -1);
        }
    s->begin = s->count;
    for (int i = 0; i < s->ranks && s->side == CF_COMPUTE_BOTH; i++)
        for (int k = 0; k < s->slices; k++) compute_after(s, CF_RESULT, slice(s, right(s, i), k), sent_before(s, sent, i, k));
}

// --- all at once: any operation whose slices hide nothing ---

// Sends every other rank what it needs and receives what this one needs from it, as one unit. A part of the own shard's sum
// from rank r + i arrives in stage slot i − 1.
static void exchange_at_once(cf_schedule *s, int wait) {
    bool gather = s->operation == CF_ALLGATHER, reduce = s->operation == CF_REDUCE_SCATTER;
    for (int i = 0; i < s->ranks - 1; i++) {
        int to = right(s, i + 1), from = left(s, i + 1);
        cf_place at = reduce ? (cf_place){CF_STAGE, s->ranks - 2 - i} : (cf_place){gather ? CF_FULL : CF_RESULT, from};
        int index = exchange(s, to, gather ? s->rank : to, from, at, gather ? from : s->rank, wait, -1);
        s->step[index].joined = i > 0;
    }
}

// The shards of all other ranks, those below and those above the own one, once steps first … last are done; first -1: now.
static void compute_others(cf_schedule *s, cf_side side, cf_buffer buffer, int first, int last) {
    const int owner[] = {0, s->rank + 1}, count[] = {s->rank, s->ranks - 1 - s->rank};
    for (int i = 0; i < 2; i++) {
        if (count[i] == 0) continue;
        int index = cf_append_compute(s, side, (cf_place){buffer, owner[i]}, owner[i], count[i], first);
        s->step[index].range = first >= 0;
        if (first >= 0) s->step[index].wait[1] = last;
    }
}

static void at_once(cf_schedule *s) {
    bool before = s->side == CF_COMPUTE_BEFORE || s->side == CF_COMPUTE_BOTH, gather = s->operation == CF_ALLGATHER;
    bool after = s->side == CF_COMPUTE_AFTER || s->side == CF_COMPUTE_BOTH, all_to_all = s->operation == CF_ALLTOALL;
    if (before) compute_others(s, CF_COMPUTE_BEFORE, CF_FULL, -1, -1);
    int first = s->count, others = s->ranks - 1, last = first + others - 1;
    exchange_at_once(s, last_on_stream(s));
    if (before) compute_before(s, all_to_all ? CF_RESULT : CF_FULL, s->rank);
    s->begin = s->count;
    if (after) {
        compute_after(s, before ? CF_RESULT : CF_FULL, s->rank, -1);
        compute_others(s, CF_COMPUTE_AFTER, gather ? CF_FULL : CF_RESULT, first, last);
    } else if (all_to_all && !before) {
        cf_append_copy(s, (cf_place){CF_RESULT, s->rank}, (cf_place){CF_FULL, s->rank}, -1);
    } else if (s->operation == CF_REDUCE_SCATTER) {
        s->stage_slots = others;
        if (others > 0) finish_own(s, 0, others, first, last);
    }
}

// --- the baselines: native collectives ---

// M slices; the collective of slice k runs during the computation of slice k ± 1. With M = 1 and
// `blocking` this is mode none: the whole collective, then (or after) one monolithic computation.
// A collective names no other to wait for: libraries demand that all ranks start their collectives in one order, and
// only the order of this list, which is the same everywhere, gives them one.
static void native(cf_schedule *s, int *sent) {
    int N = s->ranks, M = s->slices;
    bool gather = s->operation == CF_ALLGATHER, reduce = s->operation == CF_REDUCE_SCATTER;
    cf_buffer to = gather ? CF_FULL : CF_RESULT;
    s->slice_major = reduce && M > 1;
    for (int k = 0; k < M; k++) {
        int computed = -1;
        if (s->side == CF_COMPUTE_BEFORE || s->side == CF_COMPUTE_BOTH)
            computed = cf_append_compute(s, CF_COMPUTE_BEFORE, (cf_place){CF_FULL, k}, k, N, -1);
        cf_place from = {CF_FULL, gather ? slice(s, s->rank, k) : k};
        sent[k] = cf_append_collective(s, from, (cf_place){to, k}, k, computed);
    }
    s->begin = s->count;
    for (int k = 0; k < M && (s->side == CF_COMPUTE_AFTER || s->side == CF_COMPUTE_BOTH); k++)
        cf_append_compute(s, CF_COMPUTE_AFTER, (cf_place){to, k}, k, N, sent[k]);
    if (reduce && s->mode != CF_MODE_IDEAL) s->result = (cf_place){CF_RESULT, 0};
    s->blocking = s->mode == CF_MODE_NONE;
}

// --- the bounds ---

// Leaves the transfers out, and who waits for one waits no more: nowire of commfuse, ideal of none.
static void leave_out_transfers(cf_schedule *s) {
    int count = 0, begin = 0, *moved = cf_host_alloc(s->count, sizeof *moved, "a schedule"); // where step i goes
    for (int i = 0; i < s->count; i++) {
        cf_step step = s->step[i];
        moved[i] = cf_on_wire(&step) ? -1 : count;
        if (moved[i] < 0) continue;
        for (int w = 0; w < 2; w++)
            if (step.wait[w] >= 0) step.wait[w] = moved[step.wait[w]];
        step.range = false; // only transfers are waited for so
        s->step[count++] = step;
        begin += i < s->begin;
    }
    s->begin = begin, s->count = count;
    free(moved);
}

// --- choice ---

static void generate(cf_schedule *s, int *sent) {
    if (!cf_mode_is_fused(s->mode) && s->ranks > 1)
        native(s, sent);
    else if (s->route == CF_ONCE)
        at_once(s);
    else if (s->side == CF_COMPUTE_AFTER)
        compute_as_slices_arrive(s, sent);
    else if (s->operation == CF_ALLTOALL)
        alltoall(s, sent);
    else if (s->route == CF_RING)
        ring_reduce_scatter(s, sent);
    else if (s->route == CF_DIRECT)
        direct_reduce_scatter(s, sent);
    else
        cf_die(NULL, "a reduce-scatter by route %d", (int)s->route);
}

static cf_schedule *start(cf_operation operation, cf_side side, cf_mode mode, cf_route route, int ranks, int rank, int slices) {
    bool side_fits = side == CF_NO_COMPUTE || operation == CF_ALLTOALL || (operation == CF_ALLGATHER) == (side == CF_COMPUTE_AFTER);
    if (!side_fits) cf_die(NULL, "%s has no computation on that side", cf_operation_name(operation));
    if (ranks < 1 || rank < 0 || rank >= ranks || slices < 1)
        cf_die(NULL, "schedule for rank %d of %d with %d slices", rank, ranks, slices);
    cf_schedule *s = cf_host_alloc(1, sizeof *s, "a schedule");
    s->operation = operation, s->side = side, s->mode = mode, s->route = route;
    s->ranks = ranks, s->rank = rank, s->slices = slices;
    s->result = (cf_place){operation == CF_ALLTOALL ? CF_RESULT : CF_FULL, operation == CF_REDUCE_SCATTER ? rank * slices : 0};
    return s;
}

cf_schedule *cf_schedule_start(cf_operation operation, cf_side side, int ranks, int rank, int slices) {
    CF_RETURNS(NULL);
    return start(operation, side, CF_MODE_OWN, CF_DIRECT, ranks, rank, slices);
}

cf_schedule *cf_schedule_create(cf_operation operation, cf_side side, cf_mode mode, cf_route route, int ranks, int rank, int slices,
                                bool folds) {
    CF_RETURNS(NULL);
    if (mode >= CF_MODE_AUTO) cf_die(NULL, "a schedule of mode %s: one must be chosen first", cf_mode_name(mode));
    const bool alone = side == CF_NO_COMPUTE, fused = cf_mode_is_fused(mode), once = alone || route == CF_ONCE;
    const bool whole = mode == CF_MODE_NONE || mode == CF_MODE_IDEAL || alone || ranks == 1 || (once && fused);
    cf_schedule *s = start(operation, side, mode, once ? CF_ONCE : route, ranks, rank, whole && slices > 1 ? 1 : slices);
    s->folds = folds && fused && operation == CF_REDUCE_SCATTER && s->slices > 1; // hence several ranks, and compute
    if (s->folds) s->result = (cf_place){CF_STAGE, 0};
    int *sent = cf_host_alloc((int64_t)ranks * s->slices, sizeof *sent, "a schedule");
    generate(s, sent);
    free(sent);
    if (mode == CF_MODE_NOWIRE || mode == CF_MODE_IDEAL) leave_out_transfers(s);
    return s;
}

void cf_schedule_free(cf_schedule *schedule) {
    if (!schedule) return;
    free(schedule->step);
    free(schedule);
}

int64_t cf_schedule_row(const cf_schedule *s, int64_t rows, int k) {
    return rows * k / s->slices;
}

// --- printing ---

const char *cf_operation_name(cf_operation operation) {
    static const char *const name[] = {"all-gather", "reduce-scatter", "all-to-all"};
    return name[operation];
}

static const char *const mode_names[CF_MODES] = {"none", "slice", "commfuse", "nowire", "ideal", "auto", "own"};
static const char *const route_names[CF_ROUTES] = {"ring", "direct", "once"};

const char *cf_mode_name(cf_mode mode) {
    return mode_names[mode];
}

const char *cf_route_name(cf_route route) {
    return route_names[route];
}

bool cf_mode_of(const char *name, cf_mode *mode) {
    for (int i = 0; i < CF_MODES; i++)
        if (strcmp(mode_names[i], name) == 0) return *mode = (cf_mode)i, true;
    return false;
}

bool cf_route_of(const char *name, cf_route *route) {
    for (int i = 0; i < CF_ROUTES; i++)
        if (strcmp(route_names[i], name) == 0) return *route = (cf_route)i, true;
    return false;
}

bool cf_mode_is_fused(cf_mode mode) {
    return mode == CF_MODE_COMMFUSE || mode == CF_MODE_NOWIRE || mode == CF_MODE_AUTO;
}

static void print_place(FILE *file, cf_place place) {
    static const char *const name[] = {"full", "stage", "result"};
    fprintf(file, "%s[%d]", name[place.buffer], place.slot);
}

static void print_step(FILE *file, const cf_step *step) {
    const char *what = step->side == CF_COMPUTE_AFTER ? "work on   " : step->accumulate ? "compute + " : "compute   ";
    switch (step->kind) {
    case CF_COMPUTE:
        if (step->count == 1)
            fprintf(file, "%s slice %d in ", what, step->first);
        else
            fprintf(file, "%s %d slices %d, %d, … in ", what, step->count, step->first, step->first + step->stride);
        print_place(file, step->at);
        break;
    case CF_EXCHANGE:
        fprintf(file, step->joined ? "  with it  " : "exchange   ");
        if (step->send_to >= 0) fprintf(file, "slice %d → rank %d  ", step->send_slice, step->send_to);
        if (step->recv_from >= 0) {
            fprintf(file, "slice %d ← rank %d into ", step->recv_slice, step->recv_from);
            print_place(file, step->at);
        }
        break;
    case CF_COLLECTIVE:
        fprintf(file, "collective %d slices %d, %d, …", step->count, step->first, step->first + step->stride);
        break;
    case CF_ADD:
    case CF_COPY:
        fprintf(file, step->kind == CF_ADD ? "add        " : "copy       ");
        print_place(file, step->at);
        fprintf(file, step->kind == CF_COPY ? " = " : step->count > 1 ? " += %d parts from " : " += ", step->count);
        print_place(file, step->from);
        break;
    }
    for (int i = 0; i < 2; i++)
        if (step->wait[i] >= 0)
            fprintf(file, "%s%d", i == 0 || step->wait[0] < 0 ? "  after " : step->range ? " … " : ", ", step->wait[i]);
    fprintf(file, "\n");
}

char *cf_schedule_print(const cf_schedule *s) {
    CF_RETURNS(NULL);
    char *text = NULL;
    size_t size = 0;
    FILE *file = open_memstream(&text, &size);
    if (!file) cf_die(NULL, "out of memory for printing a schedule");
    const bool by = s->mode == CF_MODE_COMMFUSE;
    fprintf(file, "%s, %s%s%s, rank %d of %d, %d slice%s per shard\n", cf_operation_name(s->operation), cf_mode_name(s->mode),
            by ? " by " : "", by ? cf_route_name(s->route) : "", s->rank, s->ranks, s->slices, s->slices == 1 ? "" : "s");
    for (int i = 0; i < s->count; i++) {
        fprintf(file, "  %3d%s ", i, i < s->begin ? " " : "'");
        print_step(file, &s->step[i]);
    }
    if (fclose(file) != 0) cf_die(NULL, "out of memory for printing a schedule");
    return text;
}
