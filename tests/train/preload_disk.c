// Stands between a program and its disk (LD_PRELOAD): on one rank, FULL_RANK, there is no space for files whose path has
// FULL_PATH in it. For tests in which one rank of several cannot write.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool full(int fd) {
    const char *rank = getenv("OMPI_COMM_WORLD_RANK"), *which = getenv("FULL_RANK"), *part = getenv("FULL_PATH");
    if (!rank) rank = getenv("PMI_RANK");
    char link[64], path[PATH_MAX];
    if (!which || !part || strcmp(rank ? rank : "0", which) != 0) return false;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length > 0 ? length : 0] = 0;
    return strstr(path, part);
}

ssize_t write(int fd, const void *bytes, size_t count) {
    ssize_t (*real_write)(int, const void *, size_t) = (ssize_t(*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    if (!full(fd)) return real_write(fd, bytes, count);
    errno = ENOSPC;
    return -1;
}
