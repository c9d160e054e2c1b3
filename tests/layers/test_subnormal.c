// ranks: 1 2
//
// Numbers too small to be normal are 0 in every thread that computes: OpenMP's, those of oneDNN's products, and the one that moves
// bytes and adds up a reduce-scatter. Each case would have a subnormal result, or one that a subnormal factor makes; where the
// processor still computes with them, it is not 0.
#include "tests/commfuse/ranks.h"
#include <float.h>
#include "commfuse/fuse.h"
#include "layers/optimizer/update.h"
#include "layers/kernels/attention.h"
#include "layers/kernels/crossentropy.h"
#include "layers/kernels/elementwise.h"
#include "layers/kernels/linear.h"
#include <omp.h>

enum { MANY = 1 << 16, SIDE = 512 };
static const float TINY = FLT_MIN / 4;
static volatile float small = FLT_MIN, tiny = FLT_MIN / 4; // the compiler must not compute with them

static cf_context context;
static cf_mesh mesh;

static float *filled(int64_t n, float value) {
    float *x = cf_alloc(n * (int64_t)sizeof *x, "test");
#pragma omp parallel for
    for (int64_t i = 0; i < n; i++) x[i] = value;
    return x;
}

// Bits, because a comparison would take a subnormal number for 0, too.
static bool are_zero(const float *x, int64_t n) {
    uint32_t any = 0, bits;
    for (int64_t i = 0; i < n; i++) memcpy(&bits, x + i, sizeof bits), any |= bits << 1;
    return any == 0;
}

TEST(every_thread_flushes) {
    const int threads[] = {2, 1, 2, 5}; // some start later
    for (int i = 0; i < 4; i++) {
        int flushes = 0, reads = 0;
#pragma omp parallel num_threads(threads[i]) reduction(+ : flushes, reads)
        {
            const float result = small * 0.25f, product = tiny * 1e20f;
            flushes = are_zero(&result, 1), reads = are_zero(&product, 1);
        }
        CHECK(flushes == threads[i] && reads == threads[i], "%d and %d threads of %d", flushes, reads, threads[i]);
    }
}

// One key far behind the other: its probability is exp(-95), and its value is huge.
TEST(sharp_attention) {
    enum { D = 16, T = 2, B = 2, H = 8 };
    float *qkv = filled(T * B * 3 * H * D, 0), *out = filled(T * B * H * D, 0), *lse = filled(T * B * H, 0);
    float *dqkv = filled(T * B * 3 * H * D, 0), *dout = filled(T * B * H * D, 1),
          *scratch = filled(attention_scratch(T, B, H, H, D), 0);
    for (int64_t i = 0; i < B * H * D; i++) {
        const int64_t at = i / (H * D) * 3 * H * D + i % (H * D), next = B * 3 * H * D;
        qkv[next + at] = 1, qkv[at + H * D] = -95 / sqrtf(D), qkv[at + 2 * H * D] = 1e30f; // query, the first key and its value
    }
    attention_forward(out, lse, qkv, 0, T, T, B, H, H, D, NULL);
    attention_backward(dqkv, dout, out, lse, qkv, scratch, 0, T, T, B, H, H, D, true, NULL);
    CHECK(out[0] == 1e30f, "a query that sees one key");
    CHECK(are_zero(out + B * H * D, B * H * D), "a query takes %g of a value that it sees with exp(-95)", out[B * H * D]);
    for (int64_t i = 0; i < B * H * D; i++) {
        const int64_t at = i / (H * D) * 3 * H * D + i % (H * D);
        CHECK(dqkv[at + 2 * H * D] == 1 && are_zero(dqkv + at + H * D, 1), "a value's gradient is %g, a key's %g",
              dqkv[at + 2 * H * D], dqkv[at + H * D]);
    }
    float *all[] = {qkv, out, lse, dqkv, dout, scratch};
    for (int i = 0; i < 6; i++) cf_free(all[i]);
}

// The logits of a row are 78 to 104 less than that of its target.
TEST(logits_far_apart) {
    enum { R = 64, V = 2048 };
    float *logits = filled(R * V, 0), *again = filled(R * V, 0), *losses = filled(R, 0), *stats = filled(3 * R, 0);
    int32_t *targets = cf_alloc(R * 4, "test");
    for (int64_t i = 0; i < R * V; i++) logits[i] = again[i] = i % V == 0 ? 0 : -88 - 16 * (float)i / (R * V);
    crossentropy_fused(losses, logits, targets, 1e-3, 0, V, R, V, NULL);
    crossentropy_stats(stats, again, targets, 0, V, R, V, NULL);
    crossentropy_combine(losses, again, stats, 1, targets, 1e-3, 0, 0, V, R, V, NULL);
    CHECK(are_zero(logits, R * V), "a gradient of logits");
    CHECK(are_zero(again, R * V), "a gradient of logits by parts");
    for (int64_t i = 0; i < R * V; i++) logits[i] = i % V == 0 ? 0 : -82; // its exponential is normal, its gradient is not
    crossentropy_fused(losses, logits, targets, 1e-3, 0, V, R, V, NULL);
    CHECK(are_zero(logits, R * V), "a gradient of logits that are 82 apart");
    float *all[] = {logits, again, losses, stats};
    for (int i = 0; i < 4; i++) cf_free(all[i]);
    cf_free(targets);
}

