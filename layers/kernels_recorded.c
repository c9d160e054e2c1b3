// The layers' third twin, for --predict: every kernel records how much it computes and how many bytes it moves
// (commfuse/predict/record.h). A line below is the body of a function of the layers' headers; the Makefile makes the functions.
// Sizes that depend on the device are those of the CPU's or of the GPU's twin.
#include "../commfuse/predict/record.h"
#include "optimizer/muon.h"
#include "optimizer/update.h"
#include "kernels/attention.h"
#include "kernels/attention_cpu.h"
#include "kernels/crossentropy.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/layernorm.h"
#include "kernels/linear.h"
#include "kernels/peak.h"

enum { E = sizeof(real), P = sizeof(accum) };
// linear.cu, layernorm.cu, layernorm.c, attention.cu
enum { TILE_ROWS = 128, TILE_COLUMNS = 256, TILES_MIN = 66, DEPTH_MIN = 1024, WGRAD_ROWS = 64, PARTIALS = 512, BLOCKS = 32 };
enum { CHANNELS_MAX = 128, ATTENTION_ROWS = 128, PARTS_MAX = 16, PART_MIN = 256 };

// Are the machine's rates for whole products and attention, whatever their shape?
static bool whole(void) {
    const cf_curve *tile = &cf_record_hardware()->tile;
    return tile->x[tile->points - 1] == 1;
}

static bool gpu(void) {
    return cf_record_hardware()->gpu;
}

// `times` products of (m, k) by (k, n); bytes: of an element that is written. With the size of tiles, and the number of parts of
// the inner dimension, that take the least time; the sums of several parts are written and read.
static void product(cf_stream *stream, const char *name, int64_t times, int64_t m, int64_t n, int64_t k, int64_t bytes) {
    const cf_hardware *h = cf_record_hardware();
    const double elements = (double)(times * m) * (double)n, rate = cf_curve_at(&h->product, 2 * elements * (double)k);
    const double most = cf_record_multiprocessors();
    double best_s = INFINITY, best_tiles = 0;
    for (int i = h->tile.points - 1; i >= 0; i--) // the largest of equals
        for (double parts = 1; parts == 1 || (parts <= PARTS_MAX && (double)k >= parts * PART_MIN); parts *= 2) {
            double rows = exp2(floor(log2(h->tile.x[i]) / 2)), columns = h->tile.x[i] / rows;
            double tiles = ceil((double)m / rows) * ceil((double)n / columns) * (double)times * parts;
            double each_s = 2 * rows * columns * ((double)k / parts + h->tile_depth) / (rate * h->tile.y[i]) * h->multiprocessors;
            double s = ceil(tiles / most) * each_s + (parts > 1 ? 2 * parts * elements * P / h->memory_bytes_per_s : 0);
            if (s < best_s) best_s = s, best_tiles = tiles;
        }
    const double parts = !whole() ? best_tiles : h->persistent ? most : 0;
    cf_record_kernel(stream, CF_WORK_PRODUCT, name, parts, best_s / (parts > 0 ? ceil(parts / most) : 1),
                     (double)(E * (times * m + n) * k) + (double)bytes * elements);
}

// Scores that queries t0 … t0 + n − 1 have with the keys before them.
static void attention(cf_stream *stream, bool backward, int64_t t0, int64_t n, int64_t B, int64_t H, int64_t KV, int64_t D) {
    const cf_hardware *h = cf_record_hardware();
    double scores = (double)n * ((double)t0 + 0.5 * (double)n) * (double)(B * H), flops = (backward ? 10 : 4) * scores * (double)D;
    double rate = cf_curve_at(backward ? &h->attention_backward : &h->attention_forward, flops);
    const double blocks = whole() ? 0 : (double)(B * H * ceil_div(n, ATTENTION_ROWS));
    cf_record_kernel(stream, CF_WORK_ATTENTION, backward ? "attention backward" : "attention", blocks,
                     flops / rate * (blocks > 0 ? h->multiprocessors / blocks : 1),
                     (backward ? 4 : 2) * E * (double)(((t0 + n) * KV + n * H) * B * D));
}

static void moves(cf_stream *stream, const char *name, int64_t elements, int64_t bytes) { // a kernel that memory limits
    cf_record_kernel(stream, CF_WORK_MEMORY, name, 0, 0, (double)elements * (double)bytes);
}

static void orthogonalised(cf_stream *stream, int64_t count, int64_t rows, int64_t columns) {
    const int64_t m = smaller(rows, columns), n = larger(rows, columns), added = gpu() ? 2 * E : P;
    moves(stream, "norm of a matrix", count * rows * columns, gpu() || E == P ? 3 * E : 2 * E + 5 * P);
    for (int k = 0; k < ITERATIONS; k++) {
        product(stream, "X Xt", count, m, m, n, E), product(stream, "b A + c A A", count, m, m, m, added);
        if (!gpu()) moves(stream, "b A + c A A", count * m * m, 3 * P);
        product(stream, "X + A X", count, rows, columns, m, added);
    }
}

