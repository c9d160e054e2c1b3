// See operations.h. --dry-run prints memory, how gradients and weights are communicated, and schedules.
#include "operations.h"

void gpt_operations(gpt *g, visit_operation *visit, void *argument) {
    const lookup *l = &g->embedding;
    const int64_t L = g->params.shape.L;
    const struct {
        const char *place;
        cf_fuse *fuse; // NULL: this run has none
        int64_t times;
    } all[] = {
        {"tokens of all ranks", l->ids, 1},  {"rows, during an update", l->fetch, 1},
        {"forward", l->forward, 1},          {"forward", g->qkv.forward, L},
        {"forward", g->attproj.forward, L},  {"forward", g->fc.forward, L},
        {"forward", g->fcproj.forward, L},   {"forward", g->head.forward, 1},
        {"forward", g->gather_stats, 1},     {"backward", g->head.backward, 1},
        {"backward", g->fcproj.backward, L}, {"backward", g->fc.gather, L},
        {"backward", g->fc.backward, L},     {"backward", g->attproj.backward, L},
        {"backward", g->qkv.gather, L},      {"backward", g->qkv.backward, L},
        {"backward", l->backward, 1},        {"rows of gradient, during the last weight gradient", l->deliver, 1},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].fuse) visit(argument, all[i].place, all[i].fuse, all[i].times);
}

static void add_operation(void *tuner, const char *place, cf_fuse *fuse, int64_t times) {
    (void)times;
    cf_tuner_add(tuner, place, fuse);
}

cf_tuner *gpt_create_tuner(gpt *g) {
    cf_tuner *tuner = cf_tuner_create(g->context, &g->mesh->world_group);
    gpt_operations(g, add_operation, tuner);
    return tuner;
}

// --- memory ---

bool gpt_may_keep(cf_context *context, const cf_mesh *mesh, const gpt_setup *setup) {
    gpt model;
    gpt_step step;
    cf_transport *t = context->transport;
    const bool reserved = cf_device_reserve_only(true);
    gpt_create(&model, context, mesh, setup);
    gpt_step_create(&step, &model);
    const int64_t taken = cf_memory_bytes();
    gpt_step_free(&step);
    gpt_free(&model);
    cf_device_reserve_only(reserved);
    return cf_allreduce_min(t, cf_device_memory(t->local_size) / 4 * 3 >= taken) > 0;
}

// --- --dry-run ---

typedef struct tally { // posted by rank 0 in a step of one micro-batch
    int64_t exchanges, units, collectives;
} tally;

static void count_operation(void *argument, const char *place, cf_fuse *fuse, int64_t times) {
    (void)place;
    tally *sum = argument;
    const cf_schedule *s = cf_fuse_schedule(fuse);
    for (int i = 0; i < s->count; i++) {
        sum->exchanges += times * (s->step[i].kind == CF_EXCHANGE);
        sum->units += times * (s->step[i].kind == CF_EXCHANGE && !s->step[i].joined);
        sum->collectives += times * (s->step[i].kind == CF_COLLECTIVE);
    }
}

static void print_operation(void *argument, const char *place, cf_fuse *fuse, int64_t times) {
    (void)times;
    FILE *out = argument;
    const cf_fuse_config *config = cf_fuse_get_config(fuse);
    if (strcmp(config->group->name, "self") == 0) return; // this rank alone: nothing is communicated
    char *text = cf_schedule_print(cf_fuse_schedule(fuse));
    fprintf(out, "\n%s (%s, over %s, %.2f MiB per shard)\n%s", config->name, place, config->group->name,
            (double)(config->capacity * cf_dtype_size(config->dtype)) / 1048576, text);
    free(text);
}

void dry_run(gpt_step *s, FILE *out) {
    gpt *g = s->model;
    tally sum = {0, 0, 0};
    fprintf(out, "\n");
    cf_memory_report(out);
    if (strcmp(cf_device_name(), "CPU") != 0)
        fprintf(
            out,
            "not counted, allocated when the run begins: 32 MiB a stream for matrix products; for attention's backward at\n"
            "most 2 bytes for each query, key and head of a micro-batch, 4 for each channel of it if heads share keys, without\n"
            "cuDNN (fp32) 256 MiB, or 24 bytes for each query and key of a head if that is more; for exchanges by ipc 32 MiB\n"
            "for each other member of a group; for connections by nccl what it prints\n");
    fprintf(out, "\n");
    zero_explain(&g->zero, out);
    fprintf(out, "  ");
    lookup_explain(&g->embedding, out);
    homes_explain(g->zero.homes, out);
    gpt_operations(g, count_operation, &sum);
    gpt_step_operations(s, count_operation, &sum);
    fprintf(out, "\nA step of one micro-batch: %ld exchanges of rank 0 in %ld units, %ld native collectives\n", sum.exchanges,
            sum.units, sum.collectives);
    fprintf(out, "\nSchedules of rank 0; steps marked ' run when the operation is finished\n");
    gpt_operations(g, print_operation, out);
    gpt_step_operations(s, print_operation, out);
}
