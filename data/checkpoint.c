// See checkpoint.h. The name of a directory gives its stage:
//     step_00000123            a checkpoint
//     step_00000123.tmp        being written, or being removed
//     step_00000123.damaged    a later start resumed from an older one; only the user removes it
// Each change of stage is a rename, so a process may be killed between any two calls. A power cut may stop a save anywhere, too:
//     1. mkdir step.tmp
//     2. each rank: write its file beside, sync it, rename it, sync step.tmp
//     3. manifest: the same; now all names in step.tmp survive a power cut
//     4. rename step.tmp to step
//     5. sync OUT; only now remove what is older
//
// checkpoint_lock() may remove every step.tmp because it holds the lock. The lock's file stays in OUT, because removing it
// would race with a run that is opening it. The lock ends with its process, so it is never stale; its text is for messages only.
//
// Reading takes no lock. A checkpoint that is removed meanwhile is found incomplete and skipped.
#define _GNU_SOURCE
#include "checkpoint.h"
#include "atomic_file.h"
#include "json.h"
#include <dirent.h>
#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

enum { MANIFEST_VERSION = 1, SEAL_ROOM = 40, FILE_NAME = 48 };
typedef enum { FINISHED, UNFINISHED, DAMAGED, STAGES } stage;
static const char *const stage_suffix[STAGES] = {"", ".tmp", ".damaged"};
static const char manifest_name[] = "manifest.json", format[] = "commfuse checkpoint",
                  damaged[] = "the checkpoint is damaged, or was not copied completely";

typedef struct found {
    int64_t step;
    stage stage;
} found;

static void rank_file_name(int64_t rank, char name[FILE_NAME]) {
    snprintf(name, FILE_NAME, "rank_%05ld.safetensors", rank);
}

// --- manifest ----------------------------------------------------------------------------------------------

static int64_t make_seal(const char *text, int64_t size, char seal[SEAL_ROOM]) {
    return snprintf(seal, SEAL_ROOM, "\t\"xxh64\":\t\"%016lx\"\n}\n", (uint64_t)XXH64(text, (size_t)size, 0));
}

// cJSON returns NULL when memory runs out, and accepts NULL as an object, so each call is checked.
static void *got(void *item) {
    if (!item) cf_die(NULL, "out of memory for a checkpoint's manifest");
    return item;
}

void manifest_add(cJSON *options, const char *name, const char *form, ...) {
    char *value = NULL;
    va_list values;
    va_start(values, form);
    if (vasprintf(&value, form, values) < 0) got(NULL);
    va_end(values);
    cJSON_DeleteItemFromObjectCaseSensitive(options, name);
    got(cJSON_AddStringToObject(options, name, value));
    free(value);
}

char *manifest_print(const manifest *m, int64_t *size) {
    char *text, *options = got(cJSON_Print(m->options)), name[FILE_NAME], seal[SEAL_ROOM];
    size_t length;
    FILE *out = got(open_memstream(&text, &length));
    fprintf(out, "{\n\t\"format\":\t\"%s\",\n\t\"version\":\t%d,\n\t\"step\":\t%ld,\n\t\"ranks\":\t%ld,\n", format,
            MANIFEST_VERSION, m->step, m->ranks);
    fprintf(out, "\t\"options\":\t%s,\n\t\"files\":\t[", options);
    for (int64_t rank = 0; rank < m->ranks; rank++) {
        rank_file_name(rank, name);
        fprintf(out, "%s{\"name\": \"%s\", \"bytes\": %ld, \"xxh64\": \"%016lx\"}", rank > 0 ? ",\n\t\t" : "", name,
                m->file[rank].bytes, m->file[rank].hash);
    }
    fprintf(out, "],\n");
    if (fflush(out) != 0) got(NULL);
    make_seal(text, (int64_t)length, seal);
    fprintf(out, "%s", seal);
    if (fclose(out) != 0) got(NULL);
    cJSON_free(options);
    *size = (int64_t)length;
    return text;
}

