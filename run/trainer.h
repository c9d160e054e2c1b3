// A run: everything that training needs, made from the options.
//
// trainer_open makes it, in this order, since each needs what is before: transport → mesh → context (device, stream,
// trace) → batch → vocabulary → model and optimizer → token files. What is wrong with options, shapes or files is
// found by every rank alike and told by rank 0. trainer_close gives it all back, in the other order.
#ifndef TRAINER_H
#define TRAINER_H

#include "../commfuse/fuse.h"
#include "../data/checkpoint.h"
#include "../data/detokenize.h"
#include "../data/log.h"
#include "../data/model_file.h"
#include "../data/options.h"
#include "../data/tokens.h"
#include "../layers/model.h"
#include "../layers/optimizer.h"
#include "accounts.h"
#include "saver.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { PATH_LENGTH = 4096 };

typedef struct trainer {
    options o;
    const char *version; // of the program
    int ranks, accumulation;
    cf_transport *transport;
    cf_context context;
    cf_mesh mesh;
    gpt model;
    zero_optimizer optimizer;
    tokens *train, *val;
    vocabulary *words;
    model_file *start;
    logfile *log;
    int32_t *inputs, *targets; // (T, B) of one micro-batch, the host's
    double *loss;              // sum of losses of this rank's tokens, in the device's memory
    double peak;               // flop/s of all ranks, 0: unknown
    const char *peak_source;
    int trace_from, trace_to; // steps [from, to)
    checkpoint_store *store;  // rank 0's, with --out
    saver *checkpoints;       // with --out
    int64_t first, skipped;   // step that the run begins or goes on with; steps left out in a row
    bool watched;             // validation and samples before step `first` are done
    accounts time;            // rank 0's
    double begun_ms, watch_ms, save_ms;
} trainer;

void trainer_open(trainer *t, int *argc, char ***argv); // t->o and t->version are given
void trainer_close(trainer *t);

bool trainer_root(const trainer *t); // is this rank 0?
overlap trainer_overlap(const options *o);
// Every rank is here, and its device has nothing left to do.
void trainer_meet(trainer *t);
// Reading and writing files takes one rank longer than another: deadlines are longer meanwhile.
void trainer_patient(trainer *t, bool patient);

// Fill inputs and targets with this replica's sequences of micro-batch `micro` of the batch that starts at
// sample number `first` of an order: training order (shuffled) or as they stand in the file (validation).
void trainer_load(trainer *t, const tokens *data, bool shuffled, int64_t first, int micro);

#ifdef __cplusplus
}
#endif
#endif
