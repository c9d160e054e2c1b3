// See watch.h. Everything is a packet: the run's key, who sends it, and where that rank is.
//
//   QUESTION   where are you?
//   ANSWER     here
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
// Each rank tells the IPv4 addresses of its host. Hosts with the same ones are one host, and use the loopback
// address; from others, those that this host has too (bridges of containers) are left out.
#define _GNU_SOURCE
#include "watch.h"
#include "device.h"
#include "die.h"
#include "inquiry.h"
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
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    QUESTION = 1,
    ANSWER,
    FAREWELL,
    SILENCE,
    ADDRESSES_MAX = 6,
    PEERS_MAX = 8192, // told in one packet
    LOOK_MS = 50,
    REPEAT_MS = 250,
    REFUSED_MS = 100, // who has several addresses may be met at another one
    SILENCE_MS = 2000,
    HEED_MS = 200,   // who still waits so long after another rank has given up does so too
    LINGER_MS = 1500 // after the message: others have heard the farewell, ask and speak
};

typedef struct packet {
    uint64_t key;
    int32_t kind, from;
    int32_t waits, layer, step, group, peers;
    double since_s;
    int64_t posted[CF_INQUIRY_GROUPS];
    char label[CF_INQUIRY_LABEL];
    int32_t peer[PEERS_MAX]; // only as many as there are travel
} packet;

typedef struct card { // where a rank can be asked; equal on all ranks of one host but for the port
    uint64_t key;
    uint32_t address[ADDRESSES_MAX];
    int32_t addresses;
    uint16_t port;
} card;

struct cf_watch {
    int rank, size, socket;
    card *cards;
    bool deaf; // ranks cannot reach each other; the same on all of them
    pthread_t thread;
    pthread_mutex_t lock; // of what follows
    struct {              // what was posted last
        char label[CF_INQUIRY_LABEL];
        int layer, step, number;
    } last;
    int64_t posted[CF_INQUIRY_GROUPS];
    double since_ms;
    const cf_group *group; // waits for members of it; NULL: computes
    int number;            // of that group
    cf_wait wait;
    cf_answer *farewells;
    int told; // which rank gave up first; -1: none has
    double told_ms;
    int missed_by; // who has asked this rank in vain; -1: nobody
    packet heard;  // the thread's, and from whom: not on its stack, which is never left in good order
    struct sockaddr_in from;
    socklen_t from_size;
};

static atomic_bool gave_up; // this process

// --- packets ---

static size_t length_of(int peers) {
    return offsetof(packet, peer) + (size_t)peers * sizeof(int32_t);
}

// Where this rank is. Returns the length.
static size_t write_packet(cf_watch *w, int kind, packet *p) {
    memset(p, 0, length_of(0));
    p->key = w->cards[0].key;
    p->kind = kind;
    p->from = w->rank;
    pthread_mutex_lock(&w->lock);
    memcpy(p->posted, w->posted, sizeof p->posted);
    p->since_s = (cf_now_ms() - w->since_ms) * 1e-3;
    p->waits = w->group != NULL;
    p->group = w->group ? w->number : w->last.number;
    p->layer = w->group ? w->wait.layer : w->last.layer;
    p->step = w->group ? w->wait.step : w->last.step;
    snprintf(p->label, sizeof p->label, "%s", w->group ? w->wait.label : w->last.label);
    if (w->group && w->wait.peer >= 0) p->peer[p->peers++] = w->wait.peer;
    for (int i = 0; w->group && w->wait.peer < 0 && i < w->group->size && p->peers < PEERS_MAX; i++)
        if (i != w->group->rank) p->peer[p->peers++] = w->group->world[i];
    pthread_mutex_unlock(&w->lock);
    return length_of(p->peers);
}

// Nobody is believed who does not know the key, and nothing that cannot be.
static bool sound(const cf_watch *w, const packet *p, ssize_t length) {
    if (length < (ssize_t)length_of(0) || p->key != w->cards[0].key) return false;
    if (p->from < 0 || p->from >= w->size || p->group < 0 || p->group >= CF_INQUIRY_GROUPS) return false;
    if (p->peers < 0 || p->peers > PEERS_MAX || (size_t)length != length_of(p->peers)) return false;
    for (int i = 0; i < p->peers; i++)
        if (p->peer[i] < 0 || p->peer[i] >= w->size) return false;
    return memchr(p->label, 0, sizeof p->label) != NULL;
}

static void forget(cf_answer *a) {
    free((void *)a->where.peer);
    memset(a, 0, sizeof *a);
}

