// See watch.h. Everything is a packet: who sends it, to whom, and where that rank is.
//
//   QUESTION   where are you?
//   ANSWER     here; repeats the question's number, which nobody can foresee
//   FAREWELL   I have waited too long and give up
//   SILENCE    and you have not answered: a process that was stopped learns it when it goes on
//
// The thread of the watch answers questions and keeps farewells. Questions are asked from a socket of their own by the
// thread that gives up: the answers come back to it, and so does the word of a host on which nobody listens at that
// port any more (the error queue): that process is dead. Questions are repeated, as packets may be lost; who
// has not answered after SILENCE_MS is frozen, or its host is gone.
//
// Who has given up may have ended when it is asked. Its farewell says where it was, and counts as its answer.
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
#include "inquiry.h"
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
    QUESTION = 1,
    ANSWER,
    FAREWELL,
    SILENCE,
    ADDRESSES_MAX = 16,
    PACKETS_MAX = 4096, // taken at a time
    LOOK_MS = 50,
    REPEAT_MS = 250,
    REFUSED_MS = 100, // who has several addresses may be met at another one
    SILENCE_MS = 2000,
    HEED_MS = 200,   // who still waits so long after another rank has given up does so too
    LINGER_MS = 1500 // after the message: others have heard the farewell, ask and speak
};

typedef struct packet {
    cf_mac code; // of all below
    uint64_t question;
    int32_t kind, from, to, unused;
    cf_whereabouts where;
} packet;

typedef struct card { // where a rank can be asked; equal on all ranks of one host but for the port and random
    uint32_t address[ADDRESSES_MAX];
    int32_t addresses;
    uint16_t port, unused;
    uint64_t random[2];
} card;

typedef struct question {
    double asked_ms, sent_ms;
    uint64_t number;
    bool refused;
} question;

struct cf_watch {
    int rank, size, socket;
    card *cards; // (size), as all that follows
    int asking;  // the socket of an inquiry
    cf_answer *answers;
    question *questions;
    int *next;
    cf_mac key;
    bool deaf; // ranks cannot reach each other; the same on all of them
    pthread_t thread;
    pthread_mutex_t lock; // of what follows
    cf_whereabouts last;  // what was posted last …
    cf_whereabouts here;  // … or what is waited for
    double since_ms;
    cf_wait wait; // for cf_stop_waits()
    cf_answer *farewells;
    int told; // which rank gave up first; -1: none has
    double told_ms;
    int missed_by; // who has asked this rank in vain; -1: nobody
};

static atomic_bool gave_up; // this process

// --- addresses ---

static void add_address(card *c, const struct ifaddrs *i) {
    if (!i->ifa_addr || i->ifa_addr->sa_family != AF_INET || c->addresses == ADDRESSES_MAX) return;
    if (!(i->ifa_flags & IFF_UP) || (i->ifa_flags & IFF_LOOPBACK)) return;
    c->address[c->addresses++] = ((const struct sockaddr_in *)(const void *)i->ifa_addr)->sin_addr.s_addr;
}

// -1: there is none.
static int open_socket(uint16_t *port) {
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_ANY)};
    socklen_t length = sizeof any;
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool bound = fd >= 0 && bind(fd, (struct sockaddr *)&any, sizeof any) == 0 &&
                 getsockname(fd, (struct sockaddr *)&any, &length) == 0;
    if (!bound)
        fprintf(stderr, "note: rank %d has no UDP socket (%s); should ranks stop, messages cannot say why\n",
                cf_die_rank(), strerror(errno));
    if (!bound && fd >= 0) close(fd);
    *port = any.sin_port;
    return bound ? fd : -1;
}

static card own_card(void) {
    card c;
    memset(&c, 0, sizeof c);
    struct ifaddrs *all = NULL;
    if (getifaddrs(&all) == 0)
        for (const struct ifaddrs *i = all; i; i = i->ifa_next) add_address(&c, i);
    freeifaddrs(all);
    cf_random(c.random, sizeof c.random);
    return c;
}

static bool has_address(const card *c, uint32_t address) {
    for (int i = 0; i < c->addresses; i++)
        if (c->address[i] == address) return true;
    return false;
}

