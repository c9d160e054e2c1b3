// See vocabulary.h. The file is read whole; each word is a part of it. A prompt is short, so pairs of a word of its text are looked
// at again after each union, and words are found by bisection.
#include "vocabulary.h"
#include "input.h"
#include "../commfuse/die.h"
#include <errno.h>
#include <limits.h>
#include <stdlib.h>

// Version 1 does not say which token ends a text: it is only used with GPT-2's vocabulary, where it is 50256.
enum { MAGIC = 20240328, HEADER = 256, GPT2_TOKENS = 50257, GPT2_END_OF_TEXT = 50256, MAX_TOKENS = 1 << 24 };
enum { HEADER_BYTES = HEADER * (int)sizeof(uint32_t) };

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
    problem why;
    int64_t size, at = HEADER_BYTES;
    uint32_t header[4];
    char *bytes = input_read_all("vocabulary file", path, HEADER_BYTES + (int64_t)MAX_TOKENS * 256, &size, &why);
    if (!bytes && errno == ENOENT) return NULL;
    if (!bytes) cf_die_together(*why.hint ? why.hint : how_to_read, "%s", why.what);
    if (size < HEADER_BYTES)
        cf_die_together(how_to_make, "vocabulary file %s has %lld bytes: it is damaged or something else", path, (long long)size);
    memcpy(header, bytes, sizeof header);
    if (header[0] != MAGIC)
        cf_die_together(how_to_make, "%s is not a vocabulary file: its first number is %u, expected %d", path, header[0], MAGIC);
    if (header[1] != 2 && !(header[1] == 1 && header[2] == GPT2_TOKENS))
        cf_die_together(how_to_make, "vocabulary file %s has version %u, expected 2", path, header[1]);
    if (header[2] < 1 || header[2] > MAX_TOKENS)
        cf_die_together(how_to_make, "vocabulary file %s says it has %u tokens, allowed is 1 to %d", path, header[2], MAX_TOKENS);
    vocabulary *v = cf_host_alloc(1, sizeof *v, path);
    *v = (vocabulary){.count = header[2],
                      .end_of_text = header[1] == 1 ? GPT2_END_OF_TEXT : header[3],
                      .word = cf_host_alloc(header[2], sizeof *v->word, path),
                      .bytes = bytes};
    if (v->end_of_text >= v->count)
        cf_die_together(how_to_make, "vocabulary file %s: end of text is token %lld of %lld", path, (long long)v->end_of_text,
                        (long long)v->count);
    for (int64_t token = 0; token < v->count; token++) {
        const int length = at < size ? (unsigned char)bytes[at] : 0;
        if (at + 1 + length > size)
            cf_die_together(how_to_make, "vocabulary file %s ends within token %lld of %lld", path, (long long)token,
                            (long long)v->count);
        v->word[token] = (word){bytes + at + 1, length, (int32_t)token};
        at += 1 + length;
    }
    if (at != size)
        cf_die_together(how_to_make, "vocabulary file %s: its %lld tokens end at byte %lld, but it has %lld", path,
                        (long long)v->count, (long long)at, (long long)size);
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

// --- encoding ----------------------------------------------------------------------------------------------

