// Device memory of a layer.
#ifndef BUFFERS_H
#define BUFFERS_H

#include "real.h"

#ifdef __cplusplus
extern "C" {
#endif

static inline real *take_real(int64_t elements, const char *purpose) {
    return (real *)cf_alloc(elements * (int64_t)sizeof(real), purpose);
}
static inline precise *take_precise(int64_t elements, const char *purpose) {
    return (precise *)cf_alloc(elements * (int64_t)sizeof(precise), purpose);
}

// The layer's buffer if it keeps one from forward for backward, else the scratch that all layers share.
static inline real *kept(real *by_layer, real *of_all) {
    return by_layer ? by_layer : of_all;
}

#ifdef __cplusplus
}
#endif
#endif