static bool sealed(const char *text, int64_t size) {
    char seal[SEAL_ROOM];
    int64_t length = make_seal(text, 0, seal), above = size - length; // its length is always the same
    if (above < 0) return false;
    make_seal(text, above, seal);
    return memcmp(text + above, seal, (size_t)length) == 0;
}

static bool read_files(manifest *m, const cJSON *files, const char *name, problem *why) {
    if (!cJSON_IsArray(files) || cJSON_GetArraySize(files) != m->ranks)
        return problem_set(why, damaged, "%s does not name %ld files, one for each rank", name, m->ranks);
    file_hash *file = m->file = cf_host_alloc(m->ranks, sizeof *m->file, "a manifest");
    const cJSON *item;
    cJSON_ArrayForEach(item, files) {
        const char *hash = json_text(item, "xxh64");
        if (!hash || !json_whole(item, "bytes", 0, JSON_WHOLE_MAX, &file->bytes))
            return problem_set(why, damaged, "%s: file %ld is without size or hash", name, file - m->file);
        file++->hash = strtoul(hash, NULL, 16);
    }
    return true;
}

// The seal is right, but another program may have written the text, so every field is checked before it is used.
static bool read_root(manifest *m, cJSON *root, const char *name, problem *why) {
    int64_t version = 0;
    const cJSON *item;
    m->options = cJSON_DetachItemFromObjectCaseSensitive(root, "options");
    if (!json_is(root, "format", format)) return problem_set(why, NULL, "%s is not the manifest of a checkpoint", name);
    if (json_whole(root, "version", 0, JSON_WHOLE_MAX, &version) && version != MANIFEST_VERSION)
        return problem_set(why, "it was written by another version of this program", "%s has version %ld, expected %d", name,
                           version, MANIFEST_VERSION);
    const char *missing = version != MANIFEST_VERSION                                    ? "version"
                          : !json_whole(root, "step", 0, JSON_WHOLE_MAX, &m->step)       ? "step"
                          : !json_whole(root, "ranks", 1, MANIFEST_MAX_RANKS, &m->ranks) ? "number of ranks"
                          : !cJSON_IsObject(m->options)                                  ? "options"
                                                                                         : NULL;
    if (missing) return problem_set(why, damaged, "%s has no %s", name, missing);
    cJSON_ArrayForEach(item, m->options) {
        if (!cJSON_IsString(item)) return problem_set(why, damaged, "%s: option %.100s is not a text", name, item->string);
    }
    return read_files(m, cJSON_GetObjectItemCaseSensitive(root, "files"), name, why);
}

manifest *manifest_parse(const char *text, int64_t size, const char *name, problem *why) {
    if (size < 1 || size > MANIFEST_MAX_BYTES || memchr(text, 0, (size_t)size) || !sealed(text, size)) {
        problem_set(why, damaged, "%s is damaged: it does not end in the hash of its text", name);
        return NULL;
    }
    char *copy = got(strndup(text, (size_t)size)); // with a terminator
    cJSON *root = cJSON_ParseWithOpts(copy, NULL, true);
    free(copy);
    manifest *m = cf_host_alloc(1, sizeof *m, "a manifest");
    bool sound = read_root(m, root, name, why);
    cJSON_Delete(root);
    if (sound) return m;
    manifest_free(m);
    return NULL;
}

void manifest_free(manifest *m) {
    if (!m) return;
    cJSON_Delete(m->options);
    free(m->file);
    free(m);
}

// --- names -------------------------------------------------------------------------------------------------

// "OUT/step_00000123.tmp/NAME"; without a name, the directory.
static void path_of(const char *out, found f, const char *name, char path[PATH_MAX]) {
    int length = snprintf(path, PATH_MAX, "%s/step_%08ld%s%s%s", out, f.step, stage_suffix[f.stage], *name ? "/" : "", name);
    if (length >= PATH_MAX) cf_die("choose a shorter --out", "the name of a checkpoint is too long: %.100s…", out);
}

