// A GPU as a device: functions that take a stream enqueue on it and return. See device.h.
//
// Streams. All are non-blocking, so that nothing waits for the legacy stream by accident. Those for communication have the highest
// priority: their kernels get the next free multiprocessor while blocks of a matrix product still wait for one. Nothing here
// waits inside the CUDA library, because such a wait could not end when a peer is gone. cf_stream_sync() queries an event instead,
// at first in a row, then with sleeps between, and lets the transport check its peers meanwhile.
//
// Events are kept in a ring. An event's number is a running count, so one older than the ring is known to be forgotten
// and not mistaken for another. Events give differences, not times: a base event, recorded and waited for on a stream of its own,
// has a known time on the host's clock, and is renewed now and then, before the two clocks drift apart.
//
// Sums (cf_add) have one addition per element, so there is no order to fix; bf16 is added in float and rounded once.
#include "transport_cuda.h"
#include <cuda_bf16.h>
#include <sys/prctl.h>
#include <time.h>
#include <algorithm>
#include <utility>
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#endif

enum {
    STAGE_BYTES = 4 << 20, // pinned memory through which copies from pageable memory go
    STAGES = 8,
    EVENTS = 1 << 18,
    ADD_THREADS = 256,
    ADD_WAVES = 8,   // blocks per multiprocessor, at most
    MAJOR_MIN = 8,   // compute capability that this program is built for
    YIELD_US = 2000, // a wait yields the core between polls until this long, then sleeps between them
    REST_US = 20,
    LOOK_MS = 5, // between two calls of cf_cuda_watch()'s function
    BASE_TRIES = 3,
    PACED_THREADS = 512,
    NEAR_CORES = 8 // for the ranks of all GPUs that are near
};
static const double BASE_AGE_MS = 1000;

typedef struct events {
    cudaEvent_t event[EVENTS];
    int64_t recorded, created; // events so far; events that exist
} events;

static struct {
    cudaDeviceProp properties;
    int least, greatest; // priorities
    void (*look)(void *argument);
    void *argument;
    double looked_ms;
    events timed, untimed;
    cudaStream_t clock;      // the base is recorded here, where nothing else is
    cudaEvent_t base, fresh; // fresh: perhaps the next base
    double base_ms;          // on the cf_now_ms clock
    int64_t base_number;     // events recorded before
    struct {
        void *memory;  // pinned
        cf_event read; // the device has copied from it
    } stage[STAGES];
    int64_t staged; // copies so far
    int count;      // GPUs of this host
    size_t free;    // bytes, when the device was opened
} device;

int cf_cuda_left, cf_cuda_sharers;

// --- what CUDA says ---

static const char *hint_for(cudaError_t code) {
    switch (code) {
    case cudaErrorMemoryAllocation:
        return cf_memory_hint;
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
        return "look at nvidia-smi and CUDA_VISIBLE_DEVICES; ./train_gpt is the CPU program";
    case cudaErrorInsufficientDriver:
    case cudaErrorSystemDriverMismatch:
        return "the driver is older than the CUDA version of this program: update it, or build with an older CUDA";
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
        return "this program was built for other GPUs: build it on this machine with make cuda";
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorIllegalInstruction:
    case cudaErrorLaunchFailure:
    case cudaErrorHardwareStackError:
        return "a kernel before this call failed: compute-sanitizer, or CUDA_LAUNCH_BLOCKING=1, shows which";
    case cudaErrorECCUncorrectable:
        return "the GPU is broken: look at nvidia-smi -q, take this host out";
    default:
        return "CUDA_LAUNCH_BLOCKING=1 shows the call that failed; dmesg has the driver's messages";
    }
}

void cf_cuda_check(cudaError_t code, const char *call, const char *file, int line) {
    if (code == cudaSuccess) return;
    cf_die(hint_for(code), "%s:%d: %s: %s (%s)", file, line, call, cudaGetErrorString(code), cudaGetErrorName(code));
}

// --- the device ---

static void find_devices(void) {
    const cudaError_t code = cudaGetDeviceCount(&device.count);
    if (code == cudaSuccess && device.count > 0) return;
    int version = 0; // stays 0 without a driver, where CUDA reports an old one
    cudaDriverGetVersion(&version);
    char driver[64] = "this host has no NVIDIA driver";
    if (version > 0) snprintf(driver, sizeof driver, "the driver knows CUDA %d.%d", version / 1000, version % 1000 / 10);
    const bool old = version > 0 && code == cudaErrorInsufficientDriver;
    cf_die_together(old ? hint_for(code) : "use ./train_gpt, the CPU program, or look at nvidia-smi",
                    "no CUDA device: %s (cudaGetDeviceCount says: %s)", driver,
                    code == cudaSuccess ? "0 devices" : cudaGetErrorString(code));
}

