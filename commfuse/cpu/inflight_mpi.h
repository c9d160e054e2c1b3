// Requests in flight over MPI. Each is a set of messages in small chunks, or one call of a collective.
//
// MPI lets all messages in flight share the wire, so the first arrives with the last, and urgent data waits for megabytes that
// are not urgent. So there are two queues to each peer, one of them for bulk. In a queue, messages travel in the order posted, in
// small chunks of which few are in flight; a message that waits for another request lets others pass. (No queue can block for ever:
// the message at its head has a receiver, because all ranks post their operations in one order, receive everything they have
// posted, and end an operation only when its sends are complete.)
//
// Only the progress thread of transport_mpi.c uses this; other threads only read a request's `state` and `received`.
#pragma once
#include <mpi.h>
#include "../launch/bootstrap.h"
#include "../transport.h"

enum { CF_POSTED = 1, CF_DONE }; // state of a request

typedef struct cf_memory {
    void *at; // NULL: none
    int64_t bytes;
} cf_memory;

// Memory of ended flights, for later ones: after some steps nothing is allocated any more.
typedef struct cf_pool {
    cf_memory *spare;
    int spares;
    int64_t capacity;
} cf_pool;

typedef struct cf_inflight {
    struct cf_flight *active; // in the order posted
    int actives;
    bool collective; // at the last cf_inflight_move() one was called and not complete
    int64_t capacity;
    int (*under_way)[2]; // chunks in the queues to each rank of the world
    cf_pool lists, stages;
} cf_inflight;

void cf_inflight_open(cf_inflight *all, int ranks);
void cf_inflight_close(cf_inflight *all);

// Posts the receives of an exchange; a collective starts when its turn comes. The group's `native` is an MPI_Comm *.
void cf_inflight_add(cf_inflight *all, cf_request *r);
// Starts, sends and ends all that is possible; true if anything was. *news becomes true if a request has arrived or is complete.
bool cf_inflight_move(cf_inflight *all, bool *news);

// True for NULL. For any thread. Sequentially consistent, so that no wake-up is lost: a thread that is about to sleep counts itself
// as a waiter and then calls this; the progress thread writes and then reads the count. (On AArch64 a weaker load may be early.)
static inline bool cf_reached(const cf_request *r, cf_point point) {
    if (!r || __atomic_load_n(&r->state, __ATOMIC_SEQ_CST) == CF_DONE) return true;
    return point == CF_ARRIVED && __atomic_load_n(&r->received, __ATOMIC_SEQ_CST);
}
