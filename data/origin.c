// See origin.h.
#include "origin.h"
#include "../commfuse/die.h"
#include "durable.h"
#include "json.h"
#include <errno.h>
#include <stdlib.h>
#include <sys/random.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

// Beside the tokens, or else beside the model file.
vocabulary *origin_words(const options *o) {
    char *first = tokens_first_file(*o->train ? o->train : o->val);
    vocabulary *words = vocabulary_beside(first);
    free(first);
    return words ? words : vocabulary_beside(o->init_from);
}

tokens *origin_tokens(const options *o, const char *option, const char *pattern, int64_t V, bool root) {
    if (!*pattern) return NULL;
    tokens *data = tokens_open(pattern, o->seq);
    if (o->verify_data && root) printf("verify    --%s: all %.3f GB are read and hashed\n", option, 2e-9 * (double)data->count);
    fflush(stdout);
    if (o->verify_data) tokens_verify(data);
    tokens_check(data, V);
    return data;
}

// --- what a checkpoint says of its run ---

// A manifest holds all options of its run. Most may change when the run goes on: the mesh, how communication overlaps, what is
// watched. These may not: what came out would be neither the old run nor a new one.
enum { OF_SHAPE = 6 }; // the first of them: of the model's weights
static const char *const must_stay[] = {"layers",    "channels",     "heads",         "vocab",        "padded-vocab",
                                        "positions", "seq",          "batch",         "lr",           "min-lr",
                                        "warmup",    "schedule",     "decay-steps",   "weight-decay", "beta1",
                                        "beta2",     "eps",          "clip",          "seed",         "dtype",
                                        "steps",     "train-tokens", "train-samples", "train-blocks", "train-hash"};
static const char *const in_words[][2] = {{"padded-vocab", "rows of the vocabulary with padding"},
                                          {"positions", "--seq, the model's positions"},
                                          {"train-tokens", "tokens of --train"},
                                          {"train-samples", "samples of --train"},
                                          {"train-blocks", "content of --train"},
                                          {"train-hash", "content of --train, by --verify-data"}};

cJSON *origin_describe(const options *o, const run_facts *facts) {
    char text[PATH_MAX];
    cJSON *all = cJSON_CreateObject();
    for (const option_row *row = options_table; row < options_table + OPTIONS; row++) {
        if (row->type == OPTION_FLAG) continue;
        options_value(o, row, text, sizeof text);
        manifest_add(all, row->name, "%s", text);
    }
    const tokens *t = facts->train;
    manifest_add(all, "positions", "%lld", (long long)facts->shape->maxT);
    manifest_add(all, "padded-vocab", "%lld", (long long)facts->shape->Vp);
    manifest_add(all, "train-tokens", "%lld", t ? (long long)t->count : 0);
    manifest_add(all, "train-samples", "%lld", t ? (long long)t->samples : 0);
    manifest_add(all, "train-blocks", "%lld", t ? (long long)t->fingerprint : 0);
    manifest_add(all, "train-hash", "%lld", t ? (long long)t->hash : 0);
    manifest_add(all, "skipped", "%lld", (long long)facts->skipped);
    manifest_add(all, "watched", "%d", facts->watched);
    manifest_add(all, "version", "%s", facts->version);
    manifest_add(all, "run", "%s", facts->run);
    if (facts->plan) manifest_add(all, "found-plan", "%s", facts->plan);
    return all;
}

void origin_name(const manifest *m, char name[RUN_NAME]) {
    uint64_t number = 0;
    const char *old = m ? manifest_value(m, "run") : NULL;
    if (!old && getrandom(&number, sizeof number, 0) != sizeof number) cf_die(NULL, "no random numbers");
    if (old)
        snprintf(name, RUN_NAME, "%s", old);
    else
        snprintf(name, RUN_NAME, "%016llx", (unsigned long long)number);
}

int64_t origin_number(const manifest *m, const char *name, int64_t missing) {
    const char *text = manifest_value(m, name);
    char *end = NULL;
    long long value = text ? strtoll(text, &end, 10) : 0;
    return text && *text && !*end ? value : missing;
}

