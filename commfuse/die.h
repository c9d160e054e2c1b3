// The one way to end on an error: print what, where, why and what to do next, then end every rank. Programs that use this
// folder as a library may have the error as a value instead: cf_errors_return().
//
// A message is printed as
//     error: rank 3 of 8 (host): WHAT AND WHY
//     hint:  WHAT TO DO NEXT
// Standard output and error are flushed and the abort hook (the transport's) ends the other ranks. Whatever that
// library does, the process exits with status 1 within four seconds.
#ifndef CF_DIE_H
#define CF_DIE_H

#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include "extern_c.h"

CF_EXTERN_C_BEGIN

#if defined(__GNUC__)
#define CF_PRINTF(text, rest) __attribute__((format(printf, text, rest)))
#define CF_NORETURN           __attribute__((noreturn))
#else
#define CF_PRINTF(text, rest)
#define CF_NORETURN
#endif

// Who this process is. Until called, rank and size come from the launcher's environment
// (Open MPI, MPICH, Slurm, torchrun), or 0 of 1. `abort_all` may be NULL.
void cf_die_setup(int rank, int size, void (*abort_all)(int status));
// How ranks connect if they have not yet. cf_die_together() calls it before it prints, because only then can rank 0
// print for all and end all. (Some launchers let the others run when one ends so early.)
// NULL: the ranks are connected from here on.
void cf_die_meet_by(void (*meet)(void));
int cf_die_rank(void);
const char *cf_given(const char *name);    // a variable of the environment; NULL: not set, or empty
void cf_die_name(char *name, size_t size); // "rank 3 of 8 (host)"

// "reduce-scatter mlp.fc2, layer 7, step 41"; layer or step -1: none.
enum { CF_OPERATION_TEXT = 256 };
const char *cf_operation_text(char text[CF_OPERATION_TEXT], const char *label, int layer, int step);

// An error of this rank alone: print it, end all ranks. hint may be NULL.
CF_NORETURN void cf_die(const char *hint, const char *format, ...) CF_PRINTF(2, 3);

// Every rank finds the same error at the same place (options, shapes, files): rank 0 prints it once for
// all. A rank that is still there seconds later was alone with it and prints it too.
CF_NORETURN void cf_die_together(const char *hint, const char *format, ...) CF_PRINTF(2, 3);

// --- errors as values ---

// on: from here on the functions of this library that say so in their headers (NULL, false or NAN "on an error") return that
// when an error is found in the thread that called them, instead of ending all ranks; cf_error() is then the message. What their
// failed call had made is lost memory, no more. An operation that fails half way (a peer is dead, or late) takes its context
// with it: context.h. What a thread of the library finds (an error of MPI, a start or an end that hangs) ends all ranks as ever.
void cf_errors_return(bool on);
// "WHAT AND WHY\nhint: WHAT TO DO NEXT" of the latest error returned in this thread, valid until the next one; "": none yet.
const char *cf_error(void);

// For this library's functions. The first statement of one that returns errors is CF_RETURNS(value on an error): that value is an
// expression, taken after the error. Only the outermost such call of a thread counts. Callbacks are called with none, as nothing
// may jump past the caller's code.
typedef struct cf_boundary {
    jmp_buf back;
} cf_boundary;
bool cf_boundary_enter(cf_boundary *boundary); // false: errors end the process, or a boundary further out returns them
void cf_boundary_leave(cf_boundary *boundary);
cf_boundary *cf_boundary_swap(cf_boundary *boundary); // that of this thread, or NULL, for another
#define CF_RETURNS(value)                                                                                                          \
    cf_boundary cf_here __attribute__((cleanup(cf_boundary_leave)));                                                               \
    if (cf_boundary_enter(&cf_here) && setjmp(cf_here.back) != 0) return value

// Call when rank 0 has ended: a rank that waits in cf_die_together() for rank 0's message exits. For transports whose
// abort cannot end other processes.
void cf_die_rank_0_ended(void);
// Has this rank printed its error, or left that to rank 0? Then signals end it without another message.
bool cf_die_has_reported(void);

CF_EXTERN_C_END
#endif
