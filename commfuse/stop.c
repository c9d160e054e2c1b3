// See stop.h. A handler may call little more than write(), and printf is not of it. So who this rank is was
// written down beforehand, the rest is put together by hand, and a line leaves in one piece.
//
// The kernel gives a signal of the process to any thread. What is waited for belongs to the thread that listens and
// may be gone at any time when another one looks, so a signal that meets another thread is passed on to that one.
//
// oneDNN's matrix products (2.6) keep values below the stack pointer, where the kernel puts a handler's frame: results
// would be wrong, or the heap damaged, once in some signals. So the handler has a stack of its own, and the other
// threads that compute never run it.
#include "stop.h"
#include "device.h"
#include "die.h"
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <unistd.h>

enum { STATUS = 1, SAME_MS = 500, STACK_BYTES = 1 << 16 };

static const struct {
    int number;
    const char *name;
} signals[] = {{SIGTERM, "SIGTERM"}, {SIGINT, "SIGINT"}, {SIGUSR1, "SIGUSR1"}};
enum { SIGNALS = sizeof signals / sizeof *signals };

static struct {
    char who[128]; // "rank 2 of 4 (host)"
    pthread_t listener;
    int asked;           // atomic
    double asked_ms;     // the handler's
    const cf_wait *wait; // atomic
} stop;

// --- a line, as a handler may write it ---

typedef struct line {
    char text[512];
    size_t length;
} line;

static void add(line *l, const char *text) {
    for (; *text && l->length < sizeof l->text - 1; text++) l->text[l->length++] = *text;
}

static void add_number(line *l, const char *before, int number) {
    char digits[16], *at = digits + sizeof digits;
    *--at = 0;
    do *--at = (char)('0' + number % 10);
    while ((number /= 10) > 0);
    add(l, before);
    add(l, at);
}

static void add_wait(line *l) {
    const cf_wait *w = __atomic_load_n(&stop.wait, __ATOMIC_ACQUIRE);
    if (!w) return;
    add(l, "; it waits for ");
    if (w->peer >= 0)
        add_number(l, "rank ", w->peer);
    else
        add(l, "the other ranks");
    add(l, ": ");
    add(l, w->label);
    if (w->layer >= 0) add_number(l, ", layer ", w->layer);
    if (w->step >= 0) add_number(l, ", step ", w->step);
}

static void heard(int number) {
    int saved = errno;
    const bool again = cf_stop_asked() != 0;
    if (!pthread_equal(pthread_self(), stop.listener))
        pthread_kill(stop.listener, number);
    else if (!again || cf_now_ms() - stop.asked_ms > SAME_MS) {
        line l = {.length = 0};
        const char *name = "a signal";
        for (int i = 0; i < SIGNALS; i++)
            if (signals[i].number == number) name = signals[i].name;
        if (!again) stop.asked_ms = cf_now_ms();
        __atomic_store_n(&stop.asked, number, __ATOMIC_RELEASE);
        add(&l, again ? "\nerror: " : "\n");
        add(&l, stop.who);
        add(&l, again ? ": asked to end at once (" : ": ");
        add(&l, name);
        add(&l, again ? ")" : ": ends after this step; a second signal ends it at once ");
        add(&l, again ? "" : "(so does a launcher that has lost a rank)");
        add_wait(&l);
        add(&l, "\n");
        l.text[l.length - 1] = '\n'; // also where it was too long
        ssize_t ignored = write(STDERR_FILENO, l.text, l.length);
        (void)ignored;
        if (again) _exit(STATUS);
    }
    errno = saved;
}

void cf_stop_listen(void) {
    cf_die_name(stop.who, sizeof stop.who);
    stop.listener = pthread_self();
    struct sigaction action = {.sa_handler = heard, .sa_flags = SA_RESTART | SA_ONSTACK};
    sigemptyset(&action.sa_mask); // no second handler inside the first
    for (int i = 0; i < SIGNALS; i++) sigaddset(&action.sa_mask, signals[i].number);
    static char room[STACK_BYTES];
    stack_t now, own = {.ss_sp = room, .ss_size = sizeof room};
    // A sanitizer may have given this thread one already.
    if (sigaltstack(NULL, &now) == 0 && (now.ss_flags & SS_DISABLE)) sigaltstack(&own, NULL);
#pragma omp parallel
    if (!pthread_equal(pthread_self(), stop.listener)) pthread_sigmask(SIG_BLOCK, &action.sa_mask, NULL);
    for (int i = 0; i < SIGNALS; i++) sigaction(signals[i].number, &action, NULL);
}

int cf_stop_asked(void) {
    return __atomic_load_n(&stop.asked, __ATOMIC_ACQUIRE);
}

void cf_stop_waits(const cf_wait *wait) {
    __atomic_store_n(&stop.wait, wait, __ATOMIC_RELEASE);
}
