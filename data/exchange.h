// How the ranks of a run come to common decisions: each gives some numbers, and all get those of all.
#ifndef EXCHANGE_H
#define EXCHANGE_H

#include <stdbool.h>

typedef struct rank_exchange {
    int rank, ranks;
    int stride; // numbers that each may give, at most
    // Collective. Returns (ranks, stride), valid until the next call.
    const double *(*give)(void *argument, const double *values, int count);
    void *argument;
} rank_exchange;

// Collective. Is it so on every rank?
static inline bool exchange_all(const rank_exchange *e, bool here) {
    const double mine = here, *of_rank = e->give(e->argument, &mine, 1);
    bool everywhere = true;
    for (int rank = 0; rank < e->ranks; rank++) everywhere = everywhere && of_rank[rank * e->stride] != 0;
    return everywhere;
}

// Collective. Rank 0's number.
static inline double exchange_root(const rank_exchange *e, double mine) {
    return e->give(e->argument, &mine, 1)[0];
}

#endif
