// What one training step is made of: every kernel of it at the sizes of a model, timed on the device, and what cutting
// it into slices costs.
//
//     bench_gpu L C H B T V [repetitions]                default 12 768 12 16 1024 50304 12: d12, 16 sequences
//     bench_gpu gemm [N ...]                             only what square products of N reach; default 4096 8192 16384
//
// The first table has a line for each kernel of a step of one rank: time of a call, calls in a step, their time in the
// step, TFLOP/s with the share of the device's peak, GB/s with the share of what a plain copy reaches in this run.
// FLOP of attention count causal work alone, half of T × T. GB count each tensor once per pass over memory that the
// algorithm needs. AdamW, the norm and zeroing are timed on at most 2^27 parameters and scaled to all of them. Lines with
// 0 calls are there to be compared. Calls are those of --recompute 0; backward with 1 takes 2 L more layer norms, L GELUs.
//
// The second table tells whether GELU belongs into the epilogue of the MLP's products or into a kernel of its own.
// ratio = fused / apart: below 1 the epilogue wins.
//
// The third table: time of products by the first algorithm of the library's list and by the one that is taken (the fastest with
// the same bits), and of all products of a step. (The list has one on a CPU.)
//
// The fourth table is chunking loss: an operation as one of N ranks has it, computed whole and in the N slices in
// which CommFuse computes it, nothing sent. loss = (slices − whole) / whole, which no schedule can win back. Where N does
// not divide T, sequences are shortened until it does, for both. host-bound: enqueuing took nine tenths of the time or more,
// so the figure is of calls, and what they do may be faster.
//
// A time is between two moments of the stream around as many calls as take half a millisecond; printed is the median
// of the repetitions, after two to warm up, and the spread, slowest − fastest in percent of the median. Tensors of
// the residual stream rotate through POOL copies, so that a second-level cache does not hold them; what is written
// goes to copies that are not read as residuals, so that no number grows from call to call until it is infinite.
// The rate of square products is the median over the better part of a second of each size, for a device that draws
// all its power runs slower than in a burst.
// A source for either device: on a CPU use small sizes.
#include "commfuse/base/die.h"
#include "layers/optimizer/update.h"
#include "layers/kernels/attention.h"
#include "layers/kernels/crossentropy.h"
#include "layers/kernels/elementwise.h"
#include "layers/kernels/embedding.h"
#include "layers/kernels/layernorm.h"
#include "layers/kernels/linear.h"
#include "layers/kernels/peak.h"
#include "tests/layers/kernels/tensors.h"
#include <stdio.h>

enum {
    POOL = 6,
    WARM_UP = 2,
    REPETITIONS_MIN = 10,
    REPETITIONS_MAX = 1000,
    CALLS_MAX = 64,
    SEED_ELEMENTS = 1 << 20,
    SQUARES_MAX = 8 // sizes of square products
};
enum { STATE_MAX = 1 << 27 };
static const double SAMPLE_MS = 0.5, SUSTAINED_MS = 700, HOST_SHARE = 0.9;

typedef struct sizes {
    int64_t L, C, H, B, T, V, repetitions;
    int64_t R, D, P, S; // rows B·T, channels per head, parameters, how many of them are timed
} sizes;

typedef struct bench {
    sizes s;
    cf_stream *stream;
    double peak, copy_gbs; // FLOP/s; GB/s
    int turn;              // of the pool
    double enqueue_ms;     // of a call of the last sample
    real *narrow[POOL];    // (R, C) read
    real *written[POOL];   // (R, C)
    real *wide, *wide2, *dqkv, *weight, *table, *logits;
    accum *dweight, *dtable, *vectors, *rows, *scratch, *lse;
    real *w;
    accum *master, *m, *v, *g; // (S)
    double *sums;
    int32_t *tokens, *uniform; // (R) as uneven as words of text; each as likely as any
} bench;

static real *residual(bench *b, int which) {
    return b->narrow[(b->turn + which) % POOL];
}
static real *sink(bench *b, int which) {
    return b->written[(b->turn + which) % POOL];
}

// --- buffers ---

// Random numbers in the first part, copies of it behind: kernels must not be timed on zeros.
static void fill(bench *b, void *to, element of, int64_t count) {
    int64_t seeds = count < SEED_ELEMENTS ? count : SEED_ELEMENTS, size = element_size(of);
    char *memory = (char *)to;
    tensor x = {.of = of, .count = seeds, .at = memory};
    tensor_random(&x, 1, (uint64_t)count, 0, 0.5, false, b->stream);
    for (int64_t have = seeds; have < count; have *= 2)
        cf_copy(memory + have * size, memory, (have < count - have ? have : count - have) * size, b->stream);
}

static void *filled(bench *b, element of, int64_t count) {
    void *memory = cf_alloc(count * element_size(of), "benchmark");
    fill(b, memory, of, count);
    return memory;
}

// Products have written to it: scores of such numbers are so far apart that attention would be timed on zeros.
static void fill_qkv(bench *b) {
    fill(b, b->wide, OF_REAL, b->s.R * 4 * b->s.C);
}

static int64_t largest(int64_t a, int64_t b) {
    return a > b ? a : b;
}

