// The speed that MFU is a fraction of.
#ifndef PEAK_H
#define PEAK_H

#include "real.h"

#ifdef __cplusplus
extern "C" {
#endif

// Floating-point operations per second of the devices of all ranks together, and where the figure is from; 0: unknown.
// Collective. sum: of what every rank gives, for all of them, who wait for each other there.
// GPU: the data sheet's figure for dense products in the program's element type (fp32: without TF32).
// CPU: what all cores reach in matrix products of several large shapes, measured now, which takes about a second.
// cores: this rank's share of its host's, however few of them compute later. So the figure is the machine's, and does not
// depend on how many ranks there are.
double peak_flops(const char **source, double cores, double (*sum)(void *argument, double mine),
                  void *argument, cf_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
