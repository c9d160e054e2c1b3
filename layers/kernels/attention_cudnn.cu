// Attention by cuDNN.
//
// cuDNN gets a graph of small operations on tensors that mostly never exist in memory, recognises the pattern and makes one fused
// kernel of it. So the graphs below have the form that cuDNN looks for, operation by operation. They use the public C interface
// (cudnnBackend…) and no other header.
//
//   forward   S = Q·Kᵀ · scale, masked; m = max S, l = sum of exp(S − m); stats = m + log l;
//             O = (exp(S − m) / l)·V
//   backward  delta = sum(dO ∘ O); P = exp(S − stats); dV = Pᵀ·dO; dS = P ∘ (dO·Vᵀ − delta) · scale;
//             dK = dSᵀ·Q; dQ = dS·K
//
// Mask: query row r of the range may see column c if r + keys − n >= c. Where the range starts at 0, keys = n and the shift is left
// out.
//
// dQ is the direct result of its product. (With a sum in fp32 between them cuDNN would add partial sums in the order in which
// blocks finish.) So two runs give the same bits, at the price of a workspace of 2·B·H·n·keys bytes. It is written and read again;
// of few sequences at a time (COMMFUSE_ATTENTION_TOGETHER=2) it might stay in the second-level cache: bench_gpu compares, and nobody
// has measured it yet.
//
// Heads of queries that share keys and values: in products cuDNN repeats the fewer heads by itself. In backward dK and dV are first
// those of each head of queries, in the workspace, and then reduced, in bf16 each and summed in fp32.
//
// Statistics have cuDNN's order (B, H, n): no version before 9.26 reads any other in backward. Of all rows they are lse itself.
//
// A plan is made on the first call with a shape (libnvrtc compiles for a second) and kept until the process ends. If cuDNN is not
// used, rank 0 prints each reason once on standard error; if it is, kernels in a profile have sdpa in their names, and
// CUDNN_LOGLEVEL_DBG=3 makes cuDNN log each call.
#include "attention_cudnn.h"

#if defined(REAL_IS_BF16) && defined(__NVCC__)

#include <cudnn.h>
#include <initializer_list>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include "kernel.h"

typedef cudnnBackendDescriptor_t descriptor;

typedef struct four {
    int64_t at[4];
} four;

// Tensors that exist have these names in a graph, scalars from SCALE on; the others are numbered from VIRTUAL.
enum { Q = 1, K, V, O, STATS, DO, DQ, DK, DV, DELTA, DK_EACH, DV_EACH, SCALE, LOWEST, KEYS, QUERIES, ONE, NAMES, VIRTUAL = 100 };

static const char *const PURPOSE = "attention workspace (cuDNN)";
static const cudnnDataType_t BF16 = CUDNN_DATA_BFLOAT16, FP32 = CUDNN_DATA_FLOAT, INT32 = CUDNN_DATA_INT32,
                             BOOLEAN = CUDNN_DATA_BOOLEAN;
enum { OPERATIONS_MAX = 32, CANDIDATES = 8, REASONS_MAX = 16 };

typedef enum { FORWARD, BACKWARD } direction;

typedef struct problem {
    int64_t pass; // a direction; of one type, so that two problems can be compared byte by byte
    int64_t n, keys, B, H, KV, D;
    int64_t all; // sequences in memory, of which B are these
} problem;

// Keeps the first status that is no success; later calls do nothing.
typedef struct graph {
    cudnnStatus_t status;
    int64_t next = VIRTUAL; // name of the next virtual tensor
    int operations;
    descriptor operation[OPERATIONS_MAX];
} graph;

typedef struct plan {
    problem of;
    descriptor execution;  // NULL: cuDNN refuses,
    cudnnStatus_t refusal; // with this status
    int64_t workspace;     // bytes
} plan;

