// The clock: estimates when everything would happen on GPUs.
//
// EMULATOR_CLOCK=1: from the first kernel on nothing is computed or moved. Each host (the thread of a rank that calls CUDA) sends a
// note of everything that it enqueues, with the time on its own clock (clock_host.cc). One thread of rank 0, here, reads the notes
// of all ranks and computes when each operation would happen on GPUs and links as the table below assumes. So the time of a step
// follows from the dependencies: the program's streams, events and transports, which are all real. Steps can be estimated on any
// number of GPUs before there is one. Results are wrong by construction.
//
// Events happen in the order of their times, over all GPUs, so the same program gives the same times, however busy this machine is.
// The clock advances no further than the hosts' clocks, because a host may still enqueue something for that moment. It does not
// wait for hosts that wait for it, nor for hosts that wait in a library for another rank.
//
// A kernel consists of blocks that each take a multiprocessor for a while. Free multiprocessors go to the waiting kernel of the
// most urgent stream, and among these to the first; a running block keeps its multiprocessor. A copy by a copy engine takes none.
#include "clock.h"
#include <algorithm>
#include <cmath>
#include <deque>
#include <fcntl.h>
#include <functional>
#include <limits>
#include <list>
#include <memory>
#include <poll.h>
#include <queue>
#include <sys/socket.h>
#include <unistd.h>
#include <unordered_map>

