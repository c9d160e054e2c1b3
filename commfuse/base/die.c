// See die.h. A rank that dies
//   1. sets an alarm that ends the process in a few seconds, whatever happens next;
//   2. prints the message before it flushes stdout, because nobody may read stdout any more;
//   3. waits until the launcher has read it: some (MPICH's) drop unread output when asked to end the ranks;
//   4. calls the transport's abort, which ends the other ranks and may hang: hence 1;
//   5. calls _exit, because exit handlers may wait for threads stuck in a library.
// If several threads die at once (compute and progress), the first one does this and the others stop.
#include "die.h"
#include "sanitize.h"
#include "streams.h"
#include <pthread.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { STATUS = 1, LAST_RESORT_S = 4, RANK_0_PRINTS_S = 3, UNREAD_MS = 1000 };

static struct {
    int rank, size;
    void (*abort_all)(int status);
    pthread_mutex_t dying;
} self = {-1, -1, NULL, PTHREAD_MUTEX_INITIALIZER};

const char *cf_getenv(const char *name) {
    const char *text = getenv(name);
    return text && *text ? text : NULL;
}

static int from_environment(const char *const *names, int fallback) {
    for (; *names; names++)
        if (cf_getenv(*names)) return atoi(cf_getenv(*names));
    return fallback;
}

static void find_self(void) {
    static const char *const ranks[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID", "RANK", NULL};
    static const char *const sizes[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS", "WORLD_SIZE", NULL};
    if (self.rank < 0) self.rank = from_environment(ranks, 0);
    if (self.size < 0) self.size = from_environment(sizes, 1);
}

void cf_die_setup(int rank, int size, void (*abort_all)(int status)) {
    self.rank = rank;
    self.size = size;
    self.abort_all = abort_all;
}

int cf_die_rank(void) {
    find_self();
    return self.rank;
}

void cf_die_name(char *name, size_t size) {
    char host[64] = "unknown host";
    gethostname(host, sizeof host - 1);
    find_self();
    snprintf(name, size, "rank %d of %d (%s)", self.rank, self.size, host);
}

const char *cf_operation_text(char text[CF_OPERATION_TEXT], const char *label, int layer, int step) {
    char of_layer[32] = "", of_step[32] = "";
    if (layer >= 0) snprintf(of_layer, sizeof of_layer, ", layer %d", layer);
    if (step >= 0) snprintf(of_step, sizeof of_step, ", step %d", step);
    snprintf(text, CF_OPERATION_TEXT, "%.180s%s%s", label, of_layer, of_step);
    return text;
}

static void last_resort(int signal_number) {
    (void)signal_number;
    _exit(STATUS);
}

static bool reported; // atomic

static void obey_signals(void) {
    __atomic_store_n(&reported, true, __ATOMIC_RELEASE);
    signal(SIGTERM, last_resort);
    signal(SIGINT, last_resort);
}

bool cf_die_has_reported(void) {
    return __atomic_load_n(&reported, __ATOMIC_ACQUIRE);
}

static void wait_until_read(int fd) {
    struct stat is;
    int unread = 0;
    if (fstat(fd, &is) != 0 || !S_ISFIFO(is.st_mode)) return;
    for (int i = 0; i < UNREAD_MS && ioctl(fd, FIONREAD, &unread) == 0 && unread > 0; i++)
        nanosleep(&(struct timespec){0, 1000000}, NULL);
}

CF_NORETURN static void print_and_leave(const char *hint, const char *text) {
    signal(SIGALRM, last_resort);
    alarm(LAST_RESORT_S);
    char who[128], message[4096]; // one write, so that messages of several ranks do not mix
    cf_die_name(who, sizeof who);
    snprintf(message, sizeof message, hint ? "\nerror: %s: %s\nhint:  %s\n" : "\nerror: %s: %s\n", who, text, hint);
    fputs(cf_sanitize(message), stderr);
    fflush(stderr);
    cf_streams_drain(UNREAD_MS);
    obey_signals();
    wait_until_read(STDERR_FILENO);
    wait_until_read(STDOUT_FILENO);
    if (self.abort_all) self.abort_all(STATUS);
    _exit(STATUS);
}

// --- errors as values ---

static bool errors_return; // atomic
static __thread cf_boundary *boundary;
static __thread char error[4096];

void cf_errors_return(bool on) {
    __atomic_store_n(&errors_return, on, __ATOMIC_RELAXED);
}

const char *cf_error(void) {
    return error;
}

bool cf_boundary_enter(cf_boundary *here) {
    if (boundary || !__atomic_load_n(&errors_return, __ATOMIC_RELAXED)) return false;
    boundary = here;
    return true;
}

void cf_boundary_leave(cf_boundary *here) {
    if (boundary == here) boundary = NULL;
}

cf_boundary *cf_boundary_swap(cf_boundary *other) {
    cf_boundary *before = boundary;
    boundary = other;
    return before;
}

// --- the end ---

static bool waits_for_rank_0; // atomic

// Rank 0 prints for all, and its abort ends this rank meanwhile. If this rank still runs afterwards, rank 0 did not find the error
// (only this host lacks a file, say), and this rank prints it.
static void wait_for_rank_0(void) {
    obey_signals();
    __atomic_store_n(&waits_for_rank_0, true, __ATOMIC_RELEASE);
    sleep(RANK_0_PRINTS_S);
    __atomic_store_n(&waits_for_rank_0, false, __ATOMIC_RELEASE);
}

CF_NORETURN static void die(bool together, const char *hint, const char *format, va_list arguments) {
    char text[sizeof error / 2]; // the last error may be among the arguments
    vsnprintf(text, sizeof text, format, arguments);
    if (hint && !*hint) hint = NULL;
    if (boundary) { // the error is returned
        cf_boundary *to = boundary;
        boundary = NULL;
        snprintf(error, sizeof error, hint ? "%s\nhint: %s" : "%s", text, hint);
        cf_sanitize(error);
        longjmp(to->back, 1);
    }
    find_self();
    // Never unlocked: the first to die prints. If that one waits for rank 0 to print, what another finds is that rank 0 has ended.
    if (pthread_mutex_trylock(&self.dying) != 0) {
        if (__atomic_load_n(&waits_for_rank_0, __ATOMIC_ACQUIRE)) _exit(STATUS);
        pthread_mutex_lock(&self.dying);
    }
    if (together && self.rank != 0) wait_for_rank_0();
    print_and_leave(hint, text);
}

void cf_die(const char *hint, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    die(false, hint, format, arguments);
}

void cf_die_together(const char *hint, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    die(true, hint, format, arguments);
}
