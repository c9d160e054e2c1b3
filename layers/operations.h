// All operations of a step, for the tuner and --dry-run; the memory that they take.
#pragma once
#include "../commfuse/tune.h"
#include "step.h"

// Calls visit for each operation of a training step, except those of zero.h and the step.
void gpt_operations(gpt *g, visit_operation *visit, void *argument);
cf_tuner *gpt_create_tuner(gpt *g); // of its operations (commfuse/tune.h)

// Would the model, and its optimizer, take at most three quarters of the free memory on every rank? Collective. Allocates nothing;
// call it before gpt_create.
bool gpt_may_keep(cf_context *context, const cf_mesh *mesh, const gpt_setup *setup);

// --dry-run: memory per purpose, every schedule of rank 0, and how much a step posts.
void dry_run(gpt_step *s, FILE *out);
