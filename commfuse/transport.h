// What moves bytes between ranks. One struct of functions; transport_mpi.c fills it on CPUs, transport_nccl.cu and
// transport_ipc.cu on GPUs, where transport_cuda.cu chooses between the two for each group. A transport knows requests, not
// schedules (of schedule.h only the names of routes): pointers, sizes, peers and what to wait for.
//
// Life of a request: the executor fills it and posts it; the transport sends once what every request in `after` brings has
// arrived, and marks the request arrived and then complete. What it receives may come as soon as it is posted. Requests between
// one pair of ranks with the same tag are matched in the order posted. Memory of a request belongs to the caller and must stay
// valid until it is complete. The sending half of an exchange lasts until its peer is ready to receive; a wait for the other half
// does not wait for that peer. But messages to one peer, bulk and others apart, travel in the order posted: a peer must post what
// it receives in that order too, before it waits for any of it.
#ifndef CF_TRANSPORT_H
#define CF_TRANSPORT_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "device.h"
#include "die.h"
#include "mesh.h"
#include "schedule.h"
#include "extern_c.h"

CF_EXTERN_C_BEGIN

typedef enum {
    CF_REQUEST_EXCHANGE,       // point to point, both halves together
    CF_REQUEST_ALLGATHER,      // native collectives: the baselines
    CF_REQUEST_REDUCE_SCATTER, //
    CF_REQUEST_ALLTOALL,
    CF_REQUEST_BARRIER
} cf_request_kind;

typedef enum {
    CF_ARRIVED, // what it brings is here; a request that only sends, and a collective: complete
    CF_COMPLETE // its memory may be reused
} cf_point;

typedef struct cf_request {
    cf_request_kind kind;
    bool blocking; // collectives: the library's blocking call (mode none) rather than its non-blocking one
    const cf_group *group;
    cf_dtype dtype;
    // EXCHANGE: group ranks, -1: half absent; counts in elements of dtype.
    int send_to, recv_from, send_tag, recv_tag;
    const void *send;
    void *recv;
    int64_t send_count, recv_count;
    // Collectives: `send_count` elements per rank.
    //   ALLGATHER       block of rank i lands at recv + i · stride elements (send may lie inside recv)
    //   REDUCE_SCATTER  send holds N blocks side by side, recv gets the own one; no overlap
    //   ALLTOALL        block for rank i is read at send + i · stride, from rank i lands at recv + i · stride
    int64_t stride;
    // EXCHANGE: what is posted later may pass it, other bulk messages to the same peer may not. Both ends say the same.
    // (On GPUs a group's requests run in the order posted, and groups beside one another.)
    bool bulk;
    const struct cf_request *after[2]; // send only when what these bring has arrived; NULL: none
    // For messages: "reduce-scatter mlp.fc2", layer or -1, step or -1
    const char *label;
    int layer, step;
    cf_moment posted; // when it was posted, on the stream it is posted on, for traces; or nothing
    // Set by the transport
    void *to;                // GPUs of one host: where the peer receives it
    int state;               // atomic: 0 idle, 1 posted, 2 done
    int received;            // atomic: the receiving half is done, if there is one
    cf_moment begin, end;    // in flight between these
    cf_moment arrival;       // GPU: what it brings is here
    cf_moment here;          // GPU: the same without a time, a little sooner: streams wait for this
    struct cf_request *next; // the transport's queue
} cf_request;

// A request whose halves are absent, about no layer and step.
static inline cf_request cf_request_of(cf_request_kind kind, const cf_group *group, cf_dtype dtype, const char *label) {
    cf_request r;
    memset(&r, 0, sizeof r);
    r.kind = kind, r.group = group, r.dtype = dtype, r.label = label;
    r.send_to = r.recv_from = r.layer = r.step = -1;
    return r;
}

// Payload that this rank has to send for a request. (What a library's collective makes of it is its own affair.)
static inline int64_t cf_request_bytes(const cf_request *r) {
    if (r->kind == CF_REQUEST_BARRIER) return 0;
    int64_t peers = r->kind == CF_REQUEST_EXCHANGE ? r->send_to >= 0 : r->group->size - 1;
    return peers * r->send_count * cf_dtype_size(r->dtype);
}

