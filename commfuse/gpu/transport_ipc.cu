// Exchanges of a group within one host by the GPUs' copy engines, straight into the receiver's buffers. Takes no multiprocessors.
//
//   sender's stream to that peer              receiver's stream from that peer
//   wait until ready >= n                     ready = n
//   copy message n across the link
//   written = n                               wait until written >= n
//
// The counters of a pair are words in the memory of the GPU that waits for them, so a wait reads no other memory, and a write takes
// the way of the copy before it. Waits and writes are operations of the streams themselves. Counters wrap around: ">=" is meant
// cyclically. A barrier has its own counter.
//
// Only the receiver knows where a message goes. When it posts, its host writes an allocation, which the sender's host maps when
// it first sees it, and an offset into memory that the hosts share. So the sender's host waits in meet() until its peer has come to
// the same request, and hosts run ahead of their GPUs together. No host waits for ever, even if launch queues are full: it writes
// where it receives before it waits, all ranks post in one order, and for all earlier requests every rank has written it.
//
// A native collective is an exchange with every peer at the same time, and for a reduce-scatter a sum of what has arrived.
//
// COMMFUSE_LINK_GBPS, for measurements where ranks share a GPU: a link of that rate, each way, instead of the copies. Its kernel is
// told in device_cuda.cu; it takes multiprocessors, and a rank sends one message at a time.
//
// Memory that a peer may have mapped must not be freed: cf_free() leaves it alone (memory.h).
//
// Each peer and direction has a stream, so no transfer waits for one of another pair, and the halves of an exchange do not wait for
// each other. The streams must not share a hardware queue, hence CUDA_DEVICE_MAX_CONNECTIONS in transport_cuda.cu. A group with
// too many pairs for the queues left has one stream for each direction: transfers then follow each other in the order posted, as
// over NCCL. If copies of several streams pass through one queue nevertheless, it helps that an exchange enqueues the write of
// `ready` before its waits. One more stream joins both halves: it gives the event when a request is complete.
#include "transport_cuda.h"
#include <cuda.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

enum {
    OTHER_STREAMS = 3,
    FEW_STREAMS = 3, // one for each direction, and the one that joins them
    LINE = 64,
    ADDRESSES = 16, // of a pair, that the receiver's host may write before the sender's reads them
    NAME_LENGTH = 48,
    MEMBERS_MAX = 64,
    STREAMS_MAX = 2 * MEMBERS_MAX + 1,
    ENTRY_VERSION = 12000
};
static_assert((ADDRESSES & (ADDRESSES - 1)) == 0, "n % ADDRESSES must go on when the counter n wraps around");

typedef struct address {                     // where a message goes; the receiver's host writes it, the sender's reads it
    alignas(LINE) uint32_t number;           // 2 n + 1 for message n; 0: the sender has read it
    alignas(LINE) cudaIpcMemHandle_t handle; // of the allocation
    const char *base;                        // its address in the receiver, which identifies it
    int64_t offset, bytes;
} address;

typedef struct words {              // that a peer's streams write and this rank's wait for; each has a cache line
    alignas(LINE) uint32_t ready;   // the peer is, for so many messages from here
    alignas(LINE) uint32_t written; // so many of the peer's messages are here
    alignas(LINE) uint32_t barrier;
} words;

typedef struct allocation { // this rank's, which peers may map, or a peer's, mapped
    const char *base;       // in its owner
    int64_t bytes;
    cudaIpcMemHandle_t handle;
    char *mapped;
} allocation;

typedef struct allocations {
    allocation *list;
    int64_t count, room;
} allocations;

typedef struct connector { // one direction of one pair
    cf_stream *stream;
    address *addresses; // message n at n % ADDRESSES
    uint32_t messages;  // posted
    uint32_t met;       // messages whose address both hosts know
    allocations theirs; // the peer's, if it receives
} connector;

typedef CUresult stream_word(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags);

