// Ranks meet over TCP, as a star. See bootstrap.h.
//
// Rank 0 listens at MASTER_ADDR; each other rank connects, again and again until it is accepted. Everything is a frame: a head,
// a payload, and a code of both (secret.h).
//
//   CHALLENGE  from rank 0: random bytes            its code is made with the secret
//   HELLO      random bytes, rank, size, host       with a key made from the secret and the challenge
//   REPLY      from rank 0: accepted, or why not    from here on with a key made from the secret and both
//   DATA       a rank's part of an allgather; from rank 0: all parts
//   LOST       from rank 0, before it ends: the rank that is gone
//
// So each side proves, over the other's random bytes, that it knows the secret, and nobody can change, repeat or move a frame.
// Nobody receives more bytes than it has room for. Nothing is encrypted.
//
// Strangers, connections without a valid HELLO so far, can neither end nor delay a run: they are closed after some seconds, and
// earlier, the oldest first, if there are too many. A rank that is closed among them connects again.
//
// After the start a thread watches for connections that break, so a lost rank is noticed at once, even while the compute thread
// is inside a call that never returns. It ends this rank, and rank 0 ends all others. TCP's keep-alive notices hosts that vanish.
#define _GNU_SOURCE
#include "bootstrap.h"
#include "../device.h"
#include "../base/die.h"
#include "../base/limits.h"
#include "../base/sanitize.h"
#include "secret.h"
#include "watch.h"
#include <errno.h>
#include <math.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    CHALLENGE = 1,
    HELLO,
    REPLY,
    DATA,
    LOST,
    HOST_LENGTH = 64,
    REASON_LENGTH = 256,
    LISTENERS_MAX = 8,
    STRANGERS_MAX = 128, // in addition to the number of ranks
    STRANGER_S = 5,      // a stranger must send its hello within
    ACCEPTS = 16,        // strangers accepted before the other connections are served again
    RETRY_MS = 100,
    CONNECT_S = 5,
    RANK_0_FIRST_S = 5 // the other ranks' time-outs are this much longer: rank 0 knows which rank is missing
};
static const uint32_t MAGIC = 0xCF0B0077;

typedef struct head {
    uint32_t magic, kind;
    int32_t from;    // rank; LOST: the one that is gone
    uint32_t number; // frames sent before by this end of the connection
    int64_t bytes;   // of payload
} head;

typedef struct hello {
    cf_mac random;
    int32_t rank, size;
    char host[HOST_LENGTH];
} hello;

typedef struct connection {
    int fd;                  // -1: none
    uint32_t sent, received; // frames
    cf_mac key;
    char host[HOST_LENGTH];
    double since_s; // when a stranger connected
} connection;

typedef struct sockets {
    cf_bootstrap base;
    cf_mac secret;
    const char *address; // of rank 0
    char port[16];
    connection *connection; // [0, ranks): ranks (on rank 0 the first is unused); [ranks, strangers_end): strangers; then listeners
    struct pollfd *polled;  // one for each connection
    int ranks, strangers_end, listeners;
    bool open; // a listener is not on the loopback
    pthread_t thread;
    pthread_mutex_t busy; // held while a frame is sent, on ranks other than 0 also while one is received
} sockets;

static sockets *of_process; // for the abort hook, which has no argument
static int32_t lost_rank;   // only rank 0 sees which rank is gone: it sends that to the others before it ends

static double now_s(void) {
    return cf_now_ms() * 1e-3;
}

static double deadline_of(const sockets *s, double more_s) {
    return s->base.timeout_s > 0 ? now_s() + s->base.timeout_s + more_s : 1e300;
}

// --- frames ---

typedef enum { WHOLE, CLOSED, LATE, TOO_LONG, FALSE_FRAME } outcome; // of all but WHOLE nothing is authenticated

