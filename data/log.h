// The log: one JSON object a line, written line by line, each number with all its digits.
// Only rank 0 writes. A NULL log swallows everything, so callers need no if. A line that cannot be written (disk full) is
// reported and left out, and does not end the run: see log_whole().
//
//     log_begin(log, "step"); log_int(log, "step", 7); log_real(log, "loss", 3.2); log_end(log);
#ifndef LOG_H
#define LOG_H

#include "problem.h"
#include <stdint.h>

CF_EXTERN_C_BEGIN

typedef struct logfile logfile;
// past NULL: a new log; one that is there already becomes PATH.1, or .2, …. Dies if it cannot be written, or another process
// writes it. A path that is NULL or "" gives NULL.
// Else goes on with the log of a run that begins again at `step`: keeps the lines of what came before, steps below it and all
// else up to it (validation and samples at `step` itself only if they are `watched`, that is not done again), and drops
// what will be written again, that run's "end", and a line cut short. What is kept takes the old file's place before
// anything is added. If there is no such file, or if its first "config" has not this run's name as "run": a new one.
typedef struct log_past {
    const char *run;
    int64_t step;
    bool watched;
} log_past;
logfile *log_open(const char *path, const log_past *past);
bool log_empty(const logfile *log); // no line yet
void log_begin(logfile *log, const char *event);
void log_int(logfile *log, const char *name, int64_t value);
void log_real(logfile *log, const char *name, double value); // NaN, infinity: null
void log_true(logfile *log, const char *name);
void log_text(logfile *log, const char *name, const char *value); // invalid UTF-8 becomes U+FFFD
void log_end(logfile *log);                                       // writes the line
// Is all there that was to be written? If not, says so.
bool log_whole(const logfile *log);
// What has been written so far is on the disk, where the log is a file, or it is said not to be. Any thread.
void log_sync(logfile *log);
void log_close(logfile *log);

CF_EXTERN_C_END
#endif
