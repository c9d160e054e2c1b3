// See playback.h. Why this is not replay.c, and that not this: see there.
#include "playback.h"

static const double ROUNDING = 1e-9; // ms: tolerance of rounding

enum { WAVES = 64 };

typedef struct flight { // a unit of one player; times are INFINITY until known
    bool posted, ready, started;
    int held;                      // multiprocessors, until it is complete
    double remaining_ms[CF_LINKS]; // remaining time on each link, if alone there
    double startable_ms, began_ms, sent_ms;
} flight;

typedef struct stream {
    int64_t next;          // entry
    bool working, waiting; // in a kernel; at a wait, since began_ms
    double remaining_ms, began_ms;
    int64_t blocks[2]; // of the kernel, not started
    struct {           // blocks that started together
        int count;
        double remaining_ms;
    } wave[WAVES];
    int waves, computing; // computing: multiprocessors in use
} stream;

typedef struct player {
    const cf_record *record;
    stream stream[CF_STREAMS];
    flight *flight;       // one for each unit
    int held;             // multiprocessors, by units
    double host_ms;       // end of the last SYNC
    int first[CF_QUEUES]; // units before it are done, or of other queues
    int open, posted;     // units before `open` are done, those from `posted` on are not posted
    double step_ms[2];    // when the last two steps began
    cf_played sum;
} player;

typedef struct playback {
    const cf_hardware *hardware;
    int players;
    player *player;
    double now_ms;
    cf_trace_list *events;
} playback;

static void add_event(playback *b, const player *p, int row, const char *name, int layer, int64_t bytes, double begin, double end) {
    if (!b->events) return;
    cf_trace_event e = {begin, end, .posted_ms = begin, .row = row, .layer = layer, .slice = -1, .peer = -1, .bytes = bytes};
    snprintf(e.name, sizeof e.name, "%.39s", name);
    cf_trace_append(&b->events[p - b->player], e);
}

// --- units ---

static bool arrived(const playback *b, const player *p, int unit) {
    const cf_record_unit *u = &p->record->unit[unit];
    if (!p->flight[unit].posted) return false;
    for (uint64_t from = u->receives_from; from; from &= from - 1)
        if (!(b->player[__builtin_ctzll(from)].flight[unit].sent_ms <= b->now_ms + ROUNDING)) return false;
    return true;
}

static bool complete(const playback *b, const player *p, int unit) {
    return p->flight[unit].sent_ms <= b->now_ms + ROUNDING && arrived(b, p, unit);
}

static bool drained(const flight *f) {
    double left = 0;
    for (int l = 0; l < CF_LINKS; l++) left += f->remaining_ms[l];
    return f->started && left <= ROUNDING;
}

static bool receivers_ready(const playback *b, const player *p, int unit) {
    const cf_record_unit *u = &p->record->unit[unit];
    for (uint64_t to = u->sends_to; to; to &= to - 1) {
        const flight *f = &b->player[__builtin_ctzll(to)].flight[unit];
        if (!(b->hardware->gpu ? f->ready : f->posted)) return false;
    }
    return true;
}

static int unused(const playback *b, const player *p) {
    int computing = 0;
    for (int k = 0; k < CF_STREAMS; k++) computing += p->stream[k].computing;
    return b->hardware->multiprocessors - p->held - computing;
}

