// See timeline.h. Events of all ranks come to rank 0 by an all-gather of bytes. On one host the clocks are one; otherwise
// zero is the moment every rank left a barrier.
#include "timeline.h"
#include "../commfuse/die.h"
#include "../data/progress.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void timeline_start(trainer *t) {
    trainer_meet(t);
    double zero = cf_now_ms();
    if (t->transport->local_size == t->ranks) optimizer_maximum(&t->optimizer, &zero, 1);
    cf_trace_zero(t->context.trace, zero);
    cf_trace_record(t->context.trace, true);
}

void timeline_write(trainer *t) {
    cf_trace_record(t->context.trace, false);
    int64_t mine = 0, size = (int64_t)sizeof(cf_trace_event);
    const cf_trace_event *events = cf_trace_events(t->context.trace, &mine);
    double most = (double)mine;
    optimizer_maximum(&t->optimizer, &most, 1);
    int64_t block = ((int64_t)most + 1) * size, *counts = (int64_t *)calloc((size_t)t->ranks, sizeof *counts);
    const cf_trace_event **lists = (const cf_trace_event **)calloc((size_t)t->ranks, sizeof *lists);
    char *all = (char *)malloc((size_t)(t->ranks * block)), *own = all + t->mesh.world_group.rank * block;
    if (!counts || !lists || !all) cf_die(NULL, "out of memory for the trace");
    cf_trace_event head; // in front of each rank's events: how many they are
    memset(&head, 0, sizeof head);
    head.bytes = mine;
    memcpy(own, &head, sizeof head);
    if (mine > 0) memcpy(own + size, events, (size_t)(mine * size));
    cf_fuse_plan plan;
    memset(&plan, 0, sizeof plan);
    plan.name = "trace", plan.group = &t->mesh.world_group, plan.operation = CF_ALLGATHER;
    plan.mode =
        trainer_overlap(&t->o).mode == CF_MODE_NOWIRE ? CF_MODE_COMMFUSE : trainer_overlap(&t->o).mode;
    plan.slices = 1, plan.dtype = CF_BYTE, plan.capacity = block;
    cf_fuse *gather = cf_fuse_create(&t->context, plan);
    char *device = (char *)cf_alloc(t->ranks * block, "trace");
    cf_copy(device + t->mesh.world_group.rank * block, own, block, t->context.stream);
    cf_fuse_run(gather, device, block, 1, NULL, NULL, -1);
    cf_copy(all, device, t->ranks * block, t->context.stream);
    cf_stream_sync(t->context.stream);
    cf_fuse_free(gather);
    cf_free(device);
    for (int rank = 0; rank < t->ranks; rank++) {
        lists[rank] = (const cf_trace_event *)(all + rank * block + size);
        counts[rank] = ((const cf_trace_event *)(all + rank * block))->bytes;
    }
    if (trainer_root(t)) cf_trace_write(t->o.trace, t->ranks, lists, counts);
    if (trainer_root(t)) progress_break();
    if (trainer_root(t))
        printf("trace of steps %d to %d: %s (open it in https://ui.perfetto.dev)\n", t->trace_from,
               t->trace_to - 1, t->o.trace);
    free(all);
    free(counts);
    free(lists);
}
