// Matrix products of bf16 by those of fp32: for processors that multiply bf16 slowly, or not at all.
//
// A product of two bf16 is exact in fp32, so nothing is lost by widening what is multiplied, and the sums are those of
// fp32. What it costs are passes over memory: an element is widened once for each tile of c that it goes into. So c is
// cut into tiles that are large, and yet small enough that what is widened for one, and the tile itself where it is
// still to be rounded, stay in the cache, and in bounds however large the product is:
//
//     for each column of tiles: widen its columns of b
//         for each tile: widen its rows of a, multiply, round
//
// Buffers belong to the calling thread, as attention multiplies in all threads at once, and are kept for the next product.
#include <stdlib.h>
#include "gemm.h"
#include "../commfuse/die.h"

enum {
    TILE = 1024,       // rows and columns of a tile, at most;
    TILE_MIN = 64,     // where a product has many terms, fewer, but not fewer than these,
    WIDENED = 4 << 20, // so that no more than these elements of a or b are widened at once
    GAP = 16           // behind each row that is widened: see linear.c
};

typedef struct buffer {
    float *at;
    int64_t size;
} buffer;
static _Thread_local buffer widened_a, widened_b, tile_of_c;

static float *at_least(buffer *b, int64_t size) {
    if (size <= b->size) return b->at;
    free(b->at);
    b->at = malloc((size_t)size * sizeof *b->at);
    if (!b->at)
        cf_die("use smaller micro-batches, or fewer ranks on a host", "out of memory: %lld bytes for a product of bf16",
               (long long)size * (long long)sizeof *b->at);
    b->size = size;
    return b->at;
}

static void widen(float *restrict to, int64_t to_row, const real *restrict from, int64_t from_row, int64_t rows, int64_t columns) {
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
#pragma omp simd
        for (int64_t c = 0; c < columns; c++) to[r * to_row + c] = precise_of(from[r * from_row + c]);
    }
}

static void narrow(real *restrict to, int64_t to_row, const float *restrict from, int64_t from_row, int64_t rows, int64_t columns) {
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
#pragma omp simd
        for (int64_t c = 0; c < columns; c++) to[r * to_row + c] = real_of(from[r * from_row + c]);
    }
}

// Some rows (or columns, where `across`) of a matrix stored in rows of ld elements, the other side being `terms` long.
typedef struct panel {
    const float *at;
    int64_t row; // elements from one row to the next
} panel;

static panel widen_panel(buffer *to, const real *x, int64_t ld, bool across, int64_t first, int64_t count, int64_t terms) {
    const int64_t rows = across ? terms : count, columns = across ? count : terms, row = columns + GAP;
    float *at = at_least(to, rows * row);
    widen(at, row, x + (across ? first : first * ld), ld, rows, columns);
    return (panel){at, row};
}

static int64_t tile_side(int64_t size, int64_t terms) {
    int64_t side = terms > 0 && WIDENED / terms < TILE ? WIDENED / terms : TILE;
    if (side < TILE_MIN) side = TILE_MIN;
    return size < side ? size : side;
}

// One tile of c, (m, n), whose first element is c.
static void multiply_tile(const product *of, panel a, panel b, int64_t m, int64_t n, void *c) {
    const precise beta = of->add ? 1 : 0;
    if (of->wide) {
        gemm(of->transpose_a, of->transpose_b, m, n, of->k, a.at, a.row, b.at, b.row, beta, c, of->ldc, NULL);
        return;
    }
    const int64_t row = n + GAP;
    float *tile = at_least(&tile_of_c, m * row);
    if (of->add) widen(tile, row, c, of->ldc, m, n);
    gemm(of->transpose_a, of->transpose_b, m, n, of->k, a.at, a.row, b.at, b.row, beta, tile, row, NULL);
    narrow(c, of->ldc, tile, row, m, n);
}

void gemm_bf16_widened(const product *of, const real *a, const real *b, void *c) {
    const int64_t rows = tile_side(of->m, of->k), columns = tile_side(of->n, of->k);
    const int64_t size = of->wide ? sizeof(precise) : sizeof(real);
    for (int64_t j = 0; j < of->n; j += columns) {
        int64_t n = of->n - j < columns ? of->n - j : columns;
        panel of_b = widen_panel(&widened_b, b, of->ldb, !of->transpose_b, j, n, of->k);
        for (int64_t i = 0; i < of->m; i += rows) {
            int64_t m = of->m - i < rows ? of->m - i : rows;
            panel of_a = widen_panel(&widened_a, a, of->lda, of->transpose_a, i, m, of->k);
            multiply_tile(of, of_a, of_b, m, n, (char *)c + (i * of->ldc + j) * size);
        }
    }
}
