// The CPU as a device: a stream runs at once, memory is the process's own.
//
// Every allocation is remembered with its purpose, so that --dry-run and the banner can say where the
// memory goes. In plan-only mode addresses are reserved with mmap(PROT_NONE): the model is built as
// always, costs nothing, and a stray access is a fault rather than a wrong figure.
#include "device.h"
#include "die.h"
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum { ALIGNMENT = 64, PURPOSES_MAX = 64, PARALLEL_MIN = 1 << 14 };

struct cf_stream {
    int unused;
};

typedef struct block { // in front of nothing: kept in a list, so that guards of allocators stay useful
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

int64_t cf_dtype_size(cf_dtype dtype) {
    static const int64_t size[] = {4, 8, 8, 2, 1};
    return size[dtype];
}

const char *cf_dtype_name(cf_dtype dtype) {
    static const char *const name[] = {"fp32", "fp64", "int64", "bf16", "byte"};
    return name[dtype];
}

cf_stream *cf_stream_create(void) {
    cf_stream *stream = calloc(1, sizeof *stream);
    if (!stream) cf_die(NULL, "out of memory for a stream");
    return stream;
}

void cf_stream_free(cf_stream *stream) {
    free(stream);
}

void cf_stream_sync(cf_stream *stream) {
    (void)stream;
}

void cf_device_threads(int threads) {
#ifdef _OPENMP
    omp_set_num_threads(threads);
#else
    (void)threads;
#endif
}

void cf_device_plan_only(bool on) {
    memory.plan_only = on;
}

static int purpose_index(const char *name) {
    for (int i = 0; i < memory.purposes; i++)
        if (strcmp(memory.purpose[i].name, name) == 0) return i;
    if (memory.purposes == PURPOSES_MAX) cf_die(NULL, "more than %d purposes of memory", PURPOSES_MAX);
    snprintf(memory.purpose[memory.purposes].name, sizeof memory.purpose[0].name, "%s", name);
    return memory.purposes++;
}

static void *reserve(int64_t bytes) {
    void *address =
        mmap(NULL, (size_t)bytes + 1, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return address == MAP_FAILED ? NULL : address;
}

static void *take(int64_t bytes) {
    void *address = NULL;
    int64_t rounded = (bytes + ALIGNMENT) / ALIGNMENT * ALIGNMENT; // at least one byte
    if (posix_memalign(&address, ALIGNMENT, (size_t)rounded) != 0) return NULL;
    memset(address, 0, (size_t)rounded);
    return address;
}

void *cf_alloc(int64_t bytes, const char *purpose) {
    if (bytes < 0) cf_die(NULL, "allocation of %lld bytes for %s", (long long)bytes, purpose);
    pthread_mutex_lock(&memory.lock);
    block *b = malloc(sizeof *b);
    void *address = b == NULL ? NULL : memory.plan_only ? reserve(bytes) : take(bytes);
    if (!address)
        cf_die("lower --micro-batch or --seq, or use more ranks; --dry-run prints memory per purpose",
               "no memory: %.1f MiB for %s, after %.1f MiB already taken", (double)bytes / 1048576, purpose,
               (double)cf_memory_bytes() / 1048576);
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
        free(address);
    free(b);
}

void cf_copy(void *to, const void *from, int64_t bytes, cf_stream *stream) {
    (void)stream;
    if (bytes > 0) memmove(to, from, (size_t)bytes);
}

void cf_zero(void *to, int64_t bytes, cf_stream *stream) {
    (void)stream;
    if (bytes > 0) memset(to, 0, (size_t)bytes);
}

#define ADD(type)                                                                                            \
    {                                                                                                        \
        type *restrict t = (type *)to;                                                                       \
        const type *restrict f = (const type *)from;                                                         \
        _Pragma("omp parallel for simd if (count >= PARALLEL_MIN)") for (int64_t i = 0; i < count; i++)      \
            t[i] += f[i];                                                                                    \
        return;                                                                                              \
    }

void cf_add(void *to, const void *from, int64_t count, cf_dtype dtype, cf_stream *stream) {
    (void)stream;
    switch (dtype) {
    case CF_FP32:
        ADD(float)
    case CF_FP64:
        ADD(double)
    case CF_INT64:
        ADD(int64_t)
    case CF_BF16:
    case CF_BYTE:
        break;
    }
    cf_die(NULL, "cf_add: the CPU does not add %s", cf_dtype_name(dtype));
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
            fprintf(file, "%-32s %12.1f %6.1f%%\n", memory.purpose[i].name,
                    (double)memory.purpose[i].bytes / 1048576,
                    100.0 * (double)memory.purpose[i].bytes / (double)total);
    fprintf(file, "%-32s %12.1f\n", "total", (double)total / 1048576);
}

double cf_now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}
