// ranks: 1
#define _GNU_SOURCE
#include "tests/death.h"
#include "tests/data/says.h"
#include "tests/data/scratch.h"
#include "data/checkpoint.h"
#include "data/durable.h"
#include "data/safetensors.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

// --- safetensors -------------------------------------------------------------------------------------------

static const tensor_entry every_type[] = {
    {"momentum", TENSOR_F64, 1, {3}},
    {"position", TENSOR_I64, 0, {0}},
    {"layers.0/qkv \"w\"\\\n\xC3\xA9", TENSOR_F32, 4, {2, 1, 3, 5}},
    {"nothing", TENSOR_F32, 3, {4, 0, 1 << 30}},
    {"halves", TENSOR_BF16, 2, {7, 3}},
    {"bytes", TENSOR_U8, 1, {11}},
};
enum { EVERY_TYPE = sizeof every_type / sizeof *every_type, EVERY_BYTES = 24 + 8 + 120 + 42 + 11 };

static unsigned char byte_at(int64_t i, int64_t seed) {
    return (unsigned char)((uint64_t)(i + 1) * UINT64_C(2654435761) * (uint64_t)(2 * seed + 1) >> 13);
}

// Writes a table with bytes of byte_at, in pieces of growing size.
static bool write_tensors(const char *path, const tensor_entry *table, int64_t count, int64_t seed,
                          manifest_file *file) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++) total += tensor_entry_bytes(&table[i]);
    safetensors_writer *w = safetensors_create(path, table, count);
    unsigned char *bytes = malloc((size_t)total + 1);
    for (int64_t i = 0; i < total; i++) bytes[i] = byte_at(i, seed);
    for (int64_t at = 0, n; at < total; at += n) {
        n = at / 2 + 1 < total - at ? at / 2 + 1 : total - at;
        safetensors_append(w, bytes + at, n);
    }
    free(bytes);
    return safetensors_commit(w, &file->bytes, &file->hash, &why);
}

static void test_hash(void **state) {
    (void)state;
    // The values of xxHash's own documentation and of xxh64sum.
    int64_t bytes;
    uint64_t hash;
    assert_true(durable_hash(scratch_write("hashed", "", 0), &bytes, &hash));
    assert_true(bytes == 0 && hash == UINT64_C(0xef46db3751d8e999));
    assert_true(durable_hash(scratch_write("hashed", "abc", 3), &bytes, &hash));
    assert_true(bytes == 3 && hash == UINT64_C(0x44bc2cf5ad770999));
    assert_false(durable_hash(scratch_path("none"), &bytes, &hash));
    assert_false(durable_hash(scratch, &bytes, &hash));
}

static void test_round_trip(void **state) {
    (void)state;
    char *path = scratch_path("file");
    manifest_file written;
    int64_t bytes, at = 0;
    uint64_t hash;
    assert_true(write_tensors(path, every_type, EVERY_TYPE, 1, &written));
    assert_true(durable_hash(path, &bytes, &hash));
    assert_true(bytes == written.bytes && hash == written.hash);
    safetensors *f = safetensors_open(path, &why);
    assert_non_null(f);
    assert_int_equal(safetensors_count(f), EVERY_TYPE);
    for (int i = 0; i < EVERY_TYPE; i++) {
        int64_t found = safetensors_find(f, every_type[i].name);
        assert_int_equal(found, i);
        const tensor_entry *entry = safetensors_entry(f, found);
        assert_string_equal(entry->name, every_type[i].name);
        assert_int_equal(entry->type, every_type[i].type);
        assert_int_equal(entry->dimensions, every_type[i].dimensions);
        assert_memory_equal(entry->shape, every_type[i].shape, sizeof entry->shape);
        const unsigned char *data = safetensors_data(f, found);
        assert_int_equal((uintptr_t)data % (uintptr_t)tensor_type_bytes(entry->type), 0);
        for (int64_t j = 0; j < tensor_entry_bytes(entry); j++) assert_int_equal(data[j], byte_at(at + j, 1));
        at += tensor_entry_bytes(entry);
    }
    assert_int_equal(at, EVERY_BYTES);
    assert_int_equal(safetensors_find(f, "nobody"), -1);
    assert_int_equal(safetensors_find(f, ""), -1);
    ASSERT_DIES(safetensors_data(f, EVERY_TYPE), "tensor 6 of 6");
    safetensors_close(f);
    safetensors_close(NULL);
}

// The bytes on the disk, against the format's description rather than the reader.
static void test_bytes(void **state) {
    (void)state;
    const tensor_entry table[] = {{"a", TENSOR_F32, 2, {1, 2}}, {"b", TENSOR_U8, 0, {0}}};
    char *path = scratch_path("file"), text[256];
    manifest_file written;
    size_t size;
    assert_true(write_tensors(path, table, 2, 1, &written));
    char *bytes = scratch_read(path, &size);
    snprintf(text, sizeof text, "%-120s",
             "{\"a\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[0,8]},"
             "\"b\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[8,9]}}");
    assert_int_equal(size, 8 + 120 + 9);
    assert_memory_equal(bytes, "\x78\0\0\0\0\0\0\0", 8);
    assert_memory_equal(bytes + 8, text, 120);
    for (int i = 0; i < 9; i++) assert_int_equal((unsigned char)bytes[128 + i], byte_at(i, 1));
    free(bytes);
}

