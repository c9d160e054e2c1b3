// HellaSwag, or other questions with a text and four endings, in llm.c's format (its dev/data/hellaswag.py): a header of 256 int32
// (20240522, 1, examples, bytes of the longest one, 0 …), then uint16 numbers. An example is 65535, its bytes, its index, the right
// ending, 4, then the context and the four endings, each as the number of tokens and the tokens.
//
// A row is the context with one of the endings: row 4 · example + ending. The model's answer is the ending whose tokens have the
// lowest mean loss.
#pragma once
#include "input.h"

enum { HELLASWAG_ENDINGS = 4 };

typedef struct token_part {
    const uint16_t *token;
    int64_t count;
} token_part;
typedef struct hellaswag_example {
    token_part context, ending[HELLASWAG_ENDINGS];
    int right;
} hellaswag_example;
typedef struct hellaswag {
    int64_t count, longest; // examples; tokens of input of a row
    uint64_t hash;          // of the whole file
    hellaswag_example *all; // (count)
    const uint16_t *number; // the examples
    char *bytes;            // the file
} hellaswag;
// Dies (together) naming file, example and number if the file is damaged, a row has more than T input tokens, or a token is >= V.
hellaswag *hellaswag_open(const char *path, int64_t T, int64_t V);
void hellaswag_close(hellaswag *h);
// Writes a row to column b of inputs and targets (T, B). Its ending is tokens [*first, *end).
void hellaswag_load(void *h, int64_t row, int64_t b, int64_t B, int32_t *inputs, int32_t *targets, int64_t *first, int64_t *end);
// The number of examples whose right ending has the lowest mean loss; of equal ones the first counts. losses: (4 · examples), sums
// over the tokens of an ending.
int64_t hellaswag_correct(const hellaswag *h, const double *losses);
