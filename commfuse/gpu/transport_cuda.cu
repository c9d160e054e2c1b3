// Moves bytes between GPUs: chooses a wire for each group (README.md, "Transports"), and checks the requests under way.
//
// Wires are connected when a group is bound. Where native collectives are the baseline they have a communicator of their own.
// Elsewhere, because one takes seconds and memory, they share the wire of exchanges, in one order.
//
// Only bind, close and, now and then, post block. post lets the host run at most RUN_AHEAD requests or LAUNCHES_MAX launches ahead
// of the GPU, and over ipc not ahead of the hosts that it sends to. Queues of launches are finite, and a host that is stuck in a
// full one, inside the CUDA library, could not notice that a peer is gone. A request never depends on one that is posted after it,
// on this rank or another (all ranks post in one order), so a host that waits here will continue.
//
// While the host waits, for a stream or for requests to complete, look() asks the libraries for errors and counts for each request
// how long it has been under way meanwhile. The one that has waited longest is what this rank waits for, and is passed to the watch
// (watch.h). After timeout_s the rank asks its peers and dies with what it found, which ends all ranks through the bootstrap. (It
// does not ask a library to abort: that needs the ranks that are gone.) Two threads help: the bootstrap's notices broken
// connections, and that of deadlines (watch.h) guards calls at start and at the end that may never return.
#include "transport_cuda.h"
#include <unistd.h>

enum {
    RUN_AHEAD = 128,                     // two layers forward and back on eight ranks: 2 x 8 operations of 7 exchanges, and more
    LAUNCHES = 6,                        // of the fullest queue for an exchange, with the events around it: 5 by the emulator
    LAUNCHES_MAX = RUN_AHEAD * LAUNCHES, // a queue is known to hold a thousand
    // Of a pair, for NCCL's exchanges: 16 reach an NVLink's rate; each takes a multiprocessor from products beside it, and memory
    // in NCCL. Transfers between replicas have a whole pass to hide in. Units of all peers could do with four, but by a second
    // communicator, as NCCL has one number for all: by the imagined clock 0 to 1.3 % of a step.
    CHANNELS = 16,
    CHANNELS_HIDDEN = 4,
    BLOCKS_MAX = 64, // of an NCCL kernel; COLLECTIVE_BLOCKS of a group that is not urgent
    GROUPS_MAX = 16,
    PROOF = 1 << 17, // elements of a message at the first meeting over ipc: 1 MiB
    PROOF_TURNS = 50,
    PROOF_BLOCKS = 32,
    PROOF_THREADS = 128,
    HOPPER = 9, // compute capability
    BUS_LENGTH = 32,
    HOST_LENGTH = 64,
    GAP_MS = 1000 // between two looks: the host did something else, so the time is not waiting
};

typedef struct flight { // a copy of a request's facts: its own memory may hold another request by now
    char label[64];
    int layer, step;
    uint32_t config;
    int send_to, recv_from; // world ranks; -1: none
    cf_event begin, arrival, end;
    int64_t launches;
    double waiting_ms; // how long looks have found it begun and not ended
} flight;

enum { EXCHANGE, COLLECTIVE, WIRES }; // of a group

typedef struct cuda_state {
    cf_bootstrap *bootstrap;
    cf_watch *watch;
    bool ipc, nccl;                     // allowed by --transport
    cf_wire *wires[WIRES * GROUPS_MAX]; // cf_group.native is the address of its first; NULL: none
    int bound;                          // wires of groups bound so far
    flight flights[RUN_AHEAD];          // request i at i % RUN_AHEAD
    int64_t posted, oldest;             // requests so far; the first that is not known to be complete
    int64_t launches;                   // of the requests from `oldest` on
    flight *held;                       // a request that cannot be posted before a peer has come to it; NULL: none
    double look_ms;                     // time of the last look
} cuda_state;

// --- watch ---

static flight *flight_at(cuda_state *s, int64_t index) {
    return &s->flights[index % RUN_AHEAD];
}

static void forget_complete(cuda_state *s) {
    for (; s->oldest < s->posted && cf_event_passed(flight_at(s, s->oldest)->end); s->oldest++)
        s->launches -= flight_at(s, s->oldest)->launches;
}

