// See optimizers.h.
#include "optimizers.h"

#define ROW(name, states, ...) {#name, states, {__VA_ARGS__}, NULL},
#define PLACE(name, ...)       PLACE_##name,
enum { OPTIMIZERS(PLACE) };
const optimizer_row optimizers[] = {OPTIMIZERS(ROW){"muon", 1, {"momentum"}, &optimizers[PLACE_adamw]}, {NULL, 0, {NULL}, NULL}};

const optimizer_row *optimizer_find(const char *name) {
    for (const optimizer_row *o = optimizers; o->name; o++)
        if (strcmp(o->name, name) == 0) return o;
    return NULL;
}

state_kinds optimizer_kinds(const optimizer_row *o) {
    state_kinds kinds = {1 + (o->others ? o->others->states : o->states), {"weight"}};
    for (int i = 0; i + 1 < kinds.count; i++) kinds.name[1 + i] = i < o->states ? o->state[i] : o->others->state[i];
    return kinds;
}
