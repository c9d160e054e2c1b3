// See patience.h.
#define _GNU_SOURCE
#include "patience.h"
#include "condition.h"
#include "die.h"
#include <pthread.h>
#include <stdbool.h>

enum { NAP_S = 1, GRACE_S = 1 };

static struct {
    pthread_mutex_t lock;
    pthread_cond_t over;
    pthread_t thread;
    const char *what;
    double timeout_s;
    bool running, done;
} patience = {.lock = PTHREAD_MUTEX_INITIALIZER};

// Time in which this process itself was stopped does not count: what lies between two looks counts as one nap.
static void *lose_patience(void *argument) {
    (void)argument;
    pthread_mutex_lock(&patience.lock);
    for (double waited_s = 0; !patience.done && waited_s < patience.timeout_s + GRACE_S; waited_s += NAP_S)
        cf_condition_wait(&patience.over, &patience.lock, NAP_S);
    bool done = patience.done;
    pthread_mutex_unlock(&patience.lock);
    if (!done)
        cf_die("a rank may be dead, frozen or unreachable: see its messages (those of NCCL with "
               "NCCL_DEBUG=INFO), or allow more time with --timeout",
               "rank %d waits for the other ranks: %s; nothing came for %.0f s", cf_die_rank(), patience.what,
               patience.timeout_s);
    return NULL;
}

void cf_patience_begin(const char *what, double timeout_s) {
    if (timeout_s <= 0) return;
    patience.what = what;
    patience.timeout_s = timeout_s;
    patience.done = false;
    cf_condition_init(&patience.over);
    patience.running = pthread_create(&patience.thread, NULL, lose_patience, NULL) == 0;
    if (!patience.running) cf_die(NULL, "cannot start a thread");
}

void cf_patience_end(void) {
    if (!patience.running) return;
    pthread_mutex_lock(&patience.lock);
    patience.done = true;
    pthread_cond_signal(&patience.over);
    pthread_mutex_unlock(&patience.lock);
    pthread_join(patience.thread, NULL);
    pthread_cond_destroy(&patience.over);
    patience.running = false;
}
