// Accounts of the time of a run, over all its starts. Goodput is the share of `train`.
//
//   start   from the start of the program to its first step
//   train   steps that ran for the first time
//   redo    steps that ran again, because their result was not saved
//   save    training paused while a checkpoint was copied or waited for
//   watch   validation, samples, traces
//   down    from the last record before a kill to the next start: an unfinished step, waiting for a frozen rank, and the time until
//           somebody started the run again
//
// Rank 0 keeps them in OUT/accounts.json, which is replaced as a whole after a step, at most five times a second, and not synced:
// a power cut loses a second of the accounts, nothing else. The time from a recorded end (finished, or stopped by a signal) to the
// next start does not count.
#pragma once
#include <limits.h>
#include "../../commfuse/trace.h"
#include "../../commfuse/transport.h"
#include "log.h"
#include "options.h"

typedef enum { TIME_START, TIME_TRAIN, TIME_REDO, TIME_SAVE, TIME_WATCH, TIME_DOWN, TIMES } time_purpose;

typedef struct accounts {
    double ms[TIMES];
    int64_t starts, steps; // steps: how many different ones have run
    double stored_ms;      // time of the last write, on the clock of cf_now_ms(); 0: not yet
    char path[PATH_MAX];   // "": not stored
} accounts;

// Continues the accounts in the directory `out`, if there are any. "": of this start alone, not stored.
void accounts_open(accounts *a, const char *out);
void accounts_step(accounts *a, int64_t step, double ms); // train or redo
void accounts_store(accounts *a, bool ended);             // ended: the run has ended, write at once

double accounts_goodput(const accounts *a); // 0 … 1
void accounts_print(const accounts *a, FILE *file);
void accounts_log(const accounts *a, logfile *log); // adds fields to the line

// The overlap audit: for each operation, how much of its communication was hidden, what limited it, and an option worth trying.
// Means over ranks and all steps but trials. Collective. Rank 0 prints the operations with the longest exposed time and logs all.
void accounts_audit(const cf_trace *trace, cf_transport *transport, const options *o, logfile *log);
