// Where the time of a run went, over all its starts. Goodput is the share spent on steps that count.
//
//   start   from the start of the program to its first step
//   train   steps that were taken for the first time
//   redo    steps taken again, because their result was not saved
//   save    training paused while a checkpoint was copied or waited for
//   watch   validation, samples, traces
//   down    from the last record of a start that was killed to the next start: an unfinished step, waiting for a frozen rank, and the
//           time until somebody started the run again
//
// Rank 0 keeps them in OUT/accounts.json, which is replaced as a whole after a step, at most five times a second, and not synced:
// a power cut loses a second of them, nothing else. The time from an end that was recorded (finished, or stopped by a signal) to
// the next start does not count.
#ifndef ACCOUNTS_H
#define ACCOUNTS_H

#include <limits.h>
#include "../commfuse/trace.h"
#include "../commfuse/transport.h"
#include "log.h"
#include "options.h"

CF_EXTERN_C_BEGIN

typedef enum { TIME_START, TIME_TRAIN, TIME_REDO, TIME_SAVE, TIME_WATCH, TIME_DOWN, TIMES } time_purpose;

typedef struct accounts {
    double ms[TIMES];
    int64_t starts, steps; // steps: those that were ever taken
    double stored_ms;      // when, on the clock of cf_now_ms(); 0: not yet
    char path[PATH_MAX];   // "": nowhere
} accounts;

// Continues those in the directory `out`, if there are any. "": of this start alone.
void accounts_open(accounts *a, const char *out);
void accounts_step(accounts *a, int64_t step, double ms); // train or redo
void accounts_store(accounts *a, bool ended);             // ended: a recorded end, which is written at once

double accounts_goodput(const accounts *a); // 0 … 1
void accounts_print(const accounts *a, FILE *file);
void accounts_log(const accounts *a, logfile *log); // adds fields to the line

// The overlap audit: for each operation, how much of its communication was hidden, what bounded it, and the option worth trying.
// Means over ranks and all steps but trials. Collective. Rank 0 prints the operations with the longest waits, and logs all.
void accounts_audit(const cf_trace *trace, cf_transport *transport, const options *o, logfile *log);

CF_EXTERN_C_END
#endif
