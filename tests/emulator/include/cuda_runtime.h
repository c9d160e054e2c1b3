// CUDA as g++ sees it when the project's .cu files are built for the emulator: the part of the runtime API and of
// the device language that they use, with the signatures and numeric values of CUDA 13. Only what is declared here
// exists; code that needs more does not compile, and more is added then.
//
// A CUDA thread is a fiber (fiber.cc), a stream an OS thread (stream.cc). `static thread_local` is a block's shared
// memory: all fibers of a block run on one OS thread. It is not cleared between blocks, as on a GPU.
#ifndef EMULATOR_CUDA_RUNTIME_H
#define EMULATOR_CUDA_RUNTIME_H

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <tuple>

#ifndef __CUDACC__ // given on the command line too: real.h may come first
#define __CUDACC__ 1
#endif
#define CUDART_VERSION 13000

#define __global__
#define __device__
#define __host__
#define __constant__     static
#define __shared__       static thread_local
#define __forceinline__  inline __attribute__((always_inline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)

// ----------------------------------------------------------------------------------------------- indices

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

// -------------------------------------------------------------------------------------------- inside a kernel

extern __thread uint3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

// Where a thread waits: threads that meet must be at the same line.
struct emulator_place {
    const char *file, *function;
    int line;
};
#define EMULATOR_HERE                                                                                                              \
    emulator_place {                                                                                                               \
        file, function, line                                                                                                       \
    }
#define EMULATOR_CALLER                                                                                                            \
    const char *file = __builtin_FILE(), const char *function = __builtin_FUNCTION(), int line = __builtin_LINE()

void emulator_block_barrier(emulator_place place);
// The lanes in mask meet; returns the value of each lane, valid until this lane's next but one meeting.
const uint64_t *emulator_warp_meeting(unsigned mask, uint64_t mine, emulator_place place);
[[noreturn]] void emulator_bad_source(unsigned mask, int source, emulator_place place);
int emulator_lane();

inline void __syncthreads(EMULATOR_CALLER) {
    emulator_block_barrier(EMULATOR_HERE);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATOR_CALLER) {
    emulator_warp_meeting(mask, 0, EMULATOR_HERE);
}

template <typename T> T emulator_shuffle(unsigned mask, T mine, int source, emulator_place place) {
    static_assert(sizeof(T) <= 8, "shuffles move up to eight bytes");
    uint64_t bits = 0;
    std::memcpy(&bits, &mine, sizeof mine);
    const uint64_t *all = emulator_warp_meeting(mask, bits, place);
    if (!(mask >> source & 1)) emulator_bad_source(mask, source, place);
    std::memcpy(&mine, &all[source], sizeof mine);
    return mine;
}
template <typename T> T __shfl_sync(unsigned mask, T mine, int source, int width = 32, EMULATOR_CALLER) {
    int first = emulator_lane() & -width;
    return emulator_shuffle(mask, mine, first + (source & (width - 1)), EMULATOR_HERE);
}
template <typename T> T __shfl_xor_sync(unsigned mask, T mine, int bits, int width = 32, EMULATOR_CALLER) {
    int lane = emulator_lane(), source = lane ^ bits;
    if (source >= (lane & -width) + width) source = lane;
    return emulator_shuffle(mask, mine, source, EMULATOR_HERE);
}
template <typename T> T __shfl_down_sync(unsigned mask, T mine, unsigned by, int width = 32, EMULATOR_CALLER) {
    int lane = emulator_lane(), source = lane + (int)by;
    if (source >= (lane & -width) + width) source = lane;
    return emulator_shuffle(mask, mine, source, EMULATOR_HERE);
}
template <typename T> T __shfl_up_sync(unsigned mask, T mine, unsigned by, int width = 32, EMULATOR_CALLER) {
    int lane = emulator_lane(), source = lane - (int)by;
    if (source < (lane & -width)) source = lane;
    return emulator_shuffle(mask, mine, source, EMULATOR_HERE);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_CALLER) {
    const uint64_t *all = emulator_warp_meeting(mask, predicate != 0, EMULATOR_HERE);
    unsigned votes = 0;
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) votes |= (unsigned)all[i] << i;
    return votes;
}

