// What CommFuse promises of its own schedules, beyond what makes any schedule correct (commfuse/schedule_check.h). check_promises()
// names the first of these that a set of schedules breaks; their form must be sound. A schedule of mode OWN promises nothing.
//
//   unit        commfuse by route ONCE, or without compute: all exchanges of a rank are one unit
//   volume      commfuse: each rank sends and receives (N-1)·m slices, without collectives; none and slice: native collectives
//               cover every slice once; nowire: nothing travels
//   own slice   compute after: own slices first and during the first transfer; before: own slices last
//   arrival     compute after: the other slices in the order in which their transfers were posted
//   fold        a schedule that folds computes its own slices except m − 1, and no others, onto the sums of all other parts
//   work order  compute after an all-gather, commfuse and nowire: slices of rank r, then of r − 1, r − 2, …, by ring and by
//               direct (an all-to-all has the same order on both)
//   tail        no EXCHANGE is posted after the last COMPUTE; with compute before, after the last COMPUTE of that side
#pragma once

#include "tests/commfuse/wire_check.h"

static const char *check_volume(const cf_schedule *s) {
    const bool commfuse = s->mode == CF_MODE_COMMFUSE, native = s->mode == CF_MODE_NONE || s->mode == CF_MODE_SLICE;
    const bool once = commfuse && (s->route == CF_ONCE || s->side == CF_NO_COMPUTE);
    bool seen[CF_CHECKED_SLICES] = {false};
    int units = 0, sent = 0, received = 0, collected = 0;
    for (int i = 0; i < s->count; i++) {
        const cf_step *step = &s->step[i];
        const bool exchange = step->kind == CF_EXCHANGE;
        units += exchange && !step->joined;
        sent += exchange && step->send_to >= 0 && step->send_to != s->rank;
        received += exchange && step->recv_from >= 0 && step->recv_from != s->rank;
        for (int k = 0; k < step->count && step->kind == CF_COLLECTIVE; k++, collected++) {
            bool *again = &seen[step->first + k * step->stride];
            if (*again) return violated("volume", s->rank, i, "slice %d a second time", step->first + k * step->stride);
            *again = true;
        }
    }
    if (once && units != (s->ranks > 1)) return violated("unit", s->rank, -1, "%d of them", units);
    const int exchanges = commfuse ? (s->ranks - 1) * s->slices : 0;
    const int collectives = native && (s->ranks > 1 || collected > 0) ? s->ranks * s->slices : 0;
    if (sent == exchanges && received == exchanges && collected == collectives) return NULL;
    return violated("volume", s->rank, -1, "%d slices sent, %d received, not %d; %d in collectives, not %d", sent, received,
                    exchanges, collected, collectives);
}

// own slice, tail, work order, arrival, fold
static const char *check_work(const cf_schedule *s) {
    const int N = s->ranks, m = s->slices, r = s->rank, total = N * m;
    const bool ordered = s->operation == CF_ALLGATHER && s->route != CF_ONCE;
    const cf_side last = s->side == CF_COMPUTE_AFTER ? CF_COMPUTE_AFTER : CF_COMPUTE_BEFORE;
    const bool fused = s->mode == CF_MODE_COMMFUSE || s->mode == CF_MODE_NOWIRE;
    int computed[CF_COMPUTE_BOTH] = {0}, exchanges = 0, newest = -1; // slices, by side; newest: transfer that was waited for
    for (int i = 0; i < s->count; i++) {
        const cf_step *step = &s->step[i];
        if (fused && step->kind == CF_EXCHANGE && s->side != CF_NO_COMPUTE && computed[last] == total)
            return violated("tail", r, i, "posted after the last computation");
        exchanges += step->kind == CF_EXCHANGE;
        if (step->kind != CF_COMPUTE) continue;
        const bool after = step->side == CF_COMPUTE_AFTER, own = step->first / m == r;
        const int number = computed[step->side], owner = (r - number / m + N) % N;
        const int awaited = step->wait[0] > step->wait[1] ? step->wait[0] : step->wait[1];
        const bool now_own = after ? number < m : number + step->count > total - m;
        if (step->accumulate != (s->folds && own && step->first % m != m - 1))
            return violated("fold", r, i, "slice %d is %scomputed onto another", step->first, step->accumulate ? "" : "not ");
        if (after && awaited >= 0 && awaited < newest)
            return violated("arrival", r, i, "waits for step %d, the computation before for %d", awaited, newest);
        if (after && awaited >= 0) newest = awaited;
        computed[step->side] += step->count;
        if (!fused) continue;
        if (own != now_own || (step->count > 1 && (own || s->route != CF_ONCE)))
            return violated("own slice", r, i, "slice %d is computed as number %d", step->first, number);
        if (own && after && (step->wait[0] >= 0 || step->wait[1] >= 0))
            return violated("own slice", r, i, "waits for data that is already here");
        if (number == 0 && after && s->mode == CF_MODE_COMMFUSE && N > 1 && exchanges == 0)
            return violated("own slice", r, i, "no transfer runs during the first computation");
        if (ordered && step->first != owner * m + number % m)
            return violated("work order", r, i, "slice %d is number %d", step->first, number);
    }
    return NULL;
}

static const char *check_promises(cf_schedule *const *schedule) {
    const char *broken = NULL;
    const int ranks = schedule[0]->mode == CF_MODE_OWN ? 0 : schedule[0]->ranks;
    for (int r = 0; r < ranks && !broken; r++) broken = check_volume(schedule[r]);
    for (int r = 0; r < ranks && !broken; r++) broken = check_work(schedule[r]);
    return broken;
}
