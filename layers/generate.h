// Sampling text from the model, token by token.
#ifndef GENERATE_H
#define GENERATE_H

#include "model.h"

CF_EXTERN_C_BEGIN

// Collective over a replica: `count` tokens after `first`. Random numbers are a function of (seed, stream) alone, so
// every rank draws the same. When the window of T tokens is full, its older half is dropped. inputs (T): host scratch.
void gpt_generate(gpt *g, int32_t first, uint64_t seed, uint64_t stream, int64_t T, int32_t *inputs, int32_t *token, int count);

CF_EXTERN_C_END
#endif
