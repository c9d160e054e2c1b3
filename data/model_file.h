// Model files (llm.c's): 256 int32 header, then the tensors of layers/params.h in its order, each stacked over layers,
// matrices (out, in) row-major.
//   header[0] the block's magic (llm.c's 20240326)   header[1] version: 3 = fp32, 5 = bf16
//   header[2] maxT  [3] V  [4] L  [5] heads  [6] C  [7] Vp (V padded)
// Those of all blocks but llm.c's are this program's own, and go on:
//   header[8] heads of keys and values  [9] units of the MLP; the bits of floats: [10] epsilon of the norms  [11] theta
//   [12] factor, 0.0: not stretched  [13] low  [14] high; [15] positions before the stretch
// Tensors that a block lacks are left out.
#pragma once
#include "../layers/params.h"
#include "input.h"

int64_t model_parameters(const gpt_shape *shape); // elements of all tensors, the vocabulary's padding included
// Dies (together) if no GPT can have this shape. of, path: where it comes from ("model file", "x.bin").
void model_shape_check(const gpt_shape *shape, const char *of, const char *path);

typedef struct model_file {
    gpt_shape shape;
    bool bf16;
    int64_t first[TENSORS]; // element number of each tensor's first element
    input in;
} model_file;
model_file *model_file_open(const char *path); // dies together
// `count` elements from element `first` of one layer of a tensor, converted to float. model: a model_file; params_read() calls it.
void model_file_read(void *model, int kind, int tensor, int64_t layer, int64_t first, int64_t count, float *out);
void model_file_close(model_file *file);

// One rank writes all tensors in file order, from the first element to the last, then commits. PATH is always a complete file, the
// old or the new one (atomic_file.h). Errors (disk full, permission, another process that writes PATH) end the run, name the file,
// keep the old one and remove the temporary one.
typedef struct model_writer model_writer;
model_writer *model_writer_open(const char *path, const gpt_shape *shape, bool bf16);
void model_writer_append(void *writer, const float *values, int64_t count); // a model_writer: gpt_collect() calls it
void model_writer_commit(model_writer *writer);
