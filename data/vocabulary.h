// The words of a vocabulary, for prompts and samples. prepare.py writes a vocabulary file, tokenizer.bin
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
bool vocabulary_same(const vocabulary *a, const vocabulary *b);
int64_t vocabulary_size(const vocabulary *v); // 256 for NULL (bytes)
// The token before a sample of a model of V tokens: end of text; of bytes a line feed; or 0 if the model has none of them.
int32_t vocabulary_first(const vocabulary *v, int64_t V);
// Writes the bytes of one token to text (at most 255, no terminator); returns how many. v NULL: the byte itself.
int vocabulary_bytes(const vocabulary *v, int64_t token, char *text);
// The tokens of a text, at most `length`: again and again the longest word that the rest begins with, which is not always what the
// encoding's own rules give. v NULL: bytes. Dies together where no word fits.
int64_t vocabulary_encode(const vocabulary *v, const char *text, int64_t length, int32_t *tokens);
