// One transformer block in UP (Ulysses parallelism): activations stay sharded by sequence, weights are whole on
// every rank, and attention is sharded by heads, with an all-to-all before and after it. Each is a fused operation of
// commfuse (arXiv 2604.24013, Algorithm 5):
//
//   forward    layer norm → (QKV per destination's heads, own last ▸ all-to-all)
//              → (attention per query slice, own last ▸ all-to-all to the slice's owner ▸ out-projection
//                 accumulating per head group, own first) → residual
//              layer norm → fc1, GELU, fc2 → residual: nothing travels
//   backward   the mirror: (projection dgrad per destination's heads, own last ▸ all-to-all ▸ attention backward
//              per query slice, own first), hidden by the projection's wgrad,
//              (all-to-all ▸ QKV dgrad accumulating per head group, own first)
//
// N = tp ranks, Ts = T / N, Hl = H / N heads of D channels and Cl = C / N channels per head group. QKV and
// projection weights are stored head group by head group (params.h).
#ifndef UP_H
#define UP_H

#include "hooks.h"
#include "params.h"

#ifdef __cplusplus
extern "C" {
#endif

// Shared by all layers: planned operations and scratch memory. One layer runs at a time.
typedef struct up {
    cf_context *context;
    const cf_group *group;
    const backward_pass *pass;
    int64_t T, B; // of the pass in progress
    cf_fuse *qkv_forward, *att_forward, *att_backward, *qkv_backward;
    real *norm;                // (Ts, B, C) a layer norm's output
    real *dnorm;               // (Ts, B, C)
    real *y;                   // (Ts, B, C) output of projection or MLP
    real *qkv_out;             // (N, Ts, B, 3 Cl) by destination; backward: (T, B, 3 Cl) dqkv
    real *dheads_out, *dheads; // (N, Ts, B, Cl) by destination, (T, B, Cl) arrived
    real *dqkv;                // (N, Ts, B, 3 Cl) arrived, by head group
    real *hidden, *dhidden;    // (Ts, B, 4C); hidden NULL: layers keep theirs
    real *prepared;            // (linear_prepared_size(), the largest) weights
    const real **ready;        // [N] prepared weights of QKV or projection, head group by head group
    const real **dy, **x;      // [N] head group by head group, for the weight gradients
    precise *norm_scratch, *attention_scratch;
} up;

// Kept by one layer from forward for backward.
typedef struct up_saved {
    real *x;                // (Ts, B, C) input; shared with the previous layer's output
    precise *mean1, *rstd1; // (Ts, B)
    real *qkv;              // (T, B, 3 Cl)
    real *heads;            // (T, B, Cl)
    precise *lse;           // (T, B, Hl)
    real *groups;           // (N, Ts, B, Cl) arrived: the own rows' heads, group by group
    real *x2;               // (Ts, B, C)
    precise *mean2, *rstd2; // (Ts, B)
    real *fch;              // (Ts, B, 4C) before GELU
    // NULL: backward computes them again
    real *hidden;        // (Ts, B, 4C) GELU
    real *norm1, *norm2; // (Ts, B, C) outputs of the layer norms
} up_saved;

void up_create(up *u, cf_context *context, const cf_group *group, const backward_pass *pass, gpt_shape shape,
               int64_t T, int64_t B, overlap o, bool recompute);
void up_free(up *u);
void up_saved_create(up_saved *s, gpt_shape shape, int tp, int64_t T, int64_t B, bool recompute);
void up_saved_free(up_saved *s);

// out (Ts, B, C) = block(s->x)
void up_forward(up *u, up_saved *s, const parameters *p, int layer, real *out);
// dx (Ts, B, C): gradient of the output in, of the input out. Adds to the gradients of p, all but QKV's weights if those
// are sent owner by owner: they are left to up_backward_qkvw, and until then nothing but `dnorm` and `y` may change.
void up_backward(up *u, up_saved *s, const parameters *p, int layer, real *dx);
void up_backward_qkvw(up *u, const parameters *p, int layer);

#ifdef __cplusplus
}
#endif
#endif
