// See options.h. One table row an option, and everything else walks the table: the parser finds the row by
// name and stores through its offset, --help prints the rows by group, banner and log ask for their values.
// An option therefore cannot be parsed and undocumented, or documented and ignored.
//
// Defaults are texts that go through the same parser as the user's, first, so that a default out of its own
// range is an error in every run and cannot hide. Texts are not copied: they live in argv, or
// in what was read of --config, as long as the run.
//
// Limits are generous for any GPT that fits a machine, and small enough that every product of sizes that the
// program forms fits 64 bits: micro-batch × heads × seq² × 4 bytes is at most 2^60. Integers stop below 2^53,
// so that they pass through the table's doubles, and through any JSON reader, exactly.
//
// Errors are found by options_try(), which returns, and printed by options_parse(), which does not.
#include "options.h"
#include "input.h"
#include "json.h"
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#define INT_MAX_EXACT 9007199254740991.0 // 2^53 - 1

#define INT(field, option, value, low, high, text)                                                                                 \
    { GROUP, option, OPTION_INT, value, low, high, NULL, text, offsetof(options, field) }
#define REAL(field, option, value, low, high, text)                                                                                \
    { GROUP, option, OPTION_REAL, value, low, high, NULL, text, offsetof(options, field) }
#define TEXT(field, option, value, what, text)                                                                                     \
    { GROUP, option, OPTION_TEXT, value, 0, 0, what, text, offsetof(options, field) }
#define CHOICE(field, option, value, values, text)                                                                                 \
    { GROUP, option, OPTION_CHOICE, value, 0, 0, values, text, offsetof(options, field) }
#define FLAG(field, option, text)                                                                                                  \
    { GROUP, option, OPTION_FLAG, "", 0, 0, NULL, text, offsetof(options, field) }

