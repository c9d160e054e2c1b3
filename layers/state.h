// The state of training: a rank's part of a checkpoint, restored on any mesh; and the whole model.
#pragma once
#include "model.h"

// state_copy: copies the state that this rank owns (params.h), between two steps, after gpt_finish_step(); not collective. The
// first time it makes room (state_create). state_restore: the reverse, on any mesh: `read` returns elements of the whole model; all
// weights that this rank holds are filled, owned or not. kinds: the first so many are read, the others stay zero.
void state_create(rank_state *s, const zero_shards *z);
void state_free(rank_state *s);
void state_copy(rank_state *s, const zero_shards *z);
void state_restore(zero_shards *z, int kinds, params_reader *read, void *argument);

// The whole model in the order of llm.c's files: every rank of the replica calls this, and `append` of its first rank gets the
// elements.
void gpt_collect(gpt *g, void (*append)(void *argument, const float *values, int64_t count), void *argument);
