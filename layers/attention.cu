// Causal attention on the GPU.
//
// There are two implementations. bf16 uses cuDNN's fused attention (attention_cudnn.cu says when it does not, and how to see
// that). The kernels here are for fp32, which cuDNN does not support, and for all that it refuses; they compute in float for both
// element types.
//
// All three kernels have one structure. A block of 128 threads owns ROWS rows of one head: queries (forward and dq) or keys (dk
// and dv). It loops over the other kind in tiles of OTHERS rows, and for each tile does
//   multiply    scores (ROWS, OTHERS) = own rows · other rowsᵀ, in steps of CHUNK channels
//   a function of the scores, element by element, in registers; its result goes to shared memory as weights
//   accumulate  own sums (ROWS, WIDTH) += weights · other rows, in steps of some other rows
// so all work is in two small matrix products. In both, thread (y, x) of 8 × 16 holds PER consecutive rows and 4 or WIDTH / 16
// columns, so that per step it reads 4 + PER floats from shared memory for 4·PER multiply-adds. Operands are staged in shared
// memory transposed, row index last, with PAD floats between channels.
//
// WIDTH is the head's number of channels rounded up to 64 or 128, padded with zeros; ROWS·WIDTH = 4096 keeps the sums of a thread
// at 32 registers.
//
// Forward keeps maximum and sum of exponentials of each row and rescales sums when the maximum grows. Backward computes
// delta = sum of dout ∘ out first, then
//   P = exp(scale · q·k − lse), dS = P ∘ (dout·v − delta) · scale, dv = Pᵀ·dout, dk = dSᵀ·q, dq = dS·k
// with dq in one kernel and dk, dv in another: one block alone sums each gradient, tile after tile in order of time, so nothing is
// added atomically and every run gives the same bits. For this P is computed twice.
//
// P is kept in shared memory while dout·v is computed: so three blocks fit on a multiprocessor, which hides the time of reads.
//
// Tiles that the mask hides are skipped. Blocks with the longest loop start first.
#include "attention.h"
#include "attention_cudnn.h"
#include "../commfuse/gpu/cuda.h"

enum {
    LANES = 16,               // threads that share rows
    GROUPS = 8,               // of such threads in a block
    THREADS = LANES * GROUPS, // blockDim.x
    OTHERS = 64,              // rows of the other kind at once
    CHUNK = 32,               // channels at once
    PAD = 4,
    PACK = 4,    // channels read by one instruction
    SUMS = 4096, // ROWS · WIDTH, and elements of other rows staged by accumulate
    WIDTH_MAX = 128
};

struct alignas(PACK * sizeof(real)) pack {
    real value[PACK];
};

typedef struct shape {
    int t0, n, end;           // end = t0 + n
    int H, D, pairs;          // B·H: a pair is one head of one sequence
    int64_t T;                // of lse's rows
    int64_t qkv_row, out_row; // elements from one time step to the next
    float scale;
    bool packs; // rows are read pack by pack
} shape;

int64_t attention_channels_max(void) {
    return WIDTH_MAX;
}

static shape shape_of(int64_t t0, int64_t n, int64_t T, int64_t B, int64_t H, int64_t D) {
    if (D > WIDTH_MAX) cf_die("use more heads", "attention: %ld channels per head, at most %d", D, WIDTH_MAX);
    if (t0 + n > INT32_MAX || B * H > INT32_MAX)
        cf_die("use more ranks", "attention: %ld time steps, %ld heads in all", t0 + n, B * H);
    shape s = {};
    s.t0 = (int)t0, s.n = (int)n, s.end = (int)(t0 + n);
    s.H = (int)H, s.D = (int)D, s.pairs = (int)(B * H);
    s.T = T;
    s.qkv_row = B * 3 * H * D;
    s.out_row = B * H * D;
    s.scale = 1 / sqrtf((float)D);
    return s;
}

static bool can_pack(const shape *s, const void *a, const void *b) {
    return s->D % PACK == 0 && (uintptr_t)a % sizeof(pack) == 0 && (uintptr_t)b % sizeof(pack) == 0;
}

// Rows of one head, one for each time step.
struct matrix {
    const real *first; // time 0
    int64_t row;       // elements from one time step to the next
    int end, D;        // time steps, channels; all else is read as zero
    bool packs;
};

enum { QUERY, KEY, VALUE };

// Offset of one head's queries, keys or values in qkv (T, B, 3, H, D).
static __device__ int64_t part_at(int part, int pair, const shape &s) {
    return ((int64_t)(pair / s.H * 3 + part) * s.H + pair % s.H) * s.D;
}

