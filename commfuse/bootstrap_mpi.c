// The ranks of an MPI launcher, for devices whose transport is not MPI itself. See bootstrap.h.
//
// MPI_Init without a launcher would make a world of one rank, and some libraries stop there when their
// daemons are missing, so MPI is touched only where a launcher says that it is there.
#include "bootstrap.h"
#include <stddef.h>

#ifdef CF_WITH_MPI
#include "die.h"
#include "patience.h"
#include "watch.h"
#include <limits.h>
#include <mpi.h>
#include <stdbool.h>
#include <stdlib.h>

static bool started_by_mpi(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK",
                                        "MPI_LOCALRANKID",      NULL};
    for (const char *const *name = names; *name; name++)
        if (getenv(*name)) return true;
    return false;
}

static void abort_all(int status) {
    cf_watch_farewell();
    MPI_Abort(MPI_COMM_WORLD, status);
}

static void check(int code, const char *call) {
    if (code == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(code, text, &length);
    cf_die("see the messages of the other ranks; a rank may have died", "%s failed: %s", call, text);
}

static void allgather(cf_bootstrap *b, const void *mine, void *all, int64_t bytes) {
    if (bytes < 0 || bytes > INT_MAX)
        cf_die(NULL, "allgather of %lld bytes per rank at start", (long long)bytes);
    cf_patience_begin("MPI gathers a few words of all", b->timeout_s);
    check(MPI_Allgather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, MPI_COMM_WORLD),
          "MPI_Allgather");
    cf_patience_end();
}

static void close_mpi(cf_bootstrap *b) {
    cf_die_setup(b->rank, b->size, NULL);
    cf_patience_begin("MPI ends", b->timeout_s);
    MPI_Finalize();
    cf_patience_end();
    free(b);
}

cf_bootstrap *cf_bootstrap_mpi(int *argc, char ***argv, double timeout_s) {
    if (!started_by_mpi()) return NULL;
    int provided = 0;
    cf_patience_begin("MPI starts", CF_PATIENCE_START * timeout_s);
    int code = MPI_Init_thread(argc, argv, MPI_THREAD_SERIALIZED, &provided);
    cf_patience_end();
    if (code != MPI_SUCCESS || provided < MPI_THREAD_SERIALIZED)
        cf_die_together("use an MPI library built with thread support",
                        "MPI gives thread level %d, needed is %d", provided, MPI_THREAD_SERIALIZED);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    cf_bootstrap *b = calloc(1, sizeof *b);
    if (!b) cf_die(NULL, "out of memory at start");
    *b = (cf_bootstrap){.name = "mpi", .allgather = allgather, .close = close_mpi, .timeout_s = timeout_s};
    MPI_Comm_rank(MPI_COMM_WORLD, &b->rank);
    MPI_Comm_size(MPI_COMM_WORLD, &b->size);
    cf_die_setup(b->rank, b->size, b->size > 1 ? abort_all : NULL);
    MPI_Comm local;
    cf_patience_begin("MPI looks who shares a host", timeout_s);
    check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &local),
          "MPI_Comm_split_type");
    MPI_Comm_rank(local, &b->local_rank);
    MPI_Comm_size(local, &b->local_size);
    MPI_Comm_free(&local);
    cf_patience_end();
    return b;
}

#else

cf_bootstrap *cf_bootstrap_mpi(int *argc, char ***argv, double timeout_s) {
    (void)argc, (void)argv, (void)timeout_s;
    return NULL;
}
#endif
