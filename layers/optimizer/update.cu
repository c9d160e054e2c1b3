// The optimizers on the GPU, and the sum of squares of the gradients that comes before.
//
// The update is one pass over memory: it reads master weights, gradient and state, and writes all but the gradient, and
// the rounded weights. All loads of a thread's pack are in flight together. The norm is a sum of doubles over SQUARES_SCRATCH
// blocks (fewer for small n), on every GPU; a single block adds their partial sums.
#include "../kernels/kernel.h"
#include "update.h"

enum { THREADS = 256, FLIGHT = 4, ACCUM_PACK = cf_pack<accum>::N };

template <class Element> struct update_map {
    real *w;
    accum *master, *first, *last; // last: first again where there is one value of state
    const accum *g;
    Element element;

    template <int W> __device__ void at(int64_t i) const {
        values<W> weight = master ? load<W>(master + i) : load<W>(w + i);
        values<W> g1 = load<W>(g + i), s1 = load<W>(first + i), s2 = Element::states > 1 ? load<W>(last + i) : s1;
#pragma unroll
        for (int k = 0; k < W; k++) element(&weight.at[k], g1.at[k], &s1.at[k], &s2.at[k]);
        store<W>(first + i, s1);
        if (Element::states > 1) store<W>(last + i, s2);
        if (master) store<W>(master + i, weight);
        store<W>(w + i, weight);
    }
};

#define ELEMENT(NAME, STATES, ...)                                                                                                 \
    struct NAME##_of_element {                                                                                                     \
        enum { states = STATES };                                                                                                  \
        NAME##_factors f;                                                                                                          \
        __device__ void operator()(accum *w, accum g, accum *first, accum *last) const { NAME##_element(f, w, g, first, last); }   \
    };
ELEMENTS(ELEMENT)

void optimizer_update(const optimizer_row *o, real *w, accum *master, accum *const *state, const accum *g, int64_t n,
                      optimizer_settings s, cf_stream *stream) {
    accum *first = state[0], *last = state[o->states - 1];
    const bool packed = packable(0, w, master, first, last, g);
#define APPLY(NAME, ...)                                                                                                           \
    if (strcmp(o->name, #NAME) == 0)                                                                                               \
        each(update_map<NAME##_of_element>{w, master, first, last, g, {NAME##_factors_of(s)}}, n, packed, stream);
    ELEMENTS(APPLY)
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
    over_block<adding>(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum[0];
}

void sum_of_squares(double *sum, double *scratch, const accum *x, int64_t n, cf_stream *stream) {
    int64_t packs = (uintptr_t)x % 16 == 0 ? n / ACCUM_PACK : 0;
    int64_t blocks = ceil_div(n, THREADS * FLIGHT * ACCUM_PACK); // fewer for small n
    if (blocks > SQUARES_SCRATCH) blocks = SQUARES_SCRATCH;
    cf_launch(squares_kernel, {blocks}, THREADS, stream, scratch, x, packs, n);
    cf_launch(sum_kernel<double>, {n > 0}, SUM_THREADS, stream, sum, scratch, blocks);
}