// Runs of one class, from U+0000 to U+10FFFF: 4 · length + class. Of the Unicode version of tiktoken's library:
// tests/data/test_prompt.py compares every character with it, and prints this table.
// clang-format off
static const uint32_t runs[] = {
    36, 23, 72, 7, 60, 42, 28, 105, 24, 105, 40, 7, 104, 7, 36, 5, 28, 10, 4, 5, 12, 6, 5, 4, 14, 4, 93, 4, 125, 4, 1833, 16, 49,
    56, 21, 28, 5, 4, 5, 516, 21, 4, 9, 8, 17, 4, 5, 24, 5, 4, 13, 4, 5, 4, 81, 4, 333, 4, 557, 32, 665, 4, 153, 8, 5, 24, 165,
    284, 109, 16, 17, 180, 173, 84, 42, 16, 9, 4, 397, 4, 5, 60, 9, 28, 9, 42, 13, 8, 5, 64, 5, 4, 121, 116, 357, 44, 5, 56, 42,
    133, 36, 9, 16, 5, 20, 89, 16, 5, 36, 5, 12, 5, 92, 101, 28, 45, 20, 97, 4, 25, 68, 169, 232, 217, 12, 5, 72, 5, 28, 41, 16,
    42, 4, 65, 16, 33, 8, 9, 8, 89, 4, 29, 4, 5, 12, 17, 12, 5, 64, 5, 52, 9, 4, 13, 16, 42, 9, 8, 26, 8, 5, 32, 25, 16, 9, 8, 89,
    4, 29, 4, 9, 4, 9, 4, 9, 124, 17, 4, 5, 28, 42, 8, 13, 64, 37, 4, 13, 4, 89, 4, 29, 4, 9, 4, 21, 12, 5, 72, 5, 60, 9, 16, 42,
    36, 5, 44, 33, 8, 9, 8, 89, 4, 29, 4, 9, 4, 21, 12, 5, 120, 9, 4, 13, 16, 42, 4, 5, 26, 44, 5, 4, 25, 12, 13, 4, 17, 12, 9, 4,
    5, 4, 9, 12, 9, 12, 13, 12, 49, 88, 5, 84, 54, 72, 33, 4, 13, 4, 93, 4, 65, 12, 5, 104, 13, 8, 5, 8, 9, 16, 42, 32, 30, 4, 5,
    16, 33, 4, 13, 4, 93, 4, 41, 4, 21, 12, 5, 124, 9, 4, 9, 16, 42, 4, 9, 68, 37, 4, 13, 4, 165, 8, 5, 64, 5, 20, 13, 4, 30, 13,
    16, 78, 4, 25, 20, 73, 12, 97, 4, 37, 4, 5, 8, 29, 124, 42, 68, 193, 4, 9, 48, 29, 36, 42, 156, 9, 4, 5, 4, 21, 4, 97, 4, 5, 4,
    41, 4, 9, 36, 5, 8, 21, 4, 5, 36, 42, 8, 17, 128, 5, 124, 82, 48, 33, 4, 145, 108, 21, 460, 173, 80, 5, 42, 24, 25, 16, 17, 12,
    5, 12, 9, 28, 13, 16, 53, 48, 5, 4, 42, 24, 153, 4, 5, 20, 5, 8, 173, 4, 1333, 4, 17, 8, 29, 4, 5, 4, 17, 8, 165, 4, 17, 8,
    133, 4, 17, 8, 29, 4, 5, 4, 17, 8, 61, 4, 229, 4, 17, 8, 269, 56, 82, 12, 65, 64, 345, 8, 25, 12, 2481, 8, 69, 7, 105, 20, 301,
    12, 14, 33, 28, 73, 52, 77, 56, 73, 56, 53, 4, 13, 60, 209, 140, 5, 16, 5, 12, 42, 24, 42, 88, 42, 24, 357, 28, 21, 8, 137, 4,
    5, 20, 281, 40, 125, 156, 42, 121, 8, 21, 44, 177, 16, 105, 24, 46, 148, 93, 36, 213, 172, 42, 24, 42, 52, 5, 372, 189, 68, 33,
    12, 42, 164, 121, 52, 9, 42, 177, 104, 145, 112, 42, 12, 13, 42, 145, 8, 45, 20, 173, 8, 13, 164, 17, 4, 25, 4, 9, 12, 5, 20,
    769, 256, 1113, 8, 25, 8, 153, 8, 25, 8, 33, 4, 5, 4, 5, 4, 5, 4, 125, 8, 213, 4, 29, 4, 5, 12, 13, 4, 29, 12, 17, 8, 25, 16,
    53, 20, 13, 4, 29, 12, 47, 116, 11, 20, 7, 188, 7, 64, 6, 5, 8, 26, 20, 5, 42, 24, 53, 404, 5, 16, 5, 8, 41, 4, 5, 12, 21, 24,
    5, 4, 5, 4, 5, 4, 17, 4, 45, 8, 17, 20, 21, 16, 5, 4, 206, 9, 22, 2904, 242, 312, 90, 2520, 122, 4528, 917, 24, 17, 12, 9, 36,
    6, 8, 153, 4, 5, 20, 5, 8, 225, 28, 5, 64, 93, 36, 29, 4, 29, 4, 29, 4, 29, 4, 29, 4, 29, 4, 29, 4, 29, 320, 5, 1856, 7, 16, 9,
    6, 100, 38, 28, 21, 8, 14, 9, 16, 345, 24, 13, 4, 361, 4, 17, 20, 173, 4, 377, 12, 18, 40, 129, 192, 65, 128, 42, 120, 34, 4,
    62, 128, 42, 156, 62, 1280, 26369, 256, 88629, 268, 185, 8, 1077, 12, 65, 42, 9, 80, 189, 64, 125, 8, 281, 42, 156, 37, 8, 413,
    8, 269, 8, 9, 4, 5, 4, 33, 84, 65, 4, 13, 4, 17, 4, 93, 52, 26, 40, 209, 56, 201, 112, 42, 96, 25, 12, 5, 4, 9, 4, 42, 113, 40,
    93, 100, 117, 28, 189, 112, 5, 42, 24, 21, 4, 41, 42, 21, 4, 165, 92, 13, 4, 33, 16, 42, 24, 93, 12, 5, 12, 201, 4, 5, 12, 9,
    8, 21, 8, 5, 4, 5, 96, 13, 8, 45, 28, 13, 48, 25, 8, 25, 8, 25, 36, 29, 4, 29, 4, 173, 4, 57, 24, 461, 52, 42, 24, 44689, 48,
    93, 16, 197, 33808, 1465, 8, 425, 152, 29, 48, 21, 20, 5, 4, 41, 4, 53, 4, 21, 4, 5, 4, 9, 4, 9, 4, 433, 132, 1453, 72, 257, 8,
    217, 160, 49, 464, 21, 4, 541, 76, 42, 28, 105, 24, 105, 44, 357, 12, 25, 8, 25, 8, 25, 8, 13, 140, 49, 4, 105, 4, 77, 4, 9, 4,
    61, 8, 57, 136, 493, 48, 182, 48, 230, 68, 10, 976, 117, 12, 197, 64, 110, 16, 129, 18, 36, 81, 6, 33, 6, 20, 153, 40, 121, 8,
    145, 16, 33, 4, 22, 168, 633, 8, 42, 24, 145, 16, 145, 16, 161, 32, 209, 48, 45, 4, 61, 4, 29, 4, 9, 4, 45, 4, 61, 4, 29, 4, 9,
    12, 209, 48, 1245, 36, 89, 40, 33, 96, 25, 4, 169, 4, 37, 276, 25, 8, 5, 4, 177, 4, 9, 12, 5, 8, 93, 8, 34, 93, 8, 30, 125, 32,
    38, 192, 77, 4, 9, 20, 22, 89, 26, 16, 105, 280, 225, 16, 10, 9, 66, 8, 186, 5, 60, 17, 4, 13, 4, 117, 40, 38, 92, 117, 10, 4,
    117, 14, 128, 33, 4, 113, 24, 22, 64, 217, 40, 89, 8, 34, 77, 20, 34, 73, 92, 30, 320, 293, 220, 205, 52, 205, 28, 26, 145, 48,
    42, 24, 42, 113, 36, 93, 872, 126, 4, 169, 24, 9, 64, 13, 236, 117, 42, 5, 32, 89, 44, 18, 108, 73, 184, 85, 30, 80, 93, 48,
    213, 104, 122, 4, 9, 8, 5, 52, 181, 128, 101, 28, 42, 36, 145, 60, 42, 16, 5, 8, 5, 32, 141, 12, 5, 48, 193, 56, 17, 44, 42, 5,
    4, 5, 16, 82, 44, 73, 4, 101, 76, 9, 252, 29, 4, 5, 4, 17, 4, 61, 4, 41, 28, 189, 68, 42, 44, 33, 8, 9, 8, 89, 4, 29, 4, 9, 4,
    21, 12, 5, 72, 5, 48, 21, 120, 41, 4, 5, 8, 5, 4, 153, 4, 5, 100, 5, 4, 5, 176, 213, 72, 17, 20, 42, 20, 13, 120, 193, 80, 9,
    4, 5, 32, 42, 664, 189, 164, 17, 144, 193, 80, 5, 44, 42, 152, 173, 52, 5, 28, 42, 24, 82, 112, 109, 84, 50, 16, 29, 740, 177,
    464, 257, 78, 48, 33, 8, 5, 8, 33, 4, 9, 4, 97, 60, 5, 4, 5, 56, 42, 280, 33, 8, 157, 64, 5, 4, 5, 112, 5, 40, 161, 28, 5, 84,
    5, 44, 185, 76, 5, 72, 293, 796, 133, 60, 42, 24, 37, 4, 149, 68, 5, 60, 118, 20, 121, 448, 29, 4, 9, 4, 153, 84, 5, 36, 42,
    24, 25, 4, 9, 4, 129, 56, 5, 28, 42, 1240, 77, 60, 5, 4, 53, 4, 137, 112, 42, 344, 5, 60, 86, 172, 3689, 408, 446, 68, 785,
    10544, 389, 60, 4289, 68, 25, 100, 15981, 20, 2333, 27364, 121, 72, 42, 6936, 2277, 28, 125, 4, 42, 24, 317, 4, 42, 24, 121,
    72, 193, 64, 17, 48, 42, 4, 30, 4, 85, 20, 77, 1728, 181, 12, 42, 792, 257, 94, 420, 301, 20, 5, 264, 53, 256, 9, 4, 5, 112,
    24545, 32, 4953, 164, 41, 35740, 17, 4, 29, 4, 9, 4, 1165, 60, 5, 116, 13, 8, 5, 56, 17, 32, 1585, 9232, 429, 20, 53, 12, 37,
    28, 41, 16728, 42, 5912, 82, 48, 82, 432, 102, 540, 341, 4, 285, 4, 9, 8, 5, 8, 9, 8, 17, 4, 49, 4, 5, 4, 29, 4, 261, 4, 17, 8,
    33, 4, 29, 4, 113, 4, 17, 4, 21, 4, 5, 12, 29, 4, 1361, 8, 101, 4, 101, 4, 125, 4, 101, 4, 125, 4, 101, 4, 125, 4, 101, 4, 125,
    4, 101, 4, 33, 8, 202, 7168, 125, 24, 25, 1044, 249, 584, 181, 40, 29, 8, 42, 16, 5, 1284, 121, 72, 177, 16, 42, 1880, 113, 16,
    42, 856, 121, 8, 5, 42, 1940, 29, 4, 17, 4, 9, 4, 61, 4, 789, 8, 38, 192, 273, 28, 5, 16, 42, 3164, 238, 4, 14, 4, 18, 304,
    182, 4, 62, 776, 17, 4, 109, 4, 9, 4, 5, 8, 5, 4, 41, 4, 17, 4, 5, 4, 5, 24, 5, 16, 5, 4, 5, 4, 5, 4, 13, 4, 9, 4, 5, 8, 5, 4,
    5, 4, 5, 4, 5, 4, 5, 4, 9, 4, 5, 8, 17, 4, 29, 4, 17, 4, 17, 4, 5, 4, 41, 4, 69, 20, 13, 4, 21, 4, 69, 2320, 54, 11148, 42,
    4120, 170881, 128, 16617, 24, 889, 8, 23049, 56, 29893, 60, 2489, 9864, 2169, 6024, 19757, 20, 16769, 3633472,
};
// clang-format on

