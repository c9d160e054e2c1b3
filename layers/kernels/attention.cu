// Causal attention on the GPU.
//
// There are two implementations. bf16 uses cuDNN's fused attention (attention_cudnn.cu says when it does not, and how to see
// that). The functions here are for fp32, which cuDNN does not support, and for all that it refuses. As on the CPU, products are
// the library's (linear.cu) and the softmax is ours; scores of some heads at a time are in memory:
//
//   forward    S = Q·Kᵀ; P = exp(scale · S − lse); out = P·V
//   backward   delta = sum of dout ∘ out; S and P again; dP = dout·Vᵀ; dS = P ∘ (dP − delta) · scale;
//              dV = Pᵀ·dout; dK = dSᵀ·Q; dQ = dS·K; of heads that share keys and values dV and dK are added up, one after another
#include "attention.h"
#include "attention_cudnn.h"
#include "kernel.h"

enum { WARPS = 8, THREADS = WARPS * WARP };    // a warp for each row
static const int64_t SCORES_BYTES = 128 << 20; // of all matrices of scores together, unless one head needs more

typedef struct shape {
    int64_t t0, n, T, B, H, KV, D;
    int64_t sharing; // heads of queries that share keys and values
    int64_t keys;    // t0 + n
    int64_t pairs;   // B·H: a pair is one head of one sequence
    float scale;
} shape;

typedef struct heads { // that products take at once: pairs, of one sequence, each with keys of its own, or one head of several
    int64_t first, count, step;
    bool again; // others have had the same keys
} heads;

int64_t attention_channels_max(void) {
    return INT32_MAX;
}

static shape shape_of(int64_t t0, int64_t n, int64_t T, int64_t B, int64_t H, int64_t KV, int64_t D) {
    return {t0, n, T, B, H, KV, D, H / KV, t0 + n, B * H, 1 / sqrtf((float)D)};
}

// Calls work(heads, memory) for all pairs, with `bytes` of memory for each head.
template <typename Work> static void for_heads(const shape &s, int64_t bytes, cf_stream *stream, Work work) {
    static workspace of_stream[STREAMS_MAX];
    const bool one_sequence = s.KV >= s.B;
    const int64_t together = one_sequence ? s.KV : s.B, step = one_sequence ? s.sharing : s.H;
    const int64_t most = larger(1, smaller(together, SCORES_BYTES / bytes));
    char *memory = workspace_of(of_stream, stream, most * bytes, "scores of attention");
    for (int64_t i = 0; i < s.pairs / together; i++) {
        const int64_t turn = i % s.sharing, first = one_sequence ? i / s.sharing * s.H + turn : i;
        for (int64_t k = 0; k < together; k += most)
            work(heads{first + k * step, smaller(most, together - k), step, turn > 0}, memory);
    }
}

enum { QUERY, KEY, VALUE };

// Rows t … of these heads' queries, keys or values in qkv (T, B, H + 2 KV, D), or of their part of out (T, B, H, D).
static gemm_matrix part_of(const real *qkv, int part, int64_t t, const heads &h, const shape &s) {
    const int64_t all = s.H + 2 * s.KV, row = s.B * all * s.D, query = h.first % s.H, step = part == QUERY ? s.sharing : 1;
    const int64_t head = part == QUERY ? query : s.H + (part - KEY) * s.KV + query / s.sharing;
    return {(void *)(qkv + t * row + (h.first / s.H * all + head) * s.D), row, (s.KV >= s.B ? step : all) * s.D, false};
}
static gemm_matrix head_of(const real *out, int64_t t, const heads &h, const shape &s) {
    return {(void *)(out + (t * s.pairs + h.first) * s.D), s.pairs * s.D, h.step * s.D, false};
}
static gemm_matrix scores_at(void *memory, const shape &s) { // (n, keys) of each head
    return {memory, s.keys, s.n * s.keys, false};
}
static gemm_matrix transposed(gemm_matrix x) {
    return {x.at, x.row, x.step, true};
}

