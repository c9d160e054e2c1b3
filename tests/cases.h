// The tests of a file under cmocka. TEST(name) { … } defines one and puts it on the list, in the order of the file:
//
//     int main(void) {
//         return cmocka_run_group_tests(all_tests, NULL, NULL);
//     }
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

enum { TESTS_MAX = 64 };
static struct CMUnitTest all_tests[TESTS_MAX] __attribute__((unused)); // cmocka leaves out those without a name

// At this place of the list, between two functions or NULL.
#define TEST_AT(place, setup, name, teardown)                                                                                      \
    static void name(void **state);                                                                                                \
    __attribute__((constructor)) static void list_##name(void) {                                                                   \
        all_tests[place] = (struct CMUnitTest){#name, name, setup, teardown, NULL};                                                \
    }                                                                                                                              \
    static void name(void **state __attribute__((unused)))
#define TEST_BETWEEN(setup, name, teardown) TEST_AT(__COUNTER__ + 1, setup, name, teardown)
#define TEST(name)                          TEST_BETWEEN(NULL, name, NULL)
#define TEST_FIRST(name)                    TEST_AT(0, NULL, name, NULL) // before all others
