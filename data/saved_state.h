// The state of a run on the disk: one file per rank, each with what that rank owned (rank_state, layers/params.h). It is a
// safetensors file (https://huggingface.co/docs/safetensors): 8 bytes n, little-endian; a header of n bytes of JSON, padded
// with blanks until the data begin at a multiple of 64; and the data, little-endian:
//
//   "runs"     I64 (runs, 5)    tensor, layer, whole, count, at
//   "weight"   F32 (elements)   weights in full precision
//   "m", "v"   F32 (elements)   AdamW's moments
//
// The files of a checkpoint together hold every element once, so that they can be read for any mesh, and by other programs.
#ifndef SAVED_STATE_H
#define SAVED_STATE_H

#include "../layers/params.h"
#include "checkpoint.h"

CF_EXTERN_C_BEGIN

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
