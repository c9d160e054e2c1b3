// The generators: Algorithms 1–5 of the paper, their baselines, and nothing else.
//
// N ranks, this one is r, m slices per shard. Ranks are on a circle: left(i) = r − i and right(i) = r + i modulo N. One idea serves
// all: the last computation of a rank needs no communication after it, the first needs none before it.
//
//   all-gather       compute own, r−1, r−2, …   each slice arrives while the one before is computed
//   reduce-scatter   compute r−1, r−2, …, own   partial sums leave as soon as they are computed
//   all-to-all       after: own first, as all-gather; before: own last, as reduce-scatter; both: the second list follows the
//                    first, and the own slices, last and first, hide the transfers in flight
//
// Ring: every transfer is with a neighbour. Data of distant ranks is forwarded (all-gather) or summed on the way (reduce-scatter).
// Direct: the same slices at the same time, but straight from the rank that has them to the rank that needs them. Both routes sum
// the slice of owner j in the order ((p[j+1] + p[j+2]) + …) + p[j]: the ring because the sum travels that way, the direct route
// because the owner adds in that order. Addition commutes to the bit, so both give the same bits.
//
// Once: where the latency of a transfer exceeds the computation of a slice, or nothing is computed, one transfer after another
// would cost N − 1 latencies. So all transfers are one unit.
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

// The bounds leave the transfers out, and with them all waits: commfuse becomes nowire, none becomes ideal.
static bool without_transfers(const cf_schedule *s) {
    return s->mode == CF_MODE_NOWIRE || s->mode == CF_MODE_IDEAL;
}

static cf_step *append(cf_schedule *s, cf_step_kind kind, cf_place at, cf_place from, int wait0, int wait1) {
    s->step = cf_host_grow(s->step, &s->room, s->count + 1, sizeof *s->step, "a schedule");
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
    if (without_transfers(s)) return -1;
    cf_step *step = append(s, CF_EXCHANGE, at, from, wait0, wait1);
    step->send_to = send_to, step->send_slice = send_slice, step->recv_from = recv_from, step->recv_slice = recv_slice;
    return s->count - 1;
}

int cf_append_add(cf_schedule *s, cf_place at, cf_place from, int parts, int wait0, int wait1) {
    cf_step *step = append(s, CF_ADD, at, from, wait0, wait1);
    step->count = parts, step->stride = s->slices, step->range = parts > 1 && wait0 >= 0;
    return s->count - 1;
}

int cf_append_copy(cf_schedule *s, cf_place at, cf_place from, int wait) {
    append(s, CF_COPY, at, from, wait, -1);
    return s->count - 1;
}

