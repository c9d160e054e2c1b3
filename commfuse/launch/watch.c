// See watch.h. All packets have one format: the sender and its position, which either answers a question or asks one: I have waited
// too long and give up; where are you?
//
// One thread receives all packets from one socket: it answers questions and stores positions. The socket's error queue shows
// when nobody listens at a rank's port any more: that process is dead. The thread that gives up sends questions, again and again
// because packets may be lost, to those whose position it does not have. A rank that has not answered after SILENCE_MS is frozen,
// or its host is gone. A rank that gave up itself is not asked: it may have ended, and its question had its position.
//
// The rank that another one waits for is often not to blame, because it waits itself: in a ring a standstill spreads from
// neighbour to neighbour until every rank waits, directly or not, for the few that do not wait. So the message names those. If all
// ranks wait, they wait for each other, which happens when they are not at the same operation.
//
// Each rank sends the addresses of its host, an IPv4 address in the form that IPv6 has for it. Ranks of one network use the
// loopback. Of another network's addresses, those that this one has too (bridges of containers) are left out.
//
// A packet without the run's token is ignored: random bytes of rank 0, which the others get at the start. They keep out other runs
// and users, not those who read the network.
#define _GNU_SOURCE
#include "watch.h"
#include "../device.h"
#include "../base/limits.h"
#include "../base/sanitize.h"
#include <errno.h>
#include <ifaddrs.h>
#include <linux/errqueue.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    ADDRESSES_MAX = 16,
    LABEL_BYTES = 64,
    NAMED_MAX = 4, // ranks that a verdict names one by one
    POLL_MS = 5,
    REPEAT_MS = 250,  // between two questions to one rank
    ABSENT = 4,       // questions of one rank: this one has not answered for a second
    REFUSED_MS = 100, // a rank that refuses at one address may answer at another
    SILENCE_MS = 2000,
    FOLLOW_MS = 200,  // a rank that waits, and still does so long after another rank gave up, gives up too
    LINGER_MS = 2500, // after the message: the others have received the question, and now ask and print
    DEADLINE_POLL_MS = 50,
    DEADLINE_MORE_MS = 1000 // beyond the time-out, so that ranks that know more print first
};

typedef struct position {    // of a rank in the program
    int32_t waits;           // 1: for peer; 0: it computes
    int32_t peer;            // world rank; -1: several
    int32_t layer, step;     // of the operation it waits for, or posted last; -1: none
    uint32_t config, unused; // of the operation it waits for
    double since_s;          // how long it has waited or computed
    char label[LABEL_BYTES]; // of that operation; "": none yet
} position;

typedef struct token {
    uint64_t bits[2];
} token;

typedef struct packet {
    token token;
    int32_t from, asks; // asks: 1 wants an answer
    position at;        // of the sender
} packet;

typedef struct contact { // how to reach a rank
    uint64_t network;
    struct in6_addr address[ADDRESSES_MAX];
    int32_t addresses;
    uint16_t port, unused; // port 0: none
    token token;           // rank 0's is the run's
} contact;

typedef union name {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6; // its port is where v4 has it
} name;

typedef struct rank_state { // what this rank knows about another
    bool answered;
    bool unreachable; // no address leads there
    bool refused;     // its process is dead, unless it answers at another address
    position at;      // the first that it sent
    int questions;    // that it sent: it repeats them while this rank does not answer
} rank_state;

struct cf_watch {
    int rank, size, socket; // socket -1: none
    bool ipv4;              // the socket is for it alone
    contact *contacts;      // (size)
    pthread_t thread;
    pthread_mutex_t lock; // protects all the following
    rank_state *ranks;    // (size), this rank's included
    position posted;      // the operation posted last
    position awaited;     // the operation waited for, while it is
    double since_ms;      // when this rank began to wait or compute
    int first_to_give_up; // -1: none
    double gave_up_ms;    // when its question came
};

static atomic_bool gave_up; // this process has

// --- the verdict ---

