// Causal attention on the CPU, tile by tile.
//
// For a tile of queries and a tile of keys there are two products: scores = Q·Kᵀ, and after the softmax O += P·V. The softmax is
// a running one: each query keeps the maximum and the sum of exponentials so far, and a new maximum rescales the sum and the row
// of the output. gemm() does the products, on the calling thread; it is fast if tiles are large and their rows close to each
// other, so tiles are packed first (two rows of a head in qkv are B·(H + 2 KV)·D elements apart). Tiles above the diagonal are
// skipped; on it, columns that no query of the tile may see. With bf16 elements the factors of products are bf16, P and its
// gradient too, but scores and all sums are not.
//
// Forward: a task is a block of query tiles of one head; it packs a tile of keys and values once for all its query tiles. So
// large blocks are better, and they are cut only as far as threads need tasks: a range of few queries, as Query-Split has them,
// must not cost more per query than all of them.
//
// Backward: a task is a block of keys of one head, whose dk and dv it alone sums, over all heads of queries that share them; with
// enough heads for many threads, a block is the whole head. Each task has a partial dq in the scratch, and the partials are added
// in order.
//
// The cuts of backward depend on shapes alone, and those of forward do not change the tiles, so the order of every sum does not
// depend on the number of threads.
#include "attention.h"
#include "attention_cpu.h"
#include "gemm.h"
#include "math_real.h"

enum {
    QUERY_TILE = 64,                     // rows of scores at once
    KEY_TILE = 2048 / sizeof(accum),     // columns: all tiles must fit a stack of 2 MiB
    QUERY_BLOCK = 512,                   // rows of a forward task, at most
    TASKS_PER_THREAD = 4,                // forward: blocks are cut until each thread has so many tasks, or into single tiles
    PACK = KEY_TILE * 64,                // elements of a packed tile of keys: fewer rows of heads wider than 64
    PACK_QUERY = ATTENTION_CHANNELS_MAX, // the same for queries: a row of the widest head
};

typedef struct shape {
    int64_t t0, n, T, B, H, KV, D;
    int64_t sharing;          // heads of queries that share keys and values
    int64_t pairs;            // B·H: a pair is one head of one sequence
    int64_t qkv_row, out_row; // elements from one time step to the next
    int64_t key_tile, query_tile, query_block;
    accum scale;
} shape;

typedef struct span {
    int64_t begin, end;
} span;

static int64_t length(span s) {
    return s.end - s.begin;
}

int64_t attention_channels_max(void) {
    return ATTENTION_CHANNELS_MAX;
}

static shape shape_of(int64_t t0, int64_t n, int64_t T, int64_t B, int64_t H, int64_t KV, int64_t D) {
    shape s = {.t0 = t0, .n = n, .T = T, .B = B, .H = H, .KV = KV, .D = D, .sharing = H / KV};
    s.pairs = B * H;
    s.qkv_row = B * (H + 2 * KV) * D;
    s.out_row = B * H * D;
    s.key_tile = smaller(KEY_TILE, PACK / D);
    s.query_tile = smaller(QUERY_TILE, PACK_QUERY / D);
    int64_t tiles = smaller(QUERY_BLOCK, PACK / D) / s.query_tile;
    while (tiles > 1 && s.pairs * ceil_div(n, tiles * s.query_tile) < TASKS_PER_THREAD * gemm_threads()) tiles /= 2;
    s.query_block = tiles * s.query_tile;
    s.scale = 1 / sqrt((accum)D);
    return s;
}

enum { QUERY, KEY, VALUE };

// Offset in qkv (T, B, H + 2 KV, D) of the query of one head at time t, or of the key or value that it sees.
static int64_t qkv_at(const shape *s, int64_t t, int64_t pair, int64_t part) {
    int64_t b = pair / s->H, h = pair % s->H;
    int64_t head = part == QUERY ? h : s->H + (part - KEY) * s->KV + h / s->sharing;
    return t * s->qkv_row + (b * (s->H + 2 * s->KV) + head) * s->D;
}

// The same in out (T, B, H, D) and lse (B, H, T).
static int64_t out_at(const shape *s, int64_t t, int64_t pair) {
    return t * s->out_row + pair * s->D;
}
static int64_t lse_at(const shape *s, int64_t t, int64_t pair) {
    return pair * s->T + t;
}

