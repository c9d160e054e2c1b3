// The ranks of an MPI launcher. See bootstrap.h.
//
// MPI_Init without a launcher makes a world of one rank, and in some libraries fails because their daemons are missing. So the GPU
// program calls it only if the environment shows an MPI launcher.
#include "bootstrap.h"
#include <stddef.h>

#ifdef CF_WITH_MPI
#include "../base/die.h"
#include "../base/limits.h"
#include "../memory.h"
#include "../transport.h"
#include "watch.h"
#include <mpi.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef OPEN_MPI
#define SRUN "srun --mpi=pmix"
#else // MPICH and its kin
#define SRUN "srun --mpi=pmi2"
#endif
// Time for MPI's start, in timeouts: its launcher watches the ranks too, and all start at once, on hosts that may be busy.
enum { START_TIMEOUTS = 10 };
// That a rank will have at least; alone it has those of Open MPI's daemon, too.
enum { THREADS = 6, THREADS_ALONE = 9 };
static bool started_here; // MPI was, in this process
static MPI_Comm ours;     // a copy, so that messages of the program do not mix with the library's
static const char hint[] = "start it with the mpirun of the MPI library that it was built with (make config names it), or under "
                           "Slurm with " SRUN " (srun --mpi=list prints the choices)";

void cf_mpi_check(int code, const char *call, const cf_request *r) {
    if (code == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING], of[CF_OPERATION_TEXT] = "start or end";
    int length = 0;
    MPI_Error_string(code, text, &length);
    if (r) cf_operation_text(of, r->label, r->layer, r->step);
    cf_die("see the messages of the other ranks; a rank may have died, or has another config of that operation",
           "%s failed: %s (%s)", call, text, of);
}

static bool started_by_mpi(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK", "MPI_LOCALRANKID", NULL};
    for (const char *const *name = names; *name; name++)
        if (getenv(*name)) return true;
    return false;
}

// A launcher that MPI does not know would make every process rank 0 of a separate run. All processes notice; only the first one
// prints it.
static void refuse_strays(void) {
    static const char *const sizes[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE", NULL};
    for (const char *const *name = sizes; *name; name++) {
        const char *text = getenv(*name);
        if (!text || atoi(text) < 2 || (strcmp(*name, "WORLD_SIZE") == 0 && !getenv("RANK"))) continue;
        if (strncmp(*name, "SLURM", 5) == 0 && getenv("OMPI_COMM_WORLD_SIZE")) continue; // the step of mpirun's daemons
        const char *number = getenv("SLURM_PROCID");
        if (cf_die_rank() > 0 || (number && atoi(number) > 0)) _exit(1);
        cf_die(hint, "%s is %s, but MPI sees this process alone", *name, text);
    }
}

static void abort_all(int status) {
    cf_watch_linger();
    MPI_Abort(MPI_COMM_WORLD, status);
}

static void allgather(cf_bootstrap *b, const void *mine, void *all, int64_t bytes) {
    cf_deadline_begin("MPI gathers reports of all ranks", b->timeout_s);
    cf_mpi_check(MPI_Allgather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, ours), "MPI_Allgather", NULL);
    cf_deadline_end();
}

static void close_mpi(cf_bootstrap *b) {
    cf_die_setup(b->rank, b->size, NULL);
    cf_deadline_begin("MPI ends", b->timeout_s);
    MPI_Comm_free(&ours);
    if (started_here) MPI_Finalize();
    cf_deadline_end();
    free(b);
}

cf_bootstrap *cf_bootstrap_mpi(int *argc, char ***argv, double timeout_s, bool or_alone) {
    if (!or_alone && !started_by_mpi()) return NULL;
    const MPI_Comm *given = cf_host.comm;
    int running = 0, ended = 0, level = MPI_THREAD_SINGLE;
    MPI_Initialized(&running);
    MPI_Finalized(&ended);
    if (ended) cf_die("let the program call MPI_Init_thread before cf_open()", "MPI has ended, and starts only once in a process");
    if (!running) {
        if (!started_by_mpi()) unsetenv("SLURM_STEP_ID"); // otherwise MPI_Init of Open MPI 4 ends the process
        cf_limits_try_threads(started_by_mpi() ? THREADS : THREADS_ALONE, "a thread of MPI");
        cf_deadline_begin("MPI starts", START_TIMEOUTS * timeout_s);
        started_here = MPI_Init_thread(argc, argv, MPI_THREAD_SERIALIZED, &level) == MPI_SUCCESS;
        cf_deadline_end();
        MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    }
    MPI_Query_thread(&level);
    if (level < MPI_THREAD_SERIALIZED)
        cf_die_together(running ? "start MPI by MPI_Init_thread(…, MPI_THREAD_SERIALIZED or MULTIPLE, …)"
                                : "use an MPI library built with thread support",
                        "MPI has thread level %d, and the library's thread needs %d", level, MPI_THREAD_SERIALIZED);
    if (given && *given == MPI_COMM_NULL) cf_die("only its ranks open a communicator", "the communicator is MPI_COMM_NULL");
    cf_bootstrap *b = cf_host_alloc(1, sizeof *b, "the start");
    cf_deadline_begin("MPI copies the communicator", timeout_s);
    cf_mpi_check(MPI_Comm_dup(given ? *given : MPI_COMM_WORLD, &ours), "MPI_Comm_dup", NULL);
    cf_deadline_end();
    MPI_Comm_set_errhandler(ours, MPI_ERRORS_RETURN);
    *b = (cf_bootstrap){.allgather = allgather, .close = close_mpi, .timeout_s = timeout_s, .comm = &ours};
    MPI_Comm_rank(ours, &b->rank);
    MPI_Comm_size(ours, &b->size);
    if (b->size == 1 && started_here) refuse_strays();
    cf_die_setup(b->rank, b->size, b->size > 1 ? abort_all : NULL);
    cf_bootstrap_find_neighbours(b);
    return b;
}

#else

cf_bootstrap *cf_bootstrap_mpi(int *argc, char ***argv, double timeout_s, bool or_alone) {
    (void)argc, (void)argv, (void)timeout_s, (void)or_alone;
    return NULL;
}
#endif
