// See tokens.h. Each file is mapped whole and stays mapped; a sample is found by a search over the files'
// first sample numbers and copied straight from the map, so the page cache is the only buffer there is.
//
// Training order. An epoch must visit every sample once, in an order that every rank computes for itself from
// (seed, epoch) without a table: the number of samples may be in the billions. A Feistel network is a
// permutation of [0, 4^h) whatever its round function, built from that function's hash alone; h is the least
// with 4^h ≥ samples, and a result outside [0, samples) goes through the network again until it falls inside
// (cycle walking: still a permutation, fewer than four rounds of it on average, as the domain is less than
// four times too large). The order is part of the program's contract: runs are repeated by seed, so it may
// not change, and a test pins it.
//
// Files are sorted by byte value, not by locale, for the same reason.
#include "tokens.h"
#include "../commfuse/die.h"
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    MAGIC = 20240520,
    MAGIC_32_BIT = 20240801,
    VERSION = 1,
    HEADER = 256,
    FEISTEL_ROUNDS = 8,
    FINGERPRINT_TOKENS = 1000
};
enum { HEADER_BYTES = HEADER * (int)sizeof(int32_t) };

typedef struct token_file {
    char *name;
    void *map;
    int64_t bytes;          // of the map
    const uint16_t *tokens; // (count)
    int64_t count;
    int64_t first; // number of its first sample
} token_file;

struct tokens {
    token_file *files;
    int count;
    int64_t T, samples, total;
};

static const char *const how_to_make = "make token files with data/prepare.py --input TEXT --out DIR";
static const char *const how_to_read = "every rank must be able to read the files of --train and --val";

// --- opening -----------------------------------------------------------------------------------------------

