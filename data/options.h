// The command line. One table drives the parser, --help, the banner and the log: each option is there
// once, with its type, default, unit, allowed values and help line. Long options only, `--name value` or
// `--name=value`; flags (--dry-run, --help) take no value. Of an option given twice the last value counts. Unknown option, missing or malformed value,
// value out of range: cf_die_together naming the option, with the nearest known option as a hint.
#ifndef OPTIONS_H
#define OPTIONS_H

#include "../commfuse/transport.h"
#include "problem.h"
#include <stdint.h>

CF_EXTERN_C_BEGIN

enum { OPTIONS_MAX = 80 };

typedef struct options {
    // model; 0: as `model` says; init_from "": none; vocab 0: as the data say
    const char *model, *init_from;
    int64_t layers, channels, heads, seq, vocab;
    // data
    const char *train, *val;
    bool verify_data;
    // parallel
    int64_t tp, dp;
    const char *strategy, *transport, *overlap, *route;
    int64_t slices; // 0: 4 for slice, 1 for commfuse
    const char *plan;
    // training
    int64_t batch, micro_batch, steps;
    double lr, min_lr;
    int64_t warmup, decay_steps; // decay_steps 0: steps
    const char *schedule;
    double weight_decay, beta1, beta2, eps, clip;
    int64_t seed, recompute;
    const char *dtype;
    // watching
    int64_t val_every, val_batches, sample_every, sample_tokens, top_k;
    double temperature;
    const char *prompt, *hellaswag;
    int64_t hellaswag_every;
    const char *log, *trace, *trace_steps;
    // output
    const char *out;
    int64_t save_every, keep, keep_every;
    const char *resume, *export_to;
    int64_t export_step;
    // machine
    int64_t threads; // 0: share the cores between the ranks of a host
    double peak_tflops, timeout;
    int64_t skip_nonfinite;
    const char *config, *predict, *predict_ranks;
    bool force, check_wire, dry_run, predict_all, help;
    bool given[OPTIONS_MAX], repeated[OPTIONS_MAX]; // by row of the table: was given; more than once on the command line
} options;

typedef enum { OPTION_INT, OPTION_REAL, OPTION_TEXT, OPTION_CHOICE, OPTION_FLAG } option_type;
typedef struct option_row {
    const char *group; // "model", "data", …: heading in --help
    const char *name;  // without --
    option_type type;
    const char *fallback;    // default, as text; parsed like user input
    double minimum, maximum; // INT and REAL: allowed range
    const char *choices;     // CHOICE: "none|slice|commfuse|nowire"; TEXT: FILE, DIR, GLOB, or A:B (checked)
    const char *help;        // one line
    int64_t offset;          // of the field in struct options
} option_row;
const option_row *options_table(int *count);

// Defaults, then the file of --config, then argv[1…]. Dies together on any error. Texts point into argv, or stay in memory
// until another file is read.
void options_parse(options *o, int argc, char **argv);
// The same, but an error does not end the run: false, see why.
bool options_try(options *o, int argc, char **argv, problem *why);
void options_help(FILE *file);
// The value of a row as text, for banner and log.
void options_value(const options *o, const option_row *row, char *text, int64_t size);
bool options_given(const options *o, const char *name); // was it on the command line, or in the file of --config?
// Prints of which options the last of several values counts, a line each.
void options_print_repeated(const options *o, FILE *file);

// Collective: ranks are started one by one, by mpirun, srun, torchrun or by hand, each with a command line of its own. A rank
// with another --lr would train another model and nothing would look wrong, one with another --overlap would wait for messages
// that nobody sends. Dies together, naming the rank and the option, unless all ranks run one version of the program with
// the same options. Those that belong to a host may differ: its threads, and where files are (their content is compared later).
void options_agree(const options *o, const char *version, cf_transport *transport);

CF_EXTERN_C_END
#endif
