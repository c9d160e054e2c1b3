// See startup.h.
#include "startup.h"
#include "derived.h"
#include "../../layers/optimizer/optimizers.h"
#include "../atomic_file.h"
#include "../json.h"
#include <errno.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

enum { PROMPT_BYTES = 1 << 24 };

// The token files of an option, "train" or "val": those with its name in a directory.
static const char *files_of(const char *option, const char *value) {
    static char pattern[PATH_MAX];
    struct stat status;
    if (stat(value, &status) != 0 || !S_ISDIR(status.st_mode)) return value;
    const int length = snprintf(pattern, sizeof pattern, "%s/%s_*.bin", value, option);
    return length < (int)sizeof pattern ? pattern : value;
}

static vocabulary *words_of(const char *option, const char *value) {
    char *first = tokens_first_file(files_of(option, value));
    vocabulary *words = vocabulary_beside(first);
    free(first);
    return words;
}

// Looks beside the tokens, then beside the model file.
vocabulary *startup_vocabulary(const options *opt) {
    vocabulary *words = *opt->train ? words_of("train", opt->train) : words_of("val", opt->val);
    return words ? words : vocabulary_beside(opt->init_from);
}

static int64_t padded(int64_t words) {
    return (words + VOCABULARY_PADDING - 1) / VOCABULARY_PADDING * VOCABULARY_PADDING;
}

void startup_note_words(const options *opt) {
    const char *const option[] = {"train", "val"}, *const value[] = {opt->train, opt->val};
    vocabulary *words[2];
    for (int i = 0; i < 2; i++) {
        words[i] = words_of(option[i], value[i]);
        const int64_t size = vocabulary_size(words[i]);
        if (*value[i] && (opt->vocab > padded(size) || (words[i] && opt->vocab < size)))
            cf_print(stdout,
                     "data      note: --%s has %s tokenizer.bin beside it: %ld words%s, but the model has %ld; do they belong "
                     "together?\n",
                     option[i], words[i] ? "a" : "no", size, words[i] ? "" : ", if it is bytes", opt->vocab);
    }
    if (*opt->train && *opt->val && !vocabulary_same(words[0], words[1]))
        cf_print(stdout, "data      note: the tokenizer.bin beside --train and that beside --val differ, or one has none\n");
    for (int i = 0; i < 2; i++) vocabulary_close(words[i]);
}

tokens *startup_tokens(const options *opt, const char *option, const char *pattern, int64_t V) {
    return *pattern ? tokens_open(files_of(option, pattern), opt->seq, V) : NULL;
}

static int32_t *read_numbers(const char *path, int64_t *count) {
    problem why;
    int64_t size;
    char *text = input_read_all("prompt", path, PROMPT_BYTES, &size, &why), *at = text;
    if (!text) cf_die_together(problem_hint(&why, "every rank must be able to read it"), "--prompt-tokens: %s", why.what);
    int32_t *token = cf_host_alloc(size / 2 + 1, sizeof *token, path);
    for (*count = 0; (at += strspn(at, ", \t\r\n")) < text + size; (*count)++) {
        const size_t digits = strspn(at, "0123456789");
        if (digits == 0 || digits > 9)
            cf_die_together("write numbers in plain digits, with blanks, commas or line ends between them",
                            "--prompt-tokens %s: byte %ld begins no number of a token", path, at - text);
        token[*count] = atoi(at);
        at += digits;
    }
    free(text);
    return token;
}

int32_t *startup_prompt(const options *opt, const vocabulary *words, int64_t *count) {
    const int64_t length = (int64_t)strlen(opt->prompt);
    int32_t *token = *opt->prompt_tokens ? read_numbers(opt->prompt_tokens, count) : cf_host_alloc(length + 1, 4, "a prompt");
    if (*opt->prompt) *count = vocabulary_encode(words, opt->prompt, length, token);
    if (!*opt->prompt && !*opt->prompt_tokens) *count = 1, *token = vocabulary_first(words, opt->vocab);
    if (*count < 1 || *count > opt->seq)
        cf_die_together("a model sees --seq tokens: give at least one, and at most these",
                        "the prompt has %ld tokens; --seq is %ld", *count, opt->seq);
    for (int64_t i = 0; i < *count; i++)
        if (token[i] >= opt->vocab)
            cf_die_together("are model and tokens of one vocabulary? (--vocab, tokenizer.bin)",
                            "token %ld of the prompt is %d, but the vocabulary has %ld", i, token[i], opt->vocab);
    return token;
}

