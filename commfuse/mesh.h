// world = dp × tp. World rank = dp_rank · tp + tp_rank, so a tp group is a run of neighbouring ranks
// (usually one host) and a dp group strides across them.
#pragma once
#include <stdbool.h>
#include "base/extern_c.h"

CF_EXTERN_C_BEGIN

// How a group's native collectives may be found: not at all; by trials, as their costs are not known; by their costs, too.
typedef enum { CF_NEVER, CF_TRIED, CF_CHOSEN } cf_native_use;

typedef struct cf_group {
    const char *name; // "tp", "dp", "world", "self"
    int size;         // ranks in the group
    int rank;         // this process's rank in it
    int hosts;        // as many neighbouring members are on each; 1: one host, or they are not even (cf_group_hosts)
    int *world;       // world[i]: world rank of member i
    bool urgent;      // computation soon waits for its exchanges; others, which it hides, take few multiprocessors of a GPU
    cf_native_use collectives; // set by cf_transport.bind
    bool hierarchy;            // these send a shard to a host once, exchanges to each of several members there; set by cf_mesh_bind
    void *native;              // the transport's handle, set by cf_transport.bind, freed by its close
} cf_group;

typedef struct cf_mesh {
    int tp, dp;
    cf_group tp_group, dp_group, world_group;
    cf_group self_group; // this rank alone; needs no bind
} cf_mesh;

// Fills *mesh for one rank. Dies (together) unless tp, dp >= 1 and tp · dp = world_size.
void cf_mesh_init(cf_mesh *mesh, int world_size, int world_rank, int tp, int dp);
// Sets cf_group.hosts of all groups, alike in groups of one name, where so many neighbouring world ranks are on each host; 0: hosts
// have different numbers of ranks, or ranks that are not neighbours.
void cf_mesh_set_hosts(cf_mesh *mesh, int ranks_per_host);
int cf_group_hosts(const cf_group *group, int ranks_per_host); // of one group
void cf_mesh_free(cf_mesh *mesh);

CF_EXTERN_C_END