// What things cost here, to the order of magnitude: what choice.h reckons with.
typedef struct cf_costs {
    double latency_s;   // of an exchange: posted, moved, and found to have arrived
    double message_s;   // what one more message of a unit costs a rank
    double piece_s;     // what one more partial computation costs beyond its share of the whole
    double bytes_per_s; // of a rank's link, in each direction
    double flops_per_s; // of a rank
    cf_route route;     // of rounds
    bool native;        // native collectives may be chosen
    bool spare;         // something is left to move bytes while all threads compute: what travels can hide
    bool in_order;      // each exchange waits for the one before it, except within a unit
} cf_costs;

typedef struct cf_transport cf_transport;
struct cf_transport {
    const char *name;
    int rank, size;             // in the world
    int local_rank, local_size; // among the ranks of this host
    int local_cores;            // cores that the ranks of this host may use together
    bool in_order;              // requests of one kind and group complete in the order posted
    cf_costs costs;             // set by cf_costs_agree()
    bool collectives;           // the caller's, before bind. false: native ones are no baseline (costs.native). At first true
    void *state;
    void (*set_threads)(cf_transport *, int threads);                           // that compute in each rank (CPU); at first 1
    void (*set_timeout)(cf_transport *, double timeout_s);                      // longest wait for a peer from now on; 0: for ever
    cf_costs (*reckon)(const cf_transport *, int threads);                      // what things cost this rank
    void (*gather)(cf_transport *, const void *mine, void *all, int64_t bytes); // see cf_allgather_host
    void (*bind)(cf_transport *, cf_group *group); // collective over the group: prepare its communicator
    // Moves the data when the work enqueued on `stream` so far is done. `count` exchanges of one group that lie side by
    // side are one unit: none of them waits for another. GPUs of one host: may return only when those that it sends to
    // have posted, too.
    void (*post)(cf_transport *, cf_request *requests, int count, cf_stream *stream);
    // No need for `stream` to wait. GPU: true only where it is the stream that has waited last, and has waited for this.
    bool (*test)(cf_transport *, cf_request *request, cf_point point, cf_stream *stream);
    // Work enqueued on `stream` afterwards sees the request at that point. CPU: blocks. A rank that waits longer than
    // timeout_s (GPU: in cf_stream_sync) dies naming operation, layer, step and the peer waited for. Returns when the
    // wait ends, for traces; on a GPU, where a wait may find that all is there, that may lie before its beginning.
    cf_moment (*wait)(cf_transport *, cf_request *request, cf_point point, cf_stream *stream);
    int64_t (*bytes_sent)(cf_transport *); // since start: cf_request_bytes() of all that this rank has posted
    void (*close)(cf_transport *);         // collective; frees the transport
};

// The transport of this program, by name: "auto", "mpi" (CPU), "nccl", "ipc" (GPU). Dies
// (together) on one that it does not have. Also calls cf_device_open() and cf_die_setup().
// timeout_s: as in set_timeout, also for ranks to appear.
cf_transport *cf_transport_create(const char *name, int *argc, char ***argv, double timeout_s);

// all (size, bytes) = what every rank gives, in the host's memory: for reports between ranks, beside their steps. Collective; at
// any time. t NULL: a rank alone.
static inline void cf_allgather_host(cf_transport *t, const void *mine, void *all, int64_t bytes) {
    if (t)
        t->gather(t, mine, all, bytes);
    else
        memcpy(all, mine, (size_t)bytes);
}

// What every rank gives, (size, bytes), which the caller frees. Collective. t NULL: a rank alone.
static inline void *cf_of_all(cf_transport *t, const void *mine, int64_t bytes) {
    void *all = cf_host_alloc(t ? t->size : 1, (size_t)bytes, "what ranks report");
    cf_allgather_host(t, mine, all, bytes);
    return all;
}

// The least of what all ranks give: of bools, whether it is so everywhere. Collective.
static inline int64_t cf_least_host(cf_transport *t, int64_t mine) {
    int64_t *all = (int64_t *)cf_of_all(t, &mine, (int64_t)sizeof mine);
    for (int rank = 0; rank < t->size; rank++)
        if (all[rank] < mine) mine = all[rank];
    free(all);
    return mine;
}

// The sum of what all ranks give, in their order. Collective. t NULL: a rank alone.
static inline double cf_sum_host(cf_transport *t, double mine) {
    double *all = (double *)cf_of_all(t, &mine, (int64_t)sizeof mine), sum = 0;
    for (int rank = 0; rank < (t ? t->size : 1); rank++) sum += all[rank];
    free(all);
    return sum;
}

// Rank 0's. Collective.
static inline int64_t cf_root_host(cf_transport *t, int64_t mine) {
    return cf_least_host(t, t->rank == 0 ? mine : INT64_MAX);
}

CF_EXTERN_C_END
#endif
