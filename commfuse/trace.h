// Intervals of compute, waiting and communication of a rank, for the two figures of every step (exposed and total
// communication time) and, on demand, a Chrome/Perfetto trace.
//
//   comm_ms     the union of the intervals in which transfers were in flight
//   exposed_ms  the time in which the compute stream waited for them
//
// Only the compute thread writes here: the executor copies a transfer's moments after it has waited for it. On a GPU moments become
// times when they have passed, so the figures of a step are read while the next one runs, and events when the stream is
// synchronised.
#ifndef CF_TRACE_H
#define CF_TRACE_H

#include <stdbool.h>
#include <stdint.h>
#include "device.h"
#include "transport.h"
#include "extern_c.h"

CF_EXTERN_C_BEGIN

typedef enum { CF_TRACE_COMPUTE, CF_TRACE_WAIT, CF_TRACE_COMM } cf_trace_row;
typedef struct cf_trace cf_trace;

typedef struct cf_trace_event {
    double begin_ms, end_ms; // since cf_trace_start, else since cf_trace_create
    double posted_ms;        // communication: when the compute thread asked for it; others: begin_ms
    char name[40];
    int row;                // cf_trace_row
    int layer, slice, peer; // -1: none
    bool beside;            // computed on another stream than the step's
    int step;
    int64_t bytes;
} cf_trace_event;

cf_trace *cf_trace_create(void);
void cf_trace_free(cf_trace *trace);

// Keep events from here on (otherwise only the two figures). The stream has been synchronised.
void cf_trace_record(cf_trace *trace, bool on);
// The same on all ranks of a run, which have met in a barrier just now. Collective: they agree on zero.
void cf_trace_start(cf_trace *trace, cf_transport *transport);
void cf_trace_step(cf_trace *trace, int step, cf_stream *stream); // one begins, with what comes on the stream from here on
// Between two moments of a stream. begin() opens a range by that name on the host's time line, end()
// closes it; a computation's moments are taken only while events are recorded.
cf_moment cf_trace_begin(cf_trace *trace, cf_trace_row row, const char *name, cf_stream *stream);
// The moment when a request is posted; it has a time only for a timeline.
cf_moment cf_trace_posted(const cf_trace *trace, cf_stream *stream);
void cf_trace_end(cf_trace *trace, cf_trace_row row, const char *name, int layer, int slice, cf_moment begin, cf_stream *stream);
// A wait for a transfer that ends at `end`; if that has been before `begin`, nothing had to wait. Closes what begin() opened.
// (The microseconds in which a GPU's stream resumes are not counted.)
void cf_trace_wait(cf_trace *trace, const char *name, int layer, cf_moment begin, cf_moment end);
// A transfer: asked for at `posted`, in flight from `begin` to `end`.
void cf_trace_transfer(cf_trace *trace, const char *name, int layer, int slice, int peer, int64_t bytes, cf_moment posted,
                       cf_moment begin, cf_moment end);
// Of the step before the current one. Waits until the stream has come to the current one.
typedef struct cf_trace_figures {
    double comm_ms, exposed_ms;
} cf_trace_figures;
cf_trace_figures cf_trace_last(cf_trace *trace);
// What an operation has communicated in the steps that were counted, on this rank.
enum { CF_TRACE_TOTALS = 96, CF_TRACE_NAME = 40 };
typedef struct cf_trace_total {
    char name[CF_TRACE_NAME];   // "reduce-scatter mlp.fc2"
    double comm_ms, exposed_ms; // see above
    int64_t bytes, transfers;
} cf_trace_total;
void cf_trace_count(cf_trace *trace); // the step of the last cf_trace_last()
const cf_trace_total *cf_trace_totals(const cf_trace *trace, int *count, int64_t *steps);

double cf_median(double *values, int count); // which it sorts; the upper one of two; NAN of none

const cf_trace_event *cf_trace_events(cf_trace *trace, int64_t *count);
// Chrome trace of several ranks: events of rank i are events[i][0 … counts[i]), which it sorts.
void cf_trace_write(FILE *file, int ranks, cf_trace_event *const *events, const int64_t *counts);
// That of this run's ranks: stops recording; rank 0 gets the text, and frees it, others NULL. Collective over all ranks.
char *cf_trace_gather(cf_trace *trace, cf_transport *transport, size_t *size);

CF_EXTERN_C_END
#endif
