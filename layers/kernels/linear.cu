// Linear layer on the GPU: products by cuBLASLt, and a kernel for the gradient of a bias.
//
// cuBLASLt's matrices are column-major. Our row-major c = op(a)·op(b) is its cᵀ = op(b)ᵀ·op(a)ᵀ, and a row-major matrix is its
// own transpose there: so the factors change places and nothing is moved. A bias, one value for each of our columns, is one for
// each row of cuBLASLt's, as its epilogue expects.
//
// GELU (the tanh approximation, like ours) and its derivative are applied in epilogues too if cuBLASLt has them: the widest
// activation is then written once instead of written, read and written. What is added to a product is read by it: a residual stream
// moves 2 · R · OC elements less than by a pass of its own. The gradient of a bias comes with that of the weights, from the dy that
// the product reads anyway (R · OC elements less); the epilogue stores it, and a kernel adds it to the fp32 sum. real = float
// computes in fp32 throughout, without TF32.
//
// Algorithms: cuBLASLt's heuristic is asked once for each kind of product and alignment of addresses. Those of its list are timed
// at the first call; of those that give the bits of the first, the fastest is used: so bits are the same in every run, whatever the
// times. (bench_gpu prints the gain: on an H200, of eight, 6 % of the time of d12's products, 10 % of d48's; the sixth to eighth
// won four of fifteen.) They are timed in turns, so that a transfer beside them disturbs all; on one rank there is none. d12, 32
// sequences, has fifteen kinds, 14 ms together (H200): CALLS of each take some half a second of the start. So they are timed in every
// run, and no file has to say what is fastest by which library, on which GPU. The inner dimension may only be split through the
// workspace, in fp32 and in a fixed order. During transfers whose kernels need multiprocessors a product uses fewer (cf_cuda_left),
// with the same algorithm.
//
// Each stream has a workspace, also for the partial sums of a bias gradient, which never runs during a product of its stream. After
// it is room for the sums that an epilogue stores. Called by the host's compute thread alone.
#include "linear.h"
#include <cublasLt.h>
#include <float.h>
#include "elementwise.h"
#include "kernel.h"
#include "activation.h"

enum { CANDIDATES = 16, TIMES = 10, CALLS = 40 };
static const double WORTH = 0.99;          // another algorithm is used if it takes less than this times the first one's time
static const double HOPEFUL = 1.1;         // one that takes more than this times the best one's time is not timed again
static const int64_t WORKSPACE = 32 << 20; // bytes; cuBLAS recommends it for Hopper
static const int64_t SUMS = 1 << 18;       // columns whose sums fit after it

static const cudaDataType_t REAL_TYPE = REAL_DTYPE == CF_BF16 ? CUDA_R_16BF : CUDA_R_32F;

typedef struct matrices {
    const real *a, *b;
    const void *add; // c = this + the product; may be c. NULL: nothing
    void *c;
    cf_stream *stream;
    // Applied to a product before it is written: a bias is added; then GELU, whose input is written to `pre`; or it is multiplied
    // by the derivative of GELU at `pre`. Or the sums of b's columns are written to `bias`. NULL: not that.
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    const void *bias = NULL;
    const real *pre = NULL;
    float factor = 1, factor_add = 1; // of the product, of what is added
} matrices;

// One kind of product, row-major: c (m, n) = op(a) (m, k) · op(b) (k, n) and an epilogue; what is added makes no difference. All
// fields have one type, so that two of them can be compared byte by byte.
typedef struct product {
    int64_t transpose_a, transpose_b;
    int64_t m, n, k, lda, ldb, ldc;
    int64_t c_type;                          // cudaDataType_t
    int64_t epilogue;                        // cublasLtEpilogue_t
    int64_t aligned_a, aligned_b, aligned_c; // bytes
    int64_t blocks, step_a, step_b, step_c;  // products; elements from one's matrices to the next one's
} product;

typedef struct plan {
    product of;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, c;  // ours
    int left;                        // multiprocessors that it leaves free
    cublasLtMatmulAlgo_t *algorithm; // [CANDIDATES] apart: the list of plans is searched in every call
    int algorithms, chosen;          // how many, 0: cuBLASLt cannot; the one that is used
    bool timed;
} plan;