typedef struct ipc_wire {
    cf_wire wire;
    address *shared; // [source][destination][ADDRESSES], mapped by all processes of the group
    int64_t shared_bytes;
    words *of[MEMBERS_MAX]; // each rank's GPU has (N) words, by the rank that writes them; NULL: not mapped
    allocations mine;
    connector send[MEMBERS_MAX], recv[MEMBERS_MAX];
    cf_stream *stream[STREAMS_MAX];
    int streams;
    int offered, found;           // requests of the unit in meet() whose address is written, whose address is read
    cf_request part[MEMBERS_MAX]; // the exchanges of the native collective in meet() or post()
    int parts;
    char *stage; // what peers send to be summed, of two reduce-scatters
    int64_t stage_bytes;
    cf_event summed[2]; // the last sums of each half
    int turn;           // the half of the next one
    double link;        // GB/s of the link that is imitated; 0: none
    uint32_t barriers;
    stream_word *wait_value, *write_value;
    unsigned flush; // of a wait: a copy is seen before the word that came after it; 0: this GPU cannot, so meet_all() tries it out
} ipc_wire;

// --- where messages go ---

static allocation *add(allocations *all) {
    all->list = (allocation *)cf_host_grow(all->list, &all->room, all->count + 1, sizeof *all->list, "mapped memory");
    return &all->list[all->count++];
}

// This rank's allocation into which a request receives.
static const allocation *holder(ipc_wire *w, const cf_request *r) {
    const char *at = (const char *)r->recv;
    for (allocation *a = w->mine.list; a < w->mine.list + w->mine.count; a++)
        if (at >= a->base && at < a->base + a->bytes) return a;
    allocation *a = add(&w->mine);
    a->base = (const char *)cf_memory_lend(at, &a->bytes);
    if (!a->base) cf_die("use cf_alloc", "%s: ipc receives only into memory from cf_alloc", r->label);
    CF_CUDA(cudaIpcGetMemHandle(&a->handle, (void *)a->base));
    return a;
}

// The address of a peer's allocation in this process.
static char *mapping(connector *l, const address *p) {
    for (allocation *a = l->theirs.list; a < l->theirs.list + l->theirs.count; a++)
        if (a->base == p->base) return a->mapped;
    allocation *a = add(&l->theirs);
    a->base = p->base;
    CF_CUDA(cudaIpcOpenMemHandle((void **)&a->mapped, p->handle, cudaIpcMemLazyEnablePeerAccess));
    return a->mapped;
}

static int64_t bytes_received(const cf_request *r) {
    return r->recv_from >= 0 ? r->recv_count * cf_dtype_size(r->dtype) : 0;
}

static int64_t bytes_sent(const cf_request *r) {
    return r->send_to >= 0 ? r->send_count * cf_dtype_size(r->dtype) : 0;
}

// False: the peer has not yet read an earlier one.
static bool offer_place(ipc_wire *w, const cf_request *r) {
    connector *l = &w->recv[r->recv_from];
    address *p = &l->addresses[l->met % ADDRESSES];
    if (__atomic_load_n(&p->number, __ATOMIC_ACQUIRE) != 0) return false;
    const allocation *a = holder(w, r);
    p->handle = a->handle, p->base = a->base;
    p->offset = (const char *)r->recv - a->base, p->bytes = bytes_received(r);
    cf_word_write(&p->number, 2 * l->met++ + 1);
    return true;
}

// False: the peer has not yet written it.
static bool find_place(ipc_wire *w, cf_request *r) {
    connector *l = &w->send[r->send_to];
    address *p = &l->addresses[l->met % ADDRESSES];
    if (!cf_word_is(&p->number, 2 * l->met + 1)) return false;
    if (p->bytes != bytes_sent(r))
        cf_die(NULL, "%s: rank %d sends %lld bytes, rank %d receives %lld", r->label, r->group->world[r->group->rank],
               (long long)bytes_sent(r), r->group->world[r->send_to], (long long)p->bytes);
    r->to = mapping(l, p) + p->offset;
    __atomic_store_n(&p->number, 0, __ATOMIC_RELEASE);
    l->met++;
    return true;
}

// A stage that is too small remains: a peer may have it mapped. It grows in the first step that has a larger sum.
static char *half_of_stage(ipc_wire *w, int64_t bytes) {
    if (bytes > w->stage_bytes) w->stage = (char *)cf_alloc(2 * (w->stage_bytes = bytes), "communication staging");
    return w->stage + w->turn * w->stage_bytes;
}

