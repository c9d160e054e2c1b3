// Schedules: which rank computes and sends which slice, and when, as pure data. No MPI, no CUDA, no input or output.
//
// N ranks share a payload of N shards, one per rank. Each shard is cut into m slices; slice k of rank `owner` is slice number
// s = owner · m + k, 0 <= s < N · m. A schedule is ONE rank's list of steps. COMPUTE, ADD and COPY run one after another on the
// compute stream. EXCHANGE and COLLECTIVE, the transfers, are posted when the list reaches them and run during the steps that
// follow. Each step names the earlier steps that it must wait for. (arXiv 2604.24013: Algorithm 1 is all-gather by ring, 2
// reduce-scatter by ring, 3 their use in linear layers, 4 Query-Split attention, 5 all-to-all.)
//
// Buffers of a step:
//   CF_FULL    the caller's payload. all-gather: this operation fills it, the own shard is there from the start.
//              reduce-scatter: this rank's partial sums. all-to-all: slices by destination.
//   CF_STAGE   slots of one slice each, allocated by the operation: partial sums in transit.
//   CF_RESULT  all-to-all: slices by source. Exchanges do not move the own slices: with CF_COMPUTE_BEFORE or BOTH they are computed
//              here, with CF_COMPUTE_AFTER they are read from FULL. reduce-scatter by a native collective: the reduced own
//              shard.
// The reduced own shard of a reduce-scatter is at cf_schedule.result.
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include "base/extern_c.h"

CF_EXTERN_C_BEGIN

typedef enum { CF_ALLGATHER, CF_REDUCE_SCATTER, CF_ALLTOALL } cf_operation;
// On which side of the communication slices are computed. all-gather: after it (reads the slices that arrive). reduce-scatter:
// before it (writes partial sums). all-to-all: before, after or both. CF_NO_COMPUTE moves data only.
typedef enum { CF_NO_COMPUTE, CF_COMPUTE_BEFORE, CF_COMPUTE_AFTER, CF_COMPUTE_BOTH = CF_COMPUTE_BEFORE | CF_COMPUTE_AFTER } cf_side;
// Bit of an operation with computation on that side, in cf_algorithm.serves.
#define CF_SERVES(operation, side) (1u << (4 * (operation) + (side)))

typedef enum { CF_COMPUTE, CF_EXCHANGE, CF_ADD, CF_COPY, CF_COLLECTIVE } cf_step_kind;
typedef enum { CF_FULL, CF_STAGE, CF_RESULT } cf_buffer;

typedef struct cf_place { // one slice of one buffer
    cf_buffer buffer;
    int slot; // FULL: slice number; STAGE: slot; RESULT: slice number (all-to-all) or k (reduce-scatter)
} cf_place;

typedef struct cf_step {
    cf_step_kind kind;
    int wait[2]; // earlier steps that must be done first (transfers: have arrived), as cf_append() numbers them; 0: none
    bool range;  // COMPUTE and ADD: waits for all steps from wait[0] to wait[1]
    // COMPUTE and COLLECTIVE: `count` slices: first, first + m, …   ADD: `count` parts of the sum, m slots apart
    int first, count;
    // COMPUTE: CF_COMPUTE_BEFORE writes slices that will travel, CF_COMPUTE_AFTER reads slices that have arrived; the first of
    // them is at `at`
    cf_side side;
    // ADD: at = ((from + the part m slots further) + …) + at
    // COPY: at = from (the own slices of an all-to-all without compute)
    // EXCHANGE: sends `from`, receives into `at`.   COLLECTIVE: from → at
    cf_place at, from;
    // EXCHANGE: joined to the exchange before it: both are in one unit, which is posted in one call and whose exchanges run at the
    // same time. (Between GPUs the units of a group run one after another, in the order posted.)
    bool joined;
    // EXCHANGE: to a group rank, and from one; -1: this half is absent. Slice numbers (message tags) are of FULL for all-gather and
    // reduce-scatter, and destination · m + k on both sides for all-to-all.
    struct {
        int rank, slice;
    } send, recv;
} cf_step;

