// Moves bytes over MPI, by one progress thread.
//
// An MPI library makes progress only while a thread is inside it. Polling from the compute thread between two matrix products
// leaves a good part of the communication exposed, so after the start a separate thread makes ALL MPI calls: it takes posted
// requests from a queue, posts their receives, sends when the requests in `after` have arrived, tests the messages in flight, and
// marks requests as arrived and done. The compute thread only posts, reads flags and waits. (So MPI_THREAD_SERIALIZED is enough.)
//
// Which thread may use a core:
//   nothing in flight            The progress thread sleeps on a condition variable.
//   this host has spare cores    It polls while messages move quickly and otherwise naps between polls: for a quarter of the time
//                                between two movements, or since the last one, half a millisecond at most. (The host may be busier
//                                than it seems, and the scheduler serves a thread that never sleeps last. Each wake-up and each
//                                poll are system calls beside a compute thread, on the same core where a virtual machine's
//                                processors are hardware threads.) A post or a wait ends a nap. The thread polls a moment longer
//                                before it sleeps, because a woken thread may land on the compute thread's core. A waiting compute
//                                thread also polls its flag for a while.
//   more threads than cores      Both sleep between polls, so that compute threads get the cores.
//   more ranks than cores        In addition, blocking collectives are replaced by non-blocking ones: a blocking one spins on a
//                                core that the peer needs (324 ms a step instead of 2.9).
// Launchers bind a rank to a single core if there are few ranks (Open MPI: up to two), which would put compute threads and
// progress thread on the same core. Such a binding is widened at start.
#define _GNU_SOURCE
#include "../base/limits.h"
#include "inflight_mpi.h"
#include "../launch/watch.h"
#include <math.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    GROUPS_MAX = 16,
    POLLS_BEFORE_REST = 8,
    REST_NS = 20000, // more threads than cores: sleep between polls
    NAP_NS = 10000,  // spare cores: the shortest nap, and every nap while the compute thread waits
    NAP_NS_MAX = 500000,
    NAP_SHARE = 4,     // a nap is this part of the time between two movements, or since the last
    PACE_SHARE = 4,    // the newest time between two movements is this part of their running mean
    SLICE_NS = 100000, // the shortest time slice that Linux grants
    LINGER_MS = 5,     // spare cores: the idle progress thread polls this long before it sleeps
    SPIN_MS = 2,       // spare cores: a waiting compute thread polls this long before it sleeps
    CHECK_MS = 100,    // how often a sleeping waiter checks its deadline
    GAP_MS = 1000,     // no check for so long: this process itself was stopped, and no rank is late
    HWTHREADS_OF_ONE_CORE = 2
};

typedef struct mpi_state {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t posted, done; // wake the progress thread; wake waiting compute threads
    _Atomic(cf_request *) first; // the queue of the progress thread; also read without the lock
    cf_request *last;            // of them
    atomic_bool quit;
    atomic_int waiters;
    atomic_bool crowded; // ranks · (threads + 1) > cores, on this host
    bool never_block;    // ranks > cores, on any host: all ranks must call the same function
    cf_bootstrap *ranks;
    cf_watch *watch;
    MPI_Comm comm[GROUPS_MAX]; // of the bound groups
    int comms;
    cf_group all; // for gather()
    // Used by the progress thread alone:
    cf_inflight flights;
    double moved_ms, pace_ms; // time of the last movement; running mean between two
} mpi_state;

// pthread_cond_wait for less than a second; may wake spuriously.
static void wait_at_most(pthread_cond_t *condition, pthread_mutex_t *lock, long ns) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += ns;
    until.tv_sec += until.tv_nsec / 1000000000L;
    until.tv_nsec %= 1000000000L;
    pthread_cond_timedwait(condition, lock, &until);
}

// Call it after what the sleepers wait for has happened.
static void wake(mpi_state *s, pthread_cond_t *sleepers) {
    pthread_mutex_lock(&s->lock);
    pthread_cond_broadcast(sleepers);
    pthread_mutex_unlock(&s->lock);
}

// --- the progress thread ---

