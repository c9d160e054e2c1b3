// What every operation of a process shares; where a program that uses this folder as a library begins.
//
//     cf_errors_return(true);                             errors come back as values (die.h); without it they end all ranks
//     cf_context *c = cf_open("auto", 1, 60);             context: transport, device, stream, trace
//     cf_group *all = cf_group_create(c, "all", NULL, 0); group: who communicates
//     cf_fuse *f = cf_fuse_create(c, (cf_fuse_plan){…});  plan: an operation, made once and run as often as wanted (fuse.h)
//     result = cf_fuse_run(f, data, rows, …);             run: or cf_fuse_begin(), other work, and cf_fuse_finish()
//     cf_trace_step(…), cf_trace_last(…)                  trace: what the operations between two steps have exposed (trace.h)
//     cf_fuse_free(f); cf_group_free(all); cf_close(c);
//
// Schedules alone (schedule.h, schedule_check.h, replay.h) need no context, no MPI and no other rank.
//
// Threads. One thread calls all functions that take a context or something made from one, cf_open() included; it also runs the
// callbacks. The library has threads of its own, which call nothing of the caller's. Functions without a context may be called
// by any thread.
//
// Lifetimes. What a create or open gives is the caller's to free or close, in the reverse order. A plan's name and group, and the
// context, outlive the operation. Data of a run is the caller's and stays where it is from begin to the end of finish; what
// finish returns is valid until the next begin of that operation.
//
// Units. Milliseconds (…_ms) on the cf_now_ms() clock, seconds (…_s), bytes where a name says so, else elements or rows.
//
// Ranks. All ranks of a group create the same operations, and begin and finish them, in the same order.
//
// Versions. CF_VERSION is MAJOR.MINOR.PATCH. While MAJOR and MINOR stay, a program runs with a newer library without being compiled
// again: structs, enumerations, and what functions mean stay, functions may come. Else MINOR goes up, and the library's file name
// (libcommfuse.so.MAJOR.MINOR) with it. What no public header declares may change at any time.
#ifndef CF_CONTEXT_H
#define CF_CONTEXT_H

#include "check.h"
#include "device.h"
#include "die.h"
#include "mesh.h"
#include "trace.h"
#include "transport.h"
#include "extern_c.h"

CF_EXTERN_C_BEGIN

#define CF_VERSION "0.3.0"
const char *cf_version(void); // of the library that runs: CF_VERSION of its headers

// transport may be NULL if every group has one member.
typedef struct cf_context {
    cf_transport *transport;
    cf_stream *stream; // of computation
    cf_stream *beside; // another: slices of one computation take turns on both (cf_fuse_plan.apart); NULL: all go to `stream`
    cf_trace *trace;
    int step;        // for messages and traces; -1 outside of steps
    int tags;        // message tags given out so far: all ranks create the same operations in the same order
    bool timed;      // runs are timed: cf_fuse_spent_ms()
    bool failed;     // an operation has failed half way: ranks do not agree any more, and nothing else will run
    cf_check *check; // checksums on what is exchanged, set before the first operation is created; NULL: none
} cf_context;

// The ranks of this run and this rank's device. transport: "auto" or one that transport.h names. threads: that compute in each
// rank (CPU). timeout_s: longest wait for another rank, 0: for ever. Collective over all ranks, once in a process: it starts MPI.
// NULL on an error.
cf_context *cf_open(const char *transport, int threads, double timeout_s);
// Collective; all operations have been freed. It ends MPI. false on an error. A context that has failed cannot end together with
// the others: end the process, and the launcher ends the other ranks.
bool cf_close(cf_context *context);

// A group of `count` world ranks, in this order, this one among them; NULL: of all. Collective over its members; all groups are
// made before the first operation runs. The name is for messages and outlives the group. NULL on an error.
cf_group *cf_group_create(cf_context *context, const char *name, const int *ranks, int count);
void cf_group_free(cf_group *group); // NULL is allowed

CF_EXTERN_C_END
#endif
