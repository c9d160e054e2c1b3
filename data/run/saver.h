// Saves checkpoints while the run trains.
//
// Every rank that fails to write reports it. The failed checkpoint is removed, the run continues with its last one, and tries again
// when the next save is due.
#pragma once
#include "../../commfuse/transport.h"
#include "../checkpoint.h"
#include "log.h"
#include "options.h"

typedef struct saver saver;

// log: rank 0's, which holds the lock of --out. described: the manifest's options, which the saver frees.
saver *saver_create(cf_transport *transport, const options *opt, logfile *log, struct cJSON *described);
void saver_free(saver *s); // after saver_finish()

// Collective; waits for a checkpoint that is still being written, then rank 0 makes the directory. False: the checkpoint could not
// be begun. plan: of the checkpoint's operations (plan.h), for its manifest; NULL: none.
bool saver_begin(saver *s, int64_t step, const char *plan);
// A thread writes the copy of this rank's state, without collectives. It must stay unchanged until the next saver_begin() has
// returned. Training pauses for the copy, nothing else.
void saver_write(saver *s, const rank_state *copy);
bool saver_written(const saver *s); // this rank's copy; all ranks tell each other after every step, for saver_advance()
// Collective. When all ranks have written, rank 0's thread gives the checkpoint its final name and removes older ones; rank 0
// reports its end.
void saver_advance(saver *s, bool all_written);
bool saver_finish(saver *s); // collective: waits for all of that. False: the last checkpoint was not written
