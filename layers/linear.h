// Linear layer. Weights are (OC, IC) row-major, as in GPT-2's files after transposition (llm.c's order).
#ifndef LINEAR_H
#define LINEAR_H

#include "real.h"

CF_EXTERN_C_BEGIN

// w (OC, IC) in the layout that products read fastest, made once per operation, whatever its number of slices. Returns the
// w to pass to these products: on the CPU a copy in `prepared`, on a GPU w itself. Forward's copy is wᵀ, since a product
// with w reorders it in every call (bench_fuse, chunking). Rows of both copies are padded: without a gap some shapes map
// many rows to the same few cache sets. Valid until w or `prepared` is written. prepared: linear_prepared_size() elements,
// enough for either; none on a GPU.
int64_t linear_prepared_size(int64_t IC, int64_t OC);
typedef const real *linear_prepare(real *prepared, const real *w, int64_t IC, int64_t OC, cf_stream *stream);
linear_prepare linear_prepare_forward, linear_prepare_dgrad;

// Rows that a product reads and writes: `blocks` blocks of `rows` rows, whose starts are `in` rows apart in the input and `out`
// rows apart in the output. One product where the library has a batched one.
typedef struct linear_rows {
    int64_t blocks, rows, in, out;
} linear_rows;
static inline linear_rows linear_all(int64_t R) { // R = blocks · rows rows, one after another
    linear_rows r = {1, R, R, R};
    return r;
}

// out (R, OC) = x (R, IC) · wᵀ + bias, w prepared for forward. bias (OC) may be NULL. With pre, which has the layout of out and
// goes with a bias: pre is that, out = gelu(pre); both are kept, pre for backward. add: to out, without bias and pre, as products
// over groups of inputs are that arrive one after another.
void linear_forward(real *out, real *pre, const real *x, const real *w, const real *bias, bool add, linear_rows r, int64_t IC,
                    int64_t OC, cf_stream *stream);
// dx (R, IC) = dy (R, OC) · w, prepared for dgrad. With pre, which has the layout of dx, where x = gelu(pre): the gradient of
// pre, (dy · w) · gelu'(pre). dx is not pre. add: to dx, without pre.
void linear_dgrad(real *dx, const real *dy, const real *w, const real *pre, bool add, linear_rows r, int64_t IC, int64_t OC,
                  cf_stream *stream);
// dw (rows, IC) = dyᵀ · x or, with add, += that. dy (R, rows) has dy_row elements from one row to the next: OC for some rows, or
// all, of a matrix (OC, IC).
void linear_wgrad(precise *dw, const real *dy, int64_t dy_row, const real *x, int64_t R, int64_t IC, int64_t rows, bool add,
                  cf_stream *stream);
// Fewest rows of dw that make an efficient product: each owner must have as many for a gradient to be computed owner by
// owner. A function of IC alone, so that all ranks decide alike, whatever their devices.
int64_t linear_wgrad_rows_min(int64_t IC);
// Fewest rows of x and dy for which it pays to add their part to a gradient separately: each time reads and writes all of dw.
int64_t linear_wgrad_depth_min(void);
// db (OC) += sum over rows of dy (R, OC); each column is summed in row order within fixed blocks of rows
void linear_bias_grad(precise *db, const real *dy, int64_t R, int64_t OC, cf_stream *stream);

// For benchmarks: whether the library's algorithms for a product are timed (default), or the first of its list is used.
// linear_algorithm(): the last product's place in that list.
void linear_time_algorithms(bool all);
int linear_algorithm(void);

CF_EXTERN_C_END
#endif
