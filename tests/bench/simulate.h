// Replays the schedules of all ranks of a group over an imagined machine: what would this operation take if a
// slice cost so much and the link were so fast? The lists are those of cf_schedule_create(), the rules are
// those of the executor (commfuse/fuse.c), so a figure found here is one about the real order of things.
//
//   COMPUTE, ADD, COPY  in list order, one after another, each once the transfers it names are done
//   EXCHANGE            posted when the list reaches it, ready once the transfers it names are done, done when
//                       both its halves are, but for the steps that name it when its receiving half is
//                       (coupled: when both are)
//   a transfer          starts when the sender is ready, the receiver's EXCHANGE posted (coupled: ready), and
//                       the sender's egress and the receiver's ingress free; holds both for transfer_ms, and
//                       is there latency_ms later. Links are full duplex. Of a sender's transfers the first
//                       posted goes first (transport_mpi.c); what is not ready or has a busy receiver lets
//                       others pass. Of senders to one receiver the one that has been ready for longest.
//
// Native collectives are not replayed: their inner order is the library's own.
//
// One clock for all ranks. At each instant everything that can happen does (settle), then the clock goes to the
// next instant at which something ends. A run in which nothing will end any more is complete or a deadlock.
#ifndef SIMULATE_H
#define SIMULATE_H

#include "../../commfuse/die.h"
#include "../../commfuse/schedule.h"
#include <math.h>
#include <stdlib.h>

typedef struct machine {
    double (*cost_ms)(const void *argument, const cf_schedule *schedule, const cf_step *step);
    double (*transfer_ms)(const void *argument, const cf_schedule *schedule, const cf_step *exchange);
    const void *argument; // of both
    double latency_ms;
    bool coupled; // a transfer's two halves end as one, as in a NCCL group
} machine;

typedef struct outcome {
    double finished_ms; // the last rank is through
    double exposed_ms;  // most time that a rank's compute stream stood waiting, end included
} outcome;

typedef struct sim_exchange { // one EXCHANGE of one rank; times are INFINITY until they are known
    double posted_ms, ready_ms, sent_ms, received_ms;
    int receiver_step; // the step of rank send_to that receives what this one sends
} sim_exchange;

typedef struct sim_rank {
    const cf_schedule *schedule;
    sim_exchange *exchange; // one per step; unused for steps on the compute stream
    int next;               // step
    double stream_ms;       // the compute stream is busy until then
    double exposed_ms;
    double egress_ms, ingress_ms; // the link is busy until then
} sim_rank;

typedef struct simulation {
    const machine *machine;
    int ranks;
    sim_rank *rank;
    double now_ms;
} simulation;

static inline int sim_receiver(const cf_schedule *receiver, int sender, int slice) {
    for (int i = 0; i < receiver->count; i++) {
        const cf_step *step = &receiver->step[i];
        if (step->kind == CF_EXCHANGE && step->recv_from == sender && step->recv_slice == slice) return i;
    }
    cf_die(NULL, "slice %d of rank %d is sent but not received", slice, sender);
}

static inline void sim_start(simulation *s, cf_schedule *const *schedule) {
    for (int r = 0; r < s->ranks; r++) {
        sim_rank *rank = &s->rank[r];
        *rank = (sim_rank){.schedule = schedule[r]};
        rank->exchange = malloc((size_t)schedule[r]->count * sizeof *rank->exchange);
        if (!rank->exchange) cf_die(NULL, "out of memory for a simulation of %d ranks", s->ranks);
        for (int i = 0; i < schedule[r]->count; i++) {
            const cf_step *step = &schedule[r]->step[i];
            if (step->kind == CF_COLLECTIVE) cf_die(NULL, "native collectives cannot be simulated");
            rank->exchange[i] = (sim_exchange){INFINITY, INFINITY, INFINITY, INFINITY, -1};
            if (step->kind == CF_EXCHANGE && step->send_to >= 0)
                rank->exchange[i].receiver_step = sim_receiver(schedule[step->send_to], r, step->send_slice);
        }
    }
}

static inline bool sim_done(const simulation *s, const sim_rank *rank, int step) {
    if (step < 0 || rank->schedule->step[step].kind != CF_EXCHANGE) return true; // earlier on the stream
    const sim_exchange *e = &rank->exchange[step];
    return (!s->machine->coupled || e->sent_ms <= s->now_ms) && e->received_ms <= s->now_ms;
}

static inline bool sim_waits_done(const simulation *s, const sim_rank *rank, const cf_step *step) {
    bool done = sim_done(s, rank, step->wait[0]) && sim_done(s, rank, step->wait[1]);
    for (int i = step->wait[0]; step->range && i < step->wait[1]; i++) done &= sim_done(s, rank, i);
    return done;
}

