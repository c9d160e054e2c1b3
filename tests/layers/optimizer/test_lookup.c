// ranks: 2 4
// quick: 4
//
// The token embedding on real ranks: of the table each rank has no more than the shard that it owns, all else is NaN, and
// yet every token's row is found; gradients reach the owners of their rows, and these alone. Gradients are integers, so
// that sums are exact, or fractions, whose sums must have the same bits every time.
#include "tests/commfuse/ranks.h"
#include "layers/optimizer/lookup.h"
#include <math.h>

enum { PATIENCE_S = 60, C = 8, VOCABULARY = 70, T = 8, B = 2, ALREADY = 1000 };

static cf_context context;

// The token at a position of a sequence of a replica.
typedef int32_t draw(int replica, int64_t t, int64_t b);

static int32_t equal(int replica, int64_t t, int64_t b) {
    (void)replica, (void)t, (void)b;
    return 37;
}
static int32_t distinct(int replica, int64_t t, int64_t b) { // of four replicas, 64
    return (int32_t)(VOCABULARY - 1 - ((replica * T + t) * B + b));
}
static int32_t frequent(int replica, int64_t t, int64_t b) { // a few often, none from the middle of the table
    uint32_t mixed = (uint32_t)((replica * T + t) * B + b + 1) * 2654435761u >> 16;
    return (int32_t)(mixed % 3 ? mixed % 4 : VOCABULARY - 1 - mixed % 11);
}
static int32_t lopsided(int replica, int64_t t, int64_t b) { // one replica has as many as it can
    return replica == 0 ? distinct(0, t, b) : 0;
}
static draw *const draws[] = {equal, distinct, frequent, lopsided};
enum { DRAWS = sizeof draws / sizeof *draws };

typedef struct problem { // one rank's part in it
    cf_mesh *mesh;
    parameters p;
    lookup l;
    const cf_group *split, *owners;
    draw *token;
    bool up, fractions;
    int64_t Ts, part, owned; // rows of the part of the table that is here, and of an owner
    int32_t *inputs;         // (N · Ts, B)
    real *x, *dx, *scratch;  // (Ts, B, C), (Ts, B, C), (N · Ts, B, C)
    accum *shard;            // (owned, C)
} problem;

static real weight(int64_t row, int64_t c) {
    return (real)(row * C + c + 1);
}

static real gradient(const problem *q, int replica, int64_t t, int64_t b, int64_t c) {
    int64_t i = ((replica * T + t) * B + b) * C + c;
    return q->fractions ? sinf((float)i) : (real)(i % 17 - 8);
}

// First row of the table that this rank owns.
static int64_t first_owned(const problem *q) {
    return q->split->rank * q->part + q->owners->rank * q->owned;
}

static void open_problem(problem *q, cf_mesh *mesh, parallel_strategy strategy, draw *token, bool fractions) {
    gpt_shape shape = {.maxT = T, .V = VOCABULARY, .Vp = VOCABULARY, .L = 1, .H = 4, .C = C};
    *q = (problem){.mesh = mesh, .token = token, .up = strategy == STRATEGY_UP, .fractions = fractions};
    params_create(&q->p, shape, mesh, strategy, 0);
    q->split = q->up ? &mesh->self_group : &mesh->tp_group;
    q->owners = q->up ? &mesh->world_group : &mesh->dp_group;
    q->Ts = T / mesh->tp;
    q->part = params_local_rows(&q->p, WTE);
    q->owned = (q->part + q->owners->size - 1) / q->owners->size;
    overlap how;
    CHECK(overlap_parse(&how, "ring:2", "preset", -1, "preset"), "no schedule is called ring");
    lookup_create(&q->l, &context, &q->p, q->split, q->Ts, B, &how);
    int64_t shard = q->Ts * B * C, size = (int64_t)sizeof(real), N = q->split->size;
    q->inputs = cf_alloc(N * q->Ts * B * (int64_t)sizeof *q->inputs, "test");
    q->x = cf_alloc(shard * size, "test");
    q->dx = cf_alloc(shard * size, "test");
    q->scratch = cf_alloc(N * shard * size, "test");
    q->shard = cf_alloc(q->owned * C * (int64_t)sizeof *q->shard, "test");
    int replica = mesh->dp_group.rank;
    int64_t t0 = mesh->tp_group.rank * q->Ts, first = q->up ? t0 : 0; // of this rank, of the payload
    for (int64_t i = 0; i < N * q->Ts * B; i++) q->inputs[i] = token(replica, first + i / B, i % B);
    for (int64_t i = 0; i < shard; i++) q->dx[i] = gradient(q, replica, t0 + i / C / B, i / C % B, i % C);
    for (int64_t i = 0; i < q->part * C; i++) {
        int64_t row = q->split->rank * q->part + i / C;
        bool owned = row >= first_owned(q) && row < first_owned(q) + q->owned;
        params_weight(&q->p, WTE, 0)[i] = owned || q->owners->size == 1 ? weight(row, i % C) : NAN;
        params_grad(&q->p, WTE, 0)[i] = ALREADY;
    }
}