// clang-format off
static const option_row table[] = {
#define GROUP "model"
    CHOICE(model, "model", "d12", "d6|d12|d24|d36|d48",
           "GPT-2 by depth: 384, 768, 1024, 1280, 1600 channels in heads of 64; d12 is GPT-2 124M"),
    INT(layers, "layers", "0", 0, 4096, "blocks; 0: as --model says"),
    INT(channels, "channels", "0", 0, 131072, "width of the model; 0: as --model says"),
    INT(heads, "heads", "0", 0, 1024, "attention heads, which must divide the channels; 0: as --model says"),
    INT(seq, "seq", "1024", 1, 262144, "tokens per sequence"),
    INT(vocab, "vocab", "0", 0, 65536,
        "size of the vocabulary; 0: the model file's, else that of tokenizer.bin beside the training tokens, "
        "else 256"),
    TEXT(init_from, "init-from", "", "FILE", "start from this model file (llm.c format); it sets the shape"),
#undef GROUP
#define GROUP "data"
    TEXT(train, "train", "", "GLOB",
         "token files to train on (llm.c format, made by data/prepare.py); quote a pattern"),
    TEXT(val, "val", "", "GLOB", "token files for the validation loss"),
    FLAG(verify_data, "verify-data",
         "read and hash all tokens, and the file of --init-from, before the run begins, not only parts of them; a run that "
         "goes on compares the tokens with those of its last start if that has done so too"),
#undef GROUP
#define GROUP "parallel"
    INT(tp, "tp", "0", 0, 65536,
        "ranks that share one replica (tensor parallel); 0: ranks / dp, and 1 if dp is 0 too"),
    INT(dp, "dp", "0", 0, 65536, "replicas (data parallel); 0: ranks / tp; tp x dp is the number of ranks"),
    CHOICE(strategy, "strategy", "tpsp", "tpsp|up",
           "tpsp: tensor and sequence parallel; up: Ulysses, whole weights and attention split by heads"),
    CHOICE(transport, "transport", "auto", "auto|mpi|nccl|ipc", "what moves the bytes between ranks"),
    CHOICE(overlap, "overlap", "auto", "auto|none|slice|commfuse|nowire|ideal",
           "auto: for each operation the best, found in the first steps; none: blocking; slice: data slicing; commfuse: "
           "tail-free; for benchmarks, with wrong results: nowire, commfuse without transfers, ideal, none without them"),
    CHOICE(route, "route", "ring", "ring|direct|once",
           "commfuse: neighbour to neighbour; straight to and from the owner, one by one; or all at once"),
    INT(slices, "slices", "0", 0, 1024,
        "slices of an operation (commfuse: of each rank's part); 0: 4 for slice, 1 for commfuse"),
    TEXT(plan, "plan", "", "FILE",
         "auto: how each operation travels (--dry-run prints it, --out keeps it as plan.json); new: find it again"),
#undef GROUP
#define GROUP "training"
    INT(batch, "batch", "0", 0, 1e9,
        "sequences per step over all ranks, a multiple of micro-batch x dp; 0: micro-batch x dp"),
    INT(micro_batch, "micro-batch", "4", 1, 4096,
        "sequences per replica per pass; the rest of a batch is accumulated"),
    INT(steps, "steps", "40", 0, 1e9, "optimizer steps"),
    REAL(lr, "lr", "3e-4", 0, 100, "highest learning rate"),
    REAL(min_lr, "min-lr", "0", 0, 100, "learning rate that the schedule falls towards"),
    INT(warmup, "warmup", "0", 0, 1e9, "steps over which the learning rate rises linearly from 0"),
    CHOICE(schedule, "schedule", "cosine", "cosine|linear|constant|wsd",
           "learning rate after the warm-up; wsd: constant, then down over the last fifth"),
    INT(decay_steps, "decay-steps", "0", 0, 1e9,
        "step at which the schedule has fallen to --min-lr, and stays there, however many --steps are taken; 0: --steps"),
    REAL(weight_decay, "weight-decay", "0.1", 0, 100,
         "AdamW's decoupled decay, of matrices and embeddings only"),
    REAL(beta1, "beta1", "0.9", 0, 0.999999, "AdamW's decay of the first moment"),
    REAL(beta2, "beta2", "0.95", 0, 0.999999, "AdamW's decay of the second moment"),
    REAL(eps, "eps", "1e-8", 1e-30, 1, "AdamW's epsilon"),
    REAL(clip, "clip", "1.0", 0, 1e9, "largest global gradient norm; 0: never clip"),
    INT(seed, "seed", "1337", 0, INT_MAX_EXACT, "of initial weights and data order"),
    INT(recompute, "recompute", "1", 0, 1,
        "1: backward computes GELU and layer norms again; 0: they are kept, which is faster and takes more memory"),
    CHOICE(dtype, "dtype", "auto", "auto|fp32|bf16",
           "type of weights and activations, and in which they travel; auto: fp32 on a CPU, bf16 on a GPU"),
#undef GROUP
#define GROUP "watching"
    INT(val_every, "val-every", "20", 0, 1e9, "steps between validation losses; 0: never"),
    INT(val_batches, "val-batches", "0", 0, 1e9,
        "batches of --batch sequences in a validation loss, from the start of the set, fewer if it is short; 0: 80 sequences, "
        "whatever the batch"),
    INT(sample_every, "sample-every", "0", 0, 1e9,
        "steps between samples of generated text; 0: never, but with --prompt at the end"),
    INT(sample_tokens, "sample-tokens", "256", 1, 1e6, "tokens of a sample, beside the prompt's"),
    TEXT(prompt, "prompt", "", "TEXT|@FILE", "what samples begin with: a text, or that of a file, every byte of it"),
    REAL(temperature, "temperature", "1.0", 0, 1000,
         "of samples: what logits are divided by; 0: always the most likely token"),
    INT(top_k, "top-k", "0", 0, 65536, "samples have only the so many most likely tokens of each moment; 0: all"),
    TEXT(hellaswag, "hellaswag", "", "FILE", "HellaSwag's questions (llm.c format), answered at the end"),
    INT(hellaswag_every, "hellaswag-every", "0", 0, 1e9, "steps between answers; 0: only at the end"),
    TEXT(log, "log", "", "FILE", "log, one JSON object a line"),
    TEXT(trace, "trace", "", "FILE", "timeline of some steps, for chrome://tracing or ui.perfetto.dev"),
    TEXT(trace_steps, "trace-steps", "1:3", "A:B", "steps of the timeline: A up to, but not including, B"),
#undef GROUP
#define GROUP "output"
    TEXT(out, "out", "", "DIR", "directory for what is saved"),
    INT(save_every, "save-every", "0", 0, 1e9,
        "steps between checkpoints; 0: only at the end, or when a signal ends the run"),
    INT(keep, "keep", "2", 0, 1e6, "checkpoints to keep, the newest; 0: all"),
    INT(keep_every, "keep-every", "0", 0, 1e9, "steps whose multiples' checkpoints are kept too; 0: none"),
    CHOICE(resume, "resume", "auto", "auto|no",
           "auto: go on from the newest sound checkpoint in --out; no: refuse if there is one"),
    FLAG(force, "force", "go on although options would change the run, or begin anew where no checkpoint is sound"),
    TEXT(export_to, "export", "", "FILE",
         "write the model of a checkpoint in --out as a model file (llm.c format), then stop"),
    INT(export_step, "export-step", "0", 0, 1e9, "step of that checkpoint; 0: the newest"),
#undef GROUP
#define GROUP "machine"
    INT(threads, "threads", "0", 0, 4096,
        "compute threads per rank; 0: share the cores between the ranks of a host"),
    REAL(peak_tflops, "peak-tflops", "0", 0, 1e6,
         "peak of one rank's device, for the MFU; 0: known for GPUs, measured with a GEMM on CPUs"),
    REAL(timeout, "timeout", "60", 0, 604800,
         "seconds a rank waits for another before it gives up; 0: for ever"),
    INT(skip_nonfinite, "skip-nonfinite", "0", 0, 1e9,
        "steps in a row that may be left out because loss or gradient is not finite; one more ends the run"),
    TEXT(config, "config", "", "FILE",
         "options as a JSON object, or those of the run that has written this log (--log); others on the command line go first"),
    FLAG(check_wire, "check-wire", "checksums on what ranks exchange (commfuse), to find silent corruption"),
    FLAG(dry_run, "dry-run", "check everything, print mesh, memory per purpose, how gradients travel and all schedules, then stop"),
    TEXT(predict, "predict", "", "FILE",
         "what steps would take on the machine of this file (scripts/machines/), by its ranks' schedules; nothing runs"),
    TEXT(predict_ranks, "predict-ranks", "", "A:B",
         "predict all meshes of A, 2A, 4A … B ranks; --micro-batch is then the sequences of a rank, not of a replica"),
    FLAG(predict_all, "predict-all", "play all ranks, at most 64, rather than those of one replica for all"),
    FLAG(help, "help", "this list"),
#undef GROUP
};
// clang-format on

