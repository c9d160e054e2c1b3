// Layer normalisation on the GPU.
//
// A block is as wide as a row: a thread holds W neighbouring columns in registers, so the row is read once and its variance is
// that of the differences from the mean. A block processes some rows at once, so that their loads are in flight together and
// one block-wide reduction serves all of them. A memory of 4 TB/s with 0.7 us of latency is busy while 22 kB are in flight on each
// of 132 multiprocessors; a block waits half of its time in reductions, so there should be twice as many. Rows are kept as they
// are in memory: four of forward take as many registers as two would as floats. Backward loads the rows after these before it
// reduces. The kernels with `long` in their name read longer rows, or long rows that are not on sixteen-byte boundaries, several
// times, from the cache after the first.
//
// Backward: the rows are cut into at most PARTIALS stretches on every GPU, a block for each. A thread adds up dw, db and dbias of
// its columns over the block's rows in row order, in the block's part of the scratch. A second kernel adds these partial sums
// (kernel.h). A pass of its own for dbias would read R · C elements more.
#include "layernorm.h"
#include "kernel.h"

enum { PARTIALS = 512, THREADS_MAX = 512, LONG_THREADS = 256 };
enum { ROWS = 4, ROWS_BACKWARD = 2, SUMS = 3 }; // rows: as many as registers allow without spills

// Threads for rows of C columns, W a thread; 0: too many.
static int64_t threads_of_row(int64_t C, int64_t W) {
    int64_t threads = ceil_div(ceil_div(C, W), WARP) * WARP;
    return threads <= THREADS_MAX ? threads : 0;
}

// RMS: mean and b are NULL. A template, because a condition when it runs takes registers that it does not have.
template <int W, bool RMS>
static __global__ void __launch_bounds__(THREADS_MAX, 2)
    forward_kernel(real *out, accum *mean, accum *rstd, const real *x, const real *w, const real *b, float eps, int64_t R,
                   int64_t C) {
    int64_t c = (int64_t)threadIdx.x * W, first = (int64_t)blockIdx.x * ROWS;
    bool mine = c < C;
    int64_t at = mine ? c : 0;
    cf_pack<real, W> row[ROWS];
    float m[ROWS], s[ROWS];
#pragma unroll
    for (int k = 0; k < ROWS; k++) row[k] = load_raw<W>(x + (first + k < R ? first + k : R - 1) * C + at);
    const cf_pack<real, W> raw_scale = load_raw<W>(w + at), raw_shift = RMS ? raw_scale : load_raw<W>(b + at);
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        const values<W> v = values_of(row[k]);
        m[k] = 0;
#pragma unroll
        for (int i = 0; i < W; i++) m[k] += v.at[i];
        if (!mine) m[k] = 0;
    }
    if (!RMS) over_block<adding>(m);
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        const values<W> v = values_of(row[k]);
        m[k] = RMS ? 0 : m[k] / (float)C;
        s[k] = 0;
#pragma unroll
        for (int i = 0; i < W; i++)
            if (mine) s[k] += (v.at[i] - m[k]) * (v.at[i] - m[k]);
    }
    over_block<adding>(s);
    const values<W> scale = values_of(raw_scale), shift = values_of(raw_shift);
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        if (first + k >= R) break;
        values<W> v = values_of(row[k]);
        float rs = 1 / sqrtf(s[k] / (float)C + eps);
#pragma unroll
        for (int i = 0; i < W; i++) v.at[i] = (v.at[i] - m[k]) * rs * scale.at[i] + (RMS ? 0 : shift.at[i]);
        if (mine) store<W>(out + (first + k) * C + c, v);
        if (threadIdx.x == 0 && !RMS) mean[first + k] = m[k];
        if (threadIdx.x == 0) rstd[first + k] = rs;
    }
}

