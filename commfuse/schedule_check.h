// Checks that N lists of steps are one correct schedule. cf_schedule_check() looks at all ranks' lists together and names the first
// property that they violate. It is written from schedule.h alone. The tests check the generators of schedule.c with it,
// cf_fuse_create() a generator of your own.
//
//   form        waits name earlier steps; slots and peers exist and fit the slices in size; no COMPUTE without computation;
//               several slices in one step have the same k and are of several ranks
//   unit        joined exchanges follow one another, none waits for another of its unit, and no two are with one peer
//   side        each COMPUTE is on a side on which the operation computes
//   coverage    each rank computes every slice that it must, once; with compute on both sides, once on each
//   matching    a receive gets the slice that it names, so the size is the same; all ranks call the same collective
//   race        two steps of a rank that use one place, one of them writing, are ordered by waits
//   deadlock    every step of every rank completes
//   data        a step finds the data that it reads, and the result is complete
//   sum order   a reduce-scatter by exchanges adds slice j in the order j+1, j+2, …, j
//   begin       begin computes before and posts every transfer, finish computes after (all modes)
//
// They make any schedule correct. What CommFuse promises of its own schedules beyond that (their volume, own slices first or last,
// no transfer at the end) is in tests/commfuse/promise_check.h.
#pragma once
#include "schedule.h"

CF_EXTERN_C_BEGIN

enum {
    CF_CHECKED_RANKS = 512,  // at most
    CF_CHECKED_SLICES = 512, // N · m, and slots of the stage
    CF_CHECKED_STEPS = 2048, // of one rank
    CF_WHERE_TEXT = 256
};

// NULL, or the name of the property that the schedules of ranks 0 … N-1 violate; `where` then has rank, step and cause. Several
// threads may call it; they run one after another.
const char *cf_schedule_check(cf_schedule *const *schedule, char where[CF_WHERE_TEXT]);

CF_EXTERN_C_END
