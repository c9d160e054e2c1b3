// Matrix product of fp32 by oneDNN.
#include "gemm.h"
#include "../commfuse/base/die.h"
#include <dnnl.h>
#include <string.h>

void gemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, const accum *a, int64_t lda, const accum *b,
          int64_t ldb, accum beta, accum *c, int64_t ldc, cf_stream *stream) {
    if (m == 0 || n == 0) return;
    if (k == 0) { // oneDNN may not take it
        for (int64_t i = 0; beta == 0 && i < m; i++) memset(c + i * ldc, 0, (size_t)n * sizeof *c);
        return;
    }
    dnnl_status_t status =
        dnnl_sgemm(transpose_a ? 'T' : 'N', transpose_b ? 'T' : 'N', m, n, k, 1.0f, a, lda, b, ldb, beta, c, ldc);
    if (status != dnnl_success)
        cf_die("a row length below the row's width is a bug in the caller; status 1 is lack of memory",
               "dnnl_sgemm failed with status %d: op(a) %ld x %ld (row length %ld), op(b) %ld x %ld (%ld), c row length %ld",
               (int)status, m, k, lda, k, n, ldb, ldc);
}