void checkpoint_file_path(const char *out, int64_t step, int64_t rank, bool unfinished, char path[PATH_MAX]) {
    char name[FILE_NAME];
    rank_file_name(rank, name);
    path_of(out, (found){step, unfinished ? UNFINISHED : FINISHED}, name, path);
}

// False if path_of() makes no such name.
static bool read_name(const char *name, found *f) {
    char again[64];
    if (sscanf(name, "step_%15ld", &f->step) != 1 || f->step < 0) return false;
    for (f->stage = FINISHED; f->stage < STAGES; f->stage = (stage)(f->stage + 1)) {
        snprintf(again, sizeof again, "step_%08ld%s", f->step, stage_suffix[f->stage]);
        if (strcmp(name, again) == 0) return true;
    }
    return false;
}

// The checkpoints in OUT, newest first; none if there is no OUT. NULL, see why, if they cannot be listed: a new run must not begin
// then.
static found *list(const char *out, int64_t *count, problem *why) {
    struct dirent **entry = NULL;
    int entries = scandir(out, &entry, NULL, versionsort);
    if (entries < 0 && errno != ENOENT) {
        atomic_file_problem(why, "cannot list", out, -1);
        if (why) why->unread = true;
        return NULL;
    }
    *count = 0;
    found *all = cf_host_alloc(entries > 0 ? entries : 0, sizeof *all, "the list of checkpoints");
    for (int i = entries - 1; i >= 0; free(entry[i--])) *count += read_name(entry[i]->d_name, &all[*count]);
    free(entry);
    return all;
}

// --- the directory ---------------------------------------------------------------------------------------

static bool move(const char *out, found from, stage to, problem *why) {
    char old[PATH_MAX], new[PATH_MAX];
    path_of(out, from, "", old);
    path_of(out, (found){from.step, to}, "", new);
    return rename(old, new) == 0 || atomic_file_problem(why, "cannot rename", old, -1);
}

// Removes a directory, if it is there; its name is in `path`.
static bool clear(const char *out, int64_t step, stage which, char path[PATH_MAX], problem *why) {
    path_of(out, (found){step, which}, "", path);
    return atomic_file_remove_directory(path) || atomic_file_problem(why, "cannot remove", path, -1);
}

// Renames a checkpoint before it removes it: a checkpoint that is partly removed must not count.
static bool remove_one(const char *out, found f, problem *why) {
    char path[PATH_MAX];
    return clear(out, f.step, UNFINISHED, path, why) &&
           (f.stage == UNFINISHED || (move(out, f, UNFINISHED, why) && clear(out, f.step, UNFINISHED, path, why)));
}

int checkpoint_lock(const char *out, problem *why) {
    char path[PATH_MAX + 8];
    int64_t count;
    snprintf(path, sizeof path, "%s/lock", out);
    const bool made = atomic_file_make_directories(out) || atomic_file_problem(why, "cannot make directory", out, -1);
    const int lock = made ? atomic_file_lock(path, why) : -1;
    found *all = lock < 0 ? NULL : list(out, &count, why);
    for (found *f = all; all && f < all + count; f++) // one that cannot be removed does no harm: it does not count
        if (f->stage == UNFINISHED) remove_one(out, *f, NULL);
    if (!all && lock >= 0) close(lock);
    free(all);
    return all ? lock : -1;
}

uint64_t checkpoint_mark(const char *out) {
    char path[PATH_MAX + 8];
    file_hash lock;
    snprintf(path, sizeof path, "%s/lock", out);
    return access(out, W_OK | X_OK) == 0 && input_hash(path, &lock, NULL) ? lock.hash >> 11 | 1 : 0;
}

// --- saving ------------------------------------------------------------------------------------------------

bool checkpoint_begin(const char *out, int64_t step, problem *why) {
    char path[PATH_MAX];
    path_of(out, (found){step, FINISHED}, "", path);
    if (access(path, F_OK) == 0) return problem_set(why, "give it another name", "%.1500s exists already", path);
    if (!clear(out, step, UNFINISHED, path, why)) return false;
    return mkdir(path, 0777) == 0 || atomic_file_problem(why, "cannot make checkpoint directory", path, -1);
}