// All have a parameter `stream`.
#define product(...)   (product)(stream, __VA_ARGS__)
#define attention(...) (attention)(stream, __VA_ARGS__)
#define moves(...)     (moves)(stream, __VA_ARGS__)
// clang-format off
#define RECORDED_linear_prepared_size       gpu() ? 0 : E == 2 ? ceil_div(IC, 64) * ceil_div(OC, 64) * 4096 : IC * OC + 16 * larger(IC, OC)
#define RECORDED_linear_prepare_forward     (gpu() ? (void)0 : moves("weights, prepared", IC * OC, 2 * E)), w
#define RECORDED_linear_prepare_dgrad       linear_prepare_forward(prepared, w, IC, OC, stream)
#define RECORDED_linear_forward             product(pre ? "forward, GELU" : add ? "forward, added" : "forward", r.blocks, r.rows, OC, IC, pre || add ? 2 * E : E)
#define RECORDED_linear_dgrad               product(pre ? "dgrad, GELU" : add ? "dgrad, added" : "dgrad", r.blocks, r.rows, IC, OC, pre || add ? 2 * E : E)
#define RECORDED_linear_wgrad               product("wgrad", 1, rows, IC, R, (add ? 2 : 1) * P)
#define RECORDED_linear_wgrad_rows_min      gpu() ? ceil_div(TILES_MIN, ceil_div(IC, TILE_COLUMNS)) * TILE_ROWS : WGRAD_ROWS
#define RECORDED_linear_wgrad_depth_min     gpu() ? DEPTH_MIN : 0
#define RECORDED_linear_bias_grad           moves("bias gradient", R * OC, E)
#define RECORDED_linear_time_algorithms     (void)0
#define RECORDED_linear_algorithm           0

#define RECORDED_attention_channels_max     gpu() ? CHANNELS_MAX : ATTENTION_CHANNELS_MAX
#define RECORDED_attention_forward          attention(false, t0, n, B, H, KV, D)
#define RECORDED_attention_scratch          gpu() ? T * B * H : attention_cpu_scratch(T, B, H, KV, D)
#define RECORDED_attention_backward         attention(true, t0, n, B, H, KV, D), first && t0 > 0 ? moves("zero", t0 * B * H * D, E) : (void)0
#define RECORDED_attention_backward_by_ranges !gpu()

#define RECORDED_layernorm_forward          moves("layer norm", R * C, 2 * E)
#define RECORDED_layernorm_scratch          (gpu() ? PARTIALS : BLOCKS) * 3 * C
#define RECORDED_layernorm_backward         moves("layer norm backward", R * C, (4 + dy.parts) * E)
#define RECORDED_activation_forward         moves("GELU", count, 2 * E)
#define RECORDED_activation_backward        moves("GELU backward", count, 3 * E)
#define RECORDED_gated_forward              moves("gate", R * F, 3 * E)
#define RECORDED_gated_backward             moves("gate backward", R * F, (5 + (out != NULL)) * E)
#define RECORDED_residual_forward           moves("residual", R * C, (3 + y.parts) * E)
#define RECORDED_convert_to_real            moves("gradients, rounded", count, E + P)
#define RECORDED_convert_to_accum           moves("gradients, widened", count, E + P)
#define RECORDED_embedding_forward          moves("lookup", R * C, 2 * E)
#define RECORDED_embedding_backward         moves(wide ? "lookup, added" : "lookup backward", R * C, (wide ? P : E) + 2 * P)
#define RECORDED_position_forward           moves("positions", T * B * C, 2 * E)
#define RECORDED_position_backward          moves("positions backward", T * B * C, E)
#define RECORDED_rotary_turn                moves("rotary positions", T * B * heads * D, 2 * E)
#define RECORDED_crossentropy_stats         moves("cross-entropy", R * V, E)
#define RECORDED_crossentropy_combine       scale == 0 ? moves("cross-entropy", ranks * R * 3, P) : moves("cross-entropy backward", R * V, 2 * E)
#define RECORDED_crossentropy_fused         moves("cross-entropy", R * V, 2 * E)
#define RECORDED_crossentropy_sum           moves("cross-entropy", n, P)
#define RECORDED_optimizer_update           moves(o->name, n, E + (1 + 2 * o->states) * P + (master ? 2 * P : E))
#define RECORDED_sum_of_squares             moves("norm", n, P)

#define RECORDED_nesterov_momentum          moves("momentum", n, E + 3 * P)
#define RECORDED_orthogonalise_layers       gpu() ? LAYERS_ON_GPU : LAYERS_ON_CPU
#define RECORDED_orthogonalise              orthogonalised(stream, count, rows, columns)
#define RECORDED_orthogonal_update          moves("update", n, 2 * E + (master ? 2 * P : E))
#define RECORDED_copy_block                 moves("rows at home", rows * columns, 2 * E)

#define RECORDED_peak_flops                 (*source = "the machine's description", fp32 ? 0 : cf_record_hardware()->peak)
#define RECORDED_peak_emulated              false
// clang-format on
#include <kernels_functions.h> // made by the Makefile