static __device__ int lane() {
    return (int)threadIdx.x % WARP;
}
static __device__ int64_t row_of_warp() {
    return (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP;
}
static cf_blocks blocks_for(int64_t rows) {
    return {ceil_div(rows, WARPS)};
}

// p (heads, n, keys), zero for keys that the query must not see.
static __global__ void softmax_rows(real *p, float *lse, const float *score, heads h, shape s) {
    const int64_t row = row_of_warp(), query = s.t0 + row % s.n;
    if (row >= h.count * s.n) return;
    float highest = -INFINITY, sum = 0;
    p += row * s.keys, score += row * s.keys;
    for (int64_t c = lane(); c <= query; c += WARP) highest = fmaxf(highest, s.scale * score[c]);
    highest = over_warp<maximising>(highest);
    for (int64_t c = lane(); c <= query; c += WARP) sum += expf(s.scale * score[c] - highest);
    sum = over_warp<adding>(sum);
    for (int64_t c = lane(); c < s.keys; c += WARP) p[c] = (real)(c <= query ? expf(s.scale * score[c] - highest) / sum : 0);
    if (lane() == 0) lse[(h.first + row / s.n * h.step) * s.T + query] = highest + logf(sum);
}

void attention_forward(real *out, accum *lse, const real *qkv, int64_t t0, int64_t n, int64_t T, int64_t B, int64_t H, int64_t KV,
                       int64_t D, cf_stream *stream) {
    if (n == 0) return;
    if (attention_cudnn_forward(out, lse, qkv, t0, n, T, B, H, KV, D, stream)) return;
    const shape s = shape_of(t0, n, T, B, H, KV, D);
    for_heads(s, n * s.keys * (int64_t)(sizeof(float) + sizeof(real)), stream, [&](heads h, char *memory) {
        float *score = (float *)memory;
        real *p = (real *)(score + h.count * n * s.keys);
        multiply_batch(h.count, n, s.keys, D, part_of(qkv, QUERY, t0, h, s), transposed(part_of(qkv, KEY, 0, h, s)),
                       scores_at(score, s), true, false, stream);
        cf_launch(softmax_rows, blocks_for(h.count * n), THREADS, stream, p, lse, score, h, s);
        multiply_batch(h.count, n, D, s.keys, scores_at(p, s), part_of(qkv, VALUE, 0, h, s), head_of(out, t0, h, s), false, false,
                       stream);
    });
}

int64_t attention_scratch(int64_t T, int64_t B, int64_t H, int64_t, int64_t) { // delta
    return T * B * H;
}

// Backward is of all rows (attention.h). delta (T, B, H) = sum over D of dout · out
static __global__ void output_dot_gradient(float *delta, const real *dout, const real *out, shape s) {
    const int64_t i = row_of_warp();
    if (i >= s.n * s.pairs) return;
    float sum = 0;
    for (int64_t d = lane(); d < s.D; d += WARP) sum = fmaf((float)dout[i * s.D + d], (float)out[i * s.D + d], sum);
    sum = over_warp<adding>(sum);
    if (lane() == 0) delta[i] = sum;
}

// p and dscore (heads, T, T)
static __global__ void softmax_backward_rows(real *p, real *dscore, const float *score, const float *dp, const float *lse,
                                             const float *delta, heads h, shape s) {
    const int64_t row = row_of_warp(), query = row % s.n, pair = h.first + row / s.n * h.step;
    if (row >= h.count * s.n) return;
    const float row_lse = lse[pair * s.T + query], row_delta = delta[query * s.pairs + pair];
    for (int64_t c = row * s.keys + lane(), seen = row * s.keys + query, end = (row + 1) * s.keys; c < end; c += WARP) {
        const float e = c <= seen ? expf(s.scale * score[c] - row_lse) : 0;
        p[c] = (real)e;
        dscore[c] = (real)(e * (dp[c] - row_delta) * s.scale);
    }
}

void attention_backward(real *dqkv, const real *dout, const real *out, const accum *lse, const real *qkv, accum *scratch, int64_t,
                        int64_t, int64_t T, int64_t B, int64_t H, int64_t KV, int64_t D, bool, cf_stream *stream) {
    if (attention_cudnn_backward(dqkv, dout, out, lse, qkv, scratch, T, B, H, KV, D, stream)) return;
    const shape s = shape_of(0, T, T, B, H, KV, D);
    cf_launch(output_dot_gradient, blocks_for(T * s.pairs), THREADS, stream, scratch, dout, out, s);
    for_heads(s, 2 * T * T * (int64_t)(sizeof(float) + sizeof(real)), stream, [&](heads h, char *memory) {
        float *score = (float *)memory, *dp = score + h.count * T * T;
        real *p = (real *)(dp + h.count * T * T), *dscore = p + h.count * T * T;
        const gemm_matrix q = part_of(qkv, QUERY, 0, h, s), k = part_of(qkv, KEY, 0, h, s), v = part_of(qkv, VALUE, 0, h, s),
                          dy = head_of(dout, 0, h, s), P = scores_at(p, s), dS = scores_at(dscore, s);
        multiply_batch(h.count, T, T, D, q, transposed(k), scores_at(score, s), true, false, stream);
        multiply_batch(h.count, T, T, D, dy, transposed(v), scores_at(dp, s), true, false, stream);
        cf_launch(softmax_backward_rows, blocks_for(h.count * T), THREADS, stream, p, dscore, score, dp, lse, scratch, h, s);
        multiply_batch(h.count, T, D, T, transposed(P), dy, part_of(dqkv, VALUE, 0, h, s), false, h.again, stream);
        multiply_batch(h.count, T, D, T, transposed(dS), q, part_of(dqkv, KEY, 0, h, s), false, h.again, stream);
        multiply_batch(h.count, T, D, T, dS, k, part_of(dqkv, QUERY, 0, h, s), false, false, stream);
    });
}

bool attention_backward_by_ranges(void) {
    return false;
}
