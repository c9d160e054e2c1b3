// What transport_cuda.cu and its two ways to move bytes, transport_nccl.cu and transport_ipc.cu, share. Never
// included by C.
#ifndef CF_TRANSPORT_CUDA_H
#define CF_TRANSPORT_CUDA_H

#include "bootstrap.h"
#include "cuda.h"
#include "transport.h"

// One group's way to move bytes. Made by bind, collectively; everything post() does is enqueued.
typedef struct cf_wire cf_wire;
struct cf_wire {
    const char *name; // "nccl", "ipc"
    const cf_group *group;
    void *state;
    const cf_stream *waiter; // the stream that has waited last
    int64_t waited;          // the number of the last `end` that it has waited for
    int64_t chunk_bytes;     // a message is enqueued in pieces of so many, each some launches; 0: whole
    // Enqueue the transfers, one or a unit of `count` exchanges, behind the work enqueued on `stream` so far and behind
    // what `after` brings; set begin, arrival and end of each. Ends follow each other in the order posted.
    void (*post)(cf_wire *, cf_request *requests, int count, cf_stream *stream);
    // What the library knows of a peer that is gone, in words that stay; NULL: nothing.
    const char *(*look)(cf_wire *);
    // All transfers are complete on all ranks. detach lets go of the other ranks' memory; when all have, close
    // frees the wire.
    void (*detach)(cf_wire *);
    void (*close)(cf_wire *);
};

// When a request may begin, as far as the stream it is posted on has a say.
static inline cf_moment cf_request_ready(const cf_request *r, cf_stream *stream) {
    return r->posted.number ? r->posted : cf_moment_now(stream);
}

// Sets what NCCL reads from the environment, unless the user has. Belongs to the start, while the process has one
// thread: libraries read the environment in threads of theirs, and setenv may move it away under them.
void cf_wire_nccl_environment(void);
// Whether ranks that use one GPU may have a communicator: NCCL refuses it unless it is told to, by the environment.
bool cf_wire_nccl_shares_gpus(void);

// Both are called by all ranks of the world at once, each with its own group, and use the bootstrap equally
// often whatever they find, so that groups may differ.

// wanted: false where this group shall not have one; then NULL. blocks: thread blocks of a kernel, at most; 0: NCCL's own
// choice.
cf_wire *cf_wire_nccl(cf_bootstrap *bootstrap, const cf_group *group, bool wanted, int blocks,
                      double timeout_s);
// NULL, for all members alike, if not every member can map the memory of every other one; `why` says so in words. one_host:
// whether the group's members are thought to be on one; if not, nothing is tried.
cf_wire *cf_wire_ipc(cf_bootstrap *bootstrap, const cf_group *group, bool one_host, char why[128]);

#endif