// Token r of this order is drawn in proportion to 1 / (r + 2): the commonest of 50304 is one in twenty. Rows of one
// token are added one after another, so that such a run can be what the whole lookup's gradient waits for.
static void draw_tokens(bench *b) {
    const int64_t V = b->s.V, R = b->s.R, apart = 7919; // a prime, so that common tokens are no neighbours
    double *up_to = host_memory(V * (int64_t)sizeof *up_to), sum = 0;
    int32_t *host = host_memory(R * (int64_t)sizeof *host);
    for (int64_t r = 0; r < V; r++) up_to[r] = sum += 1 / (double)(r + 2);
    for (int64_t i = 0; i < R; i++) {
        double at = sum * random_uniform(1, 3, (uint64_t)i);
        int64_t low = 0, high = V - 1;
        while (low < high) {
            int64_t middle = (low + high) / 2;
            if (up_to[middle] > at)
                high = middle;
            else
                low = middle + 1;
        }
        host[i] = (int32_t)(low * apart % V);
    }
    cf_copy(b->tokens, host, R * (int64_t)sizeof *host, b->stream);
    cf_stream_sync(b->stream);
    free(host);
    free(up_to);
}

static void make_buffers(bench *b) {
    const sizes *s = &b->s;
    for (int i = 0; i < POOL; i++) b->narrow[i] = filled(b, OF_REAL, s->R * s->C);
    for (int i = 0; i < POOL; i++) b->written[i] = filled(b, OF_REAL, s->R * s->C);
    b->wide = filled(b, OF_REAL, s->R * 4 * s->C);
    b->wide2 = filled(b, OF_REAL, s->R * 4 * s->C);
    b->dqkv = filled(b, OF_REAL, s->R * 3 * s->C);
    b->weight = filled(b, OF_REAL, 4 * s->C * s->C); // forward products read weights as they lie on a GPU
    b->table = filled(b, OF_REAL, s->V * s->C);
    b->logits = filled(b, OF_REAL, s->R * s->V);
    b->dweight = filled(b, OF_ACCUM, 4 * s->C * s->C);
    b->dtable = filled(b, OF_ACCUM, largest(s->V, s->T) * s->C);
    b->vectors = filled(b, OF_ACCUM, 8 * s->C);
    b->rows = filled(b, OF_ACCUM, 8 * s->R);
    b->lse = filled(b, OF_ACCUM, s->R * s->H);
    b->scratch = filled(b, OF_ACCUM, largest(layernorm_scratch(s->C), attention_scratch(s->T, s->B, s->H, s->H, s->D)));
    b->w = filled(b, OF_REAL, s->S);
    b->master = filled(b, OF_ACCUM, s->S);
    b->m = filled(b, OF_ACCUM, s->S);
    b->v = filled(b, OF_ACCUM, s->S);
    b->g = filled(b, OF_ACCUM, s->S);
    b->sums = cf_alloc((SQUARES_SCRATCH + 1) * (int64_t)sizeof(double), "benchmark");
    b->tokens = cf_alloc(s->R * (int64_t)sizeof(int32_t), "benchmark");
    b->uniform = cf_alloc(s->R * (int64_t)sizeof(int32_t), "benchmark");
    tensor uniform = {.of = OF_INT32, .count = s->R, .at = b->uniform};
    tensor_integers(&uniform, 1, 2, 0, s->V, b->stream);
    draw_tokens(b);
}

// --- time ---

typedef struct timing {
    double ms, spread; // median of a call; (slowest − fastest) / median
    bool host;         // it took as long to enqueue: the host's time, not the device's
} timing;

typedef void work(bench *b, const int64_t *numbers);