// Returns the requests posted since the last call, in order. Sleeps while there are none and nothing is in flight; returns NULL
// then only when the transport is closed.
static cf_request *collect_posted(mpi_state *s) {
    const bool busy = s->flights.actives > 0;
    if (busy && !atomic_load(&s->first)) return NULL;
    const double begin_ms = cf_now_ms();
    while (!busy && !atomic_load(&s->first) && !atomic_load(&s->crowded) && cf_now_ms() - begin_ms < LINGER_MS) sched_yield();
    pthread_mutex_lock(&s->lock);
    while (!s->first && !busy && !s->quit) pthread_cond_wait(&s->posted, &s->lock);
    cf_request *first = atomic_exchange(&s->first, NULL);
    pthread_mutex_unlock(&s->lock);
    if (!busy) s->moved_ms = cf_now_ms(); // nothing could move before
    return first;
}

// 0: do not nap, something will move sooner.
static long nap_ns(const mpi_state *s) {
    if (s->flights.collective) return NAP_NS; // it shows movement only at its end
    double still_ms = cf_now_ms() - s->moved_ms;
    double ns = (still_ms > s->pace_ms ? still_ms : s->pace_ms) * 1e6 / NAP_SHARE;
    if (ns < NAP_NS) return 0;
    if (atomic_load(&s->waiters) > 0) return NAP_NS;
    return ns < NAP_NS_MAX ? (long)ns : NAP_NS_MAX;
}

static void rest(mpi_state *s, int idle) {
    if (!atomic_load(&s->crowded)) {
        pthread_mutex_lock(&s->lock); // a wait that begins from here on ends the nap
        const long ns = s->first ? 0 : nap_ns(s);
        if (ns > 0) wait_at_most(&s->posted, &s->lock, ns);
        pthread_mutex_unlock(&s->lock);
    } else if (idle != 0)
        sched_yield();
    else
        nanosleep(&(struct timespec){0, REST_NS}, NULL);
}

// Naps must last microseconds, and end although compute threads hold the cores: Linux 6.12 and later lets a waking thread with a
// short time slice run first. Older kernels ignore the slice; a thread with a real-time policy is left as it is.
static void wake_promptly(void) {
    struct { // struct sched_attr, which C libraries before 2.41 lack
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t slice_ns, deadline_ns, period_ns;
    } attributes = {.size = sizeof attributes};
    prctl(PR_SET_TIMERSLACK, 1UL);
    if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0) return;
    if (attributes.policy != SCHED_OTHER && attributes.policy != SCHED_BATCH) return;
    attributes.slice_ns = SLICE_NS;
    syscall(SYS_sched_setattr, 0, &attributes, 0);
}

static void *progress(void *argument) {
    mpi_state *s = (mpi_state *)argument;
    wake_promptly();
    cf_device_threads(1); // for the sums of reduce-scatters
    int idle = 0;         // polls without movement, modulo POLLS_BEFORE_REST
    for (;;) {
        cf_request *posted = collect_posted(s);
        bool moved = posted != NULL, news = false;
        for (cf_request *r = posted; r; r = r->next) cf_inflight_add(&s->flights, r);
        if (s->flights.actives == 0) return NULL;
        moved |= cf_inflight_move(&s->flights, &news);
        if (news && atomic_load(&s->waiters) > 0) wake(s, &s->done);
        idle = moved ? 0 : (idle + 1) % POLLS_BEFORE_REST;
        if (moved) {
            double now_ms = cf_now_ms();
            s->pace_ms += (now_ms - s->moved_ms - s->pace_ms) / PACE_SHARE;
            s->moved_ms = now_ms;
        } else
            rest(s, idle);
    }
}

// --- called by compute threads ---

static void enqueue(mpi_state *s, cf_request *r, int count) {
    for (int i = 0; i < count; i++) {
        r[i].next = i + 1 < count ? &r[i + 1] : NULL;
        r[i].received = 0;
        r[i].blocking &= !s->never_block;
        __atomic_store_n(&r[i].state, CF_POSTED, __ATOMIC_RELEASE);
    }
    pthread_mutex_lock(&s->lock);
    if (s->first)
        s->last->next = r;
    else
        atomic_store(&s->first, r);
    s->last = &r[count - 1];
    pthread_cond_signal(&s->posted);
    pthread_mutex_unlock(&s->lock);
}

static void post(cf_transport *t, cf_request *r, int count, cf_stream *stream) {
    mpi_state *s = (mpi_state *)t->state;
    cf_stream_sync(stream); // the data to send is complete
    cf_watch_posted(s->watch, r->label, r->layer, r->step);
    for (int i = 0; i < count; i++) t->bytes_sent += cf_request_bytes(&r[i]);
    enqueue(s, r, count);
}