// Calls of CUDA, and words that hosts of other ranks write, take longer from another processor.
static void stay_near_device(void) {
    const cudaDeviceProp *p = &device.properties;
    char path[96], cores[1024];
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%04x:%02x:%02x.0/local_cpulist", p->pciDomainID, p->pciBusID, p->pciDeviceID);
    FILE *file = fopen(path, "r");
    if (file && fgets(cores, sizeof cores, file)) cf_limits_near(cores, NEAR_CORES);
    if (file) fclose(file);
}

void cf_device_open(int local_rank) {
    size_t total = 0;
    find_devices();
    CF_CUDA(cudaSetDevice(local_rank % device.count));
    CF_CUDA(cudaGetDeviceProperties(&device.properties, local_rank % device.count));
    if (device.properties.major < MAJOR_MIN)
        cf_die("use ./train_gpt, the CPU program, or a newer GPU", "%s has compute capability %d.%d; this program needs %d.0",
               device.properties.name, device.properties.major, device.properties.minor, MAJOR_MIN);
    stay_near_device();
    CF_CUDA(cudaFree(NULL)); // initialises it, and starts threads
    CF_CUDA(cudaMemGetInfo(&device.free, &total));
    CF_CUDA(cudaDeviceGetStreamPriorityRange(&device.least, &device.greatest));
    CF_CUDA(cudaStreamCreateWithFlags(&device.clock, cudaStreamNonBlocking));
    CF_CUDA(cudaEventCreate(&device.base));
    CF_CUDA(cudaEventCreate(&device.fresh));
    for (int i = 0; i < STAGES; i++) CF_CUDA(cudaMallocHost(&device.stage[i].memory, STAGE_BYTES));
    prctl(PR_SET_TIMERSLACK, 1000UL); // ns: a rest of 20 us would last 70
}

int64_t cf_device_memory(int local_ranks) {
    return (int64_t)device.free / (cf_cuda_sharers ? cf_cuda_sharers : (local_ranks + device.count - 1) / device.count);
}

const char *cf_device_name(void) {
    return device.properties.name;
}

void cf_device_threads(int threads) {
    (void)threads;
}

const cudaDeviceProp *cf_cuda_properties(void) {
    return &device.properties;
}

// --- streams ---

// A cf_stream * is CUDA's handle by another name.
static cf_stream *stream_of_priority(int priority) {
    cudaStream_t stream;
    CF_CUDA(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority));
    return (cf_stream *)stream;
}

cf_stream *cf_stream_create(void) {
    return stream_of_priority(device.least);
}

cf_stream *cf_stream_create_second(void) {
    return cf_stream_create();
}

cf_stream *cf_cuda_stream_urgent(void) {
    return stream_of_priority(device.greatest);
}

void cf_stream_free(cf_stream *stream) {
    if (stream) CF_CUDA(cudaStreamDestroy((cudaStream_t)stream));
}

cudaStream_t cf_cuda_stream(cf_stream *stream) {
    if (!stream) cf_die(NULL, "a kernel or copy needs a stream");
    return (cudaStream_t)stream;
}

// Its stream is empty, so the event is recorded within microseconds; the quickest of a few tries was disturbed least.
static void renew_base(void) {
    double quickest_ms = 1e300;
    for (int i = 0; i < BASE_TRIES; i++) {
        const double before_ms = cf_now_ms();
        CF_CUDA(cudaEventRecord(device.fresh, device.clock));
        CF_CUDA(cudaEventSynchronize(device.fresh));
        const double took_ms = cf_now_ms() - before_ms;
        if (took_ms >= quickest_ms) continue;
        quickest_ms = took_ms, device.base_ms = before_ms + took_ms / 2;
        std::swap(device.base, device.fresh);
    }
    device.base_number = device.timed.recorded;
}

void cf_stream_sync(cf_stream *stream) {
    cf_event_wait(cf_event_record_untimed(stream));
    if (cf_now_ms() - device.base_ms > BASE_AGE_MS) renew_base();
}

void cf_cuda_watch(void (*look)(void *argument), void *argument) {
    device.look = look;
    device.argument = argument;
}

// --- events ---

static events *of(cf_event event) {
    return event.number < 0 ? &device.untimed : &device.timed;
}

static cudaEvent_t event_of(cf_event event) {
    const int64_t number = llabs(event.number);
    if (number == 0 || !cf_event_remembered(event))
        cf_die("ask for it sooner, or synchronise more often", "event %lld is not among the last %d of its kind",
               (long long)event.number, EVENTS);
    return of(event)->event[number % EVENTS];
}

static int64_t record(events *m, unsigned flags, cf_stream *stream) {
    const int64_t number = m->recorded + 1;
    while (m->created <= number % EVENTS) CF_CUDA(cudaEventCreateWithFlags(&m->event[m->created++], flags));
    m->recorded = number;
    CF_CUDA(cudaEventRecord(m->event[number % EVENTS], cf_cuda_stream(stream)));
    return number;
}

