// ranks: 1
// The matrix product, the linear layer and the weight gradient of a matrix in parts, against naive loops.
// Products have small integers in them, so the result is exact and compared without tolerance.
#include "kernel_testing.h"
#include "../../death.h"
#include "layers/parallel_linear.h"
#include "layers/kernels/gemm.h"
#include "layers/kernels/linear.h"

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
    int64_t lda = (ta ? m : k) + random_size(0, 3), ldb = (tb ? k : n) + random_size(0, 3), ldc = n + random_size(0, 3);
    real *a = padded_integers(ta ? k : m, ta ? m : k, lda), *b = padded_integers(tb ? n : k, tb ? k : n, ldb);
    real *c = beta == 0 ? poisoned_buffer(m * ldc) : padded_integers(m, n, ldc), *before = copy_buffer(c, m * ldc);
    gemm(ta, tb, m, n, k, a, lda, b, ldb, beta, c, ldc, NULL);
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++) {
            double sum = beta == 0 ? 0 : (double)before[i * ldc + j];
            for (int64_t p = 0; p < k; p++)
                sum += (double)(ta ? a[p * lda + i] : a[i * lda + p]) * (double)(tb ? b[j * ldb + p] : b[p * ldb + j]);
            if ((double)c[i * ldc + j] != sum)
                fail_msg("op %d%d, %lld x %lld x %lld, beta %g: c[%lld, %lld] is %g, expected %g", ta, tb, (long long)m,
                         (long long)n, (long long)k, (double)beta, (long long)i, (long long)j, (double)c[i * ldc + j], sum);
        }
        assert_untouched("after the row", c + i * ldc + n, ldc - n);
    }
}

static void check_all_gemms(int64_t m, int64_t n, int64_t k) {
    for (int i = 0; i < 8; i++) check_gemm(i & 1, i & 2, m, n, k, (real)(i >> 2));
}

KERNEL_TEST(gemm_is_exact_on_integers) {
    check_all_gemms(1, 1, 1);
    check_all_gemms(130, 67, 257);
    for (int i = 0; i < 20; i++) check_all_gemms(random_size(1, 50), random_size(1, 50), random_size(1, 50));
}

KERNEL_TEST(gemm_inside_a_parallel_region) {
    enum { TASKS = 12, N = 70 };
    real *a = integer_buffer(N * N), *b = integer_buffer(N * N), *alone = poisoned_buffer(N * N);
    real *together = poisoned_buffer(TASKS * N * N);
    gemm(false, true, N, N, N, a, N, b, N, 0, alone, N, NULL);
#pragma omp parallel for num_threads(3)
    for (int i = 0; i < TASKS; i++) gemm(false, true, N, N, N, a, N, b, N, 0, together + i * N * N, N, NULL);
    for (int i = 0; i < TASKS; i++) assert_same_bits("product", together + i * N * N, alone, N * N);
}

TEST_FIRST(gemm_refusal_is_fatal) { // before there are threads: it forks
    real *x = zero_buffer(64);
    ASSERT_DIES(gemm(false, false, 4, 4, 4, x, 3, x, 4, 0, x, 4, NULL), "dnnl_sgemm", "row length 3");
}

