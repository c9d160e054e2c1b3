// Token and position embedding on the GPU.
//
// The scatter-add of token gradients must have the same bits every time, so nothing is added atomically:
// every element of the table is summed by one thread in row order. For that the rows are sorted by token,
// rows of the same token staying in order, and a block then adds the run of rows that belongs to its token.
// Tokens are few bytes beside the rows they stand for, so the sort is a plain one, by digits of eight bits,
// lowest first, one kernel a digit: a block per value of the digit, which reads all keys twice. First it
// counts those that go before its own, and so knows where they begin; then it writes its own down in order,
// finding the place of each by a prefix sum over the block. Tokens held elsewhere get the key `count` and go
// last.
//
// 65536 rows and 50257 tokens: two digits, 4 · 256 reads of 256 KiB, all from the L2 cache. What a run costs
// is its length, as the sum is serial: FLIGHT rows are loaded at a time. The longest runs are those of the
// commonest tokens, some per cent of the rows.
//
// Keys and rows lie in scratch of this file, grown at the first call with more rows than before, and used by
// one stream at a time.
#include "embedding.h"
#include "kernel.h"

enum { DIGIT_BITS = 8, DIGITS = 1 << DIGIT_BITS };
enum { SORT_THREADS = 512, KEYS = 8, STRETCH = SORT_THREADS * KEYS, KEY_THREADS = 256 };
enum { RUN_THREADS_MAX = 256, FLIGHT = 8 };

static struct {
    int32_t *memory; // keys, rows, and both again: a digit is sorted from one pair to the other
    int64_t R;
} scratch;

static __device__ inline bool held(int32_t token, int64_t first, int64_t count) {
    return token >= first && token < first + count;
}

template <int W>
static __global__ void lookup_kernel(real *out, const int32_t *tokens, const real *wte, int64_t first, int64_t count, int64_t R,
                                     int64_t C) {
    int64_t c = tile_column<W>(), begin = (int64_t)blockIdx.x * TILE_ROWS;
    if (c >= C) return;
    values<W> x[TILE_ROWS];
#pragma unroll
    for (int k = 0; k < TILE_ROWS; k++) {
        int32_t token = tokens[begin + k < R ? begin + k : R - 1];
        x[k] = held(token, first, count) ? load<W>(wte + (token - first) * C + c) : values<W>{};
    }
#pragma unroll
    for (int k = 0; k < TILE_ROWS; k++)
        if (begin + k < R) store<W>(out + (begin + k) * C + c, x[k]);
}

void embedding_forward(real *out, const int32_t *tokens, const real *wte, int64_t first, int64_t count, int64_t R, int64_t C,
                       cf_stream *stream) {
    bool packed = packable(C, out, wte);
    tiling t = tile(R, C, packed ? PACK : 1);
    cf_launch(packed ? lookup_kernel<PACK> : lookup_kernel<1>, t.blocks, t.threads, stream, out, tokens, wte, first, count, R, C);
}

// --- the rows sorted by token ---

static __global__ void key_kernel(int32_t *keys, int32_t *rows, const int32_t *tokens, int64_t first, int64_t count, int64_t R) {
    int64_t r = (int64_t)blockIdx.x * KEY_THREADS + threadIdx.x;
    if (r >= R) return;
    keys[r] = held(tokens[r], first, count) ? (int32_t)(tokens[r] - first) : (int32_t)count;
    rows[r] = (int32_t)r;
}

static __device__ inline int digit_of(int32_t key, int shift) {
    return key >> shift & (DIGITS - 1);
}

// Sum of x over the threads before this one; *all: over all threads of the block.
static __device__ inline int sum_before(int x, int *all) {
    __shared__ int of_warp[SORT_THREADS / WARP];
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, sum = x, before = 0;
#pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2) {
        int other = __shfl_sync(0xffffffffu, sum, lane >= distance ? lane - distance : lane);
        if (lane >= distance) sum += other;
    }
    __syncthreads(); // the sums of an earlier call have been read
    if (lane == WARP - 1) of_warp[warp] = sum;
    __syncthreads();
    *all = 0;
    for (int w = 0; w < SORT_THREADS / WARP; w++) {
        if (w == warp) before = *all;
        *all += of_warp[w];
    }
    return before + sum - x;
}

