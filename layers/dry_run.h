// What --dry-run prints of a model: memory, how gradients and weights travel, and the schedule of every operation.
#ifndef DRY_RUN_H
#define DRY_RUN_H

#include "optimizer.h"

CF_EXTERN_C_BEGIN

void dry_run(gpt *g, zero_optimizer *o, FILE *out);

CF_EXTERN_C_END
#endif
