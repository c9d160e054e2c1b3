// --predict: what steps of this command would take on the machine of MACHINE.json. Ranks' steps are recorded by the trainer
// itself (commfuse/record.h) and played (commfuse/playback.h); here are the modes and meshes, and what is printed.
#ifndef PREDICT_H
#define PREDICT_H

#include "../commfuse/record.h"
#include "machine.h"
#include "options.h"

CF_EXTERN_C_BEGIN

typedef struct predicted_rank {
    cf_record record;
    int64_t memory; // bytes
    double flops;   // of a token, as MFU counts them
} predicted_rank;
// Records steps of world rank `rank` of the mesh in o: begins with a mark, as each step does, and ends with one.
typedef void predict_record(void *trainer, const options *o, int rank, int players, predicted_rank *to);

// Dies if MACHINE.json or the mesh is unsound.
void predict_options(options *o, machine *m); // what follows from MACHINE.json; before the program is chosen
void predict(const options *o, const machine *m, predict_record *record, void *trainer, FILE *out);

CF_EXTERN_C_END
#endif
