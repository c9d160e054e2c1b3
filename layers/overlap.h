// How every operation of the model communicates, and what else is communicated, and when.
//
// The schedule is the order of transfers and computation within one operation (commfuse/). The policy is everything apart from it,
// so that an experiment can change either alone. Each schedule has a policy that is usual for it, its preset (README.md, "Policy").
//
// Between GPUs' hosts a library's collective, too, sends a shard to each host once, in fewer messages than levels. So with levels
// what has no computation to hide behind is then chosen as by auto.
#pragma once
#include "../commfuse/fuse.h"

// Gradients of weights are reduced at the end of backward; each when backward has completed it; or while they are computed, owner
// by owner, if an owner has enough rows for a good product. auto: by owners where the rest of backward is too short to hide them.
typedef enum { GRADIENTS_END, GRADIENTS_READY, GRADIENTS_OWNERS, GRADIENTS_AUTO } gradients_policy;
// Of the token table, replicas exchange all of it, or the rows that their tokens name (lookup.h).
typedef enum { EMBEDDING_TABLE, EMBEDDING_ROWS, EMBEDDING_AUTO } embedding_policy;
enum { PREFETCH_AUTO = -1, PREFETCH_SOME = 4, PREFETCH_ALL = 4096 };

typedef struct overlap {
    cf_choice schedule;
    gradients_policy gradients;
    int64_t prefetch; // layers ahead of their use that weights are gathered, at most; all layers: at once, after the update
    embedding_policy embedding;
    bool round_gradients; // to real before they are communicated
} overlap;

// From the values of --overlap, --gradients, --prefetch and --embedding; "preset" and −1: the preset's. false: no schedule has that
// name.
static inline bool overlap_parse(overlap *o, const char *schedule, const char *gradients, int64_t prefetch, const char *embedding) {
    static const char *const when[] = {"end", "ready", "owners", "auto"}, *const what[] = {"table", "rows", "auto"};
    if (!cf_choice_parse(schedule, &o->schedule)) return false;
    const cf_algorithm *a = o->schedule.algorithm; // NULL: auto
    const bool native = a && (a->bound ? cf_algorithm_find(a->fallback) : a)->native, choose = !a || a->levels;
    o->gradients = choose ? GRADIENTS_AUTO : a->blocking ? GRADIENTS_END : native ? GRADIENTS_READY : GRADIENTS_OWNERS;
    o->prefetch = choose ? PREFETCH_AUTO : native ? PREFETCH_ALL : PREFETCH_SOME;
    o->embedding = choose ? EMBEDDING_AUTO : native ? EMBEDDING_TABLE : EMBEDDING_ROWS;
    for (int i = 0; i < 4; i++)
        if (strcmp(gradients, when[i]) == 0) o->gradients = (gradients_policy)i;
    for (int i = 0; i < 3; i++)
        if (strcmp(embedding, what[i]) == 0) o->embedding = (embedding_policy)i;
    if (prefetch >= 0) o->prefetch = prefetch;
    return true;
}

// capacity: elements of one rank's shard, at most. The caller sets the fields that few operations need.
static inline cf_fuse_config overlap_config(const overlap *o, const char *name, const cf_group *group, cf_operation operation,
                                            cf_side side, cf_dtype dtype, int64_t capacity) {
    cf_fuse_config config;
    memset(&config, 0, sizeof config);
    config.name = name, config.group = group;
    config.operation = operation, config.side = side;
    config.algorithm = o->schedule.algorithm, config.slices = side == CF_NO_COMPUTE ? 1 : o->schedule.slices;
    if (side == CF_NO_COMPUTE && config.algorithm && config.algorithm->levels && group->hierarchy) config.algorithm = NULL;
    config.dtype = dtype, config.capacity = capacity;
    return config;
}

// An operation for --dry-run: its place in the model, and how many times it runs in a step of one micro-batch.
typedef void visit_operation(void *argument, const char *place, cf_fuse *fuse, int64_t times);
