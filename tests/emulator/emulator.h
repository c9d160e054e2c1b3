// The emulator: CUDA, cuBLASLt and NCCL on CPUs, as far as this project uses them, for machines without a GPU.
//
// g++ compiles the project's .cu files against the headers in include/ and links them to this library instead of NVIDIA's. All
// computation, the order of streams and the communication of ranks happen, so mistakes in them show. fiber.cc runs the threads of
// a block, stream.cc streams and events, memory.cc memory and its sharing between processes, blaslt.cc matrix products, nccl.cc
// communication; layers.cc replaces some functions of layers; clock.cc and clock_host.cc estimate how long everything would take
// on GPUs; emulator.mk builds.
//
// A test that passes here does not show:
//   - how fast anything is; times are those of a CPU, or those that clock.cc assumes
//   - that the GPU compiler accepts the code, and that registers and shared memory suffice (make cuda shows the first)
//   - errors that need a weak memory model: stores here are seen in order, and the threads of a block take turns, so a missing
//     __syncthreads shows only with EMULATOR_SEED, a missing fence between GPUs not at all
//   - that the host never touches device memory, which it could touch here
//   - that addresses are aligned as packs need it, unless built with SAN=alignment
//   - what the real libraries return or refuse beyond the checks here, and in which order they add
//   - anything about cuDNN: compiled without it, attention_cudnn.cu returns "not supported"
#pragma once

#include <vector>
#include "include/cuda_runtime.h"

// Shared by the emulator's files; tests see only the CUDA headers.
namespace emulator {

// Prints what the program did wrong, and aborts.
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

// An operation that a host enqueues, for the clock (clock.cc).
enum NoteKind { KERNEL, COPY, RECORD, AFTER, WRITE, AWAIT, GROUP, ASK, AWAY };
enum HostCall { CALL, LAUNCH, PRODUCT, EXCHANGE }; // an event or a word; a kernel or a copy; a product; a group of NCCL's
struct Blocks {                                    // `count` blocks, each of `seconds` on a multiprocessor
    int64_t count;
    double seconds;
};
struct Message {  // one end of it
    uint64_t key; // equal at both ends
    double bytes;
    int channels; // NCCL's
    bool sends;
};
struct Note {
    NoteKind kind;
    HostCall call;
    double at; // by the host's clock
    int stream;
    bool urgent;       // the stream
    bool timed;        // the event
    bool across;       // the copy goes to a peer
    bool waits;        // the host that asks does nothing else
    bool back;         // the host is no longer away
    Blocks blocks[2];  // KERNEL, GROUP
    double bytes;      // COPY
    uint64_t id;       // of an event or a word
    uint32_t value;    // of a word
    uint64_t messages; // number of Message that follow
};

// stream.cc: the stream's thread runs `work` after everything enqueued before; while the clock runs, the note is sent instead.
// Aborts on the default stream.
void enqueue(cudaStream_t stream, const char *what, const Note &note, std::function<void()> work,
             const std::vector<Message> &messages = {});

int multiprocessors();
// clock_host.cc
bool imagined(); // EMULATOR_CLOCK is set: the clock runs from the first kernel on
bool clock_runs();
void start_clock();
double host_clock();
void host_reaches(double time);
int64_t host_calls_so_far();
void host_is_away(bool back);                     // false: waits for another host from now on; true: no longer
void host_writes(uint32_t *word, uint32_t value); // a word that other hosts read
void host_awaits(uint32_t *word, uint32_t value);
void host_calls(HostCall call); // takes the host's time
void note_down(Note note, int stream, bool urgent, const std::vector<Message> &messages);
uint64_t next_event(); // its number
bool event_has_passed(uint64_t event);
double event_time(uint64_t event); // in seconds, like all times
double before_clock(double machine_s);
void wait_for_event(uint64_t event);
uint64_t word_name(void *word);
// clock.cc: how long each operation takes
Note note_kernel(double blocks, double threads);
Note note_product(double m, double n, double k, double times, double bytes, int most);
Note note_attention(double flops, double heads, double rows, bool backward);
Note note_copy_within(double bytes);
Note note_paced(double blocks, double seconds);
Note note_copy(double bytes, bool across); // by a copy engine
inline Note note(NoteKind kind, uint64_t id = 0, uint32_t value = 0, HostCall call = CALL) {
    Note n = {};
    n.kind = kind, n.call = call, n.id = id, n.value = value;
    return n;
}
enum { SMALL_BYTES = 16384 }; // up to this size data moves even with the clock: the host reads it, or words begin with 0

// memory.cc: the kind of memory at an address. Aborts if its allocation ends before address + bytes.
cudaMemoryType memory_type(const void *address, size_t bytes, const char *what);
bool is_a_peers(const void *address);
void need_device(const void *address, size_t bytes,
                 const char *what); // aborts unless all of it is device memory

// fiber.cc: all threads of all blocks, on the calling OS thread and EMULATOR_THREADS - 1 more.
void run_grid(uint3 grid, uint3 block, const std::function<void()> &thread);

} // namespace emulator
