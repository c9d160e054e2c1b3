// NCCL between processes, over sockets.
//
// Every ordered pair of ranks has a connection of its own, named in the unique id. An operation is cut into halves: a send to one
// rank, a receive from one rank. The two halves of a transfer first exchange their descriptions, so a send never completes before
// its receive has begun, and sizes or operations that do not match end the run with a message. Halves between one pair meet in the
// order issued. The halves of one group move together and complete together: later work in the stream waits for all of them, as
// after NCCL's single kernel.
//
// The stream's thread does the work when the stream comes to it. Operations of one communicator run in the order issued, also those
// on different streams, as in NCCL.
//
// All communicators of a process share the multiprocessors of a GPU, one for each block of a kernel. An operation begins
// when there is room for all of its blocks, and keeps it until the other ranks' parts have come. So operations of several
// communicators that begin in another order on another rank may wait for each other for ever, as on a GPU. With
// NCCL_LAUNCH_ORDER_IMPLICIT=1, as with NCCL, they begin in the order issued.
//
// Reductions add in the order of ranks, starting with rank 0; bf16 is rounded after each addition. NCCL has another order, so sums
// differ in their last bits.
//
// A communicator with blocking = 0 begins an operation only after the second call of ncclCommGetAsyncError: a program that
// continues after ncclInProgress without asking finds the work missing from the stream. When a peer is gone, operations hang,
// ncclCommGetAsyncError reports it, and ncclCommAbort ends the wait.
#include "emulator.h"
#include "include/cuda_bf16.h"
#include "include/nccl.h"
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <thread>
#include <unistd.h>
#include <vector>

using namespace emulator;

namespace {

enum { P2P_CHANNELS = 64, COLLECTIVE_CHANNELS = 24 }; // of a communicator, unless its configuration sets fewer; of a collective
enum Operation : uint32_t { SENDRECV, ALLGATHER, REDUCE_SCATTER, ALLREDUCE, BROADCAST };
const char *const operation_name[] = {"send and receive", "all-gather", "reduce-scatter", "all-reduce", "broadcast"};

struct Header {
    uint64_t bytes;
    uint32_t number; // of the transfer between the two
    Operation operation;
};

struct Half {
    bool sends;
    int peer;
    char *data;
    size_t bytes;
    Operation operation;
    bool begun = false;
    Header mine = {}, theirs = {};
    size_t said = 0, heard = 0, moved = 0; // bytes of my description, of theirs, of data
    size_t moving() const { return imagined() && bytes > SMALL_BYTES ? 0 : bytes; }
    bool done() const { return said == sizeof mine && heard == sizeof theirs && moved == moving(); }
};

struct Call { // one call of the API, remembered until the group ends
    Operation operation;
    const char *send; // nullptr: a receive
    char *recv;       // nullptr: a send
    size_t count;
    ncclDataType_t type;
    ncclRedOp_t reduction;
    int peer; // or root
    ncclComm_t comm;
    cudaStream_t stream;
};

struct Places {
    std::mutex lock;
    std::condition_variable changed;
    uint64_t issued = 0, begun = 0;
    int taken = 0;
    const int all = multiprocessors();
    const bool ordered = setting("NCCL_LAUNCH_ORDER_IMPLICIT", 0) != 0;

    uint64_t issue() {
        std::lock_guard<std::mutex> hold(lock);
        return issued++;
    }
    void take(uint64_t turn, int blocks) {
        std::unique_lock<std::mutex> hold(lock);
        changed.wait(hold, [&] { return (!ordered || begun >= turn) && (taken == 0 || taken + blocks <= all); });
        begun++, taken += blocks;
        changed.notify_all();
    }
    void give_back(int blocks) {
        std::lock_guard<std::mutex> hold(lock);
        taken -= blocks;
        changed.notify_all();
    }
};

Places &places() {
    static Places p;
    return p;
}

size_t size_of(ncclDataType_t type) {
    static const size_t size[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return type <= ncclBfloat16 ? size[type] : 0;
}

} // namespace

struct ncclComm {
    int rank, ranks;
    char name[40];
    bool blocking;
    std::vector<int> to, from;                        // connections by peer; -1: itself
    std::vector<uint32_t> sent, received;             // transfers begun
    std::vector<uint32_t> noted_sent, noted_received; // transfers noted for the clock
    int blocks_max = 0;                               // of a kernel; 0: NCCL chooses
    std::atomic<ncclResult_t> result{ncclSuccess};
    std::atomic<bool> aborted{false};
    std::thread setup; // of a non-blocking communicator
    std::mutex lock;
    std::condition_variable changed;
    uint64_t issued = 0, served = 0;
    std::deque<std::function<void()>> held; // not begun yet, blocking = 0
    int asked = 0;

