// cuDNN's fused attention, used by attention.cu; bf16 only. Arguments and results as those of the functions of attention.h, but
// backward is of all rows; false: not available for this build, library, device, shape or alignment, and nothing was done.
#pragma once
#include "real.h"

CF_EXTERN_C_BEGIN

bool attention_cudnn_forward(real *out, accum *lse, const real *qkv, int64_t t0, int64_t n, int64_t T, int64_t B, int64_t H,
                             int64_t KV, int64_t D, cf_stream *stream);
bool attention_cudnn_backward(real *dqkv, const real *dout, const real *out, const accum *lse, const real *qkv, accum *scratch,
                              int64_t T, int64_t B, int64_t H, int64_t KV, int64_t D, cf_stream *stream);

CF_EXTERN_C_END
