// See peak.h. Which shape a library multiplies fastest differs from machine to machine, so several large ones
// are tried and the best time of the best shape counts: a peak that is too low would flatter every MFU.
#include "peak.h"
#include "gemm.h"

enum { SHAPES = 3, LARGEST = 2048, WARM_UP = 1, REPETITIONS_MIN = 3, TIME_MIN_MS = 250 };

static double best_flops(int64_t n, const real *a, const real *b, real *c, cf_stream *stream) {
    double best_ms = 1e300, start = cf_now_ms();
    for (int i = 0; i < WARM_UP + REPETITIONS_MIN || cf_now_ms() - start < TIME_MIN_MS; i++) {
        double begin = cf_now_ms();
        gemm_to_real(false, true, n, n, n, a, n, b, n, 0, c, n, stream);
        cf_stream_sync(stream);
        double ms = cf_now_ms() - begin;
        if (i >= WARM_UP && ms < best_ms) best_ms = ms;
    }
    return 2.0 * (double)(n * n * n) / (best_ms * 1e-3);
}

double peak_flops(const char **source, cf_stream *stream) {
    static const int64_t shapes[SHAPES] = {1024, 1536, LARGEST};
    const int64_t elements = (int64_t)LARGEST * LARGEST;
    *source = "best of matrix products of 1024, 1536 and 2048 cubed";
    real *a = cf_alloc(3 * elements * (int64_t)sizeof(real), "peak measurement");
    double best = 0;
    for (int i = 0; i < SHAPES; i++) {
        double flops = best_flops(shapes[i], a, a + elements, a + 2 * elements, stream);
        if (flops > best) best = flops;
    }
    cf_free(a);
    return best;
}