// The request that has waited longest; NULL: none. Not always the oldest, because groups run beside one another.
static flight *longest_waiting(cuda_state *s, double waited_ms) {
    flight *longest = NULL;
    forget_complete(s);
    for (int64_t i = s->oldest; i < s->posted; i++) {
        flight *f = flight_at(s, i);
        if (!cf_event_passed(f->begin) || cf_event_passed(f->end)) continue;
        f->waiting_ms += waited_ms;
        if (!longest || f->waiting_ms > longest->waiting_ms) longest = f;
    }
    if (s->held) s->held->waiting_ms += waited_ms;
    return longest ? longest : s->held;
}

// The peer whose half of the exchange is missing, as a world rank; -1: several ranks may be late.
static int missing_peer(const flight *f) {
    bool received = f->recv_from < 0 || cf_event_passed(f->arrival);
    bool together = f->arrival.number == f->end.number; // neither half ends before the other
    if (!received && together && f->send_to >= 0 && f->send_to != f->recv_from) return -1;
    return received ? f->send_to : f->recv_from;
}

// Called repeatedly while the host waits.
static void look(void *argument) {
    cuda_state *s = (cuda_state *)argument;
    const char *news = NULL; // an error that a library reports about its peers
    for (int i = 0; i < s->bound && !news; i++)
        if (s->wires[i] && s->wires[i]->look) news = s->wires[i]->look(s->wires[i]);
    double now_ms = cf_now_ms(), waited_ms = now_ms - s->look_ms;
    s->look_ms = now_ms;
    const flight *f = longest_waiting(s, waited_ms < GAP_MS ? waited_ms : 0);
    if (!f) {
        cf_watch_goes_on(s->watch);
        if (news) cf_die("see the messages of the other ranks: one may have died; NCCL_DEBUG=WARN says more", "%s", news);
        return;
    }
    const cf_wait wait = {missing_peer(f), f->label, f->layer, f->step, f->config};
    char either[64];
    snprintf(either, sizeof either, "rank %d or %d", f->recv_from, f->send_to);
    cf_watch_waits(s->watch, wait, wait.peer < 0 && f->recv_from >= 0 ? either : NULL, f->waiting_ms, 1e3 * s->bootstrap->timeout_s,
                   news);
}

// Returns when one more request may be posted. A unit that exceeds LAUNCHES_MAX by itself is posted alone.
static void keep_pace(cuda_state *s, int64_t launches) {
    const double begin_ms = cf_now_ms();
    for (bool first = true;; first = false) {
        const int64_t ahead = s->posted - s->oldest;
        if (ahead < RUN_AHEAD && (ahead == 0 || s->launches + launches <= LAUNCHES_MAX)) return;
        if (!first) cf_cuda_rest(begin_ms);
        forget_complete(s); // not sooner: it asks the driver about each request
    }
}

// Returns when all peers have come to the same request. A look finds it as if it had been posted.
static void meet(cuda_state *s, cf_wire *wire, cf_request *r, int count) {
    flight f = {{0}, r->layer, r->step, r->config, -1, -1, {0, 0}, {0, 0}, {0, 0}, 0, 0};
    const double begin_ms = cf_now_ms();
    for (int peer; (peer = wire->meet(wire, r, count)) >= 0; cf_cuda_rest(begin_ms)) {
        if (!s->held) snprintf(f.label, sizeof f.label, "%s", r->label);
        f.send_to = r->group->world[peer];
        s->held = &f;
    }
    s->held = NULL;
}

// A unit is remembered as one request whose peers are all other ranks.
static void remember(cuda_state *s, const cf_request *r, int count, int64_t launches) {
    const cf_group *group = r->group;
    const bool exchange = r->kind == CF_REQUEST_EXCHANGE && count == 1;
    const int send_to = exchange && r->send_to >= 0 ? group->world[r->send_to] : -1;
    const int recv_from = exchange && r->recv_from >= 0 ? group->world[r->recv_from] : -1;
    cf_watch_goes_on(s->watch); // the label that the watch has may be overwritten here
    cf_watch_posted(s->watch, r->label, r->layer, r->step);
    flight *f = flight_at(s, s->posted++);
    *f = {{0}, r->layer, r->step, r->config, send_to, recv_from, r->begin, r[count - 1].arrival, r[count - 1].end, launches, 0};
    snprintf(f->label, sizeof f->label, "%s", r->label);
    s->launches += launches;
}

