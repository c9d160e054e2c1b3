// The words of a vocabulary: token numbers to text, for samples. prepare.py writes a vocabulary file beside the token files:
// tokenizer.bin (llm.c's), 256 uint32 header (20240328, 2, count, end-of-text token, 0 …), then for each token
// one length byte and that many bytes. Byte-level models need none: token = byte.
#ifndef VOCABULARY_H
#define VOCABULARY_H

#include "problem.h"
#include <stdint.h>

CF_EXTERN_C_BEGIN

typedef struct vocabulary vocabulary;
// path: a vocabulary file. NULL if the file does not exist; dies together if it is damaged.
vocabulary *vocabulary_open(const char *path);
// The file tokenizer.bin in the directory of that file; else NULL.
vocabulary *vocabulary_beside(const char *file);
void vocabulary_close(vocabulary *v);
int64_t vocabulary_size(const vocabulary *v);        // 256 for NULL (bytes)
int64_t vocabulary_end_of_text(const vocabulary *v); // -1 if none
// Where the bytes of one of its tokens are, and how many; no terminator.
const char *vocabulary_word(const vocabulary *v, int64_t token, int *length);
// Bytes of one token into text (at most 255 and no terminator); returns how many. NULL v: the byte itself.
int vocabulary_bytes(const vocabulary *v, int64_t token, char *text);

CF_EXTERN_C_END
#endif
