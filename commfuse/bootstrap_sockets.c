// Ranks that meet over TCP, on a star. See bootstrap.h.
//
// Rank 0 listens at MASTER_ADDR; every other rank connects, again and again until it is there. Everything is a frame: a
// head, a payload, and a code of both (secret.h).
//
//   CHALLENGE  from rank 0: random bytes            made with the secret
//   HELLO      random bytes, rank, size, host       made with a key of the secret and the challenge
//   REPLY      from rank 0: you are in, or why not  from here on: with a key of the secret and both
//   DATA       what a rank gives to an allgather; from rank 0: what all gave
//   LOST       from rank 0: that rank is gone, and so am I in a moment
//   GOODBYE    at the orderly end, all to rank 0 and then rank 0 to all: the connection may close now
//
// So each side proves that it knows the secret, to the other's random bytes, and no frame can be changed, repeated or
// put elsewhere. Nobody receives more than was made room for. Nothing is encrypted.
//
// Strangers, who have connected and not said hello, can neither end nor hold up anything: they go after some seconds, the
// oldest when there are many, and a rank that went with them connects again.
//
// Later one thread looks whose connection breaks without a goodbye, so that it is noticed at once, whatever the compute
// thread does meanwhile, be it inside a call that never returns; it then ends this rank, and rank 0 ends all others.
// Computers that vanish without a word are noticed by TCP's keep-alive.
#define _GNU_SOURCE
#include "bootstrap.h"
#include "device.h"
#include "die.h"
#include "printable.h"
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
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    CHALLENGE = 1,
    HELLO,
    REPLY,
    DATA,
    LOST,
    GOODBYE,
    HOST_LENGTH = 64,
    REASON_LENGTH = 256,
    LISTENERS_MAX = 8,
    STRANGERS_MAX = 128, // beside as many as there are ranks
    STRANGER_S = 5,      // until a stranger must have said hello
    NOTES_MAX = 8,       // about strangers
    ACCEPTS = 16,        // strangers let in before the others are heard again
    OWN_FILES = 64,      // descriptors for all but connections
    RETRY_MS = 100,
    CONNECT_S = 5,
    LAST_WORDS_S = 5 // rank 0 gives up first: it knows who is missing
};
static const uint32_t MAGIC = 0xCF0B0077;

typedef struct head {
    uint32_t magic, kind;
    int32_t from;    // rank; LOST: the one that is gone
    uint32_t number; // of the frames that this end has sent on this connection
    int64_t bytes;   // of payload
} head;

typedef struct hello {
    cf_mac random;
    int32_t rank, size;
    char host[HOST_LENGTH];
} hello;

typedef struct line {        // a connection
    int fd;                  // -1: none
    uint32_t sent, received; // frames
    cf_mac key;
    char host[HOST_LENGTH];
    double since_s; // when a stranger came
} line;

typedef struct sockets {
    cf_bootstrap base;
    cf_mac secret;
    const char *address; // of rank 0
    char port[16];
    line *line;          // rank 0's: (lines) to all ranks, the first unused, strangers up to `places`, then listeners
    struct pollfd *look; // (places + LISTENERS_MAX)
    int lines, places, joined, listeners, notes;
    bool open; // a listener is not the loopback's
    pthread_t thread;
    pthread_mutex_t busy; // rank 0: a frame is being sent; others: or received
} sockets;

static sockets *of_process; // for the abort hook, which has no argument
static int32_t lost_rank;   // on a star only rank 0 sees who is gone: the others learn it before it leaves

static double now_s(void) {
    return cf_now_ms() * 1e-3;
}

static double deadline_of(const sockets *s, double more_s) {
    return s->base.timeout_s > 0 ? now_s() + s->base.timeout_s + more_s : 1e300;
}

static void nap(void) {
    nanosleep(&(struct timespec){0, RETRY_MS * 1000000L}, NULL);
}

// --- frames ---

typedef enum { WHOLE, CLOSED, LATE, FALSE_FRAME } outcome;

// events: POLLOUT: they are sent; POLLIN: received.
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

static cf_mac code_of(const line *l, const head *h, const void *payload) {
    const cf_mac of_head = cf_mac_of(&l->key, h, sizeof *h);
    return cf_mac_of(&of_head, payload, (size_t)h->bytes);
}

// What both sides have said of themselves makes the key for what they say later.
static void change_key(line *l, const head *h, const void *payload) {
    if (h->kind == CHALLENGE || h->kind == HELLO) l->key = cf_mac_of(&l->key, payload, (size_t)h->bytes);
}

