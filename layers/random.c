// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): ten rounds of multiply and exclusive-or
// turn a 128-bit counter, (index, stream), and a 64-bit key, the seed, into 128 random bits.
#include "random.h"
#include <math.h>

enum { ROUNDS = 10 };

void random_bits(uint64_t seed, uint64_t stream, uint64_t index, uint32_t out[4]) {
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    out[0] = (uint32_t)index, out[1] = (uint32_t)(index >> 32);
    out[2] = (uint32_t)stream, out[3] = (uint32_t)(stream >> 32);
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t product0 = (uint64_t)0xD2511F53u * out[0], product1 = (uint64_t)0xCD9E8D57u * out[2];
        out[0] = (uint32_t)(product1 >> 32) ^ out[1] ^ key0;
        out[1] = (uint32_t)product1;
        out[2] = (uint32_t)(product0 >> 32) ^ out[3] ^ key1;
        out[3] = (uint32_t)product0;
        key0 += 0x9E3779B9u; // the golden ratio
        key1 += 0xBB67AE85u; // sqrt(3) − 1
    }
}

// 53 of 64 bits, in [0, 1)
static double fraction(uint32_t high, uint32_t low) {
    return (double)(((uint64_t)high << 32 | low) >> 11) * 0x1p-53;
}

double random_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
    uint32_t bits[4];
    random_bits(seed, stream, index, bits);
    return fraction(bits[0], bits[1]);
}

// Box-Muller; 1 − u is in (0, 1], so the logarithm is finite
double random_normal(uint64_t seed, uint64_t stream, uint64_t index) {
    uint32_t bits[4];
    random_bits(seed, stream, index, bits);
    double radius = sqrt(-2 * log(1 - fraction(bits[0], bits[1])));
    return radius * cos(2 * 3.14159265358979323846 * fraction(bits[2], bits[3]));
}
