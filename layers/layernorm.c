// Layer normalisation on the CPU. A row is read once from memory; the passes over it after the first
// find it in the cache.
//
// Backward: the rows are cut into BLOCKS blocks whatever the number of threads. Each block sums its dw
// and db in row order into its own part of the scratch, and the blocks are then added in order, so the
// result has the same bits however many threads there are.
#include "layernorm.h"
#include "math_real.h"

enum { BLOCKS = 32 };
static const real EPS = (real)1e-5;

void layernorm_forward(real *out, precise *mean, precise *rstd, const real *x, const real *w, const real *b,
                       int64_t R, int64_t C, cf_stream *stream) {
    (void)stream;
#pragma omp parallel for
    for (int64_t r = 0; r < R; r++) {
        const real *row = x + r * C;
        real *out_row = out + r * C;
        real sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < C; c++) sum += row[c];
        real m = sum / (real)C;
#pragma omp simd reduction(+ : squares)
        for (int64_t c = 0; c < C; c++) squares += (row[c] - m) * (row[c] - m);
        real s = 1 / sqrt_real(squares / (real)C + EPS);
#pragma omp simd
        for (int64_t c = 0; c < C; c++) out_row[c] = (row[c] - m) * s * w[c] + b[c];
        if (mean) mean[r] = m;
        if (rstd) rstd[r] = s;
    }
}

int64_t layernorm_scratch(int64_t C) {
    return BLOCKS * 2 * C;
}

// dx (C) += the gradient of one row; dw, db (C) += its share.
// With h = (x − mean) · rstd and g = dy · w:  dx += rstd · (g − mean(g) − h · mean(g · h)).
static void backward_row(real *restrict dx, precise *restrict dw, precise *restrict db,
                         const real *restrict dy, const real *restrict x, const real *restrict w, real mean,
                         real rstd, int64_t C) {
    real sum_g = 0, sum_gh = 0;
#pragma omp simd reduction(+ : sum_g, sum_gh)
    for (int64_t c = 0; c < C; c++) {
        real h = (x[c] - mean) * rstd, g = dy[c] * w[c];
        dw[c] += dy[c] * h;
        db[c] += dy[c];
        sum_g += g;
        sum_gh += g * h;
    }
    real mean_g = sum_g / (real)C, mean_gh = sum_gh / (real)C;
#pragma omp simd
    for (int64_t c = 0; c < C; c++) dx[c] += rstd * (dy[c] * w[c] - mean_g - (x[c] - mean) * rstd * mean_gh);
}

void layernorm_backward(real *dx, precise *dw, precise *db, const real *dy, const real *x, const real *w,
                        const precise *mean, const precise *rstd, precise *scratch, int64_t R, int64_t C,
                        cf_stream *stream) {
    (void)stream;
    int64_t block = (R + BLOCKS - 1) / BLOCKS;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < BLOCKS; i++) {
        precise *block_dw = scratch + i * 2 * C, *block_db = block_dw + C; // (C), (C)
        memset(block_dw, 0, (size_t)(2 * C) * sizeof(precise));
        int64_t end = (i + 1) * block < R ? (i + 1) * block : R;
        for (int64_t r = i * block; r < end; r++)
            backward_row(dx + r * C, block_dw, block_db, dy + r * C, x + r * C, w, mean[r], rstd[r], C);
    }
    for (int64_t i = 0; i < BLOCKS && i * block < R; i++) {
        const precise *block_dw = scratch + i * 2 * C, *block_db = block_dw + C;
#pragma omp simd
        for (int64_t c = 0; c < C; c++) {
            dw[c] += block_dw[c];
            db[c] += block_db[c];
        }
    }
}
