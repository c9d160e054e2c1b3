// exp of `accum`, and y · sigmoid(x), for loops that must vectorise. log and sqrt are those of <tgmath.h>.
//
// The compiler uses the C library's vector functions only under -ffast-math, which gives up NaN. So exp in float is written out
// here without branch, table or call, and a loop over it becomes vector code. x = n·ln 2 + r with |r| <= ln 2 / 2 (ln 2 in two
// parts, so that r is exact), a polynomial for exp(r), and 2ⁿ as two factors made from exponent bits, so that subnormal results
// and overflow to infinity come out right. At most 2 ulp; NaN stays NaN.
//
// In double, for the gradient tests, speed does not matter.
#pragma once
#include "real.h"
#include <tgmath.h>

#ifdef REAL_IS_DOUBLE

static inline accum exp_real(accum x) {
    return exp(x);
}
#else

// 2^(e − 127), where e is the low eight bits, neither 0 nor 255
static inline float power_of_two(uint32_t biased) {
    uint32_t bits = biased << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

static inline accum exp_real(accum x) {
    x = x > 89.0f ? 89.0f : x; // outside of these the result is infinity or zero anyway; NaN passes
    x = x < -104.0f ? -104.0f : x;
    // Adding 1.5 · 2²³ rounds to an integer and leaves it in the low bits; 254 is twice the exponent's bias.
    const float rounding = 12582912.0f + 254;
    float shifted = fmaf(x, 0x1.715476p+0f, rounding);
    float n = shifted - rounding;
    uint32_t biased, half;
    memcpy(&biased, &shifted, sizeof biased); // n + 254
    half = biased >> 1;
    float r = fmaf(n, -0x1.62e400p-1f, x);
    r = fmaf(n, -0x1.7f7d1cp-20f, r);
    float p = 1.0f / 5040;
    p = fmaf(p, r, 1.0f / 720);
    p = fmaf(p, r, 1.0f / 120);
    p = fmaf(p, r, 1.0f / 24);
    p = fmaf(p, r, 1.0f / 6);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    return p * power_of_two(half) * power_of_two(biased - half);
}

#endif

#define FUNCTION static inline
FUNCTION accum times_sigmoid(accum y, accum x) {
    return y / (1 + exp_real(-x));
}
