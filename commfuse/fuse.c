// The executor. It walks one rank's list of steps and knows no algorithm: the step names the slice, the peer and the steps to
// wait for.
//
//   COMPUTE, ADD, COPY   the stream waits until the named transfers have arrived, then the work is enqueued (the last addition of a
//                        sum by the callback, if it uses the sum)
//   EXCHANGE, COLLECTIVE post a request, joined exchanges together. Named transfers become the request's `after`; named
//                        computations are already on the stream that post() gets
//
// begin runs the steps before schedule.split, finish the others; then finish waits for every request, so that all memory may be
// reused. What is posted follows the list, whatever the speed. Memory and requests are made once, in create. place_of() alone
// decides where a slice is.
//
// Two streams. If the operation is `independent`, computations alternate between the context's two streams. On a GPU the first
// tiles of one then fill the multiprocessors that the last tiles of the other leave free, so slices cost little more than the
// whole. Computations of the two streams do not wait for each other; everything else (additions, requests) waits for both streams.
#include "fuse.h"
#include "schedule_check.h"

enum { TIMED_RUNS = 64, SLICES_MAX = 1 << 16 };
static const int64_t ELEMENTS_MAX = INT64_MAX / 8 / (2 * CF_CHECKED_SLICES); // of all ranks: bytes of any buffer have 64 bits

typedef struct timed_run { // events of the compute stream: before, and after, what begin or finish enqueued
    cf_event begin[2], finish[2];
} timed_run;

struct cf_fuse {
    cf_context *context;
    cf_fuse_config config;
    cf_schedule *choice[CF_CHOICES];
    int choices;
    const cf_schedule *schedule; // the current choice
    cf_request *request;         // one per step; unused for steps on the compute stream
    unsigned char *arrived;      // per step, a bit for each stream: work on this stream need not wait for the request any more
    int64_t tag, tags;           // of slice 0; how many, one for each slice of all ranks
    cf_fuse *following;          // in the list of the context
    char *stage, *result;
    char label[64];
    uint32_t hash;    // of the config and choice, for messages
    timed_run *timed; // [TIMED_RUNS]; NULL: there is one choice
    int timed_count;
    timed_run *now; // of the run in progress; NULL: it is not timed
    // The run in progress
    bool running, inside_call; // inside_call: inside begin or finish, where an error makes the context fail
    int next;                  // step
    char *full;
    int64_t rows, row_bytes, row_elements;
    cf_compute *compute;
    void *argument;
    int layer;
    // Streams: 0 is the context's stream, 1 its second one
    bool two_streams;    // both are used
    bool computed, fork; // a computation has been enqueued; the second stream has begun
    bool join;           // the other stream has work that an addition or a request must wait for
    int current;         // of the step in progress
    cf_event start;      // of begin or finish on the first stream: the second stream begins after it
};

// --- creation ---

static int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

cf_work cf_fuse_work(const cf_fuse *f) {
    return (cf_work){.operation = f->config.operation,
                     .side = f->config.side,
                     .ranks = f->config.group->size,
                     .hosts = f->config.group->hosts,
                     .bytes = (double)(f->config.capacity * cf_dtype_size(f->config.dtype)),
                     .flops = f->config.flops,
                     .early = f->config.urgency != CF_URGENT,
                     .native = f->config.group->collectives == CF_CHOSEN};
}

static cf_choice predicted_choice(const cf_fuse *f) {
    const cf_context *context = f->context;
    cf_costs costs = {0};
    if (context->transport) costs = context->transport->costs;
    if (f->config.group->size > 1 && costs.flops_per_s <= 0)
        cf_die("call cf_costs_agree() first", "%s: a choice of algorithm needs the costs of transfers and computation",
               f->config.name);
    cf_work work = cf_fuse_work(f);
    return cf_choose(&work, &costs);
}

