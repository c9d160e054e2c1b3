// See checkpoint.h. A directory's name says what it is:
//     step_00000123            a checkpoint
//     step_00000123.tmp        being written, or being removed
//     step_00000123.damaged    was passed over by a run that went on from an older one; nobody's but the user's
// and each change from one to another is a rename, so a process may be killed between any two calls. The
// order of a save, which a power cut may stop anywhere too:
//     1. mkdir step.tmp
//     2. each rank: write its file beside, sync it, rename it, sync step.tmp
//     3. manifest: the same; now all names in step.tmp last
//     4. rename step.tmp to step
//     5. sync OUT; only now remove what is older
// A run never saves a step twice: what it has passed over when it began got another name.
//
// checkpoint_store_open removes what a dead run has left of that: step.tmp, however complete. It may do so because it
// holds the lock: a file that stays in OUT for ever, as removing it would race with whoever is just opening it; the
// lock on it goes with the process that holds it, so none is ever stale. What is written in it is only for
// people.
//
// Reading takes no lock. A checkpoint that is removed while it is looked at is found incomplete and passed
// over.
#include "checkpoint.h"
#include "durable.h"
#include "input.h"
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

typedef enum { FINISHED, UNFINISHED, DAMAGED } stage;
static const char *const stage_suffix[] = {"", ".tmp", ".damaged"};
static const char manifest_name[] = "manifest.json";
static const int64_t max_step = INT64_C(999999999999999); // as in the manifest
enum { NOTHING_BEGUN = -1 };

struct checkpoint_store {
    char out[PATH_MAX];
    int lock;
    int64_t begun; // a step, or NOTHING_BEGUN
};

typedef struct found {
    int64_t step;
    stage stage;
} found;

// --- names -------------------------------------------------------------------------------------------------

// "OUT/step_00000123.tmp/NAME"; without a name, the directory.
static void path_of(const char *out, found f, const char *name, char path[PATH_MAX]) {
    int length =
        snprintf(path, PATH_MAX, "%s/step_%08lld%s%s%s", out, (long long)f.step, stage_suffix[f.stage], *name ? "/" : "", name);
    if (length >= PATH_MAX) cf_die("choose a shorter --out", "the name of a checkpoint is too long: %.100s…", out);
}

void checkpoint_file_path(const char *out, int64_t step, int64_t rank, bool unfinished, char path[PATH_MAX]) {
    char name[MANIFEST_FILE_NAME];
    manifest_file_name(rank, name);
    path_of(out, (found){step, unfinished ? UNFINISHED : FINISHED}, name, path);
}

// Is it a name that path_of makes?
static bool read_name(const char *name, found *f) {
    if (strncmp(name, "step_", 5) != 0) return false;
    char *end, again[64];
    errno = 0;
    f->step = strtoll(name + 5, &end, 10);
    if (errno || f->step < 0 || f->step > max_step) return false;
    for (f->stage = FINISHED; f->stage <= DAMAGED; f->stage = (stage)(f->stage + 1))
        if (strcmp(end, stage_suffix[f->stage]) == 0) {
            snprintf(again, sizeof again, "step_%08lld%s", (long long)f->step, stage_suffix[f->stage]);
            return strcmp(name, again) == 0;
        }
    return false;
}

static int newest_first(const void *a, const void *b) {
    const found *x = a, *y = b;
    return x->step != y->step ? (x->step > y->step ? -1 : 1) : (int)x->stage - (int)y->stage;
}

// What OUT holds, newest first; nothing if there is no OUT. NULL: see why. Checkpoints that cannot be listed must not pass
// for none.
static found *list(const char *out, int64_t *count, problem *why) {
    int64_t room = 64;
    found *all = malloc((size_t)room * sizeof *all), f;
    DIR *directory = opendir(out);
    bool whole = directory || errno == ENOENT;
    *count = 0;
    for (struct dirent *entry; all && directory && (errno = 0, entry = readdir(directory));) {
        if (!read_name(entry->d_name, &f)) continue;
        all[(*count)++] = f;
        if (*count == room) all = realloc(all, (size_t)(room *= 2) * sizeof *all);
    }
    if (!all) cf_die(NULL, "out of memory for the list of checkpoints in %s", out);
    if (directory) whole = errno == 0;
    if (!whole) durable_problem(why, "cannot list", out, -1);
    if (directory) closedir(directory);
    qsort(all, (size_t)*count, sizeof *all, newest_first);
    if (whole) return all;
    free(all);
    return NULL;
}

// --- the store ---------------------------------------------------------------------------------------------

