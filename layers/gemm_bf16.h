// The two implementations of bf16 products; gemm_bf16.c chooses.
#ifndef GEMM_BF16_H
#define GEMM_BF16_H

#include <stdbool.h>
#include "real.h"

// One kind of product, as in gemm.h: c (m, n) = op(a) (m, k) · op(b) (k, n), added to c or not. All fields have
// one type, so that two products can be compared byte by byte.
typedef struct product {
    int64_t transpose_a, transpose_b;
    int64_t m, n, k, lda, ldb, ldc;
    int64_t wide; // c is precise
    int64_t add;
    int64_t threads; // that compute it
} product;

// By oneDNN's products of bf16. Dies where oneDNN has none for this processor.
void gemm_bf16_onednn(const product *of, const real *a, const real *b, void *c);
// By widening to fp32: everywhere.
void gemm_bf16_widened(const product *of, const real *a, const real *b, void *c);
// Whether oneDNN's is the faster one here: with AMX, and on AMD with AVX512_BF16; elsewhere oneDNN's is slow or missing.
bool gemm_bf16_is_native(void);

#endif
