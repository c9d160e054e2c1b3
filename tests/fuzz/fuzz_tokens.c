// Token files: one byte says tokens per sample and whether a second, sound file stands beside; the rest is
// the file.
#include "tests/fuzz/fuzz.h"
#include "data/tokens.h"

enum { MAX_T = 64, SAMPLES = 8, V = 200000, SOME = 60000 };

static void put_second(void) {
    const int32_t words[] = {20240520, 1, 100};
    uint8_t bytes[1 + sizeof words + 200] = {3};
    memcpy(bytes + 1, words, sizeof words);
    for (size_t i = 1 + sizeof words; i < sizeof bytes; i++) bytes[i] = i % 2 ? (uint8_t)i : 0;
    fuzz_headed_file(1, bytes, sizeof bytes);
}

static void use(const char *pattern, int64_t T) {
    int32_t inputs[MAX_T * 2], targets[MAX_T * 2];
    tokens *t = tokens_open(pattern, T, V);
    int64_t samples = t->samples, count = t->count;
    FUZZ_CHECK(samples > 0 && samples <= count / T && t->files >= 1);
    for (int64_t i = 0; i < SAMPLES; i++) {
        int64_t sample = tokens_shuffled(t, 1, i);
        FUZZ_CHECK(sample >= 0 && sample < samples);
        t->vocab = i % 2 ? SOME : V, tokens_load(t, sample, i % 2, 2, inputs, targets);
        for (int64_t j = 0; j < T; j++) FUZZ_CHECK(inputs[2 * j + i % 2] >= 0 && inputs[2 * j + i % 2] < t->vocab);
        for (int64_t j = 1; j < T; j++) FUZZ_CHECK(inputs[2 * j + i % 2] == targets[2 * (j - 1) + i % 2]);
    }
    tokens_close(t);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    if (size == 0) return 0;
    int64_t T = bytes[0] % MAX_T + 1;
    const char *pattern = fuzz_headed_file(0, bytes + 1, size - 1);
    if (bytes[0] >= 128) {
        put_second();
        pattern = "/proc/self/fd/[89]";
    }
    FUZZ_TRY(use(pattern, T));
    return 0;
}
