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
//
// Levels: H hosts of P ranks. Two circles take the place of one: that of the hosts, for ranks in the same place of each, over the
// network, and in each host that of its places. A shard is sent to a host once, not to each of its ranks.
//
//   all-gather       own first, then host by host, h, h−1, …: a shard that has come over the network is passed on within the host
//                    and to the next host, while what is in the host already is computed on
//   reduce-scatter   shards of hosts h−1, h−2, …, h, own last: the parts of a shard meet on the rank in its owner's place, whose
//                    sum leaves for the owner while the next host's shards are computed
//
// An all-to-all would save nothing, as each pair of ranks has data of its own: it is direct.
#include "schedule.h"
#include "base/die.h"
#include "memory.h"
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

int cf_append(cf_schedule *s, cf_step step) {
    if (s->bound && cf_is_transfer(&step)) return 0;
    if (s->bound) step.wait[0] = step.wait[1] = 0, step.range = false;
    s->step = cf_host_grow(s->step, &s->room, s->count + 1, sizeof *s->step, "a schedule");
    s->step[s->count] = step;
    return ++s->count;
}

// Slices at.slot, at.slot + m, …, which are at their places.
static int compute(cf_schedule *s, cf_side side, cf_place at, int count, int wait) {
    return cf_append(s, (cf_step){.kind = CF_COMPUTE, .side = side, .at = at, .first = at.slot, .count = count, .wait = {wait}});
}
static void compute_before(cf_schedule *s, cf_buffer buffer, int number) {
    compute(s, CF_COMPUTE_BEFORE, (cf_place){buffer, number}, 1, 0);
}
static void compute_after(cf_schedule *s, cf_buffer buffer, int number, int wait) {
    compute(s, CF_COMPUTE_AFTER, (cf_place){buffer, number}, 1, wait);
}

// at += the part `from`, after two steps; or several, m slots apart, after all steps from first to last.
static void add(cf_schedule *s, cf_place at, cf_place from, int parts, int first, int last) {
    cf_append(s, (cf_step){.kind = CF_ADD, .at = at, .from = from, .count = parts, .wait = {first, last}, .range = parts > 1});
}

// The slice that is sent leaves from FULL.
static int exchange(cf_schedule *s, cf_step step) {
    step.kind = CF_EXCHANGE, step.from = (cf_place){CF_FULL, step.send.slice};
    return cf_append(s, step);
}

// Slice k travels from the rank that has it to the one that needs it. It is named by its owner, in an all-to-all by its destination.
static cf_step direct_exchange(const cf_schedule *s, int to, int from, int k, int wait) {
    const bool gather = s->operation == CF_ALLGATHER;
    return (cf_step){.send = {to, slice(s, gather ? s->rank : to, k)},
                     .recv = {from, slice(s, gather ? from : s->rank, k)},
                     .at = {gather ? CF_FULL : CF_RESULT, slice(s, from, k)},
                     .wait = {wait}};
}

// The latest step on the compute stream; 0: none.
static int last_on_stream(const cf_schedule *s) {
    int number = s->count;
    while (number > 0 && cf_is_transfer(&s->step[number - 1])) number--;
    return number;
}

// Generators note in s->posted[i · m + k] the exchange that they post for slice k in round i.
static int *posted(const cf_schedule *s, int round, int k) {
    return &s->posted[round * s->slices + k];
}

// That of the round before; 0: none.
static int posted_before(const cf_schedule *s, int round, int k) {
    return round > 0 ? *posted(s, round - 1, k) : 0;
}

// --- all-gather, and all-to-all with compute after it ---

