// What follows from the options alone.
#ifndef RECIPE_H
#define RECIPE_H

#include "options.h"

CF_EXTERN_C_BEGIN

// Element types are fixed when layers are compiled: `dtype` in this program. If o asks for the other one, becomes the program
// `other` beside this one.
void recipe_choose_program(options *o, const char *dtype, const char *other, char **argv);
// Dies together if options do not fit each other. --route and --slices alone mean --overlap commfuse.
void recipe_check(options *o);
// --tp, --dp and --slices where they were not given, for a run of so many ranks. Returns the ranks of the mesh: a dry run may have more.
int recipe_mesh(options *o, int ranks);
// Micro-batches of a step; o->batch 0 becomes one. Dies together if it is no whole number. --dp is known.
int recipe_accumulation(options *o);

double recipe_learning_rate(const options *o, int64_t step);
bool recipe_due(int64_t every, int64_t step); // 0: never
// Do samples, or HellaSwag, come before this step, or after the last one?
bool recipe_samples(const options *o, int64_t step, bool last);
bool recipe_asks(const options *o, int64_t step, bool last);
// Does a validation, a sample or a save come before the next step, or does the run end?
bool recipe_interrupts(const options *o, int64_t step);

CF_EXTERN_C_END
#endif
