// The timeline of some steps of all ranks, --trace (see commfuse/trace.h).
#ifndef TIMELINE_H
#define TIMELINE_H

#include "trainer.h"

#ifdef __cplusplus
extern "C" {
#endif

// Collective.
void timeline_start(trainer *t);
void timeline_write(trainer *t);

#ifdef __cplusplus
}
#endif
#endif
