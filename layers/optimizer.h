// Gradient synchronisation and AdamW, with the optimizer state sharded over the replicas (ZeRO-1; with UP over
// the whole world, since every rank has all weights).
//
// For every bucket of parameters: reduce-scatter of the gradient, AdamW on this rank's shard, all-gather of the weights.
// The step itself updates only the weights that forward needs first; the next forward updates the rest during the
// transfers of its lookup. In the overlapping modes a matrix with a bucket to itself is reduced while its gradient is
// computed, owner by owner, this rank's rows last (commfuse); other buckets are posted when backward has completed them,
// and travel during the rest of backward. Weights are gathered during the updates and the next forward, a few layers
// ahead of their use. In mode none both are native collectives, at the end of backward and after the update.
#ifndef OPTIMIZER_H
#define OPTIMIZER_H

#include "adamw.h"
#include "model.h"

#ifdef __cplusplus
extern "C" {
#endif

// Weights of a bucket: all complete, only this rank's shard, or the other shards in flight.
typedef enum { WEIGHTS_HERE, WEIGHTS_OWN, WEIGHTS_COMING } weights_state;
typedef enum { GRADIENT_PARTIAL, GRADIENT_LEAVING, GRADIENT_REDUCED } gradient_state;

typedef struct bucket_sync {
    cf_fuse *reduce, *gather; // NULL where the bucket's group has one member
    bool borrows; // reduce is that of an earlier bucket of the same kind, whose staging memory it shares
    bool fused;   // reduce computes the gradient it sends
    gradient_state gradient;
    weights_state weights;
    bool due;       // this rank's shard waits for its update
    precise *shard; // (bucket's shard) this rank's shard of the reduced gradient
    int64_t state;  // where the bucket's moments begin in m and v
    char name[32];  // in messages and traces
} bucket_sync;

typedef struct zero_optimizer {
    cf_context *context;
    const cf_mesh *mesh;
    parameters *params;
    lookup *embedding;
    cf_mode mode;
    bucket_sync *bucket; // [params->buckets]
    int *forward,
        *backward;     // [params->buckets] the order in which forward needs them, and reductions are finished
    int gathers_begun; // in forward order, since the last update
    adamw update;      // for shards that are due
    precise *m, *v;    // (sum of this rank's shards) moments, bucket by bucket
    precise *master;   // weights of this rank's shards where `real` is not precise; else NULL
    double *report;    // (world, REPORT) numbers every rank tells the others, on the device
    double *told;      // the same, once they have been exchanged, for the host
    double *squares;   // (SQUARES_SCRATCH)
    double loss, norm2; // of the step: sums over all ranks of losses and of squares of the gradient
    cf_fuse *exchange_report;
} zero_optimizer;

enum { NONFINITE_NAME = 48 };
typedef struct step_result {
    double loss;                    // mean over the batch
    double grad_norm;               // before clipping
    bool skipped;                   // not finite: nothing was updated
    int nonfinite_rank;             // skipped: rank of the first tensor with a non-finite gradient, -1: none
    char nonfinite[NONFINITE_NAME]; // "fcw of layer 3"
} step_result;

// Takes part in the model's passes from here on (its hooks).
void optimizer_create(zero_optimizer *o, gpt *model, overlap overlap);
void optimizer_free(zero_optimizer *o);

// Call after weights were initialised or read, before the first step.
void optimizer_start(zero_optimizer *o);
// Before the first backward of a step. The forward before it updates from the last step's gradients.
void optimizer_zero_grad(zero_optimizer *o);
// After the last backward: finishes the reduction. loss_sum: this rank's sum of losses, as gpt_forward gives it, in the
// device's memory. With what makes the norm travel `count` <= REPORT_VALUES figures of the caller's, of each rank: they are
// returned, rank r's at r · REPORT, and valid until the next exchange.
const double *optimizer_reduce(zero_optimizer *o, const double *loss_sum, const double *values, int count);
// Then: takes the global norm, clips to `clip` (0: no clipping), updates, most of it in the next forward. tokens: of the whole
// batch. If the loss or a gradient is not finite nothing is written: with may_skip the step is skipped, else the run ends,
// naming step, rank and tensor.
step_result optimizer_update(zero_optimizer *o, adamw a, double clip, int64_t tokens, bool may_skip);
// Update all shards that are due; call before their state is read.
void optimizer_complete(zero_optimizer *o);
// The same, and wait until every weight is here: before saving a model, or at the end.
void optimizer_settle(zero_optimizer *o);

// What every rank has to tell: (world, REPORT) numbers, of which `count` are values; valid until the next call.
const double *optimizer_exchange(zero_optimizer *o, const double *values, int count);

// values[i] becomes the maximum over all ranks, i < count <= REPORT; the sum over all ranks. Every rank gets
// the result.
enum { REPORT = 8, REPORT_VALUES = 6 };
void optimizer_maximum(zero_optimizer *o, double *values, int count);
double optimizer_sum(zero_optimizer *o, double value);

void optimizer_operations(zero_optimizer *o, visit_operation *visit, void *argument);

// For --dry-run: which bucket travels how, and why.
void optimizer_explain(const zero_optimizer *o, FILE *out);

#ifdef __cplusplus
}
#endif
#endif
