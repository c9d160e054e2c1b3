// --predict: the time of a step of this command on the machine of MACHINE.json. The trainer records the steps of its ranks
// (commfuse/record.h), commfuse/playback.h replays them; this file chooses modes and meshes and prints the results.
#pragma once
#include "../commfuse/record.h"
#include "machine.h"
#include "options.h"

typedef struct predicted_rank {
    cf_record record;
    int64_t memory; // bytes
    double flops;   // of a token, as MFU counts them
} predicted_rank;
// Records steps of world rank `rank` of the mesh in o, with a mark before each step and after the last.
typedef void predict_record(void *trainer, const options *o, int rank, int players, predicted_rank *to);

// Both die if MACHINE.json or the mesh is unsound. predict_options() sets the options that follow from MACHINE.json; call it before
// recipe_choose_program().
void predict_options(options *o, machine *m);
void predict(const options *o, const machine *m, predict_record *record, void *trainer, FILE *out);
