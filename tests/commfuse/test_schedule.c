// ranks: 1
//
// Schedules of every operation, side, row of the table, N = 1…64 and m = 1…4 are generated for all ranks, those of two levels on
// every number of hosts, and must have the properties of commfuse/schedule_check.h and of promise_check.h. A new row is tested
// without a change here. Then the checks themselves are tested: faults of every kind are planted in good schedules, and the checks
// must name the violated property.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>
#include "tests/commfuse/promise_check.h"
#include "tests/commfuse/rows.h"

// All numbers of ranks up to ALL_RANKS are tried, and some beyond; m at most; steps that a planted fault may insert.
enum { ALL_RANKS = 64, SLICES_PER_RANK = 4, ROOM = 16 };
static const int many[] = {127, CF_CHECKED_RANKS}, many_hosts[][2] = {{510, 6}, {500, 20}, {512, 2}, {512, 64}, {512, 256}};

typedef struct kind {
    cf_operation operation;
    cf_side side;
} kind;

typedef struct set { // the schedules of all ranks
    int ranks;
    cf_schedule *of[CF_CHECKED_RANKS];
} set;

enum { AG_ALONE, AG, RS_ALONE, RS, A2A_ALONE, BEFORE_A2A, AFTER_A2A, BOTH_A2A, KINDS };
static const kind kinds[KINDS] = {
    [AG_ALONE] = {CF_ALLGATHER, CF_NO_COMPUTE},      [AG] = {CF_ALLGATHER, CF_COMPUTE_AFTER},
    [RS_ALONE] = {CF_REDUCE_SCATTER, CF_NO_COMPUTE}, [RS] = {CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE},
    [A2A_ALONE] = {CF_ALLTOALL, CF_NO_COMPUTE},      [BEFORE_A2A] = {CF_ALLTOALL, CF_COMPUTE_BEFORE},
    [AFTER_A2A] = {CF_ALLTOALL, CF_COMPUTE_AFTER},   [BOTH_A2A] = {CF_ALLTOALL, CF_COMPUTE_BOTH},
};
static const char *const side_name[] = {"no compute", "compute before", "compute after", "compute on both sides"};

static const cf_algorithm *serving(const cf_algorithm *row, kind of) { // NULL: the row leads to none
    return cf_algorithm_serving(row, of.operation, of.side);
}

static set set_create_on(int hosts, kind of, const cf_algorithm *row, int ranks, int slices) {
    set all = {.ranks = ranks};
    for (int r = 0; r < ranks; r++) {
        all.of[r] = cf_schedule_create(of.operation, of.side, row, ranks, hosts, r, slices);
        assert_non_null(all.of[r]);
    }
    return all;
}

static set set_create(kind of, const cf_algorithm *row, int ranks, int slices) {
    return set_create_on(row_hosts(row, ranks), of, row, ranks, slices);
}

static void set_free(set *all) {
    for (int r = 0; r < all->ranks; r++) cf_schedule_free(all->of[r]);
}

// A planted fault that breaks a promise may also make the schedule incorrect.
static void assert_property(const set *all, const char *expected, const char *what) {
    static const char *const promises[] = {"unit", "volume", "own slice", "work order", "tail", "arrival", "round"};
    bool promise = false;
    for (size_t i = 0; i < sizeof promises / sizeof *promises && expected; i++) promise |= strcmp(expected, promises[i]) == 0;
    const char *property = promise ? NULL : cf_schedule_check(all->of, check_where);
    if (!property) property = check_promises(all->of);
    if (property == expected || (property && expected && strcmp(property, expected) == 0)) return;
    const cf_schedule *s = all->of[0];
    print_error("%s, %s, %s%s, N = %d, H = %d, m = %d%s%s\n", cf_operation_name(s->operation), side_name[s->side],
                s->algorithm->name, s->bound ? " without transfers" : "", s->ranks, s->hosts, s->slices, what ? ", " : "",
                what ? what : "");
    print_error("violates: %s (%s); expected: %s\n", property ? property : "nothing", property ? check_where : "",
                expected ? expected : "nothing");
    for (int r = 0; r < all->ranks && all->ranks <= 4; r++) {
        char *text = cf_schedule_print(all->of[r]);
        fprintf(stderr, "rank %d\n%s\n", r, text); // longer than cmocka prints
        free(text);
    }
    fail();
}

// The row that must make a schedule: the first that serves, or one that follows it where that has none for these numbers.
static void check_row(const cf_schedule *s, kind of, const cf_algorithm *row) {
    const cf_algorithm *a = serving(row, of);
    if (a->native && s->ranks == 1) a = serving(cf_algorithm_find("ring"), of);
    while (a && a != s->algorithm) a = serving(cf_algorithm_find(a->fallback), of);
    if (!a) fail_msg("%s leads to %s", row->name, s->algorithm->name);
    assert_ptr_equal(s->bound, row->bound ? row : NULL);
}

// A bound has the computations of the row that it is a bound of and no transfers; of a native one it has nothing else.
static void check_bound(kind of, const set *bound, const cf_algorithm *row, int slices) {
    set real = set_create(of, cf_algorithm_find(row->fallback), bound->ranks, slices);
    for (int r = 0; r < bound->ranks; r++) {
        if (check_bound_of(bound->of[r], real.of[r])) fail_msg("%s, N = %d: %s", row->name, bound->ranks, check_where);
        for (int i = 0; i < bound->of[r]->count && real.of[r]->algorithm->native; i++)
            assert_int_equal(bound->of[r]->step[i].kind, CF_COMPUTE);
    }
    set_free(&real);
}

// An alias, or a row that does not serve this, has another row's schedules. On several hosts only rows of two levels have others
// than on one: their own where there are several ranks on each.
static void check_all_rows(kind of, int ranks, int hosts, int slices) {
    for (EVERY_ROW(row)) {
        if (!serving(row, of) || (!row->bound && serving(row, of) != row && ranks > SLICES_PER_RANK)) continue;
        if (hosts > 1 && (!row->levels || serving(row, of) != row)) continue;
        set all = set_create_on(hosts, of, row, ranks, slices);
        assert_true(hosts == 1 || (all.of[0]->algorithm == row) == (hosts < ranks));
        const cf_schedule *s = all.of[0];
        const bool cut = of.side != CF_NO_COMPUTE && ranks > 1 && slices <= s->algorithm->max_slices;
        assert_int_equal(s->operation, of.operation);
        assert_int_equal(s->side, of.side);
        assert_int_equal(s->ranks, ranks);
        assert_int_equal(s->slices, cut ? slices : 1);
        if (ranks == 1) assert_int_equal(s->stage_slots, 0);
        check_row(s, of, row);
        assert_property(&all, NULL, NULL);
        if (row->bound) check_bound(of, &all, row, slices);
        set_free(&all);
    }
}

static void every_schedule(void **state) {
    const kind *of = *state;
    for (int ranks = 1; ranks <= ALL_RANKS; ranks++)
        for (int slices = 1; slices <= SLICES_PER_RANK; slices++)
            for (int hosts = 1; hosts <= ranks; hosts++)
                if (ranks % hosts == 0) check_all_rows(*of, ranks, hosts, slices);
}

