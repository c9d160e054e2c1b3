// ranks: 1
// AdamW against the textbook recurrence in double, and the two looks at the gradients.
#include "../kernels/kernel_testing.h"
#include "layers/optimizer/update.h"

typedef struct problem {
    int64_t n;
    const real *g;
    optimizer_settings options;
} problem;

// w, m, v are side by side
static void run_update(void *context, real *all) {
    problem *p = context;
    optimizer_update(optimizers, all, NULL, (real *[]){all + p->n, all + 2 * p->n}, p->g, p->n, p->options, NULL);
}

static void textbook_update(double *w, double *m, double *v, double g, const optimizer_settings *a) {
    g *= a->scale;
    *m = a->beta1 * *m + (1 - a->beta1) * g;
    *v = a->beta2 * *v + (1 - a->beta2) * g * g;
    double m_hat = *m / (1 - pow(a->beta1, (double)a->step)), v_hat = *v / (1 - pow(a->beta2, (double)a->step));
    *w -= a->lr * (m_hat / (sqrt(v_hat) + a->eps) + a->weight_decay * *w);
}

static void check_steps(int64_t n, optimizer_settings options) {
    real *all = zero_buffer(3 * n);
    double *w = double_buffer(n), *m = double_buffer(n), *v = double_buffer(n);
    fill_normal(all, n, 1); // weights; both moments start at zero
    for (int64_t i = 0; i < n; i++) w[i] = (double)all[i];
    problem p = {n, NULL, options};
    for (p.options.step = 1; p.options.step <= 10; p.options.step++) {
        p.g = random_buffer(n);
        run_update(&p, all);
        for (int64_t i = 0; i < n; i++) textbook_update(w + i, m + i, v + i, (double)p.g[i], &p.options);
        assert_close("w", all, w, n, 3e-6, 0.1);
        assert_close("m", all + n, m, n, 3e-6, 0.1 * options.scale);
        assert_close("v", all + 2 * n, v, n, 3e-6, 1e-3 * options.scale * options.scale);
    }
    p.options.step = 11;
    assert_threads_do_not_matter("w, m, v", run_update, &p, all, 3 * n);
}

KERNEL_TEST(update_equals_textbook) {
    const optimizer_settings plain = {.lr = 0.01, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .scale = 1};
    optimizer_settings decayed = plain, clipped = plain, other = {0.3, 0.5, 0.999, 1e-2, 0.7, 0.02, 0, 0};
    decayed.weight_decay = 0.1;
    clipped.scale = 1e-3;
    check_steps(0, plain);
    check_steps(1, plain);
    check_steps(999, decayed);
    check_steps(40001, clipped);
    check_steps(33, other);
}

// Without a gradient only the decay is left, and no NaN comes of 0 / 0.
KERNEL_TEST(no_gradient_leaves_decay) {
    real w = 2, m = 0, v = 0, g = 0;
    optimizer_settings a = {.lr = 0.5, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.25, .scale = 1, .step = 1};
    optimizer_update(optimizers, &w, NULL, (real *[]){&m, &v}, &g, 1, a, NULL);
    assert_true(w == (real)1.75 && m == 0 && v == 0);
}

static double squares_of(const real *x, int64_t n) {
    double scratch[SQUARES_SCRATCH], sum = 0, more = 1e9;
    sum_of_squares(&sum, scratch, x, n, NULL);
    sum_of_squares(&more, scratch, x, n, NULL); // added to the sum so far
    assert_true(!(sum < 1e6) || fabs(more - 1e9 - sum) < 1e-6);
    return sum;
}

// Master weights are updated; w is their copy.
KERNEL_TEST(master_weights) {
    real w[3] = {1, 2, 3}, alone[3] = {1, 2, 3}, g[3] = {1, -1, 0.5}, master[3] = {1, 2, 3}, m[3] = {0}, v[3] = {0};
    optimizer_settings a = {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .scale = 1, .step = 1};
    memset(w, 0xff, sizeof w); // only written
    optimizer_update(optimizers, w, master, (real *[]){m, v}, g, 3, a, NULL);
    memset(m, 0, sizeof m);
    memset(v, 0, sizeof v);
    optimizer_update(optimizers, alone, NULL, (real *[]){m, v}, g, 3, a, NULL);
    assert_memory_equal(w, alone, sizeof w);
    assert_memory_equal(master, alone, sizeof w);
}

KERNEL_TEST(sum_of_squares_is_exact_and_fixed) {
    static const int64_t counts[] = {0, 1, 255, 256, 257, 16385, 100003};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        int64_t n = counts[i];
        real *x = random_buffer(n);
        double expected = dot(x, x, n), sum[3];
        for (int threads = 1; threads <= 3; threads++) {
            cf_device_threads(threads);
            sum[threads - 1] = squares_of(x, n);
        }
        assert_true(fabs(sum[0] - expected) <= 1e-12 * expected);
        assert_true(sum[1] == sum[0] && sum[2] == sum[0]);
    }
    real huge[] = {3e30f, 4e30f}; // their squares are beyond float
    assert_true(fabs(squares_of(huge, 2) - 25e60) < 1e55);
    huge[1] = (real)NAN;
    assert_true(isnan(squares_of(huge, 2)));
}

int main(void) {
    return cmocka_run_group_tests(all_tests, NULL, NULL);
}