// The lowest that are free in the group, alike on all its ranks, which make and free the same operations in the same order.
static void take_tags(cf_fuse *f, int64_t tags) {
    const int64_t most = f->context->transport ? f->context->transport->tags : 0;
    cf_fuse **at = &f->context->operations;
    f->tag = 0, f->tags = tags;
    for (; *at && ((*at)->config.group != f->config.group || (*at)->tag - f->tag < tags); at = &(*at)->following)
        if ((*at)->config.group == f->config.group) f->tag = (*at)->tag + (*at)->tags;
    if (most > 0 && f->tag + tags > most)
        cf_die_together("use fewer slices, or free operations that run no more",
                        "%s needs %lld message tags; %lld of its group are taken, and MPI has %lld (MPI_TAG_UB is %lld)", f->label,
                        (long long)tags, (long long)f->tag, (long long)most, (long long)most - 1);
    f->following = *at, *at = f;
}

static void release(cf_fuse *f) {
    cf_fuse **at = &f->context->operations;
    while (*at && *at != f) at = &(*at)->following;
    if (*at) *at = f->following; // its tags are free again
    cf_free(f->stage);
    if (!f->config.result_given) cf_free(f->result);
    for (int i = 0; i < f->choices; i++) cf_schedule_free(f->choice[i]);
    free(f->request);
    free(f->arrived);
    free(f->timed);
}

// The schedule of one rank. A caller's generator runs without the error boundary of the function that needs it.
static cf_schedule *create_schedule(const cf_fuse_config *p, cf_choice c, int rank) {
    cf_boundary *boundary = cf_boundary_swap(NULL);
    cf_schedule *s = cf_schedule_create(p->operation, p->side, c.algorithm, p->group->size, p->group->hosts, rank, c.slices);
    cf_boundary_swap(boundary);
    if (!s) cf_die(NULL, "%s: %s", p->name, cf_error());
    return s;
}

// This rank's schedule. Those of an algorithm that the tests do not know are checked, all ranks' together.
static cf_schedule *checked_schedule(const cf_fuse_config *p, cf_choice c) {
    if (cf_algorithm_find(c.algorithm->name) == c.algorithm) return create_schedule(p, c, p->group->rank);
    cf_schedule **all = cf_host_alloc(p->group->size, sizeof *all, p->name);
    for (int r = 0; r < p->group->size; r++) all[r] = create_schedule(p, c, r);
    char where[CF_WHERE_TEXT];
    const char *property = cf_schedule_check(all, where);
    if (property) cf_die("cf_schedule_print() prints it", "%s: %s violates %s: %s", p->name, c.algorithm->name, property, where);
    cf_schedule *mine = all[p->group->rank];
    for (int r = 0; r < p->group->size; r++)
        if (all[r] != mine) cf_schedule_free(all[r]);
    free(all);
    return mine;
}

int cf_fuse_set_choices(cf_fuse *f, cf_choice *choices, int count, int64_t *bytes) {
    const cf_fuse_config *config = &f->config;
    if (f->running || count < 1 || count > CF_CHOICES)
        cf_die(NULL, "%s gets %d choices%s", f->label, count, f->running ? " while it runs" : "");
    release(f);
    const int64_t shard = config->capacity * cf_dtype_size(config->dtype);
    int64_t stage = 0, result = 0, steps = 1, slices = 0;
    f->choices = 0;
    for (int i = 0; i < count; i++) {
        const cf_choice *c = &choices[i];
        cf_schedule *s = checked_schedule(config, *c);
        const int64_t shards = s->result.buffer != CF_RESULT || config->result_given ? 0
                               : s->operation == CF_ALLTOALL                         ? s->ranks
                                                                                     : 1;
        const int64_t more_stage = larger(s->stage_slots / s->slices * shard - stage, 0);
        const int64_t more_result = larger(shards * shard - result, 0);
        const int64_t more = i > 0 ? more_stage + more_result : 0;
        if (more > larger(*bytes, 0)) {
            cf_schedule_free(s);
            continue;
        }
        *bytes -= more, stage += more_stage, result += more_result;
        steps = larger(steps, s->count + 1);
        if (!s->algorithm->native && !s->bound && s->ranks > 1) slices = larger(slices, s->slices);
        choices[f->choices] = *c, f->choice[f->choices++] = s;
    }
    take_tags(f, config->group->size * slices);
    f->request = cf_host_alloc(steps, sizeof *f->request, config->name);
    f->arrived = cf_host_alloc(steps, sizeof *f->arrived, config->name);
    f->timed = count > 1 ? cf_host_alloc(TIMED_RUNS, sizeof *f->timed, config->name) : NULL;
    f->stage = cf_alloc(stage, "communication staging");
    if (!config->result_given) f->result = cf_alloc(result, "communication staging");
    cf_fuse_choose(f, 0);
    return f->choices;
}