static struct {
    cublasLtHandle_t handle;
    bool first_only;     // linear_time_algorithms(false)
    int last;            // linear_algorithm()
    int64_t plans, room; // how many are made, fit in the list
    plan *list;
    uint64_t *sums; // checksums of c and of `pre`
    workspace of_stream[STREAMS_MAX];
} blas;

static bool is_plain(const product *of) {
    return of->blocks == 1 && of->epilogue == CUBLASLT_EPILOGUE_DEFAULT;
}

#define CHECK(call, product) check((call), #call, product)

static void check(cublasStatus_t status, const char *call, const product *p) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    cf_die("set CUBLASLT_LOG_LEVEL=2 to see more; a kernel that failed before may show only here; if it is not supported, choose "
           "--channels, --seq and --micro-batch as multiples of 64",
           "%.*s: %s: product (%ld, %ld) · (%ld, %ld)%s%s%s, rows of %ld, %ld, %ld elements", (int)strcspn(call, "("), call,
           cublasLtGetStatusString(status), p->m, p->k, p->k, p->n, p->transpose_a ? ", first transposed" : "",
           p->transpose_b ? ", second transposed" : "", p->epilogue == CUBLASLT_EPILOGUE_DEFAULT ? "" : ", with an epilogue",
           p->lda, p->ldb, p->ldc);
}

static char *workspace_for(cf_stream *stream) {
    return workspace_of(blas.of_stream, stream, WORKSPACE + SUMS * (int64_t)sizeof(float), "workspace of matrix products");
}

// Of an address and of those that follow in steps of `step` elements, in bytes; more than sixteen makes no difference to any
// algorithm.
static int64_t alignment(const void *address, int64_t step, int64_t size) {
    int64_t bytes = 16;
    while (((uintptr_t)address | (uintptr_t)(step * size)) % (uintptr_t)bytes != 0) bytes /= 2;
    return bytes;
}

static void set_operation(plan *p, cublasLtMatmulDescAttributes_t name, const void *value, size_t bytes) {
    CHECK(cublasLtMatmulDescSetAttribute(p->operation, name, value, bytes), &p->of);
}

static void set_addresses(plan *p, const void *bias, const void *pre) {
    if (bias) set_operation(p, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias);
    if (pre) set_operation(p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &pre, sizeof pre);
}

// Of cuBLASLt's matrix: rows and columns change places. step: elements from one block to the next.
static cublasLtMatrixLayout_t layout(cudaDataType_t type, int64_t columns, int64_t rows, int64_t ld, int64_t step,
                                     const product *of) {
    cublasLtMatrixLayout_t l;
    const int32_t times = (int32_t)of->blocks;
    CHECK(cublasLtMatrixLayoutCreate(&l, type, (uint64_t)columns, (uint64_t)rows, ld), of);
    CHECK(cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &times, sizeof times), of);
    CHECK(cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step, sizeof step), of);
    return l;
}

static void describe(plan *p, const matrices *x) {
    const product *of = &p->of;
    const cublasOperation_t keep = CUBLAS_OP_N, transpose = CUBLAS_OP_T;
    CHECK(cublasLtMatmulDescCreate(&p->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), of);
    // cuBLASLt's first factor is our second.
    set_operation(p, CUBLASLT_MATMUL_DESC_TRANSA, of->transpose_b ? &transpose : &keep, sizeof keep);
    set_operation(p, CUBLASLT_MATMUL_DESC_TRANSB, of->transpose_a ? &transpose : &keep, sizeof keep);
    set_operation(p, CUBLASLT_MATMUL_DESC_EPILOGUE, &x->epilogue, sizeof x->epilogue);
    if (x->pre) set_operation(p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &of->ldc, sizeof of->ldc);
    // cuBLASLt assumes that all later addresses of a bias or of GELU's input are aligned as these are: sixteen bytes, as
    // linear_forward() and takes_gelu() ensure.
    set_addresses(p, x->bias ? (const void *)16 : NULL, x->pre ? (const void *)16 : NULL);
    if (x->pre) set_operation(p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, &of->step_c, sizeof of->step_c);
    const bool a = of->transpose_a, b = of->transpose_b; // as stored
    p->a = layout(REAL_TYPE, a ? of->m : of->k, a ? of->k : of->m, of->lda, of->step_a, of);
    p->b = layout(REAL_TYPE, b ? of->k : of->n, b ? of->n : of->k, of->ldb, of->step_b, of);
    p->c = layout((cudaDataType_t)of->c_type, of->n, of->m, of->ldc, of->step_c, of);
}