// --- words that hosts share ---

void cf_word_write(uint32_t *word, uint32_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

bool cf_word_is(uint32_t *word, uint32_t value) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE) == value;
}

// --- requests ---

static cf_wire *wire_for(const cf_request *r) {
    cf_wire **wires = (cf_wire **)r->group->native;
    const bool exchange = r->kind == CF_REQUEST_EXCHANGE || r->kind == CF_REQUEST_BARRIER;
    return wires[exchange || !wires[COLLECTIVE] ? EXCHANGE : COLLECTIVE];
}

// Products enqueued from here on leave multiprocessors for the kernels of transfers that no stream has waited for yet. Only those of
// Hopper and later, which are persistent: blocks of others end with their tile, and a transfer's get the next places.
static void leave_multiprocessors(const cf_transport *t) {
    const cuda_state *s = (const cuda_state *)t->state;
    int blocks = 0;
    for (int i = 0; i < s->bound; i++) {
        const cf_wire *wire = s->wires[i];
        if (!wire || wire->posted <= wire->waited) continue;
        if (t->leave_for_all || wire->group->urgent || wire->group->hosts > 1) blocks += wire->blocks;
    }
    const int most = cf_cuda_properties()->major >= HOPPER ? cf_cuda_properties()->multiProcessorCount / 2 : 0;
    cf_cuda_left = blocks < most ? blocks : most;
}

static void post(cf_transport *t, cf_request *r, int count, cf_stream *stream) {
    cuda_state *s = (cuda_state *)t->state;
    cf_wire *wire = wire_for(r);
    const bool unit = r->kind != CF_REQUEST_EXCHANGE && r->kind != CF_REQUEST_BARRIER; // of all peers
    const bool several = unit || count > 1; // over NCCL one call, with what an operation has around it: 11
    const int64_t launches = LAUNCHES * (!wire->meet ? 1 + several : unit ? r->group->size - 1 : count);
    keep_pace(s, launches);
    if (wire->meet) meet(s, wire, r, count);
    for (int i = 0; i < count; i++) t->bytes_sent += cf_request_bytes(&r[i]);
    wire->post(wire, r, count, stream);
    if (r->kind != CF_REQUEST_EXCHANGE && !t->leave_for_all && wire->nccl) wire->blocks = 0;
    wire->posted = r[count - 1].end.number;
    leave_multiprocessors(t);
    remember(s, r, count, launches);
}

// A wire's requests end in the order posted, so a wait for one is a wait for all before it.
static bool test(cf_transport *t, cf_request *r, cf_point point, cf_stream *stream) {
    (void)t, (void)point;
    const cf_wire *wire = wire_for(r);
    return wire->waiter == stream && r->end.number <= wire->waited;
}

static cf_event wait(cf_transport *t, cf_request *r, cf_point point, cf_stream *stream) {
    cf_wire *wire = wire_for(r);
    cf_event when = point == CF_ARRIVED ? r->arrival : r->end;
    cf_stream_after(stream, point == CF_ARRIVED ? r->here : r->end);
    if (wire->waiter != stream) wire->waited = 0;
    wire->waiter = stream;
    if (when.number == r->end.number && wire->waited < when.number) wire->waited = when.number;
    leave_multiprocessors(t);
    return when;
}

// --- bind ---

typedef struct card { // a rank's GPU
    char host[HOST_LENGTH], bus[BUS_LENGTH];
} card;

typedef struct neighbourhood { // of the members of a group
    cf_group *here;            // those that need no network between them
    int a, b;                  // two world ranks that share a GPU, and NCCL sees it; the same: there are none
} neighbourhood;