// KEYS digits from i on, −1 behind the end.
static __device__ inline void load_digits(int (&digit)[KEYS], const int32_t *keys, int64_t i, int64_t R, int shift) {
    const int N = cf_pack<int32_t>::N;
    if (i + KEYS <= R) {
#pragma unroll
        for (int p = 0; p < KEYS / N; p++) {
            cf_pack<int32_t> pack = load_pack(keys + i + p * N);
#pragma unroll
            for (int k = 0; k < N; k++) digit[p * N + k] = digit_of(pack.value[k], shift);
        }
    } else {
#pragma unroll
        for (int k = 0; k < KEYS; k++) digit[k] = i + k < R ? digit_of(keys[i + k], shift) : -1;
    }
}

// A block per value of the digit that is `shift` bits up.
static __global__ void __launch_bounds__(SORT_THREADS)
    sort_kernel(int32_t *sorted_keys, int32_t *sorted_rows, const int32_t *keys, const int32_t *rows, int64_t R, int shift) {
    int own = (int)blockIdx.x, digit[KEYS], smaller[1] = {0};
    for (int64_t i = (int64_t)threadIdx.x * KEYS; i < R; i += STRETCH) {
        load_digits(digit, keys, i, R, shift);
#pragma unroll
        for (int k = 0; k < KEYS; k++) smaller[0] += digit[k] >= 0 && digit[k] < own;
    }
    block_sum(smaller);
    int64_t place = smaller[0];
    for (int64_t begin = 0; begin < R; begin += STRETCH) {
        int64_t i = begin + (int64_t)threadIdx.x * KEYS;
        int found = 0, all;
        load_digits(digit, keys, i, R, shift);
#pragma unroll
        for (int k = 0; k < KEYS; k++) found += digit[k] == own;
        int64_t to = place + sum_before(found, &all);
#pragma unroll
        for (int k = 0; k < KEYS; k++)
            if (digit[k] == own) {
                sorted_keys[to] = keys[i + k];
                sorted_rows[to++] = rows[i + k];
            }
        place += all;
    }
}

// Rounded up so that each of the four arrays lies on a sixteen-byte boundary.
static int64_t scratch_length(int64_t R) {
    return ceil_div(R, KEYS) * KEYS;
}

static void grow_scratch(int64_t R, cf_stream *stream) {
    if (R <= scratch.R) return;
    if (R > INT32_MAX - STRETCH) cf_die("lower --micro-batch or --seq", "embedding: %lld rows in one pass", (long long)R);
    if (scratch.memory) cf_stream_sync(stream); // an earlier call may be using it
    cf_free(scratch.memory);
    scratch.R = R;
    scratch.memory = (int32_t *)cf_alloc(4 * scratch_length(R) * (int64_t)sizeof *scratch.memory, "embedding scratch");
}

typedef struct order {
    const int32_t *keys, *rows; // (R)
} order;

static order sort_rows(const int32_t *tokens, int64_t first, int64_t count, int64_t R, cf_stream *stream) {
    grow_scratch(R, stream);
    int64_t length = scratch_length(R);
    int32_t *keys = scratch.memory, *rows = keys + length, *other_keys = rows + length, *other_rows = other_keys + length;
    cf_launch(key_kernel, dim3((unsigned)ceil_div(R, KEY_THREADS)), dim3(KEY_THREADS), stream, keys, rows, tokens, first, count, R);
    for (int shift = 0; count >> shift > 0; shift += DIGIT_BITS) {
        int64_t highest = count >> shift; // without the digits below
        if (highest > DIGITS - 1) highest = DIGITS - 1;
        cf_launch(sort_kernel, dim3((unsigned)highest + 1), dim3(SORT_THREADS), stream, other_keys, other_rows, keys, rows, R,
                  shift);
        int32_t *keys_before = keys, *rows_before = rows;
        keys = other_keys, rows = other_rows, other_keys = keys_before, other_rows = rows_before;
    }
    return {keys, rows};
}

