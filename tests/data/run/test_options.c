// ranks: 1
#include "tests/death.h"
#include "tests/data/scratch.h"
#include "commfuse/schedule.h"
#include "data/run/options.h"
#include "layers/overlap.h"
#include <math.h>

// The command line "train_gpt WORDS…", words separated by blanks; options point into `line`.
static char line[4096];
static bool try_line(options *o, problem *wrong, const char *words) {
    char *argv[128] = {line};
    int argc = 1;
    memset(wrong, 0, sizeof *wrong);
    snprintf(line, sizeof line, "train_gpt %s", words);
    strtok(line, " ");
    while ((argv[argc] = strtok(NULL, " "))) argc++;
    return options_try(o, argc, argv, wrong);
}

static options parsed(const char *words) {
    options o;
    problem wrong;
    if (!try_line(&o, &wrong, words)) fail_msg("'%s': %s", words, wrong.what);
    return o;
}

static void assert_refused(const char *words, const char *what, const char *hint) {
    options o;
    problem wrong;
    if (try_line(&o, &wrong, words)) fail_msg("'%s' was accepted", words);
    if (!strstr(wrong.what, what)) fail_msg("'%s': '%s' does not say '%s'", words, wrong.what, what);
    if (!strstr(wrong.hint, hint)) fail_msg("'%s': hint '%s' does not say '%s'", words, wrong.hint, hint);
}

static int marked(const bool *rows) {
    int count = 0;
    for (int i = 0; i < OPTIONS; i++) count += rows[i];
    return count;
}

static const option_row *row_of(const char *name) {
    const option_row *rows = options_table;
    const int count = OPTIONS;
    for (int i = 0; i < count; i++)
        if (strcmp(rows[i].name, name) == 0) return &rows[i];
    fail_msg("no row %s", name);
    return NULL;
}

TEST(test_defaults) {
    options o = parsed("");
    assert_string_equal(o.model, "d12");
    assert_string_equal(o.train, "");
    assert_int_equal(o.seq, 1024);
    assert_int_equal(o.tp, 0);
    assert_int_equal(o.dp, 0);
    assert_true(o.lr == 3e-4 && o.beta1 == 0.9 && o.beta2 == 0.95 && o.eps == 1e-8 && o.weight_decay == 0.1);
    assert_int_equal(o.seed, 1337);
    assert_string_equal(o.overlap, "auto");
    assert_string_equal(o.trace_steps, "1:3");
    assert_false(o.dry_run || o.help);
    assert_int_equal(marked(o.given), 0);
}

// So that a script's default can be overridden at the end of its command line.
TEST(test_the_last_one_counts) {
    options o = parsed("--seq 1 --lr 1 --seq=2 --force --lr 0.5 --model d6 --force --train a --lr 2e-4 --train=b");
    assert_true(o.seq == 2 && o.lr == 2e-4 && o.force && strcmp(o.train, "b") == 0);
}

TEST(test_both_spellings) {
    options o = parsed("--seq 64 --lr=2.5e-4 --train=a=b.bin --overlap slice --dry-run --seed 9007199254740991");
    assert_int_equal(o.seq, 64);
    assert_true(o.lr == 2.5e-4);
    assert_string_equal(o.train, "a=b.bin");
    assert_string_equal(o.overlap, "slice");
    assert_true(o.dry_run);
    assert_true(o.seed == INT64_C(9007199254740991));
    assert_true(o.given[OPTION_seq] && o.given[OPTION_dry_run] && o.given[OPTION_train]);
    assert_false(o.given[OPTION_val] || o.given[OPTION_help]);
    assert_int_equal(marked(o.given), 6);
}

// Every row: its default gives its field, both ends of its range are taken, what is beyond is not.
TEST(test_every_row) {
    const option_row *rows = options_table;
    const int count = OPTIONS;
    assert_in_range(count, 60, 99);
    options defaults = parsed("");
    for (const option_row *row = rows; row < rows + count; row++) {
        char words[256], value[256];
        options o;
        for (const option_row *other = rows; other < row; other++) {
            assert_string_not_equal(row->name, other->name);
            assert_int_not_equal(row->offset, other->offset);
        }
        assert_true(strlen(row->help) > 3);
        options_value(&defaults, row, value, sizeof value);
        if (row->type == OPTION_FLAG) {
            assert_string_equal(value, "no");
            snprintf(words, sizeof words, "--%s", row->name);
            o = parsed(words);
            options_value(&o, row, value, sizeof value);
            assert_string_equal(value, "yes");
        } else if (row->type == OPTION_INT || row->type == OPTION_REAL) {
            assert_true(strtod(value, NULL) == strtod(row->fallback, NULL));
            for (int end = 0; end < 2; end++) {
                double limit = end ? row->maximum : row->minimum;
                snprintf(words, sizeof words, "--%s %.17g", row->name, limit);
                o = parsed(words);
                options_value(&o, row, value, sizeof value);
                assert_true(strtod(value, NULL) == limit);
                double step = row->type == OPTION_INT ? 1 : fabs(limit) * 1e-6 + 1e-9;
                snprintf(words, sizeof words, "--%s=%.17g", row->name, end ? limit + step * 2 : limit - step);
                assert_refused(words, "out of range", "");
            }
            snprintf(words, sizeof words, "--%s=x", row->name);
            assert_refused(words, row->name, "");
        } else {
            assert_string_equal(value, row->fallback);
            assert_non_null(row->choices);
        }
    }
}

