// Signals that ask the run to end: SIGTERM (launchers), SIGINT (the keyboard), SIGUSR1 (batch systems' warning).
//
// The first one is remembered, and the rank says that it has heard it; the program looks when it can end in good
// order, which every rank does after the same step. A second one ends this rank at once with status 1.
// Repeats within half a second are one signal: launchers send it to a process and to its group at once.
#ifndef CF_STOP_H
#define CF_STOP_H

#ifdef __cplusplus
extern "C" {
#endif

// Call once, from the thread that computes, after cf_device_threads. Threads that are started later may get the signals
// too.
void cf_stop_listen(void);

// The signal that has asked for the end, or 0.
int cf_stop_asked(void);

// What this thread waits for from now on, NULL: nothing. It is part of what is said about a signal, which may be
// this rank's last word: a launcher that ends a run because one rank is gone asks the others to end, and kills them
// a moment later. The wait stays the caller's and may change while it stands here. Costs one store.
typedef struct cf_wait {
    int peer;          // world rank, -1: several
    const char *label; // "reduce-scatter mlp.fc2"
    int layer, step;   // -1: none
} cf_wait;
void cf_stop_waits(const cf_wait *wait);

#ifdef __cplusplus
}
#endif
#endif
