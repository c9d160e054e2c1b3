// The CPU as a device: a stream runs at once, memory is the process's own.
#include "device.h"
#include "bf16.h"
#include "checksum.h"
#include "die.h"
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum { ALIGNMENT = 256, PARALLEL_MIN = 1 << 14 };

struct cf_stream {
    int unused;
};

// --- device ---

static int64_t free_bytes;

static void lower_to(const char *path) {
    long long limit = LLONG_MAX;
    FILE *file = fopen(path, "r");
    if (file && fscanf(file, "%lld", &limit) == 1 && limit < free_bytes) free_bytes = limit; // else "max"
    if (file) fclose(file);
}

// Batch systems and containers limit control groups, and kill a process of one that takes more: the least limit of this process's
// groups and of those above them. A line is "4:memory:/job" (version 1) or "0::/job" (version 2).
static void lower_to_limits(void) {
    char line[1024], path[1200];
    FILE *groups = fopen("/proc/self/cgroup", "r");
    while (groups && fgets(line, sizeof line, groups)) {
        char *kind = strchr(line, ':'), *group = kind ? strchr(kind + 1, ':') : NULL;
        if (!group) continue;
        *group++ = '\0', group[strcspn(group, "\n")] = '\0';
        if (kind[1] && !strstr(kind, "memory")) continue;
        for (char *end = group + strlen(group); end; end = strrchr(group, '/')) {
            *end = '\0';
            snprintf(path, sizeof path, kind[1] ? "/sys/fs/cgroup/memory%s/memory.limit_in_bytes" : "/sys/fs/cgroup%s/memory.max",
                     group);
            lower_to(path);
        }
    }
    if (groups) fclose(groups);
}

void cf_device_open(int local_rank) {
    char line[128];
    long long kib = LLONG_MAX / 1024;
    FILE *host = fopen("/proc/meminfo", "r");
    while (host && fgets(line, sizeof line, host) && sscanf(line, "MemAvailable: %lld", &kib) != 1) {}
    if (host) fclose(host);
    free_bytes = 1024 * kib;
    lower_to_limits();
}

int64_t cf_device_memory(int local_ranks) {
    return free_bytes / local_ranks;
}

const char *cf_device_name(void) {
    return "CPU";
}

void cf_device_threads(int threads) {
#ifdef _OPENMP
    omp_set_num_threads(threads);
#endif
}

// --- streams ---

cf_stream *cf_stream_create(void) {
    return cf_host_alloc(1, sizeof(cf_stream), "a stream");
}

cf_stream *cf_stream_create_second(void) {
    return NULL;
}

void cf_stream_free(cf_stream *stream) {
    free(stream);
}

void cf_stream_sync(cf_stream *stream) {}

cf_moment cf_moment_now(cf_stream *stream) {
    return (cf_moment){.ms = cf_now_ms()};
}

cf_moment cf_moment_untimed(cf_stream *stream) {
    return cf_moment_now(stream);
}

double cf_moment_ms(cf_moment moment) {
    return moment.ms;
}

bool cf_moment_passed(cf_moment moment) {
    return true;
}

void cf_moment_wait(cf_moment moment) {}

bool cf_moment_remembered(cf_moment moment) {
    return true;
}

void cf_stream_after(cf_stream *stream, cf_moment moment) {}

void cf_range_begin(const char *name) {}

void cf_range_end(void) {}

// --- work ---

void cf_copy(void *to, const void *from, int64_t bytes, cf_stream *stream) {
    if (bytes > 0) memmove(to, from, (size_t)bytes);
}

void cf_zero(void *to, int64_t bytes, cf_stream *stream) {
    if (bytes > 0) memset(to, 0, (size_t)bytes);
}

#define PLAIN_SUM(a, b) ((a) + (b))
#define BF16_SUM(a, b)  cf_bf16_of_float(cf_float_of_bf16(a) + cf_float_of_bf16(b))
#define ADD(type, SUM)                                                                                                             \
    {                                                                                                                              \
        type *t = (type *)to;                                                                                                      \
        const type *f = (const type *)from;                                                                                        \
        const bool onto = t != f;                                                                                                  \
        _Pragma("omp parallel for simd if (parallel : count >= PARALLEL_MIN)") for (int64_t i = 0; i < count; i++) {               \
            type sum = f[i];                                                                                                       \
            for (int p = 1; p < parts; p++) sum = SUM(sum, f[p * stride + i]);                                                     \
            t[i] = onto ? SUM(sum, t[i]) : sum;                                                                                    \
        }                                                                                                                          \
        return;                                                                                                                    \
    }

void cf_add(void *to, const void *from, int parts, int64_t stride, int64_t count, cf_dtype dtype, cf_stream *stream) {
    switch (dtype) {
    case CF_FP32:
        ADD(float, PLAIN_SUM)
    case CF_FP64:
        ADD(double, PLAIN_SUM)
    case CF_INT64:
        ADD(int64_t, PLAIN_SUM)
    case CF_BF16:
        ADD(uint16_t, BF16_SUM)
    case CF_BYTE:
        break;
    }
    cf_die(NULL, "cf_add: bytes are not added");
}

static uint64_t word_at(const char *data, int64_t i, size_t bytes) {
    uint64_t word = 0;
    memcpy(&word, data + 8 * i, bytes);
    return word;
}

void cf_checksum(uint64_t *sum, const void *data, int64_t bytes, cf_stream *stream) {
    const char *at = (const char *)data;
    int64_t words = bytes / 8;
    uint64_t total = 0;
#pragma omp parallel for simd reduction(+ : total) if (parallel : words >= PARALLEL_MIN)
    for (int64_t i = 0; i < words; i++) total += cf_checksum_word(word_at(at, i, 8), (uint64_t)i);
    if (bytes % 8) total += cf_checksum_word(word_at(at, words, (size_t)(bytes % 8)), (uint64_t)words);
    *sum += total;
}

void cf_compare(const uint64_t *expected, const uint64_t *found, int64_t count, const cf_difference *what,
                cf_difference *difference, cf_stream *stream) {
    for (int64_t i = 0; i < count && difference->place == 0; i++) {
        if (expected[i] == found[i]) continue;
        *difference = *what;
        difference->place = 1 + i;
        difference->expected = expected[i];
        difference->found = found[i];
    }
}

// --- memory ---

void *cf_device_malloc(int64_t bytes) {
    void *address = NULL;
    int64_t rounded = (bytes + ALIGNMENT) / ALIGNMENT * ALIGNMENT; // at least one byte
    if (posix_memalign(&address, ALIGNMENT, (size_t)rounded) != 0) return NULL;
    memset(address, 0, (size_t)rounded);
    return address;
}

void cf_device_free(void *memory) {
    free(memory);
}
