// The gradient of a weight matrix is not simply added up where it lies: if the matrix is a bucket of its own (params.h),
// the last micro-batch computes it owner by owner, inside a reduce-scatter, the own rows last.
#ifndef WEIGHT_GRADIENT_H
#define WEIGHT_GRADIENT_H

#include "../commfuse/fuse.h"
#include "hooks.h"
#include "params.h"

#ifdef __cplusplus
extern "C" {
#endif

// Gradient of a local matrix of `parts` parts: of part i (OC, IC) it is dy[i]ᵀ · x[i], dy[i] (R, OC), x[i] (R, IC).
typedef struct weight_gradient {
    const real *const *dy, *const *x; // [parts]
    int64_t R, OC, IC;
    int parts;
    matrix_gradient to; // weight_gradient_take() fills it in
} weight_gradient;

// Will weight_gradient_take() reduce it on the spot? Then it is best called when nothing else waits for it.
bool weight_gradient_fuses(const backward_pass *pass, const parameters *p, int tensor, int64_t layer);
// Are the slices that arrive, of a shard of `rows`, worth adding to a gradient one by one? If not it is computed when all are
// here.
bool weight_gradient_by_slices(const cf_fuse *arrive, int64_t rows);
// Where a gradient is to be computed now, inside the operation around it; at NULL: weight_gradient_take() will do it.
matrix_gradient weight_gradient_now(const backward_pass *pass, const parameters *p, int tensor,
                                    int64_t layer);
void weight_gradient_take(const backward_pass *pass, const parameters *p, int tensor, int64_t layer,
                          weight_gradient g, cf_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