// The hash (FNV-1a) of what all ranks of the group must have in common.
static uint32_t hash_of(const cf_fuse *f) {
    const cf_fuse_config *p = &f->config;
    char choice[CF_CHOICE_NAME], text[256];
    cf_choice_print((cf_choice){p->algorithm, p->slices}, choice);
    snprintf(text, sizeof text, "%s by %s, side %d, %lld x %s, tag %lld%s%s%s", f->label, choice, p->side, (long long)p->capacity,
             cf_dtype_name(p->dtype), (long long)f->tag, p->result_given ? ", result given" : "",
             p->urgency == CF_BULK ? ", bulk" : "", p->callback_adds_last ? ", callback adds last" : "");
    uint32_t hash = 2166136261u;
    for (const char *c = text; *c; c++) hash = (hash ^ (unsigned char)*c) * 16777619u;
    return hash;
}

void cf_fuse_choose(cf_fuse *f, int choice) {
    if (f->running || choice < 0 || choice >= f->choices)
        cf_die(NULL, "%s gets choice %d of %d%s", f->label, choice, f->choices, f->running ? " while it runs" : "");
    f->schedule = f->choice[choice];
    f->config.algorithm = f->schedule->bound ? f->schedule->bound : f->schedule->algorithm, f->config.slices = f->schedule->slices;
    f->hash = hash_of(f);
}

static void need(const cf_fuse_config *p, bool right, const char *field, int64_t value, const char *what) {
    if (!right)
        cf_die("fuse.h says what a field may be", "%s: %s is %lld, not %s", p->name ? p->name : "an operation", field,
               (long long)value, what);
}

static void check_config(const cf_fuse_config *p) {
    need(p, p->name, "name", 0, "a text");
    need(p, p->group, "group", 0, "a group");
    need(p, (unsigned)p->operation <= CF_ALLTOALL, "operation", p->operation, "a cf_operation");
    need(p, (unsigned)p->side <= CF_COMPUTE_BOTH, "side", p->side, "a cf_side");
    need(p, (unsigned)p->urgency <= CF_BULK, "urgency", p->urgency, "a cf_urgency");
    need(p, (unsigned)p->dtype <= CF_BYTE, "dtype", p->dtype, "a cf_dtype");
    need(p, p->operation != CF_REDUCE_SCATTER || p->dtype != CF_BYTE, "dtype", p->dtype, "one that can be summed");
    need(p, p->capacity >= 0 && p->capacity <= ELEMENTS_MAX / p->group->size, "capacity", p->capacity, "a number of elements");
    need(p, !p->algorithm || (p->slices >= 1 && p->slices <= SLICES_MAX), "slices", p->slices, "a number of slices");
    need(p, !p->callback_adds_last || (p->operation == CF_REDUCE_SCATTER && p->side == CF_COMPUTE_BEFORE), "callback_adds_last", 1,
         "0 but in a reduce-scatter with computation before it");
    need(p, !p->result_given || p->operation == CF_ALLTOALL, "result_given", 1, "0 in an operation other than all-to-all");
}

cf_fuse *cf_fuse_create_sized(cf_context *context, const cf_fuse_config *given, size_t bytes) {
    CF_RETURNS(NULL);
    cf_fuse_config config = {0};
    if (bytes > sizeof config) cf_die("link the library of its headers, or a newer one", "the program is newer than this library");
    memcpy(&config, given, bytes);
    check_config(&config);
    cf_fuse *f = cf_host_alloc(1, sizeof *f, config.name);
    f->context = context;
    f->config = config;
    snprintf(f->label, sizeof f->label, "%s %s", cf_operation_name(config.operation), config.name);
    cf_choice choice = {config.algorithm, config.slices};
    if (!config.algorithm) choice = predicted_choice(f);
    int64_t bytes_left = 0;
    cf_fuse_set_choices(f, &choice, 1, &bytes_left);
    return f;
}

