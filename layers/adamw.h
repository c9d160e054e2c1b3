// AdamW with decoupled weight decay, and what guards it: the squared norm and the non-finite check.
#ifndef ADAMW_H
#define ADAMW_H

#include "real.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct adamw {
    double lr, beta1, beta2, eps, weight_decay;
    double scale; // gradients are multiplied by this first (clip factor)
    int64_t step; // 1, 2, …: bias correction
} adamw;

// w, m, v (n): one step on n elements. m and v: first and second moments.
void adamw_update(real *w, real *m, real *v, const real *g, int64_t n, adamw a, cf_stream *stream);
// Sum of squares in double, in a fixed order whatever the number of threads.
double sum_of_squares(const real *x, int64_t n, cf_stream *stream);
// Index of the first NaN or infinity, −1 if none.
int64_t first_nonfinite(const real *x, int64_t n, cf_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
