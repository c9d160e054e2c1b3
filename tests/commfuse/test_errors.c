// ranks: 1 2
//
// Errors as values (die.h), one context (context.h), and schedules of the caller's, which an operation checks before it uses them.
#include "tests/commfuse/ranks.h"
#include "tests/death.h"
#include <float.h>
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
static const cf_algorithm *ring;

static void says(const char *words) {
    CHECK(strstr(cf_error(), words), "'%s', not '%s'", cf_error(), words);
}

TEST(pure_functions_return_errors) {
    CHECK(!cf_schedule_create(CF_ALLGATHER, CF_COMPUTE_BEFORE, ring, 4, 1, 0, 1), "a schedule");
    says("all-gather has no computation on that side");
    CHECK(!cf_schedule_create(CF_ALLGATHER, CF_COMPUTE_AFTER, NULL, 4, 1, 0, 1), "a schedule");
    says("schedule of no algorithm for rank 0 of 4 with 1 slices");
    CHECK(!cf_schedule_create(CF_ALLTOALL, CF_COMPUTE_BOTH, ring, 4, 1, 4, 1), "a schedule");
    says("rank 4 of 4");
    CHECK(!cf_schedule_create(CF_ALLTOALL, CF_COMPUTE_BOTH, ring, 4, -1, 0, 1), "a schedule");
    CHECK(!cf_alloc(-1, "a test"), "memory");
    says("allocation of -1 bytes for a test");
}

static double no_time(const void *argument, const cf_schedule *schedule, const cf_step *step) {
    (void)argument, (void)schedule, (void)step;
    return 0;
}

static bool waits_in_a_circle(cf_schedule *s, const void *argument) { // each waits for the other's slice before it sends its own
    const int r = s->rank, other = 1 - r;
    (void)argument;
    const cf_step receives = {.kind = CF_EXCHANGE, .send = {-1, -1}, .recv = {other, other}, .at = {CF_FULL, other}};
    const int wait = cf_append(s, receives);
    cf_append(s, (cf_step){.kind = CF_EXCHANGE, .send = {other, r}, .from = {CF_FULL, r}, .recv = {-1, -1}, .wait = {wait}});
    return true;
}

TEST(a_deadlock_is_no_number) {
    const cf_algorithm circle = {.name = "circle",
                                 .serves = CF_SERVES(CF_ALLGATHER, CF_COMPUTE_AFTER),
                                 .generate = waits_in_a_circle};
    const cf_machine machine = {.cost_ms = no_time, .transfer_ms = no_time};
    cf_schedule *two[2];
    for (int r = 0; r < 2; r++) two[r] = cf_schedule_create(CF_ALLGATHER, CF_COMPUTE_AFTER, &circle, 2, 1, r, 1);
    CHECK(isnan(cf_replay(two, 2, &machine).finished_ms), "replayed");
    says("deadlock: rank 0 of 2");
    for (int r = 0; r < 2; r++) cf_schedule_free(two[r]);
}

