// See report.h.
#include "report.h"
#include "derived.h"

enum { SHOWN = 8 };
static const double HIDDEN = 0.95;

// The first limit that applies, by the costs of a transfer on this machine. option: what to try.
static const char *bound_of(const cf_trace_total *t, double hidden, const cf_costs *costs, const options *opt, char *option,
                            size_t room) {
    const cf_choice schedule = derived_schedule(opt);
    const bool blocking = schedule.algorithm && schedule.algorithm->blocking,
               cut = schedule.algorithm && schedule.algorithm->native;
    const double latency_s = (double)t->transfers * costs->latency_s, wire_s = (double)t->bytes / costs->bytes_per_s;
    *option = 0;
    if (hidden >= HIDDEN) return "nothing";
    if (blocking) {
        snprintf(option, room, "--overlap auto");
        return "blocking";
    }
    if (!costs->spare && opt->threads > 1) snprintf(option, room, "--threads %ld", opt->threads - 1);
    if (!costs->spare && opt->threads <= 1) snprintf(option, room, "fewer ranks on a host");
    if (!costs->spare) return "no core to spare";
    const int64_t more = 2 * opt->micro_batch;
    snprintf(option, room, "--micro-batch %ld", more);
    if (opt->given[OPTION_batch] && opt->batch % (more * opt->dp) != 0)
        snprintf(option, room, "--micro-batch %ld --batch %ld", more, 2 * opt->batch);
    if (latency_s > wire_s && schedule.algorithm && schedule.slices > 1)
        snprintf(option, room, "--overlap %s:%d", schedule.algorithm->name, schedule.slices / 2);
    if (latency_s > wire_s) return "latency";
    if (cut) snprintf(option, room, "--overlap auto"); // nothing hides its first or last slice
    return cut ? "chunking" : "bandwidth";
}

void audit(const cf_trace *trace, cf_transport *transport, const options *opt, logfile *log) {
    cf_trace_sums *all = cf_allgather_alloc(transport, cf_trace_totals(trace), sizeof *all), sum = {.steps = all->steps};
    for (int rank = 0; rank < transport->size; rank++) // by name: a rank that has nothing to send lacks an operation
        for (int i = 0; i < all[rank].count; i++) cf_trace_add(&sum, &all[rank].total[i]);
    cf_trace_sort(&sum);
    free(all);
    if (transport->rank != 0 || sum.steps == 0 || sum.count == 0) return;
    const double share = 1 / ((double)sum.steps * transport->size);
    cf_print(stdout, "overlap   %-27s %11s  %10s  %7s  %-16s %s\n", "operation, per step and rank", "transfer ms", "exposed ms",
             "hidden", "bound", "option to try");
    for (int i = 0; i < sum.count; i++) {
        const cf_trace_total *t = &sum.total[i];
        const double hidden = t->comm_ms > t->exposed_ms ? 1 - t->exposed_ms / t->comm_ms : 0;
        char option[64];
        const char *bound = bound_of(t, hidden, &transport->costs, opt, option, sizeof option);
        if (i < SHOWN)
            cf_print(stdout, "  %-35s %11.3f  %10.3f  %5.1f %%  %-16s %s\n", t->name, t->comm_ms * share, t->exposed_ms * share,
                     100 * hidden, bound, option);
        LOG_LINE(log, "audit", FIELD("operation", t->name), FIELD("comm_ms", t->comm_ms * share),
                 FIELD("exposed_ms", t->exposed_ms * share), FIELD("hidden", hidden), FIELD("transfers", t->transfers * share),
                 FIELD("bytes", t->bytes * share), FIELD("bound", bound), FIELD("try", option));
    }
}
