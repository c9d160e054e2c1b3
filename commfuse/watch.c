// See watch.h. Everything is a packet: who sends it, to whom, and where that rank is.
//
//   FAREWELL   I have waited too long and give up; where are you?
//   ANSWER     here; repeats the question's number, which nobody can foresee
//   SILENCE    you have not answered: a process that was stopped learns it when it goes on
//
// One thread receives all of it, from one socket: it answers questions, keeps answers and farewells, and takes from the error
// queue the word of a host on which nobody listens at that port any more: that process is dead. The thread that gives up asks
// and looks at what has come. Questions are repeated, as packets may be lost; who has not answered after SILENCE_MS is frozen,
// or its host is gone. Who has given up may have ended when it is asked. Its farewell says where it was, and counts as its
// answer.
//
// The rank waited for is often not to blame: it waits itself, as a ring passes a standstill on from neighbour to neighbour.
// So the verdict follows from rank to rank for whom each waits, and ends at ranks that do not wait. Where it ends nowhere,
// ranks wait for each other in a circle, which they do when they are not at the same operation.
//
// Each rank gives the IPv4 addresses of its host. Hosts with the same ones are one host, and use the loopback
// address; from others, those that this host has too (bridges of containers) are left out.
//
// Nobody is believed who sends from elsewhere, or whose packet has not the code of the run's key (secret.h). That key is
// made of the secret and of random bytes that each rank gives, so it differs from run to run, and with a secret it
// never travels.
#define _GNU_SOURCE
#include "watch.h"
#include "device.h"
#include "die.h"
#include "printable.h"
#include "secret.h"
#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <linux/errqueue.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    FAREWELL = 1,
    ANSWER,
    SILENCE,
    ADDRESSES_MAX = 16,
    LABEL_BYTES = 64,
    NAMED_MAX = 4, // ranks that a verdict names one by one
    LOOK_MS = 50,
    ASKING_MS = 5,
    REPEAT_MS = 250,
    REFUSED_MS = 100, // who has several addresses may be met at another one
    SILENCE_MS = 2000,
    HEED_MS = 200,          // who still waits so long after another rank has given up does so too
    LINGER_MS = 1500,       // after the message: others have heard the farewell, ask and speak
    DEADLINE_MORE_MS = 1000 // beyond the time-out, so that who knows more speaks first
};

typedef struct position {        // of a rank in the program
    int32_t waits;               // for peer; otherwise it computes
    int32_t peer;                // world rank; -1: all others of its group
    int32_t first, stride, size; // world ranks of that group: first, first + stride, …
    int32_t layer, step;         // of what it waits for, or the last that it has posted; -1: none
    int32_t unused;
    double since_s;          // for how long it has done so
    char label[LABEL_BYTES]; // of the operation; "": nothing yet
} position;

typedef struct packet {
    cf_mac code; // of all below
    uint64_t question;
    int32_t kind, from, to, unused;
    position at; // of the sender
} packet;

typedef struct card { // where a rank can be asked; equal on all ranks of one host but for the port and random
    uint32_t address[ADDRESSES_MAX];
    int32_t addresses;
    uint16_t port, unused;
    uint64_t random[2];
} card;

typedef enum { UNASKED, ASKED, ANSWERED, SILENT, DEAD } finding; // from ANSWERED on: the worse, the later

typedef struct other { // rank, as far as this one knows
    finding is;
    position at; // where it was when its last word came
    double sent_ms;
    uint64_t question;
    bool refused, gave_up;
    int from, queued; // of the verdict: by whom it was reached; of this number in order, the rank
} other;

struct cf_watch {
    int rank, size, socket; // -1: this rank has none
    cf_mac key;
    card *cards; // (size)
    pthread_t thread;
    pthread_mutex_t lock; // of what follows
    other *others;        // (size); this rank's own place is used too
    position last, here;  // what was posted last; what is waited for, otherwise the same
    double since_ms;
    int first_to_give_up; // -1: nobody has
    double gave_up_ms;    // when its word came
    int unanswered;       // who has asked this rank in vain; -1: nobody
};

