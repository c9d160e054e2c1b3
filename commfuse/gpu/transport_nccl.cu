// Exchanges and native collectives of a group by NCCL, all on one urgent stream.
//
// NCCL matches the messages of a pair by order alone, and runs the requests of one communicator one after another. An exchange is
// an NCCL group of a send and a receive, which end together; a unit is one NCCL group of all its exchanges. So schedules must send
// and receive in the same order on both sides, and must complete even if every rank runs one exchange at a time:
// tests/commfuse/wire_check.h checks all of them for that (wire order, wire deadlock). Requests in `after` belong to the same
// group, so the stream's order suffices.
//
// NCCL's kernels need multiprocessors that matrix products need, too, and a running block is never moved away. A product whose
// kernel keeps all multiprocessors until it ends would delay the exchange, or find its place taken and need as long again for the
// rest. So exchanges have a communicator of their own with few blocks, and products beside them leave these their
// multiprocessors (cf_cuda_left), and for native collectives that share it. Clusters would need several free ones side by side, hence
// cgaClusterSize 1 (bench_beside shows the difference). The baseline's keep the blocks that NCCL chooses. Each group has its own
// communicators. Kernels of two that do not fit beside each other could wait for each other for ever, so all start in the order of
// the calls, which is that of all ranks (NCCL_LAUNCH_ORDER_IMPLICIT). The field CTAPolicy of ncclConfig_t stays unset: it changes
// collectives on registered memory, not sends and receives.
//
// Communicators are blocking. A non-blocking one starts a thread for every call, and would only make calls at start interruptible;
// deadlines guard these. In the steps nothing waits inside NCCL, because all pairs are connected by then.
#include "transport_cuda.h"
#include <nccl.h>

typedef struct nccl_wire {
    cf_wire wire;
    ncclComm_t comm;
    int32_t *flag; // summed by barriers
    int most;      // most blocks of a kernel; 0: NCCL chooses
    char news[512];
} nccl_wire;

static void check(ncclResult_t code, const char *call, ncclComm_t comm) {
    if (code == ncclSuccess) return;
    cf_die("see the messages of the other ranks: one may have died; NCCL_DEBUG=WARN says more", "%s failed: %s: %s", call,
           ncclGetErrorString(code), ncclGetLastError(comm));
}
#define CHECK(call) check((call), #call, w->comm)

static const ncclDataType_t nccl_type[] = {ncclFloat32, ncclFloat64, ncclInt64, ncclBfloat16, ncclUint8}; // of a cf_dtype

// Blocks of an exchange's kernel: NCCL halves the channels of a pair until those of all ranks fit into the blocks of a kernel.
// Products leave none for native collectives that are the baseline, as NCCL and the products' library run it.
static int blocks_of(const nccl_wire *w, const cf_request *r, int count) {
    if (w->most == 0) return 0;
    if (r->kind != CF_REQUEST_EXCHANGE) return w->most < COLLECTIVE_BLOCKS ? w->most : COLLECTIVE_BLOCKS;
    int channels = w->most;
    while (channels > 1 && channels * r->group->size > w->most) channels /= 2;
    return channels * count < w->most ? channels * count : w->most;
}

