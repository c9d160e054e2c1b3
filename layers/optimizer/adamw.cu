// AdamW on the GPU, and the sum of squares of the gradients that comes before it.
//
// The update is one pass over memory: it reads master weights, gradient and both moments, and writes all but the gradient, and
// the rounded weights. All loads of a thread's pack are in flight together. The norm is a sum of doubles over SQUARES_SCRATCH
// blocks (fewer for small n), on every GPU; a single block adds their partial sums.
#include "adamw.h"
#include "../kernels/kernel.h"

enum { THREADS = 256, FLIGHT = 4, ACCUM_PACK = cf_pack<accum>::N };

struct update_map {
    real *w;
    accum *master, *m, *v;
    const accum *g;
    adamw_factors f;

    template <int W> __device__ void at(int64_t i) const {
        values<W> weight = master ? load<W>(master + i) : load<W>(w + i);
        values<W> g1 = load<W>(g + i), m1 = load<W>(m + i), v1 = load<W>(v + i);
#pragma unroll
        for (int k = 0; k < W; k++) {
            float gradient = f.scale * g1.at[k];
            m1.at[k] = f.beta1 * m1.at[k] + f.rest1 * gradient;
            v1.at[k] = f.beta2 * v1.at[k] + f.rest2 * gradient * gradient;
            weight.at[k] -= f.rate * m1.at[k] / (sqrtf(v1.at[k] * f.second) + f.eps) + f.decay * weight.at[k];
        }
        store<W>(m + i, m1);
        store<W>(v + i, v1);
        if (master) store<W>(master + i, weight);
        store<W>(w + i, weight);
    }
};

void adamw_update(real *w, accum *master, accum *m, accum *v, const accum *g, int64_t n, adamw a, cf_stream *stream) {
    each(update_map{w, master, m, v, g, adamw_factors_of(a)}, n, packable(0, w, master, m, v, g), stream);
}

static __device__ inline double square(float x) {
    return (double)x * (double)x;
}

// partial (gridDim.x). Blocks sum groups of THREADS packs in turn, then the remaining elements one by one.
static __global__ void __launch_bounds__(THREADS) squares_kernel(double *partial, const accum *x, int64_t packs, int64_t n) {
    int64_t step = (int64_t)gridDim.x * THREADS;
    double sum[1] = {0};
    for (int64_t p = (int64_t)blockIdx.x * THREADS + threadIdx.x; p < packs; p += step * FLIGHT) {
        values<ACCUM_PACK> v[FLIGHT];
#pragma unroll
        for (int k = 0; k < FLIGHT; k++)
            v[k] = p + k * step < packs ? load<ACCUM_PACK>(x + (p + k * step) * ACCUM_PACK) : values<ACCUM_PACK>{};
#pragma unroll
        for (int k = 0; k < FLIGHT; k++)
#pragma unroll
            for (int i = 0; i < ACCUM_PACK; i++) sum[0] += square(v[k].at[i]);
    }
    for (int64_t i = packs * ACCUM_PACK + (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step) sum[0] += square(x[i]);
    block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum[0];
}

void sum_of_squares(double *sum, double *scratch, const accum *x, int64_t n, cf_stream *stream) {
    int64_t packs = (uintptr_t)x % 16 == 0 ? n / ACCUM_PACK : 0;
    int64_t blocks = ceil_div(n, THREADS * FLIGHT * ACCUM_PACK); // fewer for small n
    if (blocks > SQUARES_SCRATCH) blocks = SQUARES_SCRATCH;
    cf_launch(squares_kernel, {blocks}, THREADS, stream, scratch, x, packs, n);
    cf_launch(sum_kernel<double>, {n > 0}, SUM_THREADS, stream, sum, scratch, blocks);
}
