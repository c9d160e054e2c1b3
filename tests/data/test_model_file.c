// ranks: 1
#include "tests/death.h"
#include "tests/data/scratch.h"
#include "data/model_file.h"
#include <math.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/resource.h>
#include <sys/stat.h>

enum { HEADER_BYTES = 1024 };

static const gpt_shape tiny = {.maxT = 8, .V = 10, .L = 2, .H = 2, .C = 4, .Vp = 16, .block = block_rows};
// More than the writer's buffer, in both precisions, with no size a power of two of another.
static const gpt_shape small = {.maxT = 96, .V = 700, .L = 3, .H = 5, .C = 160, .Vp = 704, .block = block_rows};

static int64_t tiny_parameters(void) {
    const int64_t C = 4, L = 2;
    return 16 * C + 8 * C + L * (2 * C + 3 * C * C + 3 * C + C * C + C + 2 * C + 4 * C * C + 4 * C + 4 * C * C + C) + 2 * C;
}

static float value_of(int64_t element) {
    return (float)((element * 2654435761u) % 20011) / 128 - 64;
}

// Appends all elements, value_of each, in pieces of growing size.
static void append_all(model_writer *w, const gpt_shape *shape) {
    float *piece = malloc(300000 * sizeof *piece);
    assert_non_null(piece);
    int64_t total = model_parameters(shape), count = 0;
    for (int64_t at = 0; at < total; at += count) {
        count = at % 300000 + 1 < total - at ? at % 300000 + 1 : total - at;
        for (int64_t i = 0; i < count; i++) piece[i] = value_of(at + i);
        model_writer_append(w, piece, count);
    }
    free(piece);
}

static char *write_model(const char *name, const gpt_shape *shape, int version) {
    char *path = scratch_path(name);
    model_writer *w = model_writer_open(path, shape, version == 5);
    append_all(w, shape);
    model_writer_commit(w);
    return path;
}

TEST(test_shapes) {
    const gpt_shape gpt2 = {.maxT = 1024, .V = 50257, .L = 12, .H = 12, .C = 768, .Vp = 50304};
    const gpt_shape xl = {.maxT = 1024, .V = 50257, .L = 48, .H = 25, .C = 1600, .Vp = 50257};
    assert_true(model_parameters(&gpt2) == 124475904); // 124439808 and 47 rows of padding
    assert_true(model_parameters(&xl) == 1557611200);
    assert_true(model_parameters(&tiny) == tiny_parameters());
    const gpt_shape largest = {.maxT = 1 << 24, .V = 1 << 24, .Vp = 1 << 24, .L = 1 << 12, .H = 1, .C = 1 << 17};
    __int128 C = 1 << 17, all = 2 * (__int128)(1 << 24) * C + (1 << 12) * (12 * C * C + 13 * C) + 2 * C;
    assert_true(model_parameters(&largest) == all && all < (__int128)1 << 52);
}

// The bytes on the disk, against the format's description rather than the reader.
TEST(test_bytes) {
    for (int version = 3; version <= 5; version += 2) {
        size_t size, width = version == 3 ? 4 : 2;
        char *path = write_model("bytes", &small, version), *bytes = scratch_read(path, &size);
        assert_non_null(bytes);
        const int32_t *header = (const int32_t *)(void *)bytes;
        const int32_t expected[8] = {20240326, version, 96, 700, 3, 5, 160, 704};
        assert_memory_equal(header, expected, sizeof expected);
        for (int i = 8; i < 256; i++) assert_int_equal(header[i], 0);
        int64_t count = model_parameters(&small);
        assert_true((int64_t)size == HEADER_BYTES + count * (int64_t)width);
        for (int64_t i = 0; i < count && version == 3; i++) {
            float value;
            memcpy(&value, bytes + HEADER_BYTES + i * 4, 4);
            assert_true(value == value_of(i));
        }
        free(bytes);
    }
}

