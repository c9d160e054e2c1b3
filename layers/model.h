// GPT-2: embeddings, L blocks, final layer norm, head tied to the token embedding, cross-entropy.
//
// A replica is one tp group. It works on micro-batches of up to B sequences of up to T tokens, T a multiple of tp; every rank
// of the group gets the same tokens (T, B), row t·B + b. What is between the products is split by sequence: this rank keeps
// rows [rank · Ts, …) of it.
//
// N = tp ranks, Ts = T / N rows of time a shard. S = ranks that share the matrices of the MLP, and the vocabulary: N in TPSP,
// 1 in UP. Hl = H / N local heads, Cl = C / N, Fl = 4C / S, Vl = rows of the vocabulary held here, with padding.
#ifndef MODEL_H
#define MODEL_H

#include "../commfuse/tune.h"
#include "lookup.h"
#include "parallel_linear.h"

CF_EXTERN_C_BEGIN

typedef struct gpt {
    cf_context *context;
    const cf_mesh *mesh;
    parameters params;
    const cf_group *split; // the S ranks
    zero_shards zero;
    model_pass pass;   // in progress
    int64_t T, B;      // capacity
    int64_t first, Vl; // rows of the vocabulary: from where, how many,
    int64_t valid;     // and how many of these are no padding
    lookup embedding;
    parallel_linear qkv, attproj, fc, fcproj, head; // of all layers, which run one at a time
    struct up *up;                                  // UP's attention half; NULL: TPSP
    // The residual stream before each half of a block, attention and MLP, and after the last one. Each is read by a layer norm,
    // numbered likewise, and the output of that by a column-parallel layer.
    real **x;               // [2 L + 1] (Ts, B, C)
    precise **mean, **rstd; // [2 L + 1] (Ts, B)
    real **norm;            // [2 L + 1] (S · Ts, B, C) gathered; of each half one for all layers unless norms are kept
    bool norms_kept, hidden_kept;
    struct {           // [L] what layers keep from forward for backward
        real **qkv;    // (T, B, 3 Cl)
        real **heads;  // (T, B, Cl)
        precise **lse; // (T, B, Hl)
        real **groups; // UP: (N, Ts, B, Cl) arrived: this rank's rows' heads, group by group
        real **fch;    // (S · Ts, B, Fl) before GELU
        real **hidden; // (S · Ts, B, Fl) GELU; one for all layers if backward computes it again
    } acts;
    // Backward: the gathered gradient of a half's output, in the memory of a norm that is not needed then.
    real *mlp_dy, *attention_dy; // (S · Ts, B, C)
    real *dx;                    // (Ts, B, C) gradient of the residual stream
    real *sums;                  // (S · Ts, B, C) summed over ranks: a half's output; backward: gradient of a layer norm's output
    real *dhidden;               // (S · Ts, B, Fl) gradient of the GELU's input
    real *dheads;                // (T, B, Cl)
    real *dqkv;                  // (T, B, 3 Cl)
    bool dqkv_begun;             // some of dqkv is computed
    real *prepared;              // (largest linear_prepared_size()) weights of the product in progress
    precise *norm_scratch, *attention_scratch;
    real *logits;                        // (S · Ts · B, Vl); with a scale: their gradient
    precise *stats;                      // (S, S · Ts · B, 3)
    precise *total;                      // (S · Ts · B, 2)
    precise *losses;                     // (S · Ts · B)
    double *loss;                        // the sum of losses that gpt_forward adds up
    int32_t *inputs, *targets;           // (T, B)
    int32_t *host_inputs, *host_targets; // (T, B) in the host's memory, for callers of gpt_begin_forward()
    cf_fuse *gather_stats, *gather_logits, *collect;
    real *next;                    // (N, Vl): logits of one position, for sampling
    real *pieces;                  // (S, COLLECT): pieces of a tensor that is written to a file
    void *memory[32], *tables[16]; // all of the device's, of the host's
    int memories, table_count;
    bool lookup_begun; // the lookup of the pass has begun
    bool has_targets;
    cf_moment begun; // the pass, in the timeline
} gpt;

enum { COLLECT = 1 << 18 }; // elements of each rank's part that are collected at a time

// recompute: backward computes GELU and layer norms again, and gathers these again, instead of keeping them per layer.
// Dies (together) if shape, mesh and T do not fit. Parameters are zero until initialised or loaded.
void gpt_create(gpt *g, cf_context *context, const cf_mesh *mesh, gpt_shape shape, parallel_strategy strategy, int64_t T, int64_t B,
                overlap how, bool recompute);
