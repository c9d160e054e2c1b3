// Device memory. It is allocated before the first step (scratch of some GPU kernels: at their first call with a larger shape) and
// freed at exit. Each allocation names its purpose, for the report of memory by purpose. In plan-only mode there are only
// addresses: the model is built as usual without memory, and a stray access faults.
#pragma once
#include <stdbool.h>
#include <stdio.h>
#include "base/host.h"

CF_EXTERN_C_BEGIN

typedef enum { CF_FP32, CF_FP64, CF_INT64, CF_BF16, CF_BYTE } cf_dtype;
int64_t cf_dtype_size(cf_dtype dtype); // bytes per element
const char *cf_dtype_name(cf_dtype dtype);

// on: from here on cf_alloc() reserves addresses without memory. Returns what was set before.
bool cf_device_reserve_only(bool on);
bool cf_memory_is_reserved(const void *address);

// Zeroed, 256-byte aligned; NULL on an error, which names purpose and size. bytes = 0 gives a valid pointer.
// The host must not touch it (device.h).
void *cf_alloc(int64_t bytes, const char *purpose);
void cf_free(void *memory); // NULL is allowed

// The start and size of the allocation that contains an address, which other processes may map from here on; NULL: none. cf_free()
// leaves such memory to the end of the process.
void *cf_memory_lend(const void *address, int64_t *bytes);

int64_t cf_memory_bytes(void);     // allocated now
void cf_memory_report(FILE *file); // a table: purpose, bytes, share

CF_EXTERN_C_END
