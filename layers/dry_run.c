// What --dry-run prints of a model: memory, how gradients and weights travel, and the schedule of every operation.
#include "optimizer.h"
#include <stdlib.h>
#include <string.h>

typedef struct tally { // what rank 0 posts in a step of one micro-batch
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
    const cf_fuse_plan *plan = cf_fuse_get_plan(fuse);
    if (strcmp(plan->group->name, "self") == 0) return; // this rank alone: nothing ever travels
    char *text = cf_schedule_print(cf_fuse_schedule(fuse));
    fprintf(out, "\n%s (%s, over %s, %.2f MiB per shard)\n%s", plan->name, place, plan->group->name,
            (double)(plan->capacity * cf_dtype_size(plan->dtype)) / 1048576, text);
    free(text);
}

void dry_run(gpt *g, zero_optimizer *o, FILE *out) {
    tally sum = {0, 0, 0};
    fprintf(out, "\n");
    cf_memory_report(out);
    if (strcmp(cf_device_name(), "CPU") != 0)
        fprintf(out, "more is taken when the run begins: for matrix products 32 MiB a stream, for "
                     "attention's backward 2 "
                     "bytes for each query, key and head of a micro-batch at most, for exchanges by ipc 32 "
                     "MiB for each "
                     "other member of a group, for connections by nccl what it says\n");
    fprintf(out, "\n");
    gpt_explain(g, out);
    gpt_operations(g, count_operation, &sum);
    optimizer_operations(o, count_operation, &sum);
    fprintf(out, "\nA step of one micro-batch: %lld exchanges of rank 0 in %lld units, %lld native collectives\n",
            (long long)sum.exchanges, (long long)sum.units, (long long)sum.collectives);
    fprintf(out, "\nSchedules of rank 0; steps marked ' are taken when the operation is finished\n");
    gpt_operations(g, print_operation, out);
    optimizer_operations(o, print_operation, out);
}
