// ranks: 1
// Attention in double: forward and backward against the naive T × T softmax, every element; small ones against central differences,
// too. Query ranges come in shuffled order.
#include "kernel_testing.h"
#include "layers/kernels/attention.h"

typedef struct problem {
    int64_t T, B, H, KV, D;
    int64_t used; // rows of the sequence that have queries: 0 … used − 1
    real *qkv, *out, *lse, *dout;
} problem;

static problem problem_new(int64_t T, int64_t B, int64_t H, int64_t KV, int64_t D, int64_t used) {
    int64_t rows = T * B;
    problem p = {T, B, H, KV, D, used, NULL, NULL, NULL, NULL};
    p.qkv = random_buffer(rows * (H + 2 * KV) * D);
    p.out = poisoned_buffer(rows * H * D);
    p.lse = poisoned_buffer(rows * H);
    p.dout = random_buffer(rows * H * D);
    return p;
}

static double loss(void *context) {
    problem *p = context;
    attention_forward(p->out, p->lse, p->qkv, 0, p->used, p->T, p->B, p->H, p->KV, p->D, NULL);
    return dot(p->out, p->dout, p->used * p->B * p->H * p->D);
}

// Offset in qkv; part 0, 1, 2: query, and the key and value that it sees
static int64_t at(const problem *p, int64_t t, int64_t b, int64_t part, int64_t h) {
    int64_t head = part == 0 ? h : p->H + (part - 1) * p->KV + h * p->KV / p->H;
    return ((t * p->B + b) * (p->H + 2 * p->KV) + head) * p->D;
}

// One query of the naive softmax: out (D), returns its lse. score: (T).
static double naive_row(double *out, double *score, const problem *p, int64_t t, int64_t b, int64_t h) {
    const real *q = p->qkv + at(p, t, b, 0, h);
    double sum = 0, maximum = -INFINITY;
    for (int64_t i = 0; i <= t; i++) {
        const real *k = p->qkv + at(p, i, b, 1, h);
        score[i] = dot(q, k, p->D) / sqrt((double)p->D);
        maximum = fmax(maximum, score[i]);
    }
    for (int64_t d = 0; d < p->D; d++) out[d] = 0;
    for (int64_t i = 0; i <= t; i++) {
        const real *v = p->qkv + at(p, i, b, 2, h);
        sum += exp(score[i] - maximum);
        for (int64_t d = 0; d < p->D; d++) out[d] += exp(score[i] - maximum) * (double)v[d];
    }
    for (int64_t d = 0; d < p->D; d++) out[d] /= sum;
    return maximum + log(sum);
}

static void assert_forward_is_naive(const problem *p, int64_t t0, int64_t n) {
    double *expected = double_buffer(p->D), *score = double_buffer(p->T);
    for (int64_t t = t0; t < t0 + n; t++)
        for (int64_t i = 0; i < p->B * p->H; i++) {
            double lse = naive_row(expected, score, p, t, i / p->H, i % p->H);
            assert_close("out", p->out + (t * p->B * p->H + i) * p->D, expected, p->D, 1e-12, 1);
            assert_close("lse", p->lse + i * p->T + t, &lse, 1, 1e-12, 1);
        }
}

KERNEL_TEST(forward_equals_naive_softmax) {
    static const int64_t shapes[][7] = {// T, B, H, KV, D, t0, n
                                        {1, 1, 1, 1, 1, 0, 1},      {7, 2, 3, 3, 5, 0, 7},      {19, 1, 2, 1, 3, 4, 11},
                                        {300, 1, 4, 2, 3, 0, 300},  {600, 1, 1, 1, 2, 33, 555}, {70, 3, 2, 2, 64, 69, 1},
                                        {290, 1, 1, 1, 130, 0, 290}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const int64_t *s = shapes[i], width = s[1] * s[2] * s[4];
        problem p = problem_new(s[0], s[1], s[2], s[3], s[4], s[0]);
        attention_forward(p.out, p.lse, p.qkv, s[5], s[6], p.T, p.B, p.H, p.KV, p.D, NULL);
        assert_forward_is_naive(&p, s[5], s[6]);
        assert_untouched("out before", p.out, s[5] * width);
        assert_untouched("out after", p.out + (s[5] + s[6]) * width, (p.T - s[5] - s[6]) * width);
        for (int64_t pair = 0; pair < s[1] * s[2]; pair++) assert_untouched("lse before", p.lse + pair * p.T, s[5]);
    }
}