// Moves the units of a player as far as they get at this instant. Returns whether any moved.
static bool move_units(playback *b, player *p) {
    const cf_record *r = p->record;
    bool moved = false;
    for (int queue = 0; queue < CF_QUEUES; queue++)
        for (; p->first[queue] < r->units; p->first[queue]++) {
            const int unit = p->first[queue];
            const cf_record_unit *u = &r->unit[unit];
            flight *f = &p->flight[unit];
            if (u->queue != queue) continue;
            if (!f->posted) break;
            if (f->startable_ms == INFINITY) {
                bool all = true;
                for (int i = 0; i < 2 && all; i++) all = u->after[i] < 0 || arrived(b, p, u->after[i]);
                if (!all) break;
                f->startable_ms = b->now_ms + 1e3 * b->hardware->start_s;
            }
            if (!f->ready) {
                if (f->startable_ms > b->now_ms + ROUNDING) break;
                const int needed =
                    b->hardware->gpu ? (int)lround(u->taken * b->hardware->multiprocessors) : 0; // CPU: compute_speed()
                const int wanted = needed - f->held, given = unused(b, p) < wanted ? unused(b, p) : wanted;
                f->held += given, p->held += given;
                if (given < wanted) break;
                f->ready = moved = true;
            }
            if (!f->started) {
                if (!receivers_ready(b, p, unit)) break;
                f->started = moved = true, f->began_ms = b->now_ms;
                memcpy(f->remaining_ms, u->wire_ms, sizeof f->remaining_ms);
            }
            if (drained(f) && f->sent_ms == INFINITY) moved = true, f->sent_ms = b->now_ms + u->latency_ms;
            if (b->hardware->gpu ? !complete(b, p, unit) : !drained(f)) break;
            p->held -= f->held, moved = true;
        }
    for (; p->open < p->posted && p->flight[p->open].started && complete(b, p, p->open); p->open++) {
        const cf_record_unit *u = &r->unit[p->open];
        add_event(b, p, CF_TRACE_COMM, u->label, u->layer, u->bytes, p->flight[p->open].began_ms, b->now_ms);
    }
    return moved;
}

// --- the streams ---

static void add_exposed(cf_played *sum, const char *label, double ms) {
    cf_trace_total more = {.exposed_ms = ms};
    snprintf(more.name, sizeof more.name, "%.39s", label);
    cf_trace_add(&sum->exposed, &more);
    sum->part_ms[CF_PART_EXPOSED] += ms;
}

// The next entry of a stream; NULL: none.
static const cf_record_entry *entry_of(const player *p, const stream *s) {
    return s->next < p->record->entries ? &p->record->entry[s->next] : NULL;
}

static void next_entry(const player *p, stream *s) {
    do s->next++;
    while (s->next < p->record->entries && p->record->entry[s->next].stream != s - p->stream);
}

// The other stream's kernel began earlier and has blocks left to start.
static bool must_wait(const player *p, const stream *s) {
    const stream *other = &p->stream[s == p->stream];
    const bool sooner = other->began_ms < s->began_ms || (other->began_ms == s->began_ms && other < s);
    return other->working && sooner && (other->remaining_ms > ROUNDING || other->blocks[0] + other->blocks[1] > 0);
}

// Starts blocks on unused multiprocessors. Returns whether all blocks have ended.
static bool start_blocks(playback *b, player *p, stream *s, const cf_record_entry *e) {
    for (int i = 0; i < 2 && s->remaining_ms <= ROUNDING && !must_wait(p, s); i++) {
        const int count = s->blocks[i] < unused(b, p) ? (int)s->blocks[i] : unused(b, p);
        if (count == 0 || s->waves == WAVES) continue;
        s->wave[s->waves].count = count, s->wave[s->waves++].remaining_ms = e->block_ms[i];
        s->blocks[i] -= count, s->computing += count;
    }
    return s->remaining_ms <= ROUNDING && s->computing == 0 && s->blocks[0] + s->blocks[1] == 0;
}

// Runs the next entry of a stream, if it can run now.
static bool run_entry(playback *b, player *p, stream *s) {
    const cf_record_entry *e = entry_of(p, s);
    if (!e) return false;
    if (s->working) {
        if (!start_blocks(b, p, s, e)) return false;
        if (e->kind == CF_DO_KERNEL) add_event(b, p, CF_TRACE_COMPUTE, e->name, -1, 0, s->began_ms, b->now_ms);
        p->sum.part_ms[e->work] += e->ms, p->sum.part_ms[CF_PART_SLOWED] += fmax(0, b->now_ms - s->began_ms - e->ms);
        s->working = false;
        next_entry(p, s);
        return true;
    }
    if (p->host_ms + e->host_ms > b->now_ms + ROUNDING) return false;
    switch (e->kind) {
    case CF_DO_KERNEL:
    case CF_DO_MOMENT:
        s->working = true, s->began_ms = b->now_ms;
        s->remaining_ms = e->blocks[0] > 0 ? 1e3 * b->hardware->kernel_s : e->ms;
        memcpy(s->blocks, e->blocks, sizeof s->blocks);
        return true;
    case CF_DO_POST:
        p->flight[e->unit].posted = true, p->posted = e->unit + 1;
        break;
    case CF_DO_AFTER:
    case CF_DO_WAIT_ARRIVED:
    case CF_DO_WAIT_COMPLETE:
        if (!s->waiting) s->waiting = true, s->began_ms = b->now_ms;
        if (e->kind == CF_DO_AFTER          ? p->stream[1 - e->stream].next < e->after
            : e->kind == CF_DO_WAIT_ARRIVED ? !arrived(b, p, e->unit)
                                            : !complete(b, p, e->unit))
            return false;
        s->waiting = false;
        if (e->unit >= 0 && b->now_ms > s->began_ms + ROUNDING)
            add_event(b, p, CF_TRACE_WAIT, p->record->unit[e->unit].label, -1, 0, s->began_ms, b->now_ms);
        break;
    case CF_DO_SYNC:
        p->host_ms = b->now_ms;
        break;
    case CF_DO_STEP:
        p->step_ms[0] = p->step_ms[1], p->step_ms[1] = b->now_ms;
        if (s->next + 1 < p->record->entries) memset(&p->sum, 0, sizeof p->sum);
        break;
    }
    next_entry(p, s);
    return true;
}