static void many_ranks(void **state) {
    const kind *of = *state;
    for (size_t i = 0; i < sizeof many / sizeof *many; i++) check_all_rows(*of, many[i], 1, 1);
    for (size_t i = 0; i < sizeof many_hosts / sizeof *many_hosts; i++) check_all_rows(*of, many_hosts[i][0], many_hosts[i][1], 1);
}

static void same_call_same_schedule(void **state) {
    (void)state;
    cf_schedule *a = cf_schedule_create(CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE, cf_algorithm_find("ring"), 5, 1, 3, 2);
    cf_schedule *b = cf_schedule_create(CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE, cf_algorithm_find("ring"), 5, 1, 3, 2);
    char *first = cf_schedule_print(a), *second = cf_schedule_print(b);
    assert_string_equal(first, second);
    free(first), free(second);
    cf_schedule_free(a), cf_schedule_free(b);
}

static void assert_printed(kind of, const char *row, int slices, const char *expected) {
    set all = set_create(of, cf_algorithm_find(row), 3, slices);
    char *text = cf_schedule_print(all.of[0]);
    assert_string_equal(text, expected);
    free(text);
    set_free(&all);
}

static void what_is_printed(void **state) {
    (void)state;
    assert_printed(kinds[RS], "direct", 1,
                   "reduce-scatter, direct, rank 0 of 3, 1 slice per shard\n"
                   "    0  compute    slice 2 in full[2]\n"
                   "    1  exchange   slice 2 → rank 2  slice 0 ← rank 1 into stage[0]  after 0\n"
                   "    2  compute    slice 1 in full[1]\n"
                   "    3  exchange   slice 1 → rank 1  slice 0 ← rank 2 into stage[1]  after 2\n"
                   "    4  compute    slice 0 in full[0]\n"
                   "    5' add        full[0] += 2 parts from stage[0]  after 1 … 3\n");
    assert_printed(kinds[AG], "slice", 2,
                   "all-gather, slice, rank 0 of 3, 2 slices per shard\n"
                   "    0  collective 3 slices 0, 2, …\n"
                   "    1  collective 3 slices 1, 3, …\n"
                   "    2' work on    3 slices 0, 2, … in full[0]  after 0\n"
                   "    3' work on    3 slices 1, 3, … in full[1]  after 1\n");
    assert_printed(kinds[AG], "once", 1,
                   "all-gather, once, rank 0 of 3, 1 slice per shard\n"
                   "    0  exchange   slice 0 → rank 1  slice 2 ← rank 2 into full[2]\n"
                   "    1    with it  slice 0 → rank 2  slice 1 ← rank 1 into full[1]\n"
                   "    2' work on    slice 0 in full[0]\n"
                   "    3' work on    2 slices 1, 2, … in full[1]  after 0 … 1\n");
}

// ------------------------------------------------------------------------------------- planted faults

// A copy of a set with room for more steps, to plant faults in.
static set set_copy(const set *from) {
    set all = {.ranks = from->ranks};
    for (int r = 0; r < all.ranks; r++) {
        all.of[r] = malloc(sizeof *all.of[r]);
        assert_non_null(all.of[r]);
        *all.of[r] = *from->of[r];
        all.of[r]->room = all.of[r]->count + ROOM;
        all.of[r]->step = calloc((size_t)all.of[r]->room, sizeof(cf_step));
        assert_non_null(all.of[r]->step);
        memcpy(all.of[r]->step, from->of[r]->step, (size_t)all.of[r]->count * sizeof(cf_step));
    }
    return all;
}

static void copy_free(set *all) {
    for (int r = 0; r < all->ranks; r++) {
        free(all->of[r]->step);
        free(all->of[r]);
    }
}

// The n-th step of a kind, from the end if n < 0 (-1: the last).
static int find(const cf_schedule *s, cf_step_kind of, int n) {
    int i = n < 0 ? s->count - 1 : 0, by = n < 0 ? -1 : 1;
    for (n = n < 0 ? -n - 1 : n; i >= 0 && i < s->count; i += by)
        if (s->step[i].kind == of && n-- == 0) return i;
    fail_msg("the schedule has too few steps of kind %d to plant this fault", of);
    return -1;
}

static cf_step *nth(const cf_schedule *s, cf_step_kind of, int n) {
    return &s->step[find(s, of, n)];
}

// The same among the computations of one side.
static int find_compute(const cf_schedule *s, cf_side side, int n) {
    int i = n < 0 ? s->count - 1 : 0, by = n < 0 ? -1 : 1;
    for (n = n < 0 ? -n - 1 : n; i >= 0 && i < s->count; i += by)
        if (s->step[i].kind == CF_COMPUTE && s->step[i].side == side && n-- == 0) return i;
    fail_msg("the schedule computes too few slices on side %d to plant this fault", side);
    return -1;
}

static cf_step *nth_compute(const cf_schedule *s, cf_side side, int n) {
    return &s->step[find_compute(s, side, n)];
}

// Move step `from` to index `to`; waits follow the steps they name, and what begin took it still takes.
static void move(cf_schedule *s, int from, int to) {
    cf_step moved = s->step[from];
    if (from >= s->split && to < s->split)
        s->split++;
    else if (from < s->split && to >= s->split)
        s->split--;
    int by = from < to ? 1 : -1;
    for (int i = from; i != to; i += by) s->step[i] = s->step[i + by];
    s->step[to] = moved;
    for (int i = 0; i < s->count; i++)
        for (int w = 0; w < 2; w++) {
            int *wait = &s->step[i].wait[w];
            if (*wait == from + 1)
                *wait = to + 1;
            else if (by > 0 && *wait > from + 1 && *wait <= to + 1)
                *wait -= 1;
            else if (by < 0 && *wait > to && *wait <= from)
                *wait += 1;
        }
}

static void insert(cf_schedule *s, int at, cf_step step) {
    s->step[s->count++] = (cf_step){.kind = CF_COMPUTE};
    move(s, s->count - 1, at);
    s->step[at] = step;
}

static void drop(cf_schedule *s, int at) {
    move(s, at, s->count - 1);
    s->count--;
    if (s->split > s->count) s->split = s->count; // the last step, taken by begin, has not moved
    for (int i = 0; i < s->count; i++)
        for (int w = 0; w < 2; w++)
            if (s->step[i].wait[w] == s->count + 1) s->step[i].wait[w] = 0;
}

static void forget_waits(cf_step *step) {
    step->wait[0] = step->wait[1] = 0, step->range = false;
}

// In the schedule s of one rank.
#define PLANT(name, rank, ...)                                                                                                     \
    static void name(set *all) {                                                                                                   \
        cf_schedule *s = all->of[rank];                                                                                            \
        __VA_ARGS__;                                                                                                               \
    }

