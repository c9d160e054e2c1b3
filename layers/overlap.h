// How every operation of the model communicates.
#pragma once

#include "../commfuse/choice.h"
#include "../commfuse/fuse.h"
#include <string.h>

// capacity: elements of one rank's shard, at most. The caller sets the fields that few operations need.
static inline cf_fuse_plan overlap_plan(cf_choice how, const char *name, const cf_group *group, cf_operation operation,
                                        cf_side side, cf_dtype dtype, int64_t capacity) {
    cf_fuse_plan plan;
    memset(&plan, 0, sizeof plan);
    plan.name = name, plan.group = group;
    plan.operation = operation, plan.side = side;
    plan.mode = how.mode, plan.route = how.route, plan.slices = side == CF_NO_COMPUTE ? 1 : how.slices;
    plan.dtype = dtype, plan.capacity = capacity;
    return plan;
}

// An operation for --dry-run: its place in the model, and how many times it runs in a step of one micro-batch.
typedef void visit_operation(void *argument, const char *place, cf_fuse *fuse, int64_t times);
