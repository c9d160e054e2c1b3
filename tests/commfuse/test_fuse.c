// ranks: 1 2 3 4 8
// quick: 2 3
//
// The executor on real ranks. Payloads are small integers, so every sum is exact in every type and results are compared with ==. A
// value depends on the rank that made it, its row and its column, so a value in a wrong place is noticed. Callbacks check their
// spans: inside the payload, on a side on which the operation computes, each row once on each side; for compute after, already
// filled; for accumulating compute before, still as the caller left it. Guards after each payload and each given result must
// survive.
//
// Every row of the table of algorithms is tested, a new one too. Rows that exchange promise the order of a sum, j+1, j+2, …, j, of
// two levels host by host: fractions are summed and compared bit by bit with the sum made here, so they all give the same bits.
// Even numbers of ranks are taken for two hosts.
#include "tests/commfuse/ranks.h"
#include "tests/commfuse/rows.h"
#include "tests/death.h"
#include "commfuse/base/bf16.h"
#include "commfuse/choice.h"
#include "commfuse/fuse.h"
#include <time.h>

enum { GUARD_BYTES = 64, GUARD = 0xA5, JOBS_MAX = 8, PATIENCE_S = 60, EARLIER = 1000 };

static cf_context context;
static cf_mesh mesh;             // tp = all ranks
static const cf_algorithm *ring; // where any row will do

typedef struct job { // one operation, its payload and what its callback saw
    cf_fuse *fuse;
    cf_fuse_config plan;
    int64_t rows, elements; // of one shard; of a row
    int seed;
    bool fractions;              // values that are not exact: reduce-scatter only
    bool accumulates;            // onto what the payload holds already, values of seed + EARLIER: reduce-scatter only
    char *full, *result, *given; // given: NULL, or the memory that the result must be in
    int64_t full_bytes;
    int *covered[CF_COMPUTE_AFTER + 1];        // [side]: times each row was computed
    int64_t first_worked, last_computed;       // rows; -1: none
    const cf_stream *on[CF_COMPUTE_AFTER + 1]; // [side]: the last call's; NULL: there was none
    int64_t sent_before;                       // bytes
} job;

// Every operation that computes, on each side on which it can; in a reduce-scatter on both, the callback adds the last sum.
typedef struct computing {
    cf_operation operation;
    cf_side side;
} computing;
static const computing every_computing[] = {{CF_ALLGATHER, CF_COMPUTE_AFTER},     {CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE},
                                            {CF_REDUCE_SCATTER, CF_COMPUTE_BOTH}, {CF_ALLTOALL, CF_COMPUTE_BEFORE},
                                            {CF_ALLTOALL, CF_COMPUTE_AFTER},      {CF_ALLTOALL, CF_COMPUTE_BOTH}};
enum { COMPUTINGS = sizeof every_computing / sizeof every_computing[0] };

static bool computes(const job *j, cf_side side) {
    return (j->plan.side | (j->plan.callback_adds_last ? CF_COMPUTE_AFTER : 0)) & side;
}

// ---------------------------------------------------------------------------------------------- values

// The value that a member of the group makes for a row of the payload; it fits every type, and so do sums over ranks.
static int64_t seeded(const job *j, int member, int64_t row, int64_t column, int seed) {
    int64_t mixed = 37 * j->plan.group->world[member] + 101 * row + 7 * column + 13 * seed;
    bool summed = j->plan.operation == CF_REDUCE_SCATTER && j->plan.dtype == CF_BF16; // exact up to 256
    return summed ? mixed % 31 - 15 : mixed % 509 - 254;
}

static int64_t whole(const job *j, int member, int64_t row, int64_t column) {
    return seeded(j, member, row, column, j->seed);
}

static int64_t earlier(const job *j, int member, int64_t row, int64_t column) {
    return seeded(j, member, row, column, j->seed + EARLIER);
}

static float fraction(int64_t number, int64_t row, int64_t column) {
    uint32_t mixed = (uint32_t)(number * 2654435761 + row * 40503 + column * 69069);
    mixed ^= mixed >> 15;
    mixed *= 2246822519u;
    mixed ^= mixed >> 13;
    return (float)(int32_t)mixed * 0x1p-31f; // in [-1, 1); times a power of two: exact, so contraction changes nothing
}

static void put(const job *j, char *row, int64_t column, int64_t value) {
    switch (j->plan.dtype) {
    case CF_FP32:
        ((float *)row)[column] = (float)value;
        return;
    case CF_FP64:
        ((double *)row)[column] = (double)value;
        return;
    case CF_INT64:
        ((int64_t *)row)[column] = value;
        return;
    case CF_BF16:
        ((uint16_t *)row)[column] = cf_bf16_of_float((float)value);
        return;
    case CF_BYTE:
        ((uint8_t *)row)[column] = (uint8_t)value;
        return;
    }
}

static bool holds(const job *j, const char *row, int64_t column, int64_t value) {
    switch (j->plan.dtype) {
    case CF_FP32:
        return ((const float *)row)[column] == (float)value;
    case CF_FP64:
        return ((const double *)row)[column] == (double)value;
    case CF_INT64:
        return ((const int64_t *)row)[column] == value;
    case CF_BF16:
        return cf_float_of_bf16(((const uint16_t *)row)[column]) == (float)value;
    case CF_BYTE:
        return ((const uint8_t *)row)[column] == (uint8_t)value;
    }
    return false;
}

// With fractions: a number as its type holds it.
static float as_held(const job *j, float x) {
    return j->plan.dtype == CF_BF16 ? cf_float_of_bf16(cf_bf16_of_float(x)) : x;
}

static float held_fraction(const job *j, int64_t number, int64_t row, int64_t column) {
    return as_held(j, fraction(number, row, column));
}

static float get_fraction(const job *j, const char *row, int64_t column) {
    return j->plan.dtype == CF_BF16 ? cf_float_of_bf16(((const uint16_t *)row)[column]) : ((const float *)row)[column];
}

static void put_fraction(const job *j, char *row, int64_t column, float x) {
    if (j->plan.dtype == CF_BF16)
        ((uint16_t *)row)[column] = cf_bf16_of_float(x);
    else
        ((float *)row)[column] = x;
}