void origin_compare_run(const options *o, const run_facts *facts, const manifest *m) {
    char text[2][1024] = {"", ""}, *model = text[0], *run = text[1]; // "--lr 0.1 (the checkpoint: 0.2), …"
    cJSON *mine = origin_describe(o, facts);
    // Without a schedule that falls towards --steps a run may be made longer or shorter.
    const char *schedule = manifest_value(m, "schedule");
    const bool constant = strcmp(o->schedule, "constant") == 0 && schedule && strcmp(schedule, o->schedule) == 0,
               ends_elsewhere = o->decay_steps > 0 && origin_number(m, "decay-steps", 0) != 0;
    for (int i = 0; i < (int)(sizeof must_stay / sizeof *must_stay); i++) {
        const char *name = must_stay[i], *now = json_text(mine, name), *then = manifest_value(m, name), *words = NULL;
        char *to = i < OF_SHAPE ? model : run;
        const size_t length = strlen(to);
        if (!then) then = "not recorded";
        if (strcmp(now, then) == 0 || (strcmp(name, "steps") == 0 && (constant || ends_elsewhere))) continue;
        if (strcmp(name, "train-hash") == 0 && (strcmp(now, "0") == 0 || strcmp(then, "0") == 0))
            continue; // who has not read all tokens does not know it
        for (size_t j = 0; j < sizeof in_words / sizeof *in_words; j++)
            if (strcmp(in_words[j][0], name) == 0) words = in_words[j][1];
        snprintf(to + length, sizeof *text - length, "%s%s%s %s (the checkpoint: %s)", length ? ", " : "", words ? "" : "--",
                 words ? words : name, now, then);
    }
    if (*model)
        cf_die_together("give the options of the checkpoint, or another --out",
                        "the checkpoint of step %lld in %s is of another model: %s", (long long)m->step, o->out, model);
    if (*run && !o->force)
        cf_die_together("give the options of the checkpoint; or --force to go on with the new ones; or another --out",
                        "the run in %s, saved at step %lld, would be changed by: %s", o->out, (long long)m->step, run);
    cJSON_Delete(mine);
}

// --- the model's shape ---

static gpt_shape shape_of_file(options *o, model_file **start) {
    const char *fixed[] = {"model", "layers", "channels", "heads", "vocab"};
    *start = model_file_open(o->init_from);
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
        if (options_given(o, fixed[i]))
            cf_die_together("leave that option away", "--%s is set by the model file %s", fixed[i], o->init_from);
    gpt_shape s = (*start)->shape;
    if (!options_given(o, "seq") && o->seq > s.maxT) o->seq = s.maxT;
    return s;
}

static gpt_shape shape_in(const manifest *m, const char *out) {
    gpt_shape s = {.maxT = origin_number(m, "positions", 0),
                   .V = origin_number(m, "vocab", 0),
                   .Vp = origin_number(m, "padded-vocab", 0),
                   .L = origin_number(m, "layers", 0),
                   .H = origin_number(m, "heads", 0),
                   .C = origin_number(m, "channels", 0)};
    model_shape_check(&s, "checkpoint in", out);
    return s;
}

gpt_shape origin_shape_to_export(options *o) {
    problem why = {"", ""};
    manifest *m =
        o->export_step > 0 ? checkpoint_manifest(o->out, o->export_step, &why) : checkpoint_latest(o->out, INT64_MAX, &why);
    if (!m)
        cf_die_together("ls it; checkpoints are its directories step_*", "no checkpoint to export in %s%s%s", o->out,
                        *why.what ? ": " : "", why.what);
    gpt_shape s = shape_in(m, o->out);
    o->export_step = m->step;
    o->seq = o->tp < s.maxT ? o->tp : s.maxT;
    o->micro_batch = 1; // nothing is computed: the least there can be
    manifest_free(m);
    return s;
}

// A checkpoint has all that a run goes on with: what is not given is as it is there.
static gpt_shape shape_of_options(options *o, const vocabulary *words, const gpt_shape *saved) {
    gpt_shape s = saved->L > 0 && !options_given(o, "model") ? *saved : params_named(o->model);
    if (o->layers > 0) s.L = o->layers;
    if (o->channels > 0) s.C = o->channels;
    if (o->heads > 0) s.H = o->heads;
    s.V = o->vocab > 0 ? o->vocab : saved->L > 0 ? saved->V : vocabulary_size(words);
    s.Vp = (s.V + VOCABULARY_PADDING - 1) / VOCABULARY_PADDING * VOCABULARY_PADDING;
    if (s.V == saved->V) s.Vp = saved->Vp;
    if (saved->L > 0 && !options_given(o, "seq") && o->seq > saved->maxT) o->seq = saved->maxT;
    s.maxT = saved->L > 0 ? saved->maxT : o->seq;
    return s;
}

