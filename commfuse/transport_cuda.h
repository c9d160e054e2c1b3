// Shared by transport_cuda.cu and its two wires, transport_nccl.cu and transport_ipc.cu. Never included by C.
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
    int64_t posted;          // the number of the last `end`
    int blocks;              // multiprocessors that the kernels of what is under way take, at most
    // To be called before post until it returns -1: says to the peers where this rank receives, and learns where they do. Else
    // the group rank of one that has not come so far. Never waits. NULL: nobody needs to know.
    int (*meet)(cf_wire *, cf_request *requests, int count);
    // Enqueue the transfers, one or a unit of `count` exchanges, after the work enqueued on `stream` so far and after the
    // arrivals of `after`; set begin, arrival and end of each. Ends follow each other in the order posted.
    void (*post)(cf_wire *, cf_request *requests, int count, cf_stream *stream);
    // A message of the library about a dead peer (static storage); NULL: none.
    const char *(*look)(cf_wire *);
    // Call when all transfers are complete on all ranks. detach unmaps the other ranks' memory; when all have, close
    // frees the wire.
    void (*detach)(cf_wire *);
    void (*close)(cf_wire *);
};

// Words of host memory that hosts of several GPUs share: what one wrote before it writes a word is seen by who finds it there.
CF_EXTERN_C_BEGIN
void cf_word_write(uint32_t *word, uint32_t value);
bool cf_word_is(uint32_t *word, uint32_t value);
CF_EXTERN_C_END

// When a request may begin, as far as the stream it is posted on decides.
static inline cf_moment cf_request_ready(const cf_request *r, cf_stream *stream) {
    return r->posted.number ? r->posted : cf_moment_untimed(stream);
}

// Sets NCCL's environment variables, unless the user has. Call at start, while the process has one thread: threads of
// libraries read the environment, and setenv may move it while they do.
void cf_wire_nccl_environment(void);
// Whether ranks that share a GPU may have a communicator: NCCL refuses unless the environment allows it.
bool cf_wire_nccl_shares_gpus(void);

// Both are called by all ranks of the world at once, each with its own group, and use the bootstrap equally
// often whatever they find, so that groups may differ.

// wanted: false if this group needs none; then NULL. blocks: most thread blocks of a kernel; 0: NCCL chooses.
cf_wire *cf_wire_nccl(cf_bootstrap *bootstrap, const cf_group *group, bool wanted, int blocks, double timeout_s);
// NULL, for all members alike, if not every member can map the memory of every other one; `why` says so in words. one_host:
// whether the group's members are thought to be on one; if not, nothing is tried.
cf_wire *cf_wire_ipc(cf_bootstrap *bootstrap, const cf_group *group, bool one_host, char why[128]);

#endif
