// Text, token by token, drawn from the model's probabilities.
#ifndef GENERATE_H
#define GENERATE_H

#include "model.h"

#ifdef __cplusplus
extern "C" {
#endif

// Collective over a replica: `count` tokens behind `first`, with random numbers that are a function of (seed, stream)
// alone, so that every rank draws the same. Once the window of T tokens is full its older half is dropped. inputs (T):
// scratch of the host.
void gpt_generate(gpt *g, int32_t first, uint64_t seed, uint64_t stream, int64_t T, int32_t *inputs,
                  int32_t *token, int count);

#ifdef __cplusplus
}
#endif
#endif
