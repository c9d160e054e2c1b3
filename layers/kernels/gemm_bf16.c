// Matrix products of bf16 on the CPU, by oneDNN. It has them for processors with AVX-512, fast ones for those with its bf16 or AMX;
// for some of aarch64 if it was built with Arm's Compute Library (Debian's is not).
//
// oneDNN's matmul is made for one kind of product before it is executed, and making it takes longer than a small product. So
// each kind is made once and kept, with the number of its threads, and gets addresses at each call. Each thread makes its own,
// because attention multiplies in all threads at once. (They are not freed when a thread ends: OpenMP keeps its threads.) An
// addition to c is a "sum" that oneDNN applies before it rounds.
//
// A product with plain factors packs both into oneDNN's own layout, in every call. A packed b has the layout that oneDNN asks for
// in a product of USUAL_ROWS rows; oneDNN itself brings it there, by an operation that is kept like a product, with m = 0.
//
// Of what is used here, oneDNN 2 and 3 differ only in how memory and operations are described.
#include "gemm.h"
#include <dnnl.h>
#include <dnnl_debug.h>
#include "../../commfuse/base/die.h"
#ifdef __aarch64__
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

enum { PACKED_BLOCK = 64 }; // to a multiple of this oneDNN fills rows and columns, at most
enum { USUAL_ROWS = 1024 };
enum { ASKED = 0, PACKED = -1 }; // row lengths: the layout is oneDNN's choice, or was

// One kind of product. All fields have one type, so that two of them can be compared byte by byte.
typedef struct product {
    int64_t transpose_a, transpose_b;
    int64_t m, n, k, lda, ldb, ldc;
    int64_t wide; // c is accum
    int64_t add, bias;
    int64_t threads; // that compute it
} product;

typedef struct plan {
    product of;
    dnnl_primitive_t run;
    dnnl_memory_t memory[4]; // a, b, c, bias; of packing: b, packed
} plan;

static _Thread_local struct {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    int64_t plans, room; // how many are made, fit in the list
    plan *list;
} onednn;

#define CHECK(call, product) check((call), #call, product)
static void check(dnnl_status_t status, const char *call, const product *p) {
    if (status == dnnl_success) return;
    cf_die("set DNNL_VERBOSE=1 to see more",
           "%.*s says %s (%d): product (%ld, %ld) · (%ld, %ld) of bf16, rows of %ld, %ld, %ld elements", (int)strcspn(call, "("),
           call, dnnl_status2str(status), (int)status, p->m, p->k, p->k, p->n, p->lda, p->ldb, p->ldc);
}

// --- differences between oneDNN 2 and 3 ---

#if DNNL_VERSION_MAJOR >= 3 // a description is a pointer and must be freed
#define describe       dnnl_memory_desc_create_with_strides
#define describe_asked dnnl_memory_desc_create_with_tag
#define copy(to, from) dnnl_memory_desc_clone(to, from)
#define address(x)     (x)
#define forget(x)      dnnl_memory_desc_destroy(x)
#define add_to(after)  dnnl_post_ops_append_sum(after, 1, 0, dnnl_data_type_undef)
#define create_operation(operation, x, attributes)                                                                                 \
    dnnl_matmul_primitive_desc_create(operation, onednn.engine, x[0], x[1], x[3], x[2], attributes)
#else // it is a value
#define describe       dnnl_memory_desc_init_by_strides
#define describe_asked dnnl_memory_desc_init_by_tag
#define copy(to, from) (*(to) = *(from), dnnl_success)
#define address(x)     (&(x))
#define forget(x)      dnnl_success
#define add_to(after)  dnnl_post_ops_append_sum(after, 1)
static dnnl_status_t create_operation(dnnl_primitive_desc_t *operation, const dnnl_memory_desc_t *x,
                                      dnnl_primitive_attr_t attributes) {
    dnnl_matmul_desc_t matmul;
    dnnl_status_t status = dnnl_matmul_desc_init(&matmul, &x[0], &x[1], &x[3], &x[2]);
    return status != dnnl_success ? status : dnnl_primitive_desc_create(operation, &matmul, attributes, onednn.engine, NULL);
}
#endif

