// See tell.h.
#include "tell.h"
#include "../commfuse/die.h"
#include "../commfuse/stop.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TELL_SAVER, TELL_STOP, TELL_STEP, TELL_MS, TELL_EXPOSED, TELL_COMM, TELLS }; // the saver's word first

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Time in which a rank does not wait for others tells which one the others wait for.
static void find_slowest(step_times *times, const double *told, int ranks) {
    double *busy = (double *)malloc((size_t)ranks * sizeof *busy), most = -1;
    if (!busy) cf_die(NULL, "out of memory for %d ranks", ranks);
    for (int rank = 0; rank < ranks; rank++) {
        busy[rank] = told[rank * REPORT + TELL_MS] - told[rank * REPORT + TELL_EXPOSED];
        if (busy[rank] > most) most = busy[rank], times->slowest = rank;
    }
    qsort(busy, (size_t)ranks, sizeof *busy, ascending);
    times->lag_ms = most - busy[(ranks - 1) / 2];
    free(busy);
}

// A rank that has left out a step sends what looks like another step's: nothing hangs, and all is wrong.
static void check_steps(const trainer *t, const double *told, int64_t step) {
    for (int rank = 0; rank < t->ranks; rank++)
        if ((int64_t)told[rank * REPORT + TELL_STEP] != step)
            cf_die("a fault of this program or of a library under it: please report it; the checkpoints are "
                   "sound",
                   "the ranks are out of step: rank %d is in step %.0f, this rank in step %lld", rank,
                   told[rank * REPORT + TELL_STEP], (long long)step);
}

step_times tell_step(trainer *t, int64_t step, double begin_ms) {
    double mine[TELLS] = {t->checkpoints ? saver_tell(t->checkpoints) : 0,
                          (double)cf_stop_asked(),
                          (double)step,
                          cf_now_ms() - begin_ms,
                          cf_trace_exposed_ms(t->context.trace),
                          cf_trace_comm_ms(t->context.trace)};
    const double *told = optimizer_exchange(&t->optimizer, mine, TELLS);
    step_times times;
    memset(&times, 0, sizeof times);
    check_steps(t, told, step);
    for (int rank = 0; rank < t->ranks; rank++) {
        const double *r = told + rank * REPORT;
        times.ms = fmax(times.ms, r[TELL_MS]);
        times.exposed_ms = fmax(times.exposed_ms, r[TELL_EXPOSED]);
        times.comm_ms = fmax(times.comm_ms, r[TELL_COMM]);
        if (r[TELL_STOP] > 0) times.stop = (int)r[TELL_STOP];
    }
    find_slowest(&times, told, t->ranks);
    if (t->checkpoints) saver_look(t->checkpoints, told, REPORT); // it may exchange more, so it comes last
    return times;
}
