// Matrix products of bf16 by those of fp32: for processors that multiply bf16 slowly, or not at all.
//
// A product of two bf16 is exact in fp32, so widening the factors loses nothing, and the sums are those of fp32. The cost is
// passes over memory: an element is widened once for each tile of c that needs it. So c is cut into tiles that are large, yet
// small enough for a tile and its widened factors to stay in the cache, and for buffers of a bounded size:
//
//     for each column of tiles: widen its columns of b
//         for each tile: widen its rows of a, multiply, round
//
// Buffers belong to the calling thread, because attention multiplies in all threads at once, and are kept for the next product.
#include "gemm.h"

enum {
    TILE = 1024,       // rows and columns of a tile, at most; fewer if k is large,
    TILE_MIN = 64,     // but at least these,
    WIDENED = 4 << 20, // so that at most as many elements of a or b are widened at once
    GAP = 16           // after each widened row: see linear.c
};

typedef struct buffer {
    float *at;
    int64_t size;
} buffer;
static _Thread_local buffer widened_a, widened_b, tile_of_c;

typedef struct matrix {
    float *at;
    int64_t row; // elements from one row to the next
} matrix;

static matrix room_for(buffer *b, int64_t rows, int64_t columns) {
    const int64_t row = columns + GAP;
    b->at = cf_host_grow(b->at, &b->size, rows * row, sizeof *b->at, "a product of bf16");
    return (matrix){b->at, row};
}

static matrix widen(buffer *b, const real *from, int64_t from_row, int64_t rows, int64_t columns) {
    const matrix to = room_for(b, rows, columns);
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
#pragma omp simd
        for (int64_t c = 0; c < columns; c++) to.at[r * to.row + c] = precise_of(from[r * from_row + c]);
    }
    return to;
}

static void narrow(real *to, int64_t to_row, matrix from, int64_t rows, int64_t columns) {
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
#pragma omp simd
        for (int64_t c = 0; c < columns; c++) to[r * to_row + c] = real_of(from.at[r * from.row + c]);
    }
}

static int64_t tile_side(int64_t size, int64_t k) {
    return smaller(size, k > 0 ? larger(smaller(WIDENED / k, TILE), TILE_MIN) : TILE);
}

void gemm_bf16_widened(const product *of, const real *a, const real *b, void *c) {
    const int64_t rows = tile_side(of->m, of->k), columns = tile_side(of->n, of->k), k = of->k;
    const int64_t size = of->wide ? sizeof(precise) : sizeof(real);
    for (int64_t j = 0; j < of->n; j += columns) {
        const int64_t n = smaller(of->n - j, columns);
        const matrix y =
            of->transpose_b ? widen(&widened_b, b + j * of->ldb, of->ldb, n, k) : widen(&widened_b, b + j, of->ldb, k, n);
        for (int64_t i = 0; i < of->m; i += rows) {
            const int64_t m = smaller(of->m - i, rows);
            const matrix x =
                of->transpose_a ? widen(&widened_a, a + i, of->lda, k, m) : widen(&widened_a, a + i * of->lda, of->lda, m, k);
            void *to = (char *)c + (i * of->ldc + j) * size; // a tile (m, n)
            const matrix tile = of->wide  ? (matrix){to, of->ldc}
                                : of->add ? widen(&tile_of_c, to, of->ldc, m, n)
                                          : room_for(&tile_of_c, m, n);
            gemm(of->transpose_a, of->transpose_b, m, n, k, x.at, x.row, y.at, y.row, of->add ? 1 : 0, tile.at, tile.row, NULL);
            if (!of->wide) narrow(to, of->ldc, tile, m, n);
        }
    }
}