// events: POLLOUT: sends; POLLIN: receives.
static outcome move_all(int fd, void *data, int64_t bytes, short events, double deadline_s) {
    for (char *at = (char *)data; bytes > 0;) {
        ssize_t moved =
            events == POLLIN ? recv(fd, at, (size_t)bytes, MSG_DONTWAIT) : send(fd, at, (size_t)bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (moved > 0)
            at += moved, bytes -= moved;
        else if (moved == 0 || (errno != EAGAIN && errno != EINTR))
            return CLOSED;
        else {
            double left_s = deadline_s - now_s();
            struct pollfd look = {.fd = fd, .events = events};
            if (left_s <= 0) return LATE;
            poll(&look, 1, left_s < 60 ? (int)(left_s * 1e3) + 1 : 60000);
        }
    }
    return WHOLE;
}

// The code of the next frame. The payloads of CHALLENGE and HELLO become part of the key for all later frames.
static cf_mac next_code(connection *c, const head *h, const void *payload) {
    const cf_mac of_head = cf_mac_of(&c->key, h, sizeof *h), code = cf_mac_of(&of_head, payload, (size_t)h->bytes);
    if (h->kind == CHALLENGE || h->kind == HELLO) c->key = cf_mac_of(&c->key, payload, (size_t)h->bytes);
    return code;
}

static bool send_frame(const sockets *s, connection *c, uint32_t kind, const void *payload, int64_t bytes, double deadline_s) {
    head h = {MAGIC, kind, kind == LOST ? lost_rank : s->base.rank, c->sent++, bytes};
    cf_mac code = next_code(c, &h, payload);
    return move_all(c->fd, &h, sizeof h, POLLOUT, deadline_s) == WHOLE &&
           move_all(c->fd, (void *)payload, bytes, POLLOUT, deadline_s) == WHOLE &&
           move_all(c->fd, &code, sizeof code, POLLOUT, deadline_s) == WHOLE;
}

// TOO_LONG: more bytes than room; only the head has been received.
static outcome receive_frame(connection *c, head *h, void *payload, int64_t room, double deadline_s) {
    cf_mac code;
    outcome how = move_all(c->fd, h, sizeof *h, POLLIN, deadline_s);
    if (how == WHOLE && (h->magic != MAGIC || h->number != c->received || h->bytes < 0)) return FALSE_FRAME;
    if (how != WHOLE) return how;
    if (h->bytes > room) return TOO_LONG;
    how = move_all(c->fd, payload, h->bytes, POLLIN, deadline_s);
    if (how == WHOLE) how = move_all(c->fd, &code, sizeof code, POLLIN, deadline_s);
    if (how != WHOLE) return how;
    const cf_mac expected = next_code(c, h, payload);
    c->received++;
    return cf_mac_equal(&code, &expected) ? WHOLE : FALSE_FRAME;
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
    sockets *s = of_process;
    bool may_send = s->base.rank == 0 && pthread_mutex_trylock(&s->busy) == 0; // no frame is sent in part
    for (int i = 0; i < s->ranks; i++) {
        if (s->connection[i].fd < 0) continue;
        if (may_send) send_frame(s, &s->connection[i], LOST, "", 0, 0);
        shutdown(s->connection[i].fd, SHUT_WR);
    }
}

CF_NORETURN static void lost(const sockets *s, int rank) {
    const char *host = s->base.rank == 0 ? s->connection[rank].host : "";
    lost_rank = rank;
    if (rank == 0) poll(NULL, 0, RETRY_MS); // perhaps it ended by an error that this rank is about to find, too
    cf_die("see the messages of that rank: it has ended, was killed, or its host is gone",
           "rank %d%s%s%s is gone; rank %d cannot continue without it", rank, *host ? " (" : "", host, *host ? ")" : "",
           s->base.rank);
}

// --- allgather ---

static void expect(sockets *s, int from, uint32_t kind, void *to, int64_t bytes, double deadline_s) {
    head h;
    outcome how = receive_frame(&s->connection[from], &h, to, bytes, deadline_s);
    if (how == WHOLE && h.kind == LOST && from == 0 && h.from >= 0 && h.from < s->base.size) lost(s, h.from);
    if (how == CLOSED) lost(s, from);
    if (how == LATE)
        cf_die("that rank may be frozen or slow; see its messages, or allow a longer timeout",
               "rank %d waits for rank %d at start or end of the run; nothing came for %g s", s->base.rank, from,
               s->base.timeout_s);
    if (how == FALSE_FRAME || h.from != from)
        cf_die("was something changed on the way? which other programs use MASTER_PORT?",
               "the data from rank %d is no frame of this run", from);
    if (h.kind != kind || h.bytes != bytes)
        cf_die("start the same program with the same options on every rank",
               "rank %d gives %lld bytes (kind %u) where rank %d expects %lld (kind %u)", from, (long long)h.bytes, h.kind,
               s->base.rank, (long long)bytes, kind);
}

static void send_data(sockets *s, int to, const void *from, int64_t bytes, double deadline_s) {
    pthread_mutex_lock(&s->busy);
    bool sent = send_frame(s, &s->connection[to], DATA, from, bytes, deadline_s);
    pthread_mutex_unlock(&s->busy);
    if (!sent) lost(s, to);
}

// Rank 0 gathers, then sends everything to all.
static void allgather(cf_bootstrap *b, const void *mine, void *all, int64_t bytes) {
    sockets *s = (sockets *)b;
    const int64_t whole = bytes * b->size;
    const double deadline_s = deadline_of(s, b->rank ? RANK_0_FIRST_S : 0);
    if (b->rank != 0) {
        send_data(s, 0, mine, bytes, deadline_s);
        pthread_mutex_lock(&s->busy);
        expect(s, 0, DATA, all, whole, deadline_s);
        pthread_mutex_unlock(&s->busy);
        return;
    }
    for (int i = 1; i < s->ranks; i++) expect(s, i, DATA, (char *)all + i * bytes, bytes, deadline_s);
    memcpy(all, mine, (size_t)bytes);
    for (int i = 1; i < s->ranks; i++) send_data(s, i, all, whole, deadline_of(s, 0));
}

static void *watch_connections(void *argument) {
    sockets *s = (sockets *)argument;
    for (int i = 0; i < s->ranks; i++) s->polled[i] = (struct pollfd){.fd = s->connection[i].fd, .events = POLLRDHUP};
    while (poll(s->polled, (nfds_t)s->ranks, -1) <= 0) {} // close_sockets() cancels it here
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    for (int i = 0; s->base.rank == 0 && i < s->ranks; i++)
        if (s->polled[i].revents) lost(s, i);
    // Rank 0's last frame may name the rank that is gone. If the other thread is receiving, it reads that frame.
    pthread_mutex_lock(&s->busy);
    expect(s, 0, LOST, NULL, 0, 0);
    return NULL;
}

// --- strangers, at rank 0 ---

// Waiting would not help a process that may open no more files, and its peers are not to blame.
CF_NORETURN static void out_of_files(const sockets *s) {
    cf_die("allow more before the start: ulimit -n 65536", "rank %d of %d needs more open files than ulimit -n allows (%ld)",
           s->base.rank, s->base.size, sysconf(_SC_OPEN_MAX));
}

// poll() looks at no more places than a process may open files.
static void make_room(sockets *s) {
    const int64_t room = sysconf(_SC_OPEN_MAX) - LISTENERS_MAX;
    if (room < s->strangers_end) s->strangers_end = (int)room;
    if (room <= s->ranks) out_of_files(s);
}

static void close_stranger(connection *c) {
    close(c->fd);
    c->fd = -1;
}

// Writes why this process is no rank of this run; "": it is one.
static void check_hello(const sockets *s, const hello *said, char reason[REASON_LENGTH]) {
    *reason = 0;
    if (said->size != s->base.size)
        snprintf(reason, REASON_LENGTH, "a process on %s is rank %d of %d; this run has %d ranks (is another run using this port?)",
                 said->host, said->rank, said->size, s->base.size);
    else if (said->rank <= 0 || said->rank >= s->base.size)
        snprintf(reason, REASON_LENGTH, "a process on %s is rank %d of %d", said->host, said->rank, said->size);
    else if (s->connection[said->rank].fd >= 0)
        snprintf(reason, REASON_LENGTH, "two processes are rank %d: one on %s, one on %s", said->rank,
                 s->connection[said->rank].host, said->host);
}

// Called when a HELLO's bytes are here (the kernel reports no fewer), or when the stranger has closed the connection.
static void receive_hello(sockets *s, connection *c) {
    head h;
    hello said;
    char reason[REASON_LENGTH];
    bool joins = receive_frame(c, &h, &said, sizeof said, 0) == WHOLE && h.kind == HELLO && h.bytes == sizeof said;
    if (joins) {
        said.host[HOST_LENGTH - 1] = 0;
        memcpy(c->host, cf_sanitize(said.host), sizeof c->host);
        check_hello(s, &said, reason);
        joins = send_frame(s, c, REPLY, reason, (int64_t)strlen(reason) + 1, 0) && !*reason;
    }
    if (!joins) {
        close_stranger(c);
        return;
    }
    set(c->fd, SOL_SOCKET, SO_RCVLOWAT, 1);
    s->connection[said.rank] = *c;
    c->fd = -1;
}

static void accept_strangers(sockets *s, int listener) {
    for (int i = 0; i < ACCEPTS; i++) {
        connection *slot = NULL, *oldest = s->connection + s->ranks; // there is at least one slot
        for (connection *c = oldest; c < s->connection + s->strangers_end; c++) {
            if (c->fd < 0)
                slot = c;
            else if (oldest->fd < 0 || c->since_s < oldest->since_s)
                oldest = c;
        }
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0 && errno == EMFILE) {
            if (oldest->fd < 0) out_of_files(s);
            close_stranger(oldest);
            continue;
        }
        if (fd < 0 && errno != EAGAIN) poll(NULL, 0, RETRY_MS); // no memory, say: the listener stays readable
        if (fd < 0) return;
        if (!slot) close_stranger(slot = oldest);
        *slot = (connection){.fd = fd, .key = s->secret, .since_s = now_s()};
        cf_mac random;
        cf_random(&random, sizeof random);
        keep_alive(fd);
        set(fd, SOL_SOCKET, SO_RCVLOWAT, (int)(sizeof(head) + sizeof(hello) + sizeof(cf_mac)));
        if (!send_frame(s, slot, CHALLENGE, &random, sizeof random, 0)) close_stranger(slot);
    }
}

