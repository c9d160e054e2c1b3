// Layer normalisation on the GPU.
//
// A block is as wide as a row: a thread holds W neighbouring columns in registers, so the row is read once and its variance is
// that of the differences from the mean. A block processes ROWS rows at once, so that their loads are in flight together and
// one block-wide reduction serves all of them. The kernels with `long` in their name read longer rows, or long rows that are not
// on sixteen-byte boundaries, several times, from the cache after the first.
//
// Backward: the rows are cut into at most PARTIALS stretches on every GPU, a block for each. A thread adds up dw and db of its
// columns over the block's rows in row order, in the block's part of the scratch. A second kernel adds these partial sums
// (kernel.h).
#include "layernorm.h"
#include "kernel.h"

enum { PARTIALS = 512, THREADS_MAX = 512, LONG_THREADS = 256 };
enum { ROWS = PACK == 8 ? 2 : 4 }; // as many as registers allow without spills
#define EPS 1e-5f

// Threads for rows of C columns, W a thread; 0: too many.
static int64_t threads_of_row(int64_t C, int64_t W) {
    int64_t threads = ceil_div(ceil_div(C, W), WARP) * WARP;
    return threads <= THREADS_MAX ? threads : 0;
}

template <int W>
static __global__ void __launch_bounds__(THREADS_MAX)
    forward_kernel(real *out, accum *mean, accum *rstd, const real *x, const real *w, const real *b, int64_t R, int64_t C) {
    int64_t c = (int64_t)threadIdx.x * W, first = (int64_t)blockIdx.x * ROWS;
    bool mine = c < C;
    int64_t at = mine ? c : 0;
    values<W> row[ROWS], scale, shift;
    float m[ROWS], s[ROWS];
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        int64_t r = first + k < R ? first + k : R - 1;
        row[k] = load<W>(x + r * C + at);
    }
    scale = load<W>(w + at), shift = load<W>(b + at);
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        m[k] = 0;
#pragma unroll
        for (int i = 0; i < W; i++) m[k] += row[k].at[i];
        if (!mine) m[k] = 0;
    }
    block_sum(m);
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        m[k] /= (float)C;
        s[k] = 0;
#pragma unroll
        for (int i = 0; i < W; i++) {
            row[k].at[i] -= m[k];
            if (mine) s[k] += row[k].at[i] * row[k].at[i];
        }
    }
    block_sum(s);
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        if (first + k >= R) break;
        float rs = 1 / sqrtf(s[k] / (float)C + EPS);
#pragma unroll
        for (int i = 0; i < W; i++) row[k].at[i] = row[k].at[i] * rs * scale.at[i] + shift.at[i];
        if (mine) store<W>(out + (first + k) * C + c, row[k]);
        if (threadIdx.x == 0) mean[first + k] = m[k], rstd[first + k] = rs;
    }
}

// A block per row.
static __global__ void forward_long_kernel(real *out, accum *mean, accum *rstd, const real *x, const real *w, const real *b,
                                           int64_t C) {
    const real *row = x + blockIdx.x * C;
    real *out_row = out + blockIdx.x * C;
    float sum[1] = {0}, squares[1] = {0};
    for (int64_t c = threadIdx.x; c < C; c += LONG_THREADS) sum[0] += (float)row[c];
    block_sum(sum);
    float m = sum[0] / (float)C;
    for (int64_t c = threadIdx.x; c < C; c += LONG_THREADS) squares[0] += ((float)row[c] - m) * ((float)row[c] - m);
    block_sum(squares);
    float s = 1 / sqrtf(squares[0] / (float)C + EPS);
    for (int64_t c = threadIdx.x; c < C; c += LONG_THREADS)
        out_row[c] = (real)(((float)row[c] - m) * s * (float)w[c] + (float)b[c]);
    if (threadIdx.x == 0) mean[blockIdx.x] = m, rstd[blockIdx.x] = s;
}

void layernorm_forward(real *out, accum *mean, accum *rstd, const real *x, const real *w, const real *b, int64_t R, int64_t C,
                       cf_stream *stream) {
    bool packed = packable(C, out, x, w, b);
    int64_t threads = threads_of_row(C, packed ? PACK : 1);
    if (threads > 0)
        cf_launch(packed ? forward_kernel<PACK> : forward_kernel<1>, dim3((unsigned)ceil_div(R, ROWS)), dim3((unsigned)threads),
                  stream, out, mean, rstd, x, w, b, R, C);
    else
        cf_launch(forward_long_kernel, dim3((unsigned)R), dim3(LONG_THREADS), stream, out, mean, rstd, x, w, b, C);
}

int64_t layernorm_scratch(int64_t C) {
    return PARTIALS * 2 * C;
}

