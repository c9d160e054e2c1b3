// Shared by the kernel tests: random and poisoned buffers, comparison that names the first wrong element,
// and gradients by central differences.
#pragma once

#include "tests/cases.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#include "layers/random.h"
#include "layers/kernels/real.h"

// Buffers live until release_buffers(), the teardown of every KERNEL_TEST.
static struct {
    void *at[4096];
    int64_t count;
    uint64_t random_streams; // every buffer and size draws from its own
} testing;

static inline void *test_buffer(int64_t bytes) {
    assert_true(testing.count < (int64_t)(sizeof testing.at / sizeof *testing.at));
    return testing.at[testing.count++] = cf_alloc(bytes, "test");
}

static inline int release_buffers(void **state) {
    (void)state;
    while (testing.count > 0) cf_free(testing.at[--testing.count]);
    return 0;
}

#define KERNEL_TEST(name) TEST_BETWEEN(NULL, name, release_buffers)

static inline void fill_normal(real *x, int64_t n, double deviation) {
    testing.random_streams++;
    for (int64_t i = 0; i < n; i++) x[i] = (real)(deviation * random_normal(17, testing.random_streams, (uint64_t)i));
}

static inline real *zero_buffer(int64_t n) {
    return test_buffer(n * (int64_t)sizeof(real));
}

static inline double *double_buffer(int64_t n) {
    return test_buffer(n * (int64_t)sizeof(double));
}

static inline real *random_buffer(int64_t n) {
    real *x = zero_buffer(n);
    fill_normal(x, n, 1);
    return x;
}

// NaN everywhere: elements that a kernel fails to write, or must not read, show.
static inline real *poisoned_buffer(int64_t n) {
    real *x = zero_buffer(n);
    for (int64_t i = 0; i < n; i++) x[i] = (real)NAN;
    return x;
}

static inline real *copy_buffer(const real *x, int64_t n) {
    real *y = zero_buffer(n);
    cf_copy(y, x, n * (int64_t)sizeof(real), NULL);
    return y;
}

// low … high, both included
static inline int64_t random_size(int64_t low, int64_t high) {
    return low + (int64_t)(random_uniform(18, 0, ++testing.random_streams) * (double)(high - low + 1));
}

static inline double mean_magnitude(const real *x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += fabs((double)x[i]);
    return n > 0 ? sum / (double)n : 0;
}

// |x − expected| <= tolerance · (|expected| + floor) for every element; NaN fails.
static inline void assert_close(const char *name, const real *x, const double *expected, int64_t n, double tolerance,
                                double floor) {
    for (int64_t i = 0; i < n; i++)
        if (!(fabs((double)x[i] - expected[i]) <= tolerance * (fabs(expected[i]) + floor)))
            fail_msg("%s[%lld] of %lld is %.9g, expected %.9g", name, (long long)i, (long long)n, (double)x[i], expected[i]);
}

static inline void assert_same_bits(const char *name, const real *x, const real *y, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (memcmp(x + i, y + i, sizeof *x) != 0)
            fail_msg("%s[%lld] of %lld: %.9g and %.9g are not the same bits", name, (long long)i, (long long)n, (double)x[i],
                     (double)y[i]);
}

// Nothing but NaN: the kernel has left these alone.
static inline void assert_untouched(const char *name, const real *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (!isnan(x[i])) fail_msg("%s[%lld] was written: %.9g", name, (long long)i, (double)x[i]);
}

// run(context, out) gives the same bits in out (n), which starts as `start`, on one, two and three threads.
static inline void assert_threads_do_not_matter(const char *name, void (*run)(void *, real *), void *context, const real *start,
                                                int64_t n) {
    real *out[3];
    for (int threads = 1; threads <= 3; threads++) {
        cf_device_threads(threads);
        out[threads - 1] = copy_buffer(start, n);
        run(context, out[threads - 1]);
    }
    cf_device_threads(2);
    assert_same_bits(name, out[1], out[0], n);
    assert_same_bits(name, out[2], out[0], n);
}

static inline double dot(const real *x, const real *y, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (double)x[i] * (double)y[i];
    return sum;
}

// Compares `gradient` (n) with the five-point central difference of loss() in each of x's elements, or in
// `most` of them drawn at random. The error counts relative to the element or the mean magnitude of the
// gradient, whichever is larger.
static inline void assert_gradient(const char *name, real *x, const real *gradient, int64_t n, int64_t most, double (*loss)(void *),
                                   void *context) {
    const double tolerance = 1e-6, h = 1e-3;
    const double floor = fmax(mean_magnitude(gradient, n), 1e-6); // a gradient may be zero throughout
    for (int64_t j = 0; j < (n < most ? n : most); j++) {
        int64_t i = n <= most ? j : random_size(0, n - 1);
        real saved = x[i];
        double f[4], step[4] = {-2 * h, -h, h, 2 * h};
        for (int p = 0; p < 4; p++) {
            x[i] = (real)(saved + step[p]);
            f[p] = loss(context);
        }
        x[i] = saved;
        double expected = (f[0] - 8 * f[1] + 8 * f[2] - f[3]) / (12 * h);
        double size = fmax(fmax(fabs(expected), fabs((double)gradient[i])), floor);
        if (!(fabs((double)gradient[i] - expected) <= tolerance * size))
            fail_msg("gradient of %s[%lld] is %.12g, by central difference %.12g", name, (long long)i, (double)gradient[i],
                     expected);
    }
}
