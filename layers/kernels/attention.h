// Causal multi-head attention for a RANGE of query rows against all keys before them, for Query-Split. No T × T matrix exists, but
// where a GPU has no fused kernel (attention.cu): in fp32 the scores of some heads do.
//
// qkv (T, B, H + 2 KV, D): for each row t·B + b the queries of the H local heads, the keys of KV heads, and their values. KV
// divides H: H / KV heads of queries, one after another, share keys and values.
#pragma once
#include "real.h"

CF_EXTERN_C_BEGIN

// Channels per head, at most.
int64_t attention_channels_max(void);

// out (T, B, H, D) rows t0 … t0 + n − 1, and lse (B, H, T): log of the sum of exp of the scaled scores.
// Scale 1/sqrt(D). Only those rows of out and lse are written.
void attention_forward(real *out, accum *lse, const real *qkv, int64_t t0, int64_t n, int64_t T, int64_t B, int64_t H, int64_t KV,
                       int64_t D, cf_stream *stream);
int64_t attention_scratch(int64_t T, int64_t B, int64_t H, int64_t KV, int64_t D);
// dqkv (T, B, H + 2 KV, D) += gradients from query rows t0 … t0 + n − 1: dq at these rows, dk and dv at rows 0 … t0 + n − 1. dout
// (T, B, H, D): only the query rows are read. first: all of dqkv is written, with zeros where this range adds nothing. Calls on
// disjoint ranges in any order sum to the whole gradient. scratch: attention_scratch() elements of accum, enough for any
// smaller T and B, too. Unless attention_backward_by_ranges(), the only range is t0 0, n T, with first.
void attention_backward(real *dqkv, const real *dout, const real *out, const accum *lse, const real *qkv, accum *scratch,
                        int64_t t0, int64_t n, int64_t T, int64_t B, int64_t H, int64_t KV, int64_t D, bool first,
                        cf_stream *stream);
// Is backward worth cutting into ranges of time steps, to hide transfers? Not on a GPU: with the projection's dgrad two ranges took
// 1.5 times as long as all at once on an H200, four 1.8 times. dk and dv were written for each range and added, and a range fills
// few multiprocessors.
bool attention_backward_by_ranges(void);
// Floating-point operations of forward, causal.
static inline double attention_flops(int64_t T, int64_t B, int64_t H, int64_t D) {
    return 2.0 * (double)(T * T * B * H * D);
}

CF_EXTERN_C_END
