// See plan.h.
#include "plan.h"
#include "../atomic_file.h"
#include "../input.h"
#include "../json.h"
#include "../model_file.h"

enum { PLAN_MAX_BYTES = 1 << 14 };

static char *print(const run_plan *p) {
    cJSON *plan = cJSON_CreateObject();
    cJSON_AddStringToObject(plan, "shape", p->shape);
    cJSON_AddStringToObject(plan, "machine", p->machine);
    cJSON *list = cJSON_AddObjectToObject(plan, "operations");
    for (int i = 0; i < cf_tuner_operations(p->tuner); i++) {
        cf_tuned opt = cf_tuner_operation(p->tuner, i);
        char choice[CF_CHOICE_NAME];
        cf_choice_print(opt.choice, choice);
        cJSON_AddStringToObject(list, opt.name, choice);
    }
    char *text = cJSON_Print(plan);
    cJSON_Delete(plan);
    if (!text) cf_die(NULL, "out of memory for the plan");
    return text;
}

static bool unsound(problem *why, const char *name, const char *what, const char *which) {
    return problem_set(why, "remove it, or write another one: --dry-run prints a plan", "the plan in %s %s%s", name, what, which);
}

// Whether a plan is for this shape (and, with `here`, this machine) and has one valid choice for every operation. name: its source.
static bool fits(const run_plan *p, const cJSON *plan, const char *name, bool here, problem *why) {
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(plan, "operations"), *item;
    const char *shape = json_text(plan, "shape"), *machine = json_text(plan, "machine");
    if (!cJSON_IsObject(list) || !shape || !machine)
        return unsound(why, name, "is damaged: it is not a JSON object with \"shape\", \"machine\" and \"operations\"", "");
    if (strcmp(shape, p->shape) != 0)
        return problem_set(why, "leave out --plan to find one while training", "the plan in %s is for %s; this run is %s", name,
                           shape, p->shape);
    if (here && strcmp(machine, p->machine) != 0)
        return problem_set(why, NULL, "the plan in %s was found on %s; this is %s", name, machine, p->machine);
    cJSON_ArrayForEach(item, list) {
        cf_choice choice;
        if (json_repeated(list, item)) return unsound(why, name, "names an operation twice: ", item->string);
        if (!cJSON_IsString(item) || !cf_choice_parse(item->valuestring, &choice) || !cf_tuner_can(p->tuner, item->string, choice))
            return unsound(why, name, "has no valid choice (ring:2, direct, once, none, slice:4) for an operation of this run: ",
                           item->string);
    }
    for (int i = 0; i < cf_tuner_operations(p->tuner); i++) {
        const char *operation = cf_tuner_operation(p->tuner, i).name;
        if (!cJSON_GetObjectItemCaseSensitive(list, operation)) return unsound(why, name, "lacks the operation ", operation);
    }
    return true;
}

// Sets the choices of a plan if it fits.
static bool apply(run_plan *p, const char *name, bool here, problem *why) {
    char named[64];
    snprintf(named, sizeof named, "the plan in %s is damaged: it", name);
    cJSON *plan = json_object(p->text, p->bytes, named, "remove it, or write another one: --dry-run prints a plan", why);
    const bool ok = plan && fits(p, plan, name, here, why);
    const cJSON *list = ok ? cJSON_GetObjectItemCaseSensitive(plan, "operations") : NULL, *item;
    cJSON_ArrayForEach(item, list) {
        cf_choice choice;
        if (cf_choice_parse(item->valuestring, &choice)) cf_tuner_set(p->tuner, item->string, choice);
    }
    if (ok && p->root && strcmp(json_text(plan, "machine"), p->machine) != 0)
        cf_print(stdout, "plan      note: that in %s was found on %s; this is %s\n", name, json_text(plan, "machine"), p->machine);
    cJSON_Delete(plan);
    return ok;
}

