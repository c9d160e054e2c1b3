// Linear layer on the CPU: three products, packed weights for two of them, and the gradient of a bias.
#include "linear.h"
#include "elementwise.h"
#include "gemm.h"

// Rows of out at once: bias, product and GELU find them in the cache.
enum { ROW_BLOCK = 512 };
// Bias gradient: columns at once, and blocks of rows with a sum each.
enum { COLUMNS = 1024, BLOCKS = 16 };

int64_t linear_prepared_size(int64_t IC, int64_t OC) {
    return gemm_packed_size(OC, IC);
}

const real *linear_prepare_forward(real *prepared, const real *w, int64_t IC, int64_t OC, cf_stream *stream) {
    gemm_pack(prepared, true, OC, IC, w, IC);
    return prepared;
}

const real *linear_prepare_dgrad(real *prepared, const real *w, int64_t IC, int64_t OC, cf_stream *stream) {
    gemm_pack(prepared, false, IC, OC, w, IC);
    return prepared;
}

void linear_forward(real *out, real *pre, const real *x, const real *w, const real *bias, const real *add, linear_rows r,
                    int64_t IC, int64_t OC, cf_stream *stream) {
    const int64_t most = bias || (add && add != out) ? ROW_BLOCK : r.rows;
    for (int64_t i = 0; i < r.blocks; i++) {
        for (int64_t row = 0; row < r.rows; row += most) {
            const int64_t rows = smaller(r.rows - row, most), first = (i * r.out + row) * OC;
            real *to = (pre ? pre : out) + first;
            gemm_packed(rows, OC, IC, x + (i * r.in + row) * IC, w, bias, add ? add + first : NULL, to, stream);
            if (pre) activation_forward(out + first, to, rows * OC, stream);
        }
    }
}

void linear_dgrad(real *dx, const real *dy, const real *w, const real *pre, bool add, linear_rows r, int64_t IC, int64_t OC,
                  cf_stream *stream) {
    const int64_t most = pre ? ROW_BLOCK : r.rows;
    for (int64_t i = 0; i < r.blocks; i++) {
        for (int64_t row = 0; row < r.rows; row += most) {
            const int64_t rows = smaller(r.rows - row, most), first = (i * r.out + row) * IC;
            gemm_packed(rows, IC, OC, dy + (i * r.in + row) * OC, w, NULL, add ? dx + first : NULL, dx + first, stream);
            if (pre) activation_backward(dx + first, dx + first, pre + first, rows * IC, stream);
        }
    }
}

// Of plain factors: neither oneDNN's own layout of x nor a copy of dyᵀ gained what it took.
void linear_wgrad(accum *dw, accum *db, const real *dy, int64_t dy_row, const real *x, int64_t R, int64_t IC, int64_t rows,
                  bool add, cf_stream *stream) {
    if (db) linear_bias_grad(db, dy, R, rows, stream);
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