// One request, or `count` exchanges.
static void enqueue(nccl_wire *w, const cf_request *r, int count, cudaStream_t stream) {
    const ncclDataType_t type = nccl_type[r->dtype];
    const size_t block = (size_t)r->send_count; // of a collective
    const int64_t stride = r->stride * cf_dtype_size(r->dtype);
    const int N = r->group->size;
    const char *from = (const char *)r->send;
    char *to = (char *)r->recv;
    switch (r->kind) {
    case CF_REQUEST_EXCHANGE:
        CHECK(ncclGroupStart());
        for (int i = 0; i < count; i++) {
            if (r[i].send_to >= 0 && r[i].send_count > 0)
                CHECK(ncclSend(r[i].send, (size_t)r[i].send_count, type, r[i].send_to, w->comm, stream));
            if (r[i].recv_from >= 0 && r[i].recv_count > 0)
                CHECK(ncclRecv(r[i].recv, (size_t)r[i].recv_count, type, r[i].recv_from, w->comm, stream));
        }
        CHECK(ncclGroupEnd());
        break;
    case CF_REQUEST_ALLGATHER:
        if (r->stride == r->send_count) {
            CHECK(ncclAllGather(from, to, block, type, w->comm, stream));
            break;
        }
        CHECK(ncclGroupStart()); // there is room between the blocks
        for (int i = 0; i < N; i++)
            CHECK(ncclBroadcast(i == r->group->rank ? from : to + i * stride, to + i * stride, block, type, i, w->comm, stream));
        CHECK(ncclGroupEnd());
        break;
    case CF_REQUEST_REDUCE_SCATTER:
        CHECK(ncclReduceScatter(from, to, block, type, ncclSum, w->comm, stream));
        break;
    case CF_REQUEST_ALLTOALL:
        CHECK(ncclGroupStart());
        for (int i = 0; i < N; i++) {
            CHECK(ncclSend(from + i * stride, block, type, i, w->comm, stream));
            CHECK(ncclRecv(to + i * stride, block, type, i, w->comm, stream));
        }
        CHECK(ncclGroupEnd());
        break;
    case CF_REQUEST_BARRIER:
        CHECK(ncclAllReduce(w->flag, w->flag, 1, ncclInt32, ncclSum, w->comm, stream));
        break;
    }
}

static void post(cf_wire *wire, cf_request *r, int count, cf_stream *stream) {
    nccl_wire *w = (nccl_wire *)wire;
    cf_stream_after(wire->stream, cf_request_ready(r, stream));
    cf_event begin = cf_event_record(wire->stream);
    enqueue(w, r, count, cf_cuda_stream(wire->stream));
    cf_event here = cf_event_record_untimed(wire->stream), end = cf_event_record(wire->stream);
    int blocks = blocks_of(w, r, count);
    if (wire->posted <= wire->waited || wire->blocks < blocks) wire->blocks = blocks;
    for (int i = 0; i < count; i++) r[i].begin = begin, r[i].here = here, r[i].arrival = r[i].end = end;
}

static const char *look(cf_wire *wire) {
    nccl_wire *w = (nccl_wire *)wire;
    ncclResult_t error = ncclSuccess;
    CHECK(ncclCommGetAsyncError(w->comm, &error));
    if (error == ncclSuccess || error == ncclInProgress) return NULL;
    snprintf(w->news, sizeof w->news, "NCCL reports for the %s group: %s: %s", wire->group->name, ncclGetErrorString(error),
             ncclGetLastError(w->comm));
    return w->news;
}

static void close_wire(cf_wire *wire) {
    nccl_wire *w = (nccl_wire *)wire;
    CHECK(ncclCommDestroy(w->comm));
    cf_stream_free(wire->stream);
    cf_free(w->flag);
    free(w);
}

cf_wire *cf_wire_nccl(cf_bootstrap *bootstrap, const cf_group *group, bool wanted, int blocks) {
    ncclUniqueId id = {}, *all = (ncclUniqueId *)cf_host_alloc(bootstrap->size, sizeof *all, "NCCL's ids of groups");
    if (wanted && group->rank == 0) check(ncclGetUniqueId(&id), "ncclGetUniqueId", NULL);
    bootstrap->allgather(bootstrap, &id, all, sizeof id); // most ranks give nothing
    id = all[group->world[0]];
    free(all);
    if (!wanted) return NULL;
    nccl_wire *w = (nccl_wire *)cf_host_alloc(1, sizeof *w, "a group");
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    while (blocks & (blocks - 1)) blocks += blocks & -blocks; // as NCCL does: to a power of two
    if (blocks > 0) config.maxCTAs = w->most = blocks, config.cgaClusterSize = 1;
    cf_deadline_begin("NCCL connects the ranks", bootstrap->timeout_s);
    check(ncclCommInitRankConfig(&w->comm, group->size, id, group->rank, &config), "ncclCommInitRankConfig", NULL);
    cf_deadline_end();
    w->wire = {"nccl", true, group, cf_cuda_stream_urgent(), NULL, post, look, close_wire};
    w->flag = (int32_t *)cf_alloc(sizeof *w->flag, "communication staging");
    return &w->wire;
}