static void prefer(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t name, int64_t value,
                   const product *of) {
    const uint32_t v = (uint32_t)value;
    CHECK(cublasLtMatmulPreferenceSetAttribute(preference, name, &v, sizeof v), of);
}

static void find_algorithms(plan *p) {
    const product *of = &p->of;
    const uint64_t bytes = (uint64_t)WORKSPACE;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t result[CANDIDATES];
    int found = 0;
    CHECK(cublasLtMatmulPreferenceCreate(&preference), of);
    CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes), of);
    prefer(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, of);
    prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, of->aligned_b, of);
    prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, of->aligned_a, of);
    prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, of->aligned_c, of);
    prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, of->aligned_c, of);
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(blas.handle, p->operation, p->b, p->a, p->c, p->c, preference, CANDIDATES, result, &found);
    // That an epilogue is not possible (odd leading dimensions, for one) shows in more than one way.
    if (is_plain(of)) check(status, "cublasLtMatmulAlgoGetHeuristic", of);
    if (status != CUBLAS_STATUS_SUCCESS) found = 0;
    p->algorithm = (cublasLtMatmulAlgo_t *)cf_host_alloc(CANDIDATES, sizeof *p->algorithm, "kinds of products");
    for (int i = 0; i < found; i++)
        if (result[i].state == CUBLAS_STATUS_SUCCESS) p->algorithm[p->algorithms++] = result[i].algo;
    CHECK(cublasLtMatmulPreferenceDestroy(preference), of);
}

static plan *plan_for(const product *of, const matrices *x) {
    for (int64_t i = 0; i < blas.plans; i++)
        if (memcmp(&blas.list[i].of, of, sizeof *of) == 0) return &blas.list[i];
    if (!blas.handle) CHECK(cublasLtCreate(&blas.handle), of);
    blas.list = (plan *)cf_host_grow(blas.list, &blas.room, blas.plans + 1, sizeof *blas.list, "kinds of products");
    plan *p = &blas.list[blas.plans++];
    memset(p, 0, sizeof *p);
    p->of = *of;
    describe(p, x);
    find_algorithms(p);
    return p;
}

enum { LANES = 32, WARPS = 8, THREADS = LANES * WARPS };

// If cuBLASLt has no algorithm, this program computes the same, as exactly, and slower.
static void report_refusal(const product *of) {
    static bool reported[2];
    const bool batch = of->blocks > 1;
    if (!reported[batch] && cf_die_rank() == 0)
        fprintf(stderr,
                SLOWER_NOTE "%s: cuBLASLt %zu has no algorithm for (%ld, %ld) · (%ld, %ld), rows of %ld, %ld, %ld elements\n",
                batch ? "several products of one shape one by one, not at once"
                      : "bias or GELU by kernels of this program, not in the product's epilogue",
                cublasLtGetVersion(), of->m, of->k, of->k, of->n, of->lda, of->ldb, of->ldc);
    reported[batch] = true;
}

static cublasStatus_t run(const plan *p, int algorithm, const matrices *x) {
    const float beta = x->add ? x->factor_add : 0;
    return cublasLtMatmul(blas.handle, p->operation, &x->factor, x->b, p->b, x->a, p->a, &beta, x->add ? x->add : x->c, p->c, x->c,
                          p->c, &p->algorithm[algorithm], workspace_for(x->stream), (size_t)WORKSPACE, cf_cuda_stream(x->stream));
}

