// The layers' third twin: every kernel notes how much it computes and how many bytes it moves (commfuse/record.h). Where a size
// depends on the device, it is that of the CPU's or of the GPU's twin.
#pragma GCC diagnostic ignored "-Wunused-parameter" // nothing is read or written
#include "../commfuse/record.h"
#include "adamw.h"
#include "attention.h"
#include "crossentropy.h"
#include "elementwise.h"
#include "embedding.h"
#include "layernorm.h"
#include "linear.h"
#include "peak.h"

enum { E = sizeof(real), P = sizeof(precise) };
// linear.cu, layernorm.cu, layernorm.c, attention.cu
enum { TILE_ROWS = 128, TILE_COLUMNS = 256, TILES_MIN = 66, DEPTH_MIN = 1024, WGRAD_ROWS = 64, PARTIALS = 512, BLOCKS = 32 };
enum { CHANNELS_MAX = 128 };

static bool gpu(void) {
    return cf_record_hardware()->gpu;
}

// --- products ---

// `times` products of (m, k) by (k, n); bytes: of an element that is written; more: others that are read or written beside.
static void product(const char *name, int64_t times, int64_t m, int64_t n, int64_t k, int64_t bytes, double more) {
    double flops = 2.0 * (double)(times * m) * (double)(n * k);
    cf_record_kernel(CF_WORK_PRODUCT, name, flops, cf_curve_at(&cf_record_hardware()->product, flops),
                     (double)(E * (times * m + n) * k + bytes * times * m * n) + more);
}

int64_t linear_prepared_size(int64_t IC, int64_t OC) {
    return gpu() ? 0 : IC * OC + (E == 2 ? 0 : 16) * larger(IC, OC);
}

static const real *prepare(const real *w, int64_t IC, int64_t OC) {
    if (!gpu()) cf_record_kernel(CF_WORK_MEMORY, "weights, prepared", 0, 0, 2.0 * E * (double)(IC * OC));
    return w;
}

const real *linear_prepare_forward(real *prepared, const real *w, int64_t IC, int64_t OC, cf_stream *stream) {
    return prepare(w, IC, OC);
}

const real *linear_prepare_dgrad(real *prepared, const real *w, int64_t IC, int64_t OC, cf_stream *stream) {
    return prepare(w, IC, OC);
}

void linear_forward(real *out, const real *x, const real *w, const real *bias, int64_t R, int64_t IC, int64_t OC,
                    cf_stream *stream) {
    product("forward", 1, R, OC, IC, E, 0);
}

void linear_forward_add(real *out, const real *x, const real *w, int64_t R, int64_t IC, int64_t OC, cf_stream *stream) {
    product("forward, added", 1, R, OC, IC, 2 * E, 0);
}

void linear_forward_gelu(real *out, real *pre, const real *x, const real *w, const real *bias, int64_t R, int64_t IC, int64_t OC,
                         cf_stream *stream) {
    product("forward, GELU", 1, R, OC, IC, 2 * E, 0);
}

void linear_dgrad(real *dx, const real *dy, const real *w, int64_t R, int64_t IC, int64_t OC, cf_stream *stream) {
    product("dgrad", 1, R, IC, OC, E, 0);
}

void linear_dgrad_add(real *dx, const real *dy, const real *w, int64_t R, int64_t IC, int64_t OC, cf_stream *stream) {
    product("dgrad, added", 1, R, IC, OC, 2 * E, 0);
}

void linear_dgrad_gelu(real *dpre, const real *dy, const real *w, const real *pre, int64_t R, int64_t IC, int64_t OC,
                       cf_stream *stream) {
    product("dgrad, GELU", 1, R, IC, OC, 2 * E, 0);
}

void linear_forward_blocks(real *out, const real *x, const real *w, const real *bias, linear_rows r, int64_t IC, int64_t OC,
                           cf_stream *stream) {
    product("forward", r.blocks, r.rows, OC, IC, E, 0);
}

