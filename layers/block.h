// What a block needs to know of the world around it, in either strategy: how its operations communicate, and
// what becomes of its weights and their gradients. A weight gradient is not simply added up where it lies:
// if its matrix is a bucket of its own (params.h), the last micro-batch computes it owner by owner, inside
// a reduce-scatter, the own rows last. Who owns what, and when buckets travel, is the optimizer's affair; it
// fills the hooks.
#ifndef BLOCK_H
#define BLOCK_H

#include "../commfuse/fuse.h"
#include "params.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct overlap { // how every operation of the model communicates
    cf_mode mode;
    cf_route route;
    int slices;
} overlap;

// What a layer keeps from forward for backward, or else scratch that all layers share.
static inline real *kept(real *by_layer, real *of_all) {
    return by_layer ? by_layer : of_all;
}

// Device memory of so many elements.
real *take_real(int64_t elements, const char *purpose);
precise *take_precise(int64_t elements, const char *purpose);

// NULL functions: nobody takes part; weights are here and gradients stay here.
typedef struct gpt_hooks {
    void *argument;
    bool (*pending)(void *argument, int bucket); // only the own shard of its weights is sure to be here
    void (*need)(void *argument, int bucket);    // its weights are about to be used
    void (*meanwhile)(void *argument); // forward has only transfers to wait for: do what else there is
    void (*ready)(void *argument, int bucket); // its gradient is complete
    // Does the bucket take its gradient as a computation? If so, wgrad computes rows of it: span->row and
    // span->rows count rows of the local matrix, span->data is where they lie.
    bool (*fuses)(void *argument, int bucket);
    void (*compute)(void *argument, int bucket, cf_compute *wgrad, void *job); // job may go when it returns
} gpt_hooks;

typedef struct backward_pass {
    gpt_hooks hooks;
    bool first; // this micro-batch begins the gradients
    bool last;  // this one completes them
} backward_pass;

// Gradient of a local matrix of `parts` parts: of part i (OC, IC) it is dy[i]ᵀ · x[i], dy[i] (R, OC), x[i] (R, IC).
typedef struct weight_gradient {
    const real *const *dy, *const *x; // [parts]
    int64_t R, OC, IC;
    int parts;
    matrix_gradient to; // weight_gradient_take() fills it in
} weight_gradient;

// Will weight_gradient_take() reduce it on the spot? Then it is best called when nothing else waits for it.
bool weight_gradient_fuses(const backward_pass *pass, const parameters *p, int tensor, int64_t layer);
// Where a gradient is to be computed now, inside the operation around it; at NULL: weight_gradient_take() will do it.
matrix_gradient weight_gradient_now(const backward_pass *pass, const parameters *p, int tensor,
                                    int64_t layer);
void weight_gradient_take(const backward_pass *pass, const parameters *p, int tensor, int64_t layer,
                          weight_gradient g, cf_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
