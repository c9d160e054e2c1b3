// One step of training: forward, backward, reduce, update. train_gpt, its predictions and bench_train take their steps here.
#pragma once
#include "model.h"

// Figures of a rank that are communicated together once a step: loss, norm, and at most REPORT_VALUES of the caller.
enum { REPORT = 9, REPORT_VALUES = 7 };

typedef struct step_result {
    double loss;          // mean over the batch
    double grad_norm;     // before clipping
    const double *values; // the caller's, of all ranks: rank r's at r · REPORT; valid until the next exchange
    bool finite;          // if loss or norm is not, nothing was updated
} step_result;

typedef struct step_batch {
    int64_t T, B;          // tokens, sequences of a micro-batch of this replica
    int64_t micro_batches; // of the step, one after another
    // Fills inputs and targets (T, B), host memory, of micro-batch `micro`.
    void (*load)(void *loader, int64_t micro, int32_t *inputs, int32_t *targets);
    void *loader;
    // Fills what is communicated with this step's loss and norm, after backward; NULL: nothing.
    void (*report)(void *reporter, double *values); // [REPORT_VALUES]
    void *reporter;
} step_batch;

typedef struct gpt_step {
    gpt *model;
    cf_fuse *gather;    // gathers the figures of all ranks:
    double *device;     // (world, REPORT) on the device
    double *all;        // (world, REPORT) on the host
    step_result result; // of the last step
} gpt_step;

void gpt_step_create(gpt_step *s, gpt *model);
void gpt_step_free(gpt_step *s);

// Takes a step: gradients of the mean loss over all replicas' tokens, their global norm clipped to `clip` (0: no clipping), the
// optimizer's step with these settings. It leaves the matrices of the layers to the next pass, which updates them during the
// transfers of its lookup. Collective. The result is valid until the next call.
const step_result *gpt_train_step(gpt_step *s, const step_batch *batch, optimizer_settings settings, double clip);
// Updates them now, all: before state is read, or so that the time of the update counts to this step.
void gpt_finish_step(gpt_step *s);
// Ends the run after a result that is not finite, with a message that names step, rank and tensor. Collective.
CF_NORETURN void gpt_step_die(gpt_step *s, const char *hint);

// Calls visit for the operations that carry gradients, weights and figures.
void gpt_step_operations(gpt_step *s, visit_operation *visit, void *argument);
