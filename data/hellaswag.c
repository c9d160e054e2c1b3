// See hellaswag.h. The file is a few megabytes and stays in memory; rows point into it.
#include "hellaswag.h"
#define XXH_INLINE_ALL
#include <xxhash.h>

enum { MAGIC = 20240522, EXAMPLE = 65535, MAX_EXAMPLES = 65535, MAX_BYTES = 1 << 30 };

static const char *const how_to_make = "make it with llm.c's dev/data/hellaswag.py, or copy it again";

// Dies unless the model has all tokens of a text.
static void check_part(const token_part *part, const char *path, int64_t index, int64_t V) {
    for (int64_t i = 0; i < part->count; i++)
        if (part->token[i] >= V)
            cf_die_together("its tokens are GPT-2's: give it to a model with that vocabulary",
                            "--hellaswag %s: a token of example %ld is %d, but the vocabulary has %ld", path, index, part->token[i],
                            V);
}

// The example that begins at number `at`. Returns its numbers.
static int64_t read_example(hellaswag *h, const char *path, int64_t index, int64_t at, int64_t numbers, int64_t T, int64_t V) {
    enum { FIELDS = 5 };
    hellaswag_example *e = &h->all[index];
    const uint16_t *n = h->number + at, *next = n + FIELDS;
    const int64_t count = numbers - at < FIELDS ? 0 : n[1] / 2;
    bool sound = count >= FIELDS && count <= numbers - at && n[1] % 2 == 0 && n[0] == EXAMPLE && n[2] == index &&
                 n[3] < HELLASWAG_ENDINGS && n[4] == HELLASWAG_ENDINGS;
    for (int part = 0; sound && part <= HELLASWAG_ENDINGS; part++) {
        token_part *p = part == 0 ? &e->context : &e->ending[part - 1];
        *p = (token_part){next + 1, next < n + count ? *next : 0};
        sound = p->count > 0 && p->count < n + count - next;
        next += 1 + p->count;
    }
    if (!sound || next != n + count)
        cf_die_together(how_to_make, "--hellaswag %s: example %ld of %ld, at byte %ld, is damaged or cut short", path, index,
                        h->count, INPUT_HEADER_BYTES + 2 * at);
    e->right = n[3];
    check_part(&e->context, path, index, V);
    for (int i = 0; i < HELLASWAG_ENDINGS; i++) {
        const int64_t length = e->context.count + e->ending[i].count - 1;
        check_part(&e->ending[i], path, index, V);
        if (length > T)
            cf_die_together("raise --seq", "--hellaswag %s: example %ld takes %ld tokens, more than --seq %ld", path, index, length,
                            T);
        if (length > h->longest) h->longest = length;
    }
    return count;
}

hellaswag *hellaswag_open(const char *path, int64_t T, int64_t V) {
    static const header_field field[] = {{"magic", MAGIC, MAGIC}, {"version", 1, 1}, {"number of examples", 1, MAX_EXAMPLES}};
    problem why;
    int64_t size = 0, at = 0;
    hellaswag *h = cf_host_alloc(1, sizeof *h, path);
    h->bytes = input_read_all("--hellaswag file", path, MAX_BYTES, &size, &why);
    if (!h->bytes) cf_die_together(problem_hint(&why, "every rank must be able to read it"), "%s", why.what);
    const int32_t *header = (const int32_t *)h->bytes;
    if (!input_check_header("--hellaswag file", path, size, field, 3, header, &why)) cf_die_together(how_to_make, "%s", why.what);
    h->hash = XXH64(h->bytes, (size_t)size, 0);
    h->number = (const uint16_t *)(h->bytes + INPUT_HEADER_BYTES);
    h->count = header[2];
    h->all = cf_host_alloc(h->count, sizeof *h->all, path);
    for (int64_t i = 0; i < h->count; i++) at += read_example(h, path, i, at, (size - INPUT_HEADER_BYTES) / 2, T, V);
    if (INPUT_HEADER_BYTES + 2 * at != size)
        cf_die_together(how_to_make, "--hellaswag %s: its %ld examples end at byte %ld, but it has %ld", path, h->count,
                        INPUT_HEADER_BYTES + 2 * at, size);
    return h;
}

void hellaswag_close(hellaswag *h) {
    if (!h) return;
    free(h->all);
    free(h->bytes);
    free(h);
}

void hellaswag_load(void *all, int64_t row, int64_t b, int64_t B, int32_t *inputs, int32_t *targets, int64_t *first, int64_t *end) {
    const hellaswag_example *e = &((const hellaswag *)all)->all[row / HELLASWAG_ENDINGS];
    const token_part context = e->context, ending = e->ending[row % HELLASWAG_ENDINGS];
    *first = context.count - 1, *end = *first + ending.count;
    for (int64_t t = 0; t < *end; t++) {
        inputs[t * B + b] = t < context.count ? context.token[t] : ending.token[t - context.count];
        targets[t * B + b] = t < *first ? 0 : ending.token[t - *first];
    }
}

int64_t hellaswag_correct(const hellaswag *h, const double *losses) {
    int64_t correct = 0;
    for (int64_t i = 0; i < h->count; i++) {
        double mean[HELLASWAG_ENDINGS];
        int answer = 0;
        for (int e = 0; e < HELLASWAG_ENDINGS; e++) {
            mean[e] = losses[HELLASWAG_ENDINGS * i + e] / (double)h->all[i].ending[e].count;
            if (mean[e] < mean[answer]) answer = e;
        }
        correct += answer == h->all[i].right;
    }
    return correct;
}