static atomic_bool gave_up; // this process

// --- the verdict ---

static bool waits(const other *o) {
    return o->is == ANSWERED && o->at.waits;
}

static bool same_operation(const position *a, const position *b) {
    return a->layer == b->layer && a->step == b->step && strcmp(a->label, b->label) == 0;
}

// In one collective of one group. Such ranks wait alike and are passed over in silence.
static bool side_by_side(const position *a, const position *b) {
    return a->peer < 0 && b->peer < 0 && a->first == b->first && a->stride == b->stride && a->size == b->size &&
           same_operation(a, b);
}

static void print_finding(FILE *out, int rank, const other *o) {
    const position *at = &o->at;
    char wait[CF_WAIT_TEXT], operation[CF_OPERATION_TEXT];
    fprintf(out, "rank %d ", rank);
    if (o->is == DEAD)
        fprintf(out, "is dead: its process has ended");
    else if (o->is == SILENT)
        fprintf(out, "does not answer: frozen, or its host is dead or cut off");
    else if (waits(o))
        fprintf(out, "answers: it %s", cf_wait_text(wait, &(cf_wait){at->peer, at->label, at->layer, at->step}, NULL));
    else
        fprintf(out, "answers: it computes, for %.3g s now, %s%s: it is slow, or stuck there", at->since_s,
                *at->label ? "after " : "and has not begun any operation",
                *at->label ? cf_operation_text(operation, at->label, at->layer, at->step) : "");
}

// Ranks that this one waits for, that these wait for, and so on: breadth first, so that the way to each is a shortest one.
// Returns how many, itself the first.
static int follow(other *others, int size, int me) {
    int count = 0;
    for (int i = 0; i < size; i++) others[i].from = -1;
    others[me].from = others[count++].queued = me;
    for (int i = 0; i < count; i++) {
        const int rank = others[i].queued;
        const position *at = &others[rank].at;
        for (int j = 0; waits(&others[rank]) && j < (at->peer < 0 ? at->size : 1); j++) {
            int peer = at->peer < 0 ? at->first + j * at->stride : at->peer;
            if (others[peer].from >= 0) continue;
            others[peer].from = rank;
            others[count++].queued = peer;
        }
    }
    return count;
}

// Writes what is to be said after "rank 0 waits for rank 1: …", as "; rank 1 does not answer: …". Returns a hint.
static const char *verdict(other *others, int size, int me, char *text, size_t bytes) {
    memset(text, 0, bytes);
    FILE *out = fmemopen(text, bytes, "w");
    if (!out) cf_die(NULL, "out of memory for an inquiry among %d ranks", size);
    finding worst = UNASKED;
    bool circle = true, apart = false; // all wait for each other; not in the same operation
    int named = 0, count = follow(others, size, me);
    for (int i = 1; i < count; i++) circle &= waits(&others[others[i].queued]);
    for (int i = 1; i < count; i++) {
        const int rank = others[i].queued;
        const other *o = &others[rank];
        const bool ends = !waits(o), direct = o->from == me;
        const bool first_apart = circle && !apart && !same_operation(&others[me].at, &o->at);
        if (ends && o->is > worst) worst = o->is;
        apart |= first_apart;
        if (!ends && !first_apart && (!direct || side_by_side(&others[me].at, &o->at))) continue;
        if (++named > NAMED_MAX) continue;
        fprintf(out, "; %s",
                direct ? ""
                : ends ? "the chain of waiting ranks ends there: "
                       : "the chain of waiting ranks goes on: ");
        print_finding(out, rank, o);
        if (ends && !direct) fprintf(out, ": look at rank %d", rank);
    }
    if (named > NAMED_MAX) fprintf(out, "; and %d more", named - NAMED_MAX);
    if (apart)
        fprintf(out, ": the ranks are not at the same operation (desynchronised)");
    else if (circle && count > 1)
        fprintf(out, "; they wait for each other in the same operation: messages are lost or late");
    fclose(out);
    text[bytes - 1] = 0;
    if (worst == DEAD) return "see that rank's last words, and its host's log: was it killed, out of memory?";
    if (worst == SILENT)
        return "look at that process and its host: stopped, swapping, off the network? (or UDP does not get through)";
    if (worst == ANSWERED) return "look at what that rank does and at its host's load, or allow more time with --timeout";
    if (apart) return "all ranks need the same program, options and data; if they have, the program is wrong";
    return "look at the network between these ranks, or allow more time with --timeout";
}