namespace emulator {

// ---------------------------------------------------------------------------------------------------- the assumptions
// Sources: tests/bench/README.md. Times in seconds, rates in bytes or flops per second; EMULATOR_… variables change some.
namespace {

double setting_scaled(const char *name, double otherwise, double unit) {
    return (double)setting(name, (int64_t)(otherwise / unit + 0.5)) * unit;
}

// Multiprocessors and what runs on them
const int64_t MULTIPROCESSORS = setting("EMULATOR_MULTIPROCESSORS", 132);
enum { ATTENTION_BLOCKS = 132, PARTS_MAX = 16, PART_MIN = 256, ATTENTION_ROWS = 128, KERNEL_BYTES_PER_THREAD = 48 };
const double PRODUCT_RATE = setting_scaled("EMULATOR_TFLOPS", 770e12, 1e12); // with an infinite inner dimension
const double PRODUCT_DEPTH = 80; // time of a tile's begin and end, in elements of the inner dimension
const bool PERSISTENT = setting("EMULATOR_PERSISTENT", 1) != 0; // products: one block a multiprocessor until all tiles are done
const struct {
    double rows, columns, share; // a tile; the share of the rate that such tiles reach
} TILES[] = {{128, 256, 1}, {128, 128, 0.9}, {64, 128, 0.75}, {64, 64, 0.5}};
const double ATTENTION_RATE[] = {300e12, 210e12}; // forward; backward, deterministic; 64 channels a head
const double ATTENTION_S[] = {8e-6, 20e-6};       // and of each call
const double MEMORY_RATE = setting_scaled("EMULATOR_MEMORY_GBPS", 2.8e12, 1e9), MEMORY_WAVE_S = 4e-6;
const double GAP_S = 0.7e-6, KERNEL_S = 0.7e-6;                       // between two kernels of a stream; the shortest kernel
const double TIMED_EVENT_S = 2e-6, EVENT_S = 0.8e-6, WORD_S = 1.6e-6; // a timed event's pause; from an event to its waiter; a word
// Links of a GPU, each way, within a host and between hosts of HOST_GPUS each
const double LINK_RATE = setting_scaled("EMULATOR_GBPS", 400e9, 1e9), HOSTS_RATE = setting_scaled("EMULATOR_HOSTS_GBPS", 50e9, 1e9);
const int64_t HOST_GPUS = setting("EMULATOR_HOST_GPUS", 64);
const double NCCL_SHARE = 0.925;                        // of the link's rate
const double CHANNEL_RATE = 22e9;                       // of one NCCL channel
const double MEETING_S = 8e-6, HOSTS_MEETING_S = 25e-6; // of NCCL's two ends
enum { HOSTS_CHANNELS = 2 };                            // of NCCL, a peer, between hosts
const double COPY_S = 4e-6, PCIE_RATE = 50e9;           // the shortest copy; between a GPU and its host

const double NEVER = std::numeric_limits<double>::infinity();

// ---------------------------------------------------------------------------------------------------- what there is

struct Gpu;
struct Stream {
    Gpu *gpu;
    std::deque<std::vector<char>> line; // notes
    bool busy = false, urgent = false;
};

struct Kernel {
    Stream *stream;
    Blocks blocks[2];
    int64_t running = 0;
    bool holds; // keeps its multiprocessors until release(); `done` is called when it has them all
    std::function<void()> done;
    int64_t left() const { return blocks[0].count + blocks[1].count; }
};

struct Event {
    double time = NEVER;
    std::vector<Stream *> waiting;
};

struct Word {
    bool written = false;
    uint32_t value = 0;
    std::vector<std::pair<Stream *, uint32_t>> waiting;
    bool reaches(uint32_t wanted) const { return written && (int32_t)(value - wanted) >= 0; }
};

struct Gpu { // and its host
    enum { RUNS, ASKS, WAITS, ELSEWHERE, GONE } state = RUNS;
    int socket = -1;
    Hello hello = {};
    std::string unread;
    double reached = 0;     // by the host
    uint64_t asked = 0;     // an event
    double silent_s = 0;    // of this machine's time
    int64_t silent_cpu = 0; // CPU time that the host had used when it sent its last note
    std::vector<Passed> news;
    std::vector<Event> events;
    std::unordered_map<int32_t, Stream> streams;
    std::list<std::shared_ptr<Kernel>> waiting; // for multiprocessors
    int64_t free = MULTIPROCESSORS;
    double egress[2] = {0, 0}, ingress[2] = {0, 0}; // until when links are busy: within the host, between hosts
};

struct Group { // one of NCCL's kernels
    Gpu *gpu;
    std::shared_ptr<Kernel> kernel;
    size_t left;
};
struct Half {
    std::shared_ptr<Group> group;
    Message message;
};

std::deque<Gpu> gpus;
std::unordered_map<uint64_t, Word> words;
std::unordered_map<uint64_t, Half> halves; // whose other half has not come
double now = 0;

struct Alarm {
    double time;
    uint64_t number;
    std::function<void()> call;
    bool operator<(const Alarm &other) const { return time != other.time ? time > other.time : number > other.number; }
};
std::priority_queue<Alarm> agenda;

void at(double time, std::function<void()> call) {
    static uint64_t number = 0;
    agenda.push({std::max(time, now), number++, std::move(call)});
}

// ------------------------------------------------------------------------------------------------- multiprocessors

void give(Gpu &gpu) {
    for (auto it = gpu.waiting.begin(); it != gpu.waiting.end() && gpu.free > 0;) {
        std::shared_ptr<Kernel> kernel = *it;
        for (Blocks &blocks : kernel->blocks) {
            int64_t n = std::min(gpu.free, blocks.count);
            if (n == 0) continue;
            gpu.free -= n, blocks.count -= n, kernel->running += n;
            if (kernel->holds) continue;
            at(now + blocks.seconds, [&gpu, kernel, n] {
                gpu.free += n, kernel->running -= n;
                if (kernel->left() == 0 && kernel->running == 0) kernel->done();
                give(gpu);
            });
        }
        if (kernel->left() > 0) break; // nothing is free
        it = gpu.waiting.erase(it);
        if (!kernel->holds) continue;
        auto done = std::move(kernel->done);
        done();
    }
}

void wants_multiprocessors(const std::shared_ptr<Kernel> &kernel) {
    Gpu &gpu = *kernel->stream->gpu;
    auto place = gpu.waiting.end();
    if (kernel->stream->urgent)
        place = std::find_if(gpu.waiting.begin(), gpu.waiting.end(), [](const auto &other) { return !other->stream->urgent; });
    gpu.waiting.insert(place, kernel);
    give(gpu);
}

void release(const std::shared_ptr<Kernel> &kernel) {
    kernel->stream->gpu->free += kernel->running;
    give(*kernel->stream->gpu);
}

// ------------------------------------------------------------------------------------------------------------ links

// Each end of a link serves messages one after another. A message has arrived when both ends have served it, and NCCL's channels,
// which may be slower than the link, have moved it.
double arrives(Gpu &from, Gpu *to, double ready, double bytes, double share, double most) {
    bool hosts = to && from.hello.device / HOST_GPUS != to->hello.device / HOST_GPUS;
    double seconds = bytes / ((hosts ? HOSTS_RATE : LINK_RATE) * share), end = ready + bytes / most;
    end = std::max(end, from.egress[hosts] = std::max(ready, from.egress[hosts]) + seconds);
    if (to) end = std::max(end, to->ingress[hosts] = std::max(ready, to->ingress[hosts]) + seconds);
    return end;
}

void advance(Stream &stream);
void end_of(Stream *stream) {
    stream->busy = false;
    advance(*stream);
}

void half_is_done(const std::shared_ptr<Group> &group) {
    if (--group->left > 0) return;
    Stream *stream = group->kernel->stream;
    release(group->kernel);
    end_of(stream);
}

void meet(const std::shared_ptr<Group> &group, const Message &message) {
    auto other = halves.find(message.key);
    if (other == halves.end()) {
        halves[message.key] = {group, message};
        return;
    }
    std::shared_ptr<Group> theirs = other->second.group;
    halves.erase(other);
    Gpu *from = message.sends ? group->gpu : theirs->gpu, *to = message.sends ? theirs->gpu : group->gpu;
    bool hosts = from->hello.device / HOST_GPUS != to->hello.device / HOST_GPUS;
    double channels = hosts ? std::min<double>(message.channels, HOSTS_CHANNELS) : message.channels;
    double end =
        arrives(*from, to, now + (hosts ? HOSTS_MEETING_S : MEETING_S), message.bytes, NCCL_SHARE, channels * CHANNEL_RATE);
    at(end, [group, theirs] {
        half_is_done(group);
        half_is_done(theirs);
    });
}

// ---------------------------------------------------------------------------------------------------------- streams

void reply(Gpu &gpu, double time) {
    Reply head = {time, now, gpu.news.size()};
    std::string text((const char *)&head, sizeof head);
    text.append((const char *)gpu.news.data(), gpu.news.size() * sizeof(Passed));
    gpu.news.clear();
    gpu.state = Gpu::RUNS;
    gpu.silent_s = 0;
    for (size_t done = 0; done < text.size();) {
        ssize_t n = send(gpu.socket, text.data() + done, text.size() - done, MSG_NOSIGNAL);
        if (n <= 0) return; // it has ended; hear() notices
        done += (size_t)n;
    }
}

Event &event_of(Gpu &gpu, uint64_t number) {
    if (gpu.events.size() <= number) gpu.events.resize(number + 1024);
    return gpu.events[number];
}

void pass(Stream &stream, uint64_t number) {
    Gpu &gpu = *stream.gpu;
    Event &event = event_of(gpu, number);
    event.time = now;
    gpu.news.push_back({number, now});
    std::vector<Stream *> waiting = std::move(event.waiting);
    for (Stream *other : waiting) at(now + EVENT_S, [other] { end_of(other); });
    if ((gpu.state == Gpu::ASKS || gpu.state == Gpu::WAITS) && gpu.asked == number) {
        if (gpu.state == Gpu::WAITS) gpu.reached = now;
        reply(gpu, now);
    }
}

void set(uint64_t id, uint32_t value) {
    Word &word = words[id];
    word.written = true, word.value = value;
    auto waiting = std::move(word.waiting);
    word.waiting.clear();
    for (auto &[stream, wanted] : waiting)
        if (word.reaches(wanted))
            at(now + WORD_S, [stream = stream] { end_of(stream); });
        else
            word.waiting.push_back({stream, wanted});
}

void begin_group(Stream &stream, const Note &note, const Message *messages) {
    auto group = std::make_shared<Group>(Group{stream.gpu, nullptr, note.messages});
    std::vector<Message> all(messages, messages + note.messages);
    Kernel kernel = {&stream, {note.blocks[0], {0, 0}}, 0, true, {}};
    group->kernel = std::make_shared<Kernel>(kernel);
    group->kernel->done = [group, all] {
        for (const Message &message : all) meet(group, message);
        if (all.empty()) group->left = 1, at(now, [group] { half_is_done(group); });
    };
    at(now + GAP_S, [kernel = group->kernel] { wants_multiprocessors(kernel); });
}

// Begins the first operation in the stream's line. False: it takes no time.
bool begin(Stream &stream, const Note &note, const Message *messages) {
    Stream *self = &stream;
    switch (note.kind) {
    case KERNEL: {
        Kernel kernel = {self, {note.blocks[0], note.blocks[1]}, 0, false, [self] { end_of(self); }};
        at(now + GAP_S, [kernel = std::make_shared<Kernel>(kernel)] { wants_multiprocessors(kernel); });
        return true;
    }
    case COPY:
        at(note.across ? arrives(*stream.gpu, nullptr, now + COPY_S, note.bytes, 1, NEVER) : now + COPY_S + note.bytes / PCIE_RATE,
           [self] { end_of(self); });
        return true;
    case RECORD:
        at(now + (note.timed ? TIMED_EVENT_S : 0), [self, id = note.id] {
            pass(*self, id);
            end_of(self);
        });
        return true;
    case AFTER: {
        Event &event = event_of(*stream.gpu, note.id);
        if (note.id == 0 || event.time < NEVER) return false;
        event.waiting.push_back(self);
        return true;
    }
    case WRITE:
        at(now + WORD_S, [self, id = note.id, value = note.value] {
            set(id, value);
            end_of(self);
        });
        return true;
    case AWAIT: {
        Word &word = words[note.id];
        if (!word.reaches(note.value))
            word.waiting.push_back({self, note.value});
        else
            at(now + WORD_S, [self] { end_of(self); });
        return true;
    }
    case GROUP:
        begin_group(stream, note, messages);
        return true;
    case ASK:
    case AWAY:
        break;
    }
    return false;
}

void advance(Stream &stream) {
    while (!stream.busy && !stream.line.empty()) {
        Note note;
        memcpy(&note, stream.line.front().data(), sizeof note);
        if (note.at > now) {
            stream.busy = true;
            at(note.at, [&stream] { end_of(&stream); });
            return;
        }
        std::vector<char> text = std::move(stream.line.front());
        stream.line.pop_front();
        stream.busy = true;
        if (!begin(stream, note, (const Message *)(text.data() + sizeof note))) stream.busy = false;
    }
}

// ------------------------------------------------------------------------------------------------------------ hosts

void read_note(Gpu &gpu, const Note &note, const char *text, size_t bytes) {
    gpu.reached = std::max(note.at, gpu.reached);
    gpu.state = Gpu::RUNS;
    if (note.kind == AWAY) {
        if (!note.back) gpu.state = Gpu::ELSEWHERE;
        return;
    }
    if (note.kind != ASK) {
        Stream &stream = gpu.streams[note.stream];
        stream.gpu = &gpu, stream.urgent = note.urgent;
        stream.line.emplace_back(text, text + bytes);
        return advance(stream);
    }
    gpu.asked = note.id, gpu.reached = note.at;
    gpu.state = note.waits ? Gpu::WAITS : Gpu::ASKS;
    if (event_of(gpu, note.id).time < NEVER) reply(gpu, event_of(gpu, note.id).time);
}

// False: nothing new.
bool hear(Gpu &gpu) {
    char buffer[65536];
    ssize_t n = recv(gpu.socket, buffer, sizeof buffer, MSG_DONTWAIT);
    if (n < 0) return false;
    if (n == 0) {
        gpu.state = Gpu::GONE;
        return true;
    }
    gpu.silent_s = 0;
    gpu.unread.append(buffer, (size_t)n);
    size_t begin = 0;
    for (Note note; gpu.unread.size() - begin >= sizeof note;) {
        memcpy(&note, gpu.unread.data() + begin, sizeof note);
        size_t bytes = sizeof note + note.messages * sizeof(Message);
        if (gpu.unread.size() - begin < bytes) break;
        read_note(gpu, note, gpu.unread.data() + begin, bytes);
        begin += bytes;
    }
    gpu.unread.erase(0, begin);
    return true;
}

// CPU time of the host's thread in nanoseconds; *sleeps: it sleeps in the kernel.
int64_t cpu_of(const Gpu &gpu, bool *sleeps) {
    char path[64], text[512] = "";
    snprintf(path, sizeof path, "/proc/%d/task/%d/stat", gpu.hello.process, gpu.hello.thread);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file >= 0 && read(file, text, sizeof text - 1) > 0) {
        const char *state = strrchr(text, ')');
        *sleeps = state && state[1] && state[2] == 'S';
    }
    if (file >= 0) close(file);
    snprintf(path, sizeof path, "/proc/%d/task/%d/schedstat", gpu.hello.process, gpu.hello.thread);
    file = open(path, O_RDONLY | O_CLOEXEC);
    long long ns = 0;
    if (file >= 0 && read(file, text, sizeof text - 1) > 0) sscanf(text, "%lld", &ns);
    if (file >= 0) close(file);
    return ns;
}

// Called when no note has come for LOOK_MS. A host that sleeps for long, or is busy otherwise, waits for another rank in a library,
// and the clock does not wait for it. (Calls of MPI_Allgather send notes: layers.cc.)
enum { LOOK_MS = 3, LOOKS = 200, ELSEWHERE_NS = 500000000 };

void look_at_hosts() {
    for (Gpu &gpu : gpus) {
        if (gpu.state != Gpu::RUNS) continue;
        bool sleeps = false;
        int64_t cpu = cpu_of(gpu, &sleeps);
        if (gpu.silent_s == 0) gpu.silent_cpu = cpu;
        gpu.silent_s += 1;
        bool still = sleeps && cpu - gpu.silent_cpu < 1000000 && gpu.silent_s >= LOOKS;
        if (still || cpu - gpu.silent_cpu > ELSEWHERE_NS) gpu.state = Gpu::ELSEWHERE;
    }
}

// Advances as far as all hosts have come. False: nothing happened.
bool go_on() {
    bool happened = false;
    for (;;) {
        double limit = NEVER, away = NEVER;
        bool wanted = false;
        for (const Gpu &gpu : gpus) {
            if (gpu.state == Gpu::RUNS || gpu.state == Gpu::ASKS) limit = std::min(limit, gpu.reached);
            if (gpu.state == Gpu::ELSEWHERE) away = std::min(away, gpu.reached);
            wanted |= gpu.state == Gpu::ASKS || gpu.state == Gpu::WAITS;
        }
        if (!wanted) limit = std::min(limit, away); // nobody asks about later times
        if (!agenda.empty() && agenda.top().time <= limit) {
            auto call = agenda.top().call;
            now = agenda.top().time;
            agenda.pop();
            call();
            happened = true;
            continue;
        }
        bool replied = false;
        for (Gpu &gpu : gpus)
            if (gpu.state == Gpu::ASKS && gpu.reached <= limit) now = std::max(now, gpu.reached), reply(gpu, -1), replied = true;
        if (!replied) return happened;
        happened = true;
    }
}

} // namespace

