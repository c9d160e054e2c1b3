// See limits.h.
#define _GNU_SOURCE
#include "limits.h"
#include "die.h"
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif

struct cf_host cf_host;

static struct {
    bool found, unbind;
    cpu_set_t own;
    const char *by; // what allows these cores
    char text[96];
} limits;

// --- control groups ---

// The number that follows `name` in a line of a file, or `otherwise`.
static long long number_in(const char *folder, const char *file, const char *name, long long otherwise) {
    char path[1300], line[128];
    snprintf(path, sizeof path, "%s/%s", folder, file);
    FILE *lines = fopen(path, "r");
    while (lines && fgets(line, sizeof line, lines))
        if (strncmp(line, name, strlen(name)) == 0 && sscanf(line + strlen(name), "%lld", &otherwise) == 1) break;
    if (lines) fclose(lines);
    return otherwise;
}

// What a group leaves of something, with the names of version 1 (old) or 2.
typedef long long left_in(const char *folder, bool old);

// A process that takes more memory is killed. Cached files can be dropped at once.
static long long memory_left(const char *folder, bool old) {
    const long long limit = number_in(folder, old ? "memory.limit_in_bytes" : "memory.max", "", LLONG_MAX); // or "max"
    const long long used = number_in(folder, old ? "memory.usage_in_bytes" : "memory.current", "", 0);
    const long long cached = number_in(folder, "memory.stat", old ? "total_inactive_file " : "inactive_file ", 0);
    const long long left = limit - (used > cached ? used - cached : 0);
    return left > 0 ? left : 0;
}

// Whole cores: threads that compute together all wait for one that has used up its time.
static long long cores_left(const char *folder, bool old) {
    char first[32];
    const long long quota = number_in(folder, old ? "cpu.cfs_quota_us" : "cpu.max", "", -1); // or "max 100000"
    snprintf(first, sizeof first, "%lld ", quota);
    const long long period = number_in(folder, old ? "cpu.cfs_period_us" : "cpu.max", old ? "" : first, 100000);
    return quota <= 0 || period <= 0 ? LLONG_MAX : quota < period ? 1 : quota / period;
}

// The least that this process's groups and those above them leave. A line is "4:memory:/job" (version 1; several controllers:
// "3:cpu,cpuacct:/job", and the directory may have either name) or "0::/job" (version 2).
static long long least_left(const char *one, left_in *left, long long least) {
    char line[1024], folder[1200], controller[16];
    snprintf(controller, sizeof controller, ",%s,", one);
    FILE *groups = fopen("/proc/self/cgroup", "r");
    while (groups && fgets(line, sizeof line, groups)) {
        char *kind = strchr(line, ':'), *group = kind ? strchr(kind + 1, ':') : NULL;
        if (!group) continue;
        *kind++ = *group++ = '\0', group[strcspn(group, "\n")] = '\0';
        char names[1026];
        snprintf(names, sizeof names, ",%s,", kind);
        const bool old = *kind;
        if (old && !strstr(names, controller)) continue;
        for (char *end = group + strlen(group); end; end = strrchr(group, '/')) {
            *end = '\0';
            for (int i = 0; i <= old; i++) {
                snprintf(folder, sizeof folder, "/sys/fs/cgroup%s%s%s", old ? "/" : "", i ? kind : old ? one : "", group);
                const long long here = left(folder, old);
                if (here < least) least = here;
            }
        }
    }
    if (groups) fclose(groups);
    return least;
}

int64_t cf_limits_memory(void) {
    return least_left("memory", memory_left, 1024 * number_in("/proc", "meminfo", "MemAvailable:", LLONG_MAX / 1024));
}

int64_t cf_limits_peak_memory(void) {
    return 1024 * number_in("/proc/self", "status", "VmHWM:", 0);
}

bool cf_limits_more_files(void) {
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur == files.rlim_max) return false;
    files.rlim_cur = files.rlim_max;
    return setrlimit(RLIMIT_NOFILE, &files) == 0;
}

// --- threads ---

// The limit of a group that has reached it.
static long long threads_of_full(const char *folder, bool old) {
    (void)old;
    const long long limit = number_in(folder, "pids.max", "", LLONG_MAX);
    return number_in(folder, "pids.current", "", 0) < limit ? LLONG_MAX : limit;
}

// held: what the threads wait for; they end with this call. NULL: they go on.
static void start(pthread_t *thread, int threads, void *(*run)(void *), void *argument, pthread_mutex_t *held, const char *what) {
    char user_text[96] = "", group_text[64] = "";
    struct rlimit user;
    int started = 0, error = 0;
    if (held) pthread_mutex_lock(held);
    while (started < threads && (error = pthread_create(&thread[started], NULL, run, argument)) == 0) started++;
    const long long most = error ? least_left("pids", threads_of_full, LLONG_MAX) : LLONG_MAX;
    if (held) pthread_mutex_unlock(held);
    while (held && started > 0) pthread_join(thread[--started], NULL);
    if (!error) return;
    if (getrlimit(RLIMIT_NPROC, &user) == 0 && user.rlim_cur != RLIM_INFINITY)
        snprintf(user_text, sizeof user_text, "; ulimit -u allows all programs of this user %lld threads",
                 (long long)user.rlim_cur);
    if (most < LLONG_MAX) snprintf(group_text, sizeof group_text, "; pids.max of a control group allows %lld", most);
    cf_die("raise that limit, end other programs, or use fewer threads or ranks; stacks of 8 MiB count for ulimit -v",
           "cannot start %s: %s%s%s", what, strerror(error), user_text, group_text);
}

