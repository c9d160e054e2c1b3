// How the model's operations communicate, and whom it calls for weights and gradients. The optimizer decides who owns
// each shard and when buckets (params.h) travel; it fills the hooks.
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

// NULL functions: no optimizer; weights are complete and gradients stay local.
typedef struct gpt_hooks {
    void *argument;
    bool (*pending)(void *argument, int bucket); // only this rank's shard of its weights is complete
    void (*need)(void *argument, int bucket);    // its weights are about to be used
    void (*meanwhile)(void *argument);           // forward would only wait for transfers: do other work now
    void (*ready)(void *argument, int bucket);   // its gradient is complete
    // Is the bucket's gradient computed inside its reduce-scatter? If so, wgrad computes rows of it: span->row and
    // span->rows count rows of the local matrix, span->data is their address.
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
