// ranks: 1
// The backward of every layer but attention, in double, against central differences: odd shapes, random
// upstream gradients. Outputs that are added to (+=) start with random values, which must stay in the sum.
#include "kernel_testing.h"
#include "layers/kernels/crossentropy.h"
#include "layers/kernels/elementwise.h"
#include "layers/kernels/embedding.h"
#include "layers/kernels/layernorm.h"
#include "layers/kernels/linear.h"

enum { MOST = 400 };

// after − before
static void subtract(real *after, const real *before, int64_t n) {
    for (int64_t i = 0; i < n; i++) after[i] -= before[i];
}

// x (R, IC) → linear → y (R, OC); the loss is y · dy
typedef struct linear_problem {
    int64_t R, IC, OC;
    real *x, *w, *bias, *y, *dy, *prepared;
} linear_problem;

static double linear_loss(void *context) {
    linear_problem *p = context;
    const real *w = linear_prepare_forward(p->prepared, p->w, p->IC, p->OC, NULL);
    linear_forward(p->y, NULL, p->x, w, p->bias, NULL, linear_all(p->R), p->IC, p->OC, NULL);
    return dot(p->y, p->dy, p->R * p->OC);
}

static void check_linear(int64_t R, int64_t IC, int64_t OC, bool with_bias) {
    linear_problem p = {R,
                        IC,
                        OC,
                        random_buffer(R * IC),
                        random_buffer(OC * IC),
                        NULL,
                        poisoned_buffer(R * OC),
                        random_buffer(R * OC),
                        poisoned_buffer(linear_prepared_size(IC, OC))};
    if (with_bias) p.bias = random_buffer(OC);
    real *dx = poisoned_buffer(R * IC), *dw = random_buffer(OC * IC), *db = random_buffer(OC);
    real *dw_before = copy_buffer(dw, OC * IC), *db_before = copy_buffer(db, OC);
    linear_dgrad(dx, p.dy, linear_prepare_dgrad(p.prepared, p.w, IC, OC, NULL), NULL, false, linear_all(R), IC, OC, NULL);
    linear_wgrad(dw, db, p.dy, OC, p.x, R, IC, OC, true, NULL);
    subtract(dw, dw_before, OC * IC);
    subtract(db, db_before, OC);
    assert_gradient("x", p.x, dx, R * IC, MOST, linear_loss, &p);
    assert_gradient("w", p.w, dw, OC * IC, MOST, linear_loss, &p);
    if (with_bias) assert_gradient("bias", p.bias, db, OC, MOST, linear_loss, &p);
}

KERNEL_TEST(linear) {
    check_linear(1, 1, 1, true);
    check_linear(7, 5, 11, true);
    check_linear(7, 5, 11, false);
    check_linear(37, 3, 19, true); // more rows than blocks of the bias gradient
}

typedef struct layernorm_problem {
    int64_t R, C;
    real *x, *w, *b, *y, *dy, *mean, *rstd; // b, mean NULL: without
} layernorm_problem;

static double layernorm_loss(void *context) {
    layernorm_problem *p = context;
    layernorm_forward(p->y, p->mean, p->rstd, p->x, p->w, p->b, 1e-5, p->R, p->C, NULL);
    return dot(p->y, p->dy, p->R * p->C);
}

static void check_layernorm(int64_t R, int64_t C, bool rms) {
    layernorm_problem p = {R,
                           C,
                           random_buffer(R * C),
                           random_buffer(C),
                           random_buffer(C),
                           poisoned_buffer(R * C),
                           random_buffer(R * C),
                           poisoned_buffer(R),
                           poisoned_buffer(R)};
    if (rms) p.mean = NULL, p.b = NULL;
    real *dx = random_buffer(R * C), *dw = random_buffer(C), *db = random_buffer(C);
    real *dx_before = copy_buffer(dx, R * C), *dw_before = copy_buffer(dw, C), *db_before = copy_buffer(db, C);
    real *scratch = poisoned_buffer(layernorm_scratch(C));
    layernorm_loss(&p);
    layernorm_backward(dx, dw, rms ? NULL : db, NULL, whole_sum(p.dy), p.x, p.w, p.mean, p.rstd, scratch, R, C, NULL);
    subtract(dx, dx_before, R * C);
    subtract(dw, dw_before, C);
    subtract(db, db_before, C);
    assert_gradient("x", p.x, dx, R * C, MOST, layernorm_loss, &p);
    assert_gradient("w", p.w, dw, C, MOST, layernorm_loss, &p);
    if (!rms) assert_gradient("b", p.b, db, C, MOST, layernorm_loss, &p);
}

