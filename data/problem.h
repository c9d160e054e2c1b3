// An error as a value, for callers that may use another file, checkpoint or rank instead. Other callers end the run:
// cf_die(why->hint, "%s", why->what).
#pragma once
#include <string.h>
#include "../commfuse/memory.h"
#include "../commfuse/base/sanitize.h"

typedef struct problem {
    char what[2048], hint[256]; // what, where, why; what to do next, or ""
    bool unread;                // a file could not be opened or read now: nothing is known of its content
} problem;

// Returns false, so that a check can return it. hint may be NULL, and so may why, if nobody asks.
CF_PRINTF(3, 4)
static inline bool problem_set(problem *why, const char *hint, const char *format, ...) {
    va_list arguments;
    if (!why) return false;
    va_start(arguments, format);
    vsnprintf(why->what, sizeof why->what, format, arguments);
    va_end(arguments);
    cf_sanitize(why->what);
    snprintf(why->hint, sizeof why->hint, "%s", hint ? hint : "");
    why->unread = false;
    return false;
}

// The hint of the problem, or else `otherwise`.
static inline const char *problem_hint(const problem *why, const char *otherwise) {
    return *why->hint ? why->hint : otherwise;
}