static bool move(const char *out, found from, stage to, problem *why) {
    char old[PATH_MAX], new[PATH_MAX];
    path_of(out, from, "", old);
    path_of(out, (found){from.step, to}, "", new);
    return rename(old, new) == 0 || durable_problem(why, "cannot rename", old, -1);
}

// A checkpoint stops being one at once, however long its removal takes.
static bool remove_one(const char *out, found f, problem *why) {
    char path[PATH_MAX];
    path_of(out, (found){f.step, UNFINISHED}, "", path);
    if (!durable_remove_directory(path)) return durable_problem(why, "cannot remove", path, -1);
    if (f.stage == UNFINISHED) return true;
    if (!move(out, f, UNFINISHED, why)) return false;
    return durable_remove_directory(path) || durable_problem(why, "cannot remove", path, -1);
}

// What cannot be removed is left: it is no checkpoint.
static bool remove_unfinished(const char *out, problem *why) {
    problem ignored;
    int64_t count;
    found *all = list(out, &count, why);
    const bool listed = all != NULL;
    for (found *f = all; listed && f < all + count; f++)
        if (f->stage == UNFINISHED) remove_one(out, *f, &ignored);
    free(all);
    return listed;
}

checkpoint_store *checkpoint_store_open(const char *out, problem *why) {
    char lock[PATH_MAX + 8], in_use[PATH_MAX + 32];
    checkpoint_store *s = calloc(1, sizeof *s);
    if (!s) cf_die(NULL, "out of memory for the checkpoints in %s", out);
    *s = (checkpoint_store){.lock = -1, .begun = NOTHING_BEGUN};
    if (durable_make_directories(out)) {
        snprintf(s->out, sizeof s->out, "%s", out);
        snprintf(lock, sizeof lock, "%s/lock", out);
        snprintf(in_use, sizeof in_use, "another run saves to %s", out);
        s->lock = durable_lock(lock, in_use, why);
        if (s->lock >= 0 && remove_unfinished(out, why)) return s;
    } else {
        durable_problem(why, "cannot make directory", out, -1);
    }
    checkpoint_store_close(s);
    return NULL;
}

void checkpoint_store_close(checkpoint_store *s) {
    if (!s) return;
    checkpoint_abandon(s);
    if (s->lock >= 0) close(s->lock);
    free(s);
}

uint64_t checkpoint_store_mark(const char *out) {
    char path[PATH_MAX + 8];
    int64_t bytes;
    uint64_t hash;
    problem ignored;
    snprintf(path, sizeof path, "%s/lock", out);
    return access(out, W_OK | X_OK) == 0 && input_hash(path, &bytes, &hash, &ignored) ? hash >> 11 | 1 : 0;
}

// --- saving ------------------------------------------------------------------------------------------------

bool checkpoint_begin(checkpoint_store *s, int64_t step, problem *why) {
    if (step < 0 || step > max_step) cf_die(NULL, "a checkpoint of step %lld", (long long)step);
    if (s->begun != NOTHING_BEGUN)
        cf_die(NULL, "a checkpoint of step %lld while that of %lld is being written", (long long)step, (long long)s->begun);
    char path[PATH_MAX];
    path_of(s->out, (found){step, FINISHED}, "", path);
    if (access(path, F_OK) == 0) return problem_set(why, "give it another name", "%.1500s is there already", path);
    path_of(s->out, (found){step, UNFINISHED}, "", path);
    if (!durable_remove_directory(path)) return durable_problem(why, "cannot remove", path, -1);
    if (mkdir(path, 0777) != 0) return durable_problem(why, "cannot make checkpoint directory", path, -1);
    s->begun = step;
    return true;
}

void checkpoint_abandon(checkpoint_store *s) {
    problem ignored;
    if (s->begun != NOTHING_BEGUN) remove_one(s->out, (found){s->begun, UNFINISHED}, &ignored);
    s->begun = NOTHING_BEGUN;
}

// Each file that the manifest names is there and as long as it says.
static bool check_files(const char *out, found f, const manifest *m, problem *why) {
    for (int64_t rank = 0; rank < m->ranks; rank++) {
        char name[MANIFEST_FILE_NAME], path[PATH_MAX];
        struct stat status;
        manifest_file_name(rank, name);
        path_of(out, f, name, path);
        if (stat(path, &status) != 0) return durable_problem(why, "cannot find", path, -1);
        if (!S_ISREG(status.st_mode)) return problem_set(why, NULL, "%s is not a regular file", path);
        if (status.st_size != m->file[rank].bytes)
            return problem_set(why, NULL, "%s has %lld bytes, its manifest says %lld", path, (long long)status.st_size,
                               (long long)m->file[rank].bytes);
    }
    return true;
}

