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

enum {
    OPTIONS = 0
#define OPTION(...) +1
#include "option_list.h"
};
typedef struct options { // 0 and "": see the help of each
#define OPTION(type, kind, field, ...) type field;
#include "option_list.h"
    bool given[OPTIONS], repeated[OPTIONS]; // by row of the table: was given; more than once on the command line
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
extern const option_row options_table[];

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
