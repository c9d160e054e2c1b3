// See derived.h.
#define _GNU_SOURCE
#include "derived.h"
#include "../../commfuse/base/limits.h"
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <sys/auxv.h>
#include <unistd.h>

enum { RANKS_MAX = 1 << 20, VAL_SEQUENCES = 80, ONLY_AT_THE_END = 1000000000 };

// gcc's threads wait for their next work in a loop, for milliseconds, on cores that other programs may want. After so many turns,
// some microseconds, they sleep. OpenMP asks for the number before main() begins, so the answer is here: this function comes
// before the C library's.
char *getenv(const char *name) {
    static char turns[] = "1000";
    const size_t length = strlen(name);
    for (char **at = environ; at && *at; at++)
        if (strncmp(*at, name, length) == 0 && (*at)[length] == '=') return *at + length + 1;
    return strcmp(name, "GOMP_SPINCOUNT") == 0 && !cf_getenv("OMP_WAIT_POLICY") ? turns : NULL;
}

const char *derived_own_path(void) {
    static char path[PATH_MAX];
    // Where the dynamic loader was started, with this program as its argument, /proc/self/exe is the loader, which has no loader.
    if (!*path && !realpath(getauxval(AT_BASE) ? "/proc/self/exe" : program_invocation_name, path)) *path = 0;
    return path;
}

void derived_choose_program(options *opt, const char *dtype, const char *other, char **argv) {
    char path[2 * PATH_MAX];
    if (strcmp(opt->dtype, "auto") == 0) opt->dtype = dtype;
    if (!*opt->predict && strcmp(opt->dtype, dtype) == 0) return;
    if (*opt->predict) other = strcmp(opt->dtype, "bf16") == 0 ? "train_gpt_predict_bf16" : "train_gpt_predict";
    strcpy(path, derived_own_path());
    char *name = strrchr(path, '/');
    name = name ? name + 1 : path;
    if (*opt->predict && strcmp(name, other) == 0) return;
    if (strcmp(name, other) == 0)
        cf_die_together("rename it to the name it was built with", "--dtype %s needs the program %s, but that is this one, for %s",
                        opt->dtype, path, dtype);
    strcpy(name, other);
    execv(path, argv);
    cf_die_together("build it with: make, for GPUs make cuda", "--dtype %s needs the program %s: %s", opt->dtype, path,
                    strerror(errno));
}

cf_choice derived_schedule(const options *opt) {
    cf_choice schedule;
    if (cf_choice_parse(opt->overlap, &schedule)) return schedule;
    char hint[600] = "write NAME or NAME:SLICES, as in direct:4; NAME is one of auto";
    for (int i = 0, length = (int)strlen(hint); i < cf_algorithm_count && length < (int)sizeof hint; i++)
        length += snprintf(hint + length, sizeof hint - (size_t)length, ", %s", cf_algorithms[i].name);
    cf_die_together(hint, "--overlap %.64s: no schedule has that name, or that many slices", opt->overlap);
}

