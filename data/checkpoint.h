// Checkpoints on the disk: OUT/step_00000123/ with one safetensors file per rank and manifest.json, which is written last. Knows
// nothing of ranks but their number: who writes what and when is the caller's.
//
//   { "format": "commfuse checkpoint", "version": 1, "step": 123, "ranks": 2,
//     "options": {"tp": "2", …},                  texts that are the program's business (origin.h)
//     "files": [{"name": "rank_00000.safetensors", "bytes": 4096, "xxh64": "0123456789abcdef"}, …],
//     "xxh64": "…" }                              over all of the text above the line that holds it
//
// saver.c saves: rank 0 begins, each rank writes its file, rank 0 commits if all have done so, and prunes. origin.c loads: the
// latest; each file is verified by some rank; if any is damaged, the latest below it.
//
// Nothing here ends the run because of the disk: what is wrong is in a `problem`, and a save that fails
// leaves what was there before, and nothing else. (A limit on the size of files, ulimit -f, ends a process by
// SIGXFSZ unless the program ignores that signal; then it is a problem like the rest.)
#ifndef CHECKPOINT_H
#define CHECKPOINT_H

#include <limits.h>
#include <stdint.h>
#include "problem.h"

CF_EXTERN_C_BEGIN

enum { MANIFEST_MAX_RANKS = 1 << 16, MANIFEST_MAX_BYTES = 1 << 24, MANIFEST_MAX_OPTIONS = 1024 };

typedef struct manifest_file {
    int64_t bytes;
    uint64_t hash; // XXH64, seed 0
} manifest_file;

typedef struct manifest {
    int64_t step, ranks;
    manifest_file *file;   // (ranks)
    struct cJSON *options; // texts by their names, none twice
} manifest;

void manifest_add(struct cJSON *options, const char *name, const char *format, ...) CF_PRINTF(3, 4);
const char *manifest_value(const manifest *m, const char *name); // of an option; NULL: there is none

char *manifest_print(const manifest *m, int64_t *size); // the text; the caller frees it
// NULL: the text is no sound manifest, see why; `name` says whose it is. Else manifest_free() it.
manifest *manifest_parse(const char *text, int64_t size, const char *name, problem *why);
void manifest_free(manifest *m);

// The directory OUT, made if it is missing, and the right to write into it until close or the end of the
// process. NULL if another run has it, naming host and process. What dead runs have left unfinished is
// removed.
typedef struct checkpoint_store checkpoint_store;
checkpoint_store *checkpoint_store_open(const char *out, problem *why);
void checkpoint_store_close(checkpoint_store *store); // abandons what is begun and not committed
// 53 bits of what the run that has opened it has left in OUT, for any rank to compare with rank 0's. 0: OUT cannot be
// read, or not be written.
uint64_t checkpoint_store_mark(const char *out);

// False if there is one of that step already.
bool checkpoint_begin(checkpoint_store *store, int64_t step, problem *why);
// Of manifest->step, which has been begun.
bool checkpoint_commit(checkpoint_store *store, const manifest *m, problem *why);
void checkpoint_abandon(checkpoint_store *store);

// What is newer than step `sound`, which the run has passed over, gets another name, step_00000123.damaged, and a line
// that says so: it may look complete, and is nothing to count on. It stays until somebody removes it.
bool checkpoint_set_aside(checkpoint_store *store, int64_t sound, problem *why);

// Keeps the `keep` newest complete checkpoints (0: all there are), whatever is newer than the oldest of them,
// and the steps that are multiples of `keep_every` (0: no such); removes the rest, incomplete ones included.
// While fewer than `keep` are complete nothing is removed. False if something could not be removed: it is no
// checkpoint any more, and is tried again the next time.
bool checkpoint_prune(checkpoint_store *store, int64_t keep, int64_t keep_every, problem *why);

// The newest checkpoint of a step below `below` that is complete: a sound manifest, and each file there with
// the right size. NULL if there is none. `skipped` says, a line each, which newer ones were passed over and
// why, or "" if none was. The caller frees the manifest.
manifest *checkpoint_latest(const char *out, int64_t below, problem *skipped);
// The manifest of one step; NULL: see why.
manifest *checkpoint_manifest(const char *out, int64_t step, problem *why);
// Reads a rank's file whole and compares size and hash with the manifest.
bool checkpoint_verify(const char *out, const manifest *m, int64_t rank, problem *why);

// Where a rank's file is, or, unfinished, where it is to be written.
void checkpoint_file_path(const char *out, int64_t step, int64_t rank, bool unfinished, char path[PATH_MAX]);

CF_EXTERN_C_END
#endif
