// ranks: 1
// Attention in float against the naive T × T softmax and its derivative in double.
#include "kernel_testing.h"
#include "layers/kernels/attention.h"

typedef struct problem {
    int64_t T, B, H, KV, D, t0, n;
    real *qkv, *out, *lse, *dout;
} problem;

static problem problem_new(int64_t T, int64_t B, int64_t H, int64_t KV, int64_t D, int64_t t0, int64_t n, double deviation) {
    int64_t width = B * H * D, count = T * B * (H + 2 * KV) * D;
    problem p = {T, B, H, KV, D, t0, n, zero_buffer(count), NULL, NULL, NULL};
    fill_normal(p.qkv, count, deviation);
    p.out = poisoned_buffer(T * width);
    p.lse = poisoned_buffer(T * B * H);
    p.dout = poisoned_buffer(T * width);
    fill_normal(p.dout + t0 * width, n * width, 1); // the other rows must not be read
    return p;
}

// Offset in qkv; part 0, 1, 2: query, and the key and value that it sees
static int64_t at(const problem *p, int64_t t, int64_t b, int64_t part, int64_t h) {
    int64_t head = part == 0 ? h : p->H + (part - 1) * p->KV + h * p->KV / p->H;
    return ((t * p->B + b) * (p->H + 2 * p->KV) + head) * p->D;
}

// Probabilities (t + 1) of one query; returns its lse.
static double naive_probabilities(double *probability, const problem *p, int64_t t, int64_t b, int64_t h) {
    double maximum = -INFINITY, sum = 0;
    for (int64_t i = 0; i <= t; i++) {
        probability[i] = dot(p->qkv + at(p, t, b, 0, h), p->qkv + at(p, i, b, 1, h), p->D) / sqrt((double)p->D);
        maximum = fmax(maximum, probability[i]);
    }
    for (int64_t i = 0; i <= t; i++) sum += probability[i] = exp(probability[i] - maximum);
    for (int64_t i = 0; i <= t; i++) probability[i] /= sum;
    return maximum + log(sum);
}

// One query: out (D), its lse, and its part is added to dqkv. probability: (T).
static void naive_query(double *out, double *lse, double *dqkv, double *probability, const problem *p, int64_t t, int64_t b,
                        int64_t h) {
    const real *dout = p->dout + ((t * p->B + b) * p->H + h) * p->D;
    int64_t D = p->D;
    double scale = 1 / sqrt((double)D), delta = 0;
    *lse = naive_probabilities(probability, p, t, b, h);
    for (int64_t d = 0; d < D; d++) out[d] = 0;
    for (int64_t i = 0; i <= t; i++)
        for (int64_t d = 0; d < D; d++) out[d] += probability[i] * (double)p->qkv[at(p, i, b, 2, h) + d];
    for (int64_t d = 0; d < D; d++) delta += out[d] * (double)dout[d];
    for (int64_t i = 0; i <= t; i++) {
        double ds = probability[i] * (dot(dout, p->qkv + at(p, i, b, 2, h), D) - delta) * scale;
        for (int64_t d = 0; d < D; d++) {
            dqkv[at(p, t, b, 0, h) + d] += ds * (double)p->qkv[at(p, i, b, 1, h) + d];
            dqkv[at(p, i, b, 1, h) + d] += ds * (double)p->qkv[at(p, t, b, 0, h) + d];
            dqkv[at(p, i, b, 2, h) + d] += probability[i] * (double)dout[d];
        }
    }
}

static void run_forward(void *context, real *out) {
    problem *p = context;
    attention_forward(out, p->lse, p->qkv, p->t0, p->n, p->T, p->B, p->H, p->KV, p->D, NULL);
}

static void run_backward(void *context, real *dqkv) {
    problem *p = context;
    real *scratch = poisoned_buffer(attention_scratch(p->T, p->B, p->H, p->KV, p->D));
    attention_backward(dqkv, p->dout, p->out, p->lse, p->qkv, scratch, p->t0, p->n, p->T, p->B, p->H, p->KV, p->D, false, NULL);
}