static bool test(cf_transport *t, cf_request *r, cf_point point, cf_stream *stream) {
    return cf_reached(r, point);
}

// For the watch. The peer is that of the request at the end of the chain of `after` that is late; of an exchange, the peer whose
// half is missing.
static cf_wait wait_for(const cf_request *r) {
    const cf_request *late = r;
    for (int i = 0; i < 2; i++)
        if (!cf_reached(late->after[i], CF_ARRIVED)) late = late->after[i], i = -1;
    const bool received = late->recv_from < 0 || cf_reached(late, CF_ARRIVED);
    const int peer = received ? late->send_to : late->recv_from;
    return (cf_wait){peer < 0 ? -1 : late->group->world[peer], r->label, r->layer, r->step, r->config};
}

static void wait_asleep(mpi_state *s, const cf_request *r, cf_point point, double begin_ms) {
    double checked_ms = begin_ms;
    while (!cf_reached(r, point)) {
        cf_watch_waits(s->watch, wait_for(r), NULL, checked_ms - begin_ms, 1e3 * s->ranks->timeout_s, NULL);
        pthread_mutex_lock(&s->lock);
        if (!cf_reached(r, point)) wait_at_most(&s->done, &s->lock, CHECK_MS * 1000000L);
        pthread_mutex_unlock(&s->lock);
        const double gap_ms = cf_now_ms() - checked_ms;
        if (gap_ms > GAP_MS) begin_ms += gap_ms;
        checked_ms += gap_ms;
    }
    cf_watch_goes_on(s->watch);
}

static cf_event wait(cf_transport *t, cf_request *r, cf_point point, cf_stream *stream) {
    mpi_state *s = (mpi_state *)t->state;
    if (cf_reached(r, point)) return cf_event_record(stream);
    double begin_ms = cf_now_ms();
    atomic_fetch_add(&s->waiters, 1); // from here on naps are short
    wake(s, &s->posted);
    while (!atomic_load(&s->crowded) && !cf_reached(r, point) && cf_now_ms() - begin_ms < SPIN_MS) sched_yield();
    if (!cf_reached(r, point)) wait_asleep(s, r, point, begin_ms);
    atomic_fetch_sub(&s->waiters, 1);
    return cf_event_record(stream);
}

// --- start and end ---

// The progress thread is still idle, so this thread may call MPI.
static void bind_group(cf_transport *t, cf_group *group) {
    mpi_state *s = (mpi_state *)t->state;
    MPI_Group all, members;
    if (s->comms == GROUPS_MAX) cf_die(NULL, "more than %d groups of ranks", GROUPS_MAX);
    MPI_Comm *comm = &s->comm[s->comms++], *world = s->ranks->comm;
    cf_deadline_begin("MPI makes a group", s->ranks->timeout_s);
    cf_mpi_check(MPI_Comm_group(*world, &all), "MPI_Comm_group", NULL);
    cf_mpi_check(MPI_Group_incl(all, group->size, group->world, &members), "MPI_Group_incl", NULL);
    cf_mpi_check(MPI_Comm_create_group(*world, members, group->world[0], comm), "MPI_Comm_create_group", NULL);
    cf_mpi_check(MPI_Comm_set_errhandler(*comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler", NULL);
    MPI_Group_free(&all);
    MPI_Group_free(&members);
    cf_deadline_end();
    group->native = comm, group->collectives = CF_CHOSEN;
}

// MPI promises 32,768.
static int64_t count_tags(void) {
    int *highest = NULL, given = 0;
    cf_mpi_check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &highest, &given), "MPI_Comm_get_attr", NULL);
    return (given ? *highest : 32767) + INT64_C(1);
}

// From one core to all those of the launcher (which `taskset … mpirun` still limits). Only Open MPI's launcher binds without being
// asked; other bindings stay.
static void widen_binding(void) {
    cpu_set_t mine, launcher;
    if (cf_host.keeps_cores || !getenv("OMPI_COMM_WORLD_LOCAL_SIZE")) return;
    if (sched_getaffinity(0, sizeof mine, &mine) != 0 || CPU_COUNT(&mine) > HWTHREADS_OF_ONE_CORE) return;
    if (sched_getaffinity(getppid(), sizeof launcher, &launcher) != 0) return;
    if (CPU_COUNT(&launcher) > CPU_COUNT(&mine)) sched_setaffinity(0, sizeof launcher, &launcher);
}

