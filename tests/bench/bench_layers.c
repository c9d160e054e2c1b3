// Every CPU kernel at the sizes of one layer: time, rate, and share of the GEMM peak of the same run. In fp32, and in bf16 as
// build/release/bf16/tests/bench/bench_layers.
//
//     bench_layers [C H B T V] [repetitions]        default 768 12 4 1024 50304 15: d12, four sequences
//
// Time is the processor time of all threads divided by their number: on a quiet machine that of the clock, and where other
// programs use the cores still that of the work, if waiting threads do not spin (OMP_WAIT_POLICY=passive). It is the median; spread
// is the distance from the fastest to the slowest repetition in percent of it.
// GFLOP/s of attention counts causal work alone: half of T × T. GB/s counts each tensor once per pass over
// memory that the algorithm needs; `add` is the plain y += x to compare with. A row with both counts is
// bound by arithmetic. Threads: OMP_NUM_THREADS.
//
// Behind them what cutting a product costs by itself: the same rows in so many pieces, in turns, as multiples of the time
// of one piece. A slice of commfuse with N ranks and m slices has B·T / (N·m) rows.
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "layers/optimizer/update.h"
#include "layers/kernels/attention.h"
#include "layers/kernels/crossentropy.h"
#include "layers/kernels/elementwise.h"
#include "layers/kernels/embedding.h"
#include "layers/kernels/gemm.h"
#include "layers/kernels/layernorm.h"
#include "layers/kernels/linear.h"
#include "layers/random.h"
#include "commfuse/base/die.h"

enum { REPETITIONS_MAX = 1000, WARM_UP = 2, PIECE_ROWS_MIN = 64, CUTS_MAX = 8 };

typedef struct sizes {
    int64_t C, H, B, T, V, repetitions;
    int64_t R, D; // rows B·T, channels per head
} sizes;

// Everything the kernels work on; wide buffers serve the MLP, narrow ones the residual stream.
typedef struct bench {
    sizes s;
    double peak; // GFLOP/s
    real *wide, *wide2, *sharp, *narrow, *narrow2, *narrow3, *weight, *prepared, *prepared_head, *bias, *logits, *table;
    accum *dweight, *row_stats, *scratch, *dtable, *lse, *moments, *master;
    int32_t *tokens;
} bench;

static real *random_buffer(int64_t n, double deviation) {
    real *x = cf_alloc(n * (int64_t)sizeof(real), "bench");
#pragma omp parallel for
    for (int64_t i = 0; i < n; i++) x[i] = real_of(deviation * random_normal(1, (uint64_t)n, (uint64_t)i));
    return x;
}

static real *normal_buffer(int64_t n) {
    return random_buffer(n, 0.1);
}

static accum *precise_buffer(int64_t n) {
    return cf_alloc(n * (int64_t)sizeof(accum), "bench");
}

