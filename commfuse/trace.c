// See trace.h. Perfetto nests overlapping events of one row, so the writer spreads transfers over as many "comm" rows per rank as
// are in flight at the same time.
#include "trace.h"
#include <limits.h>
#include <math.h>

static const char purpose[] = "the trace; fewer steps make it shorter";
enum { COMM_ROWS_MAX = 16, SECOND_ROW = CF_TRACE_COMM + COMM_ROWS_MAX, SPANS_BETWEEN_LOOKS = 1024, SPANS_MAX = 4096 };
// Recorded events of a rank, and of all; those that ranks exchange at a time.
enum { EVENTS_MAX = 1 << 17, ALL_EVENTS_MAX = 1 << 22, PART = 1 << 14 };

typedef struct span {
    cf_trace_event event; // first: spans are sorted by its first field, begin_ms
    cf_event posted, begin, end;
} span;

typedef struct figures {             // of a step
    cf_trace_sums sums;              // the first, without a name: of all operations
    double reached[CF_TRACE_TOTALS]; // the end of the union of communication so far, on the cf_now_ms clock
} figures;

struct cf_trace {
    double zero_ms;
    bool record, forgotten; // forgotten: a event was no longer remembered
    bool in_range;          // of the current step
    int step;
    cf_event began;                                 // the current step
    const cf_stream *stream;                        // of the current step
    span *span;                                     // of the step before and of the current one
    int64_t before, resolved, spans, span_capacity; // [0, before) are of the step before; [0, resolved) have times
    figures last, now;                              // of the step before and of the current one: spans that have left the list
    cf_trace_list recorded;
    int full_step; // the first of which recorded has not all events
    cf_trace_sums sums;
};

cf_trace *cf_trace_create(void) {
    cf_trace *trace = cf_host_alloc(1, sizeof *trace, "the trace");
    trace->zero_ms = cf_now_ms();
    trace->step = -1, trace->full_step = INT_MAX;
    trace->span = cf_host_grow(NULL, &trace->span_capacity, SPANS_MAX + SPANS_BETWEEN_LOOKS, sizeof *trace->span, purpose);
    return trace;
}

void cf_trace_free(cf_trace *trace) {
    if (!trace) return;
    if (trace->in_range) cf_range_end();
    free(trace->span);
    free(trace->recorded.event);
    free(trace);
}

void cf_trace_append(cf_trace_list *list, cf_trace_event event) {
    list->event = cf_host_grow(list->event, &list->room, list->count + 1, sizeof event, purpose);
    list->event[list->count++] = event;
}

// --- between events ---

cf_trace_work cf_trace_begin(const cf_trace *trace, const char *name, int layer, cf_stream *stream) {
    cf_range_begin(name, layer);
    return (cf_trace_work){name, layer, trace->record ? cf_event_record(stream) : (cf_event){0}};
}

cf_event cf_trace_posted(const cf_trace *trace, cf_stream *stream) {
    return trace->record ? cf_event_record(stream) : cf_event_record_untimed(stream);
}

// Turns events of spans into times, in order: of the first `count`, and, with `others`, of those after them that have passed. A GPU
// remembers a limited number of events, and a step may take more.
static void resolve(cf_trace *trace, int64_t count, bool others) {
    for (; trace->resolved < (others ? trace->spans : count); trace->resolved++) {
        span *s = &trace->span[trace->resolved];
        cf_trace_event *e = &s->event;
        if (!cf_event_remembered(s->posted) || !cf_event_remembered(s->end)) { // one of these is the earliest
            if (!trace->forgotten)                                             // printed once
                fprintf(stderr, "note: step takes too many events for its figures: %s of layer %d is not in them\n", e->name,
                        e->layer);
            trace->forgotten = true;
            e->row = CF_TRACE_COMPUTE; // not in the figures
            continue;
        }
        if (trace->resolved >= count && (!cf_event_passed(s->end) || !cf_event_passed(s->begin))) return;
        // Each is a call of the GPU's driver, so posted is read only for recorded events.
        e->begin_ms = cf_event_ms(s->begin), e->end_ms = cf_event_ms(s->end);
        e->posted_ms = trace->record && s->posted.number >= 0 ? cf_event_ms(s->posted) : e->begin_ms;
        if (e->row == CF_TRACE_WAIT) e->end_ms = fmax(e->begin_ms, e->end_ms);
        if (!trace->record || (e->row == CF_TRACE_WAIT && e->begin_ms == e->end_ms)) continue;
        cf_trace_event recorded = *e;
        recorded.begin_ms -= trace->zero_ms, recorded.end_ms -= trace->zero_ms, recorded.posted_ms -= trace->zero_ms;
        if (trace->recorded.count < trace->recorded.room)
            trace->recorded.event[trace->recorded.count++] = recorded;
        else if (trace->full_step > e->step)
            trace->full_step = e->step;
    }
}

