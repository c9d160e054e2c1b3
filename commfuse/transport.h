// A transport moves bytes between ranks. It is one struct of functions: transport_mpi.c fills it on CPUs, transport_nccl.cu and
// transport_ipc.cu on GPUs, where transport_cuda.cu chooses between the two for each group. A transport knows requests (pointers,
// sizes, peers, requests to wait for), not schedules.
//
// Life of a request: the executor fills it and posts it. The transport sends once the data of all requests in `after` has arrived,
// and marks the request arrived, then complete. Data may be received as soon as the request is posted. Requests between two ranks
// with the same tag match in the order posted. The memory of a request belongs to the caller and must stay valid until the request
// is complete. The sending half of an exchange lasts until its peer is ready to receive; CF_ARRIVED waits for the receiving half
// alone, even if the send still waits for its peer. Messages to one peer, bulk and others separately, travel in the order posted:
// the peer must post its receives in that order too, before it waits for any of them.
#pragma once
#include <stdlib.h>
#include <string.h>
#include "device.h"
#include "base/die.h"
#include "mesh.h"

CF_EXTERN_C_BEGIN

typedef enum {
    CF_REQUEST_EXCHANGE,  // point to point, both halves together
    CF_REQUEST_ALLGATHER, // native collectives: the baselines
    CF_REQUEST_REDUCE_SCATTER,
    CF_REQUEST_ALLTOALL,
    CF_REQUEST_BARRIER
} cf_request_kind;

typedef enum {
    CF_ARRIVED, // its data is here; of a request that only sends, and of a collective: complete
    CF_COMPLETE // its memory may be reused
} cf_point;

typedef struct cf_request {
    cf_request_kind kind;
    bool blocking; // collectives: by the library's blocking call
    const cf_group *group;
    cf_dtype dtype;
    // EXCHANGE: group ranks, -1: half absent; counts in elements of dtype.
    int send_to, recv_from, send_tag, recv_tag;
    const void *send;
    void *recv;
    int64_t send_count, recv_count;
    // Collectives: `send_count` elements per rank.
    //   ALLGATHER       the block of rank i arrives at recv + i · stride elements (send may be inside recv)
    //   REDUCE_SCATTER  send has N blocks side by side, recv gets the own one; no overlap
    //   ALLTOALL        the block for rank i is read at send + i · stride, that from rank i arrives at recv + i · stride
    int64_t stride;
    // EXCHANGE: messages posted later may overtake it, but not other bulk messages to the same peer. Both ends set it.
    // (On GPUs the requests of a group run in the order posted, and groups at the same time.)
    bool bulk;
    const struct cf_request *after[2]; // send only when the data of these has arrived; NULL: none
    // For messages: "reduce-scatter mlp.fc2", layer or -1, step or -1; a hash of the operation's config
    const char *label;
    int layer, step;
    uint32_t config;
    cf_event posted; // on the stream on which it is posted, for traces; or zero
    // Set by the transport
    void *to;                // GPUs of one host: where the peer receives it
    int state;               // atomic: 0 idle, 1 posted, 2 done
    int received;            // atomic: the receiving half, if there is one, is done
    cf_event begin, end;     // in flight between these
    cf_event arrival;        // GPU: its data is here
    cf_event here;           // GPU: the same, untimed and a little earlier: streams wait for this
    struct cf_request *next; // in the transport's queue; of a part of a request: the whole
} cf_request;

// A request without halves, layer and step.
static inline cf_request cf_request_of(cf_request_kind kind, const cf_group *group, cf_dtype dtype, const char *label) {
    cf_request r;
    memset(&r, 0, sizeof r);
    r.kind = kind, r.group = group, r.dtype = dtype, r.label = label;
    r.send_to = r.recv_from = r.layer = r.step = -1;
    return r;
}

// The payload that this rank has to send for a request. (A library's collective may send more.)
static inline int64_t cf_request_bytes(const cf_request *r) {
    if (r->kind == CF_REQUEST_BARRIER) return 0;
    int64_t peers = r->kind == CF_REQUEST_EXCHANGE ? r->send_to >= 0 : r->group->size - 1;
    return peers * r->send_count * cf_dtype_size(r->dtype);
}

// Costs to the order of magnitude, for choice.h.
typedef struct cf_costs {
    double latency_s;   // of an exchange: from its post until its arrival is noticed
    double message_s;   // each further message of a unit, for a rank
    double piece_s;     // overhead of each further partial computation
    double bytes_per_s; // of a rank's link within its host, in each direction
    double flops_per_s; // of a rank
    const char *rounds; // the algorithm (schedule.h) whose rounds suit it
    // Between hosts: of an exchange; of a rank, alone and while all ranks of its host send
    double network_latency_s, network_bytes_per_s, shared_bytes_per_s;
    double share_1mb, share_100mb; // of these rates, which a native collective reaches that sends so many bytes
    bool spare;                    // a core or engine is free to move bytes while all threads compute, so transfers can hide
    bool serial;                   // each exchange waits for the one before it, except within a unit
    bool one_order;                // choices keep to the order of sums of `rounds`, or of levels; no native collectives
} cf_costs;

// Of the slowest link that joins the members of a group, while all ranks of a host send.
static inline double cf_bytes_per_s(const cf_costs *c, const cf_group *group) {
    return group->hosts > 1 ? c->shared_bytes_per_s : c->bytes_per_s;
}