// A file that rank 0 reads, on all ranks; a prediction's ranks, which have no others beside them, each read it. NULL: see why.
static char *read_shared(const char *path, cf_transport *transport, bool alone, int64_t *bytes, problem *why) {
    struct shared_text {
        problem why;
        int64_t bytes;
        char text[PLAN_MAX_BYTES];
    } *mine = cf_host_alloc(1, sizeof *mine, "a plan"), *all;
    char *text = alone || transport->rank == 0 ? input_read_all("plan", path, PLAN_MAX_BYTES - 1, &mine->bytes, &mine->why) : NULL;
    if (text) memcpy(mine->text, text, (size_t)mine->bytes);
    free(text);
    all = cf_allgather_alloc(transport, mine, (int64_t)sizeof *mine);
    *why = all->why, *bytes = all->bytes;
    text = *why->what ? NULL : memcpy(cf_host_alloc(PLAN_MAX_BYTES, 1, "a plan"), all->text, PLAN_MAX_BYTES);
    free(mine);
    free(all);
    return text;
}

void plan_create(run_plan *p, cf_tuner *tuner, const options *opt, cf_transport *transport, const char *version,
                 const char *saved) {
    problem why;
    const bool search_again = strcmp(opt->plan, "new") == 0, interrupted = saved && !*saved && !*opt->plan; // saved in trials
    const int on_a_host = transport->ranks_per_host > 0 ? transport->ranks_per_host : transport->local_size;
    *p = (run_plan){.tuner = tuner,
                    .root = transport->rank == 0 && !*opt->predict,
                    .given = *opt->plan && !search_again,
                    .assumes = on_a_host < transport->size && opt->network_gbit == 0};
    p->worth = p->given || opt->reproducible ? INT64_MAX : search_again || interrupted ? INT64_MIN : PLAN_WORTH_STEPS;
    char block[80] = ""; // GPT-2's plans do not name it
    if (params_block_named(opt->block)->magic != LLM_C_MAGIC)
        snprintf(block, sizeof block, "%s, %ld heads of keys, %ld units, ", opt->block, opt->kv_heads, opt->ffn);
    snprintf(p->shape, sizeof p->shape,
             "tp %ld x dp %ld, %s, %ld layers of %ld channels, %ld heads, %svocabulary %ld, %ld tokens, micro-batch %ld, %s%s",
             opt->tp, opt->dp, opt->strategy, opt->layers, opt->channels, opt->heads, block, opt->vocab, opt->seq, opt->micro_batch,
             strcmp(opt->reduce_dtype, "bf16") == 0 ? "bf16, gradients too" : opt->dtype,
             opt->reproducible ? ", reproducible" : "");
    const int length = (int)strlen(p->shape); // a policy that is not auto's
    if (strcmp(opt->gradients, "preset") != 0 || opt->prefetch >= 0 || strcmp(opt->embedding, "preset") != 0)
        snprintf(p->shape + length, sizeof p->shape - (size_t)length, ", gradients %s, prefetch %ld, embedding %s", opt->gradients,
                 opt->prefetch, opt->embedding);
    snprintf(p->machine, sizeof p->machine, "%s, %d ranks, %d of them and %d cores on a host, %ld threads, %s, version %s",
             transport->name, transport->size, transport->local_size, transport->local_cores, opt->threads, cf_device_name(),
             version);
    char *of_rank_0 = *opt->predict ? NULL : (char *)cf_allgather_alloc(transport, p->machine, (int64_t)sizeof p->machine);
    if (of_rank_0) memcpy(p->machine, of_rank_0, sizeof p->machine); // hosts may differ; all ranks must judge a plan alike
    free(of_rank_0);
    if (!*opt->out || snprintf(p->path, sizeof p->path, "%s/plan.json", opt->out) >= (int)sizeof p->path) *p->path = 0;
    if (saved && *saved && !*opt->plan) p->text = strdup(saved), p->bytes = (int64_t)strlen(saved);
    const char *from = p->given ? opt->plan : *opt->plan || saved ? "" : p->path;
    if (*from) p->text = read_shared(from, transport, *opt->predict, &p->bytes, &why);
    if (*from && !p->text && (p->given || why.unread)) cf_die_together(why.hint, "--%s: %s", p->given ? "plan" : "out", why.what);
}

void plan_free(run_plan *p) {
    cf_tuner_free(p->tuner);
    free(p->text);
}