static void test_large(void **state) {
    (void)state;
    const tensor_entry table[] = {{"a", TENSOR_F32, 2, {1000, 1000}}, {"b", TENSOR_U8, 1, {1 << 20}}};
    manifest_file written;
    int64_t bytes;
    uint64_t hash;
    assert_true(write_tensors(scratch_path("large"), table, 2, 3, &written));
    assert_true(durable_hash(scratch_path("large"), &bytes, &hash));
    assert_true(bytes == written.bytes && hash == written.hash && bytes > 5000000);
    assert_true(write_tensors(scratch_path("empty"), table, 0, 3, &written)); // a rank without tensors
    safetensors *f = safetensors_open(scratch_path("empty"), &why);
    assert_int_equal(safetensors_count(f), 0);
    assert_int_equal(safetensors_find(f, "a"), -1);
    safetensors_close(f);
}

static void create(const char *name, tensor_type type, int64_t extent) {
    const tensor_entry table[] = {{"a", TENSOR_U8, 1, {3}}, {name, type, 1, {extent}}};
    safetensors_create(scratch_path("never"), table, 2);
}

static void append(int64_t count) {
    const char bytes[16] = {0};
    const tensor_entry entry = {"a", TENSOR_U8, 1, {8}};
    manifest_file file;
    safetensors_writer *w = safetensors_create(scratch_path("never"), &entry, 1);
    safetensors_append(w, bytes, count);
    safetensors_commit(w, &file.bytes, &file.hash, &why);
}

static void test_writer_misused(void **state) {
    (void)state;
    int entries = scratch_entries();
    ASSERT_DIES(append(7), "incomplete");
    ASSERT_DIES(append(9), "9 bytes appended");
    ASSERT_DIES(append(-1), "-1 bytes appended");
    ASSERT_DIES(create("a", TENSOR_U8, 1), "tensor a is there twice");
    ASSERT_DIES(create("b", TENSOR_F32, 1), "not be aligned", "larger elements first");
    ASSERT_DIES(create("", TENSOR_U8, 1), "called ''");
    ASSERT_DIES(create("__metadata__", TENSOR_U8, 1), "called '__metadata__'");
    ASSERT_DIES(create("b", TENSOR_U8, -1), "no size");
    ASSERT_DIES(create("b", TENSOR_U8, INT64_MAX), "no size");
    const tensor_entry entry = {"a", TENSOR_U8, 1, {8}};
    safetensors_abandon(safetensors_create(scratch_path("never"), &entry, 1));
    safetensors_abandon(NULL);
    assert_int_equal(scratch_entries(), entries);
}

// A file of this header text and so many bytes of data.
static safetensors *open_header(const char *header, int64_t data) {
    static char bytes[1 << 16];
    size_t length = strlen(header);
    memset(bytes, 0, sizeof bytes);
    for (int i = 0; i < 8; i++) bytes[i] = (char)(length >> 8 * i);
    memcpy(bytes + 8, header, length);
    why.what[0] = 0;
    return safetensors_open(scratch_write("header", bytes, 8 + length + (size_t)data), &why);
}

#define TENSOR(name, dtype, shape, offsets)                                                                  \
    "\"" name "\":{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static void test_headers(void **state) {
    (void)state;
    static const struct {
        const char *header;
        int64_t data;
        const char *says;
    } damage[] = {
        {"", 0, "no safetensors file"},
        {"{", 0, "no safetensors file"},
        {"[]", 0, "not one JSON object"},
        {" {}", 0, "not one JSON object"}, // the format wants the brace first
        {"{}{}", 0, "not one JSON object"},
        {"{\"a\":}", 0, "not one JSON object"},
        {"{}", 1, "end at byte 0 of 1"},
        {"{" TENSOR("", "\"U8\"", "[1]", "[0,1]") "}", 1, "no name"},
        {"{\"a\":7}", 1, "a is not described"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "a is not described"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"more\":0}}", 1,
         "a is not described"},
        {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1]}}", 1, "data_offsets is not two"},
        {"{\"a\":{\"dtype\":\"U8\",\"Shape\":[1],\"data_offsets\":[0,1]}}", 1, "shape is not"},
        {"{" TENSOR("a", "\"F16\"", "[1]", "[0,2]") "}", 2, "dtype is not one of"},
        {"{" TENSOR("a", "3", "[1]", "[0,1]") "}", 1, "dtype is not one of"},
        {"{" TENSOR("a", "\"U8\"", "1", "[0,1]") "}", 1, "shape is not"},
        {"{" TENSOR("a", "\"U8\"", "[1,1,1,1,1]", "[0,1]") "}", 1, "shape is not up to 4"},
        {"{" TENSOR("a", "\"U8\"", "[-1]", "[0,1]") "}", 1, "shape is not"},
        {"{" TENSOR("a", "\"U8\"", "[1.5]", "[0,1]") "}", 1, "shape is not"},
        {"{" TENSOR("a", "\"U8\"", "[1e15]", "[0,1]") "}", 1, "shape is not"},
        {"{" TENSOR("a", "\"U8\"", "[1e999]", "[0,1]") "}", 1, "shape is not"},
        {"{" TENSOR("a", "\"U8\"", "[null]", "[0,1]") "}", 1, "shape is not"},
        {"{" TENSOR("a", "\"U8\"", "[1]", "[0]") "}", 1, "data_offsets is not two"},
        {"{" TENSOR("a", "\"U8\"", "[1]", "[0,1,2]") "}", 1, "data_offsets is not two"},
        {"{" TENSOR("a", "\"U8\"", "[1]", "[\"0\",1]") "}", 1, "data_offsets is not two"},
        {"{" TENSOR("a", "\"U8\"", "[1]", "[0,-1]") "}", 1, "data_offsets is not two"},
        {"{" TENSOR("a", "\"U8\"", "[1]", "[1,0]") "}", 1, "1 to 0 in 1 bytes"},
        {"{" TENSOR("a", "\"U8\"", "[2]", "[0,2]") "}", 1, "0 to 2 in 1 bytes"},
        {"{" TENSOR("a", "\"U8\"", "[999999999999999]", "[0,999999999999999]") "}", 1, "in 1 bytes"},
        {"{" TENSOR("a", "\"U8\"", "[2]", "[0,1]") "}", 1, "its shape needs 2 bytes, data_offsets give 1"},
        {"{" TENSOR("a", "\"F64\"", "[4294967296,4294967296]", "[0,0]") "}", 0, "its shape needs -1"},
        {"{" TENSOR("a", "\"U8\"", "[274177,67280421310721]", "[0,1]") "}", 1,
         "its shape needs -1"}, // 2^64 + 1
        {"{" TENSOR("a", "\"U8\"", "[1]", "[0,1]") "}", 2, "end at byte 1 of 2"},
        {"{" TENSOR("a", "\"U8\"", "[1]", "[1,2]") "}", 2, "begins at byte 1, behind"},
        {"{" TENSOR("a", "\"U8\"", "[2]", "[0,2]") "," TENSOR("b", "\"U8\"", "[2]", "[1,3]") "}", 3,
         "b begins at byte 1, before the end of the one before, 2"},
        {"{" TENSOR("a", "\"U8\"", "[1]", "[0,1]") "," TENSOR("b", "\"U8\"", "[1]", "[2,3]") "}", 3,
         "b begins at byte 2, behind the end of the one before, 1"},
        {"{" TENSOR("a", "\"U8\"", "[1]", "[0,1]") "," TENSOR("a", "\"U8\"", "[1]", "[1,2]") "}", 2,
         "a is there twice"},
        {"{" TENSOR("a", "\"U8\"", "[1]", "[0,1]") "," TENSOR("a", "\"U8\"", "[1]", "[0,1]") "}", 1,
         "begins at byte 0"},
        {"{" TENSOR("a", "\"F64\"", "[1]", "[0,8]") "}", 8, "not aligned to its F64"},
        {"{\"__metadata__\":[]}", 0, "__metadata__ is not"},
        {"{\"__metadata__\":{\"a\":1}}", 0, "__metadata__ is not"},
    };
    for (size_t i = 0; i < sizeof damage / sizeof *damage; i++) {
        safetensors *f = open_header(damage[i].header, damage[i].data);
        if (f || !strstr(why.what, damage[i].says) || !strstr(why.what, "/header"))
            fail_msg("%s: '%s' does not say '%s'", damage[i].header, f ? "sound" : why.what, damage[i].says);
    }
}

