// Softmax cross-entropy over a vocabulary sharded by columns: this rank holds columns [first, first + V) of the logits; those
// after the first `valid` (<= V) are padding, which does not count. Two passes with a reduction of three numbers per row between
// them; one pass if this rank holds the whole vocabulary.
#pragma once
#include "real.h"

CF_EXTERN_C_BEGIN

// logits (R, V), targets (R): all in device memory. V is a multiple of 8 (params.h), and logits begin on a boundary of sixteen
// bytes, so that a GPU reads whole packs. stats (R, 3) of the local columns: maximum, sum of exp(logit − maximum), logit of the
// target (0 if another rank holds it). valid = 0 gives maximum −infinity, sum 0.
void crossentropy_stats(accum *stats, const real *logits, const int32_t *targets, int64_t first, int64_t valid, int64_t R,
                        int64_t V, cf_stream *stream);
// losses (R) over the whole vocabulary, from the stats of all ranks, (ranks, R, 3), combined in order. Then, unless scale is 0,
// logits is overwritten by the gradient of scale · (loss + z · lse²), where lse is the logarithm of the sum of all exp(logit):
// (softmax · (1 + 2 · z · lse) − one-hot target) · scale; padding columns become 0.
void crossentropy_combine(accum *losses, real *logits, const accum *all, int64_t ranks, const int32_t *targets, double scale,
                          double z, int64_t first, int64_t valid, int64_t R, int64_t V, cf_stream *stream);
// Both at once, with a gradient, for a rank that holds the whole vocabulary, first = 0. Reads a row from memory once.
void crossentropy_fused(accum *losses, real *logits, const int32_t *targets, double scale, double z, int64_t valid, int64_t R,
                        int64_t V, cf_stream *stream);
// *sum += the sum of n losses in double, in a fixed order. sum is device memory.
void crossentropy_sum(double *sum, const accum *losses, int64_t n, cf_stream *stream);

CF_EXTERN_C_END
