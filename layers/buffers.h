// Device memory of a layer.
#ifndef BUFFERS_H
#define BUFFERS_H

#include "real.h"

CF_EXTERN_C_BEGIN

static inline real *alloc_real(int64_t elements, const char *purpose) {
    return (real *)cf_alloc(elements * (int64_t)sizeof(real), purpose);
}
static inline precise *alloc_precise(int64_t elements, const char *purpose) {
    return (precise *)cf_alloc(elements * (int64_t)sizeof(precise), purpose);
}

CF_EXTERN_C_END
#endif
