// ranks: 1
//
// Signals that ask for the end: the first is recorded and reported, its repeats are ignored, a second one ends the process. Each of
// these cases runs in a process of its own, whose standard error is read back.
//
// A signal may come at any moment, also during a matrix product, and must change neither its result nor the heap. If handlers run
// on the stack of a product, this test ends in "munmap_chunk(): invalid pointer".
#include "tests/death.h"
#include "commfuse/device.h"
#include "commfuse/base/die.h"
#include "commfuse/base/streams.h"
#include "commfuse/launch/stop.h"
#include "layers/kernels/gemm.h"
#include <pthread.h>
#include <signal.h>
#include <time.h>

// --- words ---

enum { UNEXPECTED = 50, LATER_MS = 600, MOMENT_MS = 100, LIMIT_MS = 30000 };

static const cf_wait awaited = {1, "reduce-scatter mlp.fc2", 7, 41, 0};

static void rest(int ms) {
    nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000L}, NULL);
}

static void expect(int asked) {
    for (int ms = 0; asked && cf_stop_asked() == 0 && ms < LIMIT_MS; ms++) rest(1);
    if (cf_stop_asked() != asked) _exit(UNEXPECTED);
}

// The signal is the process's, as a launcher's.
static void send(int number) {
    sigset_t pending;
    kill(getpid(), number);
    do {
        rest(1);
        sigpending(&pending);
    } while (sigismember(&pending, number));
}

static void abort_by_launcher(int status) {
    (void)status;
    send(SIGTERM);
    rest(LIMIT_MS); // the thread that listens ends it
    _exit(UNEXPECTED);
}

static void listen_as_rank_2(void) {
    cf_die_setup(2, 4, NULL);
    cf_stop_listen();
    expect(0);
}

static void signalled_once(int number) {
    listen_as_rank_2();
    send(number);
    expect(number);
    send(SIGTERM); // within a moment: the same
    send(number);
    rest(MOMENT_MS);
    expect(number);
    write(STDERR_FILENO, "goes on\n", 8) == 8 ? _exit(1) : _exit(UNEXPECTED);
}

static void hung_up_under_nohup(void) {
    signal(SIGHUP, SIG_IGN);
    listen_as_rank_2();
    send(SIGHUP);
    rest(MOMENT_MS);
    expect(0);
    write(STDERR_FILENO, "goes on\n", 8) == 8 ? _exit(1) : _exit(UNEXPECTED);
}

static void signalled_twice(void) {
    listen_as_rank_2();
    cf_stop_waits(&awaited);
    send(SIGUSR1);
    expect(SIGUSR1);
    rest(LATER_MS);
    cf_stop_waits(NULL);
    send(SIGINT);
    rest(LIMIT_MS);
}

static void signalled_while_it_waits_for_all(void) {
    static const cf_wait barrier = {-1, "barrier", -1, 1234567890, 0};
    listen_as_rank_2();
    cf_stop_waits(&barrier);
    send(SIGTERM);
    rest(LATER_MS);
    send(SIGTERM);
    rest(LIMIT_MS);
}

// A library's, which blocks nothing.
static void *raise_here(void *unused) {
    sigset_t term;
    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    pthread_sigmask(SIG_UNBLOCK, &term, NULL);
    pthread_kill(pthread_self(), SIGTERM);
    return unused;
}

// What another thread gets is passed on to the one that listens.
static void signalled_in_another_thread(void) {
    pthread_t thread;
    listen_as_rank_2();
    cf_stop_waits(&awaited);
    pthread_create(&thread, NULL, raise_here, NULL);
    pthread_join(thread, NULL);
    expect(SIGTERM);
    rest(LATER_MS);
    pthread_create(&thread, NULL, raise_here, NULL);
    pthread_join(thread, NULL);
    rest(LIMIT_MS);
}

// The thread of streams.h is then the only one that does not block signals: it gets this one while it waits for text.
static void signalled_while_nothing_is_printed(void) {
    cf_streams_open();
    listen_as_rank_2();
    rest(MOMENT_MS);
    send(SIGTERM);
    expect(SIGTERM);
    write(STDERR_FILENO, "exits\n", 6) == 6 ? exit(1) : _exit(UNEXPECTED);
}

