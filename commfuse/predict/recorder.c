// The third twin of device.h and transport.h: instead of computing and sending it records what the program would do (record.h).
// So the program predicts itself: layers, schedules and executor are those that train.
//
// Memory is reserved and never touched. When the host reads device memory it gets random token numbers of the vocabulary; read as
// the doubles of reports these are tiny. Small ones come more often, and of sixteen neighbours some: so many tokens name as many
// words as in text, by the count in lookup.c. A program has one device, so there is one record.
#include "record.h"
#include "../transport.h"

enum { PAGE = 4096 };
static const double MS = 1e3;
// As in transport_cuda.cu: the share of multiprocessors that a unit takes at most, and how much less an exchange of replicas takes.
static const double TAKEN_MAX = 0.5, REPLICAS_LESS = 4;

static cf_record record;
static double no_timeout; // nothing waits

struct cf_stream {
    int number; // 1: the second compute stream
};

// --- the record ---

int cf_record_multiprocessors(void) {
    const cf_hardware *h = record.hardware;
    double taken = 0;
    for (int queue = 0; queue < CF_QUEUES && h->gpu; queue++)
        if (record.posted[queue] > record.done[queue]) taken += record.unit[record.posted[queue] - 1].taken;
    return h->multiprocessors - (int)lround(fmin(TAKEN_MAX, taken) * h->multiprocessors);
}

static cf_record_entry *add(const cf_stream *stream, cf_record_kind kind) {
    cf_record_entry *e = cf_record_add(&record, kind);
    e->stream = stream->number;
    return e;
}

void cf_record_kernel(cf_stream *stream, cf_work_kind work, const char *name, double parts, double part_s, double bytes) {
    const cf_hardware *h = record.hardware;
    const double most = work == CF_WORK_PRODUCT ? cf_record_multiprocessors() : h->multiprocessors;
    const double compute_s = parts > 0 ? ceil(parts / most) * part_s : part_s, bytes_s = bytes / h->memory_bytes_per_s;
    cf_record_entry *e = add(stream, CF_DO_KERNEL);
    e->name = name, e->work = compute_s > 0 && compute_s >= bytes_s ? work : CF_WORK_MEMORY;
    e->ms = MS * (fmax(compute_s, bytes_s) + h->kernel_s);
    if (parts == 0 || compute_s == 0) return;
    const double part_ms = MS * part_s * fmax(1, bytes_s / compute_s);
    const double blocks = work == CF_WORK_PRODUCT && h->persistent ? fmin(parts, most) : parts, each = floor(parts / blocks);
    e->blocks[1] = (int64_t)(parts - each * blocks), e->blocks[0] = (int64_t)blocks - e->blocks[1];
    e->block_ms[0] = each * part_ms, e->block_ms[1] = (each + 1) * part_ms;
}

const cf_hardware *cf_record_hardware(void) {
    return record.hardware;
}

// --- device: the body of each function of device.h; the Makefile adds the declarations ---

static cf_stream *make_stream(int number) {
    cf_stream *stream = cf_host_alloc(1, sizeof *stream, "a stream");
    stream->number = number;
    return stream;
}

static void move_bytes(cf_stream *stream, const char *name, double bytes) {
    cf_record_kernel(stream, CF_WORK_MEMORY, name, 0, 0, bytes);
}

// Its number encodes the next entry and the stream.
static cf_event event(const cf_stream *stream, bool timed) {
    cf_record_entry *e = timed && record.hardware && record.hardware->event_s > 0 ? add(stream, CF_DO_MOMENT) : NULL;
    if (e) e->work = CF_WORK_MEMORY, e->ms = MS * record.hardware->event_s;
    return (cf_event){0, record.entries * CF_STREAMS + stream->number};
}

static void after(const cf_stream *stream, cf_event event) {
    if (event.number % CF_STREAMS != stream->number) add(stream, CF_DO_AFTER)->after = event.number / CF_STREAMS;
}

static void copy(cf_stream *stream, void *to, int64_t bytes) {
    if (bytes <= 0) return;
    move_bytes(stream, "copy", 2 * (double)bytes);
    if (cf_memory_is_reserved(to)) return;
    uint64_t word = 1; // all ranks read the same tokens
    int32_t token = 0;
    for (int64_t i = 0; i + (int64_t)sizeof token <= bytes; i += (int64_t)sizeof token) {
        word = word * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        const uint32_t drawn = (uint32_t)(word >> 33), lowest = (drawn | 16) & -(drawn | 16); // 1, 2, 4, 8, 16: each half as often
        token = (int32_t)(ldexp(drawn, -31) * ldexp(drawn, -31) * (double)record.words);
        token -= token % (int32_t)(16 / lowest);
        memcpy((char *)to + i, &token, sizeof token);
    }
    if (bytes >= PAGE) record.host_ms += MS * record.hardware->word_s * (double)bytes / sizeof token;
}

