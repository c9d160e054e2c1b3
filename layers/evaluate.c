// See evaluate.h. When fewer than B sequences are left for each replica, passes are smaller; in the last one some replicas repeat
// sequences, which are not counted. So the result depends neither on the mesh nor on B.
#include "evaluate.h"

// The sum of the losses of sequences [0, counted) of the pass in this rank's shard. losses (Ts, B): scratch.
static double sum_losses(const gpt *g, int64_t counted, accum *losses) {
    const int64_t Ts = g->pass.Ts, B = g->pass.B;
    double sum = 0;
    cf_copy(losses, g->losses + g->split->rank * Ts * B, Ts * B * (int64_t)sizeof *losses, g->context->stream);
    cf_stream_sync(g->context->stream);
    for (int64_t t = 0; t < Ts; t++)
        for (int64_t b = 0; b < counted; b++) sum += (double)losses[t * B + b];
    return sum;
}

double gpt_evaluate(gpt *g, evaluate_load *load, void *argument, int64_t count, int64_t B) {
    const int64_t T = g->setup.T, dp = g->mesh->dp;
    double sum = 0;
    accum *losses = cf_host_alloc(T / g->mesh->tp * B, sizeof *losses, "losses of sequences");
    for (int64_t done = 0, n; done < count; done += n * dp) { // n sequences of each replica
        n = larger(smaller((count - done) / dp, B), 1);
        const int64_t first = done + g->mesh->dp_group.rank * n, counted = larger(smaller(count - first, n), 0);
        for (int64_t b = 0; b < n; b++) load(argument, (first + b) % count, b, n, g->host_inputs, g->host_targets);
        gpt_begin_forward(g, g->host_inputs, g->host_targets, T, n);
        gpt_forward(g, 0);
        // In every pass, so that no replica is far ahead of another and waits for it longer than --timeout allows.
        sum += cf_allreduce_sum(g->context->transport, sum_losses(g, counted, losses));
    }
    free(losses);
    return sum / (double)(count * T);
}