// Exchanges as they are; a native collective as its exchanges.
static cf_request *unit_of(ipc_wire *w, cf_request *r, int *count) {
    if (r->kind == CF_REQUEST_EXCHANGE) return r;
    const int N = r->group->size, me = r->group->rank;
    const int64_t size = cf_dtype_size(r->dtype), block = r->send_count * size, stride = r->stride * size;
    const bool sums = r->kind == CF_REQUEST_REDUCE_SCATTER;
    char *stage = sums && !w->parts ? half_of_stage(w, (N - 1) * block) : NULL;
    for (; w->parts < N - 1; w->parts++) {
        cf_request *p = &w->part[w->parts];
        *p = *r;
        p->kind = CF_REQUEST_EXCHANGE, p->recv_count = r->send_count;
        p->send_to = (me + N - 1 - w->parts) % N, p->recv_from = (me + 1 + w->parts) % N; // summed in the order of exchanges
        if (r->kind != CF_REQUEST_ALLGATHER) p->send = (const char *)r->send + p->send_to * (sums ? block : stride);
        p->recv = sums ? stage + w->parts * block : (char *)r->recv + p->recv_from * stride;
    }
    *count = N - 1;
    return w->part;
}

static int meet(cf_wire *wire, cf_request *r, int count) {
    ipc_wire *w = (ipc_wire *)wire;
    if (r->kind == CF_REQUEST_BARRIER) return -1;
    r = unit_of(w, r, &count);
    for (; w->offered < count; w->offered++)
        if (bytes_received(&r[w->offered]) > 0 && !offer_place(w, &r[w->offered])) break;
    for (; w->found < count; w->found++)
        if (bytes_sent(&r[w->found]) > 0 && !find_place(w, &r[w->found])) return r[w->found].send_to;
    if (w->offered < count) return r[w->offered].recv_from;
    w->offered = w->found = 0;
    return -1;
}

// --- a transfer ---

enum { WRITE, AWAIT };

static void enqueue_word(ipc_wire *w, cf_stream *stream, int what, uint32_t *at, uint32_t value) {
    const unsigned flags = what == AWAIT ? CU_STREAM_WAIT_VALUE_GEQ | w->flush : (unsigned)CU_STREAM_WRITE_VALUE_DEFAULT;
    stream_word *operation = what == AWAIT ? w->wait_value : w->write_value;
    CUresult code = operation((CUstream)cf_cuda_stream(stream), (CUdeviceptr)(uintptr_t)at, value, flags);
    if (code != CUDA_SUCCESS)
        cf_die("use transport nccl", "the %s group: a stream cannot %s a word of memory: driver error %d", w->wire.group->name,
               what == AWAIT ? "wait for" : "write", (int)code);
}

// A send never waits for a event that has a time, because a stream pauses for those. A message of 0 bytes is not sent.
static void exchange(ipc_wire *w, cf_request *r, cf_event ready, cf_event *begin) {
    const int me = r->group->rank;
    connector *out = r->send_to >= 0 ? &w->send[r->send_to] : NULL;
    connector *in = r->recv_from >= 0 ? &w->recv[r->recv_from] : NULL;
    if (in) cf_stream_after(in->stream, ready);
    if (bytes_received(r) > 0) enqueue_word(w, in->stream, WRITE, &w->of[r->recv_from][me].ready, ++in->messages);
    if (out) cf_stream_after(out->stream, ready);
    if (!r->after[0] && !begin->number) *begin = cf_event_record((in ? in : out)->stream); // the peer may send sooner
    r->begin = r->after[0] ? r->after[0]->arrival : *begin;
    if (bytes_sent(r) > 0) {
        enqueue_word(w, out->stream, AWAIT, &w->of[me][r->send_to].ready, ++out->messages);
        for (int i = 0; i < 2; i++)
            if (r->after[i]) cf_stream_after(out->stream, r->after[i]->here);
        if (w->link > 0)
            cf_paced_copy(r->to, r->send, bytes_sent(r), w->link, out->stream);
        else
            CF_CUDA(cudaMemcpyAsync(r->to, r->send, (size_t)bytes_sent(r), cudaMemcpyDefault, cf_cuda_stream(out->stream)));
        enqueue_word(w, out->stream, WRITE, &w->of[r->send_to][me].written, out->messages);
    }
    if (bytes_received(r) > 0) enqueue_word(w, in->stream, AWAIT, &w->of[me][r->recv_from].written, in->messages);
    cf_stream_after(w->wire.stream, out ? cf_event_record_untimed(out->stream) : ready);
    if (!in) return;
    r->here = cf_event_record_untimed(in->stream);
    cf_stream_after(w->wire.stream, r->here);
    r->arrival = cf_event_record(in->stream);
}

