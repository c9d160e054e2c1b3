// Regular files that are read. Nothing is mapped: a file that becomes shorter would end the run with SIGBUS, without a word.
#ifndef INPUT_H
#define INPUT_H

#include <stdbool.h>
#include <stdint.h>
#include "problem.h"

// A pipe is refused, which would hold up the start until somebody writes into it, and so is a device, which has no size.
//
// kind: what the file is, for messages: "token file".
//
// A whole file of at most `most` bytes, with a 0 after it; the caller frees it. NULL: see why; errno is ENOENT only if there
// is no such file.
char *input_read_all(const char *kind, const char *path, int64_t most, int64_t *bytes, problem *why);
// XXH64, seed 0, of a whole file, as xxh64sum prints it.
bool input_hash(const char *path, int64_t *bytes, uint64_t *hash, problem *why);

// Files that are read here and there. All stay open, as many as ulimit -Hn allows: what is replaced meanwhile is read as it was.
typedef struct input {
    char *path;
    int64_t bytes;
    int fd;
} input;
typedef struct input_files {
    const char *kind;
    int64_t count, most;
    input *file; // (most) in the order in which they were added
} input_files;
input_files *input_create(const char *kind, int64_t most);
bool input_add(input_files *all, const char *path, problem *why); // false: see why
// All `bytes` from byte `at` on, or false.
bool input_read(input_files *all, int64_t file, int64_t at, void *to, int64_t bytes, problem *why);
// These bytes will be read soon: a disk, or a server, brings many such at a time.
void input_expect(input_files *all, int64_t file, int64_t at, int64_t bytes);
// Files that begin with 256 numbers, llm.c's: reads them. False: there are fewer, or the first is another than `magic`.
enum { INPUT_HEADER = 256, INPUT_HEADER_BYTES = INPUT_HEADER * (int)sizeof(int32_t) };
bool input_header(input_files *all, int64_t file, int32_t magic, int32_t header[INPUT_HEADER], problem *why);
// False unless the file has exactly so many bytes. promise: what its header says, "12 tokens".
bool input_check_size(const input_files *all, int64_t file, int64_t bytes, const char *promise, problem *why);
void input_close(input_files *all);

#endif