// A block per position: where a token's run of rows begins, it adds the run, elsewhere it has nothing to do.
template <int W, typename T>
static __global__ void __launch_bounds__(RUN_THREADS_MAX)
    add_runs_kernel(precise *dwte, const T *dout, order sorted, int64_t count, int64_t R, int64_t C) {
    int64_t begin = blockIdx.x;
    int32_t key = sorted.keys[begin];
    if (key == count || (begin > 0 && sorted.keys[begin - 1] == key)) return;
    for (int64_t c = (int64_t)threadIdx.x * W; c < C; c += (int64_t)blockDim.x * W) {
        values<W> sum = load<W>(dwte + key * C + c);
        bool more = true;
        for (int64_t i = begin; more; i += FLIGHT) {
            values<W> x[FLIGHT];
            int32_t row[FLIGHT];
            int length = 0;
#pragma unroll
            for (int k = 0; k < FLIGHT; k++) {
                int64_t at = i + k < R ? i + k : R - 1;
                bool same = sorted.keys[at] == key;
                row[k] = sorted.rows[at];
                more = more && i + k < R && same;
                length += more;
            }
#pragma unroll
            for (int k = 0; k < FLIGHT; k++) // behind the run: its first row again, which is not added
                x[k] = load<W>(dout + (k < length ? row[k] : row[0]) * C + c);
#pragma unroll
            for (int k = 0; k < FLIGHT; k++)
#pragma unroll
                for (int j = 0; j < W; j++)
                    if (k < length) sum.at[j] += x[k].at[j];
        }
        store<W>(dwte + key * C + c, sum);
    }
}

template <typename T>
static void add_rows(precise *dwte, const T *dout, const int32_t *tokens, int64_t first, int64_t count, int64_t R, int64_t C,
                     cf_stream *stream) {
    if (R == 0 || count == 0) return;
    order sorted = sort_rows(tokens, first, count, R, stream);
    bool packed = packable(C, dwte) && packable(C, dout);
    int64_t threads = ceil_div(ceil_div(C, packed ? PACK : 1), WARP) * WARP;
    if (threads > RUN_THREADS_MAX) threads = RUN_THREADS_MAX;
    cf_launch(packed ? add_runs_kernel<PACK, T> : add_runs_kernel<1, T>, dim3((unsigned)R), dim3((unsigned)threads), stream, dwte,
              dout, sorted, count, R, C);
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

template <int W> static __global__ void add_position_kernel(real *x, const real *wpe, int64_t B, int64_t R, int64_t C) {
    int64_t c = tile_column<W>(), begin = (int64_t)blockIdx.x * TILE_ROWS, t = begin / B, b = begin % B;
    if (c >= C) return;
    values<W> sum[TILE_ROWS], add[TILE_ROWS];
#pragma unroll
    for (int k = 0; k < TILE_ROWS; k++) {
        int64_t r = begin + k < R ? begin + k : R - 1;
        sum[k] = load<W>(x + r * C + c);
        add[k] = begin + k < R ? load<W>(wpe + t * C + c) : values<W>{};
        if (++b == B) b = 0, t++;
    }
#pragma unroll
    for (int k = 0; k < TILE_ROWS; k++) {
#pragma unroll
        for (int i = 0; i < W; i++) sum[k].at[i] += add[k].at[i];
        if (begin + k < R) store<W>(x + (begin + k) * C + c, sum[k]);
    }
}

void position_forward(real *x, const real *wpe, int64_t t0, int64_t T, int64_t B, int64_t C, cf_stream *stream) {
    bool packed = packable(C, x, wpe);
    tiling t = tile(T * B, C, packed ? PACK : 1);
    cf_launch(packed ? add_position_kernel<PACK> : add_position_kernel<1>, t.blocks, t.threads, stream, x, wpe + t0 * C, B, T * B,
              C);
}

// A thread has W columns of one position, and adds over b.
template <int W> static __global__ void add_batch_kernel(precise *dwpe, const real *dx, int64_t T, int64_t B, int64_t C) {
    int64_t wide = C / W, i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, t = i / wide, c = i % wide * W;
    if (t >= T) return;
    values<W> sum = load<W>(dwpe + t * C + c);
    const real *from = dx + t * B * C + c;
#pragma unroll 4
    for (int64_t b = 0; b < B; b++) {
        values<W> x = load<W>(from + b * C);
#pragma unroll
        for (int k = 0; k < W; k++) sum.at[k] += x.at[k];
    }
    store<W>(dwpe + t * C + c, sum);
}

void position_backward(precise *dwpe, const real *dx, int64_t t0, int64_t T, int64_t B, int64_t C, cf_stream *stream) {
    const int64_t threads = 128;
    bool packed = packable(C, dwpe) && packable(C, dx);
    int64_t items = T * (packed ? C / PACK : C);
    cf_launch(packed ? add_batch_kernel<PACK> : add_batch_kernel<1>, dim3((unsigned)ceil_div(items, threads)), dim3(threads),
              stream, dwpe + t0 * C, dx, T, B, C);
}
