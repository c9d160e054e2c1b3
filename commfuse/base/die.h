// The one way to end on an error: print what, where, why and what to do next, then end all ranks, this one with status 1 within
// four seconds. Programs that use this folder as a library may get the error as a value instead: cf_errors_return().
//
//     error: rank 3 of 8 (host): WHAT AND WHY
//     hint:  WHAT TO DO NEXT
#pragma once
#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include "extern_c.h"

CF_EXTERN_C_BEGIN

#define CF_PRINTF(text, rest) __attribute__((format(printf, text, rest)))
#define CF_NORETURN           __attribute__((noreturn))

// Sets rank, size and the abort hook (may be NULL). Before this call rank and size come from the launcher's environment (Open MPI,
// MPICH, Slurm, torchrun), or are 0 of 1.
void cf_die_setup(int rank, int size, void (*abort_all)(int status));
int cf_die_rank(void);
const char *cf_getenv(const char *name);   // an environment variable; NULL: not set, or empty
void cf_die_name(char *name, size_t size); // "rank 3 of 8 (host)"

// "reduce-scatter mlp.fc2, layer 7, step 41"; layer or step -1: none.
enum { CF_OPERATION_TEXT = 256 };
const char *cf_operation_text(char text[CF_OPERATION_TEXT], const char *label, int layer, int step);

// An error of this rank alone: print it, end all ranks. hint may be NULL or "".
CF_NORETURN void cf_die(const char *hint, const char *format, ...) CF_PRINTF(2, 3);

// An error that every rank finds at the same place (options, shapes, files): rank 0 prints it once for all. A rank that still runs
// seconds later was the only one to find it, and prints it too.
CF_NORETURN void cf_die_together(const char *hint, const char *format, ...) CF_PRINTF(2, 3);

// --- errors as values ---

// on: library functions whose header names a value "on an error" (NULL, false or NAN) return it, instead of ending all ranks, when
// the calling thread finds an error; cf_error() is then the message. Memory of the failed call is lost. An operation that fails
// half way (a peer is dead, or late) makes its context fail too (context.h). Errors that a thread of the library finds (an error of
// MPI, a start or an end that hangs) still end all ranks.
void cf_errors_return(bool on);
// "WHAT AND WHY\nhint: WHAT TO DO NEXT" of the latest error returned in this thread, valid until the next one; "": none yet.
const char *cf_error(void);

// For functions of the library. A function that returns errors begins with CF_RETURNS(value on an error); that expression is
// evaluated after the error. Only the outermost such call of a thread counts. Callbacks run outside of any, because nothing may
// jump past the caller's code.
typedef struct cf_boundary {
    jmp_buf back;
} cf_boundary;
bool cf_boundary_enter(cf_boundary *boundary); // false: errors end the process, or an outer boundary returns them
void cf_boundary_leave(cf_boundary *boundary);
cf_boundary *cf_boundary_swap(cf_boundary *boundary); // replaces this thread's boundary; returns the old one, or NULL
#define CF_RETURNS(value)                                                                                                          \
    cf_boundary cf_here __attribute__((cleanup(cf_boundary_leave)));                                                               \
    if (cf_boundary_enter(&cf_here) && setjmp(cf_here.back) != 0) return value

// This rank has printed its error, or has left that to rank 0: signals end it without another message.
bool cf_die_has_reported(void);

CF_EXTERN_C_END
