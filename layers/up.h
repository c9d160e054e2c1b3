// The attention half of a block in UP, up.c.
#ifndef UP_H
#define UP_H

#include "model.h"

CF_EXTERN_C_BEGIN

void up_create(gpt *g, overlap how);
void up_free(gpt *g);
// norm: of the half's input. Returns this rank's shard (Ts, B, C) of what is added to the residual stream.
const real *up_forward(gpt *g, int layer, real *norm);
// dx: the gradient of that. Returns the norm's. The weight gradient of QKV may be left to up_late_gradient(): there, if it is.
const real *up_backward(gpt *g, int layer, real *dx);
void up_late_gradient(gpt *g, int layer);

CF_EXTERN_C_END
#endif