// Backward over the ranges between `cuts`, in a shuffled order. Rows outside each range hold NaN in dout.
static void backward_in_ranges(real *dqkv, const problem *p, const int64_t *cuts, int64_t ranges) {
    int64_t width = p->B * p->H * p->D, count = p->T * width;
    real *scratch = poisoned_buffer(attention_scratch(p->T, p->B, p->H, p->KV, p->D));
    for (int64_t i = 0; i < ranges; i++) {
        int64_t j = (i * 2 + 1) % ranges; // 1, 3, …, then 0, 2, …: each once when their number is odd
        real *only_these = poisoned_buffer(count);
        int64_t t0 = cuts[j], n = cuts[j + 1] - t0;
        memcpy(only_these + t0 * width, p->dout + t0 * width, (size_t)(n * width) * sizeof(real));
        attention_backward(dqkv, only_these, p->out, p->lse, p->qkv, scratch, t0, n, p->T, p->B, p->H, p->KV, p->D, i == 0, NULL);
    }
}

// Adds the gradient of one query of the naive softmax to dqkv, in qkv's layout.
static void naive_row_backward(double *dqkv, double *out, double *score, const problem *p, int64_t t, int64_t b, int64_t h) {
    const int64_t D = p->D, query = at(p, t, b, 0, h);
    const real *dout = p->dout + ((t * p->B + b) * p->H + h) * D;
    const double lse = naive_row(out, score, p, t, b, h), scale = 1 / sqrt((double)D);
    for (int64_t i = 0; i <= t; i++) {
        const int64_t key = at(p, i, b, 1, h), value = at(p, i, b, 2, h);
        double share = exp(score[i] - lse), into = 0; // what flows into the score
        for (int64_t d = 0; d < D; d++) into += share * scale * (double)dout[d] * ((double)p->qkv[value + d] - out[d]);
        for (int64_t d = 0; d < D; d++) {
            dqkv[query + d] += into * (double)p->qkv[key + d];
            dqkv[key + d] += into * (double)p->qkv[query + d];
            dqkv[value + d] += share * (double)dout[d];
        }
    }
}

static void assert_backward_is_naive(const problem *p, const real *dqkv) {
    const int64_t count = p->T * p->B * (p->H + 2 * p->KV) * p->D;
    double *expected = double_buffer(count), *out = double_buffer(p->D), *score = double_buffer(p->T);
    memset(expected, 0, (size_t)count * sizeof *expected);
    for (int64_t t = 0; t < p->used; t++)
        for (int64_t i = 0; i < p->B * p->H; i++) naive_row_backward(expected, out, score, p, t, i / p->H, i % p->H);
    assert_close("dqkv", dqkv, expected, count, 1e-11, 1);
}

enum { SMALL = 1000 };

static void check_backward(int64_t T, int64_t B, int64_t H, int64_t KV, int64_t D, const int64_t *cuts, int64_t ranges) {
    assert_int_equal(ranges % 2, 1);
    problem p = problem_new(T, B, H, KV, D, cuts[ranges]);
    int64_t row = B * (H + 2 * KV) * D, count = T * row, used = p.used * row;
    real *dqkv = poisoned_buffer(count); // the first range writes all of it
    loss(&p);
    cf_device_threads(2);
    backward_in_ranges(dqkv, &p, cuts, ranges);
    cf_device_threads(1);
    assert_backward_is_naive(&p, dqkv);
    if (count <= SMALL) assert_gradient("qkv", p.qkv, dqkv, used, used, loss, &p);
    for (int64_t i = used; i < count; i++) assert_true(dqkv[i] == 0);
}

KERNEL_TEST(backward_one_range) {
    check_backward(1, 1, 1, 1, 1, (int64_t[]){0, 1}, 1);
    check_backward(9, 2, 3, 3, 5, (int64_t[]){0, 9}, 1);
    check_backward(9, 2, 4, 2, 5, (int64_t[]){0, 9}, 1);
    check_backward(8, 1, 3, 1, 5, (int64_t[]){0, 8}, 1);
    check_backward(17, 1, 2, 2, 7, (int64_t[]){0, 13}, 1); // keys after the last query get nothing
}

KERNEL_TEST(backward_shuffled_ranges) {
    check_backward(13, 2, 2, 1, 3, (int64_t[]){0, 1, 6, 13}, 3);
    check_backward(11, 1, 1, 1, 4, (int64_t[]){0, 2, 2, 5, 9, 11}, 5); // one range is empty
}

KERNEL_TEST(backward_many_tiles) {
    // Few heads: cut into blocks of keys. Wide heads: small tiles, so several in a block.
    check_backward(530, 1, 2, 2, 3, (int64_t[]){0, 530}, 1);
    check_backward(530, 1, 4, 2, 3, (int64_t[]){0, 530}, 1);
    check_backward(131, 1, 1, 1, 1000, (int64_t[]){0, 131}, 1);
    check_backward(126, 1, 1, 1, 300, (int64_t[]){0, 50, 93, 126}, 3); // too short to be cut
}

int main(void) {
    return cmocka_run_group_tests(all_tests, NULL, NULL);
}
