// See stop.h. A separate thread receives the signals, so that it may print. Compute threads block them: matrix products of oneDNN
// (2.6) keep values below the stack pointer, where the kernel puts a handler's frame, so a handler would now and then make results
// wrong or damage the heap. Threads that libraries started before pass their signals on.
#include "stop.h"
#include "../device.h"
#include "../base/die.h"
#include "../base/limits.h"
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

enum { STATUS = 1, SAME_MS = 500 };
static const int numbers[] = {SIGTERM, SIGINT, SIGUSR1, SIGHUP};
static const char *const names[] = {"SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"};
enum { SIGNALS = sizeof numbers / sizeof *numbers };

static struct {
    pthread_t thread;
    sigset_t signals;
    int asked;            // atomic
    pthread_mutex_t lock; // of
    cf_wait wait;         // label NULL: none
} stop = {.lock = PTHREAD_MUTEX_INITIALIZER};

const char *cf_wait_text(char text[CF_WAIT_TEXT], const cf_wait *wait, const char *peers) {
    char rank[32] = "the other ranks", operation[CF_OPERATION_TEXT];
    if (wait->peer >= 0) snprintf(rank, sizeof rank, "rank %d", wait->peer);
    snprintf(text, CF_WAIT_TEXT, "waits for %s: %s", peers ? peers : rank,
             cf_operation_text(operation, wait->label, wait->layer, wait->step));
    return text;
}

// One write, so that messages of ranks do not mix, and without stdio, whose locks a stuck thread may hold.
static void report(int number, bool again) {
    static const char first[] = ": ends after this step; a second signal ends it at once (so does a launcher that has lost a rank)";
    char who[128], wait[CF_WAIT_TEXT] = "", text[1024];
    const char *name = "";
    for (int i = 0; i < SIGNALS; i++)
        if (numbers[i] == number) name = names[i];
    cf_die_name(who, sizeof who);
    pthread_mutex_lock(&stop.lock);
    if (stop.wait.label) cf_wait_text(wait, &stop.wait, NULL);
    pthread_mutex_unlock(&stop.lock);
    snprintf(text, sizeof text, again ? "\nerror: %s: asked to end at once (%s)%s%s%s\n" : "\n%s: %s%s%s%s\n", who, name,
             again ? "" : first, *wait ? "; it " : "", wait);
    ssize_t ignored = write(STDERR_FILENO, text, strlen(text));
    (void)ignored;
}

static void *listen(void *unused) {
    double asked_ms = 0;
    for (int number;;) {
        if (sigwait(&stop.signals, &number) != 0) continue;
        const bool again = cf_stop_asked() != 0;
        if (cf_die_has_reported()) _exit(STATUS);
        if (again && cf_now_ms() - asked_ms <= SAME_MS) continue;
        asked_ms = cf_now_ms();
        __atomic_store_n(&stop.asked, number, __ATOMIC_RELEASE);
        report(number, again);
        if (again) _exit(STATUS);
    }
    return unused;
}

static void pass_on(int number) {
    const int saved = errno;
    pthread_kill(stop.thread, number);
    errno = saved;
}

void cf_stop_listen(void) {
    struct sigaction inherited;
    const bool nohup = sigaction(SIGHUP, NULL, &inherited) == 0 && inherited.sa_handler == SIG_IGN;
    sigemptyset(&stop.signals);
    for (int i = 0; i < SIGNALS; i++)
        if (numbers[i] != SIGHUP || !nohup) sigaddset(&stop.signals, numbers[i]);
#pragma omp parallel
    pthread_sigmask(SIG_BLOCK, &stop.signals, NULL);
    cf_limits_start(&stop.thread, listen, NULL, "the thread that listens to signals");
    for (int i = 0; i < SIGNALS; i++)
        if (sigismember(&stop.signals, numbers[i]))
            sigaction(numbers[i], &(struct sigaction){.sa_handler = pass_on, .sa_flags = SA_RESTART}, NULL);
}

int cf_stop_asked(void) {
    return __atomic_load_n(&stop.asked, __ATOMIC_ACQUIRE);
}

void cf_stop_waits(const cf_wait *wait) {
    pthread_mutex_lock(&stop.lock);
    stop.wait = wait ? *wait : (cf_wait){.label = NULL};
    pthread_mutex_unlock(&stop.lock);
}
