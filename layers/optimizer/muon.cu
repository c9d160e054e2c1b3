// Muon on the GPU: three products by cuBLASLt an iteration, of all matrices at once. It has none for X Xᵀ that computes half.
#include "muon.h"
#include "../kernels/elementwise.h"
#include "../kernels/kernel.h"
#include "update.h"

// to = a x + b y, copy = to; y, copy, squares may be NULL. squares: a is divided by the norm.
template <typename T> struct blend_map {
    T *to;
    const T *x;
    const real *y;
    accum a, b;
    const double *squares;
    real *copy;

    template <int W> __device__ void at(int64_t i) const {
        values<W> v = load<W>(x + i), more = y ? load<W>(y + i) : values<W>{};
        const accum by = squares ? a / (accum)(sqrt(*squares) + 1e-7) : a;
#pragma unroll
        for (int k = 0; k < W; k++) v.at[k] = by * v.at[k] + b * more.at[k];
        store<W>(to + i, v);
        if (copy) store<W>(copy + i, v);
    }
};

template <typename T> static void blend(blend_map<T> map, int64_t n, cf_stream *stream) {
    each(map, n, packable(0, map.to, map.x, map.y, map.copy), stream);
}

static int64_t aligned(int64_t n) {
    return ceil_div(n, PACK) * PACK;
}

void orthogonalise(real *x, int64_t count, int64_t rows, int64_t columns, accum *scratch, cf_stream *stream) {
    const bool tall = rows > columns;
    const int64_t n = rows * columns, m = smaller(rows, columns), squares = aligned(count * m * m);
    accum *wide = scratch + 2 * squares;
    double *sum = (double *)(wide + aligned(count * n));
    real *from = (real *)wide, *to = x; // in the last of an odd number of iterations `to` is x again
    convert_to_accum(wide, x, count * n, stream);
    cf_zero(sum, count * (int64_t)sizeof *sum, stream);
    for (int64_t i = 0; i < count; i++) sum_of_squares(sum + i, sum + aligned(count), wide + i * n, n, stream);
    for (int64_t i = 0; i < count; i++)
        blend<real>({from + i * n, x + i * n, NULL, iteration_factors_of(0).first, 0, sum + i, NULL}, n, stream);
    for (int k = 0; k < ITERATIONS; k++) {
        const iteration_factors f = iteration_factors_of(k);
        const gemm_matrix y = {from, columns, n, false}, gram = {scratch, m, m * m, false},
                          square = {scratch + squares, m, m * m, false};
        multiply_batch(count, m, m, larger(rows, columns), {from, columns, n, tall}, {from, columns, n, !tall}, gram, false, false,
                       stream);
        multiply_batch(count, m, m, m, gram, gram, square, false, false, stream);
        blend<real>({(real *)gram.at, (real *)gram.at, (real *)square.at, f.linear, f.square, NULL, NULL}, count * m * m, stream);
        multiply_batch(count, rows, columns, m, tall ? y : gram, tall ? gram : y, {to, columns, n, false}, false, false, stream,
                       from);
        real *last = from;
        from = to, to = last;
    }
}

void orthogonal_update(real *w, accum *master, const real *x, int64_t n, double keep, double by, cf_stream *stream) {
    if (master)
        blend<accum>({master, master, x, (accum)keep, (accum)by, NULL, w}, n, stream);
    else
        blend<real>({w, w, x, (accum)keep, (accum)by, NULL, NULL}, n, stream);
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
