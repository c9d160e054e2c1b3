// Ranks meet over TCP, as a star. See bootstrap.h.
//
// Rank 0 listens at MASTER_ADDR; each other rank connects, again and again until it is accepted. It says who it is, and rank 0
// answers with a reason to refuse it, or with none. Then ranks send parts of an allgather to rank 0, which sends all of them to
// all. What is not of this program is closed. As with MPI, NCCL and torchrun nothing is authenticated or encrypted (README.md).
//
// After the start a thread watches for connections that break, so a lost rank is noticed at once, even while the compute thread
// is inside a call that never returns. It ends this rank, and rank 0 ends all others. TCP's keep-alive notices hosts that vanish.
#define _GNU_SOURCE
#include "../device.h"
#include "../base/limits.h"
#include "../base/sanitize.h"
#include "watch.h"
#include <errno.h>
#include <math.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    HOST_LENGTH = 64,
    REASON_LENGTH = 256,
    LISTENERS_MAX = 8,
    GUESTS_MAX = 64,
    CONNECT_S = 5,
    HELLO_S = 1, // a hello comes at once, or the connection is closed
    RETRY_MS = 100,
    RANK_0_FIRST_S = 5 // the other ranks' time-outs are this much longer: rank 0 knows which rank is missing
};
static const uint32_t MAGIC = 0xCF0B0078;

typedef struct head { // of all that is sent
    uint32_t magic;
    int32_t from;  // rank
    int64_t bytes; // that follow
} head;

typedef struct hello {
    int32_t rank, size;
    char host[HOST_LENGTH];
} hello;

typedef struct guest { // a connection that may become a rank
    double deadline_ms;
    size_t bytes; // that have come
    struct {
        head h;
        hello said;
    } message;
} guest;

typedef struct sockets {
    cf_bootstrap base;
    const char *address; // of rank 0
    char port[16];
    int ranks;                   // connections: with rank 0; on rank 0 with all (the first is unused)
    struct pollfd *polled;       // one for each, fd -1: none; then those of listeners and of guests
    char (*host)[HOST_LENGTH];   // of each
    int listeners, guests, next; // the place of the next guest: where the first one is, or was
    guest guest[GUESTS_MAX];
    pthread_t thread;
} sockets;

static sockets *of_process; // for the abort hook, which has no argument

// --- messages ---

typedef enum { WHOLE, CLOSED, LATE, FOREIGN, OTHER_SIZE } outcome; // FOREIGN: not of this program

// All of it, or as much as moves before the deadline.
static outcome move_all(int fd, void *data, int64_t bytes, bool sends, double deadline_ms) {
    struct pollfd ready = {.fd = fd, .events = sends ? POLLOUT : POLLIN};
    for (char *at = (char *)data; bytes > 0;) {
        const ssize_t moved =
            sends ? send(fd, at, (size_t)bytes, MSG_NOSIGNAL | MSG_DONTWAIT) : recv(fd, at, (size_t)bytes, MSG_DONTWAIT);
        if (moved == 0 || (moved < 0 && errno != EINTR && errno != EAGAIN)) return CLOSED;
        const double left_ms = deadline_ms - cf_now_ms();
        if (moved > 0)
            at += moved, bytes -= moved;
        else if (left_ms <= 0)
            return LATE;
        else
            poll(&ready, 1, (int)fmin(left_ms + 1, 1e6));
    }
    return WHOLE;
}

static outcome send_message(const sockets *s, int fd, const void *data, int64_t bytes, double deadline_ms) {
    head h = {MAGIC, s->base.rank, bytes};
    outcome how = move_all(fd, &h, sizeof h, true, deadline_ms);
    return how == WHOLE ? move_all(fd, (void *)data, bytes, true, deadline_ms) : how;
}

static outcome check_head(const head *h, int64_t bytes) {
    return h->magic != MAGIC ? FOREIGN : h->bytes != bytes ? OTHER_SIZE : WHOLE;
}

static outcome receive_message(int fd, head *h, void *data, int64_t bytes, double deadline_ms) {
    outcome how = move_all(fd, h, sizeof *h, false, deadline_ms);
    if (how == WHOLE) how = check_head(h, bytes);
    return how == WHOLE ? move_all(fd, data, bytes, false, deadline_ms) : how;
}

static void set(int fd, int level, int option, int value) {
    setsockopt(fd, level, option, &value, sizeof value);
}

