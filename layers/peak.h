// The speed that MFU is a fraction of.
#ifndef PEAK_H
#define PEAK_H

#include "real.h"

#ifdef __cplusplus
extern "C" {
#endif

// Floating-point operations per second of this rank's device, and where the figure is from. CPU: the best
// of several matrix products of a large shape on this rank's threads, timed now (takes about half a second; to see what
// ranks on one host can reach together, all call it at the same time). 0: unknown.
double peak_flops(const char **source, cf_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
