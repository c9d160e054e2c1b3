// See prompt.h. A prompt is short, so a word's pairs are looked at again after each union, and words are found by bisection.
#include "prompt.h"
#include "input.h"
#include "unicode.h"
#include <stdlib.h>

static const char end_of_text[] = "<|endoftext|>";

typedef struct word { // of the vocabulary
    const char *bytes;
    int length;
    int32_t token;
} word;

static int by_bytes(const void *a, const void *b) {
    const word *x = a, *y = b;
    return x->length != y->length ? x->length - y->length : memcmp(x->bytes, y->bytes, (size_t)x->length);
}

static word *sort_words(const vocabulary *v, int64_t *count) {
    word *all = malloc((size_t)vocabulary_size(v) * sizeof *all);
    if (!all) cf_die(NULL, "out of memory for the %lld words of the vocabulary", (long long)vocabulary_size(v));
    *count = 0;
    for (int64_t token = 0; token < vocabulary_size(v); token++) {
        word w = {.token = (int32_t)token};
        w.bytes = vocabulary_word(v, token, &w.length);
        if (token != vocabulary_end_of_text(v)) all[(*count)++] = w;
    }
    qsort(all, (size_t)*count, sizeof *all, by_bytes);
    return all;
}

// INT32_MAX: it is no word.
static int32_t token_of(const word *all, int64_t count, const char *bytes, int64_t length) {
    const word key = {.bytes = bytes, .length = (int)length};
    const word *found = bsearch(&key, all, (size_t)count, sizeof *all, by_bytes);
    return found ? found->token : INT32_MAX;
}

// Characters of one class from `at` on.
static const char *skip(const char *at, const char *end, unicode_class kind) {
    while (at < end && unicode_class_of(at) == kind) at += unicode_bytes(at);
    return at;
}

// Where the first piece of a text ends that is encoded alone, GPT-2's pattern:
//     '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
static const char *piece_end(const char *text, const char *end) {
    static const char *const endings[] = {"'s", "'d", "'m", "'t", "'ll", "'ve", "'re"};
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++)
        if (strncmp(text, endings[i], strlen(endings[i])) == 0) return text + strlen(endings[i]);
    const char *at = text + (*text == ' ' && text + 1 < end);
    if (unicode_class_of(at) != UNICODE_BLANK) return skip(at, end, unicode_class_of(at));
    // Blanks, but the last one belongs to the word after it, or is alone.
    const char *last = text;
    for (at = text; at < end && unicode_class_of(at) == UNICODE_BLANK; at += unicode_bytes(at)) last = at;
    return at == end || last == text ? at : last;
}

// Parts begin at part[0 … parts], which is the end; rank[i]: the token of parts i and i + 1 together.
static int64_t encode_piece(const word *all, int64_t count, const char *text, int64_t bytes, int32_t *tokens) {
    int64_t parts = bytes, *part = malloc((size_t)(bytes + 1) * sizeof *part);
    int32_t *rank = malloc((size_t)bytes * sizeof *rank);
    if (!part || !rank) cf_die(NULL, "out of memory for a word of %lld bytes", (long long)bytes);
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

int64_t prompt_encode(const vocabulary *words, const char *text, int64_t bytes, int32_t *tokens) {
    int64_t count = 0, size;
    for (int64_t i = 0; !words && i < bytes; i++) tokens[count++] = (unsigned char)text[i];
    if (!words) return count;
    word *all = sort_words(words, &size);
    for (const char *end = text + bytes; text < end;) {
        const char *special = vocabulary_end_of_text(words) >= 0 ? strstr(text, end_of_text) : NULL;
        const char *stop = special ? special : end;
        for (const char *next; text < stop; text = next) {
            next = piece_end(text, stop);
            count += encode_piece(all, size, text, next - text, tokens + count);
        }
        if (special) tokens[count++] = (int32_t)vocabulary_end_of_text(words), text += sizeof end_of_text - 1;
    }
    free(all);
    return count;
}

// --- the option ---

static char *text_of(const options *o, int64_t *bytes) {
    problem why;
    const bool file = *o->prompt == '@';
    char *text = file ? input_read_all("--prompt", o->prompt + 1, PROMPT_MAX_BYTES, bytes, &why) : strdup(o->prompt);
    if (!text && file) cf_die_together(*why.hint ? why.hint : "every rank must be able to read it", "%s", why.what);
    if (!text) cf_die(NULL, "out of memory for the prompt");
    if (!file) *bytes = (int64_t)strlen(text);
    return text;
}

int32_t *prompt_read(const options *o, const vocabulary *words, int64_t V, int64_t *count) {
    int64_t bytes = 1, at = 0, end_of = vocabulary_end_of_text(words);
    char *text = *o->prompt ? text_of(o, &bytes) : NULL;
    int32_t *tokens = calloc((size_t)(bytes + o->sample_tokens), sizeof *tokens);
    if (!tokens) cf_die(NULL, "out of memory for a sample of %lld tokens", (long long)o->sample_tokens);
    *count = 1;
    tokens[0] = end_of >= 0 && end_of < V ? (int32_t)end_of : V > '\n' ? '\n' : 0;
    if (!text) return tokens;
    if (!words && V > vocabulary_size(NULL))
        cf_die_together("data/prepare.py --encoding gpt2 writes one beside the tokens; name them with --train or --val",
                        "--prompt: there is no tokenizer.bin for the model's %lld words beside --train, --val or --init-from",
                        (long long)V);
    while (words && at < bytes && unicode_bytes(text + at)) at += unicode_bytes(text + at);
    if (words && at < bytes)
        cf_die_together("convert it with iconv", "--prompt is not UTF-8: byte %lld is 0x%02x", (long long)at,
                        (unsigned char)text[at]);
    *count = prompt_encode(words, text, bytes, tokens);
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
