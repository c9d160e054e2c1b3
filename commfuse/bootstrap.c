// Who the ranks are: MPI, sockets or nobody else. See bootstrap.h.
//
// Which of them: a full set RANK, WORLD_SIZE, MASTER_ADDR was given for this very process, so it goes before
// the environment of an MPI launcher, which a torchrun inside of it only inherits; then MPI; then what srun
// tells (SLURM_PROCID, SLURM_NTASKS; in a step only: in a batch script they are set too, for one process).
// torchrun's agent listens at MASTER_PORT itself as long as its workers run, and tells them so: then ranks meet at the
// next port.
//
// Sockets are a star. Rank 0 listens; every other rank connects, again and again until it is there, and says
// hello: magic, rank, size, host. Nobody is believed: strangers are sent away, a rank out of range, a second one
// of the same number or another size ends the run and says who it was. When all are there, each is welcomed with
// its number among the ranks of its host. From then on everything is a frame: header, payload.
//
//   DATA      what a rank gives to an allgather; from rank 0: what all gave
//   LOST      from rank 0: that rank is gone, and so am I in a moment
//   GOODBYE   at the orderly end: a connection may close now
//
// All that arrives is read by one thread, which puts DATA into the mailbox of its sender. So a connection that
// breaks without a goodbye is noticed at once, whatever the compute thread does meanwhile, be it inside a call
// that never returns; the reader then ends this rank, and rank 0 ends all others. Computers that vanish without
// a word are noticed by TCP's keep-alive.
#define _GNU_SOURCE
#include "bootstrap.h"
#include "condition.h"
#include "die.h"
#include "watch.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    HELLO = 1,
    WELCOME,
    DATA,
    LOST,
    GOODBYE,
    RANKS_MAX = 1 << 20,
    PORTS = 65536,
    DEFAULT_PORT = 29500, // torchrun's
    HOST_LENGTH = 64,
    STRANGERS_MAX = 64, // connections that have not said hello yet
    RETRY_MS = 100,
    LAST_WORDS_S = 5, // rank 0 gives up first: it knows who is missing
    KEEPALIVE_IDLE_S = 10,
    KEEPALIVE_INTERVAL_S = 5,
    KEEPALIVE_COUNT = 3
};
static const uint32_t MAGIC = 0xCF0B0075;
static const int64_t FRAME_MAX = 1 << 28;

typedef struct frame {
    uint32_t magic, kind;
    int64_t bytes; // of payload; LOST: the rank
} frame;

typedef struct hello {
    uint32_t magic, kind;
    int32_t rank, size;
    char host[HOST_LENGTH];
} hello;

typedef struct welcome {
    uint32_t magic, kind;
    int32_t local_rank, local_size;
} welcome;

typedef struct peer {
    int fd;
    char host[HOST_LENGTH];
    bool goodbye;
    char *mail; // NULL: the box is empty
    int64_t mail_bytes;
} peer;

typedef struct sockets {
    int rank, size;
    double timeout_s;
    const char *address; // of rank 0
    char port[16];
    int peers; // rank 0: one for each rank, the own one unused; others: rank 0 alone
    peer *peer;
    pthread_t reader;
    pthread_mutex_t lock; // of mailboxes and goodbyes
    pthread_cond_t news;
    bool read_all; // all have said goodbye
} sockets;

static sockets *of_process; // for the abort hook, which has no argument

// --- the environment ---

static const char *given(const char *name) {
    const char *text = getenv(name);
    return text && *text ? text : NULL;
}

