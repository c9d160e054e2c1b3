// The words of a vocabulary: from token numbers to text, for samples, and back, for prompts. prepare.py writes a vocabulary file,
// tokenizer.bin (llm.c's), beside the token files: a header of 256 uint32 (20240328, 2, count, end-of-text token, 0 …), then for each
// token one length byte and that many bytes. Byte-level models need none: token = byte.
#ifndef VOCABULARY_H
#define VOCABULARY_H

#include "options.h"

CF_EXTERN_C_BEGIN

typedef struct vocabulary vocabulary;
// path: a vocabulary file. NULL if the file does not exist; dies together if it is damaged.
vocabulary *vocabulary_open(const char *path);
// The file tokenizer.bin in the directory of that file; else NULL.
vocabulary *vocabulary_beside(const char *file);
void vocabulary_close(vocabulary *v);
int64_t vocabulary_size(const vocabulary *v);        // 256 for NULL (bytes)
int64_t vocabulary_end_of_text(const vocabulary *v); // -1 if none
// Writes the bytes of one token to text (at most 255, no terminator); returns how many. v NULL: the byte itself.
int vocabulary_bytes(const vocabulary *v, int64_t token, char *text);

// Writes the tokens of a text, valid UTF-8 with a zero after it, to tokens (at most `bytes`); returns how many. It is encoded as by
// tiktoken: in each word, the pair of neighbours whose union has the lowest number is joined first. "<|endoftext|>" is that token.
// v NULL: any bytes, each is a token.
int64_t vocabulary_encode(const vocabulary *v, const char *text, int64_t bytes, int32_t *tokens);
// The classes of characters in GPT-2's pattern: \p{L}, \p{N}, \s, and all others.
typedef enum { OTHER_CHARACTER, LETTER, NUMERAL, BLANK } character_class;
character_class vocabulary_class_of(const char *at); // of a valid character

// The *count tokens of --prompt, in an array with room for o->sample_tokens more, which the caller frees. Without --prompt one token:
// the end of a text, or else of a line. Dies together if the prompt is no text, is longer than --seq, or has tokens beyond V.
enum { PROMPT_MAX_BYTES = 1 << 16 };
int32_t *vocabulary_prompt(const options *o, const vocabulary *v, int64_t V, int64_t *count);

CF_EXTERN_C_END
#endif
