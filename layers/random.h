// Counter-based random numbers (Philox 4x32-10): a function of (seed, stream, index), so that initial weights and generated text
// do not depend on the mesh, the number of threads or the order of calls. (data/tokens.c shuffles the samples.)
#pragma once
#include <stdint.h>

void random_bits(uint64_t seed, uint64_t stream, uint64_t index, uint32_t out[4]);
double random_uniform(uint64_t seed, uint64_t stream, uint64_t index); // [0, 1)
double random_normal(uint64_t seed, uint64_t stream, uint64_t index);  // mean 0, variance 1
