// See recipe.h.
#include "recipe.h"
#include "../../commfuse/base/limits.h"
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <unistd.h>

enum { RANKS_MAX = 1 << 20, VAL_SEQUENCES = 80 };

void recipe_choose_program(options *o, const char *dtype, const char *other, char **argv) {
    char path[PATH_MAX];
    if (strcmp(o->dtype, "auto") == 0) o->dtype = dtype;
    if (*o->predict)
        other = strcmp(o->dtype, "bf16") == 0 ? "train_gpt_predict_bf16" : "train_gpt_predict";
    else if (strcmp(o->dtype, dtype) == 0)
        return;
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - strlen(other) - 1);
    path[length > 0 ? length : 0] = 0;
    char *name = strrchr(path, '/');
    name = name ? name + 1 : path;
    if (*o->predict && strcmp(name, other) == 0) return;
    if (strcmp(name, other) == 0)
        cf_die_together("rename it to the name it was built with", "--dtype %s needs the program %s, but that is this one, for %s",
                        o->dtype, path, dtype);
    strcpy(name, other);
    execv(path, argv);
    cf_die_together("build it with: make, for GPUs make cuda", "--dtype %s needs the program %s: %s", o->dtype, path,
                    strerror(errno));
}

cf_choice recipe_schedule(const options *o) {
    cf_choice schedule;
    char names[512] = "auto";
    if (cf_choice_parse(o->overlap, &schedule)) return schedule;
    for (int i = 0, length = 4; i < cf_algorithm_count && length < (int)sizeof names; i++)
        length += snprintf(names + length, sizeof names - (size_t)length, ", %s", cf_algorithms[i].name);
    char hint[600];
    snprintf(hint, sizeof hint, "write NAME or NAME:SLICES, as in direct:4; NAME is one of %s", names);
    cf_die_together(hint, "--overlap %.64s: no schedule has that name, or that many slices", o->overlap);
    return schedule;
}

void recipe_check(options *o) {
    const cf_algorithm *schedule = recipe_schedule(o).algorithm;
    if (schedule && schedule->bound && *o->out)
        cf_die_together("leave out --out, or choose another --overlap",
                        "--overlap %s computes wrong results by construction and saves nothing, but --out %s is given", o->overlap,
                        o->out);
    if ((o->save_every > 0 || *o->export_to) && !*o->out)
        cf_die_together("name a directory with --out DIR", "--%s needs --out", *o->export_to ? "export" : "save-every");
    if (*o->export_to && (o->dry_run || *o->init_from))
        cf_die_together("leave out one of them", "--export writes the model of --out DIR; --%s contradicts it",
                        o->dry_run ? "dry-run" : "init-from");
    if (o->hellaswag_every > 0 && !*o->hellaswag)
        cf_die_together("name a file with --hellaswag FILE", "--hellaswag-every needs --hellaswag");
    if (o->export_step > 0 && !*o->export_to) cf_die_together("name a file with --export FILE", "--export-step needs --export");
    int from = 0, to = 0;
    sscanf(o->trace_steps, "%d:%d", &from, &to); // the parser has checked the form
    if (*o->trace && from >= o->steps)
        cf_die_together("choose steps that the run takes with --trace-steps A:B, counted from 0, or raise --steps",
                        "--trace-steps %s: the run ends after %ld steps and would leave --trace %s empty", o->trace_steps, o->steps,
                        o->trace);
    if (o->check_wire && schedule && (schedule->native || schedule->bound))
        cf_die_together("use --overlap auto or commfuse, or leave out --check-wire",
                        "--check-wire checks exchanges between ranks; with --overlap %s there are none", o->overlap);
    if (*o->plan && schedule)
        cf_die_together("leave out one of them", "--plan sets the schedule of each operation, and so does --overlap %s",
                        o->overlap);
    if (o->decay_steps > 0 && o->decay_steps < o->warmup)
        cf_die_together("raise --decay-steps, which counts from the first step, or lower --warmup",
                        "--decay-steps %ld ends the schedule before --warmup %ld has", o->decay_steps, o->warmup);
    if (o->min_lr > o->lr) cf_die_together("lower --min-lr", "--min-lr %g is above --lr %g", o->min_lr, o->lr);
    if (!*o->train && !o->dry_run && !*o->export_to && o->steps > 0)
        cf_die_together("make token files with data/prepare.py, then: --train 'DIR/train_*.bin'", "--train is missing");
}

