// ranks: 1
// The matrix product and the linear layer against naive loops. Products have small integers in them, so the
// result is exact and compared without tolerance.
#include "kernel_testing.h"
#include "../death.h"
#include "layers/gemm.h"
#include "layers/linear.h"

static real *integer_buffer(int64_t n) {
    real *x = zero_buffer(n);
    for (int64_t i = 0; i < n; i++) x[i] = (real)random_size(-4, 4);
    return x;
}

// A stored matrix whose rows are longer than its width; the rest of each row is NaN.
static real *padded_integers(int64_t rows, int64_t width, int64_t row) {
    real *x = poisoned_buffer(rows * row);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < width; j++) x[i * row + j] = (real)random_size(-4, 4);
    return x;
}

static void check_gemm(bool ta, bool tb, int64_t m, int64_t n, int64_t k, real beta) {
    int64_t lda = (ta ? m : k) + random_size(0, 3), ldb = (tb ? k : n) + random_size(0, 3),
            ldc = n + random_size(0, 3);
    real *a = padded_integers(ta ? k : m, ta ? m : k, lda), *b = padded_integers(tb ? n : k, tb ? k : n, ldb);
    real *c = beta == 0 ? poisoned_buffer(m * ldc) : padded_integers(m, n, ldc),
         *before = copy_buffer(c, m * ldc);
    gemm(ta, tb, m, n, k, a, lda, b, ldb, beta, c, ldc, NULL);
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++) {
            double sum = beta == 0 ? 0 : (double)before[i * ldc + j];
            for (int64_t p = 0; p < k; p++)
                sum += (double)(ta ? a[p * lda + i] : a[i * lda + p]) *
                       (double)(tb ? b[j * ldb + p] : b[p * ldb + j]);
            if ((double)c[i * ldc + j] != sum)
                fail_msg("op %d%d, %lld x %lld x %lld, beta %g: c[%lld, %lld] is %g, expected %g", ta, tb,
                         (long long)m, (long long)n, (long long)k, (double)beta, (long long)i, (long long)j,
                         (double)c[i * ldc + j], sum);
        }
        assert_untouched("after the row", c + i * ldc + n, ldc - n);
    }
}

static void check_all_gemms(int64_t m, int64_t n, int64_t k) {
    for (int i = 0; i < 8; i++) check_gemm(i & 1, i & 2, m, n, k, (real)(i >> 2));
}

static void gemm_is_exact_on_integers(void **state) {
    (void)state;
    check_all_gemms(1, 1, 1);
    check_all_gemms(130, 67, 257);
    for (int i = 0; i < 20; i++) check_all_gemms(random_size(1, 50), random_size(1, 50), random_size(1, 50));
}

static void gemm_of_nothing(void **state) {
    (void)state;
    check_all_gemms(0, 3, 2);
    check_all_gemms(3, 0, 2);
    check_all_gemms(3, 2, 0); // beta 0: zeros; beta 1: unchanged
}

static void gemm_inside_a_parallel_region(void **state) {
    (void)state;
    enum { TASKS = 12, N = 70 };
    real *a = integer_buffer(N * N), *b = integer_buffer(N * N), *alone = poisoned_buffer(N * N);
    real *together = poisoned_buffer(TASKS * N * N);
    gemm(false, true, N, N, N, a, N, b, N, 0, alone, N, NULL);
#pragma omp parallel for num_threads(3)
    for (int i = 0; i < TASKS; i++) gemm(false, true, N, N, N, a, N, b, N, 0, together + i * N * N, N, NULL);
    for (int i = 0; i < TASKS; i++) assert_same_bits("product", together + i * N * N, alone, N * N);
}

static void gemm_refusal_is_fatal(void **state) {
    (void)state;
    real *x = zero_buffer(64);
    ASSERT_DIES(gemm(false, false, 4, 4, 4, x, 3, x, 4, 0, x, 4, NULL), "dnnl_sgemm", "row length 3");
}

