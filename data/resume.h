// What a manifest says of the run that it belongs to, and whether another run may go on from there.
#ifndef RESUME_H
#define RESUME_H

#include "../layers/params.h"
#include "manifest.h"
#include "options.h"
#include "tokens.h"

CF_EXTERN_C_BEGIN

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