static void test_sound_headers(void **state) {
    (void)state;
    static const struct {
        const char *header;
        int64_t data, count;
    } sound[] = {
        {"{}", 0, 0},
        {"{}   \n", 0, 0},
        {"{\"__metadata__\":{\"format\":\"pt\"}}", 0, 0},
        {"{" TENSOR("b", "\"U8\"", "[1]", "[2,3]") "," TENSOR("a", "\"U8\"", "[2]", "[0,2]") "}", 3,
         2}, // any order
        {"{" TENSOR("b", "\"U8\"", "[1]", "[0,1]") "," TENSOR("a", "\"U8\"", "[0]", "[0,0]") "}", 1, 2},
    };
    for (size_t i = 0; i < sizeof sound / sizeof *sound; i++) {
        safetensors *f = open_header(sound[i].header, sound[i].data);
        if (!f) fail_msg("%s: %s", sound[i].header, why.what);
        assert_int_equal(safetensors_count(f), sound[i].count);
        if (sound[i].count) assert_string_equal(safetensors_entry(f, 0)->name, "a");
        safetensors_close(f);
    }
}

static void test_no_safetensors(void **state) {
    (void)state;
    static const unsigned char lengths[][8] = {{255, 255, 255, 255, 255, 255, 255, 255},
                                               {0, 0, 0, 0, 0, 0, 0, 128},
                                               {3, 0, 0, 0, 0, 0, 0, 0},
                                               {1, 0, 0, 0, 0, 0, 0, 0},
                                               {0}};
    char bytes[10] = {0};
    memcpy(bytes + 8, "{}", 2);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        memcpy(bytes, lengths[i], 8);
        assert_null(safetensors_open(scratch_write("header", bytes, 10), &why));
        ASSERT_SAYS("/header is no safetensors file: 10 bytes");
    }
    assert_null(safetensors_open(scratch_write("header", "\x4\0\0\0\0\0\0\0{}\0 ", 12), &why));
    ASSERT_SAYS("not one JSON object");
    assert_null(safetensors_open(scratch_write("header", "", 0), &why));
    ASSERT_SAYS("is empty");
    assert_null(safetensors_open(scratch_write("header", "1234567", 7), &why));
    ASSERT_SAYS("7 bytes");
    assert_null(safetensors_open(scratch_path("none"), &why));
    ASSERT_SAYS("cannot open", "No such file");
    assert_null(safetensors_open(scratch, &why));
    ASSERT_SAYS("not a regular file");
    assert_int_equal(mkfifo(scratch_path("pipe"), 0600), 0);
    assert_null(safetensors_open(scratch_path("pipe"), &why));
    ASSERT_SAYS("not a regular file");
    char *deep = malloc(100002); // more nesting than a stack has room for
    memset(deep, '[', 100000);
    memcpy(deep, "{\"a\":", 5);
    memcpy(deep + 100000, "]", 2);
    safetensors *f = open_header("{\"a\":[[[[]]]]}", 0);
    assert_null(f);
    deep[60000] = 0;
    assert_null(open_header(deep, 0));
    free(deep);
}

