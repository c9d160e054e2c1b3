// See timeline.h. Blocks of an all-gather are of one size: that of the rank with most events, behind a head that says
// how many there are.
#include "timeline.h"
#include "die.h"
#include <stdlib.h>
#include <string.h>

static const int64_t event_bytes = (int64_t)sizeof(cf_trace_event);

void cf_timeline_start(cf_context *context, double zero_ms) {
    cf_trace_zero(context->trace, zero_ms);
    cf_trace_record(context->trace, true);
}

// `all`: (ranks, block) bytes of the host, the own block in place.
static void gather(cf_context *context, const cf_group *world, cf_mode mode, char *all, int64_t block) {
    mode = cf_mode_for_figures(mode);
    cf_fuse *gather = cf_fuse_create(context, (cf_fuse_plan){.name = "trace",
                                                             .group = world,
                                                             .operation = CF_ALLGATHER,
                                                             .mode = mode,
                                                             .slices = 1,
                                                             .dtype = CF_BYTE,
                                                             .capacity = block});
    char *device = cf_alloc(world->size * block, "trace");
    cf_copy(device + world->rank * block, all + world->rank * block, block, context->stream);
    cf_fuse_run(gather, device, block, 1, NULL, NULL, -1);
    cf_copy(all, device, world->size * block, context->stream);
    cf_stream_sync(context->stream);
    cf_fuse_free(gather);
    cf_free(device);
}

static int64_t most_of(cf_context *context, const cf_group *world, cf_mode mode, int64_t mine) {
    int64_t *counts = calloc((size_t)world->size, sizeof *counts), most = 0;
    if (!counts) cf_die(NULL, "out of memory for the trace");
    counts[world->rank] = mine;
    gather(context, world, mode, (char *)counts, (int64_t)sizeof *counts);
    for (int rank = 0; rank < world->size; rank++)
        if (counts[rank] > most) most = counts[rank];
    free(counts);
    return most;
}

static char *text_of(int ranks, const char *all, int64_t block, size_t *size) {
    int64_t *counts = calloc((size_t)ranks, sizeof *counts);
    const cf_trace_event **lists = calloc((size_t)ranks, sizeof *lists);
    char *text = NULL;
    FILE *memory = open_memstream(&text, size);
    if (!counts || !lists || !memory) cf_die(NULL, "out of memory for the trace");
    for (int rank = 0; rank < ranks; rank++) {
        lists[rank] = (const cf_trace_event *)(all + rank * block + event_bytes);
        counts[rank] = ((const cf_trace_event *)(all + rank * block))->bytes;
    }
    cf_trace_write(memory, ranks, lists, counts);
    if (fclose(memory) != 0) cf_die(NULL, "out of memory for the trace");
    free(counts);
    free(lists);
    return text;
}

char *cf_timeline_end(cf_context *context, const cf_group *world, cf_mode mode, size_t *size) {
    int64_t mine = 0;
    cf_trace_record(context->trace, false);
    const cf_trace_event *events = cf_trace_events(context->trace, &mine);
    int64_t block = (most_of(context, world, mode, mine) + 1) * event_bytes;
    char *all = calloc((size_t)world->size, (size_t)block);
    if (!all) cf_die(NULL, "out of memory for the trace");
    cf_trace_event head = {.bytes = mine};
    memcpy(all + world->rank * block, &head, sizeof head);
    if (mine > 0) memcpy(all + world->rank * block + event_bytes, events, (size_t)(mine * event_bytes));
    gather(context, world, mode, all, block);
    char *text = world->rank == 0 ? text_of(world->size, all, block, size) : NULL;
    free(all);
    return text;
}
