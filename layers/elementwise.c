// GELU and residual additions on the CPU: one pass over memory each.
//
// GELU in the tanh approximation is x · (1 + tanh u) / 2 with u = sqrt(2/pi) · (x + 0.044715 x³), and (1 + tanh u) / 2 =
// 1 / (1 + exp(−2u)), which needs one exp and loses no digits where tanh u is near −1.
#include "elementwise.h"
#include "math_real.h"

enum { PARALLEL_MIN = 1 << 14 };
static const accum TWICE_ROOT = (accum)1.5957691216057308; // 2 · sqrt(2/pi)
static const accum CUBIC = (accum)0.044715;

void gelu_forward(real *out, const real *x, int64_t count, cf_stream *stream) {
#pragma omp parallel for simd if (parallel : count >= PARALLEL_MIN)
    for (int64_t i = 0; i < count; i++) {
        accum v = accum_of(x[i]);
        out[i] = real_of(v / (1 + exp_real(-TWICE_ROOT * (v + CUBIC * v * v * v))));
    }
}

void gelu_backward(real *dx, const real *dy, const real *x, int64_t count, cf_stream *stream) {
#pragma omp parallel for simd if (parallel : count >= PARALLEL_MIN)
    for (int64_t i = 0; i < count; i++) {
        accum v = accum_of(x[i]);
        v = v > 100 ? 100 : v; // the derivative is 1 or 0 long before; avoids inf · 0, NaN passes
        v = v < -100 ? -100 : v;
        accum s = 1 / (1 + exp_real(-TWICE_ROOT * (v + CUBIC * v * v * v)));
        accum slope = s + v * s * (1 - s) * TWICE_ROOT * (1 + 3 * CUBIC * v * v);
        dx[i] = real_of(accum_of(dy[i]) * slope);
    }
}

void residual_forward(real *out, const real *x, const real *y, const real *bias, int64_t R, int64_t C, cf_stream *stream) {
#pragma omp parallel for if (R * C >= PARALLEL_MIN)
    for (int64_t r = 0; r < R; r++) {
        const real *x_row = x + r * C, *y_row = y + r * C;
        real *out_row = out + r * C;
#pragma omp simd
        for (int64_t c = 0; c < C; c++) out_row[c] = real_of(accum_of(x_row[c]) + accum_of(y_row[c]) + accum_of(bias[c]));
    }
}