// --- addresses ---

// address: INADDR_LOOPBACK where all ranks share a host. -1: there is none.
static int open_socket(uint32_t address, uint16_t *port) {
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(address)};
    socklen_t length = sizeof name;
    const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), on = 1;
    if (fd >= 0 && bind(fd, (struct sockaddr *)&name, sizeof name) == 0 &&
        getsockname(fd, (struct sockaddr *)&name, &length) == 0 && setsockopt(fd, IPPROTO_IP, IP_RECVERR, &on, sizeof on) == 0) {
        *port = name.sin_port;
        return fd;
    }
    fprintf(stderr, "note: rank %d has no UDP socket (%s); should ranks stop, messages cannot say why\n", cf_die_rank(),
            strerror(errno));
    if (fd >= 0) close(fd);
    return -1;
}

static card own_card(void) {
    card c;
    memset(&c, 0, sizeof c);
    struct ifaddrs *all = NULL;
    if (getifaddrs(&all) != 0) all = NULL;
    for (const struct ifaddrs *i = all; i && c.addresses < ADDRESSES_MAX; i = i->ifa_next)
        if (i->ifa_addr && i->ifa_addr->sa_family == AF_INET && (i->ifa_flags & IFF_UP) && !(i->ifa_flags & IFF_LOOPBACK))
            c.address[c.addresses++] = ((const struct sockaddr_in *)(const void *)i->ifa_addr)->sin_addr.s_addr;
    freeifaddrs(all);
    cf_random(c.random, sizeof c.random);
    return c;
}

static bool has_address(const card *c, uint32_t address) {
    for (int i = 0; i < c->addresses; i++)
        if (c->address[i] == address) return true;
    return false;
}

// Leaves on each card the addresses at which this rank can reach that one.
static void keep_ways(card *cards, int size, const card *mine) {
    for (card *c = cards; c < cards + size; c++) {
        const bool here = c->addresses == mine->addresses && memcmp(c->address, mine->address, sizeof c->address) == 0;
        const int count = c->addresses < ADDRESSES_MAX ? c->addresses : ADDRESSES_MAX;
        c->addresses = 0;
        for (int i = 0; i < count && !here; i++)
            if (!has_address(mine, c->address[i])) c->address[c->addresses++] = c->address[i];
        if (here) c->address[c->addresses++] = htonl(INADDR_LOOPBACK);
    }
}

// --- packets ---

static cf_mac code_of(const cf_watch *w, const packet *p) {
    return cf_mac_of(&w->key, &p->question, sizeof *p - offsetof(packet, question));
}

// Where this rank is.
static packet packet_of(cf_watch *w, int kind, int to, uint64_t question) {
    packet p;
    memset(&p, 0, sizeof p);
    pthread_mutex_lock(&w->lock);
    p.at = w->here;
    p.at.since_s = (cf_now_ms() - w->since_ms) * 1e-3;
    pthread_mutex_unlock(&w->lock);
    p.kind = kind;
    p.from = w->rank;
    p.to = to;
    p.question = question;
    p.code = code_of(w, &p);
    return p;
}

static bool is_rank(const cf_watch *w, int64_t rank) {
    return rank >= 0 && rank < w->size;
}