// --- what ranks must have in common ------------------------------------------------------------------------

// Dies together unless all ranks have the same texts. Ranks exchange the beginning of each and the hash of the whole. Frees `mine`.
static void compare(cf_transport *transport, cJSON *mine, const char *kind, const char *hint) {
    typedef struct fact {
        char text[56];
        uint64_t hash;
    } fact;
    const int facts = cJSON_GetArraySize(mine);
    fact *own = cf_host_alloc(facts, sizeof *own, "what ranks compare"), *f = own;
    const cJSON *item;
    cJSON_ArrayForEach(item, mine) {
        snprintf(f->text, sizeof f->text, "%s", item->valuestring);
        f++->hash = XXH64(item->valuestring, strlen(item->valuestring), 0);
    }
    fact *all = f = cf_allgather_alloc(transport, own, facts * (int64_t)sizeof *own);
    for (int i = 0; i < facts * transport->size; i++, f++)
        if (f->hash != all[i % facts].hash)
            cf_die_together(hint, "rank %d has another %s%s than rank 0: '%s', on rank 0 '%s'", i / facts, kind,
                            cJSON_GetArrayItem(mine, i % facts)->string, f->text, all[i % facts].text);
    free(all);
    free(own);
    cJSON_Delete(mine);
}

static cJSON *all_options(const options *opt) {
    cJSON *all = cJSON_CreateObject();
    for (const option_row *row = options_table; row < options_table + OPTIONS; row++) {
        char value[PATH_MAX];
        options_value(opt, row, value, sizeof value);
        manifest_add(all, row->name, "%s", value);
    }
    return all;
}

void startup_compare_options(const options *opt, const char *version, cf_transport *transport) {
    static const int of_a_host[] = {OPTION_threads, OPTION_train, OPTION_val, OPTION_init_from, OPTION_log, OPTION_prompt_tokens};
    cJSON *program = cJSON_CreateObject(), *all = all_options(opt);
    manifest_add(program, "version of this program", "%s", version);
    compare(transport, program, "", "copy one program to every host, or build it there from the same sources");
    for (size_t i = 0; i < sizeof of_a_host / sizeof *of_a_host; i++)
        cJSON_DeleteItemFromObjectCaseSensitive(all, options_table[of_a_host[i]].name);
    compare(transport, all, "--", "start every rank with the same options; some launchers take them per host");
}

void startup_compare_data(const options *opt, cf_transport *transport, const tokens *train, const tokens *val,
                          const int32_t *prompt, int64_t prompt_length, const model_file *start) {
    cJSON *data = cJSON_CreateObject(), *out = cJSON_CreateObject();
    problem why;
    file_hash model = {0, 0};
    if (start && !input_hash(start->in.path, &model, &why)) cf_die(why.hint, "model: %s", why.what);
    manifest_add(data, "fingerprint of --train", "%lu", train ? train->fingerprint : 0);
    manifest_add(data, "fingerprint of --val", "%lu", val ? val->fingerprint : 0);
    manifest_add(data, "size of the vocabulary", "%ld", opt->vocab);
    manifest_add(data, "hash of --init-from", "%lu", model.hash);
    manifest_add(data, "token before a sample", "%d, the first of %ld (hash %lu)", *prompt, prompt_length,
                 (uint64_t)XXH64(prompt, (size_t)prompt_length * sizeof *prompt, 0));
    compare(transport, data, "", "give every host the same files; compare: ls -l, sha256sum");
    // Rank 0 opened --out before this exchange: the lock file in it is new, and no other directory has the same.
    const uint64_t mark = *opt->out ? checkpoint_mark(opt->out) : 0;
    manifest_add(out, "--out", mark ? "a directory with mark %lu" : "no directory where it may write", mark);
    compare(transport, out, "", "give --out a directory of a file system that all hosts share, where all may write");
}

// --- what a checkpoint records of its run ------------------------------------------------------------------