// A request like others, because other requests may be in flight. Not on the stack: a late rank may end it when the wait has failed.
static void gather(cf_transport *t, const void *mine, void *all, int64_t bytes) {
    mpi_state *s = (mpi_state *)t->state;
    cf_request *r = cf_host_alloc(1, sizeof *r, "a report of all ranks");
    *r = cf_request_of(CF_REQUEST_ALLGATHER, &s->all, CF_BYTE, "all-gather of reports");
    r->send = memmove((char *)all + t->rank * bytes, mine, (size_t)bytes), r->recv = all, r->send_count = r->stride = bytes;
    enqueue(s, r, 1);
    wait(t, r, CF_COMPLETE, NULL);
    free(r);
}

static void close_transport(cf_transport *t) {
    mpi_state *s = (mpi_state *)t->state;
    s->quit = true;
    wake(s, &s->posted);
    pthread_join(s->thread, NULL);
    cf_watch_close(s->watch);
    cf_deadline_begin("MPI ends", s->ranks->timeout_s);
    cf_inflight_close(&s->flights);
    for (int i = 0; i < s->comms; i++) MPI_Comm_free(&s->comm[i]);
    cf_deadline_end();
    s->ranks->close(s->ranks);
    free(s);
    free(t);
}

// If `turns` threads share a core, everything takes that many times longer. A rank with a core for each of its threads notices a
// message within some ten microseconds.
static cf_costs set_threads(cf_transport *t, int threads) {
    const double turns = threads > 0 ? fmax(1, (double)t->local_size * (threads + 1) / t->local_cores) : 1;
    if (threads > 0) atomic_store(&((mpi_state *)t->state)->crowded, turns > 1);
    return (cf_costs){.latency_s = 30e-6 * turns,
                      .message_s = 2e-6 * turns,
                      .piece_s = 3e-6 * turns,
                      .bytes_per_s = 4e9 / turns,
                      .flops_per_s = 60e9 * (threads > 0 ? threads / fmax(1, (double)t->local_size * threads / t->local_cores) : 1),
                      .rounds = "ring",
                      .spare = turns <= 1,
                      .network_latency_s = 30e-6 * turns,
                      .network_bytes_per_s = 1.25e9 / turns, // 10 Gbit/s
                      .shared_bytes_per_s = 1.25e9 / turns / (t->ranks_per_host > 0 ? t->ranks_per_host : t->local_size),
                      .share_1mb = 1,
                      .share_100mb = 1};
}

cf_transport *cf_transport_create(const char *name, int *argc, char ***argv, double timeout_s) {
    cf_transport *t = cf_host_alloc(1, sizeof *t, "the transport");
    mpi_state *s = cf_host_alloc(1, sizeof *s, "the transport");
    widen_binding();
    cf_bootstrap *ranks = s->ranks = cf_bootstrap_mpi(argc, argv, timeout_s, true);
    *t = (cf_transport){.name = "mpi",
                        .rank = ranks->rank,
                        .size = ranks->size,
                        .local_rank = ranks->local_rank,
                        .local_size = ranks->local_size,
                        .local_cores = ranks->local_cores,
                        .ranks_per_host = ranks->ranks_per_host,
                        .tags = count_tags(),
                        .collectives = true, // MPI connects them by itself, whatever the caller sets
                        .state = s,
                        .timeout_s = &ranks->timeout_s,
                        .set_threads = set_threads,
                        .gather = gather,
                        .bind = bind_group,
                        .post = post,
                        .test = test,
                        .wait = wait,
                        .close = close_transport};
    if (strcmp(name, "auto") != 0 && strcmp(name, "mpi") != 0)
        cf_die_together("use transport mpi or auto", "transport %s needs a GPU; this program is for CPUs", name);
    cf_inflight_open(&s->flights, t->size);
    cf_device_open(t->local_rank);
    s->watch = cf_watch_open(ranks);
    s->all =
        (cf_group){.name = "all ranks", .size = t->size, .rank = t->rank, .native = ranks->comm}; // no exchanges, so no members
    pthread_mutex_init(&s->lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&s->posted, &monotonic);
    pthread_cond_init(&s->done, &monotonic);
    pthread_condattr_destroy(&monotonic);
    set_threads(t, 1);
    cf_limits_start(&s->thread, progress, s, "the progress thread");
    s->never_block = !cf_allreduce_min(t, t->local_size <= t->local_cores);
    return t;
}
