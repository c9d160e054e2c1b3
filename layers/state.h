// This rank's part of the state that the next step depends on: the weights (the masters, where weights are rounded copies
// of them) and AdamW's two moments. Every element of the model is owned by one rank, so the ranks' states together hold
// each element once.
//
// Each run records the place of its elements in the whole model, so that a state can be restored on any mesh.
#ifndef STATE_H
#define STATE_H

#include "optimizer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { STATE_WEIGHT, STATE_M, STATE_V, STATE_KINDS } state_kind;

// value[…][at, at + count) are elements [whole, whole + count) of one layer of a tensor.
typedef struct state_run {
    int64_t tensor, layer, whole, count, at;
} state_run;

// A copy in the host's memory.
typedef struct rank_state {
    int64_t elements, runs;
    state_run *run;              // (runs)
    precise *value[STATE_KINDS]; // (elements) padding, which belongs to no run, is zero
} rank_state;

void state_create(rank_state *s, const zero_optimizer *o);
void state_free(rank_state *s);

// Copies the state between two steps. Not collective.
void state_take(rank_state *s, const zero_optimizer *o);

// The inverse: `read` returns elements of the whole model. Fills all weights that this rank holds, owned or not.
typedef void state_reader(void *argument, state_kind kind, int tensor, int64_t layer, int64_t first,
                          int64_t count, precise *out);
void state_give(zero_optimizer *o, state_reader *read, void *argument);

#ifdef __cplusplus
}
#endif
#endif