// A manifest holds all options of its run. Most may change when the run resumes: the mesh, how communication overlaps, which
// evaluations are done. These may not, because the result would be neither the old run nor a new one.
enum { OF_MODEL = 12 }; // the first twelve fix the model
static const char *const must_stay[] = {"block",        "kv-heads",  "ffn",          "norm-eps",    "rope-theta",
                                        "rope-stretch", "layers",    "channels",     "heads",       "vocab",
                                        "padded-vocab", "positions", "seq",          "batch",       "lr",
                                        "min-lr",       "warmup",    "schedule",     "decay-steps", "weight-decay",
                                        "beta1",        "beta2",     "eps",          "clip",        "seed",
                                        "dtype",        "steps",     "reduce-dtype", "optimizer",   "train-tokens",
                                        "train-blocks", "define",    "skip-steps",   "z-loss",      "momentum"};
// What some are, if not an option, and what a checkpoint that does not say it had.
static const char *const described[][3] = {{"padded-vocab", "rows of the vocabulary with padding", NULL},
                                           {"positions", "--seq, the model's positions", NULL},
                                           {"block", NULL, "gpt2"},
                                           {"kv-heads", NULL, "0"},
                                           {"ffn", NULL, "0"},
                                           {"norm-eps", NULL, "1e-05"},
                                           {"rope-theta", NULL, "10000"},
                                           {"rope-stretch", "stretch of rotary positions", "none"},
                                           {"train-tokens", "tokens of --train", NULL},
                                           {"train-blocks", "content of --train", NULL},
                                           {"define", "make DEFINE=", "none"},
                                           {"reduce-dtype", NULL, "fp32"},
                                           {"optimizer", NULL, "adamw"},
                                           {"skip-steps", NULL, ""},
                                           {"z-loss", NULL, "0"},
                                           {"momentum", NULL, "0.95"}};

cJSON *startup_describe(const options *opt, const run_facts *facts) {
    cJSON *all = all_options(opt);
    manifest_add(all, "positions", "%ld", facts->shape->maxT);
    manifest_add(all, "padded-vocab", "%ld", facts->shape->Vp);
    const rotary_settings *rope = &facts->shape->rotary;
    manifest_add(all, "rope-stretch", rope->factor > 0 ? "%.17g %.17g %.17g %.17g" : "none", rope->factor, rope->low, rope->high,
                 rope->original);
    manifest_add(all, "train-tokens", "%ld", facts->train ? facts->train->count : 0);
    manifest_add(all, "train-blocks", "%ld", facts->train ? (int64_t)facts->train->fingerprint : 0);
    const char *define = strchr(facts->version, ' '); // see the Makefile
    manifest_add(all, "version", "%s", facts->version);
    manifest_add(all, "define", "%s", define ? define + 1 : "none");
    manifest_add(all, "run", "%s", facts->run);
    char costs[CF_COSTS_TEXT] = "";
    if (facts->costs) cf_costs_print(*facts->costs, costs);
    manifest_add(all, "costs", "%s", costs);
    return all;
}

void startup_name(const manifest *m, char name[RUN_NAME]) {
    uint64_t number = 0;
    const char *old = m ? json_text(m->options, "run") : NULL;
    if (!old && getrandom(&number, sizeof number, 0) != sizeof number) cf_die(NULL, "no random numbers");
    snprintf(name, RUN_NAME, "%016lx", number);
    if (old) snprintf(name, RUN_NAME, "%s", old);
}

bool startup_keep(options *opt, const manifest *m, int ranks) {
    static const int kept[] = {
        OPTION_tp,           OPTION_dp,           OPTION_strategy,    OPTION_micro_batch, OPTION_overlap,
        OPTION_gradients,    OPTION_prefetch,     OPTION_embedding,   OPTION_recompute,   OPTION_ranks_per_host,
        OPTION_reproducible, OPTION_network_gbit, OPTION_reduce_dtype};
    enum { MESH = 3, KEPT = sizeof kept / sizeof *kept }; // the first three are the mesh
    bool same = m && m->ranks == ranks;
    problem why;
    // On any mesh:
    const char *skipped = m && !opt->given[OPTION_skip_steps] ? json_text(m->options, "skip-steps") : NULL;
    if (skipped && !options_set(opt, &options_table[OPTION_skip_steps], skipped, &why)) cf_die_together(NULL, "%s", why.what);
    options all = *opt;
    for (int i = 0; i < KEPT && same; i++) {
        char value[PATH_MAX];
        const option_row *row = &options_table[kept[i]];
        const char *saved = json_text(m->options, row->name);
        const bool given = opt->given[kept[i]];
        options_value(opt, row, value, sizeof value);
        same = i >= MESH || (saved && (!given || strcmp(saved, value) == 0));
        if (!same || !saved || given || (kept[i] == OPTION_overlap && *opt->plan)) continue;
        same = options_set(&all, row, saved, &why);
        if (!same && cf_die_rank() == 0) cf_print(stdout, "note      the checkpoint's choices are not kept: %s\n", why.what);
    }
    if (same) *opt = all;
    return same;
}

