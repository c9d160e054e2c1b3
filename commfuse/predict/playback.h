// Predicts how long recorded steps (record.h) take on a machine, with several streams, groups and links. (replay.h replays one
// operation.)
//
//   kernels     run in order on each of the two streams, once the host has started them. GPU: a block keeps its multiprocessor to
//               its end; the earlier kernel starts all its blocks before the later one; work for the whole device shares the
//               multiprocessors that blocks and units leave. CPU: transfers slow kernels down by the share that they take
//   units       of a queue go in order. A queue is a group's, with another one for bulk (CPU) or for native collectives, which have
//               their own communicator (GPU). A unit goes when it is posted, the units that it waits for have arrived, start_s has
//               passed, it has its multiprocessors (GPU: it gets free ones before kernels do and keeps them until it has
//               arrived), the unit before it has arrived (GPU) or left (CPU), and its receivers are ready (GPU) or have posted it
//               (CPU). The units of a rank share a link; on a CPU bulk gives way
//   arrival     when all senders to a rank in this unit have finished, and the latency has passed
//
// Ranks differ only by their place in a replica, so the players are the ranks of one replica, of its first host if it has several,
// and represent all (or, to test this, all ranks are players). One clock; all rates are constant between two events.
#pragma once
#include "record.h"
#include "../trace.h"

// Parts of a step: kernels of each kind, each alone; then waits for units; delays of kernels by other work, minus the time in which
// both streams compute; waits for the host.
enum { CF_PART_EXPOSED = CF_WORK_KINDS, CF_PART_SLOWED, CF_PART_HOST, CF_PARTS };
typedef struct cf_played { // of the last step that begins and ends
    double step_ms;        // from the last player's begin to the last player's end
    // Of the player that waited longest:
    double part_ms[CF_PARTS];
    cf_trace_sums exposed; // by operation; the longest first
} cf_played;

// records: of every player, the same steps. events: NULL, or a list for each player, to be freed by the caller. Dies on a deadlock,
// with player and operation.
cf_played cf_playback(const cf_record *const *records, int players, cf_trace_list *events);
