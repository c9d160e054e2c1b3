// How an operation travels if nobody says: mode, route and slices, the shortest by a replay of its schedules (replay.h).
//
// The costs of an exchange, of a link and of computation (cf_costs) are given, not measured: on the same machines the choice
// is the same on every run, and so are the bits. Of N ranks, with m slices a shard, an operation may run
//
//   in rounds   Algorithms 1–5 by ring or direct, m = 1, 2, 4: all but one slice hide transfers
//   at once     route ONCE: one unit of exchanges beside the computation of the own shard
//   natively    the library's collective: blocking, before or after one computation, or M of them behind slices of it
//
// A slice whose latency exceeds what it hides makes rounds long: then one of the other two is shorter. Rounds are kept unless
// another way saves a tenth. Without computation a native collective moves small messages, and by NCCL all: it adds within one
// kernel. The tuner (tune.h) tries the same ways while training.
#ifndef CF_CHOICE_H
#define CF_CHOICE_H

#include "schedule.h"
#include "transport.h"
#include "extern_c.h"

CF_EXTERN_C_BEGIN

typedef struct cf_choice {
    cf_mode mode;
    cf_route route;
    int slices;
} cf_choice;

typedef struct cf_work { // of one operation
    cf_operation operation;
    cf_side side;
    int ranks;
    double bytes; // of a shard
    double flops; // of one rank's computation of all slices
    bool early;   // begun well before it is finished: a collective must not block
    bool folds;   // see schedule.h
} cf_work;

enum { CF_CHOICES = 11 }; // ten, and one of a plan
// All ways in which the operation may run; returns how many.
int cf_choices(const cf_work *work, const cf_costs *costs, cf_choice list[CF_CHOICES]);
// Milliseconds that it would take.
double cf_choice_ms(cf_choice choice, const cf_work *work, const cf_costs *costs);
cf_choice cf_choose(const cf_work *work, const cf_costs *costs);

// "ring:2", "once", "none", "slice:4": a choice in a plan file. false: it is none.
enum { CF_CHOICE_NAME = 32 };
void cf_choice_print(cf_choice choice, char name[CF_CHOICE_NAME]);
bool cf_choice_of(const char *name, cf_choice *choice);

// All ranks choose alike only if they know the same costs: the worst of any rank's become everybody's. Collective, once,
// before the first operation with mode CF_MODE_AUTO is created. threads: that compute in each rank (CPU).
void cf_costs_agree(cf_transport *transport, int threads);

CF_EXTERN_C_END
#endif