static __device__ matrix part_of(const real *qkv, int part, int pair, const shape &s) {
    return {qkv + part_at(part, pair, s), s.qkv_row, s.end, s.D, s.packs};
}

// One head of out (T, B, H, D).
static __device__ matrix head_of(const real *out, int pair, const shape &s) {
    return {out + (int64_t)pair * s.D, s.out_row, s.end, s.D, s.packs};
}

// PACK channels of row t from channel d on, zeros beyond the matrix.
static __device__ void read_pack(float *x, const matrix &m, int t, int d) {
    const real *from = m.first + t * m.row + d;
    if (m.packs && t < m.end && d < m.D) {
        const pack p = *(const pack *)from;
#pragma unroll
        for (int i = 0; i < PACK; i++) x[i] = (float)p.value[i];
        return;
    }
#pragma unroll
    for (int i = 0; i < PACK; i++) x[i] = t < m.end && d + i < m.D ? (float)from[i] : 0;
}

template <int WIDTH> struct tile {
    enum {
        ROWS = SUMS / WIDTH,
        PER = ROWS / GROUPS,     // rows of a thread
        COLUMNS = WIDTH / LANES, // columns of its sums, four in a row
        STAGED = SUMS / WIDTH,   // other rows that accumulate stages at once
        STAGE = CHUNK * (ROWS + OTHERS + 2 * PAD) > SUMS ? CHUNK *(ROWS + OTHERS + 2 * PAD) : SUMS
    };
};

static int64_t rows_of_block(int64_t D) {
    return D <= 64 ? (int64_t)tile<64>::ROWS : (int64_t)tile<128>::ROWS;
}

static __device__ int row_group() {
    return threadIdx.x / LANES;
}
static __device__ int lane() {
    return threadIdx.x % LANES;
}
// Column of scores: two neighbours in the first half, two in the second, so that no two lanes use the same bank.
static __device__ int score_column(int j) {
    return j / 2 * (OTHERS / 2) + lane() * 2 + j % 2;
}
// Column of sums.
static __device__ int sum_column(int j) {
    return j / 4 * (LANES * 4) + lane() * 4 + j % 4;
}

template <int N> static __device__ void read_floats(float *to, const float *from) {
    struct alignas(N * 4) pack {
        float value[N];
    };
    pack p = *(const pack *)from;
#pragma unroll
    for (int i = 0; i < N; i++) to[i] = p.value[i];
}

static __device__ void write_four(float *to, const float *from) {
    cf_pack<float> p;
#pragma unroll
    for (int i = 0; i < 4; i++) p.value[i] = from[i];
    *(cf_pack<float> *)to = p;
}

// to (CHUNK, N + PAD) = channels d … of rows t … t + N − 1, transposed. Two threads read neighbouring packs of a row, sixteen such
// pairs neighbouring rows: whole sectors of memory, few bank conflicts in shared memory.
template <int N> static __device__ void stage_transposed(float *to, const matrix &m, int t, int d) {
    enum { PAIRS = CHUNK / PACK / 2 };
#pragma unroll 2
    for (int step = 0; step < N * 2 * PAIRS / THREADS; step++) {
        const int i = step * THREADS + threadIdx.x, rest = i / 32;
        const int channel = (rest % PAIRS * 2 + i % 2) * PACK, row = rest / PAIRS * 16 + i / 2 % 16;
        float x[PACK];
        read_pack(x, m, t + row, d + channel);
#pragma unroll
        for (int j = 0; j < PACK; j++) to[(channel + j) * (N + PAD) + row] = x[j];
    }
}

// to (STAGED, WIDTH) = rows t …
template <int WIDTH> static __device__ void stage_rows(float *to, const matrix &m, int t) {
#pragma unroll 4
    for (int step = 0; step < SUMS / PACK / THREADS; step++) {
        const int i = (step * THREADS + threadIdx.x) * PACK;
        float x[PACK];
        read_pack(x, m, t + i / WIDTH, i % WIDTH);
        write_four(to + i, x);
    }
}