void linear_forward_gelu_blocks(real *out, real *pre, const real *x, const real *w, const real *bias, linear_rows r, int64_t IC,
                                int64_t OC, cf_stream *stream) {
    product("forward, GELU", r.blocks, r.rows, OC, IC, 2 * E, 0);
}

void linear_dgrad_blocks(real *dx, const real *dy, const real *w, linear_rows r, int64_t IC, int64_t OC, cf_stream *stream) {
    product("dgrad", r.blocks, r.rows, IC, OC, E, 0);
}

void linear_dgrad_gelu_blocks(real *dpre, const real *dy, const real *w, const real *pre, linear_rows r, int64_t IC, int64_t OC,
                              cf_stream *stream) {
    product("dgrad, GELU", r.blocks, r.rows, IC, OC, 2 * E, 0);
}

void linear_wgrad(precise *dw, const real *dy, const real *x, int64_t R, int64_t IC, int64_t OC, bool add, cf_stream *stream) {
    product("wgrad", 1, OC, IC, R, (add ? 2 : 1) * P, 0);
}

void linear_wgrad_rows(precise *dw, const real *dy, int64_t dy_row, const real *x, int64_t R, int64_t IC, int64_t rows, bool add,
                       cf_stream *stream) {
    product("wgrad", 1, rows, IC, R, (add ? 2 : 1) * P, 0);
}

int64_t linear_wgrad_rows_min(int64_t IC) {
    int64_t across = ceil_div(IC, TILE_COLUMNS);
    return gpu() ? ceil_div(TILES_MIN, across) * TILE_ROWS : WGRAD_ROWS;
}

int64_t linear_wgrad_depth_min(void) {
    return gpu() ? DEPTH_MIN : 0;
}

void linear_bias_grad(precise *db, const real *dy, int64_t R, int64_t OC, cf_stream *stream) {
    cf_record_kernel(CF_WORK_MEMORY, "bias gradient", 0, 0, (double)(E * R * OC));
}

void linear_choose(int n) {}

int linear_choices(void) {
    return 1;
}

// --- attention ---

int64_t attention_channels_max(void) {
    return CHANNELS_MAX;
}

// Scores that queries t0 … t0 + n − 1 have with the keys before them: `each` flops for each and channel.
static void attention(const char *name, const cf_curve *rate, double each, int64_t t0, int64_t n, int64_t B, int64_t H, int64_t D,
                      double tensors) {
    double scores = (double)n * ((double)t0 + 0.5 * (double)n) * (double)(B * H), flops = each * scores * (double)D;
    cf_record_kernel(CF_WORK_ATTENTION, name, flops, cf_curve_at(rate, flops), tensors * E * (double)((t0 + n) * B * H * D));
}

void attention_forward(real *out, precise *lse, const real *qkv, int64_t t0, int64_t n, int64_t T, int64_t B, int64_t H, int64_t D,
                       cf_stream *stream) {
    attention("attention", &cf_record_hardware()->attention_forward, 4, t0, n, B, H, D, 4);
}

int64_t attention_scratch(int64_t T, int64_t B, int64_t H, int64_t D) {
    return gpu() ? 2 * T * B * H + (T * B * 3 * H * D + 1) / 2 : T * B * H * (1 + D);
}

void attention_backward(real *dqkv, const real *dout, const real *out, const precise *lse, const real *qkv, precise *scratch,
                        int64_t t0, int64_t n, int64_t T, int64_t B, int64_t H, int64_t D, bool first, cf_stream *stream) {
    attention("attention backward", &cf_record_hardware()->attention_backward, 10, t0, n, B, H, D, 8);
}

// --- what memory limits ---

static void moves(const char *name, int64_t elements, int64_t bytes) {
    cf_record_kernel(CF_WORK_MEMORY, name, 0, 0, (double)elements * (double)bytes);
}

void layernorm_forward(real *out, precise *mean, precise *rstd, const real *x, const real *w, const real *b, int64_t R, int64_t C,
                       cf_stream *stream) {
    moves("layer norm", R * C, 2 * E);
}

