// A column-parallel linear layer: whole rows in, this rank's columns out. QKV and the MLP's first layer in TPSP; the head
// in both strategies. N ranks, Ts = T / N rows of a shard.
#ifndef COLUMN_LINEAR_H
#define COLUMN_LINEAR_H

#include "hooks.h"
#include "params.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct column_job {
    real *out, *activated;     // (T·B, OC)
    matrix_gradient dw;        // at NULL: left to the caller
    const real *in, *w, *bias; // in: dy in backward; w: prepared
    int64_t B, IC, OC;
} column_job;

typedef struct column_linear {
    cf_fuse *forward, *dgrad;
    cf_fuse *gather; // of the saved input; NULL if the input is still there in backward (the head)
    int64_t IC, OC;
    real *prepared;   // (linear_prepared_size(IC, OC)) weights
    column_job wgrad; // of the gather in progress
    bool gathering;
} column_linear;

// out (T·B, OC) = gathered x · wᵀ + bias; w (OC, IC), bias (OC). full (T, B, IC): this rank's shard of x is in place at
// full + rank · Ts. activated (T·B, OC): GELU of out; NULL: not computed.
void column_create(column_linear *c, cf_context *context, const cf_group *group, const char *name,
                   int64_t capacity, int64_t IC, int64_t OC, overlap o, bool gathers);
void column_free(column_linear *c);
void column_forward(column_linear *c, cf_stream *stream, real *out, real *activated, real *full,
                    const real *w, const real *bias, int64_t Ts, int64_t B, int layer);
// dy (T·B, OC); dw (OC, IC): dyᵀ · x (dw.at NULL: left to the caller, who finds all of x in full after column_input).
// Returns the gradient of this rank's shard of x (valid until the next run).
// full: as passed to column_gather; all of x if c->gather is NULL.
// partial (T, B, IC): scratch.
real *column_backward(column_linear *c, cf_stream *stream, matrix_gradient dw, const real *dy, real *full,
                      real *partial, const real *w, int64_t Ts, int64_t B, int layer);
// If c->gather is not NULL, call before column_backward: starts the gather of x in full, where this rank's shard is in
// place. It depends on nothing that backward computes, so it may start as soon as full is free.
void column_gather(column_linear *c, real *full, int64_t Ts, int64_t B, int layer);
// Must follow a column_backward without dw, before full is read or written and before the next forward.
void column_input(column_linear *c);

#ifdef __cplusplus
}
#endif
#endif