KERNEL_TEST(layernorm) {
    for (int rms = 0; rms < 2; rms++) {
        check_layernorm(1, 9, rms);
        check_layernorm(5, 13, rms);
        check_layernorm(71, 7, rms); // several rows per block
    }
}

typedef struct gated_problem {
    int64_t R, F;
    real *pre, *out, *dout;
} gated_problem;

static double gated_loss(void *context) {
    gated_problem *p = context;
    gated_forward(p->out, p->pre, p->R, p->F, NULL);
    return dot(p->out, p->dout, p->R * p->F);
}

KERNEL_TEST(gated) {
    const int64_t R = 5, F = 9;
    for (int again = 0; again < 2; again++) {
        gated_problem p = {R, F, random_buffer(R * 2 * F), poisoned_buffer(R * F), random_buffer(R * F)};
        real *dpre = copy_buffer(p.pre, R * 2 * F), *out = poisoned_buffer(R * F);
        gated_loss(&p);
        gated_backward(dpre, again ? out : NULL, p.dout, R, F, NULL);
        if (again) assert_same_bits("out again", out, p.out, R * F);
        assert_gradient("pre", p.pre, dpre, R * 2 * F, MOST, gated_loss, &p);
    }
}

typedef struct rotary_problem {
    real *x, *dx, *table;
} rotary_problem;

enum {
    ROTARY_T = 4,
    ROTARY_B = 2,
    ROTARY_HEADS = 2,
    ROTARY_D = 6,
    ROTARY_ROW = 15,
    ROTARY_COUNT = ROTARY_T * ROTARY_B * ROTARY_ROW
};

static double rotary_loss(void *context) {
    rotary_problem *p = context;
    real *y = copy_buffer(p->x, ROTARY_COUNT);
    rotary_turn(y, p->table, false, ROTARY_T, ROTARY_B, ROTARY_HEADS, ROTARY_D, ROTARY_ROW, NULL);
    return dot(y, p->dx, ROTARY_COUNT);
}

// Against complex numbers, too: head h, pair i at position t is turned by angle t / theta^(2 i / D).
KERNEL_TEST(rotary) {
    rotary_problem p = {random_buffer(ROTARY_COUNT), random_buffer(ROTARY_COUNT), zero_buffer(ROTARY_T * ROTARY_D)};
    for (int t = 0; t < ROTARY_T; t++)
        for (int i = 0; i < ROTARY_D / 2; i++) {
            const double angle = t / pow(10000, 2.0 * i / ROTARY_D);
            p.table[t * ROTARY_D + i] = cos(angle), p.table[t * ROTARY_D + ROTARY_D / 2 + i] = sin(angle);
        }
    real *y = copy_buffer(p.x, ROTARY_COUNT), *dx = copy_buffer(p.dx, ROTARY_COUNT);
    rotary_turn(y, p.table, false, ROTARY_T, ROTARY_B, ROTARY_HEADS, ROTARY_D, ROTARY_ROW, NULL);
    for (int i = 0; i < ROTARY_COUNT; i++) {
        const int at = i % ROTARY_ROW, c = at % ROTARY_D, t = i / ROTARY_ROW / ROTARY_B, half = ROTARY_D / 2;
        const double angle = t / pow(10000, 2.0 * (c % half) / ROTARY_D),
                     other = c < half ? -p.x[i + half * (at < 12)] : p.x[i - half];
        const double expected = at < ROTARY_HEADS * ROTARY_D ? p.x[i] * cos(angle) + other * sin(angle) : p.x[i];
        assert_close("turned", y + i, &expected, 1, 1e-13, 1);
    }
    rotary_turn(dx, p.table, true, ROTARY_T, ROTARY_B, ROTARY_HEADS, ROTARY_D, ROTARY_ROW, NULL);
    assert_gradient("x", p.x, dx, ROTARY_COUNT, MOST, rotary_loss, &p);
}

typedef struct gelu_problem {
    int64_t n;
    real *x, *y, *dy;
} gelu_problem;

static double gelu_loss(void *context) {
    gelu_problem *p = context;
    activation_forward(p->y, p->x, p->n, NULL);
    return dot(p->y, p->dy, p->n);
}

KERNEL_TEST(gelu) {
    gelu_problem p = {37, random_buffer(37), poisoned_buffer(37), random_buffer(37)};
    p.x[3] = 6, p.x[4] = -4, p.x[5] = 0;
    real *dx = poisoned_buffer(p.n), *in_place = copy_buffer(p.dy, p.n);
    activation_backward(dx, p.dy, p.x, p.n, NULL);
    assert_gradient("x", p.x, dx, p.n, MOST, gelu_loss, &p);
    activation_backward(in_place, in_place, p.x, p.n, NULL);
    assert_same_bits("dx in dy's place", in_place, dx, p.n);
}

