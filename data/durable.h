// The steps that files are made of which must survive a kill and a power cut: write all, sync, rename, sync
// the directory. All return false with errno set.
#ifndef DURABLE_H
#define DURABLE_H

#include <stdbool.h>
#include <stdint.h>
#include "problem.h"

bool durable_write(int fd, const void *bytes,
                   int64_t count);               // all of them, however few the system takes at once
bool durable_sync_directory(const char *path);   // names last only once their directory is on the disk
bool durable_make_directories(const char *path); // and its parents, each synced into the one above
bool durable_remove_directory(const char *path); // and the files in it; true if there is none

// "cannot write PATH, which needs N bytes: no space …"; from errno. Returns false.
bool durable_problem(problem *why, const char *doing, const char *path, int64_t bytes);

// XXH64, seed 0, of a whole file, as xxh64sum prints it. Reads it anew: an unreadable sector is an error
// here, and would be SIGBUS in a map.
bool durable_hash(const char *path, int64_t *bytes, uint64_t *hash);

#endif