inline unsigned long long atomicAdd(unsigned long long *at, unsigned long long by) {
    return __atomic_fetch_add(at, by, __ATOMIC_RELAXED);
}
inline unsigned long long atomicCAS(unsigned long long *at, unsigned long long expected, unsigned long long wanted) {
    __atomic_compare_exchange_n(at, &expected, wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}

template <typename T> T __ldg(const T *address) {
    return *address;
}
inline float __fdividef(float a, float b) {
    return a / b;
}
inline float __expf(float x) {
    return expf(x);
}
inline float rsqrtf(float x) {
    return 1.0f / sqrtf(x);
}
inline float __int_as_float(int x) {
    float f;
    std::memcpy(&f, &x, 4);
    return f;
}
inline int __float_as_int(float f) {
    int x;
    std::memcpy(&x, &f, 4);
    return x;
}
#define EMULATOR_MIN_MAX(type)                                                                                                     \
    inline type min(type a, type b) {                                                                                              \
        return a < b ? a : b;                                                                                                      \
    }                                                                                                                              \
    inline type max(type a, type b) {                                                                                              \
        return a > b ? a : b;                                                                                                      \
    }
EMULATOR_MIN_MAX(int)
EMULATOR_MIN_MAX(unsigned)
EMULATOR_MIN_MAX(long)
EMULATOR_MIN_MAX(unsigned long)
EMULATOR_MIN_MAX(long long)
EMULATOR_MIN_MAX(unsigned long long)
inline float min(float a, float b) {
    return fminf(a, b);
}
inline float max(float a, float b) {
    return fmaxf(a, b);
}
inline double min(double a, double b) {
    return fmin(a, b);
}
inline double max(double a, double b) {
    return fmax(a, b);
}

// ------------------------------------------------------------------------------------------------ runtime API

// One list for the enumeration and for cudaGetErrorName.
// clang-format off
#define EMULATOR_ERRORS(_) \
    _(cudaSuccess, 0) _(cudaErrorInvalidValue, 1) _(cudaErrorMemoryAllocation, 2) \
    _(cudaErrorInitializationError, 3) _(cudaErrorInvalidConfiguration, 9) _(cudaErrorStubLibrary, 34) \
    _(cudaErrorInsufficientDriver, 35) _(cudaErrorDevicesUnavailable, 46) \
    _(cudaErrorInvalidDeviceFunction, 98) _(cudaErrorNoDevice, 100) _(cudaErrorInvalidDevice, 101) \
    _(cudaErrorDeviceUninitialized, 201) _(cudaErrorMapBufferObjectFailed, 205) \
    _(cudaErrorAlreadyMapped, 208) _(cudaErrorNoKernelImageForDevice, 209) \
    _(cudaErrorECCUncorrectable, 214) _(cudaErrorPeerAccessUnsupported, 217) _(cudaErrorInvalidPtx, 218) \
    _(cudaErrorUnsupportedPtxVersion, 222) _(cudaErrorOperatingSystem, 304) \
    _(cudaErrorInvalidResourceHandle, 400) _(cudaErrorSymbolNotFound, 500) _(cudaErrorNotReady, 600) \
    _(cudaErrorIllegalAddress, 700) _(cudaErrorLaunchOutOfResources, 701) _(cudaErrorLaunchTimeout, 702) \
    _(cudaErrorPeerAccessAlreadyEnabled, 704) _(cudaErrorPeerAccessNotEnabled, 705) \
    _(cudaErrorAssert, 710) _(cudaErrorHostMemoryAlreadyRegistered, 712) \
    _(cudaErrorHostMemoryNotRegistered, 713) _(cudaErrorHardwareStackError, 714) \
    _(cudaErrorIllegalInstruction, 715) _(cudaErrorMisalignedAddress, 716) \
    _(cudaErrorInvalidAddressSpace, 717) _(cudaErrorLaunchFailure, 719) _(cudaErrorNotSupported, 801) \
    _(cudaErrorSystemNotReady, 802) _(cudaErrorSystemDriverMismatch, 803) _(cudaErrorUnknown, 999)
// clang-format on
#define EMULATOR_ENUMERATOR(name, value) name = value,
enum cudaError { EMULATOR_ERRORS(EMULATOR_ENUMERATOR) };
typedef enum cudaError cudaError_t;
typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;

enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice, cudaMemoryTypeManaged };
struct cudaPointerAttributes {
    enum cudaMemoryType type;
    int device;
    void *devicePointer, *hostPointer;
    long reserved[8];
};
enum cudaDriverEntryPointQueryResult {
    cudaDriverEntryPointSuccess,
    cudaDriverEntryPointSymbolNotFound,
    cudaDriverEntryPointVersionNotSufficent // (sic)
};
enum {
    cudaStreamDefault = 0,
    cudaStreamNonBlocking = 1,
    cudaEventDefault = 0,
    cudaEventBlockingSync = 1,
    cudaEventDisableTiming = 2,
    cudaEventRecordDefault = 0,
    cudaEventWaitDefault = 0,
    cudaHostAllocDefault = 0,
    cudaHostAllocPortable = 1,
    cudaIpcMemLazyEnablePeerAccess = 1,
    cudaEnableDefault = 0
};
typedef struct cudaIpcMemHandle_st {
    char reserved[64];
} cudaIpcMemHandle_t;
struct cudaDeviceProp {
    char name[256];
    struct {
        char bytes[16];
    } uuid;
    size_t totalGlobalMem, sharedMemPerBlock;
    int regsPerBlock, warpSize, maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3];
    int major, minor, multiProcessorCount, integrated, ECCEnabled;
    int pciBusID, pciDeviceID, pciDomainID;
    int memoryBusWidth, l2CacheSize, maxThreadsPerMultiProcessor;
    size_t sharedMemPerMultiprocessor;
};
typedef struct cudaLaunchAttribute_st {
    int unused; // none is emulated
} cudaLaunchAttribute;
typedef struct cudaLaunchConfig_st {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
} cudaLaunchConfig_t;

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
// Of all kernels at once.
cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute attribute, int value);
template <typename... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute attribute, int value) {
    return cudaFuncSetAttribute((const void *)kernel, attribute, value);
}

