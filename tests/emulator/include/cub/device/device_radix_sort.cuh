// The emulated GPU's CUB: what layers/kernels/embedding.cu calls of it.
#pragma once
#include "../../cuda_runtime.h"
#include <algorithm>
#include <numeric>
#include <vector>

namespace cub {

template <typename K, typename V>
void emulator_sort(const K *keys, K *sorted_keys, const V *values, V *sorted_values, int count, K mask) {
    std::vector<int> order(count);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return (keys[a] & mask) < (keys[b] & mask); });
    for (int i = 0; i < count; i++) sorted_keys[i] = keys[order[i]], sorted_values[i] = values[order[i]];
}

struct DeviceRadixSort {
    template <typename K, typename V>
    static cudaError_t SortPairs(void *memory, size_t &bytes, const K *keys, K *sorted_keys, const V *values, V *sorted_values,
                                 int count, int begin_bit, int end_bit, cudaStream_t stream) {
        cudaLaunchConfig_t config = {};
        config.gridDim = config.blockDim = dim3(1);
        config.stream = stream;
        if (!memory) return bytes = 1, cudaSuccess;
        return cudaLaunchKernelEx(&config, emulator_sort<K, V>, keys, sorted_keys, values, sorted_values, count,
                                  (K)(((1LL << end_bit) - 1) & ~((1LL << begin_bit) - 1)));
    }
};

} // namespace cub
