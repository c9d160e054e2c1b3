// Conditions whose waits end in time, counted by a clock that nobody sets.
#ifndef CF_CONDITION_H
#define CF_CONDITION_H

#include <pthread.h>

#ifdef __cplusplus
extern "C" {
#endif

// To be ended by pthread_cond_destroy.
void cf_condition_init(pthread_cond_t *condition);
// pthread_cond_wait for so many seconds at most; it may also wake for nothing.
void cf_condition_wait(pthread_cond_t *condition, pthread_mutex_t *lock, double at_most_s);

#ifdef __cplusplus
}
#endif
#endif
