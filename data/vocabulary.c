// See vocabulary.h. The file is read whole; each token is an offset into it, to its length byte.
#include "vocabulary.h"
#include "input.h"
#include "../commfuse/die.h"
#include <errno.h>
#include <limits.h>
#include <stdlib.h>

// Version 1 does not say which token ends a text: it is only used with GPT-2's vocabulary, where it is 50256.
enum { MAGIC = 20240328, HEADER = 256, GPT2_TOKENS = 50257, GPT2_END_OF_TEXT = 50256, MAX_TOKENS = 1 << 24 };
enum { HEADER_BYTES = HEADER * (int)sizeof(uint32_t) };

struct vocabulary {
    int64_t count, end_of_text;
    int64_t *at; // (count) offsets in bytes of each token's length byte
    unsigned char *bytes;
};

static const char *const how_to_make = "make it again with data/prepare.py --encoding gpt2";
static const char *const how_to_read = "it belongs beside the token files; every rank must be able to read it";

static void check_header(vocabulary *v, const char *path) {
    uint32_t header[4];
    memcpy(header, v->bytes, sizeof header);
    if (header[0] != MAGIC)
        cf_die_together(how_to_make, "%s is not a vocabulary file: its first number is %u, expected %d", path, header[0], MAGIC);
    if (header[1] != 2 && !(header[1] == 1 && header[2] == GPT2_TOKENS))
        cf_die_together(how_to_make, "vocabulary file %s has version %u, expected 2", path, header[1]);
    if (header[2] < 1 || header[2] > MAX_TOKENS)
        cf_die_together(how_to_make, "vocabulary file %s says it has %u tokens, allowed is 1 to %d", path, header[2], MAX_TOKENS);
    v->count = header[2];
    v->end_of_text = header[1] == 1 ? GPT2_END_OF_TEXT : header[3];
    if (v->end_of_text >= v->count)
        cf_die_together(how_to_make, "vocabulary file %s: end of text is token %lld of %lld", path, (long long)v->end_of_text,
                        (long long)v->count);
}

static void find_tokens(vocabulary *v, const char *path, int64_t size) {
    v->at = malloc((size_t)v->count * sizeof *v->at);
    if (!v->at) cf_die(NULL, "no memory for the %lld tokens of vocabulary file %s", (long long)v->count, path);
    int64_t at = HEADER_BYTES;
    for (int64_t token = 0; token < v->count; token++) {
        if (at >= size || at + 1 + v->bytes[at] > size)
            cf_die_together(how_to_make, "vocabulary file %s ends within token %lld of %lld", path, (long long)token,
                            (long long)v->count);
        v->at[token] = at;
        at += 1 + v->bytes[at];
    }
    if (at != size)
        cf_die_together(how_to_make, "vocabulary file %s: its %lld tokens end at byte %lld, but it has %lld", path,
                        (long long)v->count, (long long)at, (long long)size);
}

vocabulary *vocabulary_open(const char *path) {
    problem why;
    int64_t size;
    char *bytes = input_read_all("vocabulary file", path, HEADER_BYTES + (int64_t)MAX_TOKENS * 256, &size, &why);
    if (!bytes && errno == ENOENT) return NULL;
    if (!bytes) cf_die_together(*why.hint ? why.hint : how_to_read, "%s", why.what);
    if (size < HEADER_BYTES)
        cf_die_together(how_to_make, "vocabulary file %s has %lld bytes: it is damaged or something else", path, (long long)size);
    vocabulary *v = calloc(1, sizeof *v);
    if (!v) cf_die(NULL, "out of memory for vocabulary file %s", path);
    v->bytes = (unsigned char *)bytes;
    check_header(v, path);
    find_tokens(v, path, size);
    return v;
}

vocabulary *vocabulary_beside(const char *file) {
    if (!file || !*file) return NULL;
    const char *slash = strrchr(file, '/');
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%.*stokenizer.bin", slash ? (int)(slash - file + 1) : 0, file) >= (int)sizeof path)
        cf_die_together(how_to_read, "the name of the vocabulary file beside %s is too long", file);
    return vocabulary_open(path);
}

void vocabulary_close(vocabulary *v) {
    if (!v) return;
    free(v->at);
    free(v->bytes);
    free(v);
}

int64_t vocabulary_size(const vocabulary *v) {
    return v ? v->count : 256;
}
int64_t vocabulary_end_of_text(const vocabulary *v) {
    return v ? v->end_of_text : -1;
}

const char *vocabulary_word(const vocabulary *v, int64_t token, int *length) {
    *length = v->bytes[v->at[token]];
    return (const char *)v->bytes + v->at[token] + 1;
}

int vocabulary_bytes(const vocabulary *v, int64_t token, char *text) {
    static const char replacement[] = "\xEF\xBF\xBD"; // U+FFFD, for tokens that a padded model may have
    if (token < 0 || token >= vocabulary_size(v)) {
        memcpy(text, replacement, 3);
        return 3;
    }
    if (!v) {
        text[0] = (char)token;
        return 1;
    }
    int length;
    const char *from = vocabulary_word(v, token, &length);
    memcpy(text, from, (size_t)length);
    return length;
}
