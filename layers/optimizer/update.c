// The optimizers on the CPU, and the sum of squares of the gradients that comes before.
//
// Sums are over a fixed number of blocks, whose sums are added in order, so their bits do not depend on the number of threads.
#include "../kernels/math_real.h"
#include "update.h"

enum { BLOCKS = 256 /* <= SQUARES_SCRATCH */, PARALLEL_MIN = 1 << 14 };

// NAME_update(): a step on n elements, which the compiler vectorises.
#define UPDATE(NAME, STATES, ...)                                                                                                  \
    static void NAME##_update(accum *restrict w, accum *const *state, const accum *g, int64_t n, optimizer_settings s) {           \
        const NAME##_factors f = NAME##_factors_of(s);                                                                             \
        accum *first = state[0], *last = state[STATES - 1];                                                                        \
        _Pragma("omp parallel for simd if (parallel : n >= PARALLEL_MIN)") for (int64_t i = 0; i < n; i++)                         \
            NAME##_element(f, w + i, g[i], first + i, last + i);                                                                   \
    }
OPTIMIZERS(UPDATE)

void optimizer_update(const optimizer_row *o, real *w, accum *master, accum *const *state, const accum *g, int64_t n,
                      optimizer_settings s, cf_stream *stream) {
    accum *weight = master ? master : (accum *)(void *)w; // or weights that are their own masters
#define APPLY(NAME, ...)                                                                                                           \
    if (strcmp(o->name, #NAME) == 0) NAME##_update(weight, state, g, n, s);
    OPTIMIZERS(APPLY)
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
