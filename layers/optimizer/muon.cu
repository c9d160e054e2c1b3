// Muon on the GPU: three products by cuBLASLt an iteration, of all matrices at once. It has none for X Xᵀ that computes half. What
// is added to a product is read by it, as with a residual stream, so between the products nothing moves.
#include "muon.h"
#include "../kernels/elementwise.h"
#include "../kernels/kernel.h"
#include "update.h"

struct momentum_map {
    real *u;
    accum *momentum;
    const accum *g;
    accum keep, rest;

    template <int W> __device__ void at(int64_t i) const {
        values<W> m = load<W>(momentum + i), v = load<W>(g + i);
#pragma unroll
        for (int k = 0; k < W; k++) {
            m.at[k] = keep * m.at[k] + rest * v.at[k];
            v.at[k] = keep * m.at[k] + rest * v.at[k];
        }
        store<W>(momentum + i, m);
        store<W>(u + i, v);
    }
};

void nesterov_momentum(real *u, accum *momentum, const accum *g, int64_t n, optimizer_settings s, cf_stream *stream) {
    const momentum_map map = {u, momentum, g, (accum)s.momentum, (accum)((1 - s.momentum) * s.scale)};
    each(map, n, packable(0, u, momentum, g), stream);
}

static int64_t aligned(int64_t n) {
    return ceil_div(n, PACK) * PACK;
}

// to = a x + b y, copy = to; y, copy, squares may be NULL. squares: a is divided by the norm of each n elements of x.
template <typename T> struct blend_map {
    T *to;
    const T *x;
    const real *y;
    accum a, b;
    real *copy;
    const double *squares;
    int64_t n;

    template <int W> __device__ void at(int64_t i) const {
        values<W> v = load<W>(x + i), more = y ? load<W>(y + i) : values<W>{};
        const accum by = squares ? a / (accum)(sqrt(squares[i / n]) + 1e-7) : a;
#pragma unroll
        for (int k = 0; k < W; k++) v.at[k] = by * v.at[k] + b * more.at[k];
        store<W>(to + i, v);
        if (copy) store<W>(copy + i, v);
    }
};

void orthogonalise(real *x, int64_t count, int64_t rows, int64_t columns, accum *scratch, cf_stream *stream) {
    const bool tall = rows > columns;
    const int64_t n = rows * columns, m = smaller(rows, columns);
    const gemm_matrix gram = {scratch, m, m * m, false}, square = {(real *)scratch + aligned(count * m * m), m, m * m, false};
    real *from = (real *)square.at + aligned(count * m * m), *to = x; // the last of an odd number of iterations writes x
    double *sum = (double *)(from + aligned(count * n));
    cf_zero(sum, count * (int64_t)sizeof *sum, stream);
    add_squares(sum, sum + count, SQUARES_SCRATCH, x, count, n, stream);
    each(blend_map<real>{from, x, NULL, iteration_factors_of(0).first, 0, NULL, sum, n}, count * n,
         packable(count > 1 ? n : 0, from, x), stream);
    for (int k = 0; k < ITERATIONS; k++) {
        const iteration_factors f = iteration_factors_of(k);
        const gemm_matrix y = {from, columns, n, false};
        multiply_batch(count, m, m, larger(rows, columns), {from, columns, n, tall}, {from, columns, n, !tall}, gram, false, false,
                       stream);
        multiply_batch(count, m, m, m, gram, gram, square, false, false, stream, gram.at, f.square, f.linear);
        multiply_batch(count, rows, columns, m, tall ? y : square, tall ? square : y, {to, columns, n, false}, false, false, stream,
                       from);
        real *last = from;
        from = to, to = last;
    }
}

int64_t orthogonalise_layers(void) {
    return LAYERS_ON_GPU;
}

void orthogonal_update(real *w, accum *master, const real *x, int64_t n, double keep, double by, cf_stream *stream) {
    const bool packed = packable(0, w, master, x);
    if (master)
        each(blend_map<accum>{master, master, x, (accum)keep, (accum)by, w, NULL, 0}, n, packed, stream);
    else
        each(blend_map<real>{w, w, x, (accum)keep, (accum)by, NULL, NULL, 0}, n, packed, stream);
}

struct block_map {
    real *to;
    const real *from;
    int64_t to_row, from_row, columns;

    template <int W> __device__ void at(int64_t i) const {
        const int64_t row = i / columns, column = i % columns;
        store<W>(to + row * to_row + column, load<W>(from + row * from_row + column));
    }
};

void copy_block(real *to, int64_t to_row, const real *from, int64_t from_row, int64_t rows, int64_t columns, cf_stream *stream) {
    const block_map map = {to, from, to_row, from_row, columns};
    each(map, rows * columns, packable(to_row, to, from) && from_row % PACK == 0 && columns % PACK == 0, stream);
}
