// The work of one rank in its steps, recorded instead of done: kernels with their predicted times, and units of requests as they
// are posted and waited for. The third twins of device, transport (recorder.c) and kernels (layers/kernels_recorded.c) write it;
// playback.h predicts how long it takes when all ranks do it.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include "hardware.h"

enum { CF_PLAYERS_MAX = 64 };

typedef enum {
    CF_DO_KERNEL,
    CF_DO_MOMENT,       // the stream notes a time
    CF_DO_POST,         // of a unit
    CF_DO_AFTER,        // waits until the other stream has passed entry `after`
    CF_DO_WAIT_ARRIVED, // waits until the data of a unit has arrived
    CF_DO_WAIT_COMPLETE,
    CF_DO_SYNC, // the host waits for the stream
    CF_DO_STEP  // a step begins
} cf_record_kind;
typedef enum { CF_WORK_PRODUCT, CF_WORK_ATTENTION, CF_WORK_MEMORY, CF_WORK_KINDS } cf_work_kind;

enum { CF_STREAMS = 2 };
typedef struct cf_record_entry {
    cf_record_kind kind;
    cf_work_kind work; // KERNEL
    int stream;
    int unit;         // POST and WAIT
    const char *name; // KERNEL, STEP; a constant
    double ms;        // KERNEL, if it has the device alone; EVENT
    // KERNEL: after its start-up time, blocks[i] blocks of block_ms[i] each on one multiprocessor; none: the whole device works on
    // it for `ms`
    int64_t blocks[2];
    double block_ms[2];
    int64_t after;  // AFTER: an entry
    double host_ms; // when the host comes here, since the last SYNC
} cf_record_entry;

// Requests that are posted together. Unit number i is the same one on all ranks. A rank is played by player number world rank
// modulo players.
typedef struct cf_record_unit {
    char label[48];
    int layer, queue;
    uint64_t sends_to, receives_from; // players, one bit each
    double wire_ms[CF_LINKS];         // time on each of this rank's links, if alone there
    double latency_ms, taken;
    int64_t bytes;
    int after[2]; // units that must have arrived first; -1: none
    bool bulk;
} cf_record_unit;

enum { CF_QUEUES = 16 };
typedef struct cf_record {
    const cf_hardware *hardware;
    int world, rank, players; // world: number of ranks; rank: the one recorded
    int64_t words;            // size of the vocabulary
    cf_record_entry *entry;
    cf_record_unit *unit;
    int64_t entries, units, room[2];
    double host_ms;
    // Of each queue: 1 + the last unit posted for which products leave multiprocessors; 1 + the last that was waited for, on stream
    // `waiter`
    int64_t posted[CF_QUEUES], done[CF_QUEUES];
    int waiter[CF_QUEUES];
} cf_record;

// Append an entry, a unit.
cf_record_entry *cf_record_add(cf_record *record, cf_record_kind kind);
cf_record_unit *cf_record_add_unit(cf_record *record, const char *label, int queue);
// Moves the record to the caller; the next one begins empty.
cf_record cf_record_finish(cf_record *record);
void cf_record_free(cf_record *record);
// The first level of links that joins two ranks.
int cf_record_link(const cf_hardware *hardware, int a, int b);
// Writes what is played as a graph, for Graphviz or another simulator. Each node has a rank, and `ms` on a `stream`, `ms` beside all
// else (the host, a start, a latency), or `bytes` to a rank over a link of `gb_per_s`; each edge is a wait. Not in it: what transfers
// take from kernels, and that bulk gives way.
void cf_record_graph(FILE *out, const cf_record *const *records, int players);

// recorder.c: adds a kernel to this program's record. It moves `bytes` bytes and has `parts` parts, each of which takes one
// multiprocessor part_s seconds; 0 parts: the whole device works on it for part_s. In a persistent product one block on each
// multiprocessor computes the parts, one after another.
struct cf_stream;
void cf_record_kernel(struct cf_stream *stream, cf_work_kind work, const char *name, double parts, double part_s, double bytes);
int cf_record_multiprocessors(void); // those for a product: it leaves some for simultaneous transfers
const cf_hardware *cf_record_hardware(void);