bool plan_start(run_plan *p, bool resumes, int64_t steps) {
    problem why = {.what = ""};
    if (!p->tuner) return false;
    const bool known = p->text && apply(p, p->given ? "--plan" : "--out", !p->given && !resumes, &why);
    if (p->given && !known) cf_die_together(why.hint, "%s", why.what);
    if (p->root && p->text && !known) cf_print(stdout, "plan      %s: not used\n", why.what);
    cf_tuner_start(p->tuner, steps >= p->worth && !(resumes && known));
    if (p->root && cf_tuner_left_out(p->tuner) > 0)
        cf_print(stdout, "plan      %d choices are not tried: their staging would take more than half of the memory that is left\n",
                 cf_tuner_left_out(p->tuner));
    p->trying = cf_tuner_trying(p->tuner);
    const bool tries = cf_tuner_operations(p->tuner) > 0; // with tp 1 nothing
    if (p->root && p->assumes && !known && steps > 0 && (!tries || steps < p->worth) && p->worth < INT64_MAX) {
        cf_print(stdout, "plan      predicted, the network's rate assumed: --network-gbit gives it");
        if (tries) cf_print(stdout, "; --plan new, or a run of %d steps, tries others", PLAN_WORTH_STEPS);
        cf_print(stdout, "\n");
    }
    return known;
}

bool plan_start_whole(run_plan *p, int plan) {
    const bool there = plan == 0 || (p->tuner && p->worth < INT64_MAX && cf_tuner_take(p->tuner, plan));
    plan_start(p, false, 0);
    return there;
}

char *plan_text(const run_plan *p) {
    if (!p->tuner || cf_tuner_trying(p->tuner)) return p->tuner ? strdup("") : NULL;
    char *text = print(p);
    cJSON_Minify(text);
    return text;
}

void plan_explain(const run_plan *p, FILE *out) {
    if (!p->tuner) return;
    char *text = print(p);
    cf_print(out, "\nThe plan, as --plan FILE reads it%s\n%s\n", p->trying ? "; the first steps look for a better one" : "", text);
    free(text);
}

// Adds the time of every choice that was tried for an operation: "forward all-gather att.qkv ring:2_ms".
static void log_trials(const cf_tuner *t, int operation, logfile *log) {
    char choice[CF_CHOICE_NAME], field[160];
    cf_choice c;
    double ms;
    for (int i = 0; cf_tuner_choice(t, operation, i, &c, &ms); i++) {
        cf_choice_print(c, choice);
        snprintf(field, sizeof field, "%s %s_ms", cf_tuner_operation(t, operation).name, choice);
        LOG_ADD(log, FIELD(isfinite(ms) ? field : NULL, ms));
    }
}

static void report_found(const run_plan *p, logfile *log, int64_t step) {
    const cf_tuner *t = p->tuner;
    cf_print(stdout, "plan      found in trials up to step %ld; a step:", step + 1);
    log_begin(log, "plan");
    LOG_ADD(log, FIELD("step", step), FIELD("left_out", cf_tuner_left_out(t)));
    for (int i = 0; i < cf_tuner_plans(t); i++) {
        cf_compared plan = cf_tuner_plan(t, i);
        char name[64];
        if (!isnan(plan.step_ms)) cf_print(stdout, " %s%s %.1f ms", plan.taken ? "> " : "", plan.name, plan.step_ms);
        snprintf(name, sizeof name, "%s_ms", plan.name);
        LOG_ADD(log, FIELD(name, plan.step_ms), FIELD(plan.taken ? "taken" : NULL, plan.name));
    }
    cf_print(stdout, "\n");
    for (int i = 0; i < cf_tuner_operations(t); i++) {
        cf_tuned opt = cf_tuner_operation(t, i);
        char choice[CF_CHOICE_NAME];
        cf_choice_print(opt.choice, choice);
        cf_print(stdout, "  %-42s %-9s", opt.name, choice);
        if (!isnan(opt.ms)) cf_print(stdout, " %8.3f ms; as predicted %.3f, blocking %.3f", opt.ms, opt.first_ms, opt.native_ms);
        cf_print(stdout, "\n");
        LOG_ADD(log, FIELD(opt.name, choice));
        log_trials(t, i, log);
    }
    log_end(log);
    fflush(stdout);
    problem why;
    char *text = *p->path ? print(p) : NULL;
    if (text && !atomic_file_replace(p->path, text, (int64_t)strlen(text), &why))
        cf_print(stderr, "warning: %s; training continues\n", why.what);
    free(text);
}

void plan_step(run_plan *p, logfile *log, int64_t step) {
    const bool trying = cf_tuner_trying(p->tuner), ended = p->trying && !trying;
    p->trying = trying;
    if (p->root && ended) report_found(p, log, step);
}
