// Device memory. It is allocated before the first step (scratch of some GPU kernels: at their first call with a larger shape) and
// freed at exit. Each allocation names its purpose, for the report of memory by purpose. In plan-only mode there are only
// addresses: the model is built as usual without memory, and a stray access faults.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include "base/extern_c.h"

CF_EXTERN_C_BEGIN

typedef enum { CF_FP32, CF_FP64, CF_INT64, CF_BF16, CF_BYTE } cf_dtype;
int64_t cf_dtype_size(cf_dtype dtype); // bytes per element
const char *cf_dtype_name(cf_dtype dtype);

// on: from here on cf_alloc() reserves addresses without memory. Returns what was set before.
bool cf_device_reserve_only(bool on);
bool cf_memory_is_reserved(const void *address);

// Zeroed, 256-byte aligned; NULL on an error, which names purpose and size. bytes = 0 gives a valid pointer.
// The host must not touch it (device.h).
extern const char *cf_memory_hint; // for the message that there is too little; a program may say it in its own words
void *cf_alloc(int64_t bytes, const char *purpose);
void cf_free(void *memory); // NULL is allowed

// The start and size of the allocation that contains an address, which other processes may map from here on; NULL: none. cf_free()
// leaves such memory to the end of the process.
void *cf_memory_lend(const void *address, int64_t *bytes);

// Zeroed host memory for `count` elements of `size` bytes, for free(). Dies if there is none.
void *cf_host_alloc(int64_t count, size_t size, const char *purpose);
// Grows an array to at least `wanted` elements, as realloc(); *capacity is its size in elements. Dies if there is no memory.
void *cf_host_grow(void *array, int64_t *capacity, int64_t wanted, size_t size, const char *purpose);

double cf_now_ms(void); // the host's monotonic clock, milliseconds

int64_t cf_memory_bytes(void);     // allocated now
void cf_memory_report(FILE *file); // a table: purpose, bytes, share

CF_EXTERN_C_END
