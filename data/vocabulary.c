// See vocabulary.h. The file stays in memory, and words point into it.
#include "vocabulary.h"
#include "input.h"
#include <errno.h>
#include <limits.h>

enum { MAGIC = 20240328, FILE_VERSION = 2, MAX_TOKENS = 1 << 24 };

typedef struct word {
    const char *bytes;
    int length;
} word;

struct vocabulary {
    int64_t count, end_of_text, size; // size: of the file
    word *word;                       // (count)
    char *bytes;
};

static const char *const how_to_make = "make it again with data/prepare.py --encoding gpt2";
static const char *const how_to_read = "it belongs beside the token files; every rank must be able to read it";

vocabulary *vocabulary_open(const char *path) {
    static const header_field field[] = {{"magic", MAGIC, MAGIC},
                                         {"version", FILE_VERSION, FILE_VERSION},
                                         {"number of tokens", 1, MAX_TOKENS}};
    problem why;
    int64_t size, at = INPUT_HEADER_BYTES;
    char *bytes = input_read_all("vocabulary file", path, INPUT_HEADER_BYTES + (int64_t)MAX_TOKENS * 256, &size, &why);
    if (!bytes && errno == ENOENT) return NULL;
    if (!bytes) cf_die_together(problem_hint(&why, how_to_read), "%s", why.what);
    const int32_t *header = (const int32_t *)bytes;
    if (!input_check_header("vocabulary file", path, size, field, 3, header, &why)) cf_die_together(how_to_make, "%s", why.what);
    vocabulary *v = cf_host_alloc(1, sizeof *v, path);
    v->bytes = bytes, v->count = header[2], v->end_of_text = (uint32_t)header[3], v->size = size;
    v->word = cf_host_alloc(v->count, sizeof *v->word, path);
    if (v->end_of_text >= v->count)
        cf_die_together(how_to_make, "vocabulary file %s: end of text is token %ld of %ld", path, v->end_of_text, v->count);
    for (int64_t token = 0; token < v->count; token++) {
        const int length = at < size ? (unsigned char)bytes[at] : 0;
        if (at + 1 + length > size)
            cf_die_together(how_to_make, "vocabulary file %s ends within token %ld of %ld", path, token, v->count);
        v->word[token] = (word){bytes + at + 1, length};
        at += 1 + length;
    }
    if (at != size)
        cf_die_together(how_to_make, "vocabulary file %s: its %ld tokens end at byte %ld, but it has %ld", path, v->count, at,
                        size);
    return v;
}

vocabulary *vocabulary_beside(const char *file) {
    if (!file || !*file) return NULL;
    const char *slash = strrchr(file, '/');
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%.*stokenizer.bin", slash ? (int)(slash - file + 1) : 0, file);
    return vocabulary_open(path);
}

void vocabulary_close(vocabulary *v) {
    if (!v) return;
    free(v->word);
    free(v->bytes);
    free(v);
}

bool vocabulary_same(const vocabulary *a, const vocabulary *b) {
    return a && b ? a->size == b->size && memcmp(a->bytes, b->bytes, (size_t)a->size) == 0 : a == b;
}

int64_t vocabulary_size(const vocabulary *v) {
    return v ? v->count : 256;
}

int32_t vocabulary_first(const vocabulary *v, int64_t V) {
    const int64_t token = v ? v->end_of_text : '\n';
    return token < V ? (int32_t)token : 0;
}

int vocabulary_bytes(const vocabulary *v, int64_t token, char *text) {
    const char byte = (char)token;
    word w = {"\xEF\xBF\xBD", 3}; // U+FFFD, for tokens that a padded model may have
    if (token >= 0 && token < vocabulary_size(v)) w = v ? v->word[token] : (word){&byte, 1};
    memcpy(text, w.bytes, (size_t)w.length);
    return w.length;
}

int64_t vocabulary_encode(const vocabulary *v, const char *text, int64_t length, int32_t *tokens) {
    int64_t count = 0;
    for (int64_t at = 0, longest; at < length; at += longest, count++) {
        longest = !v, tokens[count] = (unsigned char)text[at];
        for (int32_t token = 0; v && token < v->count; token++) {
            const word w = v->word[token];
            if (w.length > longest && w.length <= length - at && memcmp(w.bytes, text + at, (size_t)w.length) == 0)
                longest = w.length, tokens[count] = token;
        }
        if (longest == 0)
            cf_die_together("give its tokens with --prompt-tokens FILE", "--prompt: tokenizer.bin has no word for byte %ld", at);
    }
    return count;
}
