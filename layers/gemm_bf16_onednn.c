// Matrix products of bf16 by oneDNN's own.
//
// oneDNN's matmul is made for one kind of product before it is executed, and making it takes longer than a small
// product. So each kind is made once and kept, with the number of threads that it was made for, and gets addresses
// when it is called: by each thread for itself, as attention multiplies in all of them at once. What is added to c is
// a "sum" that it applies before it rounds. (What a thread has made is not given back when it ends: OpenMP keeps its
// threads.)
//
// oneDNN 2 and 3 differ in how memory and operations are described, and in nothing else that is used here.
#include "gemm.h"
#include <dnnl.h>
#include <dnnl_debug.h>
#include "../commfuse/die.h"

enum { PLANS_MAX = 512 };

typedef struct plan {
    product of;
    dnnl_primitive_t matmul;
    dnnl_memory_t a, b, c;
} plan;

static _Thread_local struct {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    int64_t plans; // ever made
    plan list[PLANS_MAX];
} onednn;

#define CHECK(call, product) check((call), #call, product)
static void check(dnnl_status_t status, const char *call, const product *p) {
    if (status == dnnl_success) return;
    cf_die("set DNNL_VERBOSE=1 to see more",
           "%.*s says %s (%d): product (%lld, %lld) · (%lld, %lld) of bf16, rows of %lld, %lld, %lld elements",
           (int)strcspn(call, "("), call, dnnl_status2str(status), (int)status, (long long)p->m, (long long)p->k, (long long)p->k,
           (long long)p->n, (long long)p->lda, (long long)p->ldb, (long long)p->ldc);
}

// --- what differs between oneDNN 2 and 3 ---

typedef dnnl_memory_desc_t matrix; // a value in oneDNN 2, in 3 a pointer to what is given back

#if DNNL_VERSION_MAJOR >= 3
static void describe(matrix *x, const dnnl_dims_t size, dnnl_data_type_t type, const dnnl_dims_t steps, const product *of) {
    CHECK(dnnl_memory_desc_create_with_strides(x, 2, size, type, steps), of);
}

static dnnl_memory_t memory_of(matrix *x, const product *of) {
    dnnl_memory_t memory;
    CHECK(dnnl_memory_create(&memory, *x, onednn.engine, DNNL_MEMORY_NONE), of);
    return memory;
}

static dnnl_status_t create_operation(dnnl_primitive_desc_t *operation, matrix *a, matrix *b, matrix *c,
                                      dnnl_primitive_attr_t attributes) {
    return dnnl_matmul_primitive_desc_create(operation, onednn.engine, *a, *b, NULL, *c, attributes);
}

static void append_sum(dnnl_post_ops_t after, const product *of) {
    CHECK(dnnl_post_ops_append_sum(after, 1, 0, dnnl_data_type_undef), of);
}

static void forget(matrix *x, const product *of) {
    CHECK(dnnl_memory_desc_destroy(*x), of);
}
#else
static void describe(matrix *x, const dnnl_dims_t size, dnnl_data_type_t type, const dnnl_dims_t steps, const product *of) {
    CHECK(dnnl_memory_desc_init_by_strides(x, 2, size, type, steps), of);
}

static dnnl_memory_t memory_of(matrix *x, const product *of) {
    dnnl_memory_t memory;
    CHECK(dnnl_memory_create(&memory, x, onednn.engine, DNNL_MEMORY_NONE), of);
    return memory;
}

static dnnl_status_t create_operation(dnnl_primitive_desc_t *operation, matrix *a, matrix *b, matrix *c,
                                      dnnl_primitive_attr_t attributes) {
    dnnl_matmul_desc_t matmul;
    dnnl_status_t status = dnnl_matmul_desc_init(&matmul, a, b, NULL, c);
    return status != dnnl_success ? status : dnnl_primitive_desc_create(operation, &matmul, attributes, onednn.engine, NULL);
}

static void append_sum(dnnl_post_ops_t after, const product *of) {
    CHECK(dnnl_post_ops_append_sum(after, 1), of);
}

static void forget(matrix *x, const product *of) {
    (void)x, (void)of; // a value
}
#endif

// --- plans ---