int64_t startup_number(const manifest *m, const char *name) {
    const char *text = json_text(m->options, name);
    char *end = NULL;
    long value = text ? strtol(text, &end, 10) : 0;
    return text && *text && !*end ? value : 0;
}

static double saved_real(const manifest *m, const char *name) {
    const char *text = json_text(m->options, name);
    return text ? strtod(text, NULL) : 0;
}

void startup_compare_run(const options *opt, const run_facts *facts, const manifest *m) {
    char model[1024] = "", run[1024] = ""; // "--lr 0.1 (the checkpoint: 0.2), …"
    cJSON *mine = startup_describe(opt, facts);
    // If the learning rate does not depend on --steps, the run may be made longer or shorter.
    const char *schedule = json_text(m->options, "schedule");
    const bool constant = strcmp(opt->schedule, "constant") == 0 && schedule && strcmp(schedule, opt->schedule) == 0,
               steps_may_change = constant || (opt->decay_steps > 0 && startup_number(m, "decay-steps") != 0);
    for (int i = 0; i < (int)(sizeof must_stay / sizeof *must_stay); i++) {
        const char *name = must_stay[i], *now = json_text(mine, name), *saved = json_text(m->options, name), *words = NULL;
        char *list = i < OF_MODEL ? model : run;
        const size_t length = strlen(list);
        for (size_t j = 0; j < sizeof described / sizeof *described; j++)
            if (strcmp(described[j][0], name) == 0) words = described[j][1], saved = saved ? saved : described[j][2];
        if (!saved) saved = "not recorded";
        if (strcmp(now, saved) == 0 || (steps_may_change && strcmp(name, "steps") == 0)) continue;
        if (strcmp(name, "skip-steps") == 0 && derived_same_data(now, saved, m->step)) continue; // others are in later steps
        snprintf(list + length, sizeof run - length, "%s%s%s %s (the checkpoint: %s)", length ? ", " : "", words ? "" : "--",
                 words ? words : name, now, *saved ? saved : "none");
    }
    if (*model)
        cf_die_together("give the options of the checkpoint, or another --out",
                        "the checkpoint of step %ld in %s is of another model: %s", m->step, opt->out, model);
    if (*run && !opt->force)
        cf_die_together("give the options of the checkpoint; or --force to continue with the new ones; or another --out",
                        "the run in %s, saved at step %ld, would be changed by: %s", opt->out, m->step, run);
    cJSON_Delete(mine);
}

// --- the model's shape -------------------------------------------------------------------------------------

// The options of a shape.
static const int of_shape[] = {OPTION_norm_eps, OPTION_rope_theta, OPTION_ffn,   OPTION_kv_heads, OPTION_model,
                               OPTION_layers,   OPTION_channels,   OPTION_heads, OPTION_vocab,    OPTION_block};
enum { OF_BLOCK = 4, OF_SHAPE = sizeof of_shape / sizeof *of_shape }; // the first four some blocks refuse

static gpt_shape shape_of_file(const options *opt, model_file **start) {
    *start = model_file_open(opt->init_from);
    for (int i = 0; i < OF_SHAPE; i++)
        if (opt->given[of_shape[i]])
            cf_die_together("leave out that option", "--%s is set by the model file %s", options_table[of_shape[i]].name,
                            opt->init_from);
    return (*start)->shape;
}

enum { GPT2_WORDS = 50257 }; // of a prediction, which has no tokens