// form
PLANT(wait_for_itself, 1, nth(s, CF_COMPUTE, 1)->wait[0] = find(s, CF_COMPUTE, 1) + 1)
PLANT(wait_for_later, 2, s->step[0].wait[1] = s->count)
PLANT(wait_for_nonsense, 2, s->step[0].wait[1] = -1)
PLANT(stage_overflow, 1, s->stage_slots = 0)
PLANT(full_overflow, 0, nth(s, CF_COMPUTE, 0)->at.slot = all->ranks * s->slices)
PLANT(peer_overflow, 0, nth(s, CF_EXCHANGE, 0)->send.rank = all->ranks)
PLANT(begin_overflow, 0, s->split = s->count + 1)
PLANT(rank_mixed_up, 0, s->rank = 1)
PLANT(result_in_pieces, 0, s->result = (cf_place){CF_STAGE, 1})
PLANT(compute_nothing, 0, insert(s, 0, (cf_step){.kind = CF_COMPUTE, .count = 1}))
// side
static void other_side(set *all) {
    cf_step *step = nth(all->of[2], CF_COMPUTE, 1);
    step->side = step->side == CF_COMPUTE_BEFORE ? CF_COMPUTE_AFTER : CF_COMPUTE_BEFORE;
}
PLANT(no_side, 2, nth(s, CF_COMPUTE, 1)->side = CF_NO_COMPUTE)
PLANT(both_sides_at_once, 2, nth(s, CF_COMPUTE, 1)->side = CF_COMPUTE_BOTH)
// coverage
PLANT(compute_twice, 3, insert(s, 0, *nth(s, CF_COMPUTE, 0)))
PLANT(compute_less, 3, drop(s, find(s, CF_COMPUTE, 1)))
PLANT(compute_another, 3, nth(s, CF_COMPUTE, 1)->first = nth(s, CF_COMPUTE, 2)->first)
PLANT(work_less, 3, drop(s, find_compute(s, CF_COMPUTE_AFTER, -1)))
PLANT(work_twice, 3, insert(s, s->count, *nth_compute(s, CF_COMPUTE_AFTER, 0)))
// the number of computations is right
PLANT(compute_instead_of_work, 3, nth_compute(s, CF_COMPUTE_AFTER, -1)->side = CF_COMPUTE_BEFORE)
PLANT(compute_wide, 0, nth(s, CF_COMPUTE, 0)->count = 2)
PLANT(compute_too_wide, 0, nth(s, CF_COMPUTE, 0)->count = all->ranks + 1)
// volume
PLANT(drop_send, 2, nth(s, CF_EXCHANGE, 0)->send.rank = -1)
PLANT(drop_receive, 2, nth(s, CF_EXCHANGE, -1)->recv.rank = -1)
static void drop_exchange(set *all) {
    for (int r = 0; r < all->ranks; r++) drop(all->of[r], find(all->of[r], CF_EXCHANGE, -1));
}
static void exchange_at_end(set *all) { // one more than needed, on every rank
    for (int r = 0; r < all->ranks; r++) insert(all->of[r], all->of[r]->count, *nth(all->of[r], CF_EXCHANGE, -1));
}
static void collective_in_commfuse(set *all) {
    for (int r = 0; r < all->ranks; r++)
        insert(all->of[r], 0,
               (cf_step){.kind = CF_COLLECTIVE, .count = all->ranks, .from.slot = all->of[r]->operation == CF_ALLGATHER ? r : 0});
}
static void collective_left_out(set *all) {
    for (int r = 0; r < all->ranks; r++) drop(all->of[r], find(all->of[r], CF_COLLECTIVE, 1));
}
static void collective_twice(set *all) {
    for (int r = 0; r < all->ranks; r++) {
        *nth(all->of[r], CF_COLLECTIVE, 1) = *nth(all->of[r], CF_COLLECTIVE, 0);
    }
}
// matching
static void redirect_send(set *all) {
    cf_step *step = nth(all->of[2], CF_EXCHANGE, 0);
    step->send.rank = (step->send.rank + 2) % all->ranks; // + 1 or - 1 is the rank itself
}
static void redirect_receive(set *all) {
    cf_step *step = nth(all->of[2], CF_EXCHANGE, -1);
    step->recv.rank = (step->recv.rank + 2) % all->ranks;
}
static void rename_send(set *all) {
    cf_step *step = nth(all->of[1], CF_EXCHANGE, 1);
    step->send.slice = (step->send.slice + all->of[1]->slices) % (all->ranks * all->of[1]->slices);
}
// m = 2: the other k
PLANT(wrong_size, 1, nth(s, CF_EXCHANGE, 0)->from.slot ^= 1)
static void swap_sends(set *all) { // two messages to one peer overtake each other
    cf_step *a = nth(all->of[1], CF_EXCHANGE, 0), *b = nth(all->of[1], CF_EXCHANGE, 1), kept = *a;
    assert_int_equal(a->send.rank, b->send.rank);
    a->from = b->from, a->send.slice = b->send.slice;
    b->from = kept.from, b->send.slice = kept.send.slice;
}
static void swap_collectives(set *all) { // and who waits for them
    cf_schedule *s = all->of[1];
    int a = find(s, CF_COLLECTIVE, 0), b = find(s, CF_COLLECTIVE, 1);
    cf_step first = s->step[a];
    s->step[a] = s->step[b], s->step[b] = first;
    forget_waits(&s->step[a]);
    for (int i = b + 1; i < s->count; i++)
        if (s->step[i].wait[0] == a + 1 || s->step[i].wait[0] == b + 1) s->step[i].wait[0] = a + b + 2 - s->step[i].wait[0];
}
// race
PLANT(compute_too_early, 1, forget_waits(nth(s, CF_COMPUTE, -1)))
PLANT(forward_too_early, 1, forget_waits(nth(s, CF_EXCHANGE, -1)))
PLANT(send_too_early, 1, forget_waits(nth(s, CF_EXCHANGE, 0)))
// though what the exchange brings has arrived
PLANT(write_what_is_sent, 1, nth(s, CF_ADD, -1)->at = nth(s, CF_EXCHANGE, -1)->from)
PLANT(add_too_early, 1, forget_waits(nth(s, CF_ADD, 0)))
PLANT(reduce_too_early, 1, forget_waits(nth(s, CF_COLLECTIVE, -1)))
// the own slices next to one that is still leaving
PLANT(compute_again_where_sent, 1, nth_compute(s, CF_COMPUTE_BEFORE, -1)->at = nth_compute(s, CF_COMPUTE_BEFORE, 0)->at)
// what arrives lands where the own slices are computed
PLANT(receive_over_own, 1, nth(s, CF_EXCHANGE, -1)->at = nth_compute(s, CF_COMPUTE_BEFORE, -1)->at)
static void one_stage_slot(set *all) {
    cf_schedule *s = all->of[1];
    for (int i = 0; i < s->count; i++) {
        if (s->step[i].at.buffer == CF_STAGE) s->step[i].at.slot = 0;
        if (s->step[i].from.buffer == CF_STAGE) s->step[i].from.slot = 0;
    }
}
// both halves of an exchange in one place
PLANT(receive_over_source, 1, nth(s, CF_EXCHANGE, 0)->at = nth(s, CF_EXCHANGE, 0)->from)
// deadlock: halves posted apart, the first one on every rank before the second one of any
static void post_halves_apart(set *all, int first) {
    for (int r = 0; r < all->ranks; r++) {
        cf_schedule *s = all->of[r];
        int i = find(s, CF_EXCHANGE, 0);
        cf_step whole = s->step[i], send = whole, receive = whole;
        send.recv.rank = receive.send.rank = -1;
        insert(s, i, first == SEND ? send : receive);
        s->step[i + 1] = first == SEND ? receive : send;
        for (int j = i + 2; j < s->count && first == RECV; j++) // who waited for what arrives still does
            for (int w = 0; w < 2; w++) s->step[j].wait[w] -= s->step[j].wait[w] == i + 2;
    }
}
static void all_send_first(set *all) {
    post_halves_apart(all, SEND);
}
static void all_receive_first(set *all) {
    post_halves_apart(all, RECV);
}
static void host_stands_in_front(set *all) { // N = 2: both compute on the other's slice before they send their own
    for (int r = 0; r < all->ranks; r++) {
        cf_schedule *s = all->of[r];
        int i = find(s, CF_EXCHANGE, 0);
        cf_step send = s->step[i];
        send.recv.rank = -1;
        s->step[i].send.rank = -1;
        insert(s, s->count, send);
    }
}
// data
PLANT(compute_on_wrong_place, 2, nth(s, CF_COMPUTE, -1)->at = nth(s, CF_COMPUTE, 0)->at)
// the own slice instead of the one to be forwarded
PLANT(send_wrong_place, 1, nth(s, CF_EXCHANGE, -1)->from = nth(s, CF_EXCHANGE, 0)->from)
static void swap_places(set *all) {
    cf_step *a = nth(all->of[1], CF_EXCHANGE, 0), *b = nth(all->of[1], CF_EXCHANGE, 1);
    cf_place kept = a->at;
    a->at = b->at;
    b->at = kept;
}
static void sources_mixed_up(set *all) { // transfers and work agree, but on each other's places
    cf_schedule *s = all->of[1];
    int m = s->slices;
    cf_step *one = nth(s, CF_EXCHANGE, 0), *other = nth(s, CF_EXCHANGE, m);
    cf_place kept = one->at;
    one->at = nth_compute(s, CF_COMPUTE_AFTER, m)->at = other->at;
    other->at = nth_compute(s, CF_COMPUTE_AFTER, 2 * m)->at = kept;
}
// computed in the payload, looked for in the result
PLANT(own_slices_stay, 1, nth_compute(s, CF_COMPUTE_BEFORE, -1)->at.buffer = CF_FULL)
// on what this rank has for the others
PLANT(work_on_payload, 1, nth_compute(s, CF_COMPUTE_AFTER, -1)->at.buffer = CF_FULL)
PLANT(work_before_computed, 1, move(s, find_compute(s, CF_COMPUTE_AFTER, 0), find_compute(s, CF_COMPUTE_BEFORE, -1)))
PLANT(result_elsewhere, 1, s->result.slot = (s->result.slot + 1) % all->ranks)
PLANT(add_less, 1, drop(s, find(s, CF_ADD, -1)))
static void collective_elsewhere(set *all) { // the two collectives land in each other's place
    for (int r = 0; r < all->ranks; r++) {
        cf_step *a = nth(all->of[r], CF_COLLECTIVE, 0), *b = nth(all->of[r], CF_COLLECTIVE, 1);
        cf_place kept = a->at;
        a->at = b->at;
        b->at = kept;
    }
}
static void gather_another(set *all) { // not the own block
    cf_step *step = nth(all->of[1], CF_COLLECTIVE, 0);
    step->from.slot = (step->from.slot + all->of[1]->slices) % (all->ranks * all->of[1]->slices);
}
// sum order
static void other_order(set *all) { // all is well, but slice j is summed as j+1, j+3, j+2, j
    for (int r = 0; r < all->ranks; r++) {
        cf_step *a = nth(all->of[r], CF_COMPUTE, 1), *b = nth(all->of[r], CF_COMPUTE, 2), kept = *a;
        a->first = b->first, a->at = b->at;
        b->first = kept.first, b->at = kept.at;
        a = nth(all->of[r], CF_EXCHANGE, 1), b = nth(all->of[r], CF_EXCHANGE, 2), kept = *a;
        a->send.rank = b->send.rank, a->send.slice = b->send.slice, a->from = b->from, a->recv.rank = b->recv.rank;
        b->send.rank = kept.send.rank, b->send.slice = kept.send.slice, b->from = kept.from;
        b->recv.rank = kept.recv.rank;
    }
}
PLANT(add_twice, 1, insert(s, find(s, CF_ADD, -1), *nth(s, CF_ADD, -1)))
// own slice
PLANT(own_slice_first, 2, move(s, find(s, CF_COMPUTE, -1), 0))
PLANT(own_slice_last, 2, move(s, find(s, CF_COMPUTE, 0), s->count - 1))
PLANT(own_slice_waits, 1, nth(s, CF_COMPUTE, 0)->wait[0] = find(s, CF_EXCHANGE, 0) + 1)
static void own_computed_first(set *all) {
    cf_schedule *s = all->of[2];
    for (int k = 0; k < s->slices; k++) move(s, find_compute(s, CF_COMPUTE_BEFORE, -1), 0);
}
PLANT(own_work_last, 2, move(s, find_compute(s, CF_COMPUTE_AFTER, 0), s->count - 1))
PLANT(own_work_waits, 2, nth_compute(s, CF_COMPUTE_AFTER, 0)->wait[0] = find(s, CF_EXCHANGE, -1) + 1)
PLANT(nothing_overlaps, 1, move(s, find(s, CF_COMPUTE, 0), 0))
// arrival
PLANT(later_first, 2, move(s, find_compute(s, CF_COMPUTE_AFTER, -1), find_compute(s, CF_COMPUTE_AFTER, -2)))
// round
PLANT(round_too_early, 1, nth(s, CF_EXCHANGE, 2)->wait[0] = 1)
// tail
static void transfer_at_end(set *all) {
    for (int r = 0; r < all->ranks; r++) move(all->of[r], find(all->of[r], CF_EXCHANGE, -1), find(all->of[r], CF_COMPUTE, -1));
}
static void transfer_behind_compute(set *all) { // early enough to be worked on, too late to be hidden
    for (int r = 0; r < all->ranks; r++)
        move(all->of[r], find(all->of[r], CF_EXCHANGE, -1), find_compute(all->of[r], CF_COMPUTE_BEFORE, -1));
}
// two levels
static void straight_between_hosts(set *all) { // a slice crosses the network for each of a host's ranks
    for (int r = 0; r < all->ranks; r++) all->of[r]->algorithm = cf_algorithm_find("levels"), all->of[r]->hosts = 2;
}
static void hosts_mixed_up(set *all) { // on rank 1 the sums of two hosts land in each other's place
    cf_step *a = nth(all->of[1], CF_EXCHANGE, 4), *b = nth(all->of[1], CF_EXCHANGE, 7);
    cf_place kept = a->at;
    a->at = b->at, b->at = kept;
}
PLANT(another_number_of_hosts, 1, s->hosts = 1)
// begin
PLANT(begin_less, 3, s->split--)
PLANT(begin_more, 3, s->split++)