// score (PER, 4) of each thread = rows t … of `own` times rows u … of `other`. Begins with a barrier.
template <int WIDTH>
static __device__ void multiply(float (&score)[tile<WIDTH>::PER][4], float *stage, const matrix &own, int t, const matrix &other,
                                int u) {
    enum { ROWS = tile<WIDTH>::ROWS, PER = tile<WIDTH>::PER };
    float *a = stage, *b = stage + CHUNK * (ROWS + PAD);
#pragma unroll
    for (int i = 0; i < PER; i++)
        for (int j = 0; j < 4; j++) score[i][j] = 0;
    for (int d = 0; d < own.D; d += CHUNK) {
        __syncthreads();
        stage_transposed<ROWS>(a, own, t, d);
        stage_transposed<OTHERS>(b, other, u, d);
        __syncthreads();
#pragma unroll 4
        for (int c = 0; c < CHUNK; c++) {
            float x[PER], y[4];
#pragma unroll
            for (int i = 0; i < PER; i += 4) read_floats<4>(x + i, a + c * (ROWS + PAD) + row_group() * PER + i);
            read_floats<2>(y, b + c * (OTHERS + PAD) + score_column(0));
            read_floats<2>(y + 2, b + c * (OTHERS + PAD) + score_column(2));
#pragma unroll
            for (int i = 0; i < PER; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) score[i][j] = fmaf(x[i], y[j], score[i][j]);
        }
    }
}

// weights (OTHERS, ROWS + PAD): transposed. Call it when all threads are done with the previous ones.
template <int WIDTH> static __device__ void keep_weights(float *weights, const float (&score)[tile<WIDTH>::PER][4]) {
    enum { ROWS = tile<WIDTH>::ROWS, PER = tile<WIDTH>::PER };
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int i = 0; i < PER; i += 4) {
            const float four[4] = {score[i][j], score[i + 1][j], score[i + 2][j], score[i + 3][j]};
            write_four(weights + score_column(j) * (ROWS + PAD) + row_group() * PER + i, four);
        }
}

// Reads back what the thread has kept.
template <int WIDTH> static __device__ void recall_weights(float (&score)[tile<WIDTH>::PER][4], const float *weights) {
    enum { ROWS = tile<WIDTH>::ROWS, PER = tile<WIDTH>::PER };
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int i = 0; i < PER; i += 4) {
            float four[4];
            read_floats<4>(four, weights + score_column(j) * (ROWS + PAD) + row_group() * PER + i);
            for (int e = 0; e < 4; e++) score[i + e][j] = four[e];
        }
}

// sum (PER, COLUMNS) of each thread += weights · rows u … of `other`. Begins with a barrier.
template <int WIDTH>
static __device__ void accumulate(float (&sum)[tile<WIDTH>::PER][tile<WIDTH>::COLUMNS], float *stage, const float *weights,
                                  const matrix &other, int u) {
    enum { ROWS = tile<WIDTH>::ROWS, PER = tile<WIDTH>::PER, COLUMNS = tile<WIDTH>::COLUMNS };
    enum { STAGED = tile<WIDTH>::STAGED };
    for (int k = 0; k < OTHERS; k += STAGED) {
        __syncthreads();
        stage_rows<WIDTH>(stage, other, u + k);
        __syncthreads();
#pragma unroll 4
        for (int r = 0; r < STAGED; r++) {
            float w[PER], x[COLUMNS];
#pragma unroll
            for (int i = 0; i < PER; i += 4) read_floats<4>(w + i, weights + (k + r) * (ROWS + PAD) + row_group() * PER + i);
#pragma unroll
            for (int j = 0; j < COLUMNS; j += 4) read_floats<4>(x + j, stage + r * WIDTH + sum_column(j));
#pragma unroll
            for (int i = 0; i < PER; i++)
#pragma unroll
                for (int j = 0; j < COLUMNS; j++) sum[i][j] = fmaf(w[i], x[j], sum[i][j]);
        }
    }
}

// Over the lanes that share a row; all of them get the result.
static __device__ float row_maximum(float x) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, distance));
    return x;
}
static __device__ float row_total(float x) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffff, x, distance);
    return x;
}

// Scores become exp(scale · score − maximum), zero for keys that the query must not see; a new maximum rescales the row's sum of
// exponentials and its sums. Every row sees key 0, so the maximum is finite from the first tile on.
template <int WIDTH>
static __device__ void softmax(float (&score)[tile<WIDTH>::PER][4], float (&sum)[tile<WIDTH>::PER][tile<WIDTH>::COLUMNS],
                               float *maximum, float *total, int t, int u, float scale) {
#pragma unroll
    for (int i = 0; i < tile<WIDTH>::PER; i++) {
        const int query = t + row_group() * tile<WIDTH>::PER + i;
        float highest = -INFINITY, added = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            score[i][j] = u + score_column(j) <= query ? scale * score[i][j] : -INFINITY;
            highest = fmaxf(highest, score[i][j]);
        }
        const float now = fmaxf(maximum[i], row_maximum(highest)), correction = expf(maximum[i] - now);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            score[i][j] = expf(score[i][j] - now);
            added += score[i][j];
        }
        total[i] = total[i] * correction + row_total(added);
        maximum[i] = now;
