// The token embedding through schedules: lookup forward, scatter-add of its gradient backward.
//
// The table is split by rows over the tp group (TPSP) or whole on every rank (UP). Every pass can look it up near by,
// among the ranks that together hold one copy of it:
//
//   forward    lookup of the rows held here ▸ reduce-scatter
//   backward   all-gather ▸ scatter-add into the local gradient
//
// But the table is also the largest bucket (params.h), needed at the very start of forward when its gather
// has just begun, and tied to the head, so that its gradient is complete only at the very end of backward:
// both would leave the transfers of a whole table exposed. So if it leaves fewer bytes at the two ends of a step, the
// pass after an update and the pass before one go far, over the world, with only the rows that are looked up and the
// shard of the table that each rank owns:
//
//   forward    lookup of the rows owned here ▸ reduce-scatter: the layers hide the gather of the table
//   backward   all-gather ▸ scatter-add into the owned shard: the head's part was sent at the start of backward
//
// Both add the same numbers (one row and zeros) in forward, so the bits are the same.
#ifndef LOOKUP_H
#define LOOKUP_H

#include <stdio.h>
#include "hooks.h"
#include "params.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lookup {
    cf_context *context;
    const cf_mesh *mesh;
    const parameters *p;
    const cf_group *near;                      // holds one copy of the table together
    bool far;                                  // rows go over the world, rather than the whole table
    cf_fuse *near_forward, *near_backward;     //
    cf_fuse *ids, *far_forward, *far_backward; // far only
    int32_t *tokens;                           // (world, Ts, B) far only
    real *rows;                                // (world, Ts, B, C) far only
    const real *table;                         // (count, C) of lookup
    precise *gradient;                         // (count, C) of scatter-add
    int64_t first, count;                      // rows of the vocabulary looked up or scattered
    const int32_t *inputs;                     // tokens of the payload's rows
    int64_t Ts, B;                             // of the pass in progress
    int64_t dense, sparse;                     // bytes per rank at both ends of a step, the two ways
    bool have_tokens;                          // of all ranks, of this pass
    cf_fuse *looking, *scattering; // the operation that is begun, forward and backward; NULL: none
} lookup;

// T, B: capacity. near: tp group, or this rank alone.
void lookup_create(lookup *l, cf_context *context, const cf_mesh *mesh, const parameters *p,
                   const cf_group *near, int64_t T, int64_t B, overlap o);
void lookup_free(lookup *l);

// x (Ts, B, C) = rows of wte for inputs (near->size · Ts, B), in two parts, so that other computation can hide the
// transfers. scratch (near->size · Ts, B, C), not to be touched in between.
// fresh: only the owned shard of the table is complete; needs l->far.
void lookup_forward(lookup *l, const int32_t *inputs, int64_t Ts, int64_t B, bool fresh, real *scratch);
void lookup_finish_forward(lookup *l, real *x);
// The gradient dx (Ts, B, C) of x is added to wte's: begun here, so that other computation can hide its transfers.
// dx may change afterwards, inputs (those of forward) and scratch may not. What must follow before anything else
// is asked of l: with last and far lookup_finish_far, which adds to the reduced gradient of the owned shard,
// otherwise lookup_finish_near, which adds to the local one. Each does nothing where the other is asked for.
void lookup_backward(lookup *l, const real *dx, const int32_t *inputs, bool last, real *scratch);
void lookup_finish_near(lookup *l);
void lookup_finish_far(lookup *l, precise *shard);
// Must the whole table's gradient travel after the lookup's part was added to it?
bool lookup_holds_up_table(const lookup *l);

void lookup_explain(const lookup *l, FILE *out); // a line for --dry-run: which way, and why

#ifdef __cplusplus
}
#endif
#endif
