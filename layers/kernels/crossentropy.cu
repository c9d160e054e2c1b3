// Softmax cross-entropy on the GPU: the logits are the largest tensor of a step, so each function reads them from memory once.
// A block processes a row, of whole packs: a thread every THREADS-th, of which it loads FLIGHT at a time.
//
// Statistics: each thread keeps the maximum so far and the sum of exponentials relative to it; a new maximum rescales the sum.
// Then the block finds its maximum, every thread rescales once more, and the sums are added (kernel.h: in a fixed order). A
// maximum ignores NaN, but the sum, and so the loss, becomes NaN; an infinite logit also gives NaN: infinity minus infinity.
//
// Backward is in place: a thread loads a pack, computes its gradient and stores it.
//
// The fused kernel keeps its row in shared memory if two rows fit on a multiprocessor, as on an H100 two of GPT-2's vocabulary in
// bf16, 200 kB. So it moves 2 · R · V elements, as the gradient alone does. Otherwise it reads the row a second time, from the end,
// which may still be in the caches. (On an H200 all of it took 1.63 times as long as the gradient alone: caches did not keep it.)
#include "crossentropy.h"
#include "kernel.h"

enum { THREADS = 512, FLIGHT = 4 };
enum { STATIC = 3 << 10 }; // bytes of shared memory that a block takes besides its row, at most

typedef struct softmax {
    float maximum, sum; // sum of exp(logit − maximum)
} softmax;

// For logits in bf16 the hardware's exponential is exact enough.
static __device__ inline float exponential(float x) {
    return PACK == 8 ? __expf(x) : expf(x);
}

static __device__ inline float shift_of(float maximum) {
    return maximum == -INFINITY ? 0 : maximum; // −inf − (−inf) would be NaN
}

template <int W> static __device__ inline softmax include(softmax s, const values<W> &x) {
    float maximum = s.maximum;
#pragma unroll
    for (int i = 0; i < W; i++) maximum = fmaxf(maximum, x.at[i]);
    float shift = shift_of(maximum), sum = s.sum * exponential(s.maximum - shift);
#pragma unroll
    for (int i = 0; i < W; i++) sum += exponential(x.at[i] - shift);
    return {maximum, sum};
}

static __device__ inline softmax merge(softmax a, softmax b) {
    float maximum = a.maximum > b.maximum ? a.maximum : b.maximum;
    if (maximum == -INFINITY) return {maximum, a.sum + b.sum}; // both empty, or NaN
    return {maximum, a.sum * expf(a.maximum - maximum) + b.sum * expf(b.maximum - maximum)};
}

typedef cf_pack<real> row_pack;
// The packs of a row that its block keeps in shared memory, from the first on.
typedef struct kept {
    row_pack *at;
    int64_t packs;
} kept;

// Loads FLIGHT of the packs of a row, every THREADS-th from pack p on, then calls f with each and its number.
template <typename F> static __device__ inline void packs_from(const real *row, int64_t packs, kept have, int64_t p, F f) {
    row_pack raw[FLIGHT];
#pragma unroll
    for (int k = 0; k < FLIGHT; k++) {
        const int64_t i = p + k * THREADS;
        if (i < packs) raw[k] = i < have.packs ? have.at[i] : load_raw<PACK>(row + i * PACK);
    }
#pragma unroll
    for (int k = 0; k < FLIGHT; k++)
        if (p + k * THREADS < packs) f(raw[k], p + k * THREADS);
}

// Of the first n elements of a row. keep: gets their packs, each thread its own, which it reads again; NULL: none.
static __device__ inline softmax softmax_of(const real *row, int64_t n, row_pack *keep) {
    softmax s = {-INFINITY, 0};
    const int64_t packs = n / PACK;
    if (threadIdx.x < n % PACK) s = include(s, load<1>(row + packs * PACK + threadIdx.x));
    for (int64_t p = threadIdx.x; p < packs; p += THREADS * FLIGHT)
        packs_from(row, packs, {NULL, 0}, p, [&](const row_pack &raw, int64_t i) {
            if (keep) keep[i] = raw;
            s = include(s, values_of(raw));
        });
    float maximum[1] = {s.maximum};
    over_block<maximising>(maximum);
    float sum[1] = {s.sum * expf(s.maximum - shift_of(maximum[0]))};
    over_block<adding>(sum);
    return {maximum[0], sum[0]};
}

// The difference of two logits comes first: added to a huge one the logarithm would be lost.
static __device__ inline float loss_of(softmax s, float target) {
    return logf(s.sum) + (s.maximum - target);
}

