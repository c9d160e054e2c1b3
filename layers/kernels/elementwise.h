// The activation and the gate (activation.h), residual additions, and conversion between the two types of a model.
#pragma once
#include "real.h"

CF_EXTERN_C_BEGIN

void activation_forward(real *out, const real *x, int64_t count, cf_stream *stream);
// dx = dy · activation_slope(x); dx may be dy or x
void activation_backward(real *dx, const real *dy, const real *x, int64_t count, cf_stream *stream);
// pre (R, 2, F): gates, and what they multiply. out (R, F) = gate(first) · second
void gated_forward(real *out, const real *pre, int64_t R, int64_t F, cf_stream *stream);
// pre becomes its gradient, from dout (R, F). out: NULL, or what gated_forward() has written, again
void gated_backward(real *pre, real *out, const real *dout, int64_t R, int64_t F, cf_stream *stream);
// out (R, C) = x + y + bias (C), which may be NULL; out may be x
void residual_forward(real *out, const real *x, cf_sum y, const real *bias, int64_t R, int64_t C, cf_stream *stream);
void convert_to_real(real *to, const accum *from, int64_t count, cf_stream *stream); // rounds to the nearest
void convert_to_accum(accum *to, const real *from, int64_t count, cf_stream *stream);

CF_EXTERN_C_END
