// The watch of a run: every rank knows where it is and tells whoever asks, whatever its threads are doing. So a rank
// that has waited too long learns whether the others are dead, frozen, slow, or somewhere else in the program.
//
// Each rank has a UDP socket and a thread that sleeps in it. That is beside the transport on purpose: the
// transport is what does not come back. Where ranks cannot reach each other this way (a firewall), the run says so
// at start and time-outs say less.
#ifndef CF_WATCH_H
#define CF_WATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "die.h"
#include "mesh.h"
#include "stop.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cf_watch cf_watch;

// all (size, bytes) = what every rank gives, on every rank. Collective.
typedef void cf_watch_gather(void *argument, const void *mine, void *all, int64_t bytes);

// Collective, both. A run of one rank has none: everything below takes NULL too.
cf_watch *cf_watch_open(int rank, int size, cf_watch_gather *gather, void *argument);
void cf_watch_close(cf_watch *watch);

// A request in the group of that number has been posted. The label is copied.
void cf_watch_posted(cf_watch *watch, int group, const char *label, int layer, int step);

// The thread that computes waits for members of that group, until cf_watch_goes_on(). May be called again while it
// waits, when the peer has changed. Group and label must stay until then.
void cf_watch_waits(cf_watch *watch, int number, const cf_group *group, cf_wait wait);
void cf_watch_goes_on(cf_watch *watch);

// Another rank has given up, so that the run is about to end: who has waited for so long may as well give up too.
bool cf_watch_is_over(cf_watch *watch, double waited_ms);

// This rank gives up waiting, as cf_watch_waits() says: tells the others, asks them for up to some seconds, and dies.
// peers: for whom it waits, in words; news: what a library has reported of them, NULL: nothing came for waited_ms.
CF_NORETURN void cf_watch_give_up(cf_watch *watch, const char *peers, cf_wait wait, double waited_ms,
                                  const char *news);

// Between the message and the end of the run: time for the others to give up too and to say what they see. No
// time at all if this rank has not given up.
void cf_watch_farewell(void);

#ifdef __cplusplus
}
#endif
#endif