// to (rows, D) = rows of `from` that are from_row elements apart
static void pack(real *restrict to, const real *restrict from, int64_t from_row, int64_t rows, int64_t D) {
    for (int64_t r = 0; r < rows; r++) memcpy(to + r * D, from + r * from_row, (size_t)D * sizeof(real));
}

static void add_rounded(real *restrict to, const accum *restrict from, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) to[i] = real_of(accum_of(to[i]) + from[i]);
}

// How many of these keys query t may see.
static int64_t visible(int64_t t, span keys) {
    return larger(0, smaller(keys.end, t + 1) - keys.begin);
}

// p = exp(scale · score − maximum) of one row of scores, zero after the `seen` columns. A new maximum rescales the sum and the row
// of the output so far.
static void softmax_row(real *restrict p, const accum *restrict score, int64_t seen, int64_t columns, accum scale,
                        accum *restrict maximum, accum *restrict sum, accum *restrict out, int64_t D) {
    accum highest = -INFINITY, row_sum = 0;
#pragma omp simd reduction(max : highest)
    for (int64_t c = 0; c < seen; c++) highest = score[c] > highest ? score[c] : highest;
    const accum before = *maximum, now = highest * scale > before ? highest * scale : before;
#pragma omp simd reduction(+ : row_sum)
    for (int64_t c = 0; c < seen; c++) {
        accum e = exp_real(scale * score[c] - now);
        row_sum += e;
        p[c] = real_of(e);
    }
    for (int64_t c = seen; c < columns; c++) p[c] = real_of(0);
    if (now > before && before > -INFINITY) {
        accum correction = exp_real(before - now);
        *sum *= correction;
#pragma omp simd
        for (int64_t d = 0; d < D; d++) out[d] *= correction;
    }
    *sum += row_sum;
    *maximum = now;
}

// Query rows q (rows, D) against one tile of keys. out (rows, D): not yet divided by sum.
static void forward_tile(accum *out, accum *maximum, accum *sum, const real *q, const real *k, const real *v, span rows, span keys,
                         const shape *s) {
    accum scores[QUERY_TILE * KEY_TILE];
    real p[QUERY_TILE * KEY_TILE];
    int64_t n = length(rows), columns = visible(rows.end - 1, keys), D = s->D;
    gemm_to_accum(false, true, n, columns, D, q, D, k, D, 0, scores, columns, NULL);
    for (int64_t r = 0; r < n; r++)
        softmax_row(p + r * columns, scores + r * columns, visible(rows.begin + r, keys), columns, s->scale, maximum + r, sum + r,
                    out + r * D, D);
    gemm_to_accum(false, false, n, D, columns, p, columns, v, D, keys.begin > 0, out, D, NULL);
}

static void forward_block(real *out, accum *lse, const real *qkv, int64_t pair, span block, const shape *s) {
    real q[PACK], k[PACK], v[PACK];
    accum o[PACK], maximum[QUERY_BLOCK], sum[QUERY_BLOCK];
    for (int64_t r = 0; r < length(block); r++) maximum[r] = -INFINITY, sum[r] = 0;
    pack(q, qkv + qkv_at(s, block.begin, pair, QUERY), s->qkv_row, length(block), s->D);
    for (int64_t at = 0; at < block.end; at += s->key_tile) {
        span keys = {at, smaller(at + s->key_tile, block.end)};
        pack(k, qkv + qkv_at(s, at, pair, KEY), s->qkv_row, length(keys), s->D);
        pack(v, qkv + qkv_at(s, at, pair, VALUE), s->qkv_row, length(keys), s->D);
        for (int64_t t = block.begin; t < block.end; t += s->query_tile) {
            span rows = {t, smaller(t + s->query_tile, block.end)};
            int64_t r = t - block.begin;
            if (rows.end > at) // not above the diagonal
                forward_tile(o + r * s->D, maximum + r, sum + r, q + r * s->D, k, v, rows, keys, s);
        }
    }
    for (int64_t r = 0; r < length(block); r++) {
        real *to = out + out_at(s, block.begin + r, pair);
        const accum *from = o + r * s->D, factor = 1 / sum[r];
#pragma omp simd
        for (int64_t d = 0; d < s->D; d++) to[d] = real_of(from[d] * factor); // NOLINT: every tile has set its sums
        lse[lse_at(s, block.begin + r, pair)] = maximum[r] + log(sum[r]);
    }
}