static int64_t max(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static void bench_buffers(bench *b) {
    const sizes *s = &b->s;
    b->wide = normal_buffer(s->R * 4 * s->C);
    b->wide2 = normal_buffer(s->R * 4 * s->C);
    b->sharp = random_buffer(s->R * 3 * s->C, 5);
    b->narrow = normal_buffer(s->R * s->C);
    b->narrow2 = normal_buffer(s->R * s->C);
    b->narrow3 = normal_buffer(s->R * s->C);
    b->weight = normal_buffer(4 * s->C * s->C);
    b->prepared = normal_buffer(linear_prepared_size(s->C, 4 * s->C));
    b->dweight = precise_buffer(4 * s->C * s->C);
    b->bias = normal_buffer(4 * s->C);
    b->row_stats = precise_buffer(s->R * 8);
    b->scratch = precise_buffer(max(layernorm_scratch(s->C), attention_scratch(s->T, s->B, s->H, s->H, s->D)));
    b->logits = normal_buffer(s->R * s->V);
    b->table = normal_buffer(s->V * s->C);
    b->dtable = precise_buffer(s->V * s->C);
    b->prepared_head = normal_buffer(linear_prepared_size(s->C, s->V));
    b->moments = precise_buffer(s->V * s->C * 2);
    b->master = precise_buffer(s->V * s->C);
    b->lse = precise_buffer(s->R * s->H);
    b->tokens = cf_alloc(s->R * 4, "bench");
    for (int64_t r = 0; r < s->R; r++) b->tokens[r] = (int32_t)((double)s->V * random_uniform(2, 0, (uint64_t)r));
}

static void run_add(bench *b) {
    cf_add(b->wide, b->wide2, 1, 0, b->s.R * 4 * b->s.C, REAL_DTYPE, NULL);
}

// The products in pieces of so many rows (the last may have fewer), as a fused operation calls them.
static int64_t piece_rows(const bench *b, int64_t first, int64_t rows) {
    return b->s.R - first < rows ? b->s.R - first : rows;
}
static void cut_fc_forward(bench *b, int64_t rows) {
    int64_t C = b->s.C, OC = 4 * C;
    const real *w = linear_prepare_forward(b->prepared, b->weight, C, OC, NULL);
    for (int64_t r = 0; r < b->s.R; r += rows)
        linear_forward(b->wide + r * OC, NULL, b->narrow + r * C, w, b->bias, NULL, linear_all(piece_rows(b, r, rows)), C, OC,
                       NULL);
}
static void cut_fc_dgrad(bench *b, int64_t rows) {
    int64_t C = b->s.C, OC = 4 * C;
    const real *w = linear_prepare_dgrad(b->prepared, b->weight, C, OC, NULL);
    for (int64_t r = 0; r < b->s.R; r += rows)
        linear_dgrad(b->narrow + r * C, b->wide + r * OC, w, NULL, false, linear_all(piece_rows(b, r, rows)), C, OC, NULL);
}
static void cut_fc_wgrad(bench *b, int64_t rows) {
    int64_t C = b->s.C, OC = 4 * C;
    for (int64_t r = 0; r < b->s.R; r += rows)
        linear_wgrad(b->dweight, NULL, b->wide + r * OC, OC, b->narrow + r * C, piece_rows(b, r, rows), C, OC, true, NULL);
}
static void run_fc_forward(bench *b) {
    cut_fc_forward(b, b->s.R);
}
static void run_fc_dgrad(bench *b) {
    cut_fc_dgrad(b, b->s.R);
}
static void run_fc_wgrad(bench *b) {
    cut_fc_wgrad(b, b->s.R);
}
static void run_bias_grad(bench *b) {
    linear_bias_grad(b->dweight, b->wide, b->s.R, 4 * b->s.C, NULL);
}

static void run_layernorm_forward(bench *b) {
    layernorm_forward(b->narrow2, b->row_stats, b->row_stats + b->s.R, b->narrow, b->bias, b->bias + b->s.C, 1e-5, b->s.R, b->s.C,
                      NULL);
}
static void run_layernorm_backward(bench *b) {
    layernorm_backward(b->narrow3, b->dweight, b->dweight + b->s.C, NULL, whole_sum(b->narrow2), b->narrow, b->bias, b->row_stats,
                       b->row_stats + b->s.R, b->scratch, b->s.R, b->s.C, NULL);
}

static void run_activation_forward(bench *b) {
    activation_forward(b->wide2, b->wide, b->s.R * 4 * b->s.C, NULL);
}
static void run_gelu_backward(bench *b) {
    activation_backward(b->wide2, b->wide2, b->wide, b->s.R * 4 * b->s.C, NULL);
}
static void run_residual(bench *b) {
    residual_forward(b->narrow3, b->narrow, whole_sum(b->narrow2), b->bias, b->s.R, b->s.C, NULL);
}

static void run_embedding_forward(bench *b) {
    embedding_forward(b->narrow, b->tokens, b->table, 0, b->s.V, b->s.R, b->s.C, NULL);
}
static void run_embedding_backward(bench *b) {
    embedding_backward(b->dtable, b->narrow, false, b->tokens, 0, b->s.V, b->s.R, b->s.C, NULL);
}
static void run_position_forward(bench *b) {
    position_forward(b->narrow, b->wide2, 0, b->s.T, b->s.B, b->s.C, NULL);
}
static void run_position_backward(bench *b) {
    position_backward(b->dweight, b->narrow, 0, b->s.T, b->s.B, b->s.C, NULL);
}

static void run_attention_forward(bench *b) { // qkv: three quarters of wide
    attention_forward(b->narrow, b->lse, b->wide, 0, b->s.T, b->s.T, b->s.B, b->s.H, b->s.H, b->s.D, NULL);
}
static void run_attention_backward(bench *b) {
    attention_backward(b->wide2, b->narrow2, b->narrow, b->lse, b->wide, b->scratch, 0, b->s.T, b->s.T, b->s.B, b->s.H, b->s.H,
                       b->s.D, true, NULL);
}
// Of scores so far apart that a fifth of the probabilities would be subnormal.
static void run_sharp_forward(bench *b) {
    attention_forward(b->narrow, b->lse, b->sharp, 0, b->s.T, b->s.T, b->s.B, b->s.H, b->s.H, b->s.D, NULL);
}
static void run_sharp_backward(bench *b) {
    attention_backward(b->wide2, b->narrow2, b->narrow, b->lse, b->sharp, b->scratch, 0, b->s.T, b->s.T, b->s.B, b->s.H, b->s.H,
                       b->s.D, true, NULL);
}

// The head's three products, and two of a block's.
static void run_head_forward(bench *b) {
    const real *w = linear_prepare_forward(b->prepared_head, b->table, b->s.C, b->s.V, NULL);
    linear_forward(b->logits, NULL, b->narrow, w, NULL, NULL, linear_all(b->s.R), b->s.C, b->s.V, NULL);
}
static void run_head_dgrad(bench *b) {
    const real *w = linear_prepare_dgrad(b->prepared_head, b->table, b->s.C, b->s.V, NULL);
    linear_dgrad(b->narrow2, b->logits, w, NULL, false, linear_all(b->s.R), b->s.C, b->s.V, NULL);
}
static void run_head_wgrad(bench *b) {
    linear_wgrad(b->dtable, NULL, b->logits, b->s.V, b->narrow, b->s.R, b->s.C, b->s.V, false, NULL);
}
static void run_projection_forward(bench *b) {
    const real *w = linear_prepare_forward(b->prepared, b->weight, b->s.C, b->s.C, NULL);
    linear_forward(b->narrow2, NULL, b->narrow, w, NULL, NULL, linear_all(b->s.R), b->s.C, b->s.C, NULL);
}
static void run_fcproj_wgrad(bench *b) {
    linear_wgrad(b->dweight, NULL, b->narrow, b->s.C, b->wide, b->s.R, 4 * b->s.C, b->s.C, false, NULL);
}

static void run_crossentropy_stats(bench *b) {
    crossentropy_stats(b->row_stats, b->logits, b->tokens, 0, b->s.V - b->s.V / 1000, b->s.R, b->s.V, NULL);
}
static void run_crossentropy_combine(bench *b) {
    crossentropy_combine(b->row_stats + 3 * b->s.R, b->logits, b->row_stats, 1, b->tokens, 1, 0, 0, b->s.V - b->s.V / 1000, b->s.R,
                         b->s.V, NULL); // repeated on its own result: the values do not matter
}

static void run_adamw(bench *b) {
    optimizer_settings s = {.lr = 1e-4, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .scale = 1, .step = 1};
    optimizer_update(optimizer_find("adamw"), b->table, sizeof(real) < sizeof(accum) ? b->master : NULL,
                     (accum *[]){b->moments, b->moments + b->s.V * b->s.C}, b->dtable, b->s.V * b->s.C, s, NULL);
}
static volatile double keep; // results nobody reads must still be computed
static void run_sum_of_squares(bench *b) {
    double scratch[SQUARES_SCRATCH], sum = 0;
    sum_of_squares(&sum, scratch, b->dtable, b->s.V * b->s.C, NULL);
    keep = sum;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_of(double *ms, int64_t count) {
    qsort(ms, (size_t)count, sizeof *ms, by_size);
    return ms[count / 2];
}

static double threads_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return ((double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6) / (double)gemm_threads();
}

typedef struct timing {
    double median, fastest, slowest; // ms
} timing;

static timing time_of(void (*run)(bench *), bench *b) {
    static double ms[REPETITIONS_MAX];
    for (int64_t i = 0; i < WARM_UP; i++) run(b);
    for (int64_t i = 0; i < b->s.repetitions; i++) {
        double start = threads_ms();
        run(b);
        ms[i] = threads_ms() - start;
    }
    double median = median_of(ms, b->s.repetitions);
    return (timing){median, ms[0], ms[b->s.repetitions - 1]};
}

// The fastest of some large products, with prepared weights: what "100 %" means below.
static double gemm_peak(bench *b) {
    const int64_t shapes[][3] = {{2048, 2048, 2048}, {4096, 3072, 768}, {1024, 1024, 1024}, {4096, 768, 3072}};
    double peak = 0;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        int64_t m = shapes[i][0], n = shapes[i][1], k = shapes[i][2];
        real *x = normal_buffer(m * k), *y = normal_buffer(k * n), *z = normal_buffer(m * n);
        real *ready = normal_buffer(linear_prepared_size(k, n));
        const real *w = linear_prepare_forward(ready, y, k, n, NULL);
        for (int64_t j = 0; j < b->s.repetitions; j++) {
            double start = threads_ms();
            linear_forward(z, NULL, x, w, NULL, NULL, linear_all(m), k, n, NULL);
            peak = fmax(peak, 2e-6 * (double)(m * n * k) / (threads_ms() - start));
        }
        cf_free(x);
        cf_free(y);
        cf_free(z);
        cf_free(ready);
    }
    return peak;
}

// flops and bytes moved; 0: not the bound, left out
static void report(bench *b, const char *name, void (*run)(bench *), double flops, double bytes) {
    timing t = time_of(run, b);
    printf("%-24s %9.3f %7.0f%%", name, t.median, 100 * (t.slowest - t.fastest) / t.median);
    if (flops > 0)
        printf(" %9.1f %6.1f%%", flops / t.median * 1e-6, 100 * flops / t.median * 1e-6 / b->peak);
    else
        printf(" %9s %7s", "", "");
    if (bytes > 0) printf(" %8.1f", bytes / t.median * 1e-6);
    printf("\n");
    fflush(stdout);
}

static void report_all(bench *b) {
    const double R = (double)b->s.R, C = (double)b->s.C, V = (double)b->s.V, T = (double)b->s.T;
    const double linear = 8 * R * C * C, causal = R * (T + 1) / 2 * C, n = V * C;
    const double E = sizeof(real), P = sizeof(accum), head = 2 * R * C * V;
    printf("%-24s %9s %8s %9s %7s %8s\n", "kernel", "ms", "spread", "GFLOP/s", "peak", "GB/s");
    report(b, "add", run_add, 0, 3 * E * R * 4 * C);
    report(b, "linear forward C→4C", run_fc_forward, linear, 0);
    report(b, "linear dgrad 4C→C", run_fc_dgrad, linear, 0);
    report(b, "linear wgrad C→4C", run_fc_wgrad, linear, 0);
    report(b, "linear wgrad 4C→C", run_fcproj_wgrad, linear, 0);
    report(b, "projection forward C→C", run_projection_forward, 2 * R * C * C, 0);
    report(b, "head forward", run_head_forward, head, 0);
    report(b, "head dgrad", run_head_dgrad, head, 0);
    report(b, "head wgrad", run_head_wgrad, head, 0);
    report(b, "bias gradient 4C", run_bias_grad, 0, E * R * 4 * C);
    report(b, "layernorm forward", run_layernorm_forward, 0, 2 * E * R * C);
    report(b, "layernorm backward", run_layernorm_backward, 0, 4 * E * R * C);
    report(b, "gelu forward 4C", run_activation_forward, 0, 2 * E * R * 4 * C);
    report(b, "gelu backward 4C", run_gelu_backward, 0, 3 * E * R * 4 * C);
    report(b, "residual", run_residual, 0, 3 * E * R * C);
    report(b, "embedding forward", run_embedding_forward, 0, 2 * E * R * C);
    report(b, "embedding backward", run_embedding_backward, 0, (E + 2 * P) * R * C);
    report(b, "position forward", run_position_forward, 0, E * (2 * R * C + T * C));
    report(b, "position backward", run_position_backward, 0, E * R * C + 2 * P * T * C);
    report(b, "attention forward", run_attention_forward, 4 * causal, 0);
    report(b, "attention backward", run_attention_backward, 10 * causal, 0);
    report(b, "attention forward, sharp", run_sharp_forward, 4 * causal, 0);
    report(b, "attention back, sharp", run_sharp_backward, 10 * causal, 0);
    report(b, "crossentropy stats", run_crossentropy_stats, 0, E * R * V);
    report(b, "crossentropy combine", run_crossentropy_combine, 0, 2 * E * R * V);
    report(b, "adamw", run_adamw, 0, (E < P ? E + 7 * P : 7 * P) * n);
    report(b, "sum of squares", run_sum_of_squares, 0, P * n);
}

static void report_cuts(bench *b, const char *name, void (*run)(bench *, int64_t), int cuts) {
    static double ms[CUTS_MAX][REPETITIONS_MAX];
    for (int64_t i = -WARM_UP; i < b->s.repetitions; i++)
        for (int c = 0; c < cuts; c++) {
            double start = threads_ms();
            run(b, (b->s.R + (1 << c) - 1) >> c);
            if (i >= 0) ms[c][i] = threads_ms() - start;
        }
    printf("%-24s", name);
    double whole = 0;
    for (int c = 0; c < cuts; c++) {
        double median = median_of(ms[c], b->s.repetitions);
        if (c == 0) whole = median;
        printf(" %7.3f", median / whole);
    }
    printf("\n");
    fflush(stdout);
}

static void report_all_cuts(bench *b) {
    int cuts = 1;
    printf("\n%-24s %7lld", "rows at a time", (long long)b->s.R);
    for (; cuts < CUTS_MAX && b->s.R >> cuts >= PIECE_ROWS_MIN; cuts++)
        printf(" %7lld", (long long)((b->s.R + (1 << cuts) - 1) >> cuts));
    printf("\n");
    report_cuts(b, "linear forward C→4C", cut_fc_forward, cuts);
    report_cuts(b, "linear dgrad 4C→C", cut_fc_dgrad, cuts);
    report_cuts(b, "linear wgrad", cut_fc_wgrad, cuts);
}

static sizes sizes_from(int count, char **words) {
    int64_t number[] = {768, 12, 4, 1024, 50304, 15};
    for (int i = 1; i < count && i <= 6; i++) number[i - 1] = strtoll(words[i], NULL, 10);
    for (int i = 0; i < 6; i++)
        if (number[i] < 1 || number[i] > 1 << 24 || count > 7)
            cf_die("usage: bench_layers [C H B T V] [repetitions]", "bench_layers: bad argument");
    sizes s = {number[0], number[1], number[2], number[3], number[4], number[5], 0, 0};
    s.R = s.B * s.T;
    s.D = s.C / s.H;
    if (s.C % s.H || s.repetitions < 10 || s.repetitions > REPETITIONS_MAX)
        cf_die("C must be a multiple of H, repetitions from 10 to 1000", "bench_layers: C %lld, H %lld, repetitions %lld",
               (long long)s.C, (long long)s.H, (long long)s.repetitions);
    return s;
}

int main(int count, char **words) {
    bench b = {.s = sizes_from(count, words)};
    cf_device_threads((int)gemm_threads());
    bench_buffers(&b);
    b.peak = gemm_peak(&b);
    printf("%s, C %lld, H %lld, B %lld, T %lld, V %lld, %lld repetitions; GEMM peak %.1f GFLOP/s\n",
           sizeof(real) == 2 ? "bf16" : "fp32", (long long)b.s.C, (long long)b.s.H, (long long)b.s.B, (long long)b.s.T,
           (long long)b.s.V, (long long)b.s.repetitions, b.peak);
    report_all(&b);
    report_all_cuts(&b);
    return 0;
}