bool cf_fuse_free(cf_fuse *f) {
    CF_RETURNS(false);
    if (!f) return true;
    if (f->running) cf_die(NULL, "%s is freed while it runs", f->label);
    release(f);
    free(f);
    return true;
}

void cf_fuse_set_result(cf_fuse *f, void *result) {
    if (!f->config.result_given || f->running)
        cf_die(NULL, "%s %s", f->label, f->running ? "is running" : "was created without result_given");
    f->result = result;
}

const cf_schedule *cf_fuse_schedule(const cf_fuse *f) {
    return f->schedule;
}
const cf_fuse_config *cf_fuse_get_config(const cf_fuse *f) {
    return &f->config;
}

// --- times of runs ---

double cf_fuse_median_ms(cf_fuse *f) {
    double ms[TIMED_RUNS];
    int count = f->timed_count < TIMED_RUNS ? f->timed_count : TIMED_RUNS;
    for (int i = 0; i < count; i++) {
        const timed_run *r = &f->timed[i];
        ms[i] = cf_event_ms(r->begin[1]) - cf_event_ms(r->begin[0]) + cf_event_ms(r->finish[1]) - cf_event_ms(r->finish[0]);
    }
    f->timed_count = 0;
    return cf_median(ms, count);
}

void cf_fuse_extend_timing(cf_fuse *f) {
    if (f->running) cf_die(NULL, "%s is not finished", f->label);
    if (f->now) f->now->finish[1] = cf_event_record(f->context->stream);
}

// --- places ---

// Slice k of any shard is rows [offset(k), offset(k + 1)) of it: sizes differ by at most one row.
static int64_t offset_of(const cf_fuse *f, int k) {
    return f->rows * k / f->schedule->slices;
}
static int64_t rows_of(const cf_fuse *f, int k) {
    return offset_of(f, k + 1) - offset_of(f, k);
}

static char *place_of(const cf_fuse *f, cf_place place) {
    char *base = place.buffer == CF_FULL ? f->full : place.buffer == CF_STAGE ? f->stage : f->result;
    const int m = f->schedule->slices, owner = place.slot / m, k = place.slot % m;
    int64_t row = owner * f->rows + offset_of(f, k);
    if (place.buffer == CF_FULL && f->schedule->slice_major) row = f->schedule->ranks * offset_of(f, k) + owner * rows_of(f, k);
    return base + row * f->row_bytes;
}

static cf_span span_of(const cf_fuse *f, const cf_step *step) {
    int m = f->schedule->slices, k = step->first % m;
    cf_span span = {.side = step->side,
                    .row = step->first / m * f->rows + offset_of(f, k),
                    .rows = rows_of(f, k),
                    .blocks = step->count,
                    .row_stride = f->rows,
                    .data = place_of(f, step->at)};
    int64_t between = f->schedule->slice_major && step->at.buffer == CF_FULL ? span.rows : f->rows;
    span.data_stride = between * f->row_bytes;
    if (span.rows == span.row_stride && between == span.rows) { // side by side: one block
        span.rows *= span.blocks;
        span.blocks = 1;
    }
    return span;
}

// --- two streams ---

static cf_stream *stream_of(const cf_fuse *f, int which) {
    return which ? f->context->second : f->context->stream;
}

static void sync_streams(cf_fuse *f) {
    if (f->join) cf_stream_after(stream_of(f, f->current), cf_event_record_untimed(stream_of(f, 1 - f->current)));
    f->join = false;
}

static void switch_stream(cf_fuse *f) {
    if (f->computed) f->current = 1 - f->current, f->join = true;
    if (f->current == 1 && !f->fork) cf_stream_after(f->context->second, f->start), f->fork = true;
    f->computed = true;
}

// --- steps on the compute streams ---