// Does every rank see the model file? Rank 0 says what shape the checkpoint in --out has; L = 0: there is none.
gpt_shape origin_shape(options *o, const vocabulary *words, cf_transport *transport, model_file **start) {
    problem skipped;
    gpt_shape mine = {.L = 0};
    manifest *m = transport->rank == 0 && *o->out ? checkpoint_latest(o->out, INT64_MAX, &skipped) : NULL;
    if (m) mine = shape_in(m, o->out);
    manifest_free(m);
    gpt_shape *all = cf_of_all(transport, &mine, sizeof mine);
    const gpt_shape saved = all[0];
    free(all);
    const bool readable = cf_least_host(transport, access(o->init_from, R_OK) == 0);
    return *o->init_from && (readable || saved.L == 0) ? shape_of_file(o, start) : shape_of_options(o, words, &saved);
}

// --- output ---

checkpoint_store *origin_open_output(const options *o) {
    const char *out = o->out, *hint = "choose another --out DIR that can be written";
    checkpoint_store *store = NULL;
    durable_file file;
    problem why;
    if (strlen(out) + sizeof "/" ORIGIN_MODEL > PATH_MAX) cf_die("choose a shorter --out DIR", "--out is too long");
    if (*out && !(store = checkpoint_store_open(out, &why))) cf_die(*why.hint ? why.hint : hint, "--out: %s", why.what);
    if (*out && access(out, W_OK) != 0) cf_die(hint, "--out %s cannot be written: %s", out, strerror(errno));
    if (!*o->trace) return store;
    if (!durable_create(&file, o->trace, -1, &why)) cf_die("choose another --trace FILE", "--trace: %s", why.what);
    durable_abandon(&file); // a run that goes on after its steps leaves it as it is
    return store;
}

// --- what ranks must have in common ---

static int64_t print_of(const tokens *data) {
    return !data ? 0 : (int64_t)(data->hash ? data->hash : data->fingerprint);
}

// Each rank has opened what is on its own host. Ranks of a replica share each sample and the weights, replicas share out the
// epoch: on other files the run would go on, and learn nonsense.
void origin_compare(const options *o, cf_transport *transport, const tokens *train, const tokens *val, int64_t V,
                    const model_file *start, const hellaswag *questions, const int32_t *prompt, int64_t given) {
    static const char *const fact[] = {"samples of --train",       "the fingerprint of --train", "samples of --val",
                                       "the fingerprint of --val", "words of the vocabulary",    "the fingerprint of --init-from",
                                       "the hash of --hellaswag",  "the hash of --prompt"};
    enum { FACTS = sizeof fact / sizeof *fact };
    const int64_t mine[FACTS] = {train ? train->samples : 0,
                                 print_of(train),
                                 val ? val->samples : 0,
                                 print_of(val),
                                 V,
                                 start ? (int64_t)model_file_fingerprint(start, o->verify_data) : 0,
                                 questions ? (int64_t)questions->hash : 0,
                                 (int64_t)XXH64(prompt, (size_t)given * sizeof *prompt, 0)};
    int64_t *all = cf_of_all(transport, mine, sizeof mine);
    for (int rank = 1; rank < transport->size; rank++)
        for (int i = 0; i < FACTS; i++)
            if (all[rank * FACTS + i] != all[i])
                cf_die_together("give every host the same files; compare: ls -l, sha256sum",
                                "rank %d has other data than rank 0: %s: %lld, on rank 0 %lld", rank, fact[i],
                                (long long)all[rank * FACTS + i], (long long)all[i]);
    free(all);
    if (!*o->out) return;
    // Rank 0 had opened it before it gave the facts above: its lock is a file of this moment, and whoever reads the same there
    // has the same directory.
    const uint64_t mark = checkpoint_store_mark(o->out);
    uint64_t *marks = cf_of_all(transport, &mark, sizeof mark);
    for (int rank = 1; rank < transport->size; rank++)
        if (marks[rank] == 0 || marks[rank] != marks[0])
            cf_die_together("give --out a directory of a file system that all hosts share, where all may write",
                            "rank %d cannot save to --out %s: it %s", rank, o->out,
                            marks[rank] == 0 ? "may not write there, or has no such directory"
                                             : "has another directory of that name than rank 0");
    free(marks);
}

