// Matrix product in plain loops, in place of gemm.c: what the gradient tests use in double, and machines without oneDNN.
#include "../../../layers/kernels/gemm.h"

// sum over p of a[p · a_step] · b[p]
static accum dot(const accum *a, int64_t a_step, const accum *b, int64_t k) {
    accum sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t p = 0; p < k; p++) sum += a[p * a_step] * b[p];
    return sum;
}

int64_t gemm_packed_size(int64_t n, int64_t k) {
    return n * k;
}

void gemm_pack(real *packed, bool transpose_b, int64_t n, int64_t k, const real *b, int64_t ldb) {
    for (int64_t p = 0; p < k; p++)
        for (int64_t j = 0; j < n; j++) packed[p * n + j] = transpose_b ? b[j * ldb + p] : b[p * ldb + j];
}

void gemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, const accum *a, int64_t lda, const accum *b,
          int64_t ldb, accum beta, accum *c, int64_t ldc, cf_stream *stream) {
    const int64_t a_row = transpose_a ? 1 : lda, a_step = transpose_a ? lda : 1; // of op(a)
    (void)stream;
    for (int64_t i = 0; i < m; i++) {
        accum *row = c + i * ldc;
        for (int64_t j = 0; j < n; j++) row[j] = beta == 0 ? 0 : beta * row[j];
        if (transpose_b) {
            for (int64_t j = 0; j < n; j++) row[j] += dot(a + i * a_row, a_step, b + j * ldb, k);
        } else {
            for (int64_t p = 0; p < k; p++)
                for (int64_t j = 0; j < n; j++) row[j] += a[i * a_row + p * a_step] * b[p * ldb + j];
        }
    }
}

void gemm_packed(int64_t m, int64_t n, int64_t k, const real *a, const real *packed, const real *bias, const real *add, real *c,
                 cf_stream *stream) {
    for (int64_t i = 0; i < m * n; i++) c[i] = (add ? add[i] : 0) + (bias ? bias[i % n] : 0);
    gemm(false, false, m, n, k, a, k, packed, n, 1, c, n, stream);
}
