// What the files of the emulator share. The tests see only the CUDA headers in include/.
#ifndef EMULATOR_H
#define EMULATOR_H

#include "include/cuda_runtime.h"

namespace emulator {

// Prints what the program did that a GPU would not have forgiven, and aborts.
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

int64_t setting(const char *name, int64_t otherwise); // an environment variable
int devices();                                        // EMULATOR_DEVICES
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

// stream.cc: the stream's thread runs `work` after all that was enqueued before. Aborts on the default stream.
void enqueue(cudaStream_t stream, const char *what, std::function<void()> work);

// memory.cc: what an address is. Aborts if it lies in an allocation that ends before address + bytes.
cudaMemoryType memory_type(const void *address, size_t bytes, const char *what);
void need_device(const void *address, size_t bytes,
                 const char *what); // aborts unless all of it is device memory

// fiber.cc: all threads of all blocks, on the calling OS thread and EMULATOR_THREADS - 1 more.
void run_grid(uint3 grid, uint3 block, const std::function<void()> &thread);

} // namespace emulator
#endif