TEST(test_choices) {
    const option_row *rows = options_table;
    const int count = OPTIONS;
    for (const option_row *row = rows; row < rows + count; row++) {
        if (row->type != OPTION_CHOICE) continue;
        char choices[256], words[256], value[64];
        snprintf(choices, sizeof choices, "%s", row->choices);
        for (char *rest = choices, *one; (one = strsep(&rest, "|"));) {
            snprintf(words, sizeof words, "--%s %s", row->name, one);
            options o = parsed(words);
            options_value(&o, row, value, sizeof value);
            assert_string_equal(value, one);
        }
        snprintf(words, sizeof words, "--%s %s", row->name, row->choices);
        if (strchr(row->choices, '|')) assert_refused(words, row->choices, "");
    }
    assert_refused("--strategy tp", "--strategy 'tp' is none of tpsp|up", "");
    assert_refused("--strategy TPSP", "'TPSP'", "");
}

// What schedules were called before they had one name each.
TEST(test_old_names_of_schedules) {
    assert_refused("--slice 2", "slice", "--help lists all options");
}

TEST(test_malformed_numbers) {
    assert_refused("--seq 12x", "--seq '12x' is not a whole number", "");
    assert_refused("--seq 1.5", "'1.5'", "");
    assert_refused("--seq 1e3", "'1e3'", "");
    assert_refused("--seq 0x10", "'0x10'", "");
    assert_refused("--seq -", "'-'", "");
    assert_refused("--seq -3", "--seq -3 is out of range: allowed is 1 to 262144", "");
    assert_refused("--seq 9223372036854775808", "out of range", "");
    assert_refused("--seq 99999999999999999999999999999999999999999", "out of range", "");
    assert_refused("--seed 9007199254740992", "out of range", "");
    assert_refused("--seed 9007199254740993", "out of range", "");
    assert_refused("--lr nan", "--lr 'nan' is not a finite decimal number", "");
    assert_refused("--lr inf", "'inf'", "");
    assert_refused("--lr 1e999", "'1e999'", "");
    assert_refused("--lr 0x1p3", "'0x1p3'", "");
    assert_refused("--lr 1e", "'1e'", "");
    assert_refused("--lr 1-2", "'1-2'", "");
    assert_refused("--lr -1e-9", "out of range", "");
    assert_refused("--beta2 1", "out of range", "");
}

TEST(test_words) {
    assert_refused("--micro_batch 3", "unknown option --micro_batch", "--help lists all options");
    assert_refused("--betal 1", "unknown option --betal", "--help lists all options");
    assert_refused("--layer=3", "unknown option --layer", "--help lists all options");
    assert_refused("-seq 4", "unknown option -seq", "--help lists all options");
    assert_refused("---seq 4", "unknown option ---seq", "--help lists all options");
    assert_refused("--learning-rate 1", "unknown option --learning-rate", "--help lists all options");
    assert_refused("--seq", "--seq needs a value, but there is none", "");
    assert_refused("--seq=", "--seq needs a value", "");
    assert_refused("--train --val x", "--train needs a value, but the next argument is --val", "");
    assert_refused("--dry-run=yes", "--dry-run takes no value", "");
    assert_refused("--seq x --lr 1 --seq=2", "--seq 'x'", ""); // the first must be one, too
    assert_refused("--train a_1.bin a_2.bin", "unexpected argument 'a_2.bin' (argument 3)", "quote patterns");
    assert_refused("-- x", "unexpected argument '--'", "");
    options o;
    problem wrong;
    char *empty[] = {line, (char *)"--log", (char *)""}, *nothing[] = {line, (char *)""};
    assert_false(options_try(&o, 3, empty, &wrong));
    assert_non_null(strstr(wrong.what, "--log needs a value"));
    assert_false(options_try(&o, 2, nothing, &wrong));
    assert_non_null(strstr(wrong.what, "unexpected argument ''"));
}

TEST(test_step_range) {
    assert_string_equal(parsed("--trace-steps 0:1").trace_steps, "0:1");
    const char *const wrong[] = {"3", "3:3", "3:2", "-1:2", "1:", ":2", "1:2:3", "a:b", "1:99999999999"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char words[64];
        snprintf(words, sizeof words, "--trace-steps %s", wrong[i]);
        assert_refused(words, "is not A:B", "");
    }
}

