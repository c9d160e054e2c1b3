// Stands between a program and MPI_Isend (LD_PRELOAD), and spoils what one rank sends: the memory or the network that
// corrupts data and says nothing, or a library of few message tags. The environment says what for:
//     WIRE_RANK=R     the rank, of the world
//     WIRE_BYTES=B    sends of fewer bytes are neither counted nor spoiled
//     WIRE_NTH=N      the N-th of the others, from 1, is spoiled: a copy is sent with one thing wrong
//     WIRE_BIT=I      bit I of it (modulo its bits) is the other one …
//     WIRE_NAN=1      … or the fp32 number which that bit belongs to is a NaN
//     WIRE_TAG_UB=T   the highest tag that the library has
// It says on standard error what it has done, and at the end how much the rank has sent.
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const uint32_t QUIET_NAN = 0x7FC00000;
static long sends;

static long number(const char *name) {
    const char *text = getenv(name);
    return text ? atol(text) : 0;
}

static int world_rank(void) {
    int rank = -1;
    PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
    return rank;
}

static int world_rank_of(int rank, MPI_Comm comm) {
    MPI_Group members, world;
    int found = -1;
    PMPI_Comm_group(comm, &members);
    PMPI_Comm_group(MPI_COMM_WORLD, &world);
    PMPI_Group_translate_ranks(members, 1, &rank, world, &found);
    PMPI_Group_free(&members);
    PMPI_Group_free(&world);
    return found;
}

// Lives as long as the process: nobody says when the last byte has left.
static const void *spoiled(const void *data, long bytes, int to) {
    char *copy = malloc((size_t)bytes);
    if (!copy) abort();
    memcpy(copy, data, (size_t)bytes);
    long bit = number("WIRE_BIT") % (8 * bytes);
    if (number("WIRE_NAN"))
        memcpy(copy + bit / 32 * 4, &QUIET_NAN, sizeof QUIET_NAN);
    else
        copy[bit / 8] = (char)(copy[bit / 8] ^ 1 << bit % 8);
    fprintf(stderr, "wire: send %ld from rank %d to rank %d, %ld bytes, is spoiled\n", sends, world_rank(), to, bytes);
    fflush(stderr);
    return copy;
}

int MPI_Isend(const void *data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request *request) {
    int size = 0;
    PMPI_Type_size(type, &size);
    long bytes = (long)count * size;
    if (number("WIRE_TAG_UB") && tag > number("WIRE_TAG_UB")) return MPI_ERR_TAG;
    if (world_rank() == number("WIRE_RANK") && bytes > 0 && bytes >= number("WIRE_BYTES") && ++sends == number("WIRE_NTH"))
        data = spoiled(data, bytes, world_rank_of(to, comm));
    return PMPI_Isend(data, count, type, to, tag, comm, request);
}

int MPI_Comm_get_attr(MPI_Comm comm, int key, void *value, int *found) {
    static int highest;
    if (key != MPI_TAG_UB || !number("WIRE_TAG_UB")) return PMPI_Comm_get_attr(comm, key, value, found);
    highest = (int)number("WIRE_TAG_UB");
    *(int **)value = &highest, *found = 1;
    return MPI_SUCCESS;
}

int MPI_Finalize(void) {
    if (world_rank() == number("WIRE_RANK")) fprintf(stderr, "wire: %ld sends\n", sends);
    return PMPI_Finalize();
}
