// Tests of the emulator: right programs give right results, and mistakes are found.
//
// Each case runs in a process of its own, because a process that has streams must not fork; cases with several ranks fork them. A
// case that must fail names a part of the message that it must fail with.
#include <cublasLt.h>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <nccl.h>
#include <string>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#define CHECK(condition)                                                                                                           \
    do {                                                                                                                           \
        if (!(condition)) {                                                                                                        \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                                                \
            _exit(1);                                                                                                              \
        }                                                                                                                          \
    } while (0)
#define CUDA(call) CHECK((call) == cudaSuccess)
#define NCCL(call) CHECK((call) == ncclSuccess)

template <typename... Parameters, typename... Arguments>
static void launch(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, cudaStream_t stream, Arguments... arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks, config.blockDim = threads, config.stream = stream;
    CUDA(cudaLaunchKernelEx(&config, kernel, (Parameters)arguments...));
}

static cudaStream_t new_stream() {
    cudaStream_t stream;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

template <typename T> static T *on_device(int64_t count) {
    T *memory;
    CUDA(cudaMalloc(&memory, (size_t)count * sizeof(T)));
    return memory;
}

template <typename T> static T *on_device(const std::vector<T> &values, cudaStream_t stream) {
    T *memory = on_device<T>((int64_t)values.size());
    CUDA(cudaMemcpyAsync(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice, stream));
    return memory;
}

template <typename T> static std::vector<T> on_host(const T *memory, int64_t count, cudaStream_t stream) {
    std::vector<T> values((size_t)count);
    CUDA(cudaMemcpyAsync(values.data(), memory, values.size() * sizeof(T), cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamSynchronize(stream));
    return values;
}

// Rank r of `ranks` runs in a process of its own; all must end well.
static void fork_ranks(int ranks, void (*run)(int rank, int ranks, char *shared), char *shared) {
    for (int r = 0; r < ranks; r++)
        if (fork() == 0) {
            run(r, ranks, shared);
            _exit(0);
        }
    for (int r = 0; r < ranks; r++) {
        int status;
        wait(&status);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
}

static char *shared_memory() {
    return (char *)mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

// --------------------------------------------------------------------------------------------------------- kernels

__global__ static void indices(int *out) {
    int block = (int)(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
    int thread = (int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
    out[block * (int)(blockDim.x * blockDim.y * blockDim.z) + thread] = block * 1000 + thread;
}

static void test_indices() {
    cudaStream_t stream = new_stream();
    int *out = on_device<int>(24 * 30);
    launch(indices, dim3(2, 3, 4), dim3(5, 3, 2), stream, out);
    auto got = on_host(out, 24 * 30, stream);
    for (int i = 0; i < 24 * 30; i++) CHECK(got[(size_t)i] == i / 30 * 1000 + i % 30);
}

__global__ static void block_sums(int *out, const int *in) { // one row of blockDim.x a block
    __shared__ int partial[1024];
    int t = (int)threadIdx.x, n = (int)blockDim.x;
    partial[t] = in[(int)blockIdx.x * n + t];
    __syncthreads();
    for (int half = 512; half > 0; half /= 2) {
        if (t < half && t + half < n) partial[t] += partial[t + half];
        __syncthreads();
    }
    out[(int)blockIdx.x * n + t] = partial[0];
}

static void test_barriers() {
    cudaStream_t stream = new_stream();
    for (int n : {1, 31, 256, 1000, 1024}) {
        std::vector<int> in((size_t)n * 7);
        for (size_t i = 0; i < in.size(); i++) in[i] = (int)(i * i % 1013);
        int *x = on_device(in, stream), *sums = on_device<int>(n * 7);
        launch(block_sums, dim3(7), dim3((unsigned)n), stream, sums, x);
        auto got = on_host(sums, n * 7, stream);
        for (int b = 0; b < 7; b++) {
            int sum = 0;
            for (int i = 0; i < n; i++) sum += in[(size_t)(b * n + i)];
            for (int i = 0; i < n; i++) CHECK(got[(size_t)(b * n + i)] == sum);
        }
        CUDA(cudaFree(x));
        CUDA(cudaFree(sums));
    }
}

static void test_more_threads() {
    setenv("EMULATOR_THREADS", "3", 1);
    test_barriers();
}

__global__ static void warps(float *out) { // (8, threads)
    int t = (int)threadIdx.x, n = (int)blockDim.x, lane = t & 31;
    float sum = (float)t;
    for (int bits = 16; bits > 0; bits /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bits);
    out[t] = sum;
    float down = (float)t;
    for (int by = 16; by > 0; by /= 2) down += __shfl_down_sync(0xffffffffu, down, (unsigned)by);
    out[n + t] = __shfl_sync(0xffffffffu, down, 0);
    out[2 * n + t] = (float)__ballot_sync(0xffffffffu, lane % 3 == 0);
    unsigned mine = lane < 16 ? 0x0000ffffu : 0xffff0000u; // two halves, each on its own
    double half = t;
    for (int bits = 8; bits > 0; bits /= 2) half += __shfl_xor_sync(mine, half, bits);
    out[3 * n + t] = (float)half;
    out[4 * n + t] = (float)__shfl_up_sync(0xffffffffu, t, 1);
    out[5 * n + t] = (float)__shfl_sync(0xffffffffu, t, 3, 8);
    __syncwarp();
}

static void test_shuffles() {
    cudaStream_t stream = new_stream();
    float *out = on_device<float>(6 * 96);
    launch(warps, dim3(1), dim3(96), stream, out);
    auto got = on_host(out, 6 * 96, stream);
    for (int t = 0; t < 96; t++) {
        int warp = t / 32 * 32, sum = 32 * warp + 31 * 16, half = t / 16 * 16;
        CHECK(got[(size_t)t] == (float)sum && got[(size_t)(96 + t)] == (float)sum);
        CHECK(got[(size_t)(192 + t)] == (float)0x49249249u);
        CHECK(got[(size_t)(288 + t)] == (float)(16 * half + 15 * 8));
        CHECK(got[(size_t)(384 + t)] == (float)(t % 32 ? t - 1 : t));
        CHECK(got[(size_t)(480 + t)] == (float)(t / 8 * 8 + 3));
    }
}

__global__ static void diverging() {
    if (threadIdx.x < 7) return;
    __syncthreads();
}
__global__ static void two_places() {
    if (threadIdx.x < 7)
        __syncthreads();
    else
        __syncthreads();
}
__global__ static void bad_shuffle(int *out) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffffu, (int)threadIdx.x, 20);
}
static void dies_diverging() {
    cudaStream_t stream = new_stream();
    launch(diverging, dim3(2), dim3(64), stream);
    cudaStreamSynchronize(stream);
}
static void dies_two_places() {
    cudaStream_t stream = new_stream();
    launch(two_places, dim3(2), dim3(64), stream);
    cudaStreamSynchronize(stream);
}
static void dies_bad_shuffle() {
    cudaStream_t stream = new_stream();
    launch(bad_shuffle, dim3(1), dim3(32), stream, on_device<int>(16));
    cudaStreamSynchronize(stream);
}

__global__ static void no_barrier(int *out) { // reads what a thread further on writes
    __shared__ int x[64];
    x[threadIdx.x] = 0;
    __syncthreads();
    x[threadIdx.x] = 1;
    out[threadIdx.x] = x[63 - threadIdx.x];
}

static void test_order() { // a missing barrier gives other results under other seeds
    setenv("EMULATOR_SEED", "5", 1);
    cudaStream_t stream = new_stream();
    int *out = on_device<int>(64);
    launch(no_barrier, dim3(1), dim3(64), stream, out);
    auto first = on_host(out, 64, stream);
    bool differs = false;
    for (int i = 0; i < 8; i++) {
        launch(no_barrier, dim3(1), dim3(64), stream, out);
        differs |= on_host(out, 64, stream) != first;
    }
    CHECK(differs);
}

static void test_bf16() {
    CHECK(__bfloat162float(__float2bfloat16_rn(1.0f + 1.0f / 256)) == 1.0f);       // tie: to even
    CHECK(__bfloat162float(__float2bfloat16_rn(1.0f + 3.0f / 256)) == 1.015625f);  // tie: to even, up
    CHECK(__bfloat162float(__float2bfloat16_rn(1.0f + 1.1f / 256)) == 1.0078125f); // nearest
    CHECK(std::isnan(__bfloat162float(__float2bfloat16_rn(NAN))));
    CHECK(std::isinf(__bfloat162float(__float2bfloat16_rn(3.4e38f))));
    CHECK(sizeof(__nv_bfloat16) == 2);
}

// ---------------------------------------------------------------------------------------------------------- streams

__global__ static void fill(int *x, int n, int value) {
    for (int i = (int)(blockIdx.x * blockDim.x + threadIdx.x); i < n; i += (int)(gridDim.x * blockDim.x)) x[i] = value;
}
__global__ static void copy(int *to, const int *from, int n) {
    for (int i = (int)(blockIdx.x * blockDim.x + threadIdx.x); i < n; i += (int)(gridDim.x * blockDim.x)) to[i] = from[i];
}

static bool chain_is_right(bool with_events) { // fill on one stream, copy on another, and back
    setenv("EMULATOR_JITTER", "300", 1);
    enum { N = 20000 };
    cudaStream_t a = new_stream(), b = new_stream();
    int *x = on_device<int>(N), *y = on_device<int>(N);
    cudaEvent_t filled, copied;
    CUDA(cudaEventCreateWithFlags(&filled, cudaEventDisableTiming));
    CUDA(cudaEventCreateWithFlags(&copied, cudaEventDisableTiming));
    bool right = true;
    for (int round = 0; round < 30; round++) {
        launch(fill, dim3(20), dim3(100), a, x, (int)N, round);
        CUDA(cudaEventRecord(filled, a));
        if (with_events) CUDA(cudaStreamWaitEvent(b, filled));
        launch(copy, dim3(20), dim3(100), b, y, (const int *)x, (int)N);
        CUDA(cudaEventRecord(copied, b));
        CUDA(cudaStreamWaitEvent(a, copied));
        for (int value : on_host(y, N, b)) right &= value == round;
    }
    return right;
}

static void test_events() {
    CHECK(chain_is_right(true));
}
static void test_missing_event() {
    CHECK(!chain_is_right(false));
}

static void test_wait_is_for_the_latest_record() {
    setenv("EMULATOR_JITTER", "1000", 1);
    cudaStream_t a = new_stream(), b = new_stream();
    uint32_t *flag = on_device<uint32_t>(1);
    CUDA(cudaMemsetAsync(flag, 0, 4, a));
    cudaEvent_t event;
    CUDA(cudaEventCreate(&event));
    CUDA(cudaStreamWaitEvent(b, event)); // never recorded: no wait
    CUDA(cudaStreamSynchronize(b));
    CUDA(cudaEventRecord(event, a));
    CUDA(cudaStreamWaitEvent(b, event)); // for this record, not for the next, which b itself lets happen
    void *wait_value, *write_value;
    CUDA(cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &wait_value, 12000, cudaEnableDefault));
    CUDA(cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", &write_value, 12000, cudaEnableDefault));
    auto wait = (decltype(&cuStreamWaitValue32))wait_value;
    auto write = (decltype(&cuStreamWriteValue32))write_value;
    CHECK(wait(a, (CUdeviceptr)flag, 3, CU_STREAM_WAIT_VALUE_GEQ) == CUDA_SUCCESS);
    CUDA(cudaEventRecord(event, a));
    CHECK(cudaEventQuery(event) == cudaErrorNotReady);
    CHECK(write(b, (CUdeviceptr)flag, 4, 0) == CUDA_SUCCESS);
    CUDA(cudaEventSynchronize(event));
    CHECK(cudaEventQuery(event) == cudaSuccess);
    CUDA(cudaStreamDestroy(b));
    CUDA(cudaDeviceSynchronize());
}

static void test_elapsed_time() {
    cudaStream_t stream = new_stream();
    cudaEvent_t begin, end;
    CUDA(cudaEventCreate(&begin));
    CUDA(cudaEventCreate(&end));
    int *x = on_device<int>(1 << 20);
    CUDA(cudaEventRecord(begin, stream));
    for (int i = 0; i < 4; i++) launch(fill, dim3(64), dim3(256), stream, x, 1 << 20, i);
    CUDA(cudaEventRecord(end, stream));
    CUDA(cudaEventSynchronize(end));
    float ms = -1;
    CUDA(cudaEventElapsedTime(&ms, begin, end));
    CHECK(ms > 0 && ms < 60000);
}

static void dies_default_stream() {
    launch(diverging, dim3(1), dim3(1), (cudaStream_t) nullptr);
}

// ----------------------------------------------------------------------------------------------------------- memory

static void test_memory() {
    setenv("EMULATOR_MEMORY", "1", 1);
    cudaStream_t stream = new_stream();
    unsigned char *x = on_device<unsigned char>(1000);
    CHECK((uintptr_t)x % 256 == 0);
    for (unsigned char byte : on_host(x, 1000, stream)) CHECK(byte == 0xFB);
    size_t left, total;
    CUDA(cudaMemGetInfo(&left, &total));
    CHECK(total == 1 << 20 && left == total - 1000);
    void *more;
    CHECK(cudaMalloc(&more, 1 << 20) == cudaErrorMemoryAllocation);
    CHECK(cudaGetLastError() == cudaErrorMemoryAllocation && cudaGetLastError() == cudaSuccess);
    CUDA(cudaMemsetAsync(x, 7, 500, stream));
    std::vector<unsigned char> mine(1000, 1);
    CUDA(cudaMemcpyAsync(x + 500, mine.data(), 500, cudaMemcpyDefault, stream));
    std::fill(mine.begin(), mine.end(), 2); // has been read already
    auto got = on_host(x, 1000, stream);
    CHECK(got[499] == 7 && got[500] == 1 && got[999] == 1);
    CUDA(cudaFree(x));
}

static void test_pinned_is_asynchronous() {
    cudaStream_t stream = new_stream(), other = new_stream();
    uint32_t *flag = on_device<uint32_t>(1), *x = on_device<uint32_t>(1), *pinned;
    CUDA(cudaMallocHost(&pinned, 8));
    CUDA(cudaMemsetAsync(flag, 0, 4, stream));
    CUDA(cudaStreamSynchronize(stream));
    CHECK(cuStreamWaitValue32(stream, (CUdeviceptr)flag, 1, CU_STREAM_WAIT_VALUE_GEQ) == CUDA_SUCCESS);
    pinned[0] = 1;
    CUDA(cudaMemcpyAsync(x, pinned, 4, cudaMemcpyHostToDevice, stream));
    CUDA(cudaMemcpyAsync(pinned + 1, x, 4, cudaMemcpyDeviceToHost, stream));
    pinned[0] = 2; // has not been read yet
    CHECK(cudaStreamQuery(stream) == cudaErrorNotReady);
    CHECK(cuStreamWriteValue32(other, (CUdeviceptr)flag, 1, 0) == CUDA_SUCCESS);
    CUDA(cudaStreamSynchronize(stream));
    CHECK(pinned[1] == 2);
    CUDA(cudaFreeHost(pinned));
}

__global__ static void write_at(char *x, int64_t at) {
    x[at] = 1;
}
static void dies_guard(int64_t at) {
    cudaStream_t stream = new_stream();
    char *x = on_device<char>(1000);
    launch(write_at, dim3(1), dim3(1), stream, x, at);
    CUDA(cudaFree(x));
}
static void dies_behind() {
    dies_guard(1000);
}
static void dies_before() {
    dies_guard(-1);
}
static void dies_long_copy() {
    cudaStream_t stream = new_stream();
    char *x = on_device<char>(1000), *y = on_device<char>(900);
    cudaMemcpyAsync(y, x, 901, cudaMemcpyDeviceToDevice, stream);
}
static void test_no_device() {
    setenv("EMULATOR_DEVICES", "0", 1);
    int count = -1;
    CHECK(cudaGetDeviceCount(&count) == cudaErrorNoDevice && count == 0);
    void *memory;
    CHECK(cudaMalloc(&memory, 1) == cudaErrorNoDevice);
}

struct Mailbox { // in shared memory
    cudaIpcMemHandle_t handle[2];
    int filled[2];
};

// Each rank counts in the other's memory, in turn, for a while.
static void ipc_rank(int rank, int, char *shared) {
    enum { N = 5000, ROUNDS = 50 };
    setenv("EMULATOR_JITTER", "50", 1);
    Mailbox *box = (Mailbox *)shared;
    cudaStream_t stream = new_stream();
    int *mine = on_device<int>(N + 1); // N numbers and a flag
    CUDA(cudaMemsetAsync(mine, 0, (N + 1) * 4, stream));
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaIpcGetMemHandle(&box->handle[rank], mine));
    __atomic_store_n(&box->filled[rank], 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&box->filled[!rank], __ATOMIC_ACQUIRE)) usleep(100);
    void *theirs_, *own;
    CHECK(cudaIpcOpenMemHandle(&own, box->handle[rank], cudaIpcMemLazyEnablePeerAccess) != cudaSuccess);
    CUDA(cudaIpcOpenMemHandle(&theirs_, box->handle[!rank], cudaIpcMemLazyEnablePeerAccess));
    int *theirs = (int *)theirs_;
    for (int round = 1; round <= ROUNDS; round++) {
        int *x = on_device<int>(N);
        launch(fill, dim3(8), dim3(32), stream, x, (int)N, round * 2 + rank);
        CUDA(cudaMemcpyAsync(theirs, x, N * 4, cudaMemcpyDeviceToDevice, stream));
        CHECK(cuStreamWriteValue32(stream, (CUdeviceptr)(theirs + N), (cuuint32_t)round, 0) == CUDA_SUCCESS);
        CHECK(cuStreamWaitValue32(stream, (CUdeviceptr)(mine + N), (cuuint32_t)round, CU_STREAM_WAIT_VALUE_GEQ) == CUDA_SUCCESS);
        auto got = on_host(mine, N, stream); // the peer may be a round ahead
        CHECK(got[0] >= round * 2 + !rank && got[N - 1] >= round * 2 + !rank);
        CUDA(cudaFree(x));
    }
    CUDA(cudaIpcCloseMemHandle(theirs));
    CUDA(cudaFree(mine));
}
static void test_ipc() {
    fork_ranks(2, ipc_rank, shared_memory());
}

// --------------------------------------------------------------------------------------------------------- cublasLt

struct Case {
    int64_t m, n, k;
    bool ta, tb;
    int32_t epilogue;
    float alpha, beta;
    int64_t gap; // added to every leading dimension
};

static cudaDataType type_of(float) {
    return CUDA_R_32F;
}
static cudaDataType type_of(__nv_bfloat16) {
    return CUDA_R_16BF;
}

template <typename T, typename Out> static void matmul_case(const Case &c) {
    cudaStream_t stream = new_stream();
    int64_t a_rows = c.ta ? c.k : c.m, a_cols = c.ta ? c.m : c.k, b_rows = c.tb ? c.n : c.k, b_cols = c.tb ? c.k : c.n;
    int64_t lda = a_rows + c.gap, ldb = b_rows + c.gap, ldd = c.m + c.gap;
    auto numbers = [](int64_t count, int64_t prime, auto type) {
        std::vector<decltype(type)> v;
        for (int64_t i = 0; i < count; i++) v.push_back((decltype(type))((float)(i * i % prime) / 8.0f - 5.0f));
        return v;
    };
    auto a = numbers(lda * a_cols, 83, T()), b = numbers(ldb * b_cols, 89, T());
    int64_t ld_aux = (c.m + 7) / 8 * 8;
    auto d = numbers(ldd * c.n, 97, Out()), bias = numbers(c.m + c.n, 79, Out());
    auto aux = numbers(ld_aux * c.n, 61, Out());
    T *A = on_device(a, stream), *B = on_device(b, stream);
    Out *D = on_device(d, stream), *bias_there = on_device(bias, stream), *aux_there = on_device(aux, stream);

    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t la, lb, ld;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t found;
    size_t room = 4096;
    int count;
    void *workspace = on_device<char>((int64_t)room);
    int32_t ta = c.ta, tb = c.tb;
    CHECK(cublasLtCreate(&handle) == 0);
    CHECK(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F) == 0);
    CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &ta, sizeof ta) == 0);
    CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSB, &tb, sizeof tb) == 0);
    CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &c.epilogue, sizeof c.epilogue) == 0);
    CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias_there, sizeof bias_there) == 0);
    CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &aux_there, sizeof aux_there) == 0);
    CHECK(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &ld_aux, sizeof ld_aux) == 0);
    CHECK(cublasLtMatrixLayoutCreate(&la, type_of(T()), (uint64_t)a_rows, (uint64_t)a_cols, lda) == 0);
    CHECK(cublasLtMatrixLayoutCreate(&lb, type_of(T()), (uint64_t)b_rows, (uint64_t)b_cols, ldb) == 0);
    CHECK(cublasLtMatrixLayoutCreate(&ld, type_of(Out()), (uint64_t)c.m, (uint64_t)c.n, ldd) == 0);
    CHECK(cublasLtMatmulPreferenceCreate(&preference) == 0);
    CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room, sizeof room) == 0);
    CHECK(cublasLtMatmulAlgoGetHeuristic(handle, desc, la, lb, ld, ld, preference, 1, &found, &count) == 0);
    CHECK(count == 1);
    CHECK(cublasLtMatmul(handle, desc, &c.alpha, A, la, B, lb, &c.beta, D, ld, D, ld, &found.algo, workspace, room, stream) == 0);
    auto got = on_host(D, ldd * c.n, stream), kept = on_host(aux_there, ld_aux * c.n, stream);
    auto sums = on_host(bias_there, c.m + c.n, stream);
    bool with_bias = c.epilogue & 4, gelu = c.epilogue & 32, slope = c.epilogue & 64;
    bool of_d = c.epilogue & 16, of_a = c.epilogue & 256, of_b = c.epilogue & 512;
    auto A_at = [&](int64_t i, int64_t l) { return (double)(float)a[(size_t)(c.ta ? l + i * lda : i + l * lda)]; };
    auto B_at = [&](int64_t l, int64_t j) { return (double)(float)b[(size_t)(c.tb ? j + l * ldb : l + j * ldb)]; };
    const double root = sqrt(2 / M_PI), rounding = sizeof(Out) == 2 ? 1.0 / 256 : 0;
    std::vector<double> sum_of_d((size_t)c.m), size_of_d((size_t)c.m);
    for (int64_t j = 0; j < c.n; j++)
        for (int64_t i = 0; i < ldd; i++) {
            size_t at = (size_t)(i + j * ldd), at_aux = (size_t)(i + j * ld_aux);
            if (i >= c.m) { // the gap is left alone
                CHECK((float)got[at] == (float)d[at]);
                continue;
            }
            double sum = 0, size = 1;
            for (int64_t l = 0; l < c.k; l++) sum += A_at(i, l) * B_at(l, j), size += fabs(A_at(i, l) * B_at(l, j));
            sum = c.alpha * sum + c.beta * (double)(float)d[at] + (with_bias ? (double)(float)bias[(size_t)i] : 0);
            if (gelu && c.epilogue & 128) CHECK(fabs((double)(float)kept[at_aux] - sum) <= size * 1e-6 + fabs(sum) * rounding);
            if (gelu) sum *= 0.5 * (1 + tanh(root * (sum + 0.044715 * sum * sum * sum)));
            double x = (double)(float)aux[at_aux], h = 1e-5;
            auto f = [root](double v) { return 0.5 * v * (1 + tanh(root * (v + 0.044715 * v * v * v))); };
            if (slope) sum *= (f(x + h) - f(x - h)) / (2 * h);
            CHECK(fabs((double)(float)got[at] - sum) <= size * 2e-6 + fabs(sum) * rounding);
            sum_of_d[(size_t)i] += sum, size_of_d[(size_t)i] += size;
        }
    for (int64_t i = 0; i < c.m && of_d; i++) {
        double sum = sum_of_d[(size_t)i];
        CHECK(fabs((double)(float)sums[(size_t)i] - sum) <= size_of_d[(size_t)i] * 2e-6 + fabs(sum) * rounding);
    }
    for (int64_t i = 0; i < (of_a ? c.m : of_b ? c.n : 0); i++) {
        double sum = 0;
        for (int64_t l = 0; l < c.k; l++) sum += of_a ? A_at(i, l) : B_at(l, i);
        CHECK(fabs((double)(float)sums[(size_t)i] - sum) <= 1e-3 + fabs(sum) * rounding);
    }
    CHECK(cublasLtMatmulDescDestroy(desc) == 0 && cublasLtMatmulPreferenceDestroy(preference) == 0);
    CHECK(cublasLtMatrixLayoutDestroy(la) == 0 && cublasLtMatrixLayoutDestroy(lb) == 0);
    CHECK(cublasLtMatrixLayoutDestroy(ld) == 0 && cublasLtDestroy(handle) == 0);
}

