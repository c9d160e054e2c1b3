// What all operations of a process share. A program that uses this folder as a library begins here.
//
//     cf_errors_return(true);                             errors are returned (die.h); otherwise they end all ranks
//     cf_context *c = cf_open("auto", 1, 60);             context: transport, device, streams, trace
//     cf_group *all = cf_group_create(c, "all", NULL, 0); group: ranks that communicate
//     cf_fuse *f = cf_fuse_create(c, (cf_fuse_config){…}); operation: created once, run any number of times (fuse.h)
//     result = cf_fuse_run(f, data, rows, …);             run: or cf_fuse_begin(), other work, cf_fuse_finish()
//     cf_trace_step(…), cf_trace_last(…)                  trace: exposed time of the operations between two steps (trace.h)
//     cf_fuse_free(f); cf_group_free(all); cf_close(c);
//
// Schedules alone (schedule.h, schedule_check.h, replay.h) need no context, no MPI and no other rank.
//
// Threads. One thread calls all functions that take a context or an object made from one, cf_open() included; it also runs the
// callbacks. The library's threads never call the caller's code. Any thread may call functions without a context.
//
// MPI. cf_open() starts MPI unless the program has, by MPI_Init_thread and at least MPI_THREAD_SERIALIZED. cf_close() ends what
// cf_open() started, after which MPI cannot start again; a program's own MPI goes on, and it may open again. The library copies the
// communicator: messages never mix. Between a begin and the end of its finish, one of its threads calls MPI; with
// MPI_THREAD_MULTIPLE the program may do so at any time, otherwise only when no operation runs, and in the thread above.
//
// Lifetimes. The caller frees or closes what a create or open returns, in reverse order. An operation's name, its group and the
// context outlive the operation. The data of a run is the caller's and must not move from begin to the end of finish; the result of
// finish is valid until the next begin of that operation.
//
// Units. Milliseconds (…_ms) on the cf_now_ms() clock, seconds (…_s), bytes where a name says so, otherwise elements or rows.
//
// Ranks. All ranks of a group create, begin, finish and free the same operations in the same order.
//
// Versions. CF_VERSION is MAJOR.MINOR.PATCH. While MAJOR and MINOR stay, a compiled program runs with a newer library: structs,
// enumerations and functions keep their meaning; functions may be added, and fields at the end of cf_fuse_config. Otherwise MINOR
// goes up, and with it the library's file name (libcommfuse.so.MAJOR.MINOR). What no public header declares may change at any time.
#pragma once
#include "trace.h"

CF_EXTERN_C_BEGIN

#define CF_VERSION "0.10.0"
const char *cf_version(void); // of the running library: CF_VERSION of its headers

// transport may be NULL if every group has one member.
typedef struct cf_context {
    cf_transport *transport;
    cf_stream *stream; // compute stream
    cf_stream *second; // second compute stream: slices of an `independent` operation alternate between both; NULL: there is one
    cf_trace *trace;
    int step;                   // for messages and traces; -1 outside of steps
    struct cf_fuse *operations; // those of a group in the order of their message tags
    bool timed;                 // runs are timed: cf_fuse_median_ms()
    bool failed;                // an operation has failed half way: ranks are out of step, so nothing runs any more
} cf_context;

// Connects the ranks of this run and opens this rank's device. transport: "auto" or a name of transport.h. threads: compute threads
// of each rank (CPU), which the program starts; if Open MPI's launcher has bound the process to one core, it gets the launcher's
// cores. 0: as many as OpenMP starts, and the process stays bound as it is. timeout_s: longest wait for another rank, 0: for ever.
// Collective over all ranks. NULL on an error, such as a second context in a process.
cf_context *cf_open(const char *transport, int threads, double timeout_s);
// The same for the ranks of a communicator of the program's, an MPI_Comm at that address (NULL: MPI_COMM_WORLD), which stays the
// program's.
cf_context *cf_open_on(const void *comm, const char *transport, int threads, double timeout_s);
// The same for a transport that is open already, into a context of the caller's, who closes both.
void cf_context_start(cf_context *context, cf_transport *transport, int threads);
void cf_context_stop(cf_context *context);
// Collective, after all operations have been freed. false on an error. A failed context cannot be closed together with
// the other ranks: end the process, and its launcher ends the others.
bool cf_close(cf_context *context);

// A group of `count` world ranks (of the context), in this order, this one among them; ranks NULL: all. At most 16 in the
// life of a context. Collective over its members; all groups are created before the first operation runs. The name is for messages
// and must outlive the group. NULL on an error.
cf_group *cf_group_create(cf_context *context, const char *name, const int *ranks, int count);
void cf_group_free(cf_group *group); // NULL is allowed

CF_EXTERN_C_END