static bool same_bits(float a, float b) {
    return memcmp(&a, &b, sizeof a) == 0;
}

static int64_t row_bytes(const job *j) {
    return j->elements * cf_dtype_size(j->plan.dtype);
}

typedef int64_t made_by(const job *j, int member, int64_t row, int64_t column);

static void fill_row(const job *j, char *data, int64_t row, made_by *make) { // as this rank
    for (int64_t column = 0; column < j->elements; column++) {
        int64_t value = make(j, j->plan.group->rank, row, column);
        if (j->fractions)
            put_fraction(j, data, column, fraction(value, row, column));
        else
            put(j, data, column, value);
    }
}

// The row that made the operation's schedule; whether its transfers are left out.
static const cf_algorithm *row_of(const job *j) {
    return cf_fuse_schedule(j->fuse)->algorithm;
}
static bool is_bound(const job *j) {
    return cf_fuse_schedule(j->fuse)->bound;
}

static const char *describe(const job *j) {
    static const char *const side[] = {"alone", "after compute", "before compute", "between computes"};
    static char text[256];
    const cf_fuse_config *p = &j->plan;
    snprintf(text, sizeof text, "%s %s, %s%s, %d slices, %s%s, %lld rows of %lld, rank %d of %d (%s)",
             cf_operation_name(p->operation), side[p->callback_adds_last ? CF_COMPUTE_BOTH : p->side], row_of(j)->name,
             is_bound(j) ? " without transfers" : "", p->slices, cf_dtype_name(p->dtype), p->result_given ? ", result given" : "",
             (long long)j->rows, (long long)j->elements, p->group->rank, p->group->size, p->group->name);
    return text;
}

// The payload's value at a row after the all-gather or all-to-all (rows by source).
static void check_arrived(const job *j, const char *data, int64_t row) {
    const cf_group *g = j->plan.group;
    int owner = (int)(row / j->rows);
    int64_t at_source = j->plan.operation == CF_ALLTOALL ? g->rank * j->rows + row % j->rows : row;
    for (int64_t column = 0; column < j->elements; column++)
        CHECK(holds(j, data, column, whole(j, owner, at_source, column)), "%s: row %lld column %lld is wrong", describe(j),
              (long long)row, (long long)column);
}

// Adds this rank's value for the row, which must still be as the caller left it.
static void accumulate_row(const job *j, char *data, int64_t row) {
    int rank = j->plan.group->rank;
    for (int64_t column = 0; column < j->elements; column++) {
        int64_t value = whole(j, rank, row, column), old = earlier(j, rank, row, column);
        float was = held_fraction(j, old, row, column);
        bool kept = j->fractions ? same_bits(get_fraction(j, data, column), was) : holds(j, data, column, old);
        CHECK(kept, "%s: row %lld column %lld has changed before it is computed", describe(j), (long long)row, (long long)column);
        if (j->fractions)
            put_fraction(j, data, column, was + held_fraction(j, value, row, column));
        else
            put(j, data, column, old + value);
    }
}

// A member's value for a row of a reduce-scatter; with fractions one rounded number.
static int64_t part_of(const job *j, int member, int64_t row, int64_t column, float *rounded) {
    int64_t value = whole(j, member, row, column), old = earlier(j, member, row, column);
    *rounded = held_fraction(j, value, row, column);
    if (j->accumulates) *rounded = as_held(j, *rounded + held_fraction(j, old, row, column));
    return value + (j->accumulates ? old : 0);
}

// The sum so far and the next places' parts, of the host so many behind the owner's, from its place `first` on.
static float sum_host(const job *j, int host, float running, int first, int64_t row, int64_t column, int64_t *sum) {
    const cf_schedule *s = cf_fuse_schedule(j->fuse);
    const int H = row_of(j)->levels ? s->hosts : 1, P = s->ranks / H;
    for (int i = 1; i <= P; i++) {
        float part;
        *sum += part_of(j, cf_schedule_shifted(s, host % H * P + i % P, 0, j->plan.group->rank), row, column, &part);
        running = i == first ? part : as_held(j, running + part);
    }
    return running;
}

static void check_reduced(const job *j, const char *data, int64_t row) {
    const int H = row_of(j)->levels ? cf_fuse_schedule(j->fuse)->hosts : 1;
    for (int64_t column = 0; column < j->elements; column++) {
        int64_t sum = 0;
        float running = 0; // in the promised order: the rank behind the owner first, the owner last
        for (int host = 1; host < H; host++) {
            const float theirs = sum_host(j, host, 0, 1, row, column, &sum);
            running = host == 1 ? theirs : as_held(j, running + theirs);
        }
        running = sum_host(j, H, running, H == 1 ? 1 : 0, row, column, &sum);
        bool right = j->fractions ? same_bits(get_fraction(j, data, column), running) : holds(j, data, column, sum);
        CHECK(right, "%s: row %lld column %lld is wrong", describe(j), (long long)row, (long long)column);
    }
}

// ------------------------------------------------------------------------------------------------ jobs

// A row of the own shard whose last addition is left to the callback.
static void use_sum(const job *j, const cf_span *span, int64_t row, cf_stream *stream) {
    char *data = span->data + (row - span->row) * row_bytes(j);
    const char *from = (const char *)span->sum.from + (row - span->row) * row_bytes(j);
    CHECK(span->sum.to == span->data && span->blocks == 1, "%s: the sum is not at the data", describe(j));
    if (span->sum.parts > 0) cf_add(data, from, span->sum.parts, span->sum.stride, j->elements, j->plan.dtype, stream);
    if (!is_bound(j)) check_reduced(j, data, row);
}