#pragma unroll
        for (int j = 0; j < tile<WIDTH>::COLUMNS; j++) sum[i][j] *= correction;
    }
}

template <int WIDTH>
static __global__ void __launch_bounds__(THREADS, 3) forward_rows(real *out, accum *lse, const real *qkv, shape s) {
    typedef tile<WIDTH> size;
    alignas(16) __shared__ float stage[size::STAGE];
    alignas(16) __shared__ float weights[OTHERS * (size::ROWS + PAD)];
    const int tiles = (s.n + size::ROWS - 1) / size::ROWS, pair = blockIdx.x % s.pairs;
    const int t = s.t0 + (tiles - 1 - (int)(blockIdx.x / s.pairs)) * size::ROWS; // the longest rows first
    const matrix q = part_of(qkv, QUERY, pair, s), k = part_of(qkv, KEY, pair, s), v = part_of(qkv, VALUE, pair, s);
    float sum[size::PER][size::COLUMNS] = {}, score[size::PER][4], maximum[size::PER], total[size::PER];
    for (int i = 0; i < size::PER; i++) maximum[i] = -INFINITY, total[i] = 0;
    for (int u = 0; u < t + size::ROWS && u < s.end; u += OTHERS) {
        multiply<WIDTH>(score, stage, q, t, k, u);
        softmax<WIDTH>(score, sum, maximum, total, t, u, s.scale);
        keep_weights<WIDTH>(weights, score);
        accumulate<WIDTH>(sum, stage, weights, v, u);
    }
#pragma unroll
    for (int i = 0; i < size::PER; i++) {
        const int query = t + row_group() * size::PER + i;
        if (query >= s.end) continue;
        if (lane() == 0) lse[pair * s.T + query] = maximum[i] + logf(total[i]);
#pragma unroll
        for (int j = 0; j < size::COLUMNS; j++)
            if (sum_column(j) < s.D) out[query * s.out_row + (int64_t)pair * s.D + sum_column(j)] = (real)(sum[i][j] / total[i]);
    }
}

void attention_forward(real *out, accum *lse, const real *qkv, int64_t t0, int64_t n, int64_t T, int64_t B, int64_t H, int64_t D,
                       cf_stream *stream) {
    if (n == 0) return;
    if (attention_cudnn_forward(out, lse, qkv, t0, n, T, B, H, D, stream)) return;
    shape s = shape_of(t0, n, T, B, H, D);
    s.packs = can_pack(&s, qkv, qkv);
    const int64_t rows = rows_of_block(D);
    const dim3 blocks((unsigned)(ceil_div(n, rows) * s.pairs)), threads(THREADS);
    cf_launch(D <= 64 ? forward_rows<64> : forward_rows<128>, blocks, threads, stream, out, lse, qkv, s);
}

int64_t attention_scratch(int64_t T, int64_t B, int64_t H, int64_t) { // delta
    return T * B * H;
}

// Backward is of all rows (attention.h). delta (T, B, H) = sum over D of dout · out; a warp for each element.
static __global__ void output_dot_gradient(float *delta, const real *dout, const real *out, shape s) {
    const int64_t i = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (i >= (int64_t)s.n * s.pairs) return;
    const int64_t first = i * s.D;
    float sum = 0;
    for (int d = threadIdx.x % 32; d < s.D; d += 32) sum = fmaf((float)dout[first + d], (float)out[first + d], sum);
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
    if (threadIdx.x % 32 == 0) delta[i] = sum;
}

// What both backward kernels read.
struct backward {
    const real *dout, *qkv;
    const accum *lse, *delta; // (B, H, T), (T, B, H)
};

// One probability of the softmax, zero if the query must not see the key or does not exist.
static __device__ float probability(float score, int query, int key, int pair, const backward &a, const shape &s) {
    return key <= query && query < s.end ? expf(s.scale * score - a.lse[pair * s.T + query]) : 0;
}

static __device__ float delta_of(int query, int pair, const backward &a, const shape &s) {
    return query < s.end ? a.delta[(int64_t)query * s.pairs + pair] : 0;
}