#define FAULT(plant) #plant, plant

static const struct fault {
    const char *name;
    void (*plant)(set *all);
    const char *property;
    int of;
    const char *row;
    int ranks, slices;
} faults[] = {
    {FAULT(wait_for_itself), "form", AG, "ring", 4, 1},
    {FAULT(wait_for_later), "form", RS, "ring", 4, 2},
    {FAULT(wait_for_nonsense), "form", RS, "ring", 4, 2},
    {FAULT(stage_overflow), "form", RS, "ring", 4, 1},
    {FAULT(stage_overflow), "form", RS, "direct", 4, 3},
    {FAULT(full_overflow), "form", AG, "direct", 4, 1},
    {FAULT(peer_overflow), "form", RS, "direct", 4, 1},
    {FAULT(begin_overflow), "form", AFTER_A2A, "direct", 4, 1},
    {FAULT(rank_mixed_up), "form", BEFORE_A2A, "direct", 4, 1},
    {FAULT(result_in_pieces), "form", RS, "direct", 4, 2},
    {FAULT(compute_nothing), "form", AG_ALONE, "ring", 4, 1},
    {FAULT(other_side), "side", AG, "ring", 4, 1},
    {FAULT(other_side), "side", AG, "slice", 4, 4},
    {FAULT(other_side), "side", RS, "ring", 4, 2},
    {FAULT(other_side), "side", RS, "direct", 4, 2},
    {FAULT(other_side), "side", RS, "slice", 4, 2},
    {FAULT(other_side), "side", BEFORE_A2A, "direct", 4, 1},
    {FAULT(other_side), "side", AFTER_A2A, "direct", 4, 1},
    {FAULT(no_side), "side", AG, "direct", 4, 1},
    {FAULT(no_side), "side", BOTH_A2A, "direct", 4, 1},
    {FAULT(both_sides_at_once), "side", BOTH_A2A, "slice", 4, 2},
    {FAULT(other_side), "coverage", BOTH_A2A, "direct", 4, 1},
    {FAULT(compute_twice), "coverage", BOTH_A2A, "direct", 4, 2},
    {FAULT(compute_less), "coverage", BOTH_A2A, "direct", 4, 1},
    {FAULT(work_less), "coverage", BOTH_A2A, "direct", 4, 2},
    {FAULT(work_less), "coverage", BOTH_A2A, "slice", 4, 3},
    {FAULT(work_twice), "coverage", BOTH_A2A, "ring", 4, 2},
    {FAULT(compute_instead_of_work), "coverage", BOTH_A2A, "direct", 4, 1},
    {FAULT(compute_instead_of_work), "coverage", BOTH_A2A, "nowire", 4, 1},
    {FAULT(compute_twice), "coverage", AG, "ring", 4, 1},
    {FAULT(compute_twice), "coverage", RS, "direct", 5, 4},
    {FAULT(compute_less), "coverage", RS, "ring", 4, 1},
    {FAULT(compute_less), "coverage", BEFORE_A2A, "ring", 4, 2},
    {FAULT(compute_another), "coverage", AFTER_A2A, "ring", 4, 1},
    {FAULT(compute_another), "form", AFTER_A2A, "ring", 4, 2},
    {FAULT(compute_wide), "coverage", AG, "ring", 4, 2},
    {FAULT(compute_too_wide), "form", AG, "ring", 4, 2},
    {FAULT(drop_send), "volume", AG, "ring", 4, 1},
    {FAULT(drop_receive), "volume", RS, "direct", 4, 1},
    {FAULT(drop_exchange), "volume", AFTER_A2A, "direct", 4, 2},
    {FAULT(exchange_at_end), "volume", AG, "direct", 4, 2},
    {FAULT(collective_in_commfuse), "volume", AG, "direct", 4, 1},
    {FAULT(collective_left_out), "volume", RS, "slice", 4, 4},
    {FAULT(collective_twice), "volume", AG, "slice", 4, 3},
    {FAULT(drop_send), "volume", BOTH_A2A, "direct", 4, 1},
    {FAULT(drop_exchange), "volume", BOTH_A2A, "direct", 4, 2},
    {FAULT(exchange_at_end), "volume", BOTH_A2A, "ring", 4, 2},
    {FAULT(collective_in_commfuse), "volume", BOTH_A2A, "direct", 4, 1},
    {FAULT(collective_in_commfuse), "volume", BOTH_A2A, "nowire", 4, 1},
    {FAULT(collective_twice), "volume", BOTH_A2A, "slice", 4, 3},
    {FAULT(redirect_send), "deadlock", BOTH_A2A, "direct", 4, 1},
    {FAULT(redirect_receive), "deadlock", BOTH_A2A, "ring", 4, 2},
    {FAULT(rename_send), "matching", BOTH_A2A, "direct", 4, 2},
    {FAULT(wrong_size), "form", BOTH_A2A, "direct", 4, 2},
    {FAULT(swap_sends), "race", BOTH_A2A, "direct", 4, 2},
    {FAULT(swap_collectives), "race", BOTH_A2A, "slice", 4, 2},
    {FAULT(redirect_send), "deadlock", AG, "direct", 4, 1},
    {FAULT(redirect_send), "deadlock", RS, "ring", 4, 1},
    {FAULT(redirect_receive), "deadlock", RS, "ring", 4, 2},
    {FAULT(rename_send), "matching", BEFORE_A2A, "direct", 4, 2},
    {FAULT(wrong_size), "form", AG, "ring", 4, 2},
    {FAULT(swap_sends), "matching", AG, "ring", 4, 2},
    {FAULT(swap_collectives), "matching", AG, "slice", 4, 2},
    {FAULT(compute_too_early), "race", AG, "ring", 4, 2},
    {FAULT(compute_too_early), "race", AFTER_A2A, "ring", 4, 1},
    {FAULT(compute_too_early), "race", AG, "slice", 4, 4},
    {FAULT(forward_too_early), "race", AG, "ring", 4, 1},
    {FAULT(send_too_early), "race", RS, "direct", 4, 1},
    {FAULT(send_too_early), "race", BEFORE_A2A, "ring", 4, 2},
    {FAULT(forward_too_early), "race", RS, "ring", 4, 2},
    {FAULT(write_what_is_sent), "race", RS, "ring", 4, 1},
    {FAULT(add_too_early), "race", RS, "ring", 4, 1},
    {FAULT(add_too_early), "race", RS, "direct", 4, 1},
    {FAULT(reduce_too_early), "race", RS, "slice", 4, 4},
    {FAULT(one_stage_slot), "race", RS, "direct", 4, 1},
    {FAULT(receive_over_source), "race", AG, "ring", 4, 1},
    {FAULT(compute_too_early), "race", BOTH_A2A, "direct", 4, 1},
    {FAULT(compute_too_early), "race", BOTH_A2A, "slice", 4, 4},
    {FAULT(send_too_early), "race", BOTH_A2A, "direct", 4, 2},
    {FAULT(reduce_too_early), "race", BOTH_A2A, "slice", 4, 2},
    {FAULT(compute_again_where_sent), "race", BOTH_A2A, "direct", 4, 1},
    {FAULT(swap_places), "race", BOTH_A2A, "direct", 4, 1},
    {FAULT(receive_over_own), "race", BOTH_A2A, "direct", 4, 1},
    {FAULT(all_send_first), "deadlock", BOTH_A2A, "direct", 4, 2},
    {FAULT(all_receive_first), "deadlock", BOTH_A2A, "direct", 4, 1},
    {FAULT(host_stands_in_front), "deadlock", BOTH_A2A, "direct", 2, 1},
    {FAULT(all_send_first), "deadlock", AG, "ring", 4, 1},
    {FAULT(all_send_first), "deadlock", RS, "ring", 5, 2},
    {FAULT(all_receive_first), "deadlock", AG, "direct", 4, 1},
    {FAULT(host_stands_in_front), "deadlock", AG, "ring", 2, 1},
    {FAULT(compute_on_wrong_place), "data", AG, "ring", 4, 1},
    {FAULT(send_wrong_place), "data", AG, "ring", 4, 1},
    {FAULT(swap_places), "data", A2A_ALONE, "direct", 4, 1},
    {FAULT(swap_places), "data", BEFORE_A2A, "direct", 4, 1},
    {FAULT(result_elsewhere), "data", RS, "ring", 4, 1},
    {FAULT(add_less), "data", RS, "ring", 4, 1},
    {FAULT(gather_another), "race", AG, "slice", 4, 2},
    {FAULT(collective_elsewhere), "form", BEFORE_A2A, "slice", 4, 2},
    {FAULT(sources_mixed_up), "data", BOTH_A2A, "direct", 4, 1},
    {FAULT(sources_mixed_up), "data", BOTH_A2A, "ring", 4, 2},
    {FAULT(collective_elsewhere), "form", BOTH_A2A, "slice", 4, 2},
    {FAULT(own_slices_stay), "data", BOTH_A2A, "direct", 4, 2},
    {FAULT(own_slices_stay), "data", BEFORE_A2A, "direct", 4, 1},
    {FAULT(work_on_payload), "data", BOTH_A2A, "direct", 4, 1},
    {FAULT(work_before_computed), "data", BOTH_A2A, "direct", 4, 1},
    {FAULT(other_order), "sum order", RS, "direct", 4, 1},
    {FAULT(add_twice), "sum order", RS, "ring", 4, 1},
    {FAULT(add_twice), "sum order", RS, "direct", 4, 2},
    {FAULT(own_slice_first), "own slice", RS, "ring", 4, 1},
    {FAULT(own_slice_first), "own slice", RS, "nowire", 4, 2},
    {FAULT(own_slice_first), "own slice", BEFORE_A2A, "ring", 4, 2},
    {FAULT(own_slice_last), "own slice", AG, "ring", 4, 1},
    {FAULT(own_slice_last), "own slice", AFTER_A2A, "ring", 4, 1},
    {FAULT(own_slice_waits), "own slice", AG, "direct", 4, 1},
    {FAULT(nothing_overlaps), "own slice", AG, "ring", 4, 1},
    {FAULT(own_computed_first), "own slice", BOTH_A2A, "nowire", 4, 1},
    {FAULT(own_computed_first), "own slice", BOTH_A2A, "direct", 4, 2},
    {FAULT(own_work_last), "own slice", BOTH_A2A, "direct", 4, 2},
    {FAULT(own_work_last), "own slice", BOTH_A2A, "nowire", 4, 1},
    {FAULT(own_work_waits), "own slice", BOTH_A2A, "direct", 4, 2},
    {FAULT(own_slice_waits), "own slice", AFTER_A2A, "direct", 4, 1},
    {FAULT(later_first), "arrival", BOTH_A2A, "direct", 4, 2},
    {FAULT(later_first), "arrival", BOTH_A2A, "slice", 4, 3},
    {FAULT(later_first), "work order", AG, "ring", 4, 1},
    {FAULT(later_first), "work order", AG, "nowire", 4, 2},
    {FAULT(later_first), "work order", AG, "nowire", 3, 1},
    {FAULT(round_too_early), "round", AG, "direct", 4, 2},
    {FAULT(round_too_early), "round", AFTER_A2A, "direct", 4, 2},
    {FAULT(transfer_behind_compute), "tail", BOTH_A2A, "direct", 4, 1},
    {FAULT(transfer_behind_compute), "tail", BOTH_A2A, "ring", 4, 4},
    {FAULT(begin_less), "begin", RS, "direct", 4, 1},
    {FAULT(begin_less), "begin", AG, "slice", 4, 2},
    {FAULT(begin_less), "begin", BOTH_A2A, "direct", 4, 2},
    {FAULT(begin_less), "begin", BOTH_A2A, "none", 4, 2},
    {FAULT(begin_more), "begin", BOTH_A2A, "direct", 4, 2},
    {FAULT(begin_more), "begin", AFTER_A2A, "direct", 4, 1},
    {FAULT(transfer_at_end), "tail", RS, "direct", 4, 1},
    {FAULT(transfer_at_end), "tail", BEFORE_A2A, "direct", 4, 2},
    {FAULT(another_number_of_hosts), "form", AG, "levels", 4, 1},
    {FAULT(straight_between_hosts), "volume", AG, "direct", 4, 1},
    {FAULT(straight_between_hosts), "sum order", RS, "direct", 4, 1},
    {FAULT(hosts_mixed_up), "sum order", RS, "levels", 9, 1},
    {FAULT(add_twice), "sum order", RS, "levels", 6, 2},
    {FAULT(add_less), "data", RS_ALONE, "levels", 9, 1},
    {FAULT(forward_too_early), "race", AG, "levels", 6, 2},
    {FAULT(forward_too_early), "race", AG_ALONE, "levels", 9, 1},
    {FAULT(send_too_early), "race", RS, "levels", 6, 2},
    {FAULT(forward_too_early), "race", RS, "levels", 9, 1},
    {FAULT(forward_too_early), "race", RS_ALONE, "levels", 4, 1},
    {FAULT(add_too_early), "race", RS, "levels", 9, 2},
    {FAULT(one_stage_slot), "race", RS, "levels", 4, 1},
    {FAULT(stage_overflow), "form", RS, "levels", 4, 1},
    {FAULT(drop_send), "volume", AG, "levels", 6, 1},
    {FAULT(drop_receive), "volume", RS, "levels", 6, 1},
    {FAULT(redirect_receive), "deadlock", RS, "levels", 4, 2},
    {FAULT(rename_send), "matching", AG, "levels", 6, 2},
    {FAULT(all_send_first), "deadlock", AG, "levels", 6, 2},
    {FAULT(all_send_first), "deadlock", RS_ALONE, "levels", 6, 1},
    {FAULT(own_slice_first), "own slice", RS, "levels", 6, 1},
    {FAULT(own_slice_last), "own slice", AG, "levels", 6, 1},
    {FAULT(own_slice_waits), "own slice", AG, "levels", 6, 1},
    {FAULT(later_first), "arrival", AG, "levels", 6, 2},
    {FAULT(transfer_at_end), "tail", RS, "levels", 6, 1},
    {FAULT(begin_less), "begin", RS, "levels", 6, 1},
};