static void print_rank(FILE *out, int rank, const rank_state *r) {
    const position *at = &r->at;
    char wait[CF_WAIT_TEXT], operation[CF_OPERATION_TEXT];
    fprintf(out, "; rank %d ", rank);
    if (!r->answered)
        fputs(r->refused       ? "is dead: its process has ended"
              : r->unreachable ? "cannot be asked: this host knows no address of its host"
                               : "does not answer: frozen, or its host is dead or cut off",
              out);
    else if (at->waits)
        fprintf(out, "answers: it %s", cf_wait_text(wait, &(cf_wait){at->peer, at->label, at->layer, at->step, 0}, NULL));
    else
        fprintf(out, "answers: it computes, for %.3g s now, %s%s: it is slow, or stuck there", at->since_s,
                *at->label ? "after " : "and has not begun any operation",
                *at->label ? cf_operation_text(operation, at->label, at->layer, at->step) : "");
}

// Ranks are to blame in this order: those that are dead or silent; those that do not wait; those that wait in another operation.
// Names the first kind that there is, as a continuation of "rank 0 waits for rank 1: …": "; rank 1 does not answer: …". Returns a
// hint.
static const char *verdict(const rank_state *ranks, int size, int me, char *text, size_t bytes) {
    memset(text, 0, bytes);
    FILE *out = fmemopen(text, bytes, "w");
    if (!out) cf_die(NULL, "out of memory for an inquiry among %d ranks", size);
    enum { GONE, COMPUTES, APART, KINDS } kind = GONE;
    int named = 0;
    bool dead = false, same = false; // same: APART in its config alone
    for (; kind < KINDS && named == 0; kind += named == 0)
        for (int rank = 0; rank < size; rank++) {
            const rank_state *r = &ranks[rank];
            const position *at = &r->at, *here = &ranks[me].at;
            const bool waits = r->answered && at->waits;
            const bool there = at->layer == here->layer && at->step == here->step && strcmp(at->label, here->label) == 0;
            const bool apart = waits && (!there || at->config != here->config);
            const bool is[KINDS] = {!r->answered, r->answered && !waits, apart && named == 0}; // of APART, naming one is enough
            if (rank == me || !is[kind]) continue;
            dead |= !r->answered && r->refused, same = there;
            if (++named <= NAMED_MAX) print_rank(out, rank, r);
        }
    if (named > NAMED_MAX) fprintf(out, "; and %d more", named - NAMED_MAX);
    if (kind == APART)
        fprintf(out,
                same ? ": it has another config of that operation" : ": the ranks are not at the same operation (desynchronised)");
    if (kind == KINDS) fprintf(out, "; they wait for each other in the same operation: messages are lost or late");
    fclose(out);
    text[bytes - 1] = 0;
    static const char *const hints[] = {
        [GONE] = "look at that process and its host: stopped, swapping, off the network? (or UDP does not get through)",
        [COMPUTES] = "look at what that rank does and at its host's load, or allow a longer timeout",
        [APART] = "all ranks need the same program, options and data; if they have them, the program has a bug",
        [KINDS] = "look at the network between these ranks, or allow a longer timeout"};
    if (kind == APART && same) return "all ranks of a group create the same operations, with the same config, in the same order";
    return dead ? "see that rank's last message, and its host's log: was it killed, out of memory?" : hints[kind];
}

// --- addresses ---

static const struct in6_addr loopback = {.s6_addr = {[10] = 0xff, 0xff, 127, 0, 0, 1}};

static struct in6_addr address_of(const name *n) {
    struct in6_addr ip = loopback;
    memcpy(&ip.s6_addr[12], &n->v4.sin_addr, sizeof n->v4.sin_addr);
    return n->any.sa_family == AF_INET ? ip : n->v6.sin6_addr;
}

static socklen_t make_name(name *n, bool ipv4, struct in6_addr ip, uint16_t port) {
    *n = (name){.v6 = {.sin6_family = AF_INET6, .sin6_port = port, .sin6_addr = ip}};
    if (!ipv4) return sizeof n->v6;
    n->v4 = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = port};
    memcpy(&n->v4.sin_addr, &ip.s6_addr[12], sizeof n->v4.sin_addr);
    return sizeof n->v4;
}

