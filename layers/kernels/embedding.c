// Token and position embedding on the CPU.
//
// Threads share the scatter-add of token gradients by columns, never by rows: one thread sums each element of the table, in row
// order, so the bits do not depend on the number of threads.
#include "embedding.h"

enum { STRIP = 64 }; // columns of a task of the scatter-add

void embedding_forward(real *out, const int32_t *tokens, const real *wte, int64_t first, int64_t count, int64_t R, int64_t C,
                       cf_stream *stream) {
    size_t bytes = (size_t)C * sizeof(real);
#pragma omp parallel for
    for (int64_t r = 0; r < R; r++) {
        if (is_here(tokens[r], first, count))
            memcpy(out + r * C, wte + (tokens[r] - first) * C, bytes);
        else
            memset(out + r * C, 0, bytes);
    }
}

void embedding_backward(accum *dwte, const void *dout, bool wide, const int32_t *tokens, int64_t first, int64_t count, int64_t R,
                        int64_t C, cf_stream *stream) {
#pragma omp parallel for
    for (int64_t c = 0; c < C; c += STRIP)
        for (int64_t r = 0; r < R; r++) {
            if (!is_here(tokens[r], first, count)) continue;
            accum *restrict to = dwte + (tokens[r] - first) * C + c;
            const int64_t from = r * C + c, columns = smaller(C - c, STRIP);
#pragma omp simd
            for (int64_t i = 0; i < columns; i++)
                to[i] += wide ? ((const accum *)dout)[from + i] : accum_of(((const real *)dout)[from + i]);
        }
}

void position_forward(real *x, const real *wpe, int64_t t0, int64_t T, int64_t B, int64_t C, cf_stream *stream) {
#pragma omp parallel for
    for (int64_t r = 0; r < T * B; r++) {
        real *restrict to = x + r * C;
        const real *restrict from = wpe + (t0 + r / B) * C;
#pragma omp simd
        for (int64_t i = 0; i < C; i++) to[i] = real_of(accum_of(to[i]) + accum_of(from[i]));
    }
}

void position_backward(accum *dwpe, const real *dx, int64_t t0, int64_t T, int64_t B, int64_t C, cf_stream *stream) {
#pragma omp parallel for
    for (int64_t t = 0; t < T; t++) {
        accum *restrict to = dwpe + (t0 + t) * C;
        for (int64_t b = 0; b < B; b++)
#pragma omp simd
            for (int64_t i = 0; i < C; i++) to[i] += accum_of(dx[(t * B + b) * C + i]);
    }
}

void rotary_turn(real *x, const accum *table, bool back, int64_t T, int64_t B, int64_t heads, int64_t D, int64_t row,
                 cf_stream *stream) {
#pragma omp parallel for
    for (int64_t r = 0; r < T * B; r++) {
        const accum *cosine = table + r / B * D, *sine = cosine + D / 2, sign = back ? -1 : 1;
        for (int64_t h = 0; h < heads; h++) {
            real *restrict low = x + r * row + h * D, *restrict high = low + D / 2;
#pragma omp simd
            for (int64_t i = 0; i < D / 2; i++) {
                const accum a = accum_of(low[i]), b = accum_of(high[i]), s = sign * sine[i];
                low[i] = real_of(a * cosine[i] - b * s);
                high[i] = real_of(b * cosine[i] + a * s);
            }
        }
    }
}