cf_event cf_event_record(cf_stream *stream) {
    if (device.base_ms == 0) renew_base();
    return {0, record(&device.timed, cudaEventDefault, stream)};
}

cf_event cf_event_record_untimed(cf_stream *stream) {
    return {0, -record(&device.untimed, cudaEventDisableTiming, stream)};
}

// The event enqueued first is the first argument, so a difference is negative only if events of two streams passed in the other
// order. What a stream has waited for is an untimed event (cf_request.here); the timed one behind it may still be due.
double cf_event_ms(cf_event event) {
    const bool later = event.number > device.base_number;
    cudaEvent_t recorded = event_of(event), first = later ? device.base : recorded, second = later ? recorded : device.base;
    cudaError_t elapsed;
    float ms = 0;
    while ((elapsed = cudaEventElapsedTime(&ms, first, second)) == cudaErrorNotReady) cf_event_wait(event);
    CF_CUDA(elapsed);
    return device.base_ms + (later ? ms : -ms);
}

bool cf_event_passed(cf_event event) {
    cudaError_t code = cudaEventQuery(event_of(event));
    if (code == cudaErrorNotReady) return false;
    CF_CUDA(code);
    return true;
}

void cf_cuda_rest(double begin_ms) {
    static const struct timespec pause = {0, REST_US * 1000L};
    const double now_ms = cf_now_ms();
    if ((now_ms - begin_ms) * 1e3 >= YIELD_US)
        nanosleep(&pause, NULL);
    else
        sched_yield();
    if (!device.look || now_ms - std::max(begin_ms, device.looked_ms) < LOOK_MS) return;
    device.looked_ms = now_ms;
    device.look(device.argument);
}

void cf_event_wait(cf_event event) {
    const double begin_ms = cf_now_ms();
    while (cf_event_remembered(event) && !cf_event_passed(event)) cf_cuda_rest(begin_ms);
    if (device.looked_ms > begin_ms) device.look(device.argument); // it notes that the wait is over
}

bool cf_event_remembered(cf_event event) {
    return llabs(event.number) > of(event)->recorded - EVENTS;
}

void cf_stream_after(cf_stream *stream, cf_event event) {
    CF_CUDA(cudaStreamWaitEvent(cf_cuda_stream(stream), event_of(event), 0));
}

// Without a profiler each of NVTX's functions compares a pointer with NULL.
void cf_range_begin(const char *name, int number) {
#ifdef NVTX_VERSION
    nvtxEventAttributes_t a = {};
    a.version = NVTX_VERSION, a.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    a.messageType = NVTX_MESSAGE_TYPE_ASCII, a.message.ascii = name;
    a.payloadType = number < 0 ? NVTX_PAYLOAD_UNKNOWN : NVTX_PAYLOAD_TYPE_INT32, a.payload.iValue = number;
    nvtxRangePushEx(&a);
#else
    (void)name, (void)number;
#endif
}

void cf_range_end(void) {
#ifdef NVTX_VERSION
    nvtxRangePop();
#endif
}

// --- work ---

static bool pageable(const void *memory) {
    cudaPointerAttributes attributes;
    CF_CUDA(cudaPointerGetAttributes(&attributes, memory));
    return attributes.type == cudaMemoryTypeUnregistered;
}

// The host may change its memory when this returns: it reads the next micro-batch's tokens while the device still works on the
// last. (The library promises that for few bytes at best; for many it waits inside for the stream, and nobody watches the peers.)
void cf_copy(void *to, const void *from, int64_t bytes, cf_stream *stream) {
    if (bytes <= 0) return;
    const bool to_host = pageable(to);
    if (to_host) cf_stream_sync(stream); // the library's copy would wait, too, without watching the peers
    if (to_host || !pageable(from)) {
        CF_CUDA(cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDefault, cf_cuda_stream(stream)));
        return;
    }
    for (int64_t at = 0, part; at < bytes; at += part) {
        const int i = (int)(device.staged++ % STAGES);
        part = bytes - at < STAGE_BYTES ? bytes - at : (int64_t)STAGE_BYTES;
        if (device.stage[i].read.number) cf_event_wait(device.stage[i].read);
        memcpy(device.stage[i].memory, (const char *)from + at, (size_t)part);
        CF_CUDA(cudaMemcpyAsync((char *)to + at, device.stage[i].memory, (size_t)part, cudaMemcpyDefault, cf_cuda_stream(stream)));
        device.stage[i].read = cf_event_record_untimed(stream);
    }
}

void cf_zero(void *to, int64_t bytes, cf_stream *stream) {
    if (bytes > 0) CF_CUDA(cudaMemsetAsync(to, 0, (size_t)bytes, cf_cuda_stream(stream)));
}