static double sample(bench *b, work *run, const int64_t *numbers, int calls) {
    double enqueue = cf_now_ms();
    cf_event begin = cf_event_record(b->stream);
    for (int i = 0; i < calls; i++, b->turn++) run(b, numbers);
    b->enqueue_ms = (cf_now_ms() - enqueue) / calls;
    cf_event end = cf_event_record(b->stream);
    cf_stream_sync(b->stream);
    return (cf_event_ms(end) - cf_event_ms(begin)) / calls;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static timing time_of(bench *b, work *run, const int64_t *numbers) {
    double ms[REPETITIONS_MAX], once = 0, enqueue = 1e300;
    for (int i = 0; i < WARM_UP; i++) once = sample(b, run, numbers, 1);
    int calls = once * CALLS_MAX < SAMPLE_MS ? CALLS_MAX : 1 + (int)(SAMPLE_MS / once);
    for (int64_t i = 0; i < b->s.repetitions; i++) {
        ms[i] = sample(b, run, numbers, calls);
        if (b->enqueue_ms < enqueue) enqueue = b->enqueue_ms;
    }
    qsort(ms, (size_t)b->s.repetitions, sizeof *ms, ascending);
    double median = ms[b->s.repetitions / 2];
    bool waits = strcmp(cf_device_name(), "CPU") != 0; // a CPU is host and device
    return (timing){median, (ms[b->s.repetitions - 1] - ms[0]) / median, waits && enqueue > HOST_SHARE * median};
}

// --- the kernels of a step ---

// numbers: IC, OC
static void forward(bench *b, const int64_t *n) {
    linear_forward(n[1] > n[0] ? b->wide : sink(b, 0), NULL, n[1] > n[0] ? residual(b, 1) : b->wide, b->weight, NULL, NULL,
                   linear_all(b->s.R), n[0], n[1], b->stream);
}
static void dgrad(bench *b, const int64_t *n) {
    linear_dgrad(n[1] > n[0] ? sink(b, 0) : b->wide, n[1] > n[0] ? b->wide : residual(b, 1), b->weight, NULL, false,
                 linear_all(b->s.R), n[0], n[1], b->stream);
}
static void wgrad(bench *b, const int64_t *n) {
    linear_wgrad(b->dweight, NULL, n[1] > n[0] ? b->wide : residual(b, 0), n[1], n[1] > n[0] ? residual(b, 1) : b->wide, b->s.R,
                 n[0], n[1], false, b->stream);
}
static void forward_gelu(bench *b, const int64_t *n) {
    linear_forward(b->wide2, b->wide, residual(b, 1), b->weight, b->weight, NULL, linear_all(b->s.R), n[0], n[1], b->stream);
}
static void dgrad_gelu(bench *b, const int64_t *n) {
    linear_dgrad(b->wide2, residual(b, 1), b->weight, b->wide, false, linear_all(b->s.R), n[0], n[1], b->stream);
}
static void wgrad_and_bias(bench *b, const int64_t *n) {
    linear_wgrad(b->dweight, b->vectors, b->wide, n[1], residual(b, 1), b->s.R, n[0], n[1], false, b->stream);
}
static void forward_residual(bench *b, const int64_t *n) {
    linear_forward(sink(b, 0), NULL, b->wide, b->weight, b->weight, residual(b, 1), linear_all(b->s.R), n[0], n[1], b->stream);
}
static void bias_grad(bench *b, const int64_t *n) {
    linear_bias_grad(b->vectors, n[0] > b->s.C ? b->wide : residual(b, 0), b->s.R, n[0], b->stream);
}
static void head_forward(bench *b, const int64_t *n) {
    (void)n;
    linear_forward(b->logits, NULL, residual(b, 0), b->table, NULL, NULL, linear_all(b->s.R), b->s.C, b->s.V, b->stream);
}
static void head_dgrad(bench *b, const int64_t *n) {
    (void)n;
    linear_dgrad(sink(b, 0), b->logits, b->table, NULL, false, linear_all(b->s.R), b->s.C, b->s.V, b->stream);
}
static void head_wgrad(bench *b, const int64_t *n) {
    (void)n;
    linear_wgrad(b->dtable, NULL, b->logits, b->s.V, residual(b, 0), b->s.R, b->s.C, b->s.V, false, b->stream);
}

static void attention(bench *b, const int64_t *n) {
    (void)n;
    const sizes *s = &b->s;
    attention_forward(sink(b, 0), b->lse, b->wide, 0, s->T, s->T, s->B, s->H, s->H, s->D, b->stream);
}
static void attention_gradient(bench *b, const int64_t *n) {
    (void)n;
    const sizes *s = &b->s;
    attention_backward(b->dqkv, residual(b, 0), residual(b, 1), b->lse, b->wide, b->scratch, 0, s->T, s->T, s->B, s->H, s->H, s->D,
                       true, b->stream);
}

static void norm(bench *b, const int64_t *n) {
    (void)n;
    layernorm_forward(sink(b, 0), b->rows, b->rows + b->s.R, residual(b, 1), b->weight, b->weight + b->s.C, 1e-5, b->s.R, b->s.C,
                      b->stream);
}
static void norm_gradient(bench *b, const int64_t *n) {
    (void)n;
    layernorm_backward(sink(b, 0), b->vectors, b->vectors + b->s.C, b->vectors + 2 * b->s.C, whole_sum(residual(b, 1)),
                       residual(b, 2), b->weight, b->rows, b->rows + b->s.R, b->scratch, b->s.R, b->s.C, b->stream);
}
static void gelu(bench *b, const int64_t *n) {
    (void)n;
    activation_forward(b->wide2, b->wide, b->s.R * 4 * b->s.C, b->stream);
}
static void gelu_gradient(bench *b, const int64_t *n) {
    (void)n;
    activation_backward(b->wide2, b->wide2, b->wide, b->s.R * 4 * b->s.C, b->stream);
}
static void forward_then_gelu(bench *b, const int64_t *n) {
    linear_forward(b->wide, NULL, residual(b, 1), b->weight, b->weight, NULL, linear_all(b->s.R), n[0], n[1], b->stream);
    gelu(b, n);
}
static void dgrad_then_gelu(bench *b, const int64_t *n) {
    linear_dgrad(b->wide2, residual(b, 1), b->weight, NULL, false, linear_all(b->s.R), n[0], n[1], b->stream);
    gelu_gradient(b, n);
}
static void square(bench *b, const int64_t *n) {
    linear_forward(b->wide2, NULL, b->wide, b->weight, NULL, NULL, linear_all(n[0]), n[0], n[0], b->stream);
}
static void residual_add(bench *b, const int64_t *n) {
    (void)n;
    residual_forward(sink(b, 0), residual(b, 1), whole_sum(residual(b, 2)), b->weight, b->s.R, b->s.C, b->stream);
}
static void sum_of_parts(bench *b, const int64_t *n) {
    (void)n;
    cf_add(sink(b, 0), b->wide, 3, b->s.R * b->s.C, b->s.R * b->s.C, REAL_DTYPE, b->stream);
}
static void row_copy(bench *b, const int64_t *n) {
    (void)n;
    cf_copy(sink(b, 0), residual(b, 1), b->s.R * b->s.C * (int64_t)sizeof(real), b->stream);
}

static void lookup(bench *b, const int64_t *n) {
    (void)n;
    embedding_forward(sink(b, 0), b->tokens, b->table, 0, b->s.V, b->s.R, b->s.C, b->stream);
}
static void lookup_gradient(bench *b, const int64_t *n) {
    (void)n;
    embedding_backward(b->dtable, residual(b, 0), false, b->tokens, 0, b->s.V, b->s.R, b->s.C, b->stream);
}
static void lookup_gradient_uniform(bench *b, const int64_t *n) {
    (void)n;
    embedding_backward(b->dtable, residual(b, 0), false, b->uniform, 0, b->s.V, b->s.R, b->s.C, b->stream);
}
static void position(bench *b, const int64_t *n) {
    (void)n;
    position_forward(sink(b, 0), b->wide, 0, b->s.T, b->s.B, b->s.C, b->stream);
}
static void position_gradient(bench *b, const int64_t *n) {
    (void)n;
    position_backward(b->dtable, residual(b, 0), 0, b->s.T, b->s.B, b->s.C, b->stream);
}

static void loss_stats(bench *b, const int64_t *n) {
    (void)n;
    crossentropy_stats(b->rows, b->logits, b->tokens, 0, b->s.V, b->s.R, b->s.V, b->stream);
}
static void loss_combine(bench *b, const int64_t *n) {
    (void)n;
    crossentropy_combine(b->rows + 3 * b->s.R, b->logits, b->rows, 1, b->tokens, 0, 0, 0, b->s.V, b->s.R, b->s.V, b->stream);
}
static void loss_fused(bench *b, const int64_t *n) { // again and again on its own result, as below
    (void)n;
    crossentropy_fused(b->rows + 3 * b->s.R, b->logits, b->tokens, 1, 0, b->s.V, b->s.R, b->s.V, b->stream);
}
static void loss_sum(bench *b, const int64_t *n) {
    (void)n;
    crossentropy_sum(b->sums, b->rows + 3 * b->s.R, b->s.R, b->stream);
}
static void loss_gradient(bench *b,
                          const int64_t *n) { // again and again on its own result: values do not matter
    (void)n;
    crossentropy_combine(b->rows + 3 * b->s.R, b->logits, b->rows, 1, b->tokens, 1, 0, 0, b->s.V, b->s.R, b->s.V, b->stream);
}

static void update_some(bench *b, int64_t from, int64_t count) {
    optimizer_settings s = {.lr = 1e-6, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .scale = 1, .step = 9};
    optimizer_update(optimizer_find("adamw"), b->w + from, sizeof(real) < sizeof(accum) ? b->master + from : NULL,
                     (accum *[]){b->m + from, b->v + from}, b->g + from, count, s, b->stream);
}
static void update(bench *b, const int64_t *n) {
    (void)n;
    update_some(b, 0, b->s.S);
}
static int64_t layer_elements(const sizes *s) {
    return 12 * s->C * s->C + 13 * s->C;
}
// As the optimizer does: each matrix, and the vectors in two runs. Another layer's every time.
static void update_layer(bench *b, const int64_t *n) {
    (void)n;
    const int64_t C = b->s.C, runs[] = {3 * C * C, C * C, 4 * C * C, 4 * C * C, 7 * C, 6 * C};
    int64_t layer = layer_elements(&b->s), at = b->turn % (b->s.S / layer) * layer;
    for (size_t i = 0; i < sizeof runs / sizeof *runs; at += runs[i++]) update_some(b, at, runs[i]);
}
static void squares(bench *b, const int64_t *n) {
    (void)n;
    sum_of_squares(b->sums + SQUARES_SCRATCH, b->sums, b->g, b->s.S, b->stream);
}
static void zero_gradients(bench *b, const int64_t *n) {
    (void)n;
    cf_zero(b->g, b->s.S * (int64_t)sizeof(accum), b->stream);
}
static void large_copy(bench *b, const int64_t *n) {
    (void)n;
    cf_copy(b->m, b->v, b->s.S * (int64_t)sizeof(accum), b->stream);
}

// flops and bytes of a call; 0: not the bound, left out
static void report(bench *b, const char *name, work *run, const int64_t *numbers, double calls, double flops, double bytes) {
    timing t = time_of(b, run, numbers);
    printf("%-28s %9.4f %6.0f%% %7.4g %9.3f", name, t.ms, 100 * t.spread, calls, t.ms * calls);
    if (flops > 0) printf(" %8.1f", flops / t.ms * 1e-9);
    if (flops > 0 && b->peak > 0) printf(" %6.1f%%", 100 * flops / t.ms * 1e3 / b->peak);
    if (bytes > 0) printf(" %*.0f %6.1f%%", flops > 0 ? 8 : 25, bytes / t.ms * 1e-6, 100 * bytes / t.ms * 1e-6 / b->copy_gbs);
    printf("\n");
    fflush(stdout);
}

// A step takes forward and dgrad without GELU, unless told that it takes them with it.
static void report_linear(bench *b, const char *name, int64_t IC, int64_t OC, bool gelu_behind, bool gelu_before) {
    const int64_t n[] = {IC, OC};
    const double flops = 2 * (double)(b->s.R * IC * OC), L = (double)b->s.L;
    char line[40];
    const bool column = OC > IC; // QKV and the MLP's first
    snprintf(line, sizeof line, "%s forward", name);
    report(b, line, forward, n, gelu_behind || !column ? 0 : L, flops, 0);
    snprintf(line, sizeof line, "%s forward, residual", name);
    if (!column) report(b, line, forward_residual, n, L, flops, 0);
    snprintf(line, sizeof line, "%s forward, GELU", name);
    if (gelu_behind) report(b, line, forward_gelu, n, L, flops, 0);
    snprintf(line, sizeof line, "%s dgrad", name);
    report(b, line, dgrad, n, gelu_before ? 0 : L, flops, 0);
    snprintf(line, sizeof line, "%s dgrad, GELU", name);
    if (gelu_before) report(b, line, dgrad_gelu, n, L, flops, 0);
    snprintf(line, sizeof line, "%s wgrad", name);
    report(b, line, wgrad, n, column ? 0 : L, flops, 0);
    snprintf(line, sizeof line, "%s wgrad, bias", name);
    if (column) report(b, line, wgrad_and_bias, n, L, flops, 0);
}

static void report_layers(bench *b) {
    const sizes *s = &b->s;
    const double L = (double)s->L, narrow = (double)(s->R * s->C) * sizeof(real), wide = 4 * narrow,
                 causal = (double)(s->R * (s->T + 1) / 2 * s->C);
    const int64_t C3 = 3 * s->C, C4 = 4 * s->C;
    report_linear(b, "qkv", s->C, C3, false, false);
    report_linear(b, "attproj", s->C, s->C, false, false);
    report_linear(b, "fc", s->C, C4, true, false);
    report_linear(b, "fcproj", C4, s->C, false, true);
    fill_qkv(b);
    report(b, "attention forward", attention, NULL, L, 4 * causal, 0);
    report(b, "attention backward", attention_gradient, NULL, L, 10 * causal, 0);
    for (int together = 1; together <= 4; together *= 2) { // sequences, where attention is cuDNN's
        char name[40], number[8];
        snprintf(name, sizeof name, "attention backward by %d", together), snprintf(number, sizeof number, "%d", together);
        setenv("COMMFUSE_ATTENTION_TOGETHER", number, 1);
        report(b, name, attention_gradient, NULL, 0, 10 * causal, 0);
    }
    unsetenv("COMMFUSE_ATTENTION_TOGETHER");
    report(b, "bias gradient C", bias_grad, (int64_t[]){s->C}, 0, 0, narrow); // these where several ranks delay a weight's
    report(b, "bias gradient 3C", bias_grad, &C3, 0, 0, 3 * narrow);
    report(b, "bias gradient 4C", bias_grad, &C4, 0, 0, wide);
    report(b, "layernorm forward", norm, NULL, 2 * L + 1, 0, 2 * narrow);
    report(b, "layernorm backward", norm_gradient, NULL, 2 * L + 1, 0, 4 * narrow);
    report(b, "gelu forward", gelu, NULL, 0, 0, 2 * wide);
    report(b, "gelu backward", gelu_gradient, NULL, 0, 0, 3 * wide);
    report(b, "residual", residual_add, NULL, 0, 0, 3 * narrow);          // where several ranks sum a product
    report(b, "sum of four parts", sum_of_parts, NULL, 0, 0, 5 * narrow); // where four ranks reduce and scatter rows
    report(b, "copy of rows", row_copy, NULL, 2, 0, 2 * narrow);          // where several ranks gather rows, 2 L more
}

static void report_ends(bench *b) {
    const sizes *s = &b->s;
    const double R = (double)s->R, narrow = R * (double)s->C * sizeof(real), logits = R * (double)s->V,
                 positions = (double)(s->T * s->C), P = (double)s->P, of_all = P / (double)s->S,
                 state = (double)(s->S * (int64_t)sizeof(accum));
    report(b, "head forward", head_forward, NULL, 1, 2 * logits * (double)s->C, 0);
    report(b, "head dgrad", head_dgrad, NULL, 1, 2 * logits * (double)s->C, 0);
    report(b, "head wgrad", head_wgrad, NULL, 1, 2 * logits * (double)s->C, 0);
    report(b, "crossentropy fused", loss_fused, NULL, 1, 0, 2 * logits * sizeof(real));
    report(b, "crossentropy sum", loss_sum, NULL, 1, 0, 0);
    report(b, "crossentropy stats", loss_stats, NULL, 0, 0,
           logits * sizeof(real)); // where ranks share the vocabulary
    report(b, "crossentropy combine", loss_combine, NULL, 0, 0, 0);
    report(b, "crossentropy gradient", loss_gradient, NULL, 0, 0, 2 * logits * sizeof(real));
    report(b, "embedding forward", lookup, NULL, 1, 0, 2 * narrow);
    report(b, "embedding backward", lookup_gradient, NULL, 1, 0, narrow + 2 * R * (double)s->C * sizeof(accum));
    report(b, "embedding backward, uniform", lookup_gradient_uniform, NULL, 0, 0, narrow + 2 * R * (double)s->C * sizeof(accum));
    report(b, "position forward", position, NULL, 1, 0, 2 * narrow + positions * sizeof(real));
    report(b, "position backward", position_gradient, NULL, 1, 0, narrow + 2 * positions * sizeof(accum));
    bool rounded = sizeof(real) < sizeof(accum); // then w is written only
    double update_bytes = 7 * sizeof(accum) + (rounded ? sizeof(real) : 0);
    report(b, "adamw", update, NULL, of_all, 0, (double)s->S * update_bytes);
    report(b, "adamw, a layer's tensors", update_layer, NULL, 0, 0, (double)layer_elements(s) * update_bytes);
    report(b, "sum of squares", squares, NULL, of_all, 0, state);
    report(b, "zero gradients", zero_gradients, NULL, 0, 0, state); // a matrix's are written first
}

// --- GELU in the epilogue, or in a kernel of its own ---

static void report_fused(bench *b, const char *name, work *fused, work *apart, int64_t IC, int64_t OC) {
    const int64_t n[] = {IC, OC};
    double ms[2] = {0, 0}, spread = 0;
    for (int i = 0; i < 4; i++) { // in turns, for clocks drift
        timing t = time_of(b, i % 2 ? apart : fused, n);
        ms[i % 2] += t.ms / 2;
        if (t.spread > spread) spread = t.spread;
    }
    char shape[64];
    snprintf(shape, sizeof shape, "%s (%lld, %lld, %lld)", name, (long long)b->s.R, (long long)IC, (long long)OC);
    printf("%-40s %9.4f %9.4f %7.3f %6.0f%%\n", shape, ms[0], ms[1], ms[0] / ms[1], 100 * spread);
    fflush(stdout);
}

static void report_all_fused(bench *b) {
    const int64_t C = b->s.C;
    printf("\n%-40s %9s %9s %7s %7s\n", "GELU in the epilogue or apart (R, IC, OC)", "fused ms", "apart ms", "ratio", "spread");
    report_fused(b, "fc forward", forward_gelu, forward_then_gelu, C, 4 * C);
    report_fused(b, "fcproj dgrad", dgrad_gelu, dgrad_then_gelu, 4 * C, C);
}

// --- the first algorithm or the fastest ---

typedef struct choice {  // of a product, or of all of a step
    double first, taken; // ms
} choice;

static choice report_choice(bench *b, const char *name, work *run, int64_t IC, int64_t OC) {
    const int64_t n[] = {IC, OC};
    double ms[] = {0, 0}; // the first, the one that is taken
    int number = 0;
    for (int turn = 0; turn < 4; turn++) { // clocks drift
        linear_time_algorithms(turn % 2);
        ms[turn % 2] += time_of(b, run, n).ms / 2;
        number = linear_algorithm();
    }
    printf("%-28s %9.4f %9.4f %7.3f   number %d\n", name, ms[0], ms[1], ms[0] / ms[1], number + 1);
    fflush(stdout);
    return (choice){ms[0], ms[1]};
}

static void report_all_choices(bench *b) {
    const int64_t C = b->s.C, L = b->s.L, V = b->s.V;
    const struct {
        const char *name;
        work *run;
        int64_t calls, IC, OC;
    } products[] = {
        {"qkv forward", forward, L, C, 3 * C},
        {"qkv dgrad", dgrad, L, C, 3 * C},
        {"qkv wgrad", wgrad, L, C, 3 * C},
        {"attproj forward", forward, L, C, C},
        {"attproj dgrad", dgrad, L, C, C},
        {"attproj wgrad", wgrad, L, C, C},
        {"fc forward, GELU", forward_gelu, L, C, 4 * C},
        {"fc dgrad", dgrad, L, C, 4 * C},
        {"fc wgrad", wgrad, L, C, 4 * C},
        {"fcproj forward", forward, L, 4 * C, C},
        {"fcproj dgrad, GELU", dgrad_gelu, L, 4 * C, C},
        {"fcproj wgrad", wgrad, L, 4 * C, C},
        {"head forward", head_forward, 1, C, V},
        {"head dgrad", head_dgrad, 1, C, V},
        {"head wgrad", head_wgrad, 1, C, V},
    };
    choice step = {0, 0};
    printf("\n%-28s %9s %9s %7s   %s\n", "product", "first ms", "taken ms", "ratio", "which of the list");
    for (size_t i = 0; i < sizeof products / sizeof *products; i++) {
        choice c = report_choice(b, products[i].name, products[i].run, products[i].IC, products[i].OC);
        step.first += (double)products[i].calls * c.first, step.taken += (double)products[i].calls * c.taken;
    }
    printf("%-28s %9.3f %9.3f %7.3f\n", "all of a step", step.first, step.taken, step.first / step.taken);
}

// --- chunking loss ---

typedef struct operation {
    const char *name;
    work *run;  // numbers: N ranks, slices, T
    bool heads; // N must divide the heads
} operation;

static int64_t slice_rows(const bench *b, const int64_t *n) {
    return n[2] * b->s.B / n[1];
}

static void qkv_gather(bench *b, const int64_t *n) {
    int64_t rows = slice_rows(b, n), C = b->s.C, local = 3 * C / n[0];
    for (int64_t i = 0; i < n[1]; i++)
        linear_forward(b->wide + i * rows * local, NULL, residual(b, 0) + i * rows * C, b->weight, NULL, NULL, linear_all(rows), C,
                       local, b->stream);
}
static void fc_gather(bench *b, const int64_t *n) {
    int64_t rows = slice_rows(b, n), C = b->s.C, local = 4 * C / n[0];
    for (int64_t i = 0; i < n[1]; i++)
        linear_forward(b->wide2 + i * rows * local, b->wide + i * rows * local, residual(b, 0) + i * rows * C, b->weight, b->weight,
                       NULL, linear_all(rows), C, local, b->stream);
}
static void fcproj_scatter(bench *b, const int64_t *n) {
    int64_t rows = slice_rows(b, n), C = b->s.C, local = 4 * C / n[0];
    for (int64_t i = 0; i < n[1]; i++)
        linear_forward(sink(b, 0) + i * rows * C, NULL, b->wide2 + i * rows * local, b->weight, NULL, NULL, linear_all(rows), local,
                       C, b->stream);
}
static void fc_dgrad_scatter(bench *b, const int64_t *n) {
    int64_t rows = slice_rows(b, n), C = b->s.C, local = 4 * C / n[0];
    for (int64_t i = 0; i < n[1]; i++)
        linear_dgrad(sink(b, 0) + i * rows * C, b->wide + i * rows * local, b->weight, NULL, false, linear_all(rows), C, local,
                     b->stream);
}
static void fc_wgrad_gather(bench *b, const int64_t *n) {
    int64_t rows = slice_rows(b, n), C = b->s.C, local = 4 * C / n[0];
    for (int64_t i = 0; i < n[1]; i++)
        linear_wgrad(b->dweight, NULL, b->wide + i * rows * local, local, residual(b, 0) + i * rows * C, rows, C, local, i > 0,
                     b->stream);
}
static void fc_wgrad_scatter(bench *b,
                             const int64_t *n) { // data parallel: owner by owner, nothing is split by tp
    int64_t C = b->s.C, rows = 4 * C / n[1];
    for (int64_t i = 0; i < n[1]; i++)
        linear_wgrad(b->dweight + i * rows * C, NULL, b->wide + i * rows, 4 * C, residual(b, 0), n[2] * b->s.B, C, rows, false,
                     b->stream);
}
static void attention_scatter(bench *b, const int64_t *n) {
    const sizes *s = &b->s;
    int64_t T = n[2], times = T / n[1], H = s->H / n[0], local = H * s->D, rows = times * s->B;
    for (int64_t i = 0; i < n[1]; i++) {
        attention_forward(sink(b, 0), b->lse, b->wide, i * times, times, T, s->B, H, H, s->D, b->stream);
        linear_forward(sink(b, 1) + i * rows * s->C, NULL, sink(b, 0) + i * rows * local, b->weight, NULL, NULL, linear_all(rows),
                       local, s->C, b->stream);
    }
}
static void print_chunks(bench *b, const operation *o, int64_t N, int64_t T) {
    if (o->heads) { // and statistics of as many heads
        fill_qkv(b);
        attention_scatter(b, (int64_t[]){N, 1, T});
    }
    timing whole = time_of(b, o->run, (int64_t[]){N, 1, T}), slices = time_of(b, o->run, (int64_t[]){N, N, T});
    double loss = slices.ms / whole.ms - 1;
    printf("%-30s %3lld %9.4f %9.4f %7.1f%% %6.0f%%", o->name, (long long)N, whole.ms, slices.ms, 100 * loss,
           100 * (whole.spread > slices.spread ? whole.spread : slices.spread));
    if (T != b->s.T) printf("  T %lld", (long long)T);
    if (whole.host || slices.host) printf("  host-bound: %s", whole.host ? "both" : "slices");
    printf("\n");
    fflush(stdout);
}

static void report_chunks(bench *b, const operation *o, int64_t N) {
    const sizes *s = &b->s;
    if (o->heads && s->H % N != 0)
        printf("%-30s %3lld cannot be: %lld heads\n", o->name, (long long)N, (long long)s->H);
    else if (s->C % N != 0 || s->T < N)
        printf("%-30s %3lld cannot be: %lld channels, T %lld\n", o->name, (long long)N, (long long)s->C, (long long)s->T);
    else
        print_chunks(b, o, N, s->T - s->T % N);
}

static void report_all_chunks(bench *b) {
    static const operation operations[] = {
        {"AG ▸ qkv", qkv_gather, false},
        {"AG ▸ fc", fc_gather, false},
        {"gelu, fcproj ▸ RS", fcproj_scatter, false},
        {"attention, attproj ▸ RS", attention_scatter, true},
        {"fc dgrad ▸ RS", fc_dgrad_scatter, false},
        {"AG ▸ fc wgrad", fc_wgrad_gather, false},
        {"fc wgrad by owners ▸ RS (dp)", fc_wgrad_scatter, false},
    };
    static const int64_t ranks[] = {2, 4, 5, 8};
    printf("\n%-30s %3s %9s %9s %8s %7s\n", "operation of one of N ranks", "N", "whole ms", "slices ms", "loss", "spread");
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++)
        for (size_t j = 0; j < sizeof ranks / sizeof *ranks; j++)
            if (ranks[j] != 5 || (operations[i].heads && b->s.H % 5 == 0)) report_chunks(b, &operations[i], ranks[j]);
}