static void read_packet(const packet *p, cf_answer *a) {
    int *peer = malloc((size_t)(p->peers + 1) * sizeof *peer);
    if (!peer) cf_die(NULL, "out of memory for what rank %d says", p->from);
    for (int i = 0; i < p->peers; i++) peer[i] = p->peer[i];
    forget(a);
    a->kind = CF_ANSWERED;
    a->where = (cf_whereabouts){.waits = p->waits != 0,
                                .since_s = p->since_s,
                                .layer = p->layer,
                                .step = p->step,
                                .group = p->group,
                                .peers = p->peers,
                                .peer = peer};
    memcpy(a->where.label, p->label, sizeof a->where.label);
    memcpy(a->where.posted, p->posted, sizeof a->where.posted);
}

static void copy_answer(const cf_answer *from, cf_answer *to) {
    int *peer = malloc((size_t)(from->where.peers + 1) * sizeof *peer);
    if (!peer) cf_die(NULL, "out of memory for what another rank said");
    memcpy(peer, from->where.peer, (size_t)from->where.peers * sizeof *peer);
    forget(to);
    *to = *from;
    to->where.peer = peer;
}

// --- addresses ---

static void add_address(card *c, const struct ifaddrs *i) {
    if (!i->ifa_addr || i->ifa_addr->sa_family != AF_INET || c->addresses == ADDRESSES_MAX) return;
    if (!(i->ifa_flags & IFF_UP) || (i->ifa_flags & IFF_LOOPBACK)) return;
    c->address[c->addresses++] = ((const struct sockaddr_in *)(const void *)i->ifa_addr)->sin_addr.s_addr;
}

// -1: this host has no IPv4.
static int open_socket(uint16_t *port) {
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_ANY)};
    socklen_t length = sizeof any;
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&any, sizeof any) != 0 ||
        getsockname(fd, (struct sockaddr *)&any, &length) != 0)
        return -1;
    *port = any.sin_port;
    return fd;
}