// Every tensor and layer in the documented order: sizes must add up to exactly the appended elements.
static void check_reading(const gpt_shape *shape, int version) {
    static const int rows_columns[TENSORS][2] = {{0, 1}, {0, 1}, {0, 1}, {0, 1}, {3, 1}, {0, 3}, {1, 1}, {0, 1},
                                                 {0, 1}, {0, 1}, {4, 1}, {0, 4}, {1, 4}, {0, 1}, {0, 1}, {0, 1}};
    model_file *file = model_file_open(write_model("read", shape, version));
    gpt_shape found = file->shape;
    assert_memory_equal(&found, shape, sizeof found);
    int64_t at = 0;
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        bool whole = tensor == WTE || tensor == WPE || tensor >= LNFW;
        int64_t rows = tensor == WTE             ? shape->Vp
                       : tensor == WPE           ? shape->maxT
                       : rows_columns[tensor][0] ? rows_columns[tensor][0] * shape->C
                                                 : 1;
        int64_t columns = rows_columns[tensor][1] * shape->C;
        assert_true(params_layers(shape, tensor) == (whole ? 1 : shape->L));
        assert_true(params_rows(shape, tensor) * params_columns(shape, tensor) == rows * columns);
        float *out = malloc((size_t)(rows * columns) * sizeof *out);
        for (int64_t layer = 0; layer < (whole ? 1 : shape->L); layer++) {
            model_file_read(file, STATE_WEIGHT, tensor, layer, 0, rows * columns, out);
            for (int64_t i = 0; i < rows * columns; i++)
                assert_true(fabsf(out[i] - value_of(at + i)) <= (version == 3 ? 0 : fabsf(out[i]) / 256));
            float last = out[rows * columns - 1], part[1] = {-1};
            model_file_read(file, STATE_WEIGHT, tensor, layer, rows * columns - 1, 1, part);
            assert_true(part[0] == last);
            model_file_read(file, STATE_WEIGHT, tensor, layer, rows * columns, 0, part); // nothing, at the end
            at += rows * columns;
        }
        free(out);
    }
    assert_true(at == model_parameters(shape));
    model_file_close(file);
}

TEST(test_reading) {
    check_reading(&tiny, 3);
    check_reading(&tiny, 5);
    check_reading(&small, 3);
    check_reading(&small, 5);
    model_file_close(NULL);
}

// Nothing is mapped: what is there can still be read, and what is gone is an error, not SIGBUS.
TEST(test_a_file_becomes_shorter) {
    for (int version = 3; version <= 5; version += 2) {
        char *path = write_model("shorter", &small, version);
        model_file *file = model_file_open(path);
        float out[4];
        assert_int_equal(truncate(path, 4096), 0);
        model_file_read(file, STATE_WEIGHT, WTE, 0, 0, 4, out);
        assert_true(out[3] != 0);
        ASSERT_REFUSED(model_file_read(file, STATE_WEIGHT, TENSORS - 1, 0, 0, 4, out), "/shorter cannot be read at byte",
                       "has become shorter");
        model_file_close(file);
    }
}

// --- bf16 --------------------------------------------------------------------------------------------------

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static const gpt_shape wide = {.maxT = 1, .V = 1024, .L = 1, .H = 1, .C = 64, .Vp = 1024}; // wte: 65536

// Writes `values` into the start of a bf16 file's wte and reads its 16-bit numbers from the disk.
static uint16_t *through_bf16(const float *values, int64_t count) {
    char *path = scratch_path("bf16");
    model_writer *w = model_writer_open(path, &wide, true);
    model_writer_append(w, values, count);
    float *zeros = calloc((size_t)(model_parameters(&wide) - count), sizeof *zeros);
    model_writer_append(w, zeros, model_parameters(&wide) - count);
    model_writer_commit(w);
    free(zeros);
    size_t size;
    char *bytes = scratch_read(path, &size);
    assert_non_null(bytes);
    memmove(bytes, bytes + HEADER_BYTES, (size_t)count * 2);
    return (uint16_t *)(void *)bytes;
}

