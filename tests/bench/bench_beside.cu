// What the clock of imagined GPUs (tests/emulator/clock.cc) assumes about one GPU, measured on one:
//
//     bench_beside                 all tables, about ten seconds
//     bench_beside clusters        the last one
//
//   a queue     what a launch, an event and a wait cost the stream, and the host that enqueues them
//   products    a product whole, in slices one after another, and in slices on two streams
//   beside      the same product while a kernel holds some multiprocessors, as NCCL's do: as it is; with fewer to take
//               (SM_COUNT_TARGET) from the choice of the algorithm on; and with fewer, but the algorithm that it has alone
//   clusters    a kernel that comes while a product runs, which leaves it as many multiprocessors as it has blocks: its
//               blocks each for itself, and in clusters of four, as NCCL has them unless cgaClusterSize is 1
//
// A time is between two events around the work, enqueued behind a kernel that spins until the host has enqueued all of it:
// the median of REPETITIONS. Inputs are random. `bits` compares results with the whole product's.
#include "commfuse/gpu/cuda.h"
#include <algorithm>
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { REPETITIONS = 9, ROW = 100, SLICES = 4, STREAMS = 2, HOLDERS_MAX = 32, WORKSPACE = 32 << 20 };
static const int64_t OPERAND_MAX = 32768LL * 4096;
static const long long HOLD_NS = 8 * 1000 * 1000; // longer than any product here and its enqueuing
static const long long LATER_NS = 20 * 1000;

typedef __nv_bfloat16 bf16;

typedef struct shape {
    const char *name;
    int64_t m, n, k; // c (m, n) = a (m, k) · b (n, k)ᵀ, bf16
} shape;

// Products of a layer, forward, as one of four ranks has them: 774M's width with 32 sequences, the paper's with 8.
static const shape shapes[] = {{"1280, qkv", 32768, 960, 1280},
                               {"1280, attention's", 32768, 1280, 320},
                               {"1280, MLP's", 32768, 1280, 1280},
                               {"4096, qkv", 8192, 3072, 4096},
                               {"4096, attention's", 8192, 4096, 1024},
                               {"4096, MLP's", 8192, 4096, 4096},
                               {"768, MLP's, one rank", 32768, 3072, 768},
                               {"1600, MLP's, one rank", 8192, 6400, 1600}};

static struct {
    cudaStream_t stream[STREAMS], holding;
    cudaEvent_t begin, end, joined, plain;
    bf16 *a, *b, *c, *whole;
    void *workspace[STREAMS];
    int *differs;
    volatile int *word; // of the host: 1 opens the gate
    cublasLtHandle_t lt;
} g;

static void check(cublasStatus_t status) {
    if (status != CUBLAS_STATUS_SUCCESS)
        cf_die("set CUBLASLT_LOG_LEVEL=2 to see more", "cuBLASLt: %s", cublasLtGetStatusString(status));
}

// --- kernels ---

static __global__ void nothing() {}

static __device__ long long now_ns() {
    long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Stays until the host writes the word or, should the host never do so, for a second.
static __global__ void wait_for_host(const volatile int *word) {
    for (long long begin = now_ns(); *word == 0 && now_ns() - begin < 1000000000LL;) {}
}

// Asleep but for moments: what it shares with others is the multiprocessor alone.
static __global__ void hold(long long ns) {
    for (long long begin = now_ns(); now_ns() - begin < ns;) __nanosleep(10000);
}

static __global__ void randomize(bf16 *to, int64_t count, unsigned seed) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        unsigned x = (unsigned)i * 2654435761u ^ seed;
        x ^= x >> 15, x *= 2246822519u, x ^= x >> 13, x *= 3266489917u, x ^= x >> 16;
        to[i] = __float2bfloat16((float)(int)x / 2147483648.0f);
    }
}

static __global__ void compare(const uint16_t *x, const uint16_t *y, int64_t count, int *differs) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x)
        if (x[i] != y[i]) *differs = 1;
}

// --- times ---

static double now_us() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

