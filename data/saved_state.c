// See checkpoint.h. The numbers of runs and elements determine the whole header and the size of the file. A reader takes these two
// numbers from the header, makes the header that they determine, and compares both: a difference is damage.
//
// The runs of all files are sorted by tensor, layer and first element. A range is found by bisection and continues from one run to
// the next, whichever files they are in.
#include "checkpoint.h"
#include "atomic_file.h"
#define XXH_INLINE_ALL
#include <xxhash.h>

enum { LENGTH_BYTES = 8, ALIGNMENT = 64, HEADER_MAX = 512, RUN_BYTES = sizeof(state_run) };
static const int64_t max_number = INT64_C(1) << 50; // in a run's field: a sum of two does not overflow
static const int64_t max_count = 1000000000000;     // of runs and elements: the size of the file does not overflow

// The first bytes of the file. Returns how many.
static int64_t make_header(char header[HEADER_MAX], int64_t runs, int64_t elements, const state_kinds *kinds) {
    char *text = header + LENGTH_BYTES;
    int64_t end = runs * RUN_BYTES;
    int length = snprintf(text, HEADER_MAX - LENGTH_BYTES,
                          "{\"runs\":{\"dtype\":\"I64\",\"shape\":[%ld,5],\"data_offsets\":[0,%ld]}", runs, end);
    for (int kind = 0; kind < kinds->count; kind++) {
        int64_t begin = end;
        end += elements * (int64_t)sizeof(float);
        length += snprintf(text + length, (size_t)(HEADER_MAX - LENGTH_BYTES - length),
                           ",\"%s\":{\"dtype\":\"F32\",\"shape\":[%ld],\"data_offsets\":[%ld,%ld]}%s", kinds->name[kind], elements,
                           begin, end, kind == kinds->count - 1 ? "}" : "");
    }
    int padded = (LENGTH_BYTES + length + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT - LENGTH_BYTES;
    memset(text + length, ' ', (size_t)(padded - length));
    for (int i = 0; i < LENGTH_BYTES; i++) header[i] = (char)((uint64_t)padded >> 8 * i);
    return LENGTH_BYTES + padded;
}

bool saved_state_write(const char *path, const rank_state *state, file_hash *written, problem *why) {
    char header[HEADER_MAX];
    atomic_file file;
    XXH64_state_t hash;
    const int64_t header_bytes = make_header(header, state->runs, state->elements, &state->kinds),
                  runs_bytes = state->runs * RUN_BYTES, value_bytes = state->elements * (int64_t)sizeof(float);
    written->bytes = header_bytes + runs_bytes + state->kinds.count * value_bytes;
    XXH64_reset(&hash, 0);
    bool ok = atomic_file_create(&file, path, written->bytes, why);
    file.hash = &hash;
    ok = ok && atomic_file_append(&file, header, header_bytes, why) && atomic_file_append(&file, state->run, runs_bytes, why);
    for (int kind = 0; kind < state->kinds.count; kind++)
        ok = ok && atomic_file_append(&file, state->value[kind], value_bytes, why);
    written->hash = XXH64_digest(&hash);
    ok = ok && atomic_file_commit(&file, why);
    atomic_file_abandon(&file);
    return ok;
}

typedef struct part { // one file of the state
    input in;
    int64_t runs, elements, runs_at, values_at; // at: offset of the first byte
} part;

typedef struct located_run {
    state_run run;
    const part *part;
} located_run;

struct saved_state {
    int64_t parts, runs;
    part *part;       // (parts)
    located_run *run; // (runs) sorted
};

static bool damaged(problem *why, const char *path, const char *what) {
    return problem_set(why, "use an earlier checkpoint", "%.1500s is not the state of a rank: %s", path, what);
}

static bool read_header(part *p, const state_kinds *kinds, problem *why) {
    char found[HEADER_MAX] = "", right[HEADER_MAX], promise[64];
    const int64_t most = p->in.bytes < HEADER_MAX - 1 ? p->in.bytes : HEADER_MAX - 1;
    if (!input_read(&p->in, 0, found, most, why)) return false;
    // A number with more digits is wrong, and one with as many does not overflow.
    if (most < LENGTH_BYTES ||
        sscanf(found + LENGTH_BYTES,
               "{\"runs\":{\"dtype\":\"I64\",\"shape\":[%13ld,5],\"data_offsets\":[0,%*15[0-9]]},\"weight\":{\"dtype\":\"F32\","
               "\"shape\":[%13ld",
               &p->runs, &p->elements) != 2 ||
        p->runs < 0 || p->runs > max_count || p->elements < 0 || p->elements > max_count)
        return damaged(why, p->in.path, "its header does not say how many runs and elements it has");
    p->runs_at = make_header(right, p->runs, p->elements, kinds);
    p->values_at = p->runs_at + p->runs * RUN_BYTES;
    if (p->runs_at > most || memcmp(found, right, (size_t)p->runs_at) != 0)
        return damaged(why, p->in.path, "its header does not fit its numbers of runs and elements");
    snprintf(promise, sizeof promise, "%ld runs of %ld elements", p->runs, p->elements);
    return input_check_size(&p->in, p->values_at + kinds->count * p->elements * (int64_t)sizeof(float), promise, why);
}

// Appends a file's runs to the others.
static bool read_runs(saved_state *s, const part *p, problem *why) {
    state_run *run = cf_host_alloc(p->runs, sizeof *run, "runs of elements");
    bool ok = input_read(&p->in, p->runs_at, run, p->runs * RUN_BYTES, why);
    for (int64_t i = 0; ok && i < p->runs; i++) {
        const state_run *r = &run[i];
        const int64_t field[] = {r->tensor, r->layer, r->whole, r->count, r->at};
        bool sound = r->count > 0;
        for (int j = 0; j < 5; j++) sound &= field[j] >= 0 && field[j] <= max_number;
        ok = (sound && r->at + r->count <= p->elements) || damaged(why, p->in.path, "a run outside of the file");
        s->run[s->runs++] = (located_run){*r, p};
    }
    free(run);
    return ok;
}

// Compares the first three numbers of two runs: tensor, layer and first element.
static int by_place(const void *a, const void *b) {
    const int64_t *x = a, *y = b;
    for (int i = 0; i < 3; i++)
        if (x[i] != y[i]) return x[i] < y[i] ? -1 : 1;
    return 0;
}

static bool same_tensor(const state_run *a, const state_run *b) {
    return a->tensor == b->tensor && a->layer == b->layer;
}

saved_state *saved_state_open(const char *out, const manifest *m, state_kinds kinds, problem *why) {
    saved_state *s = cf_host_alloc(1, sizeof *s, "a checkpoint");
    int64_t runs = 0;
    bool ok = true;
    s->part = cf_host_alloc(m->ranks, sizeof *s->part, "a checkpoint");
    for (; ok && s->parts < m->ranks; s->parts++) {
        char path[PATH_MAX];
        part *p = &s->part[s->parts];
        checkpoint_file_path(out, m->step, s->parts, false, path);
        ok = input_open(&p->in, "checkpoint file", path, why) && read_header(p, &kinds, why);
        runs += ok ? p->runs : 0;
    }
    s->run = cf_host_alloc(runs, sizeof *s->run, "runs of elements");
    for (int64_t i = 0; ok && i < s->parts; i++) ok = read_runs(s, &s->part[i], why);
    if (ok && s->runs > 1) qsort(s->run, (size_t)s->runs, sizeof *s->run, by_place);
    for (int64_t i = 1; ok && i < s->runs; i++) {
        const state_run *before = &s->run[i - 1].run, *r = &s->run[i].run;
        if (same_tensor(before, r) && before->whole + before->count > r->whole) ok = damaged(why, out, "an element appears twice");
    }
    if (ok) return s;
    saved_state_close(s);
    return NULL;
}

void saved_state_close(saved_state *s) {
    if (!s) return;
    for (int64_t i = 0; i < s->parts; i++) input_close(&s->part[i].in);
    free(s->part);
    free(s->run);
    free(s);
}

bool saved_state_read(const saved_state *s, int kind, int64_t tensor, int64_t layer, int64_t first, int64_t count, float *out,
                      problem *why) {
    const state_run place = {tensor, layer, first, count, 0};
    int64_t done = 0, i = -1; // the last run that begins at this place or before; -1: there is none
    for (int64_t high = s->runs; high - i > 1;) {
        const int64_t middle = i + (high - i) / 2;
        *(by_place(&s->run[middle], &place) <= 0 ? &i : &high) = middle;
    }
    for (; done < count; i++) {
        const located_run *l = i < 0 || i >= s->runs ? NULL : &s->run[i];
        const int64_t inside = l ? first + done - l->run.whole : -1;
        if (!l || !same_tensor(&l->run, &place) || inside < 0 || inside >= l->run.count)
            return problem_set(why, "was it saved by another version of this program?",
                               "element %ld of layer %ld of tensor %ld is not in the checkpoint of %s", first + done, layer, tensor,
                               s->part->in.path);
        const int64_t n = l->run.count - inside < count - done ? l->run.count - inside : count - done,
                      element = kind * l->part->elements + l->run.at + inside, size = sizeof(float);
        if (!input_read(&l->part->in, l->part->values_at + element * size, out + done, n * size, why)) return false;
        done += n;
    }
    return true;
}
