// Device memory, pinned memory, copies.
//
// All device memory of a process is in one memory file (memfd). Each allocation has pages of its own, mapped so that it ends,
// rounded up to 256 bytes, at the end of its pages; an inaccessible page follows. So an access far beyond the end faults at once,
// and a write a little beyond the end, or before the start, destroys guard bytes that cudaFree checks. New memory holds 0xFB
// everywhere, because a GPU's holds anything but zeros.
//
// Another process maps the same pages through /proc/PID/fd: that is cudaIpcOpenMemHandle.
//
// Copies from pageable host memory have read it when the call returns, copies to it return when they are complete; with pinned
// memory both happen later, in the stream. EMULATOR_PEERS=0: memory of other devices cannot be mapped; 1: streams cannot write words
// there (2). EMULATOR_LATE_BYTES=1: the last bytes of a long copy to another device come later than work that follows it, as
// where a GPU's writes may pass each other. EMULATOR_MEMORY=n: MiB of device memory (8192; with the clock 81920, because nothing is
// written there).
#include "emulator.h"
#include "include/cuda.h"
#include <cerrno>
#include <fcntl.h>
#include <map>
#include <memory>
#include <mutex>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define POISON(address, bytes)   __asan_poison_memory_region(address, bytes)
#define UNPOISON(address, bytes) __asan_unpoison_memory_region(address, bytes)
#else
#define POISON(address, bytes)   ((void)(address), (void)(bytes))
#define UNPOISON(address, bytes) ((void)(address), (void)(bytes))
#endif

namespace emulator {
namespace {

enum { PAGE = 4096, GUARD = 0xC5, POISONED = 0xFB };
enum Kind { DEVICE, PEER, PINNED };

struct Allocation {
    Kind kind;
    size_t bytes;
    char *pages; // the mapping, without the inaccessible page after it
    size_t page_bytes;
    off_t offset; // in the memory file
};

struct Handle { // a cudaIpcMemHandle_t
    uint64_t magic;
    int pid, file;
    off_t offset;
    size_t page_bytes, bytes;
};
constexpr uint64_t MAGIC = 0x656d756c61746f72;

struct State {
    std::mutex lock;
    std::map<uintptr_t, Allocation> allocations; // by address
    int file = -1;
    off_t file_bytes = 0;
    size_t device_bytes = 0;
};
State &state = *new State; // never destroyed: at exit streams may still be at work

size_t round_up(size_t bytes, size_t to) {
    return (bytes + to - 1) / to * to;
}
size_t device_capacity() {
    return (size_t)memory_mib() << 20;
}

// Maps a part of a memory file, with an inaccessible page after it.
char *map_pages(int file, off_t offset, size_t bytes) {
    void *room = mmap(nullptr, bytes + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) return nullptr;
    if (mmap(room, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, offset) == MAP_FAILED) {
        munmap(room, bytes + PAGE);
        return nullptr;
    }
    return (char *)room;
}

// The allocation that holds an address, or nullptr. The lock is held.
std::map<uintptr_t, Allocation>::iterator find(const void *address) {
    auto it = state.allocations.upper_bound((uintptr_t)address);
    if (it == state.allocations.begin()) return state.allocations.end();
    --it;
    uintptr_t inside = (uintptr_t)address - it->first;
    return inside < it->second.bytes || inside == 0 ? it : state.allocations.end();
}

// Removes an allocation of this kind from the table; it must begin at address.
Allocation forget(void *address, Kind kind, const char *what) {
    std::lock_guard<std::mutex> hold(state.lock);
    auto it = state.allocations.find((uintptr_t)address);
    if (it == state.allocations.end() || it->second.kind != kind) fail("%s: %p is not the start of such memory", what, address);
    Allocation allocation = it->second;
    state.allocations.erase(it);
    return allocation;
}

} // namespace

cudaMemoryType memory_type(const void *address, size_t bytes, const char *what) {
    std::lock_guard<std::mutex> hold(state.lock);
    auto it = find(address);
    if (it == state.allocations.end()) return cudaMemoryTypeUnregistered;
    const Allocation &a = it->second;
    size_t left = a.bytes - ((uintptr_t)address - it->first);
    if (bytes > left)
        fail("%s: %zu bytes at %p, but the memory there (%zu bytes in all) ends after %zu", what, bytes, address, a.bytes, left);
    return a.kind == DEVICE || a.kind == PEER ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
}

bool is_a_peers(const void *address) {
    std::lock_guard<std::mutex> hold(state.lock);
    auto it = find(address);
    return it != state.allocations.end() && it->second.kind == PEER;
}

void need_device(const void *address, size_t bytes, const char *what) {
    if (bytes > 0 && memory_type(address, bytes, what) != cudaMemoryTypeDevice) fail("%s: %p is not device memory", what, address);
}

} // namespace emulator

