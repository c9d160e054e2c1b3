// How ranks meet, and what they exchange before (and beside) the transports: at start and at the end, never in a step. The
// environment decides how a run starts:
//   mpirun, or srun with PMI     MPI (if the program was built with it)
//   torchrun, srun, by hand      TCP, by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (bootstrap_sockets.c)
// Without either, the process is alone. (The program for CPUs uses MPI only.)
#pragma once
#include <stdbool.h>
#include <stdint.h>

typedef struct cf_bootstrap cf_bootstrap;
struct cf_bootstrap {
    int rank, size;
    int local_rank, local_size; // among the ranks of this host
    int local_cores;            // that these ranks may use together: launchers may bind them to the same cores or to different ones
    int ranks_per_host;         // as many neighbours are on each host; 0: they are not
    uint64_t network;           // equal where the loopback leads from one rank to the other; 0: unknown
    bool one_network;           // all ranks'
    double timeout_s;           // longest wait for a rank; 0: for ever
    void *comm;                 // the MPI_Comm of these ranks, for its messages alone; NULL: they did not meet by MPI
    // all (size, bytes) = `mine` of every rank, on every rank. Collective.
    void (*allgather)(cf_bootstrap *, const void *mine, void *all, int64_t bytes);
    void (*close)(cf_bootstrap *); // collective; frees the bootstrap
};

// Calls cf_die_setup(). timeout_s: longest wait for a rank to appear.
cf_bootstrap *cf_bootstrap_create(int *argc, char ***argv, double timeout_s);
// The ranks of cf_host.comm, else of MPI_COMM_WORLD. Starts MPI unless the program has; close ends only what was started here. NULL
// if the program was built without MPI, or without `or_alone` if MPI did not start it.
cf_bootstrap *cf_bootstrap_mpi(int *argc, char ***argv, double timeout_s, bool or_alone);
// Ends the run unless code is MPI_SUCCESS. r: the request that the call belongs to, or NULL.
struct cf_request;
void cf_mpi_check(int code, const char *call, const struct cf_request *r);
// For cf_bootstrap_create. Rank 0 is at address and port; size 1: alone, without a listener.
cf_bootstrap *cf_bootstrap_sockets(int rank, int size, const char *address, int port, double timeout_s);
// For the two before: sets what follows from their places, local_rank to one_network. Collective.
void cf_bootstrap_find_neighbours(cf_bootstrap *b);
