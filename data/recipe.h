// What follows from the options alone.
#ifndef RECIPE_H
#define RECIPE_H

#include "options.h"

CF_EXTERN_C_BEGIN

// Layers are compiled for one type of elements: `dtype` in this program. If o asks for the other one, this process becomes the
// program `other`, which is in the same directory.
void recipe_choose_program(options *o, const char *dtype, const char *other, char **argv);
// Dies together if options contradict each other. --route and --slices alone mean --overlap commfuse.
void recipe_check(options *o);
// Sets --tp, --dp and --slices where they were not given. Returns the ranks of the mesh: in a dry run they may be more than `ranks`.
int recipe_mesh(options *o, int ranks);
// Micro-batches in a step; o->batch 0 becomes one. Dies together if that is no whole number. After recipe_mesh().
int recipe_accumulation(options *o);

double recipe_learning_rate(const options *o, int64_t step);
bool recipe_due(int64_t every, int64_t step); // 0: never
// Whether samples, or HellaSwag, are due before this step, or after the last one.
bool recipe_sample_due(const options *o, int64_t step, bool last);
bool recipe_hellaswag_due(const options *o, int64_t step, bool last);
// Whether a validation, a sample, a save or the end of the run comes before the next step.
bool recipe_pause_due(const options *o, int64_t step);

CF_EXTERN_C_END
#endif