// saved: the checkpoint's shape, which options override; L = 0: there is no checkpoint.
static gpt_shape shape_of_options(const options *opt, const vocabulary *words, const gpt_shape *saved) {
    gpt_shape s = saved->L > 0 && !opt->given[OPTION_model] ? *saved : params_named(opt->model);
    const block_row *asked = params_block_named(opt->block), *block = s.block ? s.block : saved->block;
    if (opt->given[OPTION_block] && opt->given[OPTION_model] && s.block && s.block != asked)
        cf_die_together("leave out one of them", "--model %s has blocks of %s, not of --block %s", opt->model, s.block->name,
                        opt->block);
    s.block = opt->given[OPTION_block] || !block ? asked : block;
    for (int i = 0; i < OF_BLOCK; i++)
        if (opt->given[of_shape[i]] &&
            (s.block->magic == LLM_C_MAGIC || (of_shape[i] == OPTION_rope_theta && s.block->positions != ROTARY)))
            cf_die_together("add --block llama, or leave it out", "--%s: blocks of %s have none", options_table[of_shape[i]].name,
                            s.block->name);
    if (opt->given[OPTION_norm_eps]) s.norm_eps = opt->norm_eps;
    if (opt->given[OPTION_rope_theta]) s.rotary.theta = opt->rope_theta;
    if (opt->ffn > 0) s.F = opt->ffn;
    if (opt->kv_heads > 0) s.KV = opt->kv_heads;
    if (opt->layers > 0) s.L = opt->layers;
    if (opt->channels > 0) s.C = opt->channels;
    if (opt->heads > 0) s.H = opt->heads;
    s.V = opt->vocab > 0                  ? opt->vocab
          : saved->L > 0                  ? saved->V
          : s.V > 0                       ? s.V
          : *opt->predict && !*opt->train ? GPT2_WORDS
                                          : vocabulary_size(words);
    s.Vp = padded(s.V);
    if (s.V == saved->V) s.Vp = saved->Vp;
    if (saved->L > 0 || s.maxT == 0) s.maxT = saved->L > 0 ? saved->maxT : opt->seq;
    return s;
}

// The model file is read only if every rank can read it.
gpt_shape startup_shape(options *opt, const vocabulary *words, const manifest *m, cf_transport *transport, model_file **start) {
    gpt_shape shape = {0};
    if (m) {
        shape = (gpt_shape){.maxT = startup_number(m, "positions"),
                            .V = startup_number(m, "vocab"),
                            .Vp = startup_number(m, "padded-vocab"),
                            .L = startup_number(m, "layers"),
                            .H = startup_number(m, "heads"),
                            .C = startup_number(m, "channels"),
                            .KV = startup_number(m, "kv-heads"),
                            .F = startup_number(m, "ffn"),
                            .norm_eps = saved_real(m, "norm-eps"),
                            .rotary.theta = saved_real(m, "rope-theta")};
        const char *block = json_text(m->options, "block"), *stretch = json_text(m->options, "rope-stretch");
        rotary_settings *r = &shape.rotary;
        shape.block = params_block_named(block ? block : options_table[OPTION_block].fallback);
        if (!shape.block) cf_die("continue with the program that saved it", "the checkpoint in %s has --block %s", opt->out, block);
        if (stretch) sscanf(stretch, "%lf %lf %lf %lf", &r->factor, &r->low, &r->high, &r->original);
        model_shape_check(&shape, "checkpoint in", opt->out);
    }
    if (*opt->export_to) { // nothing is computed, so the smallest activations will do
        opt->seq = opt->tp < shape.maxT ? opt->tp : shape.maxT;
        opt->micro_batch = 1;
    } else {
        const bool readable = cf_allreduce_min(transport, access(opt->init_from, R_OK) == 0);
        shape = *opt->init_from && (readable || shape.L == 0) ? shape_of_file(opt, start) : shape_of_options(opt, words, &shape);
    }
    if (!opt->given[OPTION_seq] && opt->seq > shape.maxT) opt->seq = shape.maxT;
    opt->layers = shape.L, opt->channels = shape.C, opt->heads = shape.H, opt->vocab = shape.V;
    shape = params_filled(shape);
    opt->block = params_block(&shape)->name;
    if (params_block(&shape)->magic != LLM_C_MAGIC) opt->kv_heads = shape.KV, opt->ffn = shape.F;
    opt->norm_eps = shape.norm_eps, opt->rope_theta = shape.rotary.theta;
    return shape;
}

// --- output ------------------------------------------------------------------------------------------------

void startup_open_output(const options *opt) {
    const char *out = opt->out, *hint = "choose another --out DIR that can be written";
    atomic_file file;
    problem why;
    if (strlen(out) + sizeof "/" ORIGIN_MODEL > PATH_MAX) cf_die("choose a shorter --out DIR", "--out is too long");
    if (*out && checkpoint_lock(out, &why) < 0) cf_die(problem_hint(&why, hint), "--out: %s", why.what);
    if (*out && access(out, W_OK) != 0) cf_die(hint, "--out %s cannot be written: %s", out, strerror(errno));
    if (!*opt->trace) return;
    if (!atomic_file_create(&file, opt->trace, -1, &why)) cf_die("choose another --trace FILE", "--trace: %s", why.what);
    atomic_file_abandon(&file); // the timeline of an earlier start stays until this one is written
}

