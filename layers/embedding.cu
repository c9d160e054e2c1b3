// Token and position embedding on the GPU.
//
// The scatter-add of token gradients must have the same bits every time, so nothing is added atomically:
// every element of the table is summed by one thread in row order. For that the rows are sorted by token,
// rows of the same token staying in order, and a block then adds the run of rows that belongs to its token.
// Tokens are few bytes beside the rows they stand for, so the sort is a plain one: each thread counts the keys
// that go before its own, and so knows its place. For 65536 rows these are 4 · 10⁹ comparisons, of keys in shared memory.
// What a run costs is its length, as the sum is serial; its rows are loaded eight at a time. The longest runs are those
// of the commonest tokens, some per cent of the rows.
//
// Tokens held elsewhere get the key `count` and go last. Keys and rows are in scratch of this file, grown at the first
// call with more rows than before, and used by one stream at a time.
#include "embedding.h"
#include "kernel.h"

enum { SORT_THREADS = 512, RUN_THREADS_MAX = 256 };

static struct {
    int32_t *keys, *rows; // (R), sorted
    int64_t R;
} sorted;

static __device__ inline bool held(int32_t token, int64_t first, int64_t count) {
    return token >= first && token < first + count;
}

struct lookup_map {
    const int32_t *tokens;
    const real *wte;
    int64_t first, count, C;

    template <int W> __device__ values<W> at(int64_t r, int64_t c) const {
        int32_t token = tokens[r];
        return held(token, first, count) ? load<W>(wte + (token - first) * C + c) : values<W>{};
    }
};

void embedding_forward(real *out, const int32_t *tokens, const real *wte, int64_t first, int64_t count, int64_t R, int64_t C,
                       cf_stream *stream) {
    each_row(out, lookup_map{tokens, wte, first, count, C}, R, C, packable(C, out, wte), stream);
}

// --- the rows sorted by token ---

static __device__ inline int32_t key_of(int32_t token, int64_t first, int64_t count) {
    return (int32_t)(held(token, first, count) ? token - first : count);
}

static __global__ void sort_kernel(int32_t *keys, int32_t *rows, const int32_t *tokens, int64_t first, int64_t count, int64_t R) {
    __shared__ int32_t other[SORT_THREADS];
    int64_t r = (int64_t)blockIdx.x * SORT_THREADS + threadIdx.x;
    int32_t key = r < R ? key_of(tokens[r], first, count) : 0, place = 0;
    for (int64_t begin = 0; begin < R; begin += SORT_THREADS) {
        const int64_t i = begin + threadIdx.x;
        const int before = (int)(r - begin); // the first of these rows, so many, are before this one
        __syncthreads();
        other[threadIdx.x] = i < R ? key_of(tokens[i], first, count) : INT32_MAX;
        __syncthreads();
#pragma unroll 16
        for (int k = 0; k < SORT_THREADS; k++) place += other[k] < key + (k < before);
    }
    if (r < R) keys[place] = key, rows[place] = (int32_t)r;
}

static void sort_rows(const int32_t *tokens, int64_t first, int64_t count, int64_t R, cf_stream *stream) {
    if (R > INT32_MAX) cf_die("lower --micro-batch or --seq", "embedding: %lld rows in one pass", (long long)R);
    if (R > sorted.R) {
        if (sorted.R > 0) cf_stream_sync(stream); // an earlier call may be using it
        cf_free(sorted.keys), cf_free(sorted.rows);
        sorted.keys = (int32_t *)cf_alloc(R * (int64_t)sizeof *sorted.keys, "embedding scratch");
        sorted.rows = (int32_t *)cf_alloc(R * (int64_t)sizeof *sorted.rows, "embedding scratch");
        sorted.R = R;
    }
    cf_launch(sort_kernel, dim3((unsigned)ceil_div(R, SORT_THREADS)), dim3(SORT_THREADS), stream, sorted.keys, sorted.rows, tokens,
              first, count, R);
}

