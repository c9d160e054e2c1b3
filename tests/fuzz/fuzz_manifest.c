// Manifests. One byte: 0, the text follows as it is; else it gets its right hash. What is taken comes out the
// same when it is printed and parsed again.
#include "tests/fuzz/fuzz.h"
#include "data/checkpoint.h"
#include <cjson/cJSON.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

static bool same(const manifest *a, const manifest *b) {
    if (a->step != b->step || a->ranks != b->ranks) return false;
    for (int64_t i = 0; i < a->ranks; i++)
        if (a->file[i].bytes != b->file[i].bytes || a->file[i].hash != b->file[i].hash) return false;
    return cJSON_Compare(a->options, b->options, true);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    if (size == 0) return 0;
    problem why = {.what = ""};
    char *text = malloc(size + 64); // for its bounds to be known
    FUZZ_CHECK(text);
    size_t length = size - 1;
    memcpy(text, bytes + 1, length);
    if (bytes[0])
        length += (size_t)snprintf(text + length, 64, "\t\"xxh64\":\t\"%016llx\"\n}\n", (unsigned long long)XXH64(text, length, 0));
    text = realloc(text, length + !length);
    manifest *m = manifest_parse(text, (int64_t)length, "fuzz", &why), *again;
    FUZZ_CHECK(m || *why.what);
    if (m) {
        int64_t printed;
        char *copy = manifest_print(m, &printed);
        again = manifest_parse(copy, printed, "again", &why);
        FUZZ_CHECK(again && same(m, again));
        manifest_free(again);
        free(copy);
    }
    manifest_free(m);
    free(text);
    return 0;
}
