// ranks: 1
// A signal may come at any moment, so also within a matrix product, which must not notice: neither its result nor the
// heap. Where handlers run on the stack of a product, this test ends in "munmap_chunk(): invalid pointer".
#include "tests/death.h"
#include "commfuse/device.h"
#include "commfuse/stop.h"
#include "layers/gemm.h"
#include <signal.h>
#include <time.h>

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
    int64_t m = 16 + turn * 37 % (M - 16), n = 16 + turn * 53 % (N - 16), k = 16 + turn * 31 % (K - 16),
            wrong = 0;
    bool ta = turn & 1, tb = turn & 2;
    gemm(ta, tb, m, n, k, a, ta ? m : k, b, tb ? k : n, 0, c, n, NULL);
    for (int64_t i = 0; i < m * n; i++) wrong += c[i] != (real)k;
    return wrong;
}

static void products_do_not_notice_signals(void **state) {
    (void)state;
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
    assert_true(turn > 3);
    assert_int_equal(cf_stop_asked(), SIGUSR1);
    free(a);
    free(b);
    free(c);
    free(d);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(products_do_not_notice_signals)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
