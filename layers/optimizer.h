// AdamW, with its state sharded over the replicas (ZeRO-1; in UP over the whole world, since every rank has all weights).
// zero.h says how gradients and weights travel.
//
// A step updates only the weights that the next forward needs first. The others are updated during the transfers of its lookup:
//
//     gpt_begin_forward(…); optimizer_finish_update(…); gpt_forward(…); gpt_backward(…);
//     optimizer_reduce(…); optimizer_begin_update(…);
#pragma once

#include "adamw.h"
#include "model.h"

enum { NONFINITE_NAME = 48 };
typedef struct step_result {
    double loss;                    // mean over the batch
    double grad_norm;               // before clipping
    bool skipped;                   // loss or norm is not finite: nothing was updated
    int nonfinite_rank;             // if skipped: rank of the first tensor whose gradient is not finite, -1: none
    char nonfinite[NONFINITE_NAME]; // "fcw of layer 3"
} step_result;

typedef struct zero_optimizer {
    cf_context *context;
    const cf_mesh *mesh;
    parameters *params;
    zero_shards *zero;
    lookup *embedding;
    adamw update;       // of shards that are not updated yet
    precise *m, *v;     // (params->owned) moments of this rank's shards, bucket by bucket
    precise *master;    // (params->owned) their weights if `real` is not precise; else NULL
    double *squares;    // (SQUARES_SCRATCH)
    double loss, norm2; // of the step: sums over all ranks of losses and of squares of the gradient
    cf_fuse *gather;    // gathers the figures of all ranks:
    double *device;     // (world, REPORT) on the device
    double *all;        // (world, REPORT) on the host
    step_result result; // of the last step
} zero_optimizer;

void optimizer_create(zero_optimizer *o, gpt *model, const overlap *how);
void optimizer_free(zero_optimizer *o);

// Call after weights were initialised or read, before the first step.
void optimizer_start(zero_optimizer *o);
// After the last backward: finishes the reduction. loss_sum: this rank's sum of losses (gpt_forward), device memory. The
// collective that sums loss and norm also carries `count` <= REPORT_VALUES figures of the caller. Returns those of all ranks,
// rank r's at r · REPORT, valid until the next exchange.
enum { REPORT = 8, REPORT_VALUES = 6 }; // figures of a rank
const double *optimizer_reduce(zero_optimizer *o, const double *loss_sum, const double *values, int count);
// The same exchange of `count` figures outside of a step. Collective.
const double *optimizer_exchange(zero_optimizer *o, const double *values, int count);
// Then: clips the global norm to `clip` (0: no clipping), and updates positions, vectors and the token table. tokens: of the whole
// batch. If the loss or a gradient is not finite nothing is written: with may_skip the step is skipped, else the run ends with a
// message that names step, rank and tensor. The result is valid until the next call.
const step_result *optimizer_begin_update(zero_optimizer *o, adamw a, double clip, int64_t tokens, bool may_skip);
// The first tensor with a gradient that this rank owns and that is not finite: tensor + TENSORS · layer; −1: none.
int64_t optimizer_nonfinite(zero_optimizer *o);
// Updates all other weights: before the next gpt_forward, and before state is read. May be called again.
void optimizer_finish_update(zero_optimizer *o);
// The same, and waits until every weight has arrived: before saving a model, or at the end.
void optimizer_wait_for_weights(zero_optimizer *o);

// Would a model without recompute, and its optimizer, take at most three quarters of the free memory on every rank? Collective.
// Arguments as of gpt_create. Allocates nothing; call it before gpt_create.
bool gpt_may_keep(cf_context *context, const cf_mesh *mesh, gpt_shape shape, parallel_strategy strategy, int64_t T, int64_t B,
                  const overlap *how);

// Calls visit for the operations that carry gradients, weights and figures.
void optimizer_operations(zero_optimizer *o, visit_operation *visit, void *argument);
// --dry-run: memory per purpose, every schedule of rank 0, and how much a step posts.
void dry_run(gpt *g, zero_optimizer *o, FILE *out);

// state_copy: copies the state that this rank owns (params.h), between two steps; not collective. state_restore: the reverse, on
// any mesh: `read` returns elements of the whole model; all weights that this rank holds are filled, owned or not.
void state_create(rank_state *s, const zero_optimizer *o);
void state_free(rank_state *s);
void state_copy(rank_state *s, const zero_optimizer *o);
typedef void state_reader(void *argument, state_kind kind, int tensor, int64_t layer, int64_t first, int64_t count, precise *out);
void state_restore(zero_optimizer *o, state_reader *read, void *argument);
