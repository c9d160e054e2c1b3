// Matrix products, row-major. gemm.c: fp32, by oneDNN; tests link plain loops instead (tests/layers/kernels/gemm_ref.c).
// gemm_bf16.c: bf16, by oneDNN, whose products with a packed b are up to a third faster.
#pragma once
#include "real.h"
#ifdef _OPENMP
#include <omp.h>
#endif

// c (m, n) = op(a) (m, k) · op(b) (k, n) + beta · c, op = transpose where the flag says so.
// lda, ldb, ldc: elements between the starts of two stored rows (of a as stored, not of op(a)).
// beta is 0 or 1. None of m, n, k is 0. Inside an OpenMP parallel region it runs on the calling thread.
void gemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, const accum *a, int64_t lda, const accum *b,
          int64_t ldb, accum beta, accum *c, int64_t ldc, cf_stream *stream);

// The same for elements of `real`, multiplied exactly and summed in accum.
#ifdef REAL_IS_BF16
void gemm_to_accum(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, const real *a, int64_t lda, const real *b,
                   int64_t ldb, accum beta, accum *c, int64_t ldc, cf_stream *stream);
// gemm_bf16_avx512.c: the same with a transposed and b as it lies. Returns false where it is not faster: then nothing is done.
bool gemm_transposed(int64_t m, int64_t n, int64_t k, const real *a, int64_t lda, const real *b, int64_t ldb, accum beta, accum *c,
                     int64_t ldc);
bool gemm_emulated(void); // the processor has no instructions for it, so that it takes longer than fp32
#else
#define gemm_to_accum   gemm
#define gemm_emulated() false
#endif

// packed: b (k, n), or the transpose of b (n, k), in the layout that products read fastest, for the thread that packs it.
int64_t gemm_packed_size(int64_t n, int64_t k); // elements, enough for the transpose, too
void gemm_pack(real *packed, bool transpose_b, int64_t n, int64_t k, const real *b, int64_t ldb);
// c (m, n) = a (m, k) · packed + bias (n) + add (m, n), without gaps between rows. bias and add may be NULL, add may be c. Of bf16
// the whole sum is rounded once.
void gemm_packed(int64_t m, int64_t n, int64_t k, const real *a, const real *packed, const real *bias, const real *add, real *c,
                 cf_stream *stream);

// Threads of a product that is called from here.
static inline int64_t gemm_threads(void) {
#ifdef _OPENMP
    return omp_in_parallel() ? 1 : omp_get_max_threads();
#else
    return 1;
#endif
}
