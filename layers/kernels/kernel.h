// Shared by the model's CUDA kernels. For .cu files alone.
//
// All of them are limited by memory, so they differ little: a thread moves sixteen bytes at a time if addresses allow it (PACK
// elements of real, W = PACK below), else single elements (W = 1); arithmetic is in float for both element types, and a value is
// rounded once, to nearest, when it is stored. There are three ways to cut work, a section each below.
//
// Sums have a fixed order: within a thread that of the elements, within a warp a butterfly (which gives every lane the same
// bits, since addition is commutative), within a block that of the warps. The number of blocks depends on the shape alone, never
// on the GPU.
#pragma once
#include <math.h>
#include "../../commfuse/gpu/cuda.h"
#include "real.h"

#define SLOWER_NOTE "note: a slower way: " // tests/gpu/times.py looks for it, too
enum { WARP = 32, PACK = cf_pack<real>::N };

// The fast exp: its error, some 2⁻²² times the argument, does not matter where the sigmoid is neither 0 nor 1.
#define FUNCTION static __device__ inline
FUNCTION float times_sigmoid(float y, float x) {
    return y * __fdividef(1, 1 + __expf(-x));
}

// --- elements ---

static __device__ inline bool is_here(int64_t index, int64_t first, int64_t count) {
    return index >= first && index < first + count;
}

template <int W> struct values { float at[W]; };

template <int W> static __device__ inline void operator+=(values<W> &to, const values<W> &x) {
#pragma unroll
    for (int i = 0; i < W; i++) to.at[i] += x.at[i];
}

// In assembly, because the compiler splits some of these stores.
template <typename T> static __device__ inline void store_pack(T *to, const cf_pack<T> &pack) {
#ifdef __CUDA_ARCH__
    unsigned word[4];
    memcpy(word, &pack, sizeof word);
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                 : "memory");
#else
    *(cf_pack<T> *)to = pack;
#endif
}

template <int W, typename T> static __device__ inline values<W> values_of(const cf_pack<T, W> &x) {
    values<W> v;
#pragma unroll
    for (int i = 0; i < W; i++) v.at[i] = (float)x.at[i];
    return v;
}

// As they are in memory: of bf16, half of the registers of their values. W is 1, or the address is on a sixteen-byte boundary and
// W elements are whole packs.
template <int W, typename T> static __device__ inline cf_pack<T, W> load_raw(const T *from) {
    return *(const cf_pack<T, W> *)from;
}

template <int W, typename T> static __device__ inline values<W> load(const T *from) {
    return values_of(load_raw<W>(from));
}

// A sum of parts as cf_add would round it. One part after another: all at once take too many registers.
template <int W> static __device__ inline cf_pack<real, W> load_sum(const cf_sum &sum, int64_t i) {
    const real *from = (const real *)sum.from + i, *last = (const real *)sum.to + i;
    cf_pack<real, W> total = load_raw<W>(sum.parts > 0 ? from : last);
#pragma unroll 1
    for (int p = 1; p <= sum.parts; p++) {
        const cf_pack<real, W> next = load_raw<W>(p < sum.parts ? from + p * sum.stride : last);
#pragma unroll
        for (int k = 0; k < W; k++) total.at[k] = (real)((float)total.at[k] + (float)next.at[k]);
    }
    return total;
}

template <int W, typename T> static __device__ inline void store(T *to, const values<W> &x) {
    if constexpr (W == 1) {
        *to = (T)x.at[0];
    } else {
#pragma unroll
        for (int p = 0; p < W / cf_pack<T>::N; p++) {
            cf_pack<T> pack;
#pragma unroll
            for (int i = 0; i < cf_pack<T>::N; i++) pack.at[i] = (T)x.at[p * cf_pack<T>::N + i];
            store_pack(to + p * cf_pack<T>::N, pack);
        }
    }
}

// May packs be used at these addresses (NULL is allowed) and at whole rows after them?
template <typename... T> static inline bool packable(int64_t row, const T *...addresses) {
    return row % PACK == 0 && (((uintptr_t)addresses | ...) % 16) == 0;
}

static inline bool packable(const cf_sum &sum) {
    return packable(sum.parts > 0 ? sum.stride : 0, (const real *)sum.to, (const real *)(sum.parts > 0 ? sum.from : NULL));
}

// --- scratch memory: one for each stream, which grows ---

enum { STREAMS_MAX = 8 };

typedef struct workspace {
    cf_stream *stream;
    char *memory;
    int64_t bytes;
} workspace;

