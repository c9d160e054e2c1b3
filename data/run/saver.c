// See saver.h. When all ranks have written their files they exchange sizes and hashes, for the manifest, which rank 0's thread
// writes. Only rank 0 knows how that ended, until saver_finish().
#define _GNU_SOURCE
#include "saver.h"
#include <cjson/cJSON.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <unistd.h>

enum { NICE = 10 }; // writing yields to computing

struct saver {
    cf_transport *transport;
    const options *opt;
    const rank_state *copy; // this rank's
    void (*work)(saver *);  // write_file, until the ranks have exchanged how it ended; on rank 0 then commit; NULL: nothing
    pthread_t thread;
    bool threaded;    // the thread does the work
    atomic_bool done; // the last act of the work
    int64_t step;
    bool ok; // the result of the work
    problem why;
    file_hash *file; // (ranks) sizes and hashes; bytes -1: it could not be written
    file_hash mine;  // this rank's
    cJSON *options;  // of the manifest
    // On rank 0 only:
    logfile *log;
    double begun_ms, stall_ms;
};

saver *saver_create(cf_transport *transport, const options *opt, logfile *log, cJSON *described) {
    saver *s = cf_host_alloc(1, sizeof *s, "checkpoints");
    s->file = cf_host_alloc(transport->size, sizeof *s->file, "checkpoints");
    s->transport = transport, s->opt = opt, s->log = log, s->options = described;
    s->ok = true;
    return s;
}

static bool root(const saver *s) {
    return s->transport->rank == 0;
}

void saver_free(saver *s) {
    if (!s) return;
    cJSON_Delete(s->options);
    free(s->file);
    free(s);
}

static void *run(void *saver_) {
    saver *s = saver_;
    if (gettid() != getpid()) setpriority(PRIO_PROCESS, (id_t)gettid(), NICE); // of this thread alone
    s->work(s);
    atomic_store(&s->done, true);
    return NULL;
}

static void start(saver *s, void (*work)(saver *)) {
    s->work = work;
    atomic_store(&s->done, false);
    s->threaded = pthread_create(&s->thread, NULL, run, s) == 0;
    if (!s->threaded) run(s); // training waits, but the checkpoint is saved
}

static void join(saver *s) {
    if (s->threaded) pthread_join(s->thread, NULL);
    s->work = NULL;
}

static void write_file(saver *s) {
    char path[PATH_MAX];
    checkpoint_file_path(s->opt->out, s->step, s->transport->rank, true, path);
    s->ok = saved_state_write(path, s->copy, &s->mine, &s->why);
}

static void commit(saver *s) {
    problem why = {.what = ""};
    manifest m = {.step = s->step, .ranks = s->transport->size, .file = s->file, .options = s->options};
    log_sync(s->log); // a run that resumes from this checkpoint needs all lines up to it
    s->ok = checkpoint_commit(s->opt->out, &m, &s->why);
    if (s->ok && !checkpoint_prune(s->opt->out, s->opt->keep, s->opt->keep_every, &why))
        cf_print(stderr, "\nwarning: an old checkpoint was not removed: %s\n", why.what);
}

static void warn(const saver *s) {
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
    cf_print(stdout, "step %5ld  saved %s/step_%08ld: %.1f MiB, training paused for %.1f ms, written after %.0f ms\n", s->step,
             s->opt->out, s->step, (double)bytes / 1048576, s->stall_ms, written_ms);
    fflush(stdout);
    LOG_LINE(s->log, "save", FIELD("step", s->step), FIELD("bytes", bytes), FIELD("stall_ms", s->stall_ms),
             FIELD("written_ms", written_ms));
}

bool saver_begin(saver *s, int64_t step, const char *plan) {
    double begun = cf_now_ms();
    saver_finish(s);
    if (plan) manifest_add(s->options, "operations", "%s", plan);
    s->step = step;
    s->begun_ms = begun;
    s->ok = !root(s) || checkpoint_begin(s->opt->out, step, &s->why);
    if (!s->ok) warn(s);
    return s->ok = cf_allreduce_min(s->transport, s->ok);
}

void saver_write(saver *s, const rank_state *copy) {
    s->copy = copy;
    s->stall_ms = cf_now_ms() - s->begun_ms;
    start(s, write_file);
}

bool saver_written(const saver *s) {
    return atomic_load(&s->done);
}

// Collective, when all have written or will soon have.
static void gather(saver *s) {
    join(s);
    if (!s->ok) warn(s), s->mine.bytes = -1;
    cf_allgather_host(s->transport, &s->mine, s->file, (int64_t)sizeof s->mine);
    for (int rank = 0; rank < s->transport->size; rank++) s->ok &= s->file[rank].bytes >= 0;
    if (s->ok && root(s)) start(s, commit);
    if (!s->ok && root(s)) checkpoint_abandon(s->opt->out, s->step);
}

static void end_commit(saver *s) {
    if (s->work != commit) return;
    join(s);
    (s->ok ? report : warn)(s);
}

void saver_advance(saver *s, bool all_written) {
    if (s->work == write_file && all_written) gather(s);
    if (atomic_load(&s->done)) end_commit(s);
}

bool saver_finish(saver *s) {
    if (s->work == write_file) gather(s);
    end_commit(s);
    return cf_allreduce_min(s->transport, s->ok);
}