static void compute(void *argument, const cf_span *span, cf_stream *stream) {
    job *j = argument;
    cf_stream_sync(stream);
    int64_t rows = j->plan.group->size * j->rows;
    CHECK((span->side == CF_COMPUTE_BEFORE || span->side == CF_COMPUTE_AFTER) && computes(j, span->side), "%s: a span on side %d",
          describe(j), span->side);
    CHECK(span->blocks >= 1 && span->rows >= 0 && span->row >= 0, "%s: span of %d blocks of %lld rows from %lld", describe(j),
          span->blocks, (long long)span->rows, (long long)span->row);
    const bool other = j->plan.independent && j->on[span->side] == context.stream;
    const bool sums = j->plan.callback_adds_last && span->side == CF_COMPUTE_AFTER;
    CHECK(sums || stream == (other ? context.second : context.stream), "%s: slices do not take turns on two streams", describe(j));
    if (!sums) j->on[span->side] = stream;
    for (int i = 0; i < span->blocks; i++)
        for (int64_t k = 0; k < span->rows; k++) {
            int64_t row = span->row + i * span->row_stride + k;
            char *data = span->data + i * span->data_stride + k * row_bytes(j);
            CHECK(row >= 0 && row < rows, "%s: span reaches row %lld of %lld", describe(j), (long long)row, (long long)rows);
            j->covered[span->side][row]++;
            if (span->side == CF_COMPUTE_AFTER) {
                if (j->first_worked < 0) j->first_worked = row;
                if (sums)
                    use_sum(j, span, row, stream);
                else if (!is_bound(j))
                    check_arrived(j, data, row);
                continue;
            }
            j->last_computed = row;
            if (j->accumulates)
                accumulate_row(j, data, row);
            else
                fill_row(j, data, row, whole);
        }
}

static void set_last_sum(cf_fuse_config *plan) {
    plan->callback_adds_last = plan->operation == CF_REDUCE_SCATTER && plan->side == CF_COMPUTE_BOTH;
    if (plan->callback_adds_last) plan->side = CF_COMPUTE_BEFORE;
}

static job job_create(const cf_group *group, cf_operation operation, cf_side side, const cf_algorithm *row, int slices,
                      cf_dtype dtype, int64_t capacity) {
    cf_fuse_config plan = {.name = "test.place",
                           .group = group,
                           .operation = operation,
                           .side = side,
                           .algorithm = row,
                           .slices = slices,
                           .dtype = dtype,
                           .capacity = capacity,
                           .urgency = slices % 2 == 0 ? CF_BULK : CF_URGENT, // as good as any
                           .independent = slices % 2 == 1 || dtype == CF_BF16};
    set_last_sum(&plan);
    if (!row_leads(row, operation, plan.side)) plan.algorithm = ring;
    return (job){.plan = plan, .fuse = cf_fuse_create(&context, plan)};
}

// With the choice for this much work.
static job job_create_chosen(cf_operation operation, cf_side side, cf_dtype dtype, int64_t capacity, double flops) {
    cf_fuse_config plan = {.name = "test.place",
                           .group = &mesh.tp_group,
                           .operation = operation,
                           .side = side,
                           .dtype = dtype,
                           .capacity = capacity,
                           .flops = flops};
    set_last_sum(&plan);
    cf_fuse *fuse = cf_fuse_create(&context, plan);
    return (job){.plan = *cf_fuse_get_config(fuse), .fuse = fuse};
}

// An all-to-all whose result goes to a place given by the job, another one in every run.
static job job_create_given(cf_side side, const cf_algorithm *row, int slices, cf_dtype dtype, int64_t capacity) {
    cf_fuse_config plan = {.name = "test.place",
                           .group = &mesh.tp_group,
                           .operation = CF_ALLTOALL,
                           .side = side,
                           .algorithm = row,
                           .slices = slices,
                           .dtype = dtype,
                           .capacity = capacity,
                           .result_given = true};
    if (!row_leads(row, CF_ALLTOALL, side)) plan.algorithm = ring;
    return (job){.plan = plan, .fuse = cf_fuse_create(&context, plan)};
}

static char *guarded(int64_t bytes) {
    char *memory = malloc((size_t)bytes + GUARD_BYTES);
    CHECK(memory, "out of memory");
    return memset(memory, GUARD, (size_t)bytes + GUARD_BYTES);
}

static void check_guard(const job *j, const char *memory, const char *what) {
    for (int i = 0; i < GUARD_BYTES; i++)
        CHECK((unsigned char)memory[j->full_bytes + i] == GUARD, "%s: byte %d behind %s", describe(j), i, what);
}

static void job_begin(job *j, int64_t rows, int64_t elements, int seed) {
    const cf_group *g = j->plan.group;
    j->rows = rows, j->elements = elements, j->seed = seed, j->first_worked = j->last_computed = -1;
    memset(j->on, 0, sizeof j->on);
    j->full_bytes = g->size * rows * row_bytes(j);
    j->full = guarded(j->full_bytes);
    j->given = j->plan.result_given ? guarded(j->full_bytes) : NULL;
    if (j->given) cf_fuse_set_result(j->fuse, j->given);
    for (cf_side side = CF_NO_COMPUTE; side <= CF_COMPUTE_AFTER; side++) {
        j->covered[side] = calloc((size_t)(g->size * rows) + 1, sizeof *j->covered[side]);
        CHECK(j->covered[side], "out of memory");
    }
    for (int64_t row = 0; row < g->size * rows; row++) {
        bool mine = j->plan.operation == CF_ALLGATHER ? row / rows == g->rank : !computes(j, CF_COMPUTE_BEFORE);
        if (mine || j->accumulates) fill_row(j, j->full + row * row_bytes(j), row, j->accumulates ? earlier : whole);
    }
    j->sent_before = context.transport ? context.transport->bytes_sent : 0;
    cf_fuse_begin(j->fuse, j->full, rows, elements, j->plan.side == CF_NO_COMPUTE ? NULL : compute, j, 7);
}

static void check_result(const job *j) {
    const cf_group *g = j->plan.group;
    bool own_stays = j->plan.side == CF_COMPUTE_AFTER && !row_of(j)->native;
    switch (j->plan.operation) {
    case CF_ALLGATHER:
        CHECK(j->result == j->full, "%s: the result is not the payload", describe(j));
        for (int64_t row = 0; row < g->size * j->rows; row++) check_arrived(j, j->result + row * row_bytes(j), row);
        break;
    case CF_REDUCE_SCATTER:
        for (int64_t k = 0; k < j->rows; k++) check_reduced(j, j->result + k * row_bytes(j), g->rank * j->rows + k);
        break;
    case CF_ALLTOALL:
        for (int64_t row = 0; row < g->size * j->rows; row++)
            if (!own_stays || row / j->rows != g->rank) check_arrived(j, j->result + row * row_bytes(j), row);
        break;
    }
}