void keep_time(int listener, int ranks) {
    for (int i = 0; i < ranks; i++) {
        gpus.emplace_back();
        Gpu &gpu = gpus.back();
        gpu.socket = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
        if (gpu.socket < 0 || recv(gpu.socket, &gpu.hello, sizeof gpu.hello, MSG_WAITALL) != sizeof gpu.hello)
            fail("clock: a rank does not come");
    }
    close(listener);
    for (Gpu &gpu : gpus) // everything before the clock has happened on all ranks
        if (send(gpu.socket, "", 1, MSG_NOSIGNAL) != 1) fail("clock: a rank is gone");
    std::sort(gpus.begin(), gpus.end(), [](const Gpu &a, const Gpu &b) { return a.hello.rank < b.hello.rank; });
    for (;;) {
        std::vector<pollfd> open;
        for (Gpu &gpu : gpus)
            if (gpu.state != Gpu::GONE) open.push_back({gpu.socket, POLLIN, 0});
        if (open.empty()) break;
        if (poll(open.data(), (nfds_t)open.size(), LOOK_MS) == 0) look_at_hosts();
        for (bool heard = true; heard;) { // a host that is back has sent that before any other continues
            heard = false;
            for (Gpu &gpu : gpus)
                while (gpu.state != Gpu::GONE && hear(gpu)) heard = true;
        }
        go_on();
    }
    for (Gpu &gpu : gpus) close(gpu.socket);
}

