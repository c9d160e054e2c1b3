// Softmax cross-entropy on the CPU: the logits are the largest tensor of a step, so each function reads them from memory once.
// It computes maximum and sum together, a stretch of columns at a time: first the stretch's maximum, then, while the stretch is
// in the cache, its exponentials; a new maximum rescales the sum so far.
#include "crossentropy.h"
#include "math_real.h"

enum { STRETCH = 2048 };

typedef struct softmax {
    accum maximum, sum; // sum of exp(logit − maximum)
} softmax;

static softmax merge(softmax a, softmax b) {
    accum maximum = a.maximum > b.maximum ? a.maximum : b.maximum;
    if (maximum == -INFINITY) return (softmax){maximum, a.sum + b.sum}; // both empty, or NaN
    return (softmax){maximum, a.sum * exp_real(a.maximum - maximum) + b.sum * exp_real(b.maximum - maximum)};
}

static softmax softmax_of(const real *x, int64_t n) {
    softmax all = {-INFINITY, 0};
    for (int64_t begin = 0; begin < n; begin += STRETCH) {
        const int64_t end = smaller(begin + STRETCH, n);
        accum maximum = -INFINITY, sum = 0;
#pragma omp simd reduction(max : maximum)
        for (int64_t i = begin; i < end; i++) maximum = accum_of(x[i]) > maximum ? accum_of(x[i]) : maximum;
        const accum shift = maximum == -INFINITY ? 0 : maximum; // −inf − (−inf) would be NaN
#pragma omp simd reduction(+ : sum)
        for (int64_t i = begin; i < end; i++) sum += exp_real(accum_of(x[i]) - shift);
        all = merge(all, (softmax){maximum, sum});
    }
    return all;
}

// The difference of two logits comes first: added to a huge one the logarithm would be lost.
static accum loss_of(softmax s, accum target) {
    return log(s.sum) + (s.maximum - target);
}

void crossentropy_stats(accum *stats, const real *logits, const int32_t *targets, int64_t first, int64_t valid, int64_t R,
                        int64_t V, cf_stream *stream) {
#pragma omp parallel for
    for (int64_t r = 0; r < R; r++) {
        const real *row = logits + r * V;
        softmax s = softmax_of(row, valid);
        stats[r * 3] = s.maximum;
        stats[r * 3 + 1] = s.sum;
        stats[r * 3 + 2] = is_here(targets[r], first, valid) ? accum_of(row[targets[r] - first]) : 0;
    }
}

// A row of logits becomes its gradient; target: its column, which may be another rank's.
static void differentiate(real *row, softmax s, accum scale, accum z, int64_t target, int64_t valid, int64_t V) {
    const bool here = is_here(target, 0, valid);
    const accum factor = scale * (1 + 2 * z * loss_of(s, 0)) / s.sum, logit = here ? accum_of(row[target]) : 0;
#pragma omp simd
    for (int64_t v = 0; v < valid; v++) row[v] = real_of(exp_real(accum_of(row[v]) - s.maximum) * factor);
    for (int64_t v = valid; v < V; v++) row[v] = real_of(0);
    if (here) row[target] = real_of(exp_real(logit - s.maximum) * factor - scale); // rounded once
}

void crossentropy_combine(accum *losses, real *logits, const accum *all, int64_t ranks, const int32_t *targets, double scale,
                          double z, int64_t first, int64_t valid, int64_t R, int64_t V, cf_stream *stream) {
#pragma omp parallel for
    for (int64_t r = 0; r < R; r++) {
        softmax s = {-INFINITY, 0};
        accum target = 0;
        for (int64_t i = 0; i < ranks; i++) {
            const accum *stats = all + (i * R + r) * 3;
            s = merge(s, (softmax){stats[0], stats[1]});
            target += stats[2];
        }
        losses[r] = loss_of(s, target);
        if (scale != 0) differentiate(logits + r * V, s, (accum)scale, (accum)z, targets[r] - first, valid, V);
    }
}

void crossentropy_fused(accum *losses, real *logits, const int32_t *targets, double scale, double z, int64_t valid, int64_t R,
                        int64_t V, cf_stream *stream) {
#pragma omp parallel for
    for (int64_t r = 0; r < R; r++) {
        real *row = logits + r * V;
        softmax s = softmax_of(row, valid);
        losses[r] = loss_of(s, accum_of(row[targets[r]]));
        differentiate(row, s, (accum)scale, (accum)z, targets[r], valid, V);
    }
}

void crossentropy_sum(double *sum, const accum *losses, int64_t n, cf_stream *stream) {
    for (int64_t i = 0; i < n; i++) *sum += (double)losses[i];
}
