// GELU and residual additions on the GPU: one pass over memory each, sixteen bytes a thread at a time.
//
// The formulas are the CPU twin's: (1 + tanh u) / 2 = 1 / (1 + exp(−2u)). GELU's arithmetic takes about as long as its memory
// traffic, so it uses the fast exp; the error, some 2⁻²² times the argument, does not matter where the sigmoid is neither 0 nor 1.
#include "elementwise.h"
#include "kernel.h"

#define TWICE_ROOT 1.5957691216057308f // 2 · sqrt(2/pi)
#define CUBIC      0.044715f

static __device__ inline float sigmoid_of_gelu(float v) {
    return __fdividef(1, 1 + __expf(-TWICE_ROOT * (v + CUBIC * v * v * v)));
}

struct gelu_map {
    real *out;
    const real *x;

    template <int W> __device__ void at(int64_t i) const {
        values<W> v = load<W>(x + i);
#pragma unroll
        for (int k = 0; k < W; k++) v.at[k] *= sigmoid_of_gelu(v.at[k]);
        store<W>(out + i, v);
    }
};

void gelu_forward(real *out, const real *x, int64_t count, cf_stream *stream) {
    each(gelu_map{out, x}, count, packable(0, out, x), stream);
}

struct gelu_slope_map {
    real *dx;
    const real *dy, *x;

    static __device__ float slope(float v) {
        v = v > 100 ? 100 : v; // the derivative is 1 or 0 long before; avoids inf · 0, NaN passes
        v = v < -100 ? -100 : v;
        float s = sigmoid_of_gelu(v);
        return s + v * s * (1 - s) * TWICE_ROOT * (1 + 3 * CUBIC * v * v);
    }

    template <int W> __device__ void at(int64_t i) const {
        values<W> v = load<W>(x + i), d = load<W>(dy + i);
#pragma unroll
        for (int k = 0; k < W; k++) d.at[k] *= slope(v.at[k]);
        store<W>(dx + i, d);
    }
};

void gelu_backward(real *dx, const real *dy, const real *x, int64_t count, cf_stream *stream) {
    each(gelu_slope_map{dx, dy, x}, count, packable(0, dx, dy, x), stream);
}

struct residual_map {
    const real *x, *y, *bias;
    int64_t C;

    template <int W> __device__ values<W> at(int64_t r, int64_t c) const {
        values<W> sum = load<W>(x + r * C + c);
        sum += load<W>(y + r * C + c);
        sum += load<W>(bias + c);
        return sum;
    }
};

void residual_forward(real *out, const real *x, const real *y, const real *bias, int64_t R, int64_t C, cf_stream *stream) {
    each_row(out, residual_map{x, y, bias, C}, R, C, packable(C, out, x, y, bias), stream);
}
