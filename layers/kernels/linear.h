// Linear layer. Weights are (OC, IC) row-major, as in GPT-2's files after transposition (llm.c's order). No number of rows or columns
// is 0.
#pragma once
#include "real.h"

CF_EXTERN_C_BEGIN

// Brings w (OC, IC) into the layout that products read fastest, once per operation, whatever its number of slices. Returns the
// w to pass to these products: on the CPU a copy in `prepared`, on a GPU w itself. Otherwise a product reorders it in every call
// (bench_fuse, chunking). Valid until w or `prepared` is written. prepared: linear_prepared_size() elements, enough for either
// copy; none on a GPU.
int64_t linear_prepared_size(int64_t IC, int64_t OC);
typedef const real *linear_prepare(real *prepared, const real *w, int64_t IC, int64_t OC, cf_stream *stream);
const real *linear_prepare_forward(real *prepared, const real *w, int64_t IC, int64_t OC, cf_stream *stream);
const real *linear_prepare_dgrad(real *prepared, const real *w, int64_t IC, int64_t OC, cf_stream *stream);

// Rows that a product reads and writes: `blocks` blocks of `rows` rows, which begin `in` rows apart in the input and `out` rows
// apart in the output. One call of the library if it has batched products.
typedef struct linear_rows {
    int64_t blocks, rows, in, out;
} linear_rows;
static inline linear_rows linear_all(int64_t R) { // R = blocks · rows rows, one after another
    linear_rows r = {1, R, R, R};
    return r;
}

// out (R, OC) = x (R, IC) · wᵀ + bias + add, w prepared for forward. bias (OC) and add may be NULL. add has the layout of out: the
// residual stream, or out itself, for products over groups of inputs that arrive one after another. With pre, which has the layout
// of out and needs a bias: pre is that sum, without add, for backward, and out = activation(pre).
void linear_forward(real *out, real *pre, const real *x, const real *w, const real *bias, const real *add, linear_rows r,
                    int64_t IC, int64_t OC, cf_stream *stream);
// dx (R, IC) = dy (R, OC) · w, prepared for dgrad. With pre, which has the layout of dx and x = activation(pre): dx is the gradient
// of pre, (dy · w) · activation_slope(pre); it is not pre's memory. add: dx +=, without pre.
void linear_dgrad(real *dx, const real *dy, const real *w, const real *pre, bool add, linear_rows r, int64_t IC, int64_t OC,
                  cf_stream *stream);
// dw (rows, IC) = dyᵀ · x or, with add, += that. The rows of dy (R, rows) begin dy_row elements apart: OC for some rows of a
// matrix (OC, IC). With db, for all rows of a matrix alone: also linear_bias_grad().
void linear_wgrad(accum *dw, accum *db, const real *dy, int64_t dy_row, const real *x, int64_t R, int64_t IC, int64_t rows,
                  bool add, cf_stream *stream);
// Fewest rows of dw that make an efficient product: a gradient is computed owner by owner if each has as many. A function of IC
// alone, so that all ranks decide alike, whatever their devices.
int64_t linear_wgrad_rows_min(int64_t IC);
// Fewest rows of x and dy whose product is worth adding to a gradient separately: each addition reads and writes all of dw.
int64_t linear_wgrad_depth_min(void);
// db (OC) += sum over rows of dy (R, OC); each column is summed in row order within fixed blocks of rows
void linear_bias_grad(accum *db, const real *dy, int64_t R, int64_t OC, cf_stream *stream);

// For benchmarks: the library's algorithms for a product are timed (default), or the first of its list is used.
// linear_algorithm(): place of the last product's algorithm in that list.
void linear_time_algorithms(bool all);
int linear_algorithm(void);

CF_EXTERN_C_END