// Sums of others' rows are used elsewhere.
static bool computes_row(const job *j, cf_side side, int64_t row) {
    return computes(j, side) && (side == CF_COMPUTE_BEFORE || !j->plan.callback_adds_last || row / j->rows == j->plan.group->rank);
}

// Each row once on each side on which the operation computes, own rows last before and first after.
static void check_coverage(const job *j) {
    const cf_group *g = j->plan.group;
    for (cf_side side = CF_COMPUTE_BEFORE; side <= CF_COMPUTE_AFTER; side++)
        for (int64_t row = 0; row < g->size * j->rows; row++)
            CHECK(j->covered[side][row] == computes_row(j, side, row), "%s: row %lld computed %d times on side %d", describe(j),
                  (long long)row, j->covered[side][row], side);
    if (!row_of(j)->tail_free || j->rows < j->plan.slices) return;
    if (computes(j, CF_COMPUTE_BEFORE))
        CHECK(j->last_computed / j->rows == g->rank, "%s: ends with row %lld", describe(j), (long long)j->last_computed);
    if (computes(j, CF_COMPUTE_AFTER))
        CHECK(j->first_worked / j->rows == g->rank, "%s: begins with row %lld", describe(j), (long long)j->first_worked);
}

static void job_finish(job *j) {
    j->result = cf_fuse_finish(j->fuse);
    cf_stream_sync(context.stream);
    check_coverage(j);
    check_guard(j, j->full, "the payload");
    if (j->given) check_guard(j, j->given, "the given result");
    CHECK(!j->given || j->result == j->given, "%s: the result is not in the memory given", describe(j));
    if (!is_bound(j)) check_result(j);
}

static void job_release(job *j) { // the payload; the operation can be begun again
    free(j->full);
    free(j->given);
    for (cf_side side = CF_NO_COMPUTE; side <= CF_COMPUTE_AFTER; side++) free(j->covered[side]);
}

static void job_run(job *j, int64_t rows, int64_t elements, int seed) {
    job_begin(j, rows, elements, seed);
    job_finish(j);
    job_release(j);
}

// ----------------------------------------------------------------------------------------------- tests

// Types in turn. Their number and that of slices have no common divisor, so that each type meets each number.
enum { TYPES = 5 };
static const cf_dtype rounded[] = {CF_FP32, CF_BF16};                                // with fractions
static const cf_dtype added[TYPES] = {CF_FP32, CF_INT64, CF_BF16, CF_FP64, CF_BF16}; // bytes are not

// Every row and number of slices; sizes odd, smaller than the number of slices, and none at all.
static void every_row(cf_operation operation, cf_side side) {
    static const int64_t rows[] = {1, 3, 5, 7, 17, 0}, elements[] = {1, 3, 64, 100};
    static const cf_dtype moved[TYPES] = {CF_FP32, CF_INT64, CF_FP64, CF_BF16, CF_BYTE};
    const cf_dtype *dtypes = operation == CF_REDUCE_SCATTER ? added : moved;
    int turn = 0;
    for (EVERY_ROW(row))
        for (int slices = 1; slices <= 4 && row_is_own(row, operation, side); slices++, turn++) {
            job j = job_create(&mesh.tp_group, operation, side, row, slices, dtypes[turn % TYPES], 1700);
            for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) job_run(&j, rows[i], elements[(i + (size_t)turn) % 4], turn);
            cf_fuse_free(j.fuse);
        }
}

TEST(every_choice) {
    static const double flops[] = {0, 1e6, 1e9, 1e13};
    for (int of = 0; of < COMPUTINGS; of++)
        for (size_t i = 0; i < sizeof flops / sizeof *flops; i++) {
            computing c = every_computing[of];
            job j = job_create_chosen(c.operation, c.side, CF_FP32, 17 * 31, c.side == CF_NO_COMPUTE ? 0 : flops[i]);
            for (int again = 0; again < 2; again++) job_run(&j, 17, 31, again);
            cf_fuse_free(j.fuse);
        }
}

TEST(allgather_alone) {
    every_row(CF_ALLGATHER, CF_NO_COMPUTE);
}
TEST(allgather_then_compute) {
    every_row(CF_ALLGATHER, CF_COMPUTE_AFTER);
}
TEST(reduce_scatter_alone) {
    every_row(CF_REDUCE_SCATTER, CF_NO_COMPUTE);
}
TEST(compute_then_reduce_scatter) {
    every_row(CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE);
}
TEST(alltoall_alone) {
    every_row(CF_ALLTOALL, CF_NO_COMPUTE);
}
TEST(compute_then_alltoall) {
    every_row(CF_ALLTOALL, CF_COMPUTE_BEFORE);
}
TEST(alltoall_then_compute) {
    every_row(CF_ALLTOALL, CF_COMPUTE_AFTER);
}
TEST(alltoall_between_computes) {
    every_row(CF_ALLTOALL, CF_COMPUTE_BOTH);
}

// Two runs into two places: the second does not touch the first one's result.
static void two_places(job *j, int64_t rows, int64_t more_rows, int64_t elements, int seed) {
    job_begin(j, rows, elements, seed);
    job_finish(j);
    job first = *j;
    job_begin(j, more_rows, elements, seed + 1);
    job_finish(j);
    CHECK(first.given != j->given, "%s: one place for two results", describe(j));
    check_guard(&first, first.given, "the result before");
    if (!is_bound(j)) check_result(&first);
    job_release(&first);
    job_release(j);
}

static int64_t stage_bytes(const job *j) {
    const cf_schedule *s = cf_fuse_schedule(j->fuse);
    return s->stage_slots / s->slices * j->plan.capacity * cf_dtype_size(j->plan.dtype);
}

