// The parts of a block that work on one rank and do not depend on the strategy: norms, rotary positions, and attention of a range
// of time steps.
#pragma once
#include "model.h"

// Layer norm n reads x[n]: of the attention half of block n / 2, of its MLP half, and, n = 2 L, before the head. Computes this
// rank's shard; returns the address of the whole, which a column-parallel layer gathers.
real *gpt_norm_forward(gpt *g, int64_t n);
// The output of layer norm n in backward: with recompute, this rank's shard is computed again.
real *gpt_norm_again(gpt *g, int64_t n);
// g->dx += the gradient of the norm's input, from that of its output. A sum_steps; argument: a norm_use.
typedef struct norm_use {
    gpt *g;
    int64_t n;
} norm_use;
void gpt_norm_backward(void *argument, cf_sum dnorm, int64_t t0, int64_t steps, cf_stream *stream);

// Turns queries and keys of qkv (T, B, Ql) by their positions; back: their gradients, after the last range of attention. Learned
// positions: does nothing.
void gpt_turn(gpt *g, real *qkv, bool back);
// Query-Split: attention of time steps [t0, t0 + n) against all keys before them, into attended (T, B, Cl); and its gradient from
// dattended, which is added to dqkv if g->dqkv_begun. model: a gpt. They are time_steps.
void gpt_attend(void *model, int layer, real *attended, int64_t t0, int64_t n, cf_stream *stream);
void gpt_attend_backward(void *model, int layer, real *dattended, int64_t t0, int64_t n, cf_stream *stream);
// Completes dqkv: the gradient of attention from g->dattended, if attention_backward_by_ranges() is false; then turns back.
void gpt_attend_backward_whole(gpt *g, int layer);