static neighbourhood meet_neighbours(const cf_transport *t, const cf_group *group) {
    const cuda_state *s = (const cuda_state *)t->state;
    card mine = {}, *all = (card *)cf_host_alloc(t->size, sizeof *all, "the GPUs of ranks");
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r"); // the same in all containers of one host
    if (!file || !fgets(mine.host, sizeof mine.host, file)) gethostname(mine.host, sizeof mine.host - 1);
    if (file) fclose(file);
    const cudaDeviceProp *p = cf_cuda_properties();
    snprintf(mine.bus, sizeof mine.bus, "%x:%x:%x", p->pciDomainID, p->pciBusID, p->pciDeviceID);
    s->bootstrap->allgather(s->bootstrap, &mine, all, sizeof mine);
    cf_cuda_sharers = 0; // each rank may see its own GPU alone (srun --gpus-per-task=1)
    for (int i = 0; i < t->size; i++) cf_cuda_sharers += memcmp(&all[i], &mine, sizeof mine) == 0;
    neighbourhood n = {(cf_group *)cf_host_alloc(1, sizeof *n.here, "a group"), 0, 0};
    for (int i = 0; i < group->size && !getenv("NCCL_HOSTID"); i++) // which hides it from NCCL
        for (int j = 0; j < i && n.a == n.b; j++)
            if (memcmp(&all[group->world[j]], &all[group->world[i]], sizeof *all) == 0)
                n.a = group->world[j], n.b = group->world[i];
    const int per_host = s->nccl && n.a == n.b ? t->ranks_per_host : 0; // containers, or a host that plays several
    n.here->name = group->name, n.here->urgent = group->urgent, n.here->hosts = 1;
    n.here->world = (int *)cf_host_alloc(group->size, sizeof *n.here->world, "a group");
    for (int i = 0; i < group->size; i++) {
        const int rank = group->world[i];
        if (strcmp(all[rank].host, mine.host) != 0 || (per_host && rank / per_host != t->rank / per_host)) continue;
        if (rank == t->rank) n.here->rank = n.here->size;
        n.here->world[n.here->size++] = rank;
    }
    free(all);
    return n;
}

static void choose(const cf_transport *t, cf_wire **wires, cf_group *group) {
    cuda_state *s = (cuda_state *)t->state;
    char why[192] = "";
    const neighbourhood n = meet_neighbours(t, group);
    const bool one_host = n.here->size == group->size, can = s->nccl && n.a == n.b;
    cf_wire *near = s->ipc ? cf_wire_ipc(s->bootstrap, n.here, why) : NULL;
    if (!s->nccl && !one_host) snprintf(why, sizeof why, "its ranks are on several hosts");
    if (!s->nccl && *why)
        cf_die_together("use transport auto or nccl", "transport ipc cannot serve the %s group: %s", group->name, why);
    if (s->nccl && !can && !(near && one_host))
        cf_die_together("give every rank a GPU of its own (CUDA_VISIBLE_DEVICES, fewer ranks), or for tests a "
                        "different NCCL_HOSTID",
                        "ranks %d and %d share a GPU, which NCCL refuses%s%s", n.a, n.b, *why ? "; and ipc: " : "", why);
    int blocks = (group->urgent ? CHANNELS : CHANNELS_HIDDEN) * group->size;
    const int most = group->urgent ? (int)BLOCKS_MAX : (int)COLLECTIVE_BLOCKS;
    if (blocks > most) blocks = most;
    cf_wire *nccl = cf_wire_nccl(s->bootstrap, group, can && !(near && one_host), blocks);
    wires[EXCHANGE] = near && nccl ? cf_wire_levels(group, n.here, near, nccl) : near ? near : nccl;
    if (!near || !nccl) { // levels keep it
        if (near) near->group = group;
        cf_group_free(n.here);
    }
    if (s->bootstrap->rank == 0)
        fprintf(stderr, "transport %s group by %s%s%s\n", group->name, wires[EXCHANGE]->name, *why ? "; not by ipc: " : "", why);
    wires[COLLECTIVE] = cf_wire_nccl(s->bootstrap, group, can && t->collectives, 0);
    group->collectives = wires[EXCHANGE]->nccl ? CF_CHOSEN : CF_TRIED; // costs are those of NCCL's
}

