// Intervals of computation, waiting and communication of a rank: for two figures of every step and, on demand, a Chrome/Perfetto
// trace.
//
//   comm_ms     the union of the intervals in which transfers were in flight
//   exposed_ms  the time in which the compute stream waited for them
//
// Only the compute thread writes here: the executor copies the events of a transfer after it has waited for it. On a GPU a event
// has a time only once it has passed, so the figures of a step are read during the next one, and events when the stream is
// synchronised.
#pragma once
#include "transport.h"

CF_EXTERN_C_BEGIN

typedef enum { CF_TRACE_COMPUTE, CF_TRACE_WAIT, CF_TRACE_COMM } cf_trace_row;
typedef struct cf_trace cf_trace;

typedef struct cf_trace_event {
    double begin_ms, end_ms; // since cf_trace_start, else since cf_trace_create
    double posted_ms;        // communication: when it was posted; others: begin_ms
    char name[40];
    int row;                // cf_trace_row
    int layer, slice, peer; // -1: none
    bool second;            // computed on the second stream
    int step;
    int64_t bytes;
} cf_trace_event;

typedef struct cf_trace_list { // of one rank
    cf_trace_event *event;
    int64_t count, room;
} cf_trace_list;
void cf_trace_append(cf_trace_list *list, cf_trace_event event);

cf_trace *cf_trace_create(void);
void cf_trace_free(cf_trace *trace);

// Records events from here on (otherwise only the two figures), 2^17 at most. The stream has been synchronised.
void cf_trace_record(cf_trace *trace, bool on);
// The same on all ranks of a run, just after a barrier. Collective: they agree on the time zero.
void cf_trace_start(cf_trace *trace, cf_transport *transport);
// A step begins with the next work on the stream. Before the first one, as in step -1, there are no figures.
void cf_trace_step(cf_trace *trace, int step, cf_stream *stream);
// A computation, between two events of a stream, which are taken only while events are recorded. A profiler sees it as a range
// (cf_range_begin), so computations nest. Its name stays where it is until the end.
typedef struct cf_trace_work {
    const char *name;
    int layer;
    cf_event begin;
} cf_trace_work;
cf_trace_work cf_trace_begin(const cf_trace *trace, const char *name, int layer, cf_stream *stream);
void cf_trace_end(cf_trace *trace, cf_trace_work work, int slice, cf_stream *stream);
// The event at which a request is posted; it has a time only while events are recorded.
cf_event cf_trace_posted(const cf_trace *trace, cf_stream *stream);
// A wait for a transfer that ended at `end`; if that is before `begin`, nothing had to wait.
// (The microseconds in which a GPU's stream resumes are not counted.)
void cf_trace_wait(cf_trace *trace, const char *name, int layer, cf_event begin, cf_event end);
// A transfer: posted at `posted`, in flight from `begin` to `end`.
void cf_trace_transfer(cf_trace *trace, const char *name, int layer, int slice, int peer, int64_t bytes, cf_event posted,
                       cf_event begin, cf_event end);
// The figures of the step before the current one. Waits until the stream has reached the current one.
typedef struct cf_trace_figures {
    double comm_ms, exposed_ms;
} cf_trace_figures;
cf_trace_figures cf_trace_last(cf_trace *trace);
// The communication of an operation on this rank, summed over steps.
enum { CF_TRACE_TOTALS = 96, CF_TRACE_NAME = 40 };
typedef struct cf_trace_total {
    char name[CF_TRACE_NAME];   // "reduce-scatter mlp.fc2"
    double comm_ms, exposed_ms; // as above
    int64_t bytes, transfers;
} cf_trace_total;
typedef struct cf_trace_sums {
    cf_trace_total total[CF_TRACE_TOTALS];
    int count;
    int64_t steps;
} cf_trace_sums;
void cf_trace_add_totals(cf_trace *trace); // adds the step of the last cf_trace_last()
// Adds `more` to the total of its name, if there is room.
void cf_trace_add(cf_trace_sums *sums, const cf_trace_total *more);
void cf_trace_sort(cf_trace_sums *sums); // the longest exposed time first
const cf_trace_sums *cf_trace_totals(const cf_trace *trace);

double cf_median(double *values, int count); // sorts them; the upper one of two; NAN if there are none

const cf_trace_list *cf_trace_events(cf_trace *trace);
// The Chrome trace of several ranks, which the caller frees; sorts the events of each and sets their rows in it.
char *cf_trace_text(int ranks, const cf_trace_list *events, size_t *size);
// Stops recording and returns the Chrome trace of all ranks on rank 0, which frees it; NULL on others, and without memory for it. A
// note names the step in which events were too many, 2^22 of all ranks. Collective over all ranks.
char *cf_trace_gather(cf_trace *trace, cf_transport *transport, size_t *size);

CF_EXTERN_C_END
