// Reading regular files. They are not mapped, because SIGBUS would end the run without a message if a mapped file becomes shorter.
#pragma once
#include "problem.h"

// An open file; ulimit -Hn limits their number. If the file is replaced, the old one is read on. Pipes are refused, because opening
// one would wait for a writer, and devices, because they have no size.
typedef struct input {
    const char *kind; // for messages: "token file"
    char *path;
    int64_t bytes;
    int fd;
} input;
bool input_open(input *file, const char *kind, const char *path, problem *why);        // false: see why
bool input_read(const input *file, int64_t at, void *to, int64_t bytes, problem *why); // all `bytes` from byte `at` on, or false
void input_close(input *file);                                                         // a file that is all zero was never open

// A whole file of at most `most` bytes, with a terminating 0; the caller frees it. NULL: see why; errno is ENOENT only if there is
// no such file.
char *input_read_all(const char *kind, const char *path, int64_t most, int64_t *bytes, problem *why);
// Size and XXH64, seed 0, of a whole file, as xxh64sum prints it.
typedef struct file_hash {
    int64_t bytes;
    uint64_t hash;
} file_hash;
bool input_hash(const char *path, file_hash *of, problem *why);

// llm.c's files begin with 256 numbers of 32 bits. The first is 'magic', which says what the file is.
enum { INPUT_HEADER = 256, INPUT_HEADER_BYTES = INPUT_HEADER * (int)sizeof(int32_t) };
typedef struct header_field {
    const char *name;
    int64_t least, most;
} header_field;
// Reads the header and checks its first numbers, one for each field. False: see why.
bool input_header(const input *file, const header_field *field, int fields, int32_t header[INPUT_HEADER], problem *why);
// The same for a file of `bytes` bytes in memory.
bool input_check_header(const char *kind, const char *path, int64_t bytes, const header_field *field, int fields,
                        const int32_t *header, problem *why);
// False unless the file has this size. promise: what its header says, "12 tokens".
bool input_check_size(const input *file, int64_t bytes, const char *promise, problem *why);
