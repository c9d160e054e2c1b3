// The rows of the table of algorithms (commfuse/schedule.h), as tests go through them: a new row is tested without being named.
#pragma once

#include "commfuse/schedule.h"

#define EVERY_ROW(row)                                                                                                             \
    const cf_algorithm *row = cf_algorithms;                                                                                       \
    row < cf_algorithms + cf_algorithm_count;                                                                                      \
    row++

// The row makes a schedule of this operation itself; `leads`: it, or one that it names.
static inline bool row_serves(const cf_algorithm *row, cf_operation operation, cf_side side) {
    return row->serves & CF_SERVES(operation, side);
}
static inline bool row_leads(const cf_algorithm *row, cf_operation operation, cf_side side) {
    return cf_algorithm_serving(row, operation, side) != NULL;
}
// It has schedules of its own of this operation: with, or without transfers.
static inline bool row_is_own(const cf_algorithm *row, cf_operation operation, cf_side side) {
    return row_serves(row, operation, side) || (row->bound && row_leads(row, operation, side));
}

// Hosts on which a row of two levels has schedules of its own, as few as can be; 1: others, or there are none.
static inline int row_hosts(const cf_algorithm *row, int ranks) {
    int hosts = 2;
    while (hosts < ranks && ranks % hosts != 0) hosts++;
    return row->levels && hosts < ranks ? hosts : 1;
}

static inline int next_exchange(const cf_schedule *s, int i) {
    while (i < s->count && s->step[i].kind != CF_EXCHANGE) i++;
    return i;
}

// The exchanges of b are those of a, another rank's, shifted.
static inline bool is_shifted(const cf_schedule *a, const cf_schedule *b) {
    const int m = a->slices;
    int i = next_exchange(a, 0), j = next_exchange(b, 0);
    for (; i < a->count && j < b->count; i = next_exchange(a, i + 1), j = next_exchange(b, j + 1)) {
        const cf_step *x = &a->step[i], *y = &b->step[j];
        const bool sends = x->send.rank >= 0, receives = x->recv.rank >= 0;
        if (y->send.rank != (sends ? cf_schedule_shifted(a, x->send.rank, a->rank, b->rank) : -1) ||
            y->recv.rank != (receives ? cf_schedule_shifted(a, x->recv.rank, a->rank, b->rank) : -1) ||
            (sends && y->send.slice != cf_schedule_shifted(a, x->send.slice / m, a->rank, b->rank) * m + x->send.slice % m) ||
            (receives && y->recv.slice != cf_schedule_shifted(a, x->recv.slice / m, a->rank, b->rank) * m + x->recv.slice % m))
            return false;
    }
    return i == a->count && j == b->count;
}