static void keep_alive(int fd) {
    set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set(fd, IPPROTO_TCP, TCP_KEEPIDLE, 10);
    set(fd, IPPROTO_TCP, TCP_KEEPINTVL, 5);
    set(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
}

// --- a rank is gone ---

static void abort_all(int status) {
    (void)status;
    cf_watch_linger();
    for (int i = 0; i < of_process->ranks; i++) shutdown(of_process->polled[i].fd, SHUT_WR); // an error if there is none
}

CF_NORETURN static void lost(const sockets *s, int rank) {
    const char *host = s->host[rank];
    if (rank == 0) poll(NULL, 0, RETRY_MS); // perhaps it ended by an error that this rank is about to find, too
    cf_die("see the messages of that rank: it has ended, was killed, or its host is gone",
           "rank %d%s%s%s is gone; rank %d cannot continue without it", rank, *host ? " (" : "", host, *host ? ")" : "",
           s->base.rank);
}

static void end_if_lost(const sockets *s) {
    for (int i = 0; i < s->ranks; i++)
        if (s->polled[i].revents) lost(s, i);
}

static void *watch_connections(void *argument) {
    sockets *s = (sockets *)argument;
    while (poll(s->polled, (nfds_t)s->ranks, -1) <= 0) {} // close_sockets() cancels it here
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    end_if_lost(s);
    return NULL;
}

// --- allgather ---

static void end_unless_moved(const sockets *s, int rank, outcome how) {
    if (how == CLOSED) lost(s, rank);
    if (how == LATE)
        cf_die("that rank may be frozen or slow; see its messages, or allow a longer timeout",
               "rank %d waits for rank %d at start or end of the run; nothing came for %g s", s->base.rank, rank,
               s->base.timeout_s);
}

static void receive(sockets *s, int from, void *to, int64_t bytes, double deadline_ms) {
    head h;
    outcome how = receive_message(s->polled[from].fd, &h, to, bytes, deadline_ms);
    end_unless_moved(s, from, how);
    if (how == FOREIGN || (how == WHOLE && h.from != from))
        cf_die("was something changed on the way? which other programs use MASTER_PORT?",
               "the data from rank %d is no message of this run", from);
    if (how == OTHER_SIZE)
        cf_die("start the same program with the same options on every rank", "rank %d gives %lld bytes where rank %d expects %lld",
               from, (long long)h.bytes, s->base.rank, (long long)bytes);
}

static void allgather(cf_bootstrap *b, const void *mine, void *all, int64_t bytes) {
    sockets *s = (sockets *)b;
    const double longest_s = b->timeout_s > 0 ? b->timeout_s + (b->rank ? RANK_0_FIRST_S : 0) : INFINITY;
    const double deadline_ms = cf_now_ms() + 1e3 * longest_s;
    for (int i = 1; b->rank == 0 && i < s->ranks; i++) receive(s, i, (char *)all + i * bytes, bytes, deadline_ms);
    if (b->rank == 0) memcpy(all, mine, (size_t)bytes);
    const void *parts = b->rank ? mine : all;
    for (int i = b->rank == 0; i < s->ranks; i++)
        end_unless_moved(s, i, send_message(s, s->polled[i].fd, parts, b->rank ? bytes : bytes * b->size, deadline_ms));
    if (b->rank != 0) receive(s, 0, all, bytes * b->size, deadline_ms);
}

// --- the start of rank 0 ---

// Listens at all addresses of that name that this host has; NULL: at all addresses of this host.
static void listen_at(sockets *s, const char *address) {
    struct addrinfo want = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *found = NULL;
    int error = getaddrinfo(address, s->port, &want, &found);
    for (struct addrinfo *at = error ? NULL : found; at && s->listeners < LISTENERS_MAX; at = at->ai_next) {
        int fd = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0 && errno == EAFNOSUPPORT) continue;
        if (fd < 0) cf_die(NULL, "rank 0 cannot open a socket: %s", strerror(errno));
        set(fd, SOL_SOCKET, SO_REUSEADDR, 1);
        if (at->ai_family == AF_INET6) set(fd, IPPROTO_IPV6, IPV6_V6ONLY, 1);
        if (bind(fd, at->ai_addr, at->ai_addrlen) == 0 && listen(fd, SOMAXCONN) == 0) {
            s->polled[s->ranks + s->listeners++] = (struct pollfd){.fd = fd, .events = POLLIN};
            continue;
        }
        if (errno != EADDRNOTAVAIL)
            cf_die(errno == EADDRINUSE ? "another run may be using it: choose another MASTER_PORT" : "choose another MASTER_PORT",
                   "rank 0 cannot listen on port %s: %s", s->port, strerror(errno));
        close(fd);
    }
    if (!error) freeaddrinfo(found);
}

