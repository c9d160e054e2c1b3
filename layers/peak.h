// The speed that MFU is a fraction of.
#ifndef PEAK_H
#define PEAK_H

#include "real.h"

#ifdef __cplusplus
extern "C" {
#endif

// Floating-point operations per second of this rank's device, and where the figure is from; 0: unknown.
// GPU: the data sheet's figure for dense products in the program's element type (fp32: without TF32).
// CPU: the best of matrix products of several large shapes on this rank's threads, timed now, which takes about
// a second. To see what the ranks of one host reach together, all call it at the same time.
// cores: of the host, for each of its ranks; with fewer than a rank has threads, the ranks take turns.
double peak_flops(const char **source, double cores, cf_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