typedef struct cf_transport cf_transport;
struct cf_transport {
    const char *name;
    int rank, size;             // in the world
    int local_rank, local_size; // among the ranks of this host
    int local_cores;            // cores that the ranks of this host may use together
    int ranks_per_host;         // as many neighbours are on each host; 0: they are not. May be set before groups are bound: to
                                // schedule containers of one host as one host, or one host as several
    bool in_order;              // requests of one kind and group complete in the order posted
    int64_t tags;               // exchanges of a group have tags below this; 0: they need none
    cf_costs costs;             // set by cf_costs_agree()
    bool leave_for_all;         // set by the caller: products leave multiprocessors for all transfers beside them, not only for
                                // those of urgent groups and those between hosts
    bool collectives;           // set by the caller before bind; false: native collectives are not needed. Initially true
    double *timeout_s;          // longest wait for a peer, which may be changed at any time; 0: for ever
    int64_t bytes_sent;         // since start: cf_request_bytes() of all requests that this rank has posted
    void *state;
    cf_costs (*set_threads)(cf_transport *, int threads); // compute threads of each rank (CPU), 1 before; returns this rank's costs
    // (0: changes nothing; the costs do not depend on this host's cores)
    void (*gather)(cf_transport *, const void *mine, void *all, int64_t bytes); // see cf_allgather_host
    void (*bind)(cf_transport *, cf_group *group); // collective over the group: prepares its communicator
    // Moves the data once the work enqueued on `stream` so far is done. `count` exchanges of one group, adjacent in memory, are one
    // unit: none of them waits for another. GPUs of one host: may return only when the receivers have posted too.
    void (*post)(cf_transport *, cf_request *requests, int count, cf_stream *stream);
    // `stream` need not wait. GPU: true only if it is the stream that waited last, and it has waited for this request.
    bool (*test)(cf_transport *, cf_request *request, cf_point point, cf_stream *stream);
    // Work enqueued on `stream` afterwards sees the request at that point. CPU: blocks. A rank that waits longer than timeout_s
    // (GPU: in cf_stream_sync) dies, naming operation, layer, step and peer. Returns the end of the wait, for traces; on a GPU it
    // may be before the wait, if nothing had to wait.
    cf_event (*wait)(cf_transport *, cf_request *request, cf_point point, cf_stream *stream);
    void (*close)(cf_transport *); // collective; frees the transport
};

// The transport of this program, by name: "auto", "mpi" (CPU), "nccl", "ipc" (GPU). Dies (together) if the program does not have
// it. Also calls cf_device_open() and cf_die_setup(). timeout_s: longest wait for a peer, also for ranks to appear.
cf_transport *cf_transport_create(const char *name, int *argc, char ***argv, double timeout_s);

// all (size, bytes) = the `bytes` bytes at `mine` of every rank, in host memory: for reports between ranks, at any time.
// Collective. t NULL: one rank.
static inline void cf_allgather_host(cf_transport *t, const void *mine, void *all, int64_t bytes) {
    if (t)
        t->gather(t, mine, all, bytes);
    else
        memcpy(all, mine, (size_t)bytes);
}

// The same into new memory, which the caller frees.
static inline void *cf_allgather_alloc(cf_transport *t, const void *mine, int64_t bytes) {
    void *all = cf_host_alloc(t ? t->size : 1, (size_t)bytes, "what ranks report");
    cf_allgather_host(t, mine, all, bytes);
    return all;
}

// The minimum over all ranks: of bools, whether it is true on all. Collective.
static inline int64_t cf_allreduce_min(cf_transport *t, int64_t mine) {
    int64_t *all = (int64_t *)cf_allgather_alloc(t, &mine, (int64_t)sizeof mine);
    for (int rank = 0; rank < t->size; rank++)
        if (all[rank] < mine) mine = all[rank];
    free(all);
    return mine;
}

// The sum over all ranks, in rank order. Collective. t NULL: one rank.
static inline double cf_allreduce_sum(cf_transport *t, double mine) {
    double *all = (double *)cf_allgather_alloc(t, &mine, (int64_t)sizeof mine), sum = 0;
    for (int rank = 0; rank < (t ? t->size : 1); rank++) sum += all[rank];
    free(all);
    return sum;
}

// Rank 0's value. Collective.
static inline int64_t cf_broadcast(cf_transport *t, int64_t mine) {
    return cf_allreduce_min(t, t->rank == 0 ? mine : INT64_MAX);
}

// Binds the groups of a mesh on all ranks, so that choices are the same in all groups of one name. The tp group is the first,
// because it moves the most bytes and queues may run out.
static inline void cf_mesh_bind(cf_transport *t, cf_mesh *mesh) {
    cf_group *groups[] = {&mesh->tp_group, &mesh->dp_group, &mesh->world_group};
    cf_mesh_set_hosts(mesh, t->ranks_per_host);
    for (int i = 0; i < 3; i++) {
        t->bind(t, groups[i]);
        groups[i]->collectives = (cf_native_use)cf_allreduce_min(t, groups[i]->collectives);
        groups[i]->hierarchy =
            t->in_order && groups[i]->collectives == CF_CHOSEN && groups[i]->hosts > 1 && groups[i]->hosts < groups[i]->size;
    }
}

CF_EXTERN_C_END
