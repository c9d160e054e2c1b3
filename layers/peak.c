// See peak.h.
#include "peak.h"
#include "gemm.h"

enum { N = 1024, WARM_UP = 2, REPETITIONS_MIN = 6, TIME_MIN_MS = 400 };

double peak_flops(const char **source, cf_stream *stream) {
    *source = "matrix product of 1024 x 1024 x 1024 timed at start";
    real *a = cf_alloc(3 * (int64_t)N * N * (int64_t)sizeof(real), "peak measurement");
    double best_ms = 1e300, start = cf_now_ms();
    for (int i = 0; i < WARM_UP + REPETITIONS_MIN || cf_now_ms() - start < TIME_MIN_MS; i++) {
        double begin = cf_now_ms();
        gemm(false, true, N, N, N, a, N, a + N * N, N, 0, a + 2 * N * N, N, stream);
        cf_stream_sync(stream);
        double ms = cf_now_ms() - begin;
        if (i >= WARM_UP && ms < best_ms) best_ms = ms;
    }
    cf_free(a);
    return 2.0 * N * N * N / (best_ms * 1e-3);
}
