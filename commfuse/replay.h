// Replays schedules over a machine that is given as costs: what would this operation take if a slice cost so much and the link
// were so fast? The lists are those of cf_schedule_create(), the rules are those of the executor (fuse.c), so a figure found
// here is one about the real order of things.
//
//   COMPUTE, ADD, COPY  in list order, one after another, each once the transfers it names are done
//   EXCHANGE            posted when the list reaches it, ready once the transfers it names are done, done when both its halves
//                       are, but for the steps that name it when its receiving half is (coupled: when both are)
//   a transfer          starts when the sender is ready, the receiver's EXCHANGE posted (coupled: ready), and the sender's
//                       egress and the receiver's ingress free; holds both for transfer_ms, and has arrived latency_ms later.
//                       Links are full duplex. Of a sender's transfers the first posted goes first (transport_mpi.c); one that
//                       is not ready, or has a busy receiver, lets others pass. Of senders to one receiver the one that has
//                       been ready for longest.
//   COLLECTIVE          starts when all ranks are ready and all links free, holds all of them for transfer_ms
//
// One clock for all ranks. At each instant everything that can happen does, then the clock goes to the next instant at which
// something ends. A run in which nothing will end any more is complete or a deadlock.
#ifndef CF_REPLAY_H
#define CF_REPLAY_H

#include "schedule.h"
#include "extern_c.h"

CF_EXTERN_C_BEGIN

typedef struct cf_machine {
    double (*cost_ms)(const void *argument, const cf_schedule *schedule,
                      const cf_step *step); // on the compute stream
    double (*transfer_ms)(const void *argument, const cf_schedule *schedule, const cf_step *step);
    const void *argument; // of both
    double latency_ms;
    bool coupled; // a transfer's two halves end as one, as in a NCCL group
} cf_machine;

typedef struct cf_replayed {
    double finished_ms; // the last rank is through
    double exposed_ms;  // most time that a rank's compute stream waited, end included
} cf_replayed;

// schedule[r]: of rank r; all of one operation, and correct (schedule_check.h). A deadlock is an error that names rank and step: NAN.
cf_replayed cf_replay(cf_schedule *const *schedule, int ranks, const cf_machine *machine);

// The same where the machine costs all ranks the same: one rank's schedule says what all do, for every rank's is that of
// its neighbour with all ranks shifted by one.
cf_replayed cf_replay_alike(cf_schedule *schedule, const cf_machine *machine);

CF_EXTERN_C_END
#endif