// The own slices first, then those of each round. What arrives in an all-to-all has a buffer of its own.
static void compute_as_they_arrive(cf_schedule *s) {
    const cf_buffer arrived = s->operation == CF_ALLGATHER ? CF_FULL : CF_RESULT;
    s->split = s->count;
    for (int i = 0; i < s->ranks; i++)
        for (int k = 0; k < s->slices; k++)
            compute_after(s, i == 0 ? CF_FULL : arrived, slice(s, left(s, i), k), posted_before(s, i, k));
}
// Algorithm 1. In round i the slices of rank r − i, which the round before has brought, go to the right neighbour, and those of
// r − 1 − i come from the left one. No transfer depends on a computation here, so all are posted first, in the order in which
// slices are computed: messages to one peer travel in that order.
static void ring_allgather(cf_schedule *s) {
    const int to = right(s, 1), from = left(s, 1);
    for (int i = 0; i < s->ranks - 1; i++)
        for (int k = 0; k < s->slices; k++) {
            const int leaves = slice(s, left(s, i), k), arrives = slice(s, left(s, i + 1), k), wait = posted_before(s, i, k);
            const cf_step step = {.send = {to, leaves}, .recv = {from, arrives}, .at = {CF_FULL, arrives}, .wait = {wait}};
            *posted(s, i, k) = exchange(s, step);
        }
    compute_as_they_arrive(s);
}

// Direct, for an all-gather and for an all-to-all. A round starts when the one before has arrived; if they shared the wire, both
// would arrive late.
static void direct_then_compute(cf_schedule *s) {
    for (int i = 0; i < s->ranks - 1; i++)
        for (int k = 0; k < s->slices; k++) {
            const int wait = posted_before(s, i, s->slices - 1);
            *posted(s, i, k) = exchange(s, direct_exchange(s, right(s, i + 1), left(s, i + 1), k, wait));
        }
    compute_as_they_arrive(s);
}

// --- reduce-scatter (Algorithm 2) ---

// Completes own slice k: the other ranks' parts of it are in `parts` stage slots, k, k + m, …, once steps first … last are done.
static void finish_own(cf_schedule *s, int k, int parts, int first, int last) {
    add(s, (cf_place){CF_FULL, slice(s, s->rank, k)}, (cf_place){CF_STAGE, k}, parts, first, parts > 1 ? last : 0);
}

// Ring. Round i: compute the slice of rank r − 1 − i, add the running sum from the left neighbour, send it to the right one. One
// stage slot per k is enough: it is free again after the addition.
static void ring_reduce_scatter(cf_schedule *s) {
    const int to = right(s, 1), from = left(s, 1);
    s->stage_slots = s->ranks > 1 ? s->slices : 0;
    for (int i = 0; i < s->ranks; i++)
        for (int k = 0; k < s->slices; k++) {
            const int leaves = slice(s, left(s, i + 1), k), arrives = slice(s, left(s, i + 2), k), arrived = posted_before(s, i, k);
            const cf_place staged = {CF_STAGE, k};
            compute_before(s, CF_FULL, leaves);
            if (i == s->ranks - 1) continue; // own slices are completed last, below
            if (i > 0) add(s, (cf_place){CF_FULL, leaves}, staged, 1, arrived, 0);
            cf_step step = {.send = {to, leaves}, .recv = {from, arrives}, .at = staged, .wait = {last_on_stream(s), arrived}};
            *posted(s, i, k) = exchange(s, step);
        }
    s->split = s->count;
    for (int k = 0; k < s->slices && s->ranks > 1; k++) finish_own(s, k, 1, posted_before(s, s->ranks - 1, k), 0);
}

// The stage slot where the part of a round arrives.
static cf_place window_slot(const cf_schedule *s, int round, int window, int k) {
    int slot = round == 0 ? 0 : 1 + (round - 1) % (window - 1);
    return (cf_place){CF_STAGE, slot * s->slices + k};
}

// sum += the part of that round
static void add_part(cf_schedule *s, int round, int window, int k) {
    add(s, window_slot(s, 0, window, k), window_slot(s, round, window, k), 1, *posted(s, round, k), *posted(s, 0, k));
}

// Direct. Round i: compute the slice of rank r − 1 − i and send it there. The part of the own slice from rank r + 1 + i arrives in
// a window of slots. Slot 0 holds the sum so far; another slot is reused once its part has been added. Parts come late from a rank
// whose slices cost more: the wider the window, the later this rank waits for them. If all parts fit, one step adds them up.
enum { WINDOW = 8 };

