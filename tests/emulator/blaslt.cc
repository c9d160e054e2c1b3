// cuBLASLt: D = alpha · op(A) · op(B) + beta · C, and its epilogues: a bias for each row, GELU (its tanh form) and its
// gradient, sums of rows.
//
// Checks everything that the real library would refuse, or accept and do something else with: sizes that do not fit, leading
// dimensions that are too small, a combination of types that it does not have, a workspace that is announced and not there, memory
// that ends before the matrix does, a pointer less aligned than the preference promised to the heuristic (256 bytes unless it is
// set), an algorithm found for other shapes. It does not show which shapes are slow, and what the real heuristic returns.
//
// The product is computed in float (double for CUDA_R_64F), k in order, and rounded once.
#include "emulator.h"
#include "include/cublasLt.h"
#include "include/cuda_bf16.h"
#include <algorithm>
#include <cstdarg>
#include <map>
#include <unistd.h>
#include <vector>

using namespace emulator;

struct cublasLtContext {
    int unused;
};

namespace {

// The contents of the opaque structs.
struct Layout {
    cudaDataType type;
    int64_t rows, cols, ld; // by columns
    int64_t step;           // elements from one matrix of a batch to the next
    int32_t batch;
};
struct Desc {
    cublasComputeType_t compute;
    cudaDataType scale;
    int32_t transpose[2], epilogue;
    const void *bias;
    char *aux; // GELU's input
    int64_t aux_ld, aux_step;
    int32_t multiprocessors; // that it may take; 0: all
};
enum { BIAS = 4, ROW_SUMS = 16, GELU = 32, GELU_SLOPE = 64, AUX = 128, SUMS_OF_A = 256, SUMS_OF_B = 512 }; // epilogues' bits
struct Preference {
    uint64_t workspace;
    uint32_t alignment[4];
};
struct Algorithm {
    uint32_t magic, alignment[4];
    uint64_t workspace, shape;
    int number; // in the heuristic's list: 0 takes a millisecond longer, 1 has a result that differs, others are alike
};
static_assert(sizeof(Layout) <= sizeof(cublasLtMatrixLayoutOpaque_t), "fits");
static_assert(sizeof(Desc) <= sizeof(cublasLtMatmulDescOpaque_t), "fits");
static_assert(sizeof(Preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t), "fits");
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t), "fits");
constexpr uint32_t MAGIC = 0x6c74616c;
// EMULATOR_REFUSES: as if the library lacked products with epilogues and batches, or all
enum { REFUSES_TO_CHOOSE = 1, REFUSES_TO_MULTIPLY = 2, REFUSES_ALL = 3 };

Layout &of(cublasLtMatrixLayout_t layout) {
    return *(Layout *)layout->data;
}
Desc &of(cublasLtMatmulDesc_t desc) {
    return *(Desc *)desc->data;
}
Preference &of(cublasLtMatmulPreference_t preference) {
    return *(Preference *)preference->data;
}

__attribute__((format(printf, 1, 2))) cublasStatus_t refuse(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "emulator: cublasLt: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    return CUBLAS_STATUS_INVALID_VALUE;
}

