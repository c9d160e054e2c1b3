// See record.h.
#include "record.h"
#include "../memory.h"
#include <stdio.h>
#include <stdlib.h>

static const char purpose[] = "a record; predict fewer ranks or a smaller batch";

cf_record_entry *cf_record_add(cf_record *r, cf_record_kind kind) {
    r->entry = cf_host_grow(r->entry, &r->room[0], r->entries + 1, sizeof *r->entry, purpose);
    cf_record_entry *e = &r->entry[r->entries++];
    if (kind == CF_DO_KERNEL || kind == CF_DO_POST) r->host_ms += 1e3 * r->hardware->call_s;
    *e = (cf_record_entry){.kind = kind, .unit = -1, .host_ms = r->host_ms};
    return e;
}

cf_record_unit *cf_record_add_unit(cf_record *r, const char *label, int queue) {
    r->unit = cf_host_grow(r->unit, &r->room[1], r->units + 1, sizeof *r->unit, purpose);
    cf_record_unit *u = &r->unit[r->units++];
    *u = (cf_record_unit){.layer = -1, .queue = queue, .after = {-1, -1}};
    snprintf(u->label, sizeof u->label, "%s", label);
    return u;
}

cf_record cf_record_finish(cf_record *r) {
    cf_record finished = *r;
    *r = (cf_record){.hardware = r->hardware};
    return finished;
}

void cf_record_free(cf_record *r) {
    free(r->entry);
    free(r->unit);
}