TEST(test_bf16_rounding) {
    static const struct {
        uint32_t bits;
        uint16_t rounded;
    } known[] = {
        {0x3F800000, 0x3F80}, {0x3F808000, 0x3F80}, // tie: to even, down
        {0x3F818000, 0x3F82}, {0x3F808001, 0x3F81}, // tie: to even, up; just above a tie
        {0x3F817FFF, 0x3F81}, {0xBF818000, 0xBF82}, // just below; negative
        {0x3FFF8000, 0x4000}, {0x7F7FFFFF, 0x7F80}, // carry into the exponent; overflow to infinity
        {0x7F800000, 0x7F80}, {0xFF800000, 0xFF80}, // infinities stay
        {0x00000000, 0x0000}, {0x80000000, 0x8000}, // zeros keep their sign
        {0x00000001, 0x0000}, {0x00018000, 0x0002}, // denormals round like the rest
        {0x007FFFFF, 0x0080},
    };
    enum { COUNT = sizeof known / sizeof *known };
    float values[COUNT + 3];
    for (int i = 0; i < COUNT; i++) values[i] = float_of(known[i].bits);
    values[COUNT] = float_of(0x7F800001), values[COUNT + 1] = float_of(0xFFFFFFFF), values[COUNT + 2] = NAN;
    uint16_t *half = through_bf16(values, COUNT + 3);
    for (int i = 0; i < COUNT; i++) assert_int_equal(half[i], known[i].rounded);
    for (int i = COUNT; i < COUNT + 3; i++) assert_true((half[i] & 0x7FFF) > 0x7F80); // still NaN
    assert_true(half[COUNT + 1] & 0x8000);
    free(half);
}

// All 65536 numbers of bf16 survive reading and writing; a NaN may become another NaN.
TEST(test_bf16_round_trip) {
    enum { ALL = 65536 };
    float *values = malloc(ALL * sizeof *values), *again = malloc(ALL * sizeof *again);
    for (uint32_t i = 0; i < ALL; i++) values[i] = float_of(i << 16);
    uint16_t *half = through_bf16(values, ALL);
    model_file *file = model_file_open(scratch_path("bf16"));
    model_file_read(file, STATE_WEIGHT, WTE, 0, 0, ALL, again);
    for (uint32_t i = 0; i < ALL; i++) {
        bool nan = (i & 0x7FFF) > 0x7F80;
        assert_int_equal(half[i], nan ? i | 0x40 : i);
        assert_true(nan ? isnan(again[i]) != 0 : bits_of(again[i]) == i << 16);
    }
    model_file_close(file);
    free(half);
    free(values);
    free(again);
}

// --- damaged files -----------------------------------------------------------------------------------------

// A version 3 file of the tiny shape with one header field changed and some bytes added or cut.
static char *damaged(int field, int32_t value, int extra_bytes) {
    size_t size;
    char *bytes = scratch_read(write_model("good", &tiny, 3), &size);
    assert_non_null(bytes);
    memcpy(bytes + field * 4, &value, 4);
    bytes = realloc(bytes, size + 64);
    char *path = scratch_write("damaged", bytes, (size_t)((int64_t)size + extra_bytes));
    free(bytes);
    return path;
}

