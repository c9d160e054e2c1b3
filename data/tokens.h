// Token files (llm.c's): 256 int32 header (20240520, 1, count, 0 …), then `count` uint16 tokens.
// Files matching a glob, in name order, form one stream of samples.
//
// Sample i of a file is tokens [i·T, i·T + T], T inputs and the same shifted by one as targets; samples do
// not cross files. Numbered over all files in order: 0 … count − 1.
// Training order: epoch e visits every sample once in a pseudo-random order that depends on (seed, e)
// alone, so which samples a step uses depends on seed and step, never on the mesh.
#ifndef TOKENS_H
#define TOKENS_H

#include "problem.h"
#include <stdint.h>

CF_EXTERN_C_BEGIN

typedef struct token_file {
    int64_t count;
    int64_t first; // number of its first sample
} token_file;
typedef struct tokens {
    int64_t T, samples; // in one epoch
    int64_t count;      // tokens in all files
    int files;
    // Of the files' sizes and of blocks that are spread over them: sees a changed stretch of a thousandth of a file. Of small
    // files, and of those that have fewer than 2^27 tokens together, it is of all tokens. 53 bits, so that a double holds it
    // exactly.
    uint64_t fingerprint;
    uint64_t hash; // likewise, of all tokens: after tokens_verify(); 0 before
    // The largest token that has been seen, and where. Of bytes none is above 255; of the text that GPT-2's encoding makes larger
    // ones of, few words are not.
    int largest, largest_in;
    int64_t largest_at;
    struct input_files *in;
    token_file *file; // (files)
    uint16_t *piece;  // a buffer of tokens
} tokens;

// Opens every file matching `pattern`, checks magic, version, count against the file size. Dies (together)
// naming the file, what was found and what was expected, and what to do. T: tokens per sample.
// A file or directory that exists is meant by its name, even if that holds brackets or stars.
tokens *tokens_open(const char *pattern, int64_t T);
void tokens_close(tokens *t);
// The first of those files, which the caller frees; NULL if there is none.
char *tokens_first_file(const char *pattern);
void tokens_verify(tokens *t); // reads all tokens
// Dies (together) naming file, position and value if a token that has been read so far is >= vocab.
void tokens_check(const tokens *t, int64_t vocab);

// The `position`-th sample of the training order: position = step · batch + i, any non-negative number.
int64_t tokens_shuffled(const tokens *t, uint64_t seed, int64_t position);

// Copy sample `sample` into column b of inputs and targets (T, B): row t·B + b. Dies naming file, position
// and value if a token is >= vocab.
// Likewise if the file has become shorter: nobody may write it while a run reads it.
void tokens_read(tokens *t, int64_t sample, int64_t vocab, int64_t b, int64_t B, int32_t *inputs, int32_t *targets);

CF_EXTERN_C_END
#endif