// --- the start of rank 0 ---

static bool is_loopback(const struct sockaddr *address) {
    if (address->sa_family == AF_INET6)
        return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)(const void *)address)->sin6_addr);
    return ntohl(((const struct sockaddr_in *)(const void *)address)->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
}

// Listens at all addresses of that name that this host has; NULL: at all addresses of this host.
static void listen_at(sockets *s, const char *address) {
    struct addrinfo want = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *found = NULL;
    int error = getaddrinfo(address, s->port, &want, &found);
    // Some systems give a host's name a loopback address, where other hosts do not look for it.
    bool is_name = address && strcmp(address, "localhost") != 0 && strspn(address, "0123456789abcdefABCDEF.:") < strlen(address);
    if (error && !address) cf_die("MASTER_PORT is a port number", "port %s: %s", s->port, gai_strerror(error));
    for (struct addrinfo *at = error ? NULL : found; at && s->listeners < LISTENERS_MAX; at = at->ai_next) {
        if (is_name && is_loopback(at->ai_addr)) continue;
        int fd = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0 && errno == EAFNOSUPPORT) continue;
        if (fd < 0) cf_die(NULL, "rank 0 cannot open a socket: %s", strerror(errno));
        set(fd, SOL_SOCKET, SO_REUSEADDR, 1);
        if (at->ai_family == AF_INET6) set(fd, IPPROTO_IPV6, IPV6_V6ONLY, 1);
        if (bind(fd, at->ai_addr, at->ai_addrlen) == 0 && listen(fd, SOMAXCONN) == 0) {
            s->connection[s->strangers_end + s->listeners++].fd = fd;
            s->open |= !is_loopback(at->ai_addr);
            continue;
        }
        if (errno != EADDRNOTAVAIL)
            cf_die(errno == EADDRINUSE ? "another run may be using it: choose another MASTER_PORT" : "choose another MASTER_PORT",
                   "rank 0 cannot listen on port %s: %s", s->port, strerror(errno));
        close(fd);
    }
    if (!error) freeaddrinfo(found);
}

