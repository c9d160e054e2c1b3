// See peak.h. The shape that a library multiplies fastest differs from machine to machine, so several large ones are tried and
// the best one counts: a peak that is too low would flatter every MFU.
//
// Every rank multiplies in as many threads as its share of the cores, all at the same time, each thread independently. The rate
// is that of a thread in its processor time, with all other cores busy: it does not depend on how many threads, of other ranks or
// programs, take turns on the core. It is a mean over products, because during a single one the core's other hyperthread or its
// cache may have been free. Other programs fill both, so they lower it: where they take turns, the source says so.
#include <math.h>
#include <time.h>
#include "peak.h"
#include "gemm.h"

enum { SHAPES = 3, LARGEST = 1536, PRODUCTS_MIN = 4, TIME_MIN_MS = 250 };
static const double SHARE_MIN = 0.9; // of the time that a thread should have run

// Of the calling thread.
static double processor_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

// flop/s of a core, by the calling thread, and the share of the time that it ran. The first product is not counted.
static double core_flops(int64_t n, bool fp32, const void *a, void *b, void *c, double *ran, cf_stream *stream) {
    if (!fp32) gemm_pack(b, true, n, n, a, n);
    double begin = 0, start = cf_now_ms(), clock = 0;
    int64_t products = -1;
    for (; products < PRODUCTS_MIN || cf_now_ms() - start < TIME_MIN_MS; products++) {
        if (fp32)
            gemm(false, false, n, n, n, a, n, b, n, 0, c, n, stream);
        else
            gemm_packed(n, n, n, a, b, NULL, NULL, c, stream);
        if (products < 0) begin = processor_ms(), clock = cf_now_ms();
    }
    const double spent_ms = processor_ms() - begin;
    *ran = spent_ms / (cf_now_ms() - clock);
    return 2.0 * (double)(n * n * n) * (double)products / (spent_ms * 1e-3);
}

bool peak_emulated(void) {
    return gemm_emulated();
}

double peak_flops(bool fp32, const char **source, double cores, cf_transport *transport, cf_stream *stream) {
#define PRODUCTS "all cores, best of matrix products of 512, 1024 and 1536 cubed on each"
    static const int64_t shapes[SHAPES] = {512, 1024, LARGEST};
    const int64_t elements = (int64_t)LARGEST * LARGEST, size = fp32 ? sizeof(accum) : sizeof(real), square = size * elements;
    const int threads = (int)ceil(cores);
    if (fp32 && cf_allreduce_sum(transport, peak_emulated()) == 0) return 0;
    const int64_t packed = size * (fp32 ? elements : gemm_packed_size(LARGEST, LARGEST)), of_thread = packed + square;
    char *a = cf_alloc(square + threads * of_thread, "peak measurement");
    double best = 0;
    bool alone = true; // no other work took these cores
    for (int i = 0; i < SHAPES; i++) {
        double mine = 0, ran = 1;
        cf_allreduce_sum(transport, 0); // all begin together
#pragma omp parallel num_threads(threads) reduction(+ : mine) reduction(min : ran)
        {
#ifdef _OPENMP
            omp_set_num_threads(1); // in this region: a single thread would start others for its product
#endif
#pragma omp for schedule(static, 1)
            for (int thread = 0; thread < threads; thread++) {
                char *b = a + square + thread * of_thread;
                mine += core_flops(shapes[i], fp32, a, b, b + packed, &ran, stream);
            }
        }
        best = fmax(best, cf_allreduce_sum(transport, mine / threads * cores));
        alone &= ran > SHARE_MIN * fmin(1, cores / threads);
    }
    cf_free(a);
    *source =
        cf_allreduce_sum(transport, !alone) == 0 ? PRODUCTS : PRODUCTS "; other work took them meanwhile, so it may be too low";
    return best;
}