static void direct_reduce_scatter(cf_schedule *s) {
    const int N = s->ranks, m = s->slices, window = N - 1 > WINDOW ? WINDOW : N - 1;
    s->stage_slots = window * m;
    for (int i = 0; i < N; i++)
        for (int k = 0; k < m; k++) {
            const int owner = left(s, i + 1);
            compute_before(s, CF_FULL, slice(s, owner, k));
            if (i == N - 1) continue;
            int before = i - (window - 1); // the round that used this slot last
            if (before > 0) add_part(s, before, window, k);
            cf_step step = direct_exchange(s, owner, right(s, i + 1), k, last_on_stream(s));
            step.at = window_slot(s, i, window, k);
            *posted(s, i, k) = exchange(s, step);
        }
    s->split = s->count;
    const bool all = window == N - 1;
    for (int k = 0; k < m && N > 1; k++) {
        for (int i = N - window; i <= N - 2 && !all; i++) add_part(s, i, window, k);
        finish_own(s, k, all ? window : 1, *posted(s, 0, k), *posted(s, N - 2, k));
    }
}

// --- levels ---

// The rank so many hosts and places further.
static int across(const cf_schedule *s, int hosts, int places) {
    const int H = s->hosts, P = s->ranks / H;
    return (s->rank / P + hosts + H) % H * P + (s->rank % P + places + P) % P;
}

// Unit (t, k) sends the slice that has come from host h − t to the others of this host and, but for the last, to the next host.
static void levels_allgather(cf_schedule *s) {
    const int H = s->hosts, P = s->ranks / H;
    for (int t = 0; t < H; t++)
        for (int k = 0; k < s->slices; k++) {
            const int leaves = slice(s, across(s, -t, 0), k), wait = posted_before(s, t, k);
            for (int i = 1; i < P + (t < H - 1); i++) {
                const bool here = i < P;
                const int to = here ? across(s, 0, i) : across(s, 1, 0), from = here ? across(s, 0, -i) : across(s, -1, 0);
                const int arrives = slice(s, here ? across(s, -t, -i) : across(s, -t - 1, 0), k);
                const cf_place at = {CF_FULL, arrives};
                const cf_step step = {.send = {to, leaves}, .recv = {from, arrives}, .at = at, .wait = {wait}, .joined = i > 1};
                *posted(s, t, k) = exchange(s, step);
            }
        }
    s->split = s->count;
    if (s->side == CF_NO_COMPUTE) return;
    for (int k = 0; k < s->slices; k++) compute_after(s, CF_FULL, slice(s, s->rank, k), 0);
    for (int i = 0; i < s->split; i++) compute_after(s, CF_FULL, s->step[i].recv.slice, i + 1);
}

// Round t is for host h − 1 − t. This rank sums the parts of the shard whose owner is in its place there.
static int summed(const cf_schedule *s, int t, int k) {
    return slice(s, across(s, -1 - t, 0), k);
}

// One unit brings them from the others of this host, each into its stage slot, and takes to these what they sum.
static void meet_in_host(cf_schedule *s, int t, int k, int slot) {
    const int wait = last_on_stream(s);
    *posted(s, t, k) = s->count + 1;
    for (int i = 1; i < s->ranks / s->hosts; i++) {
        const int to = across(s, 0, -i), from = across(s, 0, i), leaves = slice(s, across(s, -1 - t, -i), k);
        const cf_place at = {CF_STAGE, (slot + i - 1) * s->slices + k};
        exchange(s, (cf_step){.send = {to, leaves}, .recv = {from, summed(s, t, k)}, .at = at, .wait = {wait}, .joined = i > 1});
    }
}

static void add_in_host(cf_schedule *s, int t, int k, int slot) {
    const int parts = s->ranks / s->hosts - 1, first = *posted(s, t, k), last = parts > 1 ? first + parts - 1 : 0;
    add(s, (cf_place){CF_FULL, summed(s, t, k)}, (cf_place){CF_STAGE, slot * s->slices + k}, parts, first, last);
}

// The sum leaves for its owner. One for this rank comes from host h + 1 + t, into stage slot t.
static void leave_host(cf_schedule *s, int t, int k, bool joined) {
    exchange(s, (cf_step){.send = {across(s, -1 - t, 0), summed(s, t, k)},
                          .recv = {across(s, 1 + t - s->hosts, 0), slice(s, s->rank, k)},
                          .at = {CF_STAGE, t * s->slices + k},
                          .wait = {last_on_stream(s)},
                          .joined = joined});
}

