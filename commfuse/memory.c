// See memory.h. Allocations are in a list, not in a header before the memory: the host cannot write to GPU memory, and sanitizers'
// guards stay useful.
#include "memory.h"
#include "device.h"
#include "base/die.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define FIRST_PLANNED ((intptr_t)1 << 54) // in no address space of x86-64 or arm64: an access faults
#define END_PLANNED   ((intptr_t)1 << 55)
enum { PAGE = 4096 };

typedef struct block {
    void *memory;
    int64_t bytes;
    char purpose[48];
    bool reserved, lent; // lent: other processes may have it mapped
    struct block *next;
} block;

static struct {
    pthread_mutex_t lock;
    bool reserve_only;
    block *blocks; // oldest first
} allocated = {.lock = PTHREAD_MUTEX_INITIALIZER};

int64_t cf_dtype_size(cf_dtype dtype) {
    static const int64_t size[] = {4, 8, 8, 2, 1};
    return size[dtype];
}

const char *cf_dtype_name(cf_dtype dtype) {
    static const char *const name[] = {"fp32", "fp64", "int64", "bf16", "byte"};
    return name[dtype];
}

bool cf_device_reserve_only(bool on) {
    const bool before = allocated.reserve_only;
    allocated.reserve_only = on;
    return before;
}

// The block that contains an address; NULL: none. The lock is held, or there is one thread.
static block *block_of(const void *address) {
    block *b = allocated.blocks;
    while (b && ((const char *)address < (char *)b->memory || (const char *)address >= (char *)b->memory + b->bytes)) b = b->next;
    return b;
}

bool cf_memory_is_reserved(const void *address) {
    const block *b = block_of(address);
    return b && b->reserved;
}

// Addresses that no system gives to a process, behind all others of the list: reserving real ones would count for `ulimit -v`.
static void *reserve(int64_t bytes) {
    intptr_t next = FIRST_PLANNED;
    for (const block *b = allocated.blocks; b; b = b->next)
        if (b->reserved && (intptr_t)b->memory + b->bytes >= next) next = ((intptr_t)b->memory + b->bytes + PAGE) / PAGE * PAGE;
    return bytes > END_PLANNED - PAGE - next ? NULL : (void *)next;
}

void *cf_alloc(int64_t bytes, const char *purpose) {
    CF_RETURNS(NULL);
    if (bytes < 0) cf_die(NULL, "allocation of %lld bytes for %s", (long long)bytes, purpose);
    block *b = malloc(sizeof *b);
    void *address = b == NULL ? NULL : allocated.reserve_only ? reserve(bytes) : cf_device_malloc(bytes);
    if (!address)
        cf_die(cf_memory_hint, "no memory: %.1f MiB for %s; %.1f MiB are allocated already%s", (double)bytes / 1048576, purpose,
               (double)cf_memory_bytes() / 1048576, cf_memory_limit());
    *b = (block){.memory = address, .bytes = bytes, .reserved = allocated.reserve_only};
    snprintf(b->purpose, sizeof b->purpose, "%s", purpose);
    pthread_mutex_lock(&allocated.lock);
    block **end = &allocated.blocks;
    while (*end) end = &(*end)->next;
    *end = b;
    pthread_mutex_unlock(&allocated.lock);
    return address;
}

void cf_free(void *address) {
    if (!address) return;
    pthread_mutex_lock(&allocated.lock);
    block **at = &allocated.blocks, *b;
    while (*at && (*at)->memory != address) at = &(*at)->next;
    if (!(b = *at)) cf_die(NULL, "cf_free() of memory that is not from cf_alloc()");
    if (!b->lent) {
        *at = b->next;
        if (!b->reserved) cf_device_free(b->memory);
        free(b);
    }
    pthread_mutex_unlock(&allocated.lock);
}

void *cf_memory_lend(const void *address, int64_t *bytes) {
    pthread_mutex_lock(&allocated.lock);
    block *b = block_of(address);
    if (b) b->lent = true, *bytes = b->bytes;
    pthread_mutex_unlock(&allocated.lock);
    return b ? b->memory : NULL;
}

// purpose NULL: all. The lock is held.
static int64_t bytes_for(const char *purpose) {
    int64_t total = 0;
    for (const block *b = allocated.blocks; b; b = b->next)
        if (!purpose || strcmp(b->purpose, purpose) == 0) total += b->bytes;
    return total;
}

int64_t cf_memory_bytes(void) {
    pthread_mutex_lock(&allocated.lock);
    int64_t bytes = bytes_for(NULL);
    pthread_mutex_unlock(&allocated.lock);
    return bytes;
}

void cf_memory_report(FILE *file) {
    pthread_mutex_lock(&allocated.lock);
    int64_t total = bytes_for(NULL);
    fprintf(file, "%-32s %12s %7s\n", "memory for", "MiB", "share");
    for (const block *b = allocated.blocks; b; b = b->next) {
        const block *first = allocated.blocks; // of its purpose
        while (strcmp(first->purpose, b->purpose) != 0) first = first->next;
        int64_t bytes = first == b ? bytes_for(b->purpose) : 0;
        if (bytes > 0)
            fprintf(file, "%-32s %12.1f %6.1f%%\n", b->purpose, (double)bytes / 1048576, 100.0 * (double)bytes / (double)total);
    }
    fprintf(file, "%-32s %12.1f\n", "total", (double)total / 1048576);
    pthread_mutex_unlock(&allocated.lock);
}
