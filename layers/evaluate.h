// The loss of given sequences, without training: validation.
#pragma once
#include "model.h"

// Writes sequence `number` into column b of inputs and targets (T, B).
typedef void evaluate_load(void *argument, int64_t number, int64_t b, int64_t B, int32_t *inputs, int32_t *targets);

// Collective over all ranks. Returns the mean loss of sequences 0 … count − 1, the same on every rank. A replica evaluates at most
// B at a time.
double gpt_evaluate(gpt *g, evaluate_load *load, void *argument, int64_t count, int64_t B);
