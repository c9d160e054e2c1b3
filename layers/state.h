// Copies of the state that this rank owns (params.h), and the way back, on any mesh.
#ifndef STATE_H
#define STATE_H

#include "optimizer.h"

CF_EXTERN_C_BEGIN

void state_create(rank_state *s, const zero_optimizer *o);
void state_free(rank_state *s);

// Copies the state between two steps. Not collective.
void state_take(rank_state *s, const zero_optimizer *o);

// The inverse: `read` returns elements of the whole model. Fills all weights that this rank holds, owned or not.
typedef void state_reader(void *argument, state_kind kind, int tensor, int64_t layer, int64_t first, int64_t count, precise *out);
void state_give(zero_optimizer *o, state_reader *read, void *argument);

CF_EXTERN_C_END
#endif
