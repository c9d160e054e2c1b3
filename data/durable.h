// Files that survive a kill and a power cut: write all, sync, rename, sync the directory.
#ifndef DURABLE_H
#define DURABLE_H

#include <limits.h>
#include "problem.h"

// A file that appears whole: written beside, as PATH.tmp, synced, renamed to PATH, and the name synced too. A kill or a power cut at
// any moment leaves the old PATH or the new one. A PATH.tmp that a killed writer has left is removed by the next one. Of two that
// write the same PATH at once the second is refused, by a lock on PATH.tmp; where the file system has no locks, the first is refused
// when it commits. Only its owner may open PATH.tmp, so that nobody else can hold that lock, and a link of that name is removed, not
// followed. False: see why.
typedef struct durable_file {
    char path[PATH_MAX], temporary[PATH_MAX];
    int64_t bytes; // planned: no more and no fewer may be written; -1: unknown
    int64_t written;
    int fd;        // -1: not open
    unsigned mode; // that of the old file
    bool unsynced; // may be lost in a power cut
    void *hash;    // an XXH64_state_t of the appended bytes; NULL: none
} durable_file;
bool durable_create(durable_file *file, const char *path, int64_t bytes, problem *why);
bool durable_append(durable_file *file, const void *bytes, int64_t count, problem *why);
bool durable_commit(durable_file *file, problem *why); // or else abandons it
void durable_abandon(durable_file *file);              // removes PATH.tmp, if it is open
// All of that for bytes in memory.
bool durable_replace(const char *path, const char *bytes, int64_t count, bool unsynced, problem *why);

// A lock that ends with the process that holds it. Only its owner may open it, because whoever can read a file can lock it. -1: see
// why; if another process has it (errno EWOULDBLOCK): "IN_USE NAME: process 1234 on host HOST".
int durable_lock(const char *path, const char *in_use, const char *name, problem *why);
void durable_unlock(int lock, const char *path); // and removes the file; a lock whose file may stay is simply closed

// The steps themselves. False with errno set.
bool durable_write(int fd, const void *bytes, int64_t count); // all of them, however few the system takes at once
bool durable_sync_directory(const char *path);                // names survive a power cut only after this
bool durable_make_directories(const char *path);              // and its parents, each synced into the one above
bool durable_remove_directory(const char *path);              // and the files in it; true if there is none

// "DOING PATH, which needs N bytes: no space …", from errno. Returns false.
bool durable_problem(problem *why, const char *doing, const char *path, int64_t bytes);

#endif