static void close_problem(problem *q) {
    void *memory[] = {q->inputs, q->x, q->dx, q->scratch, q->shard};
    for (int i = 0; i < 5; i++) cf_free(memory[i]);
    lookup_free(&q->l);
    params_free(&q->p);
}

static void look_up(problem *q) {
    lookup_forward(&q->l, q->inputs, q->Ts, B, q->l.by_rows, q->scratch);
    lookup_finish_forward(&q->l, q->x);
}

// again: forward has been of another micro-batch, so that the rows must be found again.
static void add_gradient(problem *q, bool again) {
    if (again) q->l.rows_known = false;
    for (int64_t i = 0; i < q->owned * C; i++) q->shard[i] = ALREADY;
    lookup_backward(&q->l, q->dx, q->inputs, true, q->scratch);
    lookup_finish_backward(&q->l);
    lookup_finish_delivery(&q->l, q->shard);
}

static void check_rows(const problem *q) {
    for (int64_t i = 0; i < q->Ts * B * C; i++) {
        int64_t t = q->mesh->tp_group.rank * q->Ts + i / C / B;
        int32_t token = q->token(q->mesh->dp_group.rank, t, i / C % B);
        CHECK(q->x[i] == weight(token, i % C), "token %d, column %lld: %g", token, (long long)(i % C), q->x[i]);
    }
}

// The longest list of rows of one owner in this part of the table that tokens of one rank name.
static int64_t longest_list(const problem *q) {
    int64_t longest = 0, lists = q->up ? q->mesh->tp : 1;
    for (int64_t from = 0; from < q->mesh->dp * lists; from++)
        for (int owner = 0; owner < q->owners->size; owner++) {
            int64_t length = 0, first = q->split->rank * q->part + owner * q->owned;
            for (int64_t row = first; row < first + q->owned && row < (q->split->rank + 1) * q->part; row++) {
                bool named = false;
                for (int64_t i = 0; i < T / lists * B; i++)
                    named |= row == q->token((int)(from / lists), from % lists * (T / lists) + i / B, i % B);
                length += named;
            }
            longest = length > longest ? length : longest;
        }
    return longest;
}

static void check_sums(const problem *q) {
    bool local = q->owners->size == 1; // then there is no shard beside the gradient
    const accum *found = local ? params_grad(&q->p, WTE, 0) : q->shard;
    for (int64_t i = 0; i < q->owned * C; i++) {
        int64_t row = first_owned(q) + i / C;
        accum sum = ALREADY;
        for (int64_t k = 0; k < q->mesh->dp * T * B; k++) {
            int replica = (int)(k / B / T);
            if (q->token(replica, k / B % T, k % B) == row) sum += gradient(q, replica, k / B % T, k % B, i % C);
        }
        CHECK(found[i] == sum, "row %lld, column %lld: %g, expected %g", (long long)row, (long long)(i % C), found[i], sum);
    }
    for (int64_t i = 0; i < q->part * C && !local; i++)
        CHECK(params_grad(&q->p, WTE, 0)[i] == ALREADY, "element %lld of the local gradient changed", (long long)i);
}

static void check_problem(problem *q) {
    for (int again = 0; again < 2; again++) {
        look_up(q);
        check_rows(q);
        if (q->owners->size > 1)
            CHECK(q->l.rows == longest_list(q), "%lld rows travel, named are %lld", (long long)q->l.rows,
                  (long long)longest_list(q));
        if (q->owners->size == 1 && again) break; // it would be added once more
        add_gradient(q, again);
        if (!q->fractions) check_sums(q);
    }
}

static void check_bits(problem *q) {
    int64_t count = q->owned * C;
    accum *first = cf_alloc(count * (int64_t)sizeof *first, "test");
    add_gradient(q, false);
    memcpy(first, q->shard, (size_t)count * sizeof *first);
    add_gradient(q, true);
    CHECK(memcmp(first, q->shard, (size_t)count * sizeof *first) == 0, "another run, other bits");
    cf_free(first);
}

TEST(every_token_finds_its_row_and_its_owner) {
    for (int tp = 1; tp <= context.transport->size; tp *= 2) {
        cf_mesh mesh = ranks_mesh(context.transport, tp, context.transport->size / tp);
        for (int strategy = STRATEGY_TPSP; strategy <= STRATEGY_UP; strategy++)
            for (int i = 0; i < 2 * DRAWS; i++) {
                problem q;
                open_problem(&q, &mesh, (parallel_strategy)strategy, draws[i / 2], i % 2);
                check_problem(&q);
                if (q.fractions && q.owners->size > 1) check_bits(&q);
                close_problem(&q);
            }
        cf_mesh_free(&mesh);
    }
}

int main(int argc, char **argv) {
    context.transport = cf_transport_create("auto", &argc, &argv, 60);
    *context.transport->timeout_s = PATIENCE_S;
    cf_device_threads(1);
    context.stream = cf_stream_create();
    context.trace = cf_trace_create();
    int status = ranks_run(context.transport->rank);
    cf_trace_free(context.trace);
    cf_stream_free(context.stream);
    context.transport->close(context.transport);
    return status;
}
