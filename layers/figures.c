// See figures.h.
#include "figures.h"
#include "../commfuse/die.h"
#include <math.h>
#include <stdlib.h>

void figures_create(rank_figures *f, cf_context *context, const cf_group *world, overlap how) {
    int64_t numbers = world->size * REPORT;
    how.mode = cf_mode_for_figures(how.mode);
    *f = (rank_figures){.context = context, .world = world};
    f->device = cf_alloc(numbers * (int64_t)sizeof(double), "optimizer state");
    f->all = calloc((size_t)numbers, sizeof *f->all);
    if (!f->all) cf_die(NULL, "out of memory for the figures of %d ranks", world->size);
    f->gather = cf_fuse_create(context, overlap_plan(how, "report", world, CF_ALLGATHER, CF_NO_COMPUTE, CF_FP64, REPORT));
}

void figures_free(rank_figures *f) {
    cf_fuse_free(f->gather);
    cf_free(f->device);
    free(f->all);
}

double *figures_mine(rank_figures *f) {
    return f->device + f->world->rank * REPORT;
}

const double *figures_exchange_mine(rank_figures *f) {
    cf_fuse_run(f->gather, f->device, 1, REPORT, NULL, NULL, -1);
    cf_copy(f->all, f->device, f->world->size * REPORT * (int64_t)sizeof(double), f->context->stream);
    cf_stream_sync(f->context->stream);
    return f->all;
}

const double *figures_exchange(rank_figures *f, const double *values, int count) {
    cf_copy(figures_mine(f), values, count * (int64_t)sizeof *values, f->context->stream);
    return figures_exchange_mine(f);
}

void figures_maximum(rank_figures *f, double *values, int count) {
    figures_exchange(f, values, count);
    for (int rank = 0; rank < f->world->size; rank++)
        for (int i = 0; i < count; i++) values[i] = fmax(values[i], f->all[rank * REPORT + i]);
}

double figures_total(const rank_figures *f, int i) {
    double sum = 0;
    for (int rank = 0; rank < f->world->size; rank++) sum += f->all[rank * REPORT + i];
    return sum;
}

double figures_sum(rank_figures *f, double value) {
    figures_exchange(f, &value, 1);
    return figures_total(f, 0);
}