// --- time ---

// The share of each link that a unit gets, an urgent one and one of bulk: the units of this player divide it.
static void link_shares(const playback *b, const player *p, double share[CF_LINKS][2]) {
    int count[CF_LINKS][2] = {{0}};
    for (int i = p->open; i < p->posted; i++)
        for (int l = 0; l < b->hardware->links && p->flight[i].started; l++)
            count[l][p->record->unit[i].bulk] += p->flight[i].remaining_ms[l] > 0;
    for (int l = 0; l < b->hardware->links; l++) {
        const int urgent = count[l][0], all = urgent + count[l][1];
        share[l][0] = 1.0 / (b->hardware->gpu ? all : urgent), share[l][1] = b->hardware->gpu || urgent == 0 ? 1.0 / all : 0;
    }
}

// The speed of computation on a CPU while units are in flight; a GPU's is 1.
static double compute_speed(const playback *b, const player *p) {
    double taken = 0;
    for (int i = p->open; i < p->posted; i++)
        if (p->flight[i].started && p->flight[i].sent_ms > b->now_ms) taken = fmax(taken, p->record->unit[i].taken);
    return b->hardware->gpu ? 1 : 1 - taken;
}

// The speed of a stream's kernel if the whole device works on it: the share of multiprocessors that others leave.
static double device_share(const playback *b, const player *p, const stream *s) {
    const cf_record_entry *e = entry_of(p, s);
    const bool whole = s->working && e->kind == CF_DO_KERNEL && e->blocks[0] == 0;
    return !whole ? 1 : must_wait(p, s) ? 0 : (double)unused(b, p) / b->hardware->multiprocessors;
}

// Time until something on a stream ends. ms >= 0: first lets this much time pass.
static double advance_stream(player *p, stream *s, double now_ms, double compute_speed, double share, double ms) {
    const cf_record_entry *e = entry_of(p, s);
    double next = INFINITY;
    if (!e) return next;
    if (s->working && s->remaining_ms > ROUNDING) { // work of the whole device, or the start-up time before blocks
        if (ms >= 0) s->remaining_ms -= ms * compute_speed * share;
        if (share > 0) next = s->remaining_ms / (compute_speed * share);
    }
    for (int i = 0; i < s->waves; i++) {
        if (ms >= 0) s->wave[i].remaining_ms -= ms * compute_speed;
        next = fmin(next, s->wave[i].remaining_ms / compute_speed);
        if (s->wave[i].remaining_ms <= ROUNDING) s->computing -= s->wave[i].count, s->wave[i--] = s->wave[--s->waves];
    }
    const double issue = p->host_ms + e->host_ms - now_ms;
    return !s->working && issue > ROUNDING ? fmin(next, issue) : next;
}

