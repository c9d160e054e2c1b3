// The timeline of all ranks in one file (trace.h). Rank 0 gets the events by an all-gather of bytes, with the same
// schedules as everything else.
#ifndef CF_TIMELINE_H
#define CF_TIMELINE_H

#include "fuse.h"
#include "extern_c.h"

CF_EXTERN_C_BEGIN

// Collective over `world`, which holds all ranks. From here on events are recorded.
void cf_timeline_start(cf_context *context, const cf_group *world);
// Collective over `world`, which holds all ranks. Stops recording; rank 0 gets what is to be written, and frees it.
char *cf_timeline_end(cf_context *context, const cf_group *world, cf_mode mode, size_t *size);

CF_EXTERN_C_END
#endif
