// See generate.h.
#include "generate.h"
#include "../commfuse/die.h"
#include "random.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

// A token drawn from softmax(logits) with the uniform number u.
static int32_t draw(const float *logits, int64_t V, double u) {
    double maximum = -INFINITY, sum = 0, so_far = 0;
    for (int64_t v = 0; v < V; v++) maximum = fmax(maximum, logits[v]);
    for (int64_t v = 0; v < V; v++) sum += exp(logits[v] - maximum);
    for (int64_t v = 0; v < V; v++) {
        so_far += exp(logits[v] - maximum);
        if (so_far > u * sum) return (int32_t)v;
    }
    return (int32_t)(V - 1);
}

// Tokens behind `length` are not seen by those before, so a pass may hold more of them. Every length would be another kind
// of each product, whose plan a GPU's library takes up to a second to make: a window grows by UNIT tokens a rank.
enum { UNIT = 64 };

static int64_t padded(int64_t length, int64_t tp, int64_t T) {
    int64_t unit = UNIT * tp, enough = ceil_div(length, unit) * unit;
    return enough < T ? enough : T;
}

void gpt_generate(gpt *g, int32_t first, uint64_t seed, uint64_t stream, int64_t T, int32_t *inputs, int32_t *token, int count) {
    int64_t V = g->params.shape.V, tp = g->mesh->tp, length = 1;
    float *logits = malloc((size_t)V * sizeof *logits);
    if (!logits) cf_die(NULL, "out of memory for a sample");
    memset(inputs, 0, (size_t)T * sizeof *inputs);
    inputs[0] = first;
    for (int i = 0; i < count; i++) {
        gpt_begin_forward(g, inputs, NULL, padded(length, tp, T), 1);
        gpt_forward(g, 0, NULL);
        gpt_next_logits(g, length - 1, 0, logits);
        token[i] = draw(logits, V, random_uniform(seed, stream, (uint64_t)i));
        if (length == T) {
            length = T / 2;
            memmove(inputs, inputs + T - length, (size_t)length * sizeof *inputs);
        }
        inputs[length++] = token[i];
    }
    free(logits);
}
