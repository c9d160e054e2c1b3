// Exchanges and native collectives of a group by NCCL, all on one urgent stream.
//
// NCCL matches the messages of a pair by order alone, and requests of one communicator run one after another;
// an exchange is a group of a send and a receive, which end together, and a unit is a group of all its exchanges. So the
// schedules must send and receive in the same order on both sides, and must complete even if every rank takes one exchange at a
// time:
// tests/commfuse/wire_check.h holds all of them against that (wire order, wire deadlock). Requests that `after`
// names are of the same group, so the stream's order is enough.
//
// NCCL's kernels stand on multiprocessors that a matrix product wants, too, and nobody is moved away from one. So the blocks of
// an exchange are limited, on a communicator of their own, and products beside it leave them free (cf_cuda_leave): a product
// whose kernel keeps all multiprocessors until it ends would hold the exchange up, or find its own place taken and need as
// long again for the rest. Native collectives keep what NCCL gives them, as they are what commfuse is compared with.
// Groups have communicators of their own, too, and with so few blocks the kernels of all of them find room beside each
// other, whatever order they start in.
//
// Communicators are blocking ones. A non-blocking one starts a thread for every call, and all that it can be
// interrupted for are calls at start, which deadlines guard here. In the steps nothing waits inside NCCL, as all
// pairs are connected by then.
#include "transport_cuda.h"
#include "watch.h"
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct nccl_wire {
    cf_wire wire;
    ncclComm_t comm;
    cf_stream *stream;
    int32_t *flag; // what a barrier adds up
    int most;      // blocks of a kernel; 0: NCCL chooses
    char news[512];
} nccl_wire;

static void check(ncclResult_t code, const char *call, ncclComm_t comm) {
    if (code == ncclSuccess) return;
    cf_die("see the messages of the other ranks: one may have died; NCCL_DEBUG=WARN says more", "%s failed: %s: %s", call,
           ncclGetErrorString(code), ncclGetLastError(comm));
}
#define CHECK(call, comm) check((call), #call, comm)

static ncclDataType_t nccl_type(cf_dtype dtype) {
    static const ncclDataType_t type[] = {ncclFloat32, ncclFloat64, ncclInt64, ncclBfloat16, ncclUint8};
    return type[dtype];
}

static void exchange(nccl_wire *w, const cf_request *requests, int count, cudaStream_t stream) {
    ncclDataType_t type = nccl_type(requests->dtype);
    CHECK(ncclGroupStart(), w->comm);
    for (const cf_request *r = requests; r < requests + count; r++) {
        if (r->send_to >= 0 && r->send_count > 0)
            CHECK(ncclSend(r->send, (size_t)r->send_count, type, r->send_to, w->comm, stream), w->comm);
        if (r->recv_from >= 0 && r->recv_count > 0)
            CHECK(ncclRecv(r->recv, (size_t)r->recv_count, type, r->recv_from, w->comm, stream), w->comm);
    }
    CHECK(ncclGroupEnd(), w->comm);
}

// NCCL halves the channels of a pair until those of all ranks are no more than the blocks of a kernel. Native collectives get
// no room: they are the baseline, as NCCL and the products' library have it.
static int blocks_of(const nccl_wire *w, const cf_request *r, int count) {
    if (r->kind != CF_REQUEST_EXCHANGE || w->most == 0) return 0;
    int channels = w->most;
    while (channels > 1 && channels * r->group->size > w->most) channels /= 2;
    return channels * count < w->most ? channels * count : w->most;
}

static char *block_of(void *base, const cf_request *r, int rank) {
    return (char *)base + rank * r->stride * cf_dtype_size(r->dtype);
}

// Blocks side by side are one call; with room between them they are a broadcast of each.
static void allgather(nccl_wire *w, const cf_request *r, cudaStream_t stream) {
    ncclDataType_t type = nccl_type(r->dtype);
    size_t count = (size_t)r->send_count;
    if (r->stride == r->send_count) {
        CHECK(ncclAllGather(r->send, r->recv, count, type, w->comm, stream), w->comm);
        return;
    }
    CHECK(ncclGroupStart(), w->comm);
    for (int i = 0; i < r->group->size; i++) {
        char *block = block_of(r->recv, r, i);
        const void *send = i == r->group->rank ? r->send : block;
        CHECK(ncclBroadcast(send, block, count, type, i, w->comm, stream), w->comm);
    }
    CHECK(ncclGroupEnd(), w->comm);
}

static void reduce_scatter(nccl_wire *w, const cf_request *r, cudaStream_t stream) {
    if (r->dtype == CF_BYTE) cf_die(NULL, "%s: bytes are not added", r->label);
    CHECK(ncclReduceScatter(r->send, r->recv, (size_t)r->send_count, nccl_type(r->dtype), ncclSum, w->comm, stream), w->comm);
}

