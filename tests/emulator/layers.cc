// Functions that the linker puts before functions of the layers.
//
// cuDNN's attention: with the clock, it takes its time. Otherwise layers/kernels/attention_cudnn.cu is called, which was compiled without
// cuDNN and returns "not supported".
//
// Gradients owner by owner and slice by slice: models that can be computed here are too small for them by a GPU's thresholds, so
// without the clock the thresholds are a CPU's. EMULATOR_ROWS_MIN and EMULATOR_DEPTH_MIN set others.
//
// Kernels limited by memory: with the clock, they take the time of their bytes, which blocks and threads do not show.
//
// Initial weights: with the clock, zeros, because nobody looks at numbers then, and models are large.
#include "emulator.h"
#include "../../commfuse/gpu/transport_cuda.h"
#include "../../layers/optimizer/muon.h"
#include "../../layers/optimizer/update.h"
#include "../../layers/kernels/attention_cudnn.h"
#include "../../layers/kernels/crossentropy.h"
#include "../../layers/kernels/elementwise.h"
#include "../../layers/kernels/embedding.h"
#include "../../layers/kernels/layernorm.h"
#include "../../layers/kernels/linear.h"
extern "C" {
#include "../../layers/random.h"
}

using namespace emulator;

// Of rows [t0, t0 + n), each with all keys up to its own: a product with the keys, and one with the values.
static double flops(int64_t t0, int64_t n, int64_t B, int64_t H, int64_t D) {
    double pairs = (double)n * (double)(t0 + t0 + n + 1) / 2;
    return 4.0 * pairs * (double)(B * H * D);
}

static bool takes_time(double flops, double heads, int64_t rows, bool backward, cf_stream *stream) {
#ifdef REAL_IS_BF16
    if (!imagined()) return false;
    start_clock();
    enqueue(cf_cuda_stream(stream), "attention", note_attention(flops, heads, (double)rows, backward), {});
    return true;
#else
    (void)flops, (void)heads, (void)rows, (void)backward, (void)stream;
    return false;
#endif
}

extern "C" {
decltype(attention_cudnn_forward) __real_attention_cudnn_forward, __wrap_attention_cudnn_forward;
decltype(attention_cudnn_backward) __real_attention_cudnn_backward, __wrap_attention_cudnn_backward;

bool __wrap_attention_cudnn_forward(real *out, accum *lse, const real *qkv, int64_t t0, int64_t n, int64_t T, int64_t B, int64_t H,
                                    int64_t KV, int64_t D, cf_stream *stream) {
    return takes_time(flops(t0, n, B, H, D), (double)(B * H), n, false, stream) ||
           __real_attention_cudnn_forward(out, lse, qkv, t0, n, T, B, H, KV, D, stream);
}

bool __wrap_attention_cudnn_backward(real *dqkv, const real *dout, const real *out, const accum *lse, const real *qkv,
                                     accum *scratch, int64_t T, int64_t B, int64_t H, int64_t KV, int64_t D, cf_stream *stream) {
    return takes_time(2.5 * flops(0, T, B, H, D), (double)(B * H), T, true, stream) ||
           __real_attention_cudnn_backward(dqkv, dout, out, lse, qkv, scratch, T, B, H, KV, D, stream);
}

enum { E = sizeof(real), P = sizeof(accum) };
static bool takes_time_to_move(double bytes, cf_stream *stream) {
    if (!imagined() || bytes <= 0) return false;
    start_clock();
    enqueue(cf_cuda_stream(stream), "what memory limits", note_copy_within(bytes / 2), {});
    return true;
}

#define MOVES(name, bytes, parameters, ...)                                                                                        \
    decltype(name) __real_##name, __wrap_##name;                                                                                   \
    void __wrap_##name parameters {                                                                                                \
        if (!takes_time_to_move((double)(bytes), stream)) __real_##name(__VA_ARGS__);                                              \
    }
MOVES(layernorm_forward, R *C * 2 * E,
      (real * out, accum *mean, accum *rstd, const real *x, const real *w, const real *b, double eps, int64_t R, int64_t C,
       cf_stream *stream),
      out, mean, rstd, x, w, b, eps, R, C, stream)