    // Moves all halves; returns when all are done, or aborted.
    void move(std::vector<Half> &halves);
    void progress(Half &half);
    void copy_to_self(std::vector<Half> &halves);
    void run(const std::vector<Call> &calls);
    void collective(const Call &call);
    std::vector<Half> halves_of(const std::vector<Call> &calls), halves_of_collective(const Call &call, char *parts);
    struct Blocks {
        int of_kernel, of_message;
    };
    Blocks blocks_of(const std::vector<Call> &calls) const;
    void note(const std::vector<Call> &calls, cudaStream_t stream);
    void lost() { result = ncclRemoteError; }
    void drain() {
        std::unique_lock<std::mutex> hold(lock);
        changed.wait(hold, [this] { return served == issued; });
    }
};

// -------------------------------------------------------------------------------------------------------- transfers

void ncclComm::progress(Half &half) {
    int connection = half.sends ? to[(size_t)half.peer] : from[(size_t)half.peer];
    auto push = [&](const void *data, size_t bytes, size_t &done) {
        ssize_t n = done < bytes ? send(connection, (const char *)data + done, bytes - done, MSG_NOSIGNAL | MSG_DONTWAIT) : 0;
        if (n > 0) done += (size_t)n;
        if (n < 0 && errno != EAGAIN && errno != EINTR) lost();
    };
    auto pull = [&](void *data, size_t bytes, size_t &done) {
        ssize_t n = done < bytes ? recv(connection, (char *)data + done, bytes - done, MSG_DONTWAIT) : 0;
        if (n > 0) done += (size_t)n;
        if ((n == 0 && done < bytes) || (n < 0 && errno != EAGAIN && errno != EINTR)) lost();
    };
    if (!half.begun) // the first in line now
        half.mine = {half.bytes, (half.sends ? sent : received)[(size_t)half.peer]++, half.operation};
    half.begun = true;
    push(&half.mine, sizeof half.mine, half.said);
    if (half.heard < sizeof half.theirs) {
        pull(&half.theirs, sizeof half.theirs, half.heard);
        if (half.heard < sizeof half.theirs) return;
        const Header &m = half.mine, &t = half.theirs;
        if (m.bytes != t.bytes || m.number != t.number || m.operation != t.operation)
            fail("NCCL: rank %d of %d %s %zu bytes (%s) %s rank %d, which %s %zu bytes (%s)", rank, ranks,
                 half.sends ? "sends" : "expects", (size_t)m.bytes, operation_name[m.operation], half.sends ? "to" : "from",
                 half.peer, half.sends ? "expects" : "sends", (size_t)t.bytes, operation_name[t.operation]);
    }
    if (half.said < sizeof half.mine) return;
    half.sends ? push(half.data, half.moving(), half.moved) : pull(half.data, half.moving(), half.moved);
}

void ncclComm::copy_to_self(std::vector<Half> &halves) {
    std::deque<Half *> sends, receives;
    for (Half &half : halves)
        if (half.peer == rank) (half.sends ? sends : receives).push_back(&half);
    if (sends.size() != receives.size())
        fail("NCCL: rank %d sends %zu times to itself and receives %zu times in one group", rank, sends.size(), receives.size());
    for (size_t i = 0; i < sends.size(); i++) {
        if (sends[i]->bytes != receives[i]->bytes)
            fail("NCCL: rank %d sends %zu bytes to itself and expects %zu", rank, sends[i]->bytes, receives[i]->bytes);
        if (sends[i]->moving()) memmove(receives[i]->data, sends[i]->data, sends[i]->bytes);
    }
}

void ncclComm::move(std::vector<Half> &halves) {
    copy_to_self(halves);
    std::vector<std::deque<Half *>> lines((size_t)ranks * 2); // one for each connection
    size_t left = 0;
    for (Half &half : halves)
        if (half.peer != rank) lines[(size_t)(half.peer * 2 + half.sends)].push_back(&half), left++;
    while (left > 0 && !aborted) {
        std::vector<pollfd> wanted;
        for (auto &line : lines) {
            while (!line.empty() && result == ncclSuccess) {
                progress(*line.front());
                if (!line.front()->done()) break;
                line.pop_front(), left--;
            }
            if (line.empty()) continue;
            Half &h = *line.front();
            bool writes = h.said < sizeof h.mine || (h.sends && h.heard == sizeof h.theirs);
            wanted.push_back({h.sends ? to[(size_t)h.peer] : from[(size_t)h.peer], (short)(writes ? POLLOUT : POLLIN), 0});
        }
        if (result != ncclSuccess)
            usleep(1000); // a peer is gone: hang until aborted
        else if (left > 0)
            poll(wanted.data(), wanted.size(), 5);
    }
}

// -------------------------------------------------------------------------------------------------------- operations

template <typename T> static T combine(T a, T b, ncclRedOp_t op) {
    return op == ncclSum ? T(a + b) : op == ncclMax ? std::max(a, b) : std::min(a, b);
}

template <typename T> static void reduce(T *out, const std::vector<const void *> &in, size_t count, ncclRedOp_t op) {
    for (size_t i = 0; i < count; i++) {
        T value = ((const T *)in[0])[i];
        for (size_t r = 1; r < in.size(); r++) value = combine(value, ((const T *)in[r])[i], op);
        out[i] = value;
    }
}

static void reduce(void *out, const std::vector<const void *> &in, size_t count, ncclDataType_t type, ncclRedOp_t op) {
    switch (type) {
    case ncclInt8:
        return reduce((int8_t *)out, in, count, op);
    case ncclUint8:
        return reduce((uint8_t *)out, in, count, op);
    case ncclInt32:
        return reduce((int32_t *)out, in, count, op);
    case ncclUint32:
        return reduce((uint32_t *)out, in, count, op);
    case ncclInt64:
        return reduce((int64_t *)out, in, count, op);
    case ncclUint64:
        return reduce((uint64_t *)out, in, count, op);
    case ncclFloat32:
        return reduce((float *)out, in, count, op);
    case ncclFloat64:
        return reduce((double *)out, in, count, op);
    case ncclBfloat16:
        return reduce((__nv_bfloat16 *)out, in, count, op);
    case ncclFloat16:
        break;
    }
    fail("NCCL: a reduction of type %d", (int)type);
}

// Blocks of `bytes`: the one for rank i is at send + i · send_step, the one from it goes to recv + i · recv_step.
static std::vector<Half> all_to_all(const ncclComm &comm, Operation operation, const char *send, size_t send_step, char *recv,
                                    size_t recv_step, size_t bytes) {
    std::vector<Half> halves;
    for (int i = 0; i < comm.ranks; i++) {
        halves.push_back({true, i, (char *)send + (size_t)i * send_step, bytes, operation});
        halves.push_back({false, i, recv + (size_t)i * recv_step, bytes, operation});
    }
    return halves;
}

// The transfers of a collective. parts: room for the blocks of all ranks, if it reduces.
std::vector<Half> ncclComm::halves_of_collective(const Call &call, char *parts) {
    size_t bytes = call.count * size_of(call.type);
    if (call.operation == ALLGATHER) return all_to_all(*this, ALLGATHER, call.send, 0, call.recv, bytes, bytes);
    size_t step = call.operation == REDUCE_SCATTER ? bytes : 0;
    return all_to_all(*this, call.operation, call.send, step, parts, bytes, bytes);
}

void ncclComm::collective(const Call &call) {
    size_t bytes = call.count * size_of(call.type);
    std::vector<char> parts(call.operation == ALLGATHER ? 0 : (size_t)ranks * bytes);
    std::vector<Half> halves = halves_of_collective(call, parts.data());
    move(halves);
    if (aborted || call.operation == ALLGATHER || (imagined() && bytes > SMALL_BYTES)) return;
    std::vector<const void *> in;
    for (int i = 0; i < ranks; i++) in.push_back(parts.data() + (size_t)i * bytes);
    reduce(call.recv, in, call.count, call.type, call.reduction);
}

// The transfers of one group's sends, receives and broadcasts, which move beside each other.
std::vector<Half> ncclComm::halves_of(const std::vector<Call> &calls) {
    std::vector<Half> halves;
    for (const Call &call : calls) {
        size_t bytes = call.count * size_of(call.type);
        if (call.operation == BROADCAST) {
            for (int i = 0; i < ranks && call.peer == rank; i++) halves.push_back({true, i, (char *)call.send, bytes, BROADCAST});
            halves.push_back({false, call.peer, call.recv, bytes, BROADCAST});
        } else if (call.operation == SENDRECV)
            halves.push_back({call.send != nullptr, call.peer, call.send ? (char *)call.send : call.recv, bytes, SENDRECV});
    }
    return halves;
}

// The calls of one group on one communicator and stream.
void ncclComm::run(const std::vector<Call> &calls) {
    for (const Call &call : calls)
        if (call.operation != SENDRECV && call.operation != BROADCAST) collective(call);
    std::vector<Half> halves = halves_of(calls);
    move(halves);
}

// The blocks of a kernel, and of one message. A peer has channels, which are halved until those of all peers fit into the blocks of
// a kernel, of which there are as many as the configuration sets, rounded up to a power of two; a group's send and receive over one
// channel share a block. Collectives, and broadcasts, have as many blocks as NCCL chooses, unless the configuration sets fewer.
ncclComm::Blocks ncclComm::blocks_of(const std::vector<Call> &calls) const {
    int most = blocks_max > 0 ? std::min(blocks_max, (int)P2P_CHANNELS) : (int)P2P_CHANNELS, channels = P2P_CHANNELS, places = 1;
    bool collective = true;
    int sends = 0, receives = 0;
    for (const Call &call : calls) {
        collective &= call.operation != SENDRECV;
        if (call.peer != rank) (call.send ? sends : receives)++;
    }
    if (collective) return {std::min(most, (int)COLLECTIVE_CHANNELS), std::min(most, (int)COLLECTIVE_CHANNELS)};
    while (places < most) places *= 2;
    while (channels > 1 && channels * ranks > places) channels /= 2;
    return {std::min(places, channels * std::max(sends, receives)), channels};
}

// For the clock.
void ncclComm::note(const std::vector<Call> &calls, cudaStream_t stream) {
    const Blocks blocks = blocks_of(calls);
    std::vector<Half> halves = halves_of(calls);
    for (const Call &call : calls) {
        if (call.operation == SENDRECV || call.operation == BROADCAST) continue;
        for (Half &half : halves_of_collective(call, nullptr)) halves.push_back(half);
    }
    std::vector<Message> messages;
    uint64_t id = strtoull(name + strlen("emulated-nccl-"), nullptr, 16);
    for (const Half &half : halves) {
        if (half.peer == rank) continue;
        uint64_t number = (half.sends ? noted_sent : noted_received)[(size_t)half.peer]++;
        uint64_t pair = half.sends ? (uint64_t)rank << 16 | (uint64_t)half.peer : (uint64_t)half.peer << 16 | (uint64_t)rank;
        messages.push_back({id ^ (pair << 32 | number) * 0x9e3779b97f4a7c15u, (double)half.bytes, blocks.of_message, half.sends});
    }
    Note kernel = emulator::note(GROUP, 0, 0, EXCHANGE);
    kernel.blocks[0] = {blocks.of_kernel, 0};
    enqueue(stream, "a NCCL operation", kernel, {}, messages);
}

// ------------------------------------------------------------------------------------------------------------ groups

static thread_local int group_depth = 0;
static thread_local std::vector<Call> group;

static void begin(ncclComm_t comm, cudaStream_t stream, std::vector<Call> calls) {
    if (clock_runs()) return comm->note(calls, stream);
    const uint64_t place = places().issue();
    uint64_t turn;
    {
        std::lock_guard<std::mutex> hold(comm->lock);
        turn = comm->issued++;
    }
    enqueue(stream, "a NCCL operation", {}, [comm, turn, place, calls = std::move(calls)] {
        const int blocks = comm->blocks_of(calls).of_kernel;
        std::unique_lock<std::mutex> hold(comm->lock);
        comm->changed.wait(hold, [&] { return comm->served == turn; });
        hold.unlock();
        places().take(place, blocks);
        if (!comm->aborted) comm->run(calls);
        places().give_back(blocks);
        hold.lock();
        comm->served++;
        comm->changed.notify_all();
    });
}

static ncclResult_t flush_group() {
    ncclResult_t result = ncclSuccess;
    while (!group.empty()) {
        ncclComm_t comm = group[0].comm;
        cudaStream_t stream = group[0].stream;
        std::vector<Call> mine, others;
        for (const Call &call : group) (call.comm == comm && call.stream == stream ? mine : others).push_back(call);
        group = others;
        if (comm->blocking)
            begin(comm, stream, mine);
        else {
            comm->held.push_back([=] { begin(comm, stream, mine); });
            comm->asked = 0;
            result = ncclInProgress;
        }
    }
    return result;
}

static ncclResult_t issue(const Call &call) {
    ncclComm_t comm = call.comm;
    if (!comm || size_of(call.type) == 0) return ncclInvalidArgument;
    if (comm->result == ncclInProgress || (group_depth == 0 && !comm->held.empty()))
        fail("NCCL: an operation on a communicator that is in progress: ask ncclCommGetAsyncError until it "
             "is not");
    if (call.peer < 0 || call.peer >= comm->ranks) return ncclInvalidArgument;
    size_t bytes = call.count * size_of(call.type), ranks = (size_t)comm->ranks;
    if (call.send) need_device(call.send, call.operation == REDUCE_SCATTER ? bytes * ranks : bytes, "NCCL, send");
    if (call.recv) need_device(call.recv, call.operation == ALLGATHER ? bytes * ranks : bytes, "NCCL, receive");
    if ((call.operation == REDUCE_SCATTER || call.operation == ALLREDUCE) && call.reduction != ncclSum &&
        call.reduction != ncclMax && call.reduction != ncclMin)
        fail("NCCL: reduction %d is not emulated", (int)call.reduction);
    group.push_back(call);
    return group_depth > 0 ? ncclSuccess : flush_group();
}

ncclResult_t ncclGroupStart(void) {
    group_depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
    if (group_depth == 0) return ncclInvalidUsage;
    return --group_depth > 0 ? ncclSuccess : flush_group();
}

ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return issue({SENDRECV, (const char *)send, nullptr, count, type, ncclSum, peer, comm, stream});
}

ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return issue({SENDRECV, nullptr, (char *)recv, count, type, ncclSum, peer, comm, stream});
}

ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    return issue({ALLGATHER, (const char *)send, (char *)recv, count, type, ncclSum, 0, comm, stream});
}

ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
    return issue({REDUCE_SCATTER, (const char *)send, (char *)recv, count, type, op, 0, comm, stream});
}

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
    return issue({ALLREDUCE, (const char *)send, (char *)recv, count, type, op, 0, comm, stream});
}