// --- plans ---

static void describe_side(dnnl_memory_desc_t *x, const product *of, int64_t rows, int64_t columns, bool transpose, int64_t ld,
                          dnnl_data_type_t type) {
    const dnnl_dims_t size = {rows, columns}, steps = {transpose ? 1 : ld, transpose ? ld : 1};
    if (ld == ASKED)
        CHECK(describe_asked(x, 2, size, type, dnnl_format_tag_any), of);
    else
        CHECK(describe(x, 2, size, type, steps), of);
}

// A packed b has its layout already.
static void describe_product(dnnl_memory_desc_t x[4], const product *of) {
    describe_side(&x[0], of, of->m, of->k, of->transpose_a, of->lda, dnnl_bf16);
    if (of->ldb != PACKED) describe_side(&x[1], of, of->k, of->n, of->transpose_b, of->ldb, dnnl_bf16);
    describe_side(&x[2], of, of->m, of->n, false, of->ldc, of->wide ? dnnl_f32 : dnnl_bf16);
    if (of->bias) describe_side(&x[3], of, 1, of->n, false, of->n, dnnl_bf16);
}

static dnnl_primitive_desc_t operation_of(const product *of, const dnnl_memory_desc_t x[4]) {
    dnnl_primitive_attr_t attributes;
    dnnl_post_ops_t after;
    CHECK(dnnl_primitive_attr_create(&attributes), of);
    CHECK(dnnl_post_ops_create(&after), of);
    if (of->add) CHECK(add_to(after), of);
    CHECK(dnnl_primitive_attr_set_post_ops(attributes, after), of);
    CHECK(dnnl_post_ops_destroy(after), of);
    dnnl_primitive_desc_t operation;
    dnnl_status_t status = create_operation(&operation, x, attributes);
    if (status == dnnl_unimplemented)
        cf_die("use --dtype fp32",
               "--dtype bf16: this oneDNN has no matrix product of bf16 for this processor, only for those with AVX-512 and, if it "
               "was built with Arm's Compute Library, some of aarch64");
    CHECK(status, of);
    CHECK(dnnl_primitive_attr_destroy(attributes), of);
    return operation;
}

// It depends on n and k alone, so all products with this b read the same.
static void packed_layout(dnnl_memory_desc_t *packed, int64_t n, int64_t k) {
    const product usual = {.m = USUAL_ROWS, .n = n, .k = k, .lda = k, .ldb = ASKED, .ldc = n};
    dnnl_memory_desc_t x[4] = {0};
    describe_product(x, &usual);
    dnnl_primitive_desc_t operation = operation_of(&usual, x);
    CHECK(copy(packed, dnnl_primitive_desc_query_md(operation, dnnl_query_weights_md, 0)), &usual);
    CHECK(dnnl_primitive_desc_destroy(operation), &usual);
    for (int i = 0; i < 3; i++) CHECK(forget(x[i]), &usual);
}

static void make(plan *p) {
    const product *of = &p->of;
    const bool packing = of->m == 0;
    dnnl_memory_desc_t x[4] = {0};
    dnnl_primitive_desc_t operation;
    if (packing || of->ldb == PACKED) packed_layout(&x[1], of->n, of->k);
    if (packing) {
        describe_side(&x[0], of, of->k, of->n, of->transpose_b, of->ldb, dnnl_bf16);
        CHECK(dnnl_reorder_primitive_desc_create(&operation, address(x[0]), onednn.engine, address(x[1]), onednn.engine, NULL), of);
    } else {
        describe_product(x, of);
        operation = operation_of(of, x);
    }
    CHECK(dnnl_primitive_create(&p->run, operation), of);
    CHECK(dnnl_primitive_desc_destroy(operation), of);
    for (int i = 0; i < (packing ? 2 : 3 + of->bias); i++) {
        CHECK(dnnl_memory_create(&p->memory[i], address(x[i]), onednn.engine, DNNL_MEMORY_NONE), of);
        CHECK(forget(x[i]), of);
    }
}

