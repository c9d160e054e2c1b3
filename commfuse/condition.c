// See condition.h.
#define _GNU_SOURCE
#include "condition.h"
#include <math.h>
#include <time.h>

enum { LONGEST_S = 3600 }; // of one wait: whoever waits without an end looks again

void cf_condition_init(pthread_cond_t *condition) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

void cf_condition_wait(pthread_cond_t *condition, pthread_mutex_t *lock, double at_most_s) {
    double whole_s = floor(fmin(at_most_s, LONGEST_S));
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)whole_s;
    until.tv_nsec += (long)((fmin(at_most_s, LONGEST_S) - whole_s) * 1e9);
    until.tv_sec += until.tv_nsec / 1000000000L;
    until.tv_nsec %= 1000000000L;
    pthread_cond_timedwait(condition, lock, &until);
}
