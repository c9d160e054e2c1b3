// Ranks that meet over TCP, on a star. See bootstrap.h.
//
// Rank 0 listens at MASTER_ADDR; every other rank connects, again and again until it is there. Everything is a frame: a
// head, a payload, and the codes of both (secret.h).
//
//   CHALLENGE  from rank 0: random bytes            made with the secret
//   HELLO      random bytes, rank, size, host       made with a key of the secret and the challenge
//   REPLY      from rank 0: you are in, or why not  from here on: with a key of the secret and both
//   DATA       what a rank gives to an allgather; from rank 0: what all gave
//   LOST       from rank 0: that rank is gone, and so am I in a moment
//   GOODBYE    at the orderly end, all to rank 0 and then rank 0 to all: the connection may close now
//
// So each side proves that it knows the secret, to the other's own random bytes, and no frame can be changed, repeated or
// put elsewhere. A head is checked before there is memory for its payload. Nothing is encrypted.
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
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
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
    STRANGERS_MAX = 128, // beside as many as there are ranks to come
    STRANGER_S = 5,      // until a stranger must have said hello
    ACCEPTS = 16,        // strangers let in before the others are heard again
    NOTES_MAX = 8,       // about strangers
    OWN_FILES = 32,      // descriptors for all else
    RETRY_MS = 100,
    CONNECT_S = 5,
    LAST_WORDS_S = 5 // rank 0 gives up first: it knows who is missing
};
static const uint32_t MAGIC = 0xCF0B0076;
static const int64_t BYTES_MAX = 1 << 28; // of what rank 0 sends

typedef struct head {
    uint32_t magic, kind;
    int32_t from;       // rank; LOST: the one that is gone
    uint32_t number;    // of the frames that this end has sent on this connection
    int64_t bytes;      // of payload
    cf_mac payload, is; // codes: of the payload, of all above
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
    int lines;             // rank 0: one for each rank, the own one unused; others: rank 0 alone
    line *line, *stranger; // strangers in the order in which they came
    struct pollfd *look;   // at the lines, then at strangers and listeners
    int listener[LISTENERS_MAX], joined, strangers, listeners, notes;
    bool open; // a listener is not the loopback's
    pthread_t thread;
    pthread_mutex_t busy; // rank 0: a frame is being sent; others: or received
} sockets;

static sockets *of_process; // for the abort hook, which has no argument
static int32_t lost_rank;   // on a star only rank 0 sees who is gone: it tells the others before it leaves

// --- time ---

static double now_s(void) {
    return cf_now_ms() * 1e-3;
}

static double deadline_of(const sockets *s, double more_s) {
    return s->base.timeout_s > 0 ? now_s() + s->base.timeout_s + more_s : 1e300;
}

static void nap(void) {
    nanosleep(&(struct timespec){0, RETRY_MS * 1000000L}, NULL);
}

// Until the descriptor is ready or the deadline has passed; false: that.
static bool ready(int fd, short events, double deadline_s) {
    for (;;) {
        double left_s = deadline_s - now_s();
        struct pollfd look = {.fd = fd, .events = events};
        int found = poll(&look, 1, left_s <= 0 ? 0 : left_s < 60 ? (int)(left_s * 1e3) + 1 : 60000);
        if (found > 0 || left_s <= 0) return found > 0;
    }
}

// --- frames ---

typedef enum { WHOLE, CLOSED, LATE, FALSE_FRAME } outcome;