TEST(result_in_given_memory) {
    static const int64_t rows[] = {1, 3, 5, 17, 0, 2};
    static const cf_dtype dtypes[] = {CF_FP32, CF_INT64, CF_BF16};
    int turn = 0, count = sizeof rows / sizeof rows[0];
    for (cf_side side = CF_NO_COMPUTE; side <= CF_COMPUTE_BOTH; side++)
        for (EVERY_ROW(row))
            for (int slices = 1; slices <= 4 && row_is_own(row, CF_ALLTOALL, side); slices++, turn++) {
                int64_t before = cf_memory_bytes();
                job j = job_create_given(side, row, slices, dtypes[turn % 3], 17 * 9);
                CHECK(cf_memory_bytes() == before + stage_bytes(&j), "%s: takes %lld bytes", describe(&j),
                      (long long)(cf_memory_bytes() - before));
                for (int i = 0; i < count; i++) two_places(&j, rows[i], rows[(i + 1) % count], 1 + (i + turn) % 9, turn);
                char *place = guarded(0);
                cf_fuse_set_result(j.fuse, place);
                cf_fuse_free(j.fuse); // and not the place
                free(place);
                job own = job_create(&mesh.tp_group, CF_ALLTOALL, side, row, slices, CF_FP32, 5);
                CHECK(cf_memory_bytes() == before + mesh.tp * 5 * 4 + stage_bytes(&own), "%s: takes %lld bytes", describe(&own),
                      (long long)(cf_memory_bytes() - before));
                cf_fuse_free(own.fuse);
            }
}

// Runs a reduce-scatter of sizes that are odd; of a row that exchanges also with fractions, each again, too: libraries sum in any
// order.
static void reduce_every_size(job create(const cf_algorithm *row, int slices, cf_dtype dtype), const cf_algorithm *row, int slices,
                              int turn, bool accumulates) {
    static const int64_t rows[] = {1, 3, 5, 17, 0, 22};
    job j = create(row, slices, added[turn % TYPES]);
    j.accumulates = accumulates;
    const bool exact = !row_of(&j)->native && !is_bound(&j);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) job_run(&j, rows[i], 31, turn);
    cf_fuse_free(j.fuse);
    for (int t = 0; t < 2 && exact; t++) {
        job bits = create(row, slices, rounded[t]);
        bits.accumulates = accumulates, bits.fractions = true;
        for (int again = 0; again < 2; again++) job_run(&bits, 22, 31, turn);
        cf_fuse_free(bits.fuse);
    }
}

static job job_of_sums(const cf_algorithm *row, int slices, cf_dtype dtype) {
    return job_create(&mesh.tp_group, CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE, row, slices, dtype, 22 * 31);
}
static job job_of_used_sums(const cf_algorithm *row, int slices, cf_dtype dtype) {
    return job_create(&mesh.tp_group, CF_REDUCE_SCATTER, CF_COMPUTE_BOTH, row, slices, dtype, 22 * 31);
}

// Partial sums of earlier passes are in the payload and grow: gradients over several micro-steps, of which the last one
// communicates. Not of rows that cut the payload into native slices, in which FULL has another order of rows.
TEST(accumulate_then_reduce_scatter) {
    int turn = 0;
    for (EVERY_ROW(row))
        for (int slices = 1; slices <= 4 && row_serves(row, CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE); slices++, turn++)
            if (!row->native || slices == 1) reduce_every_size(job_of_sums, row, slices, turn, true);
}

// The computation that uses the sums makes the last additions: in the same order.
TEST(reduce_scatter_between_computes) {
    int turn = 0;
    for (EVERY_ROW(row))
        for (int slices = 1; slices <= 4 && row_is_own(row, CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE); slices++, turn++) {
            reduce_every_size(job_of_used_sums, row, slices, turn, false);
        }
}

// Every type with every operation.
TEST(every_type) {
    for (int of = 0; of < COMPUTINGS; of++)
        for (cf_dtype dtype = CF_FP32; dtype <= CF_BYTE; dtype++) {
            computing c = every_computing[of];
            if (c.operation == CF_REDUCE_SCATTER && dtype == CF_BYTE) continue;
            job j = job_create(&mesh.tp_group, c.operation, c.side, ring, 2, dtype, 9 * 31);
            job_run(&j, 9, 31, dtype);
            cf_fuse_free(j.fuse);
        }
}

TEST(megabytes) {
    int64_t rows = 1051, elements = 600; // 2.4 MiB a shard: beyond what a library sends eagerly
    for (int of = 0; of < COMPUTINGS; of++)
        for (EVERY_ROW(row)) {
            computing c = every_computing[of];
            if (!row_serves(row, c.operation, c.side)) continue;
            job j = job_create(&mesh.tp_group, c.operation, c.side, row, 2, CF_FP32, rows * elements);
            job_run(&j, rows, elements, of);
            cf_fuse_free(j.fuse);
        }
}

// All operations by one row (the first turns), or each by another one: transfers in flight must not keep a native collective of
// another operation from starting, nor must a blocking collective stop transfers in flight.
static int turns(void) {
    return 2 * cf_algorithm_count;
}
static const cf_algorithm *in_turn(int turn, int operation) {
    return &cf_algorithms[(turn + (turn < cf_algorithm_count ? 0 : operation)) % cf_algorithm_count];
}

TEST(several_in_flight) {
    const cf_group *g = &mesh.tp_group;
    for (int turn = 0; turn < turns(); turn++)
        for (int backwards = 0; backwards < 2; backwards++) {
            job jobs[] = {
                job_create(g, CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE, in_turn(turn, 0), 2, CF_FP32, 5000),
                job_create(g, CF_ALLGATHER, CF_COMPUTE_AFTER, in_turn(turn, 1), 1, CF_INT64, 5000),
                job_create(g, CF_ALLTOALL, CF_NO_COMPUTE, in_turn(turn, 2), 1, CF_FP32, 5000),
                job_create(g, CF_ALLGATHER, CF_NO_COMPUTE, in_turn(turn, 3), 1, CF_FP64, 5000),
                job_create(g, CF_REDUCE_SCATTER, CF_NO_COMPUTE, in_turn(turn, 4), 1, CF_FP64, 5000),
                job_create(g, CF_ALLTOALL, CF_COMPUTE_BOTH, in_turn(turn, 5), 2, CF_FP32, 5000),
                job_create_given(CF_COMPUTE_BOTH, in_turn(turn, 6), 1, CF_INT64, 5000),
            };
            int count = sizeof jobs / sizeof jobs[0];
            for (int i = 0; i < count; i++) job_begin(&jobs[i], 11 + i, 40 + i, i);
            for (int i = 0; i < count; i++) job_finish(&jobs[backwards ? count - 1 - i : i]);
            for (int i = 0; i < count; i++) {
                job_release(&jobs[i]);
                cf_fuse_free(jobs[i].fuse);
            }
        }
}