// --- checkpoints -------------------------------------------------------------------------------------------

static const tensor_entry table[] = {{"weights", TENSOR_F32, 2, {3, 4}}, {"step", TENSOR_I64, 0, {0}}};

static char *out_path(void) {
    return scratch_path("out");
}

static void wipe(void) {
    const int64_t steps[] = {10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 123456789};
    char path[PATH_MAX];
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        snprintf(path, sizeof path, "%s/step_%08lld", out_path(), (long long)steps[i]);
        durable_remove_directory(path);
        strcat(path, ".damaged");
        durable_remove_directory(path);
    }
    durable_remove_directory(out_path());
}

static checkpoint_store *open_store(void) {
    checkpoint_store *store = checkpoint_store_open(out_path(), &why);
    if (!store) fail_msg("%s", why.what);
    return store;
}

static const manifest_option options[] = {{"tp", "2"}, {"train", "C:\\a \"b\"\n\t\x01"}, {"empty", ""}};

static bool try_save(checkpoint_store *store, int64_t step, int64_t ranks) {
    manifest_file file[8];
    manifest m = {.step = step, .ranks = ranks, .options = 3, .file = file, .option = options};
    char path[PATH_MAX];
    if (!checkpoint_begin(store, step, &why)) return false;
    for (int64_t rank = 0; rank < ranks; rank++) {
        checkpoint_file_path(out_path(), step, rank, true, path);
        if (!write_tensors(path, table, 2, step + rank, &file[rank])) {
            checkpoint_abandon(store);
            return false;
        }
    }
    return checkpoint_commit(store, &m, &why);
}

static void save(checkpoint_store *store, int64_t step, int64_t ranks) {
    if (!try_save(store, step, ranks)) fail_msg("%s", why.what);
}

static char *file_in(int64_t step, const char *name) {
    char path[64];
    snprintf(path, sizeof path, "out/step_%08lld/%s", (long long)step, name);
    return scratch_path(path);
}

static void rewrite(int64_t step, const char *name, const char *bytes, size_t size) {
    char path[64];
    snprintf(path, sizeof path, "out/step_%08lld/%s", (long long)step, name);
    scratch_write(path, bytes, size);
}

// What a program does that loads: the newest of all whose hashes are right; -1 if there is none. `why` tells
// what was passed over.
static int64_t newest_sound(void) {
    problem skipped, damage;
    int64_t step = INT64_MAX;
    why = (problem){.what = ""};
    for (manifest *m; (m = checkpoint_latest(out_path(), step, &skipped));) {
        bool sound = true;
        step = m->step;
        if (*skipped.what) problem_add(&why, &skipped);
        for (int64_t rank = 0; rank < m->ranks && sound; rank++)
            if (!(sound = checkpoint_verify(out_path(), m, rank, &damage))) problem_add(&why, &damage);
        manifest_free(m);
        if (sound) return step;
    }
    problem_add(&why, &skipped);
    return -1;
}

static void test_save_and_load(void **state) {
    (void)state;
    wipe();
    assert_int_equal(newest_sound(), -1); // no directory
    assert_string_equal(why.what, "");
    checkpoint_store *store = open_store();
    assert_int_equal(newest_sound(), -1); // nothing in it
    save(store, 10, 1);
    save(store, 123456789, 3); // more than eight digits
    save(store, 20, 2);
    assert_int_equal(newest_sound(), 123456789);
    assert_string_equal(why.what, "");
    problem skipped;
    manifest *m = checkpoint_latest(out_path(), 123456789, &skipped);
    assert_int_equal(m->step, 20);
    assert_int_equal(m->ranks, 2);
    assert_int_equal(m->options, 3);
    for (int i = 0; i < 3; i++) assert_string_equal(manifest_value(m, options[i].name), options[i].value);
    assert_null(manifest_value(m, "dp"));
    for (int64_t rank = 0; rank < 2; rank++) {
        char path[PATH_MAX];
        checkpoint_file_path(out_path(), 20, rank, false, path);
        safetensors *f = safetensors_open(path, &why);
        assert_non_null(f);
        const unsigned char *data = safetensors_data(f, safetensors_find(f, "weights"));
        for (int i = 0; i < 48; i++) assert_int_equal(data[i], byte_at(i, 20 + rank));
        safetensors_close(f);
    }
    ASSERT_DIES(checkpoint_verify(out_path(), m, 2, &why), "rank 2 of a checkpoint of 2");
    manifest_free(m);
    assert_null(checkpoint_latest(out_path(), 10, &skipped));
    assert_null(checkpoint_manifest(out_path(), 30, &why));
    ASSERT_SAYS("step_00000030/manifest.json", "No such file");
    checkpoint_store_close(store);
    checkpoint_store_close(NULL);
}

static void test_replace(void **state) {
    (void)state;
    wipe();
    checkpoint_store *store = open_store();
    save(store, 10, 4);
    save(store, 10, 1);
    assert_int_equal(newest_sound(), 10);
    manifest *m = checkpoint_manifest(out_path(), 10, &why);
    assert_int_equal(m->ranks, 1);
    manifest_free(m);
    assert_int_equal(access(file_in(10, "rank_00001.safetensors"), F_OK), -1);
    assert_int_equal(access(scratch_path("out/step_00000010.replaced"), F_OK), -1);
    checkpoint_store_close(store);
}

// --- damage ------------------------------------------------------------------------------------------------

static const char *const files[] = {"rank_00000.safetensors", "rank_00001.safetensors", "manifest.json"};

