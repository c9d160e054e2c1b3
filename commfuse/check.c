// See check.h. Each EXCHANGE is followed by another one of eight bytes each way: the checksum of the data sent. The receiver makes
// a checksum of the data that has arrived, before it is used, and compares in finish, when all checksums have arrived. So nothing
// waits for a checksum before the end of the operation.
//
//   posted, after the payload       checksum of the data sent
//   arrived, before the first use   checksum of the data received; a stage slot may be written again later
//   finish                          compares both lists; the first difference stays on the device
//   verdict                         the host reads it and dies
//
// Forwarded slices. A ring all-gather posts before the slice that it will forward has arrived, so it cannot make a checksum. It
// forwards the checksum that came with the slice, by a request that waits for it. So all ranks down the ring compare with the
// owner's checksum, and the one after the damage finds it first. A slice is forwarded if it is sent from the place where it arrived
// (a ring reduce-scatter sends sums).
//
// Order. On all ranks the exchange of a checksum follows its payload's at once, between the same ranks. So libraries that match
// messages by order still match, and no deadlock is added (tests/commfuse/test_schedule.c checks both on doubled schedules).
//
// Memory: three words per step, allocated with the operation. Steps that receive nothing have zero in both lists.
#include "check.h"
#include "base/die.h"
#include <stdio.h>
#include <stdlib.h>

enum { OPERATION, LAYER, STEP, ROWS, ROW_BYTES }; // indices of cf_difference.about; OPERATION: the address of its cf_checksums

struct cf_check {
    cf_difference *difference; // in the device's memory
    bool compared;             // since the last verdict
};

struct cf_checksums {
    cf_check *check;
    const cf_schedule *schedule;
    const cf_group *group;
    const char *label;
    int tags;
    uint64_t *sent, *found, *came; // (steps) of data sent, of data received, those received with it; one allocation
    cf_request *request;           // one per step
    cf_difference about;           // of the run in progress
};

// --- a process ---

cf_check *cf_check_create(void) {
    cf_check *check = cf_host_alloc(1, sizeof *check, "checksums");
    check->difference = cf_alloc((int64_t)sizeof *check->difference, "checksums");
    return check;
}

void cf_check_free(cf_check *check) {
    if (!check) return;
    cf_free(check->difference);
    free(check);
}

CF_NORETURN static void report(const cf_checksums *c, const cf_difference *d) {
    const cf_schedule *s = c->schedule;
    const cf_step *step = &s->step[d->index - 1];
    const int slice = step->recv_slice, k = slice % s->slices, owner = slice / s->slices;
    const int64_t rows = cf_schedule_row(s, d->about[ROWS], k + 1) - cf_schedule_row(s, d->about[ROWS], k);
    int rank = c->group->world[c->group->rank], peer = c->group->world[step->recv_from];
    char operation[CF_OPERATION_TEXT], sender[96] = "it", before[64] = "", hint[256];
    if (s->operation == CF_ALLGATHER && owner != step->recv_from) { // forwarded in a ring
        snprintf(sender, sizeof sender, "rank %d, the owner,", c->group->world[owner]);
        snprintf(before, sizeof before, ", unless rank %d has found the same: then those before it", peer);
    }
    snprintf(hint, sizeof hint, "suspect memory or network of the hosts of ranks %d and %d%s; the last checkpoint is valid", peer,
             rank, before);
    cf_die(hint,
           "rank %d got other bytes from rank %d than %s sent: %s, slice %d of %d, %lld bytes: checksum %016llx, expected %016llx",
           rank, peer, sender, cf_operation_text(operation, c->label, (int)d->about[LAYER], (int)d->about[STEP]), slice,
           s->ranks * s->slices, (long long)(rows * d->about[ROW_BYTES]), (unsigned long long)d->found,
           (unsigned long long)d->expected);
}

bool cf_check_verdict(cf_check *check, cf_stream *stream) {
    CF_RETURNS(false);
    if (!check || !check->compared) return true;
    cf_difference d;
    cf_copy(&d, check->difference, (int64_t)sizeof d, stream);
    cf_stream_sync(stream);
    check->compared = false;
    if (d.index == 0) return true;
    cf_zero(check->difference, (int64_t)sizeof d, stream);
    report((const cf_checksums *)(intptr_t)d.about[OPERATION], &d); // valid: cf_checksums_free() calls this first
}

