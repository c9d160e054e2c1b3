// c = aᵀ·b of bf16 on processors with AVX512_BF16 and without AMX (AMD from Zen 4 on): gradients of weights, whose factors both lie
// with their rows along the sum. There oneDNN transposes a again for every part of c.
//
// An instruction adds 16 sums of two products. So rows k and k + 1 are packed as pairs: b in panels of 64 columns, which a tile of
// 6 by 64 sums reads whole, a in panels of 6, of which it reads one pair for a whole row of sums. DEPTH rows at a time: a panel of a
// stays in the first cache, one of b and a thread's part of a in the second. Each sum is in the order of k, whatever the threads.
#include "gemm.h"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__) && defined(_OPENMP)
#include <immintrin.h>

enum { ROWS = 6, COLUMNS = 64, VECTORS = COLUMNS / 16, DEPTH = 1024, PART = 16 * ROWS, PAIRS = DEPTH / 2, AHEAD = 16 };
typedef uint32_t pair; // rows k and k + 1 of one column

static void pack_b(pair *restrict to, const real *restrict b, int64_t ldb, int64_t depth) {
    for (int64_t k = 0; k < depth; k += 2, b += 2 * ldb)
        for (int64_t c = 0; c < COLUMNS; c++) *to++ = b[c].bits | (pair)b[ldb + c].bits << 16;
}

// Panels are PAIRS apart. Columns beyond the last are zeros. Rows are so far apart that the processor does not foresee the next.
static void pack_a(pair (*restrict to)[PAIRS * ROWS], const real *restrict a, int64_t lda, int64_t depth, int64_t columns) {
    for (int64_t k = 0; k < depth; k += 2)
        for (int64_t c = 0, panel = 0; c < columns; c += ROWS, panel++) {
            __builtin_prefetch(a + (k + AHEAD) * lda + c);
            __builtin_prefetch(a + (k + AHEAD + 1) * lda + c);
            const __mmask8 those = (__mmask8)((1 << smaller(ROWS, columns - c)) - 1);
            const __m128i even = _mm_maskz_loadu_epi16(those, a + k * lda + c),
                          odd = _mm_maskz_loadu_epi16(those, a + (k + 1) * lda + c);
            pair *pairs = to[panel] + k / 2 * ROWS;
            _mm_storeu_si128((__m128i *)pairs, _mm_unpacklo_epi16(even, odd));
            _mm_storel_epi64((__m128i *)(pairs + 4), _mm_unpackhi_epi16(even, odd));
        }
}

// c (rows, COLUMNS) = or += panels of a and b. `rows` is a constant where this is called, so that all sums are in registers.
static inline __attribute__((always_inline)) void tile(const int rows, const pair *restrict a, const pair *restrict b,
                                                       int64_t depth, bool add, accum *restrict c, int64_t ldc) {
    __m512 sum[ROWS][VECTORS];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sum[i][v] = add ? _mm512_loadu_ps(c + i * ldc + 16 * v) : _mm512_setzero_ps();
    for (int64_t k = 0; k < depth; k += 2, a += ROWS, b += COLUMNS)
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                sum[i][v] =
                    _mm512_dpbf16_ps(sum[i][v], (__m512bh)_mm512_set1_epi32((int)a[i]), (__m512bh)_mm512_loadu_si512(b + 16 * v));
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) _mm512_storeu_ps(c + i * ldc + 16 * v, sum[i][v]);
}

// Meanwhile the sums of the next tile come into the cache.
static void tiles(pair (*a)[PAIRS * ROWS], const pair *b, int64_t depth, bool add, accum *c, int64_t ldc, int64_t rows) {
    for (; rows >= ROWS; rows -= ROWS, a++, c += ROWS * ldc) {
        for (int64_t i = ROWS; i < smaller(rows, 2 * ROWS); i++)
            for (int v = 0; v < VECTORS; v++) __builtin_prefetch(c + i * ldc + 16 * v, 1);
        tile(ROWS, *a, b, depth, add, c, ldc);
    }
    for (int64_t i = 0; i < rows; i++) tile(1, *a + i, b, depth, add, c + i * ldc, ldc);
}

bool gemm_transposed(int64_t m, int64_t n, int64_t k, const real *a, int64_t lda, const real *b, int64_t ldb, accum beta, accum *c,
                     int64_t ldc) {
    static pair *packed; // (n / COLUMNS, DEPTH / 2, COLUMNS)
    static int64_t room;
    // In a parallel region, of one thread, too: attention has the same products with any number of threads.
    if (n % COLUMNS != 0 || k % 2 != 0 || omp_get_level() > 0) return false;
    packed = cf_host_grow(packed, &room, n * PAIRS, sizeof *packed, "a packed factor");
    const int64_t part = smaller(PART, ceil_div(ceil_div(m, ROWS), gemm_threads()) * ROWS);
#pragma omp parallel
    for (int64_t begin = 0; begin < k; begin += DEPTH) {
        const int64_t depth = smaller(DEPTH, k - begin);
        pair packed_a[PART / ROWS][PAIRS * ROWS];
#pragma omp for
        for (int64_t column = 0; column < n; column += COLUMNS)
            pack_b(packed + column * PAIRS, b + begin * ldb + column, ldb, depth);
#pragma omp for
        for (int64_t row = 0; row < m; row += part) {
            const int64_t rows = smaller(part, m - row);
            pack_a(packed_a, a + begin * lda + row, lda, depth, rows);
            for (int64_t column = 0; column < n; column += COLUMNS)
                tiles(packed_a, packed + column * PAIRS, depth, beta != 0 || begin > 0, c + row * ldc + column, ldc, rows);
        }
    }
    return true;
}
#else
bool gemm_transposed(int64_t m, int64_t n, int64_t k, const real *a, int64_t lda, const real *b, int64_t ldb, accum beta, accum *c,
                     int64_t ldc) {
    return false;
}
#endif