static void two_checkpoints(void) {
    wipe();
    checkpoint_store *store = open_store();
    save(store, 10, 2);
    save(store, 20, 2);
    checkpoint_store_close(store);
    assert_int_equal(newest_sound(), 20);
}

static void assert_passed_over(const char *name) {
    assert_int_equal(newest_sound(), 10);
    char path[128];
    snprintf(path, sizeof path, "step_00000020/%s", name);
    ASSERT_SAYS(path);
}

static void test_every_byte_flipped(void **state) {
    (void)state;
    two_checkpoints();
    int64_t flipped = 0;
    for (int i = 0; i < 3; i++) {
        size_t size;
        char *bytes = scratch_read(file_in(20, files[i]), &size);
        int fd = open(file_in(20, files[i]), O_WRONLY | O_CLOEXEC);
        for (size_t at = 0; at < size; at++)
            for (int bit = 0; bit < 8; bit++, flipped++) {
                char changed = (char)(bytes[at] ^ 1 << bit);
                assert_int_equal(pwrite(fd, &changed, 1, (off_t)at), 1);
                assert_passed_over(files[i]);
                assert_int_equal(pwrite(fd, &bytes[at], 1, (off_t)at), 1);
            }
        close(fd);
        free(bytes);
    }
    assert_int_equal(newest_sound(), 20);
    assert_true(flipped > 5000);
    print_message("%lld bits flipped, each noticed\n", (long long)flipped);
}

static void test_truncated(void **state) {
    (void)state;
    two_checkpoints();
    for (int i = 0; i < 3; i++) {
        size_t size;
        char *bytes = scratch_read(file_in(20, files[i]), &size);
        for (size_t length = 0; length <= size + 1; length++) {
            rewrite(20, files[i], bytes, length);
            if (length != size)
                assert_passed_over(files[i]);
            else
                assert_int_equal(newest_sound(), 20);
        }
        rewrite(20, files[i], bytes, size);
        free(bytes);
    }
    assert_int_equal(newest_sound(), 20);
}

static void test_missing(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++) {
        two_checkpoints();
        assert_int_equal(unlink(file_in(20, files[i])), 0);
        assert_passed_over(files[i]);
        assert_int_equal(mkdir(file_in(20, files[i]), 0700), 0);
        assert_passed_over(files[i]);
        assert_int_equal(rmdir(file_in(20, files[i])), 0);
    }
    two_checkpoints(); // that of another step
    assert_int_equal(rename(file_in(20, ""), file_in(30, "")), 0);
    assert_int_equal(newest_sound(), 10);
    ASSERT_SAYS("step_00000030/manifest.json is that of step 20");
    for (int i = 0; i < 3; i++) unlink(file_in(10, files[i]));
    assert_int_equal(newest_sound(), -1);
    ASSERT_SAYS("step_00000010/manifest.json", "step_00000030/manifest.json");
}

// Manifests that are sealed and yet wrong.
static void test_manifests(void **state) {
    (void)state;
#define FILE0 "{\"name\":\"rank_00000.safetensors\",\"bytes\":7,\"xxh64\":\"0123456789abcdef\"}"
#define M(version, step, ranks, options, files)                                                              \
    "{\"format\":\"commfuse checkpoint\",\"version\":" version ",\"step\":" step ",\"ranks\":" ranks         \
    ",\"options\":" options ",\"files\":" files ",\n"
    static const struct {
        const char *text, *says;
    } wrong[] = {
        {"", "not the manifest"},
        {"{\"format\":\"another\",\n", "not the manifest"},
        {"{{\n", "not the manifest"},
        {M("2", "1", "1", "{}", "[" FILE0 "]"), "version 2, expected 1"},
        {M("\"1\"", "1", "1", "{}", "[" FILE0 "]"), "no version"},
        {M("1", "-1", "1", "{}", "[" FILE0 "]"), "no step"},
        {M("1", "1.5", "1", "{}", "[" FILE0 "]"), "no step"},
        {M("1", "1e15", "1", "{}", "[" FILE0 "]"), "no step"},
        {M("1", "1", "0", "{}", "[]"), "no number of ranks"},
        {M("1", "1", "65537", "{}", "[]"), "no number of ranks"},
        {M("1", "1", "2", "{}", "[" FILE0 "]"), "name 2 files"},
        {M("1", "1", "1", "{}", "[" FILE0 "," FILE0 "]"), "name 1 files"},
        {M("1", "1", "1", "{}", "{}"), "name 1 files"},
        {M("1", "1", "2", "{}", "[" FILE0 "," FILE0 "]"), "file 1 is not rank_00001.safetensors"},
        {M("1", "1", "1", "{}", "[7]"), "file 0 is not"},
        {M("1", "1", "1", "{}", "[{\"name\":\"../../x\",\"bytes\":7,\"xxh64\":\"0123456789abcdef\"}]"),
         "file 0 is not"},
        {M("1", "1", "1", "{}",
           "[{\"name\":\"rank_00000.safetensors\",\"bytes\":-7,\"xxh64\":\"0123456789abcdef\"}]"),
         "file 0 is not"},
        {M("1", "1", "1", "{}",
           "[{\"name\":\"rank_00000.safetensors\",\"bytes\":7,\"xxh64\":\"0123456789ABCDEF\"}]"),
         "file 0 is not"},
        {M("1", "1", "1", "{}",
           "[{\"name\":\"rank_00000.safetensors\",\"bytes\":7,\"xxh64\":\"+123456789abcdef\"}]"),
         "file 0 is not"},
        {M("1", "1", "1", "[]", "[" FILE0 "]"), "no options"},
        {M("1", "1", "1", "{\"a\":1}", "[" FILE0 "]"), "option a is not a text"},
        {M("1", "1", "1", "{\"a\":\"1\",\"a\":\"2\"}", "[" FILE0 "]"), "option a is there twice"},
    };
    char text[1024];
    for (size_t i = 0; i <= sizeof wrong / sizeof *wrong; i++) {
        bool right = i == sizeof wrong / sizeof *wrong;
        const char *body = right ? M("1", "1", "1", "{\"a\":\"1\"}", "[" FILE0 "]") : wrong[i].text;
        int size = snprintf(text, sizeof text, "%s\t\"xxh64\":\t\"%016llx\"\n}\n", body,
                            (unsigned long long)XXH64(body, strlen(body), 0));
        manifest *m = manifest_parse(text, size, "some/manifest.json", &why);
        if (!right && (m || !strstr(why.what, wrong[i].says) || !strstr(why.what, "some/manifest.json")))
            fail_msg("%s: '%s' does not say '%s'", body, m ? "sound" : why.what, wrong[i].says);
        if (!right) continue;
        assert_non_null(m);
        assert_true(m->file[0].hash == UINT64_C(0x0123456789abcdef) && m->file[0].bytes == 7);
        manifest_free(m);
    }
    assert_null(manifest_parse(text, 0, "x", &why));
    assert_null(manifest_parse("}\n", 2, "x", &why));
    ASSERT_SAYS("does not end in the hash");
}

