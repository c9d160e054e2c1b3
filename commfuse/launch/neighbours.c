// Which ranks are on one host, and share a network (bootstrap.h).
#define _GNU_SOURCE
#include "bootstrap.h"
#include "../base/host.h"
#include "../base/limits.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

// The kernel's boot_id distinguishes machines with one name, the name containers on one kernel.
typedef struct location {
    char host[64], boot[40];
    cpu_set_t cores;
    uint64_t network;
} location;

void cf_bootstrap_find_neighbours(cf_bootstrap *b) {
    location mine = {.host = ""}, *all = cf_host_alloc(b->size, sizeof *all, "the hosts of ranks");
    gethostname(mine.host, sizeof mine.host - 1);
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (file && !fgets(mine.boot, sizeof mine.boot, file)) *mine.boot = 0;
    if (file) fclose(file);
    struct stat space;
    if (*mine.boot && stat("/proc/self/ns/net", &space) == 0) mine.network = space.st_ino;
    for (const char *c = mine.boot; mine.network != 0 && *c; c++) mine.network = mine.network * 31 + (uint64_t)*c;
    b->network = mine.network, b->one_network = mine.network != 0;
    cf_limits_cores(&mine.cores);
    const cpu_set_t own = mine.cores;
    bool shared = false;
    b->allgather(b, &mine, all, (int64_t)sizeof mine);
    for (int rank = 0; rank < b->size; rank++) {
        b->one_network &= all[rank].network == b->network;
        if (memcmp(&all[rank], &mine, offsetof(location, cores)) != 0) continue;
        cpu_set_t both;
        CPU_AND(&both, &own, &all[rank].cores);
        shared |= rank != b->rank && CPU_COUNT(&both) > 0;
        CPU_OR(&mine.cores, &mine.cores, &all[rank].cores);
        b->local_rank += rank < b->rank;
        b->local_size++;
    }
    b->local_cores = cf_limits_local_cores(&mine.cores, shared);
    const int L = b->local_size > 0 ? b->local_size : 1; // this rank is one of them
    bool even = b->size % L == 0;
    for (int rank = 0; rank < b->size; rank++)
        for (int first = 0; first <= rank && even; first += L) // of L that are on one host if all hosts have L neighbours
            even = (memcmp(&all[rank], &all[first], offsetof(location, cores)) == 0) == (rank - first < L);
    b->ranks_per_host = even ? L : 0;
    free(all);
}
