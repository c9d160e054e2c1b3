// Going on from a checkpoint, whatever mesh it was saved on.
#ifndef RESUME_H
#define RESUME_H

#include "../layers/params.h"
#include "exchange.h"
#include "manifest.h"
#include "options.h"
#include "tokens.h"

CF_EXTERN_C_BEGIN

// Collective. The newest checkpoint in `out` of a step below `below` whose files are all true to their hashes, each
// read by one of the ranks. NULL: there is none. Rank 0 prints which newer ones were passed over and why, and has
// *passed_over = true if any was.
manifest *resume_find(const rank_exchange *all, const char *out, int64_t below, bool *passed_over);
// There are some, but none is sound: dies, unless the run shall begin `anew`.
void resume_nothing_sound(const char *out, bool anew);

// What a manifest records of a run beside its options. Its tokens are NULL if it has none.
typedef struct run_facts {
    const gpt_shape *shape;
    const tokens *train;
    const char *version, *run;
    const char *plan; // as data/plan.h prints it; NULL: none has been found yet
    int64_t skipped;
    bool watched; // validation and samples of this step are done
} run_facts;
struct cJSON *resume_describe(const options *o, const run_facts *facts);

// Dies together, naming every option that would change the run, unless o->force; what gives weights another shape cannot
// be forced.
void resume_compare(const options *o, const run_facts *facts, const manifest *m);

// A run's name, by which its log is known: that of the checkpoint; or a new one, if it has none or is NULL.
enum { RUN_NAME = 17 };
void resume_name(const manifest *m, char name[RUN_NAME]);

// A number in a manifest; `missing` if it is not there.
int64_t resume_number(const manifest *m, const char *name, int64_t missing);

CF_EXTERN_C_END
#endif
