// ranks: 1 2
//
// Errors as values (die.h), one context (context.h), and schedules of the caller's, which an operation checks before it uses them.
#include "tests/commfuse/ranks.h"
#include "tests/death.h"
#include <math.h>
#include "commfuse/fuse.h"
#include "commfuse/replay.h"

enum { ROWS = 3, COLUMNS = 4 };

// A failed call loses memory, as die.h says, so the sanitizer must not look for leaks.
int __lsan_is_turned_off(void);
int __lsan_is_turned_off(void) {
    return 1;
}

static cf_context *context;
static cf_group *all;

static void says(const char *words) {
    CHECK(strstr(cf_error(), words), "'%s', not '%s'", cf_error(), words);
}

static void pure_functions_return_errors(void) {
    CHECK(!cf_schedule_create(CF_ALLGATHER, CF_COMPUTE_BEFORE, CF_MODE_NONE, CF_RING, 4, 0, 1, false), "a schedule");
    says("all-gather has no computation on that side");
    CHECK(!cf_schedule_create(CF_ALLGATHER, CF_COMPUTE_AFTER, CF_MODE_AUTO, CF_RING, 4, 0, 1, false), "a schedule");
    CHECK(!cf_schedule_start(CF_ALLTOALL, CF_COMPUTE_BOTH, 4, 4, 1), "a schedule");
    says("rank 4 of 4");
    CHECK(!cf_alloc(-1, "a test"), "memory");
    says("allocation of -1 bytes for a test");
}

static double no_time(const void *argument, const cf_schedule *schedule, const cf_step *step) {
    (void)argument, (void)schedule, (void)step;
    return 0;
}

static void a_deadlock_is_no_number(void) {
    const cf_machine machine = {no_time, no_time, NULL, 0, false};
    cf_schedule *two[2];
    for (int r = 0; r < 2; r++) { // each waits for the other's slice before it sends its own
        two[r] = cf_schedule_start(CF_ALLGATHER, CF_COMPUTE_AFTER, 2, r, 1);
        int wait = cf_append_exchange(two[r], -1, (cf_place){CF_FULL, r}, -1, 1 - r, (cf_place){CF_FULL, 1 - r}, 1 - r, -1, -1);
        cf_append_exchange(two[r], 1 - r, (cf_place){CF_FULL, r}, r, -1, (cf_place){CF_FULL, r}, -1, wait, -1);
    }
    CHECK(isnan(cf_replay(two, 2, &machine).finished_ms), "replayed");
    says("deadlock: rank 0 of 2");
    for (int r = 0; r < 2; r++) cf_schedule_free(two[r]);
}

static cf_fuse_plan plan_of(const char *name, cf_mode mode, cf_generator *generator) {
    return (cf_fuse_plan){.name = name,
                          .group = all,
                          .operation = CF_ALLGATHER,
                          .side = CF_COMPUTE_AFTER,
                          .mode = mode,
                          .generator = generator,
                          .slices = 1,
                          .dtype = CF_INT64,
                          .capacity = ROWS * COLUMNS};
}

static void sum(void *argument, const cf_span *span, cf_stream *stream) {
    (void)stream;
    for (int block = 0; block < span->blocks; block++)
        for (int64_t i = 0; i < span->rows * COLUMNS; i++)
            *(int64_t *)argument += ((int64_t *)(span->data + block * span->data_stride))[i];
}

// Every element of rank r's shard is r + 1.
static void run_well(cf_fuse *fuse) {
    const int N = all->size;
    int64_t full[2 * ROWS * COLUMNS], total = 0;
    for (int i = 0; i < ROWS * COLUMNS; i++) full[all->rank * ROWS * COLUMNS + i] = all->rank + 1;
    CHECK(cf_fuse_run(fuse, full, ROWS, COLUMNS, sum, &total, -1), "%s", cf_error());
    CHECK(total == ROWS * COLUMNS * N * (N + 1) / 2, "a sum of %lld", (long long)total);
}

static void refused_runs_leave_an_operation_as_it_was(void) {
    CHECK(!cf_fuse_create(context, plan_of("auto", CF_MODE_OWN, NULL)), "an operation");
    says("mode own without a generator\nhint: give plan.generator");
    cf_fuse *fuse = cf_fuse_create(context, plan_of("small", CF_MODE_COMMFUSE, NULL));
    int64_t full[2 * ROWS * COLUMNS], total = 0;
    CHECK(!cf_fuse_finish(fuse), "finished");
    says("all-gather small is finished but was not begun");
    CHECK(!cf_fuse_begin(fuse, full, ROWS + 1, COLUMNS, sum, &total, -1), "begun");
    says("exceeds the capacity");
    CHECK(!cf_fuse_run(fuse, full, ROWS, COLUMNS, NULL, NULL, -1), "run");
    says("needs a computation");
    CHECK(!context->failed, "failed");
    run_well(fuse);
    for (int i = 0; i < ROWS * COLUMNS; i++) full[all->rank * ROWS * COLUMNS + i] = 0;
    CHECK(cf_fuse_begin(fuse, full, ROWS, COLUMNS, sum, &total, -1), "%s", cf_error());
    CHECK(!cf_fuse_free(fuse), "freed");
    says("is freed while it runs");
    CHECK(!cf_fuse_begin(fuse, full, ROWS, COLUMNS, sum, &total, -1), "begun twice");
    CHECK(!context->failed && cf_fuse_finish(fuse) && cf_fuse_free(fuse), "%s", cf_error());
}

// An error inside a callback returns to the callback, not past it.
static void fails_within(void *argument, const cf_span *span, cf_stream *stream) {
    (void)span, (void)stream;
    CHECK(!cf_fuse_finish(argument), "finished");
    says("all-gather inner is finished but was not begun");
}

