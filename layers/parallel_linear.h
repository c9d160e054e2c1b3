// Linear layers whose weights are split over N ranks. Activations are split by sequence, Ts = T / N rows of time a shard:
//
//              this rank's part of w            forward                                backward
//   column_*   some of the columns of out       all-gather of x ▸ product              dgrad ▸ reduce-scatter of dx
//   row_*      some of the columns of x         product ▸ reduce-scatter of out        all-gather of dy ▸ dgrad
//
// The transformer's pairs are QKV and the projection, the MLP's two layers; the head is a column_* alone. On one rank nothing
// travels, and the same calls are plain linear layers.
#ifndef PARALLEL_LINEAR_H
#define PARALLEL_LINEAR_H

#include "weight_gradient.h"

CF_EXTERN_C_BEGIN

// Time steps [t0, t0 + n) of the whole sequence are about to be read, or have been written.
typedef void time_steps(void *argument, int64_t t0, int64_t n);

// The product of an operation in progress; w is made ready during the first transfers.
typedef struct linear_job {
    const struct parallel_linear *layer;
    int64_t B;
    const real *in;     // the factor that does not travel
    real *out;          // the result, where it does not travel
    const real *bias;   // (OC) or NULL
    real *activated;    // column forward: (T·B, OC) GELU of out; NULL: not computed
    const real *pre;    // row backward: (T·B, IC) GELU's input, where x is its output; else NULL
    const real *x;      // row backward: (T·B, IC) for the weight gradient
    matrix_gradient dw; // added to slice by slice; at NULL: computed elsewhere
    time_steps *rows;   // row layers: computes x, or goes on with dx; NULL: nothing to do
    void *argument;     // of rows
} linear_job;

typedef struct parallel_linear {
    cf_context *context;
    const cf_group *group;
    cf_fuse *forward, *backward;
    cf_fuse *gather;                     // column: of the saved input; NULL if that is still there in backward (the head)
    int64_t IC, OC;                      // of this rank's part of w (OC, IC)
    real *prepared;                      // (linear_prepared_size(IC, OC)) shared with other layers
    const real *ready;                   // w as products read it: in prepared, or w itself
    linear_job backward_job, gather_job; // of those in progress
    bool gathering;
} parallel_linear;

// capacity: elements of a shard of what travels. flops: of what is computed besides the products.
void column_create(parallel_linear *l, cf_context *context, const cf_group *group, const char *name, int64_t capacity, int64_t IC,
                   int64_t OC, overlap how, bool gathers, real *prepared);
void row_create(parallel_linear *l, cf_context *context, const cf_group *group, const char *name, int64_t capacity, int64_t IC,
                int64_t OC, overlap how, double forward_flops, double backward_flops, real *prepared);
void parallel_linear_free(parallel_linear *l);

// The place of this rank's shard in a whole (T, B, columns) buffer.
real *linear_own_shard(const parallel_linear *l, real *full, int64_t Ts, int64_t B, int64_t columns);

// out (T·B, OC) = x · wᵀ + bias. x (T, B, IC): this rank's shard is in place. activated (T·B, OC): GELU of out, or NULL.
void column_forward(parallel_linear *l, real *out, real *activated, real *x, const real *w, const real *bias, int64_t Ts, int64_t B,
                    int layer);
// Gathers the saved input x as column_forward did, for the weight gradient dyᵀ · x. This depends on nothing that backward
// computes, so it may begin as soon as x is free. dw.at not NULL: dw is computed as slices arrive, by column_finish_gather(),
// from the dy (T·B, OC) that is there by then.
void column_begin_gather(parallel_linear *l, real *x, const real *dy, matrix_gradient dw, int64_t Ts, int64_t B, int layer);
void column_finish_gather(parallel_linear *l);
// Begins dx = dy · w, dx (T, B, IC) scratch; finish returns this rank's shard of the sum, valid until the next run. What is
// computed in between hides the transfers.
void column_begin_backward(parallel_linear *l, real *dx, const real *dy, const real *w, int64_t Ts, int64_t B, int layer);
real *column_finish_backward(parallel_linear *l);

// Returns this rank's shard (Ts, B, OC) of x · wᵀ, x (T·B, IC), valid until the next run. out (T, B, OC): scratch.
// rows(argument, …) computes these rows of x first; NULL: x is there.
const real *row_forward(parallel_linear *l, real *out, const real *x, const real *w, int64_t Ts, int64_t B, int layer,
                        time_steps *rows, void *argument);
// dx (T·B, IC) = gathered dy · w, dy (T, B, OC) with this rank's shard in place. job: x, and those of pre, dw, rows and
// argument that are wanted. rows are called when those of dx are there, then dw is added to.
void row_begin_backward(parallel_linear *l, real *dx, real *dy, linear_job job, int64_t Ts, int64_t B, int layer);
void row_finish_backward(parallel_linear *l, const real *w);

CF_EXTERN_C_END
#endif
