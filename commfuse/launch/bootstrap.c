// Chooses between MPI, sockets and a process alone. See bootstrap.h.
//
// RANK, WORLD_SIZE and MASTER_ADDR, if all are set, are meant for this very process, so they come first: a torchrun inside an MPI
// launcher only inherits that launcher's environment. Then MPI, then srun (SLURM_PROCID, SLURM_NTASKS; only in a job step, because
// a batch script has them too, for one process).
#define _GNU_SOURCE
#include "bootstrap.h"
#include "../base/die.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum {
    RANKS_MAX = 1 << 20,
    PORTS = 65536,
    DEFAULT_PORT = 29500 // torchrun's
};

// The variable's value, or fallback if it is not set.
static int number(const char *name, int from, int below, int fallback) {
    const char *text = cf_getenv(name);
    char *end = NULL;
    if (!text) return fallback;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (errno || *end || value < from || value >= below)
        cf_die("that variable comes from the launcher (torchrun, srun) or was set by hand",
               "%s is \"%s\", not a number from %d to %d", name, text, from, below - 1);
    return (int)value;
}

static cf_bootstrap *by_environment(const char *rank_is, const char *size_is, double timeout_s) {
    const char *address = cf_getenv("MASTER_ADDR"), *agent = cf_getenv("TORCHELASTIC_USE_AGENT_STORE");
    int size = number(size_is, 1, RANKS_MAX + 1, 1), rank = number(rank_is, 0, size, 0);
    int port = number("MASTER_PORT", 1, PORTS, DEFAULT_PORT);
    // torchrun's agent listens at MASTER_PORT itself as long as its workers run, and says so: then ranks meet at the next.
    if (cf_getenv("MASTER_PORT") && agent && strcmp(agent, "True") == 0) port += port + 1 < PORTS ? 1 : -1;
    cf_die_setup(rank, size, NULL);
    if (size > 1 && !address)
        cf_die_together("export MASTER_ADDR=HOST of rank 0; under Slurm: export MASTER_ADDR=$(scontrol show "
                        "hostnames \"$SLURM_JOB_NODELIST\" | head -n 1)",
                        "there are several ranks, but MASTER_ADDR is not set: where is rank 0?");
    return cf_bootstrap_sockets(rank, size, address, port, timeout_s);
}

cf_bootstrap *cf_bootstrap_create(int *argc, char ***argv, double timeout_s) {
    const char *mpi_ranks = cf_getenv("OMPI_COMM_WORLD_SIZE") ? cf_getenv("OMPI_COMM_WORLD_SIZE") : cf_getenv("PMI_SIZE");
    bool numbered = cf_getenv("RANK") && cf_getenv("WORLD_SIZE"), complete = numbered && cf_getenv("MASTER_ADDR");
    cf_bootstrap *mpi = complete ? NULL : cf_bootstrap_mpi(argc, argv, timeout_s, false);
    if (mpi) return mpi;
    if (!complete && mpi_ranks && atoi(mpi_ranks) > 1)
        cf_die_together("build with MPI installed (make config says whether it was found), or start with "
                        "torchrun, or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
                        "an MPI launcher started %s ranks, but this program was built without MPI", mpi_ranks);
    if (!numbered && (cf_getenv("RANK") || cf_getenv("WORLD_SIZE")))
        cf_die("set both, and MASTER_ADDR and MASTER_PORT, or neither", "%s is set, but %s is not",
               cf_getenv("RANK") ? "RANK" : "WORLD_SIZE", cf_getenv("RANK") ? "WORLD_SIZE" : "RANK");
    const bool srun = !numbered && cf_getenv("SLURM_STEP_ID") && cf_getenv("SLURM_PROCID") && cf_getenv("SLURM_NTASKS");
    return by_environment(srun ? "SLURM_PROCID" : "RANK", srun ? "SLURM_NTASKS" : "WORLD_SIZE", timeout_s); // or alone
}
