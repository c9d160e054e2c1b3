// ZeRO-1: how gradients and weights travel between the ranks that share them, and when. AdamW is in optimizer.h.
//
// Every bucket of parameters (params.h) is reduce-scattered when its gradient is complete, and all-gathered after the owners of
// its shards have updated them. A bucket with one owner never travels. The loops over layers in model.c, and the optimizer, call:
//
//   forward    zero_prefetch(layer)   begins the gathers of the next layers
//              zero_wait(layer)       finishes those that this layer needs
//   backward   zero_compute()         computes the gradient of a large matrix owner by owner, this rank's rows last, and sends
//                                     each part while the next owner's is computed (commfuse)
//              zero_ready(layer)      sends the layer's other gradients, during the rest of backward
//   step       zero_finish_gradient() finishes the reductions in the order in which they began
//              zero_updated()         the shard's weights may be gathered: by zero_send_first() those that forward needs
//                                     first, by zero_prefetch() all others
//
// Exchanges begin no earlier because transfers queue: what forward needs now must not wait for all the weights. (Over MPI it
// passes them; on GPUs only in another group.) Native gathers all begin at once: one after another they slow fewer products than
// spread over forward.
#pragma once

#include <stdio.h>
#include "overlap.h"
#include "params.h"

// Weights of a bucket: complete; this rank's shard is not updated yet; it is updated; the other shards are in flight.
typedef enum { WEIGHTS_HERE, WEIGHTS_NOT_UPDATED, WEIGHTS_UPDATED, WEIGHTS_IN_FLIGHT } weights_state;
typedef enum { GRADIENT_PARTIAL, GRADIENT_IN_FLIGHT, GRADIENT_REDUCED } gradient_state;

// Where the gradient of a weight matrix is computed.
typedef enum {
    GRADIENT_NOW,       // when both its factors are complete
    GRADIENT_BY_SLICES, // slice by slice, inside the operation that brings one factor
    GRADIENT_LATER,     // as the last computation of its layer, to hide the transfers of the embedding
    GRADIENT_OWNERS     // inside the reduce-scatter of its bucket; QKV's at the time of GRADIENT_LATER
} gradient_place;

typedef struct zero_bucket {
    cf_fuse *reduce, *gather; // NULL: the bucket has one owner
    bool shares_staging;      // reduce is that of an earlier bucket of the same kind
    bool fused;               // reduce computes the gradient that it sends
    gradient_state gradient;
    weights_state weights;
    precise *shard; // (bucket's shard) this rank's shard of the reduced gradient; NULL: the update has used it
    char name[32];  // in messages and traces
} zero_bucket;

typedef struct zero_shards {
    cf_context *context;
    parameters *params;
    gradients_policy gradients;
    int64_t prefetch;        // overlap.h
    bool rows_travel;        // the lookup exchanges rows (lookup.h), so that only the head needs the whole table
    zero_bucket *bucket;     // [params->buckets]
    int *forward, *backward; // [params->buckets] in the order of forward's needs; in that of finishing reductions
    int gathers_begun;       // in forward order, since the last update
} zero_shards;

// rows: of the activations from which a weight gradient is computed.
void zero_create(zero_shards *z, cf_context *context, parameters *p, bool rows_travel, int64_t rows, const overlap *how);
void zero_free(zero_shards *z);

// In place of a layer: the token table; positions and the vectors of all layers.
enum { ZERO_TABLE = -1, ZERO_VECTORS = -2 };
void zero_prefetch(zero_shards *z, int64_t layer); // layers alone
void zero_wait(zero_shards *z, int64_t layer);
bool zero_table_is_here(const zero_shards *z); // false: only this rank's shard is complete

// Where the gradient of a matrix is computed. last: in the step's last micro-batch. arrives: the operation that brings one of its
// factors, NULL: none. (Ask again in each step: that operation's choice may have changed.) may_wait: nothing in the first layer
// waits for this gradient.
gradient_place zero_place(const zero_shards *z, int tensor, int64_t layer, bool last, const cf_fuse *arrives, bool may_wait);

// For GRADIENT_OWNERS. wgrad computes rows of the gradient: span->row and span->rows count rows of the local matrix, span->data
// is their address. job is used only during the call.
void zero_compute(zero_shards *z, int tensor, int64_t layer, cf_compute *wgrad, void *job);
// The gradients of the layer are complete: all but that of QKV's weights if they are a bucket alone or, with late, that one.
void zero_ready(zero_shards *z, int64_t layer, bool late);

// For the optimizer.
precise *zero_finish_gradient(zero_shards *z, int bucket); // this rank's shard of the reduced gradient
void zero_begin_update(zero_shards *z);                    // no shard is updated yet
void zero_updated(zero_shards *z, int bucket);             // this one is
void zero_send_first(zero_shards *z, int bucket);          // begins its gather if forward needs it first
void zero_wait_for_everything(zero_shards *z);

// For --dry-run: which bucket travels how, and why.
void zero_operations(const zero_shards *z, visit_operation *visit, void *argument);
void zero_explain(const zero_shards *z, FILE *out);