// Is what has come to be believed?
static bool is_sound(const cf_watch *w, packet *p, ssize_t bytes, const struct sockaddr_in *from) {
    position *at = &p->at;
    if (bytes != sizeof *p || !is_rank(w, p->from) || p->to != w->rank || !has_address(&w->cards[p->from], from->sin_addr.s_addr))
        return false;
    const cf_mac code = code_of(w, p);
    if (!cf_mac_equal(&code, &p->code)) return false;
    at->label[LABEL_BYTES - 1] = 0;
    cf_printable(at->label);
    if (at->peer >= 0) return is_rank(w, at->peer);
    return at->size >= 0 && at->size <= w->size && is_rank(w, at->first) &&
           is_rank(w, at->first + (at->size - 1) * (int64_t)at->stride);
}

// Under the lock.
static void take(cf_watch *w, const packet *p) {
    other *o = &w->others[p->from];
    if (p->kind == ANSWER && o->is == ASKED && p->question == o->question) o->is = ANSWERED, o->at = p->at;
    if (p->kind == SILENCE && w->unanswered < 0) w->unanswered = p->from;
    if (p->kind != FAREWELL) return;
    o->gave_up = true;
    if (o->is != ANSWERED) o->at = p->at; // the verdict may be reading that
    if (w->first_to_give_up < 0) w->gave_up_ms = cf_now_ms(), w->first_to_give_up = p->from;
}

// Packets that came back: on that host nobody listens at that port. All local ranks are at one address.
static void hear_refusals(cf_watch *w) {
    for (;;) {
        _Alignas(struct cmsghdr) char control[512];
        struct sockaddr_in to = {.sin_port = 0};
        struct msghdr message = {.msg_name = &to,
                                 .msg_namelen = sizeof to,
                                 .msg_control = control,
                                 .msg_controllen = sizeof control};
        if (recvmsg(w->socket, &message, MSG_ERRQUEUE | MSG_DONTWAIT) < 0) return;
        const struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        if (!c || c->cmsg_type != IP_RECVERR) continue;
        const bool refused = ((const struct sock_extended_err *)(const void *)CMSG_DATA(c))->ee_errno == ECONNREFUSED;
        pthread_mutex_lock(&w->lock);
        for (int i = 0; refused && i < w->size; i++)
            w->others[i].refused |= w->cards[i].port == to.sin_port && has_address(&w->cards[i], to.sin_addr.s_addr);
        pthread_mutex_unlock(&w->lock);
    }
}

static void *receive(void *argument) {
    cf_watch *w = (cf_watch *)argument;
    for (;;) { // cf_watch_close() ends it where it receives or sends, and holds nothing
        packet p;
        struct sockaddr_in from = {.sin_port = 0};
        socklen_t length = sizeof from;
        const ssize_t bytes = recvfrom(w->socket, &p, sizeof p, MSG_TRUNC, (struct sockaddr *)&from, &length);
        if (bytes < 0) hear_refusals(w);
        if (bytes < 0 || !is_sound(w, &p, bytes, &from)) continue;
        pthread_mutex_lock(&w->lock);
        take(w, &p);
        pthread_mutex_unlock(&w->lock);
        if (p.kind != FAREWELL) continue;
        p = packet_of(w, ANSWER, p.from, p.question);
        sendto(w->socket, &p, sizeof p, MSG_DONTWAIT, (struct sockaddr *)&from, sizeof from);
    }
    return NULL;
}

// --- where this rank is ---

static void set_operation(position *at, const char *label, int layer, int step) {
    memset(at->label, 0, sizeof at->label);
    memcpy(at->label, label, strnlen(label, sizeof at->label - 1));
    at->layer = layer;
    at->step = step;
}

void cf_watch_posted(cf_watch *w, const char *label, int layer, int step) {
    if (!w) return;
    pthread_mutex_lock(&w->lock);
    set_operation(&w->last, label, layer, step);
    if (!w->here.waits) w->here = w->last;
    w->since_ms = cf_now_ms();
    pthread_mutex_unlock(&w->lock);
}

