// The text that samples continue (--prompt).
#pragma once
#include "../vocabulary.h"
#include "options.h"

// The *count tokens of --prompt, in an array with room for opt->sample_tokens more, which the caller frees. Without --prompt one
// token: end of text, or else a line feed. Dies together if the prompt is not text, is longer than --seq, or has tokens beyond V.
enum { PROMPT_MAX_BYTES = 1 << 16 };
int32_t *prompt_encode(const options *opt, const vocabulary *v, int64_t V, int64_t *count);
