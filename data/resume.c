// See resume.h. A manifest holds all options of the run it belongs to. Most may change when a run goes on: the mesh,
// how communication overlaps, what is watched. Those in `fixed` may not, since what comes out would be neither the old run
// nor a new one.
#include "resume.h"
#include "checkpoint.h"
#include "json.h"
#include <stdlib.h>
#include <sys/random.h>

static const struct {
    const char *name;
    bool shape;           // of the model's weights
    const char *in_words; // what is no option of that name
    const char *before;   // what it was in runs from before it was recorded; "": unknown
} fixed[] = {{"layers", true, NULL, NULL},
             {"channels", true, NULL, NULL},
             {"heads", true, NULL, NULL},
             {"vocab", true, NULL, NULL},
             {"padded-vocab", true, "rows of the vocabulary with padding", NULL},
             {"positions", true, "--seq, the model's positions", NULL},
             {"seq", false, NULL, NULL},
             {"batch", false, NULL, NULL},
             {"lr", false, NULL, NULL},
             {"min-lr", false, NULL, NULL},
             {"warmup", false, NULL, NULL},
             {"schedule", false, NULL, NULL},
             {"decay-steps", false, NULL, "0"},
             {"weight-decay", false, NULL, NULL},
             {"beta1", false, NULL, NULL},
             {"beta2", false, NULL, NULL},
             {"eps", false, NULL, NULL},
             {"clip", false, NULL, NULL},
             {"seed", false, NULL, NULL},
             {"dtype", false, NULL, NULL},
             {"steps", false, NULL, NULL},
             {"train-tokens", false, "tokens of --train", NULL},
             {"train-samples", false, "samples of --train", ""},
             {"train-blocks", false, "content of --train", ""},
             {"train-hash", false, "content of --train, by --verify-data", ""}};

// --- facts -------------------------------------------------------------------------------------------------

cJSON *resume_describe(const options *o, const resume_facts *facts) {
    int rows = 0;
    const option_row *table = options_table(&rows);
    char text[PATH_MAX];
    cJSON *all = manifest_options();
    for (int i = 0; i < rows; i++) {
        if (table[i].type == OPTION_FLAG) continue;
        options_value(o, &table[i], text, sizeof text);
        manifest_add_option(all, table[i].name, text);
    }
    const struct {
        const char *name;
        int64_t value;
    } more[] = {{"positions", facts->positions},
                {"padded-vocab", facts->padded_vocab},
                {"train-tokens", facts->train_tokens},
                {"train-samples", facts->train_samples},
                {"train-blocks", facts->train_fingerprint},
                {"train-hash", facts->train_hash},
                {"skipped", facts->skipped},
                {"watched", facts->watched}};
    for (size_t i = 0; i < sizeof more / sizeof *more; i++) {
        snprintf(text, sizeof text, "%lld", (long long)more[i].value);
        manifest_add_option(all, more[i].name, text);
    }
    manifest_add_option(all, "version", facts->version);
    manifest_add_option(all, "run", facts->run);
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

// "--lr 0.1 (the checkpoint: 0.2), …", or "".
static void list_differences(const options *o, const manifest *m, const cJSON *mine, bool shape, char *text,
                             size_t size) {
    *text = 0;
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++) {
        const char *name = fixed[i].name, *now = json_text(mine, name), *then = manifest_value(m, name);
        if (!then) then = fixed[i].before ? fixed[i].before : "not recorded";
        if (fixed[i].shape != shape || !*then || strcmp(now, then) == 0) continue;
        if (strcmp(name, "steps") == 0 && !steps_matter(o, m)) continue;
        if (strcmp(name, "train-hash") == 0 && (strcmp(now, "0") == 0 || strcmp(then, "0") == 0))
            continue; // who has not read all tokens does not know it
        size_t length = strlen(text);
        snprintf(text + length, size - length, "%s%s%s %s (the checkpoint: %s)", length ? ", " : "",
                 fixed[i].in_words ? "" : "--", fixed[i].in_words ? fixed[i].in_words : name, now, then);
    }
}

void resume_compare(const options *o, const resume_facts *facts, const manifest *m) {
    char text[1024];
    cJSON *mine = resume_describe(o, facts);
    list_differences(o, m, mine, true, text, sizeof text);
    if (*text)
        cf_die_together("give the options of the checkpoint, or another --out",
                        "the checkpoint of step %lld in %s is of another model: %s", (long long)m->step,
                        o->out, text);
    list_differences(o, m, mine, false, text, sizeof text);
    if (*text && !o->force)
        cf_die_together(
            "give the options of the checkpoint; or --force to go on with the new ones; or another "
            "--out",
            "the run in %s, saved at step %lld, would be changed by: %s", o->out, (long long)m->step, text);
    cJSON_Delete(mine);
}

// --- finding -----------------------------------------------------------------------------------------------

static void warn(const char *what) {
    fflush(stdout);
    fprintf(stderr, "warning: rank %d: %s\n", cf_die_rank(), what);
    fflush(stderr);
}

static void warn_of(const problem *why) {
    char text[sizeof why->what + 64];
    snprintf(text, sizeof text, "passed over a checkpoint: %s", why->what);
    warn(text);
}

void resume_nothing_sound(const char *out, bool anew) {
    char text[PATH_MAX + 64];
    snprintf(text, sizeof text, "none of the checkpoints in %s is sound", out);
    if (!anew)
        cf_die("bring one back from a copy; or choose another --out; or begin anew beside them with --force",
               "%s", text);
    warn(strcat(text, ": a run begins anew there"));
}

// Rank 0 looks; the others take its word and read the same manifest.
manifest *resume_find(const rank_exchange *all, const char *out, int64_t below, bool *passed_over) {
    for (;;) {
        problem why = {.what = ""};
        manifest *m = all->rank == 0 ? checkpoint_latest(out, below, &why) : NULL;
        if (*why.what) {
            warn_of(&why);
            *passed_over = true;
        }
        below = (int64_t)exchange_root(all, m ? (double)m->step : -1);
        if (below < 0) return NULL;
        if (!m) m = checkpoint_manifest(out, below, &why);
        if (!m)
            cf_die("do all hosts share --out?", "rank 0 has found a checkpoint of step %lld: %s",
                   (long long)below, why.what);
        bool sound = true;
        for (int64_t file = all->rank; file < m->ranks; file += all->ranks) {
            if (checkpoint_verify(out, m, file, &why)) continue;
            sound = false;
            warn_of(&why);
        }
        if (exchange_all(all, sound)) return m;
        *passed_over = all->rank == 0;
        manifest_free(m);
    }
}