static struct {
    const char *reported[REASONS_MAX]; // why attention.cu's kernels are used
    cudnnHandle_t handle;
    int64_t plans, room; // how many are made, fit in the list
    plan *list;
    workspace of_stream[STREAMS_MAX];
} cudnn;

static void report_reason(const char *why) {
    if (cf_die_rank() == 0)
        fprintf(stderr, SLOWER_NOTE "attention by this program's kernels, not by cuDNN %zu: %s\n", cudnnGetVersion(), why);
}

// A reason known beforehand.
static void report_once(const char *why) {
    int i = 0;
    while (i < REASONS_MAX && cudnn.reported[i] && strcmp(cudnn.reported[i], why) != 0) i++;
    if (i == REASONS_MAX || cudnn.reported[i]) return;
    cudnn.reported[i] = why;
    report_reason(why);
}

// ---- descriptors

typedef struct attribute {
    cudnnBackendAttributeName_t name;
    cudnnBackendAttributeType_t type;
    int64_t count; // 0: left out
    const void *values;
} attribute;

static attribute part(cudnnBackendAttributeName_t name, const descriptor &d) {
    return {name, CUDNN_TYPE_BACKEND_DESCRIPTOR, d ? 1 : 0, &d};
}

static descriptor create(graph *g, cudnnBackendDescriptorType_t type) {
    descriptor d = NULL;
    if (g->status == CUDNN_STATUS_SUCCESS) g->status = cudnnBackendCreateDescriptor(type, &d);
    return d;
}

static descriptor make(graph *g, cudnnBackendDescriptorType_t type, std::initializer_list<attribute> attributes) {
    descriptor d = create(g, type);
    for (const attribute &a : attributes)
        if (g->status == CUDNN_STATUS_SUCCESS && a.count > 0)
            g->status = cudnnBackendSetAttribute(d, a.name, a.type, a.count, a.values);
    if (g->status == CUDNN_STATUS_SUCCESS) g->status = cudnnBackendFinalize(d);
    return d;
}

static int64_t get(graph *g, descriptor d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t room,
                   void *values) {
    int64_t count = 0;
    if (g->status == CUDNN_STATUS_SUCCESS) g->status = cudnnBackendGetAttribute(d, name, type, room, &count, values);
    return count;
}

// ---- tensors

static descriptor tensor(graph *g, int64_t name, cudnnDataType_t type, four size, four stride) {
    const int64_t alignment = 16;
    const bool is_virtual = name >= VIRTUAL, by_value = name >= SCALE && name < NAMES;
    return make(g, CUDNN_BACKEND_TENSOR_DESCRIPTOR,
                {{CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &name},
                 {CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type},
                 {CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, size.at},
                 {CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, stride.at},
                 {CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment},
                 {CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &is_virtual},
                 {CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &by_value}});
}

static four packed(four size) {
    return {{size.at[1] * size.at[2] * size.at[3], size.at[2] * size.at[3], size.at[3], 1}};
}

static four transposed(four f) {
    return {{f.at[0], f.at[1], f.at[3], f.at[2]}};
}

static descriptor between(graph *g, cudnnDataType_t type, four size) {
    return tensor(g, g->next++, type, size, packed(size));
}

static descriptor scalar(graph *g, int64_t name, cudnnDataType_t type) {
    return tensor(g, name, type, {{1, 1, 1, 1}}, {{1, 1, 1, 1}});
}

// ---- operations

static void add_operation(graph *g, cudnnBackendDescriptorType_t type, std::initializer_list<attribute> attributes) {
    g->operation[g->operations++] = make(g, type, attributes);
}

static void matmul(graph *g, descriptor c, descriptor a, descriptor b) {
    descriptor kind = make(g, CUDNN_BACKEND_MATMUL_DESCRIPTOR, {{CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &FP32}});
    add_operation(g, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR,
                  {part(CUDNN_ATTR_OPERATION_MATMUL_ADESC, a), part(CUDNN_ATTR_OPERATION_MATMUL_BDESC, b),
                   part(CUDNN_ATTR_OPERATION_MATMUL_CDESC, c), part(CUDNN_ATTR_OPERATION_MATMUL_DESC, kind)});
}

