// Deadlines for library calls that hang when another rank does not come, and that cannot name that rank: at start, when
// groups are made, and at the end. (For a transfer the transport waits itself and asks the watch.)
//
//     cf_patience_begin("NCCL connects the ranks", timeout_s);
//     …
//     cf_patience_end();
//
// Between the two the calling thread has timeout_s (0: for ever); then another thread ends the process with a message
// that names the call. One such call at a time in a process; they do not nest.
#ifndef CF_PATIENCE_H
#define CF_PATIENCE_H

#ifdef __cplusplus
extern "C" {
#endif

// Time for a library's start, in timeouts: its launcher watches the ranks too, and all of them start at once, on hosts
// that may be busy.
#define CF_PATIENCE_START 10

void cf_patience_begin(const char *what, double timeout_s); // what: words that stay
void cf_patience_end(void);

#ifdef __cplusplus
}
#endif
#endif
