// Losses of given sequences, without training: validation, HellaSwag.
#ifndef EVALUATE_H
#define EVALUATE_H

#include "model.h"

CF_EXTERN_C_BEGIN

// Writes a sequence into column b of inputs and targets (T, B), which are zero. Losses of its tokens [*first, *end) count:
// [0, length), unless it says so.
typedef void evaluate_load(void *argument, int64_t number, int64_t b, int64_t B, int32_t *inputs, int32_t *targets, int64_t *first,
                           int64_t *end);

// Collective over all ranks. The sums of the losses of sequences 0 … count − 1, the same on every rank; the caller frees them.
// They have at most `length` tokens, and passes a few more. A replica takes at most B at a time.
double *gpt_evaluate(gpt *g, evaluate_load *load, void *argument, int64_t count, int64_t length, int64_t B);

CF_EXTERN_C_END
#endif
