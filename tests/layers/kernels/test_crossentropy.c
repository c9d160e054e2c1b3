// ranks: 1
// Cross-entropy over a sharded vocabulary against a naive log-softmax in double over the whole of it.
#include "kernel_testing.h"
#include "layers/kernels/crossentropy.h"

enum { SHARDS_MAX = 3 };

typedef struct problem {
    int64_t shards, R, V;
    int64_t first[SHARDS_MAX], valid[SHARDS_MAX], vocabulary;
    int32_t *targets;
    real *logits; // shard i (R, V) at i · R · V; padding is NaN: it must not be read
    real *stats, *losses;
    double z;
} problem;

static problem problem_new(int64_t shards, int64_t R, int64_t V, const int64_t *valid, double deviation) {
    problem p = {.shards = shards, .R = R, .V = V};
    for (int64_t i = 0; i < shards; p.vocabulary += valid[i++]) p.first[i] = p.vocabulary, p.valid[i] = valid[i];
    p.targets = test_buffer(R * 4);
    for (int64_t r = 0; r < R; r++) p.targets[r] = (int32_t)random_size(0, p.vocabulary - 1);
    p.logits = poisoned_buffer(shards * R * V);
    for (int64_t i = 0; i < shards * R; i++) fill_normal(p.logits + i * V, valid[i / R], deviation);
    p.stats = poisoned_buffer(shards * R * 3);
    p.losses = poisoned_buffer(R);
    return p;
}

static void run_stats(void *context, real *stats) {
    problem *p = context;
    for (int64_t i = 0; i < p->shards; i++)
        crossentropy_stats(stats + i * p->R * 3, p->logits + i * p->R * p->V, p->targets, p->first[i], p->valid[i], p->R, p->V,
                           NULL);
}

// Each shard has all losses.
static void combine(problem *p, real *logits, double scale) {
    for (int64_t i = 0; i < p->shards; i++)
        crossentropy_combine(p->losses, logits + i * p->R * p->V, p->stats, p->shards, p->targets, scale, p->z, p->first[i],
                             p->valid[i], p->R, p->V, NULL);
}

// Without a gradient the logits stay as they are.
static void forward(problem *p) {
    real *before = copy_buffer(p->logits, p->shards * p->R * p->V);
    run_stats(p, p->stats);
    combine(p, p->logits, 0);
    assert_memory_equal(p->logits, before, (size_t)(p->shards * p->R * p->V) * sizeof *before);
}

static void run_backward(void *context, real *logits) {
    combine(context, logits, 0.25);
}

static void run_fused(void *context, real *logits) {
    problem *p = context;
    crossentropy_fused(p->losses, logits, p->targets, (real)0.25, p->z, p->valid[0], p->R, p->V, NULL);
}

static real *logit(const problem *p, real *all, int64_t r, int64_t token) {
    int64_t i = p->shards - 1;
    while (token < p->first[i] || p->valid[i] == 0) i--;
    return all + (i * p->R + r) * p->V + token - p->first[i];
}

// log Σ exp of one row of the whole vocabulary
static double naive_lse(const problem *p, int64_t r) {
    double maximum = -INFINITY, sum = 0;
    for (int64_t v = 0; v < p->vocabulary; v++) maximum = fmax(maximum, (double)*logit(p, p->logits, r, v));
    for (int64_t v = 0; v < p->vocabulary; v++) sum += exp((double)*logit(p, p->logits, r, v) - maximum);
    return maximum + log(sum);
}

static void check_with(double z, int64_t shards, int64_t R, int64_t V, const int64_t *valid, double deviation) {
    problem p = problem_new(shards, R, V, valid, deviation);
    p.z = z;
    forward(&p);
    assert_threads_do_not_matter("stats", run_stats, &p, p.stats, shards * R * 3);
    assert_threads_do_not_matter("gradient", run_backward, &p, p.logits, shards * R * V);
    real *gradient = copy_buffer(p.logits, shards * R * V);
    run_backward(&p, gradient);
    for (int64_t r = 0; r < R; r++) {
        double lse = naive_lse(&p, r), loss = lse - (double)*logit(&p, p.logits, r, p.targets[r]);
        assert_close("loss", p.losses + r, &loss, 1, 3e-6, 1 + deviation);
        for (int64_t v = 0; v < p.vocabulary; v++) {
            double more = 1 + 2 * z * lse,
                   expected = (exp((double)*logit(&p, p.logits, r, v) - lse) * more - (v == p.targets[r])) * 0.25;
            assert_close("gradient", logit(&p, gradient, r, v), &expected, 1, 2e-6 * (1 + deviation) * fabs(more), 1e-4);
        }
        for (int64_t i = 0; i < shards; i++)
            for (int64_t v = valid[i]; v < V; v++) assert_true(gradient[(i * R + r) * V + v] == 0);
    }
}

static void check(int64_t shards, int64_t R, int64_t V, const int64_t *valid, double deviation) {
    check_with(0, shards, R, V, valid, deviation);
    check_with(0.1, shards, R, V, valid, deviation);
}

KERNEL_TEST(one_shard) {
    check(1, 1, 1, (int64_t[]){1}, 1);
    check(1, 0, 4, (int64_t[]){4}, 1);
    check(1, 7, 130, (int64_t[]){123}, 1);
    check(1, 5, 5000, (int64_t[]){4999}, 3); // several stretches
}

