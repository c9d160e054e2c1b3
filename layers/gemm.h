// Matrix product, row-major. gemm.c: oneDNN (dnnl_sgemm). gemm_ref.c: plain loops, any `real`; the
// linker picks one.
#ifndef GEMM_H
#define GEMM_H

#include <stdbool.h>
#include "real.h"

#ifdef __cplusplus
extern "C" {
#endif

// c (m, n) = op(a) (m, k) · op(b) (k, n) + beta · c, op = transpose where the flag says so.
// lda, ldb, ldc: elements between the starts of two stored rows (of a as stored, not of op(a)).
// beta is 0 or 1. Any of m, n, k may be 0. Inside an OpenMP parallel region it runs on the calling thread.
void gemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, const real *a, int64_t lda,
          const real *b, int64_t ldb, real beta, real *c, int64_t ldc, cf_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
