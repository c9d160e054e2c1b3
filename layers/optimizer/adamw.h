// AdamW with decoupled weight decay, and the squared norm.
#pragma once

#include <math.h>
#include "../kernels/real.h"

CF_EXTERN_C_BEGIN

typedef struct adamw {
    double lr, beta1, beta2, eps, weight_decay;
    double scale; // gradients are multiplied by this first (clip factor)
    int64_t step; // 1, 2, …: bias correction
} adamw;

// The update m = β1 m + (1 − β1) g;  v = β2 v + (1 − β2) g²;  w −= lr · (m̂ / (sqrt(v̂) + ε) + decay · w), m̂ = m / (1 − β1ᵗ),
// v̂ = v / (1 − β2ᵗ), needs these factors:
typedef struct adamw_factors {
    accum scale, beta1, beta2, eps;
    accum rest1, rest2, rate, second, decay; // 1 − β1, 1 − β2, lr / (1 − β1ᵗ), 1 / (1 − β2ᵗ), lr · weight_decay
} adamw_factors;
static inline adamw_factors adamw_factors_of(adamw a) {
    const double first = 1 - pow(a.beta1, (double)a.step), second = 1 - pow(a.beta2, (double)a.step);
    adamw_factors f = {(accum)a.scale,        (accum)a.beta1,       (accum)a.beta2,
                       (accum)a.eps,          (accum)(1 - a.beta1), (accum)(1 - a.beta2),
                       (accum)(a.lr / first), (accum)(1 / second),  (accum)(a.lr * a.weight_decay)};
    return f;
}

// w, master, m, v (n): one step on n elements. m and v: first and second moments. master: the weights in full
// precision, of which w is the rounded copy; NULL: w itself is as accum.
void adamw_update(real *w, accum *master, accum *m, accum *v, const accum *g, int64_t n, adamw a, cf_stream *stream);
// *sum += the sum of squares in double, in an order that does not depend on the number of threads. sum and scratch
// (SQUARES_SCRATCH) are device memory.
enum { SQUARES_SCRATCH = 1024 };
void sum_of_squares(double *sum, double *scratch, const accum *x, int64_t n, cf_stream *stream);

CF_EXTERN_C_END
