// See vocabulary.h. The file stays in memory, and words point into it. Encoding may be slow, because a prompt is short: each merge
// scans all pairs of its word.
#include "vocabulary.h"
#include "input.h"
#include <errno.h>
#include <limits.h>

enum { MAGIC = 20240328, FILE_VERSION = 2, MAX_TOKENS = 1 << 24 };

typedef struct word {
    const char *bytes;
    int length;
    int32_t token;
} word;

struct vocabulary {
    int64_t count, end_of_text;
    word *word; // (count)
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
    *v = (vocabulary){.count = header[2],
                      .end_of_text = (uint32_t)header[3],
                      .word = cf_host_alloc(header[2], sizeof *v->word, path),
                      .bytes = bytes};
    if (v->end_of_text >= v->count)
        cf_die_together(how_to_make, "vocabulary file %s: end of text is token %ld of %ld", path, v->end_of_text, v->count);
    for (int64_t token = 0; token < v->count; token++) {
        const int length = at < size ? (unsigned char)bytes[at] : 0;
        if (at + 1 + length > size)
            cf_die_together(how_to_make, "vocabulary file %s ends within token %ld of %ld", path, token, v->count);
        v->word[token] = (word){bytes + at + 1, length, (int32_t)token};
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

int64_t vocabulary_size(const vocabulary *v) {
    return v ? v->count : 256;
}
int64_t vocabulary_end_of_text(const vocabulary *v) {
    return v ? v->end_of_text : -1;
}

int vocabulary_bytes(const vocabulary *v, int64_t token, char *text) {
    const char byte = (char)token;
    word w = {"\xEF\xBF\xBD", 3, 0}; // U+FFFD, for tokens that a padded model may have
    if (token >= 0 && token < vocabulary_size(v)) w = v ? v->word[token] : (word){&byte, 1, 0};
    memcpy(text, w.bytes, (size_t)w.length);
    return w.length;
}

// Runs of characters of one class, from U+0000 to U+10FFFF: 4 · length + class, as numbers in base 64 with the lowest five bits
// first (the VLQ of source maps, without a sign). Of the Unicode version of tiktoken's library: tests/data/test_prompt.py compares
// every character with it, and prints this table.
static const char class_runs[] =
    "kBXoCH8BqBcpDYpDoBHoDHkBFcKEFMGFEOE9CE9DEp5BQxB4BVcFEFkQVEJIREFYFENEFExCEtKEtRgB5UE5EIFYlF8ItDQR0FtF0CqBQJEtMEF8BJcJqBNI"
    "FgCFE5D0DlLsBF4BqBlEkBJQFU5CQFkBFMF8ClDctBUhDEZkCpFoH5GMFoCFcpBQqBEhCQhBIJI5CEdEFMRMFgCF0BJENQqBJIaIFgBZQJI5CEdEJEJEJ8DR"
    "EFcqBINgClBENE5CEdEJEVMFoCF8BJQqBkBFsBhBIJI5CEdEJEVMF4DJENQqBEFasBFEZMNERMJEFEJMJMNMxB4CF0C2BoChBENE9CEhCMFoDNIFIJQqBgBe"
    "EFQhBENE9CEpBEVMF8DJEJQqBEJkClBENElFIFgCFUNEeNQuCEZUpCMhDElBEFId8DqBkChGEJwBdkBqB8EJEFEVEhDEFEpBEJkBFIVEFkBqBIRgEF8DyCwB"
    "hBExEsDVsOtFwCFqBYZQRMFMJcNQ1BwBFEqBY5EEFUFItFE1pBERIdEFERIlFERIlEERIdEFERI9BElHERItI4ByCMhCgC5KIZMxtCIlCHpDUtJMOhBcpC0B"
    "tC4BpC4B1BEN8BxGsEFQFMqBYqB4CqBYlLcVIpEEFU5IoB9D8EqB5DIVsBxFQpDYuB0E9CkB1GsFqBYqB0BF0L9FkChBMqBkF5D0BJqBxFoDxEwDqBMNqBxE"
    "ItBUtFINkFREZEJMFUhYgI5iBIZI5EIZIhBEFEFEFE9DI1GEdEFMNEdMRIZQ1BUNEdMvB0DLUH8FHgCGFIaUFqBY1B0MFQFIpBEFMVYFEFEFEREtBIRUVQFE"
    "uGJW46CyH4J6C4uC6DwtE1cYRMJkBGI5EEFUFIhHcFgC9CkBdEdEdEdEdEdEdEdgKFg6BHQJGkDmBcVIOJQ5KYNEpLERUtFE5LMSoBhEgGhCgEqB4DiBE+Bg"
    "EqB8E+BgoBh4ZgI1x2CsI5FI1hBMhCqBJwC9FgC9DI5IqB8ElBI9MItIIJEFEhB0ChCENERE9C0BaoBxG4BpGwDqBgDZMFEJEqBxDoB9CkD1Dc9FwDFqBYVE"
    "pBqBVElF8CNEhBQqBY9CMFMpGEFMJIVIFEFgDNItBcNwBZIZIZkBdEdEtFE5BYtO0BqBYx0rBwB9CQlGwghB5tBIpN4EdwBVUFEpBE1BEVEFEJEJExNkEttB"
    "oChII5GgFxBwOVE9QsCqBcpDYpDsBlLMZIZIZINsExBEpDEtCEJE9BI5BoEtPwB2FwBmHkCKwe1DMlGgCuDQhESkBxCGhBGU5EoB5DIxEQhBEWoF5TIqBYxE"
    "QxEQhFgBxGwBtBE9BEdEJEtBE9BEdEJMxGwB9mBkB5CoBhBgDZEpFElB0IZIFExFEJMFI9CIiB9CIe9DgBmBgGtCEJUW5CaQpD4IhHQKJiCI6FF8BRENE1Do"
    "BmB8C1DKE1DOgEhBExDYWgC5GoB5CIiBtCUiBpC8CegKlJ8GtG0BtGcaxEwBqBYqBxDkB9Cob+DEpFYJgCNsH1DqBFgB5CsBSsDpC4F1CewC9CwB1GoD6DEJ"
    "IF0B1FgElDcqBkBxE8BqBQFIFgBtEMFwBhG4BRsBqBFEFQyCsBpCElDsCJ8HdEFERE9BEpBc9FkCqBsBhBIJI5CEdEJEVMFoCFwBV4DpBEFIFE5EEFkDFEFw"
    "F1GoCRUqBUN4DhGwCJEFgBqB4U9FkFRwEhGwCFsBqB4EtF0BFcqBYyCwDtD0CyBQdkXxFwOhIuCwBhBIFIhBEJEhD8BFEF4BqB4IhBI9EgCFEFwDFoBhFcF0"
    "CFsB5FsCFoClJ8YlE8BqBYlBE1EkCF8B2DU5DgOdEJE5E0CFkBqBYZEJEhE4BFcqB4mBtC8BFE1BEpEwDqB4KF8B2CsFpzD4M+NkCxYwpKlM8BhmEkCZkDtz"
    "PU9oCk3a5DoCqB44GlnCc9DEqBY9JEqBY5DoChGgCRwBqBEeE1CUtCg2B1FMqB4YhI+CkNtJUFoI1BgIJEFwDh/XgB56EkFpB88iBREdEJEtkB8BF0DNIF4B"
    "RgBxxBwgJtNU1BMlBcpB4qQqB44FyCwByCwNmD8Q1KE9IEJIFIJIRExBEFEdElIERIhBEdExDEREVEFMdExqBIlDElDE9DElDE9DElDE9DElDE9DElDEhBIq"
    "GggH9DYZ0gB5HoS1FoBdIqBQFkoB5DoCxFQqB46BxDQqB4a5DIFqB08BdEREJE9BE1YImBgGxIcFQqB8iDuHEOESwJ2FE+BoYREtDEJEFIFEpBEREFEFYFQF"
    "EFEFENEJEFIFEFEFEFEFEJEFIREdEREREFEpBElCUNEVElCwoC2Bs8KqB4gEh8mFgEpnQY5bIpwW4Blmd8B5tCo0J5jCo8FtpTUhsQgq8uD";

character_class vocabulary_class_of(const char *at) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    static uint32_t runs[sizeof class_runs]; // read from the table by the first call
    const int bytes = cf_utf8_bytes(at);
    uint32_t character = (unsigned char)*at & (bytes == 1 ? 0x7F : 0x7F >> bytes), run = 0;
    for (const char *digit = class_runs, *end = runs[0] ? digit : digit + strlen(digit); digit < end; run++)
        for (int shift = 0, more = 1; more; shift += 5, digit++) {
            const uint32_t value = (uint32_t)(strchr(digits, *digit) - digits);
            runs[run] |= (value & 31) << shift;
            more = value > 31;
        }
    for (int i = 1; i < bytes; i++) character = character << 6 | ((unsigned char)at[i] & 0x3F);
    for (run = 0; character >= runs[run] / 4; run++) character -= runs[run] / 4;
    return (character_class)(runs[run] % 4);
}

static const char end_of_text[] = "<|endoftext|>";

static int by_bytes(const void *a, const void *b) {
    const word *x = a, *y = b;
    return x->length != y->length ? x->length - y->length : memcmp(x->bytes, y->bytes, (size_t)x->length);
}

// INT32_MAX: not a word.
static int32_t token_of(const word *all, int64_t count, const char *bytes, int64_t length) {
    const word key = {.bytes = bytes, .length = (int)length};
    const word *found = bsearch(&key, all, (size_t)count, sizeof *all, by_bytes);
    return found ? found->token : INT32_MAX;
}

// The end of the first piece of a text, by GPT-2's pattern; pieces are encoded separately:
//     '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
static const char *piece_end(const char *text, const char *end) {
    static const char *const endings[] = {"'s", "'d", "'m", "'t", "'ll", "'ve", "'re"};
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++)
        if (strncmp(text, endings[i], strlen(endings[i])) == 0) return text + strlen(endings[i]);
    const char *at = text + (*text == ' ' && text + 1 < end), *last = text;
    const character_class kind = vocabulary_class_of(at);
    for (at = kind == BLANK ? text : at; at < end && vocabulary_class_of(at) == kind; at += cf_utf8_bytes(at)) last = at;
    // The last of several blanks belongs to the word after them.
    return kind != BLANK || at == end || last == text ? at : last;
}

