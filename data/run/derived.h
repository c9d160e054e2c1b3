// Values that follow from the options alone.
#pragma once
#include "../../commfuse/fuse.h"
#include "options.h"

// A program is compiled for one element type, here `dtype`. If opt has the other type, this process becomes the program `other` of
// the same directory.
void derived_choose_program(options *opt, const char *dtype, const char *other, char **argv);
const char *derived_own_path(void); // this program's file; "": unknown
// Dies together if options contradict each other.
void derived_check(options *opt);
// The schedule that --overlap names; its algorithm is NULL for auto.
cf_choice derived_schedule(const options *opt);
// The mesh, and the groups of a transport that is open. Sets --tp, --dp and --batch if they are 0. In a dry run of one process the
// mesh may have more ranks than there are: this process is then its rank 0.
void derived_mesh(options *opt, cf_transport *transport, cf_mesh *mesh);
// Streams, threads, and the costs that ranks agree on. Sets --threads if it is 0. cf_context_stop() ends it.
void derived_context(options *opt, cf_transport *transport, const cf_mesh *mesh, cf_context *context, const char *costs);

// The step whose data step `step` takes: as many later as --skip-steps (a valid list) leaves out before it.
int64_t derived_data_step(const char *skipped, int64_t step);
// Have two lists the same ranges in the first `steps` steps?
bool derived_same_data(const char *skipped, const char *other, int64_t steps);
double derived_learning_rate(const options *opt, int64_t step);
bool derived_due(int64_t every, int64_t step);                      // 0: never
int64_t derived_val_sequences(const options *opt, int64_t samples); // of a validation
// Whether a validation, a sample, a save or the end of the run comes before the next step.
bool derived_pause_due(const options *opt, int64_t step);