static void describe_rows(matrix *x, int64_t rows, int64_t columns, bool transpose, int64_t ld, dnnl_data_type_t type,
                          const product *of) {
    const dnnl_dims_t size = {rows, columns}, steps = {transpose ? 1 : ld, transpose ? ld : 1};
    describe(x, size, type, steps, of);
}

static dnnl_primitive_attr_t attributes_of(const product *of) {
    dnnl_primitive_attr_t attributes;
    CHECK(dnnl_primitive_attr_create(&attributes), of);
    if (!of->add) return attributes;
    dnnl_post_ops_t after;
    CHECK(dnnl_post_ops_create(&after), of);
    append_sum(after, of);
    CHECK(dnnl_primitive_attr_set_post_ops(attributes, after), of);
    CHECK(dnnl_post_ops_destroy(after), of);
    return attributes;
}

static void make(plan *p) {
    const product *of = &p->of;
    matrix a, b, c;
    describe_rows(&a, of->m, of->k, of->transpose_a, of->lda, dnnl_bf16, of);
    describe_rows(&b, of->k, of->n, of->transpose_b, of->ldb, dnnl_bf16, of);
    describe_rows(&c, of->m, of->n, false, of->ldc, of->wide ? dnnl_f32 : dnnl_bf16, of);
    dnnl_primitive_attr_t attributes = attributes_of(of);
    dnnl_primitive_desc_t operation;
    dnnl_status_t status = create_operation(&operation, &a, &b, &c, attributes);
    if (status == dnnl_unimplemented)
        cf_die("a bug in gemm_bf16_is_native()", "oneDNN has no matrix product of bf16 for this processor");
    CHECK(status, of);
    CHECK(dnnl_primitive_create(&p->matmul, operation), of);
    p->a = memory_of(&a, of), p->b = memory_of(&b, of), p->c = memory_of(&c, of);
    CHECK(dnnl_primitive_desc_destroy(operation), of);
    CHECK(dnnl_primitive_attr_destroy(attributes), of);
    forget(&a, of), forget(&b, of), forget(&c, of);
}

// The oldest makes room.
static plan *plan_for(const product *of) {
    for (int64_t i = 0; i < onednn.plans && i < PLANS_MAX; i++)
        if (memcmp(&onednn.list[i].of, of, sizeof *of) == 0) return &onednn.list[i];
    if (!onednn.engine) {
        CHECK(dnnl_engine_create(&onednn.engine, dnnl_cpu, 0), of);
        CHECK(dnnl_stream_create(&onednn.stream, onednn.engine, dnnl_stream_default_flags), of);
    }
    plan *p = &onednn.list[onednn.plans++ % PLANS_MAX];
    if (p->matmul) {
        CHECK(dnnl_primitive_destroy(p->matmul), &p->of);
        dnnl_memory_t memory[] = {p->a, p->b, p->c};
        for (int i = 0; i < 3; i++) CHECK(dnnl_memory_destroy(memory[i]), &p->of);
    }
    *p = (plan){.of = *of};
    make(p);
    return p;
}

void gemm_bf16_onednn(const product *of, const real *a, const real *b, void *c) {
    if (of->m == 0 || of->n == 0) return;
    if (of->k == 0) { // what is added to stays, what is written becomes zero
        const int64_t size = of->wide ? sizeof(precise) : sizeof(real);
        for (int64_t i = 0; !of->add && i < of->m; i++) memset((char *)c + i * of->ldc * size, 0, (size_t)(of->n * size));
        return;
    }
    plan *p = plan_for(of);
    const dnnl_exec_arg_t arguments[] = {{DNNL_ARG_SRC, p->a}, {DNNL_ARG_WEIGHTS, p->b}, {DNNL_ARG_DST, p->c}};
    CHECK(dnnl_memory_set_data_handle(p->a, (void *)a), of);
    CHECK(dnnl_memory_set_data_handle(p->b, (void *)b), of);
    CHECK(dnnl_memory_set_data_handle(p->c, c), of);
    CHECK(dnnl_primitive_execute(p->matmul, onednn.stream, 3, arguments), of);
    CHECK(dnnl_stream_wait(onednn.stream), of);
}