static void reduce(graph *g, cudnnReduceTensorOp_t mode, descriptor y, descriptor x) {
    descriptor kind = make(g, CUDNN_BACKEND_REDUCTION_DESCRIPTOR,
                           {{CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &FP32},
                            {CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &mode}});
    add_operation(g, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR,
                  {part(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x), part(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y),
                   part(CUDNN_ATTR_OPERATION_REDUCTION_DESC, kind)});
}

// The same elements of bf16, seen with this size and stride.
static descriptor seen_as(graph *g, four size, four stride, descriptor x) {
    descriptor y = tensor(g, g->next++, BF16, size, stride);
    add_operation(g, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR,
                  {part(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x), part(CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y)});
    return y;
}

// y = mode(x), mode(x, b), or t ? x : b. b and t may be NULL; axis < 0: none.
static void pointwise(graph *g, cudnnPointwiseMode_t mode, cudnnDataType_t precision, int64_t axis, descriptor y, descriptor x,
                      descriptor b, descriptor t) {
    descriptor kind = make(g, CUDNN_BACKEND_POINTWISE_DESCRIPTOR,
                           {{CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode},
                            {CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &precision},
                            {CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, axis >= 0, &axis}});
    add_operation(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR,
                  {part(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, kind), part(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x),
                   part(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b), part(CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t),
                   part(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y)});
}

// A new tensor: mode(x) or mode(x, b).
static descriptor apply(graph *g, cudnnPointwiseMode_t mode, four size, descriptor x, descriptor b, cudnnDataType_t type = FP32) {
    descriptor y = between(g, type, size);
    pointwise(g, mode, type, -1, y, x, b, NULL);
    return y;
}

static descriptor index_along(graph *g, int64_t axis, four size, descriptor x) {
    descriptor y = between(g, INT32, size);
    pointwise(g, CUDNN_POINTWISE_GEN_INDEX, FP32, axis, y, x, NULL, NULL);
    return y;
}

// ---- the two graphs

typedef struct sizes {
    four query, key, score, row; // (B, H, n, D), (B, KV, keys, D), (B, H, n, keys), (B, H, n, 1)
    four each;                   // (B, H, keys, D)
    four qkv, out;               // strides: of a part of qkv or dqkv, of out or dout
} sizes;

static sizes sizes_of(const problem *p) {
    const int64_t B = p->B, H = p->H, KV = p->KV, D = p->D, row = (H + 2 * KV) * D, all = p->all;
    return {{{B, H, p->n, D}},    {{B, KV, p->keys, D}},    {{B, H, p->n, p->keys}},     {{B, H, p->n, 1}},
            {{B, H, p->keys, D}}, {{row, D, all * row, 1}}, {{H * D, D, all * H * D, 1}}};
}

static descriptor causal_mask(graph *g, const problem *p, four score, descriptor x) {
    descriptor row = index_along(g, 2, score, x), column = index_along(g, 3, score, x);
    if (p->keys > p->n) {
        row = apply(g, CUDNN_POINTWISE_ADD, score, row, scalar(g, KEYS, INT32), INT32);
        row = apply(g, CUDNN_POINTWISE_SUB, score, row, scalar(g, QUERIES, INT32), INT32);
    }
    descriptor seen = between(g, BOOLEAN, score), y = between(g, FP32, score);
    pointwise(g, CUDNN_POINTWISE_CMP_GE, BOOLEAN, -1, seen, row, column, NULL);
    pointwise(g, CUDNN_POINTWISE_BINARY_SELECT, FP32, -1, y, x, scalar(g, LOWEST, FP32), seen);
    return y;
}

