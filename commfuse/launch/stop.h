// Signals that ask the run to end: SIGTERM (launchers), SIGINT (the keyboard), SIGUSR1 (a batch system's warning), SIGHUP (the
// terminal is gone; ignored under nohup).
//
// The first one is recorded and reported; the program checks for it between steps, and every rank ends after the same step. A
// second one ends this rank at once with status 1. Repeats within half a second count as one signal, because launchers send it to
// a process and to its group.
#pragma once
// Call once, from the compute thread, after cf_device_threads.
void cf_stop_listen(void);

// The signal that asked for the end, or 0.
int cf_stop_asked(void);

// The compute thread waits for this from now on; NULL: for nothing. The message about a signal includes it, because it may be
// this rank's last: when one rank is gone, a launcher signals the others and kills them a moment later. The label must stay valid
// until the next call.
typedef struct cf_wait {
    int peer;          // world rank, -1: several
    const char *label; // "reduce-scatter mlp.fc2"
    int layer, step;   // -1: none
    unsigned config;   // of cf_request
} cf_wait;
void cf_stop_waits(const cf_wait *wait);

// "waits for rank 1: reduce-scatter mlp.fc2, layer 7, step 41". peers: the ranks, in words; NULL: as in `wait`.
enum { CF_WAIT_TEXT = 512 };
const char *cf_wait_text(char text[CF_WAIT_TEXT], const cf_wait *wait, const char *peers);