static bool same_host(const card *a, const card *b) {
    return a->addresses == b->addresses && memcmp(a->address, b->address, sizeof a->address) == 0;
}

// Does what that rank sends come from there?
static bool is_at(const cf_watch *w, int rank, uint32_t address) {
    const card *mine = &w->cards[w->rank], *other = &w->cards[rank];
    return same_host(mine, other) ? address == htonl(INADDR_LOOPBACK) : has_address(other, address);
}

// Is that where this rank sends what is for the other?
static bool reaches(const cf_watch *w, int rank, uint32_t address) {
    return is_at(w, rank, address) && !has_address(&w->cards[w->rank], address);
}

// --- packets ---

static cf_mac code_of(const cf_watch *w, const packet *p) {
    return cf_mac_of(&w->key, &p->question, sizeof *p - offsetof(packet, question));
}

// Where this rank is.
static packet packet_of(cf_watch *w, int kind, int to, uint64_t number) {
    packet p;
    memset(&p, 0, sizeof p);
    pthread_mutex_lock(&w->lock);
    p.where = w->here;
    memcpy(p.where.posted, w->last.posted, sizeof p.where.posted);
    p.where.since_s = (cf_now_ms() - w->since_ms) * 1e-3;
    pthread_mutex_unlock(&w->lock);
    p.kind = kind;
    p.from = w->rank;
    p.to = to;
    p.question = number;
    p.code = code_of(w, &p);
    return p;
}

static void send_packet(const cf_watch *w, int socket, const packet *p) {
    const card *to = &w->cards[p->to];
    for (int i = -1; i < to->addresses; i++) {
        uint32_t address = i < 0 ? htonl(INADDR_LOOPBACK) : to->address[i];
        struct sockaddr_in name = {.sin_family = AF_INET, .sin_port = to->port, .sin_addr.s_addr = address};
        // Refused, or no way there: whoever asks sees that no answer comes. But the first error may be of an earlier
        // packet, to somebody who is gone, and this one has not been sent.
        for (int tries = 0; reaches(w, p->to, address) && tries < 2; tries++)
            if (sendto(socket, p, sizeof *p, MSG_DONTWAIT, (struct sockaddr *)&name, sizeof name) >= 0 ||
                errno != ECONNREFUSED)
                break;
    }
}

static bool is_rank(const cf_watch *w, int64_t rank) {
    return rank >= 0 && rank < w->size;
}

// Takes one that has come. False: it is not to be believed, or cannot be.
static bool receive_packet(const cf_watch *w, int socket, int flags, packet *p, struct sockaddr_in *from) {
    socklen_t length = sizeof *from;
    cf_whereabouts *at = &p->where;
    *from = (struct sockaddr_in){0};
    if (recvfrom(socket, p, sizeof *p, flags | MSG_TRUNC, (struct sockaddr *)from, &length) != sizeof *p)
        return false;
    if (!is_rank(w, p->from) || p->to != w->rank || !is_at(w, p->from, from->sin_addr.s_addr)) return false;
    cf_mac code = code_of(w, p);
    if (!cf_mac_equal(&code, &p->code)) return false;
    at->label[CF_INQUIRY_LABEL - 1] = 0;
    cf_printable(at->label);
    return at->group >= 0 && at->group < CF_INQUIRY_GROUPS && at->size >= 0 && at->size <= w->size &&
           (at->peer >= 0
                ? is_rank(w, at->peer)
                : is_rank(w, at->first) && is_rank(w, at->first + (at->size - 1) * (int64_t)at->stride));
}

// --- the thread ---

static void hear(cf_watch *w, const packet *p) {
    pthread_mutex_lock(&w->lock);
    if (p->kind == FAREWELL) {
        w->farewells[p->from] = (cf_answer){CF_ANSWERED, p->where};
        if (w->told < 0) w->told_ms = cf_now_ms();
        if (w->told < 0) w->told = p->from;
    } else if (w->missed_by < 0)
        w->missed_by = p->from;
    pthread_mutex_unlock(&w->lock);
}

