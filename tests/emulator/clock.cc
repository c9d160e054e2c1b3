// The clock of a GPU that is imagined.
//
// EMULATOR_CLOCK=1: kernels, products and large copies compute nothing and take the time that they would take on GPUs as
// below, connected as below. What a step takes is then a matter of what waits for what: of the program's own streams,
// events and transports, which are all real. So the overlap of computation and transfers can be looked at, on any number
// of GPUs, before there is one. Results are wrong by construction (memory stays zero), and the times are those of a
// model: it knows no interference, no clock rates, no caches.
//
// Every stream has a clock. An operation begins when what is ahead of it has ended, on its own stream or, by an event, on
// another; when what it receives has been sent; and not before the host has enqueued it. The host has a clock, too: a
// call takes a moment of it, a wait sets it to the time of what was waited for. So nothing sleeps, a step of a tenth of a
// second takes about as long to tell, and how threads of this machine are scheduled changes no figure, but for two
// transfers that want one link at one time: whichever comes first here has it.
//
// The host's clock is what clock_gettime returns to the thread that calls CUDA (emulator.mk has the linker put it here);
// its sleeps pass on that clock alone. All other threads have this machine's.
#include "emulator.h"
#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <sched.h>
#include <time.h>

namespace emulator {
namespace {

// An H100 as products, attention and copies usually find it, and NVLink. EMULATOR_TFLOPS, EMULATOR_GBPS and what the host's
// calls take, EMULATOR_…_NS, can be told otherwise.
enum { MULTIPROCESSORS = 132, LINK_INTERVALS_MAX = 4096, KERNEL_BYTES_PER_THREAD = 48 };
enum { PARTS_MAX = 16, PART_MIN = 256 };
const struct {
    double rows, columns, share; // of a tile; of the rate that a full wave of such tiles reaches
} TILES[] = {{128, 256, 1}, {128, 128, 0.9}, {64, 128, 0.75}, {64, 64, 0.5}};
const double ATTENTION_SHARE = 0.5; // of the rate of products
const double MEMORY_RATE = 3.0e12, HOST_LINK_RATE = 50e9;
const double KERNEL_S = 2e-6, COPY_S = 2e-6, MEETING_S = 8e-6, WORD_S = 1e-6; // the least that each takes
const double YIELD_S = 0.3e-6;

double product_rate() {
    static const double rate = (double)setting("EMULATOR_TFLOPS", 600) * 1e12;
    return rate;
}
double link_rate() { // of a GPU, each way
    static const double rate = (double)setting("EMULATOR_GBPS", 370) * 1e9;
    return rate;
}
double call_seconds(HostCall call) {
    static const double seconds[] = {(double)setting("EMULATOR_CALL_NS", 700) * 1e-9,
                                     (double)setting("EMULATOR_LAUNCH_NS", 2500) * 1e-9,
                                     (double)setting("EMULATOR_GROUP_NS", 6000) * 1e-9};
    return seconds[call];
}

thread_local double stream_time = 0; // of the stream that this thread serves
thread_local double host_time = 0;
thread_local bool is_host = false; // calls CUDA

// Who sends takes what is left of the link from some time on; one that comes later may have what lies between.
struct Link {
    std::mutex lock;
    std::map<double, double> busy; // from, until; apart from each other

