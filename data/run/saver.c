// See saver.h. All ranks decide by the exchanged stages, never by the state of their threads, so all take the same path:
//
//   IDLE → WRITING → WRITTEN → (on all ranks: they exchange results) → COMMITTING → COMMITTED → (rank 0) → IDLE
//
// While WRITING, a rank's thread owns the copy of its state; while COMMITTING, rank 0's thread changes OUT. Setting the next
// stage is the last thing that a thread does; ranks exchange its result after that.
#define _GNU_SOURCE
#include "saver.h"
#include "../../commfuse/device.h"
#include <cjson/cJSON.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

typedef enum { IDLE, WRITING, WRITTEN, COMMITTING, COMMITTED } stage;
enum { NICE = 10 }; // writing yields to computing

struct saver {
    cf_transport *transport;
    const options *opt;
    const rank_state *copy; // this rank's
    pthread_t thread;
    bool threaded;
    atomic_int stage;
    int64_t step;
    bool ok; // the thread's result
    problem why;
    bool failed;         // the last checkpoint failed on some rank
    manifest_file *file; // (ranks) sizes and hashes; bytes -1: it could not be written
    manifest_file mine;  // this rank's
    // On rank 0 only:
    logfile *log;
    cJSON *options;
    double begun_ms, stall_ms;
};

saver *saver_create(cf_transport *transport, const options *opt, logfile *log) {
    saver *s = cf_host_alloc(1, sizeof *s, "checkpoints");
    s->file = cf_host_alloc(transport->size, sizeof *s->file, "checkpoints");
    s->transport = transport, s->opt = opt, s->log = log;
    return s;
}

static bool root(const saver *s) {
    return s->transport->rank == 0;
}

static void join(saver *s) {
    if (s->threaded) pthread_join(s->thread, NULL);
    s->threaded = false;
}

void saver_free(saver *s) {
    if (!s) return;
    cJSON_Delete(s->options);
    free(s->file);
    free(s);
}

static void *work(void *saver_) {
    saver *s = saver_;
    if (s->threaded) setpriority(PRIO_PROCESS, (id_t)gettid(), NICE); // of this thread alone
    if (atomic_load(&s->stage) == WRITING) {
        char path[PATH_MAX];
        checkpoint_file_path(s->opt->out, s->step, s->transport->rank, true, path);
        s->ok = saved_state_write(path, s->copy, &s->mine, &s->why);
        atomic_store(&s->stage, WRITTEN);
    } else {
        problem why = {.what = ""};
        manifest m = {.step = s->step, .ranks = s->transport->size, .file = s->file, .options = s->options};
        log_sync(s->log); // a run that resumes from this checkpoint needs all lines up to it
        s->ok = checkpoint_commit(s->opt->out, &m, &s->why);
        if (s->ok && !checkpoint_prune(s->opt->out, s->opt->keep, s->opt->keep_every, &why))
            cf_print(stderr, "\nwarning: an old checkpoint was not removed: %s\n", why.what);
        atomic_store(&s->stage, COMMITTED);
    }
    return NULL;
}

static void start(saver *s, stage now) {
    atomic_store(&s->stage, now);
    s->threaded = true; // before it starts, because the thread reads it
    if (pthread_create(&s->thread, NULL, work, s) == 0) return;
    s->threaded = false;
    work(s); // thread creation failed: training waits, but the checkpoint is saved
}

static void warn(const saver *s) {
    progress_break();
    fflush(stdout);
    cf_print(stderr, "\nwarning: rank %d of %d: no checkpoint of step %ld: %s\n", s->transport->rank, s->transport->size, s->step,
             s->why.what);
    if (*s->why.hint) cf_print(stderr, "hint:    %s; earlier checkpoints stay as they are\n", s->why.hint);
    fflush(stderr);
}

static void report(const saver *s) {
    int64_t bytes = 0;
    for (int rank = 0; rank < s->transport->size; rank++) bytes += s->file[rank].bytes;
    double written_ms = cf_now_ms() - s->begun_ms;
    progress_break();
    cf_print(stdout, "step %5ld  saved %s/step_%08ld: %.1f MiB, training paused for %.1f ms, written after %.0f ms\n", s->step,
             s->opt->out, s->step, (double)bytes / 1048576, s->stall_ms, written_ms);
    fflush(stdout);
    LOG_LINE(s->log, "save", FIELD("step", s->step), FIELD("bytes", bytes), FIELD("stall_ms", s->stall_ms),
             FIELD("written_ms", written_ms));
}

bool saver_begin(saver *s, int64_t step, cJSON *described) {
    double begun = cf_now_ms();
    saver_finish(s);
    cJSON_Delete(s->options);
    s->options = described;
    s->step = step;
    s->begun_ms = begun;
    s->ok = !root(s) || checkpoint_begin(s->opt->out, step, &s->why);
    if (!s->ok) warn(s);
    s->failed = !cf_allreduce_min(s->transport, s->ok);
    return !s->failed;
}

void saver_write(saver *s, const rank_state *copy) {
    s->copy = copy;
    s->stall_ms = cf_now_ms() - s->begun_ms;
    start(s, WRITING);
}

double saver_stage(saver *s) {
    return (double)atomic_load(&s->stage);
}

// When no rank is writing. now: the stage of rank 0.
static void next_stage(saver *s, stage now) {
    if (now != WRITTEN && now != COMMITTED) return;
    join(s);
    if (now == WRITTEN) {
        if (!s->ok) s->mine.bytes = -1;
        cf_allgather_host(s->transport, &s->mine, s->file, (int64_t)sizeof s->mine);
        s->failed = false;
        for (int rank = 0; rank < s->transport->size; rank++) s->failed |= s->file[rank].bytes < 0;
        atomic_store(&s->stage, s->failed ? IDLE : COMMITTING);
        if (!s->ok) warn(s);
        if (s->failed && root(s)) checkpoint_abandon(s->opt->out, s->step);
        if (!s->failed && root(s)) start(s, COMMITTING);
    } else {
        s->failed = !cf_allreduce_min(s->transport, s->ok); // only rank 0 commits; `ok` of the others is true here
        atomic_store(&s->stage, IDLE);
        if (root(s)) (s->failed ? warn : report)(s);
    }
}

void saver_advance(saver *s, const double *stages, int stride) {
    for (int rank = 0; rank < s->transport->size; rank++)
        if ((stage)stages[rank * stride] == WRITING) return;
    next_stage(s, (stage)stages[0]);
}

bool saver_finish(saver *s) {
    for (;;) {
        join(s);
        const stage now = (stage)cf_broadcast(s->transport, atomic_load(&s->stage));
        if (now == IDLE) return !s->failed;
        next_stage(s, now);
    }
}
