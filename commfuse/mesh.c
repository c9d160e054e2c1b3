// See mesh.h.
#include "mesh.h"
#include "base/die.h"
#include "memory.h"
#include <stdlib.h>

static cf_group make_group(const char *name, int size, int rank, int first, int stride) {
    int *world = cf_host_alloc(size, sizeof *world, "a group");
    for (int i = 0; i < size; i++) world[i] = first + i * stride;
    return (cf_group){.name = name, .size = size, .rank = rank, .hosts = 1, .world = world, .collectives = CF_CHOSEN};
}

void cf_mesh_init(cf_mesh *mesh, int world_size, int world_rank, int tp, int dp) {
    if (tp < 1 || dp < 1 || (long long)tp * dp != world_size)
        cf_die_together("start as many ranks as tp x dp: mpirun -np N", "tp %d x dp %d = %lld, but there %s %d rank%s", tp, dp,
                        (long long)tp * dp, world_size == 1 ? "is" : "are", world_size, world_size == 1 ? "" : "s");
    int tp_rank = world_rank % tp, dp_rank = world_rank / tp;
    mesh->tp = tp;
    mesh->dp = dp;
    mesh->tp_group = make_group("tp", tp, tp_rank, dp_rank * tp, 1);
    mesh->tp_group.urgent = true; // a layer waits for its exchanges
    mesh->dp_group = make_group("dp", dp, dp_rank, tp_rank, tp);
    mesh->world_group = make_group("world", world_size, world_rank, 0, 1);
    mesh->self_group = make_group("self", 1, 0, world_rank, 1);
}

int cf_group_hosts(const cf_group *group, int ranks_per_host) {
    const int N = group->size, R = ranks_per_host, *world = group->world;
    int P = 1;
    while (R > 0 && P < N && world[P] / R == world[0] / R) P++;
    bool even = R > 0 && N % P == 0;
    for (int i = P; i < N && even; i++) even = world[i] / R == world[i - i % P] / R && world[i] / R > world[i - P] / R;
    return even ? N / P : 1;
}

// Where a tp group begins or ends within a host, groups of one name differ.
void cf_mesh_set_hosts(cf_mesh *mesh, int ranks_per_host) {
    const int R = ranks_per_host, alike = R > 0 && (R % mesh->tp == 0 || mesh->tp % R == 0) ? R : 0;
    mesh->tp_group.hosts = cf_group_hosts(&mesh->tp_group, alike);
    mesh->dp_group.hosts = cf_group_hosts(&mesh->dp_group, alike);
    mesh->world_group.hosts = cf_group_hosts(&mesh->world_group, R);
}

void cf_mesh_free(cf_mesh *mesh) {
    free(mesh->tp_group.world);
    free(mesh->dp_group.world);
    free(mesh->world_group.world);
    free(mesh->self_group.world);
}