using namespace emulator;

// ---------------------------------------------------------------------------------------------------- device memory

cudaError_t cudaMalloc(void **memory, size_t bytes) {
    *memory = nullptr;
    if (devices() == 0) return remember(cudaErrorNoDevice);
    if (bytes == 0) return cudaSuccess; // as CUDA does
    std::lock_guard<std::mutex> hold(state.lock);
    if (state.device_bytes + bytes > device_capacity()) return remember(cudaErrorMemoryAllocation);
    if (state.file < 0) state.file = memfd_create("emulated-gpu", MFD_CLOEXEC);
    size_t rounded = round_up(bytes, 256), page_bytes = round_up(rounded + 256, PAGE); // at least 256 guard bytes
    off_t offset = state.file_bytes;
    if (state.file < 0 || ftruncate(state.file, offset + (off_t)page_bytes) != 0) return remember(cudaErrorMemoryAllocation);
    char *pages = map_pages(state.file, offset, page_bytes);
    if (!pages) return remember(cudaErrorMemoryAllocation);
    state.file_bytes += (off_t)page_bytes;
    state.device_bytes += bytes;
    char *address = pages + page_bytes - rounded;
    memset(pages, GUARD, (size_t)(address - pages));
    memset(address + bytes, GUARD, (size_t)(pages + page_bytes - address) - bytes);
    if (!imagined()) memset(address, POISONED, bytes); // with the clock, unwritten pages take no memory
    POISON(pages, page_bytes);
    UNPOISON(address, bytes);
    state.allocations[(uintptr_t)address] = {DEVICE, bytes, pages, page_bytes, offset};
    *memory = address;
    return cudaSuccess;
}

static void check_guards(const char *from, const char *to, const void *memory, size_t bytes) {
    for (; from < to; from++)
        if ((unsigned char)*from != GUARD)
            fail("cudaFree: a byte %lld from the start of %zu bytes at %p was written", (long long)(from - (const char *)memory),
                 bytes, memory);
}

// As on a GPU, waits for all streams, which may still use the memory.
cudaError_t cudaFree(void *memory) {
    if (!memory) return cudaSuccess;
    cudaDeviceSynchronize();
    Allocation a = forget(memory, DEVICE, "cudaFree");
    UNPOISON(a.pages, a.page_bytes);
    check_guards(a.pages, (char *)memory, memory, a.bytes);
    check_guards((char *)memory + a.bytes, a.pages + a.page_bytes, memory, a.bytes);
    munmap(a.pages, a.page_bytes + PAGE);
    std::lock_guard<std::mutex> hold(state.lock);
    state.device_bytes -= a.bytes;
    // A peer that still has it mapped reads zeros from here on: wrong results, as after a real cudaFree.
    if (fallocate(state.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, a.offset, (off_t)a.page_bytes) != 0)
        fail("cudaFree: cannot give memory back: %s", strerror(errno));
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    if (devices() == 0) return remember(cudaErrorNoDevice);
    std::lock_guard<std::mutex> hold(state.lock);
    *total_bytes = device_capacity();
    *free_bytes = *total_bytes - state.device_bytes;
    return cudaSuccess;
}

CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *bytes, CUdeviceptr address) {
    std::lock_guard<std::mutex> hold(state.lock);
    auto it = find((void *)(uintptr_t)address);
    if (it == state.allocations.end() || it->second.kind > PEER) return CUDA_ERROR_INVALID_VALUE;
    if (base) *base = it->first;
    if (bytes) *bytes = it->second.bytes;
    return CUDA_SUCCESS;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *memory) {
    *attributes = {};
    attributes->type = memory_type(memory, 0, "cudaPointerGetAttributes");
    if (attributes->type != cudaMemoryTypeUnregistered) attributes->devicePointer = (void *)memory;
    if (attributes->type != cudaMemoryTypeDevice) attributes->hostPointer = (void *)memory;
    return cudaSuccess;
}

// ------------------------------------------------------------------------------------------------- between processes