static void callbacks_have_errors_of_their_own(void) {
    cf_fuse *inner = cf_fuse_create(context, plan_of("inner", CF_MODE_COMMFUSE, NULL));
    cf_fuse *outer = cf_fuse_create(context, plan_of("outer", CF_MODE_COMMFUSE, NULL));
    int64_t full[2 * ROWS * COLUMNS] = {0};
    CHECK(cf_fuse_run(outer, full, ROWS, COLUMNS, fails_within, inner, -1), "%s", cf_error());
    CHECK(!cf_fuse_run(outer, full, ROWS + 1, COLUMNS, fails_within, inner, -1), "run"); // it returns errors again
    CHECK(cf_fuse_free(inner) && cf_fuse_free(outer), "%s", cf_error());
}

// Every rank sends its shard to all others, and computes on its own shard, then on those that arrive.
static cf_schedule *star(int ranks, int rank, int slices) {
    cf_schedule *s = cf_schedule_start(CF_ALLGATHER, CF_COMPUTE_AFTER, ranks, rank, slices);
    for (int i = 1; i < ranks; i++) {
        int from = (rank - i + ranks) % ranks;
        cf_append_exchange(s, (rank + i) % ranks, (cf_place){CF_FULL, rank}, rank, from, (cf_place){CF_FULL, from}, from, -1, -1);
    }
    s->begin = s->count;
    for (int i = 0; i < ranks; i++) {
        int owner = (rank - i + ranks) % ranks;
        cf_append_compute(s, CF_COMPUTE_AFTER, (cf_place){CF_FULL, owner}, owner, 1, i - 1);
    }
    return s;
}

static cf_schedule *computes_less(int ranks, int rank, int slices) {
    cf_schedule *s = star(ranks, rank, slices);
    s->count--;
    return s;
}

static cf_schedule *does_not_wait(int ranks, int rank, int slices) {
    cf_schedule *s = star(ranks, rank, slices);
    s->step[s->count - 1].wait[0] = -1;
    return s;
}

static cf_schedule *cannot(int ranks, int rank, int slices) {
    return rank > 0 ? star(ranks, rank, slices) : cf_schedule_start(CF_ALLGATHER, CF_COMPUTE_BEFORE, ranks, rank, slices);
}

static cf_schedule *too_long(int ranks, int rank, int slices) {
    cf_schedule *s = star(ranks, rank, slices);
    s->step[s->count - 1].count = 2, s->step[s->count - 1].stride = 1;
    return s;
}

static cf_schedule *of_others(int ranks, int rank, int slices) {
    return star(ranks + 3, rank, slices);
}

static void own_schedules_are_checked(void) {
    CHECK(!cf_fuse_create(context, plan_of("others", CF_MODE_OWN, of_others)), "an operation");
    says("others: its generator made a schedule of");
    CHECK(!cf_fuse_create(context, plan_of("less", CF_MODE_OWN, computes_less)), "an operation");
    says("less: its schedule violates coverage: rank 0");
    CHECK(!cf_fuse_create(context, plan_of("none", CF_MODE_OWN, cannot)), "an operation");
    says("none: its generator has no schedule for rank 0");
    says("all-gather has no computation on that side");
    CHECK(!cf_fuse_create(context, plan_of("long", CF_MODE_OWN, too_long)), "an operation");
    says("violates form");
    if (all->size > 1) {
        CHECK(!cf_fuse_create(context, plan_of("early", CF_MODE_OWN, does_not_wait)), "an operation");
        says("early: its schedule violates race: rank 0 step 2");
    }
    cf_fuse *fuse = cf_fuse_create(context, plan_of("star", CF_MODE_OWN, star));
    CHECK(fuse, "%s", cf_error());
    for (int run = 0; run < 3; run++) run_well(fuse);
    cf_fuse_free(fuse);
}

static void groups_are_checked(void) {
    const int twice[] = {0, 0}, unknown[] = {0, 7}, other[] = {1 - all->rank};
    CHECK(!cf_group_create(context, "none", twice, 0), "a group");
    CHECK(!cf_group_create(context, "unknown", unknown, 2), "a group");
    if (all->size < 2) return;
    CHECK(!cf_group_create(context, "twice", twice, 2), "a group");
    says("group twice has rank 0 twice");
    CHECK(!cf_group_create(context, "other", other, 1), "a group");
    says("without this rank");
}

static void otherwise_errors_end_the_process(void) {
    if (all->size > 1) return; // a child must not touch MPI
    cf_errors_return(false);
    ASSERT_DIES(cf_schedule_start(CF_ALLTOALL, CF_COMPUTE_BOTH, 4, 4, 1), "rank 4 of 4");
    cf_errors_return(true);
}

int main(void) {
    cf_errors_return(true);
    if (cf_open("auto", 0, 60) || !strstr(cf_error(), "0 threads")) return fprintf(stderr, "not refused: %s\n", cf_error()), 1;
    context = cf_open("auto", 1, 60);
    all = context ? cf_group_create(context, "all", NULL, 0) : NULL;
    if (!all) return fprintf(stderr, "%s\n", cf_error()), 1;
    static const ranks_case cases[] = {
        RANKS_CASE(pure_functions_return_errors),
        RANKS_CASE(a_deadlock_is_no_number),
        RANKS_CASE(refused_runs_leave_an_operation_as_it_was),
        RANKS_CASE(callbacks_have_errors_of_their_own),
        RANKS_CASE(own_schedules_are_checked),
        RANKS_CASE(groups_are_checked),
        RANKS_CASE(otherwise_errors_end_the_process),
    };
    int status = ranks_run(all->rank, cases, sizeof cases / sizeof *cases);
    cf_group_free(all);
    return cf_close(context) ? status : 1;
}