enum {
    ROWS = sizeof table / sizeof *table,
    WIDTH = 110,
    LONGEST_NAME = 40,
    ECHO_MAX = 120,
    VALUE_ROOM = 4096,
    CONFIG_MAX = 1 << 20
};
_Static_assert(sizeof table / sizeof *table <= (size_t)OPTIONS_MAX, "options.given has a place for each row");

const option_row *options_table(int *count) {
    *count = ROWS;
    return table;
}

// --- values ------------------------------------------------------------------------------------------------

static bool is_choice(const char *choices, const char *text) {
    size_t length = strcspn(text, "|");
    if (text[length] != 0) return false;
    for (const char *c = choices; c; c = strchr(c, '|') ? strchr(c, '|') + 1 : NULL)
        if (length > 0 && strncmp(c, text, length) == 0 && (c[length] == '|' || c[length] == 0)) return true;
    return false;
}

static const char decimal[] = "0123456789";

static bool is_step_range(const char *text) {
    const size_t first = strspn(text, decimal), second = text[first] == ':' ? strspn(text + first + 1, decimal) : 0;
    const bool plain = first > 0 && second > 0 && text[first + 1 + second] == 0;
    return plain && atof(text) < atof(text + first + 1) && atof(text + first + 1) <= 1e9;
}

