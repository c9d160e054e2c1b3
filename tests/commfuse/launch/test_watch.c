// ranks: 1
//
// Which packets the watch accepts. Two ranks' watches run in this process and meet as in a run; then packets are forged from
// the run's token, and sent over the loopback.
#define _GNU_SOURCE
#include "tests/death.h"
#include <dirent.h>
#include <stdbool.h>
#include <sys/socket.h>

static bool bind_fails;
static int bind_or_fail(int fd, const struct sockaddr *name, socklen_t length) {
    return bind_fails ? -1 : bind(fd, name, length);
}
#define bind bind_or_fail
#include "commfuse/launch/watch.c"
#undef bind

enum { SIZE = 2, HEARD_MS = 5000, UNHEARD_MS = 300 };

typedef struct meeting {
    pthread_barrier_t all_given, all_taken;
    char given[SIZE][512]; // for this allgather
    cf_bootstrap ranks[SIZE];
    cf_watch *watch[SIZE];
} meeting;

static meeting m;

static void gather(cf_bootstrap *b, const void *mine, void *all, int64_t bytes) {
    memcpy(m.given[b->rank], mine, (size_t)bytes);
    pthread_barrier_wait(&m.all_given);
    for (int i = 0; i < SIZE; i++) memcpy((char *)all + i * bytes, m.given[i], (size_t)bytes);
    pthread_barrier_wait(&m.all_taken);
}

static void *open_one(void *argument) {
    cf_bootstrap *b = (cf_bootstrap *)argument;
    m.watch[b->rank] = cf_watch_open(b);
    return NULL;
}

static void open_watches(void) {
    pthread_t thread[SIZE];
    for (int i = 0; i < SIZE; i++) {
        m.ranks[i] = (cf_bootstrap){.rank = i, .size = SIZE, .network = 1, .allgather = gather};
        assert_int_equal(pthread_create(&thread[i], NULL, open_one, &m.ranks[i]), 0);
    }
    for (int i = 0; i < SIZE; i++) pthread_join(thread[i], NULL);
}

static void close_watches(void) {
    for (int i = 0; i < SIZE; i++) cf_watch_close(m.watch[i]);
}

static int setup(void **state) {
    (void)state;
    pthread_barrier_init(&m.all_given, NULL, SIZE);
    pthread_barrier_init(&m.all_taken, NULL, SIZE);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    close_watches();
    pthread_barrier_destroy(&m.all_given);
    pthread_barrier_destroy(&m.all_taken);
    return 0;
}

// From rank 1 to rank 0.
static packet forged(bool asks) {
    packet p;
    memset(&p, 0, sizeof p);
    p.asks = asks;
    p.from = 1;
    p.token = m.watch[0]->contacts[0].token;
    return p;
}

static void deliver(packet p, uint16_t port) {
    struct sockaddr_in there = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = port};
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    assert_int_equal(sendto(fd, &p, sizeof p, 0, (struct sockaddr *)&there, sizeof there), sizeof p);
    close(fd);
}

// Does rank 0 believe that rank 1 has given up?
static bool believed(packet p, bool expected) {
    deliver(p, m.watch[0]->contacts[0].port);
    bool believes = false;
    for (int ms = 0; !believes && ms < (expected ? HEARD_MS : UNHEARD_MS); ms += 10) {
        nanosleep(&(struct timespec){0, 10000000}, NULL);
        pthread_mutex_lock(&m.watch[0]->lock);
        believes = m.watch[0]->first_to_give_up == 1;
        pthread_mutex_unlock(&m.watch[0]->lock);
    }
    return believes;
}

#define WATCH_TEST(name) TEST_BETWEEN(setup, name, teardown)

WATCH_TEST(ranks_reach_each_other) {
    open_watches();
    assert_true(m.watch[0]->socket >= 0);
    ask(m.watch[1]);
    assert_true(m.watch[1]->ranks[0].answered);
    assert_true(believed(forged(true), true));
}

WATCH_TEST(another_runs_packet_is_not_believed) {
    open_watches();
    assert_memory_equal(&m.watch[0]->contacts[0].token, &m.watch[1]->contacts[0].token, sizeof(token));
    assert_true(m.watch[0]->contacts[0].token.bits[0] != 0 || m.watch[0]->contacts[0].token.bits[1] != 0);
    packet p = forged(true);
    p.token.bits[1] ^= 1;
    assert_false(believed(p, false));
}

WATCH_TEST(what_cannot_be_is_not_believed) {
    open_watches();
    packet wrong = forged(true);
    for (wrong.at.peer = -2; wrong.at.peer <= SIZE; wrong.at.peer += SIZE + 2) assert_false(believed(wrong, false));
}

WATCH_TEST(a_label_drives_no_terminal) {
    open_watches();
    packet p = forged(true);
    memset(p.at.label, 'x', sizeof p.at.label); // and no end
    memcpy(p.at.label, "\033[2J\xc2\x9b", 6);
    assert_true(believed(p, true));
    const char *label = m.watch[0]->ranks[1].at.label;
    assert_memory_equal(label, "?[2J??x", 7);
    assert_int_equal(strlen(label), sizeof p.at.label - 1);
}

WATCH_TEST(the_first_position_of_a_rank_counts) {
    open_watches();
    cf_watch *w = m.watch[0];
    packet p = forged(false);
    for (p.at.step = 1; p.at.step <= 2; p.at.step++) {
        deliver(p, w->contacts[0].port);
        bool answered = false;
        for (int ms = 0; ms < (answered ? UNHEARD_MS : HEARD_MS); ms += 10) {
            nanosleep(&(struct timespec){0, 10000000}, NULL);
            pthread_mutex_lock(&w->lock);
            answered = w->ranks[1].answered;
            pthread_mutex_unlock(&w->lock);
        }
        assert_true(answered);
        assert_int_equal(w->ranks[1].at.step, 1);
    }
    assert_int_equal(w->first_to_give_up, -1);
}

static int open_files(void) {
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (readdir(folder)) count++;
    closedir(folder);
    return count;
}

TEST(a_socket_that_cannot_be_bound_is_closed) {
    uint16_t port;
    bool ipv4;
    int before = open_files();
    bind_fails = true;
    assert_int_equal(open_socket(in6addr_any, &port, &ipv4), -1);
    bind_fails = false;
    assert_int_equal(open_files(), before);
}

int main(void) {
    return cmocka_run_group_tests(all_tests, NULL, NULL);
}
