// What a run keeps in --out, and what it begins with: checkpoints and the model file.
#ifndef KEEP_H
#define KEEP_H

#include "trainer.h"

#ifdef __cplusplus
extern "C" {
#endif

// Before any work is done: can --out and --trace be written? Takes hold of --out for this run.
void keep_open(trainer *t);
// The newest sound checkpoint, or else the beginning.
void keep_begin(trainer *t);

// A checkpoint of the state before step `step`. The run stands while the state is copied, and as long as an earlier
// checkpoint is still being written. watched: validation and samples of this step are done.
bool keep_save(trainer *t, int64_t step, bool watched);
bool keep_wait(trainer *t); // until it is written; false: it could not be

// The whole model in llm.c's format.
void keep_model(trainer *t, int64_t step, const char *path);
// --export: that of a checkpoint.
void keep_export(trainer *t);

#ifdef __cplusplus
}
#endif
#endif