static void *no_memory(void) {
    cf_die("a bug: cf_device_reserve_only() comes first", "a program that records allocates memory");
}

#define NOTHING                          (void)0
#define RECORDED_cf_device_open          NOTHING
#define RECORDED_cf_device_memory        record.hardware ? (int64_t)record.hardware->memory_bytes : INT64_MAX
#define RECORDED_cf_device_name          record.hardware ? record.hardware->name : "recorder"
#define RECORDED_cf_device_threads       NOTHING
#define RECORDED_cf_stream_create        make_stream(0)
#define RECORDED_cf_stream_create_second record.hardware->gpu ? make_stream(1) : NULL
#define RECORDED_cf_stream_free          free(stream)
#define RECORDED_cf_stream_sync          (void)(cf_record_add(&record, CF_DO_SYNC), record.host_ms = 0)
#define RECORDED_cf_event_record         event(stream, true)
#define RECORDED_cf_event_record_untimed event(stream, false)
#define RECORDED_cf_event_ms             event.ms
#define RECORDED_cf_event_passed         true
#define RECORDED_cf_event_wait           NOTHING
#define RECORDED_cf_event_remembered     true
#define RECORDED_cf_stream_after         after(stream, event)
#define RECORDED_cf_range_begin          NOTHING
#define RECORDED_cf_range_end            NOTHING
#define RECORDED_cf_copy                 copy(stream, to, bytes)
#define RECORDED_cf_zero                 bytes > 0 ? move_bytes(stream, "zero", (double)bytes) : NOTHING
#define RECORDED_cf_add                  move_bytes(stream, "add", (parts + 2) * (double)(count * cf_dtype_size(dtype)))
#define RECORDED_cf_device_malloc        no_memory()
#define RECORDED_cf_device_free          NOTHING
#include <device_functions.h> // made by the Makefile

// --- transport ---

// The member `offset` places after world rank `rank` in its group, whose members are neighbours or `stride` apart.
static int shifted(const cf_group *g, int rank, int offset) {
    int stride = g->size > 1 ? g->world[1] - g->world[0] : 1, span = g->size * stride;
    int first = stride == 1 ? rank / g->size * g->size : rank % stride;
    return first + (rank - first + offset * stride + span) % span;
}

// Adds `bytes` from each rank to the member `offset` places after it: to mine[] for this rank, to block[] for all ranks of its
// block of the level below, which share a link. reach: the highest level on which this exchange sends or receives; places may be a
// circle within each of its blocks.
static void add_bytes(const cf_group *g, int offset, int reach, double bytes, double mine[CF_LINKS], double block[CF_LINKS]) {
    const cf_hardware *h = record.hardware;
    int me = g->world[g->rank];
    mine[cf_record_link(h, me, shifted(g, me, offset))] += bytes;
    for (int level = 0; level <= reach; level++) {
        int size = level > 0 ? h->link[level - 1].ranks : 1, first = me / size * size;
        for (int q = first; h->link[level].block_bytes_per_s > 0 && q < first + size && q < record.world; q++)
            if (cf_record_link(h, q, shifted(g, q, offset)) == level) block[level] += bytes;
    }
}

static uint64_t player(const cf_group *g, int member) {
    return UINT64_C(1) << g->world[member] % record.players;
}

// Adds the bytes and steps of a ring over the members. Each forwards the data of all others; in a block of ranks only the last
// forwards them to the next block.
static void add_ring(cf_record_unit *u, const cf_group *g, double bytes, double mine[CF_LINKS], double block[CF_LINKS]) {
    const cf_hardware *h = record.hardware;
    int reach = cf_record_link(h, g->world[0], g->world[g->size - 1]), together = 1;
    for (int level = 0; level <= reach; level++) {
        int here = 0; // members of one block of this level
        for (int i = 0; i < g->size; i++)
            here += level == reach || g->world[i] / h->link[level].ranks == g->world[0] / h->link[level].ranks;
        if (here == together) continue;
        int size = level > 0 ? h->link[level - 1].ranks : 1;
        const double doublings = level > 0 ? log2(fmax(1, (double)here / together / 4)) : 0; // of the blocks, beyond four
        const double share = cf_curve_at(&h->link[level].native, bytes) * fmax(0.1, 1 - h->link[level].far_loss * doublings);
        const double moved = bytes / together / share;
        mine[level] += moved;
        block[level] += moved * (size < record.world ? size : record.world);
        const bool tree = together == 1 && level > 0; // NCCL's PAT (arXiv 2506.20252), for one member a host
        const double steps = tree ? ceil(log2(g->size)) : (g->size - 1) * (1.0 / together - 1.0 / here);
        u->latency_ms += MS * h->link[level].step_s * steps;
        u->taken = fmax(u->taken, h->link[level].taken);
        together = here;
    }
}

