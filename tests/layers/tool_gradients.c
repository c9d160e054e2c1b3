// Loss and gradients of the whole model on the first samples of a token file, for comparison with an
// independent reference:
//     tool_gradients MODEL TOKENS T B tp dp strategy overlap recompute apart OUT
// Sample i of the file belongs to replica i / B. apart 1: buffers that share memory (model.c) have their own, which changes no bit.
// Prints `loss %.17g`; OUT is a model file whose "weights" are the gradients of the mean loss over all B · dp samples. Gradients
// take the path of training: backward, then reduction over tp and dp by zero.h.
#include "../../commfuse/base/die.h"
#include "../../data/model_file.h"
#include "../../data/tokens.h"
#include "../../layers/state.h"
#include "../../layers/step.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// One step with beta1 = 0 leaves the reduced gradient in the first moments of the owned shards; those are then gathered as if they
// were weights.
static void gradients_into_weights(gpt *g) {
    parameters *p = &g->params;
    double *norm2 = cf_alloc((int64_t)sizeof *norm2, "test");
    cf_zero(p->weight, p->elements * (int64_t)sizeof(real), g->context->stream);
    optimizer_settings keep = {.lr = 0, .beta1 = 0, .beta2 = 0, .eps = 1, .scale = 1, .step = 1};
    zero_finish_gradients(&g->zero, &g->embedding, norm2);
    zero_update_embeddings_and_vectors(&g->zero, keep);
    zero_update_layers(&g->zero);
    zero_finish_weights(&g->zero);
    for (int i = 0; i < p->buckets; i++) {
        const param_bucket *b = &p->bucket[i];
        int owner = b->group->size == 1 ? 0 : b->group->rank;
        real *weights = p->weight + b->first + owner * b->shard;
        for (int64_t k = 0; k < b->shard; k++) weights[k] = real_of(g->zero.state[0][b->owned_before + k]);
        cf_fuse *gather = g->zero.bucket[i].gather;
        if (gather) cf_fuse_run(gather, p->weight + b->first, b->shard, 1, NULL, NULL, -1);
    }
    cf_free(norm2);
}

int main(int argc, char **argv) {
    if (argc != 12) cf_die_together("see the top of this file", "%d arguments, 11 are needed", argc - 1);
    int64_t T = atoll(argv[3]), B = atoll(argv[4]);
    cf_transport *transport = cf_transport_create("auto", &argc, &argv, 60);
    cf_context context = {.transport = transport, .stream = cf_stream_create(), .trace = cf_trace_create(), .step = 0};
    if (transport->size % 2 == 0) transport->ranks_per_host = 2; // of four ranks two levels
    cf_mesh mesh;
    cf_mesh_init(&mesh, transport->size, transport->rank, atoi(argv[5]), atoi(argv[6]));
    cf_mesh_bind(transport, &mesh);
    cf_device_threads(1);

    model_file *file = model_file_open(argv[1]);
    gpt_shape f = file->shape;
    static gpt model;
    gpt_setup setup = {.shape = f, .optimizer = optimizer_find("adamw"), .T = T, .B = B};
    setup.strategy = strcmp(argv[7], "up") == 0 ? STRATEGY_UP : STRATEGY_TPSP;
    setup.recompute = atoi(argv[9]) != 0, setup.apart = atoi(argv[10]) != 0;
    if (!overlap_parse(&setup.how, argv[8], "preset", -1, "preset")) cf_die(NULL, "no schedule %s", argv[8]);
    gpt_create(&model, &context, &mesh, &setup);
    params_read(&model.params, model_file_read, file, context.stream);
    zero_start(&model.zero);

    int32_t *inputs = model.host_inputs, *targets = model.host_targets;
    tokens *data = tokens_open(argv[2], T, f.V);
    for (int64_t b = 0; b < B; b++) tokens_load(data, mesh.dp_group.rank * B + b, b, B, inputs, targets);
    double count = (double)(T * B * mesh.dp);
    double loss = 0;
    gpt_begin_forward(&model, inputs, targets, T, B);
    gpt_forward(&model, 1 / count);
    cf_copy(&loss, model.loss, (int64_t)sizeof loss, context.stream);
    loss = cf_allreduce_sum(context.transport, loss) / count;
    gpt_backward(&model, true, true);
    gradients_into_weights(&model);

    bool root = mesh.world_group.rank == 0;
    if (root) printf("loss %.17g\n", loss);
    model_writer *writer = root ? model_writer_open(argv[11], &f, false) : NULL;
    if (mesh.dp_group.rank == 0) gpt_collect(&model, model_writer_append, writer);
    if (writer) model_writer_commit(writer);
    tokens_close(data);
    model_file_close(file);
    gpt_free(&model);
    cf_trace_free(context.trace);
    cf_stream_free(context.stream);
    transport->close(transport);
    cf_mesh_free(&mesh);
    return 0;
}
