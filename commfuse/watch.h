// What has become of a rank that others wait for: dead, frozen, slow, or somewhere else in the program. A reader may skip
// this file and watch.c: no byte of a tensor passes here.
//
// Every rank notes where it is and answers questions, whatever its other threads do. A rank that has waited too long asks all
// others and prints what it has found. Each rank has a UDP socket for that and a thread that sleeps in it, separate from the
// transport because it is the transport that does not return. Ranks that UDP does not reach (a firewall) seem to be cut off.
#ifndef CF_WATCH_H
#define CF_WATCH_H

#include <stdbool.h>
#include "bootstrap.h"
#include "die.h"
#include "stop.h"
#include "extern_c.h"

CF_EXTERN_C_BEGIN

typedef struct cf_watch cf_watch;

// Collective, both; `ranks` is used to open alone. A run of one rank has none: everything below takes NULL too.
cf_watch *cf_watch_open(cf_bootstrap *ranks);
void cf_watch_close(cf_watch *watch);

// A request has been posted. The label is copied.
void cf_watch_posted(cf_watch *watch, const char *label, int layer, int step);

// The thread that computes waits, until cf_watch_goes_on(). May be called again while it waits, when the peer has changed. The
// label must stay until then.
void cf_watch_waits(cf_watch *watch, cf_wait wait);
void cf_watch_goes_on(cf_watch *watch);

// Another rank has given up, so that the run is about to end: a rank that has waited for so long should give up too.
bool cf_watch_is_over(cf_watch *watch, double waited_ms);

// This rank gives up waiting: asks the others for up to some seconds, which also says to them that it does, and dies. peers:
// for which ranks it waits, in words, NULL: as in `wait`; news: what a library has reported of them, NULL: nothing came for
// waited_ms.
CF_NORETURN void cf_watch_give_up(cf_watch *watch, const char *peers, cf_wait wait, double waited_ms, const char *news);

// Between the message and the end of the run: time for the others to give up too and to print what they see. No
// time at all if this rank has not given up.
void cf_watch_linger(void);

// Deadlines for library calls that hang when another rank does not come, and cannot name that rank: at start, when groups are
// made, and at the end. Between the two calls this thread has timeout_s (0: for ever); then another thread ends the process
// with a message that names the call. One at a time in a process. what: words that stay.
void cf_deadline_begin(const char *what, double timeout_s);
void cf_deadline_end(void);

CF_EXTERN_C_END
#endif
