// What a process may use of its machine: launchers, batch systems, containers and OpenMP's variables may allow less than there is.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>

// What belongs to a program that uses this folder as a library (cf_open_on); empty in others.
extern struct cf_host {
    const void *comm; // MPI_Comm
    bool keeps_cores; // affinity stays as it is
    bool keeps_subnormals;
} cf_host;

int64_t cf_limits_memory(void); // bytes
// The most that this program has had so far; 0: unknown. (getrusage() also counts what ran in this process before exec().)
int64_t cf_limits_peak_memory(void);
// Raises the limit of open files as far as this process may. False: it has been there already.
bool cf_limits_more_files(void);

// pthread_create(), or an error that names the limits. what: "the progress thread".
void cf_limits_start(pthread_t *thread, void *(*run)(void *), void *argument, const char *what);
// Starts so many, and ends them: a library would end the process without a word about limits.
void cf_limits_try_threads(int threads, const char *what);

// The cores that this process may use: those of its affinity or, if OpenMP binds threads, of OpenMP's places. OpenMP has then bound
// the first thread before main(): from here on it, and threads that it starts, may use them all.
void cf_limits_cores(cpu_set_t *cores);
// For a program of its own, before it starts threads or other programs, which inherit all these cores, and stacks of 8 MiB.
void cf_limits_prepare(void);
// How many the processes of this host may use: of those in `cores`, as many as their control group has time for. shared: other
// processes have cores of this one, so that cf_limits_unbind() frees a thread of OpenMP from the place that theirs has, too.
int cf_limits_local_cores(const cpu_set_t *cores, bool shared);
void cf_limits_unbind(void);
// This thread, and those that it starts from here on, stay on those of their cores that are in the list ("0-15,32", as /sys has
// it), unless these are fewer than `least`.
void cf_limits_near(const char *list, int least);
// Compute threads of a process whose part of the cores is `share`: as many, or fewer by OMP_NUM_THREADS or OMP_THREAD_LIMIT. 0: as
// many as OpenMP starts.
int cf_limits_threads(int share);
// " (a control group's quota allows 1 of 2 cores)", " (OMP_NUM_THREADS)"; "": nothing limits cores or threads.
const char *cf_limits_text(void);
