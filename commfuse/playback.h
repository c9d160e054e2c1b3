// What recorded steps (record.h) take when all ranks do the same on one machine: several streams, groups and links, where
// replay.h has one operation.
//
//   kernels     of each of two streams in order, when the host has started them. GPU: each block keeps its multiprocessor until it
//               ends, the kernel that came first begins with all of its blocks first, and work for the whole device shares what
//               blocks and units leave. CPU: so much slower as transfers take
//   units       of one lane (a group's; CPU: those in bulk apart; GPU: native collectives, which have a communicator) in order.
//               One goes when it is posted, what it waits for is here, some microseconds have passed, it has its multiprocessors
//               (GPU: as they become free, before kernels, until it has arrived), the unit before it is done (GPU: has arrived;
//               CPU: has left), and those that it sends to have come as far (CPU: have posted it). Units of one rank on one link
//               share it; on a CPU those in bulk give way
//   arrival     when all that send to a rank in this unit are through, and the latency has passed
//
// Ranks are alike but for their place in a replica, so players are the ranks of the first replica and stand for those of all;
// or, to test that, all ranks are players. One clock; between two events all rates are constant.
#ifndef CF_PLAYBACK_H
#define CF_PLAYBACK_H

#include "record.h"
#include "trace.h"
#include "extern_c.h"

CF_EXTERN_C_BEGIN

enum { CF_PLACES = 64 };
typedef struct cf_place_exposed {
    char label[48];
    double ms;
} cf_place_exposed;

typedef struct cf_played { // of the last step that begins and ends
    double step_ms;        // from the last player's begin to the last player's end
    // Of the player that waited longest:
    double work_ms[CF_WORK_KINDS], exposed_ms, host_ms; // kernels by themselves; waits for units; waits for the host
    double slowed_ms; // what kernels take longer than alone, less what both streams compute at the same time
    double comm_ms;   // in which its units were in flight
    int places;
    cf_place_exposed place[CF_PLACES]; // exposed, by operation; the longest first
} cf_played;

// Every player's record, all of the same step. events: NULL, or of each player; the caller frees them. Dies on a deadlock, with
// player and operation.
typedef struct cf_played_events {
    cf_trace_event *event;
    int64_t count, room;
} cf_played_events;
cf_played cf_playback(const cf_record *const *records, int players, cf_played_events *events);

CF_EXTERN_C_END
#endif