// Writes why this process is no rank of this run; nothing: it is one.
static void check_hello(const sockets *s, const hello *said, char reason[REASON_LENGTH]) {
    if (said->size != s->base.size || said->rank <= 0 || said->rank >= s->base.size)
        snprintf(reason, REASON_LENGTH, "a process on %s is rank %d of %d; this run has %d ranks (is another run using this port?)",
                 said->host, said->rank, said->size, s->base.size);
    else if (s->polled[said->rank].fd >= 0)
        snprintf(reason, REASON_LENGTH, "two processes are rank %d: one on %s, one on %s", said->rank, s->host[said->rank],
                 said->host);
}

CF_NORETURN static void out_of_files(const sockets *s) {
    cf_die("allow more before the start: ulimit -n 65536", "rank 0 of %d needs more open files than ulimit -n allows (%ld)",
           s->base.size, sysconf(_SC_OPEN_MAX));
}

// Takes what has come of a guest's hello. A whole one makes it a rank, if nothing speaks against it.
static void hear(sockets *s, guest *g, int *fd) {
    hello *said = &g->message.said;
    char reason[REASON_LENGTH] = "";
    const ssize_t came = recv(*fd, (char *)&g->message + g->bytes, sizeof g->message - g->bytes, MSG_DONTWAIT);
    bool stays = came > 0 || (came < 0 && (errno == EAGAIN || errno == EINTR));
    if (came > 0) g->bytes += (size_t)came;
    if (g->bytes >= sizeof(head)) stays &= check_head(&g->message.h, sizeof *said) == WHOLE;
    const bool whole = stays && g->bytes == sizeof g->message;
    if (stays && !whole && cf_now_ms() < g->deadline_ms) return;
    if (whole) {
        said->host[HOST_LENGTH - 1] = 0;
        cf_sanitize(said->host);
        check_hello(s, said, reason);
    }
    if (whole && send_message(s, *fd, reason, sizeof reason, 0) == WHOLE && !*reason) {
        s->polled[said->rank].fd = *fd;
        memcpy(s->host[said->rank], said->host, HOST_LENGTH);
    } else
        close(*fd);
    *fd = -1;
}

// If there is no room for a guest more, the one that came first leaves: a rank connects again.
static void accept_one(sockets *s, int listener) {
    struct pollfd *polled = s->polled + s->ranks + LISTENERS_MAX;
    const int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    const bool full = fd < 0 && (errno == EMFILE || errno == ENFILE);
    int at = s->next;
    for (int i = 0; full && polled[at].fd < 0; at = (at + 1) % s->guests)
        if (i++ == s->guests) out_of_files(s);
    if (fd < 0 && !full) return;
    if (fd >= 0) keep_alive(fd);
    if (polled[at].fd >= 0) close(polled[at].fd);
    polled[at] = (struct pollfd){.fd = fd, .events = POLLIN};
    s->guest[at] = (guest){.deadline_ms = cf_now_ms() + 1e3 * HELLO_S};
    s->next = (at + !full) % s->guests;
}

// Returns when all other ranks have joined. Ends the run if one of them is lost meanwhile.
static void accept_ranks(sockets *s, double deadline_ms) {
    struct pollfd *listener = s->polled + s->ranks, *polled = listener + LISTENERS_MAX;
    const long room = sysconf(_SC_OPEN_MAX) - s->ranks - LISTENERS_MAX; // poll() refuses more
    if (room < 1) out_of_files(s);
    s->guests = room < GUESTS_MAX ? (int)room : GUESTS_MAX;
    listen_at(s, s->address);
    if (s->listeners == 0) listen_at(s, NULL);
    for (;;) {
        int missing = 0, last = 0;
        for (int i = 1; i < s->ranks; i++)
            if (s->polled[i].fd < 0) missing++, last = i;
        if (missing == 0) break;
        if (cf_now_ms() > deadline_ms)
            cf_die("were they started? do their MASTER_ADDR and MASTER_PORT lead here? or allow a longer timeout",
                   "%d of %d ranks have not connected to port %s within %g s: the last is rank %d", missing, s->ranks, s->port,
                   s->base.timeout_s, last);
        poll(s->polled, (nfds_t)(s->ranks + LISTENERS_MAX + s->guests), RETRY_MS); // ignores those without a descriptor
        end_if_lost(s);
        for (int i = 0; i < s->guests; i++)
            if (polled[i].fd >= 0) hear(s, &s->guest[i], &polled[i].fd);
        for (int i = 0; i < s->listeners; i++)
            if (listener[i].revents) accept_one(s, listener[i].fd);
    }
    for (; listener < polled + s->guests; listener++)
        if (listener->fd >= 0) close(listener->fd);
}

// --- the start of the others ---