// The sums of a round leave with the parts of the next.
static void levels_reduce_scatter(cf_schedule *s) {
    const int H = s->hosts, P = s->ranks / H, m = s->slices;
    s->stage_slots = (H + P - 2) * m;
    for (int t = 0; t < H; t++) {
        for (int k = 0; k < m; k++) {
            for (int i = 1; i < P; i++) compute_before(s, CF_FULL, slice(s, across(s, -1 - t, -i), k));
            if (t > 0) add_in_host(s, t - 1, k, H - 1);
            meet_in_host(s, t, k, H - 1);
            if (t > 0) leave_host(s, t - 1, k, true);
        }
        for (int k = 0; k < m; k++) compute_before(s, CF_FULL, summed(s, t, k));
    }
    s->split = s->count;
    for (int k = 0; k < m; k++) finish_own(s, k, H + P - 2, *posted(s, 1, k), *posted(s, H - 1, k) + P - 1);
}

// Nothing is computed: all parts meet first, so that the additions in begin wait for no network.
static void levels_reduce_alone(cf_schedule *s) {
    const int H = s->hosts, others = s->ranks / H - 1;
    s->stage_slots = s->ranks - 1;
    for (int t = 0; t < H; t++) meet_in_host(s, t, 0, H - 1 + (t + 1) % H * others); // of this host right behind the sums
    for (int t = 0; t < H - 1; t++) {
        add_in_host(s, t, 0, H - 1 + (t + 1) * others);
        leave_host(s, t, 0, false);
    }
    s->split = s->count;
    finish_own(s, 0, H - 1 + others, *posted(s, H - 1, 0), s->count);
}

// --- all-to-all (Algorithm 5) ---

// Compute before, or on both sides. Round i computes for rank r − 1 − i and sends; it receives from r + 1 + i. Own slices come last
// and are computed in RESULT. With compute on both sides they are then the first to be computed on, and the others follow in the
// order of the rounds.
static void compute_then_alltoall(cf_schedule *s) {
    for (int i = 0; i < s->ranks; i++)
        for (int k = 0; k < s->slices; k++) {
            const int to = left(s, i + 1);
            compute_before(s, to == s->rank ? CF_RESULT : CF_FULL, slice(s, to, k));
            if (to != s->rank) *posted(s, i, k) = exchange(s, direct_exchange(s, to, right(s, i + 1), k, last_on_stream(s)));
        }
    s->split = s->count;
    for (int i = 0; i < s->ranks && s->side == CF_COMPUTE_BOTH; i++)
        for (int k = 0; k < s->slices; k++) compute_after(s, CF_RESULT, slice(s, right(s, i), k), posted_before(s, i, k));
}

// --- all at once: any operation whose slices hide nothing ---

// One unit of exchanges with all other ranks. reduce-scatter: the part from rank r + i arrives in stage slot i − 1. Returns the
// last exchange; 0: none.
static int exchange_at_once(cf_schedule *s, int wait) {
    int last = 0;
    for (int i = 0; i < s->ranks - 1; i++) {
        cf_step step = direct_exchange(s, right(s, i + 1), left(s, i + 1), 0, wait);
        if (s->operation == CF_REDUCE_SCATTER) step.at = (cf_place){CF_STAGE, s->ranks - 2 - i};
        step.joined = i > 0;
        last = exchange(s, step);
    }
    return last;
}

// Computes the shards of all other ranks, below and above the own one, once steps first … last are done; both 0: no wait.
static void compute_others(cf_schedule *s, cf_side side, cf_buffer buffer, int first, int last) {
    const int owner[] = {0, s->rank + 1}, count[] = {s->rank, s->ranks - 1 - s->rank};
    for (int i = 0; i < 2; i++) {
        cf_step step = {.kind = CF_COMPUTE, .side = side, .at = {buffer, owner[i]}, .first = owner[i], .count = count[i]};
        step.wait[0] = first, step.wait[1] = last, step.range = first > 0;
        if (step.count > 0) cf_append(s, step);
    }
}