static void test_matmul() {
    for (int transposes = 0; transposes < 4; transposes++)
        for (int64_t gap : {0, 3}) {
            bool ta = transposes & 1, tb = transposes & 2;
            for (Case c : {Case{5, 7, 9, ta, tb, CUBLASLT_EPILOGUE_BIAS, 1, 0, gap},
                           Case{300, 17, 33, ta, tb, CUBLASLT_EPILOGUE_DEFAULT, 0.5f, 2, gap},
                           Case{1, 1, 1, ta, tb, CUBLASLT_EPILOGUE_BIAS, 1, 1, gap},
                           Case{64, 30, 100, ta, tb, CUBLASLT_EPILOGUE_GELU_AUX_BIAS, 0.01f, 0, gap},
                           Case{33, 9, 21, ta, tb, CUBLASLT_EPILOGUE_GELU, 0.02f, 0, gap},
                           Case{40, 12, 50, ta, tb, CUBLASLT_EPILOGUE_DGELU_BGRAD, 1, 0, gap},
                           Case{21, 14, 35, ta, tb, CUBLASLT_EPILOGUE_BGRADA, 1, 1, gap},
                           Case{21, 14, 35, ta, tb, CUBLASLT_EPILOGUE_BGRADB, 1, 1, gap}}) {
                matmul_case<float, float>(c);
                matmul_case<__nv_bfloat16, __nv_bfloat16>(c);
                matmul_case<__nv_bfloat16, float>(c);
            }
        }
}

