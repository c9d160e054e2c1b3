// Who the ranks are: MPI, sockets or nobody else. See bootstrap.h.
//
// Which of them: a full set RANK, WORLD_SIZE, MASTER_ADDR was given for this very process, so it goes before
// the environment of an MPI launcher, which a torchrun inside of it only inherits; then MPI; then what srun
// gives (SLURM_PROCID, SLURM_NTASKS; in a step only: in a batch script they are set too, for one process).
// torchrun's agent listens at MASTER_PORT itself as long as its workers run, and says so: then ranks meet at the
// next port.
#define _GNU_SOURCE
#include "bootstrap.h"
#include "die.h"
#include <errno.h>
#include <sched.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    RANKS_MAX = 1 << 20,
    PORTS = 65536,
    DEFAULT_PORT = 29500 // torchrun's
};

static const char *given(const char *name) {
    const char *text = getenv(name);
    return text && *text ? text : NULL;
}

static int number(const char *name, int from, int below) {
    char *end = NULL;
    errno = 0;
    long value = strtol(given(name), &end, 10);
    if (errno || *end || value < from || value >= below)
        cf_die("that variable comes from the launcher (torchrun, srun) or was set by hand",
               "%s is \"%s\", not a number from %d to %d", name, given(name), from, below - 1);
    return (int)value;
}

static const char *master_address(void) {
    const char *address = given("MASTER_ADDR");
    if (!address)
        cf_die_together("export MASTER_ADDR=HOST of rank 0; under Slurm: export MASTER_ADDR=$(scontrol show "
                        "hostnames \"$SLURM_JOB_NODELIST\" | head -n 1)",
                        "there are several ranks, but MASTER_ADDR is not set: where is rank 0?");
    return address;
}

static int master_port(void) {
    const char *agent = given("TORCHELASTIC_USE_AGENT_STORE");
    int port = given("MASTER_PORT") ? number("MASTER_PORT", 1, PORTS) : DEFAULT_PORT;
    if (!agent || strcmp(agent, "True") != 0) return port;
    return port + 1 < PORTS ? port + 1 : port - 1;
}

static void allgather_alone(cf_bootstrap *b, const void *mine, void *all, int64_t bytes) {
    (void)b;
    memcpy(all, mine, (size_t)bytes);
}

static void close_alone(cf_bootstrap *b) {
    free(b);
}

static cf_bootstrap *alone(void) {
    cf_bootstrap *b = calloc(1, sizeof *b);
    if (!b) cf_die(NULL, "out of memory at start");
    *b = (cf_bootstrap){
        .name = "alone", .size = 1, .local_size = 1, .allgather = allgather_alone, .close = close_alone};
    cf_die_setup(0, 1, NULL);
    return b;
}

typedef struct variables {
    const char *rank, *size, *local_rank, *local_size;
} variables;

// What the launcher says about this host goes before what host names say.
static cf_bootstrap *by_environment(const variables *of, double timeout_s) {
    int size = number(of->size, 1, RANKS_MAX + 1), rank = number(of->rank, 0, size);
    cf_die_setup(rank, size, NULL);
    cf_bootstrap *b =
        size == 1 ? alone() : cf_bootstrap_sockets(rank, size, master_address(), master_port(), timeout_s);
    if (given(of->local_size)) b->local_size = number(of->local_size, 1, size + 1);
    if (given(of->local_rank)) b->local_rank = number(of->local_rank, 0, size);
    if (b->local_rank >= b->local_size) b->local_size = b->local_rank + 1;
    return b;
}

static void refuse_mpi_launcher(void) {
    static const char *const sizes[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", NULL};
    for (const char *const *name = sizes; *name; name++)
        if (given(*name) && atoi(given(*name)) > 1)
            cf_die_together("build with MPI installed (make config says whether it was found), or start with "
                            "torchrun, or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
                            "an MPI launcher started %s ranks, but this program was built without MPI",
                            given(*name));
}

cf_bootstrap *cf_bootstrap_create(int *argc, char ***argv, double timeout_s) {
    static const variables torchrun = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
                           slurm = {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "LOCAL_WORLD_SIZE"};
    bool numbered = given("RANK") && given("WORLD_SIZE");
    cf_bootstrap *mpi = numbered && given("MASTER_ADDR") ? NULL : cf_bootstrap_mpi(argc, argv, timeout_s);
    if (mpi) return mpi;
    if (!numbered || !given("MASTER_ADDR")) refuse_mpi_launcher();
    if (numbered) return by_environment(&torchrun, timeout_s);
    if (given("RANK") || given("WORLD_SIZE"))
        cf_die("set both, and MASTER_ADDR and MASTER_PORT, or neither", "%s is set, but %s is not",
               given("RANK") ? "RANK" : "WORLD_SIZE", given("RANK") ? "WORLD_SIZE" : "RANK");
    bool in_step = given("SLURM_STEP_ID") || given("SLURM_STEPID");
    if (in_step && given("SLURM_PROCID") && given("SLURM_NTASKS")) return by_environment(&slurm, timeout_s);
    return alone();
}

typedef struct place {
    char host[64];
    cpu_set_t cores;
} place;

int cf_bootstrap_cores(cf_bootstrap *b) {
    place mine, *all = calloc((size_t)b->size, sizeof *all);
    if (!all) cf_die(NULL, "out of memory for the places of %d ranks", b->size);
    memset(&mine, 0, sizeof mine);
    gethostname(mine.host, sizeof mine.host - 1);
    if (sched_getaffinity(0, sizeof mine.cores, &mine.cores) != 0) // more cores than the set can name
        for (long i = 0; i < sysconf(_SC_NPROCESSORS_ONLN) && i < CPU_SETSIZE; i++) CPU_SET(i, &mine.cores);
    b->allgather(b, &mine, all, (int64_t)sizeof mine);
    for (int rank = 0; rank < b->size; rank++)
        if (strcmp(all[rank].host, mine.host) == 0) CPU_OR(&mine.cores, &mine.cores, &all[rank].cores);
    free(all);
    return CPU_COUNT(&mine.cores);
}
