// Exchanges of a group on several hosts: by ipc between ranks of one host, by NCCL between hosts. Each half of an exchange takes
// the wire that reaches its peer. Barriers and native collectives are NCCL's.
//
// Neither wire knows of the other's requests. So NCCL's stream waits for what has come by ipc and is sent on, and the stream on
// which requests end by ipc waits for NCCL's, so that all end in the order posted. As a request waits only for what was posted
// before it, on any rank, this cannot block.
#include "transport_cuda.h"

typedef struct side { // what one of the two wires moves of the unit in meet() or post()
    cf_wire *wire;
    cf_request *parts; // requests with the halves that it can reach; `next` is the request of the unit
    int64_t count, room;
} side;

typedef struct levels_wire {
    cf_wire wire;
    cf_group *here; // the members on this host
    side near, far;
} levels_wire;

// A member's rank in `here`; -1: it is on another host, or no member.
static int place_of(const levels_wire *w, int member) {
    for (int i = 0; i < w->here->size && member >= 0; i++)
        if (w->here->world[i] == w->wire.group->world[member]) return i;
    return -1;
}

static void add_part(side *s, cf_request *r, const cf_group *group, int send_to, int recv_from) {
    if (r->kind == CF_REQUEST_EXCHANGE && send_to < 0 && recv_from < 0) return;
    s->parts = (cf_request *)cf_host_grow(s->parts, &s->room, s->count + 1, sizeof *s->parts, "a unit's parts");
    cf_request *part = &s->parts[s->count++];
    *part = *r;
    part->next = r, part->group = group, part->send_to = send_to, part->recv_from = recv_from;
}

static void split(levels_wire *w, cf_request *r, int count) {
    if (w->near.count + w->far.count > 0) return;
    for (int i = 0; i < count; i++) {
        const int send_to = r[i].send_to, recv_from = r[i].recv_from, to = place_of(w, send_to), from = place_of(w, recv_from);
        if (r->kind == CF_REQUEST_EXCHANGE) add_part(&w->near, &r[i], w->here, to, from);
        add_part(&w->far, &r[i], r->group, to < 0 ? send_to : -1, from < 0 ? recv_from : -1);
    }
}

static int meet(cf_wire *wire, cf_request *r, int count) {
    levels_wire *w = (levels_wire *)wire;
    split(w, r, count);
    const int peer = w->near.count > 0 ? w->near.wire->meet(w->near.wire, w->near.parts, (int)w->near.count) : -1;
    for (int i = 0; peer >= 0; i++)
        if (place_of(w, i) == peer) return i;
    return -1;
}

static void post_side(levels_wire *w, side *s, cf_event ready, cf_stream *stream) {
    if (s->count == 0) return;
    s->parts->posted = ready;
    s->wire->post(s->wire, s->parts, (int)s->count, stream);
    if (w->wire.blocks < s->wire->blocks) w->wire.blocks = s->wire->blocks;
}

static void take_results(side *s) {
    for (const cf_request *part = s->parts; part < s->parts + s->count; part++) {
        part->next->begin = part->begin;
        if (part->recv_from >= 0) part->next->arrival = part->arrival, part->next->here = part->here;
    }
    s->count = 0;
}

static void post(cf_wire *wire, cf_request *r, int count, cf_stream *stream) {
    levels_wire *w = (levels_wire *)wire;
    cf_stream *ends = w->near.wire->stream, *far = w->far.wire->stream;
    const cf_event ready = cf_request_ready(r, stream);
    if (wire->posted <= wire->waited) wire->blocks = 0;
    post_side(w, &w->near, ready, stream);
    for (int i = 0; i < w->far.count; i++)
        for (int k = 0; k < 2; k++)
            if (w->far.parts[i].after[k]) cf_stream_after(far, w->far.parts[i].after[k]->here);
    if (r->kind != CF_REQUEST_EXCHANGE) cf_stream_after(far, cf_event_record_untimed(ends)); // a barrier is for both
    post_side(w, &w->far, ready, stream);
    if (w->far.count > 0) cf_stream_after(ends, w->far.parts->end);
    take_results(&w->far);
    take_results(&w->near);
    const cf_event end = cf_event_record(ends);
    for (int i = 0; i < count; i++) {
        r[i].end = end;
        if (r[i].recv_from < 0) r[i].arrival = r[i].here = end;
    }
}

static const char *look(cf_wire *wire) {
    cf_wire *far = ((levels_wire *)wire)->far.wire;
    return far->look(far);
}

static void close_wire(cf_wire *wire) {
    levels_wire *w = (levels_wire *)wire;
    side *sides[] = {&w->near, &w->far};
    for (int i = 0; i < 2; i++) {
        sides[i]->wire->close(sides[i]->wire);
        free(sides[i]->parts);
    }
    cf_group_free(w->here);
    free(w);
}

cf_wire *cf_wire_levels(const cf_group *group, cf_group *here, cf_wire *near, cf_wire *far) {
    levels_wire *w = (levels_wire *)cf_host_alloc(1, sizeof *w, "a group");
    w->here = here;
    w->near.wire = near, w->far.wire = far;
    w->wire = {"ipc within hosts, nccl between them", true, group, near->stream, meet, post, look, close_wire};
    return &w->wire;
}