// Time until something of a player ends. ms >= 0: first lets this much time pass.
static double advance(playback *b, player *p, double ms) {
    double next = INFINITY;
    int working = 0;
    const double speed = compute_speed(b, p);
    double shares[CF_STREAMS];
    const cf_record_entry *waits = NULL;
    for (stream *s = p->stream; s < p->stream + CF_STREAMS; s++) {
        const cf_record_entry *e = entry_of(p, s);
        working += s->working, shares[s - p->stream] = device_share(b, p, s);
        if (s->waiting && e->unit >= 0) waits = e;
    }
    if (ms >= 0 && working > 1) p->sum.part_ms[CF_PART_SLOWED] -= ms; // two kernels count this time
    if (ms >= 0 && !working && waits) add_exposed(&p->sum, p->record->unit[waits->unit].label, ms);
    if (ms >= 0 && !working && !waits) p->sum.part_ms[CF_PART_HOST] += ms;
    for (stream *s = p->stream; s < p->stream + CF_STREAMS; s++)
        next = fmin(next, advance_stream(p, s, b->now_ms, speed, shares[s - p->stream], ms));
    double speeds[CF_LINKS][2];
    link_shares(b, p, speeds);
    for (int i = p->open; i < p->posted; i++) {
        flight *f = &p->flight[i];
        if (f->startable_ms < INFINITY && f->startable_ms > b->now_ms + ROUNDING) next = fmin(next, f->startable_ms - b->now_ms);
        if (!f->started) continue;
        if (f->sent_ms < INFINITY && f->sent_ms > b->now_ms) next = fmin(next, f->sent_ms - b->now_ms);
        for (int l = 0; l < b->hardware->links; l++) {
            double rate = speeds[l][p->record->unit[i].bulk];
            if (f->remaining_ms[l] <= 0) continue;
            if (ms >= 0) f->remaining_ms[l] -= ms * rate;
            if (ms >= 0 && f->remaining_ms[l] < ROUNDING) f->remaining_ms[l] = 0;
            if (rate > 0) next = fmin(next, f->remaining_ms[l] / rate);
        }
    }
    return next;
}

// --- the whole ---

static void start(playback *b, const cf_record *const *records) {
    b->player = cf_host_alloc(b->players, sizeof *b->player, "a playback");
    for (int i = 0; i < b->players; i++) {
        player *p = &b->player[i];
        p->record = records[i];
        for (int k = 0; k < CF_STREAMS; k++) p->stream[k].next = -1, next_entry(p, &p->stream[k]);
        p->flight = cf_host_alloc(p->record->units, sizeof *p->flight, "a playback");
        bool same = p->record->units == records[0]->units;
        for (int u = 0; same && u < p->record->units; u++) {
            same = p->record->unit[u].queue == records[0]->unit[u].queue;
            p->flight[u].sent_ms = p->flight[u].startable_ms = INFINITY;
        }
        if (!same) cf_die(NULL, "ranks 0 and %d post different units", i);
    }
}

static cf_played result_of(playback *b) {
    cf_played result = {0};
    double from = 0, to = 0;
    for (player *p = b->player; p < b->player + b->players; p++) {
        for (const stream *s = p->stream; s < p->stream + CF_STREAMS; s++) {
            const cf_record_entry *e = entry_of(p, s);
            if (!e || e->kind == CF_DO_AFTER) continue; // the other stream's wait is the cause
            const cf_record_unit *u = e->unit >= 0 ? &p->record->unit[e->unit] : NULL;
            cf_die(NULL, "deadlock: rank %d waits for ever for %s, layer %d", (int)(p - b->player), u ? u->label : e->name,
                   u ? u->layer : -1);
        }
        from = fmax(from, p->step_ms[0]), to = fmax(to, p->step_ms[1]);
        if (p == b->player || p->sum.part_ms[CF_PART_EXPOSED] > result.part_ms[CF_PART_EXPOSED]) result = p->sum;
    }
    result.step_ms = to - from;
    cf_trace_sort(&result.exposed);
    return result;
}

cf_played cf_playback(const cf_record *const *records, int players, cf_trace_list *events) {
    playback b = {.hardware = records[0]->hardware, .players = players, .events = events};
    start(&b, records);
    for (double next = 0; next < INFINITY;) {
        b.now_ms += next;
        for (bool moved = true; moved;) {
            moved = false;
            for (player *p = b.player; p < b.player + players; p++) {
                moved |= move_units(&b, p); // first: their streams are urgent
                for (stream *s = p->stream; s < p->stream + CF_STREAMS; s++)
                    while (run_entry(&b, p, s)) moved = true;
            }
        }
        next = INFINITY;
        for (player *p = b.player; p < b.player + players; p++) next = fmin(next, advance(&b, p, -1));
        for (player *p = b.player; next < INFINITY && p < b.player + players; p++) advance(&b, p, next);
    }
    cf_played result = result_of(&b);
    for (player *p = b.player; p < b.player + players; p++) free(p->flight);
    free(b.player);
    return result;
}
