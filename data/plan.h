// The plan of a run: how each operation travels, as the tuner found it (commfuse/tune.h) or somebody wrote it. The same text is
// in --out DIR/plan.json, in every checkpoint, and in what --plan FILE reads:
//
//   { "shape": "tp 2 x dp 1, tpsp, 12 layers of 768 channels, …",   what the operations are
//     "machine": "mpi, 2 ranks, 2 a host, …",                       where they were timed
//     "operations": {"forward all-gather att.qkv": "ring:2", "forward reduce-scatter att.proj": "once", …} }
#ifndef PLAN_H
#define PLAN_H

#include <limits.h>
#include "../commfuse/tune.h"
#include "log.h"
#include "options.h"
#include "problem.h"

CF_EXTERN_C_BEGIN

typedef struct run_plan {
    cf_tuner *tuner;               // NULL: nothing to choose
    char shape[256], machine[256]; // this run's
    char path[PATH_MAX];           // where it is written; "": nowhere
    char *given, *cached;          // texts of --plan and of DIR/plan.json; NULL: none
    bool root, trying, anew;       // anew: --plan new
    bool known;                    // by trials, or by one of the texts
    int64_t steps;                 // since trials ended
    double first_ms, window_ms;
} run_plan;

// Before the first request: rank 0 reads the files, every rank gets the same. Dies together on a --plan that cannot be read.
void plan_create(run_plan *p, cf_tuner *tuner, const options *o, cf_transport *transport, const char *version);
void plan_free(run_plan *p);

enum { PLAN_WORTH_STEPS = 5 * CF_TRIAL_STEPS }; // a shorter run without --plan new keeps the plan of the arithmetic
// Gives the operations their ways: those of --plan, else of `saved` (the checkpoint's text, or NULL), else of DIR/plan.json;
// where there is none, or one in DIR alone, by trials if `steps` are left. Dies together if --plan does not fit.
void plan_start(run_plan *p, const char *saved, int64_t steps);
void plan_explain(const run_plan *p, FILE *out); // for --dry-run
char *plan_text(const run_plan *p);              // for a checkpoint; the caller frees it; NULL: nothing has been found yet
// After each step. When trials have ended the plan is printed, logged and written; later a step that has become slower is
// reported once.
void plan_step(run_plan *p, logfile *log, int64_t step, double ms);

CF_EXTERN_C_END
#endif