static void run_now(cf_transport *t, cf_request *r, cf_stream *stream) {
    post(t, r, 1, stream);
    wait(t, r, CF_COMPLETE, stream);
}

// Of a message, in every byte: tells ranks and turns apart.
static int64_t content(int rank, int turn) {
    return (1 + (rank + turn) % 127) * 0x0101010101010101;
}

static __global__ void count_others(int64_t *others, const int64_t *at, int64_t count, int64_t expected) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x)
        if (at[i] != expected) atomicAdd((unsigned long long *)others, 1ULL);
}

// Exchanges of each ordered pair, and an all-to-all if native collectives will be posted: so connections are made now
// rather than in the first step, and the data is checked, because some machines map memory between GPUs and then lose what is
// written there. Over ipc many long ones: no word may come before the bytes that it stands for.
static void meet_all(cf_transport *t, const cf_group *group) {
    cf_wire **wires = (cf_wire **)group->native;
    const int N = group->size, me = group->world[group->rank], turns = wires[EXCHANGE]->meet ? PROOF_TURNS : 1;
    const int64_t count = wires[EXCHANGE]->meet ? PROOF : 1, bytes = (count > N ? count : N) * (int64_t)sizeof(int64_t);
    cf_stream *stream = cf_stream_create();
    int64_t *out = (int64_t *)cf_alloc(bytes, "communication staging"), *in = (int64_t *)cf_alloc(bytes, "communication staging");
    int64_t *others = (int64_t *)cf_alloc(N * (int64_t)sizeof *others, "communication staging"); // of each rank
    int64_t *seen = (int64_t *)cf_host_alloc(N, sizeof *seen, "the first meeting");
    cf_request r = cf_request_of(CF_REQUEST_EXCHANGE, group, CF_INT64, "first meeting");
    r.send = out, r.recv = in, r.send_count = r.recv_count = r.stride = count;
    for (int i = 1; i < N; i++)
        for (int turn = 0; turn < turns; turn++) {
            r.send_to = (group->rank + i) % N, r.recv_from = (group->rank - i + N) % N;
            CF_CUDA(cudaMemsetAsync(out, (int)(content(me, turn) & 255), (size_t)bytes, cf_cuda_stream(stream)));
            run_now(t, &r, stream);
            cf_launch(count_others, {PROOF_BLOCKS}, PROOF_THREADS, stream, &others[r.recv_from], in, count,
                      content(group->world[r.recv_from], turn));
        }
    if (wires[COLLECTIVE]) {
        r.kind = CF_REQUEST_ALLTOALL, r.send_to = r.recv_from = -1, r.send_count = r.recv_count = r.stride = 1;
        CF_CUDA(cudaMemsetAsync(out, (int)(content(me, 0) & 255), (size_t)bytes, cf_cuda_stream(stream)));
        cf_zero(in, bytes, stream);
        run_now(t, &r, stream);
        for (int i = 0; i < N; i++) cf_launch(count_others, {1}, 1, stream, &others[i], &in[i], 1, content(group->world[i], 0));
    }
    cf_copy(seen, others, N * (int64_t)sizeof *seen, stream);
    cf_stream_sync(stream);
    for (int i = 0; i < N; i++)
        if (seen[i] > 0)
            cf_die("try transport nccl; between GPUs without NVLink look at the IOMMU and PCI ACS settings",
                   "data does not arrive from rank %d, or not before the word that announces it: %lld of %lld elements are wrong",
                   group->world[i], (long long)seen[i], (long long)(turns * count));
    free(seen);
    cf_free(others), cf_free(in), cf_free(out);
    cf_stream_free(stream);
}

static void bind_group(cf_transport *t, cf_group *group) {
    cuda_state *s = (cuda_state *)t->state;
    if (s->bound == WIRES * GROUPS_MAX) cf_die(NULL, "more than %d groups of ranks", GROUPS_MAX);
    cf_wire **wires = &s->wires[s->bound];
    group->native = wires, s->bound += WIRES;
    if (group->size == 1) return; // on all ranks: groups with one name have one size
    const int64_t bytes_sent = t->bytes_sent;
    choose(t, wires, group);
    cf_deadline_begin("the first meeting", s->bootstrap->timeout_s);
    meet_all(t, group);
    cf_deadline_end();
    t->bytes_sent = bytes_sent;
}