// An exchange or a native collective. On GPUs a collective is a ring, but for the all-to-all; on CPUs a message to each member, as
// Open MPI does it, but for a blocking all-gather.
static void add_request(cf_record_unit *u, const cf_request *r, double mine[CF_LINKS], double block[CF_LINKS]) {
    const cf_hardware *h = record.hardware;
    const cf_group *g = r->group;
    double bytes = (double)(r->send_count * cf_dtype_size(r->dtype));
    if (r->kind == CF_REQUEST_EXCHANGE) {
        if (r->send_to >= 0) u->sends_to |= player(g, r->send_to);
        if (r->recv_from >= 0) u->receives_from |= player(g, r->recv_from);
        if (r->send_to < 0) return;
        const int level = cf_record_link(h, g->world[g->rank], g->world[r->send_to]);
        const int back = r->recv_from < 0 ? 0 : cf_record_link(h, g->world[g->rank], g->world[r->recv_from]);
        const cf_link *l = &h->link[level];
        add_bytes(g, r->send_to - g->rank, level > back ? level : back, bytes, mine, block);
        u->latency_ms = fmax(u->latency_ms, MS * l->latency_s);
        if (!h->gpu)
            u->taken = fmax(u->taken, l->taken);
        else if (!l->copied)
            u->taken = fmin(u->queue == 0 ? TAKEN_MAX : l->taken, u->taken + l->taken / (u->queue == 0 ? 1 : REPLICAS_LESS));
        return;
    }
    double latency_s = 0; // of messages on CPUs: a GPU's library starts them together
    for (int peer = 0; peer < g->size; peer++) u->sends_to |= player(g, peer);
    u->receives_from = u->sends_to;
    const bool ring = h->gpu ? r->kind != CF_REQUEST_ALLTOALL : r->kind == CF_REQUEST_ALLGATHER && r->blocking;
    if (ring) add_ring(u, g, (g->size - 1) * bytes, mine, block);
    for (int peer = 0; peer < g->size; peer++) {
        if (ring || peer == g->rank) continue;
        const cf_link *l = &h->link[cf_record_link(h, g->world[g->rank], g->world[peer])];
        add_bytes(g, peer - g->rank, h->links - 1, bytes / cf_curve_at(&l->native, (g->size - 1) * bytes), mine, block);
        u->taken = fmax(u->taken, l->taken);
        if (!h->gpu) latency_s = fmax(latency_s, l->latency_s);
    }
    u->latency_ms += MS * (h->native_s + latency_s);
}

// Each group has two queues. The second is for native collectives, which have their own communicator, on GPUs, for bulk on CPUs.
static int lane_of(const cf_transport *t, const cf_request *r) {
    static const char *const names[] = {"tp", "dp", "world"};
    int queue = 0;
    while (queue < 3 && strcmp(names[queue], r->group->name) != 0) queue++;
    return 2 * queue + (record.hardware->gpu ? t->collectives && r->kind != CF_REQUEST_EXCHANGE : r->bulk);
}