void attention_forward(real *out, accum *lse, const real *qkv, int64_t t0, int64_t n, int64_t T, int64_t B, int64_t H, int64_t KV,
                       int64_t D, cf_stream *stream) {
    if (n == 0) return;
    const shape s = shape_of(t0, n, T, B, H, KV, D);
    const int64_t blocks = ceil_div(n, s.query_block);
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t i = 0; i < blocks; i++) {
        for (int64_t pair = 0; pair < s.pairs; pair++) {
            int64_t begin = t0 + (blocks - 1 - i) * s.query_block; // the longest rows first
            forward_block(out, lse, qkv, pair, (span){begin, smaller(begin + s.query_block, t0 + n)}, &s);
        }
    }
}

int64_t attention_scratch(int64_t T, int64_t B, int64_t H, int64_t KV, int64_t D) {
    return attention_cpu_scratch(T, B, H, KV, D);
}

// A tile of keys and values with their gradients, packed.
typedef struct key_tile {
    span keys;
    real k[PACK], v[PACK]; // (keys, D)
    accum dk[PACK], dv[PACK];
} key_tile;

// p = exp(scale · score − lse), dscore = p · (dp − delta) · scale, of one row
static void softmax_row_backward(real *restrict p, real *restrict dscore, const accum *restrict score, const accum *restrict dp,
                                 int64_t seen, int64_t columns, accum scale, accum lse, accum delta) {
#pragma omp simd
    for (int64_t c = 0; c < seen; c++) {
        accum e = exp_real(scale * score[c] - lse);
        p[c] = real_of(e);
        dscore[c] = real_of(e * (dp[c] - delta) * scale);
    }
    for (int64_t c = seen; c < columns; c++) p[c] = dscore[c] = real_of(0);
}

// Query rows q, dout (rows, D) against one tile of keys. dq: their first row, written if beta is 0.
static void backward_tile(accum *dq, accum beta, key_tile *tile, const real *q, const real *dout, const accum *lse,
                          const accum *delta, span rows, const shape *s) {
    accum scores[QUERY_TILE * KEY_TILE], dp[QUERY_TILE * KEY_TILE];
    real p[QUERY_TILE * KEY_TILE], dscores[QUERY_TILE * KEY_TILE];
    int64_t n = length(rows), columns = visible(rows.end - 1, tile->keys), D = s->D;
    gemm_to_accum(false, true, n, columns, D, q, D, tile->k, D, 0, scores, columns, NULL);
    gemm_to_accum(false, true, n, columns, D, dout, D, tile->v, D, 0, dp, columns, NULL);
    for (int64_t r = 0; r < n; r++)
        softmax_row_backward(p + r * columns, dscores + r * columns, scores + r * columns, dp + r * columns,
                             visible(rows.begin + r, tile->keys), columns, s->scale, lse[r], delta[r * s->pairs]);
    gemm_to_accum(true, false, columns, D, n, p, columns, dout, D, 1, tile->dv, D, NULL);
    gemm_to_accum(true, false, columns, D, n, dscores, columns, q, D, 1, tile->dk, D, NULL);
    gemm_to_accum(false, false, n, D, columns, dscores, columns, tile->k, D, beta, dq, s->out_row, NULL);
}

typedef struct backward {
    real *dqkv;
    const real *dout, *qkv;
    const accum *lse;
    accum *delta;    // (n, B, H): sum over D of dout · out
    accum *partials; // (blocks, n, B, H, D): of dq
    const shape *s;
} backward;

// The partial dq of block i at time t.
static accum *partial_at(const backward *a, int64_t i, int64_t t, int64_t pair) {
    return a->partials + (i * a->s->n + t - a->s->t0) * a->s->out_row + pair * a->s->D;
}

