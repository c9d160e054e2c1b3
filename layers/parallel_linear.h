// Linear layers whose weights are split over N ranks. Activations are split by sequence, Ts = T / N rows of time a shard:
//
//              this rank's part of w            forward                                backward
//   column_*   some of the columns of out       all-gather of x ▸ product              dgrad ▸ reduce-scatter of dx
//   row_*      some of the columns of x         product ▸ reduce-scatter of out        all-gather of dy ▸ dgrad
//
// A transformer has pairs of them: QKV and the projection, the MLP's two layers; the head is a single column_*. The names are
// Megatron's: of w (OC, IC) a rank has rows in column_*, columns in row_*. On one rank nothing is communicated, and the same calls are
// plain linear layers.
//
// zero.h decides where gradients of weights are computed, before backward begins.
#pragma once
#include "optimizer/zero.h"

// The micro-batch in progress.
typedef struct model_pass {
    cf_context *context;
    const parameters *params;
    zero_shards *zero;
    int64_t Ts, B; // rows of time of a shard, sequences
} model_pass;

// For time steps [t0, t0 + n) of the whole sequence: computes a row layer's x before they are read, or uses its dx when they are
// written.
typedef void time_steps(void *argument, int layer, real *x, int64_t t0, int64_t n, cf_stream *stream);
// Called with time steps t0 … of this rank's shard, which may still be parts of a sum.
typedef void sum_steps(void *argument, cf_sum sum, int64_t t0, int64_t n, cf_stream *stream);

// A forward operation in progress.
typedef struct linear_forward_job {
    const struct parallel_linear *linear;
    int layer;
    real *x;               // row: (T·B, IC)
    real *out;             // column: (T·B, OC); row: this rank's shard (Ts·B, OC)
    real *pre;             // column: (T·B, OC) input of GELU or SwiGLU, of which out is the output; NULL: neither
    const real *residual;  // row: (Ts·B, OC) is added, and the bias
    time_steps *compute_x; // row: NULL: x is complete
    void *argument;        // of compute_x
} linear_forward_job;

// A backward operation in progress.
typedef struct linear_backward_job {
    const struct parallel_linear *linear;
    int layer;
    const real *dy;          // (T·B, OC)
    gradient_destination dw; // of the weights, if slices compute it
    sum_steps *use_sum;      // column: of this rank's shard of dx
    real *dx;                // row: (T·B, IC)
    real *pre;               // row: GELU's input (T·B, IC), whose gradient dx then is; or SwiGLU's (T·B, 2 IC), which becomes its
                             // gradient; NULL: neither
    real *x;                 // row: (T·B, IC) the layer's input: output of GELU or SwiGLU, if there is one
    bool again;              // row: x is not there: GELU or SwiGLU is computed again
    time_steps *use_dx;      // row: NULL: the caller uses it, when the operation has finished
    void *argument;          // of use_sum or use_dx
    bool begun;              // row: an earlier slice was enqueued:
    cf_event used, added;    // when it has called use_dx, and added to the weight gradient
} linear_backward_job;

typedef struct parallel_linear {
    const model_pass *pass;
    const cf_group *group;
    real *prepared; // (linear_prepared_size(IC, OC)) shared with other layers
    int w, bias;    // tensors; bias −1: none
    bool gated;     // column: out (T·B, OC / 2) is gate · value; row: of that
    cf_fuse *forward, *backward;
    cf_fuse *gather;   // column: of the saved input; NULL: backward still has all of it
    cf_fuse *arrives;  // in backward: brings one factor of the weight gradient; NULL: none does
    int64_t IC, OC;    // of this rank's part of w (OC, IC)
    const real *ready; // w as products read it: in prepared, or w itself
    linear_backward_job backward_job, gather_job;
} parallel_linear;

// The caller has set pass, group, w, bias and prepared. capacity: elements of a shard that is communicated. flops: of what a
// row-parallel layer's time_steps compute, beside its products.
void column_create(parallel_linear *l, const char *name, int64_t capacity, const overlap *how, bool gathers);
void row_create(parallel_linear *l, const char *name, int64_t capacity, const overlap *how, double forward_flops,
                double backward_flops);
void parallel_linear_free(parallel_linear *l);

// out (T·B, OC) = x · wᵀ + bias. x (T, B, IC): this rank's shard is in place. With pre (T·B, OC), pre is that, and out its
// GELU, or gated (T·B, OC / 2).
void column_forward(parallel_linear *l, int layer, real *out, real *pre, real *x);
// Gathers the saved input x as column_forward did, for the weight gradient dyᵀ · x. This depends on nothing that backward
// computes, so it may begin as soon as x is free. dy (T·B, OC): complete when column_backward, which must follow, is called.
void column_begin_gather(parallel_linear *l, int layer, real *x, const real *dy);
// Calls use_sum(argument, …) with the rows of this rank's shard of dy · w. dx (T, B, IC): scratch. x: as gathered, or whole. Computes
// the gradients of bias and weights; that of the weights in column_gradient_after(), which must follow, if its place is after.
void column_backward(parallel_linear *l, int layer, real *dx, const real *dy, const real *x, sum_steps *use_sum, void *argument);
void column_gradient_after(parallel_linear *l, int layer, const real *dy, const real *x);

// out (Ts, B, OC) = residual (Ts, B, OC) + this rank's shard of x · wᵀ + bias, x (T·B, IC). sums (T, B, OC): scratch of several
// ranks. compute_x(argument, layer, x, …) computes rows of x before they are read; NULL: x is complete.
void row_forward(parallel_linear *l, int layer, real *out, const real *residual, real *sums, real *x, time_steps *compute_x,
                 void *argument);
// dx (T·B, IC) = gathered dy · w, and the gradient of the weights. (That of the bias is the sum of the rows of dy, which
// layernorm_backward() computes when it writes them.) shard (Ts, B, OC) of dy is gathered into whole
// (T, B, OC); on one rank whole is not used, and shard must not change until row_finish_backward(). job: dx, x and, if wanted,
// pre, again, use_dx and argument. The weight gradient of a slice follows what uses its dx.
void row_begin_backward(parallel_linear *l, int layer, real *shard, real *whole, linear_backward_job job);
void row_finish_backward(parallel_linear *l, int layer);
