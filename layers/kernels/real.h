// The two element types of a model, fixed when the layers are compiled.
//
//              real: weights, activations    accum: gradients of weights, statistics, moments, master weights
// (default)    float                         float
// REAL_IS_BF16 bf16                          float
// REAL_IS_DOUBLE double                      double; for tests that compare with central differences
//
// In C bf16 is two bytes that can be moved and converted; CUDA kernels use CUDA's type. CPU kernels compute in `accum`:
// accum_of() when they read an element, real_of() when they write one.
#pragma once
#include "../../commfuse/base/bf16.h"
#include "../../commfuse/device.h"

#if defined(REAL_IS_DOUBLE)
typedef double real, accum;
#define REAL_DTYPE  CF_FP64
#define ACCUM_DTYPE CF_FP64
#elif defined(REAL_IS_BF16)
#ifdef __CUDACC__
#include <cuda_bf16.h>
typedef __nv_bfloat16 real;
#else
typedef struct real {
    uint16_t bits;
} real;
#endif
typedef float accum;
#define REAL_DTYPE  CF_BF16
#define ACCUM_DTYPE CF_FP32
#else
typedef float real, accum;
#define REAL_DTYPE  CF_FP32
#define ACCUM_DTYPE CF_FP32
#endif

// On the host: to the nearest, ties to even.
#if defined(REAL_IS_BF16) && !defined(__CUDACC__)
static inline accum accum_of(real x) {
    return cf_float_of_bf16(x.bits);
}

static inline real real_of(double x) {
    real rounded = {cf_bf16_of_float((float)x)};
    return rounded;
}
#else
static inline accum accum_of(real x) {
    return (accum)x;
}

static inline real real_of(double x) {
    return (real)x;
}
#endif

// --- sums that a kernel makes when it reads them ---

static inline cf_sum whole_sum(const real *complete) {
    cf_sum sum = {(void *)complete, NULL, 0, 0};
    return sum;
}

#ifndef __CUDACC__
// Row r of (R, C), made in place.
static inline const real *summed_row(cf_sum sum, int64_t r, int64_t C) {
    real *row = (real *)sum.to + r * C;
    if (sum.parts > 0) cf_add(row, (const real *)sum.from + r * C, sum.parts, sum.stride, C, REAL_DTYPE, NULL);
    return row;
}

// Is it one of the rows or columns [first, first + count), which are here? kernel.h has the same for GPUs.
static inline bool is_here(int64_t index, int64_t first, int64_t count) {
    return index >= first && index < first + count;
}
#endif

// --- sizes ---

static inline int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}
static inline int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}
static inline int64_t ceil_div(int64_t n, int64_t by) {
    return (n + by - 1) / by;
}
