// Sampling text from the model, token by token.
#ifndef GENERATE_H
#define GENERATE_H

#include "model.h"

CF_EXTERN_C_BEGIN

typedef struct sampling {
    double temperature; // what logits are divided by; 0: always the largest
    int64_t top_k;      // draw among so many largest logits, and any as large as the last of these; 0: all
    uint64_t seed, stream;
} sampling;

// Collective over a replica: tokens (given + count) begins with 1 <= given <= T tokens and gets `count` more. Random numbers
// are a function of (seed, stream) alone, so every rank draws the same. When the window of T tokens is full, its older half is
// dropped.
void gpt_generate(gpt *g, sampling how, int32_t *tokens, int64_t given, int64_t count, int64_t T);

CF_EXTERN_C_END
#endif
