// ranks: 1 2 3 4
// quick: 2 3
//
// Checksums on exchanges. Results are the same with and without them. A bit that flips on the way is found on the rank where it
// arrives, with the right names, and otherwise only on ranks to which it is forwarded. Flips are planted between executor and
// transport: the posted request sends a copy with a wrong bit.
#include "tests/commfuse/ranks.h"
#include "tests/commfuse/rows.h"
#include "commfuse/fuse.h"

enum { LAYER = 7, STEP = 41, TIMEOUT_S = 60, SLICES = 3, CAPACITY = 17 * 67 };

static cf_transport *transport;
static cf_mesh mesh; // tp = all ranks
static cf_context plain, checked;

typedef struct kind {
    cf_operation operation;
    cf_side side;
    bool folds;
} kind;
static const kind kinds[] = {{CF_ALLGATHER, CF_NO_COMPUTE, false},         {CF_ALLGATHER, CF_COMPUTE_AFTER, false},
                             {CF_REDUCE_SCATTER, CF_NO_COMPUTE, false},    {CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE, false},
                             {CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE, true}, {CF_ALLTOALL, CF_NO_COMPUTE, false},
                             {CF_ALLTOALL, CF_COMPUTE_BEFORE, false},      {CF_ALLTOALL, CF_COMPUTE_AFTER, false},
                             {CF_ALLTOALL, CF_COMPUTE_BOTH, false}};
enum { KINDS = sizeof kinds / sizeof kinds[0] };

// ---------------------------------------------------------------------------------------------- faults

// The fault in this rank's next run: bit `bit` of the nth exchange's payload, or of its checksum.
static struct {
    bool armed, in_checksum;
    int nth, seen;
    int64_t bit;
    char *copy;
    cf_request *held; // a payload whose checksum is still to be made, of what should have been sent
} fault;

static void spoil(cf_request *r) {
    size_t bytes = (size_t)(r->send_count * cf_dtype_size(r->dtype));
    int64_t bit = fault.bit % (8 * (int64_t)bytes);
    fault.copy = malloc(bytes);
    CHECK(fault.copy, "out of memory");
    memcpy(fault.copy, r->send, bytes);
    fault.copy[bit / 8] = (char)(fault.copy[bit / 8] ^ 1 << bit % 8);
    r->send = fault.copy;
}

static void post_one_wrongly(cf_request *r, cf_stream *stream) {
    bool is_checksum = r->dtype == CF_INT64; // payloads are of other types
    bool counts = fault.armed && r->kind == CF_REQUEST_EXCHANGE && r->send_to >= 0 && is_checksum == fault.in_checksum;
    bool hit = counts && fault.seen++ == fault.nth;
    if (hit && !is_checksum) {
        fault.held = r;
        return;
    }
    if (hit) spoil(r);
    if (fault.held && is_checksum && r->send_to == fault.held->send_to) { // its own
        spoil(fault.held);
        transport->post(transport, fault.held, 1, stream);
        fault.held = NULL;
    }
    transport->post(transport, r, 1, stream);
}

static void post_wrongly(cf_transport *t, cf_request *r, int count, cf_stream *stream) {
    (void)t;
    for (int i = 0; i < count; i++) post_one_wrongly(&r[i], stream);
}

// ---------------------------------------------------------------------------------------- an operation

typedef struct job {
    cf_fuse *fuse;
    cf_fuse_config plan;
    int64_t rows, elements;
    int seed;
    char *full, *worked; // worked: what compute has seen of each row
    char *result;        // and what was made of it, a copy
    int64_t result_bytes;
} job;

static const char *describe(const job *j) {
    static char text[160];
    snprintf(text, sizeof text, "%s side %d by %s, %d slices, %lld rows of %lld %s, rank %d of %d",
             cf_operation_name(j->plan.operation), j->plan.side, j->plan.algorithm->name, j->plan.slices, (long long)j->rows,
             (long long)j->elements, cf_dtype_name(j->plan.dtype), mesh.tp_group.rank, mesh.tp);
    return text;
}

static int64_t row_bytes(const job *j) {
    return j->elements * cf_dtype_size(j->plan.dtype);
}

static void fill_row(const job *j, char *data, int64_t row, bool add) {
    for (int64_t i = 0; i < j->elements; i++) {
        int64_t value = (37 * mesh.tp_group.rank + 101 * row + 7 * i + 13 * j->seed) % 127;
        if (j->plan.dtype == CF_BYTE)
            data[i] = (char)value;
        else
            ((float *)(void *)data)[i] = (float)value + (add ? ((float *)(void *)data)[i] : 0);
    }
}