// Returns NULL if rank 0 has accepted this rank, otherwise why it has not, so far.
static const char *join(sockets *s, const struct addrinfo *to, double deadline_ms) {
    head h;
    char said[REASON_LENGTH];
    hello mine = {.rank = s->base.rank, .size = s->base.size};
    if (gethostname(mine.host, sizeof mine.host - 1) != 0) snprintf(mine.host, sizeof mine.host, "unknown");
    int fd = socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return strerror(errno);
    keep_alive(fd);
    const double most_s = fmax(fmin((deadline_ms - cf_now_ms()) * 1e-3, CONNECT_S), 1e-3);
    const struct timeval longest = {(time_t)most_s, (suseconds_t)(1e6 * fmod(most_s, 1))};
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &longest, sizeof longest);
    int error = connect(fd, to->ai_addr, to->ai_addrlen) == 0 ? 0 : errno == EINPROGRESS ? ETIMEDOUT : errno;
    outcome how = error ? CLOSED : send_message(s, fd, &mine, sizeof mine, deadline_ms);
    if (how == WHOLE) how = receive_message(fd, &h, said, sizeof said, deadline_ms);
    if (how == WHOLE && h.from == 0 && *said)
        cf_die("give every process a RANK of its own from 0 to WORLD_SIZE - 1, and all the same WORLD_SIZE",
               "rank 0 at %s port %s refuses rank %d: %.*s", s->address, s->port, s->base.rank, REASON_LENGTH - 1, said);
    if (how == WHOLE && h.from == 0) {
        s->polled[0].fd = fd;
        return NULL;
    }
    close(fd);
    return error           ? strerror(error)
           : how == CLOSED ? "it closes the connection"
           : how == LATE   ? "it answers nothing"
                           : "another program answers: choose another MASTER_PORT";
}

static void join_rank_0(sockets *s, double deadline_ms) {
    struct addrinfo want = {.ai_socktype = SOCK_STREAM}, *found = NULL;
    const char *why = "no answer";
    do { // a name, too, may be unknown until that host is up
        int error = getaddrinfo(s->address, s->port, &want, &found);
        if (error) why = gai_strerror(error);
        for (struct addrinfo *to = error ? NULL : found; why && to; to = to->ai_next) why = join(s, to, deadline_ms);
        if (!error) freeaddrinfo(found);
        if (!why) return;
        poll(NULL, 0, RETRY_MS);
    } while (cf_now_ms() < deadline_ms);
    cf_die("was rank 0 started there? can this host reach it? or allow a longer timeout",
           "rank %d cannot reach rank 0 at %s port %s within %g s: %s", s->base.rank, s->address, s->port, s->base.timeout_s, why);
}

// --- start and end ---

static void close_sockets(cf_bootstrap *b) {
    sockets *s = (sockets *)b;
    char nothing;
    if (b->size > 1) {
        pthread_cancel(s->thread);
        pthread_join(s->thread, NULL);
    }
    allgather(b, "", &nothing, 0); // after this, ranks may close their connections
    cf_die_setup(b->rank, b->size, NULL);
    for (int i = 0; i < s->ranks; i++)
        if (s->polled[i].fd >= 0) close(s->polled[i].fd);
    free(s->host);
    free(s->polled);
    free(s);
}

cf_bootstrap *cf_bootstrap_sockets(int rank, int size, const char *address, int port, double timeout_s) {
    sockets *s = cf_host_alloc(1, sizeof *s, "the start");
    s->base = (cf_bootstrap){.rank = rank, .size = size, .timeout_s = timeout_s, .allgather = allgather, .close = close_sockets};
    s->ranks = rank == 0 ? size : 1;
    s->host = cf_host_alloc(s->ranks, sizeof *s->host, "connections");
    const int most = s->ranks + LISTENERS_MAX + GUESTS_MAX;
    s->polled = cf_host_alloc(most, sizeof *s->polled, "connections");
    for (int i = 0; i < most; i++) s->polled[i] = (struct pollfd){.fd = -1, .events = POLLRDHUP};
    if (size > 1) {
        s->address = address;
        snprintf(s->port, sizeof s->port, "%d", port);
        of_process = s;
        cf_die_setup(rank, size, abort_all);
        cf_limits_more_files(); // for connections, and what libraries open later
        (rank == 0 ? accept_ranks : join_rank_0)(s, timeout_s > 0 ? cf_now_ms() + 1e3 * timeout_s : INFINITY);
        cf_limits_start(&s->thread, watch_connections, s, "the thread that watches connections");
    }
    cf_bootstrap_find_neighbours(&s->base);
    return &s->base;
}
