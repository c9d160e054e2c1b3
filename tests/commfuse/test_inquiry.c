// ranks: 1
//
// The verdict of the watch: from where each rank says that it is to who is to blame, in words. Worlds of a few ranks are
// written down by hand.
#include "tests/death.h"
#include "commfuse/watch.c"

enum { SIZE = 24 };

typedef struct world {
    other others[SIZE];
    char text[2048];
    const char *hint;
} world;

static world w;

static void is(int rank, finding what) {
    w.others[rank] = (other){.is = what};
}

static void computes(int rank, const char *label, int layer, int step) {
    is(rank, ANSWERED);
    position *at = &w.others[rank].at;
    *at = (position){.since_s = 61, .layer = layer, .step = step};
    strcpy(at->label, label);
}

static void waits_for(int rank, int peer, const char *label, int layer, int step) {
    computes(rank, label, layer, step);
    position *at = &w.others[rank].at;
    at->waits = true;
    at->peer = peer;
}

static void waits_for_all(int rank, int size, const char *label, int layer, int step) {
    waits_for(rank, -1, label, layer, step);
    w.others[rank].at.stride = 1;
    w.others[rank].at.size = size;
}

static const char *inquire(int size) {
    w.hint = verdict(w.others, size, 0, w.text, sizeof w.text);
    return w.text;
}

static int setup(void **state) {
    (void)state;
    memset(&w, 0, sizeof w);
    waits_for(0, 1, "reduce-scatter mlp.fc2", 7, 41);
    return 0;
}

static void a_peer_that_is_dead_or_silent_or_computes(void **state) {
    (void)state;
    is(1, DEAD);
    assert_string_equal(inquire(4), "; rank 1 is dead: its process has ended");
    assert_non_null(strstr(w.hint, "killed"));
    is(1, SILENT);
    assert_string_equal(inquire(4), "; rank 1 does not answer: frozen, or its host is dead or cut off");
    assert_non_null(strstr(w.hint, "stopped"));
    computes(1, "reduce-scatter mlp.fc2", 6, 41);
    assert_string_equal(inquire(4), "; rank 1 answers: it computes, for 61 s now, after reduce-scatter mlp.fc2, "
                                    "layer 6, step 41: it is slow, or stuck there");
    assert_non_null(strstr(w.hint, "--timeout"));
    computes(1, "", -1, -1);
    assert_string_equal(inquire(4), "; rank 1 answers: it computes, for 61 s now, and has not begun any operation: "
                                    "it is slow, or stuck there");
}

static void a_chain_leads_to_its_end(void **state) {
    (void)state;
    waits_for(1, 2, "reduce-scatter mlp.fc2", 7, 41);
    waits_for(2, 3, "all-gather att.qkv", 8, 41);
    is(3, SILENT);
    assert_string_equal(inquire(4), "; rank 1 answers: it waits for rank 2: reduce-scatter mlp.fc2, layer 7, step 41"
                                    "; the chain of waiting ranks ends there: rank 3 does not answer: frozen, or its "
                                    "host is dead or cut off: look at rank 3");
}

static void a_long_chain_leads_to_its_end(void **state) {
    (void)state;
    for (int i = 1; i < 20; i++) waits_for(i, i + 1, "reduce-scatter mlp.fc2", 7, 41);
    is(20, DEAD);
    assert_string_equal(inquire(SIZE), "; rank 1 answers: it waits for rank 2: reduce-scatter mlp.fc2, layer 7, step "
                                       "41; the chain of waiting ranks ends there: rank 20 is dead: its process has "
                                       "ended: look at rank 20");
}

static void ranks_that_wait_for_each_other_are_desynchronised(void **state) {
    (void)state;
    waits_for(1, 0, "all-gather att.qkv", 2, 42);
    assert_string_equal(inquire(2), "; rank 1 answers: it waits for rank 0: all-gather att.qkv, layer 2, "
                                    "step 42: the ranks are not at the same operation "
                                    "(desynchronised)");
    assert_non_null(strstr(w.hint, "same program"));
}

static void a_circle_of_three(void **state) {
    (void)state;
    waits_for(1, 2, "reduce-scatter mlp.fc2", 7, 41);
    waits_for(2, 0, "barrier", -1, 42);
    assert_string_equal(inquire(3), "; rank 1 answers: it waits for rank 2: reduce-scatter mlp.fc2, layer 7, step 41"
                                    "; the chain of waiting ranks goes on: rank 2 answers: it waits for rank 0: "
                                    "barrier, step 42: the ranks are not at the same operation (desynchronised)");
    waits_for(2, 0, "reduce-scatter mlp.fc2", 7, 41);
    assert_non_null(strstr(inquire(3), "messages are lost or late"));
    assert_non_null(strstr(w.hint, "network"));
}

static void of_a_collective_only_those_are_named_who_are_elsewhere(void **state) {
    (void)state;
    for (int i = 0; i < 6; i++) waits_for_all(i, 6, "barrier", -1, 41);
    is(3, SILENT);
    computes(5, "all-gather mlp.fc1", 0, 41);
    assert_string_equal(inquire(6), "; rank 3 does not answer: frozen, or its host is dead or cut off; rank 5 answers: "
                                    "it computes, for 61 s now, after all-gather mlp.fc1, layer 0, step 41: it is "
                                    "slow, or stuck there");
    assert_non_null(strstr(w.hint, "stopped")); // the worse one's
    // One of a ring, whose neighbour is in the barrier.
    waits_for_all(3, 6, "barrier", -1, 41);
    waits_for(5, 4, "all-gather mlp.fc1", 3, 40);
    assert_string_equal(inquire(6), "; rank 5 answers: it waits for rank 4: all-gather mlp.fc1, layer 3, step 40: the "
                                    "ranks are not at the same operation (desynchronised)");
}

static void of_many_a_few_are_named(void **state) {
    (void)state;
    waits_for_all(0, SIZE, "barrier", -1, 41);
    for (int i = 1; i < SIZE; i++) is(i, DEAD);
    inquire(SIZE);
    assert_non_null(strstr(w.text, "; rank 4 is dead: its process has ended; and 19 more"));
    assert_null(strstr(w.text, "rank 5"));
}

static void a_text_that_is_too_long_is_cut(void **state) {
    (void)state;
    char text[16];
    memset(text, 'x', sizeof text);
    is(1, DEAD);
    inquire(4);
    verdict(w.others, 4, 0, text, 10);
    assert_string_equal(text, "; rank 1 ");
    assert_int_equal(text[10], 'x');
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(a_peer_that_is_dead_or_silent_or_computes, setup),
        cmocka_unit_test_setup(a_chain_leads_to_its_end, setup),
        cmocka_unit_test_setup(a_long_chain_leads_to_its_end, setup),
        cmocka_unit_test_setup(ranks_that_wait_for_each_other_are_desynchronised, setup),
        cmocka_unit_test_setup(a_circle_of_three, setup),
        cmocka_unit_test_setup(of_a_collective_only_those_are_named_who_are_elsewhere, setup),
        cmocka_unit_test_setup(of_many_a_few_are_named, setup),
        cmocka_unit_test_setup(a_text_that_is_too_long_is_cut, setup),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
