// AdamW with decoupled weight decay, of one element, for both twins of update.h.
//
// m = β1 m + (1 − β1) g;  v = β2 v + (1 − β2) g²;  w −= lr · (m̂ / (sqrt(v̂) + ε) + decay · w), m̂ = m / (1 − β1ᵗ),
// v̂ = v / (1 − β2ᵗ)
#pragma once
typedef struct adamw_factors {
    accum scale, beta1, beta2, eps;
    accum rest1, rest2, rate, second, decay; // 1 − β1, 1 − β2, lr / (1 − β1ᵗ), 1 / (1 − β2ᵗ), lr · weight_decay
} adamw_factors;

static inline adamw_factors adamw_factors_of(optimizer_settings s) {
    const double first = 1 - pow(s.beta1, (double)s.step), second = 1 - pow(s.beta2, (double)s.step);
    adamw_factors f = {(accum)s.scale,        (accum)s.beta1,       (accum)s.beta2,
                       (accum)s.eps,          (accum)(1 - s.beta1), (accum)(1 - s.beta2),
                       (accum)(s.lr / first), (accum)(1 / second),  (accum)(s.lr * s.weight_decay)};
    return f;
}

FUNCTION void adamw_element(adamw_factors f, accum *w, accum g, accum *m, accum *v) {
    const accum gradient = f.scale * g;
    *m = f.beta1 * *m + f.rest1 * gradient;
    *v = f.beta2 * *v + f.rest2 * gradient * gradient;
    *w -= f.rate * *m / (sqrt(*v * f.second) + f.eps) + f.decay * *w;
}
