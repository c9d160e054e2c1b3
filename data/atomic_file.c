// See atomic_file.h.
#include "atomic_file.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <stdatomic.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

enum { LARGEST_WRITE = 1 << 30, PIECE_BYTES = 1 << 20, RANDOM = 16, OPEN_DIRECTORY = O_RDONLY | O_DIRECTORY | O_CLOEXEC };

bool atomic_file_write(int fd, const void *bytes, int64_t count) {
    for (const char *at = bytes; count > 0;) {
        ssize_t n = write(fd, at, (size_t)(count < LARGEST_WRITE ? count : LARGEST_WRITE));
        if (n < 0 && errno != EINTR) return false;
        if (n > 0) at += n, count -= n;
    }
    return true;
}

bool atomic_file_sync(int fd, const char *path) {
    static atomic_flag noted = ATOMIC_FLAG_INIT;
    if (fsync(fd) == 0) return true;
    if (errno != EINVAL && errno != ENOSYS && errno != EOPNOTSUPP && errno != EBADF) return false;
    if (cf_die_rank() == 0 && !atomic_flag_test_and_set(&noted))
        cf_print(stderr, "note: %s cannot be synced (%s): a power cut may undo the last saves\n", path, strerror(errno));
    return true;
}

bool atomic_file_sync_directory(const char *path) {
    int fd = open(path, OPEN_DIRECTORY);
    if (fd < 0) return false;
    bool synced = atomic_file_sync(fd, path);
    close(fd); // keeps errno
    return synced;
}

static const char *parent_of(const char *path, char room[PATH_MAX]) {
    snprintf(room, PATH_MAX, "%s", path);
    return dirname(room);
}

