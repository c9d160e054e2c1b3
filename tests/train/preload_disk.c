// Stands between a program and its disk (LD_PRELOAD): on one rank, FULL_RANK, there is no space for files whose path has
// FULL_PATH in it or, with OPEN_ERROR or READ_ERROR, these cannot be opened or read, with that errno, or, with SLOW_MS, each read and
// write takes so long, or, with SIGNAL_AT, what has this text in it is written just before SIGUSR1 comes. With PRODUCT_MS that rank takes
// so long for each product. For tests in which one rank of several cannot write or read, is told to stop at a certain place, or is slow.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool chosen_rank(void) {
    const char *rank = getenv("OMPI_COMM_WORLD_RANK"), *which = getenv("FULL_RANK");
    if (!rank) rank = getenv("PMI_RANK");
    return which && strcmp(rank ? rank : "0", which) == 0;
}

static bool chosen(const char *path) {
    const char *part = getenv("FULL_PATH");
    return chosen_rank() && part && strstr(path, part);
}

static bool chosen_file(int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length > 0 ? length : 0] = 0;
    return chosen(path);
}

static int number(const char *name) {
    return getenv(name) ? atoi(getenv(name)) : 0;
}

static bool chosen_for(const char *name, int fd) {
    if (!number(name) || !chosen_file(fd)) return false;
    if (strcmp(name, "SLOW_MS") == 0) usleep((useconds_t)number(name) * 1000);
    errno = number(name);
    return true;
}

int open(const char *path, int flags, ...) {
    int (*real_open)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open");
    va_list arguments;
    va_start(arguments, flags);
    const mode_t mode = flags & O_CREAT ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    if (!number("OPEN_ERROR") || (flags & O_CREAT) || !chosen(path)) return real_open(path, flags, mode);
    errno = number("OPEN_ERROR");
    return -1;
}

ssize_t pread(int fd, void *bytes, size_t count, off_t at) {
    ssize_t (*real_pread)(int, void *, size_t, off_t) = (ssize_t(*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread");
    chosen_for("SLOW_MS", fd);
    return chosen_for("READ_ERROR", fd) ? -1 : real_pread(fd, bytes, count, at);
}

ssize_t write(int fd, const void *bytes, size_t count) {
    ssize_t (*real_write)(int, const void *, size_t) = (ssize_t(*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    const bool slow = chosen_for("SLOW_MS", fd);
    const char *at = getenv("SIGNAL_AT");
    if (at && memmem(bytes, count, at, strlen(at)) && kill(getpid(), SIGUSR1) == 0) usleep(200000); // until its thread has seen it
    if (slow || at || number("OPEN_ERROR") || number("READ_ERROR") || !chosen_file(fd)) return real_write(fd, bytes, count);
    errno = ENOSPC;
    return -1;
}

int dnnl_sgemm(char a_as, char b_as, int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t a_row, const float *b,
               int64_t b_row, float beta, float *c, int64_t c_row) {
    int (*real)(char, char, int64_t, int64_t, int64_t, float, const float *, int64_t, const float *, int64_t, float, float *,
                int64_t) = dlsym(RTLD_NEXT, "dnnl_sgemm");
    if (chosen_rank() && number("PRODUCT_MS")) usleep((useconds_t)number("PRODUCT_MS") * 1000);
    return real(a_as, b_as, m, n, k, alpha, a, a_row, b, b_row, beta, c, c_row);
}
