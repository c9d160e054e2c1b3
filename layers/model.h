// The model: embeddings, L blocks (params.h), final norm, head tied to the token embedding, cross-entropy.
//
// A replica is one tp group. It works on micro-batches of up to B sequences of up to T tokens, T a multiple of tp; every rank
// of the group gets the same tokens (T, B), row t·B + b. Between the matrix products, activations are split by sequence: this
// rank holds time steps [rank · Ts, (rank + 1) · Ts).
//
// N = tp ranks, Ts = T / N time steps of a shard. S = ranks that share the MLP's matrices and the vocabulary: N in TPSP, 1 in
// UP. Hl = H / N local heads, Cl = C / N their width, Ql that of their queries, keys and values; Fl local units of the MLP, FCl
// the width of its first layer's products; Vl = local rows of the vocabulary, padding included. For GPT-2 Ql = 3 Cl,
// Fl = FCl = 4C / S; in SwiGLU FCl = 2 Fl.
#pragma once
#include "parallel_linear.h"

typedef struct gpt_setup {
    gpt_shape shape;
    parallel_strategy strategy;
    const optimizer_row *optimizer;
    int64_t T, B; // tokens of a sequence, sequences of a micro-batch, at most
    overlap how;
    // Backward computes GELU and layer norms again, and gathers the norms again, instead of keeping them per layer.
    bool recompute;
    bool apart;    // for tests: buffers that share memory (model.c) have memory of their own
    double z_loss; // gradients are those of the loss and of z_loss times the mean of lse² (crossentropy.h)
} gpt_setup;

typedef struct gpt {
    gpt_setup setup;
    cf_context *context;
    const cf_mesh *mesh;
    parameters params;
    const cf_group *split; // the S ranks
    zero_shards zero;
    model_pass pass;          // in progress
    int64_t Cl, Ql, Fl, FCl;  // see above
    int64_t first, Vl, valid; // local rows of the vocabulary: the first, how many, how many without padding
    lookup embedding;
    parallel_linear qkv, attproj, fc, fcproj, head; // each serves all layers, one at a time
    // The residual stream before each half of a block (attention, MLP), and after the last one. Layer norm i reads x[i], and a
    // column-parallel layer reads norm[i].
    real **x;             // [2 L + 1] (Ts, B, C)
    accum **mean, **rstd; // [2 L + 1] (Ts, B)
    real **norm;          // [2 L + 1] (S · Ts, B, C) gathered; with recompute two for all layers
    struct {              // [L] what forward keeps for backward
        real **qkv;       // (T, B, Ql)
        real **attended;  // (T, B, Cl) attention's output
        accum **lse;      // (B, Hl, T)
        real **groups;    // UP: (N, Ts, B, Cl) arrived: all heads of this rank's rows, group by group
        real **fch;       // (S · Ts, B, FCl) before GELU or SwiGLU; of SwiGLU backward writes the gradient here
        real **hidden;    // (S · Ts, B, Fl) after GELU or SwiGLU; with recompute one for all layers
    } acts;
    struct {                           // UP alone
        real *qkv;                     // (N, Ts, B, Ql) by destination
        real *dattended;               // (N, Ts, B, Cl) by destination
        real *dqkv;                    // (N, Ts, B, Ql) arrived, by head group
        const real **ready, **dy, **x; // [N] by head group: prepared weights; factors of weight gradients
        int64_t *arrived;              // [N] rows of dqkv
    } up;
    // Backward: the gathered gradient of a half's output
    real *mlp_dy, *attention_dy; // (S · Ts, B, C)
    real *dx;                    // (Ts, B, C) gradient of the residual stream
    real *sums;                  // (S · Ts, B, C) summed over ranks: a half's output; backward: gradient of a layer norm's output
    real *dhidden;               // (S · Ts, B, Fl) gradient of GELU's input; of SwiGLU's output
    real *dattended;             // (T, B, Cl)
    real *dqkv;                  // (T, B, Ql)
    bool dqkv_begun;             // dqkv holds the gradient of some time steps
    real *prepared;              // (largest linear_prepared_size()) weights of the product in progress
    accum *norm_scratch, *attention_scratch;
    accum *rotary;                       // (T, 2, D / 2) cosines and sines of rotary positions; NULL: learned ones
    real *logits;                        // (S · Ts · B, Vl); their gradient after a forward pass with a scale
    accum *stats;                        // (S, S · Ts · B, 3)
    accum *losses;                       // (S · Ts · B)
    double *loss;                        // sum of losses, of all passes since the caller zeroed it
    int32_t *inputs, *targets;           // (T, B)
    int32_t *host_inputs, *host_targets; // (T, B) host memory, for callers of gpt_begin_forward()
    cf_fuse *gather_stats, *gather_logits, *collect;
    real *next;                    // (N, Vl): logits of one position, for sampling
    real *pieces;                  // (S, COLLECT): pieces of a tensor that is written to a file
    void *memory[40], *tables[20]; // all allocations on the device, on the host
    int memory_count, table_count;
    bool lookup_begun; // in this pass
    bool has_targets;
    cf_trace_work begun; // the start of the pass
} gpt;

enum { COLLECT = 1 << 18 }; // elements that each rank contributes to one gather of a tensor

// Dies (together) if shape, mesh and T do not fit. Parameters are zero until they are initialised or loaded.
void gpt_create(gpt *g, cf_context *context, const cf_mesh *mesh, const gpt_setup *setup);
void gpt_free(gpt *g);

// A forward pass in two parts. The first begins the lookup, unless it needs more of the token table than this rank's shard, and
// hides its transfers behind the rest of an update (zero_update_layers). inputs, targets (T, B): host memory. targets NULL: no loss.
void gpt_begin_forward(gpt *g, const int32_t *inputs, const int32_t *targets, int64_t T, int64_t B);
// scale: not 0 if backward follows, which computes gradients of scale · (sum of losses + z_loss · lse²); then the sum of the losses
// of this rank's shard is added to *g->loss.
void gpt_forward(gpt *g, double scale);
// After gpt_forward with a scale: adds the gradients. first, last: this is the step's first or last micro-batch. The last one
// sends the gradients; zero_finish_gradients() must follow and finishes the transfers in flight.
void gpt_backward(gpt *g, bool first, bool last);
// The first row that head and lookup work on: 0 or, in UP, the first of this rank's shard.
int64_t gpt_first_row(const gpt *g);
