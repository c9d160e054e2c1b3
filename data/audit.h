// The overlap audit: of each operation, how much of its communication was hidden, what bounded it, and the option worth trying.
// Of all steps but those that tried ways, means over ranks.
#ifndef AUDIT_H
#define AUDIT_H

#include "../commfuse/trace.h"
#include "../commfuse/transport.h"
#include "log.h"
#include "options.h"

CF_EXTERN_C_BEGIN

// Collective. Rank 0 prints those that waited most, and logs all.
void audit_report(const cf_trace *trace, cf_transport *transport, const options *o, logfile *log);

CF_EXTERN_C_END
#endif
