// Replays schedules over given costs: how long would an operation take if a slice cost this much and the link were this fast? It
// walks the real lists of steps by the rules of the executor (fuse.c).
//
//   COMPUTE, ADD, COPY  run one after another in list order, each once the transfers it names are done
//   EXCHANGE            is posted when the list reaches it, and ready once the transfers it names are done. It is done when both
//                       its halves are; steps that name it wait for its receiving half only (coupled: for both)
//   a transfer          starts when the sender is ready, the receiver's EXCHANGE is posted (coupled: ready), and the link that
//                       joins them is free at both ends. It holds it for transfer_ms and arrives latency_ms later. A rank has
//                       several links, such as one within its host and one between hosts, or one to each peer; each is full
//                       duplex. A sender's transfers on a link go in the order posted (transport_mpi.c), but one that is not
//                       ready, or whose receiver is busy, lets others pass; coupled: units go one after another. Of several
//                       senders to one receiver the one that has been ready longest goes first
//   COLLECTIVE          starts when all ranks are ready and all links free, and holds all links for transfer_ms
//
// One clock serves all ranks: everything that can happen now does, then the clock moves on to the next instant at which something
// ends. If nothing will end any more, the run is complete or deadlocked.
#pragma once
#include "schedule.h"

CF_EXTERN_C_BEGIN

typedef struct cf_machine {
    double (*cost_ms)(const void *argument, const cf_schedule *schedule, const cf_step *step); // of COMPUTE, ADD and COPY
    double (*transfer_ms)(const void *argument, const cf_schedule *schedule, const cf_step *step);
    const void *argument; // of all
    double latency_ms;
    bool coupled; // as in NCCL: the two halves of an exchange end together, and units go in order
    // A rank has this many links, and this one takes a transfer, at both of its ends. 0 and NULL: there is one.
    int links;
    int (*link_of)(const void *argument, const cf_schedule *schedule, int from, int to);
} cf_machine;

typedef struct cf_replayed {
    double finished_ms; // when the last rank has finished
    double exposed_ms;  // longest wait of a rank's compute stream, the wait at the end included
} cf_replayed;

// schedule[r]: of rank r; all of one operation, and correct (schedule_check.h). count: their number, or 1: any rank's stands for
// all, if each rank's schedule is its neighbour's with all ranks shifted by one and costs are equal on all ranks. NAN on an error:
// a deadlock, with rank and step.
cf_replayed cf_replay(cf_schedule *const *schedule, int count, const cf_machine *machine);

CF_EXTERN_C_END