static inline char *workspace_of(workspace list[STREAMS_MAX], cf_stream *stream, int64_t bytes, const char *purpose) {
    for (workspace *w = list; w < list + STREAMS_MAX; w++) {
        if (w->stream && w->stream != stream) continue;
        w->stream = stream;
        if (w->bytes < bytes) {
            if (w->memory) cf_stream_sync(stream); // enqueued kernels may use the smaller one
            cf_free(w->memory);
            w->memory = (char *)cf_alloc(bytes, purpose);
            w->bytes = bytes;
        }
        return w->memory;
    }
    cf_die("call layers on fewer streams", "%s: more than %d streams", purpose, STREAMS_MAX);
}

// --- products by cuBLASLt (linear.cu) ---

typedef struct gemm_matrix { // of several of one shape, `step` elements apart, which are read transposed or as they are
    void *at;
    int64_t row, step; // elements from one row to the next
    bool transposed;
} gemm_matrix;

// Each c (m, n) = a (m, k) · b (k, n), or += that, or, with `before`, this + that, each times its factor, `count` at once. All are of
// real; c, if it is wide, of accum.
void multiply_batch(int64_t count, int64_t m, int64_t n, int64_t k, gemm_matrix a, gemm_matrix b, gemm_matrix c, bool wide,
                    bool add, cf_stream *stream, const void *before = NULL, float factor = 1, float factor_before = 1);

// --- n independent elements ---

enum { EACH_THREADS = 256, EACH_ITEMS = 4 }; // items of a thread

// An item is a pack or, after the last pack, one element.
template <typename Map> static __global__ void each_kernel(Map map, int64_t packs, int64_t items) {
    int64_t i = (int64_t)blockIdx.x * (EACH_THREADS * EACH_ITEMS) + threadIdx.x;
#pragma unroll 1
    for (int k = 0; k < EACH_ITEMS; k++, i += EACH_THREADS) {
        if (i < packs)
            map.template at<PACK>(i * PACK);
        else if (i < items)
            map.template at<1>(i + packs * (PACK - 1));
    }
}

// map.at<W>(i) processes elements i … i + W − 1, with W = PACK only if packed. Every element is processed once.
template <typename Map> static void each(Map map, int64_t n, bool packed, cf_stream *stream) {
    int64_t packs = packed ? n / PACK : 0, items = n - packs * (PACK - 1);
    cf_launch(each_kernel<Map>, {ceil_div(items, EACH_THREADS * EACH_ITEMS)}, EACH_THREADS, stream, map, packs, items);
}

// --- rows with columns in common ---

enum { TILE_ROWS = 4, TILE_THREADS_MAX = 256 };

// Loads all rows before it stores the first, because the compiler must assume that out is an input, as it may be.
template <int W, typename Map> static __global__ void rows_kernel(real *out, Map map, int64_t R, int64_t C) {
    int64_t c = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * W, first = (int64_t)blockIdx.x * TILE_ROWS;
    if (c >= C) return;
    values<W> row[TILE_ROWS];
#pragma unroll
    for (int k = 0; k < TILE_ROWS; k++) row[k] = map.template at<W>(first + k < R ? first + k : R - 1, c);
#pragma unroll
    for (int k = 0; k < TILE_ROWS; k++)
        if (first + k < R) store<W>(out + (first + k) * C + c, row[k]);
}

// out (R, C): elements c … c + W − 1 of row r are map.at<W>(r, c), with W = PACK only if packed. A thread computes W columns of
// TILE_ROWS rows.
template <typename Map> static void each_row(real *out, Map map, int64_t R, int64_t C, bool packed, cf_stream *stream) {
    int64_t wide = ceil_div(C, packed ? PACK : 1), across = ceil_div(wide, TILE_THREADS_MAX);
    int64_t threads = across > 0 ? ceil_div(ceil_div(wide, across), WARP) * WARP : 0;
    cf_launch(packed ? rows_kernel<PACK, Map> : rows_kernel<1, Map>, {ceil_div(R, TILE_ROWS), across}, threads, stream, out, map, R,
              C);
}

// --- shared memory of a size that the launch gives (cf_blocks), from a boundary of sixteen bytes on ---

static __device__ inline void *block_memory() {
#ifdef __CUDA_ARCH__
    extern __shared__ int4 memory[];
#else
    alignas(16) __shared__ char memory[100 << 10]; // the emulator's
#endif
    return memory;
}

// --- reductions: warps are whole, every thread of the block calls, every thread has the result ---

struct adding {
    template <typename T> __device__ T operator()(T a, T b) const { return a + b; }
};
struct maximising { // NaN is ignored
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

template <class Operation, typename T> static __device__ inline T over_warp(T x) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) x = Operation()(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}

// N at once.
template <class Operation, int N, typename T> static __device__ inline void over_block(T (&x)[N]) {
    __shared__ T of_warp[WARP][N];
    int warps = (int)blockDim.x / WARP, warp = (int)threadIdx.x / WARP;
#pragma unroll
    for (int n = 0; n < N; n++) x[n] = over_warp<Operation>(x[n]);
    __syncthreads(); // the results of an earlier call have been read
    if (threadIdx.x % WARP == 0)
        for (int n = 0; n < N; n++) of_warp[warp][n] = x[n];
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; n++) x[n] = of_warp[0][n];
    for (int w = 1; w < warps; w++)