// All queries of the range against one tile of keys of block i, the block's first or not. first_pair: of those that share the keys.
static void backward_keys(const backward *a, int64_t i, int64_t first_pair, span keys, bool first) {
    const shape *s = a->s;
    const int64_t D = s->D, bytes = length(keys) * D * (int64_t)sizeof(accum);
    key_tile tile;
    real q[PACK_QUERY], dout[PACK_QUERY]; // (rows, D)
    tile.keys = keys;
    pack(tile.k, a->qkv + qkv_at(s, keys.begin, first_pair, KEY), s->qkv_row, length(keys), D);
    pack(tile.v, a->qkv + qkv_at(s, keys.begin, first_pair, VALUE), s->qkv_row, length(keys), D);
    memset(tile.dk, 0, (size_t)bytes);
    memset(tile.dv, 0, (size_t)bytes);
    for (int64_t pair = first_pair; pair < first_pair + s->sharing; pair++)
        for (int64_t t = larger(s->t0, keys.begin); t < s->t0 + s->n; t += s->query_tile) {
            span rows = {t, smaller(t + s->query_tile, s->t0 + s->n)};
            pack(q, a->qkv + qkv_at(s, t, pair, QUERY), s->qkv_row, length(rows), D);
            pack(dout, a->dout + out_at(s, t, pair), s->out_row, length(rows), D);
            backward_tile(partial_at(a, i, t, pair), !first, &tile, q, dout, a->lse + lse_at(s, t, pair),
                          a->delta + (t - s->t0) * s->pairs + pair, rows, s);
        }
    for (int64_t r = 0; r < length(keys); r++) {
        add_rounded(a->dqkv + qkv_at(s, keys.begin + r, first_pair, KEY), tile.dk + r * D, D);
        add_rounded(a->dqkv + qkv_at(s, keys.begin + r, first_pair, VALUE), tile.dv + r * D, D);
    }
}

static void output_dot_gradient(accum *delta, const real *dout, const real *out, const shape *s) {
#pragma omp parallel for
    for (int64_t i = 0; i < s->n * s->pairs; i++) {
        const real *o = out + s->t0 * s->out_row + i * s->D, *d = dout + s->t0 * s->out_row + i * s->D;
        accum sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < s->D; j++) sum += accum_of(o[j]) * accum_of(d[j]);
        delta[i] = sum;
    }
}

// dq of every query += the partials of the blocks whose keys it sees, summed in order in the first one's memory.
static void add_partials(const backward *a, int64_t blocks, int64_t block) {
    const shape *s = a->s;
#pragma omp parallel for
    for (int64_t t = s->t0; t < s->t0 + s->n; t++) {
        accum *sum = partial_at(a, 0, t, 0); // (B, H, D)
        for (int64_t i = 1; i < blocks && i * block <= t; i++) {
            const accum *partial = partial_at(a, i, t, 0);
#pragma omp simd
            for (int64_t j = 0; j < s->out_row; j++) sum[j] += partial[j];
        }
        for (int64_t pair = 0; pair < s->pairs; pair++) add_rounded(a->dqkv + qkv_at(s, t, pair, QUERY), sum + pair * s->D, s->D);
    }
}

void attention_backward(real *dqkv, const real *dout, const real *out, const accum *lse, const real *qkv, accum *scratch,
                        int64_t t0, int64_t n, int64_t T, int64_t B, int64_t H, int64_t KV, int64_t D, bool first,
                        cf_stream *stream) {
    if (first) cf_zero(dqkv, T * B * (H + 2 * KV) * D * (int64_t)sizeof(real), stream);
    if (n == 0) return;
    const shape s = shape_of(t0, n, T, B, H, KV, D);
    const int64_t keys = t0 + n, blocks = attention_cpu_key_blocks(keys, B * KV), block = ceil_div(keys, blocks);
    const backward a = {dqkv, dout, qkv, lse, scratch, scratch + n * s.pairs, &s};
    output_dot_gradient(a.delta, dout, out, &s);
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t i = 0; i < blocks; i++) { // the first keys have the most queries
        for (int64_t pair = 0; pair < s.pairs; pair += s.sharing) {
            int64_t end = smaller((i + 1) * block, keys);
            for (int64_t k = i * block; k < end; k += s.key_tile)
                backward_keys(&a, i, pair, (span){k, smaller(k + s.key_tile, end)}, k == i * block);
        }
    }
    add_partials(&a, blocks, block);
}

bool attention_backward_by_ranges(void) {
    return true;
}
