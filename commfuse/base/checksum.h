// The arithmetic of a checksum, shared by device_cpu.c and device_cuda.cu: both give the same bits.
#pragma once

#include <stdint.h>

#ifdef __CUDACC__
#include <cuda_runtime.h>
#define CF_EITHER_SIDE __host__ __device__
#else
#define CF_EITHER_SIDE
#endif

// Word number `index` as it is added up. For a given index no two words give the same: xor with a constant,
// multiplications by odd numbers and x ^ (x >> n) can all be undone. So a sum detects any change of one word for
// certain. Two rounds, because flips of one bit in several words (a broken line of memory) must not cancel out.
static CF_EITHER_SIDE inline uint64_t cf_checksum_word(uint64_t word, uint64_t index) {
    uint64_t x = word ^ (index + 1) * 0x9E3779B97F4A7C15u;
    x ^= x >> 32;
    x *= 0xD6E8FEB86659FD93u;
    x ^= x >> 29;
    x *= 0x94D049BB133111EBu;
    return x ^ x >> 32;
}
