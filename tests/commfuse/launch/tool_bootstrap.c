// For test_bootstrap.py: one rank that is started by its environment.
//
//     tool_bootstrap TIMEOUT_S gather        print this rank, gather numbers of several sizes
//     tool_bootstrap TIMEOUT_S meet          print this rank, and end
//     tool_bootstrap TIMEOUT_S wait          print this rank, then stay until ended
//     tool_bootstrap TIMEOUT_S die:RANK      that rank dies, the others stay until ended
//     tool_bootstrap TIMEOUT_S leave:RANK    that rank ends without closing anything
//     tool_bootstrap TIMEOUT_S freeze:RANK   that rank does not take part in an allgather
//     tool_bootstrap TIMEOUT_S stop:RANK     that rank is stopped, the others ask where it is
//     tool_bootstrap TIMEOUT_S hangup:RANK   that rank closes its port for questions, as if it had died, and the others ask
//     tool_bootstrap TIMEOUT_S together      all ranks find the same error
//     tool_bootstrap TIMEOUT_S unequal       ranks give different sizes
#include <inttypes.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>
#include "commfuse/launch/bootstrap.h"
#include "commfuse/launch/watch.h"
#include "commfuse/base/die.h"

enum { STAY_S = 120, ROUNDS = 4 };
static const int64_t counts[ROUNDS] = {1, 0, 77, 100000};

static int64_t expected(int rank, int round, int64_t i) {
    return (int64_t)rank * 1000003 + round * 101 + i;
}

static void gather(cf_bootstrap *b) {
    for (int round = 0; round < ROUNDS; round++) {
        int64_t count = counts[round], bytes = count * (int64_t)sizeof(int64_t);
        int64_t *mine = malloc((size_t)bytes + 1), *all = malloc((size_t)(bytes * b->size) + 1);
        if (!mine || !all) cf_die(NULL, "out of memory");
        for (int64_t i = 0; i < count; i++) mine[i] = expected(b->rank, round, i);
        b->allgather(b, mine, all, bytes);
        for (int rank = 0; rank < b->size; rank++)
            for (int64_t i = 0; i < count; i++)
                if (all[rank * count + i] != expected(rank, round, i))
                    cf_die(NULL, "round %d: rank %d's element %" PRId64 " is %" PRId64, round, rank, i, all[rank * count + i]);
        free(mine);
        free(all);
    }
}

static void stay(void) {
    sleep(STAY_S);
    _exit(3); // nobody has ended this rank
}

static bool is_stopped(pid_t process) {
    char path[64], state = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)process);
    FILE *file = fopen(path, "r");
    const bool read = file && fscanf(file, "%*d %*s %c", &state) == 1;
    if (file) fclose(file);
    return read && state == 'T';
}

// The others ask when it has happened: a child of the rank that stops itself says so.
static void ask(cf_bootstrap *b, int chosen, bool stops) {
    cf_watch *watch = cf_watch_open(b);
    char mine = 0, all[64];
    if (chosen == b->rank && !stops) cf_watch_close(watch);
    if (chosen == b->rank && stops && fork() > 0) raise(SIGSTOP);
    while (chosen == b->rank && stops && !is_stopped(getppid())) usleep(1000);
    b->allgather(b, &mine, all, 1);
    if (chosen == b->rank && stops) _exit(0); // the child
    if (chosen == b->rank) stay();
    cf_watch_waits(watch, (cf_wait){.peer = chosen, .label = "barrier", .layer = -1, .step = 41}, NULL, 1e3, 1, NULL);
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    const char *what = argv[2], *colon = strchr(what, ':');
    bool freezes = strncmp(what, "freeze", 6) == 0; // after a start that may take its time
    cf_bootstrap *b = cf_bootstrap_create(&argc, &argv, freezes ? STAY_S : atof(argv[1]));
    b->timeout_s = atof(argv[1]);
    int chosen = colon ? atoi(colon + 1) : -1;
    const char *way = b->comm ? "mpi" : b->size > 1 ? "sockets" : "alone";
    printf("%s: rank %d of %d, %d of %d on this host\n", way, b->rank, b->size, b->local_rank, b->local_size);
    fflush(stdout);
    if (strcmp(what, "wait") == 0) stay();
    if (strcmp(what, "together") == 0) cf_die_together(NULL, "all of us are wrong");
    if (chosen == b->rank && strncmp(what, "die", 3) == 0) cf_die("a hint", "rank %d has had enough", chosen);
    if (chosen == b->rank && strncmp(what, "leave", 5) == 0) _exit(0);
    if (chosen == b->rank && freezes) stay();
    const bool stops = strncmp(what, "stop", 4) == 0;
    if (stops || strncmp(what, "hangup", 6) == 0) ask(b, chosen, stops);
    if (chosen >= 0 && !freezes) stay();
    char mine[16] = "", all[16 * 64];
    if (strcmp(what, "unequal") == 0) b->allgather(b, mine, all, 8 + b->rank % 2);
    if (strcmp(what, "meet") != 0) gather(b);
    printf("gathered\n");
    b->close(b);
    return 0;
}