static void choose_batch(options *o) {
    int64_t pass = o->micro_batch * o->dp;
    if (o->batch == 0) o->batch = pass;
    if (o->batch % pass != 0)
        cf_die_together("batch = micro-batch x dp x accumulation steps: lower --micro-batch, or change --batch",
                        "--batch %ld is not a multiple of --micro-batch %ld x --dp %ld = %ld", o->batch, o->micro_batch, o->dp,
                        pass);
}

void recipe_mesh(options *o, cf_transport *t, cf_mesh *mesh) {
    const cf_algorithm *schedule = recipe_schedule(o).algorithm;
    const int here = t->size;
    if (o->tp == 0) o->tp = o->dp > 0 && here % o->dp == 0 ? here / o->dp : 1;
    if (o->dp == 0) o->dp = here % o->tp == 0 ? here / o->tp : 1;
    if (o->tp * o->dp > RANKS_MAX)
        cf_die_together("lower --tp or --dp", "--tp %ld x --dp %ld is more than %d ranks", o->tp, o->dp, RANKS_MAX);
    const int ranks = o->dry_run && here == 1 ? (int)(o->tp * o->dp) : here;
    cf_mesh_init(mesh, ranks, t->rank, (int)o->tp, (int)o->dp);
    choose_batch(o);
    if (o->ranks_per_host > 0 && ranks % o->ranks_per_host != 0 && !*o->predict)
        cf_die_together("let it divide them", "--ranks-per-host %ld with %d ranks", o->ranks_per_host, ranks);
    if (o->ranks_per_host > 0 || here < ranks) t->ranks_per_host = o->ranks_per_host > 0 ? (int)o->ranks_per_host : ranks;
    t->collectives = schedule && schedule->native;
    if (here == ranks || *o->predict)
        cf_mesh_bind(t, mesh);
    else
        cf_mesh_set_hosts(mesh, t->ranks_per_host);
}

// With three or more cores per rank, one is left to the thread that moves bytes. A dry run of a mesh that is not here assumes hosts
// where one is.
void recipe_context(options *o, cf_transport *t, const cf_mesh *mesh, cf_context *context) {
    const int share = t->local_cores / t->local_size, spare = mesh->world_group.size > 1 && share >= 3 ? 1 : 0;
    if (o->threads == 0) o->threads = cf_limits_threads(share > 1 ? share - spare : 1);
    cf_device_threads((int)o->threads);
    const bool elsewhere = t->size < mesh->world_group.size && o->threads > 1;
    cf_context_start(context, t, (int)o->threads - elsewhere);
    if (o->check_wire) context->check = cf_check_create();
}

double recipe_learning_rate(const options *o, int64_t step) {
    if (step < o->warmup) return o->lr * (double)(step + 1) / (double)o->warmup;
    if (strcmp(o->schedule, "constant") == 0) return o->lr;
    int64_t end = o->decay_steps > 0 ? o->decay_steps : o->steps;
    if (step >= end) return o->min_lr;
    double span = (double)(end - o->warmup), done = (double)(step - o->warmup) / (span > 1 ? span : 1);
    if (strcmp(o->schedule, "linear") == 0) return o->lr + (o->min_lr - o->lr) * done;
    if (strcmp(o->schedule, "cosine") == 0) return o->min_lr + (o->lr - o->min_lr) * 0.5 * (1 + cos(M_PI * done));
    double hold = 0.8 * (double)end; // wsd: hold, then fall by 1 − sqrt over the last fifth
    if ((double)step < hold) return o->lr;
    return o->min_lr + (o->lr - o->min_lr) * (1 - sqrt(((double)step - hold) / ((double)end - hold)));
}

bool recipe_due(int64_t every, int64_t step) {
    return every > 0 && step % every == 0;
}

int64_t recipe_val_sequences(const options *o, int64_t samples) {
    const int64_t asked = o->val_batches > 0 ? o->val_batches * o->batch : VAL_SEQUENCES;
    return asked < samples ? asked : samples;
}

bool recipe_sample_due(const options *o, int64_t step, bool last) {
    return last ? o->sample_every > 0 || *o->prompt : step > 0 && recipe_due(o->sample_every, step);
}

bool recipe_hellaswag_due(const options *o, int64_t step, bool last) {
    return *o->hellaswag && (last || (step > 0 && recipe_due(o->hellaswag_every, step)));
}

bool recipe_pause_due(const options *o, int64_t step) {
    return recipe_due(o->val_every, step + 1) || recipe_due(o->sample_every, step + 1) || recipe_due(o->save_every, step + 1) ||
           recipe_hellaswag_due(o, step + 1, step + 1 == o->steps) || step + 1 == o->steps;
}
