// The activation (activation.h), residual additions, and conversion between the two types of a model.
#pragma once
#include "real.h"

CF_EXTERN_C_BEGIN

void activation_forward(real *out, const real *x, int64_t count, cf_stream *stream);
// dx = dy · activation_slope(x); dx may be dy or x
void activation_backward(real *dx, const real *dy, const real *x, int64_t count, cf_stream *stream);
// out (R, C) = x + y + bias (C); out may be x
void residual_forward(real *out, const real *x, cf_sum y, const real *bias, int64_t R, int64_t C, cf_stream *stream);
void convert_to_real(real *to, const accum *from, int64_t count, cf_stream *stream); // rounds to the nearest
void convert_to_accum(accum *to, const real *from, int64_t count, cf_stream *stream);

CF_EXTERN_C_END