// A block per row.
static __global__ void forward_long_kernel(real *out, accum *mean, accum *rstd, const real *x, const real *w, const real *b,
                                           float eps, int64_t C) {
    const real *row = x + blockIdx.x * C;
    real *out_row = out + blockIdx.x * C;
    float sum[1] = {0}, squares[1] = {0};
    for (int64_t c = threadIdx.x; c < C; c += LONG_THREADS) sum[0] += (float)row[c];
    over_block<adding>(sum);
    const float m = mean ? sum[0] / (float)C : 0;
    for (int64_t c = threadIdx.x; c < C; c += LONG_THREADS) squares[0] += ((float)row[c] - m) * ((float)row[c] - m);
    over_block<adding>(squares);
    float s = 1 / sqrtf(squares[0] / (float)C + eps);
    for (int64_t c = threadIdx.x; c < C; c += LONG_THREADS)
        out_row[c] = (real)(((float)row[c] - m) * s * (float)w[c] + (b ? (float)b[c] : 0));
    if (threadIdx.x == 0 && mean) mean[blockIdx.x] = m;
    if (threadIdx.x == 0) rstd[blockIdx.x] = s;
}

void layernorm_forward(real *out, accum *mean, accum *rstd, const real *x, const real *w, const real *b, double eps, int64_t R,
                       int64_t C, cf_stream *stream) {
    bool packed = packable(C, out, x, w, b);
    int64_t threads = threads_of_row(C, packed ? PACK : 1);
    auto kernel = packed ? forward_kernel<PACK, false> : forward_kernel<1, false>;
    if (!mean) kernel = packed ? forward_kernel<PACK, true> : forward_kernel<1, true>;
    if (threads > 0)
        cf_launch(kernel, {ceil_div(R, ROWS)}, threads, stream, out, mean, rstd, x, w, b, (float)eps, R, C);
    else
        cf_launch(forward_long_kernel, {R}, LONG_THREADS, stream, out, mean, rstd, x, w, b, (float)eps, C);
}

int64_t layernorm_scratch(int64_t C) {
    return PARTIALS * SUMS * C;
}

// What backward reads of some rows of W columns.
template <int W> struct rows_read {
    cf_pack<real, W> x[ROWS_BACKWARD], dy[ROWS_BACKWARD], dx[ROWS_BACKWARD];
    float mean[ROWS_BACKWARD], rstd[ROWS_BACKWARD];
};

// With h = (x − mean) · rstd and g = dy · w:  dx += rstd · (g − mean(g) − h · mean(g · h)); with mean NULL without mean(g).
// partial (stretches, SUMS, C): dw, db and dbias of each stretch of rows.
// PARTS: dy is a sum of parts. Without them the kernel needs all registers for itself. RMS: mean is NULL.
template <int W, bool PARTS, bool RMS>
static __global__ void __launch_bounds__(THREADS_MAX)
    backward_kernel(real *dx, accum *partial, cf_sum dy, const real *x, const real *w, const accum *mean, const accum *rstd,
                    int64_t stretch, int64_t R, int64_t C) {
    int64_t c = (int64_t)threadIdx.x * W, begin = blockIdx.x * stretch;
    int64_t end = begin + stretch < R ? begin + stretch : R;
    bool mine = c < C;
    int64_t at = mine ? c : 0;
    values<W> dw = {}, db = {}, dbias = {};
    const cf_pack<real, W> raw_scale = load_raw<W>(w + at);
    rows_read<W> now, next;
    const auto read = [&](int64_t first) {
#pragma unroll
        for (int k = 0; k < ROWS_BACKWARD; k++) {
            int64_t r = first + k < end ? first + k : end - 1;
            next.x[k] = load_raw<W>(x + r * C + at);
            next.dy[k] = PARTS ? load_sum<W>(dy, r * C + at) : load_raw<W>((const real *)dy.to + r * C + at);
            next.dx[k] = load_raw<W>(dx + r * C + at);
            next.mean[k] = RMS ? 0 : mean[r], next.rstd[k] = rstd[r];
        }
    };
    read(begin);
    for (int64_t first = begin; first < end; first += ROWS_BACKWARD) {
        float sum[2 * ROWS_BACKWARD]; // of g, of g · h
        const values<W> scale = values_of(raw_scale);
        now = next;
        if (first + ROWS_BACKWARD < end) read(first + ROWS_BACKWARD);
#pragma unroll
        for (int k = 0; k < ROWS_BACKWARD; k++) {
            const values<W> v = values_of(now.x[k]), d = values_of(now.dy[k]);
            sum[2 * k] = sum[2 * k + 1] = 0;
#pragma unroll
            for (int i = 0; i < W; i++) {
                sum[2 * k] += d.at[i] * scale.at[i];
                sum[2 * k + 1] += d.at[i] * scale.at[i] * ((v.at[i] - now.mean[k]) * now.rstd[k]);
            }
            if (!mine) sum[2 * k] = sum[2 * k + 1] = 0;
        }
        over_block<adding>(sum);
#pragma unroll
        for (int k = 0; k < ROWS_BACKWARD; k++) {
            if (first + k >= end) break;
            const values<W> v = values_of(now.x[k]), d = values_of(now.dy[k]);
            values<W> old = values_of(now.dx[k]);
            float mean_g = RMS ? 0 : sum[2 * k] / (float)C, mean_gh = sum[2 * k + 1] / (float)C;
#pragma unroll
            for (int i = 0; i < W; i++) {
                float h = (v.at[i] - now.mean[k]) * now.rstd[k];
                dw.at[i] += d.at[i] * h;
                if (!RMS) db.at[i] += d.at[i];
                old.at[i] += now.rstd[k] * (d.at[i] * scale.at[i] - mean_g - h * mean_gh);
            }
            dbias += old;
            if (mine) store<W>(dx + (first + k) * C + c, old);
        }
    }
    accum *part = partial + blockIdx.x * SUMS * C;
    if (mine) store<W>(part + c, dw), RMS ? (void)0 : store<W>(part + C + c, db), store<W>(part + 2 * C + c, dbias);
}