// The others begin when rank 0 has begun: its begin posts, computes the compute-before part and returns; everything that depends on
// the others is left to finish. If begin waited for them, no rank would go on.
static void hold_back(cf_operation operation, cf_side side, const cf_algorithm *row) {
    job j = job_create(&mesh.tp_group, operation, side, row, 1, CF_FP32, 100);
    if (mesh.tp_group.rank != 0) cf_barrier(&context, &mesh.tp_group);
    job_begin(&j, 10, 10, 8);
    if (mesh.tp_group.rank == 0) {
        const int *worked = j.covered[CF_COMPUTE_AFTER], *made = j.covered[CF_COMPUTE_BEFORE];
        for (int64_t i = 0; i < mesh.tp * 10; i++)
            CHECK(worked[i] == 0 && made[i] == computes(&j, CF_COMPUTE_BEFORE),
                  "%s: row %lld is computed %d times before, %d after", describe(&j), (long long)i, made[i], worked[i]);
        cf_barrier(&context, &mesh.tp_group);
    }
    job_finish(&j);
    job_release(&j);
    cf_fuse_free(j.fuse);
}

TEST(begin_does_not_wait) {
    static const computing held[] = {{CF_ALLGATHER, CF_COMPUTE_AFTER},
                                     {CF_ALLGATHER, CF_NO_COMPUTE},
                                     {CF_REDUCE_SCATTER, CF_NO_COMPUTE},
                                     {CF_ALLTOALL, CF_COMPUTE_AFTER},
                                     {CF_ALLTOALL, CF_COMPUTE_BOTH}};
    for (const computing *c = held; c < held + sizeof held / sizeof *held; c++)
        for (EVERY_ROW(row))
            if (mesh.tp > 1 && row->tail_free && row_serves(row, c->operation, c->side) &&
                !(row->levels && c->operation == CF_REDUCE_SCATTER)) // which waits for its host
                hold_back(c->operation, c->side, row);
}

TEST(one_operation_many_times) {
    for (int of = 0; of < COMPUTINGS; of++) {
        computing c = every_computing[of];
        job j = job_create(&mesh.tp_group, c.operation, c.side, ring, 2, CF_FP32, 22 * 49);
        int64_t before = cf_memory_bytes();
        for (int i = 0; i < 100; i++) job_run(&j, i * 7 % 23, 1 + i * 13 % 49, i);
        CHECK(cf_memory_bytes() == before, "%s: memory grew by %lld bytes in 100 runs", describe(&j),
              (long long)(cf_memory_bytes() - before));
        cf_fuse_free(j.fuse);
    }
}

// check_reduced compares bits with the promised order.
static void sum_fractions(cf_side side, const cf_algorithm *row, int slices) {
    job j = job_create(&mesh.tp_group, CF_REDUCE_SCATTER, side, row, slices, CF_FP32, 37 * 53);
    j.fractions = true;
    for (int again = 0; again < 3; again++) job_run(&j, 37, 53, 1);
    cf_fuse_free(j.fuse);
}

TEST(sums_have_one_order) {
    for (EVERY_ROW(row))
        for (int slices = 1; slices <= 4 && !row->native; slices++)
            for (cf_side side = CF_NO_COMPUTE; side <= CF_COMPUTE_BEFORE; side++)
                if (row_serves(row, CF_REDUCE_SCATTER, side)) sum_fractions(side, row, slices);
}

// CommFuse and libraries send as much from each rank; every row as much from all ranks together.
TEST(volume_is_what_must_travel) {
    for (int of = 0; of < COMPUTINGS && context.transport; of++)
        for (EVERY_ROW(row)) {
            computing c = every_computing[of];
            if (!row_is_own(row, c.operation, c.side)) continue;
            job j = job_create(&mesh.tp_group, c.operation, c.side, row, 3, CF_FP64, 17 * 9);
            job_run(&j, 17, 9, 4);
            int64_t sent = context.transport->bytes_sent - j.sent_before, sum = 0;
            int64_t expected = is_bound(&j) ? 0 : (mesh.tp - 1) * 17 * 9 * 8;
            int64_t *all = cf_allgather_alloc(context.transport, &sent, sizeof sent);
            for (int r = 0; r < mesh.tp; r++) sum += all[r];
            free(all);
            const bool each = row_of(&j)->tail_free || row_of(&j)->native;
            CHECK(sum == mesh.tp * expected && (!each || sent == expected), "%s: sent %lld bytes, not %lld; all ranks %lld",
                  describe(&j), (long long)sent, (long long)expected, (long long)sum);
            cf_fuse_free(j.fuse);
        }
}

