// The generators: Algorithms 1–5 of the paper, their baselines, and nothing else.
//
// N ranks, this one is r, m slices per shard. Ranks are counted on a circle: left(i) = r − i and
// right(i) = r + i modulo N. The idea is the same everywhere: the last thing a rank computes needs no
// communication afterwards, the first thing needs none before.
//
//   all-gather       compute own, r−1, r−2, …   slices arrive in that order while the one before is computed
//   reduce-scatter   compute r−1, r−2, …, own   partial sums leave as soon as they are computed
//   all-to-all       after: own first, as all-gather; before: own last, as reduce-scatter; both: the one
//                    follows the other, and the own slices, last and first, hide what is still on its way
//
// Ring: every transfer is with a neighbour, data of distant ranks is forwarded (all-gather) or summed up
// on the way (reduce-scatter). Direct: the same slices at the same time, but straight between the rank
// that has them and the one that needs them. The slice of owner j is summed in the order
// ((p[j+1] + p[j+2]) + …) + p[j] on both routes: on the ring because that is its way round, on the direct
// route because the owner adds in that order. Addition commutes bit by bit, so both give the same bits.
//
// Once: where slices are so small that the latency of a transfer is longer than the computation of a slice, and where nothing
// is computed at all, one transfer after another would cost N − 1 latencies. All transfers are one unit, beside the
// computation of the own shard, and everything else is computed together, before or after.
#include "schedule.h"
#include "die.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct builder {
    cf_schedule *s;
    int capacity;
    int last_compute; // index of the newest step on the compute stream, -1: none
    int *exchange;    // [round · m + k]: index of that EXCHANGE
} builder;

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

static int append(builder *b, cf_step step) {
    cf_schedule *s = b->s;
    if (s->count == b->capacity) {
        b->capacity = b->capacity ? 2 * b->capacity : 64;
        s->step = realloc(s->step, (size_t)b->capacity * sizeof *s->step);
        if (!s->step) cf_die(NULL, "out of memory for a schedule of %d steps", b->capacity);
    }
    s->step[s->count] = step;
    if (step.kind != CF_EXCHANGE && step.kind != CF_COLLECTIVE) b->last_compute = s->count;
    return s->count++;
}

static cf_step blank(cf_step_kind kind, int wait0, int wait1) {
    cf_step step = {.kind = kind, .wait = {wait0, wait1}, .stride = 1};
    step.send_to = step.recv_from = step.send_slice = step.recv_slice = -1;
    return step;
}

static int compute(builder *b, cf_side side, cf_place at, int first, int count, int stride, int wait) {
    cf_step step = blank(CF_COMPUTE, wait, -1);
    step.side = side;
    step.at = at;
    step.first = first, step.count = count, step.stride = stride;
    return append(b, step);
}

static int compute_before(builder *b, cf_buffer buffer, int number) {
    return compute(b, CF_COMPUTE_BEFORE, (cf_place){buffer, number}, number, 1, 1, -1);
}

static int compute_after(builder *b, cf_buffer buffer, int number, int wait) {
    return compute(b, CF_COMPUTE_AFTER, (cf_place){buffer, number}, number, 1, 1, wait);
}

// The own slice, onto what all others have for it.
static int compute_onto(builder *b, cf_place sum, int number, int wait) {
    int index = compute(b, CF_COMPUTE_BEFORE, sum, number, 1, 1, wait);
    b->s->step[index].accumulate = true;
    return index;
}

static int add(builder *b, cf_place at, cf_place from, int wait0, int wait1) {
    cf_step step = blank(CF_ADD, wait0, wait1);
    step.at = at, step.from = from;
    return append(b, step);
}

static int exchange(builder *b, int send_to, cf_place from, int send_slice, int recv_from, cf_place at, int recv_slice, int wait0,
                    int wait1) {
    cf_step step = blank(CF_EXCHANGE, wait0, wait1);
    step.send_to = send_to, step.from = from, step.send_slice = send_slice;
    step.recv_from = recv_from, step.at = at, step.recv_slice = recv_slice;
    return append(b, step);
}

static int collective(builder *b, cf_place from, cf_place at, int first, int wait) {
    cf_step step = blank(CF_COLLECTIVE, wait, -1);
    step.from = from, step.at = at;
    step.first = first, step.count = b->s->ranks, step.stride = b->s->slices;
    return append(b, step);
}

