// The machine a rank computes on: memory, streams, the few operations the executor itself needs.
//
// device_cpu.c: a stream runs at once, so every function here has finished when it returns.
// A CUDA twin enqueues on the stream instead; callers must not tell the difference, that is, they
// read results on the host only after cf_stream_sync().
//
// Memory is taken before the first step and given back at exit. Each allocation names its purpose, so
// that --dry-run can print memory per purpose; in plan-only mode addresses are reserved, never backed.
#ifndef CF_DEVICE_H
#define CF_DEVICE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { CF_FP32, CF_FP64, CF_INT64, CF_BF16, CF_BYTE } cf_dtype;
int64_t cf_dtype_size(cf_dtype dtype); // bytes per element
const char *cf_dtype_name(cf_dtype dtype);

typedef struct cf_stream cf_stream; // an ordered queue of device work

cf_stream *cf_stream_create(void);
void cf_stream_free(cf_stream *stream);
void cf_stream_sync(cf_stream *stream); // returns when all work enqueued on it is done

void cf_device_threads(int threads); // compute threads of this process; CPU only, ignored on a GPU
void cf_device_plan_only(bool on);   // from here on cf_alloc() reserves addresses without memory

// Zeroed, 64-byte aligned; dies naming purpose and size when there is none. bytes = 0 gives a valid pointer.
void *cf_alloc(int64_t bytes, const char *purpose);
void cf_free(void *memory); // NULL is allowed

void cf_copy(void *to, const void *from, int64_t bytes, cf_stream *stream);
void cf_zero(void *to, int64_t bytes, cf_stream *stream);
// to[i] = to[i] + from[i], i < count, elements of dtype (not CF_BYTE).
void cf_add(void *to, const void *from, int64_t count, cf_dtype dtype, cf_stream *stream);

int64_t cf_memory_bytes(void);     // bytes allocated now
void cf_memory_report(FILE *file); // a table: purpose, bytes, share

double cf_now_ms(void); // monotonic clock, milliseconds

#ifdef __cplusplus
}
#endif
#endif