static void trace_request(cf_fuse *f, int index) {
    const cf_request *r = &f->request[index];
    const cf_step *step = &f->schedule->step[index];
    bool exchange = step->kind == CF_EXCHANGE;
    int peer = !exchange ? -1 : step->send.rank >= 0 ? step->send.rank : step->recv.rank;
    cf_trace_transfer(f->context->trace, f->label, f->layer, exchange ? step->send.slice : step->first,
                      peer < 0 ? -1 : f->config.group->world[peer], cf_request_bytes(r), r->posted, r->begin, r->end);
}

static void wait_request(cf_fuse *f, int index, cf_point point) {
    cf_transport *t = f->context->transport;
    cf_request *request = &f->request[index];
    if (t->test(t, request, point, stream_of(f, f->current))) return;
    // The other stream's computation still hides the transfer: the wait begins when that ends.
    cf_event begin = cf_event_record(stream_of(f, f->join ? 1 - f->current : f->current));
    cf_event end = t->wait(t, request, point, stream_of(f, f->current));
    cf_trace_wait(f->context->trace, f->label, f->layer, begin, end);
}

static void wait_if_needed(cf_fuse *f, int index) {
    const bool arrived = f->arrived[index] >> f->current & 1;
    if (arrived || !cf_is_transfer(&f->schedule->step[index])) return;
    wait_request(f, index, CF_ARRIVED);
    f->arrived[index] |= 1 << f->current;
}

static void call(cf_fuse *f, const cf_span *span, int slice, cf_stream *stream) {
    const cf_trace_work work = cf_trace_begin(f->context->trace, f->config.name, f->layer, stream);
    cf_boundary *boundary = cf_boundary_swap(NULL);
    f->compute(f->argument, span, stream);
    cf_boundary_swap(boundary);
    cf_trace_end(f->context->trace, work, slice, stream);
}

// Passes own slices k … end − 1 of a sum to the callback. add: the addition that would complete slice k alone; NULL: they are whole.
static void use_sum(cf_fuse *f, int k, int end, const cf_step *add, cf_stream *stream) {
    const int slice = f->schedule->rank * f->schedule->slices + k;
    const cf_place at = {f->schedule->result.buffer, f->schedule->result.slot + k};
    cf_span span = span_of(f, &(cf_step){.side = CF_COMPUTE_AFTER, .at = at, .first = slice, .count = 1});
    span.rows = offset_of(f, end) - offset_of(f, k);
    span.sum = (cf_sum){.to = span.data};
    if (add) span.sum = (cf_sum){span.data, place_of(f, add->from), add->count, f->rows * f->row_elements};
    if (span.rows > 0) call(f, &span, slice, stream);
}

// The addition that completes own slice k of a reduce-scatter. NULL: none does.
static const cf_step *last_addition(const cf_fuse *f, int k) {
    const cf_schedule *s = f->schedule;
    const cf_step *step = s->step + s->count;
    while (--step >= s->step)
        if (!cf_is_transfer(step) && step->at.buffer == s->result.buffer && step->at.slot == s->result.slot + k) break;
    return step >= s->step && step->kind == CF_ADD ? step : NULL;
}

// The slices that no addition completes, neighbours in one call.
static void use_complete(cf_fuse *f) {
    for (int k = 0, first = 0; k <= f->schedule->slices; k++)
        if (k == f->schedule->slices || last_addition(f, k)) {
            if (first < k) use_sum(f, first, k, NULL, f->context->stream);
            first = k + 1;
        }
}

static void run_add(cf_fuse *f, const cf_step *step) {
    const int k = step->at.slot % f->schedule->slices;
    cf_stream *stream = stream_of(f, f->current);
    if (f->config.callback_adds_last && step == last_addition(f, k)) return use_sum(f, k, k + 1, step, stream);
    const cf_trace_work work = cf_trace_begin(f->context->trace, "add", f->layer, stream);
    // The same slice of the next part is one shard further.
    cf_add(place_of(f, step->at), place_of(f, step->from), step->count, f->rows * f->row_elements, rows_of(f, k) * f->row_elements,
           f->config.dtype, stream);
    cf_trace_end(f->context->trace, work, step->at.slot, stream);
}

// --- steps on the wire ---

