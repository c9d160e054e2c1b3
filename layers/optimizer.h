// Gradient synchronisation and AdamW, with the optimizer state sharded over the replicas (ZeRO-1).
//
// For every bucket of parameters: reduce-scatter of the gradient, AdamW on the own shard, all-gather of the
// weights. In the overlapping modes the reduce-scatter is posted when backward has completed the bucket and
// runs behind the layers before it; the all-gather is posted after the update and waited for where the next
// forward needs the bucket. In mode none both are native collectives at the end of backward.
#ifndef OPTIMIZER_H
#define OPTIMIZER_H

#include "adamw.h"
#include "model.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct zero_optimizer {
    cf_context *context;
    const cf_mesh *mesh;
    parameters *params;
    bool eager;                 // post behind backward (every mode but none)
    real *m, *v;                // moments of the own shards, bucket by bucket
    int64_t *state;             // [buckets] offset of the bucket in m and v
    cf_fuse **reduce, **gather; // [buckets]; NULL where the bucket's group has one member
    bool *reducing, *gathering; // [buckets] posted, not finished
    real **shard;               // [buckets] the reduced own shard of the gradient
    double *report;             // (world, REPORT) numbers every rank tells the others
    cf_fuse *exchange_report;
} zero_optimizer;

typedef struct step_result {
    double loss;      // mean over the batch
    double grad_norm; // before clipping
} step_result;

void optimizer_create(zero_optimizer *o, cf_context *context, const cf_mesh *mesh, parameters *p,
                      overlap overlap);
void optimizer_free(zero_optimizer *o);
gpt_hooks optimizer_hooks(zero_optimizer *o); // for the model

void optimizer_zero_grad(zero_optimizer *o);
// After the last backward: finishes the reduction, takes the global norm, clips to `clip` (0: no clipping),
// updates. loss_sum: this rank's sum of losses; the ranks of one tp group give the same number.
// tokens: of the whole batch. Dies before anything is written if the loss or a gradient is not finite,
// naming step, rank and tensor.
step_result optimizer_step(zero_optimizer *o, adamw a, double clip, double loss_sum, int64_t tokens);
// Wait until every weight is here: before saving, or at the end.
void optimizer_settle(zero_optimizer *o);

// values[i] becomes the maximum over all ranks, i < count <= REPORT; the sum over all ranks; the sum over
// replicas of a number that the ranks of one tp group share. Every rank gets the result.
enum { REPORT = 4 };
void optimizer_maximum(zero_optimizer *o, double *values, int count);
double optimizer_sum(zero_optimizer *o, double value);
double optimizer_sum_replicas(zero_optimizer *o, double value);

void optimizer_operations(zero_optimizer *o,
                          void (*visit)(void *argument, const char *place, const cf_fuse *fuse),
                          void *argument);

#ifdef __cplusplus
}
#endif
#endif
