// Token and position embedding on the CPU.
//
// Threads share the scatter-add of token gradients by columns, never by rows: one thread sums each element of the table, in row
// order, so the bits do not depend on the number of threads.
#include "embedding.h"
#include <string.h>

enum { STRIP = 64 }; // columns of a task of the scatter-add

static bool held(int32_t token, int64_t first, int64_t count) {
    return token >= first && token < first + count;
}

void embedding_forward(real *out, const int32_t *tokens, const real *wte, int64_t first, int64_t count, int64_t R, int64_t C,
                       cf_stream *stream) {
    size_t bytes = (size_t)C * sizeof(real);
#pragma omp parallel for
    for (int64_t r = 0; r < R; r++) {
        if (held(tokens[r], first, count))
            memcpy(out + r * C, wte + (tokens[r] - first) * C, bytes);
        else
            memset(out + r * C, 0, bytes);
    }
}

// Adds rows (R, C) of accum, or of real.
static void scatter(accum *dwte, const void *rows, bool sums, const int32_t *tokens, int64_t first, int64_t count, int64_t R,
                    int64_t C) {
#pragma omp parallel for
    for (int64_t c = 0; c < C; c += STRIP)
        for (int64_t r = 0; r < R; r++) {
            if (!held(tokens[r], first, count)) continue;
            accum *restrict to = dwte + (tokens[r] - first) * C + c;
            const int64_t from = r * C + c, columns = smaller(C - c, STRIP);
#pragma omp simd
            for (int64_t i = 0; i < columns; i++)
                to[i] += sums ? ((const accum *)rows)[from + i] : accum_of(((const real *)rows)[from + i]);
        }
}

void embedding_backward(accum *dwte, const real *dout, const int32_t *tokens, int64_t first, int64_t count, int64_t R, int64_t C,
                        cf_stream *stream) {
    scatter(dwte, dout, false, tokens, first, count, R, C);
}

void embedding_add(accum *dwte, const accum *dout, const int32_t *tokens, int64_t first, int64_t count, int64_t R, int64_t C,
                   cf_stream *stream) {
    scatter(dwte, dout, true, tokens, first, count, R, C);
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