// Element number `index` as it is added up. For a given index no two elements give the same: xor with a constant, multiplications by
// odd numbers and x ^ (x >> n) can all be undone. So a sum detects any change of one element for certain. Two rounds, because flips
// of one bit in several elements must not cancel out.
static __device__ uint64_t mixed(uint64_t element, uint64_t index) {
    uint64_t x = element ^ (index + 1) * 0x9E3779B97F4A7C15u;
    x ^= x >> 32;
    x *= 0xD6E8FEB86659FD93u;
    x ^= x >> 29;
    x *= 0x94D049BB133111EBu;
    return x ^ x >> 32;
}

// *sum += a checksum of `count` elements of two bytes. Integers have no order of addition, so threads may be as many as they like.
static __global__ void __launch_bounds__(THREADS) checksum_kernel(unsigned long long *sum, const uint16_t *data, int64_t count) {
    const int64_t threads = (int64_t)gridDim.x * THREADS;
    uint64_t mine = 0;
#pragma unroll 4 // so many are loaded together
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < count; i += threads) mine += mixed(data[i], (uint64_t)i);
    mine = over_warp<adding>(mine);
    if (threadIdx.x % LANES == 0) atomicAdd(sum, (unsigned long long)mine);
}

static void checksum(uint64_t *sum, const void *data, int64_t bytes, cf_stream *stream) {
    const int64_t blocks =
        smaller(ceil_div(bytes, 16 * THREADS), 4 * cf_cuda_properties()->multiProcessorCount); // few: it shares the GPU
    cf_launch(checksum_kernel, {blocks}, THREADS, stream, (unsigned long long *)sum, (const uint16_t *)data, bytes / 2);
}

// Milliseconds, and, unless sum is NULL, the checksums of what is written; negative: this algorithm cannot.
static double time_of(const plan *p, int algorithm, const matrices *x, uint64_t *sum) {
    const product *of = &p->of;
    const int64_t elements = (of->blocks - 1) * of->step_c + (of->m - 1) * of->ldc + of->n;
    const bool writes_pre = of->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS, sums = of->epilogue == CUBLASLT_EPILOGUE_BGRADB;
    const cf_event begin = cf_event_record(x->stream);
    if (run(p, algorithm, x) != CUBLAS_STATUS_SUCCESS) return -1;
    const cf_event end = cf_event_record(x->stream);
    if (sum) {
        cf_zero(blas.sums, 2 * sizeof *sum, x->stream);
        checksum(&blas.sums[0], x->c, elements * (int64_t)(of->c_type == REAL_TYPE ? sizeof(real) : sizeof(float)), x->stream);
        if (writes_pre) checksum(&blas.sums[1], x->pre, elements * (int64_t)sizeof(real), x->stream);
        if (sums) checksum(&blas.sums[1], x->bias, of->m * (int64_t)sizeof(float), x->stream);
        cf_copy(sum, blas.sums, 2 * sizeof *sum, x->stream);
    }
    cf_stream_sync(x->stream);
    return cf_event_ms(end) - cf_event_ms(begin);
}

// Chooses the fastest algorithm of those that give the first one's bits. A product that adds to c, or overwrites what it reads,
// cannot be computed twice.
static void time_algorithms(plan *p, const matrices *x) {
    uint64_t first[2], sum[2];
    double best[CANDIDATES], least = DBL_MAX;
    if (p->timed || blas.first_only || x->c == x->add || x->c == x->pre || p->left > 0) return;
    p->timed = true;
    if (cf_getenv("COMMFUSE_FIRST_ALGORITHM")) return; // checks of many shapes, where timing would take most of the time
    if (!blas.sums) blas.sums = (uint64_t *)cf_alloc(2 * sizeof *blas.sums, "workspace of matrix products");
    for (int turn = 0, calls = 0; turn <= TIMES && p->algorithms > 1; turn++) // the first loads kernels
        for (int i = 0; i < p->algorithms && calls < CALLS; i++) {
            if (turn > 0 && (best[0] < 0 || best[i] < 0 || (turn > 1 && i > 0 && best[i] > HOPEFUL * least))) continue;
            calls++;
            double ms = time_of(p, i, x, turn > 0 ? NULL : i > 0 ? sum : first);
            if (turn == 0)
                best[i] = ms < 0 || (i > 0 && memcmp(first, sum, sizeof sum) != 0) ? -1 : DBL_MAX;
            else if (ms < best[i])
                best[i] = ms;
            if (turn > 0) least = fmin(least, best[i]);
        }
    for (int i = 1; i < p->algorithms; i++)
        if (best[i] >= 0 && best[i] < best[p->chosen] * (p->chosen == 0 ? WORTH : 1)) p->chosen = i;
}