// Microseconds on the device of what `work` enqueues on the first stream, and of the host to enqueue it; `held` blocks of
// another kernel keep as many multiprocessors.
template <typename function> static double median_us(int held, double *host, function work) {
    double device[REPETITIONS], enqueue[REPETITIONS];
    work(); // loads its kernels, which may wait for a kernel that waits
    CF_CUDA(cudaDeviceSynchronize());
    for (int i = -2; i < REPETITIONS; i++) {
        *g.word = 0;
        if (held) hold<<<held, 1, 200 << 10, g.holding>>>(HOLD_NS);
        wait_for_host<<<1, 1, 0, g.stream[0]>>>(g.word);
        CF_CUDA(cudaEventRecord(g.begin, g.stream[0]));
        double at = now_us();
        work();
        double took = now_us() - at;
        CF_CUDA(cudaEventRecord(g.end, g.stream[0]));
        *g.word = 1;
        CF_CUDA(cudaDeviceSynchronize());
        float ms;
        CF_CUDA(cudaEventElapsedTime(&ms, g.begin, g.end));
        if (i >= 0) device[i] = 1e3 * ms, enqueue[i] = took;
    }
    std::sort(device, device + REPETITIONS), std::sort(enqueue, enqueue + REPETITIONS);
    if (host) *host = enqueue[REPETITIONS / 2];
    return device[REPETITIONS / 2];
}

// --- a queue ---

template <typename function> static double line(const char *what, double less, function work) {
    double host, device = median_us(0, &host, [&] {
                     for (int i = 0; i < ROW; i++) work();
                 });
    printf("  %-52s %8.2f us %8.2f us of the host\n", what, device / ROW - less, host / ROW);
    return device / ROW;
}

static void queue() {
    printf("a queue: of each of %d in a row\n", (int)ROW);
    double kernel = line("empty kernel", 0, [] { nothing<<<1, 32, 0, g.stream[0]>>>(); });
    line("full grid of an empty kernel", 0,
         [] { nothing<<<cf_cuda_properties()->multiProcessorCount * 8, 256, 0, g.stream[0]>>>(); });
    line("event without a time, between kernels, added", kernel, [] {
        nothing<<<1, 32, 0, g.stream[0]>>>();
        CF_CUDA(cudaEventRecord(g.plain, g.stream[0]));
    });
    line("event with a time, between kernels, added", kernel, [] {
        nothing<<<1, 32, 0, g.stream[0]>>>();
        CF_CUDA(cudaEventRecord(g.joined, g.stream[0]));
    });
    line("there and back to another stream, a kernel on each", 0, [] {
        nothing<<<1, 32, 0, g.stream[0]>>>();
        CF_CUDA(cudaEventRecord(g.plain, g.stream[0]));
        CF_CUDA(cudaStreamWaitEvent(g.stream[1], g.plain, 0));
        nothing<<<1, 32, 0, g.stream[1]>>>();
        CF_CUDA(cudaEventRecord(g.plain, g.stream[1]));
        CF_CUDA(cudaStreamWaitEvent(g.stream[0], g.plain, 0));
    });
}

// --- products ---

typedef struct product {
    int64_t m;
    cublasLtMatmulDesc_t chosen_for, run_as;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algorithm;
} product;

static cublasLtMatmulDesc_t describe(int multiprocessors) {
    cublasLtMatmulDesc_t d;
    const cublasOperation_t transpose = CUBLAS_OP_T;
    const int32_t target = multiprocessors;
    check(cublasLtMatmulDescCreate(&d, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    check(cublasLtMatmulDescSetAttribute(d, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof transpose));
    if (target) check(cublasLtMatmulDescSetAttribute(d, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &target, sizeof target));
    return d;
}

// Multiprocessors that the algorithm is chosen for, and that it runs on; 0: all.
static product product_of(const shape *s, int64_t m, int chosen_for, int runs_on) {
    product p = {};
    p.m = m, p.chosen_for = describe(chosen_for), p.run_as = describe(runs_on);
    check(cublasLtMatrixLayoutCreate(&p.a, CUDA_R_16BF, s->k, m, s->k));
    check(cublasLtMatrixLayoutCreate(&p.b, CUDA_R_16BF, s->k, s->n, s->k));
    check(cublasLtMatrixLayoutCreate(&p.c, CUDA_R_16BF, s->n, m, s->n));
    cublasLtMatmulPreference_t preference;
    const uint64_t bytes = WORKSPACE;
    const uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    check(cublasLtMatmulPreferenceCreate(&preference));
    check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes));
    check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &scheme, sizeof scheme));
    cublasLtMatmulHeuristicResult_t result;
    int found;
    check(cublasLtMatmulAlgoGetHeuristic(g.lt, p.chosen_for, p.b, p.a, p.c, p.c, preference, 1, &result, &found));
    if (!found)
        cf_die(NULL, "cuBLASLt has no algorithm for a product of (%lld, %lld, %lld)", (long long)m, (long long)s->n,
               (long long)s->k);
    p.algorithm = result.algo;
    return p;
}

