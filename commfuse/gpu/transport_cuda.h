// Shared by transport_cuda.cu and its wires, transport_nccl.cu, transport_ipc.cu and transport_levels.cu. Never included by C.
#pragma once
#include "cuda.h"
#include "../context.h"
extern "C" { // these are for C
#include "../base/limits.h"
#include "../launch/watch.h"
}

// How the bytes of one group move. Made by bind, collectively; post() only enqueues. It is the first field of a wire of each kind.
struct cf_wire {
    const char *name; // "nccl", "ipc", or both
    bool nccl;        // native collectives are NCCL's
    const cf_group *group;
    cf_stream *stream; // on which requests end
    // Call before post until it returns -1. Informs the peers where this rank receives, and learns where they do. Otherwise returns
    // the group rank of a peer that has not come to this request. Never waits. NULL: not needed.
    int (*meet)(cf_wire *, cf_request *requests, int count);
    // Enqueues the transfers, one or a unit of `count` exchanges, after the work enqueued on `stream` so far and after the
    // arrivals of `after`; sets begin, arrival and end of each. Ends follow each other in the order posted.
    void (*post)(cf_wire *, cf_request *requests, int count, cf_stream *stream);
    // The library's message about a dead peer (static storage); NULL: none. The function NULL: it never has one.
    const char *(*look)(cf_wire *);
    void (*close)(cf_wire *); // call it when all transfers are complete on all ranks
    // The transport's:
    const cf_stream *waiter = NULL; // the stream that waited last
    int64_t waited = 0;             // number of the last `end` that it waited for
    int64_t posted = 0;             // number of the last `end` posted
    int blocks = 0;                 // most multiprocessors that kernels of requests under way take
};

// Instead of a copy: a kernel of CF_PACED_BLOCKS blocks that moves gb_per_s at most.
enum { CF_PACED_BLOCKS = 4 };
CF_EXTERN_C_BEGIN
void cf_paced_copy(void *to, const void *from, int64_t bytes, double gb_per_s, cf_stream *stream);

// Words of host memory that processes share: a process that finds a word there also sees what its writer wrote before.
void cf_word_write(uint32_t *word, uint32_t value);
bool cf_word_is(uint32_t *word, uint32_t value);
CF_EXTERN_C_END

// When the stream that a request is posted on lets it begin.
static inline cf_event cf_request_ready(const cf_request *r, cf_stream *stream) {
    return r->posted.number ? r->posted : cf_event_record_untimed(stream);
}

// All ranks of the world call both at once, each with its group. Both use the bootstrap equally often whatever they find, so
// groups may differ.

// wanted: false if this group needs none; returns NULL then. blocks: most thread blocks of a kernel; 0: NCCL chooses.
enum { COLLECTIVE_BLOCKS = 16 }; // most of a collective's beside which products run: a network card needs two to four
cf_wire *cf_wire_nccl(cf_bootstrap *bootstrap, const cf_group *group, bool wanted, int blocks);
// For members of one host. Returns NULL on all of them, with the reason in `why`, unless every one can map the memory of every
// other.
cf_wire *cf_wire_ipc(cf_bootstrap *bootstrap, const cf_group *group, char why[192]);
// Of the wires of a group: near joins its members on this host, `here`, far all of them. It owns all three.
cf_wire *cf_wire_levels(const cf_group *group, cf_group *here, cf_wire *near, cf_wire *far);
