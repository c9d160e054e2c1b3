// The activation, residual additions and conversions on the GPU: one pass over memory each, sixteen bytes a thread at a time. GELU's arithmetic
// takes about as long as its memory traffic.
#include "elementwise.h"
#include "kernel.h"
#include "activation.h"

// Of x, or, with SLOPE, dy times its derivative.
template <bool SLOPE> struct activation_map {
    real *out;
    const real *x, *dy;

    template <int W> __device__ void at(int64_t i) const {
        values<W> v = load<W>(x + i), d = v;
        if (SLOPE) d = load<W>(dy + i);
#pragma unroll
        for (int k = 0; k < W; k++) v.at[k] = SLOPE ? d.at[k] * activation_slope(v.at[k]) : activation(v.at[k]);
        store<W>(out + i, v);
    }
};

void activation_forward(real *out, const real *x, int64_t count, cf_stream *stream) {
    each(activation_map<false>{out, x, NULL}, count, packable(0, out, x), stream);
}

void activation_backward(real *dx, const real *dy, const real *x, int64_t count, cf_stream *stream) {
    each(activation_map<true>{dx, x, dy}, count, packable(0, dx, dy, x), stream);
}

struct gated_map {
    const real *pre;
    int64_t F;

    template <int W> __device__ values<W> at(int64_t r, int64_t c) const {
        values<W> x = load<W>(pre + r * 2 * F + c), y = load<W>(pre + (r * 2 + 1) * F + c);
#pragma unroll
        for (int k = 0; k < W; k++) y.at[k] *= gate(x.at[k]);
        return y;
    }
};

void gated_forward(real *out, const real *pre, int64_t R, int64_t F, cf_stream *stream) {
    each_row(out, gated_map{pre, F}, R, F, packable(F, out, pre), stream);
}

// W neighbouring elements of dout, of one row because F is whole packs.
struct gated_backward_map {
    real *pre, *out;
    const real *dout;
    int64_t F;

    template <int W> __device__ void at(int64_t i) const {
        real *gates = pre + i / F * 2 * F + i % F;
        values<W> x = load<W>(gates), y = load<W>(gates + F), h;
        const values<W> d = load<W>(dout + i);
#pragma unroll
        for (int k = 0; k < W; k++) {
            const float of = gate(x.at[k]);
            h.at[k] = of * y.at[k];
            x.at[k] = d.at[k] * y.at[k] * gate_slope(x.at[k]);
            y.at[k] = d.at[k] * of;
        }
        store<W>(gates, x), store<W>(gates + F, y);
        if (out) store<W>(out + i, h);
    }
};

void gated_backward(real *pre, real *out, const real *dout, int64_t R, int64_t F, cf_stream *stream) {
    each(gated_backward_map{pre, out, dout, F}, R * F, packable(F, pre, out, dout), stream);
}

struct residual_map {
    const real *x, *bias;
    cf_sum y;
    int64_t C;

    template <int W> __device__ values<W> at(int64_t r, int64_t c) const {
        values<W> sum = load<W>(x + r * C + c);
        sum += values_of(load_sum<W>(y, r * C + c));
        if (bias) sum += load<W>(bias + c);
        return sum;
    }
};

void residual_forward(real *out, const real *x, cf_sum y, const real *bias, int64_t R, int64_t C, cf_stream *stream) {
    each_row(out, residual_map{x, bias, y, C}, R, C, packable(C, out, x, bias) && packable(y), stream);
}

template <typename To, typename From> struct convert_map {
    To *to;
    const From *from;

    template <int W> __device__ void at(int64_t i) const { store<W>(to + i, load<W>(from + i)); }
};

void convert_to_real(real *to, const accum *from, int64_t count, cf_stream *stream) {
    each(convert_map<real, accum>{to, from}, count, packable(0, to) && packable(0, from), stream);
}

void convert_to_accum(accum *to, const real *from, int64_t count, cf_stream *stream) {
    each(convert_map<accum, real>{to, from}, count, packable(0, to) && packable(0, from), stream);
}
