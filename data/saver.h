// Checkpoints of a run, written while it trains.
//
//   begin   all ranks, between two steps: rank 0 makes the directory
//   write   every rank, which has copied its state meanwhile (the only time the run stands still), starts a thread that
//           writes the copy to the disk and makes no collective
//   word    with what ranks exchange after every step goes how far each thread is
//   look    once all have written: sizes and hashes to rank 0, whose thread writes the manifest, gives the checkpoint
//           its name and removes older ones
//   finish  waits for all that
//
// A checkpoint that cannot be written is reported by every rank that has failed, leaves nothing, and does not
// end the run, whose last checkpoint stays; it is tried again when the next one is due.
#ifndef SAVER_H
#define SAVER_H

#include "../commfuse/transport.h"
#include "checkpoint.h"
#include "log.h"
#include "options.h"
#include "saved_state.h"

CF_EXTERN_C_BEGIN

typedef struct saver saver;

saver *saver_create(cf_transport *transport, checkpoint_store *store, const options *o, logfile *log); // rank 0's; else NULL
void saver_free(saver *s); // a checkpoint that is not finished is given up

// Collective. `described`: what the manifest says of the run; the saver's from here on. Waits for a checkpoint that is being
// written. False if nothing could be begun.
bool saver_begin(saver *s, int64_t step, struct cJSON *described);
// This rank's copy, which must not change until the next saver_begin has returned.
void saver_write(saver *s, const rank_state *copy);
// How far this rank is. All ranks exchange it after every step, as the first of `stride` numbers, for saver_look().
double saver_word(saver *s);
void saver_look(saver *s, const double *words, int stride); // collective. words: (ranks, stride)
// Collective. False: the last checkpoint was not written.
bool saver_finish(saver *s);

CF_EXTERN_C_END
#endif
