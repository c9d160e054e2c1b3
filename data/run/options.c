// See options.h. Defaults are texts that the same parser reads first: a default outside its range is an error in every run.
#include "options.h"
#include "../../layers/optimizer/optimizers.h"
#include "../../commfuse/schedule.h"
#include "../json.h"

const option_row options_table[OPTIONS] = {
#define OPTION(type, kind, field, name, value, least, most, choices, help)                                                         \
    {GROUP, name, kind, value, least, most, choices, help, offsetof(options, field)},
#include "option_list.h"
};
enum { WIDTH = 110, ECHO_MAX = 120, RANGES_MAX = 1000 };

// --- values ------------------------------------------------------------------------------------------------

static bool is_choice(const char *choices, const char *text) {
    size_t length = strcspn(text, "|");
    if (text[length] != 0) return false;
    for (const char *c = choices; c; c = strchr(c, '|') ? strchr(c, '|') + 1 : NULL)
        if (length > 0 && strncmp(c, text, length) == 0 && (c[length] == '|' || c[length] == 0)) return true;
    return false;
}

static const char decimal[] = "0123456789";

// A:B, or if there may be several A:B,C:D with B <= C.
static bool is_step_range(const char *text, bool several, double least) {
    const size_t first = strspn(text, decimal), second = text[first] == ':' ? strspn(text + first + 1, decimal) : 0;
    const double from = atof(text), to = second > 0 ? atof(text + first + 1) : 0;
    const char *rest = text + first + 1 + second;
    return first > 0 && second > 0 && least <= from && from < to && to <= 1e9 &&
           (*rest == 0 || (several && *rest == ',' && is_step_range(rest + 1, several, to)));
}

// Refuses blanks, hexadecimal numbers, NaN and infinity, which strtod() accepts. A double holds all allowed whole numbers exactly.
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

bool options_set(options *opt, const option_row *row, const char *text, problem *why) {
    void *field = (char *)opt + row->offset;
    if (row->type == OPTION_INT || row->type == OPTION_REAL) return set_number(field, row, text, why);
    if (row->type == OPTION_FLAG) {
        *(bool *)field = *text != 0;
        return true;
    }
    if (row->type == OPTION_CHOICE && !is_choice(row->choices, text))
        return problem_set(why, NULL, "--%s '%.*s' is none of %s", row->name, ECHO_MAX, text, row->choices);
    if (strncmp(row->choices, "A:B", 3) == 0 && *text &&
        (strlen(text) > RANGES_MAX || !is_step_range(text, row->choices[3] != 0, 0)))
        return problem_set(why, NULL, "--%s '%.*s' is not %s with whole numbers 0 <= A < B <= %s1000000000", row->name, ECHO_MAX,
                           text, row->choices, row->choices[3] ? "C < D <= " : "");
    *(const char **)field = text;
    return true;
}

// --- the command line --------------------------------------------------------------------------------------

static const option_row *find(const char *name, size_t length) {
    for (const option_row *row = options_table; row < options_table + OPTIONS; row++)
        if (strlen(row->name) == length && memcmp(row->name, name, length) == 0) return row;
    return NULL;
}

// Sets the option in argv[*at]; *at becomes the last argument used.
static bool set_argument(options *opt, int argc, char **argv, int *at, problem *why) {
    const char *argument = argv[*at], *name = argument + strspn(argument, "-");
    const char *equals = strchr(name, '=');
    size_t length = equals ? (size_t)(equals - name) : strlen(name);
    if (argument[0] != '-' || *name == 0)
        return problem_set(why, "options start with --; quote patterns to keep the shell from expanding them: --train 'data/*.bin'",
                           "unexpected argument '%.*s' (argument %d)", ECHO_MAX, argument, *at);
    const option_row *row = name - argument == 2          ? find(name, length)
                            : strcmp(argument, "-h") == 0 ? &options_table[OPTION_help]
                                                          : NULL;
    if (!row)
        return problem_set(why, "--help lists all options", "unknown option %.*s",
                           (int)(name - argument) + (int)(length < ECHO_MAX ? length : ECHO_MAX), argument);
    opt->given[row - options_table] = true;

    if (row->type == OPTION_FLAG) {
        if (equals) return problem_set(why, NULL, "--%s takes no value, but was given '%.*s'", row->name, ECHO_MAX, equals + 1);
        return options_set(opt, row, "yes", why);
    }
    const char *value = equals ? equals + 1 : *at + 1 < argc ? argv[++*at] : "";
    if (*value == 0 || (!equals && strncmp(value, "--", 2) == 0))
        return problem_set(why, row->help, "--%s needs a value, but %s%.*s", row->name,
                           *value ? "the next argument is " : "there is none", ECHO_MAX, value);
    return options_set(opt, row, value, why);
}

