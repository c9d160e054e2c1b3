// AdamW with decoupled weight decay, the squared norm and the non-finite check.
#ifndef ADAMW_H
#define ADAMW_H

#include "real.h"

CF_EXTERN_C_BEGIN

typedef struct adamw {
    double lr, beta1, beta2, eps, weight_decay;
    double scale; // gradients are multiplied by this first (clip factor)
    int64_t step; // 1, 2, …: bias correction
} adamw;

// w, master, m, v (n): one step on n elements. m and v: first and second moments. master: the weights in full
// precision, of which w is the rounded copy; NULL: w itself is as precise.
void adamw_update(real *w, precise *master, precise *m, precise *v, const precise *g, int64_t n, adamw a, cf_stream *stream);
// master (n) = w, after weights were initialised or read.
void adamw_master(precise *master, const real *w, int64_t n, cf_stream *stream);
// *sum += the sum of squares in double, in a fixed order whatever the number of threads. sum and scratch
// (SQUARES_SCRATCH) are in the device's memory.
enum { SQUARES_SCRATCH = 1024 };
void sum_of_squares(double *sum, double *scratch, const precise *x, int64_t n, cf_stream *stream);
// Index of the first NaN or infinity, −1 if none. Waits for the stream: only for a run that is about to end.
int64_t first_nonfinite(const precise *x, int64_t n, cf_stream *stream);

CF_EXTERN_C_END
#endif
