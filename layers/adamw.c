// AdamW on the CPU, and the two looks at the gradients that come before it.
//
// Sums are taken over a fixed number of blocks and the blocks added in order, so they have the same
// bits however many threads there are.
#include "adamw.h"
#include "math_real.h"

enum { BLOCKS = 256 /* <= SQUARES_SCRATCH */, PARALLEL_MIN = 1 << 14 };

typedef struct range {
    int64_t begin, end;
} range;

static range block_range(int64_t i, int64_t n) {
    int64_t block = (n + BLOCKS - 1) / BLOCKS;
    int64_t begin = i * block < n ? i * block : n;
    return (range){begin, n - begin < block ? n : begin + block};
}

// m = β1 m + (1 − β1) g;  v = β2 v + (1 − β2) g²;  w −= lr · (m̂ / (sqrt(v̂) + ε) + decay · w),
// m̂ and v̂ being m and v over 1 − βᵗ.
static void update(precise *restrict w, precise *restrict m, precise *restrict v, const precise *restrict g,
                   int64_t n, adamw a) {
    const real scale = (real)a.scale, beta1 = (real)a.beta1, beta2 = (real)a.beta2, eps = (real)a.eps;
    const real rest1 = (real)(1 - a.beta1), rest2 = (real)(1 - a.beta2);
    const real rate = (real)(a.lr / (1 - pow(a.beta1, (double)a.step)));
    const real second = (real)(1 / (1 - pow(a.beta2, (double)a.step)));
    const real decay = (real)(a.lr * a.weight_decay);
#pragma omp parallel for simd if (parallel : n >= PARALLEL_MIN)
    for (int64_t i = 0; i < n; i++) {
        real gradient = scale * g[i];
        m[i] = beta1 * m[i] + rest1 * gradient;
        v[i] = beta2 * v[i] + rest2 * gradient * gradient;
        w[i] -= rate * m[i] / (sqrt_real(v[i] * second) + eps) + decay * w[i];
    }
}

void adamw_update(real *w, precise *master, precise *m, precise *v, const precise *g, int64_t n, adamw a,
                  cf_stream *stream) {
    update(master ? master : w, m, v, g, n, a);
    if (master) cf_copy(w, master, n * (int64_t)sizeof *w, stream);
}

void adamw_master(precise *master, const real *w, int64_t n, cf_stream *stream) {
    cf_copy(master, w, n * (int64_t)sizeof *w, stream); // here weights are precise
}

void sum_of_squares(double *sum, double *scratch, const precise *x, int64_t n, cf_stream *stream) {
    (void)stream;
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
    (void)stream;
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