// Returns how many ranks have not joined, and lists them as far as there is room.
static int missing_ranks(const sockets *s, char *list, size_t room) {
    int missing = 0;
    size_t length = 0;
    for (int i = 1; i < s->ranks; i++)
        if (s->connection[i].fd < 0 && missing++ >= 0 && length + 16 < room)
            length += (size_t)snprintf(list + length, 16, "%s%d", missing > 1 ? ", " : "", i);
    return missing;
}

// Returns when all other ranks have joined. Ends the run if one of them is lost meanwhile.
static void accept_ranks(sockets *s, double deadline_s) {
    char missing[128] = "";
    make_room(s);
    const int polled = s->strangers_end + LISTENERS_MAX;
    listen_at(s, s->address);
    if (s->listeners == 0) listen_at(s, NULL);
    if (s->open && !cf_secret_given())
        fprintf(stderr,
                "note: ranks meet at %s port %s without COMMFUSE_SECRET: anybody who reaches that port can "
                "join this run; give all ranks the same one, such as openssl rand -hex 32 makes\n",
                s->address, s->port);
    for (int count; (count = missing_ranks(s, missing, sizeof missing)) > 0;) {
        const double begin_s = now_s();
        if (begin_s > deadline_s)
            cf_die("were they started? do their MASTER_ADDR and MASTER_PORT lead here? or allow a longer timeout",
                   "%d of %d ranks have not connected to port %s within %g s: rank %s%s", count, s->ranks, s->port,
                   s->base.timeout_s, missing, strlen(missing) + 16 < sizeof missing ? "" : ", …");
        for (int i = 0; i < polled; i++) // poll() ignores those without a descriptor
            s->polled[i] = (struct pollfd){.fd = s->connection[i].fd, .events = i < s->ranks ? POLLRDHUP : POLLIN};
        poll(s->polled, (nfds_t)polled, RETRY_MS);
        for (int i = 0; i < polled; i++) {
            connection *c = &s->connection[i];
            if (s->polled[i].revents && i < s->ranks)
                lost(s, i);
            else if (s->polled[i].revents && i < s->strangers_end)
                receive_hello(s, c);
            else if (s->polled[i].revents)
                accept_strangers(s, c->fd);
            else if (i >= s->ranks && i < s->strangers_end && c->fd >= 0 && begin_s - c->since_s > STRANGER_S)
                close_stranger(c);
        }
    }
    for (int i = s->ranks; i < polled; i++)
        if (s->connection[i].fd >= 0) close_stranger(&s->connection[i]);
}

