// ranks: 1
//
// Inquiries: from what each rank says of itself to who is to blame, in words. Worlds of a few ranks are written down
// by hand; who is asked, and in which order, is checked on the way.
#include "tests/death.h"
#include "commfuse/inquiry.h"

enum { SIZE = 24 };

typedef struct world {
    cf_answer truth[SIZE], answers[SIZE];
    int asked[SIZE], count;
    char text[2048];
    const char *hint;
} world;

static world w;

static void is(int rank, cf_answer_kind kind) {
    w.truth[rank] = (cf_answer){.kind = kind};
}

static void computes(int rank, const char *label, int layer, int step) {
    is(rank, CF_ANSWERED);
    cf_whereabouts *at = &w.truth[rank].where;
    *at = (cf_whereabouts){.since_s = 61, .layer = layer, .step = step};
    strcpy(at->label, label);
}

static void waits(int rank, int peer, const char *label, int layer, int step) {
    computes(rank, label, layer, step);
    cf_whereabouts *at = &w.truth[rank].where;
    at->waits = true;
    at->peer = peer;
}

static void waits_for_all(int rank, int size, const char *label, int layer, int step) {
    waits(rank, -1, label, layer, step);
    w.truth[rank].where.stride = 1;
    w.truth[rank].where.size = size;
}

// Asks as the watch does, from rank 0.
static const char *inquire(int size) {
    int next[SIZE], count;
    memset(w.answers, 0, sizeof w.answers);
    w.answers[0] = w.truth[0];
    for (w.count = 0; (count = cf_inquiry_next(w.answers, size, 0, next)) > 0;)
        for (int i = 0; i < count; i++) {
            w.answers[next[i]] = w.truth[next[i]];
            w.asked[w.count++] = next[i];
        }
    w.hint = cf_inquiry_verdict(w.answers, size, 0, w.text, sizeof w.text);
    return w.text;
}

static void assert_asked(int count, const int *ranks) {
    assert_int_equal(w.count, count);
    for (int i = 0; i < count; i++) assert_int_equal(w.asked[i], ranks[i]);
}

static int setup(void **state) {
    (void)state;
    memset(&w, 0, sizeof w);
    waits(0, 1, "reduce-scatter mlp.fc2", 7, 41);
    return 0;
}

static void a_peer_that_is_dead_or_silent_or_computes(void **state) {
    (void)state;
    is(1, CF_GONE);
    assert_string_equal(inquire(4), "; rank 1 is dead: its process has ended");
    assert_asked(1, (int[]){1});
    assert_non_null(strstr(w.hint, "killed"));
    is(1, CF_SILENT);
    assert_string_equal(inquire(4), "; rank 1 does not answer: frozen, or its host is dead or cut off");
    assert_non_null(strstr(w.hint, "stopped"));
    computes(1, "reduce-scatter mlp.fc2", 6, 41);
    assert_string_equal(inquire(4),
                        "; rank 1 answers: it computes, for 61 s now, after reduce-scatter mlp.fc2, "
                        "layer 6, step 41: it is slow, or stuck there");
    assert_non_null(strstr(w.hint, "--timeout"));
    computes(1, "", -1, -1);
    assert_string_equal(inquire(4),
                        "; rank 1 answers: it computes, for 61 s now, and has not begun any operation: "
                        "it is slow, or stuck there");
}

static void a_chain_leads_to_its_end(void **state) {
    (void)state;
    waits(1, 2, "reduce-scatter mlp.fc2", 7, 41);
    waits(2, 3, "all-gather att.qkv", 8, 41);
    is(3, CF_SILENT);
    assert_string_equal(inquire(4),
                        "; rank 1 answers: it waits for rank 2: reduce-scatter mlp.fc2, layer 7, step 41"
                        "; the chain of ranks 1, 2, 3 ends there: rank 3 does not answer: frozen, or its "
                        "host is dead or cut off: look at rank 3");
    assert_asked(3, (int[]){1, 2, 3});
}

static void a_long_chain_is_told_in_short(void **state) {
    (void)state;
    for (int i = 1; i < 20; i++) waits(i, i + 1, "reduce-scatter mlp.fc2", 7, 41);
    is(20, CF_GONE);
    assert_string_equal(inquire(SIZE),
                        "; rank 1 answers: it waits for rank 2: reduce-scatter mlp.fc2, layer 7, step "
                        "41; the chain of ranks 1, 2, 3, 4, 5, 6, 7, 8, … 20 ends there: rank 20 is "
                        "dead: its process has ended: look at rank 20");
}