static bool send_frame(const sockets *s, line *l, uint32_t kind, const void *payload, int64_t bytes, double deadline_s) {
    head h = {MAGIC, kind, kind == LOST ? lost_rank : s->base.rank, l->sent++, bytes};
    cf_mac code = code_of(l, &h, payload);
    change_key(l, &h, payload);
    return move_all(l->fd, &h, sizeof h, POLLOUT, deadline_s) == WHOLE &&
           move_all(l->fd, (void *)payload, bytes, POLLOUT, deadline_s) == WHOLE &&
           move_all(l->fd, &code, sizeof code, POLLOUT, deadline_s) == WHOLE;
}

// WHOLE: or there are more bytes than there is room for, and only the head has been received.
static outcome receive_frame(line *l, head *h, void *payload, int64_t room, double deadline_s) {
    cf_mac said;
    outcome how = move_all(l->fd, h, sizeof *h, POLLIN, deadline_s);
    if (how == WHOLE && (h->magic != MAGIC || h->number != l->received || h->bytes < 0)) return FALSE_FRAME;
    if (how != WHOLE || h->bytes > room) return how;
    how = move_all(l->fd, payload, h->bytes, POLLIN, deadline_s);
    if (how == WHOLE) how = move_all(l->fd, &said, sizeof said, POLLIN, deadline_s);
    if (how != WHOLE) return how;
    const cf_mac is = code_of(l, h, payload);
    change_key(l, h, payload);
    l->received++;
    return cf_mac_equal(&is, &said) ? WHOLE : FALSE_FRAME;
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

// --- somebody is gone ---

static void abort_all(int status) {
    (void)status;
    cf_watch_farewell();
    sockets *s = of_process;
    bool may_send = s->base.rank == 0 && pthread_mutex_trylock(&s->busy) == 0; // no frame is half sent
    for (int i = 0; i < s->lines; i++) {
        if (s->line[i].fd < 0) continue;
        if (may_send) send_frame(s, &s->line[i], LOST, "", 0, 0);
        shutdown(s->line[i].fd, SHUT_WR);
    }
}

CF_NORETURN static void lost(const sockets *s, int rank) {
    const char *host = s->base.rank == 0 ? s->line[rank].host : "";
    lost_rank = rank;
    if (rank == 0) { // perhaps because of an error that this rank is about to find, too
        nap();
        cf_die_heard();
    }
    cf_die("see the messages of that rank: it has ended, was killed, or its host is gone",
           "rank %d%s%s%s is gone; rank %d cannot go on without it", rank, *host ? " (" : "", host, *host ? ")" : "", s->base.rank);
}

// --- what ranks give each other ---

static void expect(sockets *s, int from, uint32_t kind, void *to, int64_t bytes, double deadline_s) {
    head h;
    outcome how = receive_frame(&s->line[from], &h, to, bytes, deadline_s);
    if (how == WHOLE && h.kind == LOST && from == 0 && h.from >= 0 && h.from < s->base.size) lost(s, h.from);
    if (how == CLOSED) lost(s, from);
    if (how == LATE)
        cf_die("that rank may be frozen or slow; see its messages, or allow more time with --timeout",
               "rank %d waits for rank %d at start or end of the run; nothing came for %g s", s->base.rank, from,
               s->base.timeout_s);
    if (how == FALSE_FRAME || h.from != from)
        cf_die("was something changed on the way? which other programs use MASTER_PORT?",
               "what comes from rank %d is no frame of this run", from);
    if (h.kind != kind || h.bytes != bytes)
        cf_die("start the same program with the same options on every rank",
               "rank %d gives %lld bytes (kind %u) where rank %d expects %lld (kind %u)", from, (long long)h.bytes, h.kind,
               s->base.rank, (long long)bytes, kind);
}

static void send_to(sockets *s, int to, uint32_t kind, const void *from, int64_t bytes, double deadline_s) {
    pthread_mutex_lock(&s->busy);
    bool sent = send_frame(s, &s->line[to], kind, from, bytes, deadline_s);
    pthread_mutex_unlock(&s->busy);
    if (!sent) lost(s, to);
}

// Rank 0 has what all give, then the others do.
static void exchange(sockets *s, uint32_t kind, const void *mine, void *all, int64_t bytes) {
    const int64_t whole = bytes * s->base.size;
    const double deadline_s = deadline_of(s, s->base.rank ? LAST_WORDS_S : 0);
    if (s->base.rank != 0) {
        send_to(s, 0, kind, mine, bytes, deadline_s);
        pthread_mutex_lock(&s->busy);
        expect(s, 0, kind, all, whole, deadline_s);
        pthread_mutex_unlock(&s->busy);
        return;
    }
    for (int i = 1; i < s->lines; i++) expect(s, i, kind, (char *)all + i * bytes, bytes, deadline_s);
    memcpy(all, mine, (size_t)bytes);
    for (int i = 1; i < s->lines; i++) send_to(s, i, kind, all, whole, deadline_of(s, 0));
}

static void allgather_sockets(cf_bootstrap *b, const void *mine, void *all, int64_t bytes) {
    exchange((sockets *)b, DATA, mine, all, bytes);
}

static void *notice_who_goes(void *argument) {
    sockets *s = (sockets *)argument;
    for (int i = 0; i < s->lines; i++) s->look[i] = (struct pollfd){.fd = s->line[i].fd, .events = POLLRDHUP};
    while (poll(s->look, (nfds_t)s->lines, -1) <= 0) {} // here close_sockets() may end it
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    for (int i = 0; s->base.rank == 0 && i < s->lines; i++)
        if (s->look[i].revents) lost(s, i);
    // Rank 0's last word may be who is gone. Where the other thread listens to it, that one hears it.
    pthread_mutex_lock(&s->busy);
    expect(s, 0, LOST, NULL, 0, 0);
    return NULL;
}

// --- strangers, at rank 0 ---

static void send_away(sockets *s, line *l, const char *why) { // NULL: not worth a note
    struct sockaddr_storage from;
    socklen_t length = sizeof from;
    char host[64];
    if (why && ++s->notes <= NOTES_MAX && getpeername(l->fd, (struct sockaddr *)&from, &length) == 0 &&
        getnameinfo((struct sockaddr *)&from, length, host, sizeof host, NULL, 0, NI_NUMERICHOST) == 0)
        fprintf(stderr, "note: rank 0 has closed a connection from %s: %s%s\n", host, why,
                s->notes == NOTES_MAX ? " (no more of these notes)" : "");
    close(l->fd);
    l->fd = -1;
}

// Why this process is no rank of this run; "": it is.
static void check_hello(const sockets *s, const hello *said, char reason[REASON_LENGTH]) {
    *reason = 0;
    if (said->size != s->base.size)
        snprintf(reason, REASON_LENGTH, "a process on %s is rank %d of %d; this run has %d ranks (is another run using this port?)",
                 said->host, said->rank, said->size, s->base.size);
    else if (said->rank <= 0 || said->rank >= s->base.size)
        snprintf(reason, REASON_LENGTH, "a process on %s is rank %d of %d", said->host, said->rank, said->size);
    else if (s->line[said->rank].fd >= 0)
        snprintf(reason, REASON_LENGTH, "two processes are rank %d: one on %s, one on %s", said->rank, s->line[said->rank].host,
                 said->host);
}

// A stranger speaks when as many bytes as a hello has are here, or when it has hung up: the kernel keeps less back.
static void hear_stranger(sockets *s, line *l) {
    head h;
    hello said;
    char reason[REASON_LENGTH] = "what it says is no hello with this run's COMMFUSE_SECRET";
    outcome how = receive_frame(l, &h, &said, sizeof said, 0);
    bool joins = how == WHOLE && h.kind == HELLO && h.bytes == sizeof said;
    if (joins) {
        said.host[HOST_LENGTH - 1] = 0;
        memcpy(l->host, cf_printable(said.host), sizeof l->host);
        check_hello(s, &said, reason);
        joins = send_frame(s, l, REPLY, reason, (int64_t)strlen(reason) + 1, 0) && !*reason;
    }
    if (joins) {
        set(l->fd, SOL_SOCKET, SO_RCVLOWAT, 1);
        s->line[said.rank] = *l;
        s->joined++;
        l->fd = -1;
    } else {
        send_away(s, l, how == CLOSED || !*reason ? NULL : reason);
    }
}

static void accept_strangers(sockets *s, int listener) {
    for (int i = 0; i < ACCEPTS; i++) {
        line *place = NULL, *oldest = NULL;
        for (line *l = s->line + s->lines; l < s->line + s->places; l++) {
            if (l->fd < 0)
                place = l;
            else if (!oldest || l->since_s < oldest->since_s)
                oldest = l;
        }
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0) return;
        if (!place) send_away(s, place = oldest, "others have come, and it has said no hello");
        *place = (line){.fd = fd, .key = s->secret, .since_s = now_s()};
        cf_mac random;
        cf_random(&random, sizeof random);
        keep_alive(fd);
        set(fd, SOL_SOCKET, SO_RCVLOWAT, (int)(sizeof(head) + sizeof(hello) + sizeof(cf_mac)));
        if (!send_frame(s, place, CHALLENGE, &random, sizeof random, 0)) send_away(s, place, NULL);
    }
}

