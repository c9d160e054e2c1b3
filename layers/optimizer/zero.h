// ZeRO-1: the life of a bucket of parameters (params.h), from its gradient to its weights.
//
//                what happens                                                          called by
//   computed     by the operation that brings a factor, slice by slice; or             the linear layers, in backward
//                zero_weight_gradient(): whole, or owner by owner ▸ reduce-scatter
//   reduced      zero_reduce(layer): reduce-scatters of what is complete               the loop over layers, in backward
//   its norm     zero_finish_gradients(): finishes them, sums the squares of this      the step, after backward
//                rank's shards
//   updated      zero_update_embeddings_and_vectors(): this rank's shards of what      the step
//                forward needs first; zero_update_layers(): all others                 the next pass, during its lookup
//                (muon's matrices in rounds: homes.h)
//   gathered     zero_prefetch(layer) begins the all-gathers of the next layers        the loop over layers, in forward
//                (the first begin with the update), zero_wait(layer) finishes those
//                that this layer needs
//
// A bucket with one owner is not communicated. When gradients are reduced, and how far ahead weights are gathered, is the policy of
// overlap.h. What forward needs first must not wait for all the weights, because transfers queue. (Over MPI urgent messages
// overtake bulk ones; on GPUs only requests of different groups can.)
#pragma once
#include "homes.h"
#include "lookup.h"
#include "update.h"

// Where the gradient of a weight matrix is computed, in this layer and micro-batch. What is decided when: whether a matrix has a
// bucket alone, when parameters are placed (params.c); which buckets are computed by owners, at creation (choose_owners());
// which place that leaves a matrix, when backward begins (choose_place()). From GRADIENT_AFTER on it follows the gradient of the
// layer's input.
typedef enum gradient_place {
    GRADIENT_BY_SLICES, // slice by slice, inside the operation that brings one factor
    GRADIENT_WHOLE,     // when both factors are complete
    GRADIENT_AFTER,     // whole, after the gradient of the layer's input, to hide the transfers of the embedding
    GRADIENT_OWNERS     // then, too: inside the reduce-scatter of its bucket
} gradient_place;

// Where the gradient of a weight matrix goes: decided once for a micro-batch, when backward begins (zero_begin_backward()).
typedef struct gradient_destination {
    gradient_place place;
    accum *at, *db; // db += the gradient of the bias; NULL: is not computed with the matrix'
    bool add;       // to the values there; if not, those are the previous step's and are overwritten
} gradient_destination;

// Weights of a bucket: complete; this rank's shard is not updated yet; it is updated; the other shards are in flight.
typedef enum { WEIGHTS_HERE, WEIGHTS_NOT_UPDATED, WEIGHTS_UPDATED, WEIGHTS_IN_FLIGHT } weights_state;
typedef enum { GRADIENT_PARTIAL, GRADIENT_IN_FLIGHT, GRADIENT_REDUCED } gradient_state;

typedef struct zero_bucket {
    const param_bucket *of;
    cf_fuse *reduce, *gather; // NULL: the bucket has one owner
    bool shares_staging;      // reduce, and rounded, are those of an earlier bucket of the same kind
    real *rounded;            // (bucket) the gradient as it is communicated; NULL: as it is
    bool by_owners;           // reduce computes the gradient that it sends
    int missing;              // matrices whose gradient this micro-batch has not computed yet
    gradient_state reduction;
    weights_state weights;
    accum *reduced; // (bucket's shard) this rank's shard of the reduced gradient; NULL: the update has used it
    char name[32];  // in messages and traces
} zero_bucket;

