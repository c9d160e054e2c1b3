// Put in front of parsers that may die (cc -include): whatever they take and give back is entered in a
// ledger.
#pragma once

#include <fcntl.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>
#include "commfuse/memory.h"

void *ledger_malloc(size_t size);
void *ledger_calloc(size_t count, size_t size);
char *ledger_strdup(const char *text);
void ledger_free(void *memory);
void *ledger_mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset);
int ledger_munmap(void *map, size_t size);
int ledger_open(const char *path, int flags, ...);
int ledger_close(int fd);
int ledger_glob(const char *pattern, int flags, int (*error)(const char *path, int number), glob_t *found);
void ledger_globfree(glob_t *found);

#ifndef LEDGER_ITSELF
#define malloc(size)                        ledger_malloc(size)
#define calloc(count, size)                 ledger_calloc(count, size)
#define cf_host_alloc(count, size, purpose) ledger_calloc((size_t)(count) + !(count), size)
#define strdup(text)                        ledger_strdup(text)
#define free(memory)                        ledger_free(memory)
#define mmap(at, size, prot, flags, fd, of) ledger_mmap(at, size, prot, flags, fd, of)
#define munmap(map, size)                   ledger_munmap(map, size)
#define open(...)                           ledger_open(__VA_ARGS__)
#define close(fd)                           ledger_close(fd)
#define glob(pattern, flags, error, found)  ledger_glob(pattern, flags, error, found)
#define globfree(found)                     ledger_globfree(found)
#endif
