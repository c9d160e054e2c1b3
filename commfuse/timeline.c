// See timeline.h. Blocks of an all-gather are of one size: that of the rank with most events.
#include "timeline.h"
#include "die.h"
#include <stdlib.h>
#include <string.h>

// Zero is the moment that every rank left a barrier; on one host, where the clocks are one, the latest of these.
void cf_timeline_start(cf_context *context, const cf_group *world) {
    cf_transport *t = context->transport;
    cf_barrier(context, world);
    cf_stream_sync(context->stream);
    double zero = cf_now_ms();
    if (t && t->local_size == world->size) zero = -1e-3 * (double)cf_least_host(t, (int64_t)(-1e3 * zero));
    cf_trace_zero(context->trace, zero);
    cf_trace_record(context->trace, true);
}

// (ranks, most) events in the host's memory, this rank's in its place.
static cf_trace_event *gather(cf_context *context, const cf_group *world, cf_mode mode, const cf_trace_event *events, int64_t count,
                              int64_t most) {
    const int64_t block = most * (int64_t)sizeof *events, bytes = world->size * block;
    cf_trace_event *all = malloc((size_t)bytes + 1);
    if (!all) cf_die(NULL, "out of memory for the trace");
    char *device = cf_alloc(bytes, "trace");
    cf_fuse *gather = cf_fuse_create(context, (cf_fuse_plan){.name = "trace",
                                                             .group = world,
                                                             .operation = CF_ALLGATHER,
                                                             .mode = cf_mode_for_figures(mode),
                                                             .slices = 1,
                                                             .dtype = CF_BYTE,
                                                             .capacity = block});
    cf_copy(device + world->rank * block, events, count * (int64_t)sizeof *events, context->stream);
    cf_fuse_run(gather, device, block, 1, NULL, NULL, -1);
    cf_copy(all, device, bytes, context->stream);
    cf_stream_sync(context->stream);
    cf_fuse_free(gather);
    cf_free(device);
    return all;
}

char *cf_timeline_end(cf_context *context, const cf_group *world, cf_mode mode, size_t *size) {
    const int ranks = world->size;
    int64_t mine = 0, most = 1, *counts = calloc((size_t)ranks, sizeof *counts);
    const cf_trace_event **lists = calloc((size_t)ranks, sizeof *lists);
    char *text = NULL;
    FILE *memory = open_memstream(&text, size);
    if (!counts || !lists || !memory) cf_die(NULL, "out of memory for the trace");
    cf_trace_record(context->trace, false);
    const cf_trace_event *events = cf_trace_events(context->trace, &mine);
    cf_allgather_host(context->transport, &mine, counts, sizeof mine);
    for (int rank = 0; rank < ranks; rank++)
        if (counts[rank] > most) most = counts[rank];
    cf_trace_event *all = gather(context, world, mode, events, mine, most);
    for (int rank = 0; rank < ranks; rank++) lists[rank] = all + rank * most;
    if (world->rank == 0) cf_trace_write(memory, ranks, lists, counts);
    if (fclose(memory) != 0) cf_die(NULL, "out of memory for the trace");
    if (world->rank != 0) free(text), text = NULL;
    free(counts);
    free(lists);
    free(all);
    return text;
}
