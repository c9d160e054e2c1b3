// Numbers that every rank reports to all others: a few doubles each, by one small all-gather.
#ifndef FIGURES_H
#define FIGURES_H

#include "overlap.h"

CF_EXTERN_C_BEGIN

enum { REPORT = 8 }; // numbers of a rank, at most

typedef struct rank_figures {
    cf_context *context;
    const cf_group *world;
    cf_fuse *gather;
    double *device; // (world, REPORT)
    double *all;    // (world, REPORT) the host's, after an exchange
} rank_figures;

void figures_create(rank_figures *f, cf_context *context, const cf_group *world, overlap how);
void figures_free(rank_figures *f);

// Rank r's are at r · REPORT, valid until the next exchange. Collective, like all that follows.
const double *figures_exchange(rank_figures *f, const double *values, int count);
// The same, of what is at figures_mine() in the device's memory.
double *figures_mine(rank_figures *f);
const double *figures_exchange_mine(rank_figures *f);
// values[i] becomes the maximum over all ranks, the same on all.
void figures_maximum(rank_figures *f, double *values, int count);
double figures_sum(rank_figures *f, double value);
// Of number `i` of all ranks, in the last exchange, in the order of ranks.
double figures_total(const rank_figures *f, int i);

CF_EXTERN_C_END
#endif