static cf_fuse_config plan_of(const char *name, const cf_algorithm *algorithm) {
    return (cf_fuse_config){.name = name,
                            .group = all,
                            .operation = CF_ALLGATHER,
                            .side = CF_COMPUTE_AFTER,
                            .algorithm = algorithm,
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

TEST(refused_runs_leave_an_operation_as_it_was) {
    cf_fuse *fuse = cf_fuse_create(context, plan_of("small", ring));
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

static void refused(const char *field, cf_fuse_config config) {
    char words[64];
    snprintf(words, sizeof words, "%s: %s is ", config.name ? config.name : "an operation", field);
    CHECK(!cf_fuse_create(context, config), "an operation with another %s", field);
    says(words);
}

// Each field that is not what it may be, by its name.
TEST(a_config_names_its_field) {
    const cf_fuse_config good = plan_of("field", ring);
    cf_fuse_config config;
#define REFUSED(field, value)                                                                                                      \
    do {                                                                                                                           \
        config = good;                                                                                                             \
        config.field = value;                                                                                                      \
        refused(#field, config);                                                                                                   \
    } while (0)
    REFUSED(name, NULL);
    REFUSED(group, NULL);
    REFUSED(operation, (cf_operation)3);
    REFUSED(operation, (cf_operation)-1);
    REFUSED(side, (cf_side)99);
    REFUSED(dtype, (cf_dtype)5);
    REFUSED(slices, 0);
    REFUSED(slices, INT32_MAX);
    REFUSED(capacity, -1);
    REFUSED(capacity, INT64_MAX / 8);
    REFUSED(result_given, true);
    REFUSED(urgency, (cf_urgency)3);
    REFUSED(callback_adds_last, true);
    config = good, config.operation = CF_REDUCE_SCATTER, config.side = CF_COMPUTE_BEFORE, config.dtype = CF_BYTE;
    refused("dtype", config);
    config = good, config.side = CF_COMPUTE_BEFORE;
    CHECK(!cf_fuse_create(context, config), "an all-gather with computation before it");
    says("field: all-gather has no computation on that side");
    CHECK(!context->failed, "failed");
}

TEST(a_product_that_overflows_is_refused) {
    cf_fuse *fuse = cf_fuse_create(context, plan_of("small", ring));
    int64_t full[2 * ROWS * COLUMNS], total = 0;
    CHECK(!cf_fuse_begin(fuse, full, (int64_t)1 << 62, 4, sum, &total, -1), "begun");
    says("exceeds the capacity");
    CHECK(!cf_fuse_begin(fuse, full, 4, (int64_t)1 << 62, sum, &total, -1), "begun");
    CHECK(!cf_fuse_begin(fuse, full, 0, INT64_MAX, sum, &total, -1), "begun");
    run_well(fuse);
    CHECK(cf_fuse_free(fuse), "%s", cf_error());
}

// An error inside a callback returns to the callback, not past it.
static void fails_within(void *argument, const cf_span *span, cf_stream *stream) {
    (void)span, (void)stream;
    CHECK(!cf_fuse_finish(argument), "finished");
    says("all-gather inner is finished but was not begun");
}

TEST(callbacks_have_errors_of_their_own) {
    cf_fuse *inner = cf_fuse_create(context, plan_of("inner", ring));
    cf_fuse *outer = cf_fuse_create(context, plan_of("outer", ring));
    int64_t full[2 * ROWS * COLUMNS] = {0};
    CHECK(cf_fuse_run(outer, full, ROWS, COLUMNS, fails_within, inner, -1), "%s", cf_error());
    CHECK(!cf_fuse_run(outer, full, ROWS + 1, COLUMNS, fails_within, inner, -1), "run"); // it returns errors again
    CHECK(cf_fuse_free(inner) && cf_fuse_free(outer), "%s", cf_error());
}

// What the argument says is wrong with the schedule.
typedef enum { NOTHING, COMPUTES_LESS, DOES_NOT_WAIT, TOO_LONG, DECLINES, RANK_0_DECLINES, FAILS } fault;

// Every rank sends its shard to all others, and computes on its own shard, then on those that arrive.
static bool star(cf_schedule *s, const void *argument) {
    const fault wrong = *(const fault *)argument;
    const int N = s->ranks, rank = s->rank;
    for (int i = 1; i < N; i++) {
        int from = (rank - i + N) % N;
        const cf_place at = {CF_FULL, from}, own = {CF_FULL, rank};
        cf_append(s, (cf_step){.kind = CF_EXCHANGE, .send = {(rank + i) % N, rank}, .from = own, .recv = {from, from}, .at = at});
    }
    s->split = s->count;
    for (int i = 0; i < N; i++) {
        int owner = (rank - i + N) % N;
        cf_step work = {.kind = CF_COMPUTE, .side = CF_COMPUTE_AFTER, .at = {CF_FULL, owner}, .first = owner, .count = 1};
        work.wait[0] = i;
        cf_append(s, work);
    }
    cf_step *last = &s->step[s->count - 1];
    if (wrong == COMPUTES_LESS) s->count--;
    if (wrong == DOES_NOT_WAIT) last->wait[0] = 0;
    if (wrong == TOO_LONG) last->count = 2;
    return wrong < DECLINES || (wrong == RANK_0_DECLINES && rank > 0) || (wrong == FAILS && cf_alloc(-1, "a generator"));
}

static cf_algorithm star_with(const fault *wrong, const char *otherwise) {
    return (cf_algorithm){.name = "star",
                          .serves = CF_SERVES(CF_ALLGATHER, CF_COMPUTE_AFTER),
                          .fallback = otherwise,
                          .generate = star,
                          .argument = wrong,
                          .slices = 1,
                          .max_slices = 1};
}

// A caller's algorithm makes schedules that an operation checks before it runs them.
TEST(an_algorithm_of_ones_own_is_checked) {
    static const struct {
        fault wrong;
        const char *property;
    } faults[] = {{COMPUTES_LESS, "own: star violates coverage: rank 0"},
                  {TOO_LONG, "own: star violates form: rank 0"},
                  {DOES_NOT_WAIT, "own: star violates race: rank 0 step 2"}};
    for (int i = 0; i < (all->size > 1 ? 3 : 2); i++) { // one rank has nothing to wait for
        const cf_algorithm row = star_with(&faults[i].wrong, "ring");
        CHECK(!cf_fuse_create(context, plan_of("own", &row)), "an operation");
        says(faults[i].property);
        says("hint: cf_schedule_print() prints it");
    }
    const fault nothing = NOTHING;
    const cf_algorithm row = star_with(&nothing, NULL);
    cf_fuse *fuse = cf_fuse_create(context, plan_of("own", &row));
    CHECK(fuse && cf_fuse_schedule(fuse)->algorithm == &row && cf_fuse_get_config(fuse)->algorithm == &row, "%s", cf_error());
    for (int run = 0; run < 3; run++) run_well(fuse);
    cf_fuse_free(fuse);
}

// A generator that declines leaves the operation to its row's `fallback`; without one the error names it.
TEST(an_algorithm_may_decline) {
    const fault declines[] = {DECLINES, RANK_0_DECLINES}, fails = FAILS;
    cf_algorithm row = star_with(&fails, "ring"); // an error is an error
    CHECK(!cf_fuse_create(context, plan_of("own", &row)), "an operation");
    says("own: allocation of -1 bytes for a generator");
    for (int i = 0; i < 2; i++) {
        row = star_with(&declines[i], NULL);
        CHECK(!cf_fuse_create(context, plan_of("own", &row)), "an operation");
        says("own: star makes no all-gather of ");
        says("hint: give the algorithm a `fallback`");
    }
    row = star_with(&declines[0], "commfuse");
    cf_fuse *fuse = cf_fuse_create(context, plan_of("own", &row));
    CHECK(fuse && cf_fuse_schedule(fuse)->algorithm == ring, "%s", cf_error());
    run_well(fuse);
    cf_fuse_free(fuse);
    row = star_with(&declines[1], "ring"); // rank 0 would run one algorithm, the others another
    if (all->size > 1) CHECK(!cf_fuse_create(context, plan_of("own", &row)), "an operation of two algorithms");
    if (all->size > 1) says("violates form");
    row = star_with(&declines[0], NULL), row.generate = NULL;
    CHECK(!cf_fuse_create(context, plan_of("own", &row)), "an operation");
    says("own: star makes no all-gather of ");
    row.serves = CF_SERVES(CF_ALLTOALL, CF_COMPUTE_BOTH);
    CHECK(!cf_fuse_create(context, plan_of("own", &row)), "an operation");
    says("own: star makes no all-gather of ");
}

// Tags are few, of each group; operations are freed in another order than they were made.
TEST(tags_are_given_back) {
    enum { SLOTS = 5, TURNS = 500 };
    if (all->size < 2) return;
    const int64_t most = context->transport->tags;
    cf_fuse_config wide = plan_of("wide", ring);
    cf_fuse *fuse[SLOTS + 1];
    CHECK(most > 32767, "%lld tags", (long long)most); // what MPI promises
    context->transport->tags = 10;
    for (int i = 0; i < SLOTS; i++) fuse[i] = cf_fuse_create(context, plan_of("in a turn", ring));
    for (int i = 0; i < TURNS; i++) {
        CHECK(cf_fuse_free(fuse[i * i % SLOTS]), "%s", cf_error());
        fuse[i * i % SLOTS] = cf_fuse_create(context, plan_of("in a turn", ring));
        CHECK(fuse[i * i % SLOTS], "turn %d: %s", i, cf_error());
        run_well(fuse[i % SLOTS]);
    }
    CHECK(!cf_fuse_create(context, wide), "an operation");
    says("all-gather wide needs 2 message tags; 10 of its group are taken, and MPI has 10 (MPI_TAG_UB is 9)");
    says("hint: use fewer slices, or free operations that run no more");
    cf_group *again = cf_group_create(context, "again", NULL, 0);
    wide.group = again, wide.slices = 5;
    CHECK(fuse[SLOTS] = cf_fuse_create(context, wide), "%s", cf_error());
    run_well(fuse[SLOTS]);
    wide.group = all, wide.algorithm = cf_algorithm_find("slice"), wide.slices = 64; // the library's collectives need none
    cf_fuse *native = cf_fuse_create(context, wide);
    CHECK(native && cf_fuse_free(native), "%s", cf_error());
    wide.algorithm = ring, wide.slices = 1;
    CHECK(!cf_fuse_create(context, wide) && cf_fuse_free(fuse[2]), "not refused a second time");
    CHECK(fuse[2] = cf_fuse_create(context, wide), "%s", cf_error());
    for (int i = SLOTS; i >= 0; i--) run_well(fuse[i]), cf_fuse_free(fuse[i]);
    cf_group_free(again);
    context->transport->tags = most;
}

TEST(groups_are_checked) {
    const int twice[] = {0, 0}, unknown[] = {0, 7}, other[] = {1 - all->rank};
    CHECK(!cf_group_create(context, "none", twice, 0), "a group");
    CHECK(!cf_group_create(context, "unknown", unknown, 2), "a group");
    if (all->size < 2) return;
    CHECK(!cf_group_create(context, "twice", twice, 2), "a group");
    says("group twice has rank 0 twice");
    CHECK(!cf_group_create(context, "other", other, 1), "a group");
    says("is not in group");
}

// A program that uses the library keeps its subnormal numbers, in the library's threads, too.
TEST(subnormal_numbers_are_the_programs) {
    static volatile float tiny = FLT_MIN / 4;
    cf_device_threads(1);
    for (int native = 0; native < 2; native++) {
        cf_fuse_config config = plan_of("sum", native ? cf_algorithm_find("none") : ring);
        config.operation = CF_REDUCE_SCATTER, config.side = CF_NO_COMPUTE, config.dtype = CF_FP32;
        float full[2] = {tiny, tiny};
        cf_fuse *fuse = cf_fuse_create(context, config);
        const float *sums = cf_fuse_run(fuse, full, 1, 1, NULL, NULL, -1);
        CHECK(sums && *sums * 1e30f == (float)all->size * (FLT_MIN / 4 * 1e30f), "%s", cf_error());
        CHECK(cf_fuse_free(fuse), "%s", cf_error());
    }
}

TEST(otherwise_errors_end_the_process) {
    if (all->size > 1) return; // a child must not touch MPI
    cf_errors_return(false);
    ASSERT_DIES(cf_schedule_create(CF_ALLTOALL, CF_COMPUTE_BOTH, ring, 4, 1, 4, 1), "rank 4 of 4");
    cf_errors_return(true);
}

int main(void) {
    cf_errors_return(true);
    if (cf_open("auto", -1, 60) || !strstr(cf_error(), "-1 threads")) return fprintf(stderr, "not refused: %s\n", cf_error()), 1;
    context = cf_open("auto", 1, 60);
    ring = cf_algorithm_find("ring");
    all = context ? cf_group_create(context, "all", NULL, 0) : NULL;
    if (!all) return fprintf(stderr, "%s\n", cf_error()), 1;
    int status = ranks_run(all->rank);
    cf_group_free(all);
    return cf_close(context) ? status : 1;
}
