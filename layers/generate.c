// See generate.h.
#include "generate.h"
#include "random.h"

static int descending(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

// A token drawn from softmax(logits / temperature) with the uniform number u. sorted (V): scratch.
static int32_t draw(const float *logits, float *sorted, int64_t V, sampling how, double u) {
    double maximum = -INFINITY, least = -INFINITY, sum = 0, so_far = 0;
    int32_t last = 0;
    for (int64_t v = 0; v < V; v++)
        if (logits[v] > maximum) maximum = logits[v], last = (int32_t)v;
    if (how.temperature == 0) return last;
    if (how.top_k > 0 && how.top_k < V) {
        memcpy(sorted, logits, (size_t)V * sizeof *sorted);
        qsort(sorted, (size_t)V, sizeof *sorted, descending);
        least = sorted[how.top_k - 1];
    }
    for (int64_t v = 0; v < V; v++)
        if (logits[v] >= least) sum += exp((logits[v] - maximum) / how.temperature);
    for (int64_t v = 0; v < V; v++) {
        if (!(logits[v] >= least)) continue;
        so_far += exp((logits[v] - maximum) / how.temperature);
        last = (int32_t)v;
        if (so_far > u * sum) break;
    }
    return last;
}

// Logits (V) at position t of the one sequence of the pass, on every rank. scratch (V)
static void next_logits(gpt *g, int64_t t, real *scratch, float *out) {
    const int64_t V = g->params.shape.V, Vl = g->Vl, row = t - gpt_first_row(g);
    real *mine = g->next + g->mesh->tp_group.rank * Vl;
    if (row >= 0 && row < g->split->size * g->pass.Ts)
        cf_copy(mine, g->logits + row * Vl, Vl * (int64_t)sizeof *mine, g->context->stream);
    cf_fuse_run(g->gather_logits, g->next, 1, Vl, NULL, NULL, -1);
    // The vocabulary's parts side by side or, in UP, the whole vocabulary of the rank that holds the position.
    cf_copy(scratch, g->next + (g->split->size == 1 ? t / g->pass.Ts * Vl : 0), V * (int64_t)sizeof *scratch, g->context->stream);
    cf_stream_sync(g->context->stream);
    for (int64_t v = 0; v < V; v++) out[v] = (float)accum_of(scratch[v]);
}

enum { PASS_UNIT = 64 }; // tokens of a rank

// Tokens of a pass over a text of `length` tokens: rounded up, because each number of tokens needs plans for its products, which
// take a GPU's library up to a second. No token sees those after it.
static int64_t pass_tokens(const gpt *g, int64_t length) {
    const int64_t unit = PASS_UNIT * g->mesh->tp;
    return smaller(ceil_div(length, unit) * unit, g->setup.T);
}

void gpt_generate(gpt *g, sampling how, int32_t *tokens, int64_t prompt, int64_t count) {
    int32_t *inputs = g->host_inputs;
    const int64_t V = g->params.shape.V, T = g->setup.T;
    int64_t length = prompt;
    float *logits = cf_host_alloc(2 * V, sizeof *logits, "a sample");
    real *scratch = cf_host_alloc(V, sizeof *scratch, "a sample");
    memset(inputs, 0, (size_t)T * sizeof *inputs);
    memcpy(inputs, tokens, (size_t)prompt * sizeof *inputs);
    for (int64_t i = 0; i < count; i++) {
        gpt_begin_forward(g, inputs, NULL, pass_tokens(g, length), 1);
        gpt_forward(g, 0);
        if (g->mesh->dp > 1) cf_allreduce_min(g->context->transport, 0); // no replica is far ahead of another, as in gpt_evaluate()
        next_logits(g, length - 1, scratch, logits);
        const int32_t next = tokens[prompt + i] =
            draw(logits, logits + V, V, how, random_uniform(how.seed, how.stream, (uint64_t)i));
        if (length == T) {
            length = T / 2;
            memmove(inputs, inputs + T - length, (size_t)length * sizeof *inputs);
        }
        inputs[length++] = next;
    }
    free(logits), free(scratch);
}
