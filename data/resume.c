// See resume.h. A manifest holds all options of the run it belongs to. Most may change when a run goes on: the mesh,
// how communication overlaps, what is watched. Those in the tables below may not, since what comes out would be
// neither the old run nor a new one.
#include "resume.h"
#include "checkpoint.h"
#include <stdlib.h>
#include <sys/random.h>

enum { VALUE_MAX = PATH_MAX, FACTS = 9 };

static const char *const shape_options[] = {"layers",       "channels",  "heads", "vocab",
                                            "padded-vocab", "positions", NULL};
static const char *const run_options[] = {"seq",           "batch",        "lr",          "min-lr",
                                          "warmup",        "schedule",     "decay-steps", "weight-decay",
                                          "beta1",         "beta2",        "eps",         "clip",
                                          "seed",          "dtype",        "steps",       "train-tokens",
                                          "train-samples", "train-blocks", "train-hash",  NULL};
// What checkpoints from before it was written down say nothing of, and what it was then; NULL: unknown.
static const struct {
    const char *name, *then;
} newer[] = {{"decay-steps", "0"}, {"train-samples", NULL}, {"train-blocks", NULL}, {"train-hash", NULL}};

// --- facts -------------------------------------------------------------------------------------------------

// Texts lie behind the list, in the same piece of memory.
manifest_option *resume_describe(const options *o, const resume_facts *facts, int64_t *count) {
    int rows = 0;
    const option_row *table = options_table(&rows);
    manifest_option *list = calloc(1, (size_t)(rows + FACTS) * (sizeof *list + VALUE_MAX));
    if (!list) cf_die(NULL, "out of memory for a manifest");
    char *text = (char *)(list + rows + FACTS);
    int64_t n = 0;
    for (int i = 0; i < rows; i++) {
        if (table[i].type == OPTION_FLAG) continue;
        list[n].name = table[i].name, list[n].value = text + n * VALUE_MAX;
        options_value(o, &table[i], text + n * VALUE_MAX, VALUE_MAX);
        n++;
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
    for (size_t i = 0; i < sizeof more / sizeof *more; i++, n++) {
        list[n].name = more[i].name, list[n].value = text + n * VALUE_MAX;
        snprintf(text + n * VALUE_MAX, VALUE_MAX, "%lld", (long long)more[i].value);
    }
    list[n].name = "version", list[n++].value = facts->version;
    list[n].name = "run", list[n++].value = facts->run;
    *count = n;
    return list;
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

static const char *value_of(const manifest_option *list, int64_t count, const char *name) {
    for (int64_t i = 0; i < count; i++)
        if (strcmp(list[i].name, name) == 0) return list[i].value;
    return "";
}

// NULL: nobody knows.
static const char *value_then(const manifest *m, const char *name) {
    const char *value = manifest_value(m, name);
    for (size_t i = 0; i < sizeof newer / sizeof *newer && !value; i++)
        if (strcmp(newer[i].name, name) == 0) return newer[i].then;
    return value ? value : "not told";
}

// Without a schedule that falls towards --steps a run may be made longer or shorter.
static bool matters(const options *o, const manifest *m, const char *name) {
    if (strcmp(name, "steps") != 0) return true;
    const char *schedule = value_then(m, "schedule"), *end = value_then(m, "decay-steps");
    bool constant = strcmp(o->schedule, "constant") == 0 && strcmp(schedule, o->schedule) == 0;
    bool ends_elsewhere = o->decay_steps > 0 && strcmp(end, "0") != 0;
    return !constant && !ends_elsewhere;
}

// What is no option of that name, and is said so.
static const struct {
    const char *name, *said;
} facts_said[] = {{"positions", "--seq, the model's positions"},
                  {"padded-vocab", "rows of the vocabulary with padding"},
                  {"train-tokens", "tokens of --train"},
                  {"train-samples", "samples of --train"},
                  {"train-blocks", "content of --train"},
                  {"train-hash", "content of --train, by --verify-data"}};

static void say_name(char *text, size_t size, const char *name) {
    snprintf(text, size, "--%s", name);
    for (size_t i = 0; i < sizeof facts_said / sizeof *facts_said; i++)
        if (strcmp(facts_said[i].name, name) == 0) snprintf(text, size, "%s", facts_said[i].said);
}

// "--lr 0.1 (the checkpoint: 0.2), …"; how many.
static int differences(const options *o, const manifest *m, const char *const *names,
                       const manifest_option *mine, int64_t count, char *text, size_t size) {
    int found = 0;
    for (text[0] = 0; *names; names++) {
        const char *now = value_of(mine, count, *names), *then = value_then(m, *names);
        if (!then || !matters(o, m, *names) || strcmp(now, then) == 0) continue;
        if (strcmp(*names, "train-hash") == 0 && (strcmp(now, "0") == 0 || strcmp(then, "0") == 0))
            continue; // who has not read all tokens does not know it
        char name[64];
        say_name(name, sizeof name, *names);
        size_t length = strlen(text);
        snprintf(text + length, size - length, "%s%s %s (the checkpoint: %s)", found++ ? ", " : "", name, now,
                 then);
    }
    return found;
}

void resume_compare(const options *o, const resume_facts *facts, const manifest *m) {
    char text[1024];
    int64_t count = 0;
    manifest_option *mine = resume_describe(o, facts, &count);
    if (differences(o, m, shape_options, mine, count, text, sizeof text) > 0)
        cf_die_together("give the options of the checkpoint, or another --out",
                        "the checkpoint of step %lld in %s is of another model: %s", (long long)m->step,
                        o->out, text);
    if (differences(o, m, run_options, mine, count, text, sizeof text) > 0 && !o->force)
        cf_die_together(
            "give the options of the checkpoint; or --force to go on with the new ones; or another "
            "--out",
            "the run in %s, saved at step %lld, would be changed by: %s", o->out, (long long)m->step, text);
    free(mine);
}

// --- finding -----------------------------------------------------------------------------------------------

static void warn(const problem *why) {
    fflush(stdout);
    fprintf(stderr, "warning: rank %d: passed over a checkpoint: %s\n", cf_die_rank(), why->what);
    fflush(stderr);
}

void resume_nothing_sound(const char *out, bool anew) {
    if (!anew)
        cf_die("bring one back from a copy; or choose another --out; or begin anew beside them with --force",
               "none of the checkpoints in %s is sound", out);
    fprintf(stderr, "warning: rank %d: none of the checkpoints in %s is sound: a run begins anew there\n",
            cf_die_rank(), out);
    fflush(stderr);
}

// Rank 0 looks; the others take its word and read the same manifest.
static manifest *agree(const together *t, const char *out, int64_t below, bool *sound, bool *passed_over) {
    problem why = {.what = ""};
    manifest *m = t->rank == 0 ? checkpoint_latest(out, below, &why) : NULL;
    if (*why.what) {
        warn(&why);
        *passed_over = true;
    }
    double step = m ? (double)m->step : -1;
    step = t->exchange(t->argument, &step, 1)[0];
    if (t->rank > 0 && step >= 0) {
        m = checkpoint_manifest(out, (int64_t)step, &why);
        if (!m)
            cf_die("do all hosts share --out?", "rank 0 has found a checkpoint of step %.0f: %s", step,
                   why.what);
    }
    *sound = true;
    for (int64_t file = m ? t->rank : 0; m && file < m->ranks; file += t->ranks) {
        if (checkpoint_verify(out, m, file, &why)) continue;
        *sound = false;
        warn(&why);
    }
    return m;
}

static bool sound_everywhere(const together *t, bool here) {
    double mine = here;
    const double *told = t->exchange(t->argument, &mine, 1);
    for (int rank = 0; rank < t->ranks; rank++)
        if (told[rank * t->stride] == 0) return false;
    return true;
}

manifest *resume_find(const together *t, const char *out, int64_t below, bool *passed_over) {
    for (;;) {
        bool sound = true;
        manifest *m = agree(t, out, below, &sound, passed_over);
        if (sound_everywhere(t, sound) || !m) return m;
        *passed_over = t->rank == 0;
        below = m->step;
        manifest_free(m);
    }
}