static void compute(void *argument, const cf_span *span, cf_stream *stream) {
    (void)stream;
    job *j = argument;
    for (int i = 0; i < span->blocks; i++)
        for (int64_t k = 0; k < span->rows; k++) {
            int64_t row = span->row + i * span->row_stride + k;
            char *data = span->data + i * span->data_stride + k * row_bytes(j);
            if (span->side == CF_COMPUTE_BEFORE)
                fill_row(j, data, row, span->accumulate);
            else
                memcpy(j->worked + row * row_bytes(j), data, (size_t)row_bytes(j));
        }
}

static bool exchanges(const cf_algorithm *row, kind of) {
    return row_serves(row, of.operation, of.side) && !row->native;
}

static job job_create(cf_context *context, kind of, const cf_algorithm *row, int slices, cf_dtype dtype) {
    cf_fuse_config plan = {.name = "test.place",
                           .group = &mesh.tp_group,
                           .operation = of.operation,
                           .side = of.side,
                           .algorithm = row,
                           .slices = slices,
                           .dtype = dtype,
                           .capacity = CAPACITY,
                           .folds = of.folds};
    return (job){.plan = plan, .fuse = cf_fuse_create(context, plan)};
}

static void job_begin(job *j, int64_t rows, int64_t elements, int seed) {
    int64_t all = mesh.tp * rows;
    j->rows = rows, j->elements = elements, j->seed = seed;
    j->full = calloc((size_t)(all * row_bytes(j)) + 1, 1);
    j->worked = calloc((size_t)(all * row_bytes(j)) + 1, 1);
    CHECK(j->full && j->worked, "out of memory");
    bool made = j->plan.side == CF_COMPUTE_BEFORE || j->plan.side == CF_COMPUTE_BOTH;
    for (int64_t row = 0; row < all && !made; row++)
        if (j->plan.operation != CF_ALLGATHER || row / rows == mesh.tp_group.rank)
            fill_row(j, j->full + row * row_bytes(j), row, false);
    cf_fuse_begin(j->fuse, j->full, rows, elements, j->plan.side == CF_NO_COMPUTE ? NULL : compute, j, LAYER);
}

static void job_finish(job *j) {
    const char *result = cf_fuse_finish(j->fuse);
    j->result_bytes = (j->plan.operation == CF_REDUCE_SCATTER ? 1 : mesh.tp) * j->rows * row_bytes(j);
    j->result = malloc((size_t)j->result_bytes + 1);
    CHECK(j->result, "out of memory");
    memcpy(j->result, result, (size_t)j->result_bytes);
}

static void job_release(job *j) {
    free(j->full);
    free(j->worked);
    free(j->result);
}

static void job_run(job *j, int64_t rows, int64_t elements, int seed) {
    job_begin(j, rows, elements, seed);
    job_finish(j);
}

static void check_nothing_found(const job *j) {
    CHECK(cf_check_verdict(checked.check, checked.stream), "%s: %s", describe(j), cf_error());
}

static void check_same(const job *a, const job *b) {
    CHECK(a->result_bytes == b->result_bytes && memcmp(a->result, b->result, (size_t)a->result_bytes) == 0 &&
              memcmp(a->worked, b->worked, (size_t)(mesh.tp * a->rows * row_bytes(a))) == 0,
          "%s: another result with checksums", describe(a));
}

// ---------------------------------------------------------------------------------------- nothing wrong

static void results_are_the_same(void) {
    static const int64_t rows[] = {17, 1, 0, 5}, elements[] = {67, 3, 64, 1};
    for (int of = 0; of < KINDS; of++)
        for (EVERY_ROW(row))
            for (int slices = 1; slices <= SLICES && exchanges(row, kinds[of]); slices++) {
                bool bytes = kinds[of].side == CF_NO_COMPUTE && kinds[of].operation != CF_REDUCE_SCATTER;
                cf_dtype dtype = bytes ? CF_BYTE : CF_FP32;
                job off = job_create(&plain, kinds[of], row, slices, dtype);
                job on = job_create(&checked, kinds[of], row, slices, dtype);
                int64_t memory = cf_memory_bytes();
                for (int i = 0; i < 16; i++) {
                    job_run(&off, rows[i % 4], elements[i / 4], i);
                    job_run(&on, rows[i % 4], elements[i / 4], i);
                    check_same(&off, &on);
                    check_nothing_found(&on);
                    job_release(&off), job_release(&on);
                }
                CHECK(cf_memory_bytes() == memory, "%s: memory has grown", describe(&on));
                cf_fuse_free(off.fuse), cf_fuse_free(on.fuse);
            }
}