static int by_bytes(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static glob_t find_files(const char *pattern) {
    glob_t found;
    int status = glob(pattern, GLOB_NOSORT | GLOB_TILDE, NULL, &found);
    if (status == GLOB_NOMATCH) cf_die_together(how_to_make, "no token file matches '%s'", pattern);
    if (status != 0)
        cf_die_together(how_to_read, "token files '%s' cannot be listed: %s", pattern,
                        status == GLOB_NOSPACE ? "out of memory" : strerror(errno));
    qsort(found.gl_pathv, found.gl_pathc, sizeof *found.gl_pathv, by_bytes);
    return found;
}

// Maps a whole file; what it holds is not looked at, but it is at least a header long.
static void map_file(token_file *f, const char *name) {
    struct stat status;
    int fd = open(name, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &status) != 0)
        cf_die_together(how_to_read, "token file %s cannot be opened: %s", name, strerror(errno));
    if (!S_ISREG(status.st_mode))
        cf_die_together("name the files: --train 'DIR/train_*.bin'", "token file %s is %s, not a file", name,
                        S_ISDIR(status.st_mode) ? "a directory" : "a device or pipe");
    if (status.st_size < HEADER_BYTES)
        cf_die_together(how_to_make, "token file %s has %lld bytes, less than the %d of a header", name,
                        (long long)status.st_size, HEADER_BYTES);
    f->bytes = status.st_size;
    f->map = mmap(NULL, (size_t)f->bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (f->map == MAP_FAILED)
        cf_die_together("copy it to a disk of this machine",
                        "token file %s, %lld bytes, cannot be mapped: %s", name, (long long)f->bytes,
                        strerror(errno));
    close(fd);
    f->name = strdup(name);
    if (!f->name) cf_die(NULL, "out of memory for the name of %s", name);
}

static void check_header(token_file *f) {
    const int32_t *header = f->map;
    if (header[0] == MAGIC_32_BIT)
        cf_die_together(how_to_make,
                        "token file %s holds 32-bit tokens (magic %d); this program reads 16-bit ones",
                        f->name, MAGIC_32_BIT);
    if (header[0] != MAGIC)
        cf_die_together(how_to_make, "%s is not a token file: its first number is %d, expected %d", f->name,
                        header[0], MAGIC);
    if (header[1] != VERSION)
        cf_die_together(how_to_make, "token file %s has version %d, expected %d", f->name, header[1],
                        VERSION);
    if (header[2] < 0)
        cf_die_together(how_to_make, "token file %s says it holds %d tokens; it is damaged", f->name,
                        header[2]);
    int64_t expected = HEADER_BYTES + (int64_t)header[2] * (int64_t)sizeof(uint16_t);
    if (f->bytes != expected)
        cf_die_together(
            "it is damaged or was not copied completely; make or copy it again",
            "token file %s is %s: its header says %d tokens, which is %lld bytes, but it has %lld", f->name,
            f->bytes < expected ? "truncated" : "too long", header[2], (long long)expected,
            (long long)f->bytes);
    f->count = header[2];
    f->tokens = (const uint16_t *)(header + HEADER);
}

tokens *tokens_open(const char *pattern, int64_t T) {
    if (T < 1) cf_die_together("--seq is at least 1", "samples of %lld tokens", (long long)T);
    glob_t found = find_files(pattern);
    tokens *t = calloc(1, sizeof *t);
    token_file *files = calloc(found.gl_pathc, sizeof *files);
    if (!t || !files) cf_die(NULL, "out of memory for %zu token files", found.gl_pathc);
    *t = (tokens){.files = files, .count = (int)found.gl_pathc, .T = T};
    int64_t longest = 0;
    for (int i = 0; i < t->count; i++) {
        token_file *f = &files[i];
        map_file(f, found.gl_pathv[i]);
        check_header(f);
        f->first = t->samples;
        t->samples += f->count > 0 ? (f->count - 1) / T : 0;
        t->total += f->count;
        if (f->count > longest) longest = f->count;
    }
    globfree(&found);
    if (t->samples == 0)
        cf_die_together("lower --seq or give more data",
                        "no sample in '%s': one takes %lld tokens (--seq + 1) of one file, and the longest "
                        "of %d has %lld",
                        pattern, (long long)T + 1, t->count, (long long)longest);
    return t;
}

void tokens_close(tokens *t) {
    if (!t) return;
    for (int i = 0; i < t->count; i++) {
        munmap(t->files[i].map, (size_t)t->files[i].bytes);
        free(t->files[i].name);
    }
    free(t->files);
    free(t);
}

int64_t tokens_samples(const tokens *t) {
    return t->samples;
}
int64_t tokens_count(const tokens *t) {
    return t->total;
}
int tokens_files(const tokens *t) {
    return t->count;
}

// splitmix64's finaliser: every bit of the result depends on every bit of x.
static uint64_t mix(uint64_t x) {
    x += UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

// How many tokens at each end of a file are looked at.
static int64_t some_of(const token_file *f) {
    return f->count < FINGERPRINT_TOKENS ? f->count : FINGERPRINT_TOKENS;
}

uint64_t tokens_fingerprint(const tokens *t) {
    uint64_t print = (uint64_t)t->count;
    for (int i = 0; i < t->count; i++) {
        const token_file *f = &t->files[i];
        print = mix(print ^ (uint64_t)f->count);
        for (int64_t k = 0; k < some_of(f); k++)
            print = mix(print ^ ((uint64_t)f->tokens[k] << 16 | f->tokens[f->count - 1 - k]));
    }
    return print >> 11;
}

bool tokens_look_like_bytes(const tokens *t) {
    for (int i = 0; i < t->count; i++) {
        const token_file *f = &t->files[i];
        for (int64_t k = 0; k < some_of(f); k++)
            if (f->tokens[k] > UINT8_MAX || f->tokens[f->count - 1 - k] > UINT8_MAX) return false;
    }
    return true;
}

// --- order -------------------------------------------------------------------------------------------------

// A permutation of [0, 4^half_bits) chosen by key.
static uint64_t feistel(uint64_t x, int half_bits, uint64_t key) {
    uint64_t mask = (UINT64_C(1) << half_bits) - 1, left = x >> half_bits, right = x & mask;
    for (uint64_t round = 0; round < FEISTEL_ROUNDS; round++) {
        uint64_t next = left ^ (mix(right ^ mix(key + round)) & mask);
        left = right;
        right = next;
    }
    return left << half_bits | right;
}

int64_t tokens_shuffled(const tokens *t, uint64_t seed, int64_t position) {
    if (position < 0) cf_die(NULL, "sample at position %lld", (long long)position);
    uint64_t samples = (uint64_t)t->samples, epoch = (uint64_t)position / samples;
    uint64_t key = mix(mix(seed) + epoch), x = (uint64_t)position % samples;
    int half_bits = 0;
    while (half_bits < 31 && UINT64_C(1) << 2 * half_bits < samples) half_bits++;
    do x = feistel(x, half_bits, key);
    while (x >= samples);
    return (int64_t)x;
}

// --- reading -----------------------------------------------------------------------------------------------

// The file that holds a sample: the last one whose first sample is not behind it.
static const token_file *file_of(const tokens *t, int64_t sample) {
    int low = 0, high = t->count; // low's first <= sample < high's first
    while (high - low > 1) {
        int middle = low + (high - low) / 2;
        if (t->files[middle].first <= sample)
            low = middle;
        else
            high = middle;
    }
    return &t->files[low];
}

void tokens_read(const tokens *t, int64_t sample, int64_t vocab, int64_t b, int64_t B, int32_t *inputs,
                 int32_t *targets) {
    if (sample < 0 || sample >= t->samples || b < 0 || b >= B)
        cf_die(NULL, "sample %lld of %lld into column %lld of %lld", (long long)sample, (long long)t->samples,
               (long long)b, (long long)B);
    const token_file *f = file_of(t, sample);
    const uint16_t *from = f->tokens + (sample - f->first) * t->T; // (T + 1)
    for (int64_t i = 0; i <= t->T; i++) {
        if (from[i] >= vocab)
            cf_die("the tokens belong to another vocabulary than the model; see --vocab",
                   "token file %s: token %lld is %d, but the vocabulary has %lld", f->name,
                   (long long)(from - f->tokens + i), from[i], (long long)vocab);
        if (i < t->T) inputs[i * B + b] = from[i];     // (T, B)
        if (i > 0) targets[(i - 1) * B + b] = from[i]; // (T, B)
    }
}
