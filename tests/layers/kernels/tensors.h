// Tensors in the device's memory, for host programs that call the layers of either device: filled with numbers
// that depend on (seed, tensor, index) alone, poisoned, read back. The host accesses device memory only
// by cf_copy, so that a source which uses these is the same for both devices and all element types.
//
// Around each tensor are GUARD bytes of the poison, a NaN in every floating-point type: reading them spoils the results,
// tensor_guards() finds writes.
#pragma once

#include "commfuse/base/die.h"
#include "layers/random.h"
#include "layers/kernels/real.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { GUARD = 256, POISON = 0xFF };

typedef enum { OF_REAL, OF_ACCUM, OF_DOUBLE, OF_INT32, OF_INT64 } element;

typedef struct tensor {
    element of;
    int64_t count, shift; // shift: elements between the aligned address and the first one
    char *memory;         // the whole allocation
    void *at;             // (count) device memory
} tensor;

static inline int64_t element_size(element of) {
    static const int64_t size[] = {sizeof(real), sizeof(accum), 8, 4, 8};
    return size[of];
}

static inline int64_t tensor_bytes(const tensor *x) {
    return x->count * element_size(x->of);
}

static inline real *reals(const tensor *x) {
    return (real *)x->at;
}
static inline accum *accums(const tensor *x) {
    return (accum *)x->at;
}
static inline double *doubles(const tensor *x) {
    return (double *)x->at;
}
static inline int32_t *tokens_of(const tensor *x) {
    return (int32_t *)x->at;
}

// --- elements in host memory ---

static inline void element_set(void *host, element of, int64_t i, double value) {
    switch (of) {
#ifdef REAL_IS_BF16
    case OF_REAL:
        ((real *)host)[i].bits = cf_bf16_of_float((float)value);
        break;
#else
    case OF_REAL:
        ((real *)host)[i] = (real)value;
        break;
#endif
    case OF_ACCUM:
        ((accum *)host)[i] = (accum)value;
        break;
    case OF_DOUBLE:
        ((double *)host)[i] = value;
        break;
    case OF_INT32:
        ((int32_t *)host)[i] = (int32_t)value;
        break;
    case OF_INT64:
        ((int64_t *)host)[i] = (int64_t)value;
        break;
    }
}

static inline double element_get(const void *host, element of, int64_t i) {
    switch (of) {
#ifdef REAL_IS_BF16
    case OF_REAL:
        return cf_float_of_bf16(((const real *)host)[i].bits);
#else
    case OF_REAL:
        return ((const real *)host)[i];
#endif
    case OF_ACCUM:
        return ((const accum *)host)[i];
    case OF_DOUBLE:
        return ((const double *)host)[i];
    case OF_INT32:
        return ((const int32_t *)host)[i];
    case OF_INT64:
        return (double)((const int64_t *)host)[i];
    }
    return NAN;
}

static inline void *host_memory(int64_t bytes) {
    void *host = malloc((size_t)bytes + 1);
    if (!host) cf_die("use smaller shapes", "out of memory for %lld bytes on the host", (long long)bytes);
    return host;
}

// --- life ---

static inline tensor tensor_create(element of, int64_t count, int64_t shift, cf_stream *stream) {
    tensor x = {.of = of, .count = count, .shift = shift};
    int64_t bytes = 2 * GUARD + (count + shift) * element_size(of);
    void *poison = memset(host_memory(bytes), POISON, (size_t)bytes);
    x.memory = (char *)cf_alloc(bytes, "test");
    x.at = x.memory + GUARD + shift * element_size(of);
    cf_copy(x.memory, poison, bytes, stream);
    free(poison);
    return x;
}

static inline void tensor_free(tensor *x) {
    cf_free(x->memory);
}

static inline void tensor_write(const tensor *x, const void *host, cf_stream *stream) {
    cf_copy(x->at, host, tensor_bytes(x), stream);
}

// The elements as they lie in memory; to be freed.
static inline void *tensor_read(const tensor *x, cf_stream *stream) {
    void *host = host_memory(tensor_bytes(x));
    cf_copy(host, x->at, tensor_bytes(x), stream);
    cf_stream_sync(stream);
    return host;
}

static inline bool all_poison(const void *host, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i++)
        if (((const unsigned char *)host)[i] != POISON) return false;
    return true;
}

// Nothing was written before or after it.
static inline bool tensor_guards(const tensor *x, cf_stream *stream) {
    char host[2 * GUARD];
    cf_copy(host, (char *)x->at - GUARD, GUARD, stream);
    cf_copy(host + GUARD, (char *)x->at + tensor_bytes(x), GUARD, stream);
    cf_stream_sync(stream);
    return all_poison(host, sizeof host);
}

// --- numbers ---

// middle + spread · u, u uniform with mean 0 and variance 1, in fp32 or, with `round`, in bf16: the same numbers
// in every build.
static inline void tensor_random(const tensor *x, uint64_t seed, uint64_t number, double middle, double spread, bool round,
                                 cf_stream *stream) {
    void *host = host_memory(tensor_bytes(x));
    uint32_t bits[4] = {0};
    for (int64_t i = 0; i < x->count; i++) {
        if (i % 4 == 0) random_bits(seed, number, (uint64_t)i / 4, bits);
        float value = (float)(middle + spread * 1.7320508 * (bits[i % 4] * 0x1p-31 - 1));
        element_set(host, x->of, i, round ? cf_float_of_bf16(cf_bf16_of_float(value)) : value);
    }
    tensor_write(x, host, stream);
    free(host);
}

// Whole numbers in [low, high)
static inline void tensor_integers(const tensor *x, uint64_t seed, uint64_t number, int64_t low, int64_t high, cf_stream *stream) {
    void *host = host_memory(tensor_bytes(x));
    for (int64_t i = 0; i < x->count; i++)
        element_set(host, x->of, i, (double)low + floor((double)(high - low) * random_uniform(seed, number, (uint64_t)i)));
    tensor_write(x, host, stream);
    free(host);
}