// --- the run ---

static sizes sizes_from(int count, char **words) {
    int64_t number[] = {12, 768, 12, 16, 1024, 50304, 12};
    for (int i = 1; i < count && i <= 7; i++) number[i - 1] = strtoll(words[i], NULL, 10);
    for (int i = 0; i < 7; i++)
        if (number[i] < 1 || number[i] > 1 << 24 || count > 8)
            cf_die("usage: bench_gpu [L C H B T V] [repetitions]", "bench_gpu: bad argument");
    sizes s = {number[0], number[1], number[2], number[3], number[4], number[5], number[6], 0, 0, 0, 0};
    if (s.C % s.H || s.repetitions < REPETITIONS_MIN || s.repetitions > REPETITIONS_MAX)
        cf_die("C must be a multiple of H, repetitions from 10 to 1000", "bench_gpu: C %lld, H %lld, repetitions %lld",
               (long long)s.C, (long long)s.H, (long long)s.repetitions);
    s.R = s.B * s.T, s.D = s.C / s.H;
    s.P = (s.V + s.T) * s.C + s.L * (12 * s.C * s.C + 13 * s.C) + 2 * s.C;
    s.S = s.P < STATE_MAX ? s.P : STATE_MAX;
    return s;
}

// --- square products ---

static double median_of_squares(bench *b, int64_t n) {
    static double ms[REPETITIONS_MAX];
    int taken = 0;
    for (int i = 0; i < WARM_UP; i++) sample(b, square, &n, 1);
    double begin = cf_now_ms();
    do ms[taken++] = sample(b, square, &n, 1);
    while (taken < REPETITIONS_MAX && (taken < REPETITIONS_MIN || cf_now_ms() - begin < SUSTAINED_MS));
    qsort(ms, (size_t)taken, sizeof *ms, ascending);
    return ms[taken / 2];
}