void derived_check(options *opt) {
    cf_memory_hint =
        "lower --micro-batch or --seq, use more ranks, or raise a limit named here; --dry-run prints memory by purpose";
    if (strcmp(opt->reduce_dtype, "bf16") == 0 && strcmp(opt->dtype, "bf16") != 0)
        cf_die_together("add --dtype bf16, or leave it out",
                        "--reduce-dtype bf16: gradients are sent in fp32 or in the type of weights, %s", opt->dtype);
    const cf_algorithm *schedule = derived_schedule(opt).algorithm;
    if (schedule && schedule->bound && *opt->out)
        cf_die_together("leave out --out, or choose another --overlap",
                        "--overlap %s computes wrong results by construction and saves nothing, but --out %s is given",
                        opt->overlap, opt->out);
    if ((opt->save_every > 0 || *opt->export_to) && !*opt->out)
        cf_die_together("name a directory with --out DIR", "--%s needs --out", *opt->export_to ? "export" : "save-every");
    if (*opt->export_to && (opt->dry_run || *opt->init_from))
        cf_die_together("leave out one of them", "--export writes the model of --out DIR; --%s contradicts it",
                        opt->dry_run ? "dry-run" : "init-from");
    if (opt->export_step > 0 && !*opt->export_to) cf_die_together("name a file with --export FILE", "--export-step needs --export");
    int from = 0, to = 0;
    sscanf(opt->trace_steps, "%d:%d", &from, &to); // the parser has checked the form
    if (*opt->trace && from >= opt->steps)
        cf_die_together("choose steps that the run takes with --trace-steps A:B, counted from 0, or raise --steps",
                        "--trace-steps %s: the run ends after %ld steps and would leave --trace %s empty", opt->trace_steps,
                        opt->steps, opt->trace);
    if (*opt->plan && schedule)
        cf_die_together("leave out one of them", "--plan sets the schedule of each operation, and so does --overlap %s",
                        opt->overlap);
    if (opt->decay_steps > 0 && opt->decay_steps < opt->warmup)
        cf_die_together("raise --decay-steps, which counts from the first step, or lower --warmup",
                        "--decay-steps %ld ends the schedule before --warmup %ld has", opt->decay_steps, opt->warmup);
    if (*opt->prompt && *opt->prompt_tokens)
        cf_die_together("leave out one of them", "--prompt and --prompt-tokens both say what samples continue");
    if ((*opt->prompt || *opt->prompt_tokens) && opt->sample_every == 0) opt->sample_every = ONLY_AT_THE_END;
    if (opt->min_lr > opt->lr) cf_die_together("lower --min-lr", "--min-lr %g is above --lr %g", opt->min_lr, opt->lr);
    if (!*opt->train && !opt->dry_run && !*opt->export_to && opt->steps > 0)
        cf_die_together("make token files with data/prepare.py, then: --train 'DIR/train_*.bin'", "--train is missing");
}

void derived_mesh(options *opt, cf_transport *t, cf_mesh *mesh) {
    const cf_algorithm *schedule = derived_schedule(opt).algorithm;
    const int here = t->size;
    if (opt->reproducible && !*opt->predict && ((schedule && !schedule->same_bits) || strcmp(opt->plan, "new") == 0))
        cf_die_together("leave it out, or choose ring, direct, levels or once",
                        "--reproducible 1 has no trials, and its sums one order: not with --%s %s", schedule ? "overlap" : "plan",
                        schedule ? opt->overlap : opt->plan);
    if (opt->tp == 0) opt->tp = opt->dp > 0 && here % opt->dp == 0 ? here / opt->dp : 1;
    if (opt->dp == 0) opt->dp = here % opt->tp == 0 ? here / opt->tp : 1;
    if (opt->tp * opt->dp > RANKS_MAX)
        cf_die_together("lower --tp or --dp", "--tp %ld x --dp %ld is more than %d ranks", opt->tp, opt->dp, RANKS_MAX);
    const int ranks = opt->dry_run && here == 1 ? (int)(opt->tp * opt->dp) : here;
    cf_mesh_init(mesh, ranks, t->rank, (int)opt->tp, (int)opt->dp);
    const int64_t pass = opt->micro_batch * opt->dp;
    if (opt->batch == 0) opt->batch = pass;
    if (opt->batch % pass != 0)
        cf_die_together("batch = micro-batch x dp x accumulation steps: lower --micro-batch, or change --batch",
                        "--batch %ld is not a multiple of --micro-batch %ld x --dp %ld = %ld", opt->batch, opt->micro_batch,
                        opt->dp, pass);
    if (opt->ranks_per_host > 0 && ranks % opt->ranks_per_host != 0 && !*opt->predict)
        cf_die_together("let it divide them", "--ranks-per-host %ld with %d ranks", opt->ranks_per_host, ranks);
    if (opt->ranks_per_host > 0 || here < ranks) t->ranks_per_host = opt->ranks_per_host > 0 ? (int)opt->ranks_per_host : ranks;
    t->collectives = schedule && schedule->native;
    if (here == ranks || *opt->predict)
        cf_mesh_bind(t, mesh);
    else
        cf_mesh_set_hosts(mesh, t->ranks_per_host);
}

