// See replay.h.
//
// predict/playback.c is another simulator, and they share no loop. This one knows one operation: a compute stream is busy until an
// instant, a link carries one transfer at a time, and the next instant is the least of a few numbers. So it is fast enough for
// choice.c, which replays thousands of schedules before the first step, and depends on schedule.h alone, so that other programs can
// call it. Playback knows whole steps: kernels that share multiprocessors with transfers, links shared at rates that change, two
// streams, queues of many operations, hosts that run ahead. Each of these is a state here that one operation does not have. What
// they share is the meaning of a step, which schedule.h has.
#include "replay.h"
#include "base/die.h"
#include "memory.h"
#include <math.h>
#include <stdlib.h>

typedef struct transfer { // a step of one rank; all else is unused for steps on the compute stream
    const cf_step *step;
    double posted_ms, ready_ms, sent_ms, received_ms; // INFINITY until known
    struct player *receiver;                          // of what it sends; NULL: it sends nothing
    struct transfer *receipt;                         // the receiver's step
    int link;                                         // that takes it
} transfer;

typedef struct player { // a rank, or one that stands for all
    const cf_schedule *schedule;
    transfer *transfer, *end;                  // one for each step, and the end of these
    int next;                                  // step
    double stream_ms, *egress_ms, *ingress_ms; // the compute stream, and each link, is busy until then
    double exposed_ms;
} player;

typedef struct replay {
    const cf_machine *machine;
    int players, links;
    player *player;
    double now_ms;
} replay;

// With one player for all ranks, the receiver's schedule is this one, shifted.
static void find_receiver(const replay *r, const player *p, transfer *t) {
    const cf_schedule *s = p->schedule;
    const cf_step *step = t->step;
    const bool symmetric = r->players == 1;
    const int from = symmetric ? step->send.rank : s->rank, owner = step->send.slice / s->slices, m = s->slices;
    const int sender = cf_schedule_shifted(s, s->rank, from, s->rank);
    const int slice = cf_schedule_shifted(s, owner, from, s->rank) * m + step->send.slice % m;
    t->receiver = &r->player[symmetric ? 0 : step->send.rank];
    if (r->machine->link_of) t->link = r->machine->link_of(r->machine->argument, s, s->rank, step->send.rank);
    for (transfer *to = t->receiver->transfer; to < t->receiver->end && !t->receipt; to++)
        if (to->step->kind == CF_EXCHANGE && to->step->recv.rank == sender && to->step->recv.slice == slice) t->receipt = to;
    if (!t->receipt) cf_die(NULL, "slice %d of rank %d is sent but not received", slice, sender);
}

static void start(replay *r, cf_schedule *const *schedule) {
    r->player = cf_host_alloc(r->players, sizeof *r->player, "a replay");
    for (player *p = r->player; p < r->player + r->players; p++) {
        const cf_schedule *s = p->schedule = schedule[p - r->player];
        p->transfer = cf_host_alloc(s->count, sizeof *p->transfer, "a replay"), p->end = p->transfer + s->count;
        p->egress_ms = cf_host_alloc(2 * r->links, sizeof *p->egress_ms, "a replay"), p->ingress_ms = p->egress_ms + r->links;
        for (int i = 0; i < s->count; i++)
            p->transfer[i] = (transfer){&s->step[i], INFINITY, INFINITY, INFINITY, INFINITY, NULL, NULL, 0};
    }
    for (player *p = r->player; p < r->player + r->players; p++)
        for (transfer *t = p->transfer; t < p->end; t++)
            if (t->step->kind == CF_EXCHANGE && t->step->send.rank >= 0) find_receiver(r, p, t);
}

static bool done(const replay *r, const transfer *t) {
    if (!cf_is_transfer(t->step)) return true; // the stream has passed it
    return (!r->machine->coupled || t->sent_ms <= r->now_ms) && t->received_ms <= r->now_ms;
}

static bool waits_done(const replay *r, const player *p, const cf_step *step) {
    for (int n = 0, wait = 0; (wait = cf_nth_wait(step, n)) >= 0; n++)
        if (!done(r, &p->transfer[wait])) return false;
    return true;
}

// Walks the list as far as the compute stream gets at this instant. Returns whether anything happened, as those below do.
static bool walk(replay *r, player *p) {
    bool moved = false;
    for (; p->next < p->schedule->count && p->stream_ms <= r->now_ms; p->next++, moved = true) {
        transfer *t = &p->transfer[p->next];
        if (cf_is_transfer(t->step)) {
            t->posted_ms = fmin(t->posted_ms, r->now_ms);
            if (p->schedule->algorithm->blocking && !(t->received_ms <= r->now_ms)) break;
            if (p->schedule->algorithm->blocking) p->exposed_ms += r->now_ms - p->stream_ms, p->stream_ms = r->now_ms;
            continue;
        }
        if (!waits_done(r, p, t->step)) break;
        p->exposed_ms += r->now_ms - p->stream_ms;
        p->stream_ms = r->now_ms + r->machine->cost_ms(r->machine->argument, p->schedule, t->step);
    }
    return moved;
}

