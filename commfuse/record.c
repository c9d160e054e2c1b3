// See record.h.
#include "record.h"
#include "die.h"
#include <stdio.h>
#include <stdlib.h>

// Room for one more.
static void *grow(void *array, int64_t count, int64_t *room, size_t size) {
    if (count < *room) return array;
    *room = *room ? 2 * *room : 1024;
    array = realloc(array, (size_t)*room * size);
    if (!array) cf_die("predict fewer ranks or a smaller --batch", "out of memory for a record of %lld", (long long)*room);
    return array;
}

cf_record_entry *cf_record_add(cf_record *r, cf_record_kind kind) {
    r->entry = grow(r->entry, r->entries, &r->room[0], sizeof *r->entry);
    cf_record_entry *e = &r->entry[r->entries++];
    if (kind != CF_DO_STEP) r->host_ms += 1e3 * r->hardware->call_s;
    *e = (cf_record_entry){.kind = kind, .unit = -1, .host_ms = r->host_ms};
    return e;
}

cf_record_unit *cf_record_add_unit(cf_record *r, const char *label, int lane) {
    r->unit = grow(r->unit, r->units, &r->room[1], sizeof *r->unit);
    cf_record_unit *u = &r->unit[r->units++];
    *u = (cf_record_unit){.layer = -1, .lane = lane, .number = r->lane_units[lane]++, .after = (int)r->afters};
    snprintf(u->label, sizeof u->label, "%s", label);
    return u;
}

void cf_record_after(cf_record *r, int unit) {
    r->after = grow(r->after, r->afters, &r->room[2], sizeof *r->after);
    r->after[r->afters++] = unit;
    r->unit[r->units - 1].afters++;
}

void cf_record_step(cf_record *r) {
    cf_record_add(r, CF_DO_STEP);
}

cf_record cf_record_take(cf_record *r) {
    cf_record taken = *r;
    *r = (cf_record){.hardware = taken.hardware};
    return taken;
}

void cf_record_clear(cf_record *r) {
    cf_record before = cf_record_take(r);
    r->world = before.world, r->rank = before.rank, r->players = before.players, r->words = before.words;
    cf_record_free(&before);
}

void cf_record_free(cf_record *r) {
    free(r->entry);
    free(r->unit);
    free(r->after);
}