MOVES(layernorm_backward, R *C *(4 + dy.parts) * E,
      (real * dx, accum *dw, accum *db, accum *dbias, cf_sum dy, const real *x, const real *w, const accum *mean, const accum *rstd,
       accum *scratch, int64_t R, int64_t C, cf_stream *stream),
      dx, dw, db, dbias, dy, x, w, mean, rstd, scratch, R, C, stream)
MOVES(residual_forward, R *C *(3 + y.parts) * E,
      (real * out, const real *x, cf_sum y, const real *bias, int64_t R, int64_t C, cf_stream *stream), out, x, y, bias, R, C,
      stream)
MOVES(gated_forward, R *F * 3 * E, (real * out, const real *pre, int64_t R, int64_t F, cf_stream *stream), out, pre, R, F, stream)
MOVES(gated_backward, R *F *(5 + (out != NULL)) * E,
      (real * pre, real *out, const real *dout, int64_t R, int64_t F, cf_stream *stream), pre, out, dout, R, F, stream)
MOVES(rotary_turn, T *B *heads *D * 2 * E,
      (real * x, const accum *table, bool back, int64_t T, int64_t B, int64_t heads, int64_t D, int64_t row, cf_stream *stream), x,
      table, back, T, B, heads, D, row, stream)
MOVES(linear_bias_grad, R *OC *E, (accum * db, const real *dy, int64_t R, int64_t OC, cf_stream *stream), db, dy, R, OC, stream)
MOVES(crossentropy_stats, R *V *E,
      (accum * stats, const real *logits, const int32_t *targets, int64_t first, int64_t valid, int64_t R, int64_t V,
       cf_stream *stream),
      stats, logits, targets, first, valid, R, V, stream)
MOVES(crossentropy_combine, scale == 0 ? 0 : R * V * 2 * E,
      (accum * losses, real *logits, const accum *all, int64_t ranks, const int32_t *targets, double scale, double z, int64_t first,
       int64_t valid, int64_t R, int64_t V, cf_stream *stream),
      losses, logits, all, ranks, targets, scale, z, first, valid, R, V, stream)
MOVES(crossentropy_fused, R *V * 2 * E,
      (accum * losses, real *logits, const int32_t *targets, double scale, double z, int64_t valid, int64_t R, int64_t V,
       cf_stream *stream),
      losses, logits, targets, scale, z, valid, R, V, stream)
MOVES(optimizer_update, n *(E + (1 + 2 * o->states) * P + (master ? 2 * P : E)),
      (const optimizer_row *o, real *w, accum *master, accum *const *state, const accum *g, int64_t n, optimizer_settings s,
       cf_stream *stream),
      o, w, master, state, g, n, s, stream)
MOVES(sum_of_squares, n *P, (double *sum, double *scratch, const accum *x, int64_t n, cf_stream *stream), sum, scratch, x, n,
      stream)
MOVES(cf_add, (parts + 1 + (to != from)) * count * cf_dtype_size(dtype),
      (void *to, const void *from, int parts, int64_t stride, int64_t count, cf_dtype dtype, cf_stream *stream), to, from, parts,
      stride, count, dtype, stream)
MOVES(position_forward, T *B *C * 2 * E,
      (real * x, const real *wpe, int64_t t0, int64_t T, int64_t B, int64_t C, cf_stream *stream), x, wpe, t0, T, B, C, stream)
MOVES(position_backward, T *B *C *E, (accum * dwpe, const real *dx, int64_t t0, int64_t T, int64_t B, int64_t C, cf_stream *stream),
      dwpe, dx, t0, T, B, C, stream)
MOVES(nesterov_momentum, n *(E + 3 * P),
      (real * u, accum *momentum, const accum *g, int64_t n, optimizer_settings s, cf_stream *stream), u, momentum, g, n, s, stream)
MOVES(orthogonal_update, n *(2 * E + (master ? 2 * P : E)),
      (real * w, accum *master, const real *x, int64_t n, double keep, double by, cf_stream *stream), w, master, x, n, keep, by,
      stream)
MOVES(copy_block, rows *columns * 2 * E,
      (real * to, int64_t to_row, const real *from, int64_t from_row, int64_t rows, int64_t columns, cf_stream *stream), to, to_row,
      from, from_row, rows, columns, stream)

