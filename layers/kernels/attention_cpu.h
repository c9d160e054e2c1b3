// What the CPU's attention needs, which predictions of CPU ranks must know, too.
#pragma once
#include "real.h"

// Backward cuts the keys of a head into blocks until there are so many tasks, but into no fewer rows than these.
enum { ATTENTION_TASKS = 32, ATTENTION_ROWS_MIN = 32, ATTENTION_CHANNELS_MAX = 8192 };
static inline int64_t attention_cpu_key_blocks(int64_t keys, int64_t pairs) {
    return larger(1, smaller(ceil_div(ATTENTION_TASKS, pairs), keys / (2 * ATTENTION_ROWS_MIN)));
}

// Fewer heads are cut into more blocks, so fewer sequences than B may need the most.
static inline int64_t attention_cpu_scratch(int64_t T, int64_t B, int64_t H, int64_t KV, int64_t D) {
    int64_t most = 0;
    for (int64_t b = 1; b <= B; b++) most = larger(most, T * b * H + attention_cpu_key_blocks(T, b * KV) * T * b * H * D);
    return most;
}
