// bfloat16: the upper half of a float. Rounds to nearest, ties to even, as the hardware does.
#ifndef EMULATOR_CUDA_BF16_H
#define EMULATOR_CUDA_BF16_H

#include "cuda_runtime.h"

struct alignas(2) __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float f) : bits(round(f)) {}
    operator float() const { return __int_as_float((int)((unsigned)bits << 16)); }

  private:
    static unsigned short round(float f) {
        unsigned u = (unsigned)__float_as_int(f);
        if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff; // a NaN stays one
        return (unsigned short)((u + 0x7fffu + (u >> 16 & 1)) >> 16);
    }
};

inline __nv_bfloat16 __float2bfloat16_rn(float f) {
    return __nv_bfloat16(f);
}
inline float __bfloat162float(__nv_bfloat16 b) {
    return (float)b;
}

#endif
