// Saves checkpoints while the run trains.
//
//   begin    all ranks, between two steps: rank 0 makes the directory
//   write    after each rank has copied its state (training pauses for nothing else): a thread writes the copy to the disk, without
//            collectives
//   stage    each rank's stage, one of the numbers that ranks exchange after every step
//   advance  when all have written: sends sizes and hashes to rank 0, whose thread writes the manifest, gives the checkpoint its
//            final name and removes older ones
//   finish   waits for all of that
//
// Every rank that fails to write reports it. The failed checkpoint is removed, the run continues with its last one, and tries again
// when the next save is due.
#pragma once
#include "../commfuse/transport.h"
#include "checkpoint.h"
#include "log.h"
#include "options.h"

typedef struct saver saver;

saver *saver_create(cf_transport *transport, const options *o, logfile *log); // log: rank 0's, which holds the lock of --out
void saver_free(saver *s);                                                    // after saver_finish()

// Collective; waits for a checkpoint that is still being written. described: the manifest's options, which the saver frees. False:
// the checkpoint could not be begun.
bool saver_begin(saver *s, int64_t step, struct cJSON *described);
// copy: of this rank's state; it must stay unchanged until the next saver_begin() has returned.
void saver_write(saver *s, const rank_state *copy);
// This rank's stage. All ranks exchange it after every step, as the first of `stride` numbers, for saver_advance().
double saver_stage(saver *s);
void saver_advance(saver *s, const double *stages, int stride); // collective. stages: (ranks, stride)
bool saver_finish(saver *s);                                    // collective. False: the last checkpoint was not written