static void test_manifest_numbers(void **state) {
    (void)state;
    const int64_t largest = INT64_C(999999999999999);
    manifest_file file = {.bytes = largest, .hash = UINT64_MAX};
    manifest m = {.step = largest - 1, .ranks = 1, .file = &file};
    int64_t size;
    char *text = manifest_print(&m, &size);
    manifest *again = manifest_parse(text, size, "x", &why);
    assert_non_null(again);
    assert_true(again->step == largest - 1 && again->file[0].bytes == largest &&
                again->file[0].hash == UINT64_MAX);
    manifest_free(again);
    free(text);
    const manifest_option twice[] = {{"a", "1"}, {"a", "2"}};
    m.option = twice, m.options = 2;
    ASSERT_DIES(manifest_print(&m, &size), "option a is there twice");
    m.ranks = 0;
    ASSERT_DIES(manifest_print(&m, &size), "0 ranks");
}

// --- one run at a time, and what dead ones leave -----------------------------------------------------------

static void test_lock(void **state) {
    (void)state;
    wipe();
    checkpoint_store *store = open_store();
    char process[32], host[256] = "";
    snprintf(process, sizeof process, "process %ld", (long)getpid());
    gethostname(host, sizeof host - 1);
    assert_null(checkpoint_store_open(out_path(), &why));
    ASSERT_SAYS("another run saves to", "/out", process, host);
    checkpoint_store_close(store);
    // Whoever could read it could lock it, and every run out; that of an earlier version could be read.
    struct stat status;
    char *lock = scratch_path("out/lock");
    assert_int_equal(chmod(lock, 0644), 0);
    checkpoint_store_close(open_store());
    assert_int_equal(stat(lock, &status), 0);
    assert_int_equal(status.st_mode & 0777, 0600);
    // A run that is killed holds nothing.
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    if (child == 0) {
        bool open = checkpoint_store_open(out_path(), &why) != NULL;
        ssize_t written = write(ends[1], "x", 1);
        while (open && written == 1) pause();
        _exit(1);
    }
    char byte;
    assert_int_equal(read(ends[0], &byte, 1), 1);
    assert_null(checkpoint_store_open(out_path(), &why));
    snprintf(process, sizeof process, "process %ld", (long)child);
    ASSERT_SAYS(process);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    checkpoint_store_close(open_store());
    close(ends[0]);
    close(ends[1]);
}

static void test_leftovers(void **state) {
    (void)state;
    two_checkpoints();
    static const char *const removed[] = {"out/step_00000030.tmp", "out/step_00000020.replaced",
                                          "out/step_00000020.tmp"};
    static const char *const foreign[] = {"out/step_30.tmp",       "out/step_00000030.tmp2",
                                          "out/other.tmp",         "out/step_-0000030",
                                          "out/step_+0000030.tmp", "out/step_9999999999999999999.tmp"};
    for (int i = 0; i < 3; i++) {
        char name[64];
        assert_int_equal(mkdir(scratch_path(removed[i]), 0700), 0);
        snprintf(name, sizeof name, "%s/rank_00000.safetensors.tmp", removed[i]);
        scratch_write(name, "half", 4);
    }
    for (int i = 0; i < 6; i++) scratch_write(foreign[i], "mine", 4);
    assert_int_equal(newest_sound(), 20);
    checkpoint_store_close(open_store());
    for (int i = 0; i < 3; i++) assert_int_equal(access(scratch_path(removed[i]), F_OK), -1);
    for (int i = 0; i < 6; i++) {
        assert_int_equal(access(scratch_path(foreign[i]), F_OK), 0);
        unlink(scratch_path(foreign[i]));
    }
    assert_int_equal(newest_sound(), 20);
    // Killed between the two renames that replace a step.
    assert_int_equal(rename(file_in(20, ""), scratch_path("out/step_00000020.replaced")), 0);
    assert_int_equal(newest_sound(), 10);
    checkpoint_store_close(open_store());
    assert_int_equal(newest_sound(), 20);
}