// --- how rank 0 is met ---

static bool is_loopback(const struct sockaddr *address) {
    if (address->sa_family == AF_INET6)
        return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)(const void *)address)->sin6_addr);
    return ntohl(((const struct sockaddr_in *)(const void *)address)->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
}

// At all addresses of that name which are this host's; NULL: at every one that it has.
static void listen_at(sockets *s, const char *address) {
    struct addrinfo want = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *found = NULL;
    int error = getaddrinfo(address, s->port, &want, &found);
    // Some systems give a host's own name an address of the loopback, which is not where other hosts look for it.
    bool is_name = address && strcmp(address, "localhost") != 0 && strspn(address, "0123456789abcdefABCDEF.:") < strlen(address);
    if (error && !address) cf_die("MASTER_PORT is a port number", "port %s: %s", s->port, gai_strerror(error));
    for (struct addrinfo *at = error ? NULL : found; at && s->listeners < LISTENERS_MAX; at = at->ai_next) {
        if (is_name && is_loopback(at->ai_addr)) continue;
        int fd = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0 && errno == EAFNOSUPPORT) continue;
        set(fd, SOL_SOCKET, SO_REUSEADDR, 1);
        if (at->ai_family == AF_INET6) set(fd, IPPROTO_IPV6, IPV6_V6ONLY, 1);
        if (fd >= 0 && bind(fd, at->ai_addr, at->ai_addrlen) == 0 && listen(fd, SOMAXCONN) == 0) {
            s->line[s->places + s->listeners++].fd = fd;
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

CF_NORETURN static void not_all_here(const sockets *s) {
    const int missing = s->lines - s->joined;
    char list[128] = "";
    size_t length = 0;
    int named = 0;
    for (int i = 1; i < s->lines && length < sizeof list - 16; i++)
        if (s->line[i].fd < 0) length += (size_t)snprintf(list + length, 16, "%s%d", named++ > 0 ? ", " : "", i);
    cf_die("were they started? do their MASTER_ADDR and MASTER_PORT lead here? or allow more time with --timeout",
           "%d of %d ranks have not connected to port %s within %g s: rank %s%s", missing, s->lines, s->port, s->base.timeout_s,
           list, named < missing ? ", …" : "");
}

// Open files for all ranks, and for as many strangers as may be.
static void make_room(sockets *s) {
    const rlim_t wanted = (rlim_t)s->places + OWN_FILES;
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= wanted) return;
    limit.rlim_cur = wanted < limit.rlim_max ? wanted : limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    s->places = (int)limit.rlim_cur - OWN_FILES;
    if (s->places <= s->lines)
        cf_die("allow more before the start: ulimit -n 65536", "rank 0 of %d needs more open files than ulimit -n allows (%llu)",
               s->lines, (unsigned long long)limit.rlim_cur);
}

// Rank 0, until all others have joined. Who has joined is looked at too: the run ends when such a rank is gone.
static void meet_all(sockets *s, double deadline_s) {
    make_room(s);
    const int looks = s->places + LISTENERS_MAX;
    listen_at(s, s->address);
    if (s->listeners == 0) listen_at(s, NULL);
    if (s->open && !cf_secret_given())
        fprintf(stderr,
                "note: ranks meet at %s port %s without COMMFUSE_SECRET: anybody who reaches that port can "
                "join this run; give all ranks the same one, such as openssl rand -hex 32 makes\n",
                s->address, s->port);
    for (s->joined = 1; s->joined < s->lines;) {
        const double begin_s = now_s();
        if (begin_s > deadline_s) not_all_here(s);
        for (int i = 0; i < looks; i++) // of those without a descriptor poll() says nothing
            s->look[i] = (struct pollfd){.fd = s->line[i].fd, .events = i < s->lines ? POLLRDHUP : POLLIN};
        poll(s->look, (nfds_t)looks, RETRY_MS);
        for (int i = 0; i < looks; i++) {
            line *l = &s->line[i];
            if (s->look[i].revents && i < s->lines)
                lost(s, i);
            else if (s->look[i].revents && i < s->places)
                hear_stranger(s, l);
            else if (s->look[i].revents)
                accept_strangers(s, l->fd);
            else if (i >= s->lines && i < s->places && l->fd >= 0 && begin_s - l->since_s > STRANGER_S)
                send_away(s, l, "it has said no hello");
        }
    }
    for (int i = s->lines; i < looks; i++)
        if (s->line[i].fd >= 0) send_away(s, &s->line[i], NULL);
}

// -1: errno says why.
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
        // Nobody listens, and this end was given the very port that it asks for: the socket has met itself.
        struct linger none = {.l_onoff = 1}; // so that rank 0 finds its port free
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof none);
        error = ECONNREFUSED;
    }
    if (!error) return fd;
    close(fd);
    errno = error;
    return -1;
}

