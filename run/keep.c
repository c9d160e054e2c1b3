// See keep.h. How checkpoints are written is saver.c's, how they are found and compared resume.c's.
#include "keep.h"
#include "../commfuse/die.h"
#include "../data/progress.h"
#include "resume.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

// Tensors have one order in memory and in files: a division by zero here says that it was broken.
enum {
    SAME_ORDER =
        1 / (WTE == (int)MODEL_WTE && QKVW == (int)MODEL_QKVW && ATTPROJB == (int)MODEL_ATTPROJB &&
             FCPROJW == (int)MODEL_FCPROJW && LNFB == (int)MODEL_LNFB && TENSORS == (int)MODEL_TENSORS)
};

void keep_open(trainer *t) {
    const char *out = t->o.out, *trace = t->o.trace;
    if (!trainer_root(t)) return;
    struct stat s;
    if (*out && mkdir(out, 0777) != 0) {
        bool directory = stat(out, &s) == 0 && S_ISDIR(s.st_mode);
        if (!directory || access(out, W_OK) != 0)
            cf_die("choose another --out DIR that can be written",
                   "--out %s cannot be used as a directory: %s", out, strerror(errno));
    }
    problem why;
    if (*out && !(t->store = checkpoint_store_open(out, &why))) cf_die(why.hint, "%s", why.what);
    if (!*trace) return;
    FILE *file = fopen(trace, "w");
    if (!file) cf_die("choose another --trace FILE", "cannot write trace %s: %s", trace, strerror(errno));
    fclose(file);
}

// --- where the run begins ---

static resume_facts facts_of(const trainer *t, bool watched) {
    resume_facts facts;
    facts.positions = t->model.params.shape.maxT;
    facts.train_tokens = t->train ? tokens_count(t->train) : 0;
    facts.skipped = t->skipped;
    facts.watched = watched;
    facts.version = t->version;
    return facts;
}

static void read_weights(void *file, int tensor, int64_t layer, int64_t first, int64_t count, float *out) {
    model_file_read((const model_file *)file, tensor, layer, first, count, out);
}

static void begin_anew(trainer *t) {
    if (t->start)
        params_read(&t->model.params, read_weights, t->start, t->context.stream);
    else
        params_init(&t->model.params, (uint64_t)t->o.seed, t->context.stream);
    optimizer_start(&t->optimizer);
}

static void go_on(trainer *t, const manifest *m) {
    const options *o = &t->o;
    resume_facts facts = facts_of(t, false);
    if (strcmp(o->resume, "no") == 0)
        cf_die_together("choose another --out, or leave --resume away to go on",
                        "--resume no, but %s holds a checkpoint of step %lld", o->out, (long long)m->step);
    resume_compare(o, &facts, m);
    if (m->step > o->steps)
        cf_die_together("raise --steps", "the run in %s has taken %lld steps already, more than --steps %lld",
                        o->out, (long long)m->step, (long long)o->steps);
    resume_give(&t->optimizer, o->out, m);
    t->first = m->step;
    t->skipped = resume_number(m, "skipped", 0);
    t->watched = resume_number(m, "watched", 0) == 1;
    if (trainer_root(t))
        printf("resume    from step %lld in %s, saved by %lld ranks (%s, tp %s x dp %s, version %s)\n",
               (long long)m->step, o->out, (long long)m->ranks, manifest_value(m, "strategy"),
               manifest_value(m, "tp"), manifest_value(m, "dp"), manifest_value(m, "version"));
}

void keep_begin(trainer *t) {
    trainer_patient(t, true);
    manifest *m = *t->o.out ? resume_find(&t->optimizer, t->o.out, INT64_MAX) : NULL;
    if (m)
        go_on(t, m);
    else
        begin_anew(t);
    manifest_free(m);
    trainer_patient(t, false);
}

// --- saving ---

static void append_values(void *writer, const float *values, int64_t count) {
    model_writer_append((model_writer *)writer, values, count);
}

static model_writer *open_writer(const trainer *t, const char *path) {
    const gpt_shape *s = &t->model.params.shape;
    model_shape f = {s->maxT, s->V, s->L, s->H, s->C, s->Vp};
    return model_writer_open(path, &f, REAL_DTYPE == CF_BF16 ? 5 : 3);
}

// The first replica collects, its first rank writes, the others wait, longer than for anything else.
void keep_model(trainer *t, int64_t step, const char *path) {
    optimizer_settle(&t->optimizer);
    trainer_patient(t, true);
    model_writer *writer = trainer_root(t) ? open_writer(t, path) : NULL;
    if (t->mesh.dp_group.rank == 0) gpt_collect(&t->model, append_values, writer);
    if (writer) model_writer_commit(writer);
    trainer_meet(t);
    trainer_patient(t, false);
    if (!writer) return;
    progress_break();
    printf("step %5lld  saved %s\n", (long long)step, path);
    fflush(stdout);
}

bool keep_save(trainer *t, int64_t step, bool watched) {
    double begin = cf_now_ms();
    int64_t count = 0;
    resume_facts facts = facts_of(t, watched);
    manifest_option *list = resume_describe(&t->o, &facts, &count);
    trainer_patient(t, true);
    bool begun = saver_begin(t->checkpoints, step, list, count);
    trainer_patient(t, false);
    free(list);
    t->save_ms += cf_now_ms() - begin;
    return begun;
}

bool keep_wait(trainer *t) {
    double begin = cf_now_ms();
    trainer_patient(t, true);
    bool saved = saver_finish(t->checkpoints);
    trainer_patient(t, false);
    t->save_ms += cf_now_ms() - begin;
    return saved;
}

void keep_export(trainer *t) {
    trainer_patient(t, true);
    manifest *m = resume_find(&t->optimizer, t->o.out, t->o.export_step + 1);
    if (!m || m->step != t->o.export_step)
        cf_die_together("choose another with --export-step",
                        "the checkpoint of step %lld in %s cannot be exported", (long long)t->o.export_step,
                        t->o.out);
    resume_give(&t->optimizer, t->o.out, m);
    trainer_patient(t, false);
    keep_model(t, m->step, t->o.export_to);
    manifest_free(m);
}
