// Linear layer on the CPU: three products, copies of the weights for two of them, and the gradient of a bias.
#include "linear.h"
#include "elementwise.h"
#include "gemm.h"
#include <string.h>

// Rows of out per product when there is a bias: the product adds to rows that are still in the cache.
enum { ROW_BLOCK = 1024 };
// A tile of a transposition: as many rows as fill a cache line of the result, and a few lines of columns.
enum { TILE_ROWS = 16, TILE_COLUMNS = 128 };
// After each row of a prepared matrix in fp32: rows a power of two apart would map to the same few sets of the cache. In bf16
// products lose nothing without it, and with it oneDNN chooses a kernel that keeps all of c in fp32 beside c.
enum { GAP = sizeof(real) == 2 ? 0 : 16 };
// Bias gradient: columns at once, and blocks of rows with a sum each.
enum { COLUMNS = 1024, BLOCKS = 16 };

// to (columns, rows) = from (rows, columns)ᵀ, both within larger matrices
static void transpose_tile(real *restrict to, int64_t to_row, const real *restrict from, int64_t from_row, int64_t rows,
                           int64_t columns) {
    for (int64_t c = 0; c < columns; c++) {
#pragma omp simd
        for (int64_t r = 0; r < rows; r++) to[c * to_row + r] = from[r * from_row + c];
    }
}

int64_t linear_prepared_size(int64_t IC, int64_t OC) {
    return IC * OC + GAP * (IC > OC ? IC : OC);
}

const real *linear_prepare_forward(real *prepared, const real *w, int64_t IC, int64_t OC, cf_stream *stream) {
    int64_t row = OC + GAP;
#pragma omp parallel for
    for (int64_t r = 0; r < OC; r += TILE_ROWS) {
        int64_t rows = smaller(OC - r, TILE_ROWS);
        for (int64_t c = 0; c < IC; c += TILE_COLUMNS)
            transpose_tile(prepared + c * row + r, row, w + r * IC + c, IC, rows, smaller(IC - c, TILE_COLUMNS));
    }
    return prepared;
}

const real *linear_prepare_dgrad(real *prepared, const real *w, int64_t IC, int64_t OC, cf_stream *stream) {
#pragma omp parallel for
    for (int64_t r = 0; r < OC; r++) memcpy(prepared + r * (IC + GAP), w + r * IC, (size_t)IC * sizeof *w);
    return prepared;
}

void linear_forward(real *out, real *pre, const real *x, const real *w, const real *bias, bool add, linear_rows r, int64_t IC,
                    int64_t OC, cf_stream *stream) {
    const int64_t most = bias ? ROW_BLOCK : r.rows;
    for (int64_t i = 0; i < r.blocks; i++) {
        real *block = (pre ? pre : out) + i * r.out * OC;
        for (int64_t row = 0; row < r.rows; row += most) {
            int64_t rows = smaller(r.rows - row, most);
            real *to = block + row * OC;
            if (bias) {
#pragma omp parallel for
                for (int64_t k = 0; k < rows; k++) memcpy(to + k * OC, bias, (size_t)OC * sizeof *to);
            }
            gemm_to_real(false, false, rows, OC, IC, x + (i * r.in + row) * IC, IC, w, OC + GAP, bias || add ? 1 : 0, to, OC,
                         stream);
        }
        if (pre) activation_forward(out + i * r.out * OC, block, r.rows * OC, stream); // while the block is in the cache
    }
}

void linear_dgrad(real *dx, const real *dy, const real *w, const real *pre, bool add, linear_rows r, int64_t IC, int64_t OC,
                  cf_stream *stream) {
    for (int64_t i = 0; i < r.blocks; i++) {
        real *block = dx + i * r.out * IC;
        gemm_to_real(false, false, r.rows, IC, OC, dy + i * r.in * OC, OC, w, IC + GAP, add, block, IC, stream);
        if (pre) activation_backward(block, block, pre + i * r.out * IC, r.rows * IC, stream);
    }
}

void linear_wgrad(accum *dw, const real *dy, int64_t dy_row, const real *x, int64_t R, int64_t IC, int64_t rows, bool add,
                  cf_stream *stream) {
    gemm_to_accum(true, false, rows, IC, R, dy, dy_row, x, IC, add, dw, IC, stream);
}

int64_t linear_wgrad_rows_min(int64_t IC) {
    return 64; // `make bench` prints the cost
}

int64_t linear_wgrad_depth_min(void) {
    return 0; // bench_fuse, chunking
}

// sum (columns) = sum of rows of dy, in row order
static void sum_rows(accum *restrict sum, const real *restrict dy, int64_t rows, int64_t columns, int64_t OC) {
    for (int64_t c = 0; c < columns; c++) sum[c] = 0;
    for (int64_t r = 0; r < rows; r++) {
#pragma omp simd
        for (int64_t c = 0; c < columns; c++) sum[c] += accum_of(dy[r * OC + c]);
    }
}

void linear_bias_grad(accum *db, const real *dy, int64_t R, int64_t OC, cf_stream *stream) {
    accum partial[BLOCKS][COLUMNS];
    int64_t block = ceil_div(R, BLOCKS);
    for (int64_t first = 0; first < OC; first += COLUMNS) {
        int64_t columns = smaller(OC - first, COLUMNS);
#pragma omp parallel for
        for (int64_t i = 0; i < BLOCKS; i++) {
            int64_t r = smaller(i * block, R), end = smaller(r + block, R);
            sum_rows(partial[i], dy + r * OC + first, end - r, columns, OC);
        }
        for (int64_t c = 0; c < columns; c++) {
            accum sum = partial[0][c];
            for (int64_t i = 1; i < BLOCKS; i++) sum += partial[i][c];
            db[first + c] += sum;
        }
    }
}

void linear_time_algorithms(bool all) {}

int linear_algorithm(void) {
    return 0;
}