static int *exchange_at(builder *b, int round, int k) {
    return &b->exchange[round * b->s->slices + k];
}
static int exchange_before(builder *b, int round, int k) {
    return round > 0 ? *exchange_at(b, round - 1, k) : -1;
}

// --- all-gather (Algorithm 1) ---

// Round i brings the shard of rank r − 1 − i. Nothing here depends on a computation of this operation, so
// all transfers are posted at once, in the order in which slices are worked on: to one peer they travel in that order.
// A slice is forwarded when it is here (ring); a round to the next peer starts when the last has brought what it
// brings (direct), rather than sharing the wire with it, so that both arrive together at the end.
static void post_allgather(builder *b) {
    cf_schedule *s = b->s;
    bool ring = s->route == CF_RING;
    for (int i = 0; i < s->ranks - 1; i++)
        for (int k = 0; k < s->slices; k++) {
            int send = slice(s, ring ? left(s, i) : s->rank, k), recv = slice(s, left(s, i + 1), k);
            *exchange_at(b, i, k) =
                exchange(b, right(s, ring ? 1 : i + 1), (cf_place){CF_FULL, send}, send, left(s, ring ? 1 : i + 1),
                         (cf_place){CF_FULL, recv}, recv, exchange_before(b, i, ring ? k : s->slices - 1), -1);
        }
}

static void fused_allgather(builder *b) {
    cf_schedule *s = b->s;
    bool wire = s->mode == CF_MODE_COMMFUSE;
    if (wire) post_allgather(b);
    s->begin = s->count;
    for (int i = 0; i < s->ranks; i++)
        for (int k = 0; k < s->slices; k++)
            compute_after(b, CF_FULL, slice(s, left(s, i), k), wire ? exchange_before(b, i, k) : -1);
}

// --- reduce-scatter (Algorithms 2–4) ---

// Is slice k of `owner` computed before any sum has arrived for it?
static bool computed_early(const cf_schedule *s, int owner, int k) {
    return !s->folds || owner != s->rank || k == s->slices - 1;
}

// What is done with own slice k once all other ranks' sum for it lies in slot k of the stage. If others are computed
// onto their sums, the result is wanted there.
static void finish_own(builder *b, int k, int arrived) {
    cf_place own = {CF_FULL, slice(b->s, b->s->rank, k)}, sum = {CF_STAGE, k};
    if (!computed_early(b->s, b->s->rank, k))
        compute_onto(b, sum, own.slot, arrived);
    else if (b->s->folds)
        add(b, sum, own, arrived, -1);
    else
        add(b, own, sum, arrived, -1);
}

// Ring. Round i: compute the slice of rank r − 1 − i, add the running sum that came from the left
// neighbour, send it on to the right. One stage slot per k is enough: it is free again once added.
static void ring_reduce_scatter(builder *b) {
    cf_schedule *s = b->s;
    s->stage_slots = s->ranks > 1 ? s->slices : 0;
    for (int i = 0; i < s->ranks; i++)
        for (int k = 0; k < s->slices; k++) {
            int number = slice(s, left(s, i + 1), k), arrived = exchange_before(b, i, k);
            cf_place here = {CF_FULL, number}, staged = {CF_STAGE, k};
            if (computed_early(s, left(s, i + 1), k)) compute_before(b, CF_FULL, number);
            if (i == s->ranks - 1) continue; // own slices: finished below, behind all else
            if (i > 0) add(b, here, staged, arrived, -1);
            *exchange_at(b, i, k) =
                exchange(b, right(s, 1), here, number, left(s, 1), staged, slice(s, left(s, i + 2), k), b->last_compute, arrived);
        }
    s->begin = s->count;
    for (int k = 0; k < s->slices && s->ranks > 1; k++) finish_own(b, k, exchange_before(b, s->ranks - 1, k));
}

// Where round i's part arrives.
static cf_place window_slot(const builder *b, int round, int window, int k) {
    int slot = round == 0 ? 0 : 1 + (round - 1) % (window - 1);
    return (cf_place){CF_STAGE, slot * b->s->slices + k};
}

// sum += the part of that round
static void add_part(builder *b, int round, int window, int k) {
    add(b, window_slot(b, 0, window, k), window_slot(b, round, window, k), *exchange_at(b, round, k), *exchange_at(b, 0, k));
}

// Direct. Round i: compute the slice of rank r − 1 − i and send it there; what arrives is rank r + 1 + i's
// part of the own slice, into a slot of a window. Slot 0 holds the sum so far; another is used again once what
// it brought has been added. Where a rank's slices cost more than another's, its parts come late, and the
// wider the window, the longer nobody waits for them. Without compute to pace the rounds, all are posted at
// once, each into a slot of its own.
enum { WINDOW = 4 };

