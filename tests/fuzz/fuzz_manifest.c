// Manifests. One byte: 0, the text follows as it is; else it gets its right hash. What is taken comes out the
// same when it is printed and parsed again.
#include "tests/fuzz/fuzz.h"
#include "data/checkpoint.h"
#define XXH_INLINE_ALL
#include <xxhash.h>

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
        int64_t printed, reprinted;
        char *copy = manifest_print(m, &printed);
        again = manifest_parse(copy, printed, "again", &why);
        FUZZ_CHECK(again && again->step == m->step && again->ranks == m->ranks);
        char *second = manifest_print(again, &reprinted);
        FUZZ_CHECK(reprinted == printed && memcmp(second, copy, (size_t)printed) == 0);
        manifest_free(again);
        free(second);
        free(copy);
    }
    manifest_free(m);
    free(text);
    return 0;
}