static void several_in_flight(void) {
    for (int backwards = 0; backwards < 2; backwards++) {
        job off[KINDS], on[KINDS];
        for (int of = 0; of < KINDS; of++) {
            const cf_algorithm *row = cf_algorithm_find(of % 2 ? "ring" : "direct");
            off[of] = job_create(&plain, kinds[of], row, 2, CF_FP32);
            on[of] = job_create(&checked, kinds[of], row, 2, CF_FP32);
            job_run(&off[of], 17, 67, of);
        }
        for (int of = 0; of < KINDS; of++) job_begin(&on[of], 17, 67, of);
        for (int of = 0; of < KINDS; of++) job_finish(&on[backwards ? KINDS - 1 - of : of]);
        check_nothing_found(&on[0]);
        for (int of = 0; of < KINDS; of++) {
            check_same(&off[of], &on[of]);
            job_release(&off[of]), job_release(&on[of]);
            cf_fuse_free(off[of].fuse), cf_fuse_free(on[of].fuse);
        }
    }
}

// Checksums take eight bytes for every exchange and three words of memory for every step; nothing without exchanges.
static void price_is_known(void) {
    for (int of = 0; of < KINDS; of++)
        for (EVERY_ROW(row)) {
            if (!row_is_own(row, kinds[of].operation, kinds[of].side)) continue;
            int64_t before = cf_memory_bytes();
            job off = job_create(&plain, kinds[of], row, 2, CF_FP32);
            int64_t middle = cf_memory_bytes();
            job on = job_create(&checked, kinds[of], row, 2, CF_FP32);
            int64_t more = (cf_memory_bytes() - middle) - (middle - before), sent[3], messages = 0;
            const cf_schedule *s = cf_fuse_schedule(on.fuse);
            for (int i = 0; i < s->count; i++) messages += s->step[i].kind == CF_EXCHANGE && s->step[i].send_to >= 0;
            CHECK(more == (messages ? 24 * s->count : 0), "%s: checksums take %lld bytes", describe(&on), (long long)more);
            sent[0] = transport->bytes_sent;
            job_run(&off, 17, 67, 1);
            sent[1] = transport->bytes_sent;
            job_run(&on, 17, 67, 1);
            sent[2] = transport->bytes_sent;
            CHECK(sent[2] - sent[1] == sent[1] - sent[0] + 8 * messages, "%s: %lld bytes, then %lld", describe(&on),
                  (long long)(sent[1] - sent[0]), (long long)(sent[2] - sent[1]));
            job_release(&off), job_release(&on);
            cf_fuse_free(off.fuse), cf_fuse_free(on.fuse);
            CHECK(cf_memory_bytes() == before, "memory is left behind");
        }
}

// --------------------------------------------------------------------------------------- something wrong

// The nth exchange of a rank.
static const cf_step *exchange_of(const cf_schedule *s, int nth) {
    for (int i = 0; i < s->count; i++)
        if (s->step[i].kind == CF_EXCHANGE && nth-- == 0) return &s->step[i];
    return NULL;
}

// In that exchange `sender` forwards data of another rank, which has not arrived when the exchange is posted.
static bool forwarded(const cf_schedule *s, const cf_step *sent) {
    return s->operation == CF_ALLGATHER && sent->send_slice / s->slices != s->rank;
}

// The rank that sends a slice to the rank of this schedule.
static int source_of(const cf_schedule *s, int slice) {
    const cf_step *step;
    for (int nth = 0; (step = exchange_of(s, nth)); nth++)
        if (step->recv_slice == slice) return step->recv_from;
    return s->rank;
}

static void check_words(const job *j, const char *expected) {
    CHECK(strstr(cf_error(), expected), "%s: '%s' does not say '%s'", describe(j), cf_error(), expected);
}

// The rank to which the owner sends the slice on its way to this rank.
static int first_on_the_way(const cf_schedule *owner, int slice) {
    for (int rank = mesh.tp_group.rank;;) {
        cf_schedule *s =
            cf_schedule_create(owner->operation, owner->side, owner->algorithm, mesh.tp, 1, rank, owner->slices, false);
        const int source = source_of(s, slice);
        cf_schedule_free(s);
        if (source == owner->rank || source == rank) return rank;
        rank = source;
    }
}