// Tokens → rows of wte held here + positions; the loss is x · dx
typedef struct embedding_problem {
    int64_t first, count, t0, T, B, C, maxT;
    int32_t *tokens;
    real *wte, *wpe, *x, *dx;
} embedding_problem;

static double embedding_loss(void *context) {
    embedding_problem *p = context;
    embedding_forward(p->x, p->tokens, p->wte, p->first, p->count, p->T * p->B, p->C, NULL);
    position_forward(p->x, p->wpe, p->t0, p->T, p->B, p->C, NULL);
    return dot(p->x, p->dx, p->T * p->B * p->C);
}

static void check_embedding(int64_t first, int64_t count, int64_t t0, int64_t T, int64_t B, int64_t C) {
    const int64_t vocabulary = 11, maxT = t0 + T + 2, R = T * B;
    embedding_problem p = {first, count, t0, T, B, C, maxT, test_buffer(R * 4), NULL, NULL, NULL, NULL};
    for (int64_t r = 0; r < R; r++) p.tokens[r] = (int32_t)random_size(0, vocabulary - 1); // many twice
    p.wte = random_buffer(count * C);
    p.wpe = random_buffer(maxT * C);
    p.x = poisoned_buffer(R * C);
    p.dx = random_buffer(R * C);
    real *dwte = random_buffer(count * C), *dwpe = random_buffer(maxT * C);
    real *dwte_before = copy_buffer(dwte, count * C), *dwpe_before = copy_buffer(dwpe, maxT * C);
    embedding_backward(dwte, p.dx, false, p.tokens, first, count, R, C, NULL);
    position_backward(dwpe, p.dx, t0, T, B, C, NULL);
    subtract(dwte, dwte_before, count * C);
    subtract(dwpe, dwpe_before, maxT * C);
    assert_gradient("wte", p.wte, dwte, count * C, MOST, embedding_loss, &p);
    assert_gradient("wpe", p.wpe, dwpe, maxT * C, MOST, embedding_loss, &p);
}

KERNEL_TEST(embedding_and_position) {
    check_embedding(0, 11, 0, 9, 3, 5);
    check_embedding(4, 3, 2, 6, 2, 7);  // a shard of the vocabulary, a slice of the sequence
    check_embedding(11, 2, 0, 3, 1, 2); // a shard that holds none of the tokens
}

// Logits (R, ·) in shards of V columns of which valid[i] count; the loss is Σ losses · scale
typedef struct crossentropy_problem {
    int64_t shards, R, V, valid[3], first[3];
    int32_t *targets;
    real *logits; // shard i at i · R · V
    real *stats, *losses;
    double scale, z;
} crossentropy_problem;

static double crossentropy_loss(void *context) {
    crossentropy_problem *p = context;
    for (int64_t i = 0; i < p->shards; i++)
        crossentropy_stats(p->stats + i * p->R * 3, p->logits + i * p->R * p->V, p->targets, p->first[i], p->valid[i], p->R, p->V,
                           NULL);
    crossentropy_combine(p->losses, NULL, p->stats, p->shards, p->targets, 0, 0, 0, 0, p->R, p->V, NULL);
    double sum = 0;
    crossentropy_sum(&sum, p->losses, p->R, NULL);
    for (int64_t r = 0; r < p->R; r++) {
        double lse = (double)p->losses[r];
        for (int64_t i = 0; i < p->shards; i++) lse += (double)p->stats[(i * p->R + r) * 3 + 2]; // the target's logit
        sum += p->z * lse * lse;
    }
    return p->scale * sum;
}

static void check_crossentropy(int64_t shards, int64_t R, int64_t V, const int64_t *valid) {
    crossentropy_problem p = {.shards = shards, .R = R, .V = V, .scale = 1.0 / (double)R, .z = 0.1};
    int64_t vocabulary = 0, count = shards * R * V;
    for (int64_t i = 0; i < shards; vocabulary += valid[i++]) p.first[i] = vocabulary, p.valid[i] = valid[i];
    p.targets = test_buffer(R * 4);
    for (int64_t r = 0; r < R; r++) p.targets[r] = (int32_t)random_size(0, vocabulary - 1);
    p.logits = random_buffer(count);
    p.stats = poisoned_buffer(shards * R * 3);
    p.losses = poisoned_buffer(R);
    crossentropy_loss(&p);
    real *gradient = copy_buffer(p.logits, count);
    for (int64_t i = 0; i < shards; i++)
        crossentropy_combine(p.losses, gradient + i * R * V, p.stats, shards, p.targets, p.scale, p.z, p.first[i], valid[i], R, V,
                             NULL);
    assert_gradient("logits", p.logits, gradient, count, 2 * MOST, crossentropy_loss, &p);
}