static void fill_request(cf_fuse *f, int index, cf_event posted) {
    static const cf_request_kind collectives[] = {CF_REQUEST_ALLGATHER, CF_REQUEST_REDUCE_SCATTER, CF_REQUEST_ALLTOALL};
    const cf_step *step = &f->schedule->step[index];
    const bool exchange = step->kind == CF_EXCHANGE;
    const int m = f->schedule->slices;
    const cf_request_kind kind = exchange ? CF_REQUEST_EXCHANGE : collectives[f->schedule->operation];
    cf_request *r = &f->request[index];
    *r = cf_request_of(kind, f->config.group, f->config.dtype, f->label);
    r->bulk = f->config.urgency == CF_BULK, r->layer = f->layer, r->step = f->context->step, r->config = f->hash;
    r->posted = posted;
    if (!exchange) {
        r->blocking = f->schedule->algorithm->blocking;
        r->send = place_of(f, step->from), r->recv = place_of(f, step->at);
        r->send_count = rows_of(f, step->first % m) * f->row_elements, r->stride = f->rows * f->row_elements;
    }
    if (exchange && step->send.rank >= 0) {
        r->send_to = step->send.rank, r->send = place_of(f, step->from);
        r->send_count = rows_of(f, step->send.slice % m) * f->row_elements, r->send_tag = (int)f->tag + step->send.slice;
    }
    if (exchange && step->recv.rank >= 0) {
        r->recv_from = step->recv.rank, r->recv = place_of(f, step->at);
        r->recv_count = rows_of(f, step->recv.slice % m) * f->row_elements, r->recv_tag = (int)f->tag + step->recv.slice;
    }
    for (int n = 0, after = 0, wait = 0; (wait = cf_nth_wait(step, n)) >= 0; n++)
        if (cf_is_transfer(&f->schedule->step[wait]) && !f->arrived[wait]) r->after[after++] = &f->request[wait];
}

// Posts steps [first, end): a collective, or the exchanges of one unit.
static void post(cf_fuse *f, int first, int end) {
    cf_transport *t = f->context->transport;
    sync_streams(f);
    const cf_event posted = cf_trace_posted(f->context->trace, stream_of(f, f->current)); // one for the unit
    for (int i = first; i < end; i++) fill_request(f, i, posted);
    t->post(t, &f->request[first], end - first, stream_of(f, f->current));
}

// --- a run ---

// Runs the next step; with an exchange also those joined to it.
static void run_step(cf_fuse *f) {
    int index = f->next++;
    const cf_step *step = &f->schedule->step[index];
    if (cf_is_transfer(step)) {
        while (f->next < f->schedule->count && f->schedule->step[f->next].joined) f->next++;
        post(f, index, f->next);
        if (f->schedule->algorithm->blocking) wait_if_needed(f, index);
        return;
    }
    cf_span span = span_of(f, step);
    const bool compute = step->kind == CF_COMPUTE && span.rows > 0;
    if (f->two_streams && compute)
        switch_stream(f);
    else
        sync_streams(f);
    for (int n = 0, wait = 0; (wait = cf_nth_wait(step, n)) >= 0; n++) wait_if_needed(f, wait);
    cf_stream *stream = stream_of(f, f->current);
    if (compute) call(f, &span, step->first, stream);
    if (step->kind == CF_ADD) run_add(f, step);
    if (step->kind == CF_COPY)
        cf_copy(place_of(f, step->at), place_of(f, step->from), rows_of(f, step->at.slot % f->schedule->slices) * f->row_bytes,
                stream);
}

static void run_steps(cf_fuse *f, int end) {
    f->inside_call = true;
    f->two_streams = f->config.independent && f->context->second && f->schedule->count > 1;
    f->computed = f->fork = f->join = false, f->current = 0;
    if (f->two_streams) f->start = cf_event_record_untimed(f->context->stream);
    cf_range_begin(f->label, f->layer);
    while (f->next < end) run_step(f);
    cf_range_end();
    if (f->current == 1) f->current = 0, f->join = true;
    sync_streams(f);
}

static void *fail(cf_context *context, bool inside_call) {
    context->failed |= inside_call;
    return NULL;
}

