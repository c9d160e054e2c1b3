// The optimizers, a row each. What depends on one reads its row: options and --help, the update, memory, checkpoints, predictions.
#pragma once
#include <math.h>
#include "../params.h"

CF_EXTERN_C_BEGIN

// What the options say, and the step.
typedef struct optimizer_settings {
    double lr, beta1, beta2, eps, weight_decay;
    double scale; // gradients are multiplied by this first (clip factor)
    int64_t step; // 1, 2, …: bias correction
    double momentum;
} optimizer_settings;

// A row: the name, how many values of state an element has, and their names in checkpoints. NAME.h says what a step does to one
// element, on CPUs and GPUs: NAME_factors, NAME_factors_of(settings), NAME_element(factors, w, gradient, state…).
enum { OPTIMIZER_STATES = STATE_KINDS_MAX - 1 };
#define OPTIMIZERS(ROW) ROW(adamw, 2, "m", "v")
#ifdef FUNCTION // in the twins of update.h
#include "adamw.h"
#endif

typedef struct optimizer_row {
    const char *name;
    int states;
    const char *state[OPTIMIZER_STATES];
    const struct optimizer_row *others; // of muon, whose step is that of matrices alone (homes.h): that of all other tensors
} optimizer_row;
extern const optimizer_row optimizers[]; // after those above muon; the last one has no name

const optimizer_row *optimizer_find(const char *name); // NULL: none has that name
state_kinds optimizer_kinds(const optimizer_row *o);   // what a checkpoint holds
// Their names, each after a "|".
#define OPTIMIZER_NAME(name, ...) "|" #name
#define OPTIMIZER_NAMES           OPTIMIZERS(OPTIMIZER_NAME) "|muon"

CF_EXTERN_C_END