// Orders spans, events and doubles by the double at their start.
static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// The total of an operation; NULL: there is no room for more.
static cf_trace_total *total_of(cf_trace_sums *sums, const char *name) {
    int i = 0;
    while (i < sums->count && strcmp(sums->total[i].name, name) != 0) i++;
    if (i == CF_TRACE_TOTALS) return NULL;
    if (i == sums->count) snprintf(sums->total[sums->count++].name, CF_TRACE_NAME, "%s", name);
    return &sums->total[i];
}

void cf_trace_add(cf_trace_sums *sums, const cf_trace_total *more) {
    cf_trace_total *to = total_of(sums, more->name);
    if (!to) return;
    to->comm_ms += more->comm_ms, to->exposed_ms += more->exposed_ms;
    to->bytes += more->bytes, to->transfers += more->transfers;
}

static int by_exposed(const void *a, const void *b) {
    const double x = ((const cf_trace_total *)a)->exposed_ms, y = ((const cf_trace_total *)b)->exposed_ms;
    return (x < y) - (x > y);
}

void cf_trace_sort(cf_trace_sums *sums) {
    qsort(sums->total, (size_t)sums->count, sizeof *sums->total, by_exposed);
}

// Events come in the order in which they begin. One that began before others that were taken earlier counts from their end.
static void add_event(figures *f, const char *name, const cf_trace_event *e) {
    cf_trace_total *to = total_of(&f->sums, name);
    if (to && e->row == CF_TRACE_WAIT) to->exposed_ms += e->end_ms - e->begin_ms;
    if (!to || e->row != CF_TRACE_COMM) return;
    double *reached = &f->reached[to - f->sums.total];
    to->comm_ms += fmax(0, e->end_ms - fmax(e->begin_ms, *reached));
    *reached = fmax(*reached, e->end_ms);
    to->bytes += e->bytes, to->transfers++;
}

static void remove_spans(cf_trace *trace, int64_t first, int64_t count) {
    trace->spans -= count, trace->resolved -= count;
    memmove(trace->span + first, trace->span + first + count, (size_t)(trace->spans - first) * sizeof *trace->span);
}

// Moves `count` spans from `first` on into figures, but not the `left` that begin last. They have times.
static void take(cf_trace *trace, figures *to, int64_t first, int64_t count, int64_t left) {
    span *s = trace->span + first;
    qsort(s, (size_t)count, sizeof *s, ascending);
    for (int64_t i = 0; i < count - left; i++)
        if (s[i].event.row != CF_TRACE_COMPUTE) add_event(to, "", &s[i].event), add_event(to, s[i].event.name, &s[i].event);
    remove_spans(trace, first, count - left);
}

static void add_span(cf_trace *trace, span s, const char *name) {
    if (trace->step < 0 && !trace->record) return;
    if (trace->spans % SPANS_BETWEEN_LOOKS == SPANS_BETWEEN_LOOKS - 1) resolve(trace, 0, true);
    const int64_t mine = trace->resolved - trace->before;
    if (mine >= SPANS_MAX) take(trace, &trace->now, trace->before, mine, SPANS_MAX / 2);
    trace->span = cf_host_grow(trace->span, &trace->span_capacity, trace->spans + 1, sizeof s, purpose);
    s.event.step = trace->step;
    snprintf(s.event.name, sizeof s.event.name, "%s", name);
    trace->span[trace->spans++] = s;
}

void cf_trace_end(cf_trace *trace, cf_trace_work work, int slice, cf_stream *stream) {
    const bool second = trace->stream && stream != trace->stream;
    const cf_trace_event e = {.row = CF_TRACE_COMPUTE, .layer = work.layer, .slice = slice, .peer = -1, .second = second};
    if (trace->record) add_span(trace, (span){e, work.begin, work.begin, cf_event_record(stream)}, work.name);
    cf_range_end();
}

