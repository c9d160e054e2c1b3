// Ranks meet over TCP, as a star. See bootstrap.h.
//
// Rank 0 listens at MASTER_ADDR; each other rank connects, again and again until it is accepted. It says who it is, and rank 0
// answers with a reason to refuse it, or with none. Then ranks send parts of an allgather to rank 0, which sends all of them to all.
// What is not of this program is closed. As with MPI, NCCL and torchrun nothing is authenticated or encrypted (README.md).
//
// After the start a thread watches for connections that break, so a lost rank is noticed at once, even while the compute thread
// is inside a call that never returns. It ends this rank, and rank 0 ends all others. TCP's keep-alive notices hosts that vanish.
#define _GNU_SOURCE
#include "bootstrap.h"
#include "../device.h"
#include "../base/die.h"
#include "../base/limits.h"
#include "../base/sanitize.h"
#include "watch.h"
#include <errno.h>
#include <math.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    HOST_LENGTH = 64,
    REASON_LENGTH = 256,
    LISTENERS_MAX = 8,
    CONNECT_S = 5,
    HELLO_S = 1, // a hello comes at once, or the connection is closed: others wait behind it
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

typedef struct sockets {
    cf_bootstrap base;
    const char *address; // of rank 0
    char port[16];
    int ranks;                 // connections: with rank 0; on rank 0 with all (the first is unused)
    struct pollfd *polled;     // one for each, fd -1: none; then those of listeners
    char (*host)[HOST_LENGTH]; // of each
    int listeners;
    pthread_t thread;
} sockets;

static sockets *of_process; // for the abort hook, which has no argument

// --- messages ---

typedef enum { WHOLE, CLOSED, LATE, FOREIGN, OTHER_SIZE } outcome; // FOREIGN: not of this program

// The longest wait of each call from here on; INFINITY: for ever.
static void limit(int fd, double s) {
    const double most = isinf(s) ? 0 : fmax(s, 1e-3);
    const struct timeval wait = {(time_t)most, (suseconds_t)(1e6 * fmod(most, 1))};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof wait);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof wait);
}

static outcome move_all(int fd, void *data, int64_t bytes, bool sends) {
    for (char *at = (char *)data; bytes > 0;) {
        const ssize_t moved = sends ? send(fd, at, (size_t)bytes, MSG_NOSIGNAL) : recv(fd, at, (size_t)bytes, 0);
        if (moved == 0 || (moved < 0 && errno != EINTR)) return moved < 0 && errno == EAGAIN ? LATE : CLOSED;
        if (moved > 0) at += moved, bytes -= moved;
    }
    return WHOLE;
}

static outcome send_message(const sockets *s, int fd, const void *data, int64_t bytes) {
    head h = {MAGIC, s->base.rank, bytes};
    outcome how = move_all(fd, &h, sizeof h, true);
    return how == WHOLE ? move_all(fd, (void *)data, bytes, true) : how;
}

static outcome receive_message(int fd, head *h, void *data, int64_t bytes) {
    outcome how = move_all(fd, h, sizeof *h, false);
    if (how == WHOLE && h->magic != MAGIC) return FOREIGN;
    if (how == WHOLE && h->bytes != bytes) return OTHER_SIZE;
    return how == WHOLE ? move_all(fd, data, bytes, false) : how;
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

static void receive(sockets *s, int from, void *to, int64_t bytes) {
    head h;
    outcome how = receive_message(s->polled[from].fd, &h, to, bytes);
    if (how == CLOSED) lost(s, from);
    if (how == LATE)
        cf_die("that rank may be frozen or slow; see its messages, or allow a longer timeout",
               "rank %d waits for rank %d at start or end of the run; nothing came for %g s", s->base.rank, from,
               s->base.timeout_s);
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
    for (int i = 0; i < s->ranks; i++) limit(s->polled[i].fd, longest_s);
    for (int i = 1; b->rank == 0 && i < s->ranks; i++) receive(s, i, (char *)all + i * bytes, bytes);
    if (b->rank == 0) memcpy(all, mine, (size_t)bytes);
    for (int i = b->rank == 0; i < s->ranks; i++)
        if (send_message(s, s->polled[i].fd, b->rank ? mine : all, b->rank ? bytes : bytes * b->size) != WHOLE) lost(s, i);
    if (b->rank != 0) receive(s, 0, all, bytes * b->size);
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

static void accept_one(sockets *s, int listener) {
    head h;
    hello said;
    char reason[REASON_LENGTH] = "";
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0 && (errno == EMFILE || errno == ENFILE)) out_of_files(s);
    if (fd < 0) return;
    keep_alive(fd);
    limit(fd, HELLO_S);
    bool joins = receive_message(fd, &h, &said, sizeof said) == WHOLE;
    if (joins) {
        said.host[HOST_LENGTH - 1] = 0;
        cf_sanitize(said.host);
        check_hello(s, &said, reason);
        joins = send_message(s, fd, reason, sizeof reason) == WHOLE && !*reason;
    }
    if (joins) {
        s->polled[said.rank].fd = fd;
        memcpy(s->host[said.rank], said.host, HOST_LENGTH);
    } else
        close(fd);
}

// Returns when all other ranks have joined. Ends the run if one of them is lost meanwhile.
static void accept_ranks(sockets *s, double deadline_ms) {
    if (s->ranks + LISTENERS_MAX > sysconf(_SC_OPEN_MAX)) out_of_files(s); // poll() would refuse so many
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
        poll(s->polled, (nfds_t)(s->ranks + s->listeners), RETRY_MS); // ignores those without a descriptor
        end_if_lost(s);
        for (int i = s->ranks; i < s->ranks + s->listeners; i++)
            if (s->polled[i].revents) accept_one(s, s->polled[i].fd);
    }
    for (int i = s->ranks; i < s->ranks + s->listeners; i++) close(s->polled[i].fd);
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
    limit(fd, fmin((deadline_ms - cf_now_ms()) * 1e-3, CONNECT_S));
    int error = connect(fd, to->ai_addr, to->ai_addrlen) == 0 ? 0 : errno == EINPROGRESS ? ETIMEDOUT : errno;
    limit(fd, (deadline_ms - cf_now_ms()) * 1e-3);
    outcome how = error ? CLOSED : send_message(s, fd, &mine, sizeof mine);
    if (how == WHOLE) how = receive_message(fd, &h, said, sizeof said);
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
    s->polled = cf_host_alloc(s->ranks + LISTENERS_MAX, sizeof *s->polled, "connections");
    for (int i = 0; i < s->ranks; i++) s->polled[i] = (struct pollfd){.fd = -1, .events = POLLRDHUP};
    if (size > 1) {
        s->address = address;
        snprintf(s->port, sizeof s->port, "%d", port);
        of_process = s;
        cf_die_setup(rank, size, abort_all);
        cf_limits_more_files(); // for connections, and what libraries open later
        (rank == 0 ? accept_ranks : join_rank_0)(s, timeout_s > 0 ? cf_now_ms() + 1e3 * timeout_s : INFINITY);
        if (pthread_create(&s->thread, NULL, watch_connections, s) != 0)
            cf_die(NULL, "cannot start the thread that watches connections");
    }
    cf_bootstrap_find_neighbours(&s->base);
    return &s->base;
}