int cf_append_collective(cf_schedule *s, cf_place from, cf_place at, int first, int wait) {
    if (without_transfers(s)) return -1;
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

// The latest step on the compute stream; -1: none.
static int last_on_stream(const cf_schedule *s) {
    int i = s->count - 1;
    while (i >= 0 && cf_is_transfer(&s->step[i])) i--;
    return i;
}

// Generators note in sent[i · m + k] the step that transfers slice k in round i. Returns that of the round before; -1: none.
static int sent_before(const cf_schedule *s, const int *sent, int round, int k) {
    return round > 0 ? sent[(round - 1) * s->slices + k] : -1;
}

// An exchange that sends slice `number` of FULL.
static int exchange(cf_schedule *s, int to, int number, int from, cf_place at, int recv, int wait0, int wait1) {
    return cf_append_exchange(s, to, (cf_place){CF_FULL, number}, number, from, at, recv, wait0, wait1);
}

// --- all-gather (Algorithm 1), and all-to-all with compute after ---

// Round i receives the slices of rank r − 1 − i. No transfer depends on a computation here, so all are posted first, in the order in
// which slices are computed: messages to one peer travel in that order. Ring: a slice is forwarded once it has arrived. Direct: a
// round starts when the one before has arrived; if they shared the wire, both would arrive late.
static void compute_as_slices_arrive(cf_schedule *s, bool ring, int *sent) {
    const bool gather = s->operation == CF_ALLGATHER;
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

// Slice k of `owner` is computed without waiting for a sum.
static bool computed_early(const cf_schedule *s, int owner, int k) {
    return !s->folds || owner != s->rank || k == s->slices - 1;
}

// Completes own slice k: the other ranks' parts of it are in `parts` stage slots, k, k + m, …, once steps first … last are done. If
// the schedule folds, the result goes to the stage.
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

// Ring. Round i: compute the slice of rank r − 1 − i, add the running sum from the left neighbour, send it to the right one. One
// stage slot per k is enough: it is free again after the addition.
static void ring_reduce_scatter(cf_schedule *s, int *sent) {
    s->stage_slots = s->ranks > 1 ? s->slices : 0;
    for (int i = 0; i < s->ranks; i++)
        for (int k = 0; k < s->slices; k++) {
            int owner = left(s, i + 1), number = slice(s, owner, k), arrived = sent_before(s, sent, i, k);
            cf_place here = {CF_FULL, number}, staged = {CF_STAGE, k};
            if (computed_early(s, owner, k)) compute_before(s, CF_FULL, number);
            if (i == s->ranks - 1) continue; // own slices are completed last, below
            if (i > 0) cf_append_add(s, here, staged, 1, arrived, -1);
            sent[i * s->slices + k] =
                exchange(s, right(s, 1), number, left(s, 1), staged, slice(s, left(s, i + 2), k), last_on_stream(s), arrived);
        }
    s->begin = s->count;
    for (int k = 0; k < s->slices && s->ranks > 1; k++) finish_own(s, k, 1, sent_before(s, sent, s->ranks - 1, k), -1);
}

// The stage slot where the part of a round arrives.
static cf_place window_slot(const cf_schedule *s, int round, int window, int k) {
    int slot = round == 0 ? 0 : 1 + (round - 1) % (window - 1);
    return (cf_place){CF_STAGE, slot * s->slices + k};
}

// sum += the part of that round
static void add_part(cf_schedule *s, const int *sent, int round, int window, int k) {
    cf_append_add(s, window_slot(s, 0, window, k), window_slot(s, round, window, k), 1, sent[round * s->slices + k], sent[k]);
}

// Direct. Round i: compute the slice of rank r − 1 − i and send it there. The part of the own slice from rank r + 1 + i arrives in a
// window of slots. Slot 0 holds the sum so far; another slot is reused once its part has been added. Parts come late from a rank
// whose slices cost more: the wider the window, the later this rank waits for them. If all parts fit, one step adds them up.
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
            int before = i - (window - 1); // the round that used this slot last
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

// Round i computes for rank r − 1 − i and sends; it receives from r + 1 + i. Own slices come last and are computed in RESULT. With
// compute on both sides they are then the first to be computed on, and the others follow in the order of the rounds.
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

// One unit of exchanges with all other ranks. reduce-scatter: the part from rank r + i arrives in stage slot i − 1. Returns the last
// exchange; -1: none.
static int exchange_at_once(cf_schedule *s, int wait) {
    int index = -1;
    bool gather = s->operation == CF_ALLGATHER, reduce = s->operation == CF_REDUCE_SCATTER;
    for (int i = 0; i < s->ranks - 1; i++) {
        int to = right(s, i + 1), from = left(s, i + 1);
        cf_place at = reduce ? (cf_place){CF_STAGE, s->ranks - 2 - i} : (cf_place){gather ? CF_FULL : CF_RESULT, from};
        index = exchange(s, to, gather ? s->rank : to, from, at, gather ? from : s->rank, wait, -1);
        if (index >= 0) s->step[index].joined = i > 0;
    }
    return index;
}

// Computes the shards of all other ranks, below and above the own one, once steps first … last are done; both -1: no wait.
static void compute_others(cf_schedule *s, cf_side side, cf_buffer buffer, int first, int last) {
    const int owner[] = {0, s->rank + 1}, count[] = {s->rank, s->ranks - 1 - s->rank};
    for (int i = 0; i < 2; i++) {
        if (count[i] == 0) continue;
        int index = cf_append_compute(s, side, (cf_place){buffer, owner[i]}, owner[i], count[i], first);
        s->step[index].range = first >= 0, s->step[index].wait[1] = last;
    }
}

static void at_once(cf_schedule *s) {
    bool before = s->side == CF_COMPUTE_BEFORE || s->side == CF_COMPUTE_BOTH, gather = s->operation == CF_ALLGATHER;
    bool after = s->side == CF_COMPUTE_AFTER || s->side == CF_COMPUTE_BOTH, all_to_all = s->operation == CF_ALLTOALL;
    if (before) compute_others(s, CF_COMPUTE_BEFORE, CF_FULL, -1, -1);
    const int others = s->ranks - 1, last = exchange_at_once(s, last_on_stream(s)), first = last < 0 ? -1 : last - others + 1;
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

// M slices; the collective of slice k runs during the computation of slice k ± 1. With M = 1 and `blocking` this is mode none: the
// whole collective before or after one computation. A collective waits for no other: libraries require that all ranks start their
// collectives in one order, and that is the order of this list.
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

// --- choice ---

static void generate(cf_schedule *s, int *sent) {
    const bool gather = s->operation == CF_ALLGATHER;
    if (!cf_mode_is_fused(s->mode) && s->ranks > 1)
        native(s, sent);
    else if (s->route == CF_ONCE)
        at_once(s);
    else if (s->operation == CF_ALLTOALL && s->side != CF_COMPUTE_AFTER)
        alltoall(s, sent);
    else if (s->operation == CF_ALLTOALL || (gather && s->route == CF_DIRECT))
        compute_as_slices_arrive(s, false, sent);
    else if (gather && s->route == CF_RING)
        compute_as_slices_arrive(s, true, sent);
    else if (s->route == CF_RING)
        ring_reduce_scatter(s, sent);
    else if (s->route == CF_DIRECT)
        direct_reduce_scatter(s, sent);
    else
        cf_die(NULL, "%s by route %d", cf_operation_name(s->operation), (int)s->route);
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
    if (mode >= CF_MODE_AUTO) cf_die(NULL, "mode %s has no schedule of its own", cf_mode_name(mode));
    const bool alone = side == CF_NO_COMPUTE, fused = cf_mode_is_fused(mode), once = alone || route == CF_ONCE;
    const bool whole = mode == CF_MODE_NONE || mode == CF_MODE_IDEAL || alone || ranks == 1 || (once && fused);
    cf_schedule *s = start(operation, side, mode, once ? CF_ONCE : route, ranks, rank, whole && slices > 1 ? 1 : slices);
    s->folds = folds && fused && operation == CF_REDUCE_SCATTER && s->slices > 1; // so there are several ranks, and compute
    if (s->folds) s->result = (cf_place){CF_STAGE, 0};
    int *sent = cf_host_alloc((int64_t)ranks * s->slices, sizeof *sent, "a schedule");
    generate(s, sent);
    free(sent);
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

bool cf_mode_parse(const char *name, cf_mode *mode) {
    for (int i = 0; i < CF_MODES; i++)
        if (strcmp(mode_names[i], name) == 0) return *mode = (cf_mode)i, true;
    return false;
}

bool cf_route_parse(const char *name, cf_route *route) {
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
