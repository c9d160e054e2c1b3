// More events than a device remembers: figures that need forgotten ones are left out, the others stay.
//     tool_events COUNT
// Prints whether the first of COUNT events is remembered, and how many events were counted of three: a transfer that began
// with it, one of the last events, and a wait between them. (One that ends before it begins is none.) The last has not passed yet.
#include "../../commfuse/base/die.h"
#include "../../commfuse/memory.h"
#include "../../commfuse/trace.h"
#include <stdio.h>
#include <stdlib.h>

enum { BYTES = 64 << 20 };

int main(int argc, char **argv) {
    if (argc != 2) cf_die(NULL, "one argument is needed, see the top of this file");
    cf_device_open(0);
    cf_stream *stream = cf_stream_create();
    cf_trace *trace = cf_trace_create();
    cf_trace_record(trace, true);
    cf_event first = cf_event_record(stream), last = first;
    char *much = cf_alloc(BYTES, "what takes long");
    for (int64_t i = 1; i + 1 < atoll(argv[1]); i++) last = cf_event_record(stream);
    cf_zero(much, BYTES, stream);
    last = cf_event_record(stream);
    cf_trace_transfer(trace, "early", 3, 0, 0, 1, first, first, last);
    cf_trace_transfer(trace, "late", 3, 0, 0, 1, last, last, last);
    cf_trace_wait(trace, "wait", 3, first, last);
    cf_trace_wait(trace, "no wait", 3, last, first);
    printf("remembered %d, events %lld\n", cf_event_remembered(first), (long long)cf_trace_events(trace)->count);
    cf_trace_free(trace);
    cf_free(much);
    cf_stream_free(stream);
    return 0;
}
