// Checkpoints on the disk: OUT/step_00000123/ with one safetensors file per rank and manifest.json, which is written last. This
// file knows nothing of ranks but their number: the caller decides who writes what, and when.
//
//   { "format": "commfuse checkpoint", "version": 1, "step": 123, "ranks": 2,
//     "options": {"tp": "2", …},                  texts that only the program understands (origin.h)
//     "files": [{"name": "rank_00000.safetensors", "bytes": 4096, "xxh64": "0123456789abcdef"}, …],
//     "xxh64": "…" }                              of all text above this line
//
// saver.c saves: rank 0 begins, each rank writes its file, rank 0 commits if all have done so, and prunes. origin.c loads: the
// latest; each file is verified by some rank; if any is damaged, the latest before it.
//
// An error of the disk is a `problem` and does not end the run. A save that fails leaves nothing, and what was there before stays.
// (A limit on the size of files, ulimit -f, ends a process by SIGXFSZ unless the program ignores that signal; then it is a
// problem like the rest.)
#ifndef CHECKPOINT_H
#define CHECKPOINT_H

#include <limits.h>
#include <stdint.h>
#include "../layers/params.h"
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

char *manifest_print(const manifest *m, int64_t *size); // the caller frees it
// NULL: the text is no sound manifest, see why; name: whose text it is. The caller frees it.
manifest *manifest_parse(const char *text, int64_t size, const char *name, problem *why);
void manifest_free(manifest *m);

// The directory OUT, made if it is missing, and the right to write into it until close or the end of the process. NULL if another
// run has it, naming host and process. Removes unfinished checkpoints of runs that died.
typedef struct checkpoint_store checkpoint_store;
checkpoint_store *checkpoint_store_open(const char *out, problem *why);
void checkpoint_store_close(checkpoint_store *store); // abandons a checkpoint that is begun and not committed
// 53 bits by which every rank can check that it sees the same OUT as rank 0, which has opened it. 0: OUT cannot be read or written.
uint64_t checkpoint_store_mark(const char *out);

// False if there is one of that step already.
bool checkpoint_begin(checkpoint_store *store, int64_t step, problem *why);
// Of manifest->step, which has been begun.
bool checkpoint_commit(checkpoint_store *store, const manifest *m, problem *why);
void checkpoint_abandon(checkpoint_store *store);

// Renames checkpoints newer than step `sound`, which the run has passed over, to step_00000123.damaged, and prints so: they may look
// complete, but must not count. They stay until somebody removes them.
bool checkpoint_set_aside(checkpoint_store *store, int64_t sound, problem *why);

// Keeps the `keep` newest complete checkpoints (0: all), whatever is newer than the oldest of them, and the steps that are
// multiples of `keep_every` (0: none); removes the rest, incomplete ones included. While fewer than `keep` are complete nothing is
// removed. False if something could not be removed: it does not count any more, and the next call tries again.
bool checkpoint_prune(checkpoint_store *store, int64_t keep, int64_t keep_every, problem *why);

// The newest complete checkpoint of a step below `below`: a sound manifest, and each file there with the right size. NULL if there is
// none. `skipped` names newer ones that were passed over, a line each with the reason, or is "". The caller frees the manifest.
manifest *checkpoint_latest(const char *out, int64_t below, problem *skipped);
// The manifest of one step; NULL: see why.
manifest *checkpoint_manifest(const char *out, int64_t step, problem *why);
// Reads a rank's file whole and compares size and hash with the manifest.
bool checkpoint_verify(const char *out, const manifest *m, int64_t rank, problem *why);

// Where a rank's file is, or, unfinished, where it is to be written.
void checkpoint_file_path(const char *out, int64_t step, int64_t rank, bool unfinished, char path[PATH_MAX]);

// --- the file of a rank: saved_state.c ---
//
// It holds the elements that this rank owned (rank_state, layers/params.h). It is a safetensors file
// (https://huggingface.co/docs/safetensors): 8 bytes n, little-endian; a header of n bytes of JSON, padded with blanks so that the
// data begin at a multiple of 64; and the data, little-endian:
//
//   "runs"     I64 (runs, 5)    tensor, layer, whole, count, at
//   "weight"   F32 (elements)   weights in full precision
//   "m", "v"   F32 (elements)   AdamW's moments
//
// The files of a checkpoint together hold every element once, so that any mesh, and other programs, can read them.

// Writes one rank's file, which appears whole (durable.h), and reports its size and XXH64.
bool saved_state_write(const char *path, const rank_state *state, manifest_file *written, problem *why);

// All files of a checkpoint. NULL: see why. Every run is checked against the size of its file, and no two may hold the
// same element.
typedef struct saved_state saved_state;
saved_state *saved_state_open(const char *out, const manifest *m, problem *why);
void saved_state_close(saved_state *s);
// False if not all of [first, first + count) is there.
bool saved_state_read(const saved_state *s, state_kind kind, int64_t tensor, int64_t layer, int64_t first, int64_t count,
                      float *out, problem *why);

CF_EXTERN_C_END
#endif
