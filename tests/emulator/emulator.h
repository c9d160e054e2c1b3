// The emulator: CUDA, cuBLASLt and NCCL as far as this project uses them, on CPUs, for machines that have no GPU.
//
// The project's .cu files are compiled by g++ against the headers in include/ and linked to this library instead of
// NVIDIA's. What they compute, in which order streams may run, what ranks tell each other: all of it happens, and
// mistakes in it show. fiber.cc runs the threads of a block, stream.cc streams and events, memory.cc memory and what
// processes share of it, blaslt.cc matrix products, nccl.cc communication, layers.cc what stands before the layers; clock.cc
// says how long all of it would take on a GPU; emulator.mk builds.
//
// What a test passed here does not say:
//   - how fast anything is; times are those of a CPU, or those that clock.cc imagines
//   - that the compiler for GPUs takes the code, that registers and shared memory suffice (make cuda says the first)
//   - what the memory model allows: stores here are seen in order, and the threads of a block take turns, so a
//     missing __syncthreads shows only through EMULATOR_SEED, a missing fence between GPUs not at all
//   - that the host keeps its hands off device memory, which it could touch here
//   - that addresses are aligned as packs need it, unless built with SAN=alignment
//   - what the real libraries return or refuse beyond what is written here, and in which order they add
//   - anything of cuDNN: compiled without it, attention_cudnn.cu says that it is not supported
#ifndef EMULATOR_H
#define EMULATOR_H

#include "include/cuda_runtime.h"

// What the files of the emulator share; the tests see only the CUDA headers.
namespace emulator {

// Prints what the program did that a GPU would not have forgiven, and aborts.
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

int64_t setting(const char *name, int64_t otherwise); // an environment variable
int devices();                                        // EMULATOR_DEVICES
int64_t memory_mib();                                 // EMULATOR_MEMORY, of each
cudaError_t remember(cudaError_t error);              // for cudaGetLastError; returns it

struct Random { // xorshift
    uint64_t state;
    explicit Random(uint64_t seed) : state(seed * 0x9e3779b97f4a7c15u + 0x1234567) {}
    uint64_t next() {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        return state;
    }
    int64_t below(int64_t n) { return (int64_t)(next() % (uint64_t)n); }
};

enum HostCall { CALL, LAUNCH, GROUP }; // of the host: an event or a word; a kernel or a copy; a group of NCCL's

// stream.cc: the stream's thread runs `work` after all that was enqueued before. Aborts on the default stream.
void enqueue(cudaStream_t stream, const char *what, std::function<void()> work, HostCall call = CALL);
// The same but, where time is imagined, `seconds` pass instead.
void enqueue_work(cudaStream_t stream, const char *what, double seconds, std::function<void()> work);

int multiprocessors();
// clock.cc: where time is imagined, seconds. stream_…: of the stream whose thread calls.
bool imagined();
double stream_clock();
void stream_reaches(double time);
void stream_passes(double seconds);
void host_reaches(double time);
double host_calls(HostCall call); // takes the host's time; when it is done
double kernel_seconds(double threads);
double product_seconds(double m, double n, double k, double times, double bytes);
double attention_seconds(double flops);
double copy_seconds(double bytes, bool host); // within the GPU, or between it and the host
double message_arrives(double ready,
                       double bytes); // over the link of this GPU, by NCCL or by a copy engine: when?
double copy_arrives(double ready, double bytes);
void word_is_written(void *word, uint32_t value);
void word_is_seen(void *word, uint32_t value);
enum { SMALL_BYTES = 4096 }; // what is no larger is moved in any case: it is for the host

// memory.cc: what an address is. Aborts if it lies in an allocation that ends before address + bytes.
cudaMemoryType memory_type(const void *address, size_t bytes, const char *what);
void need_device(const void *address, size_t bytes,
                 const char *what); // aborts unless all of it is device memory

// fiber.cc: all threads of all blocks, on the calling OS thread and EMULATOR_THREADS - 1 more.
void run_grid(uint3 grid, uint3 block, const std::function<void()> &thread);

} // namespace emulator
#endif