static void every_fault_is_named(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
        const struct fault *f = &faults[i];
        set good = set_create(kinds[f->of], cf_algorithm_find(f->row), f->ranks, f->slices);
        set bad = set_copy(&good);
        assert_property(&bad, NULL, "before the fault is planted");
        f->plant(&bad);
        assert_property(&bad, f->property, f->name);
        copy_free(&bad);
        set_free(&good);
    }
}

static void a_bound_differs(void **state) {
    (void)state;
    set good = set_create(kinds[RS], cf_algorithm_find("ring"), 4, 2), bad = set_copy(&good);
    assert_null(check_bound_of(bad.of[1], good.of[1]));
    cf_step *a = nth(bad.of[1], CF_COMPUTE, 1), *b = nth(bad.of[1], CF_COMPUTE, 2);
    a->first = b->first;
    assert_string_equal(check_bound_of(bad.of[1], good.of[1]), "bound");
    a->first = nth(good.of[1], CF_COMPUTE, 1)->first;
    a->side = CF_COMPUTE_AFTER;
    assert_string_equal(check_bound_of(bad.of[1], good.of[1]), "bound");
    a->side = CF_COMPUTE_BEFORE;
    assert_null(check_bound_of(bad.of[1], good.of[1]));
    drop(bad.of[1], find(bad.of[1], CF_COMPUTE, -1));
    assert_string_equal(check_bound_of(bad.of[1], good.of[1]), "bound");
    copy_free(&bad);
    set_free(&good);
}

