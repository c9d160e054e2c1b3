// See atomic_file.h.
#include "atomic_file.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

enum { LARGEST_WRITE = 1 << 30, PIECE_BYTES = 1 << 20, TRIES = 100, OPEN_DIRECTORY = O_RDONLY | O_DIRECTORY | O_CLOEXEC };

static mode_t umask_at_start = 022;
__attribute__((constructor)) static void read_umask(void) { // there are no other threads yet
    umask_at_start = umask(077);
    umask(umask_at_start);
}

bool atomic_file_write(int fd, const void *bytes, int64_t count) {
    for (const char *at = bytes; count > 0;) {
        ssize_t n = write(fd, at, (size_t)(count < LARGEST_WRITE ? count : LARGEST_WRITE));
        if (n < 0 && errno != EINTR) return false;
        if (n > 0) at += n, count -= n;
    }
    return true;
}

static bool sync_directory(int fd) {
    return fsync(fd) == 0 || errno == EINVAL; // EINVAL: a file system whose directories have no sync
}

bool atomic_file_sync_directory(const char *path) {
    int fd = open(path, OPEN_DIRECTORY);
    if (fd < 0) return false;
    bool synced = sync_directory(fd);
    int error = errno;
    close(fd);
    errno = error;
    return synced;
}

// The directory of a file.
static void parent_of(const char *path, char parent[PATH_MAX]) {
    snprintf(parent, PATH_MAX, "%s", path);
    char *slash = strrchr(parent, '/');
    if (slash)
        slash[slash == parent] = 0; // "/x" is in "/"
    else
        memcpy(parent, ".", 2);
}

bool atomic_file_make_directories(const char *path) {
    char parent[PATH_MAX];
    struct stat status;
    if (stat(path, &status) == 0) {
        errno = ENOTDIR;
        return S_ISDIR(status.st_mode);
    }
    if (errno != ENOENT || !*path) return false;
    parent_of(path, parent);
    if (!atomic_file_make_directories(parent)) return false;
    return mkdir(path, 0777) == 0 ? atomic_file_sync_directory(parent) : errno == EEXIST;
}

