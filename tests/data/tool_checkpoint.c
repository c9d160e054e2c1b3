// Small checkpoints from a shell, for test_checkpoint_kill.py.
//
//     tool_checkpoint save OUT STEP SEED RANKS KEEP    saves one of RANKS files and prunes to KEEP
//     tool_checkpoint latest OUT                       tidies OUT, prints step and seed of the newest sound
//                                                      checkpoint, whose values must be those of its seed
//     tool_checkpoint look OUT                         the same without tidying, as a reader beside a run
//
// Exit status 0; 1 and the problem on standard error; 2 if what is there is wrong.
#include "data/checkpoint.h"
#include "tests/data/kinds.h"
#include "data/json.h"
#include <stdlib.h>
#include <unistd.h>

enum { MAX_RANKS = 8, ELEMENTS = 100000, RUN = 1000 };

// Rank r holds layer r of tensor 0, in runs.
static rank_state state_of(int64_t seed, int64_t rank) {
    static state_run run[ELEMENTS / RUN];
    static float value[STATE_KINDS][ELEMENTS];
    uint32_t x = (uint32_t)(seed * 1000 + rank) * 2654435761u + 1;
    for (int64_t i = 0; i < ELEMENTS / RUN; i++) run[i] = (state_run){0, rank, i * RUN, RUN, i * RUN};
    for (int64_t i = 0; i < STATE_KINDS * ELEMENTS; i++) {
        x = x * 1664525u + 1013904223u;
        value[i % STATE_KINDS][i / STATE_KINDS] = (float)(x >> 8);
    }
    return (rank_state){ELEMENTS, ELEMENTS / RUN, run, {value[0], value[1], value[2]}, kinds_of_adamw};
}

static bool save_rank(const char *out, int64_t step, int64_t seed, int64_t rank, file_hash *file, problem *why) {
    char path[PATH_MAX];
    rank_state state = state_of(seed, rank);
    checkpoint_file_path(out, step, rank, true, path);
    return saved_state_write(path, &state, file, why);
}

static bool save(const char *out, int64_t step, int64_t seed, int64_t ranks, int64_t keep, problem *why) {
    const int lock = checkpoint_lock(out, why);
    if (lock < 0) return false;
    file_hash files[MAX_RANKS];
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)seed);
    manifest m = {.step = step, .ranks = ranks, .file = files, .options = cJSON_CreateObject()};
    manifest_add(m.options, "seed", "%s", text);
    bool sound = checkpoint_begin(out, step, why);
    for (int64_t rank = 0; sound && rank < ranks; rank++) sound = save_rank(out, step, seed, rank, &files[rank], why);
    if (!sound) checkpoint_abandon(out, step);
    sound = sound && checkpoint_commit(out, &m, why) && checkpoint_prune(out, keep, 0, why);
    close(lock);
    return sound;
}

static bool right(const saved_state *saved, int64_t seed, int64_t rank) {
    static float found[ELEMENTS];
    rank_state expected = state_of(seed, rank);
    problem why;
    for (int kind = STATE_WEIGHT; kind < STATE_KINDS; kind++)
        if (!saved_state_read(saved, kind, 0, rank, 0, ELEMENTS, found, &why) ||
            memcmp(found, expected.value[kind], sizeof found) != 0)
            return false;
    return true;
}

// Newest first, down to one whose files have the right hashes.
static manifest *newest_sound(const char *out, problem *why) {
    problem unlisted = {.what = ""};
    for (int64_t step = INT64_MAX; (step = checkpoint_newest(out, step, &unlisted)) >= 0;) {
        manifest *m = checkpoint_manifest(out, step, why);
        int64_t rank = 0;
        while (m && rank < m->ranks && checkpoint_verify(out, m, rank, why)) rank++;
        if (m && rank == m->ranks) return m;
        manifest_free(m);
        fprintf(stderr, "%s\n", why->what);
    }
    problem_set(why, NULL, "no checkpoint in %s; %s", out, unlisted.what);
    return NULL;
}

static int latest(const char *out, problem *why) {
    manifest *m = newest_sound(out, why);
    if (!m) return 1;
    const char *seed = json_text(m->options, "seed");
    saved_state *saved = saved_state_open(out, m, kinds_of_adamw, why);
    for (int64_t rank = 0; rank < m->ranks; rank++)
        if (!seed || !saved || !right(saved, atoll(seed), rank)) {
            fprintf(stderr, "step %lld: file %lld is not what was saved\n", (long long)m->step, (long long)rank);
            return 2;
        }
    printf("%lld %s\n", (long long)m->step, seed);
    saved_state_close(saved);
    manifest_free(m);
    return 0;
}

int main(int argc, char **argv) {
    problem why = {.what = ""};
    int status = 1;
    if (argc == 7 && strcmp(argv[1], "save") == 0 && atoll(argv[5]) <= MAX_RANKS) {
        status = !save(argv[2], atoll(argv[3]), atoll(argv[4]), atoll(argv[5]), atoll(argv[6]), &why);
    } else if (argc == 3 && strcmp(argv[1], "latest") == 0) {
        if (checkpoint_lock(argv[2], &why) >= 0) status = latest(argv[2], &why);
    } else if (argc == 3 && strcmp(argv[1], "look") == 0) {
        status = latest(argv[2], &why);
    } else {
        problem_set(&why, NULL, "see the top of tests/data/tool_checkpoint.c");
    }
    if (status == 1) fprintf(stderr, "error: %s\nhint:  %s\n", why.what, why.hint);
    return status;
}