// --- start and end ---

// Those of H100s with NVLink and a network card each.
static cf_costs set_threads(cf_transport *t, int threads) {
    (void)t, (void)threads;
    cf_costs c;
    c.latency_s = 12e-6, c.message_s = 1e-6, c.piece_s = 20e-6, c.bytes_per_s = 300e9, c.flops_per_s = 400e12;
    c.network_latency_s = 20e-6, c.network_bytes_per_s = c.shared_bytes_per_s = 46e9;
    c.share_1mb = 0.5, c.share_100mb = 0.95;
    c.rounds = "direct", c.spare = true, c.serial = true;
    return c;
}

static void close_transport(cf_transport *t) {
    cuda_state *s = (cuda_state *)t->state;
    cf_stream *stream = cf_stream_create();
    for (int64_t i = s->oldest; i < s->posted; i++) cf_stream_after(stream, flight_at(s, i)->end);
    cf_stream_sync(stream);
    cf_stream_free(stream);
    cf_cuda_watch(NULL, NULL);
    cf_watch_goes_on(s->watch);
    cf_allreduce_min(t, 0); // all ranks are here
    cf_deadline_begin("groups end", s->bootstrap->timeout_s);
    for (int i = s->bound - 1; i >= 0; i--)
        if (s->wires[i]) s->wires[i]->close(s->wires[i]);
    cf_deadline_end();
    cf_watch_close(s->watch);
    s->bootstrap->close(s->bootstrap);
    free(s);
    free(t);
}

static void gather(cf_transport *t, const void *mine, void *all, int64_t bytes) {
    cf_bootstrap *bootstrap = ((cuda_state *)t->state)->bootstrap;
    bootstrap->allgather(bootstrap, mine, all, bytes);
}

cf_transport *cf_transport_create(const char *name, int *argc, char ***argv, double timeout_s) {
    // Unless the user has set them. Now, while there is one thread: libraries' threads read the environment, and setenv may move
    // it. Connections are hardware queues: streams must not share one, where a stream that waits would block the others.
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); // before the first call of CUDA
    setenv("NCCL_RUNTIME_CONNECT", "0", 0);         // 1: collectives connect in the step that is first to need them
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);   // 0: kernels of two groups that do not fit together may wait for each other
    cf_bootstrap *bootstrap = cf_bootstrap_create(argc, argv, timeout_s);
    bool choice = strcmp(name, "auto") == 0, ipc = strcmp(name, "ipc") == 0, nccl = strcmp(name, "nccl") == 0;
    if (!choice && !ipc && !nccl)
        cf_die_together("use transport auto, nccl or ipc", "transport %s moves nothing between GPUs; this program is for GPUs",
                        name);
    cf_device_open(bootstrap->local_rank);
    cf_transport *t = (cf_transport *)cf_host_alloc(1, sizeof *t, "the transport");
    cuda_state *s = (cuda_state *)cf_host_alloc(1, sizeof *s, "the transport");
    s->bootstrap = bootstrap;
    s->watch = cf_watch_open(bootstrap);
    s->ipc = ipc || choice;
    s->nccl = nccl || choice;
    t->name = ipc ? "ipc" : nccl ? "nccl" : "auto";
    t->rank = bootstrap->rank;
    t->size = bootstrap->size;
    t->local_rank = bootstrap->local_rank;
    t->local_size = bootstrap->local_size;
    t->local_cores = bootstrap->local_cores;
    t->ranks_per_host = bootstrap->ranks_per_host;
    t->in_order = true;
    t->collectives = true;
    t->state = s;
    t->timeout_s = &bootstrap->timeout_s;
    t->set_threads = set_threads;
    t->gather = gather;
    t->bind = bind_group;
    t->post = post;
    t->test = test;
    t->wait = wait;
    t->close = close_transport;
    cf_cuda_watch(look, s);
    return t;
}
