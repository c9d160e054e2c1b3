// The words of a vocabulary, for decoding samples and encoding prompts. prepare.py writes a vocabulary file, tokenizer.bin
// (llm.c's), beside the token files: a header of 256 uint32 (20240328, 2, count, end-of-text token, 0 …), then for each token one
// byte with its length and its bytes. Byte-level models need none: token = byte.
#pragma once
#include <stdbool.h>
#include <stdint.h>

typedef struct vocabulary vocabulary;
// path: a vocabulary file. NULL if the file does not exist; dies together if it is damaged.
vocabulary *vocabulary_open(const char *path);
// Opens tokenizer.bin in the directory of `file`; NULL if there is none.
vocabulary *vocabulary_beside(const char *file);
void vocabulary_close(vocabulary *v);
int64_t vocabulary_size(const vocabulary *v);        // 256 for NULL (bytes)
int64_t vocabulary_end_of_text(const vocabulary *v); // -1 if none
// Writes the bytes of one token to text (at most 255, no terminator); returns how many. v NULL: the byte itself.
int vocabulary_bytes(const vocabulary *v, int64_t token, char *text);

// Encodes a text, valid UTF-8 with a terminating zero, to at most `bytes` tokens; returns how many. As in tiktoken, the pair of
// neighbours in a word whose union has the lowest number is merged first. "<|endoftext|>" becomes the end-of-text token. v NULL:
// each byte is a token.
int64_t vocabulary_encode(const vocabulary *v, const char *text, int64_t bytes, int32_t *tokens);
// The classes of characters in GPT-2's pattern: \p{L}, \p{N}, \s, and all others.
typedef enum { OTHER_CHARACTER, LETTER, NUMERAL, BLANK } character_class;
character_class vocabulary_class_of(const char *at); // of a valid character
