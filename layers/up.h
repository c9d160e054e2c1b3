// The attention half of a block in UP.
#pragma once
#include "model.h"

// Replaces the operations that the linear layers have in TPSP.
void up_create(gpt *g);
// norm: layer norm of the half's input. Returns this rank's shard (Ts, B, C) of the half's output, without the projection's bias.
const real *up_forward(gpt *g, int layer, real *norm);
// dx: the gradient of the output. Returns the gradient of norm. The weight gradient of QKV is computed here, or in
// up_gradient_after() if its place is after.
const real *up_backward(gpt *g, int layer, real *dx);
void up_gradient_after(gpt *g, int layer);
