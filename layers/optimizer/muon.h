// Muon's step on a whole matrix: as torch.optim.Muon with adjust_lr_fn="match_rms_adamw" (Moonlight, arXiv 2502.16982, 2.2).
//
//   m = μ m + (1 − μ) g;  u = μ m + (1 − μ) g, element by element: Nesterov's momentum
//   X = u / (‖u‖ + 1e-7);  five times A = X Xᵀ (XᵀX, from the right, if there are more rows than columns), X = a X + (b A + c A²) X
//   w = w − lr · decay · w − lr · 0.2 sqrt(max(rows, columns)) · X, element by element
#pragma once
#include "optimizers.h"

CF_EXTERN_C_BEGIN

// Before iteration k X is Y / a^(5 − k), so that it is Y = Y + (linear Y Yᵀ + square (Y Yᵀ)²) Y: a product that adds what it reads.
enum { ITERATIONS = 5 };
typedef struct iteration_factors {
    accum first, linear, square; // a⁵, of the first Y; of iteration k
} iteration_factors;
static inline iteration_factors iteration_factors_of(int k) {
    const double a = 3.4445, b = -4.7750, c = 2.0315, scale = pow(a, 2.0 * (k - ITERATIONS)); // X Xᵀ / Y Yᵀ
    iteration_factors f = {(accum)pow(a, ITERATIONS), (accum)(b / a * scale), (accum)(c / a * scale * scale)};
    return f;
}

void nesterov_momentum(real *u, accum *momentum, const accum *g, int64_t n, optimizer_settings s, cf_stream *stream);
// Each x (rows, columns), of `count` side by side, becomes X. On a GPU factors are `real`. scratch: elements as for 4 x, and these.
enum { ORTHOGONALISE_SCRATCH = 1 << 15 };
void orthogonalise(real *x, int64_t count, int64_t rows, int64_t columns, accum *scratch, cf_stream *stream);
// A home has so many layers' matrices at once if there are enough: a GPU is not filled by products of one.
enum { LAYERS_ON_GPU = 3, LAYERS_ON_CPU = 1 };
int64_t orthogonalise_layers(void);
// w = keep w + by x, all (n). master as for optimizer_update().
void orthogonal_update(real *w, accum *master, const real *x, int64_t n, double keep, double by, cf_stream *stream);
// A block (rows, columns) within matrices whose rows are to_row and from_row elements apart.
void copy_block(real *to, int64_t to_row, const real *from, int64_t from_row, int64_t rows, int64_t columns, cf_stream *stream);

CF_EXTERN_C_END
