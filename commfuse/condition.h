// Condition variables with time-outs on the monotonic clock.
#ifndef CF_CONDITION_H
#define CF_CONDITION_H

#include <pthread.h>

#ifdef __cplusplus
extern "C" {
#endif

// Destroy it with pthread_cond_destroy.
void cf_condition_init(pthread_cond_t *condition);
// pthread_cond_wait for at_most_s seconds; may wake spuriously.
void cf_condition_wait(pthread_cond_t *condition, pthread_mutex_t *lock, double at_most_s);

#ifdef __cplusplus
}
#endif
#endif
