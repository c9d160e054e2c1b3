// A step of an optimizer, and the squared norm of gradients.
#pragma once
#include "optimizers.h"

CF_EXTERN_C_BEGIN

// One step on n elements. w, master, state[] (n), g (n): the gradient. master: the weights in full precision, of which w is the
// rounded copy; NULL: w itself is as accum.
void optimizer_update(const optimizer_row *o, real *w, accum *master, accum *const *state, const accum *g, int64_t n,
                      optimizer_settings s, cf_stream *stream);
// *sum += the sum of squares in double, in an order that does not depend on the number of threads. sum and scratch
// (SQUARES_SCRATCH) are device memory.
enum { SQUARES_SCRATCH = 1024 };
void sum_of_squares(double *sum, double *scratch, const accum *x, int64_t n, cf_stream *stream);

CF_EXTERN_C_END
