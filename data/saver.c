// See saver.h. What ranks do together is decided by what all of them have told, never by where a thread happens to
// be, so that all take the same path.
//
// A rank's stage, as it is told:
//
//   IDLE → WRITING → WRITTEN or FAILED → (all told so) COMMITTING → (rank 0 told DONE or FAILED) IDLE
//
// The thread of a rank owns the copy of its state while WRITING, rank 0's owns the store while COMMITTING; each sets
// the stage as its last act.
#define _GNU_SOURCE
#include "saver.h"
#include "../commfuse/device.h"
#include "progress.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

typedef enum { IDLE, WRITING, WRITTEN, COMMITTING, DONE, FAILED } stage;
enum { NICE = 10 }; // the writer yields to those that compute
enum { BYTES, HASH_HIGH, HASH_LOW, WELL, RESULT };

struct saver {
    saver_plan plan;
    int rank, ranks;
    const rank_state *copy; // this rank's
    pthread_t thread;
    bool threaded;
    atomic_int stage;
    int64_t step;
    manifest_file written;
    problem why;
    bool failed; // the last checkpoint
    // Rank 0
    manifest_file *file;     // (ranks)
    manifest_option *option; // (options)
    int64_t options;
    double begun_ms, stall_ms;
};

static const double *exchange(saver *s, const double *values, int count) {
    return s->plan.all.exchange(s->plan.all.argument, values, count);
}

saver *saver_create(saver_plan plan) {
    if (plan.all.stride < RESULT) cf_die(NULL, "ranks cannot tell each other %d numbers", RESULT);
    saver *s = calloc(1, sizeof *s);
    if (!s) cf_die(NULL, "out of memory for checkpoints");
    s->plan = plan;
    s->rank = plan.all.rank;
    s->ranks = plan.all.ranks;
    s->file = calloc((size_t)s->ranks, sizeof *s->file);
    if (!s->file) cf_die(NULL, "out of memory for checkpoints");
    return s;
}

static void forget_options(saver *s) {
    for (int64_t i = 0; i < s->options; i++) {
        free((char *)s->option[i].name);
        free((char *)s->option[i].value);
    }
    free(s->option);
    s->option = NULL;
    s->options = 0;
}

static void join(saver *s) {
    if (s->threaded) pthread_join(s->thread, NULL);
    s->threaded = false;
}

void saver_free(saver *s) {
    if (!s) return;
    join(s);
    if (s->plan.store) checkpoint_abandon(s->plan.store);
    forget_options(s);
    free(s->file);
    free(s);
}

// --- threads ---

static void be_nice(void) {
    setpriority(PRIO_PROCESS, (id_t)gettid(), NICE); // of this thread alone
}

static void start(saver *s, void *(*work)(void *argument), stage now) {
    atomic_store(&s->stage, now);
    s->threaded = true; // which the thread reads
    if (pthread_create(&s->thread, NULL, work, s) == 0) return;
    s->threaded = false;
    work(s); // slower, but the checkpoint is what counts
}

static void *write_copy(void *argument) {
    saver *s = argument;
    char path[PATH_MAX];
    if (s->threaded) be_nice();
    checkpoint_file_path(s->plan.out, s->step, s->rank, true, path);
    bool well = saved_state_write(path, s->copy, &s->written, &s->why);
    atomic_store(&s->stage, well ? WRITTEN : FAILED);
    return NULL;
}

static void *commit(void *argument) {
    saver *s = argument;
    problem why = {.what = ""};
    manifest m = {
        .step = s->step, .ranks = s->ranks, .options = s->options, .file = s->file, .option = s->option};
    if (s->threaded) be_nice();
    log_sync(s->plan.log); // a run that goes on from here keeps all lines up to here
    bool well = checkpoint_commit(s->plan.store, &m, &s->why);
    if (well && !checkpoint_prune(s->plan.store, s->plan.keep, s->plan.keep_every, &why))
        fprintf(stderr, "\nwarning: an old checkpoint stays: %s\n", why.what);
    atomic_store(&s->stage, well ? DONE : FAILED);
    return NULL;
}

// --- what is said ---

static void warn(const saver *s) {
    progress_break();
    fflush(stdout);
    fprintf(stderr, "\nwarning: rank %d of %d: no checkpoint of step %lld: %s\n", s->rank, s->ranks,
            (long long)s->step, s->why.what);
    if (*s->why.hint) fprintf(stderr, "hint:    %s; earlier checkpoints stay as they are\n", s->why.hint);
    fflush(stderr);
}

