// AdamW, with its state sharded over the replicas (ZeRO-1; with UP over the whole world, since every rank has all weights).
// How gradients and weights travel is in zero.h.
//
// A step updates only the weights that the next forward needs first; the rest is updated during the transfers of its lookup:
//
//     gpt_begin_forward(…); optimizer_finish_update(…); gpt_forward(…); gpt_backward(…);
//     optimizer_reduce(…); optimizer_begin_update(…);
#ifndef OPTIMIZER_H
#define OPTIMIZER_H

#include "adamw.h"
#include "model.h"

CF_EXTERN_C_BEGIN

enum { NONFINITE_NAME = 48 };
typedef struct step_result {
    double loss;                    // mean over the batch
    double grad_norm;               // before clipping
    bool skipped;                   // not finite: nothing was updated
    int nonfinite_rank;             // skipped: rank of the first tensor with a non-finite gradient, -1: none
    char nonfinite[NONFINITE_NAME]; // "fcw of layer 3"
} step_result;

typedef struct zero_optimizer {
    cf_context *context;
    const cf_mesh *mesh;
    parameters *params;
    zero_shards *zero;
    lookup *embedding;
    adamw update;       // for shards that wait for it
    precise *m, *v;     // (params->owned) moments of this rank's shards, bucket by bucket
    precise *master;    // (params->owned) their weights where `real` is not precise; else NULL
    double *squares;    // (SQUARES_SCRATCH)
    double loss, norm2; // of the step: sums over all ranks of losses and of squares of the gradient
    cf_fuse *gather;    // of what ranks report to each other with the norm:
    double *device;     // (world, REPORT)
    double *all;        // (world, REPORT) the host's
    step_result result; // of the last step
} zero_optimizer;

void optimizer_create(zero_optimizer *o, gpt *model, overlap overlap);
void optimizer_free(zero_optimizer *o);

// Call after weights were initialised or read, before the first step.
void optimizer_start(zero_optimizer *o);
// After the last backward: finishes the reduction. loss_sum: this rank's sum of losses, as gpt_forward gives it, in the
// device's memory. With what makes the norm travel `count` <= REPORT_VALUES figures of the caller's, of each rank: they are
// returned, rank r's at r · REPORT, and valid until the next exchange.
enum { REPORT = 8, REPORT_VALUES = 6 }; // numbers of a rank
const double *optimizer_reduce(zero_optimizer *o, const double *loss_sum, const double *values, int count);
// The same exchange of `count` figures outside of a step. Collective.
const double *optimizer_exchange(zero_optimizer *o, const double *values, int count);
// Then: takes the global norm, clips to `clip` (0: no clipping), and updates positions, vectors and the token table. tokens:
// of the whole batch. If the loss or a gradient is not finite nothing is written: with may_skip the step is skipped, else
// the run ends, naming step, rank and tensor. Valid until the next call.
const step_result *optimizer_begin_update(zero_optimizer *o, adamw a, double clip, int64_t tokens, bool may_skip);
// The first tensor of which this rank owns a gradient that is not finite: tensor + TENSORS · layer; −1: none.
int64_t optimizer_nonfinite(zero_optimizer *o);
// Updates all else; before the next gpt_forward, and before state is read. Nothing to do: returns at once.
void optimizer_finish_update(zero_optimizer *o);
// The same, and waits until every weight is here: before saving a model, or at the end.
void optimizer_wait_for_weights(zero_optimizer *o);

// Calls visit for the operations that carry gradients, weights and figures.
void optimizer_operations(zero_optimizer *o, visit_operation *visit, void *argument);
// --dry-run: memory per purpose, every schedule of rank 0, and what a step posts.
void dry_run(gpt *g, zero_optimizer *o, FILE *out);

// Copies of the state that this rank owns (params.h), between two steps; not collective. And the way back, on any mesh: `read`
// returns elements of the whole model; all weights that this rank holds are filled, owned or not.
void state_create(rank_state *s, const zero_optimizer *o);
void state_free(rank_state *s);
void state_copy(rank_state *s, const zero_optimizer *o);
typedef void state_reader(void *argument, state_kind kind, int tensor, int64_t layer, int64_t first, int64_t count, precise *out);
void state_restore(zero_optimizer *o, state_reader *read, void *argument);

CF_EXTERN_C_END
#endif
