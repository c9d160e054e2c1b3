// Token files (llm.c's): a header of 256 int32 (20240520, 1, count, 0 …), then `count` uint16 tokens; or (20240801, 7, count, 0 …)
// and uint32 tokens, for vocabularies above 65,536. The files that match a pattern, sorted by name, are one data set.
//
// Sample i of a file is tokens [i·T, i·T + T]: T inputs, and the same shifted by one as targets. Samples do not cross files, and
// are numbered over all files. Epoch e visits every sample once, in a pseudo-random order that depends on (seed, e) alone. So the
// samples of a step depend on seed and step, never on the mesh.
#pragma once
#include "input.h"

typedef struct token_file {
    input in;
    int64_t count; // tokens
    int64_t first; // number of its first sample
    int width;     // bytes of a token
} token_file;
typedef struct tokens {
    int64_t T, samples; // in one epoch
    int64_t count;      // tokens in all files
    int64_t vocab;      // no token is as large
    int files;
    // A hash of the files' sizes and of blocks spread over them, which detects a change of a thousandth of a file. Small files, and
    // sets of fewer than 2^27 tokens, are hashed whole. 53 bits: exact in a double.
    uint64_t fingerprint;
    token_file *file; // (files)
    void *piece;      // a buffer of tokens
} tokens;

// Opens every file that matches, and checks its header against its size, and the tokens that it reads for the fingerprint. Dies
// (together) with the name of the file, what was found and expected, and what to do. T: tokens per sample. vocab: no token is as
// large. The name of an existing file or directory is not a pattern, even if it has brackets or stars.
tokens *tokens_open(const char *pattern, int64_t T, int64_t vocab);
void tokens_close(tokens *t);
// The name of the first of those files, which the caller frees; NULL if there is none.
char *tokens_first_file(const char *pattern);

// The `position`-th sample of the training order: position = step · batch + i, any non-negative number.
int64_t tokens_shuffled(const tokens *t, uint64_t seed, int64_t position);

// Copies a sample into column b of inputs and targets (T, B): element t·B + b. Dies if a token is beyond the vocabulary, naming
// file, position and value, or if the file has become shorter.
void tokens_load(void *tokens, int64_t sample, int64_t b, int64_t B, int32_t *inputs, int32_t *targets);
