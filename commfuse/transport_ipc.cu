// Exchanges of a group within one host by the GPUs' copy engines: nothing that crosses the link takes multiprocessors.
//
// Every rank keeps, for each other one, a staging queue of SLOTS slots in its own memory, which that rank has
// mapped. A message goes through it in chunks:
//
//   sender's stream to that peer              receiver's stream from that peer
//   wait until slot n is free                 wait until chunk n is written
//   copy chunk → slot, across the link        copy slot → destination, within the GPU
//   written = n + 1                           freed = n + 1
//
// A chunk is as large as a slot, but for a message's last: each takes six calls of the two hosts and some microseconds of
// the streams, and all that a smaller one would gain is that the last copy within the GPU is shorter.
//
// The two counters of a pair are words of host memory that both processes share and both GPUs see; the waits and
// writes are operations of the streams themselves. They count on from message to message and wrap around:
// "at least" is meant cyclically.
//
// Why staging, and not straight into the destination? Because then everything is enqueued when a request is
// posted, and nothing needs a host afterwards. The destination's address and the moment when it may be written
// are known to the receiver alone; a sender that needed them would have to ask a host thread, and a host that
// is blocked in a full launch queue, waiting for what that thread shall send, never answers. The price is a copy
// within the GPU.
//
// Of the copy across the link the driver is told that kernels run beside it. Of the one within the GPU it is not: from
// CUDA 13.1 on that, too, would be a copy engine's, and one has been seen to take four times as long for it as the link
// (NVIDIA/nccl#2177: 87 GiB/s, across the link 354, by a kernel 1627). The driver's kernel takes microseconds as soon
// as blocks of the product beside it end, since its stream is urgent. tests/bench/bench_wires measures both.
//
// A stream for each peer and each direction: no transfer stands behind one of another pair, and the two halves of
// an exchange do not wait for each other. For that the streams must not share a hardware queue, hence
// CUDA_DEVICE_MAX_CONNECTIONS in transport_cuda.cu. A group that has too many pairs for what queues are left gets a
// stream for each direction: transfers then follow each other in the order posted, as over NCCL. Should copies of several
// streams pass through one queue all the same, an exchange enqueues a chunk to be received behind those whose slots it
// frees: what is in front of it then never waits for it. A last stream joins both halves for the moment when a request
// is complete.
#include "transport_cuda.h"
#include <cuda.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum {
    OTHER_STREAMS = 3,
    FEW_STREAMS = 3, // one for each direction, and the one that joins them
    SLOTS = 2,
    LINE = 64,
    NAME_LENGTH = 48,
    MEMBERS_MAX = 64,
    STREAMS_MAX = 2 * MEMBERS_MAX,
    ENTRY_VERSION = 12000
};
static const int64_t SLOT_BYTES = 16 << 20;
static_assert((SLOTS & (SLOTS - 1)) == 0, "chunks keep their slots where counters wrap around");

typedef struct counters { // of one ordered pair, each on a cache line of its own
    uint32_t written, pad_written[LINE / 4 - 1];
    uint32_t freed, pad_freed[LINE / 4 - 1];
} counters;

typedef struct lane { // one direction of one pair
    cf_stream *stream;
    counters *count; // as the GPU sees them
    char *slots;     // of the receiver; the sender's mapping of them
    uint32_t next;   // chunk
} lane;

typedef CUresult stream_word(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags);

typedef struct ipc_wire {
    cf_wire wire;
    counters *shared; // [source · N + destination], of all processes of the group
    int64_t shared_bytes;
    int file;                  // member 0's: what is shared, until all have mapped it
    counters *pair;            // the same where the GPU has them; NULL: not registered
    char *staging;             // (N − 1, SLOTS, SLOT_BYTES) by source, see queue_of()
    void *mapped[MEMBERS_MAX]; // the staging of the others
    lane send[MEMBERS_MAX], recv[MEMBERS_MAX];
    cf_stream *stream[STREAMS_MAX], *join;
    int streams;
    stream_word *wait_value, *write_value;
    unsigned flush; // flag of a wait that has peers' writes to this GPU seen behind it, 0: none is needed
} ipc_wire;