character_class vocabulary_class_of(const char *at) {
    const int bytes = cf_utf8_bytes(at);
    uint32_t character = (unsigned char)*at & (bytes == 1 ? 0x7F : 0x7F >> bytes), run = 0;
    for (int i = 1; i < bytes; i++) character = character << 6 | ((unsigned char)at[i] & 0x3F);
    for (; character >= runs[run] / 4; run++) character -= runs[run] / 4;
    return (character_class)(runs[run] % 4);
}

static const char end_of_text[] = "<|endoftext|>";

static int by_bytes(const void *a, const void *b) {
    const word *x = a, *y = b;
    return x->length != y->length ? x->length - y->length : memcmp(x->bytes, y->bytes, (size_t)x->length);
}

// INT32_MAX: it is no word.
static int32_t token_of(const word *all, int64_t count, const char *bytes, int64_t length) {
    const word key = {.bytes = bytes, .length = (int)length};
    const word *found = bsearch(&key, all, (size_t)count, sizeof *all, by_bytes);
    return found ? found->token : INT32_MAX;
}

// Characters of one class from `at` on.
static const char *skip(const char *at, const char *end, character_class kind) {
    while (at < end && vocabulary_class_of(at) == kind) at += cf_utf8_bytes(at);
    return at;
}

// Where the first piece of a text ends that is encoded alone, GPT-2's pattern:
//     '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
static const char *piece_end(const char *text, const char *end) {
    static const char *const endings[] = {"'s", "'d", "'m", "'t", "'ll", "'ve", "'re"};
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++)
        if (strncmp(text, endings[i], strlen(endings[i])) == 0) return text + strlen(endings[i]);
    const char *at = text + (*text == ' ' && text + 1 < end);
    if (vocabulary_class_of(at) != BLANK) return skip(at, end, vocabulary_class_of(at));
    // Blanks, but the last one belongs to the word after it, or is alone.
    const char *last = text;
    for (at = text; at < end && vocabulary_class_of(at) == BLANK; at += cf_utf8_bytes(at)) last = at;
    return at == end || last == text ? at : last;
}

