// What a sample begins with: --prompt as token numbers. Bytes are tokens themselves; with a vocabulary text is encoded as GPT-2
// does, with tiktoken's rule: in each word of the text the pair of neighbours is joined first whose union has the lowest number.
#ifndef PROMPT_H
#define PROMPT_H

#include "options.h"
#include "vocabulary.h"

CF_EXTERN_C_BEGIN

enum { PROMPT_MAX_BYTES = 1 << 16 };

// (o->sample_tokens more than *count), which the caller frees: *count tokens, that a sample is to follow. Without --prompt one:
// the end of a text, or else of a line. Dies together if it is no text, longer than --seq, or has tokens beyond V.
int32_t *prompt_read(const options *o, const vocabulary *words, int64_t V, int64_t *count);

// Tokens of valid UTF-8, followed by a zero, into tokens (at most `bytes`); returns how many. "<|endoftext|>" is that token.
// NULL words: bytes, whatever they are.
int64_t prompt_encode(const vocabulary *words, const char *text, int64_t bytes, int32_t *tokens);

CF_EXTERN_C_END
#endif
