// The output of a run: banner, a line per step on the terminal and in the log, and accounts of its time.
// All ranks call these functions; only rank 0 prints and writes.
#pragma once
#include "../commfuse/fuse.h"
#include "accounts.h"
#include "origin.h"
#include "plan.h"
#include "saver.h"

typedef struct run_report {
    const options *o;
    const char *version, *run; // of the program; name of the run, on rank 0
    const cf_mesh *mesh;
    const cf_transport *transport; // in a dry run it may have fewer ranks than the mesh
    int accumulation;
    int64_t parameters, V;     // of the model
    double flops;              // per token, as MFU counts them
    double peak;               // flop/s of all ranks, 0: unknown
    const char *peak_source;   // NULL: not measured
    const tokens *train, *val; // NULL: none
    const vocabulary *words;   // NULL: bytes
    int64_t first;             // the step with which the run begins or resumes
    bool watched;              // validation and samples before it are done
    logfile *log;              // rank 0's
    accounts time;             // rank 0's
    double lap_ms;             // time of the last report_lap(), on the clock of cf_now_ms()
    double stepped_ms;         // of all reported steps
    bool untraced;             // the timeline could not be written
    run_plan plan;             // how operations travel, in mode auto
} run_report;

void report_resume(run_report *r, const manifest *m); // from this checkpoint
// Opens log and accounts of a run that begins, or resumes at r->first.
void report_open(run_report *r);
void report_config(run_report *r); // logs the options; a resumed run keeps the first line of its log and adds another
void report_banner(const run_report *r);

double report_lap(run_report *r);                         // time since the last call, or since the start of the program
double report_spent(run_report *r, time_purpose purpose); // the same, and adds it to the account of this purpose

// The numbers that ranks exchange after each step.
enum { FIGURE_SAVER, FIGURE_STOP, FIGURE_STEP, FIGURE_MS, FIGURE_EXPOSED, FIGURE_COMM, FIGURES };

typedef struct step_report {
    int64_t step;               // -1: none
    double loss, grad_norm, lr; // of all ranks
    double ms;                  // this rank's clock
    int64_t skipped;            // steps skipped in a row up to and including this one; 0: it was not skipped
    int nonfinite_rank;         // if skipped: the first rank with a number that is not finite, -1: none
    const char *nonfinite;      // if skipped: the tensor that was not finite
    bool trial;                 // of the plan
} step_report;

void report_figures(const step_report *step, cf_trace *trace, saver *s, double mine[FIGURES]);
// all: the figures of all ranks, rank r's at r · stride; later exchanges overwrite them. Returns the signal by which some rank was
// asked to end the run, 0: none. Dies if a rank is in another step.
int report_step(run_report *r, const step_report *step, const double *all, int stride, saver *s);

void report_validation(run_report *r, int64_t step, double loss, int64_t sequences);
void report_hellaswag(run_report *r, int64_t step, int64_t correct, int64_t examples);
void report_sample(run_report *r, int64_t step, const int32_t *token, int64_t count);
// Ends the timeline that begins with step `from`, and writes it to --trace.
void report_trace(run_report *r, cf_context *context, int64_t from, int64_t last);
void report_line(const run_report *r, const char *format, ...) CF_PRINTF(2, 3); // prints on rank 0
// stop: the signal that ended the run before its last step, 0: none. Dies together unless the state was saved.
void report_end(run_report *r, cf_context *context, int64_t step, int stop, bool saved, double begin_ms);

// Whether log and timeline were written. If not, training continues, but the exit status is 1.
bool report_complete(const run_report *r);
