// Gradients of weight matrices. If a matrix is a bucket by itself (params.h), the last micro-batch computes its gradient
// owner by owner, inside a reduce-scatter, this rank's rows last; otherwise it is added up in place.
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

// Will weight_gradient_take() reduce it immediately? Then call it when nothing else waits for the wire.
bool weight_gradient_fuses(const backward_pass *pass, const parameters *p, int tensor, int64_t layer);
// Are the arriving slices, of a shard of `rows` rows, large enough to add to a gradient one by one? If not, it is computed
// when all have arrived.
bool weight_gradient_by_slices(const cf_fuse *arrive, int64_t rows);
// Where to put a gradient that is computed now, inside the operation around it; at NULL: weight_gradient_take() does it.
matrix_gradient weight_gradient_now(const backward_pass *pass, const parameters *p, int tensor,
                                    int64_t layer);
void weight_gradient_take(const backward_pass *pass, const parameters *p, int tensor, int64_t layer,
                          weight_gradient g, cf_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