// events: POLLOUT: they are sent; POLLIN: received.
static outcome move_all(int fd, void *data, int64_t bytes, short events, double deadline_s) {
    for (char *at = (char *)data; bytes > 0;) {
        ssize_t moved = events == POLLIN ? recv(fd, at, (size_t)bytes, MSG_DONTWAIT)
                                         : send(fd, at, (size_t)bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (moved > 0)
            at += moved, bytes -= moved;
        else if (moved == 0 || (errno != EAGAIN && errno != EINTR))
            return CLOSED;
        else if (!ready(fd, events, deadline_s))
            return LATE;
    }
    return WHOLE;
}

// What both sides have said of themselves makes the key for what they say later.
static void change_key(line *l, uint32_t kind, const void *payload, int64_t bytes) {
    if (kind == CHALLENGE || kind == HELLO) l->key = cf_mac_of(&l->key, payload, (size_t)bytes);
}

static bool send_frame(const sockets *s, line *l, uint32_t kind, const void *payload, int64_t bytes,
                       double deadline_s) {
    int32_t from = kind == LOST ? lost_rank : s->base.rank;
    head h = {MAGIC, kind, from, l->sent++, bytes, cf_mac_of(&l->key, payload, (size_t)bytes), {{0}}};
    h.is = cf_mac_of(&l->key, &h, offsetof(head, is));
    change_key(l, kind, payload, bytes);
    return move_all(l->fd, &h, sizeof h, POLLOUT, deadline_s) == WHOLE &&
           move_all(l->fd, (void *)payload, bytes, POLLOUT, deadline_s) == WHOLE;
}

static bool is_sound(const line *l, const head *h) {
    cf_mac is = cf_mac_of(&l->key, h, offsetof(head, is));
    return cf_mac_equal(&is, &h->is) && h->magic == MAGIC && h->number == l->received && h->bytes >= 0;
}

// After its head.
static bool is_its_payload(line *l, const head *h, const void *payload) {
    cf_mac is = cf_mac_of(&l->key, payload, (size_t)h->bytes);
    change_key(l, h->kind, payload, h->bytes);
    l->received++;
    return cf_mac_equal(&is, &h->payload);
}

// WHOLE: or there are more bytes than there is room for, and only the head has been received.
static outcome receive_frame(line *l, head *h, void *payload, int64_t room, double deadline_s) {
    outcome how = move_all(l->fd, h, sizeof *h, POLLIN, deadline_s);
    if (how == WHOLE && !is_sound(l, h)) how = FALSE_FRAME;
    if (how != WHOLE || h->bytes > room) return how;
    how = move_all(l->fd, payload, h->bytes, POLLIN, deadline_s);
    return how == WHOLE && !is_its_payload(l, h, payload) ? FALSE_FRAME : how;
}

// --- sockets ---

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
    bool tells = s->base.rank == 0 && pthread_mutex_trylock(&s->busy) == 0; // no frame is half sent
    for (int i = 0; i < s->lines; i++) {
        if (s->line[i].fd < 0) continue;
        if (tells) send_frame(s, &s->line[i], LOST, "", 0, 0);
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
           "rank %d%s%s%s is gone; rank %d cannot go on without it", rank, *host ? " (" : "", host,
           *host ? ")" : "", s->base.rank);
}

// --- what ranks give each other ---

static void take(sockets *s, int from, uint32_t kind, void *to, int64_t bytes, double deadline_s) {
    head h;
    outcome how = receive_frame(&s->line[from], &h, to, bytes, deadline_s);
    if (how == WHOLE && h.kind == LOST && from == 0 && h.from >= 0 && h.from < s->base.size) lost(s, h.from);
    if (how == CLOSED) lost(s, from);
    if (how == LATE)
        cf_die("that rank may be frozen or slow; see its messages, or allow more time with --timeout",
               "rank %d waits for rank %d at start or end of the run; nothing came for %g s", s->base.rank,
               from, s->base.timeout_s);
    if (how == FALSE_FRAME || h.from != from)
        cf_die("was something changed on the way? which other programs use MASTER_PORT?",
               "what comes from rank %d is no frame of this run", from);
    if (h.kind != kind || h.bytes != bytes)
        cf_die("start the same program with the same options on every rank",
               "rank %d gives %lld bytes (kind %u) where rank %d expects %lld (kind %u)", from,
               (long long)h.bytes, h.kind, s->base.rank, (long long)bytes, kind);
}

static void give(sockets *s, int to, uint32_t kind, const void *from, int64_t bytes, double deadline_s) {
    pthread_mutex_lock(&s->busy);
    bool sent = send_frame(s, &s->line[to], kind, from, bytes, deadline_s);
    pthread_mutex_unlock(&s->busy);
    if (!sent) lost(s, to);
}

static void collect(sockets *s, uint32_t kind, const void *mine, void *all, int64_t bytes) {
    double deadline_s = deadline_of(s, s->base.rank ? LAST_WORDS_S : 0);
    if (s->base.rank != 0) give(s, 0, kind, mine, bytes, deadline_s);
    for (int i = 1; i < s->lines; i++) take(s, i, kind, (char *)all + i * bytes, bytes, deadline_s);
    if (s->base.rank == 0) memcpy(all, mine, (size_t)bytes);
}

