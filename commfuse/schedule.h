// Schedules: which rank computes and sends what, and when, as pure data. No MPI, no CUDA, no input or output.
//
// N ranks share a payload of N shards, one per rank; each shard is cut into m slices, so slice number s = owner · m + k,
// 0 <= s < N · m. A schedule is ONE rank's list of steps, taken in order: COMPUTE, ADD and COPY run one after another on the
// compute stream; EXCHANGE and COLLECTIVE are posted when the list reaches them and run during whatever follows. Each step
// names the earlier steps it must wait for. (arXiv 2604.24013: Algorithm 1 is all-gather by ring, 2 reduce-scatter by ring, 3
// their use in linear layers, 4 Query-Split attention, 5 all-to-all.)
//
// Buffers a step refers to:
//   CF_FULL    the caller's payload. all-gather: filled by this operation, own shard there from the start.
//              reduce-scatter: this rank's partial sums. all-to-all: slices by destination.
//   CF_STAGE   slots of one slice each, which belong to the operation: partial sums in transit.
//   CF_RESULT  all-to-all: slices by source. In commfuse mode nothing moves the own slices: with compute before they are
//              computed here, with compute after alone they stay in FULL. reduce-scatter by native collective: the own
//              shard, reduced.
// The reduced own shard of a reduce-scatter is at cf_schedule.result.
#ifndef CF_SCHEDULE_H
#define CF_SCHEDULE_H

#include <stdbool.h>
#include <stdint.h>
#include "extern_c.h"

CF_EXTERN_C_BEGIN

typedef enum { CF_ALLGATHER, CF_REDUCE_SCATTER, CF_ALLTOALL } cf_operation;
// What is computed, and on which side of the communication:
// all-gather computes after it (on arriving slices), reduce-scatter before it (partial sums),
// all-to-all on either side or on both: slices are computed, travel, and are worked on where they arrive.
// CF_NO_COMPUTE moves data only.
typedef enum { CF_NO_COMPUTE, CF_COMPUTE_BEFORE, CF_COMPUTE_AFTER, CF_COMPUTE_BOTH } cf_side;
// Those before NOWIRE move data, and tests compare them. NOWIRE and IDEAL are bounds: their results are wrong.
// AUTO stands for one of the first three, chosen for each operation (choice.h).
typedef enum {
    CF_MODE_NONE,
    CF_MODE_SLICE,
    CF_MODE_COMMFUSE,
    CF_MODE_NOWIRE, // commfuse without its transfers: what slices cost is in it
    CF_MODE_IDEAL,  // none without its transfers: one computation, the bound of all
    CF_MODE_AUTO,
    CF_MODE_OWN, // a generator of the caller's (cf_schedule_start)
    CF_MODES
} cf_mode;
// How slices travel.
//   CF_RING    to the neighbour, one slice after another. (all-to-all: as DIRECT)
//   CF_DIRECT  straight to the rank that needs it, one slice after another
//   CF_ONCE    straight, all of them at once, for slices too small to hide a transfer each: one unit of exchanges, beside
//              the computation of the own shard; the other ranks' shards are computed together. m is 1
// The order of a reduce-scatter's sums does not depend on the route. The order in which an all-gather's slices are worked on
// (rank r: its own, then those of r − 1, r − 2, …) is the same for RING and DIRECT, so these two give the same bits.
typedef enum { CF_RING, CF_DIRECT, CF_ONCE, CF_ROUTES } cf_route;

typedef enum { CF_COMPUTE, CF_EXCHANGE, CF_ADD, CF_COPY, CF_COLLECTIVE } cf_step_kind;
typedef enum { CF_FULL, CF_STAGE, CF_RESULT } cf_buffer;

typedef struct cf_place { // one slice of one buffer
    cf_buffer buffer;
    int slot; // FULL: slice number; STAGE: slot; RESULT: slice number (all-to-all) or k (reduce-scatter)
} cf_place;

typedef struct cf_step {
    cf_step_kind kind;
    int wait[2]; // indices of earlier steps that must be done first (transfers: have arrived); -1: none
    bool range;  // COMPUTE and ADD: waits for all steps from wait[0] to wait[1]
    // COMPUTE and COLLECTIVE: slices first, first + stride, …, `count` of them; ADD: so many parts of the sum, m slots apart
    int first, count, stride;
    // COMPUTE: CF_COMPUTE_BEFORE writes slices that will travel, CF_COMPUTE_AFTER reads those that have
    // arrived, the first of them at `at`
    cf_side side;
    bool accumulate; // adds to the sum at `at` instead of writing
    // ADD:     at = ((from + the part m slots further) + …) + at, the last not if `at` is the first of the parts.
    // COPY:    at = from (the own slices of an all-to-all without compute).
    // EXCHANGE: sends `from`, receives into `at`.   COLLECTIVE: from → at
    cf_place at, from;
    // EXCHANGE: one send, one receive; between GPUs those of a group run one after another, in the order posted. Those that
    // are `joined` to the exchange before them form one unit with it: posted together, they run at the same time.
    bool joined;
    // Group ranks; -1: this half is absent. Slice numbers name what travels (message tags):
    // all-gather and reduce-scatter: of FULL; all-to-all: destination · m + k on both sides.
    int send_to, send_slice;
    int recv_from, recv_slice;
} cf_step;

