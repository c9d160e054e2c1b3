// The command line. option_list.h has each option once; parser, --help, banner and log follow from it. Options are long:
// `--name value` or `--name=value`; flags (--dry-run) take no value. If an option is repeated, the last value counts. An unknown
// option, or a value that is missing, malformed or out of range, ends the run with a message that names it.
#pragma once
#include "../problem.h"

enum { // rows of the table: OPTION_seq, OPTION_lr, …
#define OPTION(type, kind, field, ...) OPTION_##field,
#include "option_list.h"
    OPTIONS
};
typedef struct options { // 0 and "": see --help of each
#define OPTION(type, kind, field, ...) type field;
#include "option_list.h"
    bool given[OPTIONS]; // by row: on the command line
    char **typed;        // [typed_count] the command line, without the program
    int typed_count;
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

// Reads argv[1…]. Dies together on any error. Texts point into argv.
void options_parse(options *opt, int argc, char **argv);
// The same, but an error does not end the run. False: see why.
bool options_try(options *opt, int argc, char **argv, problem *why);
// One of them, which keeps `text`. False: the text is no value of it, see why.
bool options_set(options *opt, const option_row *row, const char *text, problem *why);
int options_help(FILE *file); // on rank 0; returns the exit status 0
// The value of a row as text, for banner and log.
void options_value(const options *opt, const option_row *row, char *text, int64_t size);