static void distribute(sockets *s, uint32_t kind, void *all, int64_t bytes) {
    double deadline_s = deadline_of(s, s->base.rank ? LAST_WORDS_S : 0);
    for (int i = 1; i < s->lines; i++) give(s, i, kind, all, bytes * s->base.size, deadline_s);
    if (s->base.rank == 0) return;
    pthread_mutex_lock(&s->busy);
    take(s, 0, kind, all, bytes * s->base.size, deadline_s);
    pthread_mutex_unlock(&s->busy);
}

static void allgather_sockets(cf_bootstrap *b, const void *mine, void *all, int64_t bytes) {
    sockets *s = (sockets *)b;
    if (bytes < 0 || bytes > BYTES_MAX / b->size)
        cf_die(NULL, "allgather of %lld bytes per rank at start", (long long)bytes);
    collect(s, DATA, mine, all, bytes);
    distribute(s, DATA, all, bytes);
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
    take(s, 0, LOST, NULL, 0, 0);
    return NULL;
}

// --- strangers, at rank 0 ---

static void forget(sockets *s, line *l) {
    memmove(l, l + 1, (size_t)(&s->stranger[s->strangers--] - (l + 1)) * sizeof *l);
}

// why NULL: not worth a note.
static void send_away(sockets *s, line *l, const char *why) {
    struct sockaddr_storage from;
    socklen_t length = sizeof from;
    char host[64] = "?", port[16] = "?";
    if (why && ++s->notes <= NOTES_MAX) {
        if (getpeername(l->fd, (struct sockaddr *)&from, &length) == 0)
            getnameinfo((struct sockaddr *)&from, length, host, sizeof host, port, sizeof port,
                        NI_NUMERICHOST | NI_NUMERICSERV);
        fprintf(stderr, "note: rank 0 has closed a connection from %s port %s: %s%s\n", host, port, why,
                s->notes == NOTES_MAX ? " (no more of these notes)" : "");
    }
    close(l->fd);
    forget(s, l);
}

// Why this process is no rank of this run; "": it is one.
static void refuse(const sockets *s, const hello *h, char reason[REASON_LENGTH]) {
    *reason = 0;
    if (h->size != s->base.size)
        snprintf(reason, REASON_LENGTH,
                 "a process on %s is rank %d of %d; this run has %d ranks (is another run using "
                 "this port?)",
                 h->host, h->rank, h->size, s->base.size);
    else if (h->rank <= 0 || h->rank >= s->base.size)
        snprintf(reason, REASON_LENGTH, "a process on %s is rank %d of %d", h->host, h->rank, h->size);
    else if (s->line[h->rank].fd >= 0)
        snprintf(reason, REASON_LENGTH, "two processes are rank %d: one on %s, one on %s", h->rank,
                 s->line[h->rank].host, h->host);
}

static void let_in(sockets *s, line *l, hello *h) {
    char reason[REASON_LENGTH];
    h->host[HOST_LENGTH - 1] = 0;
    memcpy(l->host, cf_printable(h->host), sizeof l->host);
    refuse(s, h, reason);
    if (!send_frame(s, l, REPLY, reason, (int64_t)strlen(reason) + 1, 0) || *reason) {
        send_away(s, l, *reason ? reason : NULL);
        return;
    }
    set(l->fd, SOL_SOCKET, SO_RCVLOWAT, 1);
    s->line[h->rank] = *l;
    s->joined++;
    forget(s, l);
}

// Who speaks has sent as much as a hello, or has hung up: the kernel keeps the rest back.
static void hear_stranger(sockets *s, line *l, bool speaks) {
    head h;
    hello said;
    if (!speaks) {
        if (now_s() - l->since_s > STRANGER_S) send_away(s, l, "it has said no hello");
        return;
    }
    outcome how = receive_frame(l, &h, &said, sizeof said, 0);
    if (how == WHOLE && h.kind == HELLO && h.bytes == sizeof said)
        let_in(s, l, &said);
    else
        send_away(s, l, how == CLOSED ? NULL : "what it says is no hello with this run's COMMFUSE_SECRET");
}

CF_NORETURN static void too_few_files(const sockets *s) {
    struct rlimit limit = {0, 0};
    getrlimit(RLIMIT_NOFILE, &limit);
    cf_die("allow more before the start: ulimit -n 65536",
           "rank %d of %d needs more open files than ulimit -n allows (%llu)", s->base.rank, s->base.size,
           (unsigned long long)limit.rlim_cur);
}

