// GPT-2: embeddings, L blocks, final layer norm, head tied to the token embedding, cross-entropy.
//
// A replica is one tp group. It works on micro-batches of up to B sequences of up to T tokens, T a multiple
// of tp; every rank of the group gets the same tokens (T, B), row t·B + b, and keeps the sequence shard
// [rank · T/tp, …) of everything outside the blocks.
#ifndef MODEL_H
#define MODEL_H

#include "../commfuse/tune.h"
#include "block.h"
#include "lookup.h"

CF_EXTERN_C_BEGIN

enum { COLLECT = 1 << 18 }; // elements of each rank's part that are collected at a time

typedef struct gpt {
    cf_context *context;
    const cf_mesh *mesh;
    parameters params;
    const cf_group *split; // ranks that together hold one copy of the vocabulary
    zero_shards zero;
    model_pass pass; // in progress
    int64_t T, B;    // capacity
    int64_t vocabulary_first, vocabulary_rows,
        vocabulary_valid; // held here: from where, with padding, real ones
    block *blocks;        // all L share it
    lookup embedding;
    parallel_linear head;
    real *prepared;                      // of the head's weights
    real **x;                            // [L + 1] (Ts, B, C): residual stream before each block and after the last
    precise *mean, *rstd;                // (Ts, B) final layer norm
    real *logits;                        // (R, vocabulary_rows), R = split · Ts · B; with a scale: their gradient
    precise *stats;                      // (split, R, 3)
    precise *total;                      // (R, 2)
    precise *losses;                     // (R)
    real *dx;                            // (Ts, B, C)
    real *next;                          // (tp, vocabulary_rows): logits of one position, for sampling
    int32_t *inputs, *targets;           // (T, B)
    int32_t *host_inputs, *host_targets; // (T, B) the host's, for whoever begins a pass
    double *loss;                        // in the device's memory: the sum of losses that gpt_forward adds up
    cf_fuse *gather_stats, *gather_logits, *collect;
    real *pieces; // (split, COLLECT): pieces of a tensor that is written to a file
    bool looking; // the lookup of the pass has begun
    bool has_targets;
    cf_moment begun; // the pass, in the timeline
} gpt;

// recompute: backward computes GELU and layer norms again instead of keeping them per layer.
// Dies (together) if shape, mesh and T do not fit. Parameters are zero until initialised or loaded.
void gpt_create(gpt *g, cf_context *context, const cf_mesh *mesh, gpt_shape shape, parallel_strategy strategy, int64_t T, int64_t B,
                overlap how, bool recompute);
void gpt_free(gpt *g);

// A forward pass in two parts; the first begins the lookup, where it needs no more of the token table than this rank's
// shard, so that the rest of an update (optimizer_finish_update) hides its transfers. inputs and targets (T, B) are the
// host's. targets NULL: no loss; then gpt_next_logits() may follow.
void gpt_begin_forward(gpt *g, const int32_t *inputs, const int32_t *targets, int64_t T, int64_t B);
// scale: backward follows, for gradients of scale · (sum of losses), and *g->loss += the sum of the losses of the tokens of this
// rank's shard. 0: neither.
void gpt_forward(gpt *g, double scale);
// After gpt_forward with a scale: adds the gradients.
// first: this micro-batch begins the gradients. last: it completes them and sends them; the optimizer's step must follow and
// finishes the transfers still in flight.
void gpt_backward(gpt *g, bool first, bool last);

// As few tokens, at least `length`, as a pass may have. What comes after a token is not seen by it; and every length would be
// another kind of each product, whose plan a GPU's library takes up to a second to make.
int64_t gpt_pass_tokens(const gpt *g, int64_t length);
// After gpt_forward with targets: sums[b], of the losses of tokens [first[b], end[b]) of sequence b in this rank's shard.
void gpt_sum_losses(gpt *g, const int64_t *first, const int64_t *end, double *sums);
// After gpt_forward: logits (V) at position t of sequence b, on every rank, into out (host memory).
void gpt_next_logits(gpt *g, int64_t t, int64_t b, float *out);

// The whole model in the order of llm.c's files: every rank of the replica calls this, its first rank's
// `append` gets the elements.
void gpt_collect(gpt *g, void (*append)(void *argument, const float *values, int64_t count), void *argument);

// After the schedule of an operation was switched.
void gpt_place_weight_gradients(gpt *g);

// For --dry-run: calls visit for each operation of a training step, those of the optimizer excepted; prints which gradients
// are computed where, and travel how.
void gpt_operations(gpt *g, visit_operation *visit, void *argument);
void gpt_explain(const gpt *g, FILE *out);
// A tuner of its operations (commfuse/tune.h), and its trials: a step ends, and if `begins` another one follows at once.
cf_tuner *gpt_create_tuner(gpt *g);
void gpt_try_ways(gpt *g, cf_tuner *tuner, bool begins);

CF_EXTERN_C_END
#endif