// Whole numbers are digits with one optional sign, others have a point and an exponent too: no blanks, nothing hexadecimal,
// not the NaN and infinity that strtod would take. All of a whole number's range is exact in a double.
static bool set_number(void *field, const option_row *row, const char *text, problem *why) {
    const bool whole = row->type == OPTION_INT;
    const size_t sign = whole && (*text == '-' || *text == '+');
    const char *number = text + sign;
    char *end = NULL;
    bool plain = *number != 0 && number[strspn(number, whole ? decimal : "+-.0123456789eE")] == 0;
    const double value = strtod(text, &end);
    if (!plain || *end != 0 || (!whole && !isfinite(value)))
        return problem_set(why, NULL, "--%s '%.*s' is not a %s; allowed is %.10g to %.16g", row->name, ECHO_MAX, text,
                           whole ? "whole number in plain digits" : "finite decimal number", row->minimum, row->maximum);
    if (value < row->minimum || value > row->maximum)
        return problem_set(why, NULL, "--%s %.*s is out of range: allowed is %.10g to %.16g", row->name, ECHO_MAX, text,
                           row->minimum, row->maximum);
    if (whole)
        *(int64_t *)field = (int64_t)value;
    else
        *(double *)field = value;
    return true;
}

static bool set(options *o, const option_row *row, const char *text, problem *why) {
    void *field = (char *)o + row->offset;
    switch (row->type) {
    case OPTION_INT:
    case OPTION_REAL:
        return set_number(field, row, text, why);
    case OPTION_FLAG:
        *(bool *)field = *text != 0;
        return true;
    case OPTION_CHOICE:
        if (!is_choice(row->choices, text))
            return problem_set(why, NULL, "--%s '%.*s' is none of %s", row->name, ECHO_MAX, text, row->choices);
        break;
    case OPTION_TEXT:
        if (strcmp(row->choices, "A:B") == 0 && *text && !is_step_range(text))
            return problem_set(why, NULL, "--%s '%.*s' is not A:B with whole numbers 0 <= A < B <= 1000000000", row->name, ECHO_MAX,
                               text);
        break;
    }
    *(const char **)field = text;
    return true;
}

// --- names -------------------------------------------------------------------------------------------------

// Levenshtein's distance between a (of a given length, at most LONGEST_NAME) and b.
static int distance(const char *a, size_t length, const char *b) {
    int row[LONGEST_NAME + 1];
    for (size_t i = 0; i <= length; i++) row[i] = (int)i;
    for (; *b; b++) {
        int diagonal = row[0]++;
        for (size_t i = 1; i <= length; i++) {
            int replace = diagonal + (a[i - 1] != *b), skip = (row[i] < row[i - 1] ? row[i] : row[i - 1]) + 1;
            diagonal = row[i];
            row[i] = replace < skip ? replace : skip;
        }
    }
    return row[length];
}

static const option_row *nearest(const char *name, size_t length) {
    const option_row *best = NULL;
    int best_distance = length < 4 ? 2 : 3; // further off is another word
    for (const option_row *row = table; length <= LONGEST_NAME && row < table + ROWS; row++) {
        int d = distance(name, length, row->name);
        if (d >= best_distance) continue;
        best_distance = d;
        best = row;
    }
    return best;
}