static plan *plan_for(const product *of) {
    for (int64_t i = 0; i < onednn.plans; i++)
        if (memcmp(&onednn.list[i].of, of, sizeof *of) == 0) return &onednn.list[i];
    if (!onednn.engine) {
        CHECK(dnnl_engine_create(&onednn.engine, dnnl_cpu, 0), of);
        CHECK(dnnl_stream_create(&onednn.stream, onednn.engine, dnnl_stream_default_flags), of);
    }
    onednn.list = cf_host_grow(onednn.list, &onednn.room, onednn.plans + 1, sizeof *onednn.list, "kinds of products");
    plan *p = &onednn.list[onednn.plans++];
    *p = (plan){.of = *of};
    make(p);
    return p;
}

static void execute(const product *of, const int *roles, const void *const *data, int count) {
    plan *p = plan_for(of);
    dnnl_exec_arg_t arguments[4];
    for (int i = 0; i < count; i++) {
        CHECK(dnnl_memory_set_data_handle(p->memory[i], (void *)data[i]), of);
        arguments[i] = (dnnl_exec_arg_t){roles[i], p->memory[i]};
    }
    CHECK(dnnl_primitive_execute(p->run, onednn.stream, count, arguments), of);
    CHECK(dnnl_stream_wait(onednn.stream), of);
}

static void multiply(const product *of, const real *a, const real *b, const real *bias, void *c) {
    const void *const data[] = {a, b, c, bias};
    execute(of, (const int[]){DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST, DNNL_ARG_BIAS}, data, 3 + (of->bias != 0));
}

bool gemm_emulated(void) {
#ifdef __aarch64__
    return !(getauxval(AT_HWCAP2) & HWCAP2_BF16);
#endif
    return (dnnl_get_effective_cpu_isa() & dnnl_cpu_isa_avx512_core_bf16) != dnnl_cpu_isa_avx512_core_bf16;
}

int64_t gemm_packed_size(int64_t n, int64_t k) {
    return ceil_div(n, PACKED_BLOCK) * ceil_div(k, PACKED_BLOCK) * PACKED_BLOCK * PACKED_BLOCK;
}

void gemm_pack(real *packed, bool transpose_b, int64_t n, int64_t k, const real *b, int64_t ldb) {
    const product of = {.transpose_b = transpose_b, .n = n, .k = k, .ldb = ldb, .threads = gemm_threads()};
    const void *const data[] = {b, packed};
    execute(&of, (const int[]){DNNL_ARG_FROM, DNNL_ARG_TO}, data, 2);
}

void gemm_packed(int64_t m, int64_t n, int64_t k, const real *a, const real *packed, const real *bias, const real *add, real *c,
                 cf_stream *stream) {
    product of = {.m = m, .n = n, .k = k, .lda = k, .ldb = PACKED, .ldc = n, .add = add != NULL, .bias = bias != NULL};
    of.threads = gemm_threads();
#pragma omp parallel for
    for (int64_t row = 0; row < (add && add != c ? m : 0); row++) memcpy(c + row * n, add + row * n, (size_t)n * sizeof *c);
    multiply(&of, a, packed, bias, c);
}

void gemm_to_accum(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, const real *a, int64_t lda, const real *b,
                   int64_t ldb, accum beta, accum *c, int64_t ldc, cf_stream *stream) {
    if (transpose_a && !transpose_b && gemm_transposed(m, n, k, a, lda, b, ldb, beta, c, ldc)) return;
    const product of = {transpose_a, transpose_b, m, n, k, lda, ldb, ldc, true, beta != 0, false, gemm_threads()};
    multiply(&of, a, b, NULL, c);
}
