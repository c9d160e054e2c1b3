// See durable.h. xxHash is used by its header alone: there is nothing to link.
#include "durable.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

enum { PIECE_BYTES = 1 << 20, LARGEST_WRITE = 1 << 30 };

bool durable_write(int fd, const void *bytes, int64_t count) {
    for (const char *at = bytes; count > 0;) {
        ssize_t n = write(fd, at, (size_t)(count < LARGEST_WRITE ? count : LARGEST_WRITE));
        if (n < 0 && errno != EINTR) return false;
        if (n > 0) at += n, count -= n;
    }
    return true;
}

bool durable_sync_directory(const char *path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return false;
    bool synced = fsync(fd) == 0 || errno == EINVAL; // EINVAL: a file system whose directories have no sync
    int error = errno;
    close(fd);
    errno = error;
    return synced;
}

// Makes one directory, unless it is there.
static bool make_directory(const char *path, const char *parent) {
    if (mkdir(path, 0777) == 0) return durable_sync_directory(parent);
    struct stat status;
    if (errno == EEXIST && stat(path, &status) == 0 && !S_ISDIR(status.st_mode)) errno = ENOTDIR;
    return errno == EEXIST;
}

bool durable_make_directories(const char *path) {
    char prefix[PATH_MAX], parent[PATH_MAX] = ".";
    size_t length = strlen(path);
    if (length == 0 || length >= sizeof prefix) {
        errno = length ? ENAMETOOLONG : ENOENT;
        return false;
    }
    if (*path == '/') memcpy(parent, "/", 2);
    for (size_t i = 1; i <= length; i++) {
        if ((path[i] != '/' && path[i] != 0) || path[i - 1] == '/') continue;
        memcpy(prefix, path, i);
        prefix[i] = 0;
        if (!make_directory(prefix, parent)) return false;
        memcpy(parent, prefix, i + 1);
    }
    return true;
}

bool durable_remove_directory(const char *path) {
    DIR *directory = opendir(path);
    if (!directory) return errno == ENOENT;
    int error = 0;
    for (struct dirent *entry; (entry = readdir(directory));) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (unlinkat(dirfd(directory), entry->d_name, 0) != 0 && errno != ENOENT) error = errno;
    }
    closedir(directory);
    if (rmdir(path) == 0) return true;
    if (error) errno = error; // rather than "not empty", which follows from it
    return false;
}

bool durable_problem(problem *why, const char *doing, const char *path, int64_t bytes) {
    int error = errno;
    char need[128] = "", directory[PATH_MAX];
    struct statvfs space;
    snprintf(directory, sizeof directory, "%s", path);
    char *slash = strrchr(directory, '/');
    if (slash) slash[slash == directory] = 0;
    if (bytes >= 0) snprintf(need, sizeof need, ", which needs %lld bytes", (long long)bytes);
    if (error == ENOSPC && bytes >= 0 && statvfs(slash ? directory : ".", &space) == 0)
        snprintf(need, sizeof need, ", which needs %lld bytes where %llu are free", (long long)bytes,
                 (unsigned long long)space.f_bavail * space.f_frsize);
    const char *hint = NULL;
    if (error == ENOSPC || error == EDQUOT) hint = "free space, or save elsewhere";
    if (error == EFBIG) hint = "a limit on the size of files stands in the way; see ulimit -f";
    if (error == EROFS || error == EACCES || error == EPERM) hint = "make it writable, or save elsewhere";
    if (error == ENOENT) hint = "is it on a file system that all hosts share?";
    return problem_set(why, hint, "%s %.1500s%s: %s", doing, path, need, strerror(error));
}

bool durable_hash(const char *path, int64_t *bytes, uint64_t *hash) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    char *piece = malloc(PIECE_BYTES);
    XXH64_state_t state;
    XXH64_reset(&state, 0);
    *bytes = 0;
    ssize_t n = -1;
    while (piece && ((n = read(fd, piece, PIECE_BYTES)) > 0 || (n < 0 && errno == EINTR)))
        if (n > 0) XXH64_update(&state, piece, (size_t)n), *bytes += n;
    int error = piece ? errno : ENOMEM;
    free(piece);
    close(fd);
    *hash = XXH64_digest(&state);
    errno = error;
    return n == 0;
}
