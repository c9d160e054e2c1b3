// What one rank does in its steps, recorded instead of done: kernels with what they would take, units of requests as they are
// posted and waited for. planned.c, a third twin of device and transport, writes it, and the layers' third twin
// (layers/kernels_planned.c); playback.h finds out how long it takes when all ranks do so.
#ifndef CF_RECORD_H
#define CF_RECORD_H

#include <stdint.h>
#include "hardware.h"
#include "extern_c.h"

CF_EXTERN_C_BEGIN

enum { CF_PLAYERS_MAX = 64 };

typedef enum {
    CF_DO_KERNEL,
    CF_DO_MOMENT, // the stream notes a time
    CF_DO_POST,
    CF_DO_AFTER,        // until the other stream has done what is recorded before `after`
    CF_DO_WAIT_ARRIVED, // until what a unit brings is here
    CF_DO_WAIT_COMPLETE,
    CF_DO_SYNC, // the host waits for the stream
    CF_DO_STEP  // a step begins here
} cf_record_kind;
typedef enum { CF_WORK_PRODUCT, CF_WORK_ATTENTION, CF_WORK_MEMORY, CF_WORK_KINDS } cf_work_kind;

enum { CF_STREAMS = 2 };
typedef struct cf_record_entry {
    cf_record_kind kind;
    cf_work_kind work; // KERNEL
    int stream;
    int unit;         // POST and WAIT
    const char *name; // KERNEL; a constant
    double ms;        // KERNEL, if it has the device alone; MOMENT
    // KERNEL: after what it takes in any case, so many blocks, each of them so long on a multiprocessor; none: the whole device works
    // on it for `ms`
    int64_t blocks[2];
    double block_ms[2];
    int64_t after;  // AFTER: an entry
    double host_ms; // the host comes here so long after the last SYNC
} cf_record_entry;

// Requests that are posted together. Unit `number` of a lane is the same one on all ranks. Ranks are players, world rank modulo
// their number.
typedef struct cf_record_unit {
    char label[48];
    int layer, lane, number;
    uint64_t sends_to, receives_from; // players, one bit each
    double wire_ms[CF_LINKS];         // that it keeps this rank's part of a link, if it has it alone
    double latency_ms, taken;
    int64_t bytes;
    int after, afters; // must have arrived first: units record.after[after …]
    bool bulk;
} cf_record_unit;

enum { CF_LANES = 16 };
typedef struct cf_record {
    const cf_hardware *hardware;
    int world, rank, players; // who records
    int64_t words;            // tokens of the vocabulary
    cf_record_entry *entry;
    cf_record_unit *unit;
    int *after;
    int64_t entries, units, afters, room[3];
    double host_ms;
    int lane_units[CF_LANES];
    bool copies; // copy engines serve one of the groups
    // 1 + the last unit of lane 0 that takes multiprocessors, 1 + the last of each lane that has been waited for
    int64_t posted, done[CF_LANES];
    int waiter[CF_LANES]; // the stream that has
} cf_record;

// The next entry, unit, and what that unit waits for.
cf_record_entry *cf_record_add(cf_record *record, cf_record_kind kind);
cf_record_unit *cf_record_add_unit(cf_record *record, const char *label, int lane);
void cf_record_after(cf_record *record, int unit);
// What has been recorded, now the caller's; the next record begins empty.
cf_record cf_record_finish(cf_record *record);
void cf_record_free(cf_record *record);

// planned.c: a kernel of this program's record that moves so many bytes, of so many parts that each take a multiprocessor for part_s.
// parts 0: the whole device works on it for part_s. Parts of a persistent product are computed by a block on each multiprocessor, one
// after another.
struct cf_stream;
void cf_record_kernel(struct cf_stream *stream, cf_work_kind work, const char *name, double parts, double part_s, double bytes);
// That a product takes: it leaves room for transfers beside it.
int cf_record_multiprocessors(void);
const cf_hardware *cf_record_hardware(void);

CF_EXTERN_C_END
#endif