// The status of cublasLtMatmul for a product that is `wrong` in one respect, and for the corrected one.
static void refused(const char *wrong) {
    cudaStream_t stream = new_stream();
    auto is = [wrong](const char *what) { return strcmp(wrong, what) == 0; };
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t square, narrow;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t found;
    int count;
    float one = 1, zero = 0, *x = on_device<float>(16 * 16 + 1);
    cublasLtCreate(&handle);
    cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatrixLayoutCreate(&square, CUDA_R_32F, 16, 16, 16);
    cublasLtMatrixLayoutCreate(&narrow, CUDA_R_32F, 16, 16, 15);
    cublasLtMatmulPreferenceCreate(&preference);
    CHECK(cublasLtMatmulAlgoGetHeuristic(handle, desc, square, square, square, square, preference, 1, &found, &count) == 0);
    cublasLtMatrixLayout_t b = is("ld") ? narrow : square;
    const float *a = is("alignment") ? x + 1 : x;
    cublasStatus_t status = cublasLtMatmul(handle, desc, &one, a, square, x, b, &zero, x, square, x, square, &found.algo, nullptr,
                                           is("workspace") ? 64 : 0, stream);
    CHECK(status == (is("nothing") ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE));
    if (!is("nothing")) _exit(1);
}
static void test_nothing_refused() {
    refused("nothing");
}
static void dies_ld() {
    refused("ld");
}
static void dies_alignment() {
    refused("alignment");
}
static void dies_workspace() {
    refused("workspace");
}

