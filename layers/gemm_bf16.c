// Matrix products of bf16 on the CPU: which of two ways they take.
//
// oneDNN has products of bf16 for processors with AVX-512. AMD's with AVX512_BF16 (Zen 4 and later) multiply them faster than
// fp32, and so do Intel's with AMX. Elsewhere they are slower than fp32's, or missing, and widening is the better
// way (tests/bench/README.md, one process). It is chosen by what the processor is, not by measuring, so that a run that
// goes on has the bits of one that was never interrupted.
#include "gemm.h"
#include <dnnl.h>
#ifdef _OPENMP
#include <omp.h>
#endif

static bool has(int isa) {
    return ((int)dnnl_get_effective_cpu_isa() & isa) == isa;
}

static bool multiplies_bf16_fast(void) {
#if defined(__x86_64__)
    return has(dnnl_cpu_isa_avx512_core_amx) || (has(dnnl_cpu_isa_avx512_core_bf16) && __builtin_cpu_is("amd"));
#else
    return false;
#endif
}

// To ask takes 0.2 us, a small product of attention's 20.
bool gemm_bf16_is_native(void) {
    enum { UNKNOWN, YES, NO };
    static int answer; // atomic; a process has one processor
    int known = __atomic_load_n(&answer, __ATOMIC_RELAXED);
    if (known == UNKNOWN) {
        known = multiplies_bf16_fast() ? YES : NO;
        __atomic_store_n(&answer, known, __ATOMIC_RELAXED);
    }
    return known == YES;
}

// Of a product, as oneDNN counts them.
static int64_t threads(void) {
#ifdef _OPENMP
    return omp_in_parallel() ? 1 : omp_get_max_threads();
#else
    return 1;
#endif
}

static void multiply(product of, const real *a, const real *b, void *c) {
    of.threads = threads();
    if (gemm_bf16_is_native())
        gemm_bf16_onednn(&of, a, b, c);
    else
        gemm_bf16_widened(&of, a, b, c);
}

void gemm_to_real(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, const real *a, int64_t lda, const real *b,
                  int64_t ldb, precise beta, real *c, int64_t ldc, cf_stream *stream) {
    multiply((product){transpose_a, transpose_b, m, n, k, lda, ldb, ldc, .wide = false, .add = beta != 0}, a, b, c);
}

void gemm_to_precise(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, const real *a, int64_t lda, const real *b,
                     int64_t ldb, precise beta, precise *c, int64_t ldc, cf_stream *stream) {
    multiply((product){transpose_a, transpose_b, m, n, k, lda, ldb, ldc, .wide = true, .add = beta != 0}, a, b, c);
}
