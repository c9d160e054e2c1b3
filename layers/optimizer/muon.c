// Muon on the CPU: products in fp32 by gemm.h.
#include "muon.h"
#include "../kernels/elementwise.h"
#include "../kernels/gemm.h"
#include "update.h"

enum { PARALLEL_MIN = 1 << 14 };

void nesterov_momentum(real *u, accum *momentum, const accum *g, int64_t n, optimizer_settings s, cf_stream *stream) {
    const accum keep = (accum)s.momentum, rest = (accum)((1 - s.momentum) * s.scale);
#pragma omp parallel for simd if (parallel : n >= PARALLEL_MIN)
    for (int64_t i = 0; i < n; i++) {
        momentum[i] = keep * momentum[i] + rest * g[i];
        u[i] = real_of(keep * momentum[i] + rest * g[i]);
    }
}

// to = a x + b y; y may be NULL
static void blend(accum *to, accum a, const accum *x, accum b, const accum *y, int64_t n) {
#pragma omp parallel for simd if (parallel : n >= PARALLEL_MIN)
    for (int64_t i = 0; i < n; i++) to[i] = a * x[i] + (y ? b * y[i] : 0);
}

// That Y is added, too, is in the factor: 1 on its diagonal. So a product reads and writes each Y once, and nothing copies it. The
// last of an odd number of iterations writes x, if it is of accum.
static void orthogonalise_one(real *x, int64_t rows, int64_t columns, accum *scratch, cf_stream *stream) {
    const bool tall = rows > columns, wide = sizeof *x == sizeof *scratch;
    const int64_t n = rows * columns, m = smaller(rows, columns);
    accum *gram = scratch, *square = gram + m * m, *y = square + m * m, *next = wide ? (accum *)(void *)x : y + n;
    double sum = 0, squares[SQUARES_SCRATCH];
    if (!wide) convert_to_accum(next, x, n, stream);
    sum_of_squares(&sum, squares, next, n, stream);
    blend(y, iteration_factors_of(0).first / (accum)(sqrt(sum) + 1e-7), next, 0, NULL, n);
    for (int k = 0; k < ITERATIONS; k++) {
        const iteration_factors f = iteration_factors_of(k);
        gemm(tall, !tall, m, m, larger(rows, columns), y, columns, y, columns, 0, gram, m, stream);
        gemm(false, false, m, m, m, gram, m, gram, m, 0, square, m, stream);
        blend(gram, f.linear, gram, f.square, square, m * m);
        for (int64_t i = 0; i < m; i++) gram[i * m + i] += 1;
        gemm(false, false, rows, columns, m, tall ? y : gram, m, tall ? gram : y, columns, 0, next, columns, stream);
        accum *last = y;
        y = next, next = last;
    }
    if (!wide) convert_to_real(x, y, n, stream);
}

void orthogonalise(real *x, int64_t count, int64_t rows, int64_t columns, accum *scratch, cf_stream *stream) {
    for (int64_t i = 0; i < count; i++) orthogonalise_one(x + i * rows * columns, rows, columns, scratch, stream);
}

int64_t orthogonalise_layers(void) {
    return LAYERS_ON_CPU;
}

void orthogonal_update(real *w, accum *master, const real *x, int64_t n, double keep, double by, cf_stream *stream) {
    accum *weight = master ? master : (accum *)(void *)w;
#pragma omp parallel for simd if (parallel : n >= PARALLEL_MIN)
    for (int64_t i = 0; i < n; i++) weight[i] = (accum)keep * weight[i] + (accum)by * accum_of(x[i]);
    if (master) convert_to_real(w, master, n, stream);
}

void copy_block(real *to, int64_t to_row, const real *from, int64_t from_row, int64_t rows, int64_t columns, cf_stream *stream) {
    for (int64_t r = 0; r < rows; r++) cf_copy(to + r * to_row, from + r * from_row, columns * (int64_t)sizeof *to, stream);
}
