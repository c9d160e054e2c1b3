// A directory of a test's own under $TMPDIR or /tmp, and files in it.
#pragma once

#include <dirent.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char scratch[PATH_MAX / 2];

static inline int scratch_make(void **state) {
    (void)state;
    const char *base = getenv("TMPDIR");
    snprintf(scratch, sizeof scratch, "%s/commfuse-test-XXXXXX", base && *base ? base : "/tmp");
    return mkdtemp(scratch) ? 0 : -1;
}

// The path of a name in it; the text lives until the fourth call after this one.
static inline char *scratch_path(const char *name) {
    static char path[4][PATH_MAX];
    static int turn;
    turn = (turn + 1) % 4;
    snprintf(path[turn], sizeof path[turn], "%s/%s", scratch, name);
    return path[turn];
}

static inline int scratch_remove(void **state) {
    (void)state;
    DIR *directory = opendir(scratch);
    for (struct dirent *entry; directory && (entry = readdir(directory));)
        if (entry->d_name[0] != '.' && unlink(scratch_path(entry->d_name)) != 0) rmdir(scratch_path(entry->d_name));
    if (directory) closedir(directory);
    return rmdir(scratch);
}

static inline char *scratch_write(const char *name, const void *bytes, size_t size) {
    char *path = scratch_path(name);
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(bytes, 1, size, file) != size || fclose(file) != 0) {
        perror(path);
        abort();
    }
    return path;
}

// A whole file and its size, with a 0 behind; NULL if there is none. The caller frees it.
static inline char *scratch_read(const char *path, size_t *size) {
    *size = 0;
    FILE *file = fopen(path, "rb");
    if (!file) return NULL;
    char *bytes = NULL;
    for (size_t n = 1; n > 0; *size += n) {
        bytes = (char *)realloc(bytes, *size + 4097);
        if (!bytes) abort();
        n = fread(bytes + *size, 1, 4096, file);
        bytes[*size + n] = 0;
    }
    fclose(file);
    return bytes;
}

static inline int scratch_entries(void) {
    int count = 0;
    DIR *directory = opendir(scratch);
    for (struct dirent *entry; directory && (entry = readdir(directory));) count += entry->d_name[0] != '.';
    if (directory) closedir(directory);
    return count;
}