// ------------------------------------------------------------------------------------------------------------ costs

namespace {
Note kernel_note(Blocks first, Blocks second = {0, 0}) {
    Note note = {};
    note.kind = KERNEL, note.call = LAUNCH;
    note.blocks[0] = first, note.blocks[1] = second;
    return note;
}

// At most `blocks` blocks at a time, in waves of some microseconds, so that other kernels find room.
Note memory_note(double bytes, double blocks) {
    double at_once = std::min<double>((double)MULTIPROCESSORS, std::max(blocks, 1.0));
    double seconds = KERNEL_S + bytes / MEMORY_RATE, waves = std::ceil(seconds / MEMORY_WAVE_S);
    return kernel_note({(int64_t)(at_once * waves), seconds / waves});
}
} // namespace

int multiprocessors() {
    return imagined() ? (int)MULTIPROCESSORS : 5;
}

Note note_kernel(double blocks, double threads) {
    return memory_note(blocks * threads * KERNEL_BYTES_PER_THREAD, blocks);
}

Note note_copy_within(double bytes) { // the driver's kernel
    return memory_note(2 * bytes, (double)MULTIPROCESSORS);
}

Note note_paced(double blocks, double seconds) {
    return kernel_note({(int64_t)blocks, KERNEL_S + seconds});
}