// False: cuBLASLt has no algorithm with this epilogue, or for blocks, or refuses the one that it has named. Without either it must
// have one: no product was refused on H100 and H200.
static bool multiply(product of, const matrices &x) {
    const int64_t size = of.c_type == REAL_TYPE ? sizeof(real) : sizeof(float);
    of.epilogue = x.epilogue;
    of.aligned_a = alignment(x.a, of.step_a, sizeof(real));
    of.aligned_b = alignment(x.b, of.step_b, sizeof(real));
    of.aligned_c = smaller(alignment(x.c, of.step_c, size), alignment(x.add, 0, size));
    plan *p = plan_for(&of, &x);
    cublasStatus_t status = CUBLAS_STATUS_NOT_SUPPORTED;
    if (p->algorithms > 0) {
        // These change from call to call, all else of a plan stays.
        const int32_t takes = (int32_t)(cf_cuda_left > 0 ? cf_cuda_properties()->multiProcessorCount - cf_cuda_left : 0); // 0: all
        if (p->left != cf_cuda_left) set_operation(p, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &takes, sizeof takes);
        p->left = cf_cuda_left;
        set_addresses(p, x.bias, x.pre);
        time_algorithms(p, &x);
        blas.last = blas.first_only ? 0 : p->chosen;
        status = run(p, blas.last, &x);
    }
    if ((status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) && !is_plain(&of)) {
        p->algorithms = 0;
        report_refusal(&of);
        return false;
    }
    check(status, "cublasLtMatmul", &of);
    return true;
}

// c (r, n) of `real` = op(a) (r, k) · op(b) (k, n), rows of a block without gaps
static product dense(bool transpose_a, bool transpose_b, linear_rows r, int64_t n, int64_t k) {
    product of = {};
    of.transpose_a = transpose_a, of.transpose_b = transpose_b;
    of.m = r.rows, of.n = n, of.k = k;
    of.lda = transpose_a ? of.m : k, of.ldb = transpose_b ? k : n, of.ldc = n;
    of.c_type = REAL_TYPE;
    of.blocks = r.blocks;
    if (r.blocks > 1) of.step_a = r.in * k, of.step_c = r.out * n;
    return of;
}

// out = bias (OC) + add, either of which may be NULL
static __global__ void begin_sum(real *out, const real *bias, const real *add, int64_t count, int64_t OC) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < count) out[i] = (real)((bias ? (float)bias[i % OC] : 0) + (add ? (float)add[i] : 0));
}

void multiply_batch(int64_t count, int64_t m, int64_t n, int64_t k, gemm_matrix a, gemm_matrix b, gemm_matrix c, bool wide,
                    bool add, cf_stream *stream, const void *before, float factor, float factor_before) {
    product of = {};
    of.transpose_a = a.transposed, of.transpose_b = b.transposed;
    of.m = m, of.n = n, of.k = k;
    of.lda = a.row, of.ldb = b.row, of.ldc = c.row;
    of.c_type = wide ? CUDA_R_32F : REAL_TYPE;
    of.blocks = count;
    if (count > 1) of.step_a = a.step, of.step_b = b.step, of.step_c = c.step;
    if (add && !before) before = c.at;
    matrices x = {(const real *)a.at, (const real *)b.at, before, c.at, stream};
    x.factor = factor, x.factor_add = factor_before;
    if (multiply(of, x)) return;
    for (int64_t i = 0; i < count; i++) {
        gemm_matrix one[] = {a, b, c};
        for (int j = 0; j < 3; j++)
            one[j].at = (char *)one[j].at + i * one[j].step * (int64_t)(j == 2 && wide ? sizeof(float) : sizeof(real));
        multiply_batch(1, m, n, k, one[0], one[1], one[2], wide, add, stream,
                       before ? (const char *)before + ((char *)one[2].at - (char *)c.at) : NULL, factor, factor_before);
    }
}

