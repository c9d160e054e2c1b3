// Shared by the .cu files. Never included by C.
//
// Every call is checked at once: CF_CUDA and its like report file, line and what to do. Only cf_launch launches kernels. Memory is
// read and written sixteen bytes at a time through cf_pack where addresses allow.
#pragma once
#include <cuda_runtime.h>
#include "../device.h"
#include "../base/die.h"

#define CF_CUDA(call) cf_cuda_check((call), #call, __FILE__, __LINE__)
// Dies unless code is cudaSuccess, naming the call, its file and line, and what to do.
void cf_cuda_check(cudaError_t code, const char *call, const char *file, int line);

cudaStream_t cf_cuda_stream(cf_stream *stream); // dies on NULL
cf_stream *cf_cuda_stream_urgent(void);         // for communication: has priority over other streams
// A host that waits calls look(argument) again and again, to notice a dead peer.
void cf_cuda_watch(void (*look)(void *argument), void *argument);
void cf_cuda_rest(double begin_ms); // between two polls of a wait that began then: yields the core, later sleeps; and looks
const cudaDeviceProp *cf_cuda_properties(void); // of the device in use
// Multiprocessors that products enqueued from here on leave to kernels of transfers: a product whose kernel stays on all of them
// until it ends would delay those, or wait for them. The transport sets it, by the order of the program alone, not by time.
extern int cf_cuda_left;
extern int cf_cuda_sharers; // ranks that use this GPU; 0: not known yet

struct cf_blocks { // x · y of them, each with so many bytes of shared memory besides what the kernel declares
    int64_t x, y = 1, shared = 0;
};

// Launch kernel<<<blocks, threads, shared, stream>>>(arguments...). Nothing is launched for 0 blocks.
template <typename... Parameters, typename... Arguments>
void cf_launch(void (*kernel)(Parameters...), cf_blocks blocks, int64_t threads, cf_stream *stream, Arguments... arguments) {
    if (blocks.x * blocks.y == 0) return;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)blocks.x, (unsigned)blocks.y);
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = (size_t)blocks.shared;
    config.stream = cf_cuda_stream(stream);
    CF_CUDA(cudaLaunchKernelEx(&config, kernel, (Parameters)arguments...));
}

static inline __device__ int64_t cf_device_ns() {
#ifdef __NVCC__
    int64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
#else // the emulator
    return (int64_t)(cf_now_ms() * 1e6);
#endif
}

// W elements as they are in memory. By default sixteen bytes, moved by one instruction.
template <typename T, int W = 16 / sizeof(T)> struct alignas(W * sizeof(T) < 16 ? W * sizeof(T) : 16) cf_pack {
    enum { N = W };
    T at[W];
};