static void check_linear(int64_t R, int64_t IC, int64_t OC) {
    real *x = integer_buffer(R * IC), *w = integer_buffer(OC * IC), *bias = integer_buffer(OC);
    real *y = poisoned_buffer(R * OC), *plain = poisoned_buffer(R * OC);
    linear_forward(y, x, w, bias, R, IC, OC, NULL);
    linear_forward(plain, x, w, NULL, R, IC, OC, NULL);
    for (int64_t r = 0; r < R; r++)
        for (int64_t o = 0; o < OC; o++) {
            double sum = dot(x + r * IC, w + o * IC, IC);
            assert_true((double)plain[r * OC + o] == sum);
            assert_true((double)y[r * OC + o] == sum + (double)bias[o]);
        }

    real *dx = poisoned_buffer(R * IC), *dw = integer_buffer(OC * IC), *db = integer_buffer(OC);
    real *dw_before = copy_buffer(dw, OC * IC), *db_before = copy_buffer(db, OC);
    linear_dgrad(dx, y, w, R, IC, OC, NULL);
    linear_wgrad(dw, y, x, R, IC, OC, NULL);
    linear_bias_grad(db, y, R, OC, NULL);
    for (int64_t i = 0; i < IC; i++) {
        for (int64_t r = 0; r < R; r++) {
            double sum = 0;
            for (int64_t o = 0; o < OC; o++) sum += (double)y[r * OC + o] * (double)w[o * IC + i];
            assert_true((double)dx[r * IC + i] == sum);
        }
        for (int64_t o = 0; o < OC; o++) {
            double sum = (double)dw_before[o * IC + i];
            for (int64_t r = 0; r < R; r++) sum += (double)y[r * OC + o] * (double)x[r * IC + i];
            assert_true((double)dw[o * IC + i] == sum);
        }
    }
    for (int64_t o = 0; o < OC; o++) {
        double sum = (double)db_before[o];
        for (int64_t r = 0; r < R; r++) sum += (double)y[r * OC + o];
        assert_true((double)db[o] == sum);
    }
}

static void linear_is_exact_on_integers(void **state) {
    (void)state;
    check_linear(1, 1, 1);
    check_linear(0, 3, 5);
    check_linear(1030, 2, 3); // more rows than are filled with bias at once
    for (int i = 0; i < 20; i++) check_linear(random_size(1, 60), random_size(1, 40), random_size(1, 40));
}

typedef struct bias_problem {
    int64_t R, OC;
    const real *dy;
} bias_problem;

static void run_bias_grad(void *context, real *db) {
    bias_problem *p = context;
    linear_bias_grad(db, p->dy, p->R, p->OC, NULL);
}

static void bias_gradient(void **state) {
    (void)state;
    static const int64_t shapes[][2] = {{1, 1}, {3, 1025}, {16, 7}, {17, 33}, {999, 2050}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        bias_problem p = {shapes[i][0], shapes[i][1], random_buffer(shapes[i][0] * shapes[i][1])};
        real *db = random_buffer(p.OC), *start = copy_buffer(db, p.OC);
        double *expected = double_buffer(p.OC);
        for (int64_t o = 0; o < p.OC; o++) {
            expected[o] = (double)db[o];
            for (int64_t r = 0; r < p.R; r++) expected[o] += (double)p.dy[r * p.OC + o];
        }
        run_bias_grad(&p, db);
        assert_close("db", db, expected, p.OC, 2e-6, sqrt((double)p.R));
        assert_threads_do_not_matter("db", run_bias_grad, &p, start, p.OC);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        KERNEL_TEST(gemm_refusal_is_fatal), // before there are threads: it forks
        KERNEL_TEST(gemm_is_exact_on_integers),
        KERNEL_TEST(gemm_of_nothing),
        KERNEL_TEST(gemm_inside_a_parallel_region),
        KERNEL_TEST(linear_is_exact_on_integers),
        KERNEL_TEST(bias_gradient),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