TEST(test_headers) {
    ASSERT_REFUSED(model_file_open(scratch_path("none")), "none cannot be opened", "No such file");
    ASSERT_REFUSED(model_file_open(scratch), "not a regular file");
    assert_int_equal(mkfifo(scratch_path("pipe"), 0600), 0);
    ASSERT_REFUSED(model_file_open(scratch_path("pipe")), "not a regular file"); // and waits for nobody
    ASSERT_REFUSED(model_file_open(scratch_write("damaged", "", 0)), "has 0 bytes", "1024");
    ASSERT_REFUSED(model_file_open(scratch_write("damaged", scratch, 9)), "has 9 bytes");
    ASSERT_REFUSED(model_file_open(damaged(0, 20240520, 0)), "not a model file", "20240520", "20240326");
    ASSERT_REFUSED(model_file_open(damaged(1, 1, 0)), "version 1, expected 3 (fp32) or 5 (bf16)");
    ASSERT_REFUSED(model_file_open(damaged(1, 5, 0)), "too long", "bf16");
    ASSERT_REFUSED(model_file_open(damaged(2, 0, 0)), "maximum sequence length is 0");
    ASSERT_REFUSED(model_file_open(damaged(2, INT32_MAX, 0)), "maximum sequence length is 2147483647");
    ASSERT_REFUSED(model_file_open(damaged(3, -1, 0)), "vocabulary is -1");
    ASSERT_REFUSED(model_file_open(damaged(3, INT32_MAX, 0)), "vocabulary is 2147483647");
    ASSERT_REFUSED(model_file_open(damaged(4, 0, 0)), "layers is 0");
    ASSERT_REFUSED(model_file_open(damaged(3, 17, 0)), "padded vocabulary 16 is smaller than the vocabulary 17");
    ASSERT_REFUSED(model_file_open(damaged(4, INT32_MAX, 0)), "layers is 2147483647", "4096");
    ASSERT_REFUSED(model_file_open(damaged(5, 3, 0)), "4 channels cannot be split into 3 heads");
    ASSERT_REFUSED(model_file_open(damaged(5, 0, 0)), "heads is 0");
    ASSERT_REFUSED(model_file_open(damaged(5, INT32_MAX, 0)), "heads is 2147483647");
    ASSERT_REFUSED(model_file_open(damaged(6, 0, 0)), "channels is 0");
    ASSERT_REFUSED(model_file_open(damaged(6, INT32_MIN, 0)), "channels is -2147483648");
    ASSERT_REFUSED(model_file_open(damaged(7, INT32_MAX, 0)), "padded vocabulary is 2147483647");
    ASSERT_REFUSED(model_file_open(damaged(6, 8, 0)), "truncated");
    ASSERT_REFUSED(model_file_open(damaged(7, 1 << 24, 0)), "truncated");
    ASSERT_REFUSED(model_file_open(damaged(0, 20240326, -1)), "truncated");
    ASSERT_REFUSED(model_file_open(damaged(0, 20240326, 1)), "too long");
    model_file_close(model_file_open(damaged(0, 20240326, 0)));
}

// --- Llama's block ------------------------------------------------------------------------------------------

static const gpt_shape *llama(void) {
    static gpt_shape s = {.maxT = 8, .V = 10, .L = 2, .H = 4, .C = 8, .Vp = 16, .KV = 2, .F = 12, .norm_eps = 1e-5};
    s.block = params_block_named("llama");
    s.rotary = (rotary_settings){.theta = 500000, .factor = 32, .low = 1, .high = 4, .original = 8192};
    return &s;
}

// Against the format's description: its numbers, and every tensor of every layer in order.
TEST(test_llama) {
    static const struct {
        int tensor, rows, columns;
    } stored[] = {{WTE, 16, 8},      {LN1W, 8, 1},     {LN1W, 8, 1},     {QKVW, 8 + 4 + 4, 8}, {QKVW, 8 + 4 + 4, 8},
                  {ATTPROJW, 8, 8},  {ATTPROJW, 8, 8}, {LN2W, 8, 1},     {LN2W, 8, 1},         {FCW, 12 + 12, 8},
                  {FCW, 12 + 12, 8}, {FCPROJW, 8, 12}, {FCPROJW, 8, 12}, {LNFW, 8, 1}};
    static const float numbers[] = {1e-5F, 500000, 32, 1, 4};
    for (int version = 3; version <= 5; version += 2) {
        size_t size;
        char *path = write_model("llama", llama(), version), *bytes = scratch_read(path, &size);
        int32_t expected[256] = {20261129, version, 8, 10, 2, 4, 8, 16, 2, 12, [15] = 8192};
        memcpy(expected + 10, numbers, sizeof numbers);
        assert_memory_equal(bytes, expected, sizeof expected);
        model_file *file = model_file_open(path);
        gpt_shape found = file->shape;
        assert_memory_equal(&found, llama(), sizeof found);
        int64_t at = 0;
        for (size_t i = 0; i < sizeof stored / sizeof *stored; i++) {
            const int tensor = stored[i].tensor, count = stored[i].rows * stored[i].columns;
            const int layer = i > 0 && stored[i - 1].tensor == tensor;
            float out[256];
            model_file_read(file, STATE_WEIGHT, tensor, layer, 0, count, out);
            for (int j = 0; j < count; j++, at++)
                assert_true(fabsf(out[j] - value_of(at)) <= (version == 3 ? 0 : fabsf(out[j]) / 256));
        }
        assert_true(at == model_parameters(llama()) && (int64_t)size == HEADER_BYTES + at * (version == 3 ? 4 : 2));
        model_file_close(file);
        free(bytes);
    }
    // What a shape leaves to its block is written out.
    const gpt_shape usual = {.maxT = 8, .V = 10, .L = 1, .H = 2, .C = 8, .Vp = 16, .block = params_block_named("llama")};
    model_file *file = model_file_open(write_model("usual", &usual, 3));
    assert_true(file->shape.KV == 2 && file->shape.F == 128 && file->shape.norm_eps == 1e-5 && file->shape.rotary.theta == 10000);
    assert_true(file->shape.rotary.factor == 0 && model_parameters(&file->shape) == model_parameters(&usual));
    model_file_close(file);
}

