// See model.h. When fewer than B sequences are left for each replica, passes are smaller; in the last one some replicas repeat
// sequences, which are not counted. So the result depends neither on the mesh nor on B.
#include "model.h"
#include "../commfuse/base/die.h"
#include <stdlib.h>
#include <string.h>

static void *table_of(int64_t count, size_t size) {
    return cf_host_alloc(count, size, "losses of sequences");
}

// sums[b]: of the losses of tokens [first[b], end[b]) of sequence b in this rank's shard. losses (Ts, B): scratch.
static void sum_losses(gpt *g, const int64_t *first, const int64_t *end, accum *losses, double *sums) {
    int64_t Ts = g->pass.Ts, B = g->pass.B, from = g->mesh->tp_group.rank * Ts;
    cf_copy(losses, g->losses + g->split->rank * Ts * B, Ts * B * (int64_t)sizeof *losses, g->context->stream);
    cf_stream_sync(g->context->stream);
    for (int64_t b = 0; b < B; b++) {
        sums[b] = 0;
        for (int64_t t = larger(first[b] - from, 0); t < Ts && from + t < end[b]; t++) sums[b] += (double)losses[t * B + b];
    }
}

double *gpt_evaluate(gpt *g, evaluate_load *load, void *argument, int64_t count, int64_t length, int64_t B) {
    int32_t *inputs = g->host_inputs, *targets = g->host_targets;
    const int64_t T = gpt_pass_tokens(g, length), dp = g->mesh->dp, ranks = g->mesh->world_group.size;
    int64_t *first = table_of(B, sizeof *first), *end = table_of(B, sizeof *end);
    double *sums = table_of(count, sizeof *sums), *mine = table_of(B, sizeof *mine), *all = table_of(ranks * B, sizeof *all);
    accum *losses = table_of(T / g->mesh->tp * B, sizeof *losses);
    for (int64_t done = 0, n; done < count; done += n * dp) { // n sequences of each replica
        n = larger(smaller((count - done) / dp, B), 1);
        memset(inputs, 0, (size_t)(T * n) * sizeof *inputs);
        memset(targets, 0, (size_t)(T * n) * sizeof *targets);
        for (int64_t b = 0; b < n; b++) {
            first[b] = 0, end[b] = length;
            load(argument, (done + g->mesh->dp_group.rank * n + b) % count, b, n, inputs, targets, &first[b], &end[b]);
        }
        gpt_begin_forward(g, inputs, targets, T, n);
        gpt_forward(g, 0);
        sum_losses(g, first, end, losses, mine);
        cf_allgather_host(g->context->transport, mine, all, B * (int64_t)sizeof *mine);
        for (int64_t rank = 0; rank < ranks; rank++) // each rank of a replica has the losses of its shard
            for (int64_t b = 0; b < n; b++) {
                const int64_t number = done + rank / g->mesh->tp * n + b;
                if (number < count) sums[number] += all[rank * B + b];
            }
    }
    free(first), free(end), free(mine), free(all), free(losses);
    return sums;
}
