// Finds out why a rank keeps others waiting: dead, frozen, slow, or at another operation. A reader may skip this file and
// watch.c: no tensor passes through them.
//
// Every rank notes its position in the program and answers questions about it, whatever its other threads do. A rank that has
// waited too long asks all others and prints what it found. For that each rank has a UDP socket and a thread that sleeps in it,
// separate from the transport, because the transport is what hangs. Ranks that UDP does not reach (a firewall) seem cut off.
#pragma once
#include "bootstrap.h"
#include "stop.h"

typedef struct cf_watch cf_watch;

// Both collective; `ranks` is not used after open. A run of one rank has no watch: all functions below accept NULL.
cf_watch *cf_watch_open(cf_bootstrap *ranks);
void cf_watch_close(cf_watch *watch);

// A request was posted. The label is copied.
void cf_watch_posted(cf_watch *watch, const char *label, int layer, int step);

// The compute thread has waited for waited_ms and waits on, until it calls cf_watch_goes_on(); the label must stay valid until
// then. Call it again and again, also when the peer changes. It gives up if the wait has reached timeout_ms (0: no limit), if
// another rank has given up, which ends the run, or if a library has reported an error about the peers (news; else NULL): it asks
// the other ranks, which takes up to some seconds and informs them, and dies. peers: the ranks waited for, in words; NULL: as in
// `wait`.
void cf_watch_waits(cf_watch *watch, cf_wait wait, const char *peers, double waited_ms, double timeout_ms, const char *news);
void cf_watch_goes_on(cf_watch *watch); // does nothing where it has not waited

// Between the message and the end of the run: gives the other ranks time to give up and print, too. Returns at once if this rank
// has not given up.
void cf_watch_linger(void);

// A deadline for library calls that hang when another rank does not come, and that cannot name it: at start, when groups are
// made, and at the end. If cf_deadline_end() does not follow within timeout_s (0: no limit), another thread ends the process with
// a message that names the call. One at a time in a process. what: a string that stays valid.
void cf_deadline_begin(const char *what, double timeout_s);
void cf_deadline_end(void);
