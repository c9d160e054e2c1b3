// ranks: 1
// Which changes of a run are refused: tests/train/test_saving.py has those that options make. Here is what no option can make.
#include "tests/death.h"
#include "tests/data/says.h"
#include "data/run/startup.h"
#include <cjson/cJSON.h>

static const gpt_shape shape = {.maxT = 64, .V = 256, .L = 2, .H = 2, .C = 8, .Vp = 256};
static const run_facts facts = {.shape = &shape, .version = "1", .run = "0123456789abcdef"};

static options given(void) {
    char *argv[] = {"train_gpt", "--train", "tokens.bin", NULL};
    options o;
    assert_true(options_try(&o, 3, argv, &why));
    return o;
}

TEST(what_is_not_recorded_differs) {
    options o = given();
    manifest m = {.step = 3, .ranks = 1, .options = startup_describe(&o, &facts)};
    startup_compare_run(&o, &facts, &m);             // the same
    manifest_add(m.options, "prompt", "%s", "Once"); // an option that older versions had
    startup_compare_run(&o, &facts, &m);
    cJSON_DeleteItemFromObject(m.options, "train-blocks");
    ASSERT_DIES(startup_compare_run(&o, &facts, &m), "saved at step 3, would be changed by",
                "content of --train 0 (the checkpoint: not recorded)");
    o.force = true;
    startup_compare_run(&o, &facts, &m);
    cJSON_DeleteItemFromObject(m.options, "channels");
    ASSERT_DIES(startup_compare_run(&o, &facts, &m), "is of another model", "--channels", "not recorded");
    cJSON_Delete(m.options);
}

// A version is "COMMIT" or "COMMIT DEFINE": another commit resumes, another DEFINE does not.
TEST(another_define_differs) {
    options o = given();
    run_facts plain = facts, relu = facts, later = facts;
    relu.version = "1 -DRELU2 -DX", later.version = "2 -DRELU2 -DX", plain.version = "2";
    manifest with = {.step = 3, .ranks = 1, .options = startup_describe(&o, &relu)};
    manifest without = {.step = 3, .ranks = 1, .options = startup_describe(&o, &facts)};
    startup_compare_run(&o, &later, &with);
    startup_compare_run(&o, &plain, &without);
    ASSERT_DIES(startup_compare_run(&o, &plain, &with), "would be changed by: make DEFINE= none (the checkpoint: -DRELU2 -DX)");
    ASSERT_DIES(startup_compare_run(&o, &relu, &without), "would be changed by: make DEFINE= -DRELU2 -DX (the checkpoint: none)");
    cJSON_DeleteItemFromObject(without.options, "define"); // as older checkpoints
    startup_compare_run(&o, &plain, &without);
    ASSERT_DIES(startup_compare_run(&o, &relu, &without), "make DEFINE= -DRELU2 -DX (the checkpoint: none)");
    o.force = true;
    startup_compare_run(&o, &plain, &with);
    cJSON_Delete(with.options);
    cJSON_Delete(without.options);
}

TEST(names_and_numbers) {
    options o = given();
    char name[RUN_NAME], other[RUN_NAME];
    manifest m = {.step = 3, .ranks = 1, .options = startup_describe(&o, &facts)};
    startup_name(&m, name);
    assert_string_equal(name, facts.run);
    startup_name(NULL, name);
    startup_name(NULL, other);
    assert_int_equal(strlen(name), RUN_NAME - 1);
    assert_string_not_equal(name, other);
    assert_int_equal(startup_number(&m, "positions"), 64);
    assert_int_equal(startup_number(&m, "nothing"), 0);
    assert_int_equal(startup_number(&m, "schedule"), 0); // no number
    cJSON_Delete(m.options);
}

int main(void) {
    return cmocka_run_group_tests(all_tests, NULL, NULL);
}
