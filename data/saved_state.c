// See saved_state.h. All runs of all files are sorted by tensor, layer and first element; a range is found by a
// search and then follows from one run to the next, whichever files they are in.
#include "saved_state.h"
#include "checkpoint.h"
#include "safetensors.h"
#include <stdlib.h>

enum { COLUMNS = sizeof(saved_run) / sizeof(int64_t) };
static const int64_t max_number = INT64_C(1) << 50; // of any field: sums of two are far from overflowing
static const char *const value_name[SAVED_KINDS] = {"weight", "m", "v"};

typedef struct located_run {
    saved_run run;
    int64_t file;
} located_run;

struct saved_state {
    int64_t files, runs;
    safetensors **file;                 // (files)
    const float *(*value)[SAVED_KINDS]; // (files)
    located_run *run;                   // (runs) sorted
};

// --- writing -----------------------------------------------------------------------------------------------

bool saved_state_write(const char *path, const saved_run *run, int64_t runs, const float *const *values,
                       int64_t elements, manifest_file *written, problem *why) {
    tensor_entry table[1 + SAVED_KINDS] = {
        {"runs", TENSOR_I64, 2, {runs, COLUMNS}}}; // largest elements first
    for (int kind = 0; kind < SAVED_KINDS; kind++)
        table[1 + kind] = (tensor_entry){value_name[kind], TENSOR_F32, 1, {elements}};
    safetensors_writer *writer = safetensors_create(path, table, 1 + SAVED_KINDS);
    safetensors_append(writer, run, runs * (int64_t)sizeof *run);
    for (int kind = 0; kind < SAVED_KINDS; kind++)
        safetensors_append(writer, values[kind], elements * (int64_t)sizeof *values[kind]);
    return safetensors_commit(writer, &written->bytes, &written->hash, why);
}

// --- opening -----------------------------------------------------------------------------------------------

static bool field_sound(int64_t value, int64_t least) {
    return value >= least && value <= max_number;
}

static bool run_sound(const saved_run *r, int64_t elements) {
    return field_sound(r->tensor, 0) && field_sound(r->layer, 0) && field_sound(r->whole, 0) &&
           field_sound(r->count, 1) && field_sound(r->at, 0) && r->at + r->count <= elements;
}

// NULL: there is no such tensor.
static const void *find_values(const safetensors *file, const char *name, tensor_type type, int dimensions,
                               int64_t *rows) {
    int64_t i = safetensors_find(file, name);
    const tensor_entry *entry = i < 0 ? NULL : safetensors_entry(file, i);
    if (!entry || entry->type != type || entry->dimensions != dimensions) return NULL;
    if (dimensions == 2 && entry->shape[1] != COLUMNS) return NULL;
    *rows = entry->shape[0];
    return safetensors_data(file, i);
}

static bool damaged(problem *why, const char *path, const char *what) {
    return problem_set(why, "use an earlier checkpoint", "%.1500s is not the state of a rank: %s", path,
                       what);
}

// The values of one file; its runs are appended to the others.
static bool take_file(saved_state *s, int64_t number, const char *path, problem *why) {
    int64_t runs = 0, elements = 0, more = 0;
    const saved_run *run = find_values(s->file[number], "runs", TENSOR_I64, 2, &runs);
    if (!run) return damaged(why, path, "no table of runs");
    for (int kind = 0; kind < SAVED_KINDS; kind++) {
        s->value[number][kind] = find_values(s->file[number], value_name[kind], TENSOR_F32, 1, &more);
        if (!s->value[number][kind]) return damaged(why, path, "weights or moments are missing");
        if (kind > 0 && more != elements) return damaged(why, path, "not as many moments as weights");
        elements = more;
    }
    located_run *grown = realloc(s->run, (size_t)(s->runs + runs + 1) * sizeof *grown);
    if (!grown) cf_die(NULL, "out of memory for %lld runs of %s", (long long)(s->runs + runs), path);
    s->run = grown;
    for (int64_t i = 0; i < runs; i++) {
        if (!run_sound(&run[i], elements)) return damaged(why, path, "a run outside of the file");
        s->run[s->runs++] = (located_run){run[i], number};
    }
    return true;
}

static int compare(int64_t a, int64_t b) {
    return (a > b) - (a < b);
}

static int by_place(const void *a, const void *b) {
    const saved_run *x = &((const located_run *)a)->run, *y = &((const located_run *)b)->run;
    int order = compare(x->tensor, y->tensor);
    if (order == 0) order = compare(x->layer, y->layer);
    return order ? order : compare(x->whole, y->whole);
}

static bool same_tensor(const saved_run *a, const saved_run *b) {
    return a->tensor == b->tensor && a->layer == b->layer;
}

static bool sort_runs(saved_state *s, const char *out, problem *why) {
    if (s->runs > 1) qsort(s->run, (size_t)s->runs, sizeof *s->run, by_place);
    for (int64_t i = 1; i < s->runs; i++) {
        const saved_run *before = &s->run[i - 1].run, *r = &s->run[i].run;
        if (same_tensor(before, r) && before->whole + before->count > r->whole)
            return damaged(why, out, "an element is there twice");
    }
    return true;
}

saved_state *saved_state_open(const char *out, const manifest *m, problem *why) {
    saved_state *s = calloc(1, sizeof *s);
    if (s) {
        s->file = calloc((size_t)m->ranks + 1, sizeof *s->file);
        s->value = calloc((size_t)m->ranks + 1, sizeof *s->value);
    }
    if (!s || !s->file || !s->value)
        cf_die(NULL, "out of memory for a checkpoint of %lld files", (long long)m->ranks);
    bool sound = true;
    for (; sound && s->files < m->ranks; s->files++) {
        char path[PATH_MAX];
        checkpoint_file_path(out, m->step, s->files, false, path);
        s->file[s->files] = safetensors_open(path, why);
        sound = s->file[s->files] && take_file(s, s->files, path, why);
    }
    if (sound && sort_runs(s, out, why)) return s;
    saved_state_close(s);
    return NULL;
}

void saved_state_close(saved_state *s) {
    if (!s) return;
    for (int64_t i = 0; i < s->files; i++)
        if (s->file[i]) safetensors_close(s->file[i]);
    free(s->file);
    free(s->value);
    free(s->run);
    free(s);
}

// --- reading -----------------------------------------------------------------------------------------------

// The last run that does not begin behind this place; -1: there is none.
static int64_t find_run(const saved_state *s, const saved_run *place) {
    int64_t low = -1, high = s->runs;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (by_place(&s->run[middle], &(located_run){*place, 0}) <= 0)
            low = middle;
        else
            high = middle;
    }
    return low;
}

bool saved_state_read(const saved_state *s, int kind, int64_t tensor, int64_t layer, int64_t first,
                      int64_t count, float *out, problem *why) {
    saved_run place = {tensor, layer, first, count, 0};
    int64_t done = 0;
    for (int64_t i = find_run(s, &place); done < count; i++) {
        const located_run *l = i < 0 || i >= s->runs ? NULL : &s->run[i];
        int64_t inside = l ? first + done - l->run.whole : -1;
        if (!l || !same_tensor(&l->run, &place) || inside < 0 || inside >= l->run.count)
            return problem_set(why, "was it saved by another version of this program?",
                               "element %lld of layer %lld of tensor %lld is not in the checkpoint",
                               (long long)(first + done), (long long)layer, (long long)tensor);
        int64_t n = l->run.count - inside < count - done ? l->run.count - inside : count - done;
        memcpy(out + done, s->value[l->file][kind] + l->run.at + inside, (size_t)n * sizeof *out);
        done += n;
    }
    return true;
}
