// Values that follow from the options alone.
#pragma once
#include "../commfuse/choice.h"
#include "options.h"

// A program is compiled for one element type, here `dtype`. If o has the other type, this process becomes the program `other` of
// the same directory.
void recipe_choose_program(options *o, const char *dtype, const char *other, char **argv);
// Dies together if options contradict each other.
void recipe_check(options *o);
// The schedule that --overlap names; its algorithm is NULL for auto.
cf_choice recipe_schedule(const options *o);
// Sets --tp and --dp if they are 0. Returns the ranks of the mesh, in a dry run perhaps more than `ranks`.
int recipe_mesh(options *o, int ranks);
// Micro-batches in a step; sets o->batch if it is 0. Dies together if that is not a whole number. After recipe_mesh().
int recipe_accumulation(options *o);

double recipe_learning_rate(const options *o, int64_t step);
bool recipe_due(int64_t every, int64_t step); // 0: never
// Whether samples, or HellaSwag, are due before this step, or after the last step (last).
bool recipe_sample_due(const options *o, int64_t step, bool last);
bool recipe_hellaswag_due(const options *o, int64_t step, bool last);
// Whether a validation, a sample, a save or the end of the run comes before the next step.
bool recipe_pause_due(const options *o, int64_t step);
