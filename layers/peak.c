// See peak.h. Which shape a library multiplies fastest differs from machine to machine, so several large ones
// are tried and the best time of the best shape counts: a peak that is too low would flatter every MFU.
// Where ranks take turns on the cores, each has moments in which it has a core for itself, and such moments of
// all of them add up to more than the host has. So no product counts as faster than the processor time that it
// took, spread over the rank's share of the cores.
#include <math.h>
#include <time.h>
#include "peak.h"
#include "gemm.h"

enum { SHAPES = 3, LARGEST = 2048, WARM_UP = 1, REPETITIONS_MIN = 3, TIME_MIN_MS = 250 };

// Of all threads of this process.
static double processor_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static double best_flops(int64_t n, const real *a, const real *b, real *c, double cores, cf_stream *stream) {
    double best_ms = 1e300, start = cf_now_ms();
    for (int i = 0; i < WARM_UP + REPETITIONS_MIN || cf_now_ms() - start < TIME_MIN_MS; i++) {
        double begin = cf_now_ms(), processor = processor_ms();
        gemm_to_real(false, true, n, n, n, a, n, b, n, 0, c, n, stream);
        cf_stream_sync(stream);
        double ms = fmax(cf_now_ms() - begin, (processor_ms() - processor) / cores);
        if (i >= WARM_UP && ms < best_ms) best_ms = ms;
    }
    return 2.0 * (double)(n * n * n) / (best_ms * 1e-3);
}

double peak_flops(const char **source, double cores, cf_stream *stream) {
    static const int64_t shapes[SHAPES] = {1024, 1536, LARGEST};
    const int64_t elements = (int64_t)LARGEST * LARGEST;
    *source = "best of matrix products of 1024, 1536 and 2048 cubed";
    real *a = cf_alloc(3 * elements * (int64_t)sizeof(real), "peak measurement");
    double best = 0;
    for (int i = 0; i < SHAPES; i++) {
        double flops = best_flops(shapes[i], a, a + elements, a + 2 * elements, cores, stream);
        if (flops > best) best = flops;
    }
    cf_free(a);
    return best;
}