// Checks whether this rank found the fault. An all-gather that forwards slices forwards it to all ranks that get it this way.
static void check_found(const job *j, const cf_schedule *s, const cf_step *sent) {
    char expected[256];
    bool found = !cf_check_verdict(checked.check, checked.stream), here = sent->send_to == mesh.tp_group.rank;
    const int source = source_of(cf_fuse_schedule(j->fuse), sent->send_slice);
    const bool passed = s->operation == CF_ALLGATHER && !here && first_on_the_way(s, sent->send_slice) == sent->send_to;
    CHECK(found == (here || passed), "%s: %s", describe(j), found ? cf_error() : "a flipped bit has gone unseen");
    if (!found) return;
    int peer = here ? s->rank : source, k = sent->send_slice % s->slices;
    int64_t rows = j->rows * (k + 1) / s->slices - j->rows * k / s->slices;
    snprintf(expected, sizeof expected, "rank %d got other bytes from rank %d than ", mesh.tp_group.rank, peer);
    check_words(j, expected);
    if (here)
        snprintf(expected, sizeof expected, "than it sent: ");
    else
        snprintf(expected, sizeof expected, "than rank %d, the owner, sent: ", s->rank);
    check_words(j, expected);
    snprintf(expected, sizeof expected, "%s test.place, layer %d, step %d, slice %d of %d", cf_operation_name(s->operation), LAYER,
             STEP, sent->send_slice, mesh.tp * s->slices);
    check_words(j, expected);
    snprintf(expected, sizeof expected, ", %lld bytes: checksum ", (long long)(rows * row_bytes(j)));
    check_words(j, expected);
    snprintf(expected, sizeof expected, "ranks %d and %d", peer, mesh.tp_group.rank);
    check_words(j, expected);
    CHECK(here == !strstr(cf_error(), "those before it"), "%s: %s", describe(j), cf_error());
    check_nothing_found(j); // it is reported once
}

// One wrong bit in each exchange of each rank that sends its own data.
static void flip_everywhere(kind of, const cf_algorithm *row, int slices, bool in_checksum) {
    job j = job_create(&checked, of, row, slices, CF_FP32);
    for (int sender = 0; sender < mesh.tp; sender++) {
        const cf_schedule *mine = cf_fuse_schedule(j.fuse);
        cf_schedule *s = cf_schedule_create(of.operation, of.side, row, mesh.tp, 1, sender, slices, of.folds);
        CHECK(s->slices == mine->slices && s->algorithm == mine->algorithm, "another schedule");
        const cf_step *sent;
        for (int nth = 0; (sent = exchange_of(s, nth)); nth++) {
            if (forwarded(s, sent)) continue;
            fault.armed = sender == mesh.tp_group.rank;
            fault.in_checksum = in_checksum;
            fault.nth = nth, fault.seen = 0, fault.bit = 8191 * (nth + 1) + 61 * sender;
            job_run(&j, 17, 67, nth);
            CHECK(!fault.armed || fault.copy, "%s: no bit was flipped", describe(&j));
            fault.armed = false;
            check_found(&j, s, sent);
            job_release(&j);
            free(fault.copy);
            fault.copy = NULL;
            job_run(&j, 17, 67, nth); // the next run knows nothing of it
            check_nothing_found(&j);
            job_release(&j);
        }
        cf_schedule_free(s);
    }
    cf_fuse_free(j.fuse);
}

static void a_flipped_bit_is_found(void) {
    for (int of = 0; of < KINDS; of++)
        for (EVERY_ROW(row))
            for (int slices = 1; slices <= SLICES && exchanges(row, kinds[of]); slices++)
                flip_everywhere(kinds[of], row, slices, false);
}

// A mismatch is reported, whether the payload or its checksum is wrong.
static void a_flipped_checksum_is_found(void) {
    for (int of = 0; of < KINDS; of++)
        for (EVERY_ROW(row))
            if (exchanges(row, kinds[of])) flip_everywhere(kinds[of], row, 2, true);
}

// ------------------------------------------------------------------------------------------ the checksum

static uint64_t checksum(const void *data, int64_t bytes) {
    uint64_t sum = 0;
    cf_checksum(&sum, data, bytes, plain.stream);
    return sum;
}

static uint64_t random_word(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state ^ *state >> 29;
}