// ------------------------------------------------------------------------------------------------------------- nccl

static ncclComm_t connect(int rank, int ranks, char *shared, bool blocking = true) {
    int *ready = (int *)(shared + NCCL_UNIQUE_ID_BYTES);
    if (rank == 0) {
        NCCL(ncclGetUniqueId((ncclUniqueId *)shared));
        __atomic_store_n(ready, 1, __ATOMIC_RELEASE);
    }
    while (!__atomic_load_n(ready, __ATOMIC_ACQUIRE)) usleep(100);
    ncclComm_t comm;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = blocking;
    CHECK(ncclCommInitRankConfig(&comm, ranks, *(ncclUniqueId *)shared, rank, &config) ==
          (blocking ? ncclSuccess : ncclInProgress));
    return comm;
}

// A token goes round, and every rank adds one to it; then the collectives.
static void nccl_rank(int rank, int ranks, char *shared) {
    enum { N = 70001 }; // more than a connection holds
    setenv("EMULATOR_JITTER", "100", 1);
    cudaStream_t stream = new_stream();
    ncclComm_t comm = connect(rank, ranks, shared);
    int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
    int *x = on_device<int>(N), *y = on_device<int>(N);
    launch(fill, dim3(8), dim3(64), stream, x, (int)N, rank);
    for (int round = 1; round <= 2 * ranks; round++) {
        NCCL(ncclGroupStart());
        NCCL(ncclSend(x, N, ncclInt32, next, comm, stream));
        NCCL(ncclRecv(y, N, ncclInt32, previous, comm, stream));
        NCCL(ncclGroupEnd());
        std::swap(x, y);
        auto got = on_host(x, N, stream);
        for (int value : got) CHECK(value == (rank + 2 * ranks - round) % ranks);
    }
    float *all = on_device<float>(5 * ranks), *mine = on_device<float>(5), *sum = on_device<float>(5);
    std::vector<float> five(5, (float)rank + 1);
    CUDA(cudaMemcpyAsync(mine, five.data(), 20, cudaMemcpyDefault, stream));
    NCCL(ncclAllGather(mine, all, 5, ncclFloat32, comm, stream));
    auto gathered = on_host(all, 5 * ranks, stream);
    for (int i = 0; i < 5 * ranks; i++) CHECK(gathered[(size_t)i] == (float)(i / 5 + 1));
    NCCL(ncclReduceScatter(all, sum, 5, ncclFloat32, ncclSum, comm, stream));
    for (float value : on_host(sum, 5, stream)) CHECK(value == (float)(ranks * (rank + 1)));
    NCCL(ncclAllReduce(mine, mine, 5, ncclFloat32, ncclSum, comm, stream));
    for (float value : on_host(mine, 5, stream)) CHECK(value == (float)(ranks * (ranks + 1) / 2));
    NCCL(ncclGroupStart());
    for (int root = 0; root < ranks; root++) NCCL(ncclBroadcast(sum, all + 5 * root, 5, ncclFloat32, root, comm, stream));
    NCCL(ncclGroupEnd());
    gathered = on_host(all, 5 * ranks, stream);
    for (int i = 0; i < 5 * ranks; i++) CHECK(gathered[(size_t)i] == (float)(ranks * (i / 5 + 1)));
    NCCL(ncclGroupStart()); // every rank to every rank, itself included
    for (int peer = 0; peer < ranks; peer++) {
        NCCL(ncclSend(x + peer, 1, ncclInt32, peer, comm, stream));
        NCCL(ncclRecv(y + peer, 1, ncclInt32, peer, comm, stream));
    }
    NCCL(ncclGroupEnd());
    auto last = on_host(y, ranks, stream);
    for (int peer = 0; peer < ranks; peer++) CHECK(last[(size_t)peer] == peer);
    NCCL(ncclCommDestroy(comm));
}
static void test_nccl() {
    for (int ranks : {1, 2, 4}) fork_ranks(ranks, nccl_rank, shared_memory());
}