// Its products take their time; of the bytes of its norm and of what is divided by it, threads show a third.
decltype(orthogonalise) __real_orthogonalise, __wrap_orthogonalise;
void __wrap_orthogonalise(real *x, int64_t count, int64_t rows, int64_t columns, accum *scratch, cf_stream *stream) {
    takes_time_to_move(2.0 * E * (double)(count * rows * columns), stream);
    __real_orthogonalise(x, count, rows, columns, scratch, stream);
}

decltype(linear_wgrad_rows_min) __real_linear_wgrad_rows_min, __wrap_linear_wgrad_rows_min;

int64_t __wrap_linear_wgrad_rows_min(int64_t IC) {
    return setting("EMULATOR_ROWS_MIN", imagined() ? __real_linear_wgrad_rows_min(IC) : 64);
}

decltype(linear_wgrad_depth_min) __real_linear_wgrad_depth_min, __wrap_linear_wgrad_depth_min;

int64_t __wrap_linear_wgrad_depth_min(void) {
    return setting("EMULATOR_DEPTH_MIN", imagined() ? __real_linear_wgrad_depth_min() : 0);
}

enum { RANKS_MAX = 512 };
// An allgather of hosts: all clocks are equal after it.
static void (*real_allgather)(cf_bootstrap *, const void *, void *, int64_t), (*real_close)(cf_bootstrap *);
static void allgather(cf_bootstrap *b, const void *mine, void *all, int64_t bytes) {
    host_is_away(false);
    real_allgather(b, mine, all, bytes);
    if (!clock_runs()) return;
    host_is_away(true); // before any host continues
    double now = host_clock(), clocks[RANKS_MAX] = {};
    real_allgather(b, &now, clocks, sizeof now);
    for (double clock : clocks) host_reaches(clock);
}

// Here a host waits for all others, and its polls must not pass for work that the clock has to wait for.
static void close_bootstrap(cf_bootstrap *b) {
    host_is_away(false);
    real_close(b);
}

decltype(cf_bootstrap_create) __real_cf_bootstrap_create, __wrap_cf_bootstrap_create;
cf_bootstrap *__wrap_cf_bootstrap_create(int *argc, char ***argv, double timeout_s) {
    cf_bootstrap *b = __real_cf_bootstrap_create(argc, argv, timeout_s);
    real_allgather = b->allgather, real_close = b->close;
    b->allgather = allgather, b->close = close_bootstrap;
    return b;
}

// For bench_train: what the host of this rank has asked of CUDA and NCCL.
int64_t emulator_host_calls(void) {
    return host_calls_so_far();
}

decltype(cf_paced_copy) __real_cf_paced_copy, __wrap_cf_paced_copy;
void __wrap_cf_paced_copy(void *to, const void *from, int64_t bytes, double gb_per_s, cf_stream *stream) {
    if (!imagined()) return __real_cf_paced_copy(to, from, bytes, gb_per_s, stream);
    if (bytes <= SMALL_BYTES) { // as other copies: the host reads them
        cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDefault, cf_cuda_stream(stream));
        return;
    }
    start_clock();
    enqueue(cf_cuda_stream(stream), "a paced copy", note_paced(CF_PACED_BLOCKS, (double)bytes / gb_per_s * 1e-9), {});
}

// Words that hosts share: the clock finds when a host that waits for one continues.
decltype(cf_word_write) __real_cf_word_write, __wrap_cf_word_write;

void __wrap_cf_word_write(uint32_t *word, uint32_t value) {
    clock_runs() ? host_writes(word, value) : __real_cf_word_write(word, value);
}

decltype(cf_word_is) __real_cf_word_is, __wrap_cf_word_is;

bool __wrap_cf_word_is(uint32_t *word, uint32_t value) {
    if (clock_runs()) host_awaits(word, value);
    return __real_cf_word_is(word, value);
}

decltype(random_normal) __real_random_normal, __wrap_random_normal;

double __wrap_random_normal(uint64_t seed, uint64_t stream, uint64_t index) {
    return imagined() ? 0 : __real_random_normal(seed, stream, index);
}
}
