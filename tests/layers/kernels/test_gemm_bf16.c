// ranks: 1
// Products of bf16 against naive loops. Matrices hold small integers, so sums are exact in fp32, and rounded results must be the
// nearest bf16, to the last bit.
#include <stdio.h>
#include <stdlib.h>
#include "tests/cases.h"
#include <dnnl.h>
#include "layers/kernels/gemm.h"

#define NEEDS_AVX512()                                                                                                             \
    if ((dnnl_get_effective_cpu_isa() & dnnl_cpu_isa_avx512_core) != dnnl_cpu_isa_avx512_core) skip()

typedef struct product {
    bool transpose_a, transpose_b, packed /* and rounded */, add, bias;
    int64_t m, n, k, lda, ldb, ldc;
} product;

enum { POISON = 0x7fc0 }; // NaN: must not be read; where written, must not stay

static int random_int(int low, int high) {
    static uint64_t state = 19;
    state = state * 6364136223846793005u + 1442695040888963407u; // fast: there are many
    return low + (int)((state >> 33) % (uint64_t)(high - low + 1));
}

// A stored matrix, with poison after each row.
static real *integers(int64_t rows, int64_t columns, int64_t row) {
    real *x = malloc((size_t)(rows * row + 1) * sizeof *x);
    assert_non_null(x);
    for (int64_t i = 0; i < rows * row; i++) x[i] = (real){POISON};
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) x[r * row + c] = real_of(random_int(-4, 4));
    return x;
}

static float *widened(const real *x, int64_t n) {
    float *y = malloc((size_t)(n + 1) * sizeof *y);
    assert_non_null(y);
    for (int64_t i = 0; i < n; i++) y[i] = accum_of(x[i]);
    return y;
}

static double term(const product *of, const real *a, const real *b, int64_t i, int64_t j, int64_t p) {
    return (double)accum_of(of->transpose_a ? a[p * of->lda + i] : a[i * of->lda + p]) *
           (double)accum_of(of->transpose_b ? b[j * of->ldb + p] : b[p * of->ldb + j]);
}

// The correct c at (i, j).
static float expected_at(const product *of, const real *a, const real *b, const real *bias, const real *before, int64_t i,
                         int64_t j) {
    double sum = (of->add ? (double)accum_of(before[i * of->ldc + j]) : 0) + (of->bias ? (double)accum_of(bias[j]) : 0);
    for (int64_t p = 0; p < of->k; p++) sum += term(of, a, b, i, j, p);
    return of->packed ? accum_of(real_of(sum)) : (float)sum;
}

static void check_element(const product *of, float found, float expected, int64_t i, int64_t j) {
    if (found == expected) return;
    fail_msg("op %d%d, %lld x %lld x %lld, add %d, bias %d, packed %d: c[%lld, %lld] is %g, expected %g", (int)of->transpose_a,
             (int)of->transpose_b, (long long)of->m, (long long)of->n, (long long)of->k, (int)of->add, (int)of->bias,
             (int)of->packed, (long long)i, (long long)j, (double)found, (double)expected);
}

// Of large products some elements: one in `stride`, and the last.
static void check(product of, int64_t stride) {
    real *a = integers(of.transpose_a ? of.k : of.m, of.transpose_a ? of.m : of.k, of.lda);
    real *b = integers(of.transpose_b ? of.n : of.k, of.transpose_b ? of.k : of.n, of.ldb);
    real *before = integers(of.m, of.n, of.ldc), *rounded = integers(of.m, of.add ? of.n : 0, of.ldc);
    for (int64_t i = 0; of.add && i < of.m * of.ldc; i++) rounded[i] = before[i];
    float *wide = widened(rounded, of.m * of.ldc);
    real *bias = integers(1, of.n, of.n), *packed = integers(1, 0, gemm_packed_size(of.n, of.k));
    if (of.packed) {
        gemm_pack(packed, of.transpose_b, of.n, of.k, b, of.ldb);
        gemm_packed(of.m, of.n, of.k, a, packed, of.bias ? bias : NULL, of.add ? rounded : NULL, rounded, NULL);
    } else {
        gemm_to_accum(of.transpose_a, of.transpose_b, of.m, of.n, of.k, a, of.lda, b, of.ldb, of.add, wide, of.ldc, NULL);
    }
    for (int64_t i = 0; i < of.m; i++) {
        for (int64_t j = 0; j < of.ldc; j++) {
            const int64_t at = i * of.ldc + j;
            const float found = of.packed ? accum_of(rounded[at]) : wide[at];
            if (j >= of.n)
                assert_true(found != found); // not a number, as before
            else if (at % stride == 0 || at == (of.m - 1) * of.ldc + of.n - 1)
                check_element(&of, found, expected_at(&of, a, b, bias, before, i, j), i, j);
        }
    }
    free(a), free(b), free(bias), free(packed), free(before), free(rounded), free(wide);
}

static void check_all(int64_t m, int64_t n, int64_t k, int64_t stride) {
    for (int i = 0; i < 16; i++) {
        product of = {.transpose_b = i & 1, .add = i & 2, .packed = i & 4};
        of.transpose_a = !of.packed && i & 8;
        of.bias = of.packed && i & 8;
        of.m = m, of.n = n, of.k = k;
        const int gap = of.packed ? 0 : 3; // at most, after the rows of a and c
        of.lda = (of.transpose_a ? m : k) + random_int(0, gap);
        of.ldb = (of.transpose_b ? k : n) + random_int(0, 3);
        of.ldc = n + random_int(0, gap);
        check(of, stride);
    }
}

TEST(any_shape) {
    NEEDS_AVX512();
    check_all(1, 1, 1, 1);
    check_all(130, 67, 257, 1);
    check_all(7, 64, 6, 1); // gemm_bf16_avx512.c: whole panels, more rows than one, more of the sum than a block
    check_all(200, 128, 2050, 7);
    check_all(150, 140, 1 << 15, 1009);
    for (int i = 0; i < 20; i++) check_all(random_int(1, 50), random_int(1, 50), random_int(1, 50), 1);
}

TEST(inside_a_parallel_region) {
    NEEDS_AVX512();
    enum { N = 40, TASKS = 16 };
    real *a = integers(N, N, N), *b = integers(N, N, N);
    float alone[N * N], *together = malloc(sizeof alone * TASKS);
    assert_non_null(together);
    gemm_to_accum(false, true, N, N, N, a, N, b, N, 0, alone, N, NULL);
#pragma omp parallel for
    for (int i = 0; i < TASKS; i++) gemm_to_accum(false, true, N, N, N, a, N, b, N, 0, together + i * N * N, N, NULL);
    for (int i = 0; i < TASKS; i++) assert_memory_equal(alone, together + i * N * N, sizeof alone);
    free(a), free(b), free(together);
}

TEST(the_same_bits_with_any_number_of_threads) {
    NEEDS_AVX512();
    enum { M = 250, N = 128, K = 1030 };
    real *a = integers(K, M, M), *b = integers(K, N, N);
    for (int i = 0; i < K * M; i++) a[i] = real_of(accum_of(a[i]) / 3.0); // no sum is exact
    float sums[2][M * N];
    const int threads = omp_get_max_threads();
    for (int i = 0; i < 2; i++) {
        omp_set_num_threads(i ? 3 : 1);
        gemm_to_accum(true, false, M, N, K, a, M, b, N, 0, sums[i], N, NULL);
    }
    omp_set_num_threads(threads);
    assert_memory_equal(sums[0], sums[1], sizeof sums[0]);
    free(a), free(b);
}

int main(void) {
    return cmocka_run_group_tests(all_tests, NULL, NULL);
}
