// Token and position embedding on the GPU.
//
// The scatter-add of token gradients must have the same bits every time, so nothing is added atomically: one thread sums each
// element of the table, in row order. To do so, CUB sorts the rows by token, with rows of the same token in order, and a block
// then adds the run of rows of its token. A run takes time in proportion to its length, because the sum is serial; its rows are
// loaded eight at a time. The longest runs, of the most frequent tokens, have some per cent of the rows.
//
// Tokens held by other ranks get the key `count` and come last.
#include "embedding.h"
#include <cub/device/device_radix_sort.cuh>
#include "kernel.h"

enum { KEY_THREADS = 512, RUN_THREADS_MAX = 256, LIST = 64 }; // LIST: the length of a list is a multiple of it, for alignment

static workspace scratch[STREAMS_MAX];

struct lookup_map {
    const int32_t *tokens;
    const real *wte;
    int64_t first, count, C;

    template <int W> __device__ values<W> at(int64_t r, int64_t c) const {
        int32_t token = tokens[r];
        return is_here(token, first, count) ? load<W>(wte + (token - first) * C + c) : values<W>{};
    }
};

void embedding_forward(real *out, const int32_t *tokens, const real *wte, int64_t first, int64_t count, int64_t R, int64_t C,
                       cf_stream *stream) {
    each_row(out, lookup_map{tokens, wte, first, count, C}, R, C, packable(C, out, wte), stream);
}

// --- the rows sorted by token ---

static __global__ void key_kernel(int32_t *keys, int32_t *rows, const int32_t *tokens, int64_t first, int64_t count, int64_t R) {
    int64_t r = (int64_t)blockIdx.x * KEY_THREADS + threadIdx.x;
    if (r < R) keys[r] = (int32_t)(is_here(tokens[r], first, count) ? tokens[r] - first : count), rows[r] = (int32_t)r;
}

typedef struct order {
    const int32_t *keys, *rows; // (R)
} order;

static order sort_rows(const int32_t *tokens, int64_t first, int64_t count, int64_t R, cf_stream *stream) {
    const cudaStream_t s = cf_cuda_stream(stream);
    int32_t *list[4] = {}; // keys, rows; sorted keys, rows
    int bits = 1;
    size_t bytes = 0; // that CUB needs
    while (count >> bits > 0) bits++;
    CF_CUDA(cub::DeviceRadixSort::SortPairs(NULL, bytes, list[0], list[2], list[1], list[3], (int)R, 0, bits, s));
    const int64_t length = ceil_div(R, LIST) * LIST, lists = 4 * length * (int64_t)sizeof(int32_t);
    char *memory = workspace_of(scratch, stream, lists + (int64_t)bytes, "embedding scratch");
    for (int i = 0; i < 4; i++) list[i] = (int32_t *)memory + i * length;
    cf_launch(key_kernel, {ceil_div(R, KEY_THREADS)}, KEY_THREADS, stream, list[0], list[1], tokens, first, count, R);
    CF_CUDA(cub::DeviceRadixSort::SortPairs(memory + lists, bytes, list[0], list[2], list[1], list[3], (int)R, 0, bits, s));
    return {list[2], list[3]};
}

// A block for each position: if a token's run of rows begins there, it adds the run.
template <int W, typename T>
static __global__ void __launch_bounds__(RUN_THREADS_MAX)
    add_runs_kernel(accum *dwte, const T *dout, order sorted, int64_t count, int64_t R, int64_t C) {
    int64_t begin = blockIdx.x;
    int32_t key = sorted.keys[begin];
    if (key == count || (begin > 0 && sorted.keys[begin - 1] == key)) return;
    int64_t end = begin + 1;
    for (int64_t other = R; end < other;) { // bisection: the end of the run
        int64_t middle = (end + other) / 2;
        if (sorted.keys[middle] == key)
            end = middle + 1;
        else
            other = middle;
    }
    for (int64_t c = (int64_t)threadIdx.x * W; c < C; c += (int64_t)blockDim.x * W) {
        values<W> sum = load<W>(dwte + key * C + c);
#pragma unroll 8
        for (int64_t i = begin; i < end; i++) sum += load<W>(dout + sorted.rows[i] * C + c);
        store<W>(dwte + key * C + c, sum);
    }
}

