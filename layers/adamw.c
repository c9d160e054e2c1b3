// AdamW on the CPU, and the two looks at the gradients that come before it.
//
// Sums are taken over a fixed number of blocks and the blocks added in order, so they have the same
// bits however many threads there are.
#include "adamw.h"
#include "math_real.h"
#include "../commfuse/die.h"

enum { BLOCKS = 256 /* <= SQUARES_SCRATCH */, PARALLEL_MIN = 1 << 14 };

typedef struct range {
    int64_t begin, end;
} range;

static range block_range(int64_t i, int64_t n) {
    int64_t block = ceil_div(n, BLOCKS);
    int64_t begin = i * block < n ? i * block : n;
    return (range){begin, n - begin < block ? n : begin + block};
}

// m = β1 m + (1 − β1) g;  v = β2 v + (1 − β2) g²;  w −= lr · (m̂ / (sqrt(v̂) + ε) + decay · w),
// m̂ and v̂ being m and v over 1 − βᵗ.
static void update(precise *restrict w, precise *restrict m, precise *restrict v, const precise *restrict g, int64_t n, adamw a) {
    const precise scale = (precise)a.scale, eps = (precise)a.eps;
    const precise beta1 = (precise)a.beta1, beta2 = (precise)a.beta2;
    const precise rest1 = (precise)(1 - a.beta1), rest2 = (precise)(1 - a.beta2);
    const precise rate = (precise)(a.lr / (1 - pow(a.beta1, (double)a.step)));
    const precise second = (precise)(1 / (1 - pow(a.beta2, (double)a.step)));
    const precise decay = (precise)(a.lr * a.weight_decay);
#pragma omp parallel for simd if (parallel : n >= PARALLEL_MIN)
    for (int64_t i = 0; i < n; i++) {
        precise gradient = scale * g[i];
        m[i] = beta1 * m[i] + rest1 * gradient;
        v[i] = beta2 * v[i] + rest2 * gradient * gradient;
        w[i] -= rate * m[i] / (sqrt(v[i] * second) + eps) + decay * w[i];
    }
}

void adamw_update(real *w, precise *master, precise *m, precise *v, const precise *g, int64_t n, adamw a, cf_stream *stream) {
    if (!master && REAL_DTYPE != PRECISE_DTYPE) cf_die(NULL, "adamw: %s weights need masters", cf_dtype_name(REAL_DTYPE));
    update(master ? master : (precise *)(void *)w, m, v, g, n, a); // or weights that are their own masters
    if (!master) return;
#pragma omp parallel for simd if (parallel : n >= PARALLEL_MIN)
    for (int64_t i = 0; i < n; i++) w[i] = real_of(master[i]);
}

void adamw_master(precise *master, const real *w, int64_t n, cf_stream *stream) {
#pragma omp parallel for simd if (parallel : n >= PARALLEL_MIN)
    for (int64_t i = 0; i < n; i++) master[i] = precise_of(w[i]);
}

void sum_of_squares(double *sum, double *scratch, const precise *x, int64_t n, cf_stream *stream) {
#pragma omp parallel for if (n >= PARALLEL_MIN)
    for (int64_t i = 0; i < BLOCKS; i++) {
        range block = block_range(i, n);
        double squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t j = block.begin; j < block.end; j++) squares += (double)x[j] * (double)x[j];
        scratch[i] = squares;
    }
    for (int64_t i = 0; i < BLOCKS; i++) *sum += scratch[i];
}

int64_t first_nonfinite(const precise *x, int64_t n, cf_stream *stream) {
    int64_t first = n;
#pragma omp parallel for reduction(min : first) if (n >= PARALLEL_MIN)
    for (int64_t i = 0; i < BLOCKS; i++) {
        range block = block_range(i, n);
        int bad = 0;
#pragma omp simd reduction(| : bad)
        for (int64_t j = block.begin; j < block.end; j++) bad |= x[j] - x[j] != 0; // NaN of NaN and infinity
        if (!bad) continue;
        int64_t j = block.begin;
        while (isfinite(x[j])) j++;
        first = j < first ? j : first;
    }
    return first < n ? first : -1;
}