static bool unknown(const char *argument, const char *name, size_t length, problem *why) {
    char hint[128] = "--help lists all options";
    const option_row *row = nearest(name, length);
    if (row) snprintf(hint, sizeof hint, "did you mean --%s? --help lists all options", row->name);
    return problem_set(why, hint, "unknown option %.*s", (int)(name + length - argument), argument);
}

static const option_row *find(const char *name, size_t length) {
    for (const option_row *row = table; row < table + ROWS; row++)
        if (strlen(row->name) == length && memcmp(row->name, name, length) == 0) return row;
    return NULL;
}

// --- the command line --------------------------------------------------------------------------------------

// One option, argv[*at] and perhaps the value after it; *at is left on the last argument used.
static bool take(options *o, int argc, char **argv, int *at, problem *why) {
    const char *argument = argv[*at], *name = argument + strspn(argument, "-");
    const char *equals = strchr(name, '=');
    size_t length = equals ? (size_t)(equals - name) : strlen(name);
    if (argument[0] != '-' || *name == 0)
        return problem_set(why, "options start with --; quote a pattern, so that the shell leaves it whole: --train 'data/*.bin'",
                           "unexpected argument '%.*s' (argument %d)", ECHO_MAX, argument, *at);
    const option_row *row = name - argument == 2 ? find(name, length) : strcmp(argument, "-h") == 0 ? find("help", 4) : NULL;
    if (!row) return unknown(argument, name, length < ECHO_MAX ? length : ECHO_MAX, why);
    o->repeated[row - table] = row->type != OPTION_FLAG && o->given[row - table];
    o->given[row - table] = true;

    if (row->type == OPTION_FLAG) {
        if (equals) return problem_set(why, NULL, "--%s takes no value, but was given '%.*s'", row->name, ECHO_MAX, equals + 1);
        return set(o, row, "yes", why);
    }
    const char *value = equals ? equals + 1 : *at + 1 < argc ? argv[++*at] : "";
    if (*value == 0 || (!equals && strncmp(value, "--", 2) == 0))
        return problem_set(why, row->help, "--%s needs a value, but %s%.*s", row->name,
                           *value ? "the next argument is " : "there is none", ECHO_MAX, value);
    return set(o, row, value, why);
}

static bool take_all(options *o, int argc, char **argv, problem *why) {
    for (int i = 1; i < argc; i++)
        if (!take(o, argc, argv, &i, why)) return false;
    return true;
}

static bool take_defaults(options *o, problem *why) {
    *o = (options){0};
    for (const option_row *row = table; row < table + ROWS; row++)
        if (!set(o, row, row->fallback, why)) return false;
    return true;
}

// --- the file of --config ----------------------------------------------------------------------------------

// "lr": 3e-4, "train": "a.bin", "force": true or, as in a log, "yes".
static bool take_item(options *o, const cJSON *item, problem *why) {
    const size_t length = strlen(item->string);
    const option_row *row = find(item->string, length);
    const char *text = cJSON_GetStringValue(item);
    char number[32];
    if (!row) return unknown(item->string, item->string, length < ECHO_MAX ? length : ECHO_MAX, why);
    const bool numeric = row->type == OPTION_INT || row->type == OPTION_REAL, flag = row->type == OPTION_FLAG;
    if (numeric && cJSON_IsNumber(item)) {
        snprintf(number, sizeof number, "%.17g", item->valuedouble); // all digits, and a whole number has no others
        text = number;
    }
    if (flag && text) text = strcmp(text, "yes") == 0 ? text : strcmp(text, "no") == 0 ? "" : NULL;
    if (flag && cJSON_IsBool(item)) text = cJSON_IsTrue(item) ? "yes" : "";
    if (!text)
        return problem_set(why, row->help, "the value of --%s is no %s", row->name,
                           flag      ? "true or false"
                           : numeric ? "number"
                                     : "text");
    if (o->given[row - table]) return problem_set(why, NULL, "--%s is there twice", row->name);
    if (row == find("config", 6)) return problem_set(why, "put all options into one", "--config: a file names no other one");
    o->given[row - table] = *text != 0;
    return set(o, row, text, why);
}

