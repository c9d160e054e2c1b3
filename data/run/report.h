// The output of a run: banner, a line per step on the terminal and in the log.
// All ranks call these functions; only rank 0 prints and writes.
#pragma once
#include "startup.h"
#include "plan.h"
#include "saver.h"

enum { PATIENCE = 10 }; // times --timeout: how long ranks wait for one that reads or writes files

typedef struct step_report {
    int64_t step;               // -1: none
    double loss, grad_norm, lr; // of all ranks
    double ms;                  // this rank's clock; rank 0's is printed: the sum over steps is the time of the run
    bool trial;                 // of the plan
} step_report;

typedef enum { VALIDATION, SAMPLE, SAVE, PAUSES } pause_kind; // work between steps
typedef struct run_report {
    const options *opt;
    const char *version, *run; // of the program; name of the run, on rank 0
    cf_context *context;
    const cf_mesh *mesh;
    cf_transport *transport; // in a dry run it may have fewer ranks than the mesh
    int accumulation;
    int64_t parameters;       // of the model
    double flops;             // per token, as MFU counts them
    double peak;              // flop/s of all ranks, 0: unknown
    const char *peak_source;  // NULL: not measured
    double peak_fp32;         // 0: not measured, because bf16 is not slower
    bool peak_emulated;       // the processor has no instructions for this type
    tokens *train, *val;      // NULL: none
    const vocabulary *words;  // NULL: bytes
    int64_t first;            // the step with which the run begins or resumes
    logfile *log;             // rank 0's
    saver *checkpoints;       // NULL without --out
    double lap_ms, begin_ms;  // of the last lap(), of the first step: on the clock of cf_now_ms()
    double stepped_ms;        // of all reported steps
    double paused_ms[PAUSES]; // all times so far
    int64_t pauses[PAUSES];
    int trace_from, trace_to; // steps [from, to); -1 without --trace
    bool untraced;            // the timeline could not be written
    run_plan plan;            // how operations travel, with --overlap auto
    const double *muon_ms;    // its products of an update, on this rank; NULL: another optimizer
    step_report last;         // the step to be reported next; its `step` is -1 if there is none
    int stop;                 // the signal by which some rank was asked to end the run; 0: none
} run_report;

void report_resume(run_report *r, const manifest *m); // from this checkpoint
// Opens the log of a run that begins, or resumes at r->first.
void report_open(run_report *r);
void report_config(run_report *r); // logs the options; a resumed run keeps the first line of its log and adds another
void report_banner(const run_report *r);

// A step ends where the next one begins, or, if other work follows, in report_end_step(). Its figures travel with the norm of the
// next step, or alone.
enum { FIGURE_UNWRITTEN, FIGURE_STOP, FIGURE_STEP, FIGURE_MS, FIGURE_EXPOSED, FIGURE_COMM, FIGURE_OPTIMIZER, FIGURES };
void report_begin(run_report *r);                // before the first step
void report_begin_step(run_report *r);           // after other work: when all ranks are ready
void report_figures(void *run, double *figures); // this rank's, of the last step of a run_report: FIGURES numbers
// Reports the last step, if it has not been. all: the figures of all ranks, rank r's at r · stride; later exchanges overwrite them.
// Dies if a rank is in another step.
void report_step(run_report *r, const double *all, int stride);
// Ends a step before other work begins, and reports it. The timeline ends with --trace-steps, or with the run.
void report_end_step(run_report *r);
bool report_trace_due(const run_report *r, int64_t step); // tracing begins or ends with this step
void report_meet(run_report *r);                          // waits until every rank is here and its device is idle

void report_validation(run_report *r, int64_t step, double loss, int64_t sequences);
double report_pause(run_report *r, pause_kind kind); // ends here: its ms
void report_sample(run_report *r, int64_t step, const int32_t *token, int64_t count);
void report_line(const run_report *r, const char *format, ...) CF_PRINTF(2, 3); // prints on rank 0
// The overlap audit: for each operation, how much of its communication was hidden, what limited it, and an option worth trying.
// Means over ranks and all steps but trials. Collective. Rank 0 prints the operations with the longest exposed time and logs all.
void audit(const cf_trace *trace, cf_transport *transport, const options *opt, logfile *log);
// stopped: a signal ended the run before its last step. Dies together unless the state was saved. Returns the exit status of the
// program: STATUS_STOPPED if the same command resumes the run; EXIT_FAILURE if log or timeline could not be written.
enum { STATUS_STOPPED = 75 };
int report_end(run_report *r, int64_t step, bool stopped, bool saved);
void report_close(run_report *r); // checkpoints, log and tokens