int64_t linear_prepared_size(int64_t, int64_t) {
    return 0;
}

const real *linear_prepare_forward(real *, const real *w, int64_t, int64_t, cf_stream *) {
    return w;
}

const real *linear_prepare_dgrad(real *, const real *w, int64_t, int64_t, cf_stream *) {
    return w;
}

// cuBLASLt's conditions for GELU's input. Its documentation does not say how exact its tanh is: enough for bf16.
static bool takes_gelu(const real *pre, int64_t row) {
    return !pre || (ACTIVATION_IN_EPILOGUE && REAL_TYPE == CUDA_R_16BF && packable(row, pre));
}

// First all in one product; if cuBLASLt cannot, block by block, and in a block without epilogue.
void linear_forward(real *out, real *pre, const real *x, const real *w, const real *bias, const real *add, linear_rows r,
                    int64_t IC, int64_t OC, cf_stream *stream) {
    const cublasLtEpilogue_t epilogue = pre    ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS
                                        : bias ? CUBLASLT_EPILOGUE_BIAS
                                               : CUBLASLT_EPILOGUE_DEFAULT;
    // Its kernels may read sixteen bytes of a bias at once.
    const bool possible = !(add && r.blocks > 1) && packable(0, bias) && takes_gelu(pre, OC);
    if (possible && multiply(dense(false, true, r, OC, IC), {x, w, add, out, stream, epilogue, bias, pre})) return;
    if (r.blocks > 1) {
        for (int64_t i = 0; i < r.blocks; i++)
            linear_forward(out + i * r.out * OC, pre ? pre + i * r.out * OC : NULL, x + i * r.in * IC, w, bias,
                           add ? add + i * r.out * OC : NULL, linear_all(r.rows), IC, OC, stream);
    } else if (pre) {
        linear_forward(pre, NULL, x, w, bias, NULL, r, IC, OC, stream);
        activation_forward(out, pre, r.rows * OC, stream);
    } else {
        const bool begin = bias || (add && add != out);
        if (begin) cf_launch(begin_sum, {ceil_div(r.rows * OC, THREADS)}, THREADS, stream, out, bias, add, r.rows * OC, OC);
        multiply(dense(false, true, r, OC, IC), {x, w, begin ? out : add, out, stream});
    }
}

void linear_dgrad(real *dx, const real *dy, const real *w, const real *pre, bool add, linear_rows r, int64_t IC, int64_t OC,
                  cf_stream *stream) {
    const cublasLtEpilogue_t epilogue = pre ? CUBLASLT_EPILOGUE_DGELU : CUBLASLT_EPILOGUE_DEFAULT;
    const bool possible = !(add && r.blocks > 1) && takes_gelu(pre, IC);
    const product of = dense(false, false, r, IC, OC);
    if (possible && multiply(of, {dy, w, add ? dx : NULL, dx, stream, epilogue, NULL, pre})) return;
    if (r.blocks > 1) {
        for (int64_t i = 0; i < r.blocks; i++)
            linear_dgrad(dx + i * r.out * IC, dy + i * r.in * OC, w, pre ? pre + i * r.out * IC : NULL, add, linear_all(r.rows), IC,
                         OC, stream);
    } else {
        multiply(of, {dy, w, add ? dx : NULL, dx, stream});
        if (pre) activation_backward(dx, dx, pre, r.rows * IC, stream);
    }
}

