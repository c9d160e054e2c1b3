// Finds the best choice (choice.h) for each operation while training. All choices of an operation compute the same, so the steps
// that try them are ordinary training steps.
//
//   warm up  two steps with the predicted choices (cf_choose); on GPUs as many as an operation has choices, which it runs in turn
//   search   in each step every operation runs another of its choices. Once all were tried, only the predicted one and the two
//            best others are measured twice more. Another choice replaces the predicted one if it is shorter by more than 2 % and
//            by more than the measurements vary
//   compare  whole plans take turns, a step each: the plan found, the predicted one, and each of none, slice, direct and ring (or the
//            rounds that suit better) with 1, 2 and 4 slices for all operations. After one step of each only the found and the two
//            best others go on. It stays, unless another saves more than 1 % of a step and more than the measurements vary
//
// An operation is judged by the time that it adds to the compute stream, waiting included: the median over layers on each rank,
// then the maximum over ranks. Ranks exchange these times after each step, so all decide the same. All of it takes at most
// CF_TRIAL_STEPS steps. If the choices are given from the start (cf_tuner_set), only the comparison runs.
#pragma once
#include "fuse.h"

CF_EXTERN_C_BEGIN

enum { CF_TRIAL_STEPS = 54, CF_PLANS = 8 };

typedef struct cf_tuner cf_tuner;

typedef struct cf_tuned { // an operation of the plan
    const char *name;     // "forward reduce-scatter mlp.fc2"
    cf_choice choice;
    double ms, first_ms, native_ms; // on the compute stream: with this choice, the predicted one, `none`. NAN: not measured
} cf_tuned;

typedef struct cf_compared { // a plan that was compared
    const char *name;
    double step_ms; // median
    bool taken;     // the winner
} cf_compared;

cf_tuner *cf_tuner_create(cf_context *context, const cf_group *world); // world: all ranks of the transport
void cf_tuner_free(cf_tuner *tuner);                                   // NULL is allowed
// Adds an operation, between create and start; all ranks add the same ones in the same order. One without computation, or on one
// rank, is ignored. Its name in the plan is `pass` up to a comma ("forward"), its kind and its own name.
void cf_tuner_add(cf_tuner *tuner, const char *pass, cf_fuse *fuse);

int cf_tuner_operations(const cf_tuner *tuner);
cf_tuned cf_tuner_operation(const cf_tuner *tuner, int operation);
// The i-th choice that an operation has, and its time. false: there is none.
bool cf_tuner_choice(const cf_tuner *tuner, int operation, int i, cf_choice *choice, double *ms);
// false: the operation's group has no native collectives, which this choice needs
bool cf_tuner_can(const cf_tuner *tuner, const char *name, cf_choice choice);
void cf_tuner_set(cf_tuner *tuner, const char *name, cf_choice choice);

// Takes whole plan 0 … CF_PLANS - 1 of those that trials compare, before start: for predictions, which play each. false: an
// operation cannot run it, or it equals one before it.
bool cf_tuner_take(cf_tuner *tuner, int plan);

// After the last add and set. search: try choices in the steps that follow (if any was set, only compare plans); otherwise the plan
// is final. Choices whose staging memory does not fit are left out.
void cf_tuner_start(cf_tuner *tuner, bool search);
int cf_tuner_left_out(const cf_tuner *tuner); // choices, of all operations together
// A step begins, on all ranks, with the work enqueued from here on. Ends the step before unless end_step() has.
void cf_tuner_begin_step(cf_tuner *tuner);
void cf_tuner_end_step(cf_tuner *tuner); // call it before work that is not part of a step
bool cf_tuner_trying(const cf_tuner *tuner);

int cf_tuner_plans(const cf_tuner *tuner); // plans compared; 0: none yet
cf_compared cf_tuner_plan(const cf_tuner *tuner, int plan);

CF_EXTERN_C_END
