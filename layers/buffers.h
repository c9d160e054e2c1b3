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

#ifdef __cplusplus
}
#endif
#endif