// With three or more cores per rank, one is left to the thread that moves bytes. A dry run of a mesh that is not here assumes hosts
// where one is.
void derived_context(options *opt, cf_transport *t, const cf_mesh *mesh, cf_context *context, const char *costs) {
    const int share = t->local_cores / t->local_size, spare = mesh->world_group.size > 1 && share >= 3 ? 1 : 0;
    if (opt->threads == 0) opt->threads = cf_limits_threads(share > 1 ? share - spare : 1);
    cf_device_threads((int)opt->threads);
    const bool elsewhere = t->size < mesh->world_group.size && opt->threads > 1;
    cf_context_start(context, t, (int)opt->threads - elsewhere);
    if (costs) cf_costs_parse(costs, &t->costs); // of another version, which has others: this machine's
    if (opt->reproducible) cf_costs_agree(t, 0);
    if (opt->network_gbit > 0) {
        t->costs.network_bytes_per_s = opt->network_gbit * 1e9 / 8;
        t->costs.shared_bytes_per_s = t->costs.network_bytes_per_s / (t->ranks_per_host > 0 ? t->ranks_per_host : t->local_size);
    }
}

int64_t derived_data_step(const char *skipped, int64_t step) {
    int64_t from, to;
    for (int n = 0; sscanf(skipped, "%ld:%ld%n", &from, &to, &n) == 2; skipped += n + (skipped[n] == ','))
        if (step >= from) step += to - from;
    return step;
}

bool derived_same_data(const char *skipped, const char *other, int64_t steps) {
    for (int64_t from, to, from_other, to_other, left_out = 0;; left_out += to - from) {
        const bool ends = sscanf(skipped, "%ld:%ld", &from, &to) != 2 || from - left_out >= steps,
                   other_ends = sscanf(other, "%ld:%ld", &from_other, &to_other) != 2 || from_other - left_out >= steps;
        if (ends || other_ends) return ends && other_ends;
        if (from != from_other || to != to_other) return false;
        skipped += strcspn(skipped, ","), other += strcspn(other, ",");
        skipped += *skipped == ',', other += *other == ',';
    }
}

double derived_learning_rate(const options *opt, int64_t step) {
    if (step < opt->warmup) return opt->lr * (double)(step + 1) / (double)opt->warmup;
    if (strcmp(opt->schedule, "constant") == 0) return opt->lr;
    int64_t end = opt->decay_steps > 0 ? opt->decay_steps : opt->steps;
    if (step >= end) return opt->min_lr;
    double span = (double)(end - opt->warmup), done = (double)(step - opt->warmup) / (span > 1 ? span : 1);
    if (strcmp(opt->schedule, "linear") == 0) return opt->lr + (opt->min_lr - opt->lr) * done;
    if (strcmp(opt->schedule, "cosine") == 0) return opt->min_lr + (opt->lr - opt->min_lr) * 0.5 * (1 + cos(M_PI * done));
    double hold = 0.8 * (double)end; // wsd: hold, then fall by 1 − sqrt over the last fifth
    if ((double)step < hold) return opt->lr;
    return opt->min_lr + (opt->lr - opt->min_lr) * (1 - sqrt(((double)step - hold) / ((double)end - hold)));
}

bool derived_due(int64_t every, int64_t step) {
    return every > 0 && step % every == 0;
}

int64_t derived_val_sequences(const options *opt, int64_t samples) {
    const int64_t asked = opt->val_batches > 0 ? opt->val_batches * opt->batch : VAL_SEQUENCES;
    return asked < samples ? asked : samples;
}

bool derived_pause_due(const options *opt, int64_t step) {
    return derived_due(opt->val_every, step + 1) || derived_due(opt->sample_every, step + 1) ||
           derived_due(opt->save_every, step + 1) || step + 1 == opt->steps;
}