template <typename T> static __device__ T sum(T a, T b) {
    if constexpr (sizeof(T) == sizeof(__nv_bfloat16))
        return (T)((float)a + (float)b);
    else
        return a + b;
}

// N elements, from element i on.
template <typename T, int N> static __device__ void add_at(T *to, const T *from, int parts, int64_t stride, int64_t i) {
    typedef cf_pack<T, N> group;
    group a = *(const group *)(from + i);
    for (int p = 1; p <= parts; p++) {
        const group b = *(const group *)(p < parts ? from + p * stride + i : to + i);
        for (int k = 0; k < N; k++) a.at[k] = sum(a.at[k], b.at[k]);
    }
    *(group *)(to + i) = a;
}

// Each thread adds groups of N elements, `threads` groups apart, and then one element of the rest.
template <typename T, int N> static __global__ void add_kernel(T *to, const T *from, int parts, int64_t stride, int64_t count) {
    const int64_t first = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, threads = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = first; i < count / N; i += threads) add_at<T, N>(to, from, parts, stride, i * N);
    for (int64_t i = count / N * N + first; i < count; i += threads) add_at<T, 1>(to, from, parts, stride, i);
}

template <typename T> static void add(void *to, const void *from, int parts, int64_t stride, int64_t count, cf_stream *stream) {
    const int N = cf_pack<T>::N;
    const bool aligned = ((uintptr_t)to | (uintptr_t)from | (parts > 1) * (uintptr_t)stride * sizeof(T)) % sizeof(cf_pack<T>) == 0;
    const int64_t groups = aligned ? count / N + count % N : count,
                  most = (int64_t)ADD_WAVES * cf_cuda_properties()->multiProcessorCount;
    const int64_t blocks = std::min((groups + ADD_THREADS - 1) / ADD_THREADS, most);
    cf_launch(aligned ? add_kernel<T, N> : add_kernel<T, 1>, {blocks}, ADD_THREADS, stream, to, from, parts, stride, count);
}

void cf_add(void *to, const void *from, int parts, int64_t stride, int64_t count, cf_dtype dtype, cf_stream *stream) {
    const auto adds = dtype == CF_FP32    ? add<float>
                      : dtype == CF_FP64  ? add<double>
                      : dtype == CF_INT64 ? add<int64_t>
                                          : add<__nv_bfloat16>;
    if (dtype == CF_BYTE) cf_die(NULL, "cf_add: unsupported type, bytes");
    adds(to, from, parts, stride, count, stream);
}

// A round of all blocks ends when a link of that rate would have brought it.
typedef cf_pack<char> pack;
static __global__ void paced_copy(pack *to, const pack *from, int64_t count, double ns_each) {
    const int64_t begin = cf_device_ns(), round = (int64_t)gridDim.x * blockDim.x;
    for (int64_t first = 0; first < count; first += round) {
        const int64_t i = first + (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
        if (i < count) to[i] = from[i];
        const double due_ns = (double)(first + round < count ? first + round : count) * ns_each;
        while (threadIdx.x == 0 && (double)(cf_device_ns() - begin) < due_ns) {}
        __syncthreads();
    }
}

void cf_paced_copy(void *to, const void *from, int64_t bytes, double gb_per_s, cf_stream *stream) {
    if (((uintptr_t)to | (uintptr_t)from | (uintptr_t)bytes) % sizeof(pack) != 0) return cf_copy(to, from, bytes, stream); // small
    cf_launch(paced_copy, {CF_PACED_BLOCKS}, PACED_THREADS, stream, (pack *)to, (const pack *)from, bytes / (int64_t)sizeof(pack),
              (double)sizeof(pack) / gb_per_s);
}

// --- memory ---

// Allocations are whole blocks of the driver: other processes map whole blocks, and the driver puts small allocations into one.
#ifndef CF_BLOCK_BYTES // on the emulator they have their exact size, because it checks for writes beyond their end
#define CF_BLOCK_BYTES (2 << 20)
#endif

void *cf_device_malloc(int64_t bytes) {
    void *memory = NULL;
    int64_t blocks = bytes > 0 ? (bytes + CF_BLOCK_BYTES - 1) / CF_BLOCK_BYTES : 1;
    cudaError_t code = cudaMalloc(&memory, (size_t)(blocks * CF_BLOCK_BYTES));
    if (code == cudaErrorMemoryAllocation) {
        cudaGetLastError(); // NULL reports it, not the next call
        return NULL;
    }
    CF_CUDA(code);
    CF_CUDA(cudaMemsetAsync(memory, 0, bytes > 0 ? (size_t)bytes : 1, device.clock));
    CF_CUDA(cudaStreamSynchronize(device.clock));
    return memory;
}

void cf_device_free(void *memory) {
    CF_CUDA(cudaFree(memory));
}