// Two streams, one communicator: operations meet in the order issued.
static void two_streams_rank(int rank, int ranks, char *shared) {
    setenv("EMULATOR_JITTER", "200", 1);
    ncclComm_t comm = connect(rank, ranks, shared);
    cudaStream_t stream[2] = {new_stream(), new_stream()};
    int *x = on_device<int>(100);
    if (rank == 0)
        for (int i = 0; i < 100; i++) launch(fill, dim3(1), dim3(1), stream[i % 2], x + i, 1, i);
    for (int i = 0; i < 100; i++)
        NCCL(rank == 0 ? ncclSend(x + i, 1, ncclInt32, 1, comm, stream[i % 2])
                       : ncclRecv(x + i, 1, ncclInt32, 0, comm, stream[i % 2]));
    CUDA(cudaDeviceSynchronize());
    auto got = on_host(x, 100, stream[0]);
    for (int i = 0; i < 100; i++) CHECK(got[(size_t)i] == i);
    NCCL(ncclCommDestroy(comm));
}
static void test_nccl_two_streams() {
    fork_ranks(2, two_streams_rank, shared_memory());
}

static unsigned patience_s = 60;
// Three communicators whose kernels do not fit beside each other; streams delayed at random, so on each rank another begins first.
static void crowded_rank(int rank, int ranks, char *shared) {
    enum { COMMS = 3, ROUNDS = 40 };
    char seed[16];
    snprintf(seed, sizeof seed, "%d", rank + 1);
    setenv("EMULATOR_JITTER", "2000", 1);
    setenv("EMULATOR_SEED", seed, 1);
    ncclComm_t comm[COMMS];
    cudaStream_t stream[COMMS];
    int *x = on_device<int>(COMMS * 2);
    for (int i = 0; i < COMMS; i++) comm[i] = connect(rank, ranks, shared + i * 256), stream[i] = new_stream();
    alarm(patience_s);
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < COMMS; i++) {
            NCCL(ncclGroupStart());
            for (int part = 0; part < 2; part++) { // two messages of 32 channels
                NCCL(ncclSend(x + i, 1, ncclInt32, 1 - rank, comm[i], stream[i]));
                NCCL(ncclRecv(x + COMMS + i, 1, ncclInt32, 1 - rank, comm[i], stream[i]));
            }
            NCCL(ncclGroupEnd());
        }
    CUDA(cudaDeviceSynchronize());
    for (ncclComm_t one : comm) NCCL(ncclCommDestroy(one));
}
static void test_nccl_in_one_order() {
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1);
    fork_ranks(2, crowded_rank, shared_memory());
}
static void dies_in_any_order() {
    patience_s = 5;
    fork_ranks(2, crowded_rank, shared_memory());
}

