// Gradients of weight matrices: where each is computed, and how. If a matrix is a bucket by itself (params.h), the last
// micro-batch computes its gradient owner by owner, inside a reduce-scatter, this rank's rows last; otherwise it is added up
// in place.
#ifndef WEIGHT_GRADIENT_H
#define WEIGHT_GRADIENT_H

#include "zero.h"

CF_EXTERN_C_BEGIN

typedef enum {
    GRADIENT_NOW,       // when all of both its factors is here
    GRADIENT_BY_SLICES, // as the slices of the factor that travels arrive, inside that operation
    GRADIENT_LATER,     // when nothing else of its layer is left to compute, to hide the transfers of the embedding
    GRADIENT_OWNERS     // inside the reduce-scatter of its bucket; QKV's as LATER
} gradient_place;
const char *gradient_place_name(gradient_place place);

// Where the gradient of a matrix is computed, in the step's last micro-batch or in others. The one place that decides. It
// depends on schedules, which may change between steps: whoever keeps the answer asks again then. arrive: the operation
// that brings one factor, whose shards have `rows` rows; NULL: none does. may_wait: nothing of the layer waits for it.
gradient_place weight_gradient_place(const zero_shards *z, int tensor, int64_t layer, bool last, const cf_fuse *arrive,
                                     int64_t rows, bool may_wait);

typedef struct backward_pass {
    zero_shards *zero;
    bool first; // this micro-batch begins the gradients
    bool last;  // this one completes them
} backward_pass;

// Gradient of a local matrix of `parts` parts: of part i (OC, IC) it is dy[i]ᵀ · x[i], dy[i] (R, OC), x[i] (R, IC).
typedef struct weight_gradient {
    const real *const *dy, *const *x; // [parts]
    int64_t R, OC, IC;
    int parts;
    matrix_gradient to;
} weight_gradient;
// Computes it, in place or with GRADIENT_OWNERS inside its reduce-scatter; fills g.to.
void weight_gradient_compute(const backward_pass *pass, int tensor, int64_t layer, gradient_place place, weight_gradient g);
// The rows of a span of it (argument: a weight_gradient), with data at span->data.
void weight_gradient_rows(void *argument, const cf_span *span, cf_stream *stream);

CF_EXTERN_C_END
#endif
