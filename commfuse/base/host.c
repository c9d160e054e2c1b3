// See host.h.
#include "host.h"
#include "die.h"
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <time.h>

const char *cf_memory_hint = "work on less at a time, use more ranks, or raise a limit that is named";

// "; ulimit -v or -d allows 976.6 MiB in all", if one of them does.
const char *cf_memory_limit(void) {
    static __thread char text[64];
    struct rlimit addresses, data;
    if (getrlimit(RLIMIT_AS, &addresses) != 0 || getrlimit(RLIMIT_DATA, &data) != 0) return "";
    const rlim_t least = addresses.rlim_cur < data.rlim_cur ? addresses.rlim_cur : data.rlim_cur;
    if (least == RLIM_INFINITY) return "";
    snprintf(text, sizeof text, "; ulimit -v or -d allows %.1f MiB in all", (double)least / 1048576);
    return text;
}

static void *checked(void *memory, int64_t count, size_t size, const char *purpose) {
    if (!memory)
        cf_die(cf_memory_hint, "out of memory: %lld times %zu bytes for %s%s", (long long)count, size, purpose, cf_memory_limit());
    return memory;
}

void *cf_host_alloc(int64_t count, size_t size, const char *purpose) {
    return checked(calloc((size_t)count + !count, size + !size), count, size, purpose);
}

void *cf_host_grow(void *array, int64_t *capacity, int64_t wanted, size_t size, const char *purpose) {
    if (wanted <= *capacity) return array;
    *capacity = wanted < 32 ? 64 : 2 * wanted;
    return checked(realloc(array, (size_t)*capacity * size), *capacity, size, purpose);
}

double cf_now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}