static void check_context(const cf_context *context, const char *label) {
    if (context->failed)
        cf_die("end this process: its launcher ends the others", "%s: an operation of this context has failed half way", label);
}

bool cf_fuse_begin(cf_fuse *f, void *full, int64_t rows_per_rank, int64_t row_elements, cf_compute *compute, void *argument,
                   int layer) {
    CF_RETURNS(fail(f->context, f->inside_call));
    check_context(f->context, f->label);
    if (f->running) cf_die(NULL, "%s is begun while it runs", f->label);
    if (rows_per_rank < 0 || row_elements < 0 ||
        row_elements > (rows_per_rank > 0 ? f->config.capacity / rows_per_rank : ELEMENTS_MAX))
        cf_die(NULL, "%s: a shard of %lld x %lld elements exceeds the capacity of %lld", f->label, (long long)rows_per_rank,
               (long long)row_elements, (long long)f->config.capacity);
    if (f->config.result_given && !f->result)
        cf_die("call cf_fuse_set_result() before every begin", "%s: no place for its result", f->label);
    if ((compute != NULL) != (f->config.side != CF_NO_COMPUTE))
        cf_die(NULL, "%s: %s a computation", f->label, compute ? "was created without" : "needs");
    f->now = f->context->timed && f->timed ? &f->timed[f->timed_count++ % TIMED_RUNS] : NULL;
    if (f->now) f->now->begin[0] = cf_event_record(f->context->stream);
    f->running = true, f->next = 0, f->layer = layer;
    f->full = full, f->rows = rows_per_rank, f->row_elements = row_elements;
    f->row_bytes = row_elements * cf_dtype_size(f->config.dtype);
    f->compute = compute, f->argument = argument;
    memset(f->arrived, 0, (size_t)f->schedule->count * sizeof *f->arrived);
    run_steps(f, f->schedule->split);
    f->inside_call = false;
    if (f->now) f->now->begin[1] = cf_event_record(f->context->stream);
    return true;
}

static void wait_for_requests(cf_fuse *f) {
    int last = f->schedule->count - 1;
    while (last >= 0 && !cf_is_transfer(&f->schedule->step[last])) last--;
    if (last >= 0 && f->context->transport->in_order) // one wait for all
        wait_request(f, last, CF_COMPLETE);
    for (int i = 0; i <= last; i++)
        if (cf_is_transfer(&f->schedule->step[i])) {
            wait_request(f, i, CF_COMPLETE);
            trace_request(f, i);
        }
}

void *cf_fuse_finish(cf_fuse *f) {
    CF_RETURNS(fail(f->context, f->inside_call));
    check_context(f->context, f->label);
    if (!f->running) cf_die(NULL, "%s is finished but was not begun", f->label);
    if (f->now) f->now->finish[0] = cf_event_record(f->context->stream);
    run_steps(f, f->schedule->count);
    wait_for_requests(f);
    if (f->config.callback_adds_last) use_complete(f);
    f->inside_call = false;
    if (f->now) f->now->finish[1] = cf_event_record(f->context->stream);
    f->running = false;
    char *result = f->schedule->operation == CF_ALLGATHER ? f->full : place_of(f, f->schedule->result);
    if (f->config.result_given) f->result = NULL; // it is the caller's again
    return result;
}

void *cf_fuse_run(cf_fuse *f, void *full, int64_t rows_per_rank, int64_t row_elements, cf_compute *compute, void *argument,
                  int layer) {
    return cf_fuse_begin(f, full, rows_per_rank, row_elements, compute, argument, layer) ? cf_fuse_finish(f) : NULL;
}

bool cf_barrier(cf_context *context, const cf_group *group) {
    CF_RETURNS(fail(context, true));
    if (group->size == 1) return true;
    check_context(context, "barrier");
    cf_request *r = cf_host_alloc(1, sizeof *r, "a barrier"); // a late rank may end it after the wait has failed
    *r = cf_request_of(CF_REQUEST_BARRIER, group, CF_FP32, "barrier");
    r->step = context->step;
    context->transport->post(context->transport, r, 1, context->stream);
    context->transport->wait(context->transport, r, CF_COMPLETE, context->stream);
    free(r);
    return true;
}