// Walks the list as far as the stream gets at this instant.
static inline bool sim_walk(simulation *s, sim_rank *rank) {
    bool moved = false;
    for (; rank->next < rank->schedule->count && rank->stream_ms <= s->now_ms; rank->next++, moved = true) {
        const cf_step *step = &rank->schedule->step[rank->next];
        if (step->kind == CF_EXCHANGE) {
            rank->exchange[rank->next].posted_ms = s->now_ms;
            continue;
        }
        if (!sim_waits_done(s, rank, step)) break;
        rank->exposed_ms += s->now_ms - rank->stream_ms;
        rank->stream_ms = s->now_ms + s->machine->cost_ms(s->machine->argument, rank->schedule, step);
    }
    return moved;
}

static inline bool sim_make_ready(simulation *s, sim_rank *rank) {
    bool moved = false;
    for (int i = 0; i < rank->next; i++) {
        const cf_step *step = &rank->schedule->step[i];
        sim_exchange *e = &rank->exchange[i];
        if (step->kind != CF_EXCHANGE || e->ready_ms <= s->now_ms || !sim_waits_done(s, rank, step)) continue;
        e->ready_ms = s->now_ms;
        if (step->send_to < 0) e->sent_ms = s->now_ms;
        if (step->recv_from < 0) e->received_ms = s->now_ms;
        moved = true;
    }
    return moved;
}

// Of each sender's transfers that could start now takes the first posted, of these the one ready for longest.
static inline bool sim_start_transfer(simulation *s) {
    sim_rank *sender = NULL, *receiver = NULL;
    sim_exchange *send = NULL, *recv = NULL;
    const cf_step *chosen = NULL;
    double since = INFINITY;
    for (sim_rank *a = s->rank; a < s->rank + s->ranks; a++)
        for (int i = 0; i < a->next && a->egress_ms <= s->now_ms; i++) {
            sim_exchange *from = &a->exchange[i];
            if (from->receiver_step < 0 || from->sent_ms < INFINITY) continue;
            sim_rank *b = &s->rank[a->schedule->step[i].send_to];
            sim_exchange *to = &b->exchange[from->receiver_step];
            double ready = fmax(from->ready_ms, s->machine->coupled ? to->ready_ms : to->posted_ms);
            if (b->ingress_ms > s->now_ms || ready == INFINITY) continue;
            if (ready < since) sender = a, receiver = b, send = from, recv = to, chosen = &a->schedule->step[i], since = ready;
            break;
        }
    if (!chosen) return false;
    double through = s->now_ms + s->machine->transfer_ms(s->machine->argument, sender->schedule, chosen);
    sender->egress_ms = receiver->ingress_ms = through;
    send->sent_ms = recv->received_ms = through + s->machine->latency_ms;
    return true;
}

static inline void sim_settle(simulation *s) {
    bool moved = true;
    while (moved) {
        moved = false;
        for (int r = 0; r < s->ranks; r++) {
            moved |= sim_walk(s, &s->rank[r]);
            moved |= sim_make_ready(s, &s->rank[r]);
        }
        moved |= sim_start_transfer(s);
    }
}

// The next instant at which something ends; INFINITY: never.
static inline double sim_next(const simulation *s) {
    double next = INFINITY;
    for (const sim_rank *rank = s->rank; rank < s->rank + s->ranks; rank++) {
        const double link[] = {rank->stream_ms, rank->egress_ms, rank->ingress_ms};
        for (int i = 0; i < 3; i++)
            if (link[i] > s->now_ms) next = fmin(next, link[i]);
        for (int i = 0; i < rank->next; i++) {
            const sim_exchange *e = &rank->exchange[i];
            if (e->sent_ms > s->now_ms) next = fmin(next, e->sent_ms);
            if (e->received_ms > s->now_ms) next = fmin(next, e->received_ms);
        }
    }
    return next;
}

static inline outcome sim_result(const simulation *s) {
    outcome result = {0};
    for (int r = 0; r < s->ranks; r++) {
        const sim_rank *rank = &s->rank[r];
        double end = rank->stream_ms;
        for (int i = 0; i < rank->schedule->count; i++) {
            if (i >= rank->next || !sim_done(s, rank, i))
                cf_die(NULL, "simulation: rank %d of %d stands still at step %d", r, s->ranks, i);
            const sim_exchange *e = &rank->exchange[i];
            if (rank->schedule->step[i].kind == CF_EXCHANGE) end = fmax(end, fmax(e->sent_ms, e->received_ms));
        }
        result.finished_ms = fmax(result.finished_ms, end);
        result.exposed_ms = fmax(result.exposed_ms, rank->exposed_ms + end - rank->stream_ms);
    }
    return result;
}

// schedule[r]: of rank r; all of one operation.
static inline outcome simulate(cf_schedule *const *schedule, int ranks, const machine *on) {
    simulation s = {.machine = on, .ranks = ranks};
    s.rank = malloc((size_t)ranks * sizeof *s.rank);
    if (!s.rank) cf_die(NULL, "out of memory for a simulation of %d ranks", ranks);
    sim_start(&s, schedule);
    for (double next = 0; next < INFINITY; next = sim_next(&s)) {
        s.now_ms = next;
        sim_settle(&s);
    }
    outcome result = sim_result(&s);
    for (int r = 0; r < ranks; r++) free(s.rank[r].exchange);
    free(s.rank);
    return result;
}

#endif
