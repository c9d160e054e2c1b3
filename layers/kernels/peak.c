// See peak.h. The shape that a library multiplies fastest differs from machine to machine, so several large ones are tried and
// the best one counts: a peak that is too low would flatter every MFU.
//
// Every rank multiplies in as many threads as its share of the cores, all at the same time, each thread independently. The rate
// is that of a thread in its processor time, with all other cores busy: it does not depend on how many threads, of other ranks or
// programs, take turns on the core. It is a mean over products, because during a single one the core's other hyperthread or its
// cache may have been free.
#include <math.h>
#include <time.h>
#include "peak.h"
#include "gemm.h"

enum { SHAPES = 3, LARGEST = 1536, PRODUCTS_MIN = 4, TIME_MIN_MS = 250 };

// Of the calling thread.
static double processor_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

// flop/s of a core, by the calling thread. The first product is not counted.
static double core_flops(int64_t n, const real *a, real *b, real *c, cf_stream *stream) {
    gemm_pack(b, true, n, n, a, n);
    double begin = 0, start = cf_now_ms();
    int64_t products = -1;
    for (; products < PRODUCTS_MIN || cf_now_ms() - start < TIME_MIN_MS; products++) {
        gemm_packed(n, n, n, a, b, NULL, NULL, c, stream);
        if (products < 0) begin = processor_ms();
    }
    return 2.0 * (double)(n * n * n) * (double)products / ((processor_ms() - begin) * 1e-3);
}

double peak_flops(const char **source, double cores, cf_transport *transport, cf_stream *stream) {
    static const int64_t shapes[SHAPES] = {512, 1024, LARGEST};
    const int64_t elements = (int64_t)LARGEST * LARGEST;
    const int threads = (int)ceil(cores);
    *source = "all cores, best of matrix products of 512, 1024 and 1536 cubed on each";
    const int64_t packed = gemm_packed_size(LARGEST, LARGEST), of_thread = packed + elements;
    real *a = cf_alloc((elements + threads * of_thread) * (int64_t)sizeof(real), "peak measurement");
    double best = 0;
    for (int i = 0; i < SHAPES; i++) {
        double mine = 0;
        cf_allreduce_sum(transport, 0); // all begin together
#pragma omp parallel num_threads(threads) reduction(+ : mine)
        {
#ifdef _OPENMP
            omp_set_num_threads(1); // in this region: a single thread would start others for its product
#endif
#pragma omp for schedule(static, 1)
            for (int thread = 0; thread < threads; thread++) {
                real *b = a + elements + thread * of_thread;
                mine += core_flops(shapes[i], a, b, b + packed, stream);
            }
        }
        best = fmax(best, cf_allreduce_sum(transport, mine / threads * cores));
    }
    cf_free(a);
    return best;
}