void cf_watch_waits(cf_watch *w, const cf_group *group, cf_wait wait) {
    if (!w) return;
    pthread_mutex_lock(&w->lock);
    if (!w->here.waits) w->since_ms = cf_now_ms();
    set_operation(&w->here, wait.label, wait.layer, wait.step);
    w->here.waits = true;
    w->here.peer = wait.peer < 0 && group->size == 2 ? group->world[1 - group->rank] : wait.peer;
    w->here.first = group->world[0];
    w->here.stride = group->size > 1 ? group->world[1] - group->world[0] : 1;
    w->here.size = group->size;
    pthread_mutex_unlock(&w->lock);
    cf_stop_waits(&wait);
}

void cf_watch_goes_on(cf_watch *w) {
    if (!w) return;
    cf_stop_waits(NULL);
    pthread_mutex_lock(&w->lock);
    w->here = w->last;
    w->since_ms = cf_now_ms();
    pthread_mutex_unlock(&w->lock);
}

bool cf_watch_is_over(cf_watch *w, double waited_ms) {
    if (!w || waited_ms < HEED_MS) return false;
    pthread_mutex_lock(&w->lock);
    bool over = w->first_to_give_up >= 0 && cf_now_ms() - w->gave_up_ms >= HEED_MS;
    pthread_mutex_unlock(&w->lock);
    return over;
}

// --- the inquiry ---

static void send_packet(cf_watch *w, int kind, int rank) {
    const packet p = packet_of(w, kind, rank, w->others[rank].question);
    const card *to = &w->cards[rank];
    w->others[rank].sent_ms = cf_now_ms();
    for (int i = 0; i < to->addresses; i++) {
        struct sockaddr_in name = {.sin_family = AF_INET, .sin_port = to->port, .sin_addr.s_addr = to->address[i]};
        // Refused, or no way there: no answer comes. But the error may be of an earlier packet, to somebody who is gone, and then
        // this one has not been sent.
        for (int tries = 0; tries < 2; tries++) {
            if (sendto(w->socket, &p, sizeof p, MSG_DONTWAIT, (struct sockaddr *)&name, sizeof name) >= 0) break;
            hear_refusals(w); // this call has taken the error that would wake the other thread
        }
    }
}

// Asks all others, until it is known of each what has become of it. Silence for so long is known, too.
static void ask(cf_watch *w) {
    const double begin_ms = cf_now_ms();
    pthread_mutex_lock(&w->lock);
    for (other *o = w->others; o < w->others + w->size; o++) {
        if (o == &w->others[w->rank]) continue;
        cf_random(&o->question, sizeof o->question);
        o->is = ASKED;
        o->refused = false;
        o->sent_ms = 0;
    }
    pthread_mutex_unlock(&w->lock);
    for (bool open = true; open; poll(NULL, 0, ASKING_MS)) {
        open = false;
        for (int rank = 0; rank < w->size; rank++) {
            other *o = &w->others[rank];
            pthread_mutex_lock(&w->lock);
            if (o->is == ASKED && cf_now_ms() - begin_ms > (o->refused ? REFUSED_MS : SILENCE_MS))
                o->is = o->gave_up ? ANSWERED : o->refused ? DEAD : SILENT;
            const finding is = o->is;
            pthread_mutex_unlock(&w->lock);
            open |= is == ASKED;
            if (is == ASKED && cf_now_ms() - o->sent_ms > REPEAT_MS) send_packet(w, FAREWELL, rank);
            if (is == SILENT) send_packet(w, SILENCE, rank);
        }
    }
}

