// The element type of weights and activations. float in the program; the gradient tests compile the same
// sources with -DREAL_IS_DOUBLE to compare with central differences.
#ifndef REAL_H
#define REAL_H

#include "../commfuse/device.h"

#ifdef REAL_IS_DOUBLE
typedef double real;
#define REAL_DTYPE CF_FP64
#else
typedef float real;
#define REAL_DTYPE CF_FP32
#endif

#endif