// Another user may have put a link there, to any directory of this one.
bool atomic_file_remove_directory(const char *path) {
    struct stat status;
    const int fd = open(path, OPEN_DIRECTORY | O_NOFOLLOW);
    if (fd < 0 && errno == ENOTDIR && lstat(path, &status) == 0 && S_ISLNK(status.st_mode)) return unlink(path) == 0;
    DIR *directory = fd < 0 ? NULL : fdopendir(fd);
    if (!directory) return fd < 0 && errno == ENOENT;
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

bool atomic_file_problem(problem *why, const char *doing, const char *path, int64_t bytes) {
    int error = errno;
    char need[128] = "", directory[PATH_MAX];
    struct statvfs space;
    parent_of(path, directory);
    if (bytes >= 0) snprintf(need, sizeof need, ", which needs %ld bytes", bytes);
    if (error == ENOSPC && bytes >= 0 && statvfs(directory, &space) == 0)
        snprintf(need, sizeof need, ", which needs %ld bytes where %lu are free", bytes, space.f_bavail * space.f_frsize);
    const char *hint = NULL;
    if (error == ENOSPC || error == EDQUOT) hint = "free space, or save elsewhere";
    if (error == EFBIG) hint = "a limit on the size of files is in force; see ulimit -f";
    if (error == EROFS || error == EACCES || error == EPERM) hint = "make it writable, or save elsewhere";
    if (error == ENOENT) hint = "is its directory there, on a file system that all hosts share?";
    if (error == ENAMETOOLONG) hint = "choose a shorter name";
    if (error == EMLINK) hint = "it is another file, too: remove this name of it";
    if (error == EWOULDBLOCK) hint = "wait for that process, end it, or choose another name";
    return problem_set(why, hint, "%s %.1500s%s: %s", doing, path, need,
                       error == EWOULDBLOCK ? "another process writes it" : strerror(error));
}

// --- a file that appears whole -----------------------------------------------------------------------------

static const char *last_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

// 1: `name` is the only name of the open file; 2: it has others; 0: it is the name of another file, or of none.
static int names_of(int fd, int directory, const char *name) {
    struct stat opened, named;
    const bool same = fstat(fd, &opened) == 0 && fstatat(directory, name, &named, AT_SYMLINK_NOFOLLOW) == 0 &&
                      opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
    return same ? 1 + (named.st_nlink > 1) : 0;
}

// Opens and locks a file. -1: see errno; EWOULDBLOCK if another process has the lock, ESTALE if another process removed the file
// meanwhile, EMLINK if it has another name: it may be any file of the user's. If the file system has no locks, the file is open and
// errno is not 0.
static int open_locked(int directory, const char *name, int flags) {
    const mode_t mode = (umask_at_start & 060) == 0 ? 0660 : 0600; // whoever can open it can lock it
    int fd = openat(directory, name, flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
    if (fd < 0) return -1;
    int error = flock(fd, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
    const int names = error == EWOULDBLOCK ? -1 : names_of(fd, directory, name);
    if (names == 1 && fchmod(fd, mode) != 0) errno = 0; // another user's
    if (names != 1) close(fd);
    errno = names == 0 ? ESTALE : names > 1 ? EMLINK : error;
    return names != 1 ? -1 : fd;
}

// Always makes a new file, so that two writers never write into one. Removes the file of a dead writer; a living one holds the
// lock. (Without locks it may remove a living writer's file, which that writer notices when it commits.)
static bool make_temporary(atomic_file *file) {
    const char *name = last_name(file->temporary);
    for (int tries = 0; tries < TRIES; tries++) {
        file->fd = open_locked(file->directory, name, O_WRONLY | O_CREAT | O_EXCL);
        if (file->fd >= 0) return true;
        if (errno == ESTALE) continue;
        if (errno != EEXIST) return false;
        const int left = open_locked(file->directory, name, O_WRONLY);
        const bool link = left < 0 && (errno == ELOOP || errno == EMLINK);
        if (left < 0 && !link && errno != ESTALE && errno != ENOENT) return false;
        if ((left >= 0 || link) && unlinkat(file->directory, name, 0) != 0 && errno != ENOENT) return false;
        if (left >= 0) close(left);
    }
    errno = EWOULDBLOCK;
    return false;
}

bool atomic_file_create(atomic_file *file, const char *path, int64_t bytes, problem *why) {
    struct stat old;
    char directory[PATH_MAX];
    *file = (atomic_file){.bytes = bytes, .fd = -1, .directory = -1, .mode = 0666 & ~umask_at_start};
    snprintf(file->path, sizeof file->path, "%s", path);
    errno = ENAMETOOLONG;
    if (snprintf(file->temporary, sizeof file->temporary, "%s.tmp", path) >= PATH_MAX)
        return atomic_file_problem(why, "cannot create", path, bytes);
    if (stat(path, &old) == 0) {
        if (!S_ISREG(old.st_mode)) // /dev/null would be replaced
            return problem_set(why, "choose another name", "cannot create %.1500s: it is not a regular file", path);
        file->mode = old.st_mode & 0777;
    }
    parent_of(path, directory);
    const size_t length = strlen(directory);
    const bool unfinished = length > 4 && strcmp(directory + length - 4, ".tmp") == 0; // ours
    file->directory = open(directory, OPEN_DIRECTORY | (unfinished ? O_NOFOLLOW : 0));
    if (file->directory >= 0 && make_temporary(file)) return true;
    atomic_file_problem(why, "cannot create", file->temporary, bytes);
    atomic_file_abandon(file);
    return false;
}

// Hashes and writes piece by piece, so that each piece is still in the cache.
bool atomic_file_append(atomic_file *file, const void *bytes, int64_t count, problem *why) {
    for (const char *at = bytes; count > 0; at += PIECE_BYTES, count -= PIECE_BYTES) {
        const int64_t n = count < PIECE_BYTES ? count : PIECE_BYTES;
        if (file->hash) XXH64_update(file->hash, at, (size_t)n);
        if (!atomic_file_write(file->fd, at, n)) return atomic_file_problem(why, "cannot write", file->path, file->bytes);
        file->written += n;
    }
    return true;
}

// Closes the file last, because that releases the lock, and nobody may write a file that is about to be renamed. Others may open it
// only under its final name, which no writer locks.
bool atomic_file_commit(atomic_file *file, problem *why) {
    if (file->bytes >= 0 && file->written != file->bytes) {
        atomic_file_abandon(file);
        return problem_set(why, NULL, "internal error: %.1500s should have %ld bytes, but %ld were written", file->path,
                           file->bytes, file->written);
    }
    bool synced = file->unsynced || fsync(file->fd) == 0;
    const char *from = last_name(file->temporary), *to = last_name(file->path);
    bool mine = synced && names_of(file->fd, file->directory, from) > 0;
    if (synced && !mine) errno = EWOULDBLOCK;
    if (!mine || renameat(file->directory, from, file->directory, to) != 0) {
        atomic_file_problem(why, synced ? "cannot rename the temporary file to" : "cannot sync", file->path, file->bytes);
        atomic_file_abandon(file);
        return false;
    }
    if (fchmod(file->fd, file->mode) != 0) errno = 0; // a file system without modes
    close(file->fd);
    file->fd = -1;
    synced = file->unsynced || sync_directory(file->directory) ||
             problem_set(why, "the file is complete, but may not survive a power cut", "cannot sync the directory of %.1500s: %s",
                         file->path, strerror(errno));
    atomic_file_abandon(file);
    return synced;
}

void atomic_file_abandon(atomic_file *file) {
    const char *name = last_name(file->temporary);
    if (file->fd >= 0 && names_of(file->fd, file->directory, name) > 0)
        unlinkat(file->directory, name, 0); // else another process's
    if (file->fd >= 0) close(file->fd);
    if (file->directory >= 0) close(file->directory);
    file->fd = file->directory = -1;
}

bool atomic_file_replace(const char *path, const char *bytes, int64_t count, bool unsynced, problem *why) {
    atomic_file file;
    bool created = atomic_file_create(&file, path, count, why);
    file.unsynced = unsynced;
    bool written = created && atomic_file_append(&file, bytes, count, why) && atomic_file_commit(&file, why);
    atomic_file_abandon(&file);
    return written;
}

// --- a lock ------------------------------------------------------------------------------------------------

// Some cluster file systems have no locks. There, a run without a lock is better than one that cannot save.
int atomic_file_lock(const char *path, problem *why) {
    char host[256] = "", text[320] = "";
    uint64_t once = 0; // makes the text unique
    int fd, tries = 0;
    do fd = open_locked(AT_FDCWD, path, O_RDWR | O_CREAT);
    while (fd < 0 && errno == ESTALE && tries++ < TRIES);
    const int error = errno;
    if (fd < 0 && error == EWOULDBLOCK) { // its holder has written its name into it
        const int other = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        const bool named = pread(other, text, sizeof text - 1, 0) > 0;
        if (other >= 0) close(other);
        problem_set(why, "wait for it, end it, or choose another name", "another run saves to the directory of %.1500s: %s", path,
                    named ? text : "a process that has not written its name yet");
    } else if (fd < 0) {
        atomic_file_problem(why, "cannot open lock", path, -1);
        if (error == EACCES && access(path, F_OK) == 0)
            problem_set(why, "remove it if that run has ended; runs with umask 002 share locks with their group",
                        "cannot open lock %.1500s: it is of another user's run", path);
    } else {
        if (error)
            cf_print(stderr, "note: %s cannot be locked (%s): make sure that no other run writes there\n", path, strerror(error));
        gethostname(host, sizeof host - 1);
        const bool drawn = getrandom(&once, sizeof once, 0) == sizeof once;
        int length = snprintf(text, sizeof text, "process %ld on host %s (%016lx)", (long)getpid(), host, once);
        if (drawn && ftruncate(fd, 0) == 0 && atomic_file_write(fd, text, length) && (fsync(fd) == 0 || errno == EINVAL)) return fd;
        atomic_file_problem(why, "cannot write lock", path, -1);
        close(fd);
    }
    return -1;
}