static void allow_files(rlim_t needed) {
    struct rlimit limit = {0, 0};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed) return;
    limit.rlim_cur = needed < limit.rlim_max ? needed : limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
}

static void accept_strangers(sockets *s, int listener) {
    for (int i = 0; i < ACCEPTS; i++) {
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        bool full = fd < 0 ? errno == EMFILE || errno == ENFILE
                           : s->strangers == s->lines - s->joined + STRANGERS_MAX;
        if (full && s->strangers == 0) too_few_files(s);
        if (full) send_away(s, s->stranger, "others have come, and it has said no hello");
        if (fd < 0) return;
        line *l = &s->stranger[s->strangers++];
        *l = (line){.fd = fd, .key = s->secret, .since_s = now_s()};
        cf_mac random;
        cf_random(&random, sizeof random);
        keep_alive(fd);
        set(fd, SOL_SOCKET, SO_RCVLOWAT, (int)(sizeof(head) + sizeof(hello)));
        if (!send_frame(s, l, CHALLENGE, &random, sizeof random, 0)) send_away(s, l, NULL);
    }
}

// --- how rank 0 is met ---

static int listener_at(const struct addrinfo *at) {
    int fd = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    set(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    if (at->ai_family == AF_INET6) set(fd, IPPROTO_IPV6, IPV6_V6ONLY, 1);
    if (bind(fd, at->ai_addr, at->ai_addrlen) == 0 && listen(fd, SOMAXCONN) == 0) return fd;
    int why = errno;
    close(fd);
    errno = why;
    return -1;
}

static bool is_loopback(const struct sockaddr *address) {
    if (address->sa_family == AF_INET6)
        return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)(const void *)address)->sin6_addr);
    return ntohl(((const struct sockaddr_in *)(const void *)address)->sin_addr.s_addr) >> 24 ==
           IN_LOOPBACKNET;
}

// Some systems give a host's own name an address of the loopback, which is not where other hosts look for it.
static bool is_where_others_look(const sockets *s, const struct addrinfo *at) {
    return !is_loopback(at->ai_addr) || strcmp(s->address, "localhost") == 0 ||
           strspn(s->address, "0123456789abcdefABCDEF.:") == strlen(s->address);
}

// At all addresses of that name which are this host's; NULL: at every one that it has.
static void listen_at(sockets *s, const char *address) {
    struct addrinfo want = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *found = NULL;
    int error = getaddrinfo(address, s->port, &want, &found);
    if (error && !address)
        cf_die("MASTER_PORT is a port number", "port %s: %s", s->port, gai_strerror(error));
    for (struct addrinfo *at = error ? NULL : found; at && s->listeners < LISTENERS_MAX; at = at->ai_next) {
        if (address && !is_where_others_look(s, at)) continue;
        int fd = listener_at(at);
        if (fd < 0 && (errno == EADDRNOTAVAIL || errno == EAFNOSUPPORT)) continue;
        if (fd < 0 && errno == EMFILE) too_few_files(s);
        if (fd < 0)
            cf_die(errno == EADDRINUSE ? "another run may be using it: choose another MASTER_PORT"
                                       : "choose another MASTER_PORT",
                   "rank 0 cannot listen on port %s: %s", s->port, strerror(errno));
        s->listener[s->listeners++] = fd;
        s->open |= !is_loopback(at->ai_addr);
    }
    if (!error) freeaddrinfo(found);
}

CF_NORETURN static void not_all_here(const sockets *s) {
    char list[256] = "";
    int missing = 0;
    size_t length = 0;
    for (int i = 1; i < s->base.size; i++) {
        if (s->line[i].fd >= 0) continue;
        if (missing++ < 16)
            length += (size_t)snprintf(list + length, sizeof list - length, "%s%d", length ? ", " : "", i);
    }
    cf_die("were they started? do their MASTER_ADDR and MASTER_PORT lead here? or allow more time with "
           "--timeout",
           "%d of %d ranks have not connected to port %s within %g s: rank %s%s", missing, s->base.size,
           s->port, s->base.timeout_s, list, missing > 16 ? ", …" : "");
}

