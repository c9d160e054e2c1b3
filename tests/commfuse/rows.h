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