// Gradients of rows t … of one head, from the sums of a block's threads.
template <int WIDTH>
static __device__ void write_gradient(real *dqkv, const float (&sum)[tile<WIDTH>::PER][tile<WIDTH>::COLUMNS], int part, int t,
                                      int pair, const shape &s) {
#pragma unroll
    for (int i = 0; i < tile<WIDTH>::PER; i++) {
        const int time = t + row_group() * tile<WIDTH>::PER + i;
        real *to = dqkv + time * s.qkv_row + part_at(part, pair, s);
#pragma unroll
        for (int j = 0; j < tile<WIDTH>::COLUMNS; j++) {
            const int d = sum_column(j);
            if (time < s.end && d < s.D) to[d] = (real)sum[i][j];
        }
    }
}

// The block's rows are queries, or KEYS, and it loops over the other kind: scores are (rows, others).
template <int WIDTH, bool KEYS>
static __global__ void __launch_bounds__(THREADS, 3) backward_rows(real *dqkv, backward a, shape s) {
    typedef tile<WIDTH> size;
    alignas(16) __shared__ float stage[size::STAGE];
    alignas(16) __shared__ float weights[OTHERS * (size::ROWS + PAD)];
    const int pair = blockIdx.x % s.pairs, number = blockIdx.x / s.pairs, tiles = (s.n + size::ROWS - 1) / size::ROWS;
    const int t = (KEYS ? number : tiles - 1 - number) * size::ROWS; // first keys, last queries: most work
    const int begin = KEYS ? t / OTHERS * OTHERS : 0;                // queries before all keys see none
    const int end = KEYS || t + size::ROWS > s.end ? s.end : t + size::ROWS;
    const matrix q = part_of(a.qkv, QUERY, pair, s), k = part_of(a.qkv, KEY, pair, s), v = part_of(a.qkv, VALUE, pair, s),
                 dout = head_of(a.dout, pair, s);
    float sum[size::PER][size::COLUMNS] = {}, dv[KEYS ? size::PER : 1][size::COLUMNS] = {}; // dq or dk, dv
    float score[size::PER][4], dscore[size::PER][4];
    for (int u = begin; u < end; u += OTHERS) {
        multiply<WIDTH>(score, stage, KEYS ? k : q, t, KEYS ? q : k, u);
#pragma unroll
        for (int i = 0; i < size::PER; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int row = t + row_group() * size::PER + i, other = u + score_column(j);
                score[i][j] = probability(score[i][j], KEYS ? other : row, KEYS ? row : other, pair, a, s);
            }
        keep_weights<WIDTH>(weights, score);
        if constexpr (KEYS) accumulate<WIDTH>(dv, stage, weights, dout, u);
        multiply<WIDTH>(dscore, stage, KEYS ? v : dout, t, KEYS ? dout : v, u);
        recall_weights<WIDTH>(score, weights); // rather than keep 4·PER registers
#pragma unroll
        for (int i = 0; i < size::PER; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float delta = delta_of(KEYS ? u + score_column(j) : t + row_group() * size::PER + i, pair, a, s);
                dscore[i][j] = score[i][j] * (dscore[i][j] - delta) * s.scale;
            }
        keep_weights<WIDTH>(weights, dscore);
        accumulate<WIDTH>(sum, stage, weights, KEYS ? q : k, u);
    }
    write_gradient<WIDTH>(dqkv, sum, KEYS ? KEY : QUERY, t, pair, s);
    if constexpr (KEYS) write_gradient<WIDTH>(dqkv, dv, VALUE, t, pair, s);
}

void attention_backward(real *dqkv, const real *dout, const real *out, const accum *lse, const real *qkv, accum *scratch, int64_t,
                        int64_t, int64_t T, int64_t B, int64_t H, int64_t D, bool, cf_stream *stream) {
    if (attention_cudnn_backward(dqkv, dout, out, lse, qkv, scratch, T, B, H, D, stream)) return;
    shape s = shape_of(0, T, T, B, H, D);
    s.packs = can_pack(&s, qkv, dout);
    const backward a = {dout, qkv, lse, scratch};
    const dim3 blocks((unsigned)(ceil_div(T, rows_of_block(D)) * s.pairs)), threads(THREADS);
    cf_launch(output_dot_gradient, dim3((unsigned)ceil_div(T * s.pairs, THREADS / 32)), threads, stream, scratch, dout, out, s);
    cf_launch(D <= 64 ? backward_rows<64, true> : backward_rows<128, true>, blocks, threads, stream, dqkv, a, s);
    cf_launch(D <= 64 ? backward_rows<64, false> : backward_rows<128, false>, blocks, threads, stream, dqkv, a, s);
}

bool attention_backward_by_ranges(void) {
    return false;
}
