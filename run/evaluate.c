// See evaluate.h.
#include "evaluate.h"
#include "../commfuse/die.h"
#include "../data/progress.h"
#include "../layers/random.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SAMPLE_TOKENS = 256 };
enum { SAMPLE_STREAM = 1 << 20 }; // of the random numbers, apart from those of the tensors

void evaluate_loss(trainer *t, int64_t step) {
    const options *o = &t->o;
    int64_t batches = tokens_samples(t->val) / o->batch;
    if (batches > o->val_batches) batches = o->val_batches;
    double sum = 0;
    cf_zero(t->loss, (int64_t)sizeof *t->loss, t->context.stream);
    for (int64_t i = 0; i < batches; i++)
        for (int micro = 0; micro < t->accumulation; micro++) {
            trainer_load(t, t->val, false, i * o->batch, micro);
            gpt_forward(&t->model, t->inputs, t->targets, o->seq, o->micro_batch, t->loss);
        }
    cf_copy(&sum, t->loss, (int64_t)sizeof sum, t->context.stream);
    cf_stream_sync(t->context.stream);
    double loss = optimizer_sum(&t->optimizer, sum) / (double)(batches * o->batch * o->seq);
    if (trainer_root(t)) {
        progress_break();
        printf("step %5lld  validation loss %.4f\n", (long long)step, loss);
        fflush(stdout);
    }
    log_begin(t->log, "val");
    log_int(t->log, "step", step);
    log_real(t->log, "loss", loss);
    log_end(t->log);
}

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

// A text, token by token; when the window of seq tokens is full, its older half is dropped. Every rank draws with
// the same random numbers, and every replica writes the same text: the others would only wait for the first.
static void generate(trainer *t, int64_t step, char *text) {
    int64_t T = t->o.seq, V = t->model.params.shape.V, tp = t->mesh.tp, length = 1;
    float *logits = (float *)malloc((size_t)V * sizeof *logits);
    if (!logits) cf_die(NULL, "out of memory for a sample");
    int64_t end_of_text = vocabulary_end_of_text(t->words);
    memset(t->inputs, 0, (size_t)T * sizeof *t->inputs);
    t->inputs[0] = end_of_text >= 0 && end_of_text < V ? (int32_t)end_of_text : V > '\n' ? '\n' : 0;
    for (int i = 0; i < SAMPLE_TOKENS; i++) {
        int64_t padded = (length + tp - 1) / tp * tp; // tokens behind `length` are not seen by those before
        gpt_forward(&t->model, t->inputs, NULL, padded, 1, NULL);
        gpt_next_logits(&t->model, length - 1, 0, logits);
        int32_t token =
            draw(logits, V, random_uniform((uint64_t)t->o.seed, SAMPLE_STREAM + (uint64_t)step, (uint64_t)i));
        int bytes = vocabulary_bytes(t->words, token, text);
        for (int j = 0; j < bytes; j++, text++)
            if (*text == 0) *text = ' '; // a text ends at a byte 0
        if (length == T) {
            length = T / 2;
            memmove(t->inputs, t->inputs + T - length, (size_t)length * sizeof *t->inputs);
        }
        t->inputs[length++] = token;
    }
    *text = 0;
    free(logits);
}

void evaluate_sample(trainer *t, int64_t step) {
    static char text[SAMPLE_TOKENS * 256];
    if (t->o.seq < 2) return;
    generate(t, step, text);
    if (!trainer_root(t)) return;
    progress_break();
    printf("step %5lld  sample\n%s\n---\n", (long long)step, text);
    fflush(stdout);
    log_begin(t->log, "sample");
    log_int(t->log, "step", step);
    log_text(t->log, "text", text);
    log_end(t->log);
}