void checkpoint_abandon(const char *out, int64_t step) {
    remove_one(out, (found){step, UNFINISHED}, NULL);
}

// Checks that each file of the manifest is there and has the right size.
static bool check_files(const char *out, found f, const manifest *m, problem *why) {
    for (int64_t rank = 0; rank < m->ranks; rank++) {
        char path[PATH_MAX];
        struct stat status;
        checkpoint_file_path(out, f.step, rank, f.stage == UNFINISHED, path);
        if (stat(path, &status) != 0) return atomic_file_problem(why, "cannot find", path, -1);
        if (!S_ISREG(status.st_mode)) return problem_set(why, NULL, "%s is not a regular file", path);
        if (status.st_size != m->file[rank].bytes)
            return problem_set(why, NULL, "%s has %ld bytes, its manifest says %ld", path, status.st_size, m->file[rank].bytes);
    }
    return true;
}

bool checkpoint_commit(const char *out, const manifest *m, problem *why) {
    const found new = {m->step, UNFINISHED};
    char path[PATH_MAX];
    int64_t size = 0;
    path_of(out, new, manifest_name, path);
    char *text = check_files(out, new, m, why) ? manifest_print(m, &size) : NULL;
    const bool ok = text && atomic_file_replace(path, text, size, why) && move(out, new, FINISHED, why);
    free(text);
    if (!ok) checkpoint_abandon(out, m->step);
    return ok && (atomic_file_sync_directory(out) || atomic_file_problem(why, "cannot sync", out, -1));
}

bool checkpoint_set_aside(const char *out, int64_t sound, problem *why) {
    char path[PATH_MAX];
    int64_t count;
    found *all = list(out, &count, why);
    bool done = all != NULL;
    for (found *f = all; done && f < all + count; f++) {
        if (f->stage != FINISHED || f->step <= sound) continue;
        done = clear(out, f->step, DAMAGED, path, why) && move(out, *f, DAMAGED, why); // replaces an earlier one
        if (done) cf_print(stderr, "note: it is kept as %s\n", path);
    }
    free(all);
    return done && (atomic_file_sync_directory(out) || atomic_file_problem(why, "cannot sync", out, -1));
}

bool checkpoint_prune(const char *out, int64_t keep, int64_t keep_every, problem *why) {
    int64_t kept = 0, count;
    if (keep == 0) return true;
    found *all = list(out, &count, why);
    bool removed = all != NULL;
    for (found *f = all; all && f < all + count; f++) {
        if (f->stage == DAMAGED || (f->stage == UNFINISHED && kept == 0)) continue; // the newest may be being written
        if (f->stage == FINISHED && kept < keep) {                                  // stays, but counts only if it is complete
            manifest *m = checkpoint_manifest(out, f->step, NULL);
            kept += m && check_files(out, *f, m, NULL);
            manifest_free(m);
        } else if (f->stage == UNFINISHED || keep_every == 0 || f->step % keep_every != 0) {
            removed &= remove_one(out, *f, why);
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
        problem_set(why, NULL, "%s is that of step %ld", path, m->step);
        manifest_free(m);
        return NULL;
    }
    return m;
}

int64_t checkpoint_newest(const char *out, int64_t below, problem *why) {
    int64_t count, step = -1;
    found *all = list(out, &count, why);
    for (const found *f = all; all && step < 0 && f < all + count; f++)
        if (f->stage == FINISHED && f->step < below) step = f->step;
    free(all);
    return step;
}

bool checkpoint_verify(const char *out, const manifest *m, int64_t rank, problem *why) {
    char path[PATH_MAX];
    const file_hash right = m->file[rank];
    file_hash file;
    checkpoint_file_path(out, m->step, rank, false, path);
    if (!input_hash(path, &file, why)) return false;
    if (file.bytes == right.bytes && file.hash == right.hash) return true;
    return problem_set(why, NULL, "%s is damaged: %ld bytes with hash %016lx, its manifest says %ld with %016lx", path, file.bytes,
                       file.hash, right.bytes, right.hash);
}
