// Tests that several ranks run together, under mpirun or alone.
//
// Every rank runs the same tests in the same order; rank 0 runs them under cmocka and reports. A rank that finds an error ends all
// ranks at once (CHECK), because the others would wait for it for ever. For the same reason a crash stays a crash: cmocka would
// catch it on rank 0 and continue with the next test.
#pragma once

#include "tests/cases.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "commfuse/device.h"
#include "commfuse/base/die.h"
#include "commfuse/mesh.h"
#include "commfuse/transport.h"

#define CHECK(condition, ...)                                                                                                      \
    do {                                                                                                                           \
        if (!(condition)) {                                                                                                        \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                                        \
            cf_die("a test failed, see above", __VA_ARGS__);                                                                       \
        }                                                                                                                          \
    } while (0)

static const int ranks_signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGSYS};
enum { RANKS_SIGNALS = sizeof ranks_signals / sizeof ranks_signals[0] };
static struct sigaction ranks_handler[RANKS_SIGNALS]; // from before cmocka

static void ranks_under_cmocka(void **state) {
    const struct CMUnitTest *one = *state;
    for (int i = 0; i < RANKS_SIGNALS; i++) sigaction(ranks_signals[i], &ranks_handler[i], NULL);
    one->test_func(NULL);
}

// Runs all tests of the file on this rank; returns the exit status of the process.
static int ranks_run(int rank) {
    struct CMUnitTest tests[TESTS_MAX] = {0};
    for (int i = 0; i < RANKS_SIGNALS; i++) sigaction(ranks_signals[i], NULL, &ranks_handler[i]);
    for (int i = 0; i < TESTS_MAX; i++) {
        if (!all_tests[i].name) continue;
        if (rank != 0) all_tests[i].test_func(NULL);
        tests[i] = (struct CMUnitTest){all_tests[i].name, ranks_under_cmocka, NULL, NULL, &all_tests[i]};
    }
    return rank == 0 && cmocka_run_group_tests(tests, NULL, NULL) != 0;
}

// A mesh whose groups can communicate.
static inline cf_mesh ranks_mesh(cf_transport *transport, int tp, int dp) {
    cf_mesh mesh;
    cf_mesh_init(&mesh, transport->size, transport->rank, tp, dp);
    cf_mesh_bind(transport, &mesh);
    return mesh;
}