// --- the start of the others ---

// Returns -1 on an error, with errno.
static int connect_to(const struct addrinfo *to, double deadline_s) {
    int fd = socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return -1;
    const int64_t wait_us = 1 + (int64_t)(1e6 * fmin(fmax(deadline_s - now_s(), 0), CONNECT_S)); // 0: for ever
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &(struct timeval){wait_us / 1000000, wait_us % 1000000}, sizeof(struct timeval));
    int error = connect(fd, to->ai_addr, to->ai_addrlen) == 0 ? 0 : errno == EINPROGRESS ? ETIMEDOUT : errno;
    struct sockaddr_storage here = {0}, there = {0};
    socklen_t length = sizeof here, other = sizeof there;
    if (!error && getsockname(fd, (struct sockaddr *)&here, &length) == 0 &&
        getpeername(fd, (struct sockaddr *)&there, &other) == 0 && memcmp(&here, &there, sizeof here) == 0) {
        // Nobody listens, and the system gave this end the very port that it connects to: the socket is connected to itself.
        struct linger none = {.l_onoff = 1}; // so that rank 0 finds its port free
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof none);
        error = ECONNREFUSED;
    }
    if (!error) return fd;
    close(fd);
    errno = error;
    return -1;
}

// Returns NULL if rank 0 has accepted this rank, otherwise why it has not, so far.
static const char *shake_hands(sockets *s, int fd, double deadline_s) {
    connection *c = &s->connection[0];
    head heard;
    char said[REASON_LENGTH];
    hello h = {.rank = s->base.rank, .size = s->base.size};
    *c = (connection){.fd = fd, .key = s->secret};
    cf_random(&h.random, sizeof h.random);
    if (gethostname(h.host, sizeof h.host - 1) != 0) snprintf(h.host, sizeof h.host, "unknown");
    keep_alive(fd);
    outcome how = receive_frame(c, &heard, said, sizeof said, deadline_s);
    if (how == WHOLE && heard.kind == CHALLENGE && heard.bytes == sizeof(cf_mac))
        how = send_frame(s, c, HELLO, &h, sizeof h, deadline_s) ? receive_frame(c, &heard, said, sizeof said, deadline_s) : CLOSED;
    if (how == WHOLE && heard.kind == REPLY && heard.bytes == 1) return NULL; // an empty reason
    if (how == WHOLE && heard.kind == REPLY)
        cf_die("give every process a RANK of its own from 0 to WORLD_SIZE - 1, and all the same WORLD_SIZE",
               "rank 0 at %s port %s refuses rank %d: %.*s", s->address, s->port, s->base.rank, (int)heard.bytes, said);
    if (how == WHOLE || how == TOO_LONG || how == FALSE_FRAME)
        cf_die("choose another MASTER_PORT, or give all ranks the same COMMFUSE_SECRET",
               "%s port %s answers, but is not rank 0 of this program, or it has another COMMFUSE_SECRET", s->address, s->port);
    close(fd);
    c->fd = -1;
    return how == CLOSED ? "it closes the connection" : "it accepts the connection and sends nothing";
}

