// How an operation travels if nobody says: mode, route and slices, chosen by a model of what each would take.
//
// The model knows the latency of an exchange, the bandwidth of a link and the rate of computation (cf_costs), all of them
// given, not measured: on the same machines the choice is the same on every run, and so are the bits. N ranks, m slices a shard, W seconds of
// computation in all, S bytes a shard, L latency, B bandwidth, P what one more partial computation costs:
//
//   rounds   c + max((N·m − 1)·c, (N − 1)·(L + S/B)), c = W/(N·m) + P   Algorithms 1–5: all but one slice hide transfers
//   at once  max(W/N, L + (N − 1)·(M + S/B)) + W·(N − 1)/N + 2·P       one unit; M for each message; hides behind one shard
//   native   W + L + 2·M·log2(N) + (N − 1)·S/B                         the library's collective, and one computation
//
// So a slice is never so small that its latency exceeds what it hides: then one of the other two is shorter. Rounds are kept
// unless another way saves a tenth, and without computation a native collective moves small messages only.
#ifndef CF_CHOICE_H
#define CF_CHOICE_H

#include "schedule.h"
#include "transport.h"

#ifdef __cplusplus
extern "C" {
#endif

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
} cf_work;

cf_choice cf_choose(const cf_work *work, const cf_costs *costs);

// All ranks choose alike only if they know the same costs: the worst of any rank's become everybody's. Collective, once,
// before the first operation with mode CF_MODE_AUTO is created. threads: that compute in each rank (CPU).
void cf_costs_agree(cf_transport *transport, int threads);

#ifdef __cplusplus
}
#endif
#endif