static void *listen_to_others(void *argument) {
    cf_watch *w = (cf_watch *)argument;
    for (;;) { // cf_watch_close() ends it where it receives or sends, and holds nothing
        packet p;
        struct sockaddr_in from;
        if (!receive_packet(w, w->socket, 0, &p, &from)) continue;
        if (p.kind == FAREWELL || p.kind == SILENCE) hear(w, &p);
        if (p.kind != QUESTION) continue;
        p = packet_of(w, ANSWER, p.from, p.question);
        sendto(w->socket, &p, sizeof p, MSG_DONTWAIT, (struct sockaddr *)&from, sizeof from);
    }
    return NULL;
}

// --- where this rank is ---

static void set_operation(cf_whereabouts *at, int group, const char *label, int layer, int step) {
    size_t length = strnlen(label, sizeof at->label - 1);
    memset(at->label, 0, sizeof at->label);
    memcpy(at->label, label, length);
    at->group = group;
    at->layer = layer;
    at->step = step;
}

void cf_watch_posted(cf_watch *w, int number, const char *label, int layer, int step) {
    if (!w) return;
    pthread_mutex_lock(&w->lock);
    set_operation(&w->last, number, label, layer, step);
    w->last.posted[number]++;
    if (!w->here.waits) w->here = w->last;
    w->since_ms = cf_now_ms();
    pthread_mutex_unlock(&w->lock);
}

void cf_watch_waits(cf_watch *w, int number, const cf_group *group, cf_wait wait) {
    if (!w) return;
    pthread_mutex_lock(&w->lock);
    if (!w->here.waits) w->since_ms = cf_now_ms();
    set_operation(&w->here, number, wait.label, wait.layer, wait.step);
    w->here.waits = true;
    w->here.peer = wait.peer < 0 && group->size == 2 ? group->world[1 - group->rank] : wait.peer;
    w->here.first = group->world[0];
    w->here.stride = group->size > 1 ? group->world[1] - group->world[0] : 1;
    w->here.size = group->size;
    w->wait = wait;
    pthread_mutex_unlock(&w->lock);
    cf_stop_waits(&w->wait);
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
    double told_ms = w->told_ms;
    pthread_mutex_unlock(&w->lock);
    return told_ms > 0 && cf_now_ms() - told_ms >= HEED_MS;
}

// --- the inquiry ---

// Anew; whoever was asked before may be asked again.
static void begin_inquiry(cf_watch *w) {
    int on = 1;
    memset(w->answers, 0, (size_t)w->size * sizeof *w->answers);
    memset(w->questions, 0, (size_t)w->size * sizeof *w->questions);
    w->asking = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (w->asking >= 0) setsockopt(w->asking, IPPROTO_IP, IP_RECVERR, &on, sizeof on);
}

static void end_inquiry(cf_watch *w) {
    if (w->asking >= 0) close(w->asking);
}

static void send_to(cf_watch *w, int kind, int rank) {
    packet p = packet_of(w, kind, rank, w->questions[rank].number);
    w->questions[rank].sent_ms = cf_now_ms();
    send_packet(w, w->asking, &p);
}

static int ask_next(cf_watch *w) {
    int count = cf_inquiry_next(w->answers, w->size, w->rank, w->next);
    for (int i = 0; i < count; i++) {
        question *asked = &w->questions[w->next[i]];
        w->answers[w->next[i]].kind = CF_ASKED;
        cf_random(&asked->number, sizeof asked->number);
        asked->asked_ms = cf_now_ms();
        send_to(w, QUESTION, w->next[i]);
    }
    return count;
}

// What is there, and of it what answers.
static void hear_answers(cf_watch *w) {
    packet p;
    struct sockaddr_in from;
    char any;
    for (int i = 0; i < PACKETS_MAX && recv(w->asking, &any, sizeof any, MSG_PEEK | MSG_DONTWAIT) >= 0; i++)
        if (receive_packet(w, w->asking, MSG_DONTWAIT, &p, &from) && p.kind == ANSWER &&
            w->answers[p.from].kind == CF_ASKED && p.question == w->questions[p.from].number)
            w->answers[p.from] = (cf_answer){CF_ANSWERED, p.where};
}

