// Finds, while training, how each operation travels best on this machine. All ways of an operation (choice.h) do the same work,
// so the steps that try them are steps of the training.
//
//   warm up  two steps by what the arithmetic says (cf_choose)
//   search   in each step every operation takes another way; those that are far from the best drop out, the others are tried
//            twice more. An operation keeps its first way unless another one is shorter by more than the measurements vary
//   compare  whole steps in turns: the plan found, the plan of the arithmetic, all operations natively and blocking (none), all
//            in native slices, all in rounds of one, two and four slices; after a step of each only the plan found and the two
//            best others go on. The plan found is taken, unless another is shorter by more than a hundredth of a step and by
//            more than the measurements vary
//
// What counts for an operation is the time that it adds to the compute stream, waiting included: of each rank the median over
// layers, of these the maximum. Ranks exchange them after each step, so all decide alike. It takes at most CF_TRIAL_STEPS steps.
// A plan that is known from the start is only compared.
#ifndef CF_TUNE_H
#define CF_TUNE_H

#include "fuse.h"
#include "extern_c.h"

CF_EXTERN_C_BEGIN

enum { CF_TRIAL_STEPS = 40 };

typedef struct cf_tuner cf_tuner;

typedef struct cf_tuned { // an operation of the plan
    const char *name;     // "forward reduce-scatter mlp.fc2"
    cf_choice choice;
    double ms, first_ms,
        native_ms; // what it adds to the stream: so, by the first way, natively and blocking. NAN: not tried
} cf_tuned;

typedef struct cf_compared { // a plan that took part in the comparison
    const char *name;
    double step_ms; // median
    bool taken;
} cf_compared;

cf_tuner *cf_tuner_create(cf_context *context, const cf_group *world); // all ranks of the transport
void cf_tuner_free(cf_tuner *tuner);
// An operation that computes, between create and start; all ranks add the same in the same order. place: "forward", up to a
// comma; with kind and name it names the operation.
void cf_tuner_add(cf_tuner *tuner, const char *place, cf_fuse *fuse);

// The plan. A choice that is set, of an operation of that name, holds from the start.
int cf_tuner_operations(const cf_tuner *tuner);
cf_tuned cf_tuner_operation(const cf_tuner *tuner, int operation);
bool cf_tuner_can(const cf_tuner *tuner, cf_choice choice); // native collectives are not to be had everywhere
void cf_tuner_set(cf_tuner *tuner, const char *name, cf_choice choice);

// After the last add and set: gives the operations their ways. search: try them in the steps that follow, or, where choices
// have been set, compare. Otherwise the plan stays as it is. Ways whose staging memory would not fit are left out.
void cf_tuner_start(cf_tuner *tuner, bool search);
int cf_tuner_left_out(const cf_tuner *tuner); // ways of all operations
// A step begins, on all ranks, with what comes on the stream from here on; ends the one before if end() has not.
void cf_tuner_begin_step(cf_tuner *tuner);
void cf_tuner_end_step(cf_tuner *tuner); // before something else than a step follows
bool cf_tuner_trying(const cf_tuner *tuner);

int cf_tuner_plans(const cf_tuner *tuner);
cf_compared cf_tuner_plan(const cf_tuner *tuner, int plan);

CF_EXTERN_C_END
#endif
