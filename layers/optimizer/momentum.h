// Nesterov's momentum of one element, for both twins of update.h: m = μ m + (1 − μ) g;  w becomes u = μ m + (1 − μ) g
#pragma once
typedef struct muon_factors {
    accum rest, keep; // (1 − μ) · scale, μ
} muon_factors;

static inline muon_factors muon_factors_of(optimizer_settings s) {
    muon_factors f = {(accum)((1 - s.momentum) * s.scale), (accum)s.momentum};
    return f;
}

FUNCTION void muon_element(muon_factors f, accum *w, accum g, accum *m, accum *none) {
    (void)none;
    *m = f.keep * *m + f.rest * g;
    *w = f.keep * *m + f.rest * g;
}
