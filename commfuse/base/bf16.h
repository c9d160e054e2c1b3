// CF_BF16 on the host: the upper half of a float.
#pragma once
#include <stdint.h>
#include <string.h>

static inline float cf_float_of_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// To the nearest, ties to even; NaN stays NaN, made quiet, as rounding could carry it to infinity.
static inline uint16_t cf_bf16_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
    return (uint16_t)(value != value ? quiet : rounded); // no branch: loops over it become vector code
}
