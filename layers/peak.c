// See peak.h. Which shape a library multiplies fastest differs from machine to machine, so several large ones
// are tried, the best one once more, and the best sum over all ranks counts: a peak that is too low would flatter
// every MFU.
//
// All ranks multiply at the same time, and what they do then is what the machine can. Each counts over a window of its
// own, which begins when its first product ends, because they do not start together, and goes on for a while behind the
// window, because a rank whose neighbours have ended too early has more of a core than its share.
#include <math.h>
#include "peak.h"
#include "gemm.h"

enum { SHAPES = 3, LARGEST = 2048, PRODUCTS_MAX = 4096, PRODUCTS_MIN = 4 };
static const double window_ms_min = 150, behind_window = 0.25; // of it

// Products in a millisecond, of which the first ends at ends[0]: those in the window, and the part of the last one that
// is in it. 0: the window does not end among them.
static double rate_in_window(const double *ends, int count, double window_ms) {
    const double until = ends[0] + window_ms;
    for (int i = 1; i < count; i++)
        if (ends[i] >= until) return (i - 1 + (until - ends[i - 1]) / (ends[i] - ends[i - 1])) / window_ms;
    return 0;
}

// flop/s of this rank.
static double multiply(int64_t n, const real *a, const real *b, real *c, cf_stream *stream) {
    static double ends[PRODUCTS_MAX];
    double begin = cf_now_ms(), window_ms = 0;
    int count = 0;
    do {
        gemm_to_real(false, true, n, n, n, a, n, b, n, 0, c, n, stream);
        cf_stream_sync(stream);
        ends[count++] = cf_now_ms();
        window_ms = fmax(window_ms_min, PRODUCTS_MIN * (ends[0] - begin));
    } while (count < PRODUCTS_MAX && ends[count - 1] < ends[0] + (1 + behind_window) * window_ms);
    if (ends[count - 1] < ends[0] + window_ms)
        window_ms = ends[count - 1] - ends[0]; // faster than anybody thought
    return 2.0 * (double)(n * n * n) * rate_in_window(ends, count, window_ms) * 1e3;
}

double peak_flops(const char **source, int cores, double (*sum)(void *argument, double mine), void *argument,
                  cf_stream *stream) {
    static const int64_t shapes[SHAPES] = {1024, 1536, LARGEST};
    const int64_t elements = (int64_t)LARGEST * LARGEST;
    *source = "all cores at once, best of matrix products of 1024, 1536 and 2048 cubed";
    real *a = cf_alloc(3 * elements * (int64_t)sizeof(real), "peak measurement");
    double best = 0;
    int64_t fastest = shapes[0];
    cf_device_threads(cores);
    for (int i = 0; i <= SHAPES; i++) {
        const int64_t n = i < SHAPES ? shapes[i] : fastest;
        sum(argument, 0); // all begin together
        double flops = sum(argument, multiply(n, a, a + elements, a + 2 * elements, stream));
        if (flops > best) best = flops, fastest = n;
    }
    cf_free(a);
    return best;
}