static void report(const saver *s) {
    int64_t bytes = 0;
    for (int rank = 0; rank < s->ranks; rank++) bytes += s->file[rank].bytes;
    double written_ms = cf_now_ms() - s->begun_ms;
    progress_break();
    printf("step %5lld  saved %s/step_%08lld: %.1f MiB, training paused for %.1f ms, written after %.0f ms\n",
           (long long)s->step, s->plan.out, (long long)s->step, (double)bytes / 1048576, s->stall_ms,
           written_ms);
    fflush(stdout);
    log_begin(s->plan.log, "save");
    log_int(s->plan.log, "step", s->step);
    log_int(s->plan.log, "bytes", bytes);
    log_real(s->plan.log, "stall_ms", s->stall_ms);
    log_real(s->plan.log, "written_ms", written_ms);
    log_end(s->plan.log);
}

// --- together ---

static void keep_options(saver *s, const manifest_option *option, int64_t options) {
    forget_options(s);
    s->option = calloc((size_t)options + 1, sizeof *s->option);
    if (!s->option) cf_die(NULL, "out of memory for a manifest");
    for (; s->options < options; s->options++) {
        manifest_option *copy = &s->option[s->options];
        copy->name = strdup(option[s->options].name);
        copy->value = strdup(option[s->options].value);
        if (!copy->name || !copy->value) cf_die(NULL, "out of memory for a manifest");
    }
}

bool saver_begin(saver *s, int64_t step, const manifest_option *option, int64_t options) {
    double begun = cf_now_ms(), well = 1;
    saver_finish(s);
    s->step = step;
    s->begun_ms = begun;
    s->why = (problem){.what = ""};
    if (s->plan.store) {
        keep_options(s, option, options);
        well = checkpoint_begin(s->plan.store, step, &s->why);
        if (!well) warn(s);
    }
    s->failed = exchange(s, &well, 1)[0] == 0;
    return !s->failed;
}

void saver_write(saver *s, const rank_state *copy) {
    s->copy = copy;
    s->stall_ms = cf_now_ms() - s->begun_ms;
    start(s, write_copy, WRITING);
}

double saver_tell(saver *s) {
    return (double)atomic_load(&s->stage);
}

// Everyone's size and hash, two halves of it as numbers that a double holds. False if a rank has failed.
static bool exchange_results(saver *s) {
    double mine[RESULT] = {(double)s->written.bytes, (double)(s->written.hash >> 32),
                           (double)(s->written.hash & 0xffffffff), atomic_load(&s->stage) == WRITTEN};
    const double *told = exchange(s, mine, RESULT);
    bool well = true;
    for (int rank = 0; rank < s->ranks; rank++, told += s->plan.all.stride) {
        s->file[rank].bytes = (int64_t)told[BYTES];
        s->file[rank].hash = (uint64_t)told[HASH_HIGH] << 32 | (uint64_t)told[HASH_LOW];
        well &= told[WELL] != 0;
    }
    return well;
}

static void all_have_written(saver *s) {
    join(s);
    if (atomic_load(&s->stage) == FAILED) warn(s);
    s->failed = !exchange_results(s);
    atomic_store(&s->stage, s->failed ? IDLE : COMMITTING);
    if (s->failed && s->plan.store) checkpoint_abandon(s->plan.store);
    if (!s->failed && s->plan.store) start(s, commit, COMMITTING);
}

static void committed(saver *s, bool well) {
    join(s);
    s->failed = !well;
    atomic_store(&s->stage, IDLE);
    if (!s->plan.store) return;
    if (well)
        report(s);
    else
        warn(s);
}

// Reads all of `told` before it exchanges anything, which overwrites it.
void saver_look(saver *s, const double *told) {
    int first = (int)told[0]; // rank 0's
    if (first == IDLE) return;
    if (first == COMMITTING || first == DONE) {
        if (first == DONE) committed(s, true);
        return;
    }
    bool committing = false, writing = first == WRITING;
    for (int rank = 1; rank < s->ranks; rank++) {
        writing |= (int)told[rank * s->plan.all.stride] == WRITING;
        committing |= (int)told[rank * s->plan.all.stride] == COMMITTING;
    }
    if (committing) // the others wait for rank 0, which has failed
        committed(s, false);
    else if (!writing)
        all_have_written(s);
}

bool saver_finish(saver *s) {
    for (;;) {
        join(s);
        double mine = saver_tell(s);
        const double *told = exchange(s, &mine, 1);
        if ((int)told[0] == IDLE) return !s->failed;
        saver_look(s, told);
    }
}
