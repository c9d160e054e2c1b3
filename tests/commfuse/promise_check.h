// What the rows of the table promise beyond what makes any schedule correct (commfuse/schedule_check.h). check_promises() names the
// first of these that a set of schedules breaks; their form must be sound. (once: a tail-free row that has one slice at most.)
//
//   volume      exchanges: each slice is sent N − 1 times and received as often, without collectives; tail-free: by each rank
//               (N − 1)·m of them, of two levels (H − 1)·m between hosts and (P − 1)·H·m within one; native: collectives cover
//               every slice once; a bound: nothing travels
//   unit        once: all exchanges of a rank are one unit
//   own slice   tail-free. compute after: own slices first and during the first transfer; before: own slices last
//   tail        tail-free: no EXCHANGE is posted after the last COMPUTE; with compute before, after the last COMPUTE of that side
//   arrival     tail-free and native. compute after: the other slices in the order in which their transfers were posted
//   round       rows with the bits of ring, compute after: an exchange waits for the last of the round before, or for what it forwards
//   work order  rows with the bits of ring, compute after an all-gather: slices of rank r, then of r − 1, r − 2, …
#pragma once

#include "tests/commfuse/wire_check.h"

static bool is_once(const cf_schedule *s) {
    return s->algorithm->tail_free && s->algorithm->max_slices == 1;
}

static const char *check_rank_volume(const cf_schedule *s) {
    bool seen[CF_CHECKED_SLICES] = {false};
    const int P = s->algorithm->levels ? s->ranks / s->hosts : s->ranks;
    int units = 0, sent = 0, received = 0, collected = 0, left = 0, entered = 0;
    for (int i = 0; i < s->count; i++) {
        const cf_step *step = &s->step[i];
        const bool exchange = step->kind == CF_EXCHANGE;
        units += exchange && !step->joined;
        sent += exchange && step->send.rank >= 0 && step->send.rank != s->rank;
        received += exchange && step->recv.rank >= 0 && step->recv.rank != s->rank;
        left += exchange && step->send.rank >= 0 && step->send.rank / P != s->rank / P;
        entered += exchange && step->recv.rank >= 0 && step->recv.rank / P != s->rank / P;
        for (int k = 0; k < step->count && step->kind == CF_COLLECTIVE; k++, collected++) {
            bool *again = &seen[step->first + k * s->slices];
            if (*again) return violated("volume", s->rank, i, "slice %d a second time", step->first + k * s->slices);
            *again = true;
        }
    }
    const int exchanges = s->bound || s->algorithm->native ? 0 : (s->ranks - 1) * s->slices;
    const int collectives = s->bound || !s->algorithm->native ? 0 : s->ranks * s->slices;
    const bool counted = exchanges == 0 || s->algorithm->tail_free;
    if (is_once(s) && units != (exchanges > 0)) return violated("unit", s->rank, -1, "%d of them", units);
    const int hosts = s->ranks / P - 1;
    if (left != hosts * s->slices || entered != hosts * s->slices)
        return violated("volume", s->rank, -1, "%d slices leave the host, %d enter it, not %d", left, entered, hosts * s->slices);
    if ((!counted || (sent == exchanges && received == exchanges)) && collected == collectives) return NULL;
    return violated("volume", s->rank, -1, "%d slices sent, %d received, not %d; %d in collectives, not %d", sent, received,
                    exchanges, collected, collectives);
}

static const char *check_volume(cf_schedule *const *schedule) {
    const cf_schedule *s = schedule[0];
    int sent[CF_CHECKED_SLICES] = {0}, received[CF_CHECKED_SLICES] = {0};
    for (int r = 0; r < s->ranks; r++) {
        const char *broken = check_rank_volume(schedule[r]);
        if (broken) return broken;
        for (const cf_step *step = schedule[r]->step; step < schedule[r]->step + schedule[r]->count; step++) {
            if (step->kind != CF_EXCHANGE) continue;
            if (step->send.rank >= 0) sent[step->send.slice]++;
            if (step->recv.rank >= 0) received[step->recv.slice]++;
        }
    }
    const int times = s->bound || s->algorithm->native ? 0 : s->ranks - 1;
    for (int slice = 0; slice < s->ranks * s->slices; slice++)
        if (sent[slice] != times || received[slice] != times)
            return violated("volume", -1, -1, "slice %d is sent %d times and received %d times, not %d", slice, sent[slice],
                            received[slice], times);
    return NULL;
}

// Rounds that shared the wire would all arrive late. Every exchange is posted before any work.
static bool begins_a_round(const cf_schedule *s, int i) {
    const int m = s->slices;
    const cf_step *step = &s->step[i], *before = step - m;
    const bool forwards = i >= m && step->wait[0] == i - m + 1 && step->send.slice == before->recv.slice;
    return step->wait[1] == 0 && (forwards || step->wait[0] == i / m * m);
}

// own slice, tail, round, work order, arrival
static const char *check_work(const cf_schedule *s) {
    const int N = s->ranks, m = s->slices, r = s->rank, total = N * m;
    const cf_algorithm *row = s->algorithm;
    const bool rings = row->same_bits && strcmp(row->same_bits, "ring") == 0, ordered = rings && s->operation == CF_ALLGATHER;
    const cf_side last = s->side == CF_COMPUTE_AFTER ? CF_COMPUTE_AFTER : CF_COMPUTE_BEFORE;
    int computed[CF_COMPUTE_BOTH] = {0}, exchanges = 0, newest = 0; // slices, by side; newest: transfer that was waited for
    for (int i = 0; i < s->count; i++) {
        const cf_step *step = &s->step[i];
        if (row->tail_free && step->kind == CF_EXCHANGE && s->side != CF_NO_COMPUTE && computed[last] == total)
            return violated("tail", r, i, "posted after the last computation");
        if (rings && step->kind == CF_EXCHANGE && s->side == CF_COMPUTE_AFTER && !begins_a_round(s, i))
            return violated("round", r, i, "waits for step %d", step->wait[0] - 1);
        exchanges += step->kind == CF_EXCHANGE;
        if (step->kind != CF_COMPUTE) continue;
        const bool after = step->side == CF_COMPUTE_AFTER;
        const int number = computed[step->side], owner = (r - number / m + N) % N, first_owner = step->first / m;
        const int awaited = step->wait[0] > step->wait[1] ? step->wait[0] : step->wait[1];
        const bool own = r >= first_owner && r < first_owner + step->count,
                   now_own = after ? number < m : number + step->count > total - m;
        if ((row->tail_free || row->native) && after && awaited > 0 && awaited < newest)
            return violated("arrival", r, i, "waits for step %d, the computation before for %d", awaited - 1, newest - 1);
        if (after && awaited > 0) newest = awaited;
        computed[step->side] += step->count;
        if (row->tail_free && (own != now_own || (own && step->count > 1)))
            return violated("own slice", r, i, "slice %d is computed as number %d", step->first, number);
        if (row->tail_free && own && after && (step->wait[0] > 0 || step->wait[1] > 0))
            return violated("own slice", r, i, "waits for data that is already here");
        if (row->tail_free && number == 0 && after && !s->bound && N > 1 && exchanges == 0)
            return violated("own slice", r, i, "no transfer runs during the first computation");
        if (ordered && (step->count > 1 || step->first != owner * m + number % m))
            return violated("work order", r, i, "slice %d is number %d", step->first, number);
    }
    return NULL;
}

static const char *check_promises(cf_schedule *const *schedule) {
    const char *broken = check_volume(schedule);
    for (int r = 0; r < schedule[0]->ranks && !broken; r++) broken = check_work(schedule[r]);
    return broken;
}