// What no peer does for a collective: the own block, and sums.
static void complete(ipc_wire *w, const cf_request *r) {
    const int64_t size = cf_dtype_size(r->dtype), bytes = r->send_count * size, own = r->group->rank;
    const bool sums = r->kind == CF_REQUEST_REDUCE_SCATTER;
    const char *from = (const char *)r->send + (sums ? own * bytes : r->kind == CF_REQUEST_ALLTOALL ? own * r->stride * size : 0);
    char *to = (char *)r->recv + (sums ? 0 : own * r->stride * size);
    if (from != to) cf_copy(to, from, bytes, w->wire.stream);
    if (!sums) return;
    cf_add(to, w->part[0].recv, r->group->size - 1, r->send_count, r->send_count, r->dtype, w->wire.stream);
    w->summed[w->turn] = cf_event_record_untimed(w->wire.stream);
    w->turn = 1 - w->turn;
}

static void barrier(ipc_wire *w, cf_request *r, cf_event ready) {
    const uint32_t n = ++w->barriers;
    const int me = r->group->rank;
    cf_stream_after(w->wire.stream, ready);
    r->begin = cf_event_record(w->wire.stream);
    for (int i = 0; i < r->group->size; i++)
        if (i != me) enqueue_word(w, w->wire.stream, WRITE, &w->of[i][me].barrier, n);
    for (int i = 0; i < r->group->size; i++)
        if (i != me) enqueue_word(w, w->wire.stream, AWAIT, &w->of[me][i].barrier, n);
    r->arrival = r->here = r->end = cf_event_record(w->wire.stream);
}

static void post(cf_wire *wire, cf_request *r, int count, cf_stream *stream) {
    ipc_wire *w = (ipc_wire *)wire;
    cf_event ready = cf_request_ready(r, stream), begin = {0, 0};
    if (r->kind == CF_REQUEST_BARRIER) return barrier(w, r, ready);
    cf_request *unit = unit_of(w, r, &count);
    if (w->link > 0) wire->blocks = CF_PACED_BLOCKS;
    if (r->kind == CF_REQUEST_REDUCE_SCATTER && w->summed[w->turn].number) // the stage is free then
        for (int i = 0; i < count; i++) cf_stream_after(w->recv[unit[i].recv_from].stream, w->summed[w->turn]);
    for (int i = 0; i < count; i++) exchange(w, &unit[i], ready, &begin);
    if (unit != r) complete(w, r);
    const cf_event end = cf_event_record(w->wire.stream); // one for the unit
    for (int i = 0; i < count; i++) {
        unit[i].end = end;
        if (unit[i].recv_from < 0) unit[i].arrival = unit[i].here = end;
    }
    if (unit != r) r->begin = unit->begin, r->here = r->arrival = r->end = end, w->parts = 0; // traces read end: wait for it
}

// --- start and end ---

typedef struct offer { // what a rank sends to the others of its group
    cudaIpcMemHandle_t words;
    int process, file; // member 0's: where the others find the shared memory, until all have mapped it; file -1: nowhere
    uint64_t nonce;    // and what identifies it
    char why[160];     // this rank cannot use ipc; "": it can
} offer;

static address *map_addresses(int file, int64_t bytes) {
    void *memory = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    return memory == MAP_FAILED ? NULL : (address *)memory;
}