    double send(double from, double seconds) {
        std::lock_guard<std::mutex> hold(lock);
        auto next = busy.upper_bound(from);
        if (next != busy.begin()) from = std::max(from, std::prev(next)->second);
        while (seconds > 0) {
            double room = next == busy.end() ? seconds : std::min(seconds, next->first - from);
            if (room > 0) take(from, from + room);
            seconds -= room;
            from += room;
            if (seconds <= 0) break;
            from = next->second;
            ++next;
        }
        while (busy.size() > LINK_INTERVALS_MAX) busy.erase(busy.begin());
        return from;
    }
    void take(double from, double until) {
        auto before = busy.lower_bound(from);
        if (before != busy.begin() && std::prev(before)->second == from)
            std::prev(before)->second = until;
        else
            busy[from] = until;
    }
};
Link &egress = *new Link; // never destroyed: at exit streams may still be at work

} // namespace

bool imagined() {
    static const bool is = setting("EMULATOR_CLOCK", 0) != 0;
    return is;
}

int multiprocessors() {
    return imagined() ? MULTIPROCESSORS : 5;
}

int64_t memory_mib() {
    return setting("EMULATOR_MEMORY", imagined() ? 80 << 10 : 8 << 10);
}

// ----------------------------------------------------------------------------------------------------------- clocks

double stream_clock() {
    return stream_time;
}
void stream_reaches(double time) {
    stream_time = std::max(stream_time, time);
}
void stream_passes(double seconds) {
    stream_time += seconds;
}

void host_reaches(double time) {
    host_time = std::max(host_time, time);
}
double host_calls(HostCall call) {
    is_host = true;
    return host_time += call_seconds(call);
}

// ------------------------------------------------------------------------------------------------------------ costs

double kernel_seconds(double threads) {
    return KERNEL_S + threads * KERNEL_BYTES_PER_THREAD / MEMORY_RATE;
}

// `times` products at once: tiles on multiprocessors, in whole waves; their shape, and in how many parts the inner dimension is
// cut, as suits best. As long as their bytes take, at least.
double product_seconds(double m, double n, double k, double times, double bytes) {
    double best = 1e300;
    for (const auto &tile : TILES)
        for (double parts = 1; parts == 1 || (parts <= PARTS_MAX && k >= parts * PART_MIN); parts *= 2) {
            double tiles = std::ceil(m / tile.rows) * std::ceil(n / tile.columns) * parts * times;
            double waves = std::ceil(tiles / MULTIPROCESSORS);
            double flops = waves * MULTIPROCESSORS * 2 * tile.rows * tile.columns * k / parts;
            double sums = 0; // in fp32, written, and read to be added
            if (parts > 1) sums = 2 * parts * times * m * n * (double)sizeof(float);
            best = std::min(best, flops / (product_rate() * tile.share) + sums / MEMORY_RATE);
        }
    return KERNEL_S + std::max(best, bytes / MEMORY_RATE);
}

double attention_seconds(double flops) {
    return KERNEL_S + flops / (product_rate() * ATTENTION_SHARE);
}

double copy_seconds(double bytes, bool host) {
    return COPY_S + (host ? bytes / HOST_LINK_RATE : 2 * bytes / MEMORY_RATE);
}

double message_arrives(double ready, double bytes) {
    return egress.send(ready + MEETING_S, bytes / link_rate());
}

double copy_arrives(double ready, double bytes) {
    return egress.send(ready + COPY_S, bytes / link_rate());
}

// A word of memory and the times at which it got its last values, which lie behind it: whoever uses such words gives each
// a cache line of its own, and none is written more than WORD_VALUES times before all who wait for it have seen it.
enum { WORD_VALUES = 4 };

static double *word_times(void *word) {
    return (double *)(((uintptr_t)word + 15) / 8 * 8);
}

void word_is_written(void *word, uint32_t value) {
    stream_passes(WORD_S);
    word_times(word)[value % WORD_VALUES] = stream_time;
}

void word_is_seen(void *word, uint32_t value) {
    stream_reaches(word_times(word)[value % WORD_VALUES]);
    stream_passes(WORD_S);
}

} // namespace emulator

// ------------------------------------------------------------------------------------------- what the linker puts here

using namespace emulator;

extern "C" {
int __real_clock_gettime(clockid_t clock, struct timespec *time);
int __real_nanosleep(const struct timespec *wanted, struct timespec *left);
int __real_sched_yield(void);

int __wrap_clock_gettime(clockid_t clock, struct timespec *time) {
    if (!is_host || clock != CLOCK_MONOTONIC || !imagined()) return __real_clock_gettime(clock, time);
    int64_t ns = (int64_t)(host_time * 1e9) + 1000000000; // never zero
    *time = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    return 0;
}

int __wrap_nanosleep(const struct timespec *wanted, struct timespec *left) {
    if (!imagined()) { // who polls for the GPU takes the cores from it here: its streams are threads
        struct timespec longer = {wanted->tv_sec, wanted->tv_nsec < 200000 ? 200000 : wanted->tv_nsec};
        return __real_nanosleep(&longer, left);
    }
    if (!is_host) return __real_nanosleep(wanted, left);
    host_time += (double)wanted->tv_sec + (double)wanted->tv_nsec * 1e-9;
    return 0;
}

int __wrap_sched_yield(void) {
    if (!is_host || !imagined()) return __real_sched_yield();
    host_time += YIELD_S;
    return 0;
}
}