static __global__ void __launch_bounds__(THREADS)
    stats_kernel(accum *stats, const real *logits, const int32_t *targets, int64_t first, int64_t valid, int64_t V) {
    int64_t r = blockIdx.x;
    const real *row = logits + r * V;
    softmax s = softmax_of(row, valid, NULL);
    if (threadIdx.x > 0) return;
    stats[r * 3] = s.maximum;
    stats[r * 3 + 1] = s.sum;
    stats[r * 3 + 2] = is_here(targets[r], first, valid) ? (float)row[targets[r] - first] : 0;
}

void crossentropy_stats(accum *stats, const real *logits, const int32_t *targets, int64_t first, int64_t valid, int64_t R,
                        int64_t V, cf_stream *stream) {
    cf_launch(stats_kernel, {R}, THREADS, stream, stats, logits, targets, first, valid, V);
}

// A row of logits becomes its gradient, the end first. target: its column, which may be another rank's.
static __device__ inline void differentiate(real *row, kept have, softmax s, float scale, float z, int64_t target, int64_t valid,
                                            int64_t V) {
    const float factor = scale * (1 + 2 * z * loss_of(s, 0)) / s.sum;
    const int64_t column = is_here(target, 0, valid) ? target : -1;
    const int64_t packs = V / PACK, stretch = THREADS * FLIGHT, last = (packs - 1) / stretch;
    for (int64_t p = last * stretch + threadIdx.x; p >= 0; p -= stretch)
        packs_from(row, packs, have, p, [&](const row_pack &raw, int64_t i) {
            const int64_t c = i * PACK;
            values<PACK> x = values_of(raw);
#pragma unroll
            for (int k = 0; k < PACK; k++) x.at[k] = exponential(x.at[k] - s.maximum) * factor;
            if (c <= column && column < c + PACK) // rare
#pragma unroll
                for (int k = 0; k < PACK; k++) x.at[k] -= c + k == column ? scale : 0;
            if (valid < c + PACK)
#pragma unroll
                for (int k = 0; k < PACK; k++) x.at[k] = c + k < valid ? x.at[k] : 0;
            store<PACK>(row + c, x);
        });
}

static __global__ void __launch_bounds__(THREADS)
    combine_kernel(accum *losses, real *logits, const accum *all, int64_t ranks, const int32_t *targets, float scale, float z,
                   int64_t first, int64_t valid, int64_t R, int64_t V) {
    int64_t r = blockIdx.x;
    softmax s = {-INFINITY, 0};
    float target = 0;
    for (int64_t i = 0; i < ranks; i++) {
        const accum *stats = all + (i * R + r) * 3;
        s = merge(s, {stats[0], stats[1]});
        target += stats[2];
    }
    if (threadIdx.x == 0) losses[r] = loss_of(s, target);
    if (scale != 0) differentiate(logits + r * V, {NULL, 0}, s, scale, z, targets[r] - first, valid, V);
}

void crossentropy_combine(accum *losses, real *logits, const accum *all, int64_t ranks, const int32_t *targets, double scale,
                          double z, int64_t first, int64_t valid, int64_t R, int64_t V, cf_stream *stream) {
    cf_launch(combine_kernel, {R}, THREADS, stream, losses, logits, all, ranks, targets, (float)scale, (float)z, first, valid, R,
              V);
}

template <bool KEEP>
static __global__ void __launch_bounds__(THREADS, 2)
    fused_kernel(accum *losses, real *logits, const int32_t *targets, float scale, float z, int64_t valid, int64_t V) {
    int64_t r = blockIdx.x, target = targets[r];
    real *row = logits + r * V;
    const kept have = {KEEP ? (row_pack *)block_memory() : NULL, KEEP ? valid / PACK : 0};
    float at_target = (float)row[target]; // before it changes: the sum below waits for all threads
    softmax s = softmax_of(row, valid, have.at);
    if (threadIdx.x == 0) losses[r] = loss_of(s, at_target);
    differentiate(row, have, s, scale, z, target, valid, V);
}

void crossentropy_fused(accum *losses, real *logits, const int32_t *targets, double scale, double z, int64_t valid, int64_t R,
                        int64_t V, cf_stream *stream) {
    const int64_t bytes = valid / PACK * (int64_t)sizeof(row_pack);
    const bool keep = 2 * (bytes + STATIC) <= (int64_t)cf_cuda_properties()->sharedMemPerMultiprocessor;
    if (keep) CF_CUDA(cudaFuncSetAttribute(fused_kernel<true>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    cf_launch(keep ? fused_kernel<true> : fused_kernel<false>, {R, 1, keep ? bytes : 0}, THREADS, stream, losses, logits, targets,
              (float)scale, (float)z, valid, V);
}

void crossentropy_sum(double *sum, const accum *losses, int64_t n, cf_stream *stream) {
    cf_launch(sum_kernel<accum>, {n > 0}, SUM_THREADS, stream, sum, losses, n);
}