static void squares_only(bench *b, int count, char **words) {
    int64_t n[SQUARES_MAX] = {4096, 8192, 16384}, most = 0;
    int given = count < 3 ? 3 : count - 2;
    double best = 0;
    for (int i = 0; i < given && i < SQUARES_MAX; i++) {
        if (count > 2) n[i] = strtoll(words[i + 2], NULL, 10);
        most = largest(most, n[i]);
        if (n[i] < 1 || n[i] > 1 << 16 || given > SQUARES_MAX)
            cf_die("usage: bench_gpu gemm [N ...]: at most 8, of 1 to 65536", "bench_gpu: bad argument");
    }
    b->wide = filled(b, OF_REAL, most * most), b->weight = filled(b, OF_REAL, most * most);
    b->wide2 = filled(b, OF_REAL, most * most);
    for (int i = 0; i < given; i++) {
        double ms = median_of_squares(b, n[i]), flops = 2 * (double)n[i] * (double)n[i] * (double)n[i] / ms * 1e3;
        printf("product of %lld cubed: %.4f ms, %.1f TFLOP/s\n", (long long)n[i], ms, flops * 1e-12);
        if (flops > best) best = flops;
    }
    printf("best %.6g TFLOP/s\n", best * 1e-12);
}

static void all_tables(bench *b) {
    printf("%-28s %9s %7s %7s %9s %8s %7s %8s %7s\n", "kernel", "ms", "spread", "calls", "ms a step", "TFLOP/s", "peak", "GB/s",
           "copy");
    report_layers(b);
    report_ends(b);
    report_all_fused(b);
    report_all_choices(b);
    report_all_chunks(b);
}

