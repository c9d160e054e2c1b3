// See step.h. Every element of every tensor is owned by one rank of the world, so the global norm is the sum of the ranks' sums,
// added in rank order.
#include "step.h"

enum { LOSS, NORM2, VALUES }; // places in a rank's figures

// --- life ---

void gpt_step_create(gpt_step *s, gpt *model) {
    const cf_group *world = &model->mesh->world_group;
    const int64_t figures = world->size * REPORT;
    cf_fuse_config config = overlap_config(&model->setup.how, "report", world, CF_ALLGATHER, CF_NO_COMPUTE, CF_FP64, REPORT);
    if (config.algorithm && config.algorithm->bound) config.algorithm = cf_algorithm_find("once"); // figures are always sent
    *s = (gpt_step){.model = model};
    s->device = cf_alloc(figures * (int64_t)sizeof(double), "optimizer state");
    s->all = cf_host_alloc(figures, sizeof *s->all, "figures of all ranks");
    s->gather = cf_fuse_create(model->context, config);
}

void gpt_step_free(gpt_step *s) {
    cf_fuse_free(s->gather);
    cf_free(s->device);
    free(s->all);
}

// --- reduce ---

// Finishes the reduction of all gradients. Fills loss, norm and values of the result, from those of all ranks.
static void finish_gradients(gpt_step *s, const step_batch *batch, double tokens) {
    gpt *g = s->model;
    const cf_group *world = &g->mesh->world_group;
    cf_stream *stream = g->context->stream;
    double *mine = s->device + world->rank * REPORT, values[REPORT_VALUES] = {0}, loss = 0, norm2 = 0;
    if (batch->report) batch->report(batch->reporter, values);
    cf_copy(&mine[LOSS], g->loss, (int64_t)sizeof *mine, stream);
    cf_zero(&mine[NORM2], (int64_t)sizeof *mine, stream);
    cf_copy(&mine[VALUES], values, (int64_t)sizeof values, stream);
    zero_finish_gradients(&g->zero, &g->embedding, &mine[NORM2]);
    cf_fuse_run(s->gather, s->device, 1, REPORT, NULL, NULL, -1);
    cf_copy(s->all, s->device, world->size * REPORT * (int64_t)sizeof *s->all, stream);
    cf_stream_sync(stream); // here, and for all tokens (lookup.c), the host waits for the device
    for (int rank = 0; rank < world->size; rank++) loss += s->all[rank * REPORT + LOSS], norm2 += s->all[rank * REPORT + NORM2];
    s->result = (step_result){.loss = loss / tokens, .grad_norm = sqrt(norm2), .values = s->all + VALUES};
    s->result.finite = isfinite(s->result.loss) && isfinite(s->result.grad_norm);
}

void gpt_step_die(gpt_step *s, const char *hint) {
    const step_result *r = &s->result;
    gpt *g = s->model;
    const int ranks = g->mesh->world_group.size, step = g->context->step;
    const int64_t mine = zero_nonfinite(&g->zero, s->device);
    const int64_t *all = cf_allgather_alloc(g->context->transport, &mine, (int64_t)sizeof mine);
    char of_layer[32] = "", what[128] = "not finite, though every gradient tensor is";
    int rank = 0;
    while (rank < ranks && all[rank] < 0) rank++;
    if (rank < ranks) {
        const int tensor = (int)(all[rank] % TENSORS), layer = (int)(all[rank] / TENSORS);
        if (params_layers(&g->params.shape, tensor) > 1) snprintf(of_layer, sizeof of_layer, " of layer %d", layer);
        snprintf(what, sizeof what, "the gradient of %s%s on rank %d is not finite", params_name(tensor), of_layer, rank);
    }
    cf_die_together(hint, "step %d: loss %g, gradient norm %g: %s", step, r->loss, r->grad_norm, what);
}

// --- the step ---

const step_result *gpt_train_step(gpt_step *s, const step_batch *batch, optimizer_settings settings, double clip) {
    gpt *g = s->model;
    const step_result *r = &s->result;
    const double tokens = (double)(batch->micro_batches * batch->T * batch->B * g->mesh->dp);
    cf_zero(g->loss, (int64_t)sizeof *g->loss, g->context->stream);
    for (int64_t micro = 0; micro < batch->micro_batches; micro++) {
        batch->load(batch->loader, micro, g->host_inputs, g->host_targets);
        gpt_begin_forward(g, g->host_inputs, g->host_targets, batch->T, batch->B); // and updates the layers, of the step before
        gpt_forward(g, 1 / tokens);
        gpt_backward(g, micro == 0, micro == batch->micro_batches - 1);
    }
    finish_gradients(s, batch, tokens);
    settings.scale = clip > 0 && r->grad_norm > clip ? clip / r->grad_norm : 1;
    if (r->finite) zero_update_embeddings_and_vectors(&g->zero, settings);
    return r;
}

void gpt_finish_step(gpt_step *s) {
    zero_update_layers(&s->model->zero);
    homes_finish(&s->model->zero);
}

void gpt_step_operations(gpt_step *s, visit_operation *visit, void *argument) {
    zero_operations(&s->model->zero, visit, argument);
    visit(argument, "figures of all ranks", s->gather, 1);
}