// A row that does not promise what CommFuse does must be correct, and send no more than it needs.
static void rows_without_promises_must_be_correct(void **state) {
    (void)state;
    const cf_algorithm plain = {.name = "plain"};
    set good = set_create(kinds[RS], cf_algorithm_find("direct"), 4, 2), own = set_copy(&good);
    for (int r = 0; r < own.ranks; r++) own.of[r]->algorithm = &plain;
    assert_property(&own, NULL, NULL);
    transfer_at_end(&own);
    assert_property(&own, NULL, "a transfer behind all computation");
    set more = set_copy(&own);
    exchange_at_end(&more);
    assert_property(&more, "volume", "a slice sent twice");
    add_less(&own);
    assert_property(&own, "data", "add_less");
    own.of[2]->algorithm = cf_algorithm_find("direct");
    assert_property(&own, "form", "two rows");
    copy_free(&own), copy_free(&more);
    set_free(&good);
}

// The checker has limits; a schedule beyond them is refused.
static bool collectives(cf_schedule *s, const void *argument) {
    const cf_step gather = {.kind = CF_COLLECTIVE, .from = {CF_FULL, s->rank}, .count = s->ranks};
    for (const int *count = argument; s->count < *count;) {
        const int number = cf_append(s, gather);
        s->step[number - 1].wait[0] = number - 1; // the one before
    }
    s->split = s->count;
    return true;
}

