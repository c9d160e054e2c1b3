// A schedule of your own: Domino's halves (arXiv 2409.15241). The rows of a product are computed in two halves. The partial sums of
// one half travel, all at once, while the next half is computed. The program checks the schedule, replays it over costs, and runs
// it.
//
//     cc -O3 domino.c $(pkg-config --cflags --libs commfuse) -o domino && mpirun -np 2 ./domino
#include <commfuse/fuse.h>
#include <commfuse/replay.h>
#include <commfuse/schedule_check.h>
#include <stdio.h>
#include <stdlib.h>

static bool domino(cf_schedule *s, const void *argument) {
    (void)argument;
    const int N = s->ranks, rank = s->rank, halves = s->slices;
    if (halves < 2) return false;      // nothing is computed next: row.fallback
    s->stage_slots = (N - 1) * halves; // the part of rank + 1 + p arrives in slots p · halves + half
    for (int half = 0; half < halves; half++) {
        cf_step compute = {.kind = CF_COMPUTE, .side = CF_COMPUTE_BEFORE, .at = {CF_FULL, half}, .first = half, .count = N};
        int computed = cf_append(s, compute);
        for (int p = N - 2; p >= 0; p--) {
            int from = (rank + 1 + p) % N, to = (rank - 1 - p + N) % N, slice = to * halves + half;
            cf_append(s, (cf_step){.kind = CF_EXCHANGE,
                                   .send = {to, slice},
                                   .from = {CF_FULL, slice},
                                   .recv = {from, rank * halves + half},
                                   .at = {CF_STAGE, p * halves + half},
                                   .wait = {computed},
                                   .joined = p < N - 2}); // one unit for each half
        }
    }
    s->split = s->count;
    // own += (p[0] + p[1]) + …   A half has N steps: one computes, the others exchange.
    for (int half = 0; half < halves; half++)
        cf_append(s, (cf_step){.kind = CF_ADD,
                               .at = {CF_FULL, rank * halves + half},
                               .from = {CF_STAGE, half},
                               .count = N - 1,
                               .wait = {half * N + 2, half * N + N},
                               .range = N > 2});
    return true;
}

static const cf_algorithm domino_row = {.name = "domino",
                                        .serves = CF_SERVES(CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE),
                                        .fallback = "direct",
                                        .generate = domino,
                                        .slices = 2,
                                        .max_slices = 64};

// A shard takes 1 ms to compute, an addition nothing, and a shard 0.6 ms to travel.
static double cost_ms(const void *argument, const cf_schedule *s, const cf_step *step) {
    (void)argument;
    return step->kind == CF_COMPUTE ? (double)step->count / s->slices : 0;
}
static double transfer_ms(const void *argument, const cf_schedule *s, const cf_step *step) {
    (void)argument;
    return (step->kind == CF_COLLECTIVE ? s->ranks - 1 : 1) * 0.6 / s->slices;
}

enum { RANKS = 4, ROWS = 6, COLUMNS = 5 };

static void check_and_replay(const char *name, const cf_algorithm *algorithm, int slices, bool forget) {
    static const cf_machine machine = {.cost_ms = cost_ms, .transfer_ms = transfer_ms, .latency_ms = 0.01};
    cf_schedule *all[RANKS];
    char where[CF_WHERE_TEXT];
    for (int r = 0; r < RANKS; r++)
        all[r] = cf_schedule_create(CF_REDUCE_SCATTER, CF_COMPUTE_BEFORE, algorithm, RANKS, 1, r, slices);
    if (forget) all[1]->step[all[1]->split].wait[0]++; // its first addition waits for all transfers but one
    const char *property = cf_schedule_check(all, where);
    if (property)
        printf("%s violates %s: %s\n", name, property, where);
    else
        printf("%s is correct and takes %.2f ms\n", name, cf_replay(all, RANKS, &machine).finished_ms);
    for (int r = 0; r < RANKS; r++) cf_schedule_free(all[r]);
}

static void compute(void *argument, const cf_span *span, cf_stream *stream) { // element number + rank
    (void)stream;
    for (int block = 0; block < span->blocks; block++)
        for (int64_t i = 0; i < span->rows * COLUMNS; i++)
            ((float *)(span->data + block * span->data_stride))[i] =
                (float)((span->row + block * span->row_stride) * COLUMNS + i) + (float)*(int *)argument;
}

int main(void) {
    cf_errors_return(true);
    cf_context *context = cf_open("auto", 1, 60);
    cf_group *all = context ? cf_group_create(context, "all", NULL, 0) : NULL;
    if (all && all->rank == 0) {
        check_and_replay("none", cf_algorithm_find("none"), 1, false);
        check_and_replay("domino", &domino_row, 2, false);
        check_and_replay("direct", cf_algorithm_find("direct"), 2, false);
        check_and_replay("domino without a wait", &domino_row, 2, true);
    }
    cf_fuse_config config = {.name = "product", .group = all, .algorithm = &domino_row, .slices = 2, .dtype = CF_FP32};
    config.operation = CF_REDUCE_SCATTER, config.side = CF_COMPUTE_BEFORE;
    config.capacity = ROWS * COLUMNS;
    cf_fuse *product = all ? cf_fuse_create(context, config) : NULL;
    float *full = product ? calloc((size_t)all->size * ROWS * COLUMNS, sizeof *full) : NULL;
    float *mine = full ? cf_fuse_run(product, full, ROWS, COLUMNS, compute, &all->rank, -1) : NULL;
    if (!mine) return fprintf(stderr, "%s\n", cf_error()), 1;
    for (int i = 0, N = all->size; i < ROWS * COLUMNS; i++)
        if (mine[i] != (float)(N * (all->rank * ROWS * COLUMNS + i) + N * (N - 1) / 2)) return fprintf(stderr, "wrong sum\n"), 1;
    printf("rank %d of %d: its sums are exact\n", all->rank, all->size);
    free(full);
    cf_fuse_free(product), cf_group_free(all);
    return cf_close(context) ? 0 : 1;
}