// A log's first line has all values of its run, and says which of them were given: the others follow from these again.
static bool take_file(options *o, const char *path, problem *why) {
    static cJSON *config; // texts stay in it
    static char text[CONFIG_MAX + 1];
    problem wrong = {"", ""};
    input_files *in = input_create("--config", 1);
    bool well = input_add(in, path, why);
    const int64_t length = !well ? 0 : input_bytes(in, 0) < CONFIG_MAX ? input_bytes(in, 0) : CONFIG_MAX;
    well = well && input_read(in, 0, 0, text, length, why);
    input_close(in);
    if (!well) return false;
    text[length] = 0;
    cJSON_Delete(config);
    config = cJSON_ParseWithOpts(text, NULL, false);
    if (!cJSON_IsObject(config))
        return problem_set(why, "write {\"lr\": 3e-4, \"train\": \"tokens/train_*.bin\"}, or name a run's log",
                           "--config %.1500s does not begin with a JSON object", path);
    const char *given = json_is(config, "event", "config") ? json_text(config, "given") : NULL;
    const cJSON *item;
    cJSON_ArrayForEach(item, config) {
        if (given && !is_choice(given, item->string)) continue;
        if (!take_item(o, item, &wrong)) return problem_set(why, wrong.hint, "--config %.1000s: %s", path, wrong.what);
    }
    return true;
}

bool options_try(options *o, int argc, char **argv, problem *why) {
    if (!take_defaults(o, why) || !take_all(o, argc, argv, why)) return false;
    if (!*o->config) return true;
    const char *path = o->config;
    if (!take_defaults(o, why) || !take_file(o, path, why)) return false;
    bool in_file[OPTIONS_MAX];
    memcpy(in_file, o->given, sizeof in_file);
    memset(o->given, 0, sizeof o->given);
    if (!take_all(o, argc, argv, why)) return false;
    for (int i = 0; i < ROWS; i++) o->given[i] |= in_file[i];
    return true;
}

void options_parse(options *o, int argc, char **argv) {
    problem why;
    if (!options_try(o, argc, argv, &why)) cf_die_together(*why.hint ? why.hint : NULL, "%s", why.what);
}

bool options_given(const options *o, const char *name) {
    const option_row *row = find(name, strlen(name));
    if (!row) cf_die(NULL, "options_given: there is no option --%s", name);
    return o->given[row - table];
}

void options_print_repeated(const options *o, FILE *file) {
    char value[VALUE_ROOM];
    for (const option_row *row = table; row < table + ROWS; row++) {
        if (!o->repeated[row - table]) continue;
        options_value(o, row, value, sizeof value);
        fprintf(file, "option    --%s is given more than once; the last one counts: %s\n", row->name, value);
    }
}

void options_value(const options *o, const option_row *row, char *text, int64_t size) {
    const void *field = (const char *)o + row->offset;
    switch (row->type) {
    case OPTION_INT:
        snprintf(text, (size_t)size, "%lld", (long long)*(const int64_t *)field);
        break;
    case OPTION_REAL: // the fewest digits that say it exactly
        for (int digits = 6; digits <= 17; digits++) {
            snprintf(text, (size_t)size, "%.*g", digits, *(const double *)field);
            if (strtod(text, NULL) == *(const double *)field) break;
        }
        break;
    case OPTION_TEXT:
    case OPTION_CHOICE:
        snprintf(text, (size_t)size, "%s", *(const char *const *)field);
        break;
    case OPTION_FLAG:
        snprintf(text, (size_t)size, "%s", *(const bool *)field ? "yes" : "no");
        break;
    }
}

// --- help --------------------------------------------------------------------------------------------------

