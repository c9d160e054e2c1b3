// ranks: 1
//
// The verdict of the watch: from the position of each rank, which ranks are to blame, in words.
#include "tests/death.h"
#include "commfuse/launch/watch.c"

enum { SIZE = 24 };

static rank_state ranks[SIZE]; // this rank is 0
static char text[2048];
static const char *hint;

static void computes(int rank, const char *label, int layer, int step) {
    ranks[rank] = (rank_state){.answered = true, .at = {.since_s = 61, .layer = layer, .step = step}};
    strcpy(ranks[rank].at.label, label);
}

static void waits_for(int rank, int peer, const char *label, int layer, int step) {
    computes(rank, label, layer, step);
    ranks[rank].at.waits = true;
    ranks[rank].at.peer = peer;
}

static void is_gone(int rank, bool refused) {
    ranks[rank] = (rank_state){.refused = refused};
}

static const char *inquire(int size) {
    hint = verdict(ranks, size, 0, text, sizeof text);
    return text;
}

// All wait for each other in one operation.
static int setup(void **state) {
    (void)state;
    for (int i = 0; i < SIZE; i++) waits_for(i, (i + 1) % SIZE, "reduce-scatter mlp.fc2", 7, 41);
    return 0;
}

#define INQUIRY_TEST(name) TEST_BETWEEN(setup, name, NULL)

INQUIRY_TEST(a_rank_that_is_dead_or_silent_or_computes) {
    is_gone(1, true);
    assert_string_equal(inquire(4), "; rank 1 is dead: its process has ended");
    assert_non_null(strstr(hint, "killed"));
    is_gone(1, false);
    assert_string_equal(inquire(4), "; rank 1 does not answer: frozen, or its host is dead or cut off");
    assert_non_null(strstr(hint, "stopped"));
    computes(1, "reduce-scatter mlp.fc2", 6, 41);
    assert_string_equal(inquire(4), "; rank 1 answers: it computes, for 61 s now, after reduce-scatter mlp.fc2, "
                                    "layer 6, step 41: it is slow, or stuck there");
    assert_non_null(strstr(hint, "longer timeout"));
    computes(1, "", -1, -1);
    assert_string_equal(inquire(4), "; rank 1 answers: it computes, for 61 s now, and has not begun any operation: "
                                    "it is slow, or stuck there");
}

INQUIRY_TEST(the_end_of_a_chain_is_named_and_not_its_links) {
    is_gone(20, true);
    waits_for(2, 3, "all-gather att.qkv", 8, 41);
    assert_string_equal(inquire(SIZE), "; rank 20 is dead: its process has ended");
}

INQUIRY_TEST(ranks_that_are_gone_go_before_those_that_compute) {
    computes(1, "barrier", -1, 41);
    is_gone(2, false);
    is_gone(3, true);
    assert_string_equal(inquire(4), "; rank 2 does not answer: frozen, or its host is dead or cut off; rank 3 is dead: its process "
                                    "has ended");
    assert_non_null(strstr(hint, "killed")); // the worse one's
}

INQUIRY_TEST(those_that_compute_go_before_those_that_are_elsewhere) {
    waits_for(1, -1, "barrier", -1, 42);
    computes(2, "barrier", -1, 41);
    assert_string_equal(inquire(3),
                        "; rank 2 answers: it computes, for 61 s now, after barrier, step 41: it is slow, or stuck there");
}

INQUIRY_TEST(ranks_that_wait_for_each_other_are_desynchronised) {
    waits_for(1, 0, "all-gather att.qkv", 2, 42);
    assert_string_equal(inquire(2), "; rank 1 answers: it waits for rank 0: all-gather att.qkv, layer 2, "
                                    "step 42: the ranks are not at the same operation "
                                    "(desynchronised)");
    assert_non_null(strstr(hint, "same program"));
    waits_for(1, -1, "reduce-scatter mlp.fc2", 7, 42); // the next step's
    assert_non_null(
        strstr(inquire(2), "rank 1 answers: it waits for the other ranks: reduce-scatter mlp.fc2, layer 7, step 42: the"));
}

INQUIRY_TEST(one_operation_with_two_configs) {
    ranks[2].at.config = 1;
    assert_string_equal(inquire(4),
                        "; rank 2 answers: it waits for rank 3: reduce-scatter mlp.fc2, layer 7, step 41: it has another "
                        "config of that operation");
    assert_non_null(strstr(hint, "the same config"));
    waits_for(1, 0, "barrier", -1, 42); // elsewhere
    assert_non_null(strstr(inquire(4), "desynchronised"));
    assert_non_null(strstr(hint, "same program"));
}

INQUIRY_TEST(of_a_circle_one_that_is_elsewhere_is_named) {
    waits_for(2, 3, "barrier", -1, 42);
    waits_for(5, 4, "all-gather mlp.fc1", 3, 40);
    assert_string_equal(inquire(6),
                        "; rank 2 answers: it waits for rank 3: barrier, step 42: the ranks are not at the same operation "
                        "(desynchronised)");
}

INQUIRY_TEST(a_circle_in_one_operation) {
    assert_string_equal(inquire(SIZE), "; they wait for each other in the same operation: messages are lost or late");
    assert_non_null(strstr(hint, "network"));
}

INQUIRY_TEST(of_many_a_few_are_named) {
    for (int i = 1; i < SIZE; i++) is_gone(i, i == SIZE - 1);
    inquire(SIZE);
    assert_non_null(strstr(text, "; rank 4 does not answer: frozen, or its host is dead or cut off; and 19 more"));
    assert_null(strstr(text, "rank 5"));
    assert_non_null(strstr(hint, "killed")); // though the dead one is among the 19
}

INQUIRY_TEST(a_text_that_is_too_long_is_cut) {
    char small[16];
    memset(small, 'x', sizeof small);
    is_gone(1, true);
    verdict(ranks, 4, 0, small, 10);
    assert_string_equal(small, "; rank 1 ");
    assert_int_equal(small[10], 'x');
}

int main(void) {
    return cmocka_run_group_tests(all_tests, NULL, NULL);
}