void gpt_free(gpt *g);

// A forward pass in two parts; the first begins the lookup, where it needs no more of the token table than this rank's
// shard, so that the rest of an update (optimizer_finish_update) hides its transfers. inputs and targets (T, B) are the
// host's. targets NULL: no loss, as gpt_generate() needs none.
void gpt_begin_forward(gpt *g, const int32_t *inputs, const int32_t *targets, int64_t T, int64_t B);
// scale: backward follows, for gradients of scale · (sum of losses), and *g->loss += the sum of the losses of the tokens of
// this rank's shard. 0: neither.
void gpt_forward(gpt *g, double scale);
// After gpt_forward with a scale: adds the gradients.
// first: this micro-batch begins the gradients. last: it completes them and sends them; the optimizer's step must follow and
// finishes the transfers still in flight.
void gpt_backward(gpt *g, bool first, bool last);
// Of the rows that head and lookup work on, all or those of this rank's shard, the first one.
int64_t gpt_first_row(const gpt *g);

// As few tokens, at least `length`, as a pass may have. What comes after a token is not seen by it; and every length would be
// another kind of each product, whose plan a GPU's library takes up to a second to make.
int64_t gpt_pass_tokens(const gpt *g, int64_t length);

// --- what a model is used for ---

// Losses of given sequences, without training: validation, HellaSwag (evaluate.c).
// Writes a sequence into column b of inputs and targets (T, B), which are zero. Losses of its tokens [*first, *end) count:
// [0, length), unless it says so.
typedef void evaluate_load(void *argument, int64_t number, int64_t b, int64_t B, int32_t *inputs, int32_t *targets, int64_t *first,
                           int64_t *end);

// Collective over all ranks. The sums of the losses of sequences 0 … count − 1, the same on every rank; the caller frees them.
// They have at most `length` tokens, and passes a few more. A replica takes at most B at a time.
double *gpt_evaluate(gpt *g, evaluate_load *load, void *argument, int64_t count, int64_t length, int64_t B);

// Text (generate.c).
typedef struct sampling {
    double temperature; // what logits are divided by; 0: always the largest
    int64_t top_k;      // draw among the top_k largest logits, and any as large as the last of these; 0: all
    uint64_t seed, stream;
} sampling;

// Collective over a replica: tokens (given + count) begins with 1 <= given <= T tokens and gets `count` more. Random numbers
// are a function of (seed, stream) alone, so every rank draws the same. When the window of T tokens is full, its older half is
// dropped.
void gpt_generate(gpt *g, sampling how, int32_t *tokens, int64_t given, int64_t count, int64_t T);

// The whole model in the order of llm.c's files: every rank of the replica calls this, its first rank's
// `append` gets the elements.
void gpt_collect(gpt *g, void (*append)(void *argument, const float *values, int64_t count), void *argument);

// --- its operations (operations.c) ---

// Calls visit for each operation of a training step, those of the optimizer excepted.
void gpt_operations(gpt *g, visit_operation *visit, void *argument);
cf_tuner *gpt_create_tuner(gpt *g); // of its operations (commfuse/tune.h)

// --- model.c and up.c ---

real *gpt_alloc(gpt *g, int64_t elements, const char *purpose); // of the device's memory, until gpt_free()
// The output of a layer norm in backward: this rank's shard is computed again where it was not kept.
real *gpt_norm_again(gpt *g, int64_t n);
// Query-Split: attention of time steps [t0, t0 + n) against all keys before them, into heads (T, B, Cl). Its gradient from
// dheads; g->dqkv_begun: dqkv has that of other time steps.
void gpt_attend(gpt *g, int layer, real *heads, int64_t t0, int64_t n, cf_stream *stream);
void gpt_attend_backward(gpt *g, int layer, const real *dheads, int64_t t0, int64_t n, cf_stream *stream);

// The attention half of a block in UP. norm: of the half's input. Returns this rank's shard (Ts, B, C) of what is added to the
// residual stream.
void up_create(gpt *g, overlap how);
void up_free(gpt *g);
const real *up_forward(gpt *g, int layer, real *norm);
// dx: the gradient of that. Returns the norm's. The weight gradient of QKV may be left to up_late_gradient(): there, if it is.
const real *up_backward(gpt *g, int layer, real *dx);
void up_late_gradient(gpt *g, int layer);

CF_EXTERN_C_END
#endif