static int number(const char *name, int from, int below) {
    char *end = NULL;
    errno = 0;
    long value = strtol(given(name), &end, 10);
    if (errno || *end || value < from || value >= below)
        cf_die("that variable comes from the launcher (torchrun, srun) or was set by hand",
               "%s is \"%s\", not a number from %d to %d", name, given(name), from, below - 1);
    return (int)value;
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double deadline_of(double timeout_s) {
    return timeout_s > 0 ? now_s() + timeout_s : 1e300;
}

static void nap(void) {
    nanosleep(&(struct timespec){0, RETRY_MS * 1000000L}, NULL);
}

// --- frames ---

static bool send_all(int fd, const void *data, int64_t bytes) {
    const char *at = (const char *)data;
    while (bytes > 0) {
        ssize_t sent = send(fd, at, (size_t)bytes, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent <= 0) return false;
        at += sent, bytes -= sent;
    }
    return true;
}

static bool receive_all(int fd, void *data, int64_t bytes) {
    char *at = (char *)data;
    while (bytes > 0) {
        ssize_t got = recv(fd, at, (size_t)bytes, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        at += got, bytes -= got;
    }
    return true;
}

static bool send_frame(int fd, uint32_t kind, const void *payload, int64_t bytes) {
    frame f = {MAGIC, kind, bytes};
    return send_all(fd, &f, sizeof f) && (kind != DATA || send_all(fd, payload, bytes));
}

static int rank_of(const sockets *s, int index) {
    return s->rank == 0 ? index : 0;
}

CF_NORETURN static void lost(const sockets *s, int rank, const char *host) {
    if (rank == 0) { // perhaps because of an error that this rank is about to find, too
        nap();
        cf_die_heard();
    }
    cf_die("see the messages of that rank: it has ended, was killed, or its host is gone",
           "rank %d%s%s%s is gone; rank %d cannot go on without it", rank, *host ? " (" : "", host,
           *host ? ")" : "", s->rank);
}

// On a star only rank 0 sees who is gone: it tells the others before it leaves.
static int lost_rank = -1;

static void abort_all(int status) {
    (void)status;
    cf_watch_farewell();
    sockets *s = of_process;
    frame f = {MAGIC, LOST, lost_rank >= 0 ? lost_rank : s->rank};
    for (int i = 0; i < s->peers; i++) {
        if (s->peer[i].fd < 0) continue;
        if (s->rank == 0) {
            ssize_t ignored = send(s->peer[i].fd, &f, sizeof f, MSG_NOSIGNAL | MSG_DONTWAIT);
            (void)ignored;
        }
        shutdown(s->peer[i].fd, SHUT_WR);
    }
}

CF_NORETURN static void lost_peer(const sockets *s, int index) {
    lost_rank = rank_of(s, index);
    lost(s, lost_rank, s->peer[index].host);
}

// --- the reader ---

static void take_data(sockets *s, int index, int64_t bytes) {
    peer *p = &s->peer[index];
    char *mail = bytes >= 0 && bytes <= FRAME_MAX ? malloc((size_t)bytes + 1) : NULL;
    if (!mail)
        cf_die(NULL, "rank %d sends a frame of %lld bytes; at most %lld are believed", rank_of(s, index),
               (long long)bytes, (long long)FRAME_MAX);
    if (!receive_all(p->fd, mail, bytes)) lost_peer(s, index);
    pthread_mutex_lock(&s->lock);
    if (p->mail) cf_die(NULL, "rank %d gives again before all have given", rank_of(s, index));
    p->mail = mail;
    p->mail_bytes = bytes;
    pthread_cond_broadcast(&s->news);
    pthread_mutex_unlock(&s->lock);
}

static void take_frame(sockets *s, int index) {
    peer *p = &s->peer[index];
    frame f;
    if (!receive_all(p->fd, &f, sizeof f)) lost_peer(s, index);
    if (f.magic != MAGIC) cf_die(NULL, "rank %d sends what is no frame", rank_of(s, index));
    if (f.kind == DATA) {
        take_data(s, index, f.bytes);
    } else if (f.kind == GOODBYE) {
        pthread_mutex_lock(&s->lock);
        p->goodbye = true;
        pthread_mutex_unlock(&s->lock);
    } else if (f.kind == LOST && f.bytes >= 0 && f.bytes < s->size) {
        lost(s, (int)f.bytes, "");
    } else
        cf_die(NULL, "rank %d sends a frame of unknown kind %u", rank_of(s, index), f.kind);
}

static void *read_frames(void *argument) {
    sockets *s = (sockets *)argument;
    struct pollfd *look = calloc((size_t)s->peers, sizeof *look);
    if (!look) cf_die(NULL, "out of memory for %d connections", s->peers);
    for (;;) {
        int open = 0;
        for (int i = 0; i < s->peers; i++) { // poll() passes over negative ones
            look[i] = (struct pollfd){.fd = s->peer[i].goodbye ? -1 : s->peer[i].fd, .events = POLLIN};
            open += look[i].fd >= 0;
        }
        if (open == 0) break;
        if (poll(look, (nfds_t)s->peers, -1) < 0) continue;
        for (int i = 0; i < s->peers; i++)
            if (look[i].fd >= 0 && look[i].revents) take_frame(s, i);
    }
    free(look);
    pthread_mutex_lock(&s->lock);
    s->read_all = true;
    pthread_cond_broadcast(&s->news);
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

// Wait for news, with the lock held; false: the deadline has passed.
static bool wait_for_news(sockets *s, double deadline_s) {
    double left_s = deadline_s - now_s();
    if (left_s <= 0) return false;
    cf_condition_wait(&s->news, &s->lock, left_s);
    return true;
}

// --- allgather ---

static void take_mail(sockets *s, int index, void *to, int64_t bytes, double deadline_s) {
    peer *p = &s->peer[index];
    pthread_mutex_lock(&s->lock);
    while (!p->mail && wait_for_news(s, deadline_s)) {}
    if (!p->mail)
        cf_die("that rank may be frozen or slow; see its messages, or allow more time with --timeout",
               "rank %d waits for rank %d at start or end of the run; nothing came for %.0f s", s->rank,
               rank_of(s, index), s->timeout_s);
    if (p->mail_bytes != bytes)
        cf_die("start the same program with the same options on every rank",
               "rank %d gives %lld bytes where rank %d expects %lld", rank_of(s, index),
               (long long)p->mail_bytes, s->rank, (long long)bytes);
    memcpy(to, p->mail, (size_t)bytes);
    free(p->mail);
    p->mail = NULL;
    pthread_mutex_unlock(&s->lock);
}

static void post_mail(sockets *s, int index, const void *from, int64_t bytes) {
    if (!send_frame(s->peer[index].fd, DATA, from, bytes)) lost_peer(s, index);
}

static void allgather_sockets(cf_bootstrap *b, const void *mine, void *all, int64_t bytes) {
    sockets *s = (sockets *)b->state;
    s->timeout_s = b->timeout_s;
    if (bytes < 0 || bytes > FRAME_MAX / s->size)
        cf_die(NULL, "allgather of %lld bytes per rank at start", (long long)bytes);
    if (s->rank != 0) {
        post_mail(s, 0, mine, bytes);
        take_mail(s, 0, all, bytes * s->size,
                  deadline_of(s->timeout_s > 0 ? s->timeout_s + LAST_WORDS_S : 0));
        return;
    }
    double deadline_s = deadline_of(s->timeout_s);
    memcpy(all, mine, (size_t)bytes);
    for (int i = 1; i < s->size; i++) take_mail(s, i, (char *)all + i * bytes, bytes, deadline_s);
    for (int i = 1; i < s->size; i++) post_mail(s, i, all, bytes * s->size);
}

// --- rank 0 ---

static int listener_of(int family, const char *port) {
    struct addrinfo want = {.ai_family = family, .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *found;
    int error = getaddrinfo(NULL, port, &want, &found);
    if (error) cf_die("MASTER_PORT is a port number", "port %s: %s", port, gai_strerror(error));
    int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1, off = 0;
    if (fd >= 0) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (fd >= 0 && family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    bool listening =
        fd >= 0 && bind(fd, found->ai_addr, found->ai_addrlen) == 0 && listen(fd, SOMAXCONN) == 0;
    freeaddrinfo(found);
    if (listening) return fd;
    int why = errno;
    if (fd >= 0) close(fd);
    errno = why;
    return -1;
}

static int listen_on(const char *port) {
    int fd = listener_of(AF_INET6, port); // both families, where the system has both
    if (fd < 0 && errno != EADDRINUSE) fd = listener_of(AF_INET, port);
    if (fd < 0)
        cf_die(errno == EADDRINUSE ? "another run may be using it: choose another MASTER_PORT"
                                   : "choose another MASTER_PORT",
               "rank 0 cannot listen on port %s: %s", port, strerror(errno));
    return fd;
}

static void prepare_connection(int fd, double timeout_s) {
    int on = 1, idle = KEEPALIVE_IDLE_S, interval = KEEPALIVE_INTERVAL_S, count = KEEPALIVE_COUNT;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
    struct timeval patience = {.tv_sec = (time_t)timeout_s}; // 0: for ever
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
}

typedef struct stranger { // connected, but has not said hello in full
    int fd;
    int64_t got;
    hello said;
} stranger;

// 1: a rank has joined; 0: not yet; -1: no rank, send it away.
static int listen_to(sockets *s, stranger *who) {
    ssize_t got =
        recv(who->fd, (char *)&who->said + who->got, sizeof who->said - (size_t)who->got, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (got <= 0) return -1;
    who->got += got;
    hello *h = &who->said;
    if (who->got >= (int64_t)sizeof h->magic && h->magic != MAGIC) return -1;
    if (who->got < (int64_t)sizeof *h) return 0;
    if (h->kind != HELLO) return -1;
    h->host[HOST_LENGTH - 1] = 0;
    for (char *at = h->host; *at; at++)
        if (*at < ' ' || *at > '~') *at = '?';
    if (h->size != s->size)
        cf_die("all ranks of a run have the same WORLD_SIZE; is another run using this port?",
               "a process on %s connects as rank %d of %d; this run has %d ranks", h->host, h->rank, h->size,
               s->size);
    if (h->rank <= 0 || h->rank >= s->size)
        cf_die("give every process a RANK of its own from 0 to WORLD_SIZE - 1",
               "a process on %s connects as rank %d of %d", h->host, h->rank, h->size);
    peer *p = &s->peer[h->rank];
    if (p->fd >= 0)
        cf_die("give every process a RANK of its own from 0 to WORLD_SIZE - 1",
               "two processes are rank %d: one on %s, one on %s", h->rank, p->host, h->host);
    memcpy(p->host, h->host, sizeof p->host);
    p->fd = who->fd;
    return 1;
}

CF_NORETURN static void not_all_here(const sockets *s) {
    char list[256] = "";
    int missing = 0;
    size_t length = 0;
    for (int i = 1; i < s->size; i++) {
        if (s->peer[i].fd >= 0) continue;
        if (missing++ < 16)
            length += (size_t)snprintf(list + length, sizeof list - length, "%s%d", length ? ", " : "", i);
    }
    cf_die("were they started? do their MASTER_ADDR and MASTER_PORT lead here? or allow more time with "
           "--timeout",
           "%d of %d ranks have not connected to port %s within %.0f s: rank %s%s", missing, s->size, s->port,
           s->timeout_s, list, missing > 16 ? ", …" : "");
}

static void welcome_all(sockets *s) {
    for (int i = 1; i < s->size; i++) {
        welcome w = {MAGIC, WELCOME, 0, 0};
        for (int j = 0; j < s->size; j++) {
            bool same = strcmp(s->peer[i].host, s->peer[j].host) == 0;
            w.local_size += same;
            w.local_rank += same && j < i;
        }
        if (!send_all(s->peer[i].fd, &w, sizeof w)) lost_peer(s, i);
    }
}

static void gather_ranks(sockets *s) {
    static stranger strangers[STRANGERS_MAX];
    struct pollfd look[STRANGERS_MAX + 1];
    int listener = listen_on(s->port), count = 0, joined = 1;
    double deadline_s = deadline_of(s->timeout_s);
    while (joined < s->size) {
        if (now_s() > deadline_s) not_all_here(s);
        look[0] = (struct pollfd){.fd = count < STRANGERS_MAX ? listener : -1, .events = POLLIN};
        for (int i = 0; i < count; i++)
            look[i + 1] = (struct pollfd){.fd = strangers[i].fd, .events = POLLIN};
        poll(look, (nfds_t)count + 1, RETRY_MS);
        for (int i = count - 1; i >= 0; i--) {
            if (!look[i + 1].revents) continue;
            int result = listen_to(s, &strangers[i]);
            joined += result > 0;
            if (result < 0) close(strangers[i].fd);
            if (result != 0) strangers[i] = strangers[--count];
        }
        int fd = look[0].revents ? accept4(listener, NULL, NULL, SOCK_CLOEXEC) : -1;
        if (fd < 0) continue;
        prepare_connection(fd, s->timeout_s);
        strangers[count++] = (stranger){.fd = fd};
    }
    for (int i = 0; i < count; i++) close(strangers[i].fd);
    close(listener);
    welcome_all(s);
}

// --- the other ranks ---

// Nobody listens, and this end was given the very port that it asks for: the socket has met itself.
static bool met_itself(int fd) {
    struct sockaddr_storage here = {0}, there = {0};
    socklen_t length = sizeof here, other = sizeof there;
    return getsockname(fd, (struct sockaddr *)&here, &length) == 0 &&
           getpeername(fd, (struct sockaddr *)&there, &other) == 0 && length == other &&
           memcmp(&here, &there, length) == 0;
}

static int connect_within(const struct addrinfo *to, double deadline_s) {
    int fd = socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), error = 0;
    if (fd < 0) return -1;
    socklen_t length = sizeof error;
    bool connected = connect(fd, to->ai_addr, to->ai_addrlen) == 0;
    if (!connected && errno == EINPROGRESS) {
        struct pollfd look = {.fd = fd, .events = POLLOUT};
        double left_s = deadline_s - now_s();
        int ms = left_s > 5 ? 5000 : left_s > 0 ? (int)(left_s * 1e3) : 0;
        connected = poll(&look, 1, ms) == 1 && getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0;
        if (!connected) error = ETIMEDOUT;
        connected = connected && error == 0;
    } else if (!connected)
        error = errno;
    if (connected && met_itself(fd)) {
        struct linger none = {.l_onoff = 1}; // so that rank 0 finds its port free
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof none);
        connected = false, error = ECONNREFUSED;
    }
    if (connected) {
        fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
        return fd;
    }
    close(fd);
    errno = error;
    return -1;
}

static int find_rank_0(const sockets *s) {
    double deadline_s = deadline_of(s->timeout_s);
    struct addrinfo want = {.ai_socktype = SOCK_STREAM}, *found = NULL;
    const char *why = "no answer";
    do { // names may be unknown, too, until that host is up
        int error = getaddrinfo(s->address, s->port, &want, &found);
        if (error) why = gai_strerror(error);
        for (struct addrinfo *to = error ? NULL : found; to; to = to->ai_next) {
            int fd = connect_within(to, deadline_s);
            if (fd < 0) {
                why = strerror(errno);
                continue;
            }
            freeaddrinfo(found);
            prepare_connection(fd, s->timeout_s);
            return fd;
        }
        if (!error) freeaddrinfo(found);
        nap();
    } while (now_s() < deadline_s);
    cf_die("was rank 0 started there? can this host reach it? or allow more time with --timeout",
           "rank %d cannot reach rank 0 at %s port %s within %.0f s: %s", s->rank, s->address, s->port,
           s->timeout_s, why);
}

static void name_host(char *host) {
    memset(host, 0, HOST_LENGTH);
    if (gethostname(host, HOST_LENGTH - 1) != 0) memcpy(host, "unknown", 8);
}

static welcome join_rank_0(sockets *s) {
    int fd = s->peer[0].fd = find_rank_0(s);
    hello h = {MAGIC, HELLO, s->rank, s->size, ""};
    name_host(h.host);
    welcome w = {0};
    struct pollfd look = {.fd = fd, .events = POLLIN};
    int ms = s->timeout_s > 0 && s->timeout_s < 1e6 ? (int)(s->timeout_s + LAST_WORDS_S) * 1000 : -1;
    bool answered = send_all(fd, &h, sizeof h) && poll(&look, 1, ms) == 1 && receive_all(fd, &w, sizeof w);
    if (!answered)
        cf_die(
            "see the messages of rank 0; is there another program on that port? choose another MASTER_PORT",
            "%s port %s took the connection of rank %d, but did not welcome it", s->address, s->port,
            s->rank);
    if (w.magic != MAGIC || w.kind != WELCOME || w.local_rank < 0 || w.local_rank >= w.local_size ||
        w.local_size > s->size)
        cf_die("choose another MASTER_PORT", "%s port %s answers, but is not rank 0 of this program",
               s->address, s->port);
    return w;
}

// --- start and end ---

// All say goodbye to rank 0, then rank 0 to all, so that nobody's connection closes before the others know why.
static void say_goodbye(sockets *s) {
    for (int i = 0; i < s->peers; i++)
        if (s->peer[i].fd >= 0 && !send_frame(s->peer[i].fd, GOODBYE, NULL, 0)) lost_peer(s, i);
}

static void await_goodbyes(sockets *s) {
    double deadline_s =
        deadline_of(s->timeout_s > 0 && s->rank != 0 ? s->timeout_s + LAST_WORDS_S : s->timeout_s);
    pthread_mutex_lock(&s->lock);
    while (!s->read_all && wait_for_news(s, deadline_s)) {}
    if (!s->read_all)
        cf_die("a rank may be frozen or slow; see its messages, or allow more time with --timeout",
               "rank %d has finished; others have not within %.0f s", s->rank, s->timeout_s);
    pthread_mutex_unlock(&s->lock);
}

static void close_sockets(cf_bootstrap *b) {
    sockets *s = (sockets *)b->state;
    s->timeout_s = b->timeout_s;
    if (s->rank != 0) say_goodbye(s);
    await_goodbyes(s);
    if (s->rank == 0) say_goodbye(s);
    pthread_join(s->reader, NULL);
    cf_die_setup(s->rank, s->size, NULL);
    of_process = NULL;
    for (int i = 0; i < s->peers; i++) {
        if (s->peer[i].fd >= 0) close(s->peer[i].fd);
        free(s->peer[i].mail);
    }
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->news);
    free(s->peer);
    free(s);
    free(b);
}

static cf_bootstrap *make(const char *name, int rank, int size) {
    cf_bootstrap *b = calloc(1, sizeof *b);
    if (!b) cf_die(NULL, "out of memory at start");
    b->name = name;
    b->rank = rank;
    b->size = size;
    b->local_size = 1;
    return b;
}

static void start_reader(sockets *s) {
    pthread_mutex_init(&s->lock, NULL);
    cf_condition_init(&s->news);
    if (pthread_create(&s->reader, NULL, read_frames, s) != 0) cf_die(NULL, "cannot start the reader thread");
}

static const char *master_address(void) {
    const char *address = given("MASTER_ADDR");
    if (!address)
        cf_die_together("export MASTER_ADDR=HOST of rank 0; under Slurm: export MASTER_ADDR=$(scontrol show "
                        "hostnames \"$SLURM_JOB_NODELIST\" | head -n 1)",
                        "there are several ranks, but MASTER_ADDR is not set: where is rank 0?");
    return address;
}

static int master_port(void) {
    const char *agent = given("TORCHELASTIC_USE_AGENT_STORE");
    int port = given("MASTER_PORT") ? number("MASTER_PORT", 1, PORTS) : DEFAULT_PORT;
    if (!agent || strcmp(agent, "True") != 0) return port;
    return port + 1 < PORTS ? port + 1 : port - 1;
}

static cf_bootstrap *by_sockets(int rank, int size, double timeout_s) {
    cf_bootstrap *b = make("sockets", rank, size);
    sockets *s = calloc(1, sizeof *s);
    int peers = rank == 0 ? size : 1;
    if (s) s->peer = calloc((size_t)peers, sizeof *s->peer);
    if (!s || !s->peer) cf_die(NULL, "out of memory for %d connections", peers);
    s->rank = rank, s->size = size, s->timeout_s = b->timeout_s = timeout_s, s->peers = peers;
    s->address = master_address();
    snprintf(s->port, sizeof s->port, "%d", master_port());
    for (int i = 0; i < peers; i++) s->peer[i].fd = -1;
    name_host(s->peer[0].host); // rank 0's own; others learn it from no one, and need it not
    if (rank == 0) {
        gather_ranks(s);
        for (int i = 1; i < size; i++) b->local_size += strcmp(s->peer[0].host, s->peer[i].host) == 0;
    } else {
        welcome w = join_rank_0(s);
        b->local_rank = w.local_rank;
        b->local_size = w.local_size;
        s->peer[0].host[0] = 0;
    }
    of_process = s;
    cf_die_setup(rank, size, abort_all);
    start_reader(s);
    b->state = s;
    b->allgather = allgather_sockets;
    b->close = close_sockets;
    return b;
}

static void allgather_alone(cf_bootstrap *b, const void *mine, void *all, int64_t bytes) {
    (void)b;
    memcpy(all, mine, (size_t)bytes);
}

static void close_alone(cf_bootstrap *b) {
    free(b);
}

static cf_bootstrap *alone(void) {
    cf_bootstrap *b = make("alone", 0, 1);
    b->allgather = allgather_alone;
    b->close = close_alone;
    cf_die_setup(0, 1, NULL);
    return b;
}

// What the launcher says about this host goes before what host names say.
static cf_bootstrap *with_local_rank(cf_bootstrap *b, const char *rank, const char *size) {
    if (given(size)) b->local_size = number(size, 1, b->size + 1);
    if (given(rank)) b->local_rank = number(rank, 0, b->size);
    if (b->local_rank >= b->local_size) b->local_size = b->local_rank + 1;
    return b;
}

static cf_bootstrap *by_environment(const char *rank_name, const char *size_name, double timeout_s) {
    int size = number(size_name, 1, RANKS_MAX + 1), rank = number(rank_name, 0, size);
    cf_die_setup(rank, size, NULL);
    return size == 1 ? alone() : by_sockets(rank, size, timeout_s);
}

static void refuse_mpi_launcher(void) {
    static const char *const sizes[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", NULL};
    for (const char *const *name = sizes; *name; name++)
        if (given(*name) && atoi(given(*name)) > 1)
            cf_die_together("build with MPI installed (make config says whether it was found), or start with "
                            "torchrun, or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
                            "an MPI launcher started %s ranks, but this program was built without MPI",
                            given(*name));
}

cf_bootstrap *cf_bootstrap_create(int *argc, char ***argv, double timeout_s) {
    if (given("RANK") && given("WORLD_SIZE") && given("MASTER_ADDR"))
        return with_local_rank(by_environment("RANK", "WORLD_SIZE", timeout_s), "LOCAL_RANK",
                               "LOCAL_WORLD_SIZE");
    cf_bootstrap *b = cf_bootstrap_mpi(argc, argv, timeout_s);
    if (b) return b;
    refuse_mpi_launcher();
    if (given("RANK") && given("WORLD_SIZE"))
        return with_local_rank(by_environment("RANK", "WORLD_SIZE", timeout_s), "LOCAL_RANK",
                               "LOCAL_WORLD_SIZE");
    if (given("RANK") || given("WORLD_SIZE"))
        cf_die("set both, and MASTER_ADDR and MASTER_PORT, or neither", "%s is set, but %s is not",
               given("RANK") ? "RANK" : "WORLD_SIZE", given("RANK") ? "WORLD_SIZE" : "RANK");
    bool in_step = given("SLURM_STEP_ID") || given("SLURM_STEPID");
    if (in_step && given("SLURM_PROCID") && given("SLURM_NTASKS"))
        return with_local_rank(by_environment("SLURM_PROCID", "SLURM_NTASKS", timeout_s), "SLURM_LOCALID",
                               "LOCAL_WORLD_SIZE");
    return alone();
}

typedef struct place {
    char host[HOST_LENGTH];
    cpu_set_t cores;
} place;

int cf_bootstrap_cores(cf_bootstrap *b) {
    place mine, *all = calloc((size_t)b->size, sizeof *all);
    if (!all) cf_die(NULL, "out of memory for the places of %d ranks", b->size);
    memset(&mine, 0, sizeof mine);
    name_host(mine.host);
    if (sched_getaffinity(0, sizeof mine.cores, &mine.cores) != 0) // more cores than the set can name
        for (long i = 0; i < sysconf(_SC_NPROCESSORS_ONLN) && i < CPU_SETSIZE; i++) CPU_SET(i, &mine.cores);
    b->allgather(b, &mine, all, (int64_t)sizeof mine);
    for (int rank = 0; rank < b->size; rank++)
        if (strcmp(all[rank].host, mine.host) == 0) CPU_OR(&mine.cores, &mine.cores, &all[rank].cores);
    free(all);
    return CPU_COUNT(&mine.cores);
}
