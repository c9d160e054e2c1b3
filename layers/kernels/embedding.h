// Token and position embedding, and rotary positions. The token table is sharded by rows (vocabulary) over the tp group: this rank
// holds rows [first, first + count) and looks up only those; the sum over ranks is the embedding.
#pragma once
#include "real.h"

CF_EXTERN_C_BEGIN

// All in device memory.
// out (R, C): wte[token − first] if this rank holds the token's row, else zero. tokens (R), wte (count, C)
void embedding_forward(real *out, const int32_t *tokens, const real *wte, int64_t first, int64_t count, int64_t R, int64_t C,
                       cf_stream *stream);
// dwte (count, C) += dout rows of the tokens held here, in row order: the same bits every time. dout (R, C): of accum, if it is
// wide, else of real
void embedding_backward(accum *dwte, const void *dout, bool wide, const int32_t *tokens, int64_t first, int64_t count, int64_t R,
                        int64_t C, cf_stream *stream);
// x (T, B, C) += wpe[t0 + t] (maxT, C)
void position_forward(real *x, const real *wpe, int64_t t0, int64_t T, int64_t B, int64_t C, cf_stream *stream);
// dwpe[t0 + t] (maxT, C) += sum over b of dx (T, B, C)
void position_backward(accum *dwpe, const real *dx, int64_t t0, int64_t T, int64_t B, int64_t C, cf_stream *stream);
// Turns elements i and i + D / 2 of each of the first `heads` heads of every row of x (T, B, row) by an angle; back: by its
// negative, which is the gradient. table (T, 2, D / 2): cosines and sines
void rotary_turn(real *x, const accum *table, bool back, int64_t T, int64_t B, int64_t heads, int64_t D, int64_t row,
                 cf_stream *stream);

CF_EXTERN_C_END
