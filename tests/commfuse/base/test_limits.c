// ranks: 1
//
// A rank stays on cores near its GPU, of those that it may use, as a list of /sys names them.
#define _GNU_SOURCE
#include "tests/death.h"
#include "commfuse/base/limits.h"

// cores: a bit for each of the two that this thread may use after it had cores `first` and the next, and got near the list.
static void check(int first, const char *list, int least, int cores) {
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET((size_t)first, &own);
    CPU_SET((size_t)first + 1, &own);
    if (sched_setaffinity(0, sizeof own, &own) != 0 || sched_getaffinity(0, sizeof own, &own) != 0 || CPU_COUNT(&own) < 2) skip();
    cf_limits_near(list, least);
    assert_int_equal(sched_getaffinity(0, sizeof own, &own), 0);
    for (int i = 0; i < 2; i++) assert_int_equal(CPU_ISSET((size_t)(first + i), &own) != 0, cores >> i & 1);
}

TEST(of_two_cores_those_in_the_list_remain) {
    cpu_set_t all;
    int first = 0;
    assert_int_equal(sched_getaffinity(0, sizeof all, &all), 0);
    while (first < CPU_SETSIZE - 2 && !(CPU_ISSET((size_t)first, &all) && CPU_ISSET((size_t)first + 1, &all))) first++;
    char list[64];
    snprintf(list, sizeof list, "%d\n", first);
    check(first, list, 1, 1);
    check(first, list, 2, 3); // too few
    snprintf(list, sizeof list, "%d-%d,5000-6000\n", first + 1, first + 7);
    check(first, list, 1, 2);
    snprintf(list, sizeof list, "%d-%d,%d", first + 2, first + 7, first + 1);
    check(first, list, 1, 2);
    snprintf(list, sizeof list, "%d-%d", first, first + 1);
    check(first, list, 2, 3);
    static const char *const nothing[] = {"", "\n", "5000", "-3", "cores", "7-1"};
    for (size_t i = 0; i < sizeof nothing / sizeof *nothing; i++) check(first, nothing[i], 1, 3);
}

int main(void) {
    return cmocka_run_group_tests(all_tests, NULL, NULL);
}