const char *cudaGetErrorName(cudaError_t error);
const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();

cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device);
enum cudaDeviceAttr { cudaDevAttrCanFlushRemoteWrites = 98 };
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status = nullptr);

cudaError_t cudaMalloc(void **memory, size_t bytes);
template <typename T> cudaError_t cudaMalloc(T **memory, size_t bytes) {
    return cudaMalloc((void **)memory, bytes);
}
cudaError_t cudaFree(void *memory);
cudaError_t cudaMallocHost(void **memory, size_t bytes, unsigned flags = 0);
template <typename T> cudaError_t cudaMallocHost(T **memory, size_t bytes, unsigned flags = 0) {
    return cudaMallocHost((void **)memory, bytes, flags);
}
cudaError_t cudaFreeHost(void *memory);
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *memory);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaMemsetAsync(void *to, int byte, size_t bytes, cudaStream_t stream);
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *memory);
cudaError_t cudaIpcOpenMemHandle(void **memory, cudaIpcMemHandle_t handle, unsigned flags);
cudaError_t cudaIpcCloseMemHandle(void *memory);

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaEventCreate(cudaEvent_t *event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end);

cudaError_t emulator_launch(const cudaLaunchConfig_t *config, std::function<void()> thread);
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Parameters...), Arguments &&...arguments) {
    std::tuple<Parameters...> values(std::forward<Arguments>(arguments)...);
    return emulator_launch(config, [kernel, values] { std::apply(kernel, values); });
}

#endif
