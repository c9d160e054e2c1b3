// What this MPI library makes of each collective that a baseline could call, over the link that it finds.
//
//     mpirun -np N bench_collectives [--rounds R]
//
// A baseline is honest if it takes no longer than a user of the same library must accept. Which call that is cannot be
// read off the name: a reduce-scatter may reduce everything to rank 0 and scatter it from there, and send three times
// what it must; another sends no more and works in memory that it takes from the system anew for every call. So here are
// all of them side by side, of the same blocks, in turns: seconds lie between what is compared. Measured by them are
// call_allgather(), call_reduce_scatter() and call_alltoall() in commfuse/cpu/inflight_mpi.c.
//
// The wire is what the bytes need: each rank exchanges a block with one peer after another, both ways at once. Every rank
// sends (N - 1) blocks in every row. A time is that of the slowest rank between two barriers, and its row the median of
// the rounds; the first of them, in which memory is made, is left out.
//
// Of the commfuse library nothing is used: there is no progress thread here, the caller stands inside the library.
#include <mpi.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIZES = 4, ROUNDS = 15, ROUNDS_MAX = 10000 };
static const int64_t KIB = 1 << 10;
static const int64_t block_kib[SIZES] = {64, 512, 4096, 16384}; // 2048 tokens of d12 on two ranks: 3072

typedef struct blocks { // one for each rank, side by side
    float *from, *into, *stage;
    int *counts; // elements of each block
    int count, ranks, rank;
} blocks;

typedef void collective(const blocks *b);