static void post(cf_transport *t, cf_request *request, int count, cf_stream *stream) {
    const cf_hardware *h = record.hardware;
    double mine[CF_LINKS] = {0}, block[CF_LINKS] = {0};
    int messages = 0;
    cf_record_unit *u = cf_record_add_unit(&record, request->label, lane_of(t, request));
    u->layer = request->layer, u->bulk = request->bulk;
    for (int i = 0; i < 2; i++) // joined exchanges wait for the same ones
        if (request->after[i]) u->after[i] = (int)request->after[i]->end.number - 1;
    for (cf_request *r = request; r < request + count; r++) {
        r->end.number = record.units, r->state = 0;
        u->bytes += cf_request_bytes(r);
        messages += r->kind == CF_REQUEST_EXCHANGE && r->send_to >= 0;
        add_request(u, r, mine, block);
    }
    for (int l = 0; l < h->links; l++) {
        double rate = h->link[l].bytes_per_s, all = h->link[l].block_bytes_per_s;
        if (mine[l] > 0) u->wire_ms[l] = MS * fmax(mine[l] / rate, all > 0 ? block[l] / all : 0);
    }
    if (messages > 1) u->latency_ms += MS * h->message_s * (messages - 1);
    const bool exchange = messages > 0 && (u->queue == 0 || request->group->hosts > 1);
    // As in transport_cuda.cu: baselines get none, and products whose blocks end with their tile leave none.
    if (u->taken > 0 && h->persistent && (exchange || (t->leave_for_all && (messages > 0 || !t->collectives))))
        record.posted[u->queue] = record.units;
    add(stream, CF_DO_POST)->unit = (int)record.units - 1;
}

// On a GPU a group's requests end in the order posted, so a stream that has waited for one need not wait for those before it.
static bool test(cf_transport *t, cf_request *r, cf_point point, cf_stream *stream) {
    return r->state > (int)point ||
           (record.hardware->gpu && r->end.number <= record.done[lane_of(t, r)] && record.waiter[lane_of(t, r)] == stream->number);
}

static cf_event wait(cf_transport *t, cf_request *r, cf_point point, cf_stream *stream) {
    int unit = (int)r->end.number - 1;
    cf_record_kind kind = point == CF_ARRIVED ? CF_DO_WAIT_ARRIVED : CF_DO_WAIT_COMPLETE;
    const cf_record_entry *last = record.entries ? &record.entry[record.entries - 1] : NULL;
    if (!last || last->unit != unit || last->kind != kind) add(stream, kind)->unit = unit; // once for all messages of a unit
    const int queue = record.unit[unit].queue;
    if (record.waiter[queue] != stream->number) record.done[queue] = 0, record.waiter[queue] = stream->number;
    if (point == CF_COMPLETE || record.unit[unit].taken > 0) record.done[queue] = r->end.number;
    r->state = (int)point + 1;
    return (cf_event){0, 0};
}

static cf_costs set_threads(cf_transport *t, int threads) {
    const cf_hardware *h = record.hardware;
    const cf_link *network = &h->link[cf_record_link(h, 0, record.world - 1)];
    const int host = network > h->link ? network[-1].ranks : 1;
    const double all = network->block_bytes_per_s > 0 ? network->block_bytes_per_s : INFINITY;
    return (cf_costs){.latency_s = h->link[0].latency_s,
                      .message_s = h->message_s,
                      .piece_s = h->kernel_s + 2 * h->call_s,
                      .bytes_per_s = h->link[0].bytes_per_s,
                      .flops_per_s = h->product.y[h->product.points - 1],
                      .rounds = h->gpu ? "direct" : "ring",
                      .spare = true,
                      .serial = h->gpu,
                      .network_latency_s = network->latency_s,
                      .network_bytes_per_s = fmin(network->bytes_per_s, all),
                      .shared_bytes_per_s = fmin(network->bytes_per_s, all / host),
                      .share_1mb = cf_curve_at(&network->native, 1e6),
                      .share_100mb = cf_curve_at(&network->native, 1e8)};
}

static void gather(cf_transport *t, const void *mine, void *all, int64_t bytes) {
    for (int i = 0; i < t->size; i++) memcpy((char *)all + i * bytes, mine, (size_t)bytes);
}

static void bind_group(cf_transport *t, cf_group *group) {
    t->in_order = record.hardware->gpu;
    const cf_hardware *h = record.hardware;
    group->collectives = h->link[cf_record_link(h, group->world[0], group->world[group->size - 1])].copied ? CF_NEVER : CF_CHOSEN;
}

static void close_transport(cf_transport *t) {
    free(t);
}

cf_transport *cf_transport_create(const char *name, int *argc, char ***argv, double timeout_s) {
    cf_transport *t = cf_host_alloc(1, sizeof *t, "a transport");
    *t = (cf_transport){.name = "recorder",
                        .size = 1,
                        .local_size = 1,
                        .local_cores = 1,
                        .collectives = true,
                        .state = &record,
                        .timeout_s = &no_timeout,
                        .set_threads = set_threads,
                        .gather = gather,
                        .bind = bind_group,
                        .post = post,
                        .test = test,
                        .wait = wait,
                        .close = close_transport};
    cf_die_setup(0, 1, NULL);
    return t;
}
