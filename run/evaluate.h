// How good the model is so far: the validation loss, and texts that it writes.
#ifndef EVALUATE_H
#define EVALUATE_H

#include "trainer.h"

#ifdef __cplusplus
extern "C" {
#endif

// Both before step `step`, collective; rank 0 prints and logs.
void evaluate_loss(trainer *t, int64_t step);
void evaluate_sample(trainer *t, int64_t step);

#ifdef __cplusplus
}
#endif
#endif