typedef struct cf_schedule {
    cf_operation operation;
    cf_side side;
    cf_mode mode;
    cf_route route;
    int ranks, rank, slices; // N, r, m (or M)
    // FULL is ordered [owner][k] except for a sliced reduce-scatter: [k][owner], so that each native
    // collective finds its N slices side by side.
    bool slice_major;
    bool folds;      // reduce-scatter: own slices but the last are computed onto the sums that have arrived
    int stage_slots; // STAGE slots used
    cf_place result; // reduce-scatter: first slice of the reduced own shard
    bool blocking;   // COLLECTIVE steps are waited for where they are (mode none)
    int begin;       // cf_fuse_begin() takes steps [0, begin), cf_fuse_finish() the rest
    int count;
    cf_step *step;
} cf_schedule;

// The schedule of group rank `rank` of `ranks`. slices >= 1: slices per rank's shard: m of commfuse and nowire, M of slice;
// ignored (1) by none and ideal, without compute, by route ONCE and on one rank. Without compute nothing hides a transfer, so all
// of them travel at once: the route is ONCE.
//
// folds: the computation of a reduce-scatter can add to what is there. With m >= 2 slices the own slices 0 … m − 2,
// last of all, are then computed onto the sums that have arrived for them, which saves an addition each. Slice m − 1 is
// computed first of the own ones, without its sum, which arrives last of all and is added at the very end: so no
// computation waits for it, and whatever hides without folding hides with it.
// NULL on an error, such as a side on which the operation does not compute.
cf_schedule *cf_schedule_create(cf_operation operation, cf_side side, cf_mode mode, cf_route route, int ranks, int rank, int slices,
                                bool folds);
void cf_schedule_free(cf_schedule *schedule);

// A schedule of your own: a list without steps, of mode OWN, which the following fill; then set `begin`, and `stage_slots`
// (a multiple of m) if it uses the stage. Each appends a step and returns its index, for later steps to wait for; -1 for a wait
// is none. What is not an argument (range, accumulate, joined) is set in schedule->step[index]. Plans take a function that
// makes such a schedule for any rank (fuse.h), and cf_schedule_check() says what is wrong with it.
cf_schedule *cf_schedule_start(cf_operation operation, cf_side side, int ranks, int rank, int slices);
int cf_append_compute(cf_schedule *s, cf_side side, cf_place at, int first, int count, int wait); // slices first, first + m, …
int cf_append_exchange(cf_schedule *s, int send_to, cf_place from, int send_slice, int recv_from, cf_place at, int recv_slice,
                       int wait0, int wait1);
int cf_append_add(cf_schedule *s, cf_place at, cf_place from, int parts, int wait0, int wait1); // several parts: range
int cf_append_copy(cf_schedule *s, cf_place at, cf_place from, int wait);
int cf_append_collective(cf_schedule *s, cf_place from, cf_place at, int first, int wait); // slices first, first + m, …, N of them

// Does it run beside the compute stream?
static inline bool cf_on_wire(const cf_step *step) {
    return step->kind == CF_EXCHANGE || step->kind == CF_COLLECTIVE;
}

// The n-th of the steps that a step waits for; -1: there are no more.
static inline int cf_nth_wait(const cf_step *step, int n) {
    if (step->range) return step->wait[0] + n <= step->wait[1] ? step->wait[0] + n : -1;
    for (int i = 0; i < 2; i++)
        if (step->wait[i] >= 0 && n-- == 0) return step->wait[i];
    return -1;
}

// First row of slice k, 0 <= k <= m, of a shard of `rows` rows: sizes differ by at most one row.
int64_t cf_schedule_row(const cf_schedule *schedule, int64_t rows, int k);

// One readable line per step, into a malloc'ed string: to look at, and for tests that fail.
char *cf_schedule_print(const cf_schedule *schedule);
const char *cf_operation_name(cf_operation operation);
const char *cf_mode_name(cf_mode mode);
const char *cf_route_name(cf_route route);
// The other way round; false: there is none of that name.
bool cf_mode_of(const char *name, cf_mode *mode);
bool cf_route_of(const char *name, cf_route *route);
// Point-to-point transfers between partial computations (commfuse, nowire, which leaves the transfers out, and auto,
// which has native collectives only where they are shorter), rather than native collectives throughout.
bool cf_mode_is_fused(cf_mode mode);

CF_EXTERN_C_END
#endif