// After its error a rank ends by the first signal, without another word.
static void signalled_after_its_error(void) {
    listen_as_rank_2();
    cf_die_setup(2, 4, abort_by_launcher);
    cf_die(NULL, "enough");
}

TEST(the_first_is_remembered) {
    ASSERT_DIES(signalled_once(SIGTERM), "\nrank 2 of 4 (", "): SIGTERM: ends after this step; a second signal ends it", "goes on");
    ASSERT_DIES(signalled_once(SIGINT), ": SIGINT: ends after", "goes on");
    ASSERT_DIES(signalled_once(SIGUSR1), ": SIGUSR1: ends after", "goes on");
    ASSERT_DIES(signalled_once(SIGHUP), ": SIGHUP: ends after", "goes on");
}

TEST(nohup_is_respected) {
    ASSERT_DIES(hung_up_under_nohup(), "goes on");
}

TEST(the_second_ends_the_process) {
    ASSERT_DIES(signalled_twice(), "): SIGUSR1: ends after this step",
                "; it waits for rank 1: reduce-scatter mlp.fc2, layer 7, step 41\n", "\nerror: rank 2 of 4 (",
                "): asked to end at once (SIGINT)\n");
}

TEST(after_an_error_it_ends_in_silence) {
    ASSERT_DIES(signalled_after_its_error(), "\nerror: rank 2 of 4 (", "): enough\n");
}

TEST(what_it_waits_for_is_reported) {
    ASSERT_DIES(signalled_while_it_waits_for_all(), "; it waits for the other ranks: barrier, step 1234567890\n");
    ASSERT_DIES(signalled_in_another_thread(), "; it waits for rank 1: reduce-scatter mlp.fc2, layer 7, step 41\n",
                "asked to end at once (SIGTERM); it waits for rank 1: reduce-scatter mlp.fc2, layer 7, step 41\n");
}

TEST(a_signal_does_not_keep_it_from_its_end) {
    ASSERT_DIES(signalled_while_nothing_is_printed(), "exits\n");
}

// --- matrix products ---

enum { M = 288, N = 192, K = 96, SIGNALS_MS = 250 }; // repeats within half a second are one signal

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

// A process that sends this one signals, as many as go into the time.
static pid_t start_sender(int number) {
    pid_t target = getpid(), sender = fork();
    if (sender != 0) return sender;
    for (double begin = now_ms(); now_ms() - begin < SIGNALS_MS;) {
        kill(target, number);
        usleep(50);
    }
    _exit(0);
}

static bool running(pid_t sender) {
    return waitpid(sender, NULL, WNOHANG) == 0;
}

static real *ones(int64_t count) {
    real *x = malloc((size_t)count * sizeof *x);
    assert_non_null(x);
    for (int64_t i = 0; i < count; i++) x[i] = 1;
    return x;
}

// One product of every kind and of changing sizes; every element is k. How many are not.
static int64_t wrong_elements(const real *a, const real *b, real *c, int turn) {
    int64_t m = 16 + turn * 37 % (M - 16), n = 16 + turn * 53 % (N - 16), k = 16 + turn * 31 % (K - 16), wrong = 0;
    bool ta = turn & 1, tb = turn & 2;
    gemm(ta, tb, m, n, k, a, ta ? m : k, b, tb ? k : n, 0, c, n, NULL);
    for (int64_t i = 0; i < m * n; i++) wrong += c[i] != (real)k;
    return wrong;
}

TEST(products_do_not_notice_signals) {
    real *a = ones(M * K), *b = ones(K * N), *c = ones(M * N), *d = ones(M * N);
    int64_t wrong = 0;
    int turn = 0;
    cf_device_threads(2);
    cf_stop_listen();
    assert_int_equal(cf_stop_asked(), 0);
    for (pid_t sender = start_sender(SIGUSR1); running(sender); turn++) {
        wrong += wrong_elements(a, b, c, turn); // by two threads
#pragma omp parallel for reduction(+ : wrong)
        for (int side = 0; side < 2; side++) // two, by a thread each
            wrong += wrong_elements(a, b, side ? c : d, turn + side);
    }
    assert_int_equal(wrong, 0);
    assert_true(turn > 0);
    assert_int_equal(cf_stop_asked(), SIGUSR1);
    free(a);
    free(b);
    free(c);
    free(d);
}

int main(void) {
    return cmocka_run_group_tests(all_tests, NULL, NULL);
}
