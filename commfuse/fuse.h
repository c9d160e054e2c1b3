// The executor: runs any schedule with a compute callback, a device stream and a transport.
//
// A cf_fuse is one operation: schedule, staging memory and requests. It is created before the first training step and run
// any number of times, with any payload up to its capacity. Several may be in flight at a time if all ranks of the group begin
// them in the same order. Other computation, between begin and finish, hides the remaining transfers.
//
// An example, threads, lifetimes, units and errors as values: context.h.
#pragma once
#include "choice.h"
#include "context.h"

CF_EXTERN_C_BEGIN

// The part of the payload that one call of the callback works on: `blocks` blocks of `rows` rows each. Block i is rows
// [row + i·row_stride, …+ rows) of the N · rows_per_rank rows of the payload, at data + i · data_stride bytes.
// CF_COMPUTE_AFTER: read it. CF_COMPUTE_BEFORE: write it.
// callback_adds_last: a reduce-scatter then makes calls with CF_COMPUTE_AFTER for own slices, one or several at a time, one call
// after another. If a slice lacks its last addition, the callback makes it: see `sum`.
//
// For example N = 2, m = 2 and shards of 3 rows: slice 0 of a shard is its first row, slice 1 the other two, and rows 0 to 2 are rank
// 0's. It sees these calls, row+rows of each block:
//   ring:2   all-gather      after 0+1, after 1+2, after 3+1, after 4+2        the own first, then as they arrive
//   ring:2   reduce-scatter  before 3+1, before 4+2, before 0+1, before 1+2    the first two leave at once
//                            after 0+1, after 1+2                              with callback_adds_last; each adds one part
//   slice:2  reduce-scatter  before 0+1 3+1, before 1+2 4+2                    two blocks, side by side in memory; row_stride 3
//   none     all-gather      after 0+6                                         one block
typedef struct cf_span {
    cf_side side;
    int64_t row, rows;
    int blocks;
    int64_t row_stride; // rows between the starts of two blocks
    char *data;
    int64_t data_stride; // bytes between the starts of two blocks
    cf_sum sum;          // (device.h) reduce-scatter, CF_COMPUTE_AFTER; sum.to is data
} cf_span;
// begin() makes the calls with CF_COMPUTE_BEFORE, finish() those with CF_COMPUTE_AFTER (begin() too, where a schedule of your own
// makes the last addition of a sum before its `split`). The callback enqueues all its work on `stream`: the context's or, for an
// `independent` operation, also its second one. The callback of others may run operations. It cannot fail: it notes an error in its
// argument and returns.
typedef void cf_compute(void *argument, const cf_span *span, cf_stream *stream);

// How soon computation waits for an operation. Early: it is begun well before it is finished, so no call may block. Bulk: early and
// large (gradients, weights), so messages posted later may overtake its own. (Of a group: mesh.h)
typedef enum { CF_URGENT, CF_EARLY, CF_BULK } cf_urgency;

// It grows only at its end, and what an older program leaves out is zero.
typedef struct cf_fuse_config {
    const char *name; // for messages and traces, "mlp.fc2"; must outlive the operation
    const cf_group *group;
    cf_operation operation;
    cf_side side;
    // A row of the table (schedule.h); NULL: chosen (choice.h). If it is not in the table, create makes
    // the schedules of all ranks and checks them (cf_schedule_check).
    const cf_algorithm *algorithm;
    int slices;        // of each rank's shard
    cf_dtype dtype;    // of a reduce-scatter: not CF_BYTE
    int64_t capacity;  // of one rank's shard, elements
    bool result_given; // all-to-all: the caller sets the place of the result before every begin
    cf_urgency urgency;
    bool independent;        // two calls of compute may run at the same time
    bool callback_adds_last; // reduce-scatter: the callback makes the last addition of each own slice (cf_span.sum)
    // Where algorithm and slices are chosen:
    double flops; // of all slices on one rank
} cf_fuse_config;

typedef struct cf_fuse cf_fuse;

// NULL on an error, which names the field of the config.
cf_fuse *cf_fuse_create_sized(cf_context *context, const cf_fuse_config *config, size_t bytes);
static inline cf_fuse *cf_fuse_create(cf_context *context, cf_fuse_config config) {
    return cf_fuse_create_sized(context, &config, sizeof config);
}
bool cf_fuse_free(cf_fuse *fuse); // NULL is allowed; false on an error: it is running
const cf_schedule *cf_fuse_schedule(const cf_fuse *fuse);
const cf_fuse_config *cf_fuse_get_config(const cf_fuse *fuse); // with algorithm and slices of the current choice
cf_work cf_fuse_work(const cf_fuse *fuse);

// Gives the operation several choices instead of the one that it was created with; the first becomes current. Memory is allocated
// for the largest of them. *bytes: what may still be allocated. A choice that needs more, beyond those before it, is
// removed from the list; otherwise what it needs is subtracted. Returns the number of choices left. All ranks call this with the
// same list and bytes, before the first run.
int cf_fuse_set_choices(cf_fuse *fuse, cf_choice *choices, int count, int64_t *bytes);
void cf_fuse_choose(cf_fuse *fuse, int choice); // from the next run on; on all ranks of the group between the same two runs
// The time that a run added to the compute stream, waiting included: the median of the runs begun with context.timed since the last
// call, of 64 at most. The stream has been synchronised. NAN: no run.
double cf_fuse_median_ms(cf_fuse *fuse);
// Adds the time since the last run finished to that run: for work that other choices do inside the operation.
void cf_fuse_extend_timing(cf_fuse *fuse);

// The place for the result (ranks · capacity elements) of the next run, and of that one alone, of an operation with result_given.
void cf_fuse_set_result(cf_fuse *fuse, void *result);

// Payload: `full` holds ranks · rows_per_rank rows of row_elements elements, rank i's shard at row i · rows_per_rank. all-gather:
// the own shard must be in place. compute and argument: NULL without compute. layer: for messages and traces, -1 none.
// rows_per_rank may be smaller than the number of slices. false on an error; wrong arguments are refused before anything is done.
bool cf_fuse_begin(cf_fuse *fuse, void *full, int64_t rows_per_rank, int64_t row_elements, cf_compute *compute, void *argument,
                   int layer);
// Runs the remaining steps. Returns: reduce-scatter: the reduced own shard (callback_adds_last: perhaps without its last addition);
// all-to-all: slices by source (with compute after, the own ones stay in full unless a native collective moves them); all-gather:
// full. Valid until the next begin. NULL on an error.
void *cf_fuse_finish(cf_fuse *fuse);
// begin and finish. NULL on an error.
void *cf_fuse_run(cf_fuse *fuse, void *full, int64_t rows_per_rank, int64_t row_elements, cf_compute *compute, void *argument,
                  int layer);

// Blocks until all members of the group have called it. false on an error.
bool cf_barrier(cf_context *context, const cf_group *group);

CF_EXTERN_C_END
