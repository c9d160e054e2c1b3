// Where the time of a run went, over all its starts: the goodput is the share spent on steps that count.
//
//   start   from the start of the program to its first step
//   train   steps that were taken for the first time
//   redo    steps taken again, because what they had done was not saved
//   save    the run stood while checkpoints were taken or waited for
//   watch   validation, samples, traces
//   down    from the last sign of life of a start that was killed to the next start: a step that was not finished,
//           waiting for a frozen rank, and the time until somebody started the run again
//
// Rank 0 keeps them in OUT/accounts.json, which is replaced as a whole after a step, at most five times a second, and
// not synced: a power cut loses a second of book-keeping, nothing else. Time between an end that was recorded (finished,
// or stopped by a signal) and the next start belongs to nobody.
#ifndef ACCOUNTS_H
#define ACCOUNTS_H

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include "../commfuse/trace.h"
#include "../commfuse/transport.h"
#include "log.h"
#include "options.h"

CF_EXTERN_C_BEGIN

typedef enum { TIME_START, TIME_TRAIN, TIME_REDO, TIME_SAVE, TIME_WATCH, TIME_DOWN, TIMES } time_purpose;

typedef struct accounts {
    double ms[TIMES];
    int64_t starts, steps; // steps: those that were ever taken
    double stored_ms;      // when, on the clock of cf_now_ms; 0: not yet
    char path[PATH_MAX];   // "": not kept
} accounts;

// Goes on with those in `out`, if there are any; "": only of this start.
void accounts_open(accounts *a, const char *out);
void accounts_step(accounts *a, int64_t step, double ms); // train or redo
void accounts_store(accounts *a, bool ended);             // ended: in any case, and nothing is lost from here on

double accounts_goodput(const accounts *a); // 0 … 1
void accounts_print(const accounts *a, FILE *file);
void accounts_log(const accounts *a, logfile *log); // adds fields to the line

// The overlap audit: of each operation, how much of its communication was hidden, what bounded it, and the option worth trying.
// Of all steps but those that tried ways, means over ranks. Collective. Rank 0 prints those that waited most, and logs all.
void accounts_audit(const cf_trace *trace, cf_transport *transport, const options *o, logfile *log);

CF_EXTERN_C_END
#endif