static void too_many_collectives_are_refused(void **state) {
    (void)state;
    for (int count = 10; count <= 40; count += 30) {
        const cf_algorithm row = {.name = "collectives",
                                  .serves = CF_SERVES(CF_ALLGATHER, CF_NO_COMPUTE),
                                  .generate = collectives,
                                  .argument = &count,
                                  .slices = 1,
                                  .max_slices = 1};
        set own = set_create(kinds[AG_ALONE], &row, CF_CHECKED_RANKS, 1);
        const char *property = cf_schedule_check(own.of, check_where);
        assert_true(count == 10 ? !property : property && strcmp(property, "form") == 0);
        set_free(&own);
    }
}

// The n-th row that serves; NULL: no more.
static const cf_algorithm *nth_row(kind of, int n) {
    for (EVERY_ROW(row))
        if (row_serves(row, of.operation, of.side) && n-- == 0) return row;
    return NULL;
}

// Every step is needed: without any one of them a schedule is wrong.
static void no_step_is_spare(void **state) {
    (void)state;
    for (int of = 0; of < KINDS; of++)
        for (int n = 0; nth_row(kinds[of], n); n++) {
            set good = set_create(kinds[of], nth_row(kinds[of], n), 4, 2);
            for (int i = 0; i < good.of[3]->count; i++) {
                set bad = set_copy(&good);
                drop(bad.of[3], i);
                if (!cf_schedule_check(bad.of, check_where) && !check_promises(bad.of))
                    assert_property(&bad, "something", "a step left out");
                copy_free(&bad);
            }
            set_free(&good);
        }
}

// The parts of direct's own slices, if its stage has room for all of them.
static void parts_are_added_in_one_step(void **state) {
    (void)state;
    for (int ranks = 2; ranks <= 12; ranks++) {
        set all = set_create(kinds[RS], cf_algorithm_find("direct"), ranks, 2);
        for (int r = 0; r < ranks; r++) {
            int steps = 0;
            for (int i = 0; i < all.of[r]->count; i++) steps += all.of[r]->step[i].kind == CF_ADD;
            assert_int_equal(steps, 2 * (all.of[r]->stage_slots == 2 * (ranks - 1) ? 1 : ranks - 1));
        }
        set_free(&all);
    }
}

// ------------------------------------------------------------------------------- operations in flight

typedef enum { ONE_AFTER_THE_OTHER, OVERLAPPED, NESTED, ORDERS } order;

static void append_items(program *p, int operation, int from, int to) {
    for (int i = from; i < to; i++) p->list[p->count++] = (item){operation, i};
}

// begin and finish of operations 0 and 1
static void write_program(program *p, const cf_schedule *first, const cf_schedule *second, order how) {
    *p = (program){.operation = {first, second}};
    append_items(p, 0, 0, first->split);
    if (how == ONE_AFTER_THE_OTHER) append_items(p, 0, first->split, first->count);
    append_items(p, 1, 0, second->split);
    if (how == NESTED) append_items(p, 1, second->split, second->count);
    if (how != ONE_AFTER_THE_OTHER) append_items(p, 0, first->split, first->count);
    if (how != NESTED) append_items(p, 1, second->split, second->count);
}

// Each rank in its own order: an operation may finish at different times on different ranks.
static void every_order_on_one_wire(const set *first, const set *second) {
    static program of[WIRE_RANKS_MAX];
    for (int how = 0; how <= ORDERS; how++) {
        for (int r = 0; r < first->ranks; r++)
            write_program(&of[r], first->of[r], second->of[r], (order)(how < ORDERS ? how : r % ORDERS));
        const char *property = check_wire(of, first->ranks);
        if (property)
            fail_msg("%s and %s, N = %d, order %d: %s (%s)", cf_operation_name(first->of[0]->operation),
                     cf_operation_name(second->of[0]->operation), first->ranks, how, property, check_where);
    }
}

// Blocking rows are never in flight together.
static void two_operations_on_one_wire(void **state) {
    (void)state;
    static const int sizes[] = {2, 3, 4, 5, 8, 16};
    for (size_t n = 0; n < sizeof sizes / sizeof *sizes; n++)
        for (int a = 0; a < KINDS * cf_algorithm_count; a++)
            for (int b = 0; b < KINDS * cf_algorithm_count; b++) {
                const int at[] = {a, b};
                set pair[2] = {{.ranks = 0}, {.ranks = 0}};
                for (int i = 0; i < 2; i++) {
                    const kind of = kinds[at[i] % KINDS];
                    const cf_algorithm *row = &cf_algorithms[at[i] / KINDS];
                    if (!row_serves(row, of.operation, of.side) || row->blocking) break;
                    pair[i] = set_create(of, row, sizes[n], 1 + 2 * i);
                }
                if (pair[1].ranks > 0) every_order_on_one_wire(&pair[0], &pair[1]);
                set_free(&pair[0]), set_free(&pair[1]);
            }
}

static void swap_operations(program *of, const set *first,
                            const set *second) { // rank 1 begins the other one first
    (void)first, (void)second;
    for (int i = 0; i < of[1].count; i++) of[1].list[i].operation = 1 - of[1].list[i].operation;
    const cf_schedule *kept = of[1].operation[0];
    of[1].operation[0] = of[1].operation[1], of[1].operation[1] = kept;
}

static int find_item(const program *p, cf_step_kind of, int n) {
    for (int i = 0; i < p->count; i++)
        if (p->operation[p->list[i].operation]->step[p->list[i].step].kind == of && n-- == 0) return i;
    fail_msg("too few steps of kind %d to plant this fault", of);
    return -1;
}