static void check_linear(int64_t R, int64_t IC, int64_t OC) {
    real *x = integer_buffer(R * IC), *w = integer_buffer(OC * IC), *bias = integer_buffer(OC);
    real *y = poisoned_buffer(R * OC), *plain = poisoned_buffer(R * OC);
    const real *ready = linear_prepare_forward(poisoned_buffer(linear_prepared_size(IC, OC)), w, IC, OC, NULL);
    linear_forward(y, NULL, x, ready, bias, NULL, linear_all(R), IC, OC, NULL);
    linear_forward(plain, NULL, x, ready, NULL, NULL, linear_all(R), IC, OC, NULL);
    for (int64_t r = 0; r < R; r++)
        for (int64_t o = 0; o < OC; o++) {
            double sum = dot(x + r * IC, w + o * IC, IC);
            assert_true((double)plain[r * OC + o] == sum);
            assert_true((double)y[r * OC + o] == sum + (double)bias[o]);
        }

    real *dx = poisoned_buffer(R * IC), *dw = integer_buffer(OC * IC), *db = integer_buffer(OC);
    real *dw_before = copy_buffer(dw, OC * IC), *db_before = copy_buffer(db, OC);
    ready = linear_prepare_dgrad(poisoned_buffer(linear_prepared_size(IC, OC)), w, IC, OC, NULL);
    linear_dgrad(dx, y, ready, NULL, false, linear_all(R), IC, OC, NULL);
    linear_wgrad(dw, db, y, OC, x, R, IC, OC, true, NULL);
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

KERNEL_TEST(linear_is_exact_on_integers) {
    check_linear(1, 1, 1);
    check_linear(1030, 2, 3); // more rows than get the bias at once
    check_linear(3, 300, 50); // tiles of prepared weights, and parts of tiles
    for (int i = 0; i < 20; i++) check_linear(random_size(1, 60), random_size(1, 40), random_size(1, 40));
}

static void check_added(int64_t R, int64_t IC, int64_t OC) {
    real *x = integer_buffer(R * IC), *w = integer_buffer(OC * IC), *dy = integer_buffer(R * OC);
    real *y = integer_buffer(R * OC), *dx = integer_buffer(R * IC), *bias = integer_buffer(OC);
    real *apart = poisoned_buffer(R * OC), *unbiased = poisoned_buffer(R * OC);
    real *y_before = copy_buffer(y, R * OC), *dx_before = copy_buffer(dx, R * IC);
    const real *ready = linear_prepare_forward(poisoned_buffer(linear_prepared_size(IC, OC)), w, IC, OC, NULL);
    linear_forward(apart, NULL, x, ready, bias, y, linear_all(R), IC, OC, NULL);
    linear_forward(unbiased, NULL, x, ready, NULL, y, linear_all(R), IC, OC, NULL);
    linear_forward(y, NULL, x, ready, NULL, y, linear_all(R), IC, OC, NULL);
    for (int64_t i = 0; i < R * OC; i++) assert_true(apart[i] == y[i] + bias[i % OC] && unbiased[i] == y[i]);
    ready = linear_prepare_dgrad(poisoned_buffer(linear_prepared_size(IC, OC)), w, IC, OC, NULL);
    linear_dgrad(dx, dy, ready, NULL, true, linear_all(R), IC, OC, NULL);
    for (int64_t r = 0; r < R; r++) {
        for (int64_t o = 0; o < OC; o++)
            assert_true((double)y[r * OC + o] == (double)y_before[r * OC + o] + dot(x + r * IC, w + o * IC, IC));
        for (int64_t i = 0; i < IC; i++) {
            double sum = (double)dx_before[r * IC + i];
            for (int64_t o = 0; o < OC; o++) sum += (double)dy[r * OC + o] * (double)w[o * IC + i];
            assert_true((double)dx[r * IC + i] == sum);
        }
    }
}

// Some columns of a wider dy, whose others are NaN; later rows of dw stay NaN.
static void check_rows(int64_t R, int64_t IC, int64_t rows, int64_t dy_row) {
    real *x = integer_buffer(R * IC), *dy = padded_integers(R, rows, dy_row);
    real *dw = poisoned_buffer((rows + 1) * IC), *before = integer_buffer(rows * IC);
    real *written = poisoned_buffer((rows + 1) * IC);
    cf_copy(dw, before, rows * IC * (int64_t)sizeof *dw, NULL);
    linear_wgrad(dw, NULL, dy, dy_row, x, R, IC, rows, true, NULL);
    linear_wgrad(written, NULL, dy, dy_row, x, R, IC, rows, false, NULL);
    for (int64_t o = 0; o < rows; o++)
        for (int64_t i = 0; i < IC; i++) {
            double sum = 0;
            for (int64_t r = 0; r < R; r++) sum += (double)dy[r * dy_row + o] * (double)x[r * IC + i];
            assert_true((double)dw[o * IC + i] == sum + (double)before[o * IC + i]);
            assert_true((double)written[o * IC + i] == sum);
        }
    assert_untouched("after the rows", dw + rows * IC, IC);
    assert_untouched("after the rows written", written + rows * IC, IC);
}

KERNEL_TEST(adding_is_exact_on_integers) {
    check_added(1, 1, 1);
    for (int i = 0; i < 20; i++) check_added(random_size(1, 60), random_size(1, 40), random_size(1, 40));
}

KERNEL_TEST(some_rows_of_the_weight_gradient) {
    check_rows(1, 1, 1, 2);
    for (int i = 0; i < 20; i++) {
        int64_t rows = random_size(1, 40);
        check_rows(random_size(1, 60), random_size(1, 40), rows, rows + random_size(1, 30));
    }
}

// --- the weight gradient of a matrix in parts (parallel_linear.h) ---

enum { PART_ROWS = 7 };

// UP on 2 x 2 ranks: QKV's 270 rows are two parts of 135 and a bucket of its own, 68 rows for each of four
// owners, the last two of them padding. The projection's 180 rows are too few for that.
static void create_parts(parameters *p, cf_mesh *mesh) {
    cf_mesh_init(mesh, 4, 1, 2, 2);
    params_create(p, (gpt_shape){.maxT = 4, .V = 8, .Vp = 8, .L = 2, .H = 6, .C = 90}, mesh, STRATEGY_UP, 0);
}

static void free_parts(parameters *p, cf_mesh *mesh) {
    params_free(p);
    cf_mesh_free(mesh);
}

typedef struct product {
    int tensor;
    const real *dy[2], *x[2];
    weight_gradient g;
    real *before; // of the gradient; NaN where it must not count
    double *whole;
} product;

static void make_product(product *q, const parameters *p, int tensor, bool add) {
    int64_t OC = params_local_rows(p, tensor) / 2, IC = params_local_columns(p, tensor), count = 2 * OC * IC;
    q->tensor = tensor;
    q->g = (weight_gradient){.dy = q->dy, .x = q->x, .R = PART_ROWS, .OC = OC, .IC = IC, .parts = 2};
    q->before = add ? integer_buffer(count) : poisoned_buffer(count);
    q->whole = double_buffer(count);
    for (int part = 0; part < 2; part++) {
        q->dy[part] = integer_buffer(PART_ROWS * OC), q->x[part] = integer_buffer(PART_ROWS * IC);
        for (int64_t i = 0; i < OC * IC; i++) {
            double *sum = &q->whole[part * OC * IC + i];
            *sum = add ? (double)q->before[part * OC * IC + i] : 0;
            for (int64_t r = 0; r < PART_ROWS; r++)
                *sum += (double)q->dy[part][r * OC + i / IC] * (double)q->x[part][r * IC + i % IC];
        }
    }
}

static void assert_product(const product *q, const real *gradient) {
    for (int64_t i = 0; i < 2 * q->g.OC * q->g.IC; i++)
        if ((double)gradient[i] != q->whole[i])
            fail_msg("row %lld of %s: %g, expected %g", (long long)(i / q->g.IC), params_name(q->tensor), (double)gradient[i],
                     q->whole[i]);
}

// Of QKV's bias, which comes with the weights'. What it was is put back.
static void assert_bias(const product *q, real *gradient, const real *before) {
    for (int64_t i = 0; i < 2 * q->g.OC; i++) {
        double sum = (double)before[i];
        for (int64_t r = 0; r < PART_ROWS; r++) sum += (double)q->dy[i / q->g.OC][r * q->g.OC + i % q->g.OC];
        assert_true((double)gradient[i] == sum);
        gradient[i] = before[i];
    }
}

// The step's first micro-batch overwrites the gradient of a matrix, whether it has a bucket of its own or shares one.
static void check_in_place(zero_shards *z, int tensor, bool add) {
    const parameters *p = z->params;
    product q;
    make_product(&q, p, tensor, add);
    int64_t count = 2 * q.g.OC * q.g.IC;
    real *gradient = params_grad(p, tensor, 1), *around = copy_buffer(p->grad, p->elements);
    cf_copy(gradient, q.before, count * (int64_t)sizeof *gradient, NULL);
    zero_weight_gradient(z, tensor, 1, q.g);
    assert_product(&q, gradient);
    real *bias = params_grad(p, QKVB, 1);
    if (tensor == QKVW) assert_bias(&q, bias, around + (bias - p->grad));
    int64_t first = gradient - p->grad, end = first + count;
    assert_same_bits("before the gradient", p->grad, around, first);
    assert_same_bits("after the gradient", p->grad + end, around + end, p->elements - end);
}

KERNEL_TEST(weight_gradient_in_place) {
    static parameters p;
    static cf_context context; // the default stream
    cf_mesh mesh;
    create_parts(&p, &mesh);
    zero_shards z = {.context = &context, .params = &p, .bucket = test_buffer(p.buckets * (int64_t)sizeof *z.bucket)};
    z.destination = test_buffer(p.tensors * (int64_t)sizeof *z.destination);
    memset(z.bucket, 0, (size_t)p.buckets * sizeof *z.bucket);
    for (int first = 1; first >= 0; first--) {
        zero_begin_backward(&z, first, false);
        check_in_place(&z, QKVW, !first);
        check_in_place(&z, ATTPROJW, !first);
    }
    free_parts(&p, &mesh);
}

// Only the last micro-batch sends; a matrix that shares a bucket does not make the others wait; no operation brings a factor.
KERNEL_TEST(place_of_a_weight_gradient) {
    static parameters p;
    cf_mesh mesh;
    create_parts(&p, &mesh);
    zero_bucket *bucket = test_buffer(p.buckets * (int64_t)sizeof *bucket);
    memset(bucket, 0, (size_t)p.buckets * sizeof *bucket);
    zero_shards z = {.params = &p, .bucket = bucket, .destination = test_buffer(p.tensors * (int64_t)sizeof *z.destination)};
    bucket[params_find(&p, QKVW, 1)->bucket].by_owners = true;
    for (int may_wait = 0; may_wait <= 1; may_wait++) {
        p.strategy = may_wait ? STRATEGY_TPSP : STRATEGY_UP;
        for (int last = 0; last <= 1; last++) {
            zero_begin_backward(&z, true, last);
            assert_int_equal(zero_decided(&z, QKVW, 1)->place, last ? GRADIENT_OWNERS : GRADIENT_WHOLE);
            assert_int_equal(zero_decided(&z, QKVW, 0)->place, may_wait ? GRADIENT_AFTER : GRADIENT_WHOLE); // the first may wait
            assert_int_equal(zero_decided(&z, ATTPROJW, 0)->place, GRADIENT_WHOLE);                         // others wait for it
            assert_int_equal(zero_decided(&z, ATTPROJW, 1)->place, GRADIENT_WHOLE);
        }
    }
    free_parts(&p, &mesh);
}

// Slices of uneven size, in any order: across the border of the parts at 135, within a part, into the padding after 270, two
// blocks at once.
static void compute_slices(weight_gradient *g, real *gradient, int64_t row) {
    static const struct {
        int64_t row, rows, stride;
        int blocks;
    } slices[] = {{130, 71, 0, 1}, {0, 1, 0, 1}, {201, 71, 0, 1}, {1, 13, 81, 2}, {14, 68, 0, 1}, {95, 35, 0, 1}};
    for (size_t i = 0; i < sizeof slices / sizeof *slices; i++) {
        cf_span span = {.side = CF_COMPUTE_BEFORE,
                        .row = slices[i].row,
                        .rows = slices[i].rows,
                        .blocks = slices[i].blocks,
                        .row_stride = slices[i].stride,
                        .data = (char *)(gradient + slices[i].row * row),
                        .data_stride = slices[i].stride * row * (int64_t)sizeof(real)};
        zero_gradient_rows(g, &span, NULL);
    }
}

KERNEL_TEST(weight_gradient_owner_by_owner) {
    static parameters p;
    cf_mesh mesh;
    create_parts(&p, &mesh);
    const param_bucket *b = &p.bucket[params_find(&p, QKVW, 1)->bucket];
    assert_int_equal(b->count / b->row, 272);
    for (int add = 0; add <= 1; add++) { // add: the step has more micro-batches than this one
        product q;
        make_product(&q, &p, QKVW, add == 1);
        real *gradient = poisoned_buffer(b->count);
        cf_copy(gradient, q.before, 2 * q.g.OC * q.g.IC * (int64_t)sizeof(real), NULL);
        q.g.to.add = add == 1;
        compute_slices(&q.g, gradient, b->row);
        assert_product(&q, gradient);
        assert_untouched("padding", gradient + 270 * b->row, 2 * b->row);
    }
    free_parts(&p, &mesh);
}

typedef struct bias_problem {
    int64_t R, OC;
    const real *dy;
} bias_problem;

static void run_bias_grad(void *context, real *db) {
    bias_problem *p = context;
    linear_bias_grad(db, p->dy, p->R, p->OC, NULL);
}

KERNEL_TEST(bias_gradient) {
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
    return cmocka_run_group_tests(all_tests, NULL, NULL);
}
