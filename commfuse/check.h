// Checksums on exchanged data: they find silent corruption on the wire and name the transfer.
//
// A process has one cf_check, in its cf_context; each operation has cf_checksums, which only the executor uses. A difference stays
// in device memory until cf_check_verdict(). The program calls that where the host waits for the device anyway and before anything
// irreversible: before the optimizer writes weights. Not covered: data that was wrong before it was sent, and native collectives.
#pragma once

#include "device.h"
#include "mesh.h"
#include "schedule.h"
#include "transport.h"
#include "base/extern_c.h"

CF_EXTERN_C_BEGIN

typedef struct cf_check cf_check;

cf_check *cf_check_create(void);
void cf_check_free(cf_check *check); // NULL is allowed
// An error (false) if this rank received other data than was sent, in an operation finished on `stream`. It names operation, slice
// and sender, once. check NULL: true.
bool cf_check_verdict(cf_check *check, cf_stream *stream);

// --- for the executor ---

typedef struct cf_checksums cf_checksums;

// NULL if check is NULL or the schedule has no exchange. label: "reduce-scatter mlp.fc2". All arguments must outlive the result.
// The tag of a checksum is its payload's plus `tags`.
cf_checksums *cf_checksums_create(cf_check *check, const cf_schedule *schedule, const cf_group *group, const char *label, int tags);
void cf_checksums_free(cf_checksums *sums, cf_stream *stream); // NULL is allowed; gives the verdict first

// A run begins. rows: of a shard; row_bytes: of a row.
void cf_checksums_begin(cf_checksums *sums, int64_t rows, int64_t row_bytes, int layer, int step, cf_stream *stream);
// Posts the checksum of an EXCHANGE step whose payload has been posted.
void cf_checksums_post(cf_checksums *sums, int step, const cf_request *payload, cf_transport *transport, cf_stream *stream);
// Call it when the data of an EXCHANGE step has arrived on the stream, before it is used.
void cf_checksums_arrived(cf_checksums *sums, int step, const cf_request *payload, cf_stream *stream);
// The request of a step's checksum. All must be complete on the stream before the comparison.
cf_request *cf_checksums_request(cf_checksums *sums, int step);
void cf_checksums_compare(cf_checksums *sums, cf_stream *stream);

CF_EXTERN_C_END