static void direct_reduce_scatter(builder *b) {
    cf_schedule *s = b->s;
    int N = s->ranks, m = s->slices;
    int window = N - 1 > WINDOW ? WINDOW : N - 1;
    s->stage_slots = window * m;
    for (int i = 0; i < N; i++)
        for (int k = 0; k < m; k++) {
            int owner = left(s, i + 1), own = slice(s, s->rank, k), number = slice(s, owner, k);
            if (computed_early(s, owner, k)) compute_before(b, CF_FULL, number);
            if (i == N - 1) continue;
            int before = i - (window - 1); // the round whose slot this one takes
            if (before > 0) add_part(b, before, window, k);
            *exchange_at(b, i, k) = exchange(b, owner, (cf_place){CF_FULL, number}, number, right(s, i + 1),
                                             window_slot(b, i, window, k), own, b->last_compute, -1);
        }
    s->begin = s->count;
    for (int k = 0; k < m && N > 1; k++) {
        for (int i = N - window > 1 ? N - window : 1; i <= N - 2; i++) add_part(b, i, window, k);
        finish_own(b, k, *exchange_at(b, 0, k));
    }
}

// The bound for benchmarks: the computations and additions of commfuse, no transfer.
static void nowire_reduce_scatter(builder *b) {
    cf_schedule *s = b->s;
    s->stage_slots = s->ranks > 1 ? s->slices : 0;
    for (int i = 0; i < s->ranks; i++)
        for (int k = 0; k < s->slices; k++) {
            int number = slice(s, left(s, i + 1), k);
            bool own = i == s->ranks - 1;
            if (computed_early(s, left(s, i + 1), k)) compute_before(b, CF_FULL, number);
            if (i > 0 && !own) add(b, (cf_place){CF_FULL, number}, (cf_place){CF_STAGE, k}, -1, -1);
        }
    s->begin = s->count;
    for (int k = 0; k < s->slices && s->ranks > 1; k++) finish_own(b, k, -1);
}

// --- all-to-all (Algorithm 5) ---

// Round i sends to rank r + 1 + i and receives from r − 1 − i; one round after another, as in an all-gather.
static void alltoall_after(builder *b) {
    cf_schedule *s = b->s;
    bool wire = s->mode == CF_MODE_COMMFUSE;
    for (int i = 0; wire && i < s->ranks - 1; i++)
        for (int k = 0; k < s->slices; k++) {
            int to = right(s, i + 1), from = left(s, i + 1);
            *exchange_at(b, i, k) =
                exchange(b, to, (cf_place){CF_FULL, slice(s, to, k)}, slice(s, to, k), from,
                         (cf_place){CF_RESULT, slice(s, from, k)}, slice(s, s->rank, k), exchange_before(b, i, s->slices - 1), -1);
        }
    s->begin = s->count;
    for (int i = 0; i < s->ranks; i++)
        for (int k = 0; k < s->slices; k++) {
            int number = slice(s, left(s, i), k);
            compute_after(b, i == 0 ? CF_FULL : CF_RESULT, number, wire ? exchange_before(b, i, k) : -1);
        }
}

// Round i computes for rank r − 1 − i and sends; what arrives comes from r + 1 + i. Own slices last,
// computed where the result is wanted. With compute on both sides, the own slices are then the first to be
// worked on, and the others follow in the order in which they were sent.
static void alltoall_before(builder *b) {
    cf_schedule *s = b->s;
    bool wire = s->mode == CF_MODE_COMMFUSE;
    for (int i = 0; i < s->ranks; i++)
        for (int k = 0; k < s->slices; k++) {
            int to = left(s, i + 1), from = right(s, i + 1);
            bool own = i == s->ranks - 1;
            compute_before(b, own ? CF_RESULT : CF_FULL, slice(s, to, k));
            if (wire && !own)
                *exchange_at(b, i, k) =
                    exchange(b, to, (cf_place){CF_FULL, slice(s, to, k)}, slice(s, to, k), from,
                             (cf_place){CF_RESULT, slice(s, from, k)}, slice(s, s->rank, k), b->last_compute, -1);
        }
    s->begin = s->count;
    for (int i = 0; i < s->ranks && s->side == CF_COMPUTE_BOTH; i++)
        for (int k = 0; k < s->slices; k++)
            compute_after(b, CF_RESULT, slice(s, right(s, i), k), wire ? exchange_before(b, i, k) : -1);
}

