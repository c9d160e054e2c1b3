// What went wrong, for the caller, instead of ending the run: for what another file, another checkpoint or
// another rank can still make good. Whoever cannot go on says cf_die(why->hint, "%s", why->what).
#ifndef PROBLEM_H
#define PROBLEM_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "../commfuse/die.h"
#include "../commfuse/memory.h"
#include "../commfuse/printable.h"

typedef struct problem {
    char what[2048], hint[256]; // what, where, why; what to do next, or ""
} problem;

// Always false, so that a check can return it. hint may be NULL.
CF_PRINTF(3, 4)
static inline bool problem_set(problem *why, const char *hint, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(why->what, sizeof why->what, format, arguments);
    va_end(arguments);
    cf_printable(why->what);
    snprintf(why->hint, sizeof why->hint, "%s", hint ? hint : "");
    return false;
}

// Adds a line to what is there already, as far as there is room.
static inline void problem_add(problem *why, const problem *more) {
    size_t length = strlen(why->what);
    snprintf(why->what + length, sizeof why->what - length, "%s%s", length ? "\n" : "", more->what);
    if (!*why->hint) memcpy(why->hint, more->hint, sizeof why->hint);
}

#endif
