// Tests that several ranks run together, under mpirun or alone.
//
// Every rank runs the same tests in the same order; rank 0 runs them under cmocka and reports. A rank that finds an error ends all
// ranks at once (CHECK), because the others would wait for it for ever. For the same reason a crash stays a crash: cmocka would
// catch it on rank 0 and continue with the next test.
#pragma once

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
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

typedef void ranks_test(void);
typedef struct ranks_case {
    const char *name;
    ranks_test *run;
} ranks_case;
#define RANKS_CASE(test)                                                                                                           \
    { #test, test }

static const int ranks_signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGSYS};
enum { RANKS_SIGNALS = sizeof ranks_signals / sizeof ranks_signals[0], RANKS_CASES_MAX = 64 };
static struct sigaction ranks_handler[RANKS_SIGNALS]; // from before cmocka

static void ranks_under_cmocka(void **state) {
    const ranks_case *one = *state;
    for (int i = 0; i < RANKS_SIGNALS; i++) sigaction(ranks_signals[i], &ranks_handler[i], NULL);
    one->run();
}

// Runs all cases on this rank; returns the exit status of the process.
static int ranks_run(int rank, const ranks_case *cases, int count) {
    struct CMUnitTest tests[RANKS_CASES_MAX];
    if (count > RANKS_CASES_MAX) cf_die(NULL, "more than %d cases", RANKS_CASES_MAX);
    for (int i = 0; i < count && rank != 0; i++) cases[i].run();
    if (rank != 0) return 0;
    for (int i = 0; i < RANKS_SIGNALS; i++) sigaction(ranks_signals[i], NULL, &ranks_handler[i]);
    for (int i = 0; i < count; i++)
        tests[i] = (struct CMUnitTest){cases[i].name, ranks_under_cmocka, NULL, NULL, (void *)&cases[i]};
    return _cmocka_run_group_tests("ranks", tests, (size_t)count, NULL, NULL) != 0;
}

// A mesh whose groups can communicate.
static inline cf_mesh ranks_mesh(cf_transport *transport, int tp, int dp) {
    cf_mesh mesh;
    cf_mesh_init(&mesh, transport->size, transport->rank, tp, dp);
    cf_mesh_bind(transport, &mesh);
    return mesh;
}