// Questions that came back: on that host nobody listens at that port. All local ranks are at one address.
static void hear_refusals(cf_watch *w) {
    for (;;) {
        union {
            struct cmsghdr aligned;
            char bytes[512];
        } control;
        struct sockaddr_in to = {.sin_port = 0};
        struct msghdr message = {.msg_name = &to,
                                 .msg_namelen = sizeof to,
                                 .msg_control = &control,
                                 .msg_controllen = sizeof control};
        if (recvmsg(w->asking, &message, MSG_ERRQUEUE | MSG_DONTWAIT) < 0) return;
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        if (!c || c->cmsg_type != IP_RECVERR) continue;
        struct sock_extended_err error;
        memcpy(&error, CMSG_DATA(c), sizeof error);
        if (error.ee_errno != ECONNREFUSED) continue;
        for (int i = 0; i < w->size; i++)
            if (w->cards[i].port == to.sin_port && reaches(w, i, to.sin_addr.s_addr))
                w->questions[i].refused = true;
    }
}

// Nothing comes from it any more: it said so itself, it is dead, or it is silent.
static void conclude(cf_watch *w, int rank) {
    pthread_mutex_lock(&w->lock);
    if (w->farewells[rank].kind == CF_ANSWERED)
        w->answers[rank] = w->farewells[rank];
    else
        w->answers[rank].kind = w->questions[rank].refused ? CF_GONE : CF_SILENT;
    pthread_mutex_unlock(&w->lock);
}

// How many answers are still to come.
static int settle(cf_watch *w) {
    int open = 0;
    for (int i = 0; i < w->size; i++) {
        if (w->answers[i].kind != CF_ASKED) continue;
        double now_ms = cf_now_ms(), waited_ms = now_ms - w->questions[i].asked_ms;
        if (waited_ms > (w->questions[i].refused ? REFUSED_MS : SILENCE_MS)) {
            conclude(w, i);
            continue;
        }
        open++;
        if (now_ms - w->questions[i].sent_ms > REPEAT_MS) send_to(w, QUESTION, i);
    }
    return open;
}

// Asks all that this rank waits for, as stands in its own answer, and those that they wait for.
static void ask_around(cf_watch *w) {
    for (int open = 0; ask_next(w) + open > 0; open = settle(w)) {
        struct pollfd look = {w->asking, POLLIN, 0};
        poll(&look, 1, LOOK_MS);
        hear_answers(w);
        hear_refusals(w);
    }
}

static const char *inquire(cf_watch *w, char *text, size_t bytes) {
    begin_inquiry(w);
    w->answers[w->rank] = (cf_answer){CF_ANSWERED, packet_of(w, FAREWELL, w->rank, 0).where};
    for (int i = 0; i < w->size; i++)
        if (i != w->rank) send_to(w, FAREWELL, i);
    ask_around(w);
    for (int i = 0; i < w->size; i++)
        if (w->answers[i].kind == CF_SILENT) send_to(w, SILENCE, i);
    const char *hint = cf_inquiry_verdict(w->answers, w->size, w->rank, text, bytes);
    end_inquiry(w);
    return hint;
}

// Says what is to be added to the message, and returns the hint.
static const char *find_out(cf_watch *w, char *text, size_t bytes) {
    *text = 0;
    if (!w || w->deaf)
        return "that rank may be dead, frozen or slow; see its messages, or allow more time with --timeout";
    atomic_store(&gave_up, true);
    pthread_mutex_lock(&w->lock);
    int told = w->told, missed_by = w->missed_by;
    pthread_mutex_unlock(&w->lock);
    if (missed_by >= 0) {
        snprintf(text, bytes, "; rank %d has given up: this rank did not answer it", missed_by);
        return "this process did not run: was it stopped, or its host asleep or swapping?";
    }
    int length = told >= 0 ? snprintf(text, bytes, "; rank %d has given up", told) : 0;
    return inquire(w, text + length, bytes - (size_t)length);
}