// --- a transfer ---

static void word(ipc_wire *w, stream_word *operation, const lane *l, uint32_t *at, uint32_t value, unsigned flags) {
    CUresult code = operation((CUstream)cf_cuda_stream(l->stream), (CUdeviceptr)(uintptr_t)at, value, flags);
    if (code != CUDA_SUCCESS)
        cf_die("use --transport nccl", "the %s group: a stream cannot %s a word of memory: driver error %d", w->wire.group->name,
               operation == w->wait_value ? "wait for" : "write", (int)code);
}

// Both ends lie in GPU memory, which cf_copy would ask the driver about for every chunk.
static void copy_within(void *to, const void *from, int64_t bytes, const lane *l) {
    if (bytes > 0) CF_CUDA(cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDefault, cf_cuda_stream(l->stream)));
}

static void copy_across(void *to, const void *from, int64_t bytes, const lane *l) {
    static bool beside = true;
    if (beside && bytes > 0) beside = cf_cuda_copy_beside(to, from, bytes, l->stream) == cudaSuccess;
    if (!beside) copy_within(to, from, bytes, l);
}

static void send_chunk(ipc_wire *w, lane *l, const char *from, int64_t bytes) {
    uint32_t n = l->next++;
    word(w, w->wait_value, l, &l->count->freed, n + 1 - SLOTS, CU_STREAM_WAIT_VALUE_GEQ);
    copy_across(l->slots + n % SLOTS * SLOT_BYTES, from, bytes, l);
    word(w, w->write_value, l, &l->count->written, n + 1, CU_STREAM_WRITE_VALUE_DEFAULT);
}

static void recv_chunk(ipc_wire *w, lane *l, char *to, int64_t bytes) {
    uint32_t n = l->next++;
    word(w, w->wait_value, l, &l->count->written, n + 1, CU_STREAM_WAIT_VALUE_GEQ | w->flush);
    copy_within(to, l->slots + n % SLOTS * SLOT_BYTES, bytes, l);
    word(w, w->write_value, l, &l->count->freed, n + 1, CU_STREAM_WRITE_VALUE_DEFAULT);
}

static int64_t of_slot(int64_t left) {
    return left < SLOT_BYTES ? left : SLOT_BYTES;
}

// Both halves, SLOTS chunks sent in front of the first received. An exchange of nothing sends nothing; a barrier, no
// bytes but a chunk.
static void move(ipc_wire *w, lane *out, const char *from, int64_t send_bytes, lane *in, char *to, int64_t recv_bytes) {
    for (int64_t i = 0; i * SLOT_BYTES < send_bytes || (i - SLOTS) * SLOT_BYTES < recv_bytes; i++) {
        int64_t sent = i * SLOT_BYTES, received = sent - SLOTS * SLOT_BYTES;
        if (received >= 0 && received < recv_bytes) recv_chunk(w, in, to + received, of_slot(recv_bytes - received));
        if (sent < send_bytes) send_chunk(w, out, from + sent, of_slot(send_bytes - sent));
    }
}

static void exchange(ipc_wire *w, cf_request *r, cf_moment ready) {
    int64_t size = cf_dtype_size(r->dtype);
    lane *out = r->send_to >= 0 ? &w->send[r->send_to] : NULL;
    lane *in = r->recv_from >= 0 ? &w->recv[r->recv_from] : NULL;
    if (in) cf_stream_after(in->stream, ready);
    if (out) cf_stream_after(out->stream, ready);
    for (int i = 0; i < 2 && out; i++) // what comes may come at once
        if (r->after[i]) cf_stream_after(out->stream, r->after[i]->arrival);
    r->begin = cf_moment_now((out ? out : in)->stream);
    move(w, out, (const char *)r->send, out ? r->send_count * size : 0, in, (char *)r->recv, in ? r->recv_count * size : 0);
    cf_moment sent = out ? cf_moment_now(out->stream) : ready, arrived = in ? cf_moment_now(in->stream) : ready;
    cf_stream_after(w->join, sent);
    cf_stream_after(w->join, arrived);
    r->end = cf_moment_now(w->join);
    r->arrival = r->recv_from >= 0 ? arrived : r->end;
}