// --- all at once: any operation whose slices hide nothing ---

// Sends every other rank what it needs and receives what this one needs from it, as one unit. A part of the own shard's sum
// from rank r + i arrives in stage slot i − 1.
static void exchange_at_once(builder *b, int wait) {
    cf_schedule *s = b->s;
    bool gather = s->operation == CF_ALLGATHER, reduce = s->operation == CF_REDUCE_SCATTER;
    for (int i = 0; i < s->ranks - 1; i++) {
        int to = right(s, i + 1), from = left(s, i + 1);
        int send = gather ? s->rank : to, recv = gather ? from : s->rank;
        cf_place at = reduce ? (cf_place){CF_STAGE, s->ranks - 2 - i} : (cf_place){gather ? CF_FULL : CF_RESULT, from};
        int index = exchange(b, to, (cf_place){CF_FULL, send}, send, from, at, recv, wait, -1);
        s->step[index].joined = i > 0;
    }
}

// The shards of all other ranks: those below and those above the own one.
static void compute_others(builder *b, cf_side side, cf_buffer buffer, int first_exchange, int last_exchange) {
    const cf_schedule *s = b->s;
    const int first[] = {0, s->rank + 1}, count[] = {s->rank, s->ranks - 1 - s->rank};
    for (int i = 0; i < 2; i++) {
        if (count[i] == 0) continue;
        int index = compute(b, side, (cf_place){buffer, first[i]}, first[i], count[i], 1, first_exchange);
        if (first_exchange < 0) continue;
        s->step[index].wait[1] = last_exchange;
        s->step[index].range = true;
    }
}

// own += (stage[0] + stage[1]) + …; `first`: the exchange that has filled the last slot, -1: none has.
static void add_all(builder *b, int first) {
    cf_schedule *s = b->s;
    int slots = s->ranks - 1, arrived = first < 0 ? -1 : first + slots - 1;
    s->stage_slots = slots;
    for (int i = 1; i < slots; i++) add(b, (cf_place){CF_STAGE, 0}, (cf_place){CF_STAGE, i}, first < 0 ? -1 : arrived - i, arrived);
    if (slots > 0) add(b, (cf_place){CF_FULL, s->rank}, (cf_place){CF_STAGE, 0}, arrived, -1);
}

static void at_once(builder *b) {
    cf_schedule *s = b->s;
    bool before = s->side == CF_COMPUTE_BEFORE || s->side == CF_COMPUTE_BOTH, gather = s->operation == CF_ALLGATHER;
    bool after = s->side == CF_COMPUTE_AFTER || s->side == CF_COMPUTE_BOTH, all_to_all = s->operation == CF_ALLTOALL;
    bool wire = s->mode == CF_MODE_COMMFUSE && s->ranks > 1;
    if (before) compute_others(b, CF_COMPUTE_BEFORE, CF_FULL, -1, -1);
    int first = wire ? s->count : -1;
    if (wire) exchange_at_once(b, b->last_compute);
    int last = s->count - 1;
    if (before) compute_before(b, all_to_all ? CF_RESULT : CF_FULL, s->rank);
    s->begin = s->count;
    if (after) {
        compute_after(b, before ? CF_RESULT : CF_FULL, s->rank, -1);
        compute_others(b, CF_COMPUTE_AFTER, gather ? CF_FULL : CF_RESULT, first, last);
    } else if (all_to_all && !before) {
        cf_step step = blank(CF_COPY, -1, -1);
        step.at = (cf_place){CF_RESULT, s->rank}, step.from = (cf_place){CF_FULL, s->rank};
        append(b, step);
    } else if (s->operation == CF_REDUCE_SCATTER) {
        add_all(b, first);
    }
}

// --- the baselines: native collectives ---

