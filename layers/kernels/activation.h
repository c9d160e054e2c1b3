// The MLP's activation, or gate, and its derivative, of one element, for both twins, which include math_real.h or kernel.h before.
// README.md says what else another one changes.
//
// GELU in the tanh approximation is x · (1 + tanh u) / 2 with u = sqrt(2/pi) · (x + 0.044715 x³), and (1 + tanh u) / 2 =
// sigmoid(2u), which needs one exp and loses no digits where tanh u is near −1.
#pragma once
static const bool ACTIVATION_IN_EPILOGUE = true; // cuBLASLt's products can apply it, and its derivative (linear.cu)

#define TWICE_ROOT ((accum)1.5957691216057308) // 2 · sqrt(2/pi)
#define CUBIC      ((accum)0.044715)

FUNCTION accum activation(accum x) {
    return times_sigmoid(x, TWICE_ROOT * (x + CUBIC * x * x * x));
}

FUNCTION accum activation_slope(accum x) {
    x = x > 100 ? 100 : x; // the derivative is 1 or 0 long before; avoids inf · 0, NaN passes
    x = x < -100 ? -100 : x;
    const accum s = times_sigmoid(1, TWICE_ROOT * (x + CUBIC * x * x * x));
    return s + x * s * (1 - s) * TWICE_ROOT * (1 + 3 * CUBIC * x * x);
}

// Of a gated MLP (SwiGLU): x · sigmoid(x), by which its second product is multiplied.
FUNCTION accum gate(accum x) {
    return times_sigmoid(x, x);
}

FUNCTION accum gate_slope(accum x) {
    const accum s = times_sigmoid(1, x);
    return s + x * s * (1 - s);
}
