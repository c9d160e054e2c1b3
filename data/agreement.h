// Ranks are started one by one, by mpirun, srun, torchrun or by hand, each with a command line of its own. What they
// must have in common is compared before anything depends on it: a rank with another --lr would train another model and
// nothing would look wrong, one with another --overlap would wait for messages that nobody sends.
#ifndef AGREEMENT_H
#define AGREEMENT_H

#include "options.h"

#ifdef __cplusplus
extern "C" {
#endif

// all (ranks, bytes) = what every rank gives, on every rank. Collective.
typedef void agreement_gather(void *argument, const void *mine, void *all, int64_t bytes);

// Collective. Dies together, naming the rank and the option, unless all ranks run one version of the program with the same
// options. Those that belong to a host may differ: its threads, and where files lie (what is in them is compared later).
void agreement_check(const options *o, const char *version, int ranks, agreement_gather *gather,
                     void *argument);

#ifdef __cplusplus
}
#endif
#endif
