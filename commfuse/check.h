// Checksums on what ranks exchange: corruption on the way that nobody else notices is found, and where.
//
// A cf_check is of a process, like the cf_context that names it; cf_checksums are of one operation and are used by
// the executor alone. What was found waits in the device's memory until somebody asks for the verdict, at a point
// where the host waits for the device anyway and before anything is done that cannot be undone: the optimizer does
// before it writes weights. What was wrong before it was sent is not seen, nor what native collectives move.
#ifndef CF_CHECK_H
#define CF_CHECK_H

#include "device.h"
#include "mesh.h"
#include "schedule.h"
#include "transport.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cf_check cf_check;

cf_check *cf_check_create(void);
void cf_check_free(cf_check *check); // NULL is allowed
// Dies if something arrived on this rank that was not what had been sent, in an operation finished on `stream`; says
// what, where, and from whom. check NULL: returns at once.
void cf_check_verdict(cf_check *check, cf_stream *stream);
// The same for those who want to go on: true, and what cf_check_verdict() would have said; then it is forgotten.
enum { CF_CHECK_TEXT = 512 };
bool cf_check_look(cf_check *check, cf_stream *stream, char text[CF_CHECK_TEXT], char hint[CF_CHECK_TEXT]);

// --- for the executor ---

typedef struct cf_checksums cf_checksums;

// NULL if check is, or if the schedule exchanges nothing. label: "reduce-scatter mlp.fc2"; all must outlive it. Its
// messages have the tags of the payload's and `tags` more.
cf_checksums *cf_checksums_create(cf_check *check, const cf_schedule *schedule, const cf_group *group,
                                  const char *label, int tags);
void cf_checksums_free(cf_checksums *sums, cf_stream *stream); // NULL is allowed; gives the verdict first

// A run: rows_per_rank and bytes of a row of the payload.
void cf_checksums_begin(cf_checksums *sums, int64_t rows, int64_t row_bytes, int layer, int step,
                        cf_stream *stream);
// The payload of an EXCHANGE step has been posted: so is its checksum.
void cf_checksums_post(cf_checksums *sums, int step, const cf_request *payload, cf_transport *transport,
                       cf_stream *stream);
// What an EXCHANGE step brings is here, on the stream; nobody has used it yet.
void cf_checksums_arrived(cf_checksums *sums, int step, const cf_request *payload, cf_stream *stream);
// The request that was posted for the step; all must be complete, on the stream, before the comparison.
cf_request *cf_checksums_request(cf_checksums *sums, int step);
void cf_checksums_compare(cf_checksums *sums, cf_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