template <typename T>
static void add_rows(accum *dwte, const T *dout, const int32_t *tokens, int64_t first, int64_t count, int64_t R, int64_t C,
                     cf_stream *stream) {
    if (R == 0 || count == 0) return;
    order sorted = sort_rows(tokens, first, count, R, stream);
    bool packed = packable(C, dwte) && packable(C, dout);
    const int64_t threads = smaller(ceil_div(ceil_div(C, packed ? PACK : 1), WARP) * WARP, RUN_THREADS_MAX);
    cf_launch(packed ? add_runs_kernel<PACK, T> : add_runs_kernel<1, T>, {R}, threads, stream, dwte, dout, sorted, count, R, C);
}

void embedding_backward(accum *dwte, const void *dout, bool wide, const int32_t *tokens, int64_t first, int64_t count, int64_t R,
                        int64_t C, cf_stream *stream) {
    if (wide)
        add_rows(dwte, (const accum *)dout, tokens, first, count, R, C, stream);
    else
        add_rows(dwte, (const real *)dout, tokens, first, count, R, C, stream);
}

// --- positions ---

struct position_map {
    const real *x, *wpe;
    int64_t B, C;

    template <int W> __device__ values<W> at(int64_t r, int64_t c) const {
        values<W> sum = load<W>(x + r * C + c);
        sum += load<W>(wpe + r / B * C + c);
        return sum;
    }
};

void position_forward(real *x, const real *wpe, int64_t t0, int64_t T, int64_t B, int64_t C, cf_stream *stream) {
    each_row(x, position_map{x, wpe + t0 * C, B, C}, T * B, C, packable(C, x, wpe), stream);
}

// W neighbouring elements of dwpe (T, C), of one row because C is whole packs.
struct batch_map {
    accum *dwpe;
    const real *dx;
    int64_t B, C;

    template <int W> __device__ void at(int64_t i) const {
        const real *from = dx + i / C * B * C + i % C;
        values<W> sum = load<W>(dwpe + i);
#pragma unroll 4
        for (int64_t b = 0; b < B; b++) sum += load<W>(from + b * C);
        store<W>(dwpe + i, sum);
    }
};

void position_backward(accum *dwpe, const real *dx, int64_t t0, int64_t T, int64_t B, int64_t C, cf_stream *stream) {
    each(batch_map{dwpe + t0 * C, dx, B, C}, T * C, packable(C, dwpe) && packable(C, dx), stream);
}

// W neighbouring pairs of one head, because half a head is whole packs.
struct rotary_map {
    real *x;
    const accum *table;
    float sign;
    int64_t B, heads, D, row;

    template <int W> __device__ void at(int64_t i) const {
        const int64_t half = D / 2, pair = i % half, r = i / half / heads;
        real *low = x + r * row + i / half % heads * D + pair;
        values<W> a = load<W>(low), b = load<W>(low + half);
        const values<W> cosine = load<W>(table + r / B * D + pair), sine = load<W>(table + r / B * D + half + pair);
#pragma unroll
        for (int k = 0; k < W; k++) {
            const float before = a.at[k], s = sign * sine.at[k];
            a.at[k] = before * cosine.at[k] - b.at[k] * s;
            b.at[k] = b.at[k] * cosine.at[k] + before * s;
        }
        store<W>(low, a), store<W>(low + half, b);
    }
};

void rotary_turn(real *x, const accum *table, bool back, int64_t T, int64_t B, int64_t heads, int64_t D, int64_t row,
                 cf_stream *stream) {
    const bool packed = packable(D / 2, x) && packable(row, table);
    each(rotary_map{x, table, back ? -1.0f : 1.0f, B, heads, D, row}, T * B * heads * (D / 2), packed, stream);
}
