// Files that a user names are opened as what they must be: regular files. A pipe would hold up the start until somebody
// writes into it, and a device has no size.
#ifndef REGULAR_H
#define REGULAR_H

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

// Opens for reading. -1: *why says why not; errno is ENOENT only if there is no such file.
static inline int regular_open(const char *path, struct stat *status, const char **why) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    *why = fd < 0 || fstat(fd, status) != 0 ? strerror(errno)
           : S_ISREG(status->st_mode)       ? NULL
           : S_ISDIR(status->st_mode)       ? "it is a directory, not a regular file"
                                            : "it is a device or a pipe, not a regular file";
    if (!*why) return fd;
    if (fd >= 0) {
        close(fd);
        errno = EINVAL;
    }
    return -1;
}

#endif
