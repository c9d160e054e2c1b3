// The state of a run on the disk: one safetensors file per rank, each with what that rank owned.
//
//   "runs"     I64 (runs, 5)    tensor, layer, whole, count, at
//   "weight"   F32 (elements)   weights in full precision
//   "m", "v"   F32 (elements)   AdamW's moments
//
// A run says that elements [at, at + count) of the three are elements [whole, whole + count) of that layer of that
// tensor, tensors numbered and laid out as in a model file (model_file.h). The files of a checkpoint together hold
// every element once, so that they can be read for any mesh, and by other programs.
#ifndef SAVED_STATE_H
#define SAVED_STATE_H

#include "manifest.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SAVED_WEIGHT, SAVED_M, SAVED_V, SAVED_KINDS };

typedef struct saved_run {
    int64_t tensor, layer, whole, count, at;
} saved_run;

// Writes one rank's file as safetensors_create and _commit do. values: SAVED_KINDS times (elements).
bool saved_state_write(const char *path, const saved_run *run, int64_t runs, const float *const *values,
                       int64_t elements, manifest_file *written, problem *why);

// All files of a checkpoint. NULL: see why. Every run is checked against the size of its file, and no two may hold the
// same element.
typedef struct saved_state saved_state;
saved_state *saved_state_open(const char *out, const manifest *m, problem *why);
void saved_state_close(saved_state *s);
// False if not all of [first, first + count) is there.
bool saved_state_read(const saved_state *s, int kind, int64_t tensor, int64_t layer, int64_t first,
                      int64_t count, float *out, problem *why);

#ifdef __cplusplus
}
#endif
#endif