static void open_doors(sockets *s) {
    allow_files((rlim_t)s->base.size + STRANGERS_MAX + OWN_FILES);
    listen_at(s, s->address);
    if (s->listeners == 0) listen_at(s, NULL);
    if (s->open && !cf_secret_given())
        fprintf(stderr,
                "note: ranks meet at %s port %s without COMMFUSE_SECRET: anybody who reaches that port can "
                "join this "
                "run; give all ranks the same one, such as openssl rand -hex 32 makes\n",
                s->address, s->port);
}

// Who has joined is looked at too: the run ends when such a rank is gone.
static void meet_all(sockets *s, double deadline_s) {
    for (s->joined = 1; s->joined < s->lines;) {
        int count = 0, strangers = s->strangers;
        if (now_s() > deadline_s) not_all_here(s);
        for (int i = 0; i < s->lines; i++) // poll() passes over negative ones
            s->look[count++] = (struct pollfd){.fd = s->line[i].fd, .events = POLLRDHUP};
        for (int i = 0; i < strangers; i++)
            s->look[count++] = (struct pollfd){.fd = s->stranger[i].fd, .events = POLLIN};
        for (int i = 0; i < s->listeners; i++)
            s->look[count++] = (struct pollfd){.fd = s->listener[i], .events = POLLIN};
        int found = poll(s->look, (nfds_t)count, RETRY_MS);
        if (found < 0 && errno == EINVAL) too_few_files(s); // to look at, let alone to have
        if (found < 0) continue;
        for (int i = 0; i < s->lines; i++)
            if (s->look[i].revents) lost(s, i);
        for (int i = strangers - 1; i >= 0; i--) // those behind one that goes move up
            hear_stranger(s, &s->stranger[i], s->look[s->lines + i].revents != 0);
        for (int i = 0; i < s->listeners; i++)
            if (s->look[s->lines + strangers + i].revents) accept_strangers(s, s->listener[i]);
    }
    while (s->strangers > 0) send_away(s, s->stranger, NULL);
    while (s->listeners > 0) close(s->listener[--s->listeners]);
}

// Nobody listens, and this end was given the very port that it asks for: the socket has met itself.
static bool met_itself(int fd) {
    struct sockaddr_storage here = {0}, there = {0};
    socklen_t length = sizeof here, other = sizeof there;
    return getsockname(fd, (struct sockaddr *)&here, &length) == 0 &&
           getpeername(fd, (struct sockaddr *)&there, &other) == 0 && length == other &&
           memcmp(&here, &there, length) == 0;
}

// -1: errno says why.
static int connect_to(const sockets *s, const struct addrinfo *to, double deadline_s) {
    int fd = socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), error = 0;
    if (fd < 0 && (errno == EMFILE || errno == ENFILE)) too_few_files(s);
    if (fd < 0) return -1;
    double soon_s = now_s() + CONNECT_S;
    socklen_t length = sizeof error;
    if (connect(fd, to->ai_addr, to->ai_addrlen) != 0) error = errno;
    if (error == EINPROGRESS && !ready(fd, POLLOUT, soon_s < deadline_s ? soon_s : deadline_s))
        error = ETIMEDOUT;
    else if (error == EINPROGRESS && getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0)
        error = errno;
    if (!error && met_itself(fd)) {
        struct linger none = {.l_onoff = 1}; // so that rank 0 finds its port free
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof none);
        error = ECONNREFUSED;
    }
    if (!error) return fd;
    close(fd);
    errno = error;
    return -1;
}

static void name_host(char *host) {
    memset(host, 0, HOST_LENGTH);
    if (gethostname(host, HOST_LENGTH - 1) != 0) memcpy(host, "unknown", 8);
}

