// How the ranks of a run come to common decisions: each gives some numbers, and all get those of all.
#ifndef TOGETHER_H
#define TOGETHER_H

typedef struct together {
    int rank, ranks;
    int stride; // numbers that each may give, at most
    // Collective. Returns (ranks, stride), valid until the next call.
    const double *(*exchange)(void *argument, const double *values, int count);
    void *argument;
} together;

#endif
