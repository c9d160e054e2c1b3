// Signals that ask the run to end: SIGTERM (launchers), SIGINT (the keyboard), SIGUSR1 (batch systems' warning).
//
// The first one is remembered and reported; the program checks for it between steps, and every rank ends after the same
// step. A second one ends this rank at once with status 1. Repeats within half a second count as one signal, since
// launchers send it to a process and to its group.
#ifndef CF_STOP_H
#define CF_STOP_H

#include "extern_c.h"

CF_EXTERN_C_BEGIN

// Call once, from the thread that computes, after cf_device_threads. Threads that are started later may get the signals
// too.
void cf_stop_listen(void);

// The signal that has asked for the end, or 0.
int cf_stop_asked(void);

// The wait of this thread from now on, NULL: none. The message about a signal includes it, because it may be this
// rank's last message: a launcher that ends a run because one rank is gone signals the others and kills them a moment
// later. The wait stays the caller's and may change meanwhile. Costs one store.
typedef struct cf_wait {
    int peer;          // world rank, -1: several
    const char *label; // "reduce-scatter mlp.fc2"
    int layer, step;   // -1: none
} cf_wait;
void cf_stop_waits(const cf_wait *wait);

CF_EXTERN_C_END
#endif