static void multiply(const product *p, const shape *s, int64_t row, int stream) {
    const float one = 1, zero = 0;
    bf16 *c = g.c + row * s->n;
    check(cublasLtMatmul(g.lt, p->run_as, &one, g.b, p->b, g.a + row * s->k, p->a, &zero, c, p->c, c, p->c, &p->algorithm,
                         g.workspace[stream], WORKSPACE, g.stream[stream]));
}

static void in_slices(const product *p, const shape *s, int streams) {
    if (streams > 1) {
        CF_CUDA(cudaEventRecord(g.plain, g.stream[0]));
        CF_CUDA(cudaStreamWaitEvent(g.stream[1], g.plain, 0));
    }
    for (int i = 0; i < s->m / p->m; i++) multiply(p, s, i * p->m, i % streams);
    if (streams > 1) {
        CF_CUDA(cudaEventRecord(g.plain, g.stream[1]));
        CF_CUDA(cudaStreamWaitEvent(g.stream[0], g.plain, 0));
    }
}

static const char *bits(const shape *s) {
    *g.differs = 0;
    compare<<<1024, 256, 0, g.stream[0]>>>((uint16_t *)g.c, (uint16_t *)g.whole, s->m * s->n, g.differs);
    CF_CUDA(cudaStreamSynchronize(g.stream[0]));
    return *g.differs ? "other" : "same";
}

static void products() {
    printf("products: us; TFLOP/s of the whole; %d slices over the whole, on one stream and on two\n", (int)SLICES);
    printf("  %-24s %8s %8s %8s %8s %8s %8s\n", "", "whole", "TFLOP/s", "one", "bits", "two", "bits");
    for (const shape &s : shapes) {
        const product whole = product_of(&s, s.m, 0, 0), slice = product_of(&s, s.m / SLICES, 0, 0);
        double us = median_us(0, NULL, [&] { multiply(&whole, &s, 0, 0); });
        CF_CUDA(cudaMemcpy(g.whole, g.c, (size_t)(s.m * s.n) * sizeof(bf16), cudaMemcpyDeviceToDevice));
        double one = median_us(0, NULL, [&] { in_slices(&slice, &s, 1); });
        const char *one_bits = bits(&s);
        double two = median_us(0, NULL, [&] { in_slices(&slice, &s, 2); });
        printf("  %-24s %8.1f %8.1f %8.3f %8s %8.3f %8s\n", s.name, us, 2e-6 * (double)s.m * (double)s.n * (double)s.k / us,
               one / us, one_bits, two / us, bits(&s));
    }
}

static void beside() {
    printf("beside kernels that hold multiprocessors: time over the product's alone, and bits\n");
    printf("  %-24s %5s %9s %15s %15s %15s %15s\n", "", "held", "as it is", "fewer, alone", "fewer, beside", "same algo alone",
           "same algo beside");
    for (const shape &s : shapes)
        for (int held = 4; held <= HOLDERS_MAX; held *= 2) {
            if (held == 8) continue;
            const product whole = product_of(&s, s.m, 0, 0),
                          chosen = product_of(&s, s.m, cf_cuda_properties()->multiProcessorCount - held,
                                              cf_cuda_properties()->multiProcessorCount - held),
                          told = product_of(&s, s.m, 0, cf_cuda_properties()->multiProcessorCount - held);
            double us = median_us(0, NULL, [&] { multiply(&whole, &s, 0, 0); });
            CF_CUDA(cudaMemcpy(g.whole, g.c, (size_t)(s.m * s.n) * sizeof(bf16), cudaMemcpyDeviceToDevice));
            double as_is = median_us(held, NULL, [&] { multiply(&whole, &s, 0, 0); });
            double fewer_alone = median_us(0, NULL, [&] { multiply(&chosen, &s, 0, 0); });
            double fewer = median_us(held, NULL, [&] { multiply(&chosen, &s, 0, 0); });
            const char *fewer_bits = bits(&s);
            double same_alone = median_us(0, NULL, [&] { multiply(&told, &s, 0, 0); });
            double same = median_us(held, NULL, [&] { multiply(&told, &s, 0, 0); });
            printf("  %-24s %5d %9.3f %15.3f %9.3f %5s %15.3f %9.3f %5s\n", s.name, held, as_is / us, fewer_alone / us, fewer / us,
                   fewer_bits, same_alone / us, same / us, bits(&s));
        }
}

