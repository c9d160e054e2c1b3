// One transformer block in TPSP: heads and MLP columns are split over the tp group, and between them
// everything is split by sequence. Every exchange is a fused operation of commfuse:
//
//   forward    layer norm → (all-gather ▸ QKV) → (attention ▸ projection ▸ reduce-scatter) → residual
//              layer norm → (all-gather ▸ fc1, GELU) → (fc2 ▸ reduce-scatter) → residual
//   backward   the mirror: (all-gather of dY ▸ dgrad, wgrad per slice) for the row-parallel half, and
//              (dgrad ▸ reduce-scatter) with the all-gather of the saved input behind it, wgrad as its
//              slices arrive, for the column-parallel half
//
// The gather of a saved input waits for nothing that backward computes. It is posted one operation ahead, where there
// is spare computation: fc1's during fc2's backward, QKV's during fc1's, since QKV's can hide no more than its sums.
//
// A weight gradient that is sent owner by owner (weight_gradient.h) is computed after these, from the gathered inputs;
// QKV's last of all, when the gradient of the block's input is already in flight. In layer 0 it is always last, to hide
// the embedding's transfers.
//
// N = tp ranks, Ts = T / N. A shard is (Ts, B, C), the whole sequence (T, B, C); Hl = H / N local heads,
// Cl = C / N, Fl = 4C / N.
#ifndef TPSP_H
#define TPSP_H

#include "column_linear.h"

#ifdef __cplusplus
extern "C" {
#endif

// Shared by all layers: planned operations and scratch memory. One layer runs at a time.
typedef struct tpsp {
    cf_context *context;
    const cf_group *group;
    const backward_pass *pass;
    int64_t T, B; // of the pass in progress
    column_linear qkv, fc;
    cf_fuse *attproj_forward, *attproj_backward, *fcproj_forward, *fcproj_backward;
    real *wide;     // (T, B, C) filled by all-gather; in backward dY of the MLP, then QKV's input
    real *wide2;    // (T, B, C) in backward fc1's input, then dY of attention
    real *partial;  // (T, B, C) summed by reduce-scatter
    real *hidden;   // (T, B, Fl) GELU; NULL: layers keep theirs
    real *dhidden;  // (T, B, Fl) gradient of the GELU's input
    real *dheads;   // (T, B, Cl)
    real *dqkv;     // (T, B, 3 Cl)
    real *prepared; // (linear_prepared_size() of the larger) weights of a row-parallel layer
    precise *norm_scratch, *attention_scratch;
} tpsp;

// Kept by one layer from forward for backward.
typedef struct tpsp_saved {
    real *x;                // (Ts, B, C) input; shared with the previous layer's output
    precise *mean1, *rstd1; // (Ts, B)
    real *qkv;              // (T, B, 3 Cl)
    real *heads;            // (T, B, Cl)
    precise *lse;           // (T, B, Hl)
    real *x2;               // (Ts, B, C)
    precise *mean2, *rstd2; // (Ts, B)
    real *fch;              // (T, B, Fl) before GELU
    // NULL: backward computes them again
    real *hidden;        // (T, B, Fl) GELU
    real *norm1, *norm2; // (T, B, C) outputs of the layer norms; several ranks gather them again in any case
} tpsp_saved;

void tpsp_create(tpsp *t, cf_context *context, const cf_group *group, const backward_pass *pass,
                 gpt_shape shape, int64_t T, int64_t B, overlap o, bool recompute);
void tpsp_free(tpsp *t);
void tpsp_saved_create(tpsp_saved *s, gpt_shape shape, int tp, int64_t T, int64_t B, bool recompute);
void tpsp_saved_free(tpsp_saved *s);

// out (Ts, B, C) = block(s->x)
void tpsp_forward(tpsp *t, tpsp_saved *s, const parameters *p, int layer, real *out);
// dx (Ts, B, C): gradient of the output in, of the input out. Adds to the gradients of p, all but QKV's weights if those
// are sent owner by owner or hide the embedding's transfers (layer 0): they are left to tpsp_backward_qkvw, and until
// then nothing but `partial` may change.
void tpsp_backward(tpsp *t, tpsp_saved *s, const parameters *p, int layer, real *dx);
void tpsp_backward_qkvw(tpsp *t, const tpsp_saved *s, const parameters *p, int layer);

#ifdef __cplusplus
}
#endif
#endif
