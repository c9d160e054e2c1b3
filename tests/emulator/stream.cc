// Streams, events, devices, launches.
//
// A stream is an OS thread that runs work from a queue, in order. Two streams run at the same time, so if one reads what the other
// writes without an event between, that is a race here as on a GPU. It shows as a wrong result, more often with EMULATOR_JITTER=n
// (each piece of work begins up to n microseconds late), or in the thread sanitizer's report, because two streams share nothing but
// events, synchronisation and stream order.
//
// An event is a name for its latest record. cudaStreamWaitEvent waits for the record that is the latest when it is called.
//
// EMULATOR_DEVICES=n: the number of GPUs (8). They are equal but for their number. 0: cudaErrorNoDevice.
#include "emulator.h"
#include "include/cuda.h"
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <deque>
#include <linux/futex.h>
#include <memory>
#include <mutex>
#include <set>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace emulator {

void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fflush(stdout);
    fprintf(stderr, "emulator: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    fflush(stderr);
    va_end(arguments);
    abort();
}

int64_t setting(const char *name, int64_t otherwise) {
    const char *text = getenv(name);
    if (!text || !*text) return otherwise;
    char *end;
    int64_t value = strtoll(text, &end, 10);
    if (*end || value < 0) fail("%s=%s: not a number", name, text);
    return value;
}

int devices() {
    static const int count = (int)setting("EMULATOR_DEVICES", 8);
    return count;
}

static thread_local cudaError_t last_error = cudaSuccess;

cudaError_t remember(cudaError_t error) {
    if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
    return error;
}

struct Record { // one event of a stream
    std::mutex lock;
    std::condition_variable changed;
    bool passed = false;
    double time = 0;    // seconds
    uint64_t noted = 0; // with the clock: the event's number

    void pass() {
        std::lock_guard<std::mutex> hold(lock);
        passed = true;
        std::chrono::duration<double> now = std::chrono::steady_clock::now().time_since_epoch();
        time = now.count();
        changed.notify_all();
    }
    void wait() {
        std::unique_lock<std::mutex> hold(lock);
        changed.wait(hold, [this] { return passed; });
    }
    bool has_passed() {
        std::lock_guard<std::mutex> hold(lock);
        return passed;
    }
    double when() const { return noted ? event_time(noted) : imagined() ? before_clock(time) : time; }
};

} // namespace emulator

struct CUevent_st {
    bool timed = true;
    std::shared_ptr<emulator::Record> latest; // nullptr: never recorded
};

struct CUstream_st {
    std::mutex lock;
    std::condition_variable changed;
    std::deque<std::function<void()>> queue;
    bool busy = false, closing = false;
    int number = 0; // for the clock
    bool urgent = false;
};

namespace emulator {

// Never destroyed: at exit streams may still be at work.
static std::mutex &streams_lock = *new std::mutex;
static std::set<cudaStream_t> &streams = *new std::set<cudaStream_t>;

static void serve(cudaStream_t stream, int64_t jitter, uint64_t seed) {
    Random random(seed);
    std::unique_lock<std::mutex> hold(stream->lock);
    for (;;) {
        stream->changed.wait(hold, [&] { return !stream->queue.empty() || stream->closing; });
        if (stream->queue.empty()) break;
        {
            std::function<void()> work = std::move(stream->queue.front());
            stream->queue.pop_front();
            stream->busy = true;
            hold.unlock();
            if (jitter) std::this_thread::sleep_for(std::chrono::microseconds(random.below(jitter + 1)));
            work();
        }
        hold.lock();
        stream->busy = false;
        if (stream->queue.empty()) stream->changed.notify_all();
    }
    hold.unlock();
    delete stream;
}

static void check(cudaStream_t stream, const char *what) {
    if ((uintptr_t)stream <= 2) fail("%s on the default stream: give it a stream of its own", what);
    std::lock_guard<std::mutex> hold(streams_lock);
    if (!streams.count(stream)) fail("%s on a stream that does not exist (any more)", what);
}

void enqueue(cudaStream_t stream, const char *what, const Note &note, std::function<void()> work,
             const std::vector<Message> &messages) {
    check(stream, what);
    if (clock_runs()) return note_down(note, stream->number, stream->urgent, messages);
    std::lock_guard<std::mutex> hold(stream->lock);
    stream->queue.push_back(std::move(work));
    stream->changed.notify_all();
}

} // namespace emulator

using namespace emulator;

// -------------------------------------------------------------------------------------------------------- launches

enum { SHARED_BYTES = 100 << 10 };                // of a multiprocessor
static std::atomic<size_t> shared_most{48 << 10}; // of a block, besides static arrays

cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute attribute, int value) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || value > SHARED_BYTES)
        return remember(cudaErrorInvalidValue);
    shared_most = (size_t)value;
    return cudaSuccess;
}

cudaError_t emulator_launch(const cudaLaunchConfig_t *config, std::function<void()> thread) {
    dim3 g = config->gridDim, b = config->blockDim;
    if (config->numAttrs) fail("launch attributes are not emulated");
    if (config->dynamicSmemBytes > shared_most)
        fail("%zu bytes of shared memory, %zu allowed", config->dynamicSmemBytes, shared_most.load());
    if (g.x < 1 || g.y < 1 || g.z < 1 || g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535 || b.x < 1 || b.y < 1 || b.z < 1 ||
        b.z > 64 || (uint64_t)b.x * b.y * b.z > 1024)
        return remember(cudaErrorInvalidConfiguration);
    start_clock();
    double blocks = (double)g.x * g.y * g.z;
    enqueue(config->stream, "a kernel", note_kernel(blocks, (double)b.x * b.y * b.z), [g, b, thread = std::move(thread)] {
        run_grid({g.x, g.y, g.z}, {b.x, b.y, b.z}, thread);
    });
    return cudaSuccess;
}

// --------------------------------------------------------------------------------------------------------- streams

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int priority) {
    if (devices() == 0) return remember(cudaErrorNoDevice);
    *stream = new CUstream_st;
    std::lock_guard<std::mutex> hold(streams_lock);
    static uint64_t number = 0;
    streams.insert(*stream);
    (*stream)->number = (int)number + 1, (*stream)->urgent = priority < 0;
    // Read here, not by the thread: nobody may set the environment while another thread reads it.
    uint64_t seed = ++number + (uint64_t)setting("EMULATOR_SEED", 0) * 1000;
    std::thread(serve, *stream, setting("EMULATOR_JITTER", 0), seed).detach();
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) { // returns at once; its thread ends when its work is done
    check(stream, "cudaStreamDestroy");
    {
        std::lock_guard<std::mutex> hold(streams_lock);
        streams.erase(stream);
    }
    std::lock_guard<std::mutex> hold(stream->lock);
    stream->closing = true;
    stream->changed.notify_all();
    return cudaSuccess;
}

static std::shared_ptr<Record> record(cudaStream_t stream, const char *what, bool timed) {
    auto record = std::make_shared<Record>();
    if (clock_runs()) record->noted = next_event(), record->passed = true;
    Note event = note(RECORD, record->noted);
    event.timed = timed;
    enqueue(stream, what, event, [record] { record->pass(); });
    return record;
}

static void drain(cudaStream_t stream) {
    auto end = record(stream, "cudaStreamSynchronize", false); // of the work enqueued up to now, not of later work
    if (end->noted) return wait_for_event(end->noted);
    end->wait();
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    drain(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    check(stream, "cudaStreamQuery");
    if (clock_runs()) return event_has_passed(record(stream, "cudaStreamQuery", false)->noted) ? cudaSuccess : cudaErrorNotReady;
    std::lock_guard<std::mutex> hold(stream->lock);
    return stream->busy || !stream->queue.empty() ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
    if (devices() == 0) return remember(cudaErrorNoDevice);
    std::vector<cudaStream_t> all;
    {
        std::lock_guard<std::mutex> hold(streams_lock);
        all.assign(streams.begin(), streams.end());
    }
    for (cudaStream_t stream : all) drain(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    check(stream, "cudaStreamWaitEvent");
    auto record = event->latest;
    if (!record || (clock_runs() && !record->noted)) return cudaSuccess; // it has passed
    enqueue(stream, "cudaStreamWaitEvent", note(AFTER, record->noted), [record] { record->wait(); });
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------------- events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    if (devices() == 0) return remember(cudaErrorNoDevice);
    *event = new CUevent_st{!(flags & cudaEventDisableTiming), nullptr};
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return cudaEventCreateWithFlags(event, 0);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    event->latest = record(stream, "cudaEventRecord", event->timed);
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (event->latest && event->latest->noted) return event_has_passed(event->latest->noted) ? cudaSuccess : cudaErrorNotReady;
    return !event->latest || event->latest->has_passed() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (!event->latest) return cudaSuccess;
    if (event->latest->noted)
        wait_for_event(event->latest->noted);
    else
        event->latest->wait();
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
    if (!start->timed || !end->timed || !start->latest || !end->latest) return remember(cudaErrorInvalidResourceHandle);
    if (!start->latest->has_passed() || !end->latest->has_passed()) return cudaErrorNotReady;
    host_calls(CALL);
    *ms = (float)((end->latest->when() - start->latest->when()) * 1e3);
    return cudaSuccess;
}

// ------------------------------------------------------------------------------------- words in memory, the driver's

// Between processes: acquire here and release below make the peer's earlier writes visible after the wait. A wait sleeps in the
// kernel until a stream writes the word; a CUDA kernel may write it, too, so the wait also looks every millisecond.
static void sleep_while(uint32_t *word, uint32_t value) {
    struct timespec look = {0, 1000000};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &look, nullptr, 0);
}

CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
    if ((flags & ~(unsigned)CU_STREAM_WAIT_VALUE_FLUSH) > CU_STREAM_WAIT_VALUE_EQ) return CUDA_ERROR_NOT_SUPPORTED;
    if (address & 3) return CUDA_ERROR_INVALID_VALUE;
    uint32_t *word = (uint32_t *)(uintptr_t)address;
    memory_type(word, 4, "cuStreamWaitValue32");
    if (is_a_peers(word)) fail("cuStreamWaitValue32: a stream polls the memory of another device");
    bool equal = flags & CU_STREAM_WAIT_VALUE_EQ;
    auto reached = [=](uint32_t now) { return equal ? now == value : (int32_t)(now - value) >= 0; };
    Note wait = note(AWAIT, clock_runs() ? word_name(word) : 0, value);
    if (clock_runs() && reached(__atomic_load_n(word, __ATOMIC_ACQUIRE))) wait = note(AFTER); // written before the clock began
    enqueue(stream, "cuStreamWaitValue32", wait, [=] {
        for (uint32_t now; !reached(now = __atomic_load_n(word, __ATOMIC_ACQUIRE));) sleep_while(word, now);
    });
    return CUDA_SUCCESS;
}

CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned) {
    if (address & 3) return CUDA_ERROR_INVALID_VALUE;
    uint32_t *word = (uint32_t *)(uintptr_t)address;
    memory_type(word, 4, "cuStreamWriteValue32");
    if (is_a_peers(word) && setting("EMULATOR_PEERS", 2) < 2) return CUDA_ERROR_NOT_SUPPORTED;
    enqueue(stream, "cuStreamWriteValue32", note(WRITE, clock_runs() ? word_name(word) : 0, value), [=] {
        __atomic_store_n(word, value, __ATOMIC_RELEASE);
        syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
    });
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned, unsigned long long,
                                             enum cudaDriverEntryPointQueryResult *status) {
    static const struct {
        const char *name;
        void *function;
    } table[] = {{"cuStreamWaitValue32", (void *)cuStreamWaitValue32},
                 {"cuStreamWriteValue32", (void *)cuStreamWriteValue32},
                 {"cuMemGetAddressRange", (void *)cuMemGetAddressRange}};
    *function = nullptr;
    for (const auto &entry : table)
        if (strcmp(symbol, entry.name) == 0) *function = entry.function;
    if (status) *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

// --------------------------------------------------------------------------------------------------------- devices

static thread_local int current_device = 0;

static cudaError_t valid(int device) {
    if (devices() == 0) return remember(cudaErrorNoDevice);
    return remember(device >= 0 && device < devices() ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaGetDeviceCount(int *count) {
    *count = devices();
    return remember(*count ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int device) {
    cudaError_t error = valid(device);
    if (error == cudaSuccess) current_device = device;
    return error;
}

cudaError_t cudaGetDevice(int *device) {
    *device = current_device;
    return valid(*device);
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    if (attribute != cudaDevAttrCanFlushRemoteWrites) return cudaErrorInvalidValue;
    *value = 1;
    return valid(device);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
    if (valid(device) != cudaSuccess) return valid(device);
    *p = cudaDeviceProp{};
    snprintf(p->name, sizeof p->name, "Emulated GPU");
    memcpy(p->uuid.bytes, &device, sizeof device);
    p->totalGlobalMem = (size_t)memory_mib() << 20;
    p->sharedMemPerBlock = 48 << 10, p->sharedMemPerMultiprocessor = SHARED_BYTES;
    p->regsPerBlock = 65536, p->warpSize = 32, p->maxThreadsPerBlock = 1024;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 0x7fffffff, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->major = setting("EMULATOR_PERSISTENT", 1) ? 9 : 8, p->minor = 0, p->multiProcessorCount = multiprocessors();
    p->pciBusID = device + 1 + setting("EMULATOR_FIRST", 0); // of those that the process sees
    p->memoryBusWidth = 64, p->l2CacheSize = 1 << 20, p->maxThreadsPerMultiProcessor = 2048;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetLastError() {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
#define NAME(name, value)                                                                                                          \
    case name:                                                                                                                     \
        return #name;
        EMULATOR_ERRORS(NAME)
#undef NAME
    }
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error) {
    return cudaGetErrorName(error);
}
