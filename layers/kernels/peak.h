// The peak that MFU is a fraction of.
#pragma once
#include "../../commfuse/transport.h"
#include "real.h"

CF_EXTERN_C_BEGIN

// Whether products of bf16 take longer than those of fp32, because this rank's processor has no instructions for them.
bool peak_emulated(void);
// Floating-point operations per second of the devices of all ranks together, and the source of the figure; 0: unknown.
// Collective over the ranks of the transport; NULL: a single rank.
// GPU: the data sheet's figure for dense products in the program's element type (fp32: without TF32).
// CPU: the rate of all cores in matrix products of several large shapes, measured during the call, about a second.
// cores: this rank's share of its host's cores, even if fewer compute later, so that the figure does not depend on the number
// of ranks.
// fp32: the same in products of fp32, where some rank's bf16 is emulated; elsewhere 0, without a source.
double peak_flops(bool fp32, const char **source, double cores, cf_transport *transport, cf_stream *stream);

CF_EXTERN_C_END
