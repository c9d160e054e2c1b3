// ranks: 1
// Layer normalisation against a naive reference in double.
#include "kernel_testing.h"
#include "layers/kernels/layernorm.h"

typedef struct problem {
    int64_t R, C;
    real *x, *w, *b, *dy, *out, *mean, *rstd;
} problem;

static problem problem_new(int64_t R, int64_t C) {
    return (problem){R,
                     C,
                     random_buffer(R * C),
                     random_buffer(C),
                     random_buffer(C),
                     random_buffer(R * C),
                     poisoned_buffer(R * C),
                     poisoned_buffer(R),
                     poisoned_buffer(R)};
}

static void forward(const problem *p, real *out) {
    layernorm_forward(out, p->mean, p->rstd, p->x, p->w, p->b, 1e-5, p->R, p->C, NULL);
}

static double naive_mean(const problem *p, int64_t r) {
    double sum = 0;
    if (!p->mean) return 0;
    for (int64_t c = 0; c < p->C; c++) sum += (double)p->x[r * p->C + c];
    return sum / (double)p->C;
}

static double naive_rstd(const problem *p, int64_t r) {
    double sum = 0, mean = naive_mean(p, r);
    for (int64_t c = 0; c < p->C; c++) sum += pow((double)p->x[r * p->C + c] - mean, 2);
    return 1 / sqrt(sum / (double)p->C + 1e-5);
}

static void assert_forward(const problem *p, double tolerance) {
    double *expected = double_buffer(p->C);
    for (int64_t r = 0; r < p->R; r++) {
        double mean = naive_mean(p, r), rstd = naive_rstd(p, r);
        for (int64_t c = 0; c < p->C; c++)
            expected[c] = ((double)p->x[r * p->C + c] - mean) * rstd * (double)p->w[c] + (p->b ? (double)p->b[c] : 0);
        assert_close("out", p->out + r * p->C, expected, p->C, tolerance, 1);
        if (p->mean) assert_close("mean", p->mean + r, &mean, 1, 1e-6, 1);
        assert_close("rstd", p->rstd + r, &rstd, 1, tolerance, 0);
    }
}

KERNEL_TEST(forward_equals_naive) {
    static const int64_t shapes[][2] = {{0, 3}, {1, 1}, {1, 768}, {33, 7}, {5, 1001}, {100, 64}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        problem p = problem_new(shapes[i][0], shapes[i][1]);
        forward(&p, p.out);
        assert_forward(&p, 1e-5);
        p.mean = p.b = NULL; // the root of the mean square
        forward(&p, p.out);
        assert_forward(&p, 1e-5);
    }
}

// A large common offset: the variance must not be the difference of two large numbers.
KERNEL_TEST(forward_survives_an_offset) {
    problem p = problem_new(4, 500);
    for (int64_t i = 0; i < p.R * p.C; i++) p.x[i] += 1000;
    forward(&p, p.out);
    assert_forward(&p, 2e-3); // neighbours in float are 6e-5 apart there
}

KERNEL_TEST(nan_stays_in_its_row) {
    problem p = problem_new(3, 20);
    p.x[20 + 7] = (real)NAN;
    forward(&p, p.out);
    for (int64_t i = 0; i < 60; i++) assert_int_equal(isnan(p.out[i]) != 0, i >= 20 && i < 40);
}

// dx, dw, db, dbias are side by side
static void backward(void *context, real *gradients) {
    problem *p = context;
    real *scratch = poisoned_buffer(layernorm_scratch(p->C));
    real *dw = gradients + p->R * p->C;
    layernorm_backward(gradients, dw, p->b ? dw + p->C : NULL, dw + 2 * p->C, whole_sum(p->dy), p->x, p->w, p->mean, p->rstd,
                       scratch, p->R, p->C, NULL);
    real *dx = copy_buffer(gradients, p->R * p->C), *others = zero_buffer(2 * p->C); // not wanted: not written
    layernorm_backward(dx, others, others + p->C, NULL, whole_sum(p->dy), p->x, p->w, p->mean, p->rstd, scratch, p->R, p->C, NULL);
}

static void naive_backward(const problem *p, double *gradients) {
    double *dw = gradients + p->R * p->C, *db = dw + p->C, C = (double)p->C;
    for (int64_t r = 0; r < p->R; r++) {
        double mean = naive_mean(p, r), rstd = naive_rstd(p, r), mean_g = 0, mean_gh = 0;
        const real *x = p->x + r * p->C, *dy = p->dy + r * p->C;
        for (int64_t c = 0; c < p->C; c++) {
            double h = ((double)x[c] - mean) * rstd, g = (double)dy[c] * (double)p->w[c];
            mean_g += p->mean ? g / C : 0;
            mean_gh += g * h / C;
            dw[c] += (double)dy[c] * h;
            db[c] += p->b ? (double)dy[c] : 0;
        }
        for (int64_t c = 0; c < p->C; c++) {
            gradients[r * p->C + c] += rstd * ((double)dy[c] * (double)p->w[c] - mean_g - ((double)x[c] - mean) * rstd * mean_gh);
            db[p->C + c] += gradients[r * p->C + c]; // dbias
        }
    }
}

KERNEL_TEST(backward_equals_naive) {
    static const int64_t shapes[][2] = {{0, 3}, {1, 5}, {31, 7}, {33, 130}, {64, 9}, {65, 33}, {200, 768}};
    for (size_t i = 0; i < 2 * (sizeof shapes / sizeof *shapes); i++) {
        problem p = problem_new(shapes[i / 2][0], shapes[i / 2][1]);
        if (i % 2) p.mean = p.b = NULL;
        int64_t n = p.R * p.C + 3 * p.C;
        real *gradients = random_buffer(n), *start = copy_buffer(gradients, n);
        double *expected = double_buffer(n);
        for (int64_t j = 0; j < n; j++) expected[j] = (double)gradients[j];
        forward(&p, p.out);
        backward(&p, gradients);
        naive_backward(&p, expected);
        assert_close("dx, dw, db", gradients, expected, n, 1e-5, 1 + sqrt((double)p.R));
        assert_threads_do_not_matter("dx, dw, db", backward, &p, start, n);
    }
}

KERNEL_TEST(backward_sums_parts) {
    problem p = problem_new(45, 31);
    const int64_t n = p.R * p.C, stride = n + 3;
    real *scratch = poisoned_buffer(layernorm_scratch(p.C));
    forward(&p, p.out);
    for (int parts = 1; parts <= 4; parts++) {
        real *from = random_buffer(parts * stride), *sum = copy_buffer(p.dy, n), *last = copy_buffer(p.dy, n);
        real *expected = random_buffer(n + 3 * p.C), *gradients = copy_buffer(expected, n + 3 * p.C);
        cf_add(sum, from, parts, stride, n, REAL_DTYPE, NULL);
        layernorm_backward(expected, expected + n, expected + n + p.C, expected + n + 2 * p.C, whole_sum(sum), p.x, p.w, p.mean,
                           p.rstd, scratch, p.R, p.C, NULL);
        layernorm_backward(gradients, gradients + n, gradients + n + p.C, gradients + n + 2 * p.C,
                           (cf_sum){last, from, parts, stride}, p.x, p.w, p.mean, p.rstd, scratch, p.R, p.C, NULL);
        assert_same_bits("of parts", gradients, expected, n + 3 * p.C);
    }
}

int main(void) {
    return cmocka_run_group_tests(all_tests, NULL, NULL);
}
