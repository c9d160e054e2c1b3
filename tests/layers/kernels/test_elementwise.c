// ranks: 1
// GELU, its derivative, residual additions and the exp they rest on, against the C library in double.
#include "kernel_testing.h"
#include <float.h>
#include "layers/kernels/elementwise.h"
#include "layers/kernels/math_real.h"

// Error of x in units of the distance between float neighbours of the exact value. What is too small to be normal is 0 (device.h).
static double error_ulp(float x, double exact) {
    float nearest = (float)exact;
    if (isnan(exact)) return isnan(x) ? 0 : INFINITY;
    if (fabs(exact) < (double)FLT_MIN) return x == 0 ? 0 : INFINITY;
    if (isinf(nearest)) return x == nearest ? 0 : INFINITY;
    return fabs((double)x - exact) / ((double)nextafterf(fabsf(nearest), INFINITY) - (double)fabsf(nearest));
}

KERNEL_TEST(exp_of_every_kind_of_float) {
    static const float edge[] = {
        0,    -0.0f, 1,      -1,     88.72283f,       88.72284f,        89,        1e30f, -87.4f, -103.972076f, -103.973f,
        -104, -200,  -1e30f, 1e-40f, (float)INFINITY, (float)-INFINITY, (float)NAN};
    for (size_t i = 0; i < sizeof edge / sizeof *edge; i++)
        if (!(error_ulp(exp_real(edge[i]), exp((double)edge[i])) <= 2))
            fail_msg("exp(%.9g) is %.9g", (double)edge[i], (double)exp_real(edge[i]));
    for (uint64_t bits = 0; bits < 1ull << 32; bits += 9973) { // 430 000 floats of every exponent and sign
        uint32_t low = (uint32_t)bits;
        float x;
        memcpy(&x, &low, sizeof x);
        if (!(error_ulp(exp_real(x), exp((double)x)) <= 2)) fail_msg("exp(%.9g) is %.9g", (double)x, (double)exp_real(x));
    }
}

static double gelu_exact(double x) {
    return 0.5 * x * (1 + tanh(sqrt(2 / acos(-1)) * (x + 0.044715 * x * x * x)));
}

static double gelu_slope_exact(double x) {
    double root = sqrt(2 / acos(-1)), t = tanh(root * (x + 0.044715 * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * root * (1 + 3 * 0.044715 * x * x);
}

KERNEL_TEST(gelu_equals_tanh_formula) {
    static const int64_t counts[] = {0, 1, 15, 17, 1000, 40001};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        int64_t n = counts[i];
        real *x = zero_buffer(n + 1), *dy = random_buffer(n), *y = poisoned_buffer(n + 1), *dx = poisoned_buffer(n + 1);
        double *expected = double_buffer(n), *slope = double_buffer(n);
        fill_normal(x, n, 3);
        activation_forward(y, x, n, NULL);
        activation_backward(dx, dy, x, n, NULL);
        for (int64_t j = 0; j < n; j++) expected[j] = gelu_exact((double)x[j]);
        for (int64_t j = 0; j < n; j++) slope[j] = (double)dy[j] * gelu_slope_exact((double)x[j]);
        assert_close("gelu", y, expected, n, 2e-6, 0.1);
        assert_close("gelu'", dx, slope, n, 4e-6, 1);
        assert_untouched("after gelu", y + n, 1);
        assert_untouched("after gelu'", dx + n, 1);
        activation_backward(dy, dy, x, n, NULL);
        assert_same_bits("in place", dy, dx, n);
    }
}

KERNEL_TEST(gelu_far_out) {
    real x[] = {40, -40, 1e18f, -1e18f, 3e38f, -3e38f, 0, (real)NAN}, one[8], y[8], dx[8];
    for (int i = 0; i < 8; i++) one[i] = 1;
    activation_forward(y, x, 8, NULL);
    activation_backward(dx, one, x, 8, NULL);
    for (int i = 0; i < 6; i++) {
        assert_true(y[i] == (x[i] > 0 ? x[i] : 0));
        assert_true(dx[i] == (x[i] > 0 ? 1 : 0));
    }
    assert_true(y[6] == 0 && dx[6] == (real)0.5);
    assert_true(isnan(y[7]) && isnan(dx[7]));
}

KERNEL_TEST(gated_equals_formula) {
    static const int64_t shapes[][2] = {{0, 4}, {1, 1}, {3, 17}, {301, 129}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const int64_t R = shapes[i][0], F = shapes[i][1];
        real *pre = random_buffer(R * 2 * F), *dout = random_buffer(R * F), *out = poisoned_buffer(R * F + 1);
        real *slope = copy_buffer(pre, R * 2 * F), *again = poisoned_buffer(R * F);
        double *expected = double_buffer(R * F), *gradient = double_buffer(R * 2 * F);
        for (int64_t j = 0; j < R * F; j++) {
            const int64_t at = j / F * 2 * F + j % F;
            const double x = (double)pre[at], y = (double)pre[at + F], s = 1 / (1 + exp(-x)), d = (double)dout[j];
            expected[j] = x * s * y, gradient[at] = d * y * s * (1 + x * (1 - s)), gradient[at + F] = d * x * s;
        }
        gated_forward(out, pre, R, F, NULL);
        gated_backward(slope, again, dout, R, F, NULL);
        assert_close("out", out, expected, R * F, 2e-6, 0.1);
        assert_close("pre", slope, gradient, R * 2 * F, 4e-6, 1);
        assert_same_bits("out again", again, out, R * F);
        assert_untouched("after out", out + R * F, 1);
    }
}

KERNEL_TEST(residual_adds) {
    static const int64_t shapes[][2] = {{0, 4}, {1, 1}, {3, 17}, {301, 129}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        int64_t R = shapes[i][0], C = shapes[i][1];
        real *x = random_buffer(R * C), *y = random_buffer(R * C), *bias = random_buffer(C);
        real *biased = poisoned_buffer(R * C);
        residual_forward(biased, x, whole_sum(y), bias, R, C, NULL);
        for (int64_t j = 0; j < R * C; j++) {
            double sum = (double)x[j] + (double)y[j] + (double)bias[j % C];
            assert_close("x + y + bias", biased + j, &sum, 1, 2e-7, 3);
        }
        residual_forward(x, x, whole_sum(y), bias, R, C, NULL);
        assert_same_bits("in place", x, biased, R * C);
        real *zero = zero_buffer(C), *without = poisoned_buffer(R * C);
        residual_forward(biased, x, whole_sum(y), zero, R, C, NULL);
        residual_forward(without, x, whole_sum(y), NULL, R, C, NULL);
        assert_same_bits("without bias", without, biased, R * C);
    }
}

KERNEL_TEST(residual_sums_parts) {
    int64_t R = 7, C = 33, stride = R * C + 5;
    for (int parts = 1; parts <= 4; parts++) {
        real *x = random_buffer(R * C), *y = random_buffer(R * C), *from = random_buffer(parts * stride), *bias = random_buffer(C);
        real *sum = copy_buffer(y, R * C), *expected = poisoned_buffer(R * C), *out = poisoned_buffer(R * C);
        cf_add(sum, from, parts, stride, R * C, REAL_DTYPE, NULL);
        residual_forward(expected, x, whole_sum(sum), bias, R, C, NULL);
        residual_forward(out, x, (cf_sum){y, from, parts, stride}, bias, R, C, NULL);
        assert_same_bits("of parts", out, expected, R * C);
    }
}

int main(void) {
    cf_device_threads(2);
    return cmocka_run_group_tests(all_tests, NULL, NULL);
}
