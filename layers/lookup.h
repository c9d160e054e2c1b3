// The token embedding through schedules: lookup forward, scatter-add of its gradient backward.
//
// The table is split by rows over the tp group (TPSP) or whole on every rank (UP). The ranks that together hold one copy of
// it look tokens up among themselves:
//
//   forward    lookup of the rows held here ▸ reduce-scatter
//   backward   all-gather ▸ scatter-add into the local gradient
//
// But the table is also the largest bucket (params.h): ranks that hold the same part of different copies own it row by row.
// It is needed at the very start of forward, when its gather has just begun, and tied to the head, so that its gradient is
// complete only at the very end of backward: a whole table would travel with nothing to hide it. So the pass after an update
// and the pass before one exchange rows with their owners, each row that a rank's tokens name once:
//
//   forward    fetch these rows ▸ as above, with them for a table: the layers hide the gather of the table
//   backward   as above, into a gradient of these rows ▸ deliver it to the owners, who add it to their shards, rank by
//              rank: the head's part was sent at the start of backward
//
// All ranks know all tokens, so all know the longest list of rows that one rank wants of one owner, and as many travel
// between any two. These are never more than a rank's tokens, nor than an owner's rows: not more than the whole table.
// Forward copies rows, so its bits are the same either way.
#ifndef LOOKUP_H
#define LOOKUP_H

#include <stdio.h>
#include "overlap.h"
#include "params.h"

CF_EXTERN_C_BEGIN

// N ranks hold a copy of the table; Ts, B: of the pass in progress.
typedef struct lookup {
    cf_context *context;
    const parameters *p;
    const cf_group *split, *owners; // the N ranks; those that own rows of the same part of the table
    int64_t part, owned;            // rows of that part, rows of one owner
    cf_fuse *forward, *backward;    // over split
    // What every call of embedding.h works on:
    const int32_t *tokens; // (N · Ts, B) numbers of rows, of which there are here
    int64_t first, count;  // [first, first + count)
    const real *table;     // (count, C) of lookup
    precise *gradient;     // (count, C) of scatter-add
    int64_t Ts, B;
    real *scratch;
    bool by_rows; // rows travel between owners rather than the whole table; what follows is for this alone
    cf_fuse *ids, *fetch, *deliver;
    int64_t rows, rows_most; // that travel between two owners in this pass; in any
    bool rows_known;         // of this micro-batch
    bool delivering;
    int32_t *all_tokens;     // (owners, N · Ts · B); then this rank's are places in (owners, rows), −1: not here
    int32_t *wanted;         // (owners, rows) by rank: the rows of this owner that it wants; −1: no more
    void *leaving, *arrived; // (owners, rows, C) real or precise
    int32_t *host_tokens, *host_wanted, *named_by, *number, *length; // the host's: see list_rows()
} lookup;

// split: ranks that together hold one copy: tp group, or this rank alone. Ts · B: tokens of each at most.
void lookup_create(lookup *l, cf_context *context, const parameters *p, const cf_group *split, int64_t Ts, int64_t B, overlap o);
void lookup_free(lookup *l);

// x (Ts, B, C) = rows of wte for inputs (N · Ts, B), in two parts, so that other computation can hide the transfers.
// scratch (N · Ts, B, C), not to be touched in between.
// only_owned: of the table only this rank's shard is complete; needs l->by_rows.
void lookup_forward(lookup *l, const int32_t *inputs, int64_t Ts, int64_t B, bool only_owned, real *scratch);
void lookup_finish_forward(lookup *l, real *x);
// The gradient dx (Ts, B, C) of x is added to wte's, in two parts or three. dx may change after the first, inputs (those of
// forward) and scratch only after the second. last: with l->by_rows the third must follow, and the second only begins to
// deliver the rows; the third adds them to the reduced gradient of the owned shard, and otherwise does nothing.
void lookup_backward(lookup *l, const real *dx, const int32_t *inputs, bool last, real *scratch);
void lookup_finish_backward(lookup *l);
void lookup_finish_delivery(lookup *l, precise *shard);

void lookup_explain(const lookup *l, FILE *out); // a line for --dry-run: which way, and why

CF_EXTERN_C_END
#endif
