// AdamW on the CPU, and the sum of squares of the gradients that comes before it.
//
// Sums are over a fixed number of blocks, whose sums are added in order, so their bits do not depend on the number of threads.
#include "adamw.h"
#include "../kernels/math_real.h"

enum { BLOCKS = 256 /* <= SQUARES_SCRATCH */, PARALLEL_MIN = 1 << 14 };

void adamw_update(real *w, accum *master, accum *m, accum *v, const accum *g, int64_t n, adamw a, cf_stream *stream) {
    accum *restrict weight = master ? master : (accum *)(void *)w; // or weights that are their own masters
    const adamw_factors f = adamw_factors_of(a);
#pragma omp parallel for simd if (parallel : n >= PARALLEL_MIN)
    for (int64_t i = 0; i < n; i++) {
        accum gradient = f.scale * g[i];
        m[i] = f.beta1 * m[i] + f.rest1 * gradient;
        v[i] = f.beta2 * v[i] + f.rest2 * gradient * gradient;
        weight[i] -= f.rate * m[i] / (sqrt(v[i] * f.second) + f.eps) + f.decay * weight[i];
    }
#pragma omp parallel for simd if (parallel : n >= PARALLEL_MIN)
    for (int64_t i = 0; i < (master ? n : 0); i++) w[i] = real_of(master[i]);
}

void sum_of_squares(double *sum, double *scratch, const accum *x, int64_t n, cf_stream *stream) {
    const int64_t block = ceil_div(n, BLOCKS);
#pragma omp parallel for if (n >= PARALLEL_MIN)
    for (int64_t i = 0; i < BLOCKS; i++) {
        const int64_t end = smaller((i + 1) * block, n);
        double squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t j = i * block; j < end; j++) squares += (double)x[j] * (double)x[j];
        scratch[i] = squares;
    }
    for (int64_t i = 0; i < BLOCKS; i++) *sum += scratch[i];
}