static void patient_rank(int rank, int ranks, char *shared) {
    ncclComm_t comm = connect(rank, ranks, shared, false);
    auto finish = [comm] {
        ncclResult_t result = ncclInProgress;
        while (result == ncclInProgress) NCCL(ncclCommGetAsyncError(comm, &result));
        CHECK(result == ncclSuccess);
    };
    finish();
    cudaStream_t stream = new_stream();
    int *x = on_device<int>(1);
    launch(fill, dim3(1), dim3(1), stream, x, 1, rank + 1);
    CHECK(ncclAllReduce(x, x, 1, ncclInt32, ncclMax, comm, stream) == ncclInProgress);
    CHECK(on_host(x, 1, stream)[0] == rank + 1); // without a question nothing begins
    finish();
    CHECK(on_host(x, 1, stream)[0] == ranks);
    NCCL(ncclCommDestroy(comm));
}
static void test_nccl_nonblocking() {
    fork_ranks(3, patient_rank, shared_memory());
}

static void leaving_rank(int rank, int ranks, char *shared) {
    ncclComm_t comm = connect(rank, ranks, shared);
    if (rank == 1) _exit(0); // without a word
    cudaStream_t stream = new_stream();
    int *x = on_device<int>(1);
    NCCL(ncclRecv(x, 1, ncclInt32, 1, comm, stream));
    ncclResult_t result = ncclSuccess;
    while (result == ncclSuccess) NCCL(ncclCommGetAsyncError(comm, &result));
    CHECK(result == ncclRemoteError && cudaStreamQuery(stream) == cudaErrorNotReady);
    NCCL(ncclCommAbort(comm));
    CUDA(cudaStreamSynchronize(stream));
}
static void test_nccl_lost_peer() {
    fork_ranks(2, leaving_rank, shared_memory());
}

