// What ranks tell each other after every step: how long it took them, whether a signal has asked for the end, how far
// their checkpoint is, and which step it was.
#ifndef TELL_H
#define TELL_H

#include "trainer.h"

#ifdef __cplusplus
extern "C" {
#endif

// What a step took, as all ranks have told.
typedef struct step_times {
    double ms, exposed_ms, comm_ms,
        lag_ms;        // the longest; how much longer the slowest rank computes than the median
    int slowest, stop; // rank; signal that has asked for the end, 0: none
} step_times;

// Collective. begin_ms: when the step began, on the cf_now_ms clock. Dies if ranks are not in the same step.
step_times tell_step(trainer *t, int64_t step, double begin_ms);

#ifdef __cplusplus
}
#endif
#endif