// NULL: rank 0 has let this rank in; otherwise why it has not, so far.
static const char *shake_hands(sockets *s, int fd, double deadline_s) {
    line *l = &s->line[0];
    head heard;
    char said[REASON_LENGTH];
    hello h = {.rank = s->base.rank, .size = s->base.size};
    *l = (line){.fd = fd, .key = s->secret};
    cf_random(&h.random, sizeof h.random);
    name_host(h.host);
    keep_alive(fd);
    outcome how = receive_frame(l, &heard, said, sizeof said, deadline_s);
    if (how == WHOLE && heard.kind == CHALLENGE)
        how = send_frame(s, l, HELLO, &h, sizeof h, deadline_s)
                  ? receive_frame(l, &heard, said, sizeof said, deadline_s)
                  : CLOSED;
    if (how == WHOLE && heard.kind == REPLY && heard.bytes == 1) return NULL; // no reason why not
    if (how == WHOLE && heard.kind == REPLY && heard.bytes <= REASON_LENGTH)
        cf_die("give every process a RANK of its own from 0 to WORLD_SIZE - 1, and all the same WORLD_SIZE",
               "rank 0 at %s port %s refuses rank %d: %.*s", s->address, s->port, s->base.rank,
               (int)heard.bytes, said);
    if (how == WHOLE || how == FALSE_FRAME)
        cf_die("choose another MASTER_PORT, or give all ranks the same COMMFUSE_SECRET",
               "%s port %s answers, but is not rank 0 of this program, or it has another COMMFUSE_SECRET",
               s->address, s->port);
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
            int fd = connect_to(s, to, deadline_s);
            why = fd < 0 ? strerror(errno) : shake_hands(s, fd, deadline_s);
        }
        if (!error) freeaddrinfo(found);
        if (!why) return;
        nap();
    } while (now_s() < deadline_s);
    cf_die("was rank 0 started there? can this host reach it? or allow more time with --timeout",
           "rank %d cannot reach rank 0 at %s port %s within %g s: %s", s->base.rank, s->address, s->port,
           s->base.timeout_s, why);
}

// --- start and end ---

static void stop_noticing(sockets *s) {
    pthread_cancel(s->thread);
    pthread_join(s->thread, NULL);
}

// Rank 0 says goodbye when all others have, and they close when it has: until then who goes is noticed.
static void close_sockets(cf_bootstrap *b) {
    sockets *s = (sockets *)b;
    char nothing;
    if (b->rank != 0) stop_noticing(s);
    collect(s, GOODBYE, "", &nothing, 0);
    if (b->rank == 0) stop_noticing(s);
    distribute(s, GOODBYE, &nothing, 0);
    cf_die_setup(b->rank, b->size, NULL);
    for (int i = 0; i < s->lines; i++)
        if (s->line[i].fd >= 0) close(s->line[i].fd);
    free(s->line);
    free(s->look);
    free(s->stranger);
    free(s);
}

// Ranks of one host name are on one host.
static void count_neighbours(sockets *s) {
    cf_bootstrap *b = &s->base;
    char host[HOST_LENGTH];
    name_host(host);
    cf_mac name = cf_mac_of(&s->secret, host, sizeof host);
    uint64_t mine, *all = calloc((size_t)b->size, sizeof *all);
    if (!all) cf_die(NULL, "out of memory for the hosts of %d ranks", b->size);
    memcpy(&mine, name.bytes, sizeof mine);
    allgather_sockets(b, &mine, all, sizeof mine);
    b->local_size = 0;
    for (int i = 0; i < b->size; i++) {
        b->local_size += all[i] == mine;
        b->local_rank += all[i] == mine && i < b->rank;
    }
    free(all);
}

cf_bootstrap *cf_bootstrap_sockets(int rank, int size, const char *address, int port, double timeout_s) {
    sockets *s = calloc(1, sizeof *s);
    int lines = rank == 0 ? size : 1;
    size_t strangers = (size_t)lines + STRANGERS_MAX;
    if (!s || !(s->line = calloc((size_t)lines, sizeof *s->line)) ||
        !(s->stranger = calloc(strangers, sizeof *s->stranger)) ||
        !(s->look = calloc((size_t)lines + strangers + LISTENERS_MAX, sizeof *s->look)))
        cf_die(NULL, "out of memory for %d connections", lines);
    s->base = (cf_bootstrap){.name = "sockets",
                             .rank = rank,
                             .size = size,
                             .timeout_s = timeout_s,
                             .allgather = allgather_sockets,
                             .close = close_sockets};
    s->secret = cf_secret();
    s->address = address;
    snprintf(s->port, sizeof s->port, "%d", port);
    s->lines = lines;
    for (int i = 0; i < lines; i++) s->line[i].fd = -1;
    pthread_mutex_init(&s->busy, NULL);
    name_host(s->line[0].host);
    of_process = s;
    cf_die_setup(rank, size, abort_all);
    double deadline_s = deadline_of(s, 0);
    if (rank == 0) {
        open_doors(s);
        meet_all(s, deadline_s);
    } else
        join_rank_0(s, deadline_s);
    if (pthread_create(&s->thread, NULL, notice_who_goes, s) != 0)
        cf_die(NULL, "cannot start the thread that notices who goes");
    count_neighbours(s);
    return &s->base;
}
