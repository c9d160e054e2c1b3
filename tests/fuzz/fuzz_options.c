// The command line, an argument a line. Values that are taken come out the same when they are given again.
#include "tests/fuzz/fuzz.h"
#include "commfuse/schedule.h"
#include "data/run/options.h"

enum { ARGUMENTS = 64, VALUE = 8192 };

// What --help alone needs: names of schedules.
const cf_algorithm cf_algorithms[] = {{.name = "none"}};
const int cf_algorithm_count = 1;

static int split(char *text, char **argv) {
    static char program[] = "train_gpt";
    int argc = 1;
    argv[0] = program;
    for (char *line = strtok(text, "\n"); line && argc < ARGUMENTS; line = strtok(NULL, "\n")) argv[argc++] = line;
    argv[argc] = NULL;
    return argc;
}

static void give_again(const options *o) {
    static char value[VALUE], again[VALUE], argument[VALUE + 64];
    for (const option_row *row = options_table; row < options_table + OPTIONS; row++) {
        options_value(o, row, value, sizeof value);
        FUZZ_CHECK(memchr(value, 0, sizeof value));
        if (row->type == OPTION_FLAG || !o->given[row - options_table]) continue;
        snprintf(argument, sizeof argument, "--%s=%s", row->name, value);
        options second;
        problem wrong;
        char *argv[] = {argument, argument, NULL};
        FUZZ_CHECK(options_try(&second, 2, argv, &wrong) && second.given[row - options_table]);
        options_value(&second, row, again, sizeof again);
        FUZZ_CHECK(strcmp(value, again) == 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    char *text = malloc(size + 1), *argv[ARGUMENTS + 1];
    FUZZ_CHECK(text);
    memcpy(text, bytes, size);
    text[size] = 0;
    options o;
    problem wrong = {.what = ""};
    if (options_try(&o, split(text, argv), argv, &wrong))
        give_again(&o);
    else
        FUZZ_CHECK(*wrong.what && memchr(wrong.what, 0, sizeof wrong.what) && memchr(wrong.hint, 0, sizeof wrong.hint));
    free(text);
    return 0;
}
