// Matrix product of fp32 by oneDNN, and transposition.
#include "gemm.h"
#include "../commfuse/base/die.h"
#include <dnnl.h>
#include <string.h>

// A transposition moves blocks of SIDE rows and columns through registers. A task is so many rows, and so many columns that each
// of its rows' cache lines is read at once.
enum { SIDE = 8, TASK_ROWS = 256, TASK_COLUMNS = 64 / sizeof(real) };
// After each row of a packed matrix of fp32: rows a power of two apart would map to the same few sets of the cache.
enum { GAP = 16 };

// Elements as bits, which vectors can have.
#if defined(REAL_IS_BF16)
typedef uint16_t element;
#else
typedef uint32_t element;
#endif
typedef element side __attribute__((vector_size(SIDE * sizeof(element)), aligned(sizeof(element)), may_alias));

static void transpose_block(real *to, int64_t to_row, const real *from, int64_t from_row) {
    side x[SIDE], y[SIDE];
    for (int64_t i = 0; i < SIDE; i++) x[i] = *(const side *)(from + i * from_row);
#pragma GCC unroll 3
    for (int stage = 0; stage < 3; stage++) { // after each, the places of elements are rotated by a bit: row and column have three
        for (int i = 0; i < SIDE / 2; i++) {
            y[2 * i] = __builtin_shufflevector(x[i], x[i + SIDE / 2], 0, 8, 1, 9, 2, 10, 3, 11);
            y[2 * i + 1] = __builtin_shufflevector(x[i], x[i + SIDE / 2], 4, 12, 5, 13, 6, 14, 7, 15);
        }
        memcpy(x, y, sizeof x);
    }
    for (int64_t i = 0; i < SIDE; i++) *(side *)(to + i * to_row) = x[i];
}

void gemm_transpose(real *to, int64_t to_row, const real *from, int64_t from_row, int64_t rows, int64_t columns) {
#pragma omp parallel for collapse(2)
    for (int64_t task = 0; task < rows; task += TASK_ROWS) {
        for (int64_t first = 0; first < columns; first += TASK_COLUMNS) {
            const int64_t end = smaller(task + TASK_ROWS, rows), last = smaller(first + TASK_COLUMNS, columns);
            for (int64_t r = task; r < end; r += SIDE)
                for (int64_t c = first; c < last; c += SIDE) {
                    if (r + SIDE <= end && c + SIDE <= last)
                        transpose_block(to + c * to_row + r, to_row, from + r * from_row + c, from_row);
                    else
                        for (int64_t i = r; i < smaller(r + SIDE, end); i++)
                            for (int64_t j = c; j < smaller(c + SIDE, last); j++) to[j * to_row + i] = from[i * from_row + j];
                }
        }
    }
}

#ifndef REAL_IS_BF16
int64_t gemm_packed_size(int64_t n, int64_t k) {
    return n * k + GAP * larger(n, k);
}

void gemm_pack(real *packed, bool transpose_b, int64_t n, int64_t k, const real *b, int64_t ldb) {
    if (transpose_b) {
        gemm_transpose(packed, n + GAP, b, ldb, n, k);
        return;
    }
#pragma omp parallel for
    for (int64_t r = 0; r < k; r++) memcpy(packed + r * (n + GAP), b + r * ldb, (size_t)n * sizeof *b);
}
#endif

void gemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, const precise *a, int64_t lda, const precise *b,
          int64_t ldb, precise beta, precise *c, int64_t ldc, cf_stream *stream) {
    if (m == 0 || n == 0) return;
    if (k == 0) { // oneDNN may not take it
        for (int64_t i = 0; beta == 0 && i < m; i++) memset(c + i * ldc, 0, (size_t)n * sizeof *c);
        return;
    }
    if (ldb == GEMM_PACKED) ldb = n + GAP;
    dnnl_status_t status =
        dnnl_sgemm(transpose_a ? 'T' : 'N', transpose_b ? 'T' : 'N', m, n, k, 1.0f, a, lda, b, ldb, beta, c, ldc);
    if (status != dnnl_success)
        cf_die("a row length below the row's width is a bug in the caller; status 1 is lack of memory",
               "dnnl_sgemm failed with status %d: op(a) %ld x %ld (row length %ld), op(b) %ld x %ld (%ld), c row length %ld",
               (int)status, m, k, lda, k, n, ldb, ldc);
}