static bool at_once(cf_schedule *s, const void *argument) {
    (void)argument;
    const bool before = s->side & CF_COMPUTE_BEFORE, after = s->side & CF_COMPUTE_AFTER;
    const bool gather = s->operation == CF_ALLGATHER, all_to_all = s->operation == CF_ALLTOALL;
    if (before) compute_others(s, CF_COMPUTE_BEFORE, CF_FULL, 0, 0);
    const int others = s->ranks - 1;
    const int last = exchange_at_once(s, last_on_stream(s)), first = last - others + 1;
    if (before) compute_before(s, all_to_all ? CF_RESULT : CF_FULL, s->rank);
    s->split = s->count;
    if (after) {
        compute_after(s, before ? CF_RESULT : CF_FULL, s->rank, 0);
        compute_others(s, CF_COMPUTE_AFTER, gather ? CF_FULL : CF_RESULT, first, last);
    } else if (all_to_all && !before) {
        cf_append(s, (cf_step){.kind = CF_COPY, .at = {CF_RESULT, s->rank}, .from = {CF_FULL, s->rank}});
    } else if (s->operation == CF_REDUCE_SCATTER) {
        s->stage_slots = others;
        if (others > 0) finish_own(s, 0, others, first, last);
    }
    return true;
}

// --- the baselines: native collectives ---

// M slices; the collective of slice k runs during the computation of slice k ± 1. With M = 1 and `blocking` this is none: the
// whole collective before or after one computation. A collective waits for no other: libraries require that all ranks start their
// collectives in one order, and that is the order of this list.
static bool native(cf_schedule *s, const void *argument) {
    (void)argument;
    int N = s->ranks, M = s->slices;
    bool gather = s->operation == CF_ALLGATHER, reduce = s->operation == CF_REDUCE_SCATTER;
    cf_buffer to = gather ? CF_FULL : CF_RESULT;
    s->slice_major = reduce && M > 1;
    for (int k = 0; k < M; k++) {
        cf_step step = {
            .kind = CF_COLLECTIVE, .from = {CF_FULL, gather ? slice(s, s->rank, k) : k}, .at = {to, k}, .first = k, .count = N};
        if (s->side & CF_COMPUTE_BEFORE) step.wait[0] = compute(s, CF_COMPUTE_BEFORE, (cf_place){CF_FULL, k}, N, 0);
        *posted(s, 0, k) = cf_append(s, step);
    }
    s->split = s->count;
    for (int k = 0; k < M && (s->side & CF_COMPUTE_AFTER); k++)
        compute(s, CF_COMPUTE_AFTER, (cf_place){to, k}, N, *posted(s, 0, k));
    if (reduce && !s->bound) s->result = (cf_place){CF_RESULT, 0};
    return true;
}

// --- the table ---

static bool ring(cf_schedule *s, const void *argument) {
    (void)argument;
    s->operation == CF_ALLGATHER ? ring_allgather(s) : ring_reduce_scatter(s);
    return true;
}

static bool direct(cf_schedule *s, const void *argument) {
    (void)argument;
    if (s->operation == CF_REDUCE_SCATTER)
        direct_reduce_scatter(s);
    else
        s->side == CF_COMPUTE_AFTER ? direct_then_compute(s) : compute_then_alltoall(s);
    return true;
}

static bool levels(cf_schedule *s, const void *argument) {
    (void)argument;
    if (s->hosts == 1 || s->hosts == s->ranks || s->bound) return false;
    if (s->operation == CF_ALLGATHER)
        levels_allgather(s);
    else
        s->side == CF_NO_COMPUTE ? levels_reduce_alone(s) : levels_reduce_scatter(s);
    return true;
}

enum {
    MOST = 1024,
    SUMS = CF_SERVES(CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE),
    ROUNDS = CF_SERVES(CF_ALLGATHER, CF_COMPUTE_AFTER) | SUMS,
    LEVELS = ROUNDS | CF_SERVES(CF_ALLGATHER, CF_NO_COMPUTE) | CF_SERVES(CF_REDUCE_SCATTER, CF_NO_COMPUTE),
    ALLTOALLS = CF_SERVES(CF_ALLTOALL, CF_COMPUTE_BEFORE) | CF_SERVES(CF_ALLTOALL, CF_COMPUTE_AFTER) |
                CF_SERVES(CF_ALLTOALL, CF_COMPUTE_BOTH),
    ALL = LEVELS | ALLTOALLS | CF_SERVES(CF_ALLTOALL, CF_NO_COMPUTE)
};