static void check(int64_t T, int64_t B, int64_t H, int64_t KV, int64_t D, int64_t t0, int64_t n, double deviation) {
    problem p = problem_new(T, B, H, KV, D, t0, n, deviation);
    int64_t width = B * H * D, count = T * B * (H + 2 * KV) * D;
    double *out = double_buffer(D), *probability = double_buffer(T), *expected = double_buffer(count), lse;
    real *dqkv = zero_buffer(count), *untouched = copy_buffer(p.out, T * width);
    fill_normal(dqkv, count, 1);
    for (int64_t i = 0; i < count; i++) expected[i] = (double)dqkv[i];
    real *start = copy_buffer(dqkv, count);
    cf_device_threads(2);
    run_forward(&p, p.out);
    run_backward(&p, dqkv);
    for (int64_t i = t0 * B * H; i < (t0 + n) * B * H; i++) {
        naive_query(out, &lse, expected, probability, &p, i / (B * H), i / H % B, i % H);
        assert_close("out", p.out + i * D, out, D, 3e-6 * (1 + deviation * deviation), 1 + deviation);
        assert_close("lse", p.lse + i % (B * H) * T + i / (B * H), &lse, 1, 3e-6, 1 + deviation * deviation);
    }
    assert_untouched("out before", p.out, t0 * width);
    assert_untouched("out after", p.out + (t0 + n) * width, (T - t0 - n) * width);
    for (int64_t pair = 0; pair < B * H; pair++) {
        assert_untouched("lse before", p.lse + pair * T, t0);
        assert_untouched("lse after", p.lse + pair * T + t0 + n, T - t0 - n);
    }
    assert_close("dqkv", dqkv, expected, count, 1e-5 * (1 + deviation * deviation), 2 + 2 * deviation);
    assert_threads_do_not_matter("out", run_forward, &p, untouched, T * width);
    assert_threads_do_not_matter("dqkv", run_backward, &p, start, count);
}

KERNEL_TEST(small_and_odd) {
    check(1, 1, 1, 1, 1, 0, 1, 1);
    check(5, 2, 3, 3, 7, 0, 5, 1);
    check(5, 2, 3, 3, 7, 4, 1, 1);
    check(5, 2, 3, 3, 7, 2, 0, 1); // a range of nothing
    check(5, 2, 6, 2, 7, 0, 5, 1);
    check(5, 2, 3, 1, 7, 2, 3, 1);
    for (int i = 0; i < 12; i++) {
        int64_t T = random_size(1, 90), t0 = random_size(0, T - 1);
        int64_t KV = random_size(1, 3);
        check(T, random_size(1, 3), KV * random_size(1, 3), KV, random_size(1, 70), t0, random_size(1, T - t0), 1);
    }
}

KERNEL_TEST(many_tiles) {
    check(650, 1, 2, 2, 16, 0, 650, 1);   // few heads: keys are cut between tasks
    check(650, 1, 4, 2, 16, 517, 100, 1); // a late slice
    check(200, 2, 20, 20, 8, 0, 200, 1);  // enough heads
    check(610, 4, 8, 1, 3, 590, 20, 1);   // enough heads, two tiles of keys
    check(150, 1, 2, 2, 200, 3, 140, 1);  // wide heads: smaller tiles
}

// Scores in the thousands: the softmax is nearly one-hot and must neither overflow nor lose the maximum.
KERNEL_TEST(huge_scores) {
    problem p = problem_new(600, 1, 1, 1, 8, 0, 600, 40);
    double *out = double_buffer(8), *probability = double_buffer(600), *unused = double_buffer(600 * 24), lse;
    run_forward(&p, p.out);
    for (int64_t t = 0; t < 600; t++) {
        naive_query(out, &lse, unused, probability, &p, t, 0, 0);
        assert_close("lse", p.lse + t, &lse, 1, 1e-6, 1000);  // a score is a sum of such terms
        assert_close("out", p.out + t * 8, out, 8, 2e-3, 40); // exp of a difference of thousands in float
    }
}

KERNEL_TEST(nan_reaches_every_later_query) {
    problem p = problem_new(560, 1, 1, 1, 4, 0, 560, 1);
    p.qkv[at(&p, 530, 0, 1, 0)] = (real)NAN; // a key
    run_forward(&p, p.out);
    for (int64_t i = 0; i < 560 * 4; i++) assert_int_equal(isnan(p.out[i]) != 0, i / 4 >= 530);
    for (int64_t t = 0; t < 560; t++) assert_int_equal(isnan(p.lse[t]) != 0, t >= 530);
}

int main(void) {
    return cmocka_run_group_tests(all_tests, NULL, NULL);
}