bool atomic_file_make_directories(const char *path) {
    char room[PATH_MAX];
    struct stat status;
    if (stat(path, &status) == 0) {
        errno = ENOTDIR;
        return S_ISDIR(status.st_mode);
    }
    if (errno != ENOENT || !*path) return false;
    const char *parent = parent_of(path, room);
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

static bool same(const struct stat *a, const struct stat *b) {
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

bool atomic_file_inherited(const struct stat *file, int fds) {
    char path[64];
    struct stat other;
    for (int fd = 0; fd < fds; fd++) // what this program opens is closed on exec
        if (fcntl(fd, F_GETFD) == 0 && fstat(fd, &other) == 0 && same(&other, file)) return true;
    for (int parent = fds > STDERR_FILENO + 1 ? getppid() : 0, up; parent > 1; parent = up) {
        for (int fd = STDOUT_FILENO; fd <= STDERR_FILENO; fd++) {
            snprintf(path, sizeof path, "/proc/%d/fd/%d", parent, fd);
            if (stat(path, &other) == 0 && same(&other, file)) return true;
        }
        snprintf(path, sizeof path, "/proc/%d/stat", parent);
        FILE *status = fopen(path, "re");
        if (!status || fscanf(status, "%*d (%*[^)]) %*c %d", &up) != 1) up = 0;
        if (status) fclose(status);
    }
    return false;
}

bool atomic_file_problem(problem *why, const char *doing, const char *path, int64_t bytes) {
    int error = errno;
    char need[128] = "", room[PATH_MAX];
    struct statvfs space;
    if (bytes >= 0) snprintf(need, sizeof need, ", which needs %ld bytes", bytes);
    if (error == ENOSPC && bytes >= 0 && statvfs(parent_of(path, room), &space) == 0)
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

// Removes what killed writers have left. One that lives, at the same time, finds that its file is gone when it commits.
static void remove_temporaries(int directory, const char *name) {
    const size_t length = strlen(name);
    DIR *all = fdopendir(openat(directory, ".", OPEN_DIRECTORY));
    for (struct dirent *entry; all && (entry = readdir(all));) {
        const char *rest = entry->d_name + length;
        if (strncmp(entry->d_name, name, length) == 0 && strncmp(rest, ".tmp.", 5) == 0 && strlen(rest) == 5 + RANDOM)
            unlinkat(directory, entry->d_name, 0);
    }
    if (all) closedir(all);
}

// Another user may have put a link in the place of a directory of ours, whose name ends in .tmp.
static int open_parent(const char *path) {
    char room[PATH_MAX];
    const char *directory = parent_of(path, room);
    const size_t length = strlen(directory);
    const bool unfinished = length > 4 && strcmp(directory + length - 4, ".tmp") == 0;
    return open(directory, OPEN_DIRECTORY | (unfinished ? O_NOFOLLOW : 0));
}

bool atomic_file_create(atomic_file *file, const char *path, int64_t bytes, problem *why) {
    struct stat old;
    uint64_t random = 0;
    *file = (atomic_file){.bytes = bytes, .fd = -1, .directory = -1};
    const bool exists = stat(path, &old) == 0;
    if (exists && !S_ISREG(old.st_mode)) // /dev/null would be replaced
        return problem_set(why, "choose another name", "cannot create %.1500s: it is not a regular file", path);
    if (exists && atomic_file_inherited(&old, ATOMIC_FILE_FDS))
        return problem_set(why, "choose another name", "cannot create %.1500s: the shell has redirected this program to it", path);
    if ((!exists && errno != ENOENT) || getrandom(&random, sizeof random, 0) != sizeof random)
        return atomic_file_problem(why, "cannot create", path, bytes);
    snprintf(file->path, sizeof file->path, "%s", path);
    snprintf(file->temporary, sizeof file->temporary, "%s.tmp.%0*lx", basename(file->path), RANDOM, random);
    file->directory = open_parent(path);
    if (file->directory >= 0) {
        remove_temporaries(file->directory, basename(file->path));
        file->fd = openat(file->directory, file->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    }
    if (file->fd < 0) atomic_file_problem(why, "cannot create", path, bytes), atomic_file_abandon(file);
    if (file->fd >= 0 && exists && fchmod(file->fd, old.st_mode & 0777) != 0) errno = 0; // a file system without modes
    return file->fd >= 0;
}

// Hashes and writes piece by piece, so that each piece is still in the cache.
bool atomic_file_append(atomic_file *file, const void *bytes, int64_t count, problem *why) {
    for (const char *at = bytes; count > 0; at += PIECE_BYTES, count -= PIECE_BYTES) {
        const int64_t n = count < PIECE_BYTES ? count : PIECE_BYTES;
        if (file->hash) XXH64_update(file->hash, at, (size_t)n);
        if (!atomic_file_write(file->fd, at, n)) return atomic_file_problem(why, "cannot write", file->path, file->bytes);
    }
    return true;
}

bool atomic_file_commit(atomic_file *file, problem *why) {
    bool done = true;
    if (!atomic_file_sync(file->fd, file->path))
        done = atomic_file_problem(why, "cannot sync", file->path, file->bytes);
    else if (renameat(file->directory, file->temporary, file->directory, basename(file->path)) != 0) {
        if (errno == ENOENT) errno = EWOULDBLOCK;
        done = atomic_file_problem(why, "cannot rename the temporary file to", file->path, file->bytes);
    } else {
        close(file->fd);
        file->fd = -1;
        if (!atomic_file_sync(file->directory, file->path))
            done = problem_set(why, "the file is complete, but may not survive a power cut",
                               "cannot sync the directory of %.1500s: %s", file->path, strerror(errno));
    }
    atomic_file_abandon(file);
    return done;
}

void atomic_file_abandon(atomic_file *file) {
    if (file->fd >= 0) unlinkat(file->directory, file->temporary, 0);
    if (file->fd >= 0) close(file->fd);
    if (file->directory >= 0) close(file->directory);
    file->fd = file->directory = -1;
}

bool atomic_file_replace(const char *path, const char *bytes, int64_t count, problem *why) {
    atomic_file file;
    const bool written = atomic_file_create(&file, path, count, why) && atomic_file_append(&file, bytes, count, why) &&
                         atomic_file_commit(&file, why);
    atomic_file_abandon(&file);
    return written;
}

// --- a lock ------------------------------------------------------------------------------------------------

// Some cluster file systems have no locks. There, a run without a lock is better than one that cannot save.
int atomic_file_lock(const char *path, problem *why) {
    char host[256] = "", text[320] = "";
    uint64_t random = 0; // makes the text unique
    struct stat status;
    const int fd = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0660);
    int error = fd < 0 || flock(fd, LOCK_EX | LOCK_NB) != 0 ? errno : 0;
    // With another name it may be any file of the user's; with none it has been removed before it was locked.
    const bool own = fd >= 0 && fstat(fd, &status) == 0 && status.st_nlink == 1;
    if (error == EWOULDBLOCK) { // its holder has written its name into it
        const bool named = pread(fd, text, sizeof text - 1, 0) > 0;
        problem_set(why, "wait for it, end it, or choose another name", "another run saves to the directory of %.1500s: %s", path,
                    named ? text : "a process that has not written its name yet");
    } else if (!own) {
        errno = fd < 0 ? error : status.st_nlink > 1 ? EMLINK : ESTALE;
        atomic_file_problem(why, "cannot open lock", path, -1);
        if (error == EACCES && access(path, F_OK) == 0)
            problem_set(why, "remove it if that run has ended; runs with umask 002 share locks with their group",
                        "cannot open lock %.1500s: it is of another user's run", path);
    } else if (pread(fd, text, sizeof text - 1, 0) > 0 && strncmp(text, "process ", strnlen(text, 8)) != 0) { // look first
        problem_set(why, "move it away, or choose another directory", "%.1500s is not the lock of a run, so it stays as it is",
                    path);
    } else {
        if (error)
            cf_print(stderr, "note: %s cannot be locked (%s): make sure that no other run writes there\n", path, strerror(error));
        if (fchmod(fd, (status.st_mode & 060) == 060 ? 0660 : 0600) != 0) errno = 0; // another user's
        gethostname(host, sizeof host - 1);
        const bool drawn = getrandom(&random, sizeof random, 0) == sizeof random;
        int length = snprintf(text, sizeof text, "process %ld on host %s (%016lx)", (long)getpid(), host, random);
        if (drawn && ftruncate(fd, 0) == 0 && atomic_file_write(fd, text, length) && atomic_file_sync(fd, path)) return fd;
        atomic_file_problem(why, "cannot write lock", path, -1);
    }
    if (fd >= 0) close(fd);
    return -1;
}