// A row serves what its generator makes; `fallback` serves the rest. What has no computation to hide behind travels at once.
// clang-format off
const cf_algorithm cf_algorithms[] = {
    {.name = "none", .serves = ALL, .generate = native, .slices = 1, .max_slices = 1,
     .native = true, .blocking = true, .rank_symmetric = true,
     .help = "the library's blocking collective, before or after one computation"},
    {.name = "slice", .serves = ALL, .generate = native, .slices = 4, .max_slices = MOST,
     .native = true, .rank_symmetric = true,
     .help = "data slicing: a non-blocking collective for each slice"},
    {.name = "ring", .serves = ROUNDS, .fallback = "direct", .generate = ring, .same_bits = "ring", .slices = 1, .max_slices = MOST,
     .tail_free = true, .rank_symmetric = true,
     .help = "CommFuse from neighbour to neighbour; all-to-all: direct"},
    {.name = "direct", .serves = ROUNDS | ALLTOALLS, .fallback = "once", .generate = direct, .same_bits = "ring", .slices = 1,
     .max_slices = MOST, .tail_free = true, .rank_symmetric = true,
     .help = "CommFuse straight to the rank that needs a slice"},
    {.name = "levels", .serves = LEVELS, .fallback = "direct", .generate = levels, .same_bits = "levels", .slices = 1,
     .max_slices = MOST, .tail_free = true, .rank_symmetric = true, .levels = true,
     .help = "CommFuse between hosts and within each: a slice crosses the network once for a host; on one host: direct"},
    {.name = "once", .serves = ALL, .generate = at_once, .same_bits = "once", .slices = 1, .max_slices = 1,
     .tail_free = true, .rank_symmetric = true,
     .help = "exchanges with all ranks at the same time, during the computation of the own shard"},
    {.name = "commfuse", .fallback = "ring", .same_bits = "ring", .slices = 1, .max_slices = MOST,
     .help = "the paper's name for ring"},
    {.name = "nowire", .fallback = "ring", .slices = 1, .max_slices = MOST, .bound = true,
     .help = "a bound, with wrong results: ring without transfers"},
    {.name = "ideal", .fallback = "none", .slices = 1, .max_slices = 1, .bound = true,
     .help = "the bound of all schedules, with wrong results: none without transfers"},
};
// clang-format on
const int cf_algorithm_count = sizeof cf_algorithms / sizeof *cf_algorithms;

const cf_algorithm *cf_algorithm_find(const char *name) {
    for (int i = 0; name && i < cf_algorithm_count; i++)
        if (strcmp(cf_algorithms[i].name, name) == 0) return &cf_algorithms[i];
    return NULL;
}

const cf_algorithm *cf_algorithm_serving(const cf_algorithm *a, cf_operation operation, cf_side side) {
    while (a && !(a->serves & CF_SERVES(operation, side))) a = cf_algorithm_find(a->fallback);
    return a;
}

// The schedule of algorithm `a`; NULL: it has none for so many ranks or slices.
static cf_schedule *generate(cf_schedule as, const cf_algorithm *a) {
    cf_schedule *s = cf_host_alloc(1, sizeof *s, "a schedule");
    *s = as;
    s->algorithm = a;
    if (s->side == CF_NO_COMPUTE || s->ranks == 1 || s->slices > a->max_slices) s->slices = 1;
    if (s->operation == CF_REDUCE_SCATTER) s->result = (cf_place){CF_FULL, s->rank * s->slices};
    if (s->operation == CF_ALLTOALL) s->result = (cf_place){CF_RESULT, 0};
    s->posted = cf_host_alloc((int64_t)s->ranks * s->slices, sizeof *s->posted, "a schedule");
    const bool made = a->generate && a->generate(s, a->argument);
    free(s->posted), s->posted = NULL;
    if (made) return s;
    cf_schedule_free(s);
    return NULL;
}