// A file in memory, which others open through /proc: it has no name, so a killed start leaves nothing behind.
static void make_addresses(ipc_wire *w, offer *mine) {
    char name[NAME_LENGTH];
    mine->process = getpid();
    bool drawn = getrandom(&mine->nonce, sizeof mine->nonce, 0) == sizeof mine->nonce;
    snprintf(name, sizeof name, "commfuse-%016llx", (unsigned long long)mine->nonce);
    mine->file = drawn ? memfd_create(name, MFD_CLOEXEC) : -1;
    if (mine->file >= 0 && (errno = posix_fallocate(mine->file, 0, w->shared_bytes)) == 0) // zeroes; fails where memory is short
        w->shared = map_addresses(mine->file, w->shared_bytes);
    if (!w->shared) snprintf(mine->why, sizeof mine->why, "no shared memory: %s", strerror(errno));
}

static void open_addresses(ipc_wire *w, const offer *first, offer *mine) {
    char path[NAME_LENGTH], found[NAME_LENGTH] = "", expected[NAME_LENGTH];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", first->process, first->file);
    snprintf(expected, sizeof expected, "/memfd:commfuse-%016llx (deleted)", (unsigned long long)first->nonce);
    bool same = readlink(path, found, sizeof found - 1) > 0 && strcmp(found, expected) == 0;
    int file = same ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file >= 0) {
        w->shared = map_addresses(file, w->shared_bytes);
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

static int streams_made; // by all wires of this process

// A wire's streams may wait while the other streams of this process must go on, so each needs its own queue.
static bool enough_connections(int streams) {
    const char *text = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    return !text || atoi(text) >= streams_made + streams + OTHER_STREAMS;
}

static void make_offer(ipc_wire *w, const cf_group *group, offer *mine) {
    int device = 0, can_flush = 0;
    memset(mine, 0, sizeof *mine);
    mine->file = -1;
    w->shared_bytes = (int64_t)group->size * group->size * ADDRESSES * (int64_t)sizeof(address);
    w->wait_value = driver_function("cuStreamWaitValue32");
    w->write_value = driver_function("cuStreamWriteValue32");
    CF_CUDA(cudaGetDevice(&device));
    CF_CUDA(cudaDeviceGetAttribute(&can_flush, cudaDevAttrCanFlushRemoteWrites, device));
    w->flush = can_flush ? CU_STREAM_WAIT_VALUE_FLUSH : 0;
    if (group->size == 1)
        snprintf(mine->why, sizeof mine->why, "no other rank is on its host");
    else if (group->size > MEMBERS_MAX)
        snprintf(mine->why, sizeof mine->why, "more than %d ranks", MEMBERS_MAX);
    else if (!enough_connections(FEW_STREAMS))
        snprintf(mine->why, sizeof mine->why, "%d streams need queues, CUDA_DEVICE_MAX_CONNECTIONS=%.8s",
                 streams_made + FEW_STREAMS + OTHER_STREAMS, getenv("CUDA_DEVICE_MAX_CONNECTIONS"));
    else if (!w->wait_value || !w->write_value)
        snprintf(mine->why, sizeof mine->why, "the driver's streams cannot wait for memory");
    if (*mine->why) return;
    int64_t bytes = group->size * (int64_t)sizeof(words);
    w->of[group->rank] = (words *)cf_alloc(bytes, "communication staging");
    cf_memory_lend(w->of[group->rank], &bytes);
    cudaError_t code = cudaIpcGetMemHandle(&mine->words, w->of[group->rank]);
    if (code != cudaSuccess) {
        snprintf(mine->why, sizeof mine->why, "no handle of GPU memory: %s", cudaGetErrorName(code));
        cudaGetLastError();
    }
    if (group->rank == 0 && !*mine->why) make_addresses(w, mine);
}

// Maps the words of all members. A first write to each, of the 0 that is there, shows whether streams can.
static void accept_offers(ipc_wire *w, const cf_group *group, const offer *all, offer *mine) {
    cudaError_t code = cudaSuccess;
    CUresult written = CUDA_SUCCESS;
    if (group->rank != 0) open_addresses(w, &all[group->world[0]], mine);
    if (*mine->why) return;
    cf_stream *stream = cf_stream_create();
    for (int i = 0; i < group->size && written == CUDA_SUCCESS; i++) {
        if (i == group->rank) continue;
        void *mapped = NULL;
        code = cudaIpcOpenMemHandle(&mapped, all[group->world[i]].words, cudaIpcMemLazyEnablePeerAccess);
        if (code != cudaSuccess) break;
        w->of[i] = (words *)mapped;
        written = w->write_value((CUstream)cf_cuda_stream(stream), (CUdeviceptr)(uintptr_t)&w->of[i][group->rank].barrier, 0,
                                 CU_STREAM_WRITE_VALUE_DEFAULT);
    }
    cf_stream_sync(stream);
    cf_stream_free(stream);
    if (code != cudaSuccess)
        snprintf(mine->why, sizeof mine->why,
                 "GPU memory cannot be mapped: %s; let each rank see all GPUs of the host, e.g. without --gpus-per-task",
                 cudaGetErrorName(code));
    else if (written != CUDA_SUCCESS)
        snprintf(mine->why, sizeof mine->why, "streams cannot write words of another GPU: driver error %d", (int)written);
    cudaGetLastError();
}

// Writes the first reason of a member that cannot use ipc; false: all can.
static bool any_reason(cf_bootstrap *bootstrap, const cf_group *group, const offer *mine, offer *all, char why[192]) {
    bootstrap->allgather(bootstrap, mine, all, sizeof *mine);
    for (int i = 0; i < group->size && !*why; i++) {
        offer *theirs = &all[group->world[i]];
        theirs->why[sizeof theirs->why - 1] = 0;
        if (*theirs->why) snprintf(why, 192, "rank %d: %s", group->world[i], theirs->why);
    }
    return *why != 0;
}

static void close_wire(cf_wire *wire) {
    ipc_wire *w = (ipc_wire *)wire;
    for (int i = 0; i < MEMBERS_MAX; i++) {
        for (int64_t k = 0; k < w->send[i].theirs.count; k++) CF_CUDA(cudaIpcCloseMemHandle(w->send[i].theirs.list[k].mapped));
        free(w->send[i].theirs.list);
        if (w->of[i] && i != wire->group->rank) CF_CUDA(cudaIpcCloseMemHandle(w->of[i]));
    }
    for (int i = 0; i < w->streams; i++) cf_stream_free(w->stream[i]);
    if (w->shared) munmap(w->shared, (size_t)w->shared_bytes);
    cf_free(w->stage);
    free(w->mine.list);
    free(w);
}

static cf_stream *new_stream(ipc_wire *w) {
    streams_made++;
    return w->stream[w->streams++] = cf_cuda_stream_urgent();
}

static void make_lanes(ipc_wire *w, const cf_group *group) {
    const bool share = w->link > 0 || !enough_connections(2 * (group->size - 1) + 1); // one stream for each direction
    for (int i = 0; i < group->size; i++) {
        if (i == group->rank) continue;
        w->send[i].stream = share && w->streams ? w->stream[0] : new_stream(w);
        w->recv[i].stream = share && w->streams > 1 ? w->stream[1] : new_stream(w);
        w->send[i].addresses = w->shared + (group->rank * group->size + i) * ADDRESSES;
        w->recv[i].addresses = w->shared + (i * group->size + group->rank) * ADDRESSES;
    }
    w->wire.stream = new_stream(w);
}

cf_wire *cf_wire_ipc(cf_bootstrap *bootstrap, const cf_group *group, char why[192]) {
    ipc_wire *w = (ipc_wire *)cf_host_alloc(1, sizeof *w, "a group");
    offer mine, *all = (offer *)cf_host_alloc(bootstrap->size, sizeof *all, "what ranks report");
    const char *link = cf_getenv("COMMFUSE_LINK_GBPS");
    *why = 0;
    w->link = link ? atof(link) : 0;
    if (link && !(w->link > 0))
        cf_die_together("leave it out where ranks share no GPU", "COMMFUSE_LINK_GBPS is '%.40s', no rate", link);
    make_offer(w, group, &mine);
    if (!any_reason(bootstrap, group, &mine, all, why)) accept_offers(w, group, all, &mine);
    bool refused = any_reason(bootstrap, group, &mine, all, why);
    if (mine.file >= 0) close(mine.file); // by now all ranks that can have mapped it
    free(all);
    w->wire = {"ipc", false, group, NULL, meet, post, NULL, close_wire};
    if (refused) {
        close_wire(&w->wire);
        return NULL;
    }
    make_lanes(w, group);
    return &w->wire;
}