static void build_forward(graph *g, const problem *p) {
    const sizes s = sizes_of(p);
    descriptor q = tensor(g, Q, BF16, s.query, s.qkv);
    descriptor k = tensor(g, K, BF16, transposed(s.key), transposed(s.qkv));
    descriptor v = tensor(g, V, BF16, s.key, s.qkv);
    descriptor o = tensor(g, O, BF16, s.query, s.out);
    descriptor stats = tensor(g, STATS, FP32, s.row, packed(s.row));

    descriptor x = between(g, FP32, s.score);
    matmul(g, x, q, k);
    x = apply(g, CUDNN_POINTWISE_MUL, s.score, x, scalar(g, SCALE, FP32));
    x = causal_mask(g, p, s.score, x);

    descriptor maximum = between(g, FP32, s.row), sum = between(g, FP32, s.row);
    reduce(g, CUDNN_REDUCE_TENSOR_MAX, maximum, x);
    x = apply(g, CUDNN_POINTWISE_SUB, s.score, x, maximum);
    x = apply(g, CUDNN_POINTWISE_EXP, s.score, x, NULL);
    reduce(g, CUDNN_REDUCE_TENSOR_ADD, sum, x);
    descriptor log_sum = apply(g, CUDNN_POINTWISE_LOG, s.row, sum, NULL);
    pointwise(g, CUDNN_POINTWISE_ADD, FP32, -1, stats, maximum, log_sum, NULL);

    descriptor probability = between(g, BF16, s.score);
    pointwise(g, CUDNN_POINTWISE_DIV, FP32, -1, probability, x, sum, NULL);
    matmul(g, o, probability, v);
}

// sum (B, KV, keys, D) = aᵀ · b, added up over the heads that share it
static void matmul_shared(graph *g, const problem *p, int64_t each, descriptor sum, descriptor a, descriptor b) {
    const four size = sizes_of(p).each;
    descriptor y = p->KV == p->H ? sum : tensor(g, each, BF16, size, packed(size));
    matmul(g, y, a, b);
    if (y != sum) reduce(g, CUDNN_REDUCE_TENSOR_ADD, sum, y);
}

static void build_backward(graph *g, const problem *p) {
    const sizes s = sizes_of(p);
    const four across = transposed(s.score), steps = transposed(packed(s.score)); // (B, H, keys, n)
    descriptor q = tensor(g, Q, BF16, s.query, s.qkv);
    descriptor k = tensor(g, K, BF16, transposed(s.key), transposed(s.qkv));
    descriptor v = tensor(g, V, BF16, transposed(s.key), transposed(s.qkv));
    descriptor o = tensor(g, O, BF16, s.query, s.out), dout = tensor(g, DO, BF16, s.query, s.out);
    descriptor stats = tensor(g, STATS, FP32, s.row, packed(s.row));
    descriptor dq = tensor(g, DQ, BF16, s.query, s.qkv);
    descriptor dk = tensor(g, DK, BF16, s.key, s.qkv), dv = tensor(g, DV, BF16, s.key, s.qkv);
    descriptor scale = scalar(g, SCALE, FP32);

    descriptor product = apply(g, CUDNN_POINTWISE_MUL, s.query, dout, o);
    descriptor sum = between(g, FP32, s.row), delta = tensor(g, DELTA, FP32, s.row, packed(s.row));
    reduce(g, CUDNN_REDUCE_TENSOR_ADD, sum, product);
    pointwise(g, CUDNN_POINTWISE_MUL, FP32, -1, delta, sum, scalar(g, ONE, FP32), NULL);

    descriptor x = between(g, FP32, s.score);
    matmul(g, x, q, k);
    x = apply(g, CUDNN_POINTWISE_MUL, s.score, x, scale);
    x = apply(g, CUDNN_POINTWISE_SUB, s.score, x, stats);
    x = causal_mask(g, p, s.score, x);
    descriptor probability = apply(g, CUDNN_POINTWISE_EXP, s.score, x, NULL);
    matmul_shared(g, p, DV_EACH, dv, seen_as(g, across, steps, probability), dout);

    x = between(g, FP32, s.score);
    matmul(g, x, dout, v);
    x = apply(g, CUDNN_POINTWISE_SUB, s.score, x, delta);
    x = apply(g, CUDNN_POINTWISE_MUL, s.score, x, probability);
    x = apply(g, CUDNN_POINTWISE_MUL, s.score, x, scale);
    matmul_shared(g, p, DK_EACH, dk, seen_as(g, across, steps, x), q);

    matmul(g, dq, x, seen_as(g, s.key, s.qkv, k));
}

