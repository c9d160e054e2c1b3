// What a model needs to know of the world around it: how its operations communicate, and what becomes of its weights and
// their gradients. Who owns what, and when buckets (params.h) travel, is the optimizer's affair; it fills the hooks.
#ifndef HOOKS_H
#define HOOKS_H

#include "../commfuse/fuse.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct overlap { // how every operation of the model communicates
    cf_mode mode;
    cf_route route;
    int slices;
} overlap;

// An operation for --dry-run: where in the model it is, and how many times it runs in a step of one micro-batch.
typedef void visit_operation(void *argument, const char *place, const cf_fuse *fuse, int64_t times);

// NULL functions: nobody takes part; weights are here and gradients stay here.
typedef struct gpt_hooks {
    void *argument;
    bool (*pending)(void *argument, int bucket); // only the own shard of its weights is sure to be here
    void (*need)(void *argument, int bucket);    // its weights are about to be used
    void (*meanwhile)(void *argument); // forward has only transfers to wait for: do what else there is
    void (*ready)(void *argument, int bucket); // its gradient is complete
    // Does the bucket take its gradient as a computation? If so, wgrad computes rows of it: span->row and
    // span->rows count rows of the local matrix, span->data is where they lie.
    bool (*fuses)(void *argument, int bucket);
    void (*compute)(void *argument, int bucket, cf_compute *wgrad, void *job); // job may go when it returns
} gpt_hooks;

typedef struct backward_pass {
    gpt_hooks hooks;
    bool first; // this micro-batch begins the gradients
    bool last;  // this one completes them
} backward_pass;

#ifdef __cplusplus
}
#endif
#endif
