// The emulator: CUDA, cuBLASLt and NCCL as far as this project uses them, on CPUs, for machines that have no GPU.
//
// The project's .cu files are compiled by g++ against the headers in include/ and linked to this library instead of
// NVIDIA's. What they compute, in which order streams may run, what ranks tell each other: all of it happens, and
// mistakes in it show. fiber.cc runs the threads of a block, stream.cc streams and events, memory.cc memory and what
// processes share of it, blaslt.cc matrix products, nccl.cc communication, layers.cc what stands before the layers; clock.cc
// and clock_host.cc say how long all of it would take on GPUs; emulator.mk builds.
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

#include <vector>
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

// What a host enqueues, for the clock (clock.cc), where time is imagined.
enum NoteKind { KERNEL, COPY, RECORD, AFTER, WRITE, AWAIT, GROUP, ASK, AWAY };
enum HostCall { CALL, LAUNCH, PRODUCT, EXCHANGE }; // an event or a word; a kernel or a copy; a product; a group of NCCL's
struct Blocks {                                    // so many, each of them so long on a multiprocessor
    int64_t count;
    double seconds;
};
struct Message {  // a half of it: one end
    uint64_t key; // both ends have the same
    double bytes;
    int channels; // of NCCL's
    bool sends;
};
struct Note {
    NoteKind kind;
    HostCall call;
    double at; // by the host's clock
    int stream;
    bool urgent, timed, across, waits,
        back; // the stream is; the event is; the copy goes to a peer; who asks does nothing else; the host is no longer away
    Blocks blocks[2];  // KERNEL, GROUP
    double bytes;      // COPY
    uint64_t id;       // of an event or a word
    uint32_t value;    // of a word
    uint64_t messages; // so many Message follow
};

// stream.cc: the stream's thread runs `work` after all that was enqueued before; where the clock runs, it is noted instead.
// Aborts on the default stream.
void enqueue(cudaStream_t stream, const char *what, const Note &note, std::function<void()> work,
             const std::vector<Message> &messages = {});

int multiprocessors();
// clock_host.cc
bool imagined(); // time is; the clock runs from the first kernel on
bool clock_runs();
void start_clock();
double host_clock();
void host_reaches(double time);
void host_is_away(bool back);                     // it waits for another host; or does so no longer
void host_writes(uint32_t *word, uint32_t value); // which other hosts see
void host_awaits(uint32_t *word, uint32_t value);
void host_calls(HostCall call); // takes the host's time
void note_down(Note note, int stream, bool urgent, const std::vector<Message> &messages);
uint64_t next_event(); // a number for it
bool event_has_passed(uint64_t event);
double event_time(uint64_t event); // seconds, as all times
double before_clock(double machine_s);
void wait_for_event(uint64_t event);
uint64_t word_name(void *word);
// clock.cc: what takes how long
Note note_kernel(double blocks, double threads);
Note note_product(double m, double n, double k, double times, double bytes, int most);
Note note_attention(double flops, double heads, double rows, bool backward);
Note note_copy_within(double bytes);
Note note_copy(double bytes, bool across); // by a copy engine
inline Note note(NoteKind kind, uint64_t id = 0, uint32_t value = 0, HostCall call = CALL) {
    Note n = {};
    n.kind = kind, n.call = call, n.id = id, n.value = value;
    return n;
}
enum { SMALL_BYTES = 4096 }; // what is no larger is moved in any case: it is for the host

// memory.cc: what an address is. Aborts if it lies in an allocation that ends before address + bytes.
cudaMemoryType memory_type(const void *address, size_t bytes, const char *what);
void need_device(const void *address, size_t bytes,
                 const char *what); // aborts unless all of it is device memory

// fiber.cc: all threads of all blocks, on the calling OS thread and EMULATOR_THREADS - 1 more.
void run_grid(uint3 grid, uint3 block, const std::function<void()> &thread);

} // namespace emulator
#endif