// M slices; the collective of slice k runs behind the computation of slice k ± 1. With M = 1 and
// `blocking` this is mode none: the whole collective, then (or after) one monolithic computation.
// A collective names no other to wait for: libraries demand that all ranks start their collectives in one order, and
// only the order of this list, which is the same everywhere, gives them one. Mode ideal leaves the collective out.
static void native(builder *b) {
    cf_schedule *s = b->s;
    int N = s->ranks, M = s->slices;
    bool gather = s->operation == CF_ALLGATHER, reduce = s->operation == CF_REDUCE_SCATTER;
    bool wire = s->mode != CF_MODE_IDEAL;
    cf_buffer to = gather ? CF_FULL : CF_RESULT;
    s->slice_major = reduce && M > 1;
    for (int k = 0; k < M; k++) {
        int computed = -1;
        if (s->side == CF_COMPUTE_BEFORE || s->side == CF_COMPUTE_BOTH)
            computed = compute(b, CF_COMPUTE_BEFORE, (cf_place){CF_FULL, k}, k, N, M, -1);
        cf_place from = {CF_FULL, gather ? slice(s, s->rank, k) : k};
        *exchange_at(b, 0, k) = wire ? collective(b, from, (cf_place){to, k}, k, computed) : -1;
    }
    s->begin = s->count;
    for (int k = 0; k < M && (s->side == CF_COMPUTE_AFTER || s->side == CF_COMPUTE_BOTH); k++)
        compute(b, CF_COMPUTE_AFTER, (cf_place){to, k}, k, N, M, *exchange_at(b, 0, k));
    if (reduce && wire) s->result = (cf_place){CF_RESULT, 0};
    s->blocking = s->mode == CF_MODE_NONE;
}

// --- choice ---

static void fused_reduce_scatter(builder *b) {
    switch (b->s->route) { // the compiler reports a route that is missing
    case CF_RING:
        ring_reduce_scatter(b);
        return;
    case CF_DIRECT:
        direct_reduce_scatter(b);
        return;
    case CF_ONCE:
    case CF_ROUTES:
        break;
    }
    cf_die(NULL, "a reduce-scatter by route %d", (int)b->s->route);
}

static void check_arguments(cf_operation operation, cf_side side, cf_mode mode, int ranks, int rank, int slices) {
    bool side_fits = side == CF_NO_COMPUTE || operation == CF_ALLTOALL || (operation == CF_ALLGATHER) == (side == CF_COMPUTE_AFTER);
    if (!side_fits) cf_die(NULL, "%s has no computation on that side", cf_operation_name(operation));
    if (mode == CF_MODE_AUTO) cf_die(NULL, "a schedule of mode auto: one must be chosen first");
    if (ranks < 1 || rank < 0 || rank >= ranks || slices < 1)
        cf_die(NULL, "schedule for rank %d of %d with %d slices", rank, ranks, slices);
}

static void generate(builder *b) {
    cf_schedule *s = b->s;
    if (!cf_mode_is_fused(s->mode) && s->ranks > 1)
        native(b);
    else if (s->route == CF_ONCE)
        at_once(b);
    else if (s->operation == CF_ALLGATHER)
        fused_allgather(b);
    else if (s->operation == CF_ALLTOALL) {
        if (s->side == CF_COMPUTE_BEFORE || s->side == CF_COMPUTE_BOTH)
            alltoall_before(b);
        else
            alltoall_after(b);
    } else if (s->mode == CF_MODE_NOWIRE)
        nowire_reduce_scatter(b);
    else
        fused_reduce_scatter(b);
}