bool checkpoint_commit(checkpoint_store *s, const manifest *m, problem *why) {
    if (s->begun != m->step) cf_die(NULL, "a checkpoint of step %lld was not begun", (long long)m->step);
    found new = {m->step, UNFINISHED};
    char path[PATH_MAX];
    int64_t size = 0;
    path_of(s->out, new, manifest_name, path);
    char *text = check_files(s->out, new, m, why) ? manifest_print(m, &size) : NULL;
    bool well = text && durable_replace(path, text, size, false, why) && move(s->out, new, FINISHED, why);
    free(text);
    if (!well) {
        checkpoint_abandon(s);
        return false;
    }
    s->begun = NOTHING_BEGUN;
    return durable_sync_directory(s->out) || durable_problem(why, "cannot sync", s->out, -1);
}

bool checkpoint_set_aside(checkpoint_store *s, int64_t sound, problem *why) {
    char path[PATH_MAX];
    int64_t count;
    found *all = list(s->out, &count, why);
    bool done = all != NULL;
    for (found *f = all; done && f < all + count; f++) {
        if (f->stage != FINISHED || f->step <= sound) continue;
        path_of(s->out, (found){f->step, DAMAGED}, "", path); // of an earlier time
        done = durable_remove_directory(path) ? move(s->out, *f, DAMAGED, why) : durable_problem(why, "cannot remove", path, -1);
        if (done) fprintf(stderr, "note: it stays as %s\n", path);
    }
    free(all);
    return done && (durable_sync_directory(s->out) || durable_problem(why, "cannot sync", s->out, -1));
}

bool checkpoint_prune(checkpoint_store *s, int64_t keep, int64_t keep_every, problem *why) {
    problem ignored;
    int64_t kept = 0, count;
    if (keep == 0) return true;
    found *all = list(s->out, &count, why);
    bool removed = all != NULL;
    for (found *f = all; all && f < all + count; f++) {
        if (f->stage == DAMAGED || f->step == s->begun) continue;
        if (f->stage == FINISHED && kept < keep) { // still looking for those to keep
            manifest *m = checkpoint_manifest(s->out, f->step, &ignored);
            kept += m && check_files(s->out, *f, m, &ignored);
            manifest_free(m);
        } else if (f->stage == UNFINISHED || keep_every == 0 || f->step % keep_every != 0) {
            removed &= remove_one(s->out, *f, why);
        }
    }
    free(all);
    return removed;
}

// --- loading -----------------------------------------------------------------------------------------------

manifest *checkpoint_manifest(const char *out, int64_t step, problem *why) {
    char path[PATH_MAX];
    path_of(out, (found){step, FINISHED}, manifest_name, path);
    int64_t size;
    char *text = input_read_all("manifest", path, MANIFEST_MAX_BYTES, &size, why);
    if (!text) return NULL;
    manifest *m = manifest_parse(text, size, path, why);
    free(text);
    if (m && m->step != step) {
        problem_set(why, NULL, "%s is that of step %lld", path, (long long)m->step);
        manifest_free(m);
        return NULL;
    }
    return m;
}

manifest *checkpoint_latest(const char *out, int64_t below, problem *skipped) {
    problem why;
    *skipped = (problem){.what = "", .hint = ""};
    int64_t count;
    found *all = list(out, &count, skipped);
    manifest *m = NULL;
    for (found *f = all; all && f < all + count; f++) {
        if (f->stage != FINISHED || f->step >= below) continue;
        m = checkpoint_manifest(out, f->step, &why);
        if (m && check_files(out, *f, m, &why)) break;
        manifest_free(m);
        m = NULL;
        problem_add(skipped, &why);
    }
    free(all);
    return m;
}

bool checkpoint_verify(const char *out, const manifest *m, int64_t rank, problem *why) {
    if (rank < 0 || rank >= m->ranks)
        cf_die(NULL, "file of rank %lld of a checkpoint of %lld ranks", (long long)rank, (long long)m->ranks);
    char path[PATH_MAX];
    int64_t bytes;
    uint64_t hash;
    checkpoint_file_path(out, m->step, rank, false, path);
    if (!input_hash(path, &bytes, &hash, why)) return false;
    if (bytes == m->file[rank].bytes && hash == m->file[rank].hash) return true;
    return problem_set(why, NULL, "%s is damaged: %lld bytes with hash %016llx, its manifest says %lld with %016llx", path,
                       (long long)bytes, (unsigned long long)hash, (long long)m->file[rank].bytes,
                       (unsigned long long)m->file[rank].hash);
}