// With h = (x − mean) · rstd and g = dy · w:  dx += rstd · (g − mean(g) − h · mean(g · h)).
// partial (stretches, 2, C): dw and db of each stretch of rows.
template <int W>
static __global__ void __launch_bounds__(THREADS_MAX)
    backward_kernel(real *dx, accum *partial, const real *dy, const real *x, const real *w, const accum *mean, const accum *rstd,
                    int64_t stretch, int64_t R, int64_t C) {
    int64_t c = (int64_t)threadIdx.x * W, begin = blockIdx.x * stretch;
    int64_t end = begin + stretch < R ? begin + stretch : R;
    bool mine = c < C;
    values<W> dw = {}, db = {}, scale = mine ? load<W>(w + c) : values<W>{};
    for (int64_t first = begin; first < end; first += ROWS) {
        values<W> h[ROWS], d[ROWS], old[ROWS];
        float m[ROWS], s[ROWS], sum[2 * ROWS]; // of g, of g · h
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            int64_t r = first + k < end ? first + k : end - 1;
            h[k] = mine ? load<W>(x + r * C + c) : values<W>{};
            d[k] = mine ? load<W>(dy + r * C + c) : values<W>{};
            old[k] = mine ? load<W>(dx + r * C + c) : values<W>{};
            m[k] = mean[r];
            s[k] = rstd[r];
        }
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            sum[2 * k] = sum[2 * k + 1] = 0;
#pragma unroll
            for (int i = 0; i < W; i++) {
                h[k].at[i] = (h[k].at[i] - m[k]) * s[k];
                sum[2 * k] += d[k].at[i] * scale.at[i];
                sum[2 * k + 1] += d[k].at[i] * scale.at[i] * h[k].at[i];
            }
            if (!mine) sum[2 * k] = sum[2 * k + 1] = 0; // 0 · infinity
        }
        block_sum(sum);
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            if (first + k >= end) break;
            float mean_g = sum[2 * k] / (float)C, mean_gh = sum[2 * k + 1] / (float)C;
#pragma unroll
            for (int i = 0; i < W; i++) {
                dw.at[i] += d[k].at[i] * h[k].at[i];
                db.at[i] += d[k].at[i];
                old[k].at[i] += s[k] * (d[k].at[i] * scale.at[i] - mean_g - h[k].at[i] * mean_gh);
            }
            if (mine) store<W>(dx + (first + k) * C + c, old[k]);
        }
    }
    accum *part = partial + blockIdx.x * 2 * C;
    if (mine) store<W>(part + c, dw), store<W>(part + C + c, db);
}

// The same for long rows: one thread adds up each element of dw and db in the scratch.
static __global__ void backward_long_kernel(real *dx, accum *partial, const real *dy, const real *x, const real *w,
                                            const accum *mean, const accum *rstd, int64_t stretch, int64_t R, int64_t C) {
    int64_t begin = blockIdx.x * stretch, end = begin + stretch < R ? begin + stretch : R;
    accum *dw = partial + blockIdx.x * 2 * C, *db = dw + C;
    for (int64_t c = threadIdx.x; c < C; c += LONG_THREADS) dw[c] = db[c] = 0;
    for (int64_t r = begin; r < end; r++) {
        float m = mean[r], s = rstd[r], sum[2] = {0, 0};
        for (int64_t c = threadIdx.x; c < C; c += LONG_THREADS) {
            float d = (float)dy[r * C + c], g = d * (float)w[c], h = ((float)x[r * C + c] - m) * s;
            dw[c] += d * h;
            db[c] += d;
            sum[0] += g;
            sum[1] += g * h;
        }
        block_sum(sum);
        float mean_g = sum[0] / (float)C, mean_gh = sum[1] / (float)C;
        for (int64_t c = threadIdx.x; c < C; c += LONG_THREADS) {
            float g = (float)dy[r * C + c] * (float)w[c], h = ((float)x[r * C + c] - m) * s;
            dx[r * C + c] = (real)((float)dx[r * C + c] + s * (g - mean_g - h * mean_gh));
        }
    }
}

void layernorm_backward(real *dx, accum *dw, accum *db, const real *dy, const real *x, const real *w, const accum *mean,
                        const accum *rstd, accum *scratch, int64_t R, int64_t C, cf_stream *stream) {
    if (R == 0) return;
    bool packed = packable(C, dx, dy, x, w, scratch);
    int64_t threads = threads_of_row(C, packed ? PACK : 1);
    int64_t stretch = ceil_div(R, PARTIALS), stretches = ceil_div(R, stretch);
    auto kernel = threads == 0 ? backward_long_kernel : packed ? backward_kernel<PACK> : backward_kernel<1>;
    if (threads == 0) threads = LONG_THREADS;
    cf_launch(kernel, dim3((unsigned)stretches), dim3((unsigned)threads), stream, dx, scratch, dy, x, w, mean, rstd, stretch, R, C);
    add_partials(dw, db, scratch, stretches, C, 2 * C, stream);
}
