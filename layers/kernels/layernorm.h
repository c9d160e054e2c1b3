// Layer normalisation over the last dimension, and that by the root of the mean square, which does not subtract the mean.
#pragma once
#include "real.h"

CF_EXTERN_C_BEGIN

// out (R, C) = (x − mean) · rstd · w + b; mean, rstd (R): for backward. mean and b NULL: 0 in their place. eps is added to the
// variance.
void layernorm_forward(real *out, accum *mean, accum *rstd, const real *x, const real *w, const real *b, double eps, int64_t R,
                       int64_t C, cf_stream *stream);
int64_t layernorm_scratch(int64_t C);
// dx (R, C) += gradient of x; dw, db (C) += over these rows, in a fixed order. mean and db NULL: as in forward. dbias (C) += the
// sum of the rows of dx as they then are, before they are rounded: the gradient of a bias that was added to x. NULL: not wanted. dy
// (R, C). scratch: layernorm_scratch(C) elements of accum.
void layernorm_backward(real *dx, accum *dw, accum *db, accum *dbias, cf_sum dy, const real *x, const real *w, const accum *mean,
                        const accum *rstd, accum *scratch, int64_t R, int64_t C, cf_stream *stream);

CF_EXTERN_C_END
