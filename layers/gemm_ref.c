// Matrix product in plain loops: the reference, and what the gradient tests use in double.
#include "gemm.h"

void gemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, const real *a, int64_t lda,
          const real *b, int64_t ldb, real beta, real *c, int64_t ldc, cf_stream *stream) {
    (void)stream;
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++) {
            real sum = 0;
            for (int64_t p = 0; p < k; p++)
                sum += (transpose_a ? a[p * lda + i] : a[i * lda + p]) *
                       (transpose_b ? b[j * ldb + p] : b[p * ldb + j]);
            c[i * ldc + j] = beta == 0 ? sum : beta * c[i * ldc + j] + sum;
        }
    }
}