void cf_watch_give_up(cf_watch *w, const char *peers, cf_wait wait, double waited_ms, const char *news) {
    char layer[32] = "", step[32] = "", nothing[64], verdict[1536];
    if (wait.layer >= 0) snprintf(layer, sizeof layer, ", layer %d", wait.layer);
    if (wait.step >= 0) snprintf(step, sizeof step, ", step %d", wait.step);
    snprintf(nothing, sizeof nothing, "nothing came for %.*f s", waited_ms < 1e4, waited_ms / 1e3);
    const char *hint = find_out(w, verdict, sizeof verdict);
    cf_die(hint, "rank %d waits for %s: %s%s%s; %s%s", cf_die_rank(), peers, wait.label, layer, step,
           news ? news : nothing, verdict);
}

void cf_watch_farewell(void) {
    if (atomic_load(&gave_up))
        nanosleep(&(struct timespec){LINGER_MS / 1000, LINGER_MS % 1000 * 1000000L}, NULL);
}

// --- start and end ---

// Every rank asks the one behind it, so that each host is asked from another one before it matters.
static bool neighbour_answers(cf_watch *w) {
    begin_inquiry(w);
    int neighbour = (w->rank + 1) % w->size;
    w->answers[w->rank] = (cf_answer){CF_ANSWERED, {.waits = true, .peer = neighbour}};
    ask_around(w);
    bool answers = w->answers[neighbour].kind == CF_ANSWERED;
    end_inquiry(w);
    return answers;
}

// Either all ranks can be asked or none is.
static void try_it(cf_watch *w, cf_watch_gather *gather, void *argument) {
    char mine = w->socket >= 0 && neighbour_answers(w), *all = calloc((size_t)w->size, 1);
    if (!all) cf_die(NULL, "out of memory for the watch");
    gather(argument, &mine, all, 1);
    for (int i = w->size - 1; i >= 0; i--) {
        if (all[i]) continue;
        if (!w->deaf && w->rank == 0)
            fprintf(stderr,
                    "note: rank %d cannot reach rank %d by UDP (a firewall between their hosts, or another "
                    "COMMFUSE_SECRET?); should ranks stop, messages cannot say why\n",
                    i, (i + 1) % w->size);
        w->deaf = true;
    }
    free(all);
}

// Ranks of one host need nobody else's packets. (Before Linux 5.7 this is root's to ask for; addresses are checked anyway.)
static void keep_to_host(const cf_watch *w) {
    for (int i = 0; i < w->size; i++)
        if (!same_host(&w->cards[i], &w->cards[w->rank])) return;
    setsockopt(w->socket, SOL_SOCKET, SO_BINDTODEVICE, "lo", sizeof "lo");
}

cf_watch *cf_watch_open(int rank, int size, cf_watch_gather *gather, void *argument) {
    if (size == 1) return NULL;
    cf_watch *w = calloc(1, sizeof *w);
    size_t n = (size_t)size;
    if (!w || !(w->cards = calloc(n, sizeof *w->cards)) || !(w->answers = calloc(n, sizeof *w->answers)) ||
        !(w->farewells = calloc(n, sizeof *w->farewells)) || !(w->next = calloc(n, sizeof *w->next)) ||
        !(w->questions = calloc(n, sizeof *w->questions)))
        cf_die(NULL, "out of memory for the watch of %d ranks", size);
    w->rank = rank;
    w->size = size;
    w->last.layer = w->last.step = -1;
    w->here = w->last;
    w->told = w->missed_by = -1;
    w->since_ms = cf_now_ms();
    pthread_mutex_init(&w->lock, NULL);
    card mine = own_card();
    w->socket = open_socket(&mine.port);
    gather(argument, &mine, w->cards, sizeof mine);
    cf_mac secret = cf_secret();
    w->key = cf_mac_of(&secret, w->cards, n * sizeof *w->cards);
    keep_to_host(w);
    if (w->socket >= 0 && pthread_create(&w->thread, NULL, listen_to_others, w) != 0)
        cf_die(NULL, "cannot start the thread of the watch");
    try_it(w, gather, argument);
    return w;
}

void cf_watch_close(cf_watch *w) {
    if (!w) return;
    if (w->socket >= 0) {
        pthread_cancel(w->thread); // in recvfrom() or sendto(), where it holds nothing
        pthread_join(w->thread, NULL);
        close(w->socket);
    }
    free(w->farewells);
    free(w->answers);
    free(w->questions);
    free(w->next);
    free(w->cards);
    pthread_mutex_destroy(&w->lock);
    free(w);
}
