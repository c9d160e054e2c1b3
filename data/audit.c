// See audit.h. Bounds are read off what a transfer costs here (cf_costs), by the first of these that holds.
#include "audit.h"
#include "../commfuse/die.h"
#include <stdlib.h>

enum { SHOWN = 8 };
static const double HIDDEN = 0.95;

typedef struct account {
    int count;
    int64_t steps;
    cf_trace_total total[CF_TRACE_TOTALS];
} account;

static int by_exposed(const void *a, const void *b) {
    const double x = ((const cf_trace_total *)a)->exposed_ms, y = ((const cf_trace_total *)b)->exposed_ms;
    return (x < y) - (x > y);
}

// Adds up what ranks have of an operation, by its name: one that has nothing to send has none.
static account merge(const account *all, int ranks) {
    account sum = {.steps = all->steps};
    for (int rank = 0; rank < ranks; rank++)
        for (int i = 0; i < all[rank].count; i++) {
            const cf_trace_total *from = &all[rank].total[i];
            int at = 0;
            while (at < sum.count && strcmp(sum.total[at].name, from->name) != 0) at++;
            if (at == CF_TRACE_TOTALS) continue;
            cf_trace_total *to = &sum.total[at];
            if (at == sum.count) memcpy(sum.total[sum.count++].name, from->name, sizeof from->name);
            to->comm_ms += from->comm_ms, to->exposed_ms += from->exposed_ms;
            to->bytes += from->bytes, to->transfers += from->transfers;
        }
    qsort(sum.total, (size_t)sum.count, sizeof *sum.total, by_exposed);
    return sum;
}

static const char *bound_of(const cf_trace_total *t, double hidden, const cf_costs *costs, const options *o, char *option,
                            size_t room) {
    const bool blocking = strcmp(o->overlap, "none") == 0, cut = strcmp(o->overlap, "slice") == 0;
    const double latency_s = (double)t->transfers * costs->latency_s, wire_s = (double)t->bytes / costs->bytes_per_s;
    *option = 0;
    if (hidden >= HIDDEN) return "nothing";
    if (blocking) {
        snprintf(option, room, "--overlap auto");
        return "blocking";
    }
    if (!costs->spare && o->threads > 1) snprintf(option, room, "--threads %lld", (long long)o->threads - 1);
    if (!costs->spare && o->threads <= 1) snprintf(option, room, "fewer ranks on a host");
    if (!costs->spare) return "no core to spare";
    snprintf(option, room, "--micro-batch %lld", 2 * (long long)o->micro_batch);
    if (latency_s > wire_s && o->slices > 1) snprintf(option, room, "--slices %lld", (long long)o->slices / 2);
    if (latency_s > wire_s) return "latency";
    if (cut) snprintf(option, room, "--overlap auto"); // its first or last piece has nothing to hide it
    return cut ? "chunking" : "bandwidth";
}

void audit_report(const cf_trace *trace, cf_transport *transport, const options *o, logfile *log) {
    account mine = {0}, *all = calloc((size_t)transport->size, sizeof *all);
    if (!all) cf_die(NULL, "out of memory for the audit of %d ranks", transport->size);
    const cf_trace_total *totals = cf_trace_totals(trace, &mine.count, &mine.steps);
    memcpy(mine.total, totals, (size_t)mine.count * sizeof *totals);
    cf_allgather_host(transport, &mine, all, sizeof mine);
    const account sum = merge(all, transport->size);
    free(all);
    if (transport->rank != 0 || sum.steps == 0 || sum.count == 0) return;
    const double share = 1 / ((double)sum.steps * transport->size);
    printf("overlap   of each operation, ms a step and rank; hidden; bounded by; worth trying\n");
    for (int i = 0; i < sum.count; i++) {
        const cf_trace_total *t = &sum.total[i];
        const double hidden = t->comm_ms > t->exposed_ms ? 1 - t->exposed_ms / t->comm_ms : 0;
        char option[64];
        const char *bound = bound_of(t, hidden, &transport->costs, o, option, sizeof option);
        if (i < SHOWN)
            printf("  %-36s %8.3f, exposed %8.3f  %5.1f %%  %-16s %s\n", t->name, t->comm_ms * share, t->exposed_ms * share,
                   100 * hidden, bound, option);
        log_begin(log, "audit");
        log_text(log, "operation", t->name);
        log_real(log, "comm_ms", t->comm_ms * share);
        log_real(log, "exposed_ms", t->exposed_ms * share);
        log_real(log, "hidden", hidden);
        log_real(log, "transfers", (double)t->transfers * share);
        log_real(log, "bytes", (double)t->bytes * share);
        log_text(log, "bound", bound);
        log_text(log, "try", option);
        log_end(log);
    }
}