// NULL: rank 0 has let this rank in; otherwise why it has not, so far.
static const char *shake_hands(sockets *s, int fd, double deadline_s) {
    line *l = &s->line[0];
    head heard;
    char said[REASON_LENGTH];
    hello h = {.rank = s->base.rank, .size = s->base.size};
    *l = (line){.fd = fd, .key = s->secret};
    cf_random(&h.random, sizeof h.random);
    if (gethostname(h.host, sizeof h.host - 1) != 0) snprintf(h.host, sizeof h.host, "unknown");
    keep_alive(fd);
    outcome how = receive_frame(l, &heard, said, sizeof said, deadline_s);
    if (how == WHOLE && heard.kind == CHALLENGE)
        how = send_frame(s, l, HELLO, &h, sizeof h, deadline_s) ? receive_frame(l, &heard, said, sizeof said, deadline_s) : CLOSED;
    if (how == WHOLE && heard.kind == REPLY && heard.bytes == 1) return NULL; // no reason why not
    if (how == WHOLE && heard.kind == REPLY && heard.bytes <= REASON_LENGTH)
        cf_die("give every process a RANK of its own from 0 to WORLD_SIZE - 1, and all the same WORLD_SIZE",
               "rank 0 at %s port %s refuses rank %d: %.*s", s->address, s->port, s->base.rank, (int)heard.bytes, said);
    if (how == WHOLE || how == FALSE_FRAME)
        cf_die("choose another MASTER_PORT, or give all ranks the same COMMFUSE_SECRET",
               "%s port %s answers, but is not rank 0 of this program, or it has another COMMFUSE_SECRET", s->address, s->port);
    close(fd);
    l->fd = -1;
    return how == CLOSED ? "it closes the connection" : "it takes the connection and says nothing";
}

