// See memory.h. Each allocation is remembered with its purpose in a list, not in front of the memory, so that
// guards of allocators and sanitizers stay useful, and because the host cannot write into a GPU's memory.
#include "memory.h"
#include "device.h"
#include "die.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PURPOSES_MAX = 64 };

typedef struct block {
    void *memory;
    int64_t bytes;
    int purpose;
    bool reserved;
    struct block *next;
} block;

static struct {
    pthread_mutex_t lock;
    bool plan_only;
    block *blocks;
    int purposes;
    struct {
        char name[48];
        int64_t bytes;
    } purpose[PURPOSES_MAX];
} memory = {.lock = PTHREAD_MUTEX_INITIALIZER};

void cf_device_plan_only(bool on) {
    memory.plan_only = on;
}

static int purpose_index(const char *name) {
    for (int i = 0; i < memory.purposes; i++)
        if (strcmp(memory.purpose[i].name, name) == 0) return i;
    if (memory.purposes == PURPOSES_MAX) {
        pthread_mutex_unlock(&memory.lock);
        cf_die(NULL, "more than %d purposes of memory", PURPOSES_MAX);
    }
    snprintf(memory.purpose[memory.purposes].name, sizeof memory.purpose[0].name, "%s", name);
    return memory.purposes++;
}

static void *reserve(int64_t bytes) {
    void *address = mmap(NULL, (size_t)bytes + 1, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return address == MAP_FAILED ? NULL : address;
}

bool cf_memory_is_reserved(const void *address) {
    const block *b = memory.blocks;
    while (b && (!b->reserved || (const char *)address < (char *)b->memory || (const char *)address > (char *)b->memory + b->bytes))
        b = b->next;
    return b != NULL;
}

void *cf_alloc(int64_t bytes, const char *purpose) {
    CF_RETURNS(NULL);
    if (bytes < 0) cf_die(NULL, "allocation of %lld bytes for %s", (long long)bytes, purpose);
    block *b = malloc(sizeof *b);
    void *address = b == NULL ? NULL : memory.plan_only ? reserve(bytes) : cf_device_take(bytes);
    if (!address)
        cf_die("lower --micro-batch or --seq, or use more ranks; --dry-run prints memory per purpose",
               "no memory: %.1f MiB for %s, after %.1f MiB already taken", (double)bytes / 1048576, purpose,
               (double)cf_memory_bytes() / 1048576);
    pthread_mutex_lock(&memory.lock);
    *b = (block){address, bytes, purpose_index(purpose), memory.plan_only, memory.blocks};
    memory.blocks = b;
    memory.purpose[b->purpose].bytes += bytes;
    pthread_mutex_unlock(&memory.lock);
    return address;
}

void cf_free(void *address) {
    if (!address) return;
    pthread_mutex_lock(&memory.lock);
    block **at = &memory.blocks;
    while (*at && (*at)->memory != address) at = &(*at)->next;
    block *b = *at;
    if (!b) cf_die(NULL, "cf_free of memory that cf_alloc did not give");
    *at = b->next;
    memory.purpose[b->purpose].bytes -= b->bytes;
    pthread_mutex_unlock(&memory.lock);
    if (b->reserved)
        munmap(address, (size_t)b->bytes + 1);
    else
        cf_device_give(address);
    free(b);
}

int64_t cf_memory_bytes(void) {
    int64_t total = 0;
    for (int i = 0; i < memory.purposes; i++) total += memory.purpose[i].bytes;
    return total;
}

void cf_memory_report(FILE *file) {
    int64_t total = cf_memory_bytes();
    fprintf(file, "%-32s %12s %7s\n", "memory for", "MiB", "share");
    for (int i = 0; i < memory.purposes; i++)
        if (memory.purpose[i].bytes > 0)
            fprintf(file, "%-32s %12.1f %6.1f%%\n", memory.purpose[i].name, (double)memory.purpose[i].bytes / 1048576,
                    100.0 * (double)memory.purpose[i].bytes / (double)total);
    fprintf(file, "%-32s %12.1f\n", "total", (double)total / 1048576);
}
