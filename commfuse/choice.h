// Chooses algorithm and slices for an operation (`--overlap auto`): the shortest by a replay of its schedules (replay.h).
//
// The costs of exchanges, links and computation (cf_costs) are given, not measured. So the same machines make the same choice on
// every run, and give the same bits. Candidates are the rows of the table of algorithms (schedule.h) that serve the operation, with
// 1, 2 or 4 slices. Where the latency exceeds what a slice hides, rounds are long, and `once` or a native collective is shorter.
// The tuner (tune.h) measures the same choices while training.
#pragma once
#include "schedule.h"
#include "transport.h"

CF_EXTERN_C_BEGIN

typedef struct cf_choice {
    const cf_algorithm *algorithm; // NULL: auto
    int slices;
} cf_choice;

typedef struct cf_work { // of one operation
    cf_operation operation;
    cf_side side;
    int ranks, hosts; // of its group
    double bytes;     // of one shard
    double flops;     // of all slices on one rank
    bool early;       // begun well before it is finished: a collective must not block
    bool native;      // native collectives may be chosen
} cf_work;

enum { CF_CHOICES = 14 }; // of an operation, at most, one from a plan file included; a newer library may allow more
// Lists the choices of the operation, `most` of them; returns their number.
int cf_choices(const cf_work *work, const cf_costs *costs, cf_choice *list, int most);
const cf_algorithm *cf_choice_rounds(const cf_work *work, const cf_costs *costs);  // whose rounds suit it and the links
double cf_choice_ms(cf_choice choice, const cf_work *work, const cf_costs *costs); // predicted
cf_choice cf_choose(const cf_work *work, const cf_costs *costs);

// "ring:2", "once", "none", "slice:4", "auto": NAME[:SLICES] of --overlap and of plans. parse returns false if the name is not one.
enum { CF_CHOICE_NAME = 32 };
void cf_choice_print(cf_choice choice, char name[CF_CHOICE_NAME]);
bool cf_choice_parse(const char *name, cf_choice *choice);

// Gives all ranks the same costs, the worst of any rank, so that all make the same choices. Collective, once, before the first
// operation is created whose algorithm is chosen. Sets the compute threads of each rank (CPU). Called again with threads 0: costs
// for choices of one order of sums, the same on every machine of a kind.
void cf_costs_agree(cf_transport *transport, int threads);
// All that choices reckon with and a machine's cores decide, as text. parse returns false, and changes nothing, if it is none.
enum { CF_COSTS_TEXT = 320 };
void cf_costs_print(cf_costs costs, char text[CF_COSTS_TEXT]);
bool cf_costs_parse(const char *text, cf_costs *costs);

CF_EXTERN_C_END
