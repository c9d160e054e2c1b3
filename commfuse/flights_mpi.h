// Requests on their way over MPI. Each is messages in small chunks, or one call of a collective.
//
// Left to itself, the library lets all messages in flight share the wire, so that the first arrives with the last, and
// what is needed at once waits behind megabytes that are not. So there are two lanes to each peer, one for bulk. In each
// messages travel in the order posted, in small chunks of which few are under way, and what waits for another request
// lets others pass. (No lane can be stuck for ever: who is at the head has a receiver, since all ranks post their
// operations in one order, receive what they have posted whatever it comes after, and end an operation only when
// what they send for it is gone.)
//
// All of it belongs to one thread, that of transport_mpi.c; others look only at a request's `state` and `received`.
#ifndef CF_FLIGHTS_MPI_H
#define CF_FLIGHTS_MPI_H

#include <mpi.h>
#include "transport.h"

enum { CF_IDLE, CF_POSTED, CF_ACTIVE, CF_DONE }; // state of a request

typedef struct cf_flight cf_flight;

typedef struct cf_memory {
    void *at; // NULL: none
    int64_t bytes;
} cf_memory;

// Memory for flights to come: after some steps nothing is allocated any more.
typedef struct cf_pool {
    cf_memory *spare;
    int spares, capacity;
} cf_pool;

typedef struct cf_flights {
    cf_flight *active; // in the order started
    int actives, capacity;
    int (*under_way)[2]; // chunks in the lanes to each rank of the world
    cf_pool lists, stages;
    int tag_max;
    MPI_Op sum_of_bf16;
} cf_flights;

void cf_flights_open(cf_flights *all, int ranks);
void cf_flights_close(cf_flights *all);

// From here on the request is ready to receive; its group's `native` is an MPI_Comm *. A collective is called, and if it
// is blocking, has been when this returns.
void cf_flights_start(cf_flights *all, cf_request *r);
// Send what may be sent now. True: something was.
bool cf_flights_send(cf_flights *all);
// Look what has come, and mark it. True: a request has arrived or is complete.
bool cf_flights_test(cf_flights *all);

// Is a collective under way, in this group (NULL: in any)?
bool cf_flights_collective(const cf_flights *all, const cf_group *group);
// Do chunks that may be sent wait until others are gone?
bool cf_flights_hold_back(const cf_flights *all);

// Ends the run unless MPI_SUCCESS. r: what it was for, or NULL.
void cf_mpi_check(int code, const char *call, const cf_request *r);

// NULL: yes. Any thread may ask. Who is about to sleep has said so before it asks, and the other thread looks for sleepers
// after it has written: in one order for all, or both may miss each other (on AArch64, where a weaker load may be early).
static inline bool cf_reached(const cf_request *r, cf_point point) {
    if (!r || __atomic_load_n(&r->state, __ATOMIC_SEQ_CST) == CF_DONE) return true;
    return point == CF_ARRIVED && __atomic_load_n(&r->received, __ATOMIC_SEQ_CST);
}

#endif