// Part i is the bytes [part[i], part[i + 1]); rank[i]: the token of parts i and i + 1 together.
static int64_t encode_piece(const word *all, int64_t count, const char *text, int64_t bytes, int32_t *tokens) {
    int64_t parts = bytes, *part = cf_host_alloc(bytes + 1, sizeof *part, "a word");
    int32_t *rank = cf_host_alloc(bytes, sizeof *rank, "a word");
    for (int64_t i = 0; i <= bytes; i++) part[i] = i;
    for (int64_t i = 0; i + 1 < bytes; i++) rank[i] = token_of(all, count, text + i, 2);
    while (parts > 1) {
        int64_t least = 0;
        for (int64_t i = 1; i + 1 < parts; i++) least = rank[i] < rank[least] ? i : least;
        if (rank[least] == INT32_MAX) break;
        memmove(part + least + 1, part + least + 2, (size_t)(parts - least - 1) * sizeof *part);
        memmove(rank + least, rank + least + 1, (size_t)(parts - least - 2) * sizeof *rank);
        parts--;
        for (int64_t i = least > 0 ? least - 1 : 0; i <= least && i + 1 < parts; i++)
            rank[i] = token_of(all, count, text + part[i], part[i + 2] - part[i]);
    }
    for (int64_t i = 0; i < parts; i++) {
        tokens[i] = token_of(all, count, text + part[i], part[i + 1] - part[i]);
        if (tokens[i] == INT32_MAX)
            cf_die_together("use the tokenizer.bin that data/prepare.py --encoding gpt2 has written",
                            "--prompt: the vocabulary has no word for the byte %d", (unsigned char)text[part[i]]);
    }
    free(part);
    free(rank);
    return parts;
}

int64_t vocabulary_encode(const vocabulary *v, const char *text, int64_t bytes, int32_t *tokens) {
    int64_t count = 0, size = 0;
    for (int64_t i = 0; !v && i < bytes; i++) tokens[count++] = (unsigned char)text[i];
    if (!v) return count;
    word *all = cf_host_alloc(v->count, sizeof *all, "the words of the vocabulary"); // sorted, without the end of a text
    for (int64_t token = 0; token < v->count; token++)
        if (token != v->end_of_text) all[size++] = v->word[token];
    qsort(all, (size_t)size, sizeof *all, by_bytes);
    for (const char *end = text + bytes; text < end;) {
        const char *special = v->end_of_text >= 0 ? strstr(text, end_of_text) : NULL;
        const char *stop = special ? special : end;
        for (const char *next; text < stop; text = next) {
            next = piece_end(text, stop);
            count += encode_piece(all, size, text, next - text, tokens + count);
        }
        if (special) tokens[count++] = (int32_t)v->end_of_text, text += sizeof end_of_text - 1;
    }
    free(all);
    return count;
}