// --- an operation ---

// The exchange that receives the slice that this step forwards; -1: it sends this rank's own data.
static int received_by(const cf_schedule *s, const cf_step *step) {
    for (int i = 0; i < 2; i++) {
        const int wait = step->wait[i];
        if (wait < 0 || s->step[wait].kind != CF_EXCHANGE || s->step[wait].recv_from < 0) continue;
        if (s->step[wait].at.buffer == step->from.buffer && s->step[wait].at.slot == step->from.slot) return wait;
    }
    return -1;
}

cf_checksums *cf_checksums_create(cf_check *check, const cf_schedule *schedule, const cf_group *group, const char *label,
                                  int tags) {
    bool exchanges = false;
    for (int i = 0; i < schedule->count; i++) exchanges |= schedule->step[i].kind == CF_EXCHANGE;
    if (!check || !exchanges) return NULL;
    cf_checksums *c = cf_host_alloc(1, sizeof *c, "checksums");
    *c = (cf_checksums){.check = check,
                        .schedule = schedule,
                        .group = group,
                        .label = label,
                        .tags = tags,
                        .sent = cf_alloc(3 * schedule->count * (int64_t)sizeof *c->sent, "checksums"),
                        .request = cf_host_alloc(schedule->count, sizeof *c->request, "checksums")};
    c->found = c->sent + schedule->count;
    c->came = c->found + schedule->count;
    return c;
}

void cf_checksums_free(cf_checksums *c, cf_stream *stream) {
    if (!c) return;
    cf_check_verdict(c->check, stream); // while a difference can still be explained
    cf_free(c->sent);
    free(c->request);
    free(c);
}

// --- a run ---

void cf_checksums_begin(cf_checksums *c, int64_t rows, int64_t row_bytes, int layer, int step, cf_stream *stream) {
    c->about = (cf_difference){.about = {(int64_t)(intptr_t)c, layer, step, rows, row_bytes}};
    cf_zero(c->sent, 2 * c->schedule->count * (int64_t)sizeof *c->sent, stream); // and found
}

// The payload may be in flight already, so only the caller's fields of its request are read.
void cf_checksums_post(cf_checksums *c, int step, const cf_request *payload, cf_transport *transport, cf_stream *stream) {
    const bool sends = payload->send_to >= 0, receives = payload->recv_from >= 0;
    const int from = sends ? received_by(c->schedule, &c->schedule->step[step]) : -1;
    if (sends && from < 0) cf_checksum(&c->sent[step], payload->send, payload->send_count * cf_dtype_size(payload->dtype), stream);
    cf_request *r = &c->request[step];
    *r = cf_request_of(CF_REQUEST_EXCHANGE, payload->group, CF_INT64, payload->label);
    r->send_to = payload->send_to, r->send_tag = payload->send_tag + c->tags, r->send_count = sends;
    r->recv_from = payload->recv_from, r->recv_tag = payload->recv_tag + c->tags, r->recv_count = receives;
    r->send = from < 0 ? &c->sent[step] : &c->came[from];
    r->recv = &c->came[step];
    r->after[0] = from < 0 ? NULL : &c->request[from];
    r->layer = payload->layer, r->step = payload->step;
    transport->post(transport, r, 1, stream);
}

void cf_checksums_arrived(cf_checksums *c, int step, const cf_request *payload, cf_stream *stream) {
    if (payload->recv_from >= 0)
        cf_checksum(&c->found[step], payload->recv, payload->recv_count * cf_dtype_size(payload->dtype), stream);
}

cf_request *cf_checksums_request(cf_checksums *c, int step) {
    return &c->request[step];
}

void cf_checksums_compare(cf_checksums *c, cf_stream *stream) {
    cf_compare(c->came, c->found, c->schedule->count, &c->about, c->check->difference, stream);
    c->check->compared = true;
}