static void swap_transfers(program *of, const set *first,
                           const set *second) { // rank 2 posts in another order
    (void)first, (void)second;
    int i = find_item(&of[2], CF_EXCHANGE, 0), j = find_item(&of[2], CF_EXCHANGE, 1);
    item kept = of[2].list[i];
    of[2].list[i] = of[2].list[j], of[2].list[j] = kept;
}

static void transfer_left_out(program *of, const set *first, const set *second) {
    (void)first, (void)second;
    int at = find_item(&of[0], CF_EXCHANGE, 0);
    memmove(&of[0].list[at], &of[0].list[at + 1], (size_t)(--of[0].count - at) * sizeof of[0].list[0]);
}

static void work_in_front(program *of, const set *first,
                          const set *second) { // of its own transfer, on rank 1
    (void)second;
    int last = of[1].count - 1;
    while (of[1].list[last].operation != 0) last--;
    item waits = of[1].list[last];
    assert_true(on_stream(&first->of[1]->step[waits.step]));
    memmove(&of[1].list[1], &of[1].list[0], (size_t)last * sizeof waits);
    of[1].list[0] = waits;
}

static void halves_apart(program *of, const set *first, const set *second) { // all send before they receive
    (void)second;
    for (int r = 0; r < first->ranks; r++) {
        cf_schedule *s = first->of[r];
        int at = find(s, CF_EXCHANGE, 0);
        cf_step receive = s->step[at];
        receive.send.rank = -1;
        s->step[at].recv.rank = -1;
        insert(s, at + 1, receive);
        for (int i = at + 2; i < s->count; i++)
            for (int w = 0; w < 2; w++)
                if (s->step[i].wait[w] == at + 1) s->step[i].wait[w] = at + 2;
        write_program(&of[r], s, of[r].operation[1], OVERLAPPED);
    }
}

static void every_fault_on_the_wire_is_named(void **state) {
    (void)state;
    static const struct {
        const char *name;
        void (*plant)(program *of, const set *first, const set *second);
        const char *property;
        int first, second;
        const char *row;
    } planted[] = {
        {FAULT(swap_operations), "wire order", AG, RS, "ring"},
        {FAULT(swap_operations), "wire order", BEFORE_A2A, AFTER_A2A, "direct"},
        {FAULT(swap_transfers), "wire order", AG, AG, "ring"},
        {FAULT(transfer_left_out), "wire order", RS, AG, "direct"},
        {FAULT(work_in_front), "wire deadlock", AG, RS, "ring"},
        {FAULT(work_in_front), "wire deadlock", AFTER_A2A, AG, "direct"},
        {FAULT(halves_apart), "wire deadlock", AG, RS, "ring"},
        {FAULT(halves_apart), "wire deadlock", AFTER_A2A, RS, "direct"},
    };
    static program of[WIRE_RANKS_MAX];
    for (size_t i = 0; i < sizeof planted / sizeof *planted; i++) {
        set good = set_create(kinds[planted[i].first], cf_algorithm_find(planted[i].row), 4, 1);
        set second = set_create(kinds[planted[i].second], cf_algorithm_find(planted[i].row), 4, 1);
        set first = set_copy(&good);
        for (int r = 0; r < 4; r++) write_program(&of[r], first.of[r], second.of[r], OVERLAPPED);
        assert_null(check_wire(of, 4));
        planted[i].plant(of, &first, &second);
        const char *property = check_wire(of, 4);
        if (!property || strcmp(property, planted[i].property) != 0)
            fail_msg("%s: %s, not %s", planted[i].name, property ? property : "nothing", planted[i].property);
        copy_free(&first);
        set_free(&good), set_free(&second);
    }
}

static void every_row_is_whole(void **state) {
    (void)state;
    for (EVERY_ROW(row)) {
        const cf_algorithm *other = cf_algorithm_find(row->fallback), *alike = cf_algorithm_find(row->same_bits);
        assert_ptr_equal(cf_algorithm_find(row->name), row); // no two have a name
        assert_true(strlen(row->name) <= 16 && !strpbrk(row->name, ": ,/") && strcmp(row->name, "auto") != 0);
        assert_true(row->help && *row->help && row->slices >= 1 && row->slices <= row->max_slices);
        assert_true((row->serves != 0) == (row->generate != NULL));
        assert_true(row->serves || other);     // an alias, or a bound
        assert_true(!row->fallback || other);  // a row that exists,
        assert_true(!row->same_bits || alike); // and one that names itself
        assert_true(!alike || strcmp(alike->same_bits, alike->name) == 0);
        for (int of = 0; of < KINDS; of++) assert_non_null(serving(row, kinds[of])); // --overlap is one row for all operations
        assert_false(row->blocking && !row->native);
        assert_false(row->bound && (row->serves || row->same_bits));
        for (int n = 0; other; other = cf_algorithm_find(other->fallback)) assert_true(n++ < cf_algorithm_count); // no circle
    }
    assert_null(cf_algorithm_find("auto"));
    assert_null(cf_algorithm_find("rin"));
    assert_null(cf_algorithm_find(NULL));
}

int main(void) {
    struct CMUnitTest tests[] = {
        {"allgather", every_schedule, NULL, NULL, (void *)&kinds[AG_ALONE]},
        {"allgather → compute", every_schedule, NULL, NULL, (void *)&kinds[AG]},
        {"reduce-scatter", every_schedule, NULL, NULL, (void *)&kinds[RS_ALONE]},
        {"compute → reduce-scatter", every_schedule, NULL, NULL, (void *)&kinds[RS]},
        {"all-to-all", every_schedule, NULL, NULL, (void *)&kinds[A2A_ALONE]},
        {"compute → all-to-all", every_schedule, NULL, NULL, (void *)&kinds[BEFORE_A2A]},
        {"all-to-all → compute", every_schedule, NULL, NULL, (void *)&kinds[AFTER_A2A]},
        {"compute → all-to-all → compute", every_schedule, NULL, NULL, (void *)&kinds[BOTH_A2A]},
        {"all-gather, many ranks", many_ranks, NULL, NULL, (void *)&kinds[AG_ALONE]},
        {"all-gather → compute, many ranks", many_ranks, NULL, NULL, (void *)&kinds[AG]},
        {"reduce-scatter, many ranks", many_ranks, NULL, NULL, (void *)&kinds[RS_ALONE]},
        {"compute → reduce-scatter, many ranks", many_ranks, NULL, NULL, (void *)&kinds[RS]},
        {"compute → all-to-all → compute, many ranks", many_ranks, NULL, NULL, (void *)&kinds[BOTH_A2A]},
        cmocka_unit_test(same_call_same_schedule),
        cmocka_unit_test(what_is_printed),
        cmocka_unit_test(every_fault_is_named),
        cmocka_unit_test(rows_without_promises_must_be_correct),
        cmocka_unit_test(a_bound_differs),
        cmocka_unit_test(too_many_collectives_are_refused),
        cmocka_unit_test(no_step_is_spare),
        cmocka_unit_test(parts_are_added_in_one_step),
        cmocka_unit_test(every_row_is_whole),
        cmocka_unit_test(two_operations_on_one_wire),
        cmocka_unit_test(every_fault_on_the_wire_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