static card own_card(void) {
    card c;
    memset(&c, 0, sizeof c);
    struct ifaddrs *all = NULL;
    if (getifaddrs(&all) == 0)
        for (const struct ifaddrs *i = all; i; i = i->ifa_next) add_address(&c, i);
    freeifaddrs(all);
    if (getrandom(&c.key, sizeof c.key, 0) != sizeof c.key) c.key = (uint64_t)getpid();
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

// Is that where this rank sends what is for the other?
static bool reaches(const cf_watch *w, int rank, uint32_t address) {
    const card *mine = &w->cards[w->rank], *to = &w->cards[rank];
    if (same_host(mine, to)) return address == htonl(INADDR_LOOPBACK);
    return has_address(to, address) && !has_address(mine, address);
}

static void send_packet(const cf_watch *w, int socket, int rank, const packet *p, size_t length) {
    const card *to = &w->cards[rank];
    for (int i = -1; i < to->addresses; i++) {
        uint32_t address = i < 0 ? htonl(INADDR_LOOPBACK) : to->address[i];
        struct sockaddr_in name = {.sin_family = AF_INET, .sin_port = to->port, .sin_addr.s_addr = address};
        // Refused, or no way there: whoever asks sees that no answer comes. But the first error may be told of an
        // earlier packet, to somebody who is gone, and this one has not been sent.
        for (int tries = 0; reaches(w, rank, address) && tries < 2; tries++)
            if (sendto(socket, p, length, MSG_DONTWAIT, (struct sockaddr *)&name, sizeof name) >= 0 ||
                errno != ECONNREFUSED)
                break;
    }
}

// --- the thread ---

static void hear_farewell(cf_watch *w, const packet *p) {
    pthread_mutex_lock(&w->lock);
    read_packet(p, &w->farewells[p->from]);
    if (w->told < 0) {
        w->told = p->from;
        w->told_ms = cf_now_ms();
    }
    pthread_mutex_unlock(&w->lock);
}

static void hear_silence(cf_watch *w, const packet *p) {
    pthread_mutex_lock(&w->lock);
    if (w->missed_by < 0) w->missed_by = p->from;
    pthread_mutex_unlock(&w->lock);
}

static void *listen_to_others(void *argument) {
    cf_watch *w = (cf_watch *)argument;
    for (;;) {
        packet *p = &w->heard;
        w->from_size = sizeof w->from;
        ssize_t length = recvfrom(w->socket, p, sizeof *p, 0, (struct sockaddr *)&w->from, &w->from_size);
        if (!sound(w, p, length)) continue;
        if (p->kind == FAREWELL) hear_farewell(w, p);
        if (p->kind == SILENCE) hear_silence(w, p);
        if (p->kind != QUESTION) continue;
        length = (ssize_t)write_packet(w, ANSWER, p);
        sendto(w->socket, p, (size_t)length, MSG_DONTWAIT, (struct sockaddr *)&w->from, w->from_size);
    }
    return NULL;
}

// --- where this rank is ---

void cf_watch_posted(cf_watch *w, int number, const char *label, int layer, int step) {
    if (!w) return;
    pthread_mutex_lock(&w->lock);
    size_t length = strnlen(label, sizeof w->last.label - 1);
    memcpy(w->last.label, label, length);
    w->last.label[length] = 0;
    w->last.layer = layer;
    w->last.step = step;
    w->last.number = number;
    w->posted[number]++;
    w->since_ms = cf_now_ms();
    pthread_mutex_unlock(&w->lock);
}

void cf_watch_waits(cf_watch *w, int number, const cf_group *group, cf_wait wait) {
    if (!w) return;
    pthread_mutex_lock(&w->lock);
    if (!w->group) w->since_ms = cf_now_ms();
    w->wait = wait;
    w->number = number;
    w->group = group;
    pthread_mutex_unlock(&w->lock);
    cf_stop_waits(&w->wait);
}

void cf_watch_goes_on(cf_watch *w) {
    if (!w) return;
    cf_stop_waits(NULL);
    pthread_mutex_lock(&w->lock);
    w->group = NULL;
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

typedef struct question {
    double asked_ms, sent_ms;
    bool refused;
} question;

typedef struct inquiry {
    cf_watch *w;
    int socket;
    cf_answer *answers;
    question *questions;
    int *next;
    packet packet;
} inquiry;

static inquiry *begin_inquiry(cf_watch *w) {
    size_t size = (size_t)w->size;
    int on = 1;
    inquiry *q = calloc(1, sizeof *q);
    if (!q || !(q->answers = calloc(size, sizeof *q->answers)) ||
        !(q->next = calloc(size, sizeof *q->next)) || !(q->questions = calloc(size, sizeof *q->questions)))
        cf_die(NULL, "out of memory for an inquiry among %d ranks", w->size);
    q->w = w;
    q->socket = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (q->socket >= 0) setsockopt(q->socket, IPPROTO_IP, IP_RECVERR, &on, sizeof on);
    return q;
}

static void end_inquiry(inquiry *q) {
    for (int i = 0; i < q->w->size; i++) forget(&q->answers[i]);
    if (q->socket >= 0) close(q->socket);
    free(q->answers);
    free(q->questions);
    free(q->next);
    free(q);
}

static void ask(inquiry *q, int rank) {
    q->questions[rank].sent_ms = cf_now_ms();
    send_packet(q->w, q->socket, rank, &q->packet, write_packet(q->w, QUESTION, &q->packet));
}

static int ask_next(inquiry *q) {
    int count = cf_inquiry_next(q->answers, q->w->size, q->w->rank, q->next);
    for (int i = 0; i < count; i++) {
        q->answers[q->next[i]].kind = CF_ASKED;
        q->questions[q->next[i]].asked_ms = cf_now_ms();
        ask(q, q->next[i]);
    }
    return count;
}

static void hear_answers(inquiry *q) {
    packet *p = &q->packet;
    ssize_t length;
    while ((length = recv(q->socket, p, sizeof *p, MSG_DONTWAIT)) >= 0)
        if (sound(q->w, p, length) && p->kind == ANSWER && q->answers[p->from].kind == CF_ASKED)
            read_packet(p, &q->answers[p->from]);
}

// Questions that came back: on that host nobody listens at that port. All local ranks are at one address.
static void hear_refusals(inquiry *q) {
    for (;;) {
        char control[512];
        struct sockaddr_in to = {.sin_port = 0};
        struct msghdr message = {.msg_name = &to,
                                 .msg_namelen = sizeof to,
                                 .msg_control = control,
                                 .msg_controllen = sizeof control};
        if (recvmsg(q->socket, &message, MSG_ERRQUEUE | MSG_DONTWAIT) < 0) return;
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        if (!c || c->cmsg_type != IP_RECVERR) continue;
        struct sock_extended_err error;
        memcpy(&error, CMSG_DATA(c), sizeof error);
        if (error.ee_errno != ECONNREFUSED) continue;
        for (int i = 0; i < q->w->size; i++)
            if (q->w->cards[i].port == to.sin_port && reaches(q->w, i, to.sin_addr.s_addr))
                q->questions[i].refused = true;
    }
}

// Nothing comes from it any more: it said so itself, it is dead, or it is silent.
static void conclude(inquiry *q, int rank) {
    cf_watch *w = q->w;
    pthread_mutex_lock(&w->lock);
    if (w->farewells[rank].kind == CF_ANSWERED)
        copy_answer(&w->farewells[rank], &q->answers[rank]);
    else
        q->answers[rank].kind = q->questions[rank].refused ? CF_GONE : CF_SILENT;
    pthread_mutex_unlock(&w->lock);
}

// How many answers are still to come.
static int settle(inquiry *q) {
    int open = 0;
    for (int i = 0; i < q->w->size; i++) {
        if (q->answers[i].kind != CF_ASKED) continue;
        double now_ms = cf_now_ms(), waited_ms = now_ms - q->questions[i].asked_ms;
        if (waited_ms > (q->questions[i].refused ? REFUSED_MS : SILENCE_MS)) {
            conclude(q, i);
            continue;
        }
        open++;
        if (now_ms - q->questions[i].sent_ms > REPEAT_MS) ask(q, i);
    }
    return open;
}

// Asks all that this rank waits for, as stands in its own answer, and those that they wait for.
static void ask_around(inquiry *q) {
    for (int open = 0; ask_next(q) + open > 0; open = settle(q)) {
        struct pollfd look = {q->socket, POLLIN, 0};
        poll(&look, 1, LOOK_MS);
        hear_answers(q);
        hear_refusals(q);
    }
}

static void tell_the_silent(inquiry *q) {
    size_t length = write_packet(q->w, SILENCE, &q->packet);
    for (int i = 0; i < q->w->size; i++)
        if (q->answers[i].kind == CF_SILENT) send_packet(q->w, q->socket, i, &q->packet, length);
}

static void say_farewell(inquiry *q) {
    size_t length = write_packet(q->w, FAREWELL, &q->packet);
    read_packet(&q->packet, &q->answers[q->w->rank]); // is also where this rank is
    for (int i = 0; i < q->w->size; i++)
        if (i != q->w->rank) send_packet(q->w, q->socket, i, &q->packet, length);
}

static const char *inquire(cf_watch *w, char *text, size_t bytes) {
    inquiry *q = begin_inquiry(w);
    say_farewell(q);
    ask_around(q);
    tell_the_silent(q);
    const char *hint = cf_inquiry_verdict(q->answers, w->size, w->rank, text, bytes);
    end_inquiry(q);
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
        return "this process stood still: was it stopped, or its host asleep or swapping?";
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
    inquiry *q = begin_inquiry(w);
    int neighbour = (w->rank + 1) % w->size, *peer = malloc(sizeof *peer);
    if (!peer) cf_die(NULL, "out of memory for the watch");
    *peer = neighbour;
    q->answers[w->rank] = (cf_answer){CF_ANSWERED, {.waits = true, .peers = 1, .peer = peer}};
    ask_around(q);
    bool answers = q->answers[neighbour].kind == CF_ANSWERED;
    end_inquiry(q);
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
                    "note: rank %d cannot reach rank %d by UDP (a firewall between their hosts?); "
                    "should ranks stop, messages cannot tell why\n",
                    i, (i + 1) % w->size);
        w->deaf = true;
    }
    free(all);
}

cf_watch *cf_watch_open(int rank, int size, cf_watch_gather *gather, void *argument) {
    if (size == 1) return NULL;
    cf_watch *w = calloc(1, sizeof *w);
    if (!w || !(w->cards = calloc((size_t)size, sizeof *w->cards)) ||
        !(w->farewells = calloc((size_t)size, sizeof *w->farewells)))
        cf_die(NULL, "out of memory for the watch of %d ranks", size);
    w->rank = rank;
    w->size = size;
    w->last.layer = w->last.step = -1;
    w->told = w->missed_by = -1;
    w->since_ms = cf_now_ms();
    pthread_mutex_init(&w->lock, NULL);
    card mine = own_card();
    w->socket = open_socket(&mine.port);
    gather(argument, &mine, w->cards, sizeof mine);
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
    for (int i = 0; i < w->size; i++) forget(&w->farewells[i]);
    free(w->farewells);
    free(w->cards);
    pthread_mutex_destroy(&w->lock);
    free(w);
}