cf_schedule *cf_schedule_create(cf_operation operation, cf_side side, cf_mode mode, cf_route route, int ranks, int rank, int slices,
                                bool folds) {
    check_arguments(operation, side, mode, ranks, rank, slices);
    if (side == CF_NO_COMPUTE) route = CF_ONCE;
    bool whole = mode == CF_MODE_NONE || mode == CF_MODE_IDEAL || side == CF_NO_COMPUTE || ranks == 1;
    if (whole || (route == CF_ONCE && cf_mode_is_fused(mode))) slices = 1;
    cf_schedule *s = calloc(1, sizeof *s);
    int *exchanges = calloc((size_t)ranks * (size_t)slices, sizeof *exchanges);
    if (!s || !exchanges) cf_die(NULL, "out of memory for a schedule");
    s->operation = operation, s->side = side, s->mode = mode, s->route = route;
    s->ranks = ranks, s->rank = rank, s->slices = slices;
    s->result = (cf_place){operation == CF_ALLTOALL ? CF_RESULT : CF_FULL, operation == CF_REDUCE_SCATTER ? rank * slices : 0};
    builder b = {.s = s, .last_compute = -1, .exchange = exchanges};
    s->folds = folds && cf_mode_is_fused(mode) && operation == CF_REDUCE_SCATTER && slices > 1; // hence several ranks, and compute
    if (s->folds) s->result = (cf_place){CF_STAGE, 0};
    generate(&b);
    free(exchanges);
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

static const char *const mode_names[CF_MODES] = {"none", "slice", "commfuse", "nowire", "ideal", "auto"};
static const char *const route_names[CF_ROUTES] = {"ring", "direct", "once"};

static int find(const char *const *names, int count, const char *name) {
    int i = 0;
    while (i < count && strcmp(names[i], name) != 0) i++;
    return i;
}

const char *cf_mode_name(cf_mode mode) {
    return mode_names[mode];
}

const char *cf_route_name(cf_route route) {
    return route_names[route];
}

bool cf_mode_of(const char *name, cf_mode *mode) {
    const int found = find(mode_names, CF_MODES, name);
    if (found < CF_MODES) *mode = (cf_mode)found;
    return found < CF_MODES;
}

bool cf_route_of(const char *name, cf_route *route) {
    const int found = find(route_names, CF_ROUTES, name);
    if (found < CF_ROUTES) *route = (cf_route)found;
    return found < CF_ROUTES;
}

bool cf_mode_is_fused(cf_mode mode) {
    return mode == CF_MODE_COMMFUSE || mode == CF_MODE_NOWIRE || mode == CF_MODE_AUTO;
}

cf_mode cf_mode_for_figures(cf_mode mode) {
    return mode == CF_MODE_NOWIRE || mode == CF_MODE_IDEAL ? CF_MODE_COMMFUSE : mode;
}

typedef struct text {
    char *at;
    size_t length, capacity;
} text;

static void print(text *t, const char *format, ...) CF_PRINTF(2, 3);
static void print(text *t, const char *format, ...) {
    char piece[160];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(piece, sizeof piece, format, arguments);
    va_end(arguments);
    if (length < 0 || length >= (int)sizeof piece) cf_die(NULL, "a schedule line of %d characters", length);
    if (t->length + (size_t)length + 1 > t->capacity) {
        t->capacity = 2 * (t->length + (size_t)length + 1);
        t->at = realloc(t->at, t->capacity);
        if (!t->at) cf_die(NULL, "out of memory for printing a schedule");
    }
    memcpy(t->at + t->length, piece, (size_t)length + 1);
    t->length += (size_t)length;
}

static void print_place(text *t, cf_place place) {
    static const char *const name[] = {"full", "stage", "result"};
    print(t, "%s[%d]", name[place.buffer], place.slot);
}

static void print_step(text *t, const cf_step *step) {
    const char *what = step->side == CF_COMPUTE_AFTER ? "work on   " : step->accumulate ? "compute + " : "compute   ";
    switch (step->kind) {
    case CF_COMPUTE:
        if (step->count == 1)
            print(t, "%s slice %d in ", what, step->first);
        else
            print(t, "%s %d slices %d, %d, … in ", what, step->count, step->first, step->first + step->stride);
        print_place(t, step->at);
        break;
    case CF_EXCHANGE:
        print(t, step->joined ? "  with it  " : "exchange   ");
        if (step->send_to >= 0) print(t, "slice %d → rank %d  ", step->send_slice, step->send_to);
        if (step->recv_from >= 0) {
            print(t, "slice %d ← rank %d into ", step->recv_slice, step->recv_from);
            print_place(t, step->at);
        }
        break;
    case CF_COLLECTIVE:
        print(t, "collective %d slices %d, %d, …", step->count, step->first, step->first + step->stride);
        break;
    case CF_ADD:
    case CF_COPY:
        print(t, step->kind == CF_ADD ? "add        " : "copy       ");
        print_place(t, step->at);
        print(t, step->kind == CF_ADD ? " += " : " = ");
        print_place(t, step->from);
        break;
    }
    for (int i = 0; i < 2; i++)
        if (step->wait[i] >= 0)
            print(t, "%s%d", i == 0 || step->wait[0] < 0 ? "  after " : step->range ? " … " : ", ", step->wait[i]);
    print(t, "\n");
}

char *cf_schedule_print(const cf_schedule *s) {
    text t = {0};
    print(&t, "%s, %s%s%s, rank %d of %d, %d slice%s per shard\n", cf_operation_name(s->operation), cf_mode_name(s->mode),
          s->mode == CF_MODE_COMMFUSE ? " by " : "", s->mode == CF_MODE_COMMFUSE ? cf_route_name(s->route) : "", s->rank, s->ranks,
          s->slices, s->slices == 1 ? "" : "s");
    for (int i = 0; i < s->count; i++) {
        print(&t, "  %3d%s ", i, i < s->begin ? " " : "'");
        print_step(&t, &s->step[i]);
    }
    return t.at;
}