static void test_begin_and_abandon(void **state) {
    (void)state;
    two_checkpoints();
    checkpoint_store *store = open_store();
    assert_true(checkpoint_begin(store, 30, &why));
    ASSERT_DIES(checkpoint_begin(store, 40, &why), "step 40 while that of 30");
    scratch_write("out/step_00000030.tmp/rank_00000.safetensors", "abc", 3);
    assert_int_equal(newest_sound(), 20);
    checkpoint_abandon(store);
    checkpoint_abandon(store);
    assert_int_equal(access(scratch_path("out/step_00000030.tmp"), F_OK), -1);
    manifest_file file = {.bytes = 4, .hash = 0};
    manifest m = {.step = 30, .ranks = 1, .file = &file};
    ASSERT_DIES(checkpoint_commit(store, &m, &why), "was not begun");
    // A file that is not what its rank says.
    assert_true(checkpoint_begin(store, 30, &why));
    scratch_write("out/step_00000030.tmp/rank_00000.safetensors", "abc", 3);
    assert_false(checkpoint_commit(store, &m, &why));
    ASSERT_SAYS("rank_00000.safetensors has 3 bytes, its manifest says 4");
    assert_int_equal(access(scratch_path("out/step_00000030.tmp"), F_OK), -1);
    assert_true(checkpoint_begin(store, 30, &why));
    checkpoint_store_close(store); // which abandons it
    assert_int_equal(access(scratch_path("out/step_00000030.tmp"), F_OK), -1);
    assert_int_equal(newest_sound(), 20);
}

// --- pruning -----------------------------------------------------------------------------------------------

// Which of the steps 10, 20, … 90 are there, as a text of their tens.
static const char *left(void) {
    static char text[16];
    char *at = text;
    for (int64_t step = 10; step < 100; step += 10)
        if (access(file_in(step, ""), F_OK) == 0) *at++ = (char)('0' + step / 10);
    *at = 0;
    return text;
}

static checkpoint_store *nine(void) {
    wipe();
    checkpoint_store *store = open_store();
    for (int64_t step = 10; step < 100; step += 10) save(store, step, 1);
    return store;
}

static void test_prune(void **state) {
    (void)state;
    checkpoint_store *store = nine();
    assert_true(checkpoint_prune(store, 0, 0, &why));
    assert_string_equal(left(), "123456789");
    assert_true(checkpoint_prune(store, 100, 0, &why));
    assert_string_equal(left(), "123456789");
    assert_true(checkpoint_prune(store, 3, 20, &why));
    assert_string_equal(left(), "246789");
    assert_true(checkpoint_prune(store, 2, 0, &why));
    assert_string_equal(left(), "89");
    assert_true(checkpoint_prune(store, 1, 0, &why));
    assert_string_equal(left(), "9");
    assert_int_equal(newest_sound(), 90);
    checkpoint_store_close(store);
    // Incomplete ones do not count, and go when they are older than what is kept.
    store = nine();
    unlink(file_in(90, "manifest.json"));
    unlink(file_in(70, "rank_00000.safetensors"));
    assert_true(checkpoint_prune(store, 2, 0, &why));
    assert_string_equal(left(), "6789");
    assert_int_equal(newest_sound(), 80);
    assert_true(checkpoint_begin(store, 100, &why)); // while one is being written, that one stays
    assert_true(checkpoint_prune(store, 1, 0, &why));
    assert_string_equal(left(), "89");
    assert_int_equal(access(scratch_path("out/step_00000100.tmp"), F_OK), 0);
    checkpoint_abandon(store);
    // No complete one: nothing is removed.
    unlink(file_in(80, "manifest.json"));
    assert_true(checkpoint_prune(store, 1, 0, &why));
    assert_string_equal(left(), "89");
    checkpoint_store_close(store);
}

static bool is_aside(int64_t step) {
    return access(scratch_path(step == 70   ? "out/step_00000070.damaged"
                               : step == 80 ? "out/step_00000080.damaged"
                                            : "out/step_00000090.damaged"),
                  F_OK) == 0;
}

// What a run has passed over does not count, though it may look complete, and is nobody's to remove.
static void test_set_aside(void **state) {
    (void)state;
    checkpoint_store *store = nine();
    assert_true(checkpoint_set_aside(store, 90, &why));
    assert_string_equal(left(), "123456789");
    assert_true(checkpoint_set_aside(store, 70, &why));
    assert_string_equal(left(), "1234567");
    assert_false(is_aside(70));
    assert_true(is_aside(80) && is_aside(90));
    assert_int_equal(newest_sound(), 70);
    assert_true(checkpoint_prune(store, 2, 0, &why));
    assert_string_equal(left(), "67");
    save(store, 90, 2); // and is passed over, too
    assert_true(checkpoint_set_aside(store, 70, &why));
    assert_string_equal(left(), "67");
    checkpoint_store_close(store);
    store = open_store(); // which tidies up
    assert_true(is_aside(80) && is_aside(90));
    assert_true(checkpoint_set_aside(store, -1, &why));
    assert_string_equal(left(), "");
    assert_true(is_aside(70));
    checkpoint_store_close(store);
}

static void test_prune_that_cannot(void **state) {
    (void)state;
    checkpoint_store *store = nine();
    assert_int_equal(mkdir(file_in(30, "directory"), 0700), 0);
    assert_false(checkpoint_prune(store, 1, 0, &why));
    ASSERT_SAYS("cannot remove", "step_00000030.tmp");
    assert_string_equal(left(), "9");
    assert_int_equal(rmdir(scratch_path("out/step_00000030.tmp/directory")), 0);
    assert_true(checkpoint_prune(store, 1, 0, &why));
    assert_int_equal(access(scratch_path("out/step_00000030.tmp"), F_OK), -1);
    checkpoint_store_close(store);
}

// --- disks that are full -----------------------------------------------------------------------------------