struct zero_shards {
    cf_context *context;
    parameters *params;
    gradients_policy gradients;
    int64_t prefetch;          // overlap.h
    bool rows_travel;          // the lookup exchanges rows (lookup.h), so that only the head needs the whole table
    zero_bucket *bucket, *end; // [params->buckets], the end of these
    // [params->buckets] in the order of forward's needs; in that of finishing reductions
    zero_bucket **forward, **backward;
    int gathers_begun;                 // in forward order, since the last update
    cf_fuse *arrives[TENSORS];         // the operation that brings one factor of a matrix' gradient; NULL: none does
    gradient_destination *destination; // [params->tensors] of this micro-batch, as placed; vectors have none
    bool last;                         // this is the step's last micro-batch, after which gradients are communicated
    const optimizer_row *optimizer;
    optimizer_settings update;      // of shards that are not updated yet
    accum *state[OPTIMIZER_STATES]; // (params->owned) of this rank's shards, bucket by bucket; the first state_from have none
    int64_t state_from[OPTIMIZER_STATES];
    struct homes *homes; // Muon's; else NULL
    accum *master;       // (params->owned) their weights if `real` is not accum; else NULL
    double *squares;     // (SQUARES_SCRATCH)
};

// rows: of the activations from which a weight gradient is computed.
void zero_create(zero_shards *z, cf_context *context, parameters *p, const optimizer_row *o, bool rows_travel, int64_t rows,
                 const overlap *how);
void zero_free(zero_shards *z);
// Call after weights were initialised or read, before the first step.
void zero_start(zero_shards *z);

// --- weights, in forward. layer: or LAYER_TABLE, LAYER_VECTORS ---

void zero_prefetch(zero_shards *z, int64_t layer); // neither of these
void zero_wait(zero_shards *z, int64_t layer);
bool zero_table_is_here(const zero_shards *z); // false: only this rank's shard is complete

// --- gradients, in backward ---

// Decides where all weight gradients of this micro-batch are computed. first, last: of the step.
void zero_begin_backward(zero_shards *z, bool first, bool last);
const gradient_destination *zero_decided(const zero_shards *z, int tensor, int64_t layer); // what was decided
// Of a local matrix in `parts` parts: that of part i (OC, IC) is dy[i]ᵀ · x[i], dy[i] (R, OC), x[i] (R, IC).
typedef struct weight_gradient {
    const real *const *dy, *const *x; // [parts]
    int64_t R, OC, IC;
    int parts;
    gradient_destination to;
} weight_gradient;
// Both factors are complete: computes the gradient, unless slices have. Once a micro-batch for each matrix; fills OC, IC and to.
// The gradients of the biases of QKV and the MLP's first product come with it. But if it comes after others (GRADIENT_AFTER,
// GRADIENT_OWNERS), the vectors of all layers may be communicated before: then the caller has computed them.
void zero_weight_gradient(zero_shards *z, int tensor, int64_t layer, weight_gradient g);
// Computes the rows of a span of it at span->data. argument: a weight_gradient.
void zero_gradient_rows(void *argument, const cf_span *span, cf_stream *stream);
// In the last micro-batch: begins to reduce the buckets of the layer whose gradients are complete.
void zero_reduce(zero_shards *z, int64_t layer);

// --- the update, between backward and the next forward ---

// Finishes all reductions and adds the rows of the lookup to the table's. Adds the squares of this rank's shards to *sum (device).
void zero_finish_gradients(zero_shards *z, lookup *embedding, double *sum);
// The first tensor with a gradient that this rank owns and that is not finite: tensor + TENSORS · layer; −1: none. After
// zero_finish_gradients().
int64_t zero_nonfinite(zero_shards *z, double *scratch); // one, on the device
// The optimizer's step with these settings, in two halves. The second must come before the layers are used; it may be
// called again. Of several ranks, one that has updated a shard of the layers begins to send it.
void zero_update_embeddings_and_vectors(zero_shards *z, optimizer_settings settings);
void zero_update_layers(zero_shards *z);
// After both: waits until every weight has arrived, before a model is saved, or at the end.
void zero_finish_weights(zero_shards *z);

// --- for --dry-run: how each bucket is communicated, and why ---

void zero_operations(const zero_shards *z, visit_operation *visit, void *argument);
void zero_explain(const zero_shards *z, FILE *out);
