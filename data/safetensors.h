// Safetensors files, by the format's description (https://huggingface.co/docs/safetensors):
//   8 bytes     n, little-endian
//   n bytes     JSON {"NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, …} padded with
//               spaces; an entry "__metadata__" of texts is allowed
//   the rest    the tensors' bytes, little-endian, row-major; offsets count from here, without gap or overlap
// Of the format's element types the five below, of shapes up to four dimensions.
//
// Nothing here ends the run because of a file: what is wrong with it is told in a `problem`.
#ifndef SAFETENSORS_H
#define SAFETENSORS_H

#include <stdbool.h>
#include <stdint.h>
#include "problem.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SAFETENSORS_DIMENSIONS = 4 };
typedef enum { TENSOR_F64, TENSOR_I64, TENSOR_F32, TENSOR_BF16, TENSOR_U8, TENSOR_TYPES } tensor_type;

typedef struct tensor_entry {
    const char *name;
    tensor_type type;
    int dimensions; // 0: one element
    int64_t shape[SAFETENSORS_DIMENSIONS];
} tensor_entry;

int64_t tensor_type_bytes(tensor_type type);           // of one element
const char *tensor_type_name(tensor_type type);        // "F64", "I64", "F32", "BF16", "U8"
int64_t tensor_entry_bytes(const tensor_entry *entry); // -1: no shape, or 10^15 bytes or more

// Writing: create, append the tensors' bytes in the table's order in pieces of any size, commit; PATH is always a
// complete file (durable.h). A disk error is kept until commit, which tells it and removes the temporary file. A table
// that no reader may take (a name twice, elements off their alignment: largest element types first) or too
// many or too few bytes are the caller's fault and end the run. The table is not needed after create.
typedef struct safetensors_writer safetensors_writer;
safetensors_writer *safetensors_create(const char *path, const tensor_entry *entries, int64_t count);
void safetensors_append(safetensors_writer *writer, const void *bytes, int64_t count);
// Frees the writer in any case. The file's size and XXH64.
bool safetensors_commit(safetensors_writer *writer, int64_t *bytes, uint64_t *hash, problem *why);
void safetensors_abandon(safetensors_writer *writer);

// Reading: memory-mapped, read-only; every field of the header is checked against the file's size before use.
typedef struct safetensors safetensors;
safetensors *safetensors_open(const char *path, problem *why); // NULL: see why
void safetensors_close(safetensors *file);
int64_t safetensors_count(const safetensors *file);
const tensor_entry *safetensors_entry(const safetensors *file, int64_t i); // in the order of their bytes
int64_t safetensors_find(const safetensors *file, const char *name);       // -1: there is none
const void *safetensors_data(const safetensors *file,
                             int64_t i); // tensor_entry_bytes() of them, aligned to its type

#ifdef __cplusplus
}
#endif
#endif
