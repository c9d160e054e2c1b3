// See tokens.h.
//
// Order. Every rank computes it from (seed, epoch) without a table, because there may be billions of samples. A Feistel network is
// a permutation of [0, 4^h) for every round function; h is the smallest with 4^h ≥ samples. A result outside [0, samples) goes
// through the network again until it is inside (cycle walking): still a permutation, in fewer than four passes on average. The
// order must never change, because a seed has to repeat a run; a test pins it.
//
// Fingerprint. Of a large file only blocks are read. One begins every 1/1250 of the file, so that each thousandth of it holds a
// whole block: 1/1000 − 1/1250 of more than 2^21 tokens is longer than one.
#include "tokens.h"
#include <glob.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

enum {
    MAGIC = 20240520,
    FILE_VERSION = 1,
    MAGIC_32 = 20240801,
    FILE_VERSION_32 = 7,
    FEISTEL_ROUNDS = 8,
    PIECE = 1 << 16,      // tokens of one read
    BLOCK = 256,          // tokens
    BLOCKS = 1250,        // of a file
    WHOLE_FILE = 1 << 21, // a file of at most as many tokens is hashed whole
    WHOLE_SET = 1 << 27   // all files are hashed whole if they have at most as many tokens together
};
static const char *const how_to_make = "make token files with data/prepare.py --input TEXT --out DIR";
static const char *const how_to_read = "every rank must be able to read the files of --train and --val";

// Finds the files, sorted by byte value, as glob() sorts in the locale "C", which no program leaves that does not ask to. The
// brackets and stars of an existing file or directory are not special. Returns glob()'s status.
static int find_files(const char *pattern, glob_t *found) {
    char directory[PATH_MAX];
    const char *slash = strrchr(pattern, '/');
    snprintf(directory, sizeof directory, "%.*s", slash ? (int)(slash - pattern) : 0, pattern);
    const size_t literal = strlen(access(pattern, F_OK) == 0 ? pattern : access(directory, F_OK) == 0 ? directory : "");
    char *escaped = cf_host_alloc(2 * (int64_t)strlen(pattern) + 1, 1, "a pattern"), *end = escaped;
    for (size_t i = 0; pattern[i]; i++) {
        if (i < literal && strchr("*?[]\\~", pattern[i])) *end++ = '\\';
        *end++ = pattern[i];
    }
    const int status = glob(escaped, GLOB_TILDE, NULL, found);
    free(escaped);
    return status;
}

char *tokens_first_file(const char *pattern) {
    glob_t found;
    if (find_files(pattern, &found) != 0) return NULL;
    char *name = strdup(found.gl_pathv[0]);
    if (!name) cf_die(NULL, "out of memory for the name of %s", found.gl_pathv[0]);
    globfree(&found);
    return name;
}

// The tokens that read_tokens() has read.
static int64_t token_of(const tokens *t, const token_file *file, int64_t i) {
    return file->width == 2 ? ((const uint16_t *)t->piece)[i] : ((const uint32_t *)t->piece)[i];
}

static void check_tokens(const tokens *t, const token_file *file, int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (token_of(t, file, i) >= t->vocab)
            cf_die_together("the tokens belong to another vocabulary than the model (see --vocab), or the file is damaged",
                            "token file %s: token %ld is %ld, at byte %ld, but the vocabulary has %ld", file->in.path, first + i,
                            token_of(t, file, i), INPUT_HEADER_BYTES + (first + i) * file->width, t->vocab);
}

static void read_tokens(const tokens *t, const token_file *file, int64_t first, int64_t count) {
    problem why;
    if (!input_read(&file->in, INPUT_HEADER_BYTES + first * file->width, t->piece, count * file->width, &why))
        cf_die(why.hint, "%s", why.what);
}

static void open_file(token_file *file, const char *name) {
    static const header_field fields[][3] = {
        {{"magic", MAGIC, MAGIC}, {"version", FILE_VERSION, FILE_VERSION}, {"number of tokens", 0, INT32_MAX}},
        {{"magic", MAGIC_32, MAGIC_32}, {"version", FILE_VERSION_32, FILE_VERSION_32}, {"number of tokens", 0, INT32_MAX}}};
    problem why;
    int32_t header[INPUT_HEADER] = {0};
    char promise[32];
    if (!input_open(&file->in, "token file", name, &why)) cf_die_together(problem_hint(&why, how_to_read), "%s", why.what);
    const bool wide = input_header(&file->in, fields[1], 1, header, NULL);
    if (!input_header(&file->in, fields[wide], 3, header, &why)) cf_die_together(problem_hint(&why, how_to_make), "%s", why.what);
    file->count = header[2], file->width = wide ? 4 : 2;
    snprintf(promise, sizeof promise, "%d tokens", header[2]);
    if (!input_check_size(&file->in, INPUT_HEADER_BYTES + file->count * file->width, promise, &why))
        cf_die_together(why.hint, "%s", why.what);
}