cf_schedule *cf_schedule_create(cf_operation operation, cf_side side, const cf_algorithm *asked, int ranks, int hosts, int rank,
                                int slices) {
    CF_RETURNS(NULL);
    bool side_fits = side == CF_NO_COMPUTE || operation == CF_ALLTOALL ||
                     side == (operation == CF_ALLGATHER ? CF_COMPUTE_AFTER : CF_COMPUTE_BEFORE);
    if (!side_fits) cf_die(NULL, "%s has no computation on that side", cf_operation_name(operation));
    if (!asked || ranks < 1 || hosts < 0 || (hosts > 1 && ranks % hosts != 0) || rank < 0 || rank >= ranks || slices < 1)
        cf_die(NULL, "schedule of %s for rank %d of %d with %d slices", asked ? asked->name : "no algorithm", rank, ranks, slices);
    cf_schedule as = {.operation = operation, .side = side, .ranks = ranks, .rank = rank, .slices = slices};
    as.bound = asked->bound ? asked : NULL, as.hosts = hosts > 1 ? hosts : 1;
    const cf_algorithm *a = cf_algorithm_serving(asked, operation, side);
    if (a && a->native && ranks == 1) a = cf_algorithm_serving(cf_algorithm_find("ring"), operation, side); // nothing to collect
    cf_schedule *s = NULL;
    for (; a && !s; a = cf_algorithm_serving(cf_algorithm_find(a->fallback), operation, side)) s = generate(as, a);
    if (!s)
        cf_die("give the algorithm a `fallback`", "%s makes no %s of %d ranks and %d slices", asked->name,
               cf_operation_name(operation), ranks, slices);
    return s;
}

void cf_schedule_free(cf_schedule *schedule) {
    if (!schedule) return;
    free(schedule->step);
    free(schedule);
}

// --- printing ---

const char *cf_operation_name(cf_operation operation) {
    static const char *const name[] = {"all-gather", "reduce-scatter", "all-to-all"};
    return name[operation];
}

static void print_place(FILE *file, cf_place place) {
    static const char *const name[] = {"full", "stage", "result"};
    fprintf(file, "%s[%d]", name[place.buffer], place.slot);
}

static void print_step(FILE *file, const cf_step *step, int m) {
    const char *what = step->side == CF_COMPUTE_AFTER ? "work on   " : "compute   ";
    switch (step->kind) {
    case CF_COMPUTE:
        if (step->count == 1)
            fprintf(file, "%s slice %d in ", what, step->first);
        else
            fprintf(file, "%s %d slices %d, %d, … in ", what, step->count, step->first, step->first + m);
        print_place(file, step->at);
        break;
    case CF_EXCHANGE:
        fprintf(file, step->joined ? "  with it  " : "exchange   ");
        if (step->send.rank >= 0) fprintf(file, "slice %d → rank %d  ", step->send.slice, step->send.rank);
        if (step->recv.rank >= 0) {
            fprintf(file, "slice %d ← rank %d into ", step->recv.slice, step->recv.rank);
            print_place(file, step->at);
        }
        break;
    case CF_COLLECTIVE:
        fprintf(file, "collective %d slices %d, %d, …", step->count, step->first, step->first + m);
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
        if (step->wait[i] > 0)
            fprintf(file, "%s%d", i == 0 || step->wait[0] == 0 ? "  after " : step->range ? " … " : ", ", step->wait[i] - 1);
    fprintf(file, "\n");
}

char *cf_schedule_print(const cf_schedule *s) {
    CF_RETURNS(NULL);
    char *text = NULL;
    size_t size = 0;
    FILE *file = open_memstream(&text, &size);
    if (!file) cf_die(NULL, "out of memory for printing a schedule");
    fprintf(file, "%s, %s, rank %d of %d, %d slice%s per shard\n", cf_operation_name(s->operation),
            (s->bound ? s->bound : s->algorithm)->name, s->rank, s->ranks, s->slices, s->slices == 1 ? "" : "s");
    for (int i = 0; i < s->count; i++) {
        fprintf(file, "  %3d%s ", i, i < s->split ? " " : "'");
        print_step(file, &s->step[i], s->slices);
    }
    if (fclose(file) != 0) cf_die(NULL, "out of memory for printing a schedule");
    return text;
}
