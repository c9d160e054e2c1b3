// ranks: 1
// Token and position embedding: copies and sums, so forward is compared exactly.
#include "kernel_testing.h"
#include "layers/kernels/embedding.h"

enum { VOCABULARY = 50 };

typedef struct problem {
    int64_t first, count, R, C;
    int32_t *tokens;
    real *wte, *dout;
} problem;

static problem problem_new(int64_t first, int64_t count, int64_t R, int64_t C) {
    problem p = {first, count, R, C, test_buffer(R * 4), random_buffer(count * C), random_buffer(R * C)};
    for (int64_t r = 0; r < R; r++) p.tokens[r] = (int32_t)random_size(0, VOCABULARY - 1);
    return p;
}

static const int64_t shapes[][4] = { // first, count, R, C
    {0, 50, 1, 1},   {0, 50, 40, 7}, {10, 20, 100, 65}, {25, 25, 333, 130},
    {50, 10, 20, 3}, {7, 0, 20, 3},  {0, 50, 0, 5},     {3, 1, 200, 64}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

KERNEL_TEST(forward_looks_up_what_is_held) {
    for (int i = 0; i < SHAPES; i++) {
        problem p = problem_new(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3]);
        real *out = poisoned_buffer(p.R * p.C + 1);
        embedding_forward(out, p.tokens, p.wte, p.first, p.count, p.R, p.C, NULL);
        for (int64_t r = 0; r < p.R; r++) {
            bool held = p.tokens[r] >= p.first && p.tokens[r] < p.first + p.count;
            for (int64_t c = 0; c < p.C; c++)
                assert_true(out[r * p.C + c] == (held ? p.wte[(p.tokens[r] - p.first) * p.C + c] : 0));
        }
        assert_untouched("after out", out + p.R * p.C, 1);
    }
}

static void backward(void *context, real *dwte) {
    problem *p = context;
    embedding_backward(dwte, p->dout, false, p->tokens, p->first, p->count, p->R, p->C, NULL);
}

KERNEL_TEST(backward_adds_rows_in_order) {
    for (int i = 0; i < SHAPES; i++) {
        problem p = problem_new(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3]);
        int64_t n = p.count * p.C;
        real *dwte = random_buffer(n), *start = copy_buffer(dwte, n), *expected = copy_buffer(dwte, n);
        for (int64_t r = 0; r < p.R; r++) // the same order of additions, so the same bits
            for (int64_t c = 0; c < p.C; c++)
                if (p.tokens[r] >= p.first && p.tokens[r] < p.first + p.count)
                    expected[(p.tokens[r] - p.first) * p.C + c] += p.dout[r * p.C + c];
        backward(&p, dwte);
        assert_same_bits("dwte", dwte, expected, n);
        assert_threads_do_not_matter("dwte", backward, &p, start, n);
    }
}

// With fp32 elements the two do the same.
static void add(void *context, real *dwte) {
    problem *p = context;
    embedding_backward(dwte, p->dout, true, p->tokens, p->first, p->count, p->R, p->C, NULL);
}

KERNEL_TEST(sums_are_added_in_order) {
    for (int i = 0; i < SHAPES; i++) {
        problem p = problem_new(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3]);
        int64_t n = p.count * p.C;
        real *dwte = random_buffer(n), *start = copy_buffer(dwte, n), *expected = copy_buffer(dwte, n);
        backward(&p, expected);
        add(&p, dwte);
        assert_same_bits("dwte", dwte, expected, n);
        assert_threads_do_not_matter("dwte", add, &p, start, n);
    }
}

static void check_position(int64_t t0, int64_t T, int64_t B, int64_t C) {
    int64_t n = T * B * C, maxT = t0 + T + 1;
    real *x = random_buffer(n), *before = copy_buffer(x, n), *wpe = random_buffer(maxT * C);
    real *dwpe = random_buffer(maxT * C), *dwpe_before = copy_buffer(dwpe, maxT * C), *dx = random_buffer(n);
    position_forward(x, wpe, t0, T, B, C, NULL);
    position_backward(dwpe, dx, t0, T, B, C, NULL);
    for (int64_t i = 0; i < n; i++) assert_true(x[i] == before[i] + wpe[(t0 + i / (B * C)) * C + i % C]);
    for (int64_t i = 0; i < maxT * C; i++) {
        int64_t t = i / C - t0;
        double sum = (double)dwpe_before[i];
        for (int64_t b = 0; t >= 0 && t < T && b < B; b++) sum += (double)dx[(t * B + b) * C + i % C];
        assert_close("dwpe", dwpe + i, &sum, 1, 1e-6, 4);
    }
}

KERNEL_TEST(positions) {
    check_position(0, 1, 1, 1);
    check_position(0, 0, 3, 5);
    check_position(5, 9, 3, 33);
    check_position(0, 40, 1, 70);
}

int main(void) {
    cf_device_threads(2);
    return cmocka_run_group_tests(all_tests, NULL, NULL);
}
