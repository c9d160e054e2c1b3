// The activation, residual additions and conversions on the CPU: one pass over memory each.
#include "elementwise.h"
#include "math_real.h"
#include "activation.h"

enum { PARALLEL_MIN = 1 << 14 };

void activation_forward(real *out, const real *x, int64_t count, cf_stream *stream) {
#pragma omp parallel for simd if (parallel : count >= PARALLEL_MIN)
    for (int64_t i = 0; i < count; i++) out[i] = real_of(activation(accum_of(x[i])));
}

void activation_backward(real *dx, const real *dy, const real *x, int64_t count, cf_stream *stream) {
#pragma omp parallel for simd if (parallel : count >= PARALLEL_MIN)
    for (int64_t i = 0; i < count; i++) dx[i] = real_of(accum_of(dy[i]) * activation_slope(accum_of(x[i])));
}

void gated_forward(real *out, const real *pre, int64_t R, int64_t F, cf_stream *stream) {
#pragma omp parallel for if (R * F >= PARALLEL_MIN)
    for (int64_t r = 0; r < R; r++) {
        const real *gates = pre + r * 2 * F, *values = gates + F;
        real *out_row = out + r * F;
#pragma omp simd
        for (int64_t i = 0; i < F; i++) out_row[i] = real_of(gate(accum_of(gates[i])) * accum_of(values[i]));
    }
}

void gated_backward(real *pre, real *out, const real *dout, int64_t R, int64_t F, cf_stream *stream) {
#pragma omp parallel for if (R * F >= PARALLEL_MIN)
    for (int64_t r = 0; r < R; r++) {
        real *gates = pre + r * 2 * F, *values = gates + F;
        if (out) gated_forward(out + r * F, gates, 1, F, stream);
#pragma omp simd
        for (int64_t i = 0; i < F; i++) {
            const accum x = accum_of(gates[i]), y = accum_of(values[i]), d = accum_of(dout[r * F + i]);
            gates[i] = real_of(d * y * gate_slope(x));
            values[i] = real_of(d * gate(x));
        }
    }
}

void residual_forward(real *out, const real *x, cf_sum y, const real *bias, int64_t R, int64_t C, cf_stream *stream) {
#pragma omp parallel for if (R * C >= PARALLEL_MIN)
    for (int64_t r = 0; r < R; r++) {
        const real *x_row = x + r * C, *y_row = summed_row(y, r, C);
        real *out_row = out + r * C;
#pragma omp simd
        for (int64_t c = 0; c < C; c++)
            out_row[c] = real_of(accum_of(x_row[c]) + accum_of(y_row[c]) + (bias ? accum_of(bias[c]) : 0));
    }
}

void convert_to_real(real *to, const accum *from, int64_t count, cf_stream *stream) {
#pragma omp parallel for simd if (parallel : count >= PARALLEL_MIN)
    for (int64_t i = 0; i < count; i++) to[i] = real_of(from[i]);
}

void convert_to_accum(accum *to, const real *from, int64_t count, cf_stream *stream) {
#pragma omp parallel for simd if (parallel : count >= PARALLEL_MIN)
    for (int64_t i = 0; i < count; i++) to[i] = accum_of(from[i]);
}