// Continues a hash with a file (whole) or with blocks spread over it, and checks these tokens.
static uint64_t hash_file(const tokens *t, const token_file *file, bool whole, uint64_t hash) {
    const int64_t step = whole ? PIECE : file->count / BLOCKS, length = whole ? PIECE : BLOCK;
    hash = XXH64(&file->count, sizeof file->count, hash);
    for (int64_t at = 0; !whole && at < file->count; at += step) // reads ahead, because disks serve many requests at once
        posix_fadvise(file->in.fd, INPUT_HEADER_BYTES + at * file->width, BLOCK * file->width, POSIX_FADV_WILLNEED);
    for (int64_t at = 0; at < file->count; at += step) {
        const int64_t count = file->count - at < length ? file->count - at : length;
        read_tokens(t, file, at, count);
        hash = XXH64(t->piece, (size_t)(count * file->width), hash);
        check_tokens(t, file, at, count);
    }
    return hash;
}

tokens *tokens_open(const char *pattern, int64_t T, int64_t vocab) {
    glob_t found;
    const int status = find_files(pattern, &found);
    if (status == GLOB_NOMATCH)
        cf_die_together(
            "make token files with data/prepare.py --input TEXT --out DIR; of a directory, --train DIR reads train_*.bin "
            "and --val DIR val_*.bin",
            "no token file matches '%s'", pattern);
    if (status != 0)
        cf_die_together(how_to_read, "token files '%s' cannot be listed: %s", pattern,
                        status == GLOB_NOSPACE ? "out of memory" : strerror(errno));
    tokens *t = cf_host_alloc(1, sizeof *t, "token files");
    t->T = T, t->vocab = vocab, t->files = (int)found.gl_pathc;
    t->file = cf_host_alloc(t->files, sizeof *t->file, "token files");
    t->piece = cf_host_alloc(T < PIECE ? PIECE : T + 1, sizeof(uint32_t), "tokens");
    int64_t longest = 0;
    for (int i = 0; i < t->files; i++) {
        open_file(&t->file[i], found.gl_pathv[i]);
        const int64_t count = t->file[i].count;
        t->file[i].first = t->samples;
        t->samples += count > 0 ? (count - 1) / T : 0;
        t->count += count;
        if (count > longest) longest = count;
    }
    globfree(&found);
    if (t->samples == 0)
        cf_die_together("lower --seq or give more data",
                        "no sample in '%s': one takes %ld tokens (--seq + 1) of one file, and the longest of %d has %ld", pattern,
                        T + 1, t->files, longest);
    uint64_t hash = (uint64_t)t->files;
    for (token_file *f = t->file; f < t->file + t->files; f++)
        hash = hash_file(t, f, f->count <= WHOLE_FILE || t->count <= WHOLE_SET, hash);
    t->fingerprint = hash >> 11;
    return t;
}

void tokens_close(tokens *t) {
    if (!t) return;
    for (int i = 0; i < t->files; i++) input_close(&t->file[i].in);
    free(t->file);
    free(t->piece);
    free(t);
}

// splitmix64's finaliser: every bit of the result depends on every bit of x.
static uint64_t mix(uint64_t x) {
    x += UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

int64_t tokens_shuffled(const tokens *t, uint64_t seed, int64_t position) {
    uint64_t samples = (uint64_t)t->samples, epoch = (uint64_t)position / samples;
    uint64_t key = mix(mix(seed) + epoch), x = (uint64_t)position % samples;
    int half_bits = 0;
    while (half_bits < 31 && UINT64_C(1) << 2 * half_bits < samples) half_bits++;
    const uint64_t mask = (UINT64_C(1) << half_bits) - 1;
    do { // a permutation of [0, 4^half_bits) chosen by key
        uint64_t left = x >> half_bits, right = x & mask;
        for (uint64_t round = 0; round < FEISTEL_ROUNDS; round++) {
            const uint64_t next = left ^ (mix(right ^ mix(key + round)) & mask);
            left = right;
            right = next;
        }
        x = left << half_bits | right;
    } while (x >= samples);
    return (int64_t)x;
}

void tokens_load(void *data, int64_t sample, int64_t b, int64_t B, int32_t *inputs, int32_t *targets) {
    tokens *t = data;
    int file = 0; // the last file whose first sample is at or before `sample`
    for (int end = t->files; end - file > 1;) {
        const int middle = file + (end - file) / 2;
        *(t->file[middle].first <= sample ? &file : &end) = middle;
    }
    const int64_t first = (sample - t->file[file].first) * t->T;
    read_tokens(t, &t->file[file], first, t->T + 1); // (T + 1)
    check_tokens(t, &t->file[file], first, t->T + 1);
    for (int64_t i = 0; i <= t->T; i++) {
        const int32_t token = (int32_t)token_of(t, &t->file[file], i);
        if (i < t->T) inputs[i * B + b] = token;     // (T, B)
        if (i > 0) targets[(i - 1) * B + b] = token; // (T, B)
    }
}