static void ranks_that_wait_for_each_other_are_desynchronised(void **state) {
    (void)state;
    waits(1, 0, "all-gather att.qkv", 2, 42);
    w.truth[0].where.posted[0] = 7;
    w.truth[1].where.posted[0] = 9;
    assert_string_equal(inquire(2),
                        "; rank 1 answers: it waits for rank 0: all-gather att.qkv, layer 2, step 42 (2 "
                        "requests ahead in that group): the ranks are not at the same operation "
                        "(desynchronised)");
    assert_non_null(strstr(w.hint, "same program"));
    w.truth[1].where.posted[0] = 6;
    assert_non_null(strstr(inquire(2), "(1 request behind in that group)"));
}

static void a_circle_of_three(void **state) {
    (void)state;
    waits(1, 2, "reduce-scatter mlp.fc2", 7, 41);
    waits(2, 0, "barrier", -1, 42);
    assert_string_equal(inquire(3),
                        "; rank 1 answers: it waits for rank 2: reduce-scatter mlp.fc2, layer 7, step 41"
                        "; the chain of ranks 1, 2 goes on: rank 2 answers: it waits for rank 0: "
                        "barrier, step 42: the ranks are not at the same operation (desynchronised)");
    waits(2, 0, "reduce-scatter mlp.fc2", 7, 41);
    assert_non_null(strstr(inquire(3), "messages are lost or late"));
    assert_non_null(strstr(w.hint, "network"));
}

static void of_a_collective_only_those_are_named_who_are_elsewhere(void **state) {
    (void)state;
    for (int i = 0; i < 6; i++) waits_for_all(i, 6, "barrier", -1, 41);
    is(3, CF_SILENT);
    computes(5, "all-gather mlp.fc1", 0, 41);
    assert_string_equal(inquire(6),
                        "; rank 3 does not answer: frozen, or its host is dead or cut off; rank 5 answers: "
                        "it computes, for 61 s now, after all-gather mlp.fc1, layer 0, step 41: it is "
                        "slow, or stuck there");
    assert_asked(5, (int[]){1, 2, 3, 4, 5});
    assert_non_null(strstr(w.hint, "stopped")); // the worse one's
    // One of a ring, whose neighbour is in the barrier.
    waits_for_all(3, 6, "barrier", -1, 41);
    waits(5, 4, "all-gather mlp.fc1", 3, 40);
    assert_string_equal(inquire(6),
                        "; rank 5 answers: it waits for rank 4: all-gather mlp.fc1, layer 3, step 40: the "
                        "ranks are not at the same operation (desynchronised)");
}

static void of_many_a_few_are_named(void **state) {
    (void)state;
    waits_for_all(0, SIZE, "barrier", -1, 41);
    for (int i = 1; i < SIZE; i++) is(i, CF_GONE);
    inquire(SIZE);
    assert_non_null(strstr(w.text, "; rank 4 is dead: its process has ended; and 19 more"));
    assert_null(strstr(w.text, "rank 5"));
}

static void a_text_that_is_too_long_is_cut(void **state) {
    (void)state;
    char text[16];
    memset(text, 'x', sizeof text);
    is(1, CF_GONE);
    inquire(4);
    cf_inquiry_verdict(w.answers, 4, 0, text, 10);
    assert_string_equal(text, "; rank 1 ");
    assert_int_equal(text[10], 'x');
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(a_peer_that_is_dead_or_silent_or_computes, setup),
        cmocka_unit_test_setup(a_chain_leads_to_its_end, setup),
        cmocka_unit_test_setup(a_long_chain_is_told_in_short, setup),
        cmocka_unit_test_setup(ranks_that_wait_for_each_other_are_desynchronised, setup),
        cmocka_unit_test_setup(a_circle_of_three, setup),
        cmocka_unit_test_setup(of_a_collective_only_those_are_named_who_are_elsewhere, setup),
        cmocka_unit_test_setup(of_many_a_few_are_named, setup),
        cmocka_unit_test_setup(a_text_that_is_too_long_is_cut, setup),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