static void mismatching_rank(int rank, int ranks, char *shared) {
    ncclComm_t comm = connect(rank, ranks, shared);
    cudaStream_t stream = new_stream();
    int *x = on_device<int>(8);
    NCCL(rank == 0 ? ncclSend(x, 7, ncclInt32, 1, comm, stream) : ncclRecv(x, 8, ncclInt32, 0, comm, stream));
    CUDA(cudaStreamSynchronize(stream));
}
static void dies_mismatch() {
    fork_ranks(2, mismatching_rank, shared_memory());
}

// -------------------------------------------------------------------------------------------------------------- run

// A sanitizer reports some errors earlier and with another message.
#if defined(__SANITIZE_ADDRESS__)
#define BEHIND "use-after-poison"
#define BEFORE "use-after-poison"
#else
#define BEHIND "a byte 1000 from the start of 1000 bytes"
#define BEFORE "a byte -1 from the start of 1000 bytes"
#endif
#if defined(__SANITIZE_THREAD__)
#define RACE "ThreadSanitizer: data race"
#else
#define RACE nullptr
#endif

static const struct {
    const char *name;
    void (*run)();
    const char *dies; // a part of its error message; nullptr: it must not fail
} cases[] = {
    {"indices", test_indices, nullptr},
    {"barriers", test_barriers, nullptr},
    {"blocks on three threads", test_more_threads, nullptr},
    {"shuffles", test_shuffles, nullptr},
    {"thread order", test_order, nullptr},
    {"bf16", test_bf16, nullptr},
    {"a thread that left", dies_diverging, "7 of 64 threads have left the kernel"},
    {"two barriers at once", dies_two_places, "__syncthreads: some threads of a block are at"},
    {"shuffle from outside", dies_bad_shuffle, "a shuffle reads lane 20, which is not in mask 0000ffff"},
    {"events", test_events, nullptr},
    {"missing event", test_missing_event, RACE},
    {"latest record", test_wait_is_for_the_latest_record, nullptr},
    {"elapsed time", test_elapsed_time, nullptr},
    {"default stream", dies_default_stream, "on the default stream"},
    {"memory", test_memory, nullptr},
    {"pinned memory", test_pinned_is_asynchronous, nullptr},
    {"written behind", dies_behind, BEHIND},
    {"written before", dies_before, BEFORE},
    {"copy too long", dies_long_copy, "901 bytes at"},
    {"no device", test_no_device, nullptr},
    {"ipc", test_ipc, nullptr},
    {"matmul", test_matmul, nullptr},
    {"matmul accepted", test_nothing_refused, nullptr},
    {"ld too small", dies_ld, "B is 16 by 16 and ld 15 too small for it"},
    {"less aligned than promised", dies_alignment, "the preference promised an alignment of 256 bytes"},
    {"no workspace", dies_workspace, "a workspace of 64 bytes at (nil)"},
    {"nccl", test_nccl, nullptr},
    {"nccl on two streams", test_nccl_two_streams, nullptr},
    {"nccl of several groups in one order", test_nccl_in_one_order, nullptr},
    {"nccl of several groups in any order", dies_in_any_order, ""}, // they wait for each other
    {"nccl non-blocking", test_nccl_nonblocking, nullptr},
    {"nccl lost peer", test_nccl_lost_peer, nullptr},
    {"nccl mismatch", dies_mismatch, "sends 28 bytes (send and receive) to rank 1, which expects 32 bytes"},
};

int main(int argc, char **argv) {
    int failed = 0, count = 0;
    for (const auto &c : cases) {
        if (argc > 1 && !strstr(c.name, argv[1])) continue;
        int words[2];
        if (pipe(words) != 0) return 1;
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            dup2(words[1], 2);
            alarm(100);
            c.run();
            _exit(0);
        }
        close(words[1]);
        std::string said;
        char part[512];
        for (ssize_t n; (n = read(words[0], part, sizeof part)) > 0;) said.append(part, (size_t)n);
        close(words[0]);
        int status;
        waitpid(child, &status, 0);
        bool well = WIFEXITED(status) && WEXITSTATUS(status) == 0;
        bool passed = c.dies ? !well && said.find(c.dies) != std::string::npos : well && said.empty();
        printf("%s %d - %s\n", passed ? "ok" : "not ok", ++count, c.name);
        if (!passed) printf("status %d, said:\n%s\n", status, said.c_str());
        failed += !passed;
    }
    printf("1..%d\n", count);
    return failed ? 1 : 0;
}