static void barrier(ipc_wire *w, cf_request *r, cf_moment ready) {
    cf_stream_after(w->join, ready);
    r->begin = cf_moment_now(w->join);
    for (int i = 0; i < r->group->size; i++) {
        if (i == r->group->rank) continue;
        cf_stream_after(w->send[i].stream, ready);
        send_chunk(w, &w->send[i], NULL, 0);
        cf_stream_after(w->join, cf_moment_now(w->send[i].stream));
    }
    for (int i = 0; i < r->group->size; i++) {
        if (i == r->group->rank) continue;
        cf_stream_after(w->recv[i].stream, ready);
        recv_chunk(w, &w->recv[i], NULL, 0);
        cf_stream_after(w->join, cf_moment_now(w->recv[i].stream));
    }
    r->arrival = r->end = cf_moment_now(w->join);
}

static void post(cf_wire *wire, cf_request *r, int count, cf_stream *stream) {
    ipc_wire *w = (ipc_wire *)wire->state;
    for (int i = 0; i < count; i++) {
        cf_moment ready = cf_request_ready(&r[i], stream);
        if (r[i].kind == CF_REQUEST_EXCHANGE)
            exchange(w, &r[i], ready);
        else
            barrier(w, &r[i], ready); // transport_cuda.cu gives native collectives to NCCL
    }
}

static const char *look(cf_wire *wire) {
    (void)wire;
    return NULL; // copy engines know nothing of peers
}

// --- start and end ---

typedef struct offer { // what a rank shows to the others of its group
    cudaIpcMemHandle_t staging;
    int process, file; // member 0's: where the others find the counters
    uint64_t nonce;    // and how they know them
    char why[80];      // it has nothing to offer
} offer;

static uint64_t random_number(void) {
    uint64_t value = 0;
    FILE *file = fopen("/dev/urandom", "rb");
    if (!file || fread(&value, sizeof value, 1, file) != 1) value = (uint64_t)getpid() << 32 ^ (uint64_t)(cf_now_ms() * 1e6);
    if (file) fclose(file);
    return value;
}

static counters *map_counters(int file, int64_t bytes) {
    void *memory = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    return memory == MAP_FAILED ? NULL : (counters *)memory;
}

// A file of memory alone, which others open through /proc: it has no name that a killed start would leave.
static void make_counters(ipc_wire *w, offer *mine) {
    char name[NAME_LENGTH];
    mine->process = getpid();
    mine->nonce = random_number();
    snprintf(name, sizeof name, "commfuse-%016llx", (unsigned long long)mine->nonce);
    w->file = mine->file = memfd_create(name, MFD_CLOEXEC);
    if (w->file >= 0 && (errno = posix_fallocate(w->file, 0, w->shared_bytes)) == 0) // zeroes, and there is memory for them
        w->shared = map_counters(w->file, w->shared_bytes);
    if (!w->shared) snprintf(mine->why, sizeof mine->why, "no shared memory: %s", strerror(errno));
}

static void open_counters(ipc_wire *w, const offer *first, offer *mine) {
    char path[NAME_LENGTH], found[NAME_LENGTH] = "", expected[NAME_LENGTH];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", first->process, first->file);
    snprintf(expected, sizeof expected, "/memfd:commfuse-%016llx (deleted)", (unsigned long long)first->nonce);
    bool same = readlink(path, found, sizeof found - 1) > 0 && strcmp(found, expected) == 0;
    int file = same ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file >= 0) {
        w->shared = map_counters(file, w->shared_bytes);
        close(file);
    }
    if (!w->shared) snprintf(mine->why, sizeof mine->why, "not all ranks are on one host (or see each other's /proc)");
}