static void every_bit_counts(void) {
    enum { MOST = 41 };
    char data[MOST + 8], moved[MOST + 8];
    uint64_t state = 1;
    for (int i = 0; i < MOST; i++) data[i] = (char)random_word(&state);
    for (int bytes = 0; bytes <= MOST; bytes++) {
        uint64_t sum = checksum(data, bytes);
        for (int shift = 1; shift < 8; shift++) {
            memcpy(moved + shift, data, (size_t)bytes);
            CHECK(checksum(moved + shift, bytes) == sum, "%d bytes, %d behind a word", bytes, shift);
        }
        for (int bit = 0; bit < 8 * bytes; bit++) {
            memcpy(moved, data, (size_t)bytes);
            moved[bit / 8] = (char)(moved[bit / 8] ^ 1 << bit % 8);
            CHECK(checksum(moved, bytes) != sum, "bit %d of %d bytes", bit, bytes);
        }
        CHECK(bytes == 0 || checksum(data, bytes - bytes % 8 - 8) != sum, "%d bytes are left out", bytes % 8 + 8);
    }
}

// Faults of several words: the same bit of two words or of every eighth, words swapped, all zero, all equal.
static void more_than_one_word(void) {
    enum { WORDS = 1024 };
    static uint64_t words[WORDS], other[WORDS];
    uint64_t state = 2;
    for (int like = 0; like < 3; like++) {
        for (int i = 0; i < WORDS; i++) words[i] = like == 0 ? random_word(&state) : like == 1 ? 0 : 0x3F800000;
        uint64_t sum = checksum(words, sizeof words);
        for (int bit = 0; bit < 64; bit++) {
            for (int again = 0; again < 200; again++) {
                int a = (int)(random_word(&state) % WORDS), b = (int)(random_word(&state) % WORDS);
                memcpy(other, words, sizeof words);
                other[a] ^= (uint64_t)1 << bit, other[b] ^= (uint64_t)1 << bit;
                CHECK((checksum(other, sizeof other) != sum) == (a != b), "bit %d of words %d and %d", bit, a, b);
            }
            memcpy(other, words, sizeof words);
            for (int i = 0; i < WORDS; i += 8) other[i] ^= (uint64_t)1 << bit;
            CHECK(checksum(other, sizeof other) != sum, "bit %d of every eighth word", bit);
        }
        for (int i = 1; i < WORDS && like == 0; i++) {
            memcpy(other, words, sizeof words);
            other[0] = words[i], other[i] = words[0];
            CHECK(checksum(other, sizeof other) != sum, "words 0 and %d are swapped", i);
        }
    }
}

// The value itself, so that hosts of different builds agree; it does not depend on the number of threads.
static void the_number_is_fixed(void) {
    enum { WORDS = 1 << 16 };
    uint64_t *words = malloc(WORDS * sizeof *words), sum[3];
    CHECK(words, "out of memory");
    for (int i = 0; i < WORDS; i++) words[i] = (uint64_t)i * 0x0101010101010101u;
    for (int threads = 1; threads <= 3; threads++) {
        cf_device_threads(threads);
        sum[threads - 1] = checksum(words, WORDS * 8 - 3);
    }
    cf_device_threads(1);
    CHECK(sum[0] == sum[1] && sum[0] == sum[2], "another sum with more threads");
    CHECK(checksum("commfuse", 8) == 0x0258f9f492d587bf, "commfuse gives %016llx", (unsigned long long)checksum("commfuse", 8));
    CHECK(sum[0] == 0x5dc00f027052f99c, "the words give %016llx", (unsigned long long)sum[0]);
    free(words);
}

int main(int argc, char **argv) {
    transport = cf_transport_create("auto", &argc, &argv, TIMEOUT_S);
    cf_errors_return(true); // verdicts
    cf_device_threads(1);
    mesh = ranks_mesh(transport, transport->size, 1);
    cf_transport wrong = *transport;
    wrong.post = post_wrongly;
    plain = (cf_context){.transport = transport, .stream = cf_stream_create(), .trace = cf_trace_create(), .step = STEP};
    checked = plain;
    checked.transport = &wrong;
    checked.tags = 1 << 14; // different from those of plain
    checked.check = cf_check_create();
    static const ranks_case cases[] = {
        RANKS_CASE(results_are_the_same),   RANKS_CASE(several_in_flight),           RANKS_CASE(price_is_known),
        RANKS_CASE(a_flipped_bit_is_found), RANKS_CASE(a_flipped_checksum_is_found), RANKS_CASE(every_bit_counts),
        RANKS_CASE(more_than_one_word),     RANKS_CASE(the_number_is_fixed),
    };
    int status = ranks_run(transport->rank, cases, sizeof cases / sizeof cases[0]);
    cf_check_free(checked.check);
    cf_trace_free(plain.trace);
    cf_stream_free(plain.stream);
    cf_mesh_free(&mesh);
    transport->close(transport);
    return status;
}