// Both groups of a 2 × N/2 mesh at once, as in a training step.
TEST(two_groups_at_once) {
    int ranks = mesh.tp;
    if (ranks % 2 != 0 || !context.transport) return;
    cf_mesh grid = ranks_mesh(context.transport, ranks / 2, 2);
    for (int turn = 0; turn < turns(); turn++) {
        job jobs[] = {
            job_create(&grid.dp_group, CF_REDUCE_SCATTER, CF_NO_COMPUTE, in_turn(turn, 0), 1, CF_FP32, 4000),
            job_create(&grid.tp_group, CF_ALLGATHER, CF_COMPUTE_AFTER, in_turn(turn, 1), 2, CF_FP32, 4000),
            job_create(&grid.dp_group, CF_ALLGATHER, CF_NO_COMPUTE, in_turn(turn, 2), 1, CF_FP32, 4000),
            job_create(&grid.tp_group, CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE, in_turn(turn, 3), 1, CF_FP32, 4000),
            job_create(&grid.world_group, CF_ALLTOALL, CF_COMPUTE_BEFORE, in_turn(turn, 4), 1, CF_FP32, 4000),
            job_create(&grid.tp_group, CF_ALLTOALL, CF_COMPUTE_BOTH, in_turn(turn, 5), 2, CF_FP32, 4000),
        };
        int count = sizeof jobs / sizeof jobs[0];
        for (int again = 0; again < 3; again++) {
            for (int i = 0; i < count; i++) job_begin(&jobs[i], 13, 30 + i, i + again);
            for (int i = count - 1; i >= 0; i--) job_finish(&jobs[i]);
            for (int i = 0; i < count; i++) job_release(&jobs[i]);
        }
        for (int i = 0; i < count; i++) cf_fuse_free(jobs[i].fuse);
    }
    cf_mesh_free(&grid);
}

TEST(trace_sees_the_wire) {
    for (EVERY_ROW(row)) {
        if (!row_is_own(row, CF_ALLGATHER, CF_COMPUTE_AFTER)) continue;
        const int step = (int)(row - cf_algorithms);
        job j = job_create(&mesh.tp_group, CF_ALLGATHER, CF_COMPUTE_AFTER, row, 2, CF_FP32, 200 * 200);
        cf_trace_step(context.trace, step, context.stream);
        double begin = cf_now_ms();
        job_run(&j, 200, 200, 5);
        cf_trace_step(context.trace, step + 1, context.stream);
        cf_trace_figures figures = cf_trace_last(context.trace);
        double took = cf_now_ms() - begin, comm = figures.comm_ms, exposed = figures.exposed_ms;
        bool wire = !is_bound(&j) && mesh.tp > 1;
        CHECK(wire ? comm > 0 : comm == 0, "%s: %g ms of communication", describe(&j), comm);
        CHECK(exposed >= 0 && exposed <= took && comm <= took && (wire || exposed == 0),
              "%s: %g ms exposed, %g ms of communication in %g ms", describe(&j), exposed, comm, took);
        cf_fuse_free(j.fuse);
    }
}

TEST(an_operation_knows_its_plan) {
    job j = job_create(&mesh.tp_group, CF_ALLTOALL, CF_COMPUTE_AFTER, ring, 2, CF_FP64, 100);
    const cf_schedule *s = cf_fuse_schedule(j.fuse);
    const cf_fuse_config *plan = cf_fuse_get_config(j.fuse);
    CHECK(s->ranks == mesh.tp && s->rank == mesh.tp_group.rank && s->operation == CF_ALLTOALL, "a schedule of rank %d of %d",
          s->rank, s->ranks);
    CHECK(strcmp(plan->name, "test.place") == 0 && plan->capacity == 100 && plan->dtype == CF_FP64, "another plan");
    CHECK(plan->algorithm == s->algorithm && strcmp(s->algorithm->name, "direct") == 0, "%s instead of ring", s->algorithm->name);
    cf_fuse_free(j.fuse);
    cf_fuse_free(NULL);
}

// A group of one needs no transport, and then a child may be forked to die.
TEST(alone_without_transport) {
    if (mesh.tp > 1) return;
    cf_transport *kept = context.transport;
    context.transport = NULL;
    for (int of = 0; of < COMPUTINGS; of++)
        for (EVERY_ROW(row)) {
            computing c = every_computing[of];
            if (!row_is_own(row, c.operation, c.side)) continue;
            job j = job_create(&mesh.tp_group, c.operation, c.side, row, 3, CF_FP32, 7 * 11);
            job_run(&j, 7, 11, 6);
            cf_fuse_free(j.fuse);
        }
    cf_barrier(&context, &mesh.tp_group);
    job j = job_create(&mesh.tp_group, CF_ALLGATHER, CF_NO_COMPUTE, ring, 1, CF_FP32, 10);
    float payload[12] = {0};
    ASSERT_DIES((cf_die_setup(0, 1, NULL), cf_fuse_begin(j.fuse, payload, 2, 6, NULL, NULL, -1)), "test.place", "all-gather",
                "2 x 6", "10"); // the child has no MPI that it could abort
    cf_fuse_free(j.fuse);
    context.transport = kept;
}

// A run that began with one schedule must not finish with another.
TEST(no_other_choice_while_it_runs) {
    if (mesh.tp > 1) return; // as above
    cf_transport *kept = context.transport;
    context.transport = NULL;
    cf_choice choices[] = {{ring, 1}, {cf_algorithm_find("direct"), 2}};
    int64_t bytes = 0; // a gather takes none
    job j = job_create(&mesh.tp_group, CF_ALLGATHER, CF_NO_COMPUTE, ring, 1, CF_FP32, 10);
    float payload[10] = {0};
    cf_fuse_set_choices(j.fuse, choices, 2, &bytes);
    cf_fuse_begin(j.fuse, payload, 1, 10, NULL, NULL, -1);
    ASSERT_DIES((cf_die_setup(0, 1, NULL), cf_fuse_choose(j.fuse, 1)), "test.place", "gets choice 1 of 2 while it runs");
    ASSERT_DIES((cf_die_setup(0, 1, NULL), cf_fuse_set_choices(j.fuse, choices, 1, &bytes)), "test.place", "while it runs");
    cf_fuse_finish(j.fuse);
    cf_fuse_choose(j.fuse, 1);
    ASSERT_DIES((cf_die_setup(0, 1, NULL), cf_fuse_choose(j.fuse, 2)), "test.place", "gets choice 2 of 2");
    cf_fuse_free(j.fuse);
    context.transport = kept;
}

