// See record.h.
#include "record.h"
#include "../memory.h"
#include <stdlib.h>

static const char purpose[] = "a record; predict fewer ranks or a smaller batch";

cf_record_entry *cf_record_add(cf_record *r, cf_record_kind kind) {
    r->entry = cf_host_grow(r->entry, &r->room[0], r->entries + 1, sizeof *r->entry, purpose);
    cf_record_entry *e = &r->entry[r->entries++];
    if (kind == CF_DO_KERNEL || kind == CF_DO_POST) r->host_ms += 1e3 * r->hardware->call_s;
    *e = (cf_record_entry){.kind = kind, .unit = -1, .name = kind == CF_DO_STEP ? "step" : "", .host_ms = r->host_ms};
    return e;
}

cf_record_unit *cf_record_add_unit(cf_record *r, const char *label, int queue) {
    r->unit = cf_host_grow(r->unit, &r->room[1], r->units + 1, sizeof *r->unit, purpose);
    cf_record_unit *u = &r->unit[r->units++];
    *u = (cf_record_unit){.layer = -1, .queue = queue, .after = {-1, -1}};
    snprintf(u->label, sizeof u->label, "%s", label);
    return u;
}

cf_record cf_record_finish(cf_record *r) {
    cf_record finished = *r;
    *r = (cf_record){.hardware = r->hardware};
    return finished;
}

void cf_record_free(cf_record *r) {
    free(r->entry);
    free(r->unit);
}

int cf_record_link(const cf_hardware *h, int a, int b) {
    int level = 0;
    while (level < h->links - 1 && a / h->link[level].ranks != b / h->link[level].ranks) level++;
    return level;
}

// --- as a graph. Nodes: e, an entry; h, the host comes to it; of a unit p, posted, r, ready, g, it goes, t, a transfer, s, sent.
// In DOT a name with a dot is quoted, and a number has no exponent. ---

typedef struct graph {
    FILE *out;
    const cf_record *record;
    int rank;
} graph;

static void edge(const graph *g, char from, int rank, int64_t number, char to, int64_t of) {
    fprintf(g->out, "\"%c%d.%ld\" -> \"%c%d.%ld\";\n", from, rank, number, to, g->rank, of);
}

static void node(const graph *g, char kind, int64_t number, double ms) {
    fprintf(g->out, "\"%c%d.%ld\" [rank=%d, ms=%.9f];\n", kind, g->rank, number, g->rank, ms);
}

static void wait_for_arrival(const graph *g, int unit, char to, int64_t number) {
    for (uint64_t left = g->record->unit[unit].receives_from; left; left &= left - 1)
        edge(g, 's', __builtin_ctzll(left), unit, to, number);
}

static void write_entry(const graph *g, int64_t number, int64_t synced, const int64_t previous[CF_STREAMS]) {
    const cf_record_entry *e = &g->record->entry[number];
    const bool works = e->kind == CF_DO_KERNEL || e->kind == CF_DO_MOMENT;
    int64_t other = e->kind == CF_DO_AFTER ? e->after - 1 : -1; // of the other stream
    while (other >= 0 && g->record->entry[other].stream == e->stream) other--;
    fprintf(g->out, "\"e%d.%ld\" [rank=%d, stream=%d, ms=%.9f, label=\"%s\"];\n", g->rank, number, g->rank, e->stream,
            works ? e->ms : 0, e->name);
    if (previous[e->stream] >= 0) edge(g, 'e', g->rank, previous[e->stream], 'e', number);
    if (other >= 0) edge(g, 'e', g->rank, other, 'e', number);
    if (e->host_ms > 0) {
        node(g, 'h', number, e->host_ms);
        edge(g, 'e', g->rank, synced, 'h', number);
        edge(g, 'h', g->rank, number, 'e', number);
    }
    if (e->kind == CF_DO_POST) edge(g, 'e', g->rank, number, 'p', e->unit);
    if (e->kind == CF_DO_WAIT_ARRIVED || e->kind == CF_DO_WAIT_COMPLETE) wait_for_arrival(g, e->unit, 'e', number);
    if (e->kind == CF_DO_WAIT_COMPLETE) edge(g, 's', g->rank, e->unit, 'e', number);
}

static void write_transfers(const graph *g, int unit, int next) {
    const cf_record_unit *u = &g->record->unit[unit];
    const cf_hardware *h = g->record->hardware;
    const int rank = g->rank;
    int peers[CF_LINKS] = {0};
    for (uint64_t left = u->sends_to; left; left &= left - 1) peers[cf_record_link(h, rank, __builtin_ctzll(left))]++;
    for (uint64_t left = u->sends_to; left; left &= left - 1) {
        const int to = __builtin_ctzll(left), link = cf_record_link(h, rank, to);
        const double rate = h->link[link].bytes_per_s, bytes = 1e-3 * u->wire_ms[link] / peers[link] * rate;
        edge(g, h->gpu ? 'r' : 'p', to, unit, 'g', unit);
        fprintf(g->out, "\"t%d.%d.%d\" [rank=%d, to=%d, link=%d, gb_per_s=%.9f, bytes=%.0f, label=\"%s\"];\n", rank, unit, to, rank,
                to, link, 1e-9 * rate, bytes, u->label);
        fprintf(g->out, "\"g%d.%d\" -> \"t%d.%d.%d\" -> \"s%d.%d\";\n", rank, unit, rank, unit, to, rank, unit);
        if (next >= 0 && !h->gpu) fprintf(g->out, "\"t%d.%d.%d\" -> \"r%d.%d\";\n", rank, unit, to, rank, next);
    }
}

static void write_unit(const graph *g, int unit) {
    const cf_record_unit *u = &g->record->unit[unit];
    const bool gpu = g->record->hardware->gpu;
    int next = unit + 1; // of its queue
    while (next < g->record->units && g->record->unit[next].queue != u->queue) next++;
    if (next == g->record->units) next = -1;
    node(g, 'p', unit, 0), node(g, 'r', unit, 1e3 * g->record->hardware->start_s);
    node(g, 'g', unit, 0), node(g, 's', unit, u->latency_ms);
    edge(g, 'p', g->rank, unit, 'r', unit);
    edge(g, 'r', g->rank, unit, 'g', unit);
    edge(g, 'g', g->rank, unit, 's', unit);
    for (int i = 0; i < 2; i++)
        if (u->after[i] >= 0) wait_for_arrival(g, u->after[i], 'r', unit);
    write_transfers(g, unit, next);
    if (next >= 0) edge(g, gpu ? 's' : 'g', g->rank, unit, 'r', next);
    if (next >= 0 && gpu) wait_for_arrival(g, unit, 'r', next);
}

void cf_record_graph(FILE *out, const cf_record *const *records, int players) {
    fprintf(out, "digraph steps {\n");
    for (int rank = 0; rank < players; rank++) {
        const graph g = {out, records[rank], rank};
        int64_t previous[CF_STREAMS] = {-1, -1}, synced = 0;
        for (int64_t i = 0; i < g.record->entries; i++) {
            write_entry(&g, i, synced, previous);
            previous[g.record->entry[i].stream] = i;
            if (g.record->entry[i].kind == CF_DO_SYNC) synced = i;
        }
        for (int unit = 0; unit < g.record->units; unit++) write_unit(&g, unit);
    }
    fprintf(out, "}\n");
}