static void join_rank_0(sockets *s, double deadline_s) {
    struct addrinfo want = {.ai_socktype = SOCK_STREAM}, *found = NULL;
    const char *why = "no answer";
    do { // names may be unknown, too, until that host is up
        int error = getaddrinfo(s->address, s->port, &want, &found);
        if (error) why = gai_strerror(error);
        for (struct addrinfo *to = error ? NULL : found; why && to; to = to->ai_next) {
            int fd = connect_to(to, deadline_s);
            why = fd < 0 ? strerror(errno) : shake_hands(s, fd, deadline_s);
        }
        if (!error) freeaddrinfo(found);
        if (!why) return;
        nap();
    } while (now_s() < deadline_s);
    cf_die("was rank 0 started there? can this host reach it? or allow more time with --timeout",
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
    exchange(s, GOODBYE, "", &nothing, 0);
    cf_die_setup(b->rank, b->size, NULL);
    for (int i = 0; i < s->lines; i++)
        if (s->line[i].fd >= 0) close(s->line[i].fd);
    free(s->line);
    free(s->look);
    free(s);
}

cf_bootstrap *cf_bootstrap_sockets(int rank, int size, const char *address, int port, double timeout_s) {
    sockets *s = cf_host_alloc(1, sizeof *s, "the start");
    const int lines = rank == 0 ? size : 1, places = rank == 0 && size > 1 ? 2 * size + STRANGERS_MAX : lines;
    s->line = cf_host_alloc(places + LISTENERS_MAX, sizeof *s->line, "connections");
    s->look = cf_host_alloc(places + LISTENERS_MAX, sizeof *s->look, "connections");
    s->base = (cf_bootstrap){.name = size > 1 ? "sockets" : "alone",
                             .rank = rank,
                             .size = size,
                             .timeout_s = timeout_s,
                             .allgather = allgather_sockets,
                             .close = close_sockets};
    s->lines = lines;
    s->places = places;
    for (int i = 0; i < places + LISTENERS_MAX; i++) s->line[i].fd = -1;
    pthread_mutex_init(&s->busy, NULL);
    if (size > 1) {
        s->secret = cf_secret();
        s->address = address;
        snprintf(s->port, sizeof s->port, "%d", port);
        of_process = s;
        cf_die_setup(rank, size, abort_all);
        (rank == 0 ? meet_all : join_rank_0)(s, deadline_of(s, 0));
        if (pthread_create(&s->thread, NULL, notice_who_goes, s) != 0)
            cf_die(NULL, "cannot start the thread that notices who goes");
    }
    cf_bootstrap_find_neighbours(&s->base);
    return &s->base;
}