TEST(test_values_as_text) {
    char text[64];
    options o = parsed("--lr 0.0003 --weight-decay 0.1 --eps 1.2345678901234567e-8 --clip 1000000");
    options_value(&o, row_of("lr"), text, sizeof text);
    assert_string_equal(text, "0.0003");
    options_value(&o, row_of("weight-decay"), text, sizeof text);
    assert_string_equal(text, "0.1");
    options_value(&o, row_of("clip"), text, sizeof text);
    assert_string_equal(text, "1e+06");
    options_value(&o, row_of("eps"), text, sizeof text);
    assert_true(strtod(text, NULL) == 1.2345678901234567e-8);
    options_value(&o, row_of("model"), text, 3); // cut, not overrun
    assert_string_equal(text, "d1");
}

TEST(test_help) {
    char *path = scratch_path("help");
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    options_help(file);
    fclose(file);
    size_t size;
    char *text = scratch_read(path, &size);
    int documented = 0;
    const option_row *rows = options_table;
    for (char *at = text; *at; at += strcspn(at, "\n") + 1) {
        size_t length = strcspn(at, "\n");
        assert_true(length <= 110);
        assert_true(length == 0 || at[length - 1] != ' ');
        if (strncmp(at, "  --", 4) != 0) continue;
        assert_true(documented < OPTIONS);
        size_t name = strlen(rows[documented].name);
        assert_memory_equal(at + 4, rows[documented].name, name);
        assert_true(at[4 + name] == ' ');
        documented++;
    }
    assert_int_equal(documented, OPTIONS);
    for (int i = 0; i < cf_algorithm_count; i++) { // the names of schedules, each on a line of its own
        char name[64];
        snprintf(name, sizeof name, "\n    %s  ", cf_algorithms[i].name);
        assert_non_null(strstr(text, name));
    }
    assert_non_null(strstr(text, "(1 to 262144)"));
    free(text);
}

TEST(test_dies) {
    options o;
    char *wrong[] = {line, (char *)"--seeed", (char *)"3"}, *right[] = {line, (char *)"--seed", (char *)"3"};
    ASSERT_DIES(options_parse(&o, 3, wrong), "error:", "unknown option --seeed", "--help lists all options");
    options_parse(&o, 3, right);
    assert_int_equal(o.seed, 3);
}

// Random command lines: never a crash, and what is refused is explained.
TEST(test_noise) {
    static const char letters[] = "--==seqlrtrainvaltrace-steps0123456789.:eE+-|\xff\x01";
    uint64_t x = 1;
    for (int round = 0; round < 20000; round++) {
        char words[3][64], *argv[4] = {line, words[0], words[1], words[2]};
        for (int w = 0; w < 3; w++) {
            x = x * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            size_t length = (size_t)(x >> 59);
            for (size_t i = 0; i < length; i++) {
                x = x * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
                words[w][i] = letters[(x >> 33) % (sizeof letters - 1)];
            }
            words[w][length] = 0;
            if (w == 0 && round % 2) snprintf(words[w], sizeof words[w], "--%s", row_of("trace-steps")[-(int)(x >> 60)].name);
        }
        options o;
        problem wrong = {.what = ""};
        if (!options_try(&o, 4, argv, &wrong)) assert_true(strlen(wrong.what) > 5);
    }
}

// The preset that a help text names for a schedule: the word before "for" in whose list it is, or behind "else".
static const char *preset_said(const char *help, const char *schedule) {
    static char text[512], *word[64];
    int words = 0, value = -1;
    snprintf(text, sizeof text, "%s", strstr(help, "preset: ") ? strstr(help, "preset: ") + 8 : strstr(help, "-1: ") + 4);
    for (char *w = strtok(text, " ,;:"); w && words < 64; w = strtok(NULL, " ,;:")) word[words++] = w;
    for (int i = 0; i < words; i++) {
        if (i + 1 < words && strcmp(word[i + 1], "for") == 0)
            value = i++;
        else if (strcmp(word[i], "else") == 0)
            return word[i + 1];
        else if (strcmp(word[i], schedule) == 0)
            return word[value];
    }
    return "nothing";
}

// What --help says of presets is what they are.
TEST(test_presets) {
    static const char *const when[] = {"end", "ready", "owners", "auto"}, *const what[] = {"table", "rows", "auto"};
    for (int i = -1; i < cf_algorithm_count; i++) {
        const char *name = i < 0 ? "auto" : cf_algorithms[i].name, *prefetch = row_of("prefetch")->help;
        overlap o;
        assert_true(overlap_parse(&o, name, "preset", -1, "preset"));
        assert_string_equal(preset_said(row_of("gradients")->help, name), when[o.gradients]);
        assert_string_equal(preset_said(row_of("embedding")->help, name), what[o.embedding]);
        const bool of_choice = strstr(strrchr(prefetch, ';'), name) != NULL;
        assert_int_equal(of_choice, o.prefetch == PREFETCH_AUTO);
        if (!of_choice) assert_string_equal(preset_said(prefetch, name), o.prefetch == PREFETCH_ALL ? "all" : "4");
    }
}

int main(void) {
    return cmocka_run_group_tests(all_tests, scratch_make, scratch_remove);
}