KERNEL_TEST(crossentropy) {
    check_crossentropy(1, 5, 13, (int64_t[]){13});
    check_crossentropy(1, 5, 13, (int64_t[]){10}); // padding columns
    check_crossentropy(2, 7, 9, (int64_t[]){9, 4});
    check_crossentropy(3, 6, 8, (int64_t[]){8, 8, 3});
    check_crossentropy(3, 4, 8, (int64_t[]){8, 2, 0}); // a shard of nothing but padding
}

// A small MLP with residual: x → layer norm → linear → GELU → linear → x + · + bias → loss. The backward
// is composed as a block does it, gradients of the residual stream accumulating in place.
typedef struct mlp_problem {
    int64_t R, C, F;
    real *x, *lnw, *lnb, *w1, *b1, *w2, *b2;    // parameters
    real *ln, *mean, *rstd, *hidden, *gelu, *y; // activations
    real *prepared;
    real *dy;
} mlp_problem;

static double mlp_loss(void *context) {
    mlp_problem *p = context;
    layernorm_forward(p->ln, p->mean, p->rstd, p->x, p->lnw, p->lnb, 1e-5, p->R, p->C, NULL);
    const real *w = linear_prepare_forward(p->prepared, p->w1, p->C, p->F, NULL);
    linear_forward(p->hidden, NULL, p->ln, w, p->b1, NULL, linear_all(p->R), p->C, p->F, NULL);
    activation_forward(p->gelu, p->hidden, p->R * p->F, NULL);
    w = linear_prepare_forward(p->prepared, p->w2, p->F, p->C, NULL);
    linear_forward(p->y, NULL, p->gelu, w, p->b2, p->x, linear_all(p->R), p->F, p->C, NULL);
    return dot(p->y, p->dy, p->R * p->C);
}

KERNEL_TEST(mlp_with_residual) {
    const int64_t R = 6, C = 5, F = 12;
    mlp_problem p = {.R = R, .C = C, .F = F};
    struct {
        const char *name;
        real **at, *gradient;
        int64_t n;
    } parameter[] = {{"x", &p.x, NULL, R * C}, {"lnw", &p.lnw, NULL, C},   {"lnb", &p.lnb, NULL, C}, {"w1", &p.w1, NULL, F * C},
                     {"b1", &p.b1, NULL, F},   {"w2", &p.w2, NULL, C * F}, {"b2", &p.b2, NULL, C}};
    enum { COUNT = sizeof parameter / sizeof *parameter };
    for (int i = 0; i < COUNT; i++)
        *parameter[i].at = random_buffer(parameter[i].n), parameter[i].gradient = zero_buffer(parameter[i].n);
    p.dy = random_buffer(R * C);
    p.ln = poisoned_buffer(R * C), p.mean = poisoned_buffer(R), p.rstd = poisoned_buffer(R);
    p.hidden = poisoned_buffer(R * F), p.gelu = poisoned_buffer(R * F);
    p.y = poisoned_buffer(R * C);
    p.prepared = poisoned_buffer(linear_prepared_size(F, C)); // of either
    mlp_loss(&p);

    real *dx = parameter[0].gradient, *dhidden = poisoned_buffer(R * F), *dln = poisoned_buffer(R * C);
    real *scratch = poisoned_buffer(layernorm_scratch(C));
    cf_copy(dx, p.dy, R * C * (int64_t)sizeof(real), NULL);
    linear_wgrad(parameter[5].gradient, parameter[6].gradient, p.dy, C, p.gelu, R, F, C, true, NULL);
    linear_dgrad(dhidden, p.dy, linear_prepare_dgrad(p.prepared, p.w2, F, C, NULL), NULL, false, linear_all(R), F, C, NULL);
    activation_backward(dhidden, dhidden, p.hidden, R * F, NULL);
    linear_wgrad(parameter[3].gradient, parameter[4].gradient, dhidden, F, p.ln, R, C, F, true, NULL);
    linear_dgrad(dln, dhidden, linear_prepare_dgrad(p.prepared, p.w1, C, F, NULL), NULL, false, linear_all(R), C, F, NULL);
    layernorm_backward(dx, parameter[1].gradient, parameter[2].gradient, NULL, whole_sum(dln), p.x, p.lnw, p.mean, p.rstd, scratch,
                       R, C, NULL);

    for (int i = 0; i < COUNT; i++)
        assert_gradient(parameter[i].name, *parameter[i].at, parameter[i].gradient, parameter[i].n, MOST, mlp_loss, &p);
}

int main(void) {
    cf_device_threads(2);
    return cmocka_run_group_tests(all_tests, NULL, NULL);
}
