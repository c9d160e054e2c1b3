// Properties beyond those of one schedule (commfuse/schedule_check.h): of several operations in flight on one wire, and of the
// bounds that move no data.
//
// What a GPU's transport makes of several operations in flight: a group has one queue on each rank, in which the
// transfers of all operations stand in the order they were posted. Each starts when all that was enqueued on the
// compute stream before it is done, and ends only when both its halves have: cf_schedule_check() shows that for a
// single operation, check_wire() for any lists of steps that ranks take. It names
//
//   wire order      the k-th message from r to p is the k-th that p expects from r, of all operations
//   wire deadlock   every step of every rank completes, one transfer at a time
#pragma once

#include "commfuse/base/die.h"
#include "commfuse/schedule_check.h"
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { SEND = 0, RECV = 1 };
enum { IN_FLIGHT_MAX = 2, ITEMS_MAX = 2 * CF_CHECKED_STEPS, WIRE_RANKS_MAX = 16 };

typedef struct item { // step `step` of operation number `operation`
    int operation, step;
} item;

typedef struct program { // what one rank's host enqueues, in order
    const cf_schedule *operation[IN_FLIGHT_MAX];
    int count;
    item list[ITEMS_MAX];
} program;

typedef struct wire {
    const program *of; // of every rank
    int ranks;
    int partner[WIRE_RANKS_MAX][ITEMS_MAX][2]; // item of the peer that holds the other half of this half
    bool complete[WIRE_RANKS_MAX][IN_FLIGHT_MAX][CF_CHECKED_STEPS], met[WIRE_RANKS_MAX][ITEMS_MAX][2];
    int stream[WIRE_RANKS_MAX], head[WIRE_RANKS_MAX]; // first items not complete: of the stream, of the queue
} wire;

static char check_where[CF_WHERE_TEXT]; // where the violation was found, for the message

static const char *violated(const char *property, int rank, int step, const char *format, ...) CF_PRINTF(4, 5);
static const char *violated(const char *property, int rank, int step, const char *format, ...) {
    int length = snprintf(check_where, sizeof check_where, "rank %d step %d: ", rank, step);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(check_where + length, sizeof check_where - (size_t)length, format, arguments);
    va_end(arguments);
    return property;
}

static bool on_stream(const cf_step *step) {
    return !cf_is_transfer(step);
}

static const cf_step *step_of(const wire *w, int r, int i) {
    const program *p = &w->of[r];
    return &p->operation[p->list[i].operation]->step[p->list[i].step];
}

static bool *complete_of(wire *w, int r, int i) {
    return &w->complete[r][w->of[r].list[i].operation][w->of[r].list[i].step];
}

static int next_half(const wire *w, int r, int from, int half, int peer) {
    for (int i = from; i < w->of[r].count; i++) {
        const cf_step *step = step_of(w, r, i);
        if (step->kind == CF_EXCHANGE && (half == SEND ? step->send.rank : step->recv.rank) == peer) return i;
    }
    return -1;
}

static const char *check_wire_order(wire *w) {
    for (int r = 0; r < w->ranks; r++)
        for (int p = 0; p < w->ranks; p++)
            for (int i = -1, j = -1;;) {
                i = next_half(w, r, i + 1, SEND, p), j = next_half(w, p, j + 1, RECV, r);
                if (i < 0 && j < 0) break;
                if (i < 0 || j < 0) return violated("wire order", r, i, "more halves on one side, to rank %d", p);
                if (w->of[r].list[i].operation != w->of[p].list[j].operation ||
                    step_of(w, r, i)->send.slice != step_of(w, p, j)->recv.slice)
                    return violated("wire order", r, i, "rank %d expects another slice", p);
                w->partner[r][i][SEND] = j, w->partner[p][j][RECV] = i;
            }
    return NULL;
}

static bool item_waits(wire *w, int r, int i) {
    const cf_step *step = step_of(w, r, i);
    for (int n = 0, wait = 0; (wait = cf_nth_wait(step, n)) >= 0; n++)
        if (!w->complete[r][w->of[r].list[i].operation][wait]) return true;
    return false;
}

static void find_items(wire *w, int r) {
    int count = w->of[r].count;
    while (w->stream[r] < count && (!on_stream(step_of(w, r, w->stream[r])) || *complete_of(w, r, w->stream[r]))) w->stream[r]++;
    while (w->head[r] < count && (on_stream(step_of(w, r, w->head[r])) || *complete_of(w, r, w->head[r]))) w->head[r]++;
}

// The item in flight on rank r; -1: none. What it comes after on the stream is done, and so is what it names.
static int in_flight(wire *w, int r) {
    find_items(w, r);
    int i = w->head[r];
    return i < w->of[r].count && w->stream[r] > i && !item_waits(w, r, i) ? i : -1;
}

static bool half_meets(wire *w, int r, int i, int half, int peer) {
    if (peer < 0 || w->met[r][i][half]) return true;
    int j = w->partner[r][i][half];
    if (in_flight(w, peer) != j) return false;
    return w->met[r][i][half] = w->met[peer][j][1 - half] = true;
}

static bool all_collect(wire *w, int i) {
    for (int r = 0; r < w->ranks; r++) {
        int j = in_flight(w, r);
        if (j < 0 || step_of(w, r, j)->kind != CF_COLLECTIVE || w->of[r].list[j].operation != w->of[0].list[i].operation)
            return false;
    }
    for (int r = 0; r < w->ranks; r++) *complete_of(w, r, w->head[r]) = true;
    return true;
}

static bool take_item(wire *w, int r) {
    find_items(w, r);
    int i = w->stream[r];
    if (i < w->of[r].count && !item_waits(w, r, i)) return *complete_of(w, r, i) = true;
    i = in_flight(w, r);
    if (i < 0) return false;
    const cf_step *step = step_of(w, r, i);
    if (step->kind == CF_COLLECTIVE) return r == 0 && all_collect(w, i);
    bool sent = half_meets(w, r, i, SEND, step->send.rank), received = half_meets(w, r, i, RECV, step->recv.rank);
    return sent && received ? *complete_of(w, r, i) = true : false;
}

// Heads stay in flight until they complete, so one run decides for all, as in cf_schedule_check().
static const char *check_wire(const program *of, int ranks) {
    static wire w;
    memset(&w, 0, sizeof w);
    w.of = of, w.ranks = ranks;
    const char *property = check_wire_order(&w);
    if (property) return property;
    for (bool moved = true; moved;) {
        moved = false;
        for (int r = 0; r < ranks; r++)
            while (take_item(&w, r)) moved = true;
    }
    for (int r = 0; r < ranks; r++)
        if (w.stream[r] < of[r].count || w.head[r] < of[r].count) return violated("wire deadlock", r, w.head[r], "never completes");
    return NULL;
}

// A bound is honest: it computes what the schedule with transfers computes, in the same order, on the same side.
static const char *check_bound_of(const cf_schedule *bound, const cf_schedule *real) {
    int i = 0, j = 0;
    for (;; i++, j++) {
        while (i < bound->count && bound->step[i].kind != CF_COMPUTE) i++;
        while (j < real->count && real->step[j].kind != CF_COMPUTE) j++;
        if (i == bound->count || j == real->count) break;
        const cf_step *a = &bound->step[i], *b = &real->step[j];
        if (a->side != b->side || a->first != b->first || a->count != b->count)
            return violated("bound", bound->rank, i, "slice %d on side %d, not %d on %d", a->first, a->side, b->first, b->side);
    }
    if (i < bound->count || j < real->count) return violated("bound", bound->rank, i, "number of steps");
    return NULL;
}
