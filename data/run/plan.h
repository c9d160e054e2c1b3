// The plan of a run: the schedule of each operation, found by the tuner (commfuse/tune.h) or written by hand. --out DIR/plan.json
// and the file of --plan hold the same text:
//
//   { "shape": "tp 2 x dp 1, tpsp, 12 layers of 768 channels, …",   what the operations are, and the policy if it is not auto's
//     "machine": "mpi, 2 ranks, 2 a host, …",                       where they were timed
//     "operations": {"forward all-gather att.qkv": "ring:2", "forward reduce-scatter att.proj": "once", …} }
#pragma once
#include <limits.h>
#include "../../commfuse/tune.h"
#include "log.h"
#include "options.h"

typedef struct run_plan {
    cf_tuner *tuner;               // NULL: nothing to choose
    char shape[384], machine[256]; // of this run
    char path[PATH_MAX];           // of plan.json; "": none is written
    char *text;                    // of --plan (given), else of the checkpoint, else of DIR/plan.json; NULL: none
    int64_t bytes;                 // of text
    bool given, root, trying;
    bool assumes;  // that the network between hosts is as fast as --help says of --network-gbit
    int64_t worth; // trials follow if at least so many steps are left; INT64_MAX: none (--plan FILE, --reproducible)
} run_plan;

// Rank 0 reads the files for all ranks. Dies together if --plan cannot be read. saved: plan_text() of the checkpoint from which the
// run resumes on the same mesh; NULL: it has none.
void plan_create(run_plan *p, cf_tuner *tuner, const options *o, cf_transport *transport, const char *version, const char *saved);
void plan_free(run_plan *p);

enum { PLAN_WORTH_STEPS = 210 }; // a shorter run without --plan new keeps the predicted plan
// Uses the plan of --plan, else the checkpoint's, else DIR/plan.json, and returns whether there was one. A run that resumes keeps
// it, on any machine; otherwise trials follow if enough `steps` are left, or if the checkpoint was saved in trials. Dies together
// if --plan does not fit.
bool plan_start(run_plan *p, bool resumes, int64_t steps);
// For predictions: with this whole plan (cf_tuner_take), without trials. false: there is none.
bool plan_start_whole(run_plan *p, int plan);
// For a checkpoint's manifest: the plan as it is now, "" in trials, NULL if nothing is to be chosen. The caller frees it.
char *plan_text(const run_plan *p);
void plan_explain(const run_plan *p, FILE *out); // for --dry-run
// After each step. Prints, logs and writes the plan when trials have ended.
void plan_step(run_plan *p, logfile *log, int64_t step);
