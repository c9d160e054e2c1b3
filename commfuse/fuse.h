// The executor: runs any schedule with a compute callback, a device stream and a transport.
// It knows no algorithm: it walks the list, waits for what a step names, and does what the step says.
//
// A cf_fuse is one planned operation: schedule, staging memory and requests, made before the first step
// and run as often as wanted, with any payload up to its capacity. Several may be in flight at a time,
// if all ranks of the group begin them in the same order.
//
//     cf_fuse *rs = cf_fuse_create(&context, (cf_fuse_plan){.name = "mlp.fc2", …});
//     float *mine = cf_fuse_run(rs, partial, rows, row_elements, gemm, &args, layer);
// or begin; other compute; finish, so that other compute hides what is left of the transfers.
//
// Who calls what, how long things live, and errors as values: context.h.
#ifndef CF_FUSE_H
#define CF_FUSE_H

#include "choice.h"
#include "context.h"
#include "schedule.h"
#include "extern_c.h"

CF_EXTERN_C_BEGIN

// The part of the payload one call of the callback works on: `blocks` runs of `rows` consecutive rows.
// Block i is rows [row + i·row_stride, …+ rows) of the N · rows_per_rank rows of the payload and is at
// data + i · data_stride bytes. side CF_COMPUTE_AFTER: read it. CF_COMPUTE_BEFORE: write it, or, if accumulate
// (only where the plan says that it folds), add to it.
typedef struct cf_span {
    cf_side side;
    bool accumulate;
    int64_t row, rows;
    int blocks;
    int64_t row_stride; // rows between the starts of two blocks
    char *data;
    int64_t data_stride; // bytes between the starts of two blocks
} cf_span;
// begin() makes the calls with CF_COMPUTE_BEFORE, finish() those with CF_COMPUTE_AFTER, or with accumulate. All that a callback
// enqueues goes to `stream`, which is the context's or, if the plan says `apart`, its second one. A callback may run other
// operations, but not where the plan says `apart`. It has no way to fail: what went wrong in it, it notes in its argument, and
// computes on.
typedef void cf_compute(void *argument, const cf_span *span, cf_stream *stream);

// Makes the schedule of any rank (cf_schedule_start), the same whoever calls it; NULL: it cannot. The operation frees it.
typedef cf_schedule *cf_generator(int ranks, int rank, int slices);

typedef struct cf_fuse_plan {
    const char *name; // for messages and traces, "mlp.fc2"; must outlive the operation
    const cf_group *group;
    cf_operation operation;
    cf_side side;
    cf_mode mode;
    cf_route route;
    int slices;              // of each rank's shard
    cf_generator *generator; // of mode OWN: create calls it for all ranks, and refuses what cf_schedule_check() does
    cf_dtype dtype;
    int64_t capacity;  // elements of one rank's shard, at most
    bool result_given; // all-to-all: the caller says before every begin where the result goes
    bool folds;        // reduce-scatter: compute can add to what is there, and what it writes elsewhere is new
    bool bulk;         // much, and not needed soon: what is posted later may pass it (weights, their gradients)
    bool apart;        // no call of compute needs what another does, or it orders that itself: two may run at a time
    // For CF_MODE_AUTO, where mode, route and slices are chosen (choice.h):
    double flops; // of one rank's computation of all slices
    bool early;   // begun well before it is finished
} cf_fuse_plan;

typedef struct cf_fuse cf_fuse;

cf_fuse *cf_fuse_create(cf_context *context, cf_fuse_plan plan); // NULL on an error
bool cf_fuse_free(cf_fuse *fuse);                                // NULL is allowed; false on an error: it runs
const cf_schedule *cf_fuse_schedule(const cf_fuse *fuse);
const cf_fuse_plan *cf_fuse_get_plan(const cf_fuse *fuse); // mode, route and slices: of the way that it takes now
cf_work cf_fuse_work(const cf_fuse *fuse);

// Ways in which the operation may run, instead of the one that it was created with; it takes the first. Memory is that of the
// largest: a way that would take more than *room bytes beside those before it is removed from the list, what others take is taken
// off *room. Returns how many ways are left. All ranks offer the same, in the same order, with the same room, before the first
// run. Not with checksums (context.check).
int cf_fuse_offer(cf_fuse *fuse, cf_choice *ways, int count, int64_t *room);
// From the next run on it takes that one; on all ranks of the group between the same two runs.
void cf_fuse_take(cf_fuse *fuse, int way);
// What the runs since the last call, begun while context.timed, added to the compute stream, waiting included: the median of
// at most 64. The stream has been synchronised. NAN: none.
double cf_fuse_spent_ms(cf_fuse *fuse);
// Its last run is finished; what was computed since counts as the run's: the same work that other ways do within it.
void cf_fuse_include(cf_fuse *fuse);

// Where the slices by source of an all-to-all planned with result_given go in its next run, and in that
// alone: ranks · capacity elements.
void cf_fuse_result(cf_fuse *fuse, void *result);

// Payload: `full` holds ranks · rows_per_rank rows of row_elements elements, rank i's shard at row
// i · rows_per_rank. all-gather: the own shard must be in place. compute and argument: NULL without
// compute. layer: for messages and traces, -1 none. rows_per_rank may be smaller than the number of slices.
// false on an error; refused before anything is done if an argument is wrong.
bool cf_fuse_begin(cf_fuse *fuse, void *full, int64_t rows_per_rank, int64_t row_elements, cf_compute *compute, void *argument,
                   int layer);
// Take the remaining steps. Returns: reduce-scatter: the reduced own shard; all-to-all: slices by
// source (with compute after, the own ones stay in full in commfuse mode and on one rank); all-gather: full.
// Valid until the next begin. NULL on an error.
void *cf_fuse_finish(cf_fuse *fuse);
// begin and finish. NULL on an error.
void *cf_fuse_run(cf_fuse *fuse, void *full, int64_t rows_per_rank, int64_t row_elements, cf_compute *compute, void *argument,
                  int layer);

// Blocks until all members of the group are here. false on an error.
bool cf_barrier(cf_context *context, const cf_group *group);

CF_EXTERN_C_END
#endif
