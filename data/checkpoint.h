// Checkpoints on the disk: OUT/step_00000123/ with one safetensors file per rank and manifest.json, which is written last. The
// caller decides which rank calls what, and when.
//
//   { "format": "commfuse checkpoint", "version": 1, "step": 123, "ranks": 2,
//     "options": {"tp": "2", …},                  texts, which startup.h explains
//     "files": [{"name": "rank_00000.safetensors", "bytes": 4096, "xxh64": "0123456789abcdef"}, …],
//     "xxh64": "…" }                              of all text above this line
//
// An error of the disk is a `problem` and does not end the run. A failed save leaves nothing and changes no earlier checkpoint.
// (Ignore SIGXFSZ, so that a limit on the size of files, ulimit -f, is such an error too.)
#pragma once
#include <limits.h>
#include "../layers/params.h"
#include "input.h"

enum { MANIFEST_MAX_RANKS = 1 << 16, MANIFEST_MAX_BYTES = 1 << 24 };

typedef struct manifest {
    int64_t step, ranks;
    file_hash *file;       // (ranks)
    struct cJSON *options; // texts by their names, for json_text()
} manifest;

// Replaces what had this name.
void manifest_add(struct cJSON *options, const char *name, const char *format, ...) CF_PRINTF(3, 4);

char *manifest_print(const manifest *m, int64_t *size); // the caller frees it
// NULL: the text is not a sound manifest, see why. name: its file. The caller frees it.
manifest *manifest_parse(const char *text, int64_t size, const char *name, problem *why);
void manifest_free(manifest *m);

// Makes the directory OUT if it is missing, locks it until close() or the end of the process, and removes unfinished checkpoints of
// runs that died. Returns the lock. -1: see why; if another run has the lock, its host and process.
int checkpoint_lock(const char *out, problem *why);
// 53 bits of the lock's hash: equal on all ranks that see the OUT that rank 0 has locked. 0: OUT cannot be read or written.
uint64_t checkpoint_mark(const char *out);

// These change OUT: only for who holds its lock. checkpoint_begin() is false if there is already one of that step.
bool checkpoint_begin(const char *out, int64_t step, problem *why);
bool checkpoint_commit(const char *out, const manifest *m, problem *why); // of m->step; if it fails, abandons it
void checkpoint_abandon(const char *out, int64_t step);

// Renames the checkpoints newer than step `sound`, which are damaged, to step_00000123.damaged, and prints so: they may look
// complete, but must not count. They stay until somebody removes them.
bool checkpoint_set_aside(const char *out, int64_t sound, problem *why);

// Keeps the `keep` newest complete checkpoints (0: all), all newer ones, and the steps that are multiples of `keep_every` (0:
// none); removes the rest, incomplete ones included. Removes nothing while fewer than `keep` are complete. False if something could
// not be removed: it no longer counts, and the next call tries again.
bool checkpoint_prune(const char *out, int64_t keep, int64_t keep_every, problem *why);

// The step of the newest checkpoint below `below`, sound or not. -1: there is none, or they cannot be listed, which sets why.
int64_t checkpoint_newest(const char *out, int64_t below, problem *why);
// The manifest of one step; NULL: see why.
manifest *checkpoint_manifest(const char *out, int64_t step, problem *why);
// Reads the whole file of a rank and compares size and hash with the manifest.
bool checkpoint_verify(const char *out, const manifest *m, int64_t rank, problem *why);

// The path of a rank's file, in a checkpoint or in an unfinished one.
void checkpoint_file_path(const char *out, int64_t step, int64_t rank, bool unfinished, char path[PATH_MAX]);

// --- the file of a rank: saved_state.c ---
//
// It holds the elements that this rank owned (rank_state, layers/params.h). It is a safetensors file
// (https://huggingface.co/docs/safetensors): 8 bytes n, little-endian; a header of n bytes of JSON, padded with blanks so that the
// data begin at a multiple of 64; and the data, little-endian:
//
//   "runs"     I64 (runs, 5)    tensor, layer, whole, count, at
//   "weight"   F32 (elements)   weights in full precision
//   "m", "v"   F32 (elements)   AdamW's moments; other optimizers have others (layers/optimizer/optimizers.h)
//
// The files of a checkpoint together hold every element once, so that any mesh, and other programs, can read them.

// Writes one rank's file, which appears whole (atomic_file.h), and reports its size and XXH64.
bool saved_state_write(const char *path, const rank_state *state, file_hash *written, problem *why);

// Opens all files of a checkpoint, which hold these kinds of values. NULL: see why. Every run is checked against the size of its
// file, and no two may hold the same element.
typedef struct saved_state saved_state;
saved_state *saved_state_open(const char *out, const manifest *m, state_kinds kinds, problem *why);
void saved_state_close(saved_state *s);
// False if an element of [first, first + count) is missing.
bool saved_state_read(const saved_state *s, int kind, int64_t tensor, int64_t layer, int64_t first, int64_t count, float *out,
                      problem *why);
