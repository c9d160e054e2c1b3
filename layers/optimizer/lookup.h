// The token embedding through schedules: lookup forward, scatter-add of its gradient backward.
//
// The table is split by rows over the tp group (TPSP) or whole on every rank (UP). The ranks that together hold one copy look
// tokens up among themselves:
//
//   forward    lookup of the rows held here ▸ reduce-scatter
//   backward   all-gather ▸ scatter-add into the local gradient
//
// But the table is also the largest bucket (params.h), whose rows are owned by the ranks that hold the same part of different
// copies. The lookup needs it at the very start of forward, and its gradient is complete only at the very end of backward: the
// whole table would be communicated with nothing to hide it. So the pass after an update and the pass before one exchange only the rows
// that a rank's tokens name, each once, with their owners:
//
//   forward    fetch these rows ▸ as above, with these rows as the table: the layers hide the gather of the whole table
//   backward   as above, into a gradient of these rows ▸ deliver it to the owners, who add it to their shards rank by rank.
//              (The gradient of the head, which uses the same table, was sent at the start of backward.)
//
// All ranks know all tokens, hence the longest list of rows that one rank wants from one owner: as many rows are sent between any
// two. That is never more than a rank's tokens or an owner's rows, so in total never more than the whole table. Forward copies
// rows, so its bits do not depend on this.
#pragma once
#include "../overlap.h"
#include "../params.h"

// N ranks hold one copy of the table; Ts, B: of the pass in progress.
typedef struct lookup {
    cf_context *context;
    const parameters *p;
    const cf_group *split, *owners; // the N ranks; the owners of the same part of the table
    int64_t part, owned;            // rows of that part, of one owner
    cf_fuse *forward, *backward;    // over split
    // Arguments of embedding.h in this pass:
    const int32_t *tokens; // (N · Ts, B) row numbers; rows [first, first + count) are here
    int64_t first, count;
    const real *table; // (count, C) read by the lookup
    accum *gradient;   // (count, C) written by the scatter-add
    int64_t Ts, B;
    real *scratch;
    bool by_rows; // owners exchange rows; all below is for this alone
    cf_fuse *ids, *fetch, *deliver;
    int64_t rows, rows_most; // that are sent between two owners in this pass, in any
    bool rows_known;         // in this micro-batch
    bool delivering;
    int32_t *all_tokens;     // (owners, N · Ts · B); then this rank's are places in (owners, rows), −1: not here
    int32_t *wanted;         // (owners, rows) the rows of this owner that each rank wants, then −1
    void *leaving, *arrived; // (owners, rows, C) real or accum
    int32_t *host_tokens, *host_wanted, *named_by, *number, *length; // host memory: see list_rows()
} lookup;

// split: ranks that together hold one copy: tp group, or this rank alone. Ts · B: tokens of each at most.
void lookup_create(lookup *l, cf_context *context, const parameters *p, const cf_group *split, int64_t Ts, int64_t B,
                   const overlap *o);
void lookup_free(lookup *l);

// x (Ts, B, C) = rows of wte for inputs (N · Ts, B), in two calls, so that computation between them hides the transfers.
// scratch (N · Ts, B, C): in use between them.
// only_owned: only this rank's shard of the table is complete; needs l->by_rows.
void lookup_forward(lookup *l, const int32_t *inputs, int64_t Ts, int64_t B, bool only_owned, real *scratch);
void lookup_finish_forward(lookup *l, real *x);
// Adds dx (Ts, B, C), the gradient of x, to that of wte, in three calls. dx may change after the first; inputs (those of forward)
// and scratch are in use until the second. With `last` and l->by_rows the second begins to deliver the rows, and the third adds
// them to `shard`, the reduced gradient of the owned rows; otherwise the third does nothing.
void lookup_backward(lookup *l, const real *dx, const int32_t *inputs, bool last, real *scratch);
void lookup_finish_backward(lookup *l);
void lookup_finish_delivery(lookup *l, accum *shard);

void lookup_explain(const lookup *l, FILE *out); // a line for --dry-run: what is communicated, and why
