// What --dry-run prints of a model: memory, how gradients and weights travel, and the schedule of every operation.
#ifndef DRY_RUN_H
#define DRY_RUN_H

#include "figures.h"
#include "model.h"

#ifdef __cplusplus
extern "C" {
#endif

void dry_run(gpt *g, const rank_figures *f, FILE *out);

#ifdef __cplusplus
}
#endif
#endif