// Returns -1 where there is no UDP. *ipv4: for IPv4 alone, where the kernel has nothing else.
static int open_socket(struct in6_addr ip, uint16_t *port, bool *ipv4) {
    const int both = socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0), on = 1, off = 0;
    *ipv4 = both < 0;
    const int fd = *ipv4 ? socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0) : both;
    name n;
    socklen_t length = make_name(&n, *ipv4, ip, 0);
    if (fd >= 0 &&
        (*ipv4 || (setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) == 0 &&
                   setsockopt(fd, IPPROTO_IPV6, IPV6_RECVERR, &on, sizeof on) == 0)) &&
        bind(fd, &n.any, length) == 0 && getsockname(fd, &n.any, &length) == 0 &&
        setsockopt(fd, IPPROTO_IP, IP_RECVERR, &on, sizeof on) == 0) {
        *port = n.v4.sin_port;
        return fd;
    }
    fprintf(stderr, "note: rank %d has no UDP socket (%s); if ranks stop, messages cannot say why\n", cf_die_rank(),
            strerror(errno));
    if (fd >= 0) close(fd);
    return -1;
}

// Those of a link alone would need its name on the other side, too.
static void find_addresses(contact *c) {
    struct ifaddrs *all = NULL;
    if (getifaddrs(&all) != 0) return;
    for (const struct ifaddrs *i = all; i && c->addresses < ADDRESSES_MAX; i = i->ifa_next) {
        const name *n = (const name *)(const void *)i->ifa_addr;
        if (!n || !(i->ifa_flags & IFF_UP) || (i->ifa_flags & IFF_LOOPBACK)) continue;
        if (n->any.sa_family == AF_INET || (n->any.sa_family == AF_INET6 && !IN6_IS_ADDR_LINKLOCAL(&n->v6.sin6_addr)))
            c->address[c->addresses++] = address_of(n);
    }
    freeifaddrs(all);
}

static bool has_address(const contact *c, struct in6_addr ip) {
    for (int i = 0; i < c->addresses; i++)
        if (IN6_ARE_ADDR_EQUAL(&c->address[i], &ip)) return true;
    return false;
}

// Keeps only the addresses at which this rank can reach that one.
static void keep_reachable(contact *c, const contact *mine, bool ipv4) {
    const bool here = c->network == mine->network && c->network != 0;
    const int count = here || c->addresses > ADDRESSES_MAX ? 0 : c->addresses;
    c->addresses = 0;
    for (int i = 0; i < count; i++)
        if (!has_address(mine, c->address[i]) && (!ipv4 || IN6_IS_ADDR_V4MAPPED(&c->address[i])))
            c->address[c->addresses++] = c->address[i];
    if (here) c->address[c->addresses++] = loopback;
}

// --- packets ---

static packet make_packet(cf_watch *w, bool asks) {
    packet p = {.token = w->contacts[0].token, .from = w->rank, .asks = asks};
    pthread_mutex_lock(&w->lock);
    p.at = w->awaited.waits ? w->awaited : w->posted;
    p.at.since_s = (cf_now_ms() - w->since_ms) * 1e-3;
    pthread_mutex_unlock(&w->lock);
    return p;
}

static bool is_valid(const cf_watch *w, const packet *p, ssize_t bytes) {
    return bytes == sizeof *p && memcmp(&p->token, &w->contacts[0].token, sizeof p->token) == 0 && p->from >= 0 &&
           p->from < w->size && p->at.peer >= -1 && p->at.peer < w->size;
}

// Reads the packets that came back because nobody listens at that address and port.
static void note_refusals(cf_watch *w) {
    for (;;) {
        _Alignas(struct cmsghdr) char control[512];
        name to;
        struct msghdr message = {.msg_name = &to,
                                 .msg_namelen = sizeof to,
                                 .msg_control = control,
                                 .msg_controllen = sizeof control};
        if (recvmsg(w->socket, &message, MSG_ERRQUEUE | MSG_DONTWAIT) < 0) return;
        const struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        if (!c || (c->cmsg_type != IP_RECVERR && c->cmsg_type != IPV6_RECVERR)) continue;
        const bool refused = ((const struct sock_extended_err *)(const void *)CMSG_DATA(c))->ee_errno == ECONNREFUSED;
        pthread_mutex_lock(&w->lock);
        for (int i = 0; refused && i < w->size; i++)
            w->ranks[i].refused |= w->contacts[i].port == to.v4.sin_port && has_address(&w->contacts[i], address_of(&to));
        pthread_mutex_unlock(&w->lock);
    }
}

