// The words of a vocabulary: token numbers to text, for samples, and text to token numbers, for prompts. prepare.py writes a
// vocabulary file beside the token files: tokenizer.bin (llm.c's), 256 uint32 header (20240328, 2, count, end-of-text token,
// 0 …), then for each token one length byte and that many bytes. Byte-level models need none: token = byte.
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
// Bytes of one token into text (at most 255 and no terminator); returns how many. NULL v: the byte itself.
int vocabulary_bytes(const vocabulary *v, int64_t token, char *text);

// Tokens of valid UTF-8, followed by a zero, into tokens (at most `bytes`); returns how many. Text is encoded as GPT-2 does, with
// tiktoken's rule: in each word of the text the pair of neighbours is joined first whose union has the lowest number.
// "<|endoftext|>" is that token. NULL v: bytes, whatever they are.
int64_t vocabulary_encode(const vocabulary *v, const char *text, int64_t bytes, int32_t *tokens);
// Which characters are letters, numbers and blanks, as GPT-2's encoding asks (its pattern's \p{L}, \p{N} and \s).
typedef enum { OTHER_CHARACTER, LETTER, NUMERAL, BLANK } character_class;
character_class vocabulary_class_of(const char *at); // of a valid character

// What a sample begins with: --prompt as token numbers, (o->sample_tokens more than *count), which the caller frees: *count
// tokens, that a sample is to follow. Without --prompt one: the end of a text, or else of a line. Dies together if it is no text,
// longer than --seq, or has tokens beyond V.
enum { PROMPT_MAX_BYTES = 1 << 16 };
int32_t *vocabulary_prompt(const options *o, const vocabulary *v, int64_t V, int64_t *count);

CF_EXTERN_C_END
#endif
