// The device of a rank: memory, streams, and the few kernels that the executor needs.
//
// device_cpu.c: a stream runs at once, so every function has finished when it returns.
// device_cuda.cu: functions that take a stream enqueue on it and return.
// Callers need not know which: only kernels and cf_copy touch device memory (memory.h), and the host reads copied data only after
// cf_stream_sync(). A cf_copy from host memory has read it when it returns.
#pragma once
#include "memory.h"

CF_EXTERN_C_BEGIN

// Opens this process's device, before any other device function. GPU: number local_rank modulo the GPUs of this host. Dies if there
// is none.
void cf_device_open(int local_rank);
const char *cf_device_name(void); // "CPU", "NVIDIA H100 80GB HBM3"
// Bytes that this rank may allocate: those free when the device was opened, divided by the ranks that share it. local_ranks: ranks
// on this host.
int64_t cf_device_memory(int local_ranks);
// Compute threads of this process; CPU only, ignored on a GPU. They, and the thread that calls this, take subnormal numbers for 0,
// unless the program has called cf_open().
void cf_device_threads(int threads);

typedef struct cf_stream cf_stream; // an ordered queue of device work

cf_stream *cf_stream_create(void);
cf_stream *cf_stream_create_second(void); // a second compute stream; NULL: two would not run at the same time (CPU)
void cf_stream_free(cf_stream *stream);
void cf_stream_sync(cf_stream *stream); // returns when all work enqueued on it is done

// A point of a stream: when all work enqueued on it so far is done. GPU: the latest 2^18 are remembered.
typedef struct cf_event {
    double ms;      // CPU: on the cf_now_ms clock
    int64_t number; // GPU; negative: it has no time
} cf_event;
cf_event cf_event_record(cf_stream *stream);
cf_event cf_event_record_untimed(cf_stream *stream);     // for cf_stream_after() alone; a timed one costs a GPU's stream 2 us
double cf_event_ms(cf_event event);                      // on the cf_now_ms clock; waits until it has passed
bool cf_event_passed(cf_event event);                    // does not wait
void cf_event_wait(cf_event event);                      // until it has passed; as cf_stream_sync()
bool cf_event_remembered(cf_event event);                // false: it must not be passed to the functions above
void cf_stream_after(cf_stream *stream, cf_event event); // work enqueued from here on starts after the event

// What this thread enqueues between them has a name in profiles (NVTX; nothing without its header, or on CPUs). Ranges nest.
// number: of a layer or step; -1: none.
void cf_range_begin(const char *name, int number);
void cf_range_end(void);

void cf_copy(void *to, const void *from, int64_t bytes, cf_stream *stream);
void cf_zero(void *to, int64_t bytes, cf_stream *stream);
// to[i] = ((from[i] + from[stride + i]) + …) + to[i], i < count: `parts` parts in this order, elements of dtype (not CF_BYTE), bf16
// added in float and rounded after each addition.
void cf_add(void *to, const void *from, int parts, int64_t stride, int64_t count, cf_dtype dtype, cf_stream *stream);
// `to` and parts, which the kernel that reads their sum adds up as cf_add would: so the sum need not be written and read again.
typedef struct cf_sum {
    void *to;         // the kernel may make the sum here
    const void *from; // `parts` parts; 0: `to` is the sum already
    int parts;
    int64_t stride; // elements
} cf_sum;

// For memory.c alone: zeroed device memory, 256-byte aligned; NULL: out of memory.
void *cf_device_malloc(int64_t bytes);
void cf_device_free(void *memory);

CF_EXTERN_C_END