static bool make_ready(replay *r, player *p) {
    bool moved = false;
    for (transfer *t = p->transfer; t < p->end && (!cf_is_transfer(t->step) || t->posted_ms < INFINITY); t++) {
        const cf_step *step = t->step;
        if (!cf_is_transfer(step) || t->ready_ms <= r->now_ms || !waits_done(r, p, step)) continue;
        t->ready_ms = r->now_ms;
        if (step->kind == CF_EXCHANGE && step->send.rank < 0) t->sent_ms = r->now_ms;
        if (step->kind == CF_EXCHANGE && step->recv.rank < 0) t->received_ms = r->now_ms;
        moved = true;
    }
    return moved;
}

// A collective has the same index in all lists.
static bool start_collective(replay *r, int step) {
    for (int i = 0; i < r->players * r->links; i++) {
        const player *p = &r->player[i / r->links];
        if (!(p->transfer[step].ready_ms <= r->now_ms) || p->egress_ms[i % r->links] > r->now_ms) return false;
    }
    for (player *p = r->player; p < r->player + r->players; p++) {
        const double through = r->now_ms + r->machine->transfer_ms(r->machine->argument, p->schedule, &p->schedule->step[step]);
        for (int link = 0; link < r->links; link++) p->egress_ms[link] = through;
        p->transfer[step].sent_ms = p->transfer[step].received_ms = through + r->machine->latency_ms;
    }
    return true;
}

// The first transfer of a sender that can start now; NULL: none. since: when it became ready.
static transfer *startable(replay *r, const player *a, double *since) {
    bool busy = false; // with this unit or one before it
    for (transfer *t = a->transfer; t < a->end; t++) {
        if (!cf_is_transfer(t->step)) continue;
        if (t->posted_ms == INFINITY || (busy && r->machine->coupled && !t->step->joined)) break;
        busy |= !done(r, t);
        if (t->step->kind == CF_COLLECTIVE && t->sent_ms == INFINITY && start_collective(r, (int)(t - a->transfer))) return t;
        if (!t->receiver || t->sent_ms < INFINITY || a->egress_ms[t->link] > r->now_ms) continue;
        *since = fmax(t->ready_ms, r->machine->coupled ? t->receipt->ready_ms : t->receipt->posted_ms);
        if (*since < INFINITY && t->receiver->ingress_ms[t->link] <= r->now_ms) return t;
    }
    return NULL;
}

// Starts one transfer: from each sender the first posted that can start now, and of these the one that has been ready longest.
static bool start_transfer(replay *r) {
    player *sender = NULL;
    transfer *send = NULL;
    double earliest = INFINITY, since = INFINITY;
    for (player *a = r->player; a < r->player + r->players; a++) {
        transfer *t = startable(r, a, &since);
        if (!t) continue;
        if (t->step->kind == CF_COLLECTIVE) return true;
        if (since < earliest) sender = a, send = t, earliest = since;
    }
    if (!sender) return false;
    double through = r->now_ms + r->machine->transfer_ms(r->machine->argument, sender->schedule, send->step);
    sender->egress_ms[send->link] = send->receiver->ingress_ms[send->link] = through;
    send->sent_ms = send->receipt->received_ms = through + r->machine->latency_ms;
    return true;
}

// The next instant at which something ends; INFINITY: none.
static double next_instant(const replay *r) {
    double next = INFINITY;
    for (const player *p = r->player; p < r->player + r->players; p++) {
        if (p->stream_ms > r->now_ms) next = fmin(next, p->stream_ms);
        for (int i = 0; i < 2 * r->links; i++) // of egress and, behind it, ingress
            if (p->egress_ms[i] > r->now_ms) next = fmin(next, p->egress_ms[i]);
        for (const transfer *t = p->transfer; t < p->end; t++) {
            if (!cf_is_transfer(t->step)) continue;
            if (t->posted_ms == INFINITY) break;
            if (t->sent_ms > r->now_ms) next = fmin(next, t->sent_ms);
            if (t->received_ms > r->now_ms) next = fmin(next, t->received_ms);
        }
    }
    return next;
}

static cf_replayed result_of(const replay *r) {
    cf_replayed result = {0, 0};
    for (int i = 0; i < r->players; i++) {
        const player *p = &r->player[i];
        double end = p->stream_ms;
        for (const transfer *t = p->transfer; t < p->end; t++) {
            const int step = (int)(t - p->transfer);
            if (step >= p->next || !done(r, t)) cf_die(NULL, "deadlock: rank %d of %d stops at step %d", i, r->players, step);
            if (cf_is_transfer(t->step)) end = fmax(end, fmax(t->sent_ms, t->received_ms));
        }
        result.finished_ms = fmax(result.finished_ms, end);
        result.exposed_ms = fmax(result.exposed_ms, p->exposed_ms + end - p->stream_ms);
    }
    return result;
}

cf_replayed cf_replay(cf_schedule *const *schedule, int count, const cf_machine *machine) {
    CF_RETURNS(((cf_replayed){NAN, NAN}));
    replay r = {.machine = machine, .players = count, .links = machine->links > 1 ? machine->links : 1};
    start(&r, schedule);
    double next = 0;
    do {
        r.now_ms = next;
        for (bool moved = true; moved;) {
            moved = false;
            for (player *p = r.player; p < r.player + count; p++) {
                moved |= walk(&r, p);
                moved |= make_ready(&r, p);
            }
            moved |= start_transfer(&r);
        }
        next = next_instant(&r);
    } while (next < INFINITY);
    cf_replayed result = result_of(&r);
    for (int i = 0; i < count; i++) free(r.player[i].transfer), free(r.player[i].egress_ms);
    free(r.player);
    return result;
}
