// A host with the clock: its time, and the notes of what it enqueues. See clock.cc.
//
// A call takes a moment of the host's time, and a wait sets it to the time of the event waited for. So nothing sleeps, and a step
// of a tenth of a second takes about as long to estimate. clock_gettime returns this time to the thread that calls CUDA
// (emulator.mk makes the linker replace it), and the thread's sleeps advance only this time. All other threads have the machine's
// time.
#include "clock.h"
#include <cmath>
#include <cstddef>
#include <mutex>
#include <sched.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <thread>
#include <time.h>
#include <unistd.h>

extern "C" {
int __real_clock_gettime(clockid_t clock, struct timespec *time);
int __real_nanosleep(const struct timespec *wanted, struct timespec *left);
int __real_sched_yield(void);
}

namespace emulator {
namespace {

enum { FLUSH_BYTES = 8 << 10, FLUSH_US = 1000 };
const double YIELD_S = 0.3e-6, SEEN_S = 0.5e-6; // SEEN_S: until a host sees a word that another one wrote

double call_seconds(HostCall call) {
    static const double seconds[] = {(double)setting("EMULATOR_CALL_NS", 700) * 1e-9,
                                     (double)setting("EMULATOR_LAUNCH_NS", 3300) * 1e-9,
                                     (double)setting("EMULATOR_PRODUCT_NS", 4000) * 1e-9,
                                     (double)setting("EMULATOR_GROUP_NS", 6000) * 1e-9};
    return seconds[call];
}

int64_t calls = 0;               // of CUDA and NCCL, while the clock runs
double host_time = 0, begun = 0; // this host's time; the machine's time when the clock began
double known = 0;                // all events up to this time are in line.passed
bool runs = false;
thread_local bool is_host = false; // this thread calls CUDA, and the clock runs

struct Line { // to the clock
    std::mutex lock;
    std::string out;
    int socket = -1;
    uint64_t events = 0, asked = 0;
    std::vector<double> passed; // by event; NaN: not known
    std::thread keeper;
};
Line &line = *new Line;

void flush_held() {
    for (size_t done = 0; done < line.out.size();) {
        ssize_t n = send(line.socket, line.out.data() + done, line.out.size() - done, MSG_NOSIGNAL);
        if (n <= 0) fail("the clock is gone");
        done += (size_t)n;
    }
    line.out.clear();
}

// So notes reach the clock soon, whatever the host does next.
void flush_now_and_then() {
    for (;;) {
        usleep(FLUSH_US);
        std::lock_guard<std::mutex> hold(line.lock);
        if (line.socket < 0) return;
        flush_held();
    }
}

void end_line() {
    {
        std::lock_guard<std::mutex> hold(line.lock);
        flush_held();
        close(line.socket);
        line.socket = -1;
    }
    if (line.keeper.joinable()) line.keeper.join();
}

void hear(void *data, size_t bytes) {
    if (bytes > 0 && recv(line.socket, data, bytes, MSG_WAITALL) != (ssize_t)bytes) fail("the clock is gone");
}

int environment(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

void connect_line() {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    const char *job = getenv("PMIX_NAMESPACE"); // distinguishes mpiruns
    int length =
        snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "emulated-clock-%d-%s", (int)getppid(), job ? job : "");
    socklen_t bytes = (socklen_t)(offsetof(sockaddr_un, sun_path) + 1 + (size_t)length);
    int rank = environment("OMPI_COMM_WORLD_RANK", environment("RANK", 0)), device = 0;
    int ranks = environment("OMPI_COMM_WORLD_SIZE", environment("WORLD_SIZE", 1));
    if (rank == 0) {
        int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (bind(listener, (sockaddr *)&address, bytes) != 0 || listen(listener, ranks) != 0) fail("the clock cannot listen");
        line.keeper = std::thread(keep_time, listener, ranks);
    }
    line.socket = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    while (connect(line.socket, (sockaddr *)&address, bytes) != 0) usleep(1000);
    cudaGetDevice(&device);
    Hello hello = {rank, device, (int)getpid(), (int)syscall(SYS_gettid)};
    line.out.append((const char *)&hello, sizeof hello);
    flush_held();
    char all_are_here;
    hear(&all_are_here, 1);
    std::thread(flush_now_and_then).detach();
    atexit(end_line);
}

void put(const Note &note, const std::vector<Message> &messages) {
    std::lock_guard<std::mutex> hold(line.lock);
    line.out.append((const char *)&note, sizeof note);
    line.out.append((const char *)messages.data(), messages.size() * sizeof(Message));
    if (line.out.size() >= FLUSH_BYTES || note.kind >= ASK) flush_held();
}

// NaN: the event has not passed at the host's time.
double ask(uint64_t event, bool waits) {
    Note note = {};
    note.kind = ASK, note.id = event, note.at = host_time, note.waits = waits;
    put(note, {});
    Reply reply;
    hear(&reply, sizeof reply);
    std::vector<Passed> news(reply.news);
    hear(news.data(), news.size() * sizeof(Passed));
    for (const Passed &p : news) line.passed[p.event] = p.time;
    known = reply.now;
    return reply.time < 0 ? std::nan("") : reply.time;
}

} // namespace

bool imagined() {
    static const bool is = setting("EMULATOR_CLOCK", 0) != 0;
    return is;
}

bool clock_runs() {
    return runs;
}

void start_clock() {
    if (!imagined() || runs) return;
    cudaDeviceSynchronize(); // all earlier work
    struct timespec time;
    __real_clock_gettime(CLOCK_MONOTONIC, &time);
    begun = (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
    connect_line();
    runs = is_host = true;
}

int64_t host_calls_so_far() {
    return calls;
}

double host_clock() {
    return host_time;
}

void host_reaches(double time) {
    host_time = std::max(host_time, time);
}

void host_is_away(bool back) {
    Note note = {};
    note.kind = AWAY, note.at = host_time, note.back = back;
    if (runs) put(note, {});
}

double before_clock(double machine_s) {
    return machine_s - begun;
}

int64_t memory_mib() {
    return setting("EMULATOR_MEMORY", imagined() ? 80 << 10 : 8 << 10);
}

void host_calls(HostCall call) {
    if (runs) host_time += call_seconds(call), calls++;
}

void note_down(Note note, int stream, bool urgent, const std::vector<Message> &messages) {
    host_calls(note.call);
    note.at = host_time, note.stream = stream, note.urgent = urgent, note.messages = messages.size();
    line.asked = 0;
    put(note, messages);
}

enum { NO_STREAM = -1 }; // what the host does itself
static void put_own(Note note) {
    note.at = host_time, note.stream = NO_STREAM;
    put(note, {});
}

// When a word was written; stored beside its name.
static double &time_of(void *word) {
    return *((double *)word + 2);
}

void host_writes(uint32_t *word, uint32_t value) {
    time_of(word) = host_time;
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
    put_own(note(WRITE, word_name(word), value));
}

// A host that comes too early waits for the clock.
void host_awaits(uint32_t *word, uint32_t value) {
    if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != value) {
        uint64_t event = next_event();
        put_own(note(AWAIT, word_name(word), value));
        put_own(note(RECORD, event));
        event_time(event);
    }
    host_reaches(time_of(word) + SEEN_S);
}

uint64_t next_event() {
    line.passed.resize(line.events + 2, std::nan(""));
    return ++line.events;
}

// If a host asks twice for one event and enqueues nothing between, it only waits for that event.
bool event_has_passed(uint64_t event) {
    host_calls(CALL);
    if (std::isnan(line.passed[event]) && host_time > known) ask(event, line.asked == event);
    line.asked = event;
    return line.passed[event] <= host_time;
}

double event_time(uint64_t event) {
    if (std::isnan(line.passed[event])) ask(event, true);
    return line.passed[event];
}

void wait_for_event(uint64_t event) {
    host_calls(CALL);
    host_time = std::max(host_time, event_time(event));
}

// Words are in shared memory, at another address in each process. Each word has a cache line of its own, so there is room for a
// name beside it.
uint64_t word_name(void *word) {
    static uint64_t names = 0;
    uint64_t *place = (uint64_t *)(((uintptr_t)word + 15) / 8 * 8), unnamed = 0;
    uint64_t name = (uint64_t)getpid() << 32 | ++names;
    return __atomic_compare_exchange_n(place, &unnamed, name, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST) ? name : unnamed;
}

} // namespace emulator

// ------------------------------------------------------------------------------------------ replacements for the linker

using namespace emulator;

extern "C" {
int __wrap_clock_gettime(clockid_t clock, struct timespec *time) {
    if (!is_host || clock != CLOCK_MONOTONIC) return __real_clock_gettime(clock, time);
    int64_t ns = (int64_t)((begun + host_time) * 1e9);
    *time = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    return 0;
}

int __wrap_nanosleep(const struct timespec *wanted, struct timespec *left) {
    if (!imagined()) { // streams are threads here, which a polling thread would keep from the cores
        struct timespec longer = {wanted->tv_sec, wanted->tv_nsec < 200000 ? 200000 : wanted->tv_nsec};
        return __real_nanosleep(&longer, left);
    }
    if (!is_host) return __real_nanosleep(wanted, left);
    host_time += (double)wanted->tv_sec + (double)wanted->tv_nsec * 1e-9;
    return 0;
}

int __wrap_sched_yield(void) {
    if (!is_host) return __real_sched_yield();
    host_time += YIELD_S;
    return 0;
}
}
