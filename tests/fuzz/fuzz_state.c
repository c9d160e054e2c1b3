// Tables of runs in the files of a checkpoint: two sound safetensors files, and in them whatever the input says. It is
//   1 byte      elements of each file
//   5 bytes     a run: tensor, layer, whole, count, at; the highest bit of the count puts it into the second file
//   255         ends the runs; what follows are some questions of four bytes: tensor, layer, first, count
// With 255 as its first byte, the rest is the second file, as it is.
// A byte above 119 stands for a large number. What a search finds is compared with a look at every run.
#include "tests/fuzz/fuzz.h"
#include "data/checkpoint.h"
#include "tests/data/kinds.h"

enum { RUNS = 64, FILES = 2, FIELDS = 5, ELEMENTS = 64, QUESTIONS = 16 };

static const char *path_of_file[FILES];

// The parser's way to its files leads here.
void checkpoint_file_path(const char *out, int64_t step, int64_t rank, bool unfinished, char path[PATH_MAX]) {
    (void)out, (void)step, (void)unfinished;
    snprintf(path, PATH_MAX, "%s", path_of_file[rank]);
}

static int64_t number(uint8_t byte) {
    static const int64_t large[] = {-1, INT64_MIN, INT64_MAX, INT64_C(1) << 50, 1 << 30, (INT64_C(1) << 50) + 1, INT64_MAX - 1};
    return byte < 120 ? byte : large[byte % 7];
}

static float value_of(int file, int kind, int64_t at) {
    return (float)(file * 1000 + kind * 100 + at);
}

static const char *put(int file, const state_run *run, int64_t runs, int64_t elements) {
    static char bytes[1 << 16];
    uint64_t first = (uint64_t)(runs * FIELDS * 8), each = (uint64_t)elements * 4, length;
    char *text = bytes + 8;
    length = (uint64_t)snprintf(text, 1024,
                                "{\"runs\":{\"dtype\":\"I64\",\"shape\":[%lld,5],\"data_offsets\":[0,%llu]},"
                                "\"weight\":{\"dtype\":\"F32\",\"shape\":[%lld],\"data_offsets\":[%llu,%llu]},"
                                "\"m\":{\"dtype\":\"F32\",\"shape\":[%lld],\"data_offsets\":[%llu,%llu]},"
                                "\"v\":{\"dtype\":\"F32\",\"shape\":[%lld],\"data_offsets\":[%llu,%llu]}}",
                                (long long)runs, (unsigned long long)first, (long long)elements, (unsigned long long)first,
                                (unsigned long long)(first + each), (long long)elements, (unsigned long long)(first + each),
                                (unsigned long long)(first + 2 * each), (long long)elements, (unsigned long long)(first + 2 * each),
                                (unsigned long long)(first + 3 * each));
    while ((8 + length) % 64) text[length++] = ' ';
    for (int i = 0; i < 8; i++) bytes[i] = (char)(length >> 8 * i);
    char *data = text + length;
    memcpy(data, run, first);
    for (int kind = 0; kind < STATE_KINDS; kind++)
        for (int64_t at = 0; at < elements; at++) {
            float value = value_of(file, kind, at);
            memcpy(data + first + (uint64_t)kind * each + (uint64_t)at * 4, &value, sizeof value);
        }
    return fuzz_file(file, (const uint8_t *)bytes, 8 + length + first + 3 * each);
}

typedef struct tables {
    state_run run[FILES][RUNS];
    int64_t runs[FILES];
} tables;

// The one value of an element; false: no run holds it.
static bool look_up(const tables *t, int kind, int64_t tensor, int64_t layer, int64_t element, float *value) {
    for (int file = 0; file < FILES; file++)
        for (int64_t i = 0; i < t->runs[file]; i++) {
            const state_run *r = &t->run[file][i];
            if (r->tensor != tensor || r->layer != layer || element < r->whole || element - r->whole >= r->count) continue;
            *value = value_of(file, kind, r->at + element - r->whole);
            return true;
        }
    return false;
}

static void ask(const saved_state *s, const tables *t, const uint8_t question[4]) {
    float found[256], expected;
    problem why = {.what = ""};
    int64_t tensor = question[0] % 120, layer = question[1] % 120, first = question[2], count = question[3];
    int kind = question[0] % STATE_KINDS;
    bool all = true;
    for (int64_t i = 0; i < count; i++) all &= look_up(t, kind, tensor, layer, first + i, &expected);
    FUZZ_CHECK(saved_state_read(s, kind, tensor, layer, first, count, found, &why) == all);
    FUZZ_CHECK(all || *why.what);
    for (int64_t i = 0; all && i < count; i++) {
        look_up(t, kind, tensor, layer, first + i, &expected);
        FUZZ_CHECK(found[i] == expected);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static tables t;
    static file_hash files[FILES];
    if (size == 0) return 0;
    int64_t elements = *bytes % ELEMENTS;
    const bool raw = *bytes == 255;
    const uint8_t *const rest = bytes + 1;
    const size_t rest_bytes = size - 1;
    memset(&t, 0, sizeof t);
    if (raw) size = 1;
    for (bytes++, size--; size >= FIELDS && *bytes != 255; bytes += FIELDS, size -= FIELDS) {
        int file = bytes[3] >> 7;
        if (t.runs[file] == RUNS) break;
        state_run r = {number(bytes[0]), number(bytes[1]), number(bytes[2]), number(bytes[3] & 127), number(bytes[4])};
        t.run[file][t.runs[file]++] = r;
    }
    for (int file = 0; file < FILES; file++)
        path_of_file[file] = raw && file == 1 ? fuzz_file(1, rest, rest_bytes) : put(file, t.run[file], t.runs[file], elements);
    problem why = {.what = ""};
    manifest m = {.ranks = FILES, .file = files};
    saved_state *s = saved_state_open("out", &m, kinds_of_adamw, &why);
    FUZZ_CHECK(s || *why.what);
    if (s && size > 0) bytes++, size--;
    for (int asked = 0; s && size >= 4 && asked < QUESTIONS; asked++, bytes += 4, size -= 4) ask(s, &t, bytes);
    saved_state_close(s);
    return 0;
}