Note note_copy(double bytes, bool across) {
    Note note = {};
    note.kind = COPY, note.call = LAUNCH, note.bytes = bytes, note.across = across;
    return note;
}

// `times` products at once, with the best shape of tiles and number of parts of the inner dimension. Not shorter than the time of
// their bytes. most: multiprocessors that it may take; 0: all.
Note note_product(double m, double n, double k, double times, double bytes, int most) {
    int64_t at_once = most > 0 ? std::min<int64_t>(most, MULTIPROCESSORS) : MULTIPROCESSORS, tiles = 0;
    double best = NEVER, seconds = 0, sums = 0;
    for (const auto &tile : TILES)
        for (double parts = 1; parts == 1 || (parts <= PARTS_MAX && k >= parts * PART_MIN); parts *= 2) {
            double count = std::ceil(m / tile.rows) * std::ceil(n / tile.columns) * parts * times;
            double flops = 2 * tile.rows * tile.columns * (k / parts + PRODUCT_DEPTH);
            double each = flops * (double)MULTIPROCESSORS / (PRODUCT_RATE * tile.share);
            double adding =
                parts > 1 ? 2 * parts * times * m * n * (double)sizeof(float) / MEMORY_RATE : 0; // fp32, written and read
            double total = std::ceil(count / (double)at_once) * each + adding;
            if (total < best) best = total, seconds = each, tiles = (int64_t)count, sums = adding;
        }
    seconds *= std::max(best, bytes / MEMORY_RATE) / (best - sums); // the longer of both, spread over the tiles
    if (!PERSISTENT) return kernel_note({tiles, seconds + KERNEL_S});
    int64_t blocks = std::min(tiles, at_once), more = tiles % blocks, each = tiles / blocks;
    return kernel_note({more, (double)(each + 1) * seconds + KERNEL_S}, {blocks - more, (double)each * seconds + KERNEL_S});
}

Note note_attention(double flops, double heads, double rows, bool backward) {
    double blocks = heads * std::ceil(rows / ATTENTION_ROWS),
           start = ATTENTION_S[backward] / std::ceil(blocks / (double)MULTIPROCESSORS);
    return kernel_note({(int64_t)blocks, start + flops / blocks * ATTENTION_BLOCKS / ATTENTION_RATE[backward]});
}

} // namespace emulator
