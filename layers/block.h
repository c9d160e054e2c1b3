// One transformer block. Its attention half is TPSP's (tpsp.c) or UP's (up.c); the MLP half is the same for both, over the
// tp group or over this rank alone (block.c). Both strategies keep activations between the halves split by sequence.
//
// N = tp ranks, Ts = T / N rows of time a shard. S = ranks that share the matrices of the MLP: N in TPSP, 1 in UP.
// Hl = H / N local heads, Cl = C / N, Fl = 4C / S.
#ifndef BLOCK_H
#define BLOCK_H

#include <stdio.h>
#include "parallel_linear.h"

CF_EXTERN_C_BEGIN

// Each half begins with a layer norm and a column-parallel layer.
typedef enum { ATTENTION, MLP, HALVES } block_half;

// Kept by one layer from forward for backward. NULL: backward computes it again.
typedef struct block_layer {
    const real *x[HALVES];                // (Ts, B, C) what the halves read; the first is the previous layer's output
    precise *mean[HALVES], *rstd[HALVES]; // (Ts, B)
    real *norm[HALVES];                   // (S · Ts, B, C) outputs of the layer norms, or NULL
    real *x2;                             // (Ts, B, C) the attention half's output
    real *qkv;                            // (T, B, 3 Cl)
    real *heads;                          // (T, B, Cl)
    precise *lse;                         // (T, B, Hl)
    real *groups;                         // UP: (N, Ts, B, Cl) arrived: this rank's rows' heads, group by group
    real *fch;                            // (S · Ts, B, Fl) before GELU
    real *hidden;                         // (S · Ts, B, Fl) GELU, or NULL
} block_layer;

typedef struct block block;
typedef struct block_strategy {
    // Of the attention half. norm: of its input, as block_norm_again() returns it. Returns this rank's shard (Ts, B, C) of the
    // sum that is added to x.
    const real *(*forward)(block *b, int layer, real *norm);
    // dx: the half's gradient. Returns that of the norm. QKV's weight gradient may be left to late.
    const real *(*backward)(block *b, int layer, real *dx);
    void (*late)(block *b, int layer);
    void (*free)(block *b);
} block_strategy;

// What a half runs in each pass, in this order. Three backward: gather of the row-parallel layer's gradient, of the
// column-parallel layer's input, and the sum of that input's gradient.
typedef struct block_exchanges {
    cf_fuse *forward[3], *backward[3];
} block_exchanges;

// What all layers share: planned operations and scratch memory. One layer runs at a time. up.c adds fields of its own after
// these.
struct block {
    const block_strategy *strategy;
    const model_pass *pass;
    const cf_group *tp;
    parallel_linear fc, fcproj;
    parallel_linear qkv, attproj; // TPSP's; in UP nothing is in them
    block_exchanges operations[HALVES];
    // Memory that is one thing at a time, the first in forward and again for the weight gradients of its half.
    union {
        real *norm1;      // (S · Ts, B, C) gathered output of the first layer norm
        real *mlp_dy;     // (S · Ts, B, C) backward, before that: gathered gradient of the MLP half's output
        real *head_input; // (S · Ts, B, C) between the passes: the head's
    };
    union {
        real *norm2;        // (S · Ts, B, C) gathered output of the second layer norm
        real *attention_dy; // (S · Ts, B, C) backward, after that: gathered gradient of the attention half's output
    };
    real *sums;     // (S · Ts, B, C) summed over ranks: a half's output; backward: gradient of a layer norm's output
    real *hidden;   // (S · Ts, B, Fl) GELU; NULL: layers keep theirs
    real *dhidden;  // (S · Ts, B, Fl) gradient of the GELU's input
    real *dheads;   // (T, B, Cl)
    real *dqkv;     // (T, B, 3 Cl)
    real *prepared; // (largest linear_prepared_size()) weights of the product in progress
    precise *norm_scratch, *attention_scratch;
    block_layer *layer; // [L]
};

// T, B: capacity. recompute: GELU and layer norms, in backward, instead of keeping them for each layer.
block *tpsp_create(const model_pass *pass, const cf_mesh *mesh, int64_t T, int64_t B, overlap how, bool recompute);
block *up_create(const model_pass *pass, const cf_mesh *mesh, int64_t T, int64_t B, overlap how, bool recompute);
void block_free(block *b);

// Where weight gradients are computed, asked of the schedules as they are: after creation, and again after one was switched.
void block_place_weight_gradients(const block *b);

// out (Ts, B, C) = block(x), x (Ts, B, C) kept until backward.
void block_forward(block *b, int layer, const real *x, real *out);
// dx (Ts, B, C): gradient of the output in, of the input out. Adds to the gradients of all but QKV's weights if those are
// left to block_backward_late(); until then nothing but `sums` may change.
void block_backward(block *b, int layer, real *dx);
void block_backward_late(block *b, int layer);
void block_operations(const block *b, bool forward, visit_operation *visit, void *argument);

// --- for tpsp.c and up.c ---

// Fills what both have. size: of the strategy's struct, which begins with a block. split: the S ranks. prepared: elements
// that the attention half's largest weights take.
void *block_create(size_t size, const block_strategy *strategy, const model_pass *pass, const cf_group *tp, const cf_group *split,
                   int64_t T, int64_t B, overlap how, bool recompute, int64_t prepared);
block_exchanges block_pair(const parallel_linear *column, const parallel_linear *row);
// The buffer with a half's layer norm; in backward this rank's shard is computed where it was not kept.
real *block_norm_buffer(const block *b, int layer, block_half half);
real *block_norm_again(block *b, int layer, block_half half);

CF_EXTERN_C_END
#endif