// --- checkpoints ---

static void warn(const char *what, const char *which, const char *then) {
    fflush(stdout);
    fprintf(stderr, "warning: rank %d: %s%s%s\n", cf_die_rank(), what, which, then);
    fflush(stderr);
}

// The newest sound one of a step below `below`. Rank 0 looks; the others take its word and read the same manifest. It also
// learns whether any was passed over.
static manifest *find(const options *o, cf_transport *transport, int64_t below, bool *passed_over) {
    for (;;) {
        problem why = {.what = ""};
        manifest *m = transport->rank == 0 ? checkpoint_latest(o->out, below, &why) : NULL;
        if (*why.what) {
            warn("passed over a checkpoint: ", why.what, "");
            *passed_over = true;
        }
        below = cf_root_host(transport, m ? m->step : -1);
        if (below < 0) return NULL;
        if (!m) m = checkpoint_manifest(o->out, below, &why);
        if (!m) cf_die("do all hosts share --out?", "rank 0 has found a checkpoint of step %lld: %s", (long long)below, why.what);
        bool sound = true;
        for (int64_t file = transport->rank; file < m->ranks; file += transport->size) {
            if (checkpoint_verify(o->out, m, file, &why)) continue;
            sound = false;
            warn("passed over a checkpoint: ", why.what, "");
        }
        if (cf_least_host(transport, sound)) return m;
        *passed_over = transport->rank == 0;
        manifest_free(m);
    }
}

manifest *origin_checkpoint(const options *o, const run_facts *facts, cf_transport *transport, checkpoint_store *store,
                            const model_file *start) {
    bool passed_over = false;
    problem why;
    manifest *m = *o->out ? find(o, transport, INT64_MAX, &passed_over) : NULL;
    if (!m && passed_over && !o->force)
        cf_die("bring one back from a copy; or choose another --out; or begin anew beside them with --force",
               "none of the checkpoints in %s is sound", o->out);
    if (!m && passed_over) warn("none of the checkpoints in ", o->out, " is sound: a run begins anew there");
    if (m && strcmp(o->resume, "no") == 0)
        cf_die_together("choose another --out, or leave --resume away to go on",
                        "--resume no, but %s holds a checkpoint of step %lld", o->out, (long long)m->step);
    if (m) origin_compare_run(o, facts, m);
    if (m && m->step > o->steps)
        cf_die_together("raise --steps", "the run in %s has taken %lld steps already, more than --steps %lld", o->out,
                        (long long)m->step, (long long)o->steps);
    if (!m && *o->init_from && !start)
        cf_die_together("bring it back, or choose another --out", "--init-from %s is not to be read on every host", o->init_from);
    if (passed_over && !checkpoint_set_aside(store, m ? m->step : -1, &why)) cf_die(why.hint, "%s", why.what);
    return m;
}

// The newest, perhaps, and a run may go on there: what rank 0 has seen counts.
manifest *origin_checkpoint_to_export(options *o, cf_transport *transport) {
    bool passed_over = false;
    o->export_step = cf_root_host(transport, o->export_step);
    manifest *m = find(o, transport, o->export_step + 1, &passed_over);
    if (!m || m->step != o->export_step)
        cf_die_together("choose another with --export-step", "the checkpoint of step %lld in %s cannot be exported",
                        (long long)o->export_step, o->out);
    return m;
}

saved_state *origin_open_state(const options *o, const manifest *m) {
    problem why;
    saved_state *s = saved_state_open(o->out, m, &why);
    if (!s) cf_die(why.hint, "%s", why.what);
    return s;
}

void origin_read_state(void *state, state_kind kind, int tensor, int64_t layer, int64_t first, int64_t count, float *out) {
    problem why;
    if (!saved_state_read((const saved_state *)state, kind, tensor, layer, first, count, out, &why))
        cf_die(why.hint, "this checkpoint is not that of this model: %s", why.what);
}