void cf_watch_give_up(cf_watch *w, const char *peers, cf_wait wait, double waited_ms, const char *news) {
    char what[CF_WAIT_TEXT], nothing[64], found[1536] = "";
    snprintf(nothing, sizeof nothing, "nothing came for %.*f s", waited_ms < 1e4, waited_ms / 1e3);
    const char *hint = "that rank may be dead, frozen or slow; see its messages, or allow more time with --timeout";
    if (w && w->socket >= 0) {
        atomic_store(&gave_up, true);
        pthread_mutex_lock(&w->lock);
        int first = w->first_to_give_up, unanswered = w->unanswered, length = 0;
        pthread_mutex_unlock(&w->lock);
        if (unanswered >= 0) {
            snprintf(found, sizeof found, "; rank %d has given up: this rank did not answer it", unanswered);
            hint = "this process did not run: was it stopped, or its host asleep or swapping?";
        } else {
            if (first >= 0) length = snprintf(found, sizeof found, "; rank %d has given up", first);
            w->others[w->rank].is = ANSWERED, w->others[w->rank].at = packet_of(w, 0, w->rank, 0).at;
            ask(w);
            hint = verdict(w->others, w->size, w->rank, found + length, sizeof found - (size_t)length);
        }
    }
    cf_die(hint, "rank %d %s; %s%s", cf_die_rank(), cf_wait_text(what, &wait, peers), news ? news : nothing, found);
}

void cf_watch_farewell(void) {
    if (atomic_load(&gave_up)) nanosleep(&(struct timespec){LINGER_MS / 1000, LINGER_MS % 1000 * 1000000L}, NULL);
}

// --- start and end ---

cf_watch *cf_watch_open(cf_bootstrap *ranks) {
    const int size = ranks->size;
    if (size == 1) return NULL;
    cf_watch *w = cf_host_alloc(1, sizeof *w, "the watch");
    *w = (cf_watch){.rank = ranks->rank,
                    .size = size,
                    .cards = cf_host_alloc(size, sizeof *w->cards, "the watch"),
                    .others = cf_host_alloc(size, sizeof *w->others, "the watch"),
                    .last = {.layer = -1, .step = -1},
                    .here = {.layer = -1, .step = -1},
                    .since_ms = cf_now_ms(),
                    .first_to_give_up = -1,
                    .unanswered = -1};
    pthread_mutex_init(&w->lock, NULL);
    card mine = own_card();
    w->socket = open_socket(ranks->local_size == size ? INADDR_LOOPBACK : INADDR_ANY, &mine.port);
    ranks->allgather(ranks, &mine, w->cards, sizeof mine);
    cf_mac secret = cf_secret();
    w->key = cf_mac_of(&secret, w->cards, (size_t)size * sizeof *w->cards);
    keep_ways(w->cards, size, &mine);
    if (w->socket >= 0 && pthread_create(&w->thread, NULL, receive, w) != 0) cf_die(NULL, "cannot start the thread of the watch");
    return w;
}

void cf_watch_close(cf_watch *w) {
    if (!w) return;
    if (w->socket >= 0) {
        pthread_cancel(w->thread); // in recvfrom() or sendto(), where it holds nothing
        pthread_join(w->thread, NULL);
        close(w->socket);
    }
    free(w->others);
    free(w->cards);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

// --- deadlines inside libraries ---

static struct {
    pthread_t thread;
    const char *what;
    double timeout_s;
    bool runs;
} deadline;

// Time in which this process itself was stopped does not count: whatever time is between two looks counts as one.
static void *end_at_deadline(void *argument) {
    for (double left_ms = deadline.timeout_s * 1e3 + DEADLINE_MORE_MS; left_ms > 0; left_ms -= LOOK_MS)
        poll(NULL, 0, LOOK_MS); // here cf_deadline_end() may end it
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    cf_die("a rank may be dead, frozen or unreachable: see its messages (those of NCCL with "
           "NCCL_DEBUG=INFO), or allow more time with --timeout",
           "rank %d waits for the other ranks: %s; nothing came for %g s", cf_die_rank(), deadline.what, deadline.timeout_s);
    return argument;
}

void cf_deadline_begin(const char *what, double timeout_s) {
    deadline.what = what;
    deadline.timeout_s = timeout_s;
    deadline.runs = timeout_s > 0;
    if (deadline.runs && pthread_create(&deadline.thread, NULL, end_at_deadline, NULL) != 0) cf_die(NULL, "cannot start a thread");
}

void cf_deadline_end(void) {
    if (!deadline.runs) return;
    pthread_cancel(deadline.thread);
    pthread_join(deadline.thread, NULL);
    deadline.runs = false;
}
