// See resume.h. A manifest holds all options of the run it belongs to. Most may change when a run goes on: the mesh,
// how communication overlaps, what is watched. Those in `fixed` may not: what came out would be neither the old run
// nor a new one.
#include "resume.h"
#include "json.h"
#include <limits.h>
#include <stdlib.h>
#include <sys/random.h>

enum { OF_SHAPE = 6 }; // the first of them: of the model's weights
static const char *const fixed[] = {"layers",    "channels",     "heads",         "vocab",        "padded-vocab",
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

// --- facts -------------------------------------------------------------------------------------------------

static void add_number(cJSON *all, const char *name, int64_t value) {
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)value);
    manifest_add_option(all, name, text);
}

cJSON *resume_describe(const options *o, const run_facts *facts) {
    int rows = 0;
    const option_row *table = options_table(&rows);
    char text[PATH_MAX];
    cJSON *all = manifest_options();
    for (int i = 0; i < rows; i++) {
        if (table[i].type == OPTION_FLAG) continue;
        options_value(o, &table[i], text, sizeof text);
        manifest_add_option(all, table[i].name, text);
    }
    const tokens *t = facts->train;
    add_number(all, "positions", facts->shape->maxT);
    add_number(all, "padded-vocab", facts->shape->Vp);
    add_number(all, "train-tokens", t ? tokens_count(t) : 0);
    add_number(all, "train-samples", t ? tokens_samples(t) : 0);
    add_number(all, "train-blocks", t ? (int64_t)tokens_fingerprint(t) : 0);
    add_number(all, "train-hash", t ? (int64_t)tokens_hash(t) : 0);
    add_number(all, "skipped", facts->skipped);
    add_number(all, "watched", facts->watched);
    manifest_add_option(all, "version", facts->version);
    manifest_add_option(all, "run", facts->run);
    if (facts->plan) manifest_add_option(all, "found-plan", facts->plan);
    return all;
}

void resume_name(const manifest *m, char name[RUN_NAME]) {
    uint64_t number = 0;
    const char *old = m ? manifest_value(m, "run") : NULL;
    if (!old && getrandom(&number, sizeof number, 0) != sizeof number) cf_die(NULL, "no random numbers");
    if (old)
        snprintf(name, RUN_NAME, "%s", old);
    else
        snprintf(name, RUN_NAME, "%016llx", (unsigned long long)number);
}

int64_t resume_number(const manifest *m, const char *name, int64_t missing) {
    const char *text = manifest_value(m, name);
    char *end = NULL;
    long long value = text ? strtoll(text, &end, 10) : 0;
    return text && *text && !*end ? value : missing;
}

// --- comparison --------------------------------------------------------------------------------------------

// Without a schedule that falls towards --steps a run may be made longer or shorter.
static bool steps_matter(const options *o, const manifest *m) {
    const char *schedule = manifest_value(m, "schedule");
    bool constant = strcmp(o->schedule, "constant") == 0 && schedule && strcmp(schedule, o->schedule) == 0;
    bool ends_elsewhere = o->decay_steps > 0 && resume_number(m, "decay-steps", 0) != 0;
    return !constant && !ends_elsewhere;
}

// Appends "--lr 0.1 (the checkpoint: 0.2)", unless they are the same.
static void add_difference(const options *o, const manifest *m, const char *name, const char *now, char *text, size_t size) {
    char what[64];
    const char *then = manifest_value(m, name);
    snprintf(what, sizeof what, "--%s", name);
    for (size_t i = 0; i < sizeof in_words / sizeof *in_words; i++)
        if (strcmp(in_words[i][0], name) == 0) snprintf(what, sizeof what, "%s", in_words[i][1]);
    if (!then) then = "not recorded";
    if (strcmp(now, then) == 0) return;
    if (strcmp(name, "steps") == 0 && !steps_matter(o, m)) return;
    if (strcmp(name, "train-hash") == 0 && (strcmp(now, "0") == 0 || strcmp(then, "0") == 0))
        return; // who has not read all tokens does not know it
    size_t length = strlen(text);
    snprintf(text + length, size - length, "%s%s %s (the checkpoint: %s)", length ? ", " : "", what, now, then);
}

void resume_compare(const options *o, const run_facts *facts, const manifest *m) {
    char model[1024] = "", run[1024] = "";
    cJSON *mine = resume_describe(o, facts);
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
        add_difference(o, m, fixed[i], json_text(mine, fixed[i]), i < OF_SHAPE ? model : run, sizeof model);
    if (*model)
        cf_die_together("give the options of the checkpoint, or another --out",
                        "the checkpoint of step %lld in %s is of another model: %s", (long long)m->step, o->out, model);
    if (*run && !o->force)
        cf_die_together("give the options of the checkpoint; or --force to go on with the new ones; or another --out",
                        "the run in %s, saved at step %lld, would be changed by: %s", o->out, (long long)m->step, run);
    cJSON_Delete(mine);
}