static stream_word *driver_function(const char *name) {
    void *function = NULL;
    enum cudaDriverEntryPointQueryResult found;
    cudaError_t code = cudaGetDriverEntryPointByVersion(name, &function, ENTRY_VERSION, cudaEnableDefault, &found);
    return code == cudaSuccess && found == cudaDriverEntryPointSuccess ? (stream_word *)function : NULL;
}

static unsigned flush_flag(void) {
    int device = 0, can = 0;
    CF_CUDA(cudaGetDevice(&device));
    CF_CUDA(cudaDeviceGetAttribute(&can, cudaDevAttrCanFlushRemoteWrites, device));
    return can ? CU_STREAM_WAIT_VALUE_FLUSH : 0;
}

static int64_t queue_bytes(void) {
    return SLOTS * SLOT_BYTES;
}

// In the staging of `owner`, who keeps none for itself.
static int64_t queue_of(int source, int owner) {
    return (source < owner ? source : source - 1) * queue_bytes();
}

static int streams_made; // by all wires of this process

// Streams of a wire may wait while others, and the host's own, have to go on.
static bool enough_connections(int streams) {
    const char *text = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    return !text || atoi(text) >= streams_made + streams + OTHER_STREAMS;
}

// A stream for each lane, if there are queues for so many, or one for each direction.
static bool lanes_share(const cf_group *group) {
    return !enough_connections(2 * (group->size - 1) + 1);
}

static void make_offer(ipc_wire *w, const cf_group *group, bool one_host, offer *mine) {
    memset(mine, 0, sizeof *mine);
    w->shared_bytes = (int64_t)group->size * group->size * (int64_t)sizeof(counters);
    w->wait_value = driver_function("cuStreamWaitValue32");
    w->write_value = driver_function("cuStreamWriteValue32");
    w->flush = flush_flag();
    if (!one_host)
        snprintf(mine->why, sizeof mine->why, "its ranks are on several hosts");
    else if (group->size > MEMBERS_MAX)
        snprintf(mine->why, sizeof mine->why, "more than %d ranks", MEMBERS_MAX);
    else if (!enough_connections(FEW_STREAMS))
        snprintf(mine->why, sizeof mine->why, "%d streams need queues, CUDA_DEVICE_MAX_CONNECTIONS=%.8s",
                 streams_made + FEW_STREAMS + OTHER_STREAMS, getenv("CUDA_DEVICE_MAX_CONNECTIONS"));
    else if (!w->wait_value || !w->write_value)
        snprintf(mine->why, sizeof mine->why, "the driver's streams cannot wait for memory");
    if (*mine->why) return;
    w->staging = (char *)cf_alloc((group->size - 1) * queue_bytes(), "communication staging");
    cudaError_t code = cudaIpcGetMemHandle(&mine->staging, w->staging);
    if (code != cudaSuccess) {
        snprintf(mine->why, sizeof mine->why, "no handle of GPU memory: %s", cudaGetErrorName(code));
        cudaGetLastError();
    }
    if (group->rank == 0 && !*mine->why) make_counters(w, mine);
}

