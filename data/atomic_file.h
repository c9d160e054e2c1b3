// Files that survive a kill and a power cut: write all, sync, rename, sync the directory.
#pragma once
#include <limits.h>
#include "problem.h"

// A file that appears whole: written beside PATH under a random name, synced, renamed to PATH, and the directory synced. A kill or
// a power cut at any moment leaves the old PATH or the new one; the next writer removes what a killed one left. If two write the
// same PATH at once, the commit of the first fails, and PATH is whole. A link in the place of a directory whose name ends in .tmp
// is not followed. False: see why.
typedef struct atomic_file {
    char path[PATH_MAX], temporary[NAME_MAX + 32]; // temporary: a name in the directory
    int64_t bytes;                                 // that it will have, for messages; -1: not known
    int fd;                                        // -1: not open
    int directory;                                 // where both names are; -1: not open
    void *hash;                                    // an XXH64_state_t of the appended bytes; NULL: none
} atomic_file;
bool atomic_file_create(atomic_file *file, const char *path, int64_t bytes, problem *why);
bool atomic_file_append(atomic_file *file, const void *bytes, int64_t count, problem *why);
bool atomic_file_commit(atomic_file *file, problem *why); // if it fails, abandons the file
void atomic_file_abandon(atomic_file *file);              // removes the temporary file, if it is open
// Replaces a file by bytes in memory.
bool atomic_file_replace(const char *path, const char *bytes, int64_t count, problem *why);

// A lock that ends with its process. Only its owner, and with umask 002 his group, may open the file, because whoever can read it
// can lock it. -1: see why; if another process has the lock, its number and host.
int atomic_file_lock(const char *path, problem *why);

// Whether descriptors below `fds` that this program was started with are of this file: `> FILE` or `3>FILE` of the shell. A rename
// would leave them with the old file. With more than three also the outputs of what has started it: mpirun gives its ranks pipes.
struct stat;
bool atomic_file_inherited(const struct stat *file, int fds);
enum { ATOMIC_FILE_FDS = 256 };

// Single steps. False with errno set.
bool atomic_file_write(int fd, const void *bytes, int64_t count); // all bytes, by as many calls of write() as it takes
// True with a note, the first one, where the file system has no sync: directories of some network and FUSE file systems.
bool atomic_file_sync(int fd, const char *path);
bool atomic_file_sync_directory(const char *path);   // names survive a power cut only after this
bool atomic_file_make_directories(const char *path); // and its parents, each synced into the one above
bool atomic_file_remove_directory(const char *path); // and the files in it; true if there is none; a link: only itself

// "DOING PATH, which needs N bytes: no space …", from errno; bytes -1: unknown. Returns false.
bool atomic_file_problem(problem *why, const char *doing, const char *path, int64_t bytes);