// Words of `text` from column `from` on, wrapped at WIDTH and indented likewise.
static void print_wrapped(FILE *file, int from, const char *text) {
    int column = from;
    while (*text) {
        int length = (int)strcspn(text, " ");
        if (column + 1 + length > WIDTH) column = fprintf(file, "\n%*s", from, "") - 1;
        if (column > from) column += fprintf(file, " ");
        column += fprintf(file, "%.*s", length, text);
        text += length + strspn(text + length, " ");
    }
    fputc('\n', file);
}

static void print_row(FILE *file, const option_row *row) {
    char option[64], line[512];
    const char *value = row->type == OPTION_INT    ? "N"
                        : row->type == OPTION_REAL ? "X"
                        : row->type == OPTION_FLAG ? ""
                                                   : row->choices;
    snprintf(option, sizeof option, "--%s %s", row->name, value);
    snprintf(line, sizeof line, "%s", row->help);
    if (row->type == OPTION_INT || row->type == OPTION_REAL)
        snprintf(line, sizeof line, "%s (%.10g to %.16g)", row->help, row->minimum, row->maximum);
    int from = fprintf(file, "  %-38s %-8s ", option, *row->fallback ? row->fallback : "-");
    print_wrapped(file, from, line);
}

void options_help(FILE *file) {
    fprintf(file,
            "usage: mpirun -np N ./train_gpt --train GLOB [options]\n"
            "Trains a GPT with every collective fused into the computation beside it.\n\n"
            "  %-38s %-8s %s\n",
            "option", "default", "meaning (allowed range); --name value or --name=value");
    const char *group = "";
    for (const option_row *row = table; row < table + ROWS; row++) {
        if (strcmp(group, row->group) != 0) fprintf(file, "\n%s\n", row->group);
        group = row->group;
        print_row(file, row);
    }
}

// --- all ranks ---------------------------------------------------------------------------------------------

typedef struct fact { // a text, however long
    uint64_t hash;
    char begin[56];
} fact;

static fact fact_of(const char *text) {
    fact f = {.hash = XXH64(text, strlen(text), 0)};
    snprintf(f.begin, sizeof f.begin, "%.*s", (int)sizeof f.begin - 1, text);
    return f;
}

static bool belongs_to_a_host(const char *name) {
    static const char *const those[] = {"threads", "train", "val", "init-from", "hellaswag", "log", "config"};
    for (size_t i = 0; i < sizeof those / sizeof *those; i++)
        if (strcmp(those[i], name) == 0) return true;
    return false;
}

// Versions first, in the place before the options: another one may have another table, whose rows cannot be compared.
void options_agree(const options *o, const char *version, cf_transport *transport) {
    const int ranks = transport->size;
    fact mine[1 + OPTIONS_MAX] = {fact_of(version)}, *all = calloc((size_t)ranks, sizeof mine);
    if (!all) cf_die(NULL, "out of memory for the options of %d ranks", ranks);
    for (int i = 0; i < ROWS; i++) {
        char text[VALUE_ROOM];
        options_value(o, &table[i], text, sizeof text);
        mine[1 + i] = fact_of(belongs_to_a_host(table[i].name) ? "" : text);
    }
    cf_allgather_host(transport, mine, all, sizeof mine);
    for (int place = 0; place <= ROWS; place++)
        for (int rank = 1; rank < ranks; rank++) {
            const fact *other = &all[rank * (1 + OPTIONS_MAX) + place];
            if (other->hash == all[place].hash) continue;
            if (place == 0)
                cf_die_together("copy one program to every host, or build it there from the same sources",
                                "rank %d runs version %s of this program, rank 0 version %s", rank, other->begin, all->begin);
            cf_die_together("start every rank with the same options; some launchers take them per host",
                            "rank %d was started with --%s '%s', rank 0 with '%s'", rank, table[place - 1].name, other->begin,
                            all[place].begin);
        }
    free(all);
}