// ---- plans

// Does cuDNN say that the engine of this configuration gives the same bits every time?
static bool deterministic(descriptor configuration) {
    graph g = {};
    descriptor engine = create(&g, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    cudnnBackendNumericalNote_t note[CUDNN_NUMERICAL_NOTE_TYPE_COUNT];
    get(&g, configuration, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &engine);
    const int64_t count =
        get(&g, engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE, CUDNN_NUMERICAL_NOTE_TYPE_COUNT, note);
    bool result = g.status == CUDNN_STATUS_SUCCESS;
    for (int64_t i = 0; i < count; i++) result &= note[i] != CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC;
    if (engine) cudnnBackendDestroyDescriptor(engine);
    return result;
}

static bool plan_from(plan *p, const descriptor &configuration) {
    graph g = {};
    descriptor d = make(&g, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR,
                        {{CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &cudnn.handle},
                         part(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration)});
    get(&g, d, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &p->workspace);
    p->refusal = g.status;
    if (g.status != CUDNN_STATUS_SUCCESS) return false;
    p->execution = d;
    return true;
}

// Chooses the first engine of the heuristic's list that accepts the graph, those that cuDNN marks as deterministic before others.
// The mark is about all graphs of an engine; ours has a workspace for the sums that would be added in random order, so an engine
// without the mark is used, too. (tool_twins --repeat compares the bits.)
static void choose_engine(plan *p, graph *g) {
    const cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    descriptor whole = make(g, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR,
                            {{CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, g->operations, g->operation},
                             {CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &cudnn.handle}});
    descriptor heuristic =
        make(g, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR,
             {part(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, whole), {CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode}});
    descriptor candidate[CANDIDATES];
    for (int i = 0; i < CANDIDATES; i++) candidate[i] = create(g, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    const int64_t count = get(g, heuristic, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, CANDIDATES, candidate);
    p->refusal = g->status;
    if (g->status != CUDNN_STATUS_SUCCESS) return;
    p->refusal = CUDNN_STATUS_NOT_SUPPORTED;
    for (int promised = 1; promised >= 0; promised--)
        for (int64_t i = 0; i < count && i < CANDIDATES; i++)
            if (deterministic(candidate[i]) == (bool)promised && plan_from(p, candidate[i])) return;
}

static void report_refusal(const plan *p) {
    char why[512], cause[256] = "";
    cudnnGetLastErrorString(cause, sizeof cause); // a library not found, for one, is reported only here
    snprintf(why, sizeof why, "no deterministic engine for %ld queries, %ld keys, B %ld, H %ld, D %ld%s: %s (%s)", p->of.n,
             p->of.keys, p->of.B, p->of.H, p->of.D, p->of.pass == FORWARD ? "" : ", backward", cudnnGetErrorString(p->refusal),
             cause);
    report_reason(why);
}

static plan *plan_for(const problem *of) {
    for (int64_t i = 0; i < cudnn.plans; i++)
        if (memcmp(&cudnn.list[i].of, of, sizeof *of) == 0) return &cudnn.list[i];
    cudnn.list = (plan *)cf_host_grow(cudnn.list, &cudnn.room, cudnn.plans + 1, sizeof *cudnn.list, "plans of attention");
    plan *p = &cudnn.list[cudnn.plans++];
    memset(p, 0, sizeof *p);
    p->of = *of;
    graph g = {};
    (of->pass == FORWARD ? build_forward : build_backward)(&g, of);
    choose_engine(p, &g);
    if (!p->execution) report_refusal(p);
    return p;
}

// A reason not to ask cuDNN; NULL: none.
static const char *objection(const problem *p, bool aligned) {
    const size_t version = cudnnGetVersion();
    if (!aligned) return "an address is not a multiple of 16 bytes";
    if (version < 90600 || version == 91000 || version == 91001) return "this version is wrong for it";
    if (p->D % 8 != 0 || p->D > 128) return "channels per head are not a multiple of 8 up to 128";
    if (p->n < 2) return "a range of one query";
    if (p->pass != FORWARD && version <= 91500 && p->keys % 128 != 0)
        return "before 9.15.1 its backward is wrong unless the number of keys is a multiple of 128";
    if (p->pass != FORWARD && cf_cuda_properties()->major >= 10 && version < 91800)
        return "before 9.18 its backward is not deterministic on this GPU";
    return NULL;
}

// NULL: not supported, and reported. aligned: all addresses are.
static plan *supported(const problem *of, bool aligned) {
    if (cudnnGetVersion() != CUDNN_VERSION)
        cf_die("run scripts/find_cuda.sh report, take another cuDNN out of LD_LIBRARY_PATH, or set CUDNN_HOME and make cuda again",
               "cuDNN: this program was compiled with the header of version %d and runs with the library of %zu", CUDNN_VERSION,
               cudnnGetVersion());
    const char *why = objection(of, aligned);
    if (!why && !cudnn.handle && cudnnCreate(&cudnn.handle) != CUDNN_STATUS_SUCCESS) {
        cudnn.handle = NULL;
        why = "it does not start on this machine";
    }
    if (why) report_once(why);
    plan *p = why ? NULL : plan_for(of);
    return p && p->execution ? p : NULL;
}

static void run(const plan *p, void *pointer[NAMES], void *workspace_memory, cf_stream *stream) {
    int64_t name[NAMES], count = 0;
    void *address[NAMES];
    // Scalars: cuDNN reads them from the host when the plan runs.
    float scale = 1 / sqrtf((float)p->of.D), lowest = cudnnGetVersion() < 91000 ? -3.402823466e38f : -INFINITY, one = 1;
    int32_t keys = (int32_t)p->of.keys, queries = (int32_t)p->of.n;
    pointer[SCALE] = &scale, pointer[LOWEST] = &lowest;
    if (p->of.pass != FORWARD) pointer[ONE] = &one;
    if (keys != queries) pointer[KEYS] = &keys, pointer[QUERIES] = &queries;
    for (int64_t i = 1; i < NAMES; i++)
        if (pointer[i]) name[count] = i, address[count++] = pointer[i];
    graph g = {};
    descriptor pack = make(&g, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR,
                           {{CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, name},
                            {CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, address},
                            {CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace_memory}});
    if (g.status == CUDNN_STATUS_SUCCESS) g.status = cudnnSetStream(cudnn.handle, cf_cuda_stream(stream));
    if (g.status == CUDNN_STATUS_SUCCESS) g.status = cudnnBackendExecute(cudnn.handle, p->execution, pack);
    if (g.status != CUDNN_STATUS_SUCCESS) {
        char last[512] = "";
        cudnnGetLastErrorString(last, sizeof last);
        cf_die("set CUDNN_LOGERR_DBG=1 CUDNN_LOGDEST_DBG=stderr to see more",
               "attention by cuDNN, %ld queries, %ld keys, B %ld, H %ld, D %ld: %s: %s", p->of.n, p->of.keys, p->of.B, p->of.H,
               p->of.D, cudnnGetErrorString(g.status), last);
    }
    cudnnBackendDestroyDescriptor(pack);
}

// What both directions read or write. t0: the first query.
static void set_pointers(void *pointer[NAMES], const problem *of, const real *qkv, const real *out, const float *stats,
                         int64_t t0) {
    const int64_t keys = of->H * of->D, values = keys + of->KV * of->D;
    pointer[Q] = (void *)(qkv + t0 * of->all * (values + of->KV * of->D));
    pointer[K] = (void *)(qkv + keys);
    pointer[V] = (void *)(qkv + values);
    pointer[O] = (void *)(out + t0 * of->B * keys);
    pointer[STATS] = (void *)stats;
}

// ---- called by attention.cu

bool attention_cudnn_forward(real *out, accum *lse, const real *qkv, int64_t t0, int64_t n, int64_t T, int64_t B, int64_t H,
                             int64_t KV, int64_t D, cf_stream *stream) {
    const problem of = {FORWARD, n, t0 + n, B, H, KV, D, B};
    const plan *p = supported(&of, packable(0, out, qkv, lse));
    if (!p) return false;
    const int64_t row = n * (int64_t)sizeof *lse, statistics = n < T ? (row * B * H + 255) / 256 * 256 : 0; // bytes
    char *memory = workspace_of(cudnn.of_stream, stream, statistics + p->workspace, PURPOSE);
    float *stats = n < T ? (float *)memory : lse; // (B, H, n)
    void *pointer[NAMES] = {};
    set_pointers(pointer, &of, qkv, out, stats, t0);
    run(p, pointer, memory + statistics, stream);
    if (n < T)
        CF_CUDA(cudaMemcpy2DAsync(lse + t0, (size_t)T * sizeof *lse, stats, (size_t)row, (size_t)row, (size_t)(B * H),
                                  cudaMemcpyDeviceToDevice, cf_cuda_stream(stream)));
    return true;
}

bool attention_cudnn_backward(real *dqkv, const real *dout, const real *out, const accum *lse, const real *qkv, accum *scratch,
                              int64_t T, int64_t B, int64_t H, int64_t KV, int64_t D, cf_stream *stream) {
    const char *together = cf_getenv("COMMFUSE_ATTENTION_TOGETHER");
    const int64_t most = together ? larger(1, atoi(together)) : B, row = (H + 2 * KV) * D;
    for (int64_t b = 0; b < B; b += most) {
        const problem of = {BACKWARD, T, T, smaller(most, B - b), H, KV, D, B};
        const plan *p = supported(&of, packable(0, dqkv, dout, out, qkv, lse, scratch));
        if (!p) return false; // attention.cu's kernels write all of it again
        const int64_t each =
            KV < H ? ceil_div(of.B * H * T * D * (int64_t)sizeof(real), 256) * 256 : 0; // bytes of dK, and of dV, of all heads
        char *memory = workspace_of(cudnn.of_stream, stream, 2 * each + p->workspace, PURPOSE);
        void *pointer[NAMES] = {};
        set_pointers(pointer, &of, qkv + b * row, out + b * H * D, lse + b * H * T, 0);
        if (each > 0) pointer[DK_EACH] = memory, pointer[DV_EACH] = memory + each;
        pointer[DO] = (void *)(dout + b * H * D);
        pointer[DELTA] = scratch + b * H * T;
        pointer[DQ] = dqkv + b * row;
        pointer[DK] = dqkv + b * row + H * D;
        pointer[DV] = dqkv + b * row + (H + KV) * D;
        run(p, pointer, memory + 2 * each, stream);
    }
    return true;
}

#else // fp32, or the emulator

bool attention_cudnn_forward(real *, accum *, const real *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                             cf_stream *) {
    return false;
}

bool attention_cudnn_backward(real *, const real *, const real *, const accum *, const real *, accum *, int64_t, int64_t, int64_t,
                              int64_t, int64_t, cf_stream *) {
    return false;
}

#endif