// --- checkpoints -------------------------------------------------------------------------------------------

// Damage is what differs in content.
static void skip(const problem *why) {
    fflush(stdout);
    if (why->unread)
        cf_die("mend that and repeat the command; to use an older checkpoint, move this one away",
               "a checkpoint cannot be read now, and nothing was changed: %s", why->what);
    cf_print(stderr, "warning: rank %d: a checkpoint is skipped: %s\n", cf_die_rank(), why->what);
}

// The newest checkpoint of a step below `below` whose files all have the right hash; for an export no older one. Rank 0 looks in
// the directory; then all ranks read the same manifest, and each verifies some of the files, but not for a dry run.
static manifest *find_sound(const options *opt, cf_transport *transport, int64_t below, bool *damage) {
    const bool root = transport->rank == 0;
    for (;;) {
        problem why = {.what = ""};
        below = cf_broadcast(transport, root ? checkpoint_newest(opt->out, below, &why) : 0);
        manifest *m = below < 0 ? NULL : checkpoint_manifest(opt->out, below, &why);
        bool sound = cf_broadcast(transport, m != NULL);
        if (!m && sound) cf_die("do all hosts share --out?", "rank 0 has found a checkpoint of step %ld: %s", below, why.what);
        if (root && *why.what) {
            skip(&why);
            *damage = true;
        }
        if (below < 0) return NULL;
        const bool look = sound && !opt->dry_run;
        for (int64_t file = transport->rank; look && file < m->ranks; file += transport->size) {
            if (checkpoint_verify(opt->out, m, file, &why)) continue;
            sound = false;
            skip(&why);
        }
        if (cf_allreduce_min(transport, sound)) return m;
        *damage = root;
        manifest_free(m);
        if (*opt->export_to) return NULL;
    }
}

manifest *startup_checkpoint(const options *opt, cf_transport *transport, bool *damage) {
    const int64_t wanted = opt->export_step;
    manifest *m = *opt->out ? find_sound(opt, transport, wanted > 0 ? wanted + 1 : INT64_MAX, damage) : NULL;
    if (*opt->export_to && (!m || (wanted > 0 && m->step != wanted)))
        cf_die_together("ls it; checkpoints are its directories step_*",
                        "%s has no sound checkpoint of --export-step %ld (0: the newest)", opt->out, wanted);
    return m;
}

void startup_resume(const options *opt, const run_facts *facts, const manifest *m, bool damage) {
    problem why;
    if (!m && damage && !opt->force)
        cf_die("restore one from a copy; or choose another --out; or begin a new run beside them with --force",
               "no valid checkpoint in %s", opt->out);
    if (!m && damage) cf_print(stderr, "warning: no valid checkpoint in %s: a new run begins there\n", opt->out);
    if (m) startup_compare_run(opt, facts, m);
    if (m && m->step > opt->steps)
        cf_die_together("raise --steps", "the run in %s has taken %ld steps already, more than --steps %ld", opt->out, m->step,
                        opt->steps);
    if (damage && !checkpoint_set_aside(opt->out, m ? m->step : -1, &why)) cf_die(why.hint, "%s", why.what);
}

saved_state *startup_open_state(const options *opt, const manifest *m, int *kinds) {
    problem why;
    const char *name = json_text(m->options, "optimizer");
    const optimizer_row *of = optimizer_find(name ? name : options_table[OPTION_optimizer].fallback);
    if (!of) cf_die("continue with the program that saved it", "the checkpoint in %s is of --optimizer %s", opt->out, name);
    *kinds = of == optimizer_find(opt->optimizer) ? optimizer_kinds(of).count : 1;
    saved_state *s = saved_state_open(opt->out, m, optimizer_kinds(of), &why);
    if (!s) cf_die(why.hint, "%s", why.what);
    return s;
}

void startup_read_state(void *state, int kind, int tensor, int64_t layer, int64_t first, int64_t count, float *out) {
    problem why;
    if (!saved_state_read((const saved_state *)state, kind, tensor, layer, first, count, out, &why))
        cf_die(why.hint, "this checkpoint is of another model: %s", why.what);
}
