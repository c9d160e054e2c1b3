// What a run says of itself: on the terminal, for people, and in the log, for programs. Rank 0 speaks; the log of the
// others is NULL and swallows everything.
#ifndef REPORT_H
#define REPORT_H

#include "tell.h"

#ifdef __cplusplus
extern "C" {
#endif

void report_config(trainer *t); // the log's first line, or that a run goes on
void report_banner(const trainer *t);
void report_plan(trainer *t); // --dry-run
void report_step(trainer *t, int64_t step, const step_result *r, double lr, const step_times *times,
                 double eta_s);
void report_end(trainer *t, int64_t step, double begin_ms,
                int stop); // stop: the signal that has ended it, or 0

#ifdef __cplusplus
}
#endif
#endif