// Parts begin at part[0 … parts], which is the end; rank[i]: the token of parts i and i + 1 together.
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

// --- the option ---

int32_t *vocabulary_prompt(const options *o, const vocabulary *v, int64_t V, int64_t *count) {
    problem why;
    const bool file = *o->prompt == '@';
    int64_t bytes = *o->prompt ? (int64_t)strlen(o->prompt) : 1, at = 0, end_of = vocabulary_end_of_text(v);
    char *text = file ? input_read_all("--prompt", o->prompt + 1, PROMPT_MAX_BYTES, &bytes, &why) : strdup(o->prompt);
    if (!text && file) cf_die_together(*why.hint ? why.hint : "every rank must be able to read it", "%s", why.what);
    if (!text) cf_die(NULL, "out of memory for the prompt");
    int32_t *tokens = cf_host_alloc(bytes + o->sample_tokens, sizeof *tokens, "a sample");
    if (!*o->prompt) {
        *count = 1;
        tokens[0] = end_of >= 0 && end_of < V ? (int32_t)end_of : V > '\n' ? '\n' : 0;
        free(text);
        return tokens;
    }
    if (!v && V > vocabulary_size(NULL))
        cf_die_together("data/prepare.py --encoding gpt2 writes one beside the tokens; name them with --train or --val",
                        "--prompt: there is no tokenizer.bin for the model's %lld words beside --train, --val or --init-from",
                        (long long)V);
    while (v && at < bytes && cf_utf8_bytes(text + at)) at += cf_utf8_bytes(text + at);
    if (v && at < bytes)
        cf_die_together("convert it with iconv", "--prompt is not UTF-8: byte %lld is 0x%02x", (long long)at,
                        (unsigned char)text[at]);
    *count = vocabulary_encode(v, text, bytes, tokens);
    free(text);
    if (*count < 1 || *count > o->seq)
        cf_die_together("give another one, or raise --seq", "--prompt has %lld tokens; allowed is 1 to --seq %lld",
                        (long long)*count, (long long)o->seq);
    for (int64_t i = 0; i < *count; i++)
        if (tokens[i] >= V)
            cf_die_together("give another one, or the model's tokenizer.bin",
                            "--prompt: its token %lld is %d, but the model has %lld words", (long long)i, tokens[i], (long long)V);
    return tokens;
}