// In a child whose files may not be longer than that; it tells what save() says through its standard error.
static void save_limited(rlim_t bytes) {
    signal(SIGXFSZ, SIG_IGN); // the write fails with EFBIG instead
    problem told;
    checkpoint_store *store = checkpoint_store_open(out_path(), &told); // its lock is a file, too
    setrlimit(RLIMIT_FSIZE, &(struct rlimit){bytes, bytes});
    if (!store || try_save(store, 30, 2)) _exit(DEATH_SURVIVED);
    fputs(why.what, stderr);
    fputs(why.hint, stderr);
    checkpoint_store_close(store);
    _exit(1);
}

static void test_file_size_limit(void **state) {
    (void)state;
    two_checkpoints();
    struct stat rank, text;
    stat(file_in(20, "rank_00000.safetensors"), &rank);
    stat(file_in(20, "manifest.json"), &text);
    char needs[64];
    snprintf(needs, sizeof needs, "needs %lld bytes", (long long)rank.st_size);
    for (int64_t limit = 0; limit < rank.st_size; limit += limit < 8 ? 1 : 50) {
        ASSERT_DIES(save_limited((rlim_t)limit), "cannot write", "step_00000030.tmp/rank_00000.safetensors",
                    needs, "File too large", "ulimit -f");
        assert_int_equal(newest_sound(), 20);
        assert_int_equal(access(scratch_path("out/step_00000030.tmp"), F_OK), -1);
    }
    assert_true(text.st_size > rank.st_size);
    ASSERT_DIES(save_limited((rlim_t)text.st_size - 1), "cannot write", "step_00000030.tmp/manifest.json");
    assert_int_equal(newest_sound(), 20);
    assert_string_equal(left(), "12");
}

static bool disk_full;

ssize_t write(int fd, const void *bytes, size_t count) {
    if (!disk_full) return syscall(SYS_write, fd, bytes, count);
    errno = ENOSPC;
    return -1;
}

static void test_full_disk(void **state) {
    (void)state;
    two_checkpoints();
    checkpoint_store *store = open_store();
    manifest_file file;
    assert_true(checkpoint_begin(store, 30, &why));
    char path[PATH_MAX];
    checkpoint_file_path(out_path(), 30, 0, true, path);
    disk_full = true;
    bool written = write_tensors(path, table, 2, 1, &file);
    disk_full = false;
    assert_false(written);
    ASSERT_SAYS("cannot write", "rank_00000.safetensors", "are free", "No space left on device");
    checkpoint_abandon(store);
    assert_int_equal(newest_sound(), 20);
    checkpoint_store_close(store);
}

// A rank on a host that does not see the directory that rank 0 has made.
static void test_no_directory(void **state) {
    (void)state;
    manifest_file file;
    assert_false(write_tensors(scratch_path("nowhere/rank_00000.safetensors"), table, 2, 1, &file));
    ASSERT_SAYS("cannot create", "nowhere/rank_00000.safetensors", "needs 184 bytes", "No such file");
    assert_non_null(strstr(why.hint, "all hosts share"));
}

static void test_directories_that_cannot_be(void **state) {
    (void)state;
    scratch_write("plain", "x", 1);
    assert_null(checkpoint_store_open(scratch_path("plain"), &why));
    ASSERT_SAYS("cannot make directory", "Not a directory");
    assert_null(checkpoint_store_open(scratch_path("plain/below"), &why));
    ASSERT_SAYS("plain/below", "Not a directory");
    assert_null(checkpoint_store_open("", &why));
    problem skipped;
    assert_null(checkpoint_latest(scratch_path("plain"), INT64_MAX, &skipped));
    assert_non_null(strstr(skipped.what, "cannot list"));
    static char name[5000];
    memset(name, 'n', sizeof name - 1);
    assert_null(checkpoint_store_open(name, &why));
    ASSERT_SAYS("File name too long");
    name[PATH_MAX - 10] = 0;
    ASSERT_DIES(checkpoint_file_path(name, 1, 0, true, (char[PATH_MAX]){0}), "too long", "shorter --out");
    char here[PATH_MAX]; // names below the current directory, some of them new, with slashes too many
    assert_non_null(getcwd(here, sizeof here));
    assert_int_equal(chdir(scratch), 0);
    checkpoint_store *store = checkpoint_store_open("deep//er/", &why);
    assert_int_equal(chdir(here), 0);
    assert_non_null(store);
    checkpoint_store_close(store);
    assert_int_equal(access(scratch_path("deep/er/lock"), F_OK), 0);
    durable_remove_directory(scratch_path("deep/er"));
}

static int clean(void **state) {
    wipe();
    return scratch_remove(state);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hash),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_large),
        cmocka_unit_test(test_writer_misused),
        cmocka_unit_test(test_headers),
        cmocka_unit_test(test_sound_headers),
        cmocka_unit_test(test_no_safetensors),
        cmocka_unit_test(test_save_and_load),
        cmocka_unit_test(test_replace),
        cmocka_unit_test(test_every_byte_flipped),
        cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_missing),
        cmocka_unit_test(test_manifests),
        cmocka_unit_test(test_manifest_numbers),
        cmocka_unit_test(test_lock),
        cmocka_unit_test(test_leftovers),
        cmocka_unit_test(test_begin_and_abandon),
        cmocka_unit_test(test_prune),
        cmocka_unit_test(test_set_aside),
        cmocka_unit_test(test_prune_that_cannot),
        cmocka_unit_test(test_file_size_limit),
        cmocka_unit_test(test_full_disk),
        cmocka_unit_test(test_no_directory),
        cmocka_unit_test(test_directories_that_cannot_be),
    };
    return cmocka_run_group_tests(tests, scratch_make, clean);
}
