// Values that follow from the options alone.
#pragma once
#include "../../commfuse/fuse.h"
#include "options.h"

// A program is compiled for one element type, here `dtype`. If o has the other type, this process becomes the program `other` of
// the same directory.
void recipe_choose_program(options *o, const char *dtype, const char *other, char **argv);
// Dies together if options contradict each other.
void recipe_check(options *o);
// The schedule that --overlap names; its algorithm is NULL for auto.
cf_choice recipe_schedule(const options *o);
// The mesh, and the groups of a transport that is open. Sets --tp, --dp and --batch if they are 0. In a dry run of one process the
// mesh may have more ranks than there are: this process is then its rank 0.
void recipe_mesh(options *o, cf_transport *transport, cf_mesh *mesh);
// Streams, threads, and the costs that ranks agree on. Sets --threads if it is 0. cf_context_stop() ends it.
void recipe_context(options *o, cf_transport *transport, const cf_mesh *mesh, cf_context *context);

double recipe_learning_rate(const options *o, int64_t step);
bool recipe_due(int64_t every, int64_t step);                    // 0: never
int64_t recipe_val_sequences(const options *o, int64_t samples); // of a validation
// Whether samples, or HellaSwag, are due before this step, or after the last step (last).
bool recipe_sample_due(const options *o, int64_t step, bool last);
bool recipe_hellaswag_due(const options *o, int64_t step, bool last);
// Whether a validation, a sample, a save or the end of the run comes before the next step.
bool recipe_pause_due(const options *o, int64_t step);
