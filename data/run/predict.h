// --predict: the time of a step of this command on the machine of MACHINE.json. The trainer records the steps of its ranks
// (commfuse/predict/record.h), commfuse/predict/playback.h replays them; this file reads the machine, chooses modes and meshes, and
// prints the results. scripts/README.md describes MACHINE.json.
#pragma once
#include "../../commfuse/predict/record.h"
#include "options.h"

typedef struct predicted_rank {
    int plan;      // given: of auto, one of those that trials compare (cf_tuner_take); 0: the predicted one
    bool left_out; // there is no such plan
    cf_record record;
    int64_t memory; // bytes
    double flops;   // of a token, as MFU counts them
} predicted_rank;
// Records steps of world rank `rank` of the mesh in opt, with a mark before each step and after the last.
typedef void predict_record(void *trainer, const options *opt, int rank, int players, predicted_rank *to);

// Reads MACHINE.json and sets the options that follow from it; call it before derived_choose_program(). Dies together, naming the
// field, if one is missing, unknown or out of range. A field that a data sheet lacks may be missing.
void predict_options(options *opt, cf_hardware *h);
// Dies together if the mesh is unsound.
void predict(const options *opt, const cf_hardware *h, predict_record *record, void *trainer, FILE *out);