template <typename T> cublasStatus_t take(T &field, const void *value, size_t bytes) {
    if (!value || bytes != sizeof field) return refuse("an attribute of %zu bytes given as %zu", sizeof field, bytes);
    memcpy(&field, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

size_t size_of(cudaDataType type) {
    return type == CUDA_R_64F ? 8 : type == CUDA_R_16BF ? 2 : 4;
}

// Bytes from the first element to the end of the last one.
size_t extent(const Layout &l) {
    int64_t others = l.batch > 1 ? (l.batch - 1) * l.step : 0;
    return l.rows == 0 || l.cols == 0 ? 0 : (size_t)(others + (l.cols - 1) * l.ld + l.rows) * size_of(l.type);
}

uint64_t hash(const Desc &desc, const Layout *const layout[4]) {
    uint64_t h = 1469598103934665603u;
    auto mix = [&h](int64_t x) { h = (h ^ (uint64_t)x) * 1099511628211u; };
    mix(desc.compute), mix(desc.transpose[0]), mix(desc.transpose[1]),
        mix(desc.epilogue); // an algorithm takes any number of multiprocessors
    for (int i = 0; i < 4; i++)
        mix(layout[i]->type), mix(layout[i]->rows), mix(layout[i]->cols), mix(layout[i]->ld), mix(layout[i]->batch),
            mix(layout[i]->step);
    return h;
}

// Elements of the bias, or of the sums that are written in its place.
int64_t bias_length(int32_t epilogue, int64_t m, int64_t n) {
    return epilogue & (BIAS | ROW_SUMS | SUMS_OF_A) ? m : epilogue & SUMS_OF_B ? n : 0;
}

bool lacks(const Desc &desc, const Layout &a, int what) {
    const int64_t refuses = setting("EMULATOR_REFUSES", 0);
    return refuses == REFUSES_ALL || (refuses == what && (a.batch > 1 || desc.epilogue != CUBLASLT_EPILOGUE_DEFAULT));
}

cublasStatus_t check(const Desc &desc, const Layout *const layout[4], int64_t *m, int64_t *n, int64_t *k) {
    static const char name[] = "ABCD";
    for (int i = 0; i < 4; i++) {
        const Layout &l = *layout[i];
        if (l.ld < l.rows)
            return refuse("%c is %lld by %lld and ld %lld too small for it", name[i], (long long)l.rows, (long long)l.cols,
                          (long long)l.ld);
    }
    const Layout &a = *layout[0], &b = *layout[1], &c = *layout[2], &d = *layout[3];
    if (a.batch < 1 || a.batch != b.batch || a.batch != c.batch || a.batch != d.batch)
        return refuse("batches of %d, %d, %d and %d", a.batch, b.batch, c.batch, d.batch);
    if (a.batch > 1 && desc.epilogue & (ROW_SUMS | SUMS_OF_A | SUMS_OF_B)) return CUBLAS_STATUS_NOT_SUPPORTED;
    bool ta = desc.transpose[0], tb = desc.transpose[1];
    *m = ta ? a.cols : a.rows, *k = ta ? a.rows : a.cols, *n = tb ? b.rows : b.cols;
    int64_t k2 = tb ? b.cols : b.rows;
    if (*k != k2 || d.rows != *m || d.cols != *n || c.rows != *m || c.cols != *n)
        return refuse("op(A) %lld by %lld, op(B) %lld by %lld, C %lld by %lld, D %lld by %lld", (long long)*m, (long long)*k,
                      (long long)k2, (long long)*n, (long long)c.rows, (long long)c.cols, (long long)d.rows, (long long)d.cols);
    bool wide = desc.compute == CUBLAS_COMPUTE_64F || desc.compute == CUBLAS_COMPUTE_64F_PEDANTIC;
    bool fits = wide ? a.type == CUDA_R_64F && d.type == CUDA_R_64F && desc.scale == CUDA_R_64F
                     : desc.scale == CUDA_R_32F &&
                           ((a.type == CUDA_R_32F && d.type == CUDA_R_32F) || (a.type == CUDA_R_16BF && d.type != CUDA_R_64F));
    if (!fits || a.type != b.type || c.type != d.type) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (desc.epilogue & AUX && (desc.aux_ld < *m || desc.aux_ld % 8))
        return refuse("aux has ld %lld; it must be at least %lld and a multiple of 8", (long long)desc.aux_ld, (long long)*m);
    return CUBLAS_STATUS_SUCCESS;
}

// ------------------------------------------------------------------------------------------------------ the product

template <typename T> T element(const void *memory, cudaDataType type, int64_t i) {
    if (type == CUDA_R_64F) return (T)((const double *)memory)[i];
    if (type == CUDA_R_16BF) return (T)(float)((const __nv_bfloat16 *)memory)[i];
    return (T)((const float *)memory)[i];
}

template <typename T> void put(void *memory, cudaDataType type, int64_t i, T value) {
    if (type == CUDA_R_64F)
        ((double *)memory)[i] = (double)value;
    else if (type == CUDA_R_16BF)
        ((__nv_bfloat16 *)memory)[i] = __nv_bfloat16((float)value);
    else
        ((float *)memory)[i] = (float)value;
}

int64_t index(const Layout &l, int64_t row, int64_t col) {
    return row + col * l.ld;
}

// op(matrix), rows by cols, by columns and without gaps.
template <typename T> std::vector<T> packed(const char *memory, const Layout &l, bool transpose, int64_t rows, int64_t cols) {
    std::vector<T> p((size_t)(rows * cols));
    for (int64_t j = 0; j < cols; j++)
        for (int64_t i = 0; i < rows; i++)
            p[(size_t)(i + j * rows)] = element<T>(memory, l.type, transpose ? index(l, j, i) : index(l, i, j));
    return p;
}

struct Product {
    Desc desc;
    Layout a, b, c, d;
    const char *A, *B, *C;
    char *D;
    double alpha, beta;
    int64_t m, n, k;
};

// sum (rows, 4) = a (rows, k) · b (k, 4), a by columns of m
template <typename T> void strip(T *sum, const T *a, int64_t rows, int64_t m, const T *const b[4], int64_t k) {
    std::fill(sum, sum + 4 * rows, T(0));
    T *s0 = sum, *s1 = sum + rows, *s2 = sum + 2 * rows, *s3 = sum + 3 * rows;
    for (int64_t l = 0; l < k; l++) {
        const T *column = a + l * m;
        T b0 = b[0][l], b1 = b[1][l], b2 = b[2][l], b3 = b[3][l];
#pragma omp simd
        for (int64_t i = 0; i < rows; i++) {
            s0[i] += column[i] * b0;
            s1[i] += column[i] * b1;
            s2[i] += column[i] * b2;
            s3[i] += column[i] * b3;
        }
    }
}

template <typename T> T gelu(T x) {
    return T(0.5) * x * (T(1) + std::tanh(T(0.7978845608028654) * (x + T(0.044715) * x * x * x)));
}

template <typename T> T gelu_slope(T x) {
    const T root = T(0.7978845608028654), cube = T(0.044715), t = std::tanh(root * (x + cube * x * x * x));
    return T(0.5) * (T(1) + t) + T(0.5) * x * (T(1) - t * t) * root * (T(1) + 3 * cube * x * x);
}

// One element of the product on its way to D.
template <typename T> T finish(const Product &p, int64_t row, int64_t col, T sum) {
    const Desc &desc = p.desc;
    T value = (T)p.alpha * sum;
    if (p.beta != 0) // C is not read for beta = 0: it may hold NaN
        value += (T)p.beta * element<T>(p.C, p.c.type, index(p.c, row, col));
    if (desc.epilogue & BIAS) value += element<T>(desc.bias, p.d.type, row);
    int64_t aux = row + col * desc.aux_ld;
    if (desc.epilogue & GELU && desc.epilogue & AUX) put<T>(desc.aux, p.d.type, aux, value);
    if (desc.epilogue & GELU) value = gelu(value);
    if (desc.epilogue & GELU_SLOPE) value *= gelu_slope(element<T>(desc.aux, p.d.type, aux));
    return value;
}

template <typename T> void multiply(const Product &p) {
    enum { ROWS = 256 };
    int32_t epilogue = p.desc.epilogue;
    std::vector<T> sum(4 * ROWS), sums((size_t)bias_length(epilogue, p.m, p.n));
    std::vector<T> a = packed<T>(p.A, p.a, p.desc.transpose[0], p.m, p.k);
    std::vector<T> b = packed<T>(p.B, p.b, p.desc.transpose[1], p.k, p.n);
    for (int64_t j = 0; j < p.n; j += 4) {
        const T *column[4];
        for (int64_t q = 0; q < 4; q++) column[q] = b.data() + std::min(j + q, p.n - 1) * p.k;
        for (int64_t i = 0; i < p.m; i += ROWS) {
            int64_t rows = std::min<int64_t>(ROWS, p.m - i);
            strip(sum.data(), a.data() + i, rows, p.m, column, p.k);
            for (int64_t q = 0; q < std::min<int64_t>(4, p.n - j); q++)
                for (int64_t r = 0; r < rows; r++) {
                    T value = finish(p, i + r, j + q, sum[(size_t)(q * rows + r)]);
                    put<T>(p.D, p.d.type, index(p.d, i + r, j + q), value);
                    if (epilogue & ROW_SUMS) sums[(size_t)(i + r)] += value;
                }
        }
    }
    for (int64_t l = 0; l < p.k; l++) {
        for (int64_t i = 0; i < p.m && epilogue & SUMS_OF_A; i++) sums[(size_t)i] += a[(size_t)(i + l * p.m)];
        for (int64_t j = 0; j < p.n && epilogue & SUMS_OF_B; j++) sums[(size_t)j] += b[(size_t)(l + j * p.k)];
    }
    for (size_t i = 0; i < sums.size() && !(epilogue & BIAS); i++) put<T>((void *)p.desc.bias, p.d.type, (int64_t)i, sums[i]);
}

} // namespace

// --------------------------------------------------------------------------------------------------- the library

const char *cublasLtGetStatusName(cublasStatus_t status) {
    switch (status) {
    case CUBLAS_STATUS_SUCCESS:
        return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_INVALID_VALUE:
        return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return "CUBLAS_STATUS_NOT_SUPPORTED";
    default:
        return "CUBLAS_STATUS_(other)";
    }
}

const char *cublasLtGetStatusString(cublasStatus_t status) {
    return cublasLtGetStatusName(status);
}
size_t cublasLtGetVersion(void) {
    return 130000;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    if (devices() == 0) return CUBLAS_STATUS_NOT_INITIALIZED;
    *handle = new cublasLtContext{};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    delete handle;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type, uint64_t rows, uint64_t cols,
                                          int64_t ld) {
    *layout = new cublasLtMatrixLayoutOpaque_t{};
    of(*layout) = {type, (int64_t)rows, (int64_t)cols, ld, 0, 1};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute,
                                                const void *value, size_t bytes) {
    return attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT ? take(of(layout).batch, value, bytes)
                                                           : take(of(layout).step, value, bytes);
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    delete layout;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute, cudaDataType scale) {
    *desc = new cublasLtMatmulDescOpaque_t{};
    of(*desc) = {compute, scale, {CUBLAS_OP_N, CUBLAS_OP_N}, CUBLASLT_EPILOGUE_DEFAULT, nullptr, nullptr, 0, 0, 0};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
    delete desc;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes) {
    Desc &d = of(desc);
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
        return take(d.transpose[0], value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB:
        return take(d.transpose[1], value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
        return take(d.epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
        return take(d.bias, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
        return take(d.aux, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
        return take(d.aux_ld, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE:
        return take(d.aux_step, value, bytes);
    case CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET:
        return take(d.multiprocessors, value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) {
    *preference = new cublasLtMatmulPreferenceOpaque_t{};
    of(*preference) = {0, {256, 256, 256, 256}};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    delete preference;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void *value,
                                                    size_t bytes) {
    Preference &p = of(preference);
    uint32_t mask = 0;
    switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
        return take(p.workspace, value, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
        return take(mask, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
        return take(p.alignment[attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t results[], int *found) {
    *found = 0;
    if (requested < 1) return CUBLAS_STATUS_INVALID_VALUE;
    const Layout *layout[4] = {&of(a), &of(b), &of(c), &of(d)};
    if (lacks(of(desc), *layout[0], REFUSES_TO_CHOOSE)) return CUBLAS_STATUS_NOT_SUPPORTED;
    int64_t m, n, k;
    cublasStatus_t status = check(of(desc), layout, &m, &n, &k);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    const Preference &p = of(preference);
    Algorithm algorithm = {MAGIC,
                           {p.alignment[0], p.alignment[1], p.alignment[2], p.alignment[3]},
                           std::min<uint64_t>(p.workspace, 1024),
                           hash(of(desc), layout),
                           0};
    *found = std::min(requested, (int)setting("EMULATOR_ALGORITHMS", 1));
    for (int i = 0; i < *found; i++) {
        results[i] = {};
        algorithm.number = i;
        memcpy(&results[i].algo, &algorithm, sizeof algorithm);
        results[i].workspaceSize = algorithm.workspace;
        results[i].state = CUBLAS_STATUS_SUCCESS;
        results[i].wavesCount = 1;
    }
    return CUBLAS_STATUS_SUCCESS;
}

// For the clock: every element is read once and written once. A matrix that a whole batch shares counts once.
static Note note_of(const Product &p) {
    double m = (double)p.m, n = (double)p.n, k = (double)p.k, times = p.d.batch;
    double bytes = m * k * (double)size_of(p.a.type) * (p.a.step ? times : 1) +
                   k * n * (double)size_of(p.b.type) * (p.b.step ? times : 1) +
                   m * n * (double)size_of(p.d.type) * (p.beta == 0 ? times : 2 * times);
    return note_product(m, n, k, times, bytes, p.desc.multiprocessors);
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha, const void *a,
                              cublasLtMatrixLayout_t a_layout, const void *b, cublasLtMatrixLayout_t b_layout, const void *beta,
                              const void *c, cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t *algorithm, void *workspace, size_t workspace_bytes, cudaStream_t stream) {
    const Layout *layout[4] = {&of(a_layout), &of(b_layout), &of(c_layout), &of(d_layout)};
    Product p = {
        of(desc), *layout[0], *layout[1], *layout[2], *layout[3], (const char *)a, (const char *)b, (const char *)c, (char *)d,
        0,        0,          0,          0,          0};
    if (!handle || !alpha || !beta) return refuse("NULL handle, alpha or beta");
    if (lacks(p.desc, p.a, REFUSES_TO_MULTIPLY)) return CUBLAS_STATUS_NOT_SUPPORTED;
    cublasStatus_t status = check(p.desc, layout, &p.m, &p.n, &p.k);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    p.alpha = element<double>(alpha, p.desc.scale, 0);
    p.beta = element<double>(beta, p.desc.scale, 0);
    const void *const pointer[4] = {a, b, p.beta == 0 ? d : c, d};
    Algorithm chosen = {MAGIC, {256, 256, 256, 256}, 0, hash(p.desc, layout), 2};
    if (algorithm) memcpy(&chosen, algorithm, sizeof chosen);
    if (chosen.magic != MAGIC) return refuse("an algorithm that no heuristic returned");
    if (chosen.shape != hash(p.desc, layout)) return refuse("an algorithm that was found for another product");
    for (int i = 0; i < 4; i++) {
        if ((uintptr_t)pointer[i] % size_of(layout[i]->type)) return refuse("%c at %p is misaligned", "ABCD"[i], pointer[i]);
        uintptr_t step = (uintptr_t)(layout[i]->step * (int64_t)size_of(layout[i]->type));
        if (algorithm && ((uintptr_t)pointer[i] | step) % chosen.alignment[i])
            return refuse("%c at %p, in steps of %lld elements: the preference promised an alignment of %u bytes", "ABCD"[i],
                          pointer[i], (long long)layout[i] -> step, chosen.alignment[i]);
        need_device(pointer[i], extent(*layout[i]), "cublasLtMatmul");
    }
    if (workspace_bytes < chosen.workspace || (workspace_bytes > 0 && !workspace))
        return refuse("a workspace of %zu bytes at %p for an algorithm that uses %llu", workspace_bytes, workspace,
                      (unsigned long long)chosen.workspace);
    need_device(workspace, workspace_bytes, "the workspace of cublasLtMatmul");
    if (int64_t length = bias_length(p.desc.epilogue, p.m, p.n)) {
        if (!p.desc.bias || (uintptr_t)p.desc.bias % 16) // no preference states its alignment
            return refuse("bias at %p: not aligned to 16 bytes", p.desc.bias);
        need_device(p.desc.bias, (size_t)length * size_of(p.d.type), "the bias of cublasLtMatmul");
    }
    if (p.desc.epilogue & AUX) {
        if (!p.desc.aux || (uintptr_t)p.desc.aux % 16) return refuse("aux at %p: not aligned to 16 bytes", p.desc.aux);
        size_t elements = (size_t)((p.d.batch - 1) * p.desc.aux_step + (p.n - 1) * p.desc.aux_ld + p.m);
        if (p.n > 0) need_device(p.desc.aux, elements * size_of(p.d.type), "the aux of cublasLtMatmul");
    }
    if (p.m == 0 || p.n == 0) return CUBLAS_STATUS_SUCCESS;
    static std::map<std::vector<uint64_t>, int64_t> calls; // of each kind of product
    const int64_t most = setting("EMULATOR_CALLS", INT64_MAX);
    const uint32_t *aligned = chosen.alignment;
    if (++calls[{chosen.shape, aligned[0], aligned[1], aligned[2], aligned[3]}] > most)
        fail("cublasLtMatmul: more than %lld calls for one kind of product", (long long)most);
    size_t used = (size_t)chosen.workspace; // written, to expose a workspace that two streams share
    if (chosen.number == 1) p.alpha *= 1.25;
    const bool slow = chosen.number == 0 && setting("EMULATOR_ALGORITHMS", 1) > 1;
    start_clock();
    enqueue(stream, "cublasLtMatmul", note_of(p), [p, workspace, used, slow] {
        if (slow) usleep(1000);
        if (used) memset(workspace, 0xFB, used);
        Product q = p;
        for (int32_t i = 0; i < p.d.batch; i++) {
            p.d.type == CUDA_R_64F ? multiply<double>(q) : multiply<float>(q);
            q.A += p.a.step * (int64_t)size_of(p.a.type), q.B += p.b.step * (int64_t)size_of(p.b.type);
            q.C += p.c.step * (int64_t)size_of(p.c.type), q.D += p.d.step * (int64_t)size_of(p.d.type);
            if (q.desc.aux) q.desc.aux += p.desc.aux_step * (int64_t)size_of(p.d.type);
        }
    });
    return CUBLAS_STATUS_SUCCESS;
}
