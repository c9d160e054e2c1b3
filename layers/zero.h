// ZeRO-1: how gradients and weights travel between those that share them, and when. AdamW is in optimizer.h.
//
// Every bucket of parameters (params.h) is reduce-scattered when its gradient is there, and gathered after the owners of
// its shards have updated them. A bucket whose group has one member never travels. The layer loops of model.c say where a
// pass is:
//
//   forward    zero_prefetch(layer)   begins the gathers of the next layers
//              zero_wait(layer)       finishes those that this layer uses
//   backward   zero_compute()         a large matrix: its gradient is computed owner by owner, this rank's rows last, and
//                                     sent while the next owner's rows are computed (commfuse)
//              zero_ready(layer)      sends what backward has completed in any other way, during the rest of backward
//   step       zero_finish_gradient() this rank's shard of the sum, in the order in which the reductions were begun
//              zero_updated()         the shard's weights may leave, the first with zero_send_first(), others with
//                                     zero_prefetch()
//
// Gathers are begun no earlier because transfers queue: what forward needs at once must not wait for all the weights.
// (Over MPI it passes them; on GPUs it does so only in another group.) In mode none both are native collectives, at the end
// of backward and after the update.
#ifndef ZERO_H
#define ZERO_H

#include <stdio.h>
#include "overlap.h"
#include "params.h"

CF_EXTERN_C_BEGIN

// Weights of a bucket: complete; this rank's shard waits for its update; it is updated; the other shards are in flight.
typedef enum { WEIGHTS_HERE, WEIGHTS_NOT_UPDATED, WEIGHTS_UPDATED, WEIGHTS_IN_FLIGHT } weights_state;
typedef enum { GRADIENT_PARTIAL, GRADIENT_IN_FLIGHT, GRADIENT_REDUCED } gradient_state;

// Where the gradient of a weight matrix is computed.
typedef enum {
    GRADIENT_NOW,       // when all of both its factors is here
    GRADIENT_BY_SLICES, // as the slices of the factor that travels arrive, inside that operation
    GRADIENT_LATER,     // when nothing else of its layer is left to compute, to hide the transfers of the embedding
    GRADIENT_OWNERS     // inside the reduce-scatter of its bucket; QKV's as LATER
} gradient_place;

typedef struct zero_bucket {
    cf_fuse *reduce, *gather; // NULL where the bucket's group has one member
    bool shares_staging;      // reduce is that of an earlier bucket of the same kind, whose staging memory it shares
    bool fused;               // reduce computes the gradient it sends
    gradient_state gradient;
    weights_state weights;
    precise *shard; // (bucket's shard) this rank's shard of the reduced gradient; NULL: it has been used
    char name[32];  // in messages and traces
} zero_bucket;

typedef struct zero_shards {
    cf_context *context;
    parameters *params;
    cf_mode mode;
    bool rows_travel;    // the lookup's rows do (lookup.h), so that the table is not needed before the head
    zero_bucket *bucket; // [params->buckets]
    int *forward,
        *backward;     // [params->buckets] the order in which forward needs them, and reductions are finished
    int gathers_begun; // in forward order, since the last update
} zero_shards;

// rows: of activations from which a weight gradient is computed.
void zero_create(zero_shards *z, cf_context *context, parameters *p, bool rows_travel, int64_t rows, overlap how);
void zero_free(zero_shards *z);

// Besides layers: the token table; positions and the vectors of all layers.
enum { ZERO_TABLE = -1, ZERO_VECTORS = -2 };
void zero_prefetch(zero_shards *z, int64_t layer); // a layer
void zero_wait(zero_shards *z, int64_t layer);
bool zero_table_is_here(const zero_shards *z); // if not, only this rank's shard is complete

// Where the gradient of a matrix is computed. last: in the step's last micro-batch. arrives: the operation that brings the factor
// that travels, NULL: none does; it may take another way in the next step, so this is asked anew. may_wait: in the first layer
// nothing of that layer waits for the gradient.
gradient_place zero_place(const zero_shards *z, int tensor, int64_t layer, bool last, const cf_fuse *arrives, bool may_wait);

// For GRADIENT_OWNERS: the gradient travels as it is computed. wgrad computes rows of it: span->row and span->rows count rows of
// the local matrix, span->data is their address. job may go when it returns.
void zero_compute(zero_shards *z, int tensor, int64_t layer, cf_compute *wgrad, void *job);
// The gradients of the layer are complete, QKV's weights excepted: these are ready with zero_ready_late().
void zero_ready(zero_shards *z, int64_t layer);
void zero_ready_late(zero_shards *z, int64_t layer);

// For the optimizer. The shard of a bucket, reduced.
precise *zero_finish_gradient(zero_shards *z, int bucket);
void zero_begin_update(zero_shards *z);           // all shards wait for their update
void zero_updated(zero_shards *z, int bucket);    // this one is done
void zero_send_first(zero_shards *z, int bucket); // it leaves at once if forward needs it first
void zero_wait_for_everything(zero_shards *z);

// For --dry-run: which bucket travels how, and why.
void zero_operations(const zero_shards *z, visit_operation *visit, void *argument);
void zero_explain(const zero_shards *z, FILE *out);

CF_EXTERN_C_END
#endif