static cudaError_t register_counters(ipc_wire *w) {
    void *on_device = NULL;
    cudaError_t code = cudaHostRegister(w->shared, (size_t)w->shared_bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (code != cudaSuccess) return code;
    code = cudaHostGetDevicePointer(&on_device, w->shared, 0);
    if (code == cudaSuccess)
        w->pair = (counters *)on_device;
    else
        cudaHostUnregister(w->shared);
    return code;
}

static void take_offers(ipc_wire *w, const cf_group *group, const offer *all, offer *mine) {
    if (group->rank != 0) open_counters(w, &all[group->world[0]], mine);
    if (*mine->why) return;
    cudaError_t code = register_counters(w);
    for (int i = 0; i < group->size && code == cudaSuccess; i++) {
        if (i == group->rank) continue;
        code = cudaIpcOpenMemHandle(&w->mapped[i], all[group->world[i]].staging, cudaIpcMemLazyEnablePeerAccess);
    }
    if (code == cudaSuccess) return;
    snprintf(mine->why, sizeof mine->why, "GPU memory cannot be mapped: %s", cudaGetErrorName(code));
    cudaGetLastError();
}

// The first reason that a member gives; false: nobody gives one.
static bool any_reason(cf_bootstrap *bootstrap, const cf_group *group, const offer *mine, offer *all, char why[128]) {
    bootstrap->allgather(bootstrap, mine, all, sizeof *mine);
    for (int i = 0; i < group->size && !*why; i++) {
        offer *theirs = &all[group->world[i]];
        theirs->why[sizeof theirs->why - 1] = 0;
        if (*theirs->why) snprintf(why, 128, "rank %d: %s", group->world[i], theirs->why);
    }
    return *why != 0;
}

static void give_back(ipc_wire *w) {
    for (int i = 0; i < MEMBERS_MAX; i++)
        if (w->mapped[i]) CF_CUDA(cudaIpcCloseMemHandle(w->mapped[i]));
    for (int i = 0; i < w->streams; i++) cf_stream_free(w->stream[i]);
    cf_stream_free(w->join);
    if (w->pair) CF_CUDA(cudaHostUnregister(w->shared));
    if (w->shared) munmap(w->shared, (size_t)w->shared_bytes);
}

static void detach(cf_wire *wire) {
    give_back((ipc_wire *)wire->state);
}

static void close_wire(cf_wire *wire) {
    ipc_wire *w = (ipc_wire *)wire->state;
    cf_free(w->staging);
    free(w);
}

static cf_stream *new_stream(ipc_wire *w) {
    return w->stream[w->streams++] = cf_stream_create_urgent();
}

static void make_lanes(ipc_wire *w, const cf_group *group) {
    bool share = lanes_share(group);
    for (int i = 0; i < group->size; i++) {
        if (i == group->rank) continue;
        w->send[i].stream = share && w->streams ? w->stream[0] : new_stream(w);
        w->recv[i].stream = share && w->streams > 1 ? w->stream[1] : new_stream(w);
        w->send[i].slots = (char *)w->mapped[i] + queue_of(group->rank, i);
        w->recv[i].slots = w->staging + queue_of(i, group->rank);
        w->send[i].count = &w->pair[group->rank * group->size + i];
        w->recv[i].count = &w->pair[i * group->size + group->rank];
    }
    w->join = cf_stream_create_urgent();
    streams_made += w->streams + 1;
}

cf_wire *cf_wire_ipc(cf_bootstrap *bootstrap, const cf_group *group, bool one_host, char why[128]) {
    ipc_wire *w = (ipc_wire *)calloc(1, sizeof *w);
    offer mine, *all = (offer *)calloc((size_t)bootstrap->size, sizeof *all);
    if (!w || !all) cf_die(NULL, "out of memory to bind group %s", group->name);
    *why = 0;
    w->file = -1;
    make_offer(w, group, one_host, &mine);
    if (!any_reason(bootstrap, group, &mine, all, why)) take_offers(w, group, all, &mine);
    bool refused = any_reason(bootstrap, group, &mine, all, why);
    if (w->file >= 0) close(w->file); // all who can have mapped it
    if (refused) {
        give_back(w);
        bootstrap->allgather(bootstrap, why, all, 1); // nobody has it mapped any more
        cf_free(w->staging);
        free(all);
        free(w);
        return NULL;
    }
    bootstrap->allgather(bootstrap, why, all, 1); // all groups alike
    free(all);
    make_lanes(w, group);
    w->wire.name = "ipc";
    w->wire.group = group;
    w->wire.state = w;
    w->wire.chunk_bytes = SLOT_BYTES;
    w->wire.post = post;
    w->wire.look = look;
    w->wire.detach = detach;
    w->wire.close = close_wire;
    return &w->wire;
}
