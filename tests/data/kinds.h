// What checkpoints of AdamW hold of an element, in the order of their files.
#pragma once
#include "layers/params.h"

enum { STATE_M = 1, STATE_V, STATE_KINDS };
static const state_kinds kinds_of_adamw = {STATE_KINDS, {"weight", "m", "v"}};