void linear_wgrad(accum *dw, accum *db, const real *dy, int64_t dy_row, const real *x, int64_t R, int64_t IC, int64_t rows,
                  bool add, cf_stream *stream) {
    product of = dense(true, false, linear_all(rows), IC, R);
    const float *bias = db ? (float *)(workspace_for(stream) + WORKSPACE) : NULL;
    of.lda = dy_row;
    of.c_type = CUDA_R_32F;
    if (db && rows <= SUMS && multiply(of, {dy, x, add ? dw : NULL, dw, stream, CUBLASLT_EPILOGUE_BGRADB, bias})) {
        add_partials(sums<1>{{db}}, bias, 1, rows, stream);
        return;
    }
    multiply(of, {dy, x, add ? dw : NULL, dw, stream});
    if (db) linear_bias_grad(db, dy, R, rows, stream);
}

// Tiles of 128 x 256, as the best products have them, for half of the multiprocessors of an H100: cut along the inner dimension
// they fill it. On an H200 gradients by owners of 1600 rows take 8 % longer than whole ones, of 3200 2 % (bench_gpu, d48).
enum { PRODUCT_ROWS = 128, PRODUCT_COLUMNS = 256, TILES_MIN = 66 };

int64_t linear_wgrad_rows_min(int64_t IC) {
    const int64_t across = ceil_div(IC, PRODUCT_COLUMNS);
    return ceil_div(TILES_MIN, across) * PRODUCT_ROWS;
}

// Such a product has 2 · rows flops for each element of dw, and moves 8 bytes: at 600 TFLOP/s and 3 TB/s both take as long for 800
// rows.
int64_t linear_wgrad_depth_min(void) {
    return 1024;
}

// Bias gradient. First each block sums some rows of LANES · N columns: a warp sums consecutive rows, a lane N neighbouring columns
// (sixteen bytes, or one column if rows are not aligned), and the warps' sums are added in order. Then the blocks' sums are added
// (kernel.h). The cuts depend on R and OC alone.
enum { BLOCKS = 768, ROWS_MIN = 64 };

// partial (blocks, OC), blocks = gridDim.y
template <int N> static __global__ void sum_rows(float *partial, const real *dy, int64_t R, int64_t OC, int64_t rows) {
    __shared__ float of_warp[WARPS][LANES * N];
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const int64_t first = (int64_t)blockIdx.x * LANES * N, column = first + lane * N;
    const int64_t each = (rows + WARPS - 1) / WARPS, begin = blockIdx.y * rows + warp * each;
    const int64_t block_end = blockIdx.y * rows + rows < R ? blockIdx.y * rows + rows : R;
    const int64_t end = begin + each < block_end ? begin + each : block_end;
    values<N> sum = {};
    if (column < OC) {
#pragma unroll 4
        for (int64_t r = begin; r < end; r++) sum += load<N>(dy + r * OC + column);
    }
#pragma unroll
    for (int i = 0; i < N; i++) of_warp[warp][lane * N + i] = sum.at[i];
    __syncthreads();
    const int c = threadIdx.x;
    if (c >= LANES * N || first + c >= OC) return;
    float total = of_warp[0][c];
    for (int w = 1; w < WARPS; w++) total += of_warp[w][c];
    partial[blockIdx.y * OC + first + c] = total;
}

void linear_bias_grad(accum *db, const real *dy, int64_t R, int64_t OC, cf_stream *stream) {
    const bool packs = packable(OC, dy);
    const int64_t across = ceil_div(OC, LANES * (packs ? PACK : 1)), fit = WORKSPACE / (OC * (int64_t)sizeof(float));
    const int64_t blocks = smaller(smaller(ceil_div(R, ROWS_MIN), ceil_div(BLOCKS, across)), fit);
    float *partial = (float *)workspace_for(stream); // (blocks, OC)
    cf_launch(packs ? sum_rows<PACK> : sum_rows<1>, {across, blocks}, THREADS, stream, partial, dy, R, OC, ceil_div(R, blocks));
    add_partials(sums<1>{{db}}, partial, blocks, OC, stream);
}

void linear_time_algorithms(bool all) {
    blas.first_only = !all;
}

int linear_algorithm(void) {
    return blas.last;
}
