// The CPU as a device: a stream runs at once, memory is the process's own.
#define _GNU_SOURCE
#include "../device.h"
#include "../base/bf16.h"
#include "../base/die.h"
#include "../base/limits.h"
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __SSE2__
#include <immintrin.h>
#endif

enum { ALIGNMENT = 256, HUGE_PAGE = 2 << 20, PARALLEL_MIN = 1 << 14, STRETCH = 1024 };
enum { STACK_MIN = 7 << 18 }; // bytes; oneDNN 2.6 takes 1.1 MiB

// --- device ---

static int64_t free_bytes;

void cf_device_open(int local_rank) {
    free_bytes = cf_limits_memory();
}

int64_t cf_device_memory(int local_ranks) {
    return free_bytes / local_ranks;
}

const char *cf_device_name(void) {
    return "CPU";
}

// Of this thread, and those that it starts from here on: numbers too small to be normal (10⁻³⁸ in fp32), read or computed, are 0.
// They change no result that counts, and arithmetic with them takes an Intel processor a hundred times as long.
static void flush_subnormals(void) {
    if (cf_host.keeps_subnormals) return;
#if defined(__SSE2__)
    enum { FLUSH_RESULTS = 1 << 15, READ_AS_ZERO = 1 << 6 }; // FTZ, DAZ
    _mm_setcsr(_mm_getcsr() | FLUSH_RESULTS | READ_AS_ZERO);
#elif defined(__aarch64__)
    enum { FZ = 1 << 24 }; // both
    uint64_t fpcr;
    __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
    __asm__ volatile("msr fpcr, %0" ::"r"(fpcr | FZ));
#endif
}

#ifdef _OPENMP
static size_t stack_of_this_thread(void) {
    pthread_attr_t attributes;
    size_t bytes = SIZE_MAX;
    if (pthread_getattr_np(pthread_self(), &attributes) != 0) return bytes;
    pthread_attr_getstacksize(&attributes, &bytes);
    pthread_attr_destroy(&attributes);
    return bytes;
}

// A product that needs more than a thread has may write over other memory without a fault. At least one thread of OpenMP is asked:
// the measurement of the peak starts some even for a program of one.
static void start_threads(int threads) {
    size_t least = SIZE_MAX;
    int started = 0;
    cf_limits_try_threads(threads > 1 ? threads - 1 : 1, "a thread of OpenMP");
#pragma omp parallel num_threads(threads > 1 ? threads : 2) reduction(min : least) reduction(+ : started)
    {
        cf_limits_unbind(), flush_subnormals();
        least = stack_of_this_thread(), started = 1;
    }
    if (started < threads)
        cf_die_together("use fewer threads, or raise OMP_THREAD_LIMIT", "OpenMP starts %d threads of %d", started, threads);
    if (least < STACK_MIN)
        cf_die_together(
            "OMP_STACKSIZE and GOMP_STACKSIZE give threads their stacks, ulimit -s the first one: unset them, or ask for 8 MiB",
            "a thread has a stack of %zu KiB, and matrix products need %d", least >> 10, STACK_MIN >> 10);
}
#endif

void cf_device_threads(int threads) {
    flush_subnormals();
#ifdef _OPENMP
    omp_set_dynamic(0); // OMP_DYNAMIC would start fewer on a busy machine
    omp_set_num_threads(threads);
    if (getpid() == syscall(SYS_gettid)) return start_threads(threads); // other threads multiply nothing
    cpu_set_t mine;
    const bool known = sched_getaffinity(0, sizeof mine, &mine) == 0;
#pragma omp parallel num_threads(1) // a thread's first region moves it to OpenMP's first place
    if (known) sched_setaffinity(0, sizeof mine, &mine);
#endif
}

// --- streams ---

cf_stream *cf_stream_create(void) {
    return cf_host_alloc(1, 1, "a stream"); // nothing is in it
}

cf_stream *cf_stream_create_second(void) {
    return NULL;
}

void cf_stream_free(cf_stream *stream) {
    free(stream);
}

void cf_stream_sync(cf_stream *stream) {}

cf_event cf_event_record(cf_stream *stream) {
    return (cf_event){.ms = cf_now_ms()};
}

cf_event cf_event_record_untimed(cf_stream *stream) {
    return cf_event_record(stream);
}

double cf_event_ms(cf_event event) {
    return event.ms;
}

bool cf_event_passed(cf_event event) {
    return true;
}

void cf_event_wait(cf_event event) {}

bool cf_event_remembered(cf_event event) {
    return true;
}

void cf_stream_after(cf_stream *stream, cf_event event) {}

void cf_range_begin(const char *name, int number) {}

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
// By stretches that stay in the cache, because a loop over elements with one over parts inside does not become vector code.
#define ADD(kind, type, SUM)                                                                                                       \
    case kind: {                                                                                                                   \
        type *t = (type *)to;                                                                                                      \
        const type *f = (const type *)from;                                                                                        \
        _Pragma("omp parallel for if (count >= PARALLEL_MIN)") for (int64_t first = 0; first < count; first += STRETCH) {          \
            const int64_t n = count - first < STRETCH ? count - first : STRETCH;                                                   \
            type sum[STRETCH];                                                                                                     \
            memcpy(sum, f + first, (size_t)n * sizeof *sum);                                                                       \
            for (int p = 1; p <= parts; p++) {                                                                                     \
                const type *next = p < parts ? f + p * stride + first : t + first;                                                 \
                _Pragma("omp simd") for (int64_t i = 0; i < n; i++) sum[i] = SUM(sum[i], next[i]);                                 \
            }                                                                                                                      \
            memcpy(t + first, sum, (size_t)n * sizeof *sum);                                                                       \
        }                                                                                                                          \
        return;                                                                                                                    \
    }

void cf_add(void *to, const void *from, int parts, int64_t stride, int64_t count, cf_dtype dtype, cf_stream *stream) {
    switch (dtype) {
        ADD(CF_FP32, float, PLAIN_SUM)
        ADD(CF_FP64, double, PLAIN_SUM)
        ADD(CF_INT64, int64_t, PLAIN_SUM)
        ADD(CF_BF16, uint16_t, BF16_SUM)
    case CF_BYTE:
        break;
    }
    cf_die(NULL, "cf_add: unsupported type, bytes");
}

// --- memory ---

void *cf_device_malloc(int64_t bytes) {
    void *address = NULL;
    int64_t rounded = (bytes + ALIGNMENT) / ALIGNMENT * ALIGNMENT; // at least one byte
    if (posix_memalign(&address, rounded < HUGE_PAGE ? ALIGNMENT : HUGE_PAGE, (size_t)rounded) != 0) return NULL;
    if (rounded >= HUGE_PAGE) madvise(address, (size_t)rounded, MADV_HUGEPAGE); // many systems give them only who asks
    memset(address, 0, (size_t)rounded);
    return address;
}

void cf_device_free(void *memory) {
    free(memory);
}