static void *receive(void *argument) {
    cf_watch *w = (cf_watch *)argument;
    for (;;) { // cf_watch_close() cancels it in recvfrom() or sendto(), where it holds no lock
        packet p;
        name from;
        socklen_t length = sizeof from;
        const ssize_t bytes = recvfrom(w->socket, &p, sizeof p, MSG_TRUNC, &from.any, &length);
        if (bytes < 0) note_refusals(w);
        if (bytes < 0 || !is_valid(w, &p, bytes)) continue;
        p.at.label[LABEL_BYTES - 1] = 0;
        cf_sanitize(p.at.label);
        rank_state *r = &w->ranks[p.from];
        pthread_mutex_lock(&w->lock);
        if (!r->answered) r->answered = true, r->at = p.at;
        r->questions += p.asks;
        if (p.asks && w->first_to_give_up < 0) w->gave_up_ms = cf_now_ms(), w->first_to_give_up = p.from;
        pthread_mutex_unlock(&w->lock);
        if (!p.asks) continue;
        p = make_packet(w, false);
        sendto(w->socket, &p, sizeof p, MSG_DONTWAIT, &from.any, length);
    }
    return NULL;
}

// --- the position of this rank ---

static void set_operation(position *at, const char *label, int layer, int step) {
    memset(at->label, 0, sizeof at->label);
    memcpy(at->label, label, strnlen(label, sizeof at->label - 1));
    at->layer = layer, at->step = step;
}

void cf_watch_posted(cf_watch *w, const char *label, int layer, int step) {
    if (!w) return;
    pthread_mutex_lock(&w->lock);
    set_operation(&w->posted, label, layer, step);
    w->since_ms = cf_now_ms();
    pthread_mutex_unlock(&w->lock);
}

void cf_watch_goes_on(cf_watch *w) {
    if (!w || !w->awaited.waits) return; // only this thread changes it
    cf_stop_waits(NULL);
    pthread_mutex_lock(&w->lock);
    w->awaited.waits = false;
    w->since_ms = cf_now_ms();
    pthread_mutex_unlock(&w->lock);
}

// --- the inquiry ---

static void send_question(cf_watch *w, int rank) {
    const packet p = make_packet(w, true);
    const contact *to = &w->contacts[rank];
    for (int i = 0; i < to->addresses; i++) {
        name n;
        const socklen_t length = make_name(&n, w->ipv4, to->address[i], to->port);
        note_refusals(w); // of earlier packets: otherwise sendto() returns that error and sends nothing
        sendto(w->socket, &p, sizeof p, MSG_DONTWAIT, &n.any, length);
    }
}

// Asks until the position of each rank is known, or it is dead, or has been silent for too long.
static void ask(cf_watch *w) {
    const double begin_ms = cf_now_ms();
    double sent_ms = -REPEAT_MS;
    for (bool open = true; open; poll(NULL, 0, POLL_MS)) {
        const bool send = cf_now_ms() - sent_ms > REPEAT_MS;
        if (send) sent_ms = cf_now_ms();
        open = false;
        for (int rank = 0; rank < w->size; rank++) {
            rank_state *r = &w->ranks[rank];
            pthread_mutex_lock(&w->lock);
            const bool may_answer = !r->answered && cf_now_ms() - begin_ms <= (r->refused ? REFUSED_MS : SILENCE_MS);
            pthread_mutex_unlock(&w->lock);
            open |= may_answer;
            if (send && may_answer) send_question(w, rank);
        }
    }
}

CF_NORETURN static void give_up(cf_watch *w, const char *peers, cf_wait wait, double waited_ms, const char *news) {
    char what[CF_WAIT_TEXT], nothing[64], found[1536] = "";
    snprintf(nothing, sizeof nothing, "nothing came for %.*f s", waited_ms < 1e4, waited_ms / 1e3);
    const char *hint = "that rank may be dead, frozen or slow; see its messages, or allow a longer timeout";
    if (w->socket >= 0) {
        atomic_store(&gave_up, true);
        pthread_mutex_lock(&w->lock);
        const int first = w->first_to_give_up;
        const bool absent = first >= 0 && w->ranks[first].questions > ABSENT;
        pthread_mutex_unlock(&w->lock);
        int length = 0;
        if (first >= 0) length = snprintf(found, sizeof found, "; rank %d has given up", first);
        if (absent) {
            strcpy(found + length, ": this rank did not answer it");
            hint = "this process did not run: was it stopped, or its host asleep or swapping?";
        } else {
            w->ranks[w->rank].at = make_packet(w, false).at;
            ask(w);
            pthread_mutex_lock(&w->lock); // answers may still come
            hint = verdict(w->ranks, w->size, w->rank, found + length, sizeof found - (size_t)length);
            pthread_mutex_unlock(&w->lock);
        }
    }
    cf_die(hint, "rank %d %s; %s%s", cf_die_rank(), cf_wait_text(what, &wait, peers), news ? news : nothing, found);
}