// Ends at once, but blocks take a multiprocessor each.
static void come(int blocks, unsigned cluster) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {cluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = {(unsigned)blocks, 1, 1}, config.blockDim = {1, 1, 1}, config.dynamicSmemBytes = 200 << 10;
    config.stream = g.stream[0], config.attrs = &attribute, config.numAttrs = 1;
    CF_CUDA(cudaLaunchKernelEx(&config, hold, 0LL));
}

static void clusters() {
    printf("a kernel that comes %lld us after a product that leaves its multiprocessors: us until it has ended\n", LATER_NS / 1000);
    printf("  %-24s %6s %9s %9s %9s\n", "", "blocks", "product", "single", "clusters");
    for (const shape &s : shapes)
        for (int blocks = 4; blocks <= HOLDERS_MAX; blocks *= 2) {
            const product left = product_of(&s, s.m, 0, cf_cuda_properties()->multiProcessorCount - blocks);
            double us[2], alone = median_us(0, NULL, [&] { multiply(&left, &s, 0, 0); });
            for (int i = 0; i < 2; i++)
                us[i] = median_us(0, NULL, [&] {
                    CF_CUDA(cudaEventRecord(g.plain, g.stream[0]));
                    CF_CUDA(cudaStreamWaitEvent(g.stream[1], g.plain, 0));
                    multiply(&left, &s, 0, 1);
                    hold<<<1, 1, 0, g.stream[0]>>>(LATER_NS);
                    come(blocks, i == 0 ? 1 : 4);
                });
            printf("  %-24s %6d %9.1f %9.1f %9.1f\n", s.name, blocks, alone, us[0], us[1]);
        }
}

static void *take(int64_t bytes) {
    void *memory;
    CF_CUDA(cudaMalloc(&memory, (size_t)bytes));
    return memory;
}

int main(int count, char **words) {
    const bool only = count == 2 && strcmp(words[1], "clusters") == 0;
    if (count > 1 && !only) cf_die("it takes nothing, or: clusters", "bench_beside: what is %s?", words[1]);
    setvbuf(stdout, NULL, _IOLBF, 0); // whoever ends it finds the lines printed so far
    cf_device_open(0);
    for (int i = 0; i < STREAMS; i++) {
        CF_CUDA(cudaStreamCreateWithFlags(&g.stream[i], cudaStreamNonBlocking));
        g.workspace[i] = take(WORKSPACE);
    }
    CF_CUDA(cudaStreamCreateWithFlags(&g.holding, cudaStreamNonBlocking));
    CF_CUDA(cudaEventCreate(&g.begin));
    CF_CUDA(cudaEventCreate(&g.end));
    CF_CUDA(cudaEventCreate(&g.joined));
    CF_CUDA(cudaEventCreateWithFlags(&g.plain, cudaEventDisableTiming));
    CF_CUDA(cudaHostAlloc((void **)&g.word, sizeof *g.word, cudaHostAllocMapped));
    CF_CUDA(cudaMallocHost((void **)&g.differs, sizeof *g.differs));
    CF_CUDA(cudaFuncSetAttribute(hold, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 << 10));
    check(cublasLtCreate(&g.lt));
    bf16 **operands[] = {&g.a, &g.b, &g.c, &g.whole};
    for (unsigned i = 0; i < 4; i++) {
        *operands[i] = (bf16 *)take(OPERAND_MAX * (int64_t)sizeof(bf16));
        randomize<<<1024, 256>>>(*operands[i], OPERAND_MAX, i + 1);
    }
    CF_CUDA(cudaDeviceSynchronize());
    if (!only) queue(), products(), beside();
    if (cf_cuda_properties()->major >= 9) clusters(); // Hopper
    return 0;
}