// A version 3 file of llama()'s shape with one number changed.
static const char *llama_with(int field, int32_t value) {
    size_t size;
    char *bytes = scratch_read(write_model("good", llama(), 3), &size);
    memcpy(bytes + field * 4, &value, 4);
    const char *path = scratch_write("damaged", bytes, size);
    free(bytes);
    return path;
}

static int32_t bits(float number) {
    int32_t of;
    memcpy(&of, &number, 4);
    return of;
}

TEST(test_llama_headers) {
    static const char *const truncated = "is truncated", *const long_one = "is too long";
    const struct {
        int field;
        int32_t value;
        const char *word;
    } wrong[] = {{0, 20240326, truncated}, // GPT-2's
                 {1, 4, "version 4"},
                 {8, 0, "number 8 of its header is 0"},
                 {8, -1, "heads of keys and values is -1"},
                 {8, 3, "4 heads cannot share 3"},
                 {8, 8, "4 heads cannot share 8"},
                 {8, 4, truncated},
                 {8, 1, long_one},
                 {9, 0, "number 9 of its header is 0"},
                 {9, -1, "units of the MLP is -1"},
                 {9, (1 << 20) + 1, "units of the MLP is 1048577"},
                 {9, 11, long_one},
                 {9, 13, truncated},
                 {5, 8, "the 1 channels of a head are no pairs"},
                 {10, 0, "number 10 of its header is 0"},
                 {10, bits(-1e-5F), "epsilon of the norms is -1e-05"},
                 {10, bits(2), "epsilon of the norms is 2"},
                 {10, bits(NAN), "epsilon of the norms is nan"},
                 {10, bits(INFINITY), "epsilon of the norms is inf"},
                 {11, 0, "number 11 of its header is 0"},
                 {11, bits(-1), "theta is -1"},
                 {11, bits(NAN), "theta is nan"},
                 {11, bits(INFINITY), "theta is inf"},
                 {12, bits(0.5F), "factor of the stretch is 0.5"},
                 {12, bits(-32), "factor of the stretch is -32"},
                 {12, bits(INFINITY), "factor of the stretch is inf"},
                 {12, 0, "low frequency factor is 1, allowed is 0 to 0"},
                 {13, bits(0), "low frequency factor is 0"},
                 {13, bits(NAN), "low frequency factor is nan"},
                 {13, bits(4), "high less low frequency factor is 0"},
                 {14, bits(0.5F), "high less low frequency factor is -0.5"},
                 {14, bits(NAN), "high less low frequency factor is nan"},
                 {15, 0, "positions before the stretch is 0"},
                 {15, -1, "positions before the stretch is -1"}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        ASSERT_REFUSED(model_file_open(llama_with(wrong[i].field, wrong[i].value)), "model file", "/damaged", wrong[i].word);
    model_file_close(model_file_open(llama_with(11, bits(1)))); // the others of a header may be what they are
    ASSERT_REFUSED(model_file_open(damaged(0, 20261129, 0)), "number 8 of its header is 0"); // a GPT-2 is no Llama
    gpt_shape shared = tiny;
    shared.KV = 1;
    ASSERT_DIES(model_writer_open(scratch_path("x"), &shared, false), "GPT-2's block shares no keys and values");
    shared.KV = 2, shared.F = 24;
    ASSERT_DIES(model_writer_open(scratch_path("x"), &shared, false), "4 units for a channel");
}

// --- writing that fails ------------------------------------------------------------------------------------

static void limit_file_size(rlim_t bytes) {
    signal(SIGXFSZ, SIG_IGN); // the write fails with EFBIG instead
    setrlimit(RLIMIT_FSIZE, &(struct rlimit){bytes, bytes});
}

// The file `path` is the complete tiny model that was there before, and nothing temporary lies about.
static void assert_untouched(const char *path, int entries) {
    assert_int_equal(scratch_entries(), entries);
    model_file *file = model_file_open(path);
    gpt_shape shape = file->shape;
    assert_memory_equal(&shape, &tiny, sizeof shape);
    model_file_close(file);
}

static void write_some(const char *path, int64_t count) {
    model_writer *w = model_writer_open(path, &tiny, false);
    float values[4096] = {0};
    model_writer_append(w, values, count);
    model_writer_commit(w);
}

static void write_limited(const char *name, rlim_t bytes) {
    limit_file_size(bytes);
    write_model(name, &small, 3);
}

TEST(test_failed_writes) {
    char *path = write_model("keep", &tiny, 3);
    int entries = scratch_entries();
    // Full at once, in the middle of a buffer, and in the last one, which only commit writes.
    int64_t size = HEADER_BYTES + 4 * model_parameters(&small);
    const int64_t limits[] = {0, 100, 1 << 20, (1 << 20) + 3, size - 1};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        char wanted[64];
        snprintf(wanted, sizeof wanted, "%lld bytes", (long long)size);
        ASSERT_REFUSED(write_limited("keep", (rlim_t)limits[i]), "cannot write", "keep", wanted, "File too large");
        assert_untouched(path, entries);
    }
    gpt_shape odd = tiny;
    odd.H = 3;
    ASSERT_DIES(model_writer_open(path, &odd, false), "4 channels cannot be split into 3 heads");
    assert_untouched(path, entries);
    ASSERT_REFUSED(model_writer_open(scratch_path("nowhere/x"), &tiny, false), "cannot create", "nowhere/x", "No such file");
    static char name[5000];
    memset(name, 'n', sizeof name - 1);
    ASSERT_REFUSED(model_writer_open(name, &tiny, false), "too long");
    assert_int_equal(mkdir(scratch_path("directory"), 0700), 0);
    ASSERT_REFUSED(write_some(scratch_path("directory"), tiny_parameters()), "cannot create", "directory", "not a regular file",
                   "choose another name");
    assert_untouched(path, entries + 1);
}