// The place of a result is set before every begin, not during a run, and only for a plan with result_given.
TEST(a_result_needs_one_place) {
    if (mesh.tp > 1) return; // as above: the child has no transport
    cf_transport *kept = context.transport;
    context.transport = NULL;
    for (EVERY_ROW(row)) {
        if (!row_is_own(row, CF_ALLTOALL, CF_COMPUTE_BOTH)) continue;
        job j = job_create_given(CF_COMPUTE_BOTH, row, 2, CF_FP32, 40);
        float payload[40], result[40];
        ASSERT_DIES((cf_die_setup(0, 1, NULL), cf_fuse_begin(j.fuse, payload, 4, 10, compute, &j, -1)), "all-to-all test.place",
                    "no place for its result");
        job_begin(&j, 4, 10, 1);
        ASSERT_DIES((cf_die_setup(0, 1, NULL), cf_fuse_set_result(j.fuse, result)), "all-to-all test.place", "is running");
        job_finish(&j);
        job_release(&j);
        ASSERT_DIES((cf_die_setup(0, 1, NULL), cf_fuse_begin(j.fuse, payload, 4, 10, compute, &j, -1)), "all-to-all test.place",
                    "no place for its result"); // that was for one run
        cf_fuse_free(j.fuse);
    }
    for (int of = 0; of < COMPUTINGS; of++) {
        computing c = every_computing[of];
        job j = job_create(&mesh.tp_group, c.operation, c.side, ring, 1, CF_FP32, 40);
        float result[40];
        ASSERT_DIES((cf_die_setup(0, 1, NULL), cf_fuse_set_result(j.fuse, result)), "test.place",
                    "was created without result_given");
        cf_fuse_config plan = j.plan;
        plan.result_given = true;
        if (c.operation != CF_ALLTOALL)
            ASSERT_DIES((cf_die_setup(0, 1, NULL), cf_fuse_create(&context, plan)), "test.place", "result_given is 1",
                        "all-to-all");
        cf_fuse_free(j.fuse);
    }
    context.transport = kept;
}

static void note_span(void *text, const cf_span *span, cf_stream *stream) {
    (void)stream;
    size_t length = strlen(text);
    for (int i = 0; i < span->blocks; i++, length = strlen(text))
        snprintf((char *)text + length, 128 - length, "%s%lld+%lld",
                 i > 0                            ? " "
                 : span->side == CF_COMPUTE_AFTER ? ", after "
                                                  : ", before ",
                 (long long)(span->row + i * span->row_stride), (long long)span->rows);
}

// The example in fuse.h.
TEST(the_example_holds) {
    static const struct {
        const char *row, *calls;
        cf_operation operation;
    } example[] = {{"ring", ", after 0+1, after 1+2, after 3+1, after 4+2", CF_ALLGATHER},
                   {"ring", ", before 3+1, before 4+2, before 0+1, before 1+2, after 0+1, after 1+2", CF_REDUCE_SCATTER},
                   {"slice", ", before 0+1 3+1, before 1+2 4+2, after 0+3", CF_REDUCE_SCATTER},
                   {"none", ", after 0+6", CF_ALLGATHER}};
    for (size_t i = 0; i < sizeof example / sizeof *example && mesh.tp == 2; i++) {
        cf_fuse_config plan = {.name = "example", .group = &mesh.tp_group, .operation = example[i].operation, .capacity = 3};
        plan.algorithm = cf_algorithm_find(example[i].row), plan.slices = plan.algorithm->max_slices > 1 ? 2 : 1;
        plan.callback_adds_last = plan.operation == CF_REDUCE_SCATTER;
        plan.side = plan.callback_adds_last ? CF_COMPUTE_BEFORE : CF_COMPUTE_AFTER;
        cf_fuse *fuse = cf_fuse_create(&context, plan);
        float full[6] = {0};
        char calls[128] = "";
        cf_fuse_run(fuse, full, 3, 1, note_span, calls, -1);
        CHECK(mesh.tp_group.rank > 0 || strcmp(calls, example[i].calls) == 0, "%s: %s", example[i].row, calls);
        cf_fuse_free(fuse);
    }
}

TEST(barrier_holds_everybody) { // nobody leaves before the last one has come
    for (int late = 0; late < mesh.tp; late++) {
        double stamps[2] = {0, 0}; // milliseconds on the clock that the ranks of a host share
        if (late == mesh.tp_group.rank) {
            double until = cf_now_ms() + 20;
            while (cf_now_ms() < until) {}
        }
        stamps[0] = cf_now_ms();
        cf_barrier(&context, &mesh.tp_group);
        stamps[1] = cf_now_ms();
        double *all = malloc((size_t)mesh.tp * sizeof stamps);
        CHECK(all, "out of memory");
        memcpy(all + 2 * mesh.tp_group.rank, stamps, sizeof stamps);
        cf_fuse_config plan = {.name = "stamps",
                               .group = &mesh.tp_group,
                               .operation = CF_ALLGATHER,
                               .side = CF_NO_COMPUTE,
                               .algorithm = cf_algorithm_find("none"),
                               .slices = 1,
                               .dtype = CF_FP64,
                               .capacity = 2};
        cf_fuse *gather = cf_fuse_create(&context, plan);
        cf_fuse_run(gather, all, 1, 2, NULL, NULL, -1);
        for (int r = 0; r < mesh.tp; r++)
            CHECK(stamps[1] >= all[2 * r], "left the barrier %g ms before rank %d came", all[2 * r] - stamps[1], r);
        cf_fuse_free(gather);
        free(all);
    }
}

int main(int argc, char **argv) {
    cf_transport *transport = cf_transport_create("auto", &argc, &argv, 60);
    *transport->timeout_s = PATIENCE_S;
    cf_costs_agree(transport, 1);
    cf_device_threads(1);
    ring = cf_algorithm_find("ring");
    if (transport->size % 2 == 0) transport->ranks_per_host = transport->size / 2;
    mesh = ranks_mesh(transport, transport->size, 1);
    CHECK(mesh.tp_group.hosts == (transport->size % 2 == 0 ? 2 : 1), "%d hosts", mesh.tp_group.hosts);
    context = (cf_context){.transport = transport, .stream = cf_stream_create(), .trace = cf_trace_create(), .step = 41};
    context.second = cf_stream_create(); // so the test can distinguish the streams on a CPU too
    int status = ranks_run(transport->rank);
    cf_trace_free(context.trace);
    cf_stream_free(context.stream);
    cf_stream_free(context.second);
    cf_mesh_free(&mesh);
    transport->close(transport);
    return status;
}