typedef struct cf_schedule {
    cf_operation operation;
    cf_side side;
    const struct cf_algorithm *algorithm; // which made the steps
    const struct cf_algorithm *bound;     // nowire or ideal: the transfers are left out, so results are wrong; NULL: they are there
    int ranks, rank, slices;              // N, r, m
    int hosts;                            // H, with N / H neighbouring ranks on each; 1: one, or unknown
    // FULL is ordered [owner][k]; for a reduce-scatter by several native collectives [k][owner], because each needs its N slices
    // side by side
    bool slice_major;
    int stage_slots; // STAGE slots used
    cf_place result; // reduce-scatter: first slice of the reduced own shard
    int split;       // cf_fuse_begin() runs steps [0, split), cf_fuse_finish() the rest
    int count;
    cf_step *step;
    int64_t room; // steps that `step` has room for
    int *posted;  // [N · m] the generator's scratch: number of the exchange of round i and slice k; NULL once it is done
} cf_schedule;

// --- how schedules are made ---

// Appends the steps of rank s->rank, then sets s->split, and stage_slots (a multiple of m) if it uses the stage. false: it has no
// schedule for so many ranks or slices.
typedef bool cf_generator(cf_schedule *s, const void *argument);
// Appends a step, in which 0 is what is left out. Returns its number, for later ones to wait for: that of s->step[i] is i + 1. (A bound
// leaves transfers out, which then have number 0, and all waits.)
int cf_append(cf_schedule *s, cf_step step);

// A row of the table in schedule.c, or one of your own. Its name is the same on the command line, in plans, logs and documents.
typedef struct cf_algorithm {
    const char *name, *help;
    unsigned serves;      // operations, of CF_SERVES
    const char *fallback; // the name of the row that serves the others; NULL: they are errors
    cf_generator *generate;
    const void *argument;   // of generate
    const char *same_bits;  // the name of a row: runs have the same bits with all that name the same one; NULL: with none
    int slices, max_slices; // of a shard: the default, the most
    bool native;            // calls collectives of the library: not in groups without them
    bool blocking;          // each COLLECTIVE is waited for before the next step: not for what is begun early
    bool tail_free;         // CommFuse's promise: the first computation waits for no transfer, the last has none after it
    bool rank_symmetric;    // the exchanges of rank r are rank 0's, shifted (cf_schedule_shifted), so one stands for all (replay.h)
    bool levels; // of two levels: for several hosts with several ranks on each, its places. A host's places form a circle,
        // and so do the hosts. A slice's sum is ((that of the host after its owner's + …) + parts of the owner's host
        // in the order of their places) + the owner's; a host's sum ends with the owner's place
    bool bound; // `fallback` without its transfers: the results are wrong
} cf_algorithm;

// The table. An alias (no operations, not a bound) is another name of its `fallback`.
extern const cf_algorithm cf_algorithms[];
extern const int cf_algorithm_count;
const cf_algorithm *cf_algorithm_find(const char *name); // NULL: none has it
// The one that makes the schedule of this operation: itself, or the first `fallback` that serves it. NULL: none.
const cf_algorithm *cf_algorithm_serving(const cf_algorithm *algorithm, cf_operation operation, cf_side side);

// The schedule of group rank `rank` of `ranks`, on `hosts` hosts (cf_group). slices >= 1: slices of a shard, m; it is 1 without
// compute, on one rank, and where the algorithm has no more. On one rank, native algorithms have the schedule of ring.
// NULL on an error, such as a side on which the operation does not compute.
cf_schedule *cf_schedule_create(cf_operation operation, cf_side side, const cf_algorithm *asked, int ranks, int hosts, int rank,
                                int slices);
void cf_schedule_free(cf_schedule *schedule);

// EXCHANGE and COLLECTIVE: they run during the compute stream's work.
static inline bool cf_is_transfer(const cf_step *step) {
    return step->kind == CF_EXCHANGE || step->kind == CF_COLLECTIVE;
}

// The index of the n-th step that a step waits for; -1: no more.
static inline int cf_nth_wait(const cf_step *step, int n) {
    if (step->range) return step->wait[0] + n <= step->wait[1] ? step->wait[0] + n - 1 : -1;
    for (int i = 0; i < 2; i++)
        if (step->wait[i] > 0 && n-- == 0) return step->wait[i] - 1;
    return -1;
}

// Which rank is to rank `to` as `rank` is to `from`: on the circle of ranks or, of two levels, on that of hosts and that of places.
static inline int cf_schedule_shifted(const cf_schedule *s, int rank, int from, int to) {
    const int H = s->algorithm->levels ? s->hosts : 1, P = s->ranks / H;
    return (rank / P + to / P - from / P + H) % H * P + (rank % P + to % P - from % P + P) % P;
}

// One readable line per step, as a malloc'ed string.
char *cf_schedule_print(const cf_schedule *schedule);
const char *cf_operation_name(cf_operation operation);

CF_EXTERN_C_END