// A process that is killed half-way leaves the old file; the next writer removes what else it has left.
TEST(test_killed_writer) {
    char *path = write_model("killed", &tiny, 3);
    int entries = scratch_entries();
    pid_t child = fork();
    if (child == 0) {
        model_writer *w = model_writer_open(path, &small, false);
        float values[1000] = {0};
        for (int i = 0; i < 400; i++) model_writer_append(w, values, 1000);
        kill(getpid(), SIGKILL);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status));
    model_file *old = model_file_open(path);
    gpt_shape shape = old->shape;
    model_file_close(old);
    assert_memory_equal(&shape, &tiny, sizeof shape);
    path = write_model("killed", &small, 5);
    model_file *file = model_file_open(path);
    assert_true(file->shape.C == small.C);
    model_file_close(file);
    assert_int_equal(scratch_entries(), entries);
}

TEST(test_two_writers) {
    char *path = write_model("two", &tiny, 3);
    model_writer *first = model_writer_open(path, &tiny, false), *w = model_writer_open(path, &small, false);
    append_all(first, &tiny);
    ASSERT_REFUSED(model_writer_commit(first), "model file: cannot rename", "two", "another process writes it",
                   "wait for that process", "writes it again");
    free(first); // the process that was refused is gone
    append_all(w, &small);
    model_writer_commit(w);
    model_file *file = model_file_open(path);
    assert_true(file->shape.C == small.C);
    model_file_close(file);
}

// A name without a directory is in the current one.
TEST(test_relative_name) {
    char here[PATH_MAX];
    assert_non_null(getcwd(here, sizeof here));
    assert_int_equal(chdir(scratch), 0);
    write_some("relative", tiny_parameters());
    model_file_close(model_file_open(scratch_path("relative")));
    assert_int_equal(chdir(here), 0);
}

int main(void) {
    return cmocka_run_group_tests(all_tests, scratch_make, scratch_remove);
}