// Whoever holds the whole vocabulary may take either way.
KERNEL_TEST(fused_gives_the_same_bits) {
    static const int64_t sizes[][3] = {{1, 1, 1}, {0, 4, 4}, {7, 130, 123}, {5, 5000, 4999}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        int64_t R = sizes[i][0], V = sizes[i][1];
        problem p = problem_new(1, R, V, &sizes[i][2], 3);
        p.z = 0.1;
        forward(&p);
        real *gradient = copy_buffer(p.logits, R * V), *losses = copy_buffer(p.losses, R);
        run_backward(&p, gradient);
        fill_normal(p.losses, R, 1);
        assert_threads_do_not_matter("fused", run_fused, &p, p.logits, R * V);
        real *fused = copy_buffer(p.logits, R * V);
        run_fused(&p, fused);
        assert_memory_equal(fused, gradient, (size_t)(R * V) * sizeof *fused);
        assert_memory_equal(p.losses, losses, (size_t)R * sizeof *losses);
    }
}

KERNEL_TEST(several_shards_with_padding) {
    check(2, 9, 40, (int64_t[]){40, 31}, 2);
    check(3, 4, 2100, (int64_t[]){2100, 2100, 7}, 2);
    check(3, 6, 16, (int64_t[]){16, 5, 0}, 1); // the last holds nothing but padding
}

KERNEL_TEST(huge_logits) {
    check(1, 5, 3000, (int64_t[]){2990}, 1e4);
    check(2, 5, 30, (int64_t[]){30, 20}, 1e30);
}

// Logits that are all alike, however huge: each of n words has probability 1 / n.
KERNEL_TEST(alike_however_huge) {
    static const double sizes[] = {0, 1e4, 1e20, 1e30, -1e30};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        problem p = problem_new(2, 3, 40, (int64_t[]){40, 31}, 1), whole = problem_new(1, 3, 71, (int64_t[]){71}, 1);
        for (int64_t k = 0; k < 2 * 3 * 40; k++) p.logits[k] = (real)sizes[i];
        for (int64_t k = 0; k < 3 * 71; k++) whole.logits[k] = (real)sizes[i];
        forward(&p);
        run_fused(&whole, whole.logits);
        for (int64_t r = 0; r < 3; r++) {
            assert_close("loss", p.losses + r, &(double){log(71)}, 1, 1e-6, 1);
            assert_close("fused loss", whole.losses + r, &(double){log(71)}, 1, 1e-6, 1);
        }
    }
}

KERNEL_TEST(empty_shard_is_neutral) {
    problem p = problem_new(1, 3, 8, (int64_t[]){8}, 1);
    crossentropy_stats(p.stats, p.logits, p.targets, 8, 0, p.R, p.V, NULL);
    for (int64_t r = 0; r < p.R; r++) {
        assert_true(p.stats[r * 3] == (real)-INFINITY);
        assert_true(p.stats[r * 3 + 1] == 0 && p.stats[r * 3 + 2] == 0);
    }
}

// Of columns that are −infinity throughout a stretch the others' sum is left as it is.
KERNEL_TEST(masked_logits) {
    problem p = problem_new(1, 1, 9000, (int64_t[]){9000}, 1);
    for (int64_t v = 0; v < 9000; v++)
        if (v / 2048 != 1) p.logits[v] = (real)-INFINITY;
    p.targets[0] = 3000;
    forward(&p);
    double loss = naive_lse(&p, 0) - (double)p.logits[3000];
    assert_close("loss", p.losses, &loss, 1, 3e-6, 1);
    for (int64_t v = 0; v < 9000; v++) p.logits[v] = (real)-INFINITY;
    p.logits[5000] = (real)NAN; // no maximum, yet not nothing
    forward(&p);
    assert_true(isnan(p.stats[1]) && isnan(p.losses[0]));
}

static double sum_of(const accum *losses, int64_t n) {
    double sum = 0;
    crossentropy_sum(&sum, losses, n, NULL);
    return sum;
}

// The loss shows NaN: none may get lost, wherever it is.
KERNEL_TEST(nan_and_infinity_reach_the_loss) {
    static const int64_t places[] = {0, 15, 16, 2047, 2048, 4099};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++)
        for (int kind = 0; kind < 2; kind++) {
            problem p = problem_new(2, 3, 4100, (int64_t[]){4100, 4100}, 1);
            for (int64_t r = 0; r < p.R; r++) p.targets[r] = 1;
            p.logits[p.V + places[i]] = kind ? (real)NAN : (real)INFINITY;
            forward(&p);
            assert_true(isfinite(p.losses[0]) && !isfinite(p.losses[1]) && isfinite(p.losses[2]));
            assert_true(!isfinite(sum_of(p.losses, p.R)));
        }
}

KERNEL_TEST(they_reach_the_fused_loss_too) {
    for (int kind = 0; kind < 3; kind++) {
        problem p = problem_new(1, 3, 4100, (int64_t[]){4100}, 1);
        for (int64_t r = 0; r < p.R; r++) p.targets[r] = 1;
        p.logits[p.V + 2048] = kind == 0 ? (real)NAN : kind == 1 ? (real)INFINITY : (real)-INFINITY;
        run_fused(&p, p.logits);
        assert_true(isfinite(p.losses[0]) && !isfinite(p.losses[1]) == (kind < 2) && isfinite(p.losses[2]));
    }
}

KERNEL_TEST(sum_in_double) {
    const int64_t n = 100001;
    real *losses = zero_buffer(n);
    for (int64_t i = 0; i < n; i++) losses[i] = 0.1f;
    assert_true(fabs(sum_of(losses, n) - 0.1f * (double)n) < 1e-6);
    assert_true(sum_of(losses, 0) == 0);
}

int main(void) {
    cf_device_threads(2);
    return cmocka_run_group_tests(all_tests, NULL, NULL);
}
