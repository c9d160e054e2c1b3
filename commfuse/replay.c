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

typedef struct transfer { // an EXCHANGE or COLLECTIVE of one rank; times are INFINITY until known
    double posted_ms, ready_ms, sent_ms, received_ms;
    int receiver, receiver_step; // player, and its step, that receive what this one sends; -1: it sends nothing
    int link;                    // that takes it
} transfer;

typedef struct player { // a rank, or one that stands for all
    const cf_schedule *schedule;
    transfer *transfer;                        // one per step; unused for steps on the compute stream
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
static void find_receiver(const replay *r, const player *p, const cf_step *step, transfer *t) {
    const cf_schedule *s = p->schedule;
    const bool symmetric = r->players == 1;
    const int from = symmetric ? step->send.rank : s->rank, owner = step->send.slice / s->slices, m = s->slices;
    const int sender = cf_schedule_shifted(s, s->rank, from, s->rank);
    const int slice = cf_schedule_shifted(s, owner, from, s->rank) * m + step->send.slice % m;
    t->receiver = symmetric ? 0 : step->send.rank;
    if (r->machine->link_of) t->link = r->machine->link_of(r->machine->argument, s, s->rank, step->send.rank);
    s = r->player[t->receiver].schedule;
    for (int i = 0; i < s->count && t->receiver_step < 0; i++)
        if (s->step[i].kind == CF_EXCHANGE && s->step[i].recv.rank == sender && s->step[i].recv.slice == slice)
            t->receiver_step = i;
    if (t->receiver_step < 0) cf_die(NULL, "slice %d of rank %d is sent but not received", slice, sender);
}

static void start(replay *r, cf_schedule *const *schedule) {
    r->player = cf_host_alloc(r->players, sizeof *r->player, "a replay");
    for (int i = 0; i < r->players; i++) r->player[i].schedule = schedule[i];
    for (player *p = r->player; p < r->player + r->players; p++) {
        p->transfer = cf_host_alloc(p->schedule->count, sizeof *p->transfer, "a replay");
        p->egress_ms = cf_host_alloc(2 * r->links, sizeof *p->egress_ms, "a replay"), p->ingress_ms = p->egress_ms + r->links;
        for (int i = 0; i < p->schedule->count; i++) {
            const cf_step *step = &p->schedule->step[i];
            p->transfer[i] = (transfer){INFINITY, INFINITY, INFINITY, INFINITY, -1, -1, 0};
            if (step->kind == CF_EXCHANGE && step->send.rank >= 0) find_receiver(r, p, step, &p->transfer[i]);
        }
    }
}

static bool done(const replay *r, const player *p, int step) {
    if (!cf_is_transfer(&p->schedule->step[step])) return true; // the stream has passed it
    const transfer *t = &p->transfer[step];
    return (!r->machine->coupled || t->sent_ms <= r->now_ms) && t->received_ms <= r->now_ms;
}

static bool waits_done(const replay *r, const player *p, const cf_step *step) {
    for (int n = 0, wait = 0; (wait = cf_nth_wait(step, n)) >= 0; n++)
        if (!done(r, p, wait)) return false;
    return true;
}

// Walks the list as far as the compute stream gets at this instant. Returns whether anything happened, as those below do.
static bool walk(replay *r, player *p) {
    bool moved = false;
    for (; p->next < p->schedule->count && p->stream_ms <= r->now_ms; p->next++, moved = true) {
        const cf_step *step = &p->schedule->step[p->next];
        if (cf_is_transfer(step)) {
            p->transfer[p->next].posted_ms = fmin(p->transfer[p->next].posted_ms, r->now_ms);
            if (p->schedule->algorithm->blocking && !(p->transfer[p->next].received_ms <= r->now_ms)) break;
            if (p->schedule->algorithm->blocking) p->exposed_ms += r->now_ms - p->stream_ms, p->stream_ms = r->now_ms;
            continue;
        }
        if (!waits_done(r, p, step)) break;
        p->exposed_ms += r->now_ms - p->stream_ms;
        p->stream_ms = r->now_ms + r->machine->cost_ms(r->machine->argument, p->schedule, step);
    }
    return moved;
}

static bool make_ready(replay *r, player *p) {
    bool moved = false;
    for (int i = 0; i < p->schedule->count && (!cf_is_transfer(&p->schedule->step[i]) || p->transfer[i].posted_ms < INFINITY);
         i++) {
        const cf_step *step = &p->schedule->step[i];
        transfer *t = &p->transfer[i];
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

// The first transfer of a sender that can start now; -1: none. since: when it became ready.
static int startable(replay *r, const player *a, double *since) {
    bool busy = false; // with this unit or one before it
    for (int i = 0; i < a->schedule->count; i++) {
        const cf_step *step = &a->schedule->step[i];
        const transfer *from = &a->transfer[i];
        if (!cf_is_transfer(step)) continue;
        if (from->posted_ms == INFINITY || (busy && r->machine->coupled && !step->joined)) break;
        busy |= !done(r, a, i);
        if (step->kind == CF_COLLECTIVE && from->sent_ms == INFINITY && start_collective(r, i)) return i;
        if (from->receiver < 0 || from->sent_ms < INFINITY || a->egress_ms[from->link] > r->now_ms) continue;
        const player *b = &r->player[from->receiver];
        const transfer *to = &b->transfer[from->receiver_step];
        // NOLINTNEXTLINE(clang-analyzer-core.NullDereference): start() has made the transfers of all players
        *since = fmax(from->ready_ms, r->machine->coupled ? to->ready_ms : to->posted_ms);
        if (*since < INFINITY && b->ingress_ms[from->link] <= r->now_ms) return i;
    }
    return -1;
}

// Starts one transfer: from each sender the first posted that can start now, and of these the one that has been ready longest.
static bool start_transfer(replay *r) {
    player *sender = NULL;
    transfer *send = NULL;
    double earliest = INFINITY, since = INFINITY;
    for (player *a = r->player; a < r->player + r->players; a++) {
        const int i = startable(r, a, &since);
        if (i < 0) continue;
        if (a->schedule->step[i].kind == CF_COLLECTIVE) return true;
        if (since < earliest) sender = a, send = &a->transfer[i], earliest = since;
    }
    if (!sender) return false;
    player *receiver = &r->player[send->receiver];
    const cf_step *step = &sender->schedule->step[send - sender->transfer];
    double through = r->now_ms + r->machine->transfer_ms(r->machine->argument, sender->schedule, step);
    sender->egress_ms[send->link] = receiver->ingress_ms[send->link] = through;
    send->sent_ms = receiver->transfer[send->receiver_step].received_ms = through + r->machine->latency_ms;
    return true;
}

// The next instant at which something ends; INFINITY: none.
static double next_instant(const replay *r) {
    double next = INFINITY;
    for (const player *p = r->player; p < r->player + r->players; p++) {
        if (p->stream_ms > r->now_ms) next = fmin(next, p->stream_ms);
        for (int i = 0; i < 2 * r->links; i++) // of egress and, behind it, ingress
            if (p->egress_ms[i] > r->now_ms) next = fmin(next, p->egress_ms[i]);
        for (int i = 0; i < p->schedule->count; i++) {
            const transfer *t = &p->transfer[i];
            if (!cf_is_transfer(&p->schedule->step[i])) continue;
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
        for (int k = 0; k < p->schedule->count; k++) {
            if (k >= p->next || !done(r, p, k)) cf_die(NULL, "deadlock: rank %d of %d stops at step %d", i, r->players, k);
            if (cf_is_transfer(&p->schedule->step[k])) end = fmax(end, fmax(p->transfer[k].sent_ms, p->transfer[k].received_ms));
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
