// Stands between a program and the calls that change a disk (LD_PRELOAD), and counts them: open for writing,
// write, ftruncate, posix_fallocate, fsync, rename, unlinkat, rmdir, mkdir. Built and used by test_checkpoint_kill.py and
// test_saving.py; the environment says what for:
//     CALLS_LOG=FILE      a line for each call: its name and what it is about
//     CALLS_ABOUT=TEXT    only calls on paths that have this in them count
//     KILL_AT=N           SIGKILL before the N-th, from 1; in the middle of it if it is a write
//     FAIL_AT=N           the N-th fails with errno FAIL_WITH
//     FAIL_FROM=N         so do it and all later ones but those that remove something
//     DIRECTORY_SYNC=N    directories cannot be synced: errno N
//     NO_FLOCK=1          locks are not supported
//     NO_SCANDIR=1        directories cannot be listed: EIO
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int number(const char *name) {
    const char *text = getenv(name);
    return text ? atoi(text) : 0;
}

static void note(const char *call, const char *a, const char *b) {
    char line[2 * PATH_MAX + 32];
    if (!getenv("CALLS_LOG")) return;
    int length = snprintf(line, sizeof line, "%s %s %s\n", call, a, b);
    int fd = (int)syscall(SYS_openat, AT_FDCWD, getenv("CALLS_LOG"), O_WRONLY | O_CREAT | O_APPEND, 0666);
    syscall(SYS_write, fd, line, (size_t)length);
    syscall(SYS_close, fd);
}

static const char *path_of(int fd) {
    static _Thread_local char path[PATH_MAX]; // the log and a checkpoint are written by two threads
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    path[n > 0 ? n : 0] = 0;
    return path;
}

static void join(char path[2 * PATH_MAX], int directory, const char *name) {
    const bool whole = *name == '/' || directory == AT_FDCWD;
    snprintf(path, 2 * PATH_MAX, "%s%s%s", whole ? "" : path_of(directory), whole ? "" : "/", name);
}

static bool removes(const char *call) {
    return strcmp(call, "unlink") == 0 || strcmp(call, "rmdir") == 0;
}

static int calls;

// Counts a call. False: it is to fail, errno is set.
static bool count(const char *call, const char *a, const char *b, void (*halfway)(const void *), const void *what) {
    if (getenv("CALLS_ABOUT") && !strstr(a, getenv("CALLS_ABOUT"))) return true;
    calls++;
    note(call, a, b);
    if (calls == number("KILL_AT")) {
        if (halfway) halfway(what);
        kill(getpid(), SIGKILL);
    }
    bool from = number("FAIL_FROM") > 0 && calls >= number("FAIL_FROM") && !removes(call);
    if (calls != number("FAIL_AT") && !from) return true;
    errno = number("FAIL_WITH");
    return false;
}

struct writing {
    int fd;
    const void *bytes;
    size_t size;
};

static void write_half(const void *what) {
    const struct writing *w = what;
    syscall(SYS_write, w->fd, w->bytes, w->size / 2);
}

ssize_t write(int fd, const void *bytes, size_t size) {
    struct writing w = {fd, bytes, size};
    return count("write", path_of(fd), "", write_half, &w) ? REAL(write)(fd, bytes, size) : -1;
}

int open(const char *path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = flags & O_CREAT ? (mode_t)va_arg(arguments, int) : 0;
    va_end(arguments);
    if (flags & O_CREAT && !count("create", path, "", NULL, NULL)) return -1;
    return REAL(open)(path, flags, mode);
}

int openat(int directory, const char *name, int flags, ...) {
    char path[2 * PATH_MAX];
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = flags & O_CREAT ? (mode_t)va_arg(arguments, int) : 0;
    va_end(arguments);
    join(path, directory, name);
    if (flags & O_CREAT && !count("create", path, "", NULL, NULL)) return -1;
    return REAL(openat)(directory, name, flags, mode);
}

int ftruncate(int fd, off_t size) {
    return count("truncate", path_of(fd), "", NULL, NULL) ? REAL(ftruncate)(fd, size) : -1;
}
int posix_fallocate(int fd, off_t offset, off_t size) {
    return count("allocate", path_of(fd), "", NULL, NULL) ? REAL(posix_fallocate)(fd, offset, size) : errno;
}
int fsync(int fd) {
    struct stat status;
    if (number("DIRECTORY_SYNC") > 0 && fstat(fd, &status) == 0 && S_ISDIR(status.st_mode)) {
        errno = number("DIRECTORY_SYNC");
        return -1;
    }
    return count("fsync", path_of(fd), "", NULL, NULL) ? REAL(fsync)(fd) : -1;
}
int rename(const char *from, const char *to) {
    return count("rename", from, to, NULL, NULL) ? REAL(rename)(from, to) : -1;
}
int renameat(int directory, const char *from, int other, const char *to) {
    char whole[2][2 * PATH_MAX];
    join(whole[0], directory, from), join(whole[1], other, to);
    return count("rename", whole[0], whole[1], NULL, NULL) ? REAL(renameat)(directory, from, other, to) : -1;
}
int unlink(const char *path) {
    return count("unlink", path, "", NULL, NULL) ? REAL(unlink)(path) : -1;
}
int rmdir(const char *path) {
    return count("rmdir", path, "", NULL, NULL) ? REAL(rmdir)(path) : -1;
}
int mkdir(const char *path, mode_t mode) {
    return count("mkdir", path, "", NULL, NULL) ? REAL(mkdir)(path, mode) : -1;
}

int unlinkat(int directory, const char *name, int flags) {
    char path[2 * PATH_MAX];
    join(path, directory, name);
    return count("unlink", path, "", NULL, NULL) ? REAL(unlinkat)(directory, name, flags) : -1;
}

int scandir(const char *path, struct dirent ***entries, int (*filter)(const struct dirent *),
            int (*order)(const struct dirent **, const struct dirent **)) {
    if (number("NO_SCANDIR")) {
        errno = EIO;
        return -1;
    }
    return REAL(scandir)(path, entries, filter, order);
}

int flock(int fd, int operation) {
    if (number("NO_FLOCK")) {
        errno = ENOLCK;
        return -1;
    }
    return (int)syscall(SYS_flock, fd, operation);
}
