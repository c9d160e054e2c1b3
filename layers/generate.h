// Text that a model continues.
#pragma once
#include "model.h"

typedef struct sampling {
    double temperature; // logits are divided by it; 0: always the largest logit
    int64_t top_k;      // draw among the top_k largest logits, and all that equal the last of these; 0: among all
    uint64_t seed, stream;
} sampling;

// Collective over a replica: tokens (prompt + count) begins with a prompt, of 1 to T tokens, and gets the `count` that follow it.
// Random numbers are a function of (seed, stream) alone, so every rank draws the same. When the window of T tokens is full, its
// older half is dropped.
void gpt_generate(gpt *g, sampling how, int32_t *tokens, int64_t prompt, int64_t count);