TEST(elements) {
    float *x = filled(MANY, TINY), *y = filled(MANY, 1), *out = filled(MANY, 1);
    activation_forward(out, x, MANY, NULL);
    CHECK(are_zero(out, MANY), "GELU of a subnormal number");
    for (int64_t i = 0; i < MANY; i++) x[i] = -10.01f - 0.04f * (float)i / MANY; // where its sigmoid is subnormal
    activation_backward(out, y, x, MANY, NULL);
    CHECK(are_zero(out, MANY), "the slope of GELU is %g to %g", out[0], out[MANY - 1]);
    for (int64_t i = 0; i < MANY; i++) y[i] = TINY;
    cf_add(y, y, 1, 0, MANY, CF_FP32, NULL);
    CHECK(are_zero(y, MANY), "a sum");
    cf_free(x), cf_free(y), cf_free(out);
}

TEST(small_moments) {
    const optimizer_settings a = {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .scale = 1, .step = 1};
    float *w = filled(MANY, 1), *m = filled(MANY, 0), *v = filled(MANY, TINY), *g = filled(MANY, 1e-20f);
    optimizer_update(optimizers, w, NULL, (float *[]){m, v}, g, MANY, a, NULL);
    CHECK(are_zero(v, MANY) && m[0] > 0, "second moments");
    for (int64_t i = 0; i < MANY; i++) m[i] = TINY, g[i] = 0;
    optimizer_update(optimizers, w, NULL, (float *[]){m, v}, g, MANY, a, NULL);
    CHECK(are_zero(m, MANY) && w[0] == 1, "first moments");
    cf_free(w), cf_free(m), cf_free(v), cf_free(g);
}

TEST(products) {
    float *x = filled(SIDE * SIDE, 1e-20f), *w = filled(SIDE * SIDE, 1e-20f), *out = filled(SIDE * SIDE, 1);
    float *ready = filled(linear_prepared_size(SIDE, SIDE), 0);
    linear_forward(out, NULL, x, linear_prepare_forward(ready, w, SIDE, SIDE, NULL), NULL, NULL, linear_all(SIDE), SIDE, SIDE,
                   NULL);
    CHECK(are_zero(out, SIDE * SIDE), "a product's %g", out[0]);
    linear_wgrad(out, NULL, x, SIDE, w, SIDE, SIDE, SIDE, false, NULL);
    CHECK(are_zero(out, SIDE * SIDE), "a weight gradient's %g", out[0]);
    cf_free(x), cf_free(w), cf_free(out), cf_free(ready);
}

// By native collectives, which another thread adds up, and by exchanges.
TEST(sums_of_ranks) {
    const int N = mesh.tp;
    float *full = filled(N * MANY, 0);
    for (int i = 0; i < cf_algorithm_count && N > 1; i++) {
        const cf_algorithm *a = &cf_algorithms[i];
        if (a->bound || !(a->serves & CF_SERVES(CF_REDUCE_SCATTER, CF_NO_COMPUTE))) continue;
        for (int64_t k = 0; k < N * MANY; k++) full[k] = TINY;
        cf_fuse *fuse = cf_fuse_create(&context, (cf_fuse_config){.name = "test",
                                                                  .group = &mesh.tp_group,
                                                                  .operation = CF_REDUCE_SCATTER,
                                                                  .algorithm = a,
                                                                  .slices = 1,
                                                                  .dtype = CF_FP32,
                                                                  .capacity = MANY});
        CHECK(are_zero(cf_fuse_run(fuse, full, 1, MANY, NULL, NULL, -1), MANY), "a sum by %s", a->name);
        cf_fuse_free(fuse);
    }
    cf_free(full);
}

int main(int argc, char **argv) {
    cf_transport *transport = cf_transport_create("auto", &argc, &argv, 60);
    cf_costs_agree(transport, 2);
    omp_set_num_threads(2);
    cf_free(filled(MANY, 0)); // threads of OpenMP run already
    cf_device_threads(2);
    mesh = ranks_mesh(transport, transport->size, 1);
    context = (cf_context){.transport = transport, .stream = cf_stream_create(), .trace = cf_trace_create(), .step = -1};
    int status = ranks_run(transport->rank);
    cf_trace_free(context.trace);
    cf_stream_free(context.stream);
    cf_mesh_free(&mesh);
    transport->close(transport);
    return status;
}