static void alltoall(nccl_wire *w, const cf_request *r, cudaStream_t stream) {
    ncclDataType_t type = nccl_type(r->dtype);
    size_t count = (size_t)r->send_count;
    CHECK(ncclGroupStart(), w->comm);
    for (int i = 0; i < r->group->size; i++) {
        CHECK(ncclSend(block_of((void *)r->send, r, i), count, type, i, w->comm, stream), w->comm);
        CHECK(ncclRecv(block_of(r->recv, r, i), count, type, i, w->comm, stream), w->comm);
    }
    CHECK(ncclGroupEnd(), w->comm);
}

static void post(cf_wire *wire, cf_request *r, int count, cf_stream *stream) {
    nccl_wire *w = (nccl_wire *)wire->state;
    cudaStream_t on = cf_cuda_stream(w->stream);
    for (int i = 0; i < 2 * count; i++)
        if (r[i / 2].after[i % 2] && r[i / 2].after[i % 2]->group != r->group)
            cf_die(NULL, "%s waits for a request of another group", r->label);
    cf_stream_after(w->stream, cf_request_ready(r, stream));
    cf_moment begin = cf_moment_now(w->stream);
    switch (r->kind) {
    case CF_REQUEST_EXCHANGE:
        exchange(w, r, count, on);
        break;
    case CF_REQUEST_ALLGATHER:
        allgather(w, r, on);
        break;
    case CF_REQUEST_REDUCE_SCATTER:
        reduce_scatter(w, r, on);
        break;
    case CF_REQUEST_ALLTOALL:
        alltoall(w, r, on);
        break;
    case CF_REQUEST_BARRIER:
        CHECK(ncclAllReduce(w->flag, w->flag, 1, ncclInt32, ncclSum, w->comm, on), w->comm);
        break;
    }
    cf_moment here = cf_moment_untimed(w->stream), end = cf_moment_now(w->stream);
    int blocks = blocks_of(w, r, count);
    if (wire->posted <= wire->waited || wire->blocks < blocks) wire->blocks = blocks;
    for (int i = 0; i < count; i++) r[i].begin = begin, r[i].here = here, r[i].arrival = r[i].end = end;
}

static const char *look(cf_wire *wire) {
    nccl_wire *w = (nccl_wire *)wire->state;
    ncclResult_t error = ncclSuccess;
    CHECK(ncclCommGetAsyncError(w->comm, &error), w->comm);
    if (error == ncclSuccess || error == ncclInProgress) return NULL;
    snprintf(w->news, sizeof w->news, "NCCL reports for the %s group: %s: %s", wire->group->name, ncclGetErrorString(error),
             ncclGetLastError(w->comm));
    return w->news;
}

static void detach(cf_wire *wire) {
    (void)wire; // NCCL does that itself
}

static void close_wire(cf_wire *wire) {
    nccl_wire *w = (nccl_wire *)wire->state;
    CHECK(ncclCommDestroy(w->comm), w->comm);
    cf_stream_free(w->stream);
    cf_free(w->flag);
    free(w);
}

// The id that member 0 of this rank's group has made. All ranks give one, most of them nothing.
static ncclUniqueId id_of_group(cf_bootstrap *bootstrap, const cf_group *group, bool wanted) {
    ncclUniqueId mine = {}, *all = (ncclUniqueId *)calloc((size_t)bootstrap->size, sizeof *all);
    if (!all) cf_die(NULL, "out of memory to bind group %s", group->name);
    if (wanted && group->rank == 0) CHECK(ncclGetUniqueId(&mine), NULL);
    bootstrap->allgather(bootstrap, &mine, all, sizeof mine);
    mine = all[group->world[0]];
    free(all);
    return mine;
}

void cf_wire_nccl_environment(void) {
    setenv("NCCL_RUNTIME_CONNECT", "0", 0); // 1: collectives connect in the step that is first to need them
}

// By different host names it is misled, in any version; the variable is known from 2.30.3 on.
bool cf_wire_nccl_shares_gpus(void) {
    int version = 0;
    return getenv("NCCL_HOSTID") ||
           (ncclGetVersion(&version) == ncclSuccess && version >= 23003 && getenv("NCCL_MULTI_RANK_GPU_ENABLE"));
}

cf_wire *cf_wire_nccl(cf_bootstrap *bootstrap, const cf_group *group, bool wanted, int blocks, double timeout_s) {
    ncclUniqueId id = id_of_group(bootstrap, group, wanted);
    if (!wanted) return NULL;
    nccl_wire *w = (nccl_wire *)calloc(1, sizeof *w);
    if (!w) cf_die(NULL, "out of memory to bind group %s", group->name);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    if (blocks > 0) config.maxCTAs = w->most = blocks;
    cf_deadline_begin("NCCL connects the ranks", timeout_s);
    CHECK(ncclCommInitRankConfig(&w->comm, group->size, id, group->rank, &config), NULL);
    cf_deadline_end();
    w->stream = cf_stream_create_urgent();
    w->flag = (int32_t *)cf_alloc(sizeof *w->flag, "communication staging");
    w->wire.name = "nccl";
    w->wire.group = group;
    w->wire.state = w;
    w->wire.post = post;
    w->wire.look = look;
    w->wire.detach = detach;
    w->wire.close = close_wire;
    return &w->wire;
}