// The handle is that of the whole allocation: a program that shares a part of it must also send the part's offset.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *memory) {
    static_assert(sizeof(Handle) <= sizeof *handle, "fits");
    std::lock_guard<std::mutex> hold(state.lock);
    auto it = find(memory);
    if (it == state.allocations.end() || it->second.kind != DEVICE) return remember(cudaErrorInvalidValue);
    Handle h = {MAGIC, (int)getpid(), state.file, it->second.offset, it->second.page_bytes, it->second.bytes};
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &h, sizeof h);
    return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void **memory, cudaIpcMemHandle_t handle, unsigned flags) {
    Handle h;
    memcpy(&h, &handle, sizeof h);
    if (h.magic != MAGIC || flags != cudaIpcMemLazyEnablePeerAccess) return remember(cudaErrorInvalidValue);
    if (setting("EMULATOR_PEERS", 2) == 0) return remember(cudaErrorInvalidDevice);
    if (h.pid == getpid()) return remember(cudaErrorDeviceUninitialized); // a process cannot open its own memory
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", h.pid, h.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return remember(cudaErrorMapBufferObjectFailed);
    char *pages = map_pages(file, h.offset, h.page_bytes);
    close(file);
    if (!pages) return remember(cudaErrorMapBufferObjectFailed);
    *memory = pages + h.page_bytes - round_up(h.bytes, 256);
    std::lock_guard<std::mutex> hold(state.lock);
    state.allocations[(uintptr_t)*memory] = {PEER, h.bytes, pages, h.page_bytes, 0};
    return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void *memory) {
    cudaDeviceSynchronize();
    Allocation a = forget(memory, PEER, "cudaIpcCloseMemHandle");
    munmap(a.pages, a.page_bytes + PAGE);
    return cudaSuccess;
}

// ----------------------------------------------------------------------------------------------------- pinned memory

cudaError_t cudaMallocHost(void **memory, size_t bytes, unsigned) {
    if (devices() == 0) return remember(cudaErrorNoDevice);
    if (posix_memalign(memory, PAGE, round_up(bytes ? bytes : 1, PAGE)) != 0) return remember(cudaErrorMemoryAllocation);
    memset(*memory, POISONED, bytes);
    std::lock_guard<std::mutex> hold(state.lock);
    state.allocations[(uintptr_t)*memory] = {PINNED, bytes, nullptr, 0, 0};
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *memory) {
    if (!memory) return cudaSuccess;
    cudaDeviceSynchronize();
    forget(memory, PINNED, "cudaFreeHost");
    free(memory);
    return cudaSuccess;
}

// ------------------------------------------------------------------------------------------------------------ copies

static bool allows(enum cudaMemcpyKind kind, bool from_device, bool to_device) {
    static const enum cudaMemcpyKind fits[2][2] = {{cudaMemcpyHostToHost, cudaMemcpyHostToDevice},
                                                   {cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice}};
    return kind == cudaMemcpyDefault || kind == fits[from_device][to_device];
}

// Between devices, to and from the host, within a device. With the clock, small copies move data nevertheless: the host reads them.
// They cannot be too early, because kernels write nothing.
static void enqueue_copy(cudaStream_t stream, const char *what, void *to, const void *from, size_t bytes, bool host) {
    bool across = is_a_peers(to) || is_a_peers(from), moves = !imagined() || bytes <= SMALL_BYTES;
    if (clock_runs() && moves && !across) memmove(to, from, bytes);
    Note note = host || across ? note_copy((double)bytes, across) : note_copy_within((double)bytes);
    const size_t late = across && bytes > SMALL_BYTES && setting("EMULATOR_LATE_BYTES", 0) ? SMALL_BYTES : 0;
    enqueue(stream, what, note, [=] {
        if (moves) memmove(to, from, bytes - late);
        if (!late || !moves) return;
        auto rest = std::make_shared<std::vector<char>>((const char *)from + bytes - late, (const char *)from + bytes);
        std::thread([=] { // it has long been the turn of other work
            usleep(20000);
            memcpy((char *)to + bytes - late, rest->data(), late);
        })
            .detach();
    });
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    if (bytes == 0) return cudaSuccess;
    cudaMemoryType source = memory_type(from, bytes, "cudaMemcpyAsync, from");
    cudaMemoryType target = memory_type(to, bytes, "cudaMemcpyAsync, to");
    if (!allows(kind, source == cudaMemoryTypeDevice, target == cudaMemoryTypeDevice))
        fail("cudaMemcpyAsync: kind %d does not fit memory of types %d and %d", kind, source, target);
    if (source == cudaMemoryTypeUnregistered && target != cudaMemoryTypeUnregistered && !imagined()) {
        auto read = std::make_shared<std::vector<char>>((const char *)from, (const char *)from + bytes);
        enqueue(stream, "cudaMemcpyAsync", {}, [=] { memcpy(to, read->data(), bytes); });
        return cudaSuccess;
    }
    enqueue_copy(stream, "cudaMemcpyAsync", to, from, bytes, source != cudaMemoryTypeDevice || target != cudaMemoryTypeDevice);
    return target == cudaMemoryTypeUnregistered ? cudaStreamSynchronize(stream) : cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int byte, size_t bytes, cudaStream_t stream) {
    need_device(to, bytes, "cudaMemsetAsync");
    bool moves = !imagined() || bytes <= SMALL_BYTES;
    enqueue(stream, "cudaMemsetAsync", note_copy_within((double)bytes / 2), [=] {
        if (moves) memset(to, byte, bytes);
    });
    return cudaSuccess;
}
