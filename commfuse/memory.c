// See memory.h. Each allocation is remembered with its purpose in a list, not in front of the memory, so that
// guards of allocators and sanitizers stay useful, and because the host cannot write into a GPU's memory.
#include "memory.h"
#include "device.h"
#include "die.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

typedef struct block {
    void *memory;
    int64_t bytes;
    char purpose[48];
    bool reserved, lent, unused; // lent: other processes may have it mapped
    struct block *next;
} block;

static struct {
    pthread_mutex_t lock;
    bool plan_only;
    block *blocks; // oldest first
} taken = {.lock = PTHREAD_MUTEX_INITIALIZER};

int64_t cf_dtype_size(cf_dtype dtype) {
    static const int64_t size[] = {4, 8, 8, 2, 1};
    return size[dtype];
}

const char *cf_dtype_name(cf_dtype dtype) {
    static const char *const name[] = {"fp32", "fp64", "int64", "bf16", "byte"};
    return name[dtype];
}

void cf_device_plan_only(bool on) {
    taken.plan_only = on;
}

static void *reserve(int64_t bytes) {
    void *address = mmap(NULL, (size_t)bytes + 1, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return address == MAP_FAILED ? NULL : address;
}

bool cf_memory_is_reserved(const void *address) {
    const block *b = taken.blocks;
    while (b && (!b->reserved || (const char *)address < (char *)b->memory || (const char *)address > (char *)b->memory + b->bytes))
        b = b->next;
    return b != NULL;
}

void *cf_alloc(int64_t bytes, const char *purpose) {
    CF_RETURNS(NULL);
    if (bytes < 0) cf_die(NULL, "allocation of %lld bytes for %s", (long long)bytes, purpose);
    block *b = malloc(sizeof *b);
    void *address = b == NULL ? NULL : taken.plan_only ? reserve(bytes) : cf_device_take(bytes);
    if (!address)
        cf_die("lower --micro-batch or --seq, or use more ranks; --dry-run prints memory per purpose",
               "no memory: %.1f MiB for %s, after %.1f MiB already taken", (double)bytes / 1048576, purpose,
               (double)cf_memory_bytes() / 1048576);
    *b = (block){.memory = address, .bytes = bytes, .reserved = taken.plan_only};
    snprintf(b->purpose, sizeof b->purpose, "%s", purpose);
    pthread_mutex_lock(&taken.lock);
    block **end = &taken.blocks;
    while (*end) end = &(*end)->next;
    *end = b;
    pthread_mutex_unlock(&taken.lock);
    return address;
}

// Those that nobody uses. The lock is held.
static void give_back(void) {
    for (block **at = &taken.blocks, *b; (b = *at) != NULL;) {
        if (!b->unused || b->lent) {
            at = &b->next;
            continue;
        }
        *at = b->next;
        if (b->reserved)
            munmap(b->memory, (size_t)b->bytes + 1);
        else
            cf_device_give(b->memory);
        free(b);
    }
}

void cf_free(void *address) {
    if (!address) return;
    pthread_mutex_lock(&taken.lock);
    block *b = taken.blocks;
    while (b && (b->memory != address || b->unused)) b = b->next;
    if (!b) cf_die(NULL, "cf_free of memory that cf_alloc did not give");
    b->unused = true;
    give_back();
    pthread_mutex_unlock(&taken.lock);
}

void *cf_memory_lend(const void *address, int64_t *bytes) {
    pthread_mutex_lock(&taken.lock);
    block *b = taken.blocks;
    while (b && ((const char *)address < (char *)b->memory || (const char *)address >= (char *)b->memory + b->bytes)) b = b->next;
    if (b) b->lent = true, *bytes = b->bytes;
    pthread_mutex_unlock(&taken.lock);
    return b ? b->memory : NULL;
}

void cf_memory_returned(void) {
    pthread_mutex_lock(&taken.lock);
    for (block *b = taken.blocks; b; b = b->next) b->lent = false;
    give_back();
    pthread_mutex_unlock(&taken.lock);
}

void *cf_host_alloc(int64_t count, size_t size, const char *purpose) {
    void *memory = calloc((size_t)count + !count, size + !size);
    if (!memory) cf_die(NULL, "out of memory: %lld times %zu bytes for %s", (long long)count, size, purpose);
    return memory;
}

void *cf_host_grow(void *array, int64_t *capacity, int64_t wanted, size_t size, const char *purpose) {
    if (wanted <= *capacity) return array;
    *capacity = wanted < 32 ? 64 : 2 * wanted;
    array = realloc(array, (size_t)*capacity * size);
    if (!array) cf_die(NULL, "out of memory: %lld times %zu bytes for %s", (long long)*capacity, size, purpose);
    return array;
}

double cf_now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

// For a purpose; NULL: for all. The lock is held.
static int64_t bytes_for(const char *purpose) {
    int64_t total = 0;
    for (const block *b = taken.blocks; b; b = b->next)
        if (!purpose || strcmp(b->purpose, purpose) == 0) total += b->bytes;
    return total;
}

int64_t cf_memory_bytes(void) {
    pthread_mutex_lock(&taken.lock);
    int64_t bytes = bytes_for(NULL);
    pthread_mutex_unlock(&taken.lock);
    return bytes;
}

void cf_memory_report(FILE *file) {
    pthread_mutex_lock(&taken.lock);
    int64_t total = bytes_for(NULL);
    fprintf(file, "%-32s %12s %7s\n", "memory for", "MiB", "share");
    for (const block *b = taken.blocks; b; b = b->next) {
        const block *first = taken.blocks; // of its purpose
        while (strcmp(first->purpose, b->purpose) != 0) first = first->next;
        int64_t bytes = first == b ? bytes_for(b->purpose) : 0;
        if (bytes > 0)
            fprintf(file, "%-32s %12.1f %6.1f%%\n", b->purpose, (double)bytes / 1048576, 100.0 * (double)bytes / (double)total);
    }
    fprintf(file, "%-32s %12.1f\n", "total", (double)total / 1048576);
    pthread_mutex_unlock(&taken.lock);
}