void cf_trace_wait(cf_trace *trace, const char *name, int layer, cf_event begin, cf_event end) {
    add_span(trace, (span){{.row = CF_TRACE_WAIT, .layer = layer, .slice = -1, .peer = -1}, begin, begin, end}, name);
}

void cf_trace_transfer(cf_trace *trace, const char *name, int layer, int slice, int peer, int64_t bytes, cf_event posted,
                       cf_event begin, cf_event end) {
    const cf_trace_event e = {.row = CF_TRACE_COMM, .layer = layer, .slice = slice, .peer = peer, .bytes = bytes};
    add_span(trace, (span){e, posted, begin, end}, name);
}

// --- figures ---

void cf_trace_record(cf_trace *trace, bool on) {
    resolve(trace, trace->spans, false); // with the old setting
    trace->record = on;
    if (!on || trace->recorded.event) return;
    trace->recorded.event = malloc(EVENTS_MAX * sizeof(cf_trace_event)); // a run goes on without
    trace->recorded.room = trace->recorded.event ? EVENTS_MAX : 0;
}

// Zero is the time when a rank left the barrier; on one host, whose ranks share a clock, the latest of these times.
void cf_trace_start(cf_trace *trace, cf_transport *t) {
    trace->zero_ms = cf_now_ms();
    if (t->local_size == t->size) trace->zero_ms = -1e-3 * (double)cf_allreduce_min(t, (int64_t)(-1e3 * trace->zero_ms));
    cf_trace_record(trace, true);
}

// The stream has waited for all transfers of the step before.
static void resolve_last(cf_trace *trace) {
    if (trace->before > 0) cf_event_wait(trace->began);
    resolve(trace, trace->before, false);
}

void cf_trace_step(cf_trace *trace, int step, cf_stream *stream) {
    resolve_last(trace);
    remove_spans(trace, 0, trace->before);
    trace->before = trace->spans;
    trace->last = trace->now, trace->now = (figures){.sums = {.count = 0}};
    trace->began = cf_event_record(stream), trace->stream = stream;
    if (trace->in_range) cf_range_end();
    trace->in_range = step > trace->step; // not what comes after it: validation, samples
    if (trace->in_range) cf_range_begin("step", step);
    trace->step = step;
}

double cf_median(double *values, int count) {
    if (count == 0) return NAN;
    qsort(values, (size_t)count, sizeof *values, ascending);
    return values[count / 2];
}

cf_trace_figures cf_trace_last(cf_trace *trace) {
    resolve_last(trace);
    take(trace, &trace->last, 0, trace->before, 0);
    trace->before = 0;
    return (cf_trace_figures){trace->last.sums.total->comm_ms, trace->last.sums.total->exposed_ms};
}

void cf_trace_add_totals(cf_trace *trace) {
    for (int i = 1; i < trace->last.sums.count; i++) cf_trace_add(&trace->sums, &trace->last.sums.total[i]);
    trace->sums.steps++;
}

const cf_trace_sums *cf_trace_totals(const cf_trace *trace) {
    return &trace->sums;
}

const cf_trace_list *cf_trace_events(cf_trace *trace) {
    resolve(trace, trace->spans, false);
    return &trace->recorded;
}

// --- Chrome trace ---

static void write_text(FILE *file, const char *text) {
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') fputc('\\', file);
        fputc((unsigned char)*text < 0x20 ? ' ' : *text, file);
    }
}

static void write_event(FILE *file, int rank, const cf_trace_event *e) {
    static const char *const category[] = {"compute", "wait", "comm"};
    const int kind = e->second ? CF_TRACE_COMPUTE : e->row < CF_TRACE_COMM ? e->row : CF_TRACE_COMM;
    fprintf(file, ",\n{\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f,\"cat\":\"%s\",\"name\":\"", rank, e->row,
            e->begin_ms * 1e3, (e->end_ms - e->begin_ms) * 1e3, category[kind]);
    write_text(file, e->name);
    fprintf(file, "\",\"args\":{\"step\":%d", e->step);
    if (e->layer >= 0) fprintf(file, ",\"layer\":%d", e->layer);
    if (e->slice >= 0) fprintf(file, ",\"slice\":%d", e->slice);
    if (e->peer >= 0) fprintf(file, ",\"peer\":%d", e->peer);
    if (e->bytes > 0) fprintf(file, ",\"bytes\":%lld", (long long)e->bytes);
    if (kind == CF_TRACE_COMM) fprintf(file, ",\"posted\":%.3f", e->posted_ms * 1e3);
    fprintf(file, "}}");
}

