// See context.h.
#include "context.h"
#include "base/limits.h"
#include "choice.h"

const char *cf_version(void) {
    return CF_VERSION;
}

void cf_context_start(cf_context *context, cf_transport *transport, int threads) {
    cf_costs_agree(transport, threads);
    *context = (cf_context){.transport = transport, .trace = cf_trace_create(), .step = -1};
    context->stream = cf_stream_create(), context->second = cf_stream_create_second();
}

static bool is_open; // the context of cf_open()

cf_context *cf_open(const char *transport, int threads, double timeout_s) {
    return cf_open_on(NULL, transport, threads, timeout_s);
}

cf_context *cf_open_on(const void *comm, const char *transport, int threads, double timeout_s) {
    CF_RETURNS(NULL);
    if (is_open) cf_die("close it first, or make groups of its ranks", "a context is open, and a process has one at a time");
    if (threads < 0 || !(timeout_s >= 0)) cf_die(NULL, "a context with %d threads and a timeout of %g s", threads, timeout_s);
    cf_context *context = cf_host_alloc(1, sizeof *context, "a context");
    cf_host = (struct cf_host){comm, threads == 0, true};
    cf_context_start(context, cf_transport_create(transport, NULL, NULL, timeout_s), cf_limits_threads(threads));
    is_open = true;
    return context;
}

void cf_context_stop(cf_context *context) {
    cf_trace_free(context->trace);
    cf_stream_free(context->stream), cf_stream_free(context->second);
}

bool cf_close(cf_context *context) {
    CF_RETURNS(false);
    if (context->failed)
        cf_die("end this process: its launcher ends the others", "an operation of this context has failed half way");
    cf_context_stop(context);
    context->transport->close(context->transport);
    is_open = false;
    free(context);
    return true;
}

cf_group *cf_group_create(cf_context *context, const char *name, const int *ranks, int members) {
    CF_RETURNS(NULL);
    cf_transport *t = context->transport;
    const int count = ranks ? members : t->size;
    if (count < 1 || count > t->size) cf_die(NULL, "group %s of %d of %d ranks", name, count, t->size);
    cf_group *group = cf_host_alloc(1, sizeof *group, "a group");
    int *world = cf_host_alloc(count, sizeof *world, "a group");
    *group = (cf_group){.name = name, .size = count, .rank = -1, .world = world, .urgent = true};
    for (int i = 0; i < count; i++) {
        world[i] = ranks ? ranks[i] : i;
        if (world[i] < 0 || world[i] >= t->size) cf_die(NULL, "group %s has rank %d of %d", name, world[i], t->size);
        for (int k = 0; k < i; k++)
            if (world[k] == world[i]) cf_die(NULL, "group %s has rank %d twice", name, world[i]);
        if (world[i] == t->rank) group->rank = i;
    }
    if (group->rank < 0) cf_die("only its members make a group", "rank %d is not in group %s", t->rank, name);
    group->hosts = cf_group_hosts(group, t->ranks_per_host);
    t->bind(t, group);
    return group;
}

void cf_group_free(cf_group *group) {
    if (!group) return;
    free(group->world);
    free(group);
}
