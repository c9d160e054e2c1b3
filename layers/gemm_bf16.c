// Matrix products of bf16 on the CPU: the choice between two implementations.
//
// oneDNN has products of bf16 for processors with AVX-512. AMD's with AVX512_BF16 (Zen 4 and later) multiply bf16 faster than
// fp32, and so do Intel's with AMX. Elsewhere these products are slower than fp32's, or missing, and widening is faster
// (tests/bench/README.md, one process). The processor decides, not a measurement, so that a run that is resumed has the bits of
// one that was never interrupted.
#include "gemm.h"
#include <dnnl.h>

static bool multiplies_bf16_fast(void) {
#if defined(__x86_64__)
    const int isa = (int)dnnl_get_effective_cpu_isa(), amx = dnnl_cpu_isa_avx512_core_amx, bf16 = dnnl_cpu_isa_avx512_core_bf16;
    return (isa & amx) == amx || ((isa & bf16) == bf16 && __builtin_cpu_is("amd"));
#else
    return false;
#endif
}

// The answer is kept because asking takes 0.2 us, and a small product of attention 20 us.
bool gemm_bf16_is_native(void) {
    static _Thread_local int answer = -1;
    if (answer < 0) answer = multiplies_bf16_fast();
    return answer;
}

static void multiply(product of, const real *a, const real *b, void *c) {
    of.threads = gemm_threads();
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