// A block per position: where a token's run of rows begins, it adds the run, elsewhere it has nothing to do.
template <int W, typename T>
static __global__ void __launch_bounds__(RUN_THREADS_MAX)
    add_runs_kernel(precise *dwte, const T *dout, const int32_t *keys, const int32_t *rows, int64_t count, int64_t R, int64_t C) {
    int64_t begin = blockIdx.x;
    int32_t key = keys[begin];
    if (key == count || (begin > 0 && keys[begin - 1] == key)) return;
    int64_t end = begin + 1;
    for (int64_t other = R; end < other;) { // the first key that is another one
        int64_t middle = (end + other) / 2;
        if (keys[middle] == key)
            end = middle + 1;
        else
            other = middle;
    }
    for (int64_t c = (int64_t)threadIdx.x * W; c < C; c += (int64_t)blockDim.x * W) {
        values<W> sum = load<W>(dwte + key * C + c);
#pragma unroll 8
        for (int64_t i = begin; i < end; i++) {
            values<W> x = load<W>(dout + rows[i] * C + c);
#pragma unroll
            for (int k = 0; k < W; k++) sum.at[k] += x.at[k];
        }
        store<W>(dwte + key * C + c, sum);
    }
}

template <typename T>
static void add_rows(precise *dwte, const T *dout, const int32_t *tokens, int64_t first, int64_t count, int64_t R, int64_t C,
                     cf_stream *stream) {
    if (R == 0 || count == 0) return;
    sort_rows(tokens, first, count, R, stream);
    bool packed = packable(C, dwte) && packable(C, dout);
    int64_t threads = ceil_div(ceil_div(C, packed ? PACK : 1), WARP) * WARP;
    if (threads > RUN_THREADS_MAX) threads = RUN_THREADS_MAX;
    cf_launch(packed ? add_runs_kernel<PACK, T> : add_runs_kernel<1, T>, dim3((unsigned)R), dim3((unsigned)threads), stream, dwte,
              dout, sorted.keys, sorted.rows, count, R, C);
}

void embedding_backward(precise *dwte, const real *dout, const int32_t *tokens, int64_t first, int64_t count, int64_t R, int64_t C,
                        cf_stream *stream) {
    add_rows(dwte, dout, tokens, first, count, R, C, stream);
}

void embedding_add(precise *dwte, const precise *dout, const int32_t *tokens, int64_t first, int64_t count, int64_t R, int64_t C,
                   cf_stream *stream) {
    add_rows(dwte, dout, tokens, first, count, R, C, stream);
}

// --- positions ---

struct position_map {
    const real *x, *wpe;
    int64_t B, C;

    template <int W> __device__ values<W> at(int64_t r, int64_t c) const {
        values<W> sum = load<W>(x + r * C + c), add = load<W>(wpe + r / B * C + c);
#pragma unroll
        for (int i = 0; i < W; i++) sum.at[i] += add.at[i];
        return sum;
    }
};

void position_forward(real *x, const real *wpe, int64_t t0, int64_t T, int64_t B, int64_t C, cf_stream *stream) {
    each_row(x, position_map{x, wpe + t0 * C, B, C}, T * B, C, packable(C, x, wpe), stream);
}

// Packs of dwpe (T, C), where C is whole packs.
struct batch_map {
    precise *dwpe;
    const real *dx;
    int64_t B, C;

    template <int W> __device__ void at(int64_t i) const {
        const real *from = dx + i / C * B * C + i % C;
        values<W> sum = load<W>(dwpe + i);
#pragma unroll 4
        for (int64_t b = 0; b < B; b++) {
            values<W> x = load<W>(from + b * C);
#pragma unroll
            for (int k = 0; k < W; k++) sum.at[k] += x.at[k];
        }
        store<W>(dwpe + i, sum);
    }
};

void position_backward(precise *dwpe, const real *dx, int64_t t0, int64_t T, int64_t B, int64_t C, cf_stream *stream) {
    each(batch_map{dwpe + t0 * C, dx, B, C}, T * C, packable(C, dwpe) && packable(C, dx), stream);
}