// The same for long rows: one thread adds up each element of dw, db and dbias in the scratch.
static __global__ void backward_long_kernel(real *dx, accum *partial, cf_sum dy, const real *x, const real *w, const accum *mean,
                                            const accum *rstd, int64_t stretch, int64_t R, int64_t C) {
    int64_t begin = blockIdx.x * stretch, end = begin + stretch < R ? begin + stretch : R;
    accum *dw = partial + blockIdx.x * SUMS * C, *db = dw + C, *dbias = db + C;
    for (int64_t c = threadIdx.x; c < C; c += LONG_THREADS) dw[c] = db[c] = dbias[c] = 0;
    for (int64_t r = begin; r < end; r++) {
        float m = mean ? mean[r] : 0, s = rstd[r], sum[2] = {0, 0};
        real *dy_row = (real *)dy.to + r * C;
        for (int64_t c = threadIdx.x; c < C; c += LONG_THREADS) {
            if (dy.parts > 0) dy_row[c] = load_sum<1>(dy, r * C + c).at[0];
            float d = (float)dy_row[c], g = d * (float)w[c], h = ((float)x[r * C + c] - m) * s;
            dw[c] += d * h;
            db[c] += d;
            sum[0] += g;
            sum[1] += g * h;
        }
        over_block<adding>(sum);
        float mean_g = mean ? sum[0] / (float)C : 0, mean_gh = sum[1] / (float)C;
        for (int64_t c = threadIdx.x; c < C; c += LONG_THREADS) {
            float g = (float)dy_row[c] * (float)w[c], h = ((float)x[r * C + c] - m) * s;
            float changed = (float)dx[r * C + c] + s * (g - mean_g - h * mean_gh);
            dbias[c] += changed;
            dx[r * C + c] = (real)changed;
        }
    }
}

template <bool RMS> static auto backward_for(bool packed, bool parts) {
    if (parts) return packed ? backward_kernel<PACK, true, RMS> : backward_kernel<1, true, RMS>;
    return packed ? backward_kernel<PACK, false, RMS> : backward_kernel<1, false, RMS>;
}

void layernorm_backward(real *dx, accum *dw, accum *db, accum *dbias, cf_sum dy, const real *x, const real *w, const accum *mean,
                        const accum *rstd, accum *scratch, int64_t R, int64_t C, cf_stream *stream) {
    bool packed = packable(C, dx, x, w, scratch) && packable(dy);
    int64_t threads = threads_of_row(C, packed ? PACK : 1);
    int64_t stretch = ceil_div(R, PARTIALS), stretches = ceil_div(R, stretch);
    auto kernel = mean ? backward_for<false>(packed, dy.parts > 0) : backward_for<true>(packed, dy.parts > 0);
    if (threads == 0) kernel = backward_long_kernel;
    if (threads == 0) threads = LONG_THREADS;
    cf_launch(kernel, {stretches}, threads, stream, dx, scratch, dy, x, w, mean, rstd, stretch, R, C);
    add_partials(sums<SUMS>{{dw, db, dbias}}, scratch, stretches, C, stream);
}
