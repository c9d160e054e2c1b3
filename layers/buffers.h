// Device memory of a layer, and sizes.
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

static inline int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}
static inline int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}
static inline int64_t quotient_up(int64_t n, int64_t by) {
    return (n + by - 1) / by;
}

#ifdef __cplusplus
}
#endif
#endif