// Sorts the events of a rank and gives each its row of the file.
static void arrange(cf_trace_list *events) {
    double end_ms[COMM_ROWS_MAX];                                  // of the last event of each comm row
    for (int i = 0; i < COMM_ROWS_MAX; i++) end_ms[i] = -INFINITY; // a transfer may begin before zero
    if (events->count > 0) qsort(events->event, (size_t)events->count, sizeof *events->event, ascending);
    for (cf_trace_event *e = events->event; e < events->event + events->count; e++) {
        if (e->second) e->row = SECOND_ROW;
        if (e->second || e->row < CF_TRACE_COMM) continue;
        int free = 0;
        while (free < COMM_ROWS_MAX - 1 && end_ms[free] > e->begin_ms) free++;
        end_ms[free] = e->end_ms, e->row = CF_TRACE_COMM + free;
    }
}

static FILE *open_text(int ranks, char **text, size_t *size) { // NULL: no memory
    static const char *const names[] = {"compute", "waiting (exposed)", "comm"};
    FILE *file = open_memstream(text, size);
    if (!file) return NULL;
    fprintf(file, "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
    for (int rank = 0; rank < ranks; rank++) {
        for (int row = 0; row <= SECOND_ROW; row++)
            fprintf(file, "{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"%s\"}},\n", rank, row,
                    row == SECOND_ROW ? "compute, second stream" : names[row < CF_TRACE_COMM ? row : CF_TRACE_COMM]);
        fprintf(file, "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,\"args\":{\"name\":\"rank %d\"}}%s", rank, rank,
                rank + 1 < ranks ? ",\n" : "");
    }
    return file;
}

static void close_text(FILE *file, char **text) { // NULL: no memory
    if (!file) return;
    const bool whole = fprintf(file, "\n]}\n") > 0; // where memory has ended, all that follows fails
    if (fclose(file) == 0 && whole) return;
    free(*text);
    *text = NULL;
}

char *cf_trace_text(int ranks, const cf_trace_list *events, size_t *size) {
    char *text = NULL;
    FILE *file = open_text(ranks, &text, size);
    for (int rank = 0; file && rank < ranks; rank++) {
        cf_trace_list list = events[rank];
        arrange(&list);
        for (int64_t i = 0; i < list.count; i++) write_event(file, rank, &list.event[i]);
    }
    close_text(file, &text);
    if (!text) cf_die(NULL, "out of memory for the trace");
    return text;
}

// All ranks send parts of equal size, one after another: the events of all ranks together would need much memory.
char *cf_trace_gather(cf_trace *trace, cf_transport *t, size_t *size) {
    cf_trace_record(trace, false);
    cf_trace_list *mine = &trace->recorded;
    const int64_t room = ALL_EVENTS_MAX / t->size, part = PART / t->size + 1;
    if (mine->count > room) trace->full_step = mine->event[room].step, mine->count = room;
    arrange(mine);
    const int64_t most = -cf_allreduce_min(t, -mine->count), full_step = cf_allreduce_min(t, trace->full_step);
    if (t->rank == 0 && full_step < INT_MAX)
        fprintf(stderr, "note: the trace is full: events from step %lld on are not in it; fewer steps fit\n", (long long)full_step);
    cf_trace_list *lists = cf_allgather_alloc(t, mine, sizeof *lists);
    cf_trace_event *all = cf_host_alloc((t->size + 1) * part, sizeof *all, purpose), *sent = all + t->size * part;
    char *text = NULL;
    FILE *file = t->rank == 0 ? open_text(t->size, &text, size) : NULL;
    for (int64_t at = 0; at < most; at += part) {
        for (int64_t i = at; i < at + part && i < mine->count; i++) sent[i - at] = mine->event[i];
        cf_allgather_host(t, sent, all, part * (int64_t)sizeof *all);
        for (int rank = 0; file && rank < t->size; rank++)
            for (int64_t i = at; i < at + part && i < lists[rank].count; i++) write_event(file, rank, &all[rank * part + i - at]);
    }
    close_text(file, &text);
    free(lists);
    free(all);
    return text;
}
