// Layer normalisation on the CPU. A row is read once from memory; later passes find it in the cache.
//
// Backward: the rows are cut into BLOCKS blocks. Each block sums its dw, db and dbias in row order in its part of the scratch, and
// the blocks are then added in order, so the bits do not depend on the number of threads.
#include "layernorm.h"
#include "math_real.h"

enum { BLOCKS = 32, SUMS = 3 };

void layernorm_forward(real *out, accum *mean, accum *rstd, const real *x, const real *w, const real *b, double eps, int64_t R,
                       int64_t C, cf_stream *stream) {
#pragma omp parallel for
    for (int64_t r = 0; r < R; r++) {
        const real *row = x + r * C;
        real *out_row = out + r * C;
        accum sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < (mean ? C : 0); c++) sum += accum_of(row[c]);
        const accum m = sum / (accum)C;
#pragma omp simd reduction(+ : squares)
        for (int64_t c = 0; c < C; c++) squares += (accum_of(row[c]) - m) * (accum_of(row[c]) - m);
        accum s = 1 / sqrt(squares / (accum)C + (accum)eps);
#pragma omp simd
        for (int64_t c = 0; c < C; c++)
            out_row[c] = real_of((accum_of(row[c]) - m) * s * accum_of(w[c]) + (b ? accum_of(b[c]) : 0));
        if (mean) mean[r] = m;
        rstd[r] = s;
    }
}

int64_t layernorm_scratch(int64_t C) {
    return BLOCKS * SUMS * C;
}

// dx (C) += the gradient of one row; sums (dw, db, dbias) (SUMS, C) += its share.
// With h = (x − mean) · rstd and g = dy · w:  dx += rstd · (g − mean(g) − h · mean(g · h)); with mean NULL without mean(g).
static void backward_row(real *restrict dx, accum *restrict sums, const real *restrict dy, const real *restrict x,
                         const real *restrict w, const accum *mean, accum rstd, int64_t C) {
    const accum m = mean ? *mean : 0;
    accum sum_g = 0, sum_gh = 0;
#pragma omp simd reduction(+ : sum_g, sum_gh)
    for (int64_t c = 0; c < C; c++) {
        accum h = (accum_of(x[c]) - m) * rstd, d = accum_of(dy[c]), g = d * accum_of(w[c]);
        sums[c] += d * h;
        sums[C + c] += d;
        sum_g += g;
        sum_gh += g * h;
    }
    accum mean_g = mean ? sum_g / (accum)C : 0, mean_gh = sum_gh / (accum)C;
#pragma omp simd
    for (int64_t c = 0; c < C; c++) {
        accum h = (accum_of(x[c]) - m) * rstd, g = accum_of(dy[c]) * accum_of(w[c]);
        accum sum = accum_of(dx[c]) + rstd * (g - mean_g - h * mean_gh);
        sums[2 * C + c] += sum;
        dx[c] = real_of(sum);
    }
}

void layernorm_backward(real *dx, accum *dw, accum *db, accum *dbias, cf_sum dy, const real *x, const real *w, const accum *mean,
                        const accum *rstd, accum *scratch, int64_t R, int64_t C, cf_stream *stream) {
    accum *to[SUMS] = {dw, db, dbias};
    int64_t block = ceil_div(R, BLOCKS);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < BLOCKS; i++) {
        accum *sums = scratch + i * SUMS * C;
        memset(sums, 0, (size_t)(SUMS * C) * sizeof(accum));
        for (int64_t r = i * block; r < smaller((i + 1) * block, R); r++)
            backward_row(dx + r * C, sums, summed_row(dy, r, C), x + r * C, w, mean ? mean + r : NULL, rstd[r], C);
    }
    for (int64_t i = 0; i < BLOCKS && i * block < R; i++)
        for (int64_t k = 0; k < SUMS; k++)
#pragma omp simd
            for (int64_t c = 0; c < (to[k] ? C : 0); c++) to[k][c] += scratch[(i * SUMS + k) * C + c];
}