// send: read on the root alone.
ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
    const char *from = comm && comm->rank == root ? (const char *)send : nullptr;
    return issue({BROADCAST, from, (char *)recv, count, type, ncclSum, root, comm, stream});
}

// ----------------------------------------------------------------------------------------------------- communicators

ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    uint64_t number;
    if (getrandom(&number, sizeof number, 0) != sizeof number) return ncclSystemError;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "emulated-nccl-%016llx", (unsigned long long)number);
    return ncclSuccess;
}

static socklen_t address_of(sockaddr_un *address, const char *name, int rank) { // abstract: not in a file system
    *address = {};
    address->sun_family = AF_UNIX;
    int length = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "%s-%d", name, rank);
    return (socklen_t)(offsetof(sockaddr_un, sun_path) + 1 + (size_t)length);
}

// Connects to all other ranks, which may start later, and accepts their connections.
static void set_up(ncclComm_t comm) {
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address;
    socklen_t length = address_of(&address, comm->name, comm->rank);
    if (bind(listener, (sockaddr *)&address, length) != 0 || listen(listener, comm->ranks) != 0)
        fail("NCCL: rank %d of %d cannot listen (%s): is there another one?", comm->rank, comm->ranks, strerror(errno));
    int hello[2] = {comm->rank, comm->ranks};
    for (int peer = 0; peer < comm->ranks; peer++) {
        if (peer == comm->rank) continue;
        int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        length = address_of(&address, comm->name, peer);
        while (connect(connection, (sockaddr *)&address, length) != 0) {
            if (comm->aborted) return (void)close(listener);
            usleep(1000);
        }
        if (send(connection, hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) comm->lost();
        comm->to[(size_t)peer] = connection;
    }
    for (int i = 1; i < comm->ranks; i++) {
        pollfd waiting = {listener, POLLIN, 0};
        while (poll(&waiting, 1, 5) != 1)
            if (comm->aborted) return (void)close(listener);
        int connection = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
        int their[2] = {-1, -1};
        if (connection < 0 || recv(connection, their, sizeof their, MSG_WAITALL) != sizeof their || their[1] != comm->ranks ||
            their[0] < 0 || their[0] >= comm->ranks || comm->from[(size_t)their[0]] >= 0)
            fail("NCCL: rank %d of %d meets a rank %d of %d", comm->rank, comm->ranks, their[0], their[1]);
        comm->from[(size_t)their[0]] = connection;
    }
    close(listener);
    if (comm->result == ncclInProgress) comm->result = ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
    if (devices() == 0) return ncclUnhandledCudaError;
    if (!out || ranks < 1 || rank < 0 || rank >= ranks || strncmp(id.internal, "emulated-nccl-", 14) != 0)
        return ncclInvalidArgument;
    if (config && (config->size != sizeof *config || config->magic != 0xcafebeef)) return ncclInvalidArgument;
    ncclComm_t comm = *out = new ncclComm;
    comm->rank = rank, comm->ranks = ranks;
    snprintf(comm->name, sizeof comm->name, "%.39s", id.internal);
    comm->blocking = !config || config->blocking != 0;
    comm->to.assign((size_t)ranks, -1), comm->from.assign((size_t)ranks, -1);
    comm->sent.assign((size_t)ranks, 0), comm->received.assign((size_t)ranks, 0);
    comm->noted_sent = comm->noted_received = comm->sent;
    if (config && config->maxCTAs != NCCL_CONFIG_UNDEF_INT) comm->blocks_max = config->maxCTAs;
    comm->result = ncclInProgress;
    if (!comm->blocking) {
        comm->setup = std::thread(set_up, comm);
        return ncclInProgress;
    }
    set_up(comm);
    return comm->result;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank) {
    return ncclCommInitRankConfig(comm, ranks, id, rank, nullptr);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    *error = comm->result;
    if (comm->held.empty() || *error != ncclSuccess) return ncclSuccess;
    if (++comm->asked < 2) {
        *error = ncclInProgress;
        return ncclSuccess;
    }
    for (auto &work : comm->held) work();
    comm->held.clear();
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    ncclResult_t result;
    while (ncclCommGetAsyncError(comm, &result), result == ncclInProgress) usleep(100);
    comm->drain();
    return result;
}

static void release(ncclComm_t comm) {
    if (comm->setup.joinable()) comm->setup.join();
    for (int connection : comm->to)
        if (connection >= 0) close(connection);
    for (int connection : comm->from)
        if (connection >= 0) close(connection);
    delete comm;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    ncclResult_t result = ncclCommFinalize(comm);
    release(comm);
    return result;
}

// Does not wait for streams: the remaining operations, also those not begun yet, do nothing. They need the communicator, so it is
// not freed.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    comm->aborted = true;
    if (comm->setup.joinable()) comm->setup.join();
    for (int connection : comm->to) shutdown(connection, SHUT_RDWR);
    for (int connection : comm->from) shutdown(connection, SHUT_RDWR);
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
    static const char *const text[] = {"no error",
                                       "unhandled cuda error",
                                       "unhandled system error",
                                       "internal error",
                                       "invalid argument",
                                       "invalid usage",
                                       "remote process exited or there was a network error",
                                       "in progress"};
    return result < ncclNumResults ? text[result] : "unknown result code";
}

const char *ncclGetLastError(ncclComm_t comm) {
    return comm && comm->result == ncclRemoteError ? "a peer has closed its connection" : "";
}