void cf_limits_start(pthread_t *thread, void *(*run)(void *), void *argument, const char *what) {
    start(thread, 1, run, argument, NULL, what);
}

static void *wait_for(void *lock) {
    pthread_mutex_lock(lock);
    pthread_mutex_unlock(lock);
    return NULL;
}

void cf_limits_try_threads(int threads, const char *what) {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_t thread[CPU_SETSIZE];
    start(thread, threads < CPU_SETSIZE ? threads : CPU_SETSIZE, wait_for, &lock, &lock, what);
}

// --- cores ---

static bool add_places(cpu_set_t *cores) {
    CPU_ZERO(cores);
#ifdef _OPENMP
    for (int place = 0; omp_get_proc_bind() != omp_proc_bind_false && place < omp_get_num_places(); place++) {
        int count = omp_get_place_num_procs(place), core[CPU_SETSIZE];
        if (count <= CPU_SETSIZE) omp_get_place_proc_ids(place, core);
        for (int i = 0; i < count && count <= CPU_SETSIZE; i++) CPU_SET((size_t)core[i], cores);
    }
#endif
    return CPU_COUNT(cores) > 0;
}

void cf_limits_cores(cpu_set_t *cores) {
    cpu_set_t places;
    if (sched_getaffinity(0, sizeof *cores, cores) != 0) // more cores than the set can name
        for (long i = 0; i < sysconf(_SC_NPROCESSORS_ONLN) && i < CPU_SETSIZE; i++) CPU_SET((size_t)i, cores);
    const bool bound = add_places(&places), asked = cf_getenv("OMP_PLACES") || cf_getenv("GOMP_CPU_AFFINITY");
    // More than places that nobody asked for: they were a launcher's binding, which has been widened since (transport_mpi.c).
    limits.unbind = bound && !asked && CPU_COUNT(cores) > CPU_COUNT(&places);
    if (bound && !limits.unbind) *cores = places;
    if (bound && !limits.unbind && !cf_host.keeps_cores) sched_setaffinity(0, sizeof *cores, cores);
    limits.own = *cores;
    limits.by = bound && !limits.unbind ? "OpenMP's places allow" : "affinity allows";
}

void cf_limits_prepare(void) {
    enum { STACK = 8 << 20 };
    cpu_set_t cores;
    struct rlimit first;
    pthread_attr_t others;
    size_t bytes;
    cf_limits_cores(&cores);
    if (getrlimit(RLIMIT_STACK, &first) == 0 && first.rlim_cur < STACK && first.rlim_cur < first.rlim_max) {
        first.rlim_cur = first.rlim_max < STACK ? first.rlim_max : STACK;
        setrlimit(RLIMIT_STACK, &first);
    }
    if (pthread_getattr_default_np(&others) != 0) return;
    pthread_attr_getstacksize(&others, &bytes);
    if (bytes < STACK && pthread_attr_setstacksize(&others, STACK) == 0) pthread_setattr_default_np(&others);
    pthread_attr_destroy(&others);
}

int cf_limits_local_cores(const cpu_set_t *cores, bool shared) {
    const int count = CPU_COUNT(cores), all = (int)sysconf(_SC_NPROCESSORS_ONLN);
    const long long timed = least_left("cpu", cores_left, count);
    snprintf(limits.text, sizeof limits.text, timed < all ? " (%s %d of %d cores)" : "",
             timed < count ? "a control group's quota allows" : limits.by, (int)timed, all);
    limits.found = true, limits.unbind |= shared;
    return (int)timed;
}

void cf_limits_unbind(void) {
    if (limits.unbind) sched_setaffinity(0, sizeof limits.own, &limits.own);
}

void cf_limits_near(const char *list, int least) {
    cpu_set_t own, near;
    CPU_ZERO(&near);
    if (sched_getaffinity(0, sizeof own, &own) != 0) return;
    for (int first, last, read; sscanf(list, "%d%n", &first, &read) == 1; list += *list == ',') {
        list += read, last = first;
        if (sscanf(list, "-%d%n", &last, &read) == 1) list += read;
        for (int i = first; i <= last && i < CPU_SETSIZE; i++)
            if (i >= 0 && CPU_ISSET((size_t)i, &own)) CPU_SET((size_t)i, &near);
    }
    if (CPU_COUNT(&near) >= least) sched_setaffinity(0, sizeof near, &near);
}

int cf_limits_threads(int share) {
#ifdef _OPENMP
    if (share == 0) return omp_get_max_threads();
    const int asked = cf_getenv("OMP_NUM_THREADS") ? omp_get_max_threads() : INT_MAX, most = omp_get_thread_limit();
    const int least = asked < most ? asked : most;
    if (!limits.found || least >= share) return share; // a prediction is for another machine
    snprintf(limits.text, sizeof limits.text, " (%s)", asked < most ? "OMP_NUM_THREADS" : "OMP_THREAD_LIMIT");
    return least;
#else
    return share > 0 ? share : 1;
#endif
}

const char *cf_limits_text(void) {
    return limits.text;
}