void cf_watch_waits(cf_watch *w, cf_wait wait, const char *peers, double waited_ms, double timeout_ms, const char *news) {
    if (!w) return;
    pthread_mutex_lock(&w->lock);
    if (!w->awaited.waits) w->since_ms = cf_now_ms();
    w->awaited.waits = true, w->awaited.peer = wait.peer, w->awaited.config = wait.config;
    set_operation(&w->awaited, wait.label, wait.layer, wait.step);
    const bool follows = w->first_to_give_up >= 0 && cf_now_ms() - w->gave_up_ms >= FOLLOW_MS;
    pthread_mutex_unlock(&w->lock);
    cf_stop_waits(&wait);
    if (news || (timeout_ms > 0 && waited_ms >= timeout_ms) || (follows && waited_ms >= FOLLOW_MS))
        give_up(w, peers, wait, waited_ms, news);
}

void cf_watch_linger(void) {
    if (atomic_load(&gave_up)) poll(NULL, 0, LINGER_MS);
}

// --- start and end ---

cf_watch *cf_watch_open(cf_bootstrap *ranks) {
    const int size = ranks->size;
    if (size == 1) return NULL;
    cf_watch *w = cf_host_alloc(1, sizeof *w, "the watch");
    *w = (cf_watch){.rank = ranks->rank,
                    .size = size,
                    .contacts = cf_host_alloc(size, sizeof *w->contacts, "the watch"),
                    .ranks = cf_host_alloc(size, sizeof *w->ranks, "the watch"),
                    .posted = {.layer = -1, .step = -1},
                    .since_ms = cf_now_ms(),
                    .first_to_give_up = -1};
    w->ranks[w->rank].answered = true;
    pthread_mutex_init(&w->lock, NULL);
    contact mine = {.network = ranks->network};
    find_addresses(&mine);
    if (getrandom(&mine.token, sizeof mine.token, 0) != sizeof mine.token) cf_die(NULL, "the system gives no random bytes");
    w->socket = open_socket(ranks->one_network ? loopback : in6addr_any, &mine.port, &w->ipv4);
    ranks->allgather(ranks, &mine, w->contacts, sizeof mine);
    for (int rank = 0; rank < size; rank++) {
        contact *c = &w->contacts[rank];
        keep_reachable(c, &mine, w->ipv4);
        w->ranks[rank].unreachable = c->addresses == 0 || c->port == 0;
    }
    if (w->socket >= 0) cf_limits_start(&w->thread, receive, w, "the watch's thread");
    return w;
}

void cf_watch_close(cf_watch *w) {
    if (!w) return;
    if (w->socket >= 0) {
        pthread_cancel(w->thread);
        pthread_join(w->thread, NULL);
        close(w->socket);
    }
    free(w->ranks);
    free(w->contacts);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

// --- deadlines inside libraries ---

static struct {
    pthread_t thread;
    const char *what;
    double timeout_s;
} deadline;

// Counts polls, not time: if this process itself is stopped, that lasts one poll, however long.
static void *end_at_deadline(void *unused) {
    for (int64_t polls = (int64_t)((deadline.timeout_s * 1e3 + DEADLINE_MORE_MS) / DEADLINE_POLL_MS) + 1; polls > 0; polls--)
        poll(NULL, 0, DEADLINE_POLL_MS); // cf_deadline_end() cancels it here
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    cf_die("a rank may be dead, frozen or unreachable: see its messages (those of NCCL with "
           "NCCL_DEBUG=INFO), or allow a longer timeout",
           "rank %d waits for the other ranks: %s; nothing came for %g s", cf_die_rank(), deadline.what, deadline.timeout_s);
    return unused;
}

void cf_deadline_begin(const char *what, double timeout_s) {
    deadline.what = what;
    deadline.timeout_s = timeout_s;
    if (timeout_s > 0) cf_limits_start(&deadline.thread, end_at_deadline, NULL, "the thread that ends long waits");
}

void cf_deadline_end(void) {
    if (deadline.timeout_s <= 0) return;
    pthread_cancel(deadline.thread);
    pthread_join(deadline.thread, NULL);
}