bool options_try(options *opt, int argc, char **argv, problem *why) {
    *opt = (options){.typed = argv + 1, .typed_count = argc - 1};
    for (const option_row *row = options_table; row < options_table + OPTIONS; row++)
        if (!options_set(opt, row, row->fallback, why)) return false;
    for (int i = 1; i < argc; i++)
        if (!set_argument(opt, argc, argv, &i, why)) return false;
    return true;
}

void options_parse(options *opt, int argc, char **argv) {
    problem why;
    if (!options_try(opt, argc, argv, &why)) cf_die_together(why.hint, "%s", why.what);
}

void options_value(const options *opt, const option_row *row, char *text, int64_t size) {
    const void *field = (const char *)opt + row->offset;
    char number[JSON_NUMBER_TEXT];
    if (row->type == OPTION_INT)
        snprintf(text, (size_t)size, "%ld", *(const int64_t *)field);
    else if (row->type == OPTION_FLAG)
        snprintf(text, (size_t)size, "%s", *(const bool *)field ? "yes" : "no");
    else if (row->type == OPTION_REAL)
        snprintf(text, (size_t)size, "%s", json_print_number(*(const double *)field, 6, number));
    else
        snprintf(text, (size_t)size, "%s", *(const char *const *)field);
}

// --- help --------------------------------------------------------------------------------------------------

// Prints `text` from column `from` on; lines after WIDTH columns continue at `from`.
static void print_wrapped(FILE *file, int from, const char *text) {
    int column = from;
    while (*text) {
        int length = (int)strcspn(text, " ");
        if (column + 1 + length > WIDTH) column = cf_print(file, "\n%*s", from, "") - 1;
        if (column > from) column += cf_print(file, " ");
        column += cf_print(file, "%.*s", length, text);
        text += length + strspn(text + length, " ");
    }
    fputc('\n', file);
}

int options_help(FILE *file) {
    if (cf_die_rank() != 0) return 0;
    cf_print(file,
             "usage: mpirun -np N ./train_gpt --train GLOB [options]; the last of an option counts\nTrains a GPT with every "
             "collective fused into the computation "
             "beside it.\n\n  %-38s %-8s %s\n",
             "option", "default", "meaning (allowed range); --name value or --name=value");
    const char *group = "";
    for (const option_row *row = options_table; row < options_table + OPTIONS; row++) {
        if (strcmp(group, row->group) != 0) cf_print(file, "\n%s\n", row->group);
        group = row->group;
        const bool whole = row->type == OPTION_INT, number = whole || row->type == OPTION_REAL;
        char option[128], line[512];
        snprintf(option, sizeof option, "--%s %s", row->name, number ? whole ? "N" : "X" : row->choices ? row->choices : "");
        snprintf(line, sizeof line, number ? "%s (%.10g to %.16g)" : "%s", row->help, row->minimum, row->maximum);
        if (strlen(option) > 38) cf_print(file, "  %s\n", option), *option = 0;
        int from = cf_print(file, "  %-38s %-8s ", option, *row->fallback ? row->fallback : "-");
        print_wrapped(file, from, line);
        for (int i = 0; i < cf_algorithm_count && row == &options_table[OPTION_overlap]; i++)
            print_wrapped(file, cf_print(file, "    %-47s", cf_algorithms[i].name), cf_algorithms[i].help);
    }
    return 0;
}
