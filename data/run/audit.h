// The overlap audit: for each operation, how much of its communication was hidden, what limited it, and an option worth trying.
// Means over ranks and all steps but trials. Collective. Rank 0 prints the operations with the longest exposed time and logs all.
#pragma once
#include "../../commfuse/trace.h"
#include "../../commfuse/transport.h"
#include "log.h"
#include "options.h"

void audit(const cf_trace *trace, cf_transport *transport, const options *o, logfile *log);