static void fail(const char *why) {
    fprintf(stderr, "bench_collectives: %s\n", why);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static void finish(MPI_Request request) {
    MPI_Wait(&request, MPI_STATUS_IGNORE);
}

// --- what is compared ---

static void wire(const blocks *b) {
    for (int i = 1; i < b->ranks; i++) {
        int to = (b->rank + i) % b->ranks, from = (b->rank - i + b->ranks) % b->ranks;
        MPI_Sendrecv(b->from + (int64_t)to * b->count, b->count, MPI_FLOAT, to, 0, b->into + (int64_t)from * b->count, b->count,
                     MPI_FLOAT, from, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
}

static void allgather(const blocks *b) {
    MPI_Allgather(b->from, b->count, MPI_FLOAT, b->into, b->count, MPI_FLOAT, MPI_COMM_WORLD);
}

static void iallgather(const blocks *b) {
    MPI_Request request;
    MPI_Iallgather(b->from, b->count, MPI_FLOAT, b->into, b->count, MPI_FLOAT, MPI_COMM_WORLD, &request);
    finish(request);
}

static void alltoall(const blocks *b) {
    MPI_Alltoall(b->from, b->count, MPI_FLOAT, b->stage, b->count, MPI_FLOAT, MPI_COMM_WORLD);
}

static void ialltoall(const blocks *b) {
    MPI_Request request;
    MPI_Ialltoall(b->from, b->count, MPI_FLOAT, b->stage, b->count, MPI_FLOAT, MPI_COMM_WORLD, &request);
    finish(request);
}

static void sum_stage(const blocks *b) {
    memcpy(b->into, b->stage, (size_t)b->count * sizeof *b->into);
    for (int i = 1; i < b->ranks; i++) MPI_Reduce_local(b->stage + (int64_t)i * b->count, b->into, b->count, MPI_FLOAT, MPI_SUM);
}

static void alltoall_and_sum(const blocks *b) {
    alltoall(b);
    sum_stage(b);
}

static void ialltoall_and_sum(const blocks *b) {
    ialltoall(b);
    sum_stage(b);
}

static void reduce_scatter(const blocks *b) {
    MPI_Reduce_scatter(b->from, b->into, b->counts, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static void reduce_scatter_block(const blocks *b) {
    MPI_Reduce_scatter_block(b->from, b->into, b->count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static void ireduce_scatter(const blocks *b) {
    MPI_Request request;
    MPI_Ireduce_scatter(b->from, b->into, b->counts, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request);
    finish(request);
}

static void ireduce_scatter_block(const blocks *b) {
    MPI_Request request;
    MPI_Ireduce_scatter_block(b->from, b->into, b->count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request);
    finish(request);
}

static const struct {
    const char *name, *baseline; // which --overlap calls it
    collective *run;
} row[] = {
    {"the wire: MPI_Sendrecv", "", wire},
    {"MPI_Allgather", "none", allgather},
    {"MPI_Iallgather", "slice", iallgather},
    {"MPI_Alltoall", "none", alltoall},
    {"MPI_Ialltoall", "slice", ialltoall},
    {"MPI_Alltoall and a sum", "none", alltoall_and_sum},
    {"MPI_Ialltoall and a sum", "slice", ialltoall_and_sum},
    {"MPI_Reduce_scatter", "", reduce_scatter},
    {"MPI_Reduce_scatter_block", "", reduce_scatter_block},
    {"MPI_Ireduce_scatter", "", ireduce_scatter},
    {"MPI_Ireduce_scatter_block", "", ireduce_scatter_block},
};
enum { ROWS = sizeof row / sizeof *row };

// --- measuring ---

static void *make(int64_t count, size_t size) {
    void *memory = calloc((size_t)count, size);
    if (!memory) fail("out of memory; use fewer ranks");
    return memory;
}

static blocks make_blocks(int64_t kib) {
    blocks b = {.count = (int)(kib * KIB / (int64_t)sizeof(float))};
    MPI_Comm_size(MPI_COMM_WORLD, &b.ranks);
    MPI_Comm_rank(MPI_COMM_WORLD, &b.rank);
    int64_t all = (int64_t)b.ranks * b.count;
    b.from = make(all, sizeof *b.from);
    b.into = make(all, sizeof *b.into);
    b.stage = make(all, sizeof *b.stage);
    b.counts = make(b.ranks, sizeof *b.counts);
    for (int64_t i = 0; i < all; i++) b.from[i] = (float)(i % 7);
    for (int i = 0; i < b.ranks; i++) b.counts[i] = b.count;
    return b;
}

static void free_blocks(blocks b) {
    free(b.from);
    free(b.into);
    free(b.stage);
    free(b.counts);
}

static double slowest_ms(collective *run, const blocks *b) {
    MPI_Barrier(MPI_COMM_WORLD);
    double begin = MPI_Wtime(), mine, slowest;
    run(b);
    mine = 1e3 * (MPI_Wtime() - begin);
    MPI_Allreduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return slowest;
}

static int ascending(const void *x, const void *y) {
    double a = *(const double *)x, b = *(const double *)y;
    return (a > b) - (a < b);
}

static double median(double *of, int count) {
    qsort(of, (size_t)count, sizeof *of, ascending);
    return count % 2 ? of[count / 2] : (of[count / 2 - 1] + of[count / 2]) / 2;
}

static void measure(int64_t kib, int rounds, double ms[ROWS]) {
    blocks b = make_blocks(kib);
    double *of[ROWS];
    for (int i = 0; i < ROWS; i++) of[i] = make(rounds, sizeof **of);
    for (int round = -1; round < rounds; round++)
        for (int i = 0; i < ROWS; i++) {
            double slowest = slowest_ms(row[i].run, &b);
            if (round >= 0) of[i][round] = slowest;
        }
    for (int i = 0; i < ROWS; i++) {
        ms[i] = median(of[i], rounds);
        free(of[i]);
    }
    free_blocks(b);
}

// --- the table ---

static void print_head(int ranks, int rounds) {
    char library[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    MPI_Get_library_version(library, &length);
    printf("%.*s, %d ranks, blocks of a rank; ms, median of %d rounds in turns (times the wire)\n%-28s%-10s",
           (int)strcspn(library, ","), library, ranks, rounds, "", "--overlap");
    for (int s = 0; s < SIZES; s++) printf("%9lld KiB   ", (long long)block_kib[s]);
    printf("\n");
}

static int rounds_of(int argc, char **argv) {
    if (argc == 1) return ROUNDS;
    char *end = NULL;
    long rounds = argc == 3 && strcmp(argv[1], "--rounds") == 0 ? strtol(argv[2], &end, 10) : 0;
    if (rounds < 1 || rounds > ROUNDS_MAX || *end) fail("mpirun -np N bench_collectives [--rounds 1..10000]");
    return (int)rounds;
}

int main(int argc, char **argv) {
    static double ms[SIZES][ROWS];
    MPI_Init(&argc, &argv);
    int ranks, rank, rounds = rounds_of(argc, argv);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (ranks < 2) fail("one rank sends nothing; start it with mpirun -np 2 or more");
    for (int s = 0; s < SIZES; s++) measure(block_kib[s], rounds, ms[s]);
    if (rank == 0) {
        print_head(ranks, rounds);
        for (int i = 0; i < ROWS; i++) {
            printf("%-28s%-10s", row[i].name, row[i].baseline);
            for (int s = 0; s < SIZES; s++) printf("%9.3f (%4.2f)", ms[s][i], ms[s][i] / ms[s][0]);
            printf("\n");
        }
    }
    MPI_Finalize();
    return 0;
}