static void join_rank_0(sockets *s, double deadline_s) {
    struct addrinfo want = {.ai_socktype = SOCK_STREAM}, *found = NULL;
    const char *why = "no answer";
    do { // a name, too, may be unknown until that host is up
        int error = getaddrinfo(s->address, s->port, &want, &found);
        if (error) why = gai_strerror(error);
        for (struct addrinfo *to = error ? NULL : found; why && to; to = to->ai_next) {
            int fd = connect_to(to, deadline_s);
            why = fd < 0 ? strerror(errno) : shake_hands(s, fd, deadline_s);
        }
        if (!error) freeaddrinfo(found);
        if (!why) return;
        poll(NULL, 0, RETRY_MS);
    } while (now_s() < deadline_s);
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
        if (s->connection[i].fd >= 0) close(s->connection[i].fd);
    free(s->connection);
    free(s->polled);
    free(s);
}

cf_bootstrap *cf_bootstrap_sockets(int rank, int size, const char *address, int port, double timeout_s) {
    sockets *s = cf_host_alloc(1, sizeof *s, "the start");
    s->base = (cf_bootstrap){.name = size > 1 ? "sockets" : "alone",
                             .rank = rank,
                             .size = size,
                             .timeout_s = timeout_s,
                             .allgather = allgather,
                             .close = close_sockets};
    s->ranks = rank == 0 ? size : 1;
    s->strangers_end = rank == 0 && size > 1 ? 2 * size + STRANGERS_MAX : s->ranks;
    const int connections = s->strangers_end + LISTENERS_MAX;
    s->connection = cf_host_alloc(connections, sizeof *s->connection, "connections");
    s->polled = cf_host_alloc(connections, sizeof *s->polled, "connections");
    for (int i = 0; i < connections; i++) s->connection[i].fd = -1;
    pthread_mutex_init(&s->busy, NULL);
    if (size > 1) {
        s->secret = cf_secret();
        s->address = address;
        snprintf(s->port, sizeof s->port, "%d", port);
        of_process = s;
        cf_die_setup(rank, size, abort_all);
        cf_limits_more_files(); // for connections, and what libraries open later
        (rank == 0 ? accept_ranks : join_rank_0)(s, deadline_of(s, 0));
        if (pthread_create(&s->thread, NULL, watch_connections, s) != 0)
            cf_die(NULL, "cannot start the thread that watches connections");
    }
    cf_bootstrap_find_neighbours(&s->base);
    return &s->base;
}