#pragma unroll
        for (int n = 0; n < N; n++) x[n] = Operation()(x[n], of_warp[w][n]);
}

// to[k] (C) += the sum over i of partial (count, K, C); NULL: not wanted. A warp adds a fixed share of the partial sums of 32
// columns, in order; the warps' sums are added in order.
enum { PARTIAL_WARPS = 16 };
template <int K> struct sums { float *to[K]; };
template <int K> static __global__ void add_partials_kernel(sums<K> of, const float *partial, int64_t count, int64_t C) {
    __shared__ float of_warp[PARTIAL_WARPS][WARP];
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
    int64_t column = (int64_t)blockIdx.x * WARP + lane;
    const int64_t columns = K * C;
    float *to = of.to[0] ? of.to[0] + column : NULL;
#pragma unroll
    for (int k = 1; k < K; k++)
        if (column >= k * C) to = of.to[k] ? of.to[k] + column - k * C : NULL;
    int64_t share = (count + PARTIAL_WARPS - 1) / PARTIAL_WARPS, begin = warp * share;
    int64_t end = begin + share < count ? begin + share : count;
    float sum = 0;
    if (column < columns && to)
#pragma unroll 8
        for (int64_t i = begin; i < end; i++) sum += partial[i * columns + column];
    of_warp[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= columns || !to) return;
    for (int i = 1; i < PARTIAL_WARPS; i++) sum += of_warp[i][lane];
    *to += sum;
}

template <int K> static void add_partials(sums<K> of, const float *partial, int64_t count, int64_t C, cf_stream *stream) {
    cf_launch(add_partials_kernel<K>, {ceil_div(K * C, WARP)}, PARTIAL_WARPS * WARP, stream, of, partial, count, C);
}

// Each *sum += the sum of its x (n), by one block.
enum { SUM_THREADS = 512 };
template <typename T> static __global__ void sum_kernel(double *sum, const T *x, int64_t n) {
    double total[1] = {0};
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < n; i += SUM_THREADS) total[0] += (double)x[blockIdx.x * n + i];
    over_block<adding>(total);
    if (threadIdx.x == 0) sum[blockIdx.x] += total[0];
}

// Sums of squares in double, of several x (n): gridDim.x blocks for each, which sum groups of packs in turn, then the remaining
// elements one by one. partial (gridDim.y, gridDim.x)
enum { SQUARES_THREADS = 256, SQUARES_FLIGHT = 4 };
template <typename T>
static __global__ void __launch_bounds__(SQUARES_THREADS) squares_kernel(double *partial, const T *x, int64_t packs, int64_t n) {
    enum { W = cf_pack<T>::N };
    const int64_t step = (int64_t)gridDim.x * SQUARES_THREADS, first = (int64_t)blockIdx.x * SQUARES_THREADS + threadIdx.x;
    double sum[1] = {0};
    x += blockIdx.y * n;
    for (int64_t p = first; p < packs; p += step * SQUARES_FLIGHT) {
        values<W> v[SQUARES_FLIGHT];
#pragma unroll
        for (int k = 0; k < SQUARES_FLIGHT; k++) v[k] = p + k * step < packs ? load<W>(x + (p + k * step) * W) : values<W>{};
#pragma unroll
        for (int k = 0; k < SQUARES_FLIGHT; k++)
#pragma unroll
            for (int i = 0; i < W; i++) sum[0] += (double)v[k].at[i] * (double)v[k].at[i];
    }
    for (int64_t i = packs * W + first; i < n; i += step) sum[0] += (double)(float)x[i] * (double)(float)x[i];
    over_block<adding>(sum);
    if (threadIdx.x == 0) partial[blockIdx.y * gridDim.x + blockIdx.x] = sum[0];
}

// Each sum (count) += the squares of its x (n), in at most `most` blocks, fewer for small n, on every GPU; partial (count, most)
template <typename T>
static void add_squares(double *sum, double *partial, int64_t most, const T *x, int64_t count, int64_t n, cf_stream *stream) {
    const int64_t W = cf_pack<T>::N, blocks = smaller(ceil_div(n, SQUARES_THREADS * SQUARES_FLIGHT * W), most);
    const bool packed = (uintptr_t)x % 16 == 0 && (count == 1 || n % W == 0);
    cf_launch(squares_kernel<T>, {blocks, count}, SQUARES_THREADS, stream, partial, x, packed ? n / W : 0, n);
    cf_launch(sum_kernel<double>, {n > 0 ? count : 0}, SUM_THREADS, stream, sum, partial, blocks);
}
