// Matrix product of fp32 by oneDNN.
#include "gemm.h"
#include "../../commfuse/base/die.h"
#include <dnnl.h>

void gemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, const accum *a, int64_t lda, const accum *b,
          int64_t ldb, accum beta, accum *c, int64_t ldc, cf_stream *stream) {
    dnnl_status_t status =
        dnnl_sgemm(transpose_a ? 'T' : 'N', transpose_b ? 'T' : 'N', m, n, k, 1.0f, a, lda, b, ldb, beta, c, ldc);
    if (status != dnnl_success)
        cf_die("a row length below the row's width is a bug in the caller; status 1 is lack of memory",
               "dnnl_sgemm failed with status %d: op(a) %ld x %ld (row length %ld), op(b) %ld x %ld (%ld), c row length %ld",
               (int)status, m, k, lda, k, n, ldb, ldc);
}

#ifndef REAL_IS_BF16
// A tile of a transposition: as many rows as fill a cache line of the result, and a few lines of columns.
enum { TILE_ROWS = 16, TILE_COLUMNS = 128 };
// After each row of a packed matrix: rows a power of two apart would map to the same few sets of the cache.
enum { GAP = 16 };

// to (columns, rows) = from (rows, columns)ᵀ, both within larger matrices
static void transpose_tile(real *restrict to, int64_t to_row, const real *restrict from, int64_t from_row, int64_t rows,
                           int64_t columns) {
    for (int64_t c = 0; c < columns; c++) {
#pragma omp simd
        for (int64_t r = 0; r < rows; r++) to[c * to_row + r] = from[r * from_row + c];
    }
}

int64_t gemm_packed_size(int64_t n, int64_t k) {
    return n * k + GAP * larger(n, k);
}

void gemm_pack(real *packed, bool transpose_b, int64_t n, int64_t k, const real *b, int64_t ldb) {
    const int64_t row = n + GAP;
    if (!transpose_b) {
#pragma omp parallel for
        for (int64_t r = 0; r < k; r++) memcpy(packed + r * row, b + r * ldb, (size_t)n * sizeof *b);
        return;
    }
#pragma omp parallel for
    for (int64_t r = 0; r < n; r += TILE_ROWS) {
        int64_t rows = smaller(n - r, TILE_ROWS);
        for (int64_t c = 0; c < k; c += TILE_COLUMNS)
            transpose_tile(packed + c * row + r, row, b + r * ldb + c, ldb, rows, smaller(k - c, TILE_COLUMNS));
    }
}

// c (m, n) = bias (n) + add (m, n)
static void begin_sum(real *c, const real *bias, const real *add, int64_t m, int64_t n) {
#pragma omp parallel for
    for (int64_t row = 0; row < m; row++) {
        if (!add) memcpy(c + row * n, bias, (size_t)n * sizeof *c);
#pragma omp simd
        for (int64_t i = row * n; i < (add ? (row + 1) * n : 0); i++) c[i] = add[i] + (bias ? bias[i - row * n] : 0);
    }
}

void gemm_packed(int64_t m, int64_t n, int64_t k, const real *a, const real *packed, const real *bias, const real *add, real *c,
                 cf_stream *stream) {
    if (bias || (add && add != c)) begin_sum(c, bias, add, m, n);
    gemm(false, false, m, n, k, a, k, packed, n + GAP, bias || add, c, n, stream);
}
#endif
