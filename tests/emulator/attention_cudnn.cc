// In place of attention_cudnn.cu: cuDNN is not emulated, so attention.cu's own kernels do all the work.
#include "../../layers/attention_cudnn.h"

bool attention_cudnn_forward(real *, precise *, const real *, int64_t, int64_t, int64_t, int64_t, int64_t,
                             int64_t, cf_stream *) {
    return false;
}

bool attention_cudnn_backward(real *, const real *, const real *, const precise *, const real *, precise *,
                              int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, cf_stream *) {
    return false;
}

int64_t attention_cudnn_scratch(int64_t, int64_t, int64_t, int64_t) {
    return 0;
}

void attention_cudnn_enable(bool) {}
