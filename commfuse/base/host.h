// Memory of the host, and its clock.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include "extern_c.h"

CF_EXTERN_C_BEGIN

// Zeroed host memory for `count` elements of `size` bytes, for free(). Dies if there is none.
void *cf_host_alloc(int64_t count, size_t size, const char *purpose);
// Grows an array to at least `wanted` elements, as realloc(); *capacity is its size in elements. Dies if there is no memory.
void *cf_host_grow(void *array, int64_t *capacity, int64_t wanted, size_t size, const char *purpose);

double cf_now_ms(void); // the host's monotonic clock, milliseconds

extern const char *cf_memory_hint; // for the message that there is too little; a program may say it in its own words
const char *cf_memory_limit(void); // for that message: the ulimit, if one is set

CF_EXTERN_C_END