int main(int count, char **words) {
    static bench b;
    const char *source = "";
    setvbuf(stdout, NULL, _IOLBF, 0); // whoever ends it finds the lines printed so far
    bool gemm = count > 1 && strcmp(words[1], "gemm") == 0;
    if (!gemm) b.s = sizes_from(count, words);
    cf_device_open(0);
    b.stream = cf_stream_create();
    if (gemm) {
        squares_only(&b, count, words);
        cf_stream_free(b.stream);
        return 0;
    }
    b.peak = peak_flops(false, &source, 1, NULL, b.stream);
    make_buffers(&b);
    b.copy_gbs = 2 * (double)(b.s.S * (int64_t)sizeof(accum)) / time_of(&b, large_copy, NULL).ms * 1e-6;
    printf("%s, %s: L %lld, C %lld, H %lld, B %lld, T %lld, V %lld; peak %.1f TFLOP/s (%s), copy %.0f GB/s\n", cf_device_name(),
           cf_dtype_name(REAL_DTYPE), (long long)b.s.L, (long long)b.s.C, (long long)b.s.H, (long long)b.s.B, (long long)b.s.T,
           (long long)b.s.V, b.peak * 1e-12, source, b.copy_gbs);
    all_tables(&b);
    cf_stream_free(b.stream);
    return 0;
}