int64_t layernorm_scratch(int64_t C) {
    return (gpu() ? PARTIALS : BLOCKS) * 2 * C;
}

void layernorm_backward(real *dx, precise *dw, precise *db, const real *dy, const real *x, const real *w, const precise *mean,
                        const precise *rstd, precise *scratch, int64_t R, int64_t C, cf_stream *stream) {
    moves("layer norm backward", R * C, 4 * E);
}

void gelu_forward(real *out, const real *x, int64_t count, cf_stream *stream) {
    moves("GELU", count, 2 * E);
}

void gelu_backward(real *dx, const real *dy, const real *x, int64_t count, cf_stream *stream) {
    moves("GELU backward", count, 3 * E);
}

void residual_forward(real *out, const real *x, const real *y, const real *bias, int64_t R, int64_t C, cf_stream *stream) {
    moves("residual", R * C, 3 * E);
}

void embedding_forward(real *out, const int32_t *tokens, const real *wte, int64_t first, int64_t count, int64_t R, int64_t C,
                       cf_stream *stream) {
    moves("lookup", R * C, 2 * E);
}

void embedding_backward(precise *dwte, const real *dout, const int32_t *tokens, int64_t first, int64_t count, int64_t R, int64_t C,
                        cf_stream *stream) {
    moves("lookup backward", R * C, E + 2 * P);
}

void embedding_add(precise *dwte, const precise *dout, const int32_t *tokens, int64_t first, int64_t count, int64_t R, int64_t C,
                   cf_stream *stream) {
    moves("lookup, added", R * C, 3 * P);
}

void position_forward(real *x, const real *wpe, int64_t t0, int64_t T, int64_t B, int64_t C, cf_stream *stream) {
    moves("positions", T * B * C, 2 * E);
}

void position_backward(precise *dwpe, const real *dx, int64_t t0, int64_t T, int64_t B, int64_t C, cf_stream *stream) {
    moves("positions backward", T * B * C, E);
}

void crossentropy_stats(precise *stats, const real *logits, const int32_t *targets, int64_t first, int64_t valid, int64_t R,
                        int64_t V, cf_stream *stream) {
    moves("cross-entropy", R * V, E);
}

void crossentropy_combine(precise *losses, precise *total, const precise *all, int64_t ranks, int64_t R, cf_stream *stream) {
    moves("cross-entropy", ranks * R * 3, P);
}

void crossentropy_backward(real *logits, const precise *total, const int32_t *targets, double scale, int64_t first, int64_t valid,
                           int64_t R, int64_t V, cf_stream *stream) {
    moves("cross-entropy backward", R * V, 2 * E);
}

void crossentropy_fused(precise *losses, real *logits, const int32_t *targets, double scale, int64_t valid, int64_t R, int64_t V,
                        cf_stream *stream) {
    moves("cross-entropy", R * V, 2 * E);
}

void crossentropy_sum(double *sum, const precise *losses, int64_t n, cf_stream *stream) {
    moves("cross-entropy", n, P);
}

void adamw_update(real *w, precise *master, precise *m, precise *v, const precise *g, int64_t n, adamw a, cf_stream *stream) {
    moves("AdamW", n, E + 5 * P + (master ? 2 * P : E));
}

void adamw_master(precise *master, const real *w, int64_t n, cf_stream *stream) {
    moves("AdamW", n, E + P);
}

void sum_of_squares(double *sum, double *scratch, const precise *x, int64_t n, cf_stream *stream) {
    moves("norm", n, P);
}

int64_t first_nonfinite(const precise *x, int64_t n, cf_stream *stream) {
    return n < 0 ? 0 : -1;
}

double peak_flops(const char **source, double cores, double (*sum)(void *argument, double mine), void *argument,
                  cf_stream *stream) {
    *source = "the machine's description";
    return cf_record_hardware()->peak;
}
