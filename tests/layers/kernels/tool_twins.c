// Calls every function of the layers that has a twin on the other device, with the same inputs everywhere, and writes the
// outputs into a file, for tests/layers/kernels/compare_twins.py to compare with another build's:
//
//     tool_twins OUT [--seed N] [--round] [--repeat] [--small] [--only NAMES] [--except NAMES] [--threads N]
//
//     --round    inputs of type `real` are rounded to bf16 in every build, so that a float build can be compared
//                with a bf16 build, where it is required
//     --repeat   each case twice: the same bits, and no more memory than after the first time
//     --small    leave the large cases out, for sanitizers
//     --only     cases of these names, with commas between them: linear, attention and others, see `fixed`
//     --except   all cases but those of these names
//     --threads  of a CPU build, which must not change a bit of most results
//
// One case is one shape of one header's functions. It makes its inputs from (seed, case, tensor, index), so the
// same case sees the same inputs in every build and in every run; outputs that a function must write whole start
// as NaN, outputs that it adds to start as random numbers, scratch memory as NaN. Every second case (not of the
// cross-entropy) starts its tensors one element after an aligned address. Rows that a function must not write, and
// the memory around each tensor, must not change. A fault is printed at once, and the exit status is 1.
//
// The file: a line of JSON that says what wrote it, then for each output a line of JSON (function, tensor, case,
// whether it is of type `real`, type f4 or f8, count) and its elements, in the order of this machine's bytes.
#include "tensors.h"
#include "layers/optimizer/muon.h"
#include "layers/optimizer/update.h"
#include "layers/kernels/attention.h"
#include "layers/kernels/crossentropy.h"
#include "layers/kernels/elementwise.h"
#include "layers/kernels/embedding.h"
#include "layers/kernels/layernorm.h"
#include "layers/kernels/linear.h"
#include <stdarg.h>
#include <stdio.h>

enum { TENSORS_MAX = 64, NUMBERS = 6, PARTS = 5 };

typedef struct tool {
    cf_stream *stream;
    uint64_t seed, case_number, draws; // draws: random tensors and sizes of this case so far
    bool round, repeat, small;
    const char *only, *except;
    int64_t shift;
    char shape[128];
    tensor tensors[TENSORS_MAX]; // of this case
    int count;
    char *records; // of this case
    int64_t size, capacity;
    int faults, cases, others; // products by another algorithm than the library's first
    FILE *out;
} tool;

static void fault(tool *t, const char *format, ...) CF_PRINTF(2, 3);
static void fault(tool *t, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "FAULT %s: ", t->shape);
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    t->faults++;
}

static void shape_is(tool *t, const char *format, ...) CF_PRINTF(2, 3);
static void shape_is(tool *t, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(t->shape, sizeof t->shape, format, arguments);
    va_end(arguments);
    snprintf(t->shape + length, sizeof t->shape - (size_t)length, " shift %lld", (long long)t->shift);
}

// --- tensors of a case ---

static uint64_t next_number(tool *t) {
    return t->case_number << 16 | ++t->draws;
}

static tensor *poisoned(tool *t, element of, int64_t count) {
    if (t->count == TENSORS_MAX) cf_die(NULL, "%s: more than %d tensors", t->shape, TENSORS_MAX);
    tensor *x = &t->tensors[t->count++];
    *x = tensor_create(of, count, t->shift, t->stream);
    return x;
}

static tensor *randoms(tool *t, element of, int64_t count, double middle, double spread) {
    tensor *x = poisoned(t, of, count);
    tensor_random(x, t->seed, next_number(t), middle, spread, t->round && of == OF_REAL, t->stream);
    return x;
}

static tensor *integers(tool *t, element of, int64_t count, int64_t low, int64_t high) {
    tensor *x = poisoned(t, of, count);
    tensor_integers(x, t->seed, next_number(t), low, high, t->stream);
    return x;
}

static tensor *copy_of(tool *t, const tensor *x) {
    tensor *y = poisoned(t, x->of, x->count);
    cf_copy(y->at, x->at, tensor_bytes(x), t->stream);
    return y;
}

static int64_t draw(tool *t, int64_t low, int64_t high) { // both included
    return low + (int64_t)(random_uniform(t->seed, next_number(t), 0) * (double)(high - low + 1));
}

// --- records ---

static void append(tool *t, const void *bytes, int64_t size) {
    if (t->size + size > t->capacity) {
        t->capacity = 2 * (t->size + size);
        t->records = realloc(t->records, (size_t)t->capacity);
        if (!t->records) cf_die("use --small", "out of memory for %lld bytes", (long long)t->capacity);
    }
    memcpy(t->records + t->size, bytes, (size_t)size);
    t->size += size;
}

// Rows of a tensor, `row` elements each.
static void keep_rows(tool *t, const char *function, const char *name, const tensor *x, int64_t first, int64_t rows, int64_t row) {
    bool wide = element_size(x->of) == 8;
    char line[512], *host = tensor_read(x, t->stream);
    int64_t count = rows * row;
    int length = snprintf(line, sizeof line,
                          "{\"function\":\"%s\",\"tensor\":\"%s\",\"case\":\"%s\",\"real\":%s,\"type\":\"%s\","
                          "\"count\":%lld}\n",
                          function, name, t->shape, x->of == OF_REAL ? "true" : "false", wide ? "f8" : "f4", (long long)count);
    append(t, line, length);
    for (int64_t i = 0; i < count; i++) {
        double value = element_get(host, x->of, first * row + i);
        float narrow = (float)value;
        append(t, wide ? (void *)&value : (void *)&narrow, wide ? 8 : 4);
    }
    free(host);
}

static void keep(tool *t, const char *function, const char *name, const tensor *x) {
    keep_rows(t, function, name, x, 0, 1, x->count);
}

// Rows [first, first + rows) are written, the others are still poison.
static void others_untouched(tool *t, const char *function, const char *name, const tensor *x, int64_t first, int64_t rows,
                             int64_t row) {
    char *host = tensor_read(x, t->stream);
    int64_t bytes = row * element_size(x->of), before = first * bytes, after = (first + rows) * bytes;
    if (!all_poison(host, before) || !all_poison(host + after, tensor_bytes(x) - after))
        fault(t, "%s has written rows of %s outside %lld … %lld", function, name, (long long)first, (long long)(first + rows - 1));
    free(host);
}

// --- linear ---

static void linear_wgrads(tool *t, const tensor *dy, const tensor *x, int64_t R, int64_t IC, int64_t OC) {
    int64_t from = draw(t, 0, OC - 1), rows = draw(t, 1, OC - from);
    tensor *dw = randoms(t, OF_ACCUM, OC * IC, 0, 1), *db = randoms(t, OF_ACCUM, OC, 0, 1),
           *some = randoms(t, OF_ACCUM, rows * IC, 0, 1), *with_weights = randoms(t, OF_ACCUM, OC, 0, 1);
    tensor *written = poisoned(t, OF_ACCUM, rows * IC);
    linear_wgrad(accums(dw), NULL, reals(dy), OC, reals(x), R, IC, OC, true, t->stream);
    keep(t, "linear_wgrad", "dw", dw);
    linear_wgrad(accums(some), NULL, reals(dy) + from, OC, reals(x), R, IC, rows, true, t->stream);
    keep(t, "linear_wgrad_rows", "dw", some);
    linear_wgrad(accums(written), NULL, reals(dy) + from, OC, reals(x), R, IC, rows, false, t->stream);
    keep(t, "linear_wgrad_rows", "dw, written", written);
    linear_bias_grad(accums(db), reals(dy), R, OC, t->stream);
    keep(t, "linear_bias_grad", "db", db);
    linear_wgrad(accums(dw), accums(with_weights), reals(dy), OC, reals(x), R, IC, OC, false, t->stream);
    keep(t, "linear_wgrad", "dw, with db", dw);
    keep(t, "linear_bias_grad", "db, with dw", with_weights);
}

static const real *for_forward(tool *t, tensor *w, int64_t IC, int64_t OC) {
    tensor *place = poisoned(t, OF_REAL, linear_prepared_size(IC, OC));
    return linear_prepare_forward(reals(place), reals(w), IC, OC, t->stream);
}
static const real *for_dgrad(tool *t, tensor *w, int64_t IC, int64_t OC) {
    tensor *place = poisoned(t, OF_REAL, linear_prepared_size(IC, OC));
    return linear_prepare_dgrad(reals(place), reals(w), IC, OC, t->stream);
}

static void run_linear_gelu(tool *t, tensor *x, tensor *w, tensor *bias, tensor *dy, const int64_t *n) {
    int64_t R = n[0], IC = n[1], OC = n[2];
    tensor *pre = poisoned(t, OF_REAL, R * OC), *out = poisoned(t, OF_REAL, R * OC), *dpre = poisoned(t, OF_REAL, R * IC);
    linear_forward(reals(out), reals(pre), reals(x), for_forward(t, w, IC, OC), reals(bias), NULL, linear_all(R), IC, OC,
                   t->stream);
    keep(t, "linear_forward_gelu", "out", out);
    keep(t, "linear_forward_gelu", "pre", pre);
    linear_dgrad(reals(dpre), reals(dy), for_dgrad(t, w, IC, OC), reals(x), false, linear_all(R), IC, OC, t->stream);
    keep(t, "linear_dgrad_gelu", "dpre", dpre);
}

// Three blocks of rows, with a gap between them in the input.
static void run_linear_blocks(tool *t, tensor *w, tensor *bias, const int64_t *n) {
    int64_t IC = n[1], OC = n[2];
    linear_rows r = {.blocks = 3, .rows = n[0], .in = n[0] + 2, .out = n[0]};
    tensor *x = randoms(t, OF_REAL, r.blocks * r.in * IC, 0, 1), *dy = randoms(t, OF_REAL, r.blocks * r.in * OC, 0, 1),
           *before = randoms(t, OF_REAL, r.blocks * r.out * IC, 0, 1);
    tensor *out = poisoned(t, OF_REAL, r.blocks * r.out * OC), *pre = poisoned(t, OF_REAL, r.blocks * r.out * OC),
           *gelu = poisoned(t, OF_REAL, r.blocks * r.out * OC), *plain = poisoned(t, OF_REAL, r.blocks * r.out * OC),
           *dx = poisoned(t, OF_REAL, r.blocks * r.out * IC), *dpre = poisoned(t, OF_REAL, r.blocks * r.out * IC);
    const real *ready = for_forward(t, w, IC, OC);
    linear_forward(reals(out), NULL, reals(x), ready, reals(bias), NULL, r, IC, OC, t->stream);
    keep(t, "linear_forward_blocks", "out", out);
    linear_forward(reals(plain), NULL, reals(x), ready, NULL, NULL, r, IC, OC, t->stream);
    keep(t, "linear_forward_blocks", "out, no bias", plain);
    linear_forward(reals(gelu), reals(pre), reals(x), ready, reals(bias), NULL, r, IC, OC, t->stream);
    keep(t, "linear_forward_gelu_blocks", "out", gelu);
    keep(t, "linear_forward_gelu_blocks", "pre", pre);
    ready = for_dgrad(t, w, IC, OC);
    linear_dgrad(reals(dx), reals(dy), ready, NULL, false, r, IC, OC, t->stream);
    keep(t, "linear_dgrad_blocks", "dx", dx);
    linear_dgrad(reals(dpre), reals(dy), ready, reals(before), false, r, IC, OC, t->stream);
    keep(t, "linear_dgrad_gelu_blocks", "dpre", dpre);
}

static void run_linear(tool *t, const int64_t *n) {
    int64_t R = n[0], IC = n[1], OC = n[2];
    shape_is(t, "R %lld IC %lld OC %lld", (long long)R, (long long)IC, (long long)OC);
    tensor *x = randoms(t, OF_REAL, R * IC, 0, 1), *w = randoms(t, OF_REAL, OC * IC, 0, 1 / sqrt((double)IC)),
           *bias = randoms(t, OF_REAL, OC, 0, 1), *dy = randoms(t, OF_REAL, R * OC, 0, 1), *out = poisoned(t, OF_REAL, R * OC),
           *plain = poisoned(t, OF_REAL, R * OC), *sum = randoms(t, OF_REAL, R * OC, 0, 1), *dx = poisoned(t, OF_REAL, R * IC),
           *dx_sum = randoms(t, OF_REAL, R * IC, 0, 1);
    const real *ready = for_forward(t, w, IC, OC);
    linear_forward(reals(out), NULL, reals(x), ready, reals(bias), NULL, linear_all(R), IC, OC, t->stream);
    keep(t, "linear_forward", "out", out);
    linear_forward(reals(plain), NULL, reals(x), ready, NULL, NULL, linear_all(R), IC, OC, t->stream);
    keep(t, "linear_forward", "out, no bias", plain);
    t->others += linear_algorithm() > 0;
    tensor *other = poisoned(t, OF_REAL, R * OC);
    linear_time_algorithms(false);
    linear_forward(reals(other), NULL, reals(x), ready, NULL, NULL, linear_all(R), IC, OC, t->stream);
    linear_time_algorithms(true);
    keep(t, "linear_forward", "out, by the first algorithm of the list", other);
    linear_forward(reals(sum), NULL, reals(x), ready, NULL, reals(sum), linear_all(R), IC, OC, t->stream);
    keep(t, "linear_forward_add", "out", sum);
    linear_forward(reals(plain), NULL, reals(x), ready, reals(bias), reals(dy), linear_all(R), IC, OC, t->stream);
    keep(t, "linear_forward_add", "out, to another and a bias", plain);
    ready = for_dgrad(t, w, IC, OC);
    linear_dgrad(reals(dx), reals(dy), ready, NULL, false, linear_all(R), IC, OC, t->stream);
    keep(t, "linear_dgrad", "dx", dx);
    linear_dgrad(reals(dx_sum), reals(dy), ready, NULL, true, linear_all(R), IC, OC, t->stream);
    keep(t, "linear_dgrad_add", "dx", dx_sum);
    linear_wgrads(t, dy, x, R, IC, OC);
    run_linear_gelu(t, x, w, bias, dy, n);
    run_linear_blocks(t, w, bias, n);
}

// More kinds of products than a library's plans are kept of, each of them twice.
static void run_many_linears(tool *t, const int64_t *n) {
    int64_t kinds = n[0], IC = 8, OC = 16;
    shape_is(t, "kinds %lld", (long long)kinds);
    tensor *x = randoms(t, OF_REAL, kinds * IC, 0, 1), *w = randoms(t, OF_REAL, OC * IC, 0, 1);
    tensor *out = poisoned(t, OF_REAL, kinds * OC);
    const real *ready = for_forward(t, w, IC, OC);
    for (int64_t i = 0; i < 2 * kinds; i++)
        linear_forward(reals(out), NULL, reals(x), ready, NULL, NULL, linear_all(i % kinds + 1), IC, OC, t->stream);
    keep(t, "linear_forward", "out, many kinds", out);
}

// --- attention ---

typedef struct heads {
    int64_t T, B, H, KV, D, apart; // apart: how far scores are from 0; rounding then shows more
    tensor *qkv, *dout, *out, *lse, *scratch;
} heads;

typedef struct ranges {
    int count;
    int64_t begin[PARTS], length[PARTS];
} ranges;

// [0, T) cut at random places. Lengths may be 1, and 0 where T is small.
static ranges cut(tool *t, int64_t T) {
    ranges r = {.count = PARTS};
    int64_t at = 0;
    for (int i = 0; i < PARTS; i++) {
        r.begin[i] = at;
        r.length[i] = i == PARTS - 1 ? T - at : draw(t, 0, 2 * (T - at) / (PARTS - i));
        if (r.length[i] > T - at) r.length[i] = T - at;
        at += r.length[i];
    }
    return r;
}

// Queries up, keys down: all scores are then near −apart. A library that takes exp(−lse) of a key that is not there has
// infinity where lse is below −88.7 (cuDNN's backward has done so: NVIDIA/cudnn-frontend#628).
static void move_apart(const tool *t, const heads *h) {
    double far = sqrt((double)h->apart / sqrt((double)h->D));
    char *host = tensor_read(h->qkv, t->stream);
    for (int64_t i = 0; i < h->qkv->count; i++) {
        int64_t head = i / h->D % (h->H + 2 * h->KV);
        double by = head < h->H ? far : head < h->H + h->KV ? -far : 0;
        float value = (float)(element_get(host, OF_REAL, i) + by);
        element_set(host, OF_REAL, i, t->round ? cf_float_of_bf16(cf_bf16_of_float(value)) : value);
    }
    tensor_write(h->qkv, host, t->stream);
    free(host);
}

static void attention_forwards(tool *t, heads *h, const ranges *parts, int64_t t0, int64_t n) {
    const int64_t T = h->T, B = h->B, H = h->H, KV = h->KV, D = h->D;
    h->out = poisoned(t, OF_REAL, T * B * H * D), h->lse = poisoned(t, OF_ACCUM, T * B * H);
    attention_forward(reals(h->out), accums(h->lse), reals(h->qkv), 0, T, T, B, H, KV, D, t->stream);
    keep(t, "attention_forward", "out", h->out);
    keep(t, "attention_forward", "lse", h->lse);
    tensor *out = poisoned(t, OF_REAL, T * B * H * D), *lse = poisoned(t, OF_ACCUM, T * B * H);
    for (int i = 0; i < parts->count; i++)
        attention_forward(reals(out), accums(lse), reals(h->qkv), parts->begin[i], parts->length[i], T, B, H, KV, D, t->stream);
    keep(t, "attention_forward", "out, in ranges", out);
    keep(t, "attention_forward", "lse, in ranges", lse);
    tensor *some = poisoned(t, OF_REAL, T * B * H * D), *some_lse = poisoned(t, OF_ACCUM, T * B * H);
    attention_forward(reals(some), accums(some_lse), reals(h->qkv), t0, n, T, B, H, KV, D, t->stream);
    keep_rows(t, "attention_forward", "out, one range", some, t0, n, B * H * D);
    others_untouched(t, "attention_forward", "out", some, t0, n, B * H * D);
    char *host = tensor_read(some_lse, t->stream);
    const int64_t size = element_size(OF_ACCUM);
    for (int64_t row = 0; row < B * H * T * size; row += T * size) // (B, H, T)
        if (!all_poison(host + row, t0 * size) || !all_poison(host + row + (t0 + n) * size, (T - t0 - n) * size))
            fault(t, "attention_forward has written lse outside its range");
    free(host);
}

static void run_attention(tool *t, const int64_t *n) {
    heads h = {.T = n[0], .B = n[1], .H = n[2], .D = n[3], .apart = n[4], .KV = n[5] > 0 ? n[5] : n[2]};
    shape_is(t, "T %lld B %lld H %lld KV %lld D %lld apart %lld", (long long)h.T, (long long)h.B, (long long)h.H, (long long)h.KV,
             (long long)h.D, (long long)h.apart);
    h.qkv = randoms(t, OF_REAL, h.T * h.B * (h.H + 2 * h.KV) * h.D, 0, 1);
    if (h.apart) move_apart(t, &h);
    h.dout = randoms(t, OF_REAL, h.T * h.B * h.H * h.D, 0, 1);
    h.scratch = poisoned(t, OF_ACCUM, attention_scratch(h.T, h.B, h.H, h.KV, h.D));
    ranges parts = cut(t, h.T);
    int64_t t0 = draw(t, 0, h.T - 1), some = draw(t, 1, h.T - t0);
    attention_forwards(t, &h, &parts, t0, some);
    tensor *dqkv = poisoned(t, OF_REAL, h.qkv->count);
    attention_backward(reals(dqkv), reals(h.dout), reals(h.out), accums(h.lse), reals(h.qkv), accums(h.scratch), 0, h.T, h.T, h.B,
                       h.H, h.KV, h.D, true, t->stream);
    keep(t, h.apart ? "attention_backward_apart" : "attention_backward", "dqkv", dqkv);
}

// --- layer norm ---

// Of one to four parts, and what they are added to: whole numbers, whose sums are exact in every type.
static cf_sum random_sum(tool *t, int64_t count) {
    const int parts = (int)draw(t, 1, 4);
    const int64_t stride = count + draw(t, 0, 1) * 3;
    tensor *to = integers(t, OF_REAL, count, -8, 8), *from = integers(t, OF_REAL, parts * stride, -8, 8);
    return (cf_sum){reals(to), reals(from), parts, stride};
}

static void run_layernorm(tool *t, const int64_t *n) {
    int64_t R = n[0], C = n[1];
    shape_is(t, "R %lld C %lld", (long long)R, (long long)C);
    tensor *x = randoms(t, OF_REAL, R * C, 4, 2), *w = randoms(t, OF_REAL, C, 1, 0.5), *b = randoms(t, OF_REAL, C, 0, 1),
           *dy = randoms(t, OF_REAL, R * C, 0, 1), *out = poisoned(t, OF_REAL, R * C), *mean = poisoned(t, OF_ACCUM, R),
           *rstd = poisoned(t, OF_ACCUM, R), *dx = randoms(t, OF_REAL, R * C, 0, 0.5), *dw = randoms(t, OF_ACCUM, C, 0, 1),
           *db = randoms(t, OF_ACCUM, C, 0, 1), *scratch = poisoned(t, OF_ACCUM, layernorm_scratch(C)),
           *dbias = randoms(t, OF_ACCUM, C, 0, 1);
    layernorm_forward(reals(out), accums(mean), accums(rstd), reals(x), reals(w), reals(b), 1e-5, R, C, t->stream);
    keep(t, "layernorm_forward", "out", out);
    keep(t, "layernorm_forward", "mean", mean);
    keep(t, "layernorm_forward", "rstd", rstd);
    layernorm_backward(reals(dx), accums(dw), accums(db), accums(dbias), whole_sum(reals(dy)), reals(x), reals(w), accums(mean),
                       accums(rstd), accums(scratch), R, C, t->stream);
    keep(t, "layernorm_backward", "dx", dx);
    keep(t, "layernorm_backward", "dw", dw);
    keep(t, "layernorm_backward", "db", db);
    keep(t, "layernorm_backward", "dbias", dbias);
    cf_sum parts = random_sum(t, R * C);
    dx = randoms(t, OF_REAL, R * C, 0, 0.5);
    layernorm_backward(reals(dx), accums(dw), accums(db), NULL, parts, reals(x), reals(w), accums(mean), accums(rstd),
                       accums(scratch), R, C, t->stream);
    keep(t, "layernorm_backward", "dx of parts", dx);
    keep(t, "layernorm_backward", "dw of parts", dw);
    keep(t, "layernorm_backward", "db of parts", db);
    // Without mean and biases.
    dx = randoms(t, OF_REAL, R * C, 0, 0.5);
    layernorm_forward(reals(out), NULL, accums(rstd), reals(x), reals(w), NULL, 1e-6, R, C, t->stream);
    keep(t, "rmsnorm_forward", "out", out);
    keep(t, "rmsnorm_forward", "rstd", rstd);
    layernorm_backward(reals(dx), accums(dw), NULL, NULL, whole_sum(reals(dy)), reals(x), reals(w), NULL, accums(rstd),
                       accums(scratch), R, C, t->stream);
    keep(t, "rmsnorm_backward", "dx", dx);
    keep(t, "rmsnorm_backward", "dw", dw);
}

// --- GELU and residual ---

static void run_elementwise(tool *t, const int64_t *n) {
    int64_t R = n[0], C = n[1], count = R * C;
    shape_is(t, "R %lld C %lld", (long long)R, (long long)C);
    tensor *x = randoms(t, OF_REAL, count, 0, 2), *y = randoms(t, OF_REAL, count, 0, 1), *bias = randoms(t, OF_REAL, C, 0, 1),
           *out = poisoned(t, OF_REAL, count), *dx = poisoned(t, OF_REAL, count), *dy = copy_of(t, y), *over = copy_of(t, x),
           *sum = poisoned(t, OF_REAL, count), *in_place = copy_of(t, x);
    activation_forward(reals(out), reals(x), count, t->stream);
    keep(t, "gelu_forward", "out", out);
    activation_backward(reals(dx), reals(y), reals(x), count, t->stream);
    keep(t, "gelu_backward", "dx", dx);
    activation_backward(reals(dy), reals(dy), reals(x), count, t->stream);
    keep(t, "gelu_backward", "dx is dy", dy);
    activation_backward(reals(over), reals(y), reals(over), count, t->stream);
    keep(t, "gelu_backward", "dx is x", over);
    tensor *sums = randoms(t, OF_ACCUM, count, 0, 1), *rounded = poisoned(t, OF_REAL, count),
           *widened = poisoned(t, OF_ACCUM, count);
    convert_to_real(reals(rounded), accums(sums), count, t->stream);
    keep(t, "convert_to_real", "to", rounded);
    convert_to_accum(accums(widened), reals(x), count, t->stream);
    keep(t, "convert_to_accum", "to", widened);
    residual_forward(reals(sum), reals(x), whole_sum(reals(y)), reals(bias), R, C, t->stream);
    keep(t, "residual_forward", "out", sum);
    residual_forward(reals(in_place), reals(in_place), whole_sum(reals(y)), reals(bias), R, C, t->stream);
    keep(t, "residual_forward", "out is x", in_place);
    residual_forward(reals(sum), reals(x), random_sum(t, count), reals(bias), R, C, t->stream);
    keep(t, "residual_forward", "out of parts", sum);
    residual_forward(reals(sum), reals(x), whole_sum(reals(y)), NULL, R, C, t->stream);
    keep(t, "residual_forward", "out without bias", sum);
    tensor *gates = randoms(t, OF_REAL, 2 * count, 0, 2), *others = copy_of(t, gates), *again = poisoned(t, OF_REAL, count);
    gated_forward(reals(out), reals(gates), R, C, t->stream);
    keep(t, "gated_forward", "out", out);
    gated_backward(reals(gates), reals(again), reals(y), R, C, t->stream);
    keep(t, "gated_backward", "pre", gates);
    keep(t, "gated_backward", "out", again);
    gated_backward(reals(others), NULL, reals(y), R, C, t->stream);
    keep(t, "gated_backward", "pre alone", others);
}

// --- embeddings ---

// Tokens of a vocabulary of V, of which rows [first, first + count) are held here.
static void run_embedding(tool *t, const int64_t *n) {
    int64_t T = n[0], B = n[1], C = n[2], V = n[3], first = n[4], count = n[5], R = T * B, t0 = T / 3;
    shape_is(t, "T %lld B %lld C %lld V %lld rows %lld to %lld", (long long)T, (long long)B, (long long)C, (long long)V,
             (long long)first, (long long)(first + count - 1));
    tensor *tokens = integers(t, OF_INT32, R, 0, V), *wte = randoms(t, OF_REAL, count * C, 0, 1),
           *wpe = randoms(t, OF_REAL, (t0 + T) * C, 0, 1), *dout = randoms(t, OF_REAL, R * C, 0, 1),
           *out = poisoned(t, OF_REAL, R * C), *x = randoms(t, OF_REAL, R * C, 0, 1), *dwte = randoms(t, OF_ACCUM, count * C, 0, 1),
           *sums = randoms(t, OF_ACCUM, R * C, 0, 1), *dwpe = randoms(t, OF_ACCUM, (t0 + T) * C, 0, 1);
    // Three heads of four, of 2 C channels.
    tensor *heads_of = randoms(t, OF_REAL, R * 8 * C, 0, 1), *table = randoms(t, OF_ACCUM, T * 2 * C, 0, 1);
    for (int back = 0; back < 2; back++) {
        tensor *turned = copy_of(t, heads_of);
        rotary_turn(reals(turned), accums(table), back, T, B, 3, 2 * C, 8 * C, t->stream);
        keep(t, "rotary_turn", back ? "x, turned back" : "x", turned);
    }
    embedding_forward(reals(out), tokens_of(tokens), reals(wte), first, count, R, C, t->stream);
    keep(t, "embedding_forward", "out", out);
    embedding_backward(accums(dwte), reals(dout), false, tokens_of(tokens), first, count, R, C, t->stream);
    keep(t, "embedding_backward", "dwte", dwte);
    embedding_backward(accums(dwte), accums(sums), true, tokens_of(tokens), first, count, R, C, t->stream);
    keep(t, "embedding_backward", "dwte of wide rows", dwte);
    position_forward(reals(x), reals(wpe), t0, T, B, C, t->stream);
    keep(t, "position_forward", "x", x);
    position_backward(accums(dwpe), reals(dout), t0, T, B, C, t->stream);
    keep(t, "position_backward", "dwpe", dwpe);
}

// --- cross-entropy ---

// The three numbers of each row as several ranks would give them; the last rank holds padding alone.
static tensor *stats_of_ranks(tool *t, int64_t ranks, int64_t R) {
    tensor *all = poisoned(t, OF_ACCUM, ranks * R * 3);
    uint64_t number = next_number(t);
    void *host = host_memory(tensor_bytes(all));
    for (int64_t i = 0; i < ranks * R; i++) {
        int64_t rank = i / R, row = i % R;
        double u = random_uniform(t->seed, number, (uint64_t)i);
        bool padding = rank == ranks - 1;
        element_set(host, OF_ACCUM, 3 * i, padding ? -(double)INFINITY : 10 * u);
        element_set(host, OF_ACCUM, 3 * i + 1, padding ? 0 : 1 + 100 * u * u);
        element_set(host, OF_ACCUM, 3 * i + 2, row % (ranks - 1) == rank ? 5 * u : 0);
    }
    tensor_write(all, host, t->stream);
    free(host);
    return all;
}

static void run_crossentropy(tool *t, const int64_t *n) {
    int64_t R = n[0], V = n[1], valid = n[2], first = n[3], vocabulary = n[4], ranks = 4;
    t->shift = 0; // rows are whole packs
    shape_is(t, "R %lld V %lld valid %lld first %lld of %lld", (long long)R, (long long)V, (long long)valid, (long long)first,
             (long long)vocabulary);
    tensor *logits = randoms(t, OF_REAL, R * V, 0, 3), *targets = integers(t, OF_INT32, R, 0, vocabulary),
           *stats = poisoned(t, OF_ACCUM, R * 3), *all = stats_of_ranks(t, ranks, R), *losses = poisoned(t, OF_ACCUM, R),
           *whole_losses = poisoned(t, OF_ACCUM, R), *fused = copy_of(t, logits), *fused_losses = poisoned(t, OF_ACCUM, R),
           *sum = randoms(t, OF_DOUBLE, 1, 3, 1);
    crossentropy_stats(accums(stats), reals(logits), tokens_of(targets), first, valid, R, V, t->stream);
    keep(t, "crossentropy_stats", "stats", stats);
    crossentropy_combine(accums(losses), reals(logits), accums(all), ranks, tokens_of(targets), 0, 0, first, valid, R, V,
                         t->stream);
    keep(t, "crossentropy_combine", "losses", losses);
    keep(t, "crossentropy_combine", "logits, as before", logits);
    crossentropy_sum(doubles(sum), accums(losses), R, t->stream);
    keep(t, "crossentropy_sum", "sum", sum);
    if (first == 0 && valid == vocabulary) {
        crossentropy_fused(accums(fused_losses), reals(fused), tokens_of(targets), 1 / (double)R, 0.01, valid, R, V, t->stream);
        keep(t, "crossentropy_fused", "losses", fused_losses);
        keep(t, "crossentropy_fused", "logits", fused);
    }
    crossentropy_combine(accums(whole_losses), reals(logits), accums(valid > 0 ? stats : all), valid > 0 ? 1 : ranks,
                         tokens_of(targets), 1 / (double)R, 0.01, first, valid, R, V, t->stream);
    keep(t, "crossentropy_combine", "losses, with gradient", whole_losses);
    keep(t, "crossentropy_combine", "logits", logits);
    if (first == 0 && valid == vocabulary) { // all alike, so huge that their sum with a logarithm is themselves
        tensor *huge = randoms(t, OF_REAL, R * V, 1e30, 0);
        crossentropy_fused(accums(fused_losses), reals(huge), tokens_of(targets), 1, 0, valid, R, V, t->stream);
        keep(t, "crossentropy_fused", "losses of huge logits", fused_losses);
    }
}

// --- optimizers ---

static void updates(tool *t, const optimizer_row *o, int64_t n, int64_t step, bool master) {
    optimizer_settings s = {
        .lr = 0.1, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .scale = 0.5, .step = step, .momentum = 0.9};
    tensor *w = master ? poisoned(t, OF_REAL, n) : randoms(t, OF_REAL, n, 0, 0.1), *exact = randoms(t, OF_ACCUM, n, 0, 0.1),
           *m = randoms(t, OF_ACCUM, n, 0, 0.1), *v = randoms(t, OF_ACCUM, n, 0.5, 0.2), *g = randoms(t, OF_ACCUM, n, 0, 1);
    char name[32];
    snprintf(name, sizeof name, "%s_update", o->name);
    optimizer_update(o, reals(w), master ? accums(exact) : NULL, (accum *[]){accums(m), accums(v)}, accums(g), n, s, t->stream);
    keep(t, name, master ? "w, of a master" : "w", w);
    keep(t, name, "m", m);
    if (o->states > 1) keep(t, name, "v", v);
    if (master) keep(t, name, "master", exact);
}

static void run_update(tool *t, const int64_t *n) {
    int64_t count = n[0];
    shape_is(t, "n %lld step %lld", (long long)count, (long long)n[1]);
    for (const optimizer_row *o = optimizers; !o->others; o++) { // muon, the last, has a step of its own: run_muon()
        updates(t, o, count, n[1], true);
        if (!t->round) updates(t, o, count, n[1], false); // otherwise a weight would have lost what bf16 cannot hold
    }
    tensor *g = randoms(t, OF_ACCUM, count, 0, 1), *sum = randoms(t, OF_DOUBLE, 1, 3, 1),
           *scratch = poisoned(t, OF_DOUBLE, SQUARES_SCRATCH);
    sum_of_squares(doubles(sum), doubles(scratch), accums(g), count, t->stream);
    keep(t, "sum_of_squares", "sum", sum);
}

static void run_muon(tool *t, const int64_t *n) {
    const int64_t count = n[0], rows = n[1], columns = n[2], all = count * rows * columns, apart = columns + 3;
    t->shift = 0; // scratch memory has sums of double, too
    shape_is(t, "%lld of (%lld, %lld)", (long long)count, (long long)rows, (long long)columns);
    tensor *x = randoms(t, OF_REAL, all, 0, 1), *w = poisoned(t, OF_REAL, all), *exact = randoms(t, OF_ACCUM, all, 0, 1),
           *block = randoms(t, OF_REAL, rows * apart, 0, 1), *alone = copy_of(t, x), *momentum = randoms(t, OF_ACCUM, all, 0, 0.1),
           *g = randoms(t, OF_ACCUM, all, 0, 1), *u = poisoned(t, OF_REAL, all),
           *scratch = poisoned(t, OF_ACCUM, ORTHOGONALISE_SCRATCH + 4 * all);
    nesterov_momentum(reals(u), accums(momentum), accums(g), all, (optimizer_settings){.scale = 0.5, .momentum = 0.9}, t->stream);
    keep(t, "nesterov_momentum", "u", u);
    keep(t, "nesterov_momentum", "momentum", momentum);
    orthogonal_update(reals(w), accums(exact), reals(x), all, 0.99, -0.3, t->stream);
    keep(t, "orthogonal_update", "w, of a master", w);
    keep(t, "orthogonal_update", "master", exact);
    if (!t->round) orthogonal_update(reals(alone), NULL, reals(x), all, 0.99, -0.3, t->stream);
    keep(t, "orthogonal_update", "w", alone);
    copy_block(reals(block) + 2, apart, reals(x), columns, rows, columns, t->stream);
    keep(t, "copy_block", "block", block);
    orthogonalise(reals(x), count, rows, columns, accums(scratch), t->stream);
    keep(t, "orthogonalise", "x", x);
}

// --- the device's own ---

// One part, and some that lie side by side or further apart.
static void added(tool *t, const char *name, element of, cf_dtype dtype, int64_t n) {
    enum { ADDED = 3 };
    const int64_t apart[] = {0, n, n + 8};
    for (int i = 0; i < 3; i++) {
        const bool whole = of == OF_INT64;
        const int64_t all = n + (ADDED - 1) * apart[i];
        tensor *to = whole ? integers(t, of, n, -1000000, 1000000) : randoms(t, of, n, 0, 1),
               *from = whole ? integers(t, of, all, -1000000, 1000000) : randoms(t, of, all, 0, 1);
        cf_add(to->at, from->at, i == 0 ? 1 : ADDED, apart[i], n, dtype, t->stream);
        keep(t, i == 0 ? "cf_add" : "cf_add_parts", name, to);
    }
}

// More pieces than a device may have under way, of a size that no library takes at once, from memory that is used again.
static void run_copies(tool *t, const int64_t *n) {
    int64_t pieces = n[0], count = n[1];
    shape_is(t, "pieces %lld n %lld", (long long)pieces, (long long)count);
    tensor *to = poisoned(t, OF_INT64, pieces * count);
    int64_t *host = malloc((size_t)count * sizeof *host);
    if (!host) cf_die(NULL, "out of memory for %lld numbers", (long long)count);
    for (int64_t i = 0; i < pieces; i++) {
        for (int64_t k = 0; k < count; k++) host[k] = i * count + k;
        cf_copy((int64_t *)to->at + i * count, host, count * (int64_t)sizeof *host, t->stream);
    }
    free(host);
    keep(t, "cf_copy", "to, from the host", to);
}

static void run_device(tool *t, const int64_t *n) {
    int64_t count = n[0], skip = count / 3, some = count - skip - count / 5;
    shape_is(t, "n %lld", (long long)count);
    added(t, "real", OF_REAL, REAL_DTYPE, count);
    added(t, "accum", OF_ACCUM, ACCUM_DTYPE, count);
    added(t, "fp64", OF_DOUBLE, CF_FP64, count);
    added(t, "int64", OF_INT64, CF_INT64, count);
    tensor *from = randoms(t, OF_REAL, count, 0, 1), *to = poisoned(t, OF_REAL, count), *zeros = randoms(t, OF_REAL, count, 0, 1);
    cf_copy(reals(to) + skip, reals(from) + skip, some * (int64_t)sizeof(real), t->stream);
    keep_rows(t, "cf_copy", "to", to, skip, some, 1);
    others_untouched(t, "cf_copy", "to", to, skip, some, 1);
    cf_zero(reals(zeros) + skip, some * (int64_t)sizeof(real), t->stream);
    keep(t, "cf_zero", "to", zeros);
}

// --- cases ---

typedef struct test_case {
    const char *name;
    void (*run)(tool *, const int64_t *numbers);
    int64_t n[NUMBERS];
    bool large;
} test_case;

static const test_case fixed[] = {
    {"linear", run_linear, {1, 1, 1}, false},
    {"linear", run_linear, {3, 8, 16}, false},
    {"linear", run_linear, {130, 24, 136}, false},
    {"linear", run_linear, {129, 65, 131}, false},
    {"linear", run_linear, {67, 768, 2304}, true},  // d12's QKV
    {"linear", run_linear, {5, 3072, 768}, true},   // its second MLP matrix
    {"linear", run_linear, {33, 1600, 1600}, true}, // d48's projection
    {"linear", run_linear, {640, 320, 512}, true},
    {"linear", run_linear, {7, 48, 50304}, true}, // a vocabulary
    {"linear", run_linear, {7, 48, 50257}, true},
    {"linear", run_many_linears, {600}, false},
    {"attention", run_attention, {1, 1, 1, 64}, false},
    {"attention", run_attention, {2, 3, 1, 16}, false},
    {"attention", run_attention, {37, 2, 3, 64}, false},
    {"attention", run_attention, {65, 1, 2, 32}, false},
    {"attention", run_attention, {37, 2, 6, 64, 0, 2}, false}, // heads that share keys and values,
    {"attention", run_attention, {70, 3, 4, 32, 0, 1}, false}, // fewer than sequences
    {"attention", run_attention, {512, 2, 9, 64, 0, 3}, true}, // SmolLM2 135M's
    {"attention", run_attention, {128, 1, 2, 64}, false},
    {"attention", run_attention, {200, 2, 12, 64}, true}, // d12's heads
    {"attention", run_attention, {257, 1, 25, 64}, true}, // d48's
    {"attention", run_attention, {1024, 1, 2, 64}, true},
    {"attention", run_attention, {140, 1, 2, 128}, true},
    {"attention", run_attention, {192, 1, 2, 64, 110}, false}, // scores near −110
    {"attention", run_attention, {704, 1, 2, 64, 110}, true},
    {"attention", run_attention, {96, 2, 1, 32, 110}, false},
    {"layernorm", run_layernorm, {1, 3}, false},
    {"layernorm", run_layernorm, {3, 8}, false},
    {"layernorm", run_layernorm, {67, 97}, false},
    {"layernorm", run_layernorm, {300, 384}, false},
    {"layernorm", run_layernorm, {1000, 768}, true},
    {"layernorm", run_layernorm, {77, 1600}, true},
    {"layernorm", run_layernorm, {5, 6400}, true},
    {"elementwise", run_elementwise, {1, 1}, false},
    {"elementwise", run_elementwise, {3, 24}, false},
    {"elementwise", run_elementwise, {7, 33}, false},
    {"elementwise", run_elementwise, {129, 3072}, true},
    {"elementwise", run_elementwise, {63, 1600}, true},
    {"embedding", run_embedding, {1, 1, 1, 3, 0, 3}, false},
    {"embedding", run_embedding, {29, 3, 40, 101, 20, 50}, false},
    {"embedding", run_embedding, {29, 3, 33, 11, 0, 11}, false},
    {"embedding", run_embedding, {128, 4, 768, 50257, 0, 3000}, true},
    {"embedding", run_embedding, {256, 4, 384, 300, 100, 200}, true},
    {"crossentropy", run_crossentropy, {1, 8, 1, 0, 1}, false},
    {"crossentropy", run_crossentropy, {13, 128, 101, 0, 101}, false},
    {"crossentropy", run_crossentropy, {37, 80, 77, 77, 231}, false},
    {"crossentropy", run_crossentropy, {5, 64, 0, 128, 101}, false},
    {"crossentropy", run_crossentropy, {3, 10048, 10011, 0, 10011}, false}, // rows that the emulator keeps in shared memory
    {"crossentropy", run_crossentropy, {3, 30016, 30011, 0, 30011}, false}, // and some that it does not
    {"crossentropy", run_crossentropy, {65, 50304, 50257, 0, 50257}, true},
    {"crossentropy", run_crossentropy, {9, 12584, 12575, 12577, 50257}, true},
    {"update", run_update, {1, 1}, false},
    {"update", run_update, {1003, 3}, false},
    {"update", run_update, {1000003, 1000}, true},
    {"muon", run_muon, {1, 1, 33}, false},
    {"muon", run_muon, {3, 24, 24}, false},
    {"muon", run_muon, {1, 65, 40}, false},
    {"muon", run_muon, {2, 17, 96}, false},
    {"muon", run_muon, {3, 7, 9}, false}, // the second begins at an odd place
    {"muon", run_muon, {1, 384, 1536}, true},
    {"device", run_device, {1}, false},
    {"device", run_copies, {11, 20011}, false},
    {"device", run_device, {4099}, false},
    {"device", run_device, {1000003}, true},
};

// Sizes drawn from the seed, besides those of the tables.
static test_case drawn(tool *t, int i) {
    int64_t a = draw(t, 1, 150), b = draw(t, 1, 150), c = draw(t, 1, 150), V = draw(t, 2, 600);
    int64_t first = draw(t, 0, V - 1), rows = draw(t, 1, V - first), head = 8 * draw(t, 1, 12);
    switch (i % 6) {
    case 0:
        return (test_case){"linear", run_linear, {a, b, c}, false};
    case 1:
        return (test_case){"attention", run_attention, {a, 1 + b % 3, 1 + c % 4, head}, false};
    case 2:
        return (test_case){"layernorm", run_layernorm, {a, b * 3}, false};
    case 3:
        return (test_case){"elementwise", run_elementwise, {a, b}, false};
    case 4:
        return (test_case){"embedding", run_embedding, {a, 1 + b % 5, c, V, first, rows}, false};
    default:
        return (test_case){"crossentropy", run_crossentropy, {a, ceil_div(V, 8) * 8, rows, first, V + first}, false};
    }
}

static void run_once(tool *t, const test_case *c) {
    t->draws = 1000; // apart from those that chose the sizes
    t->count = 0;
    c->run(t, c->n);
    for (int i = 0; i < t->count; i++) {
        if (!tensor_guards(&t->tensors[i], t->stream))
            fault(t, "%s: written beyond an end of tensor %d, which has %lld elements", c->name, i, (long long)t->tensors[i].count);
        tensor_free(&t->tensors[i]);
    }
}

// The record that holds byte `at`, by its function and tensor.
static const char *record_at(const tool *t, int64_t at) {
    static char name[512];
    for (int64_t begin = 0; begin < t->size;) {
        const char *line = t->records + begin, *count = strstr(line, "\"count\":"), *type = strstr(line, "\"type\":\"f");
        int64_t length = (const char *)memchr(line, '\n', (size_t)(t->size - begin)) - line + 1;
        snprintf(name, sizeof name, "%.*s", (int)(type - line), line);
        begin += length + strtoll(count + 8, NULL, 10) * (type[9] - '0');
        if (at < begin) return name;
    }
    return "?";
}

static void check_repetition(tool *t, const test_case *c) {
    int64_t size = t->size, memory = cf_memory_bytes(), at = 0;
    run_once(t, c);
    if (cf_memory_bytes() != memory)
        fault(t, "%s: %lld bytes are allocated after the second time, %lld after the first", c->name, (long long)cf_memory_bytes(),
              (long long)memory);
    if (t->size == 2 * size && memcmp(t->records, t->records + size, (size_t)size) == 0) {
        t->size = size;
        return;
    }
    while (at < size && t->records[at] == t->records[size + at]) at++;
    fault(t, "the second time gives other bits: %s", record_at(t, at));
    t->size = size;
}

static bool lists(const char *names, const char *name) {
    size_t length = strlen(name);
    for (const char *at = names; *at; at += strcspn(at, ","), at += *at == ',')
        if (strcspn(at, ",") == length && strncmp(at, name, length) == 0) return true;
    return false;
}

static bool wanted(const tool *t, const test_case *c) {
    return !(t->small && c->large) && (!*t->only || lists(t->only, c->name)) && !lists(t->except, c->name);
}

static void run_case(tool *t, const test_case *c) {
    if (!wanted(t, c)) return;
    t->cases++;
    t->shift = (int64_t)(((uint64_t)t->case_number + t->seed) % 2);
    t->size = 0;
    run_once(t, c);
    if (t->repeat) check_repetition(t, c);
    if (fwrite(t->records, 1, (size_t)t->size, t->out) != (size_t)t->size)
        cf_die("free space on its disk", "the records cannot be written");
    fflush(t->out); // should the next case be the last of this process
}

static void parse(tool *t, int count, char **words, int64_t *threads) {
    for (int i = 2; i < count; i++) {
        const char *value = i + 1 < count ? words[i + 1] : NULL;
        if (strcmp(words[i], "--round") == 0)
            t->round = true;
        else if (strcmp(words[i], "--repeat") == 0)
            t->repeat = true;
        else if (strcmp(words[i], "--small") == 0)
            t->small = true;
        else if (strcmp(words[i], "--seed") == 0 && value)
            t->seed = strtoull(words[++i], NULL, 10);
        else if (strcmp(words[i], "--only") == 0 && value)
            t->only = words[++i];
        else if (strcmp(words[i], "--except") == 0 && value)
            t->except = words[++i];
        else if (strcmp(words[i], "--threads") == 0 && value)
            *threads = strtoll(words[++i], NULL, 10);
        else
            cf_die("see the top of tests/layers/kernels/tool_twins.c", "tool_twins: bad argument %s", words[i]);
    }
    if (REAL_DTYPE == CF_BF16 && !t->round) cf_die("add --round, here and for the other build", "this build has bf16 inputs alone");
}

int main(int count, char **words) {
    static tool t = {.seed = 1, .only = "", .except = ""};
    int64_t threads = 0;
    if (count < 2 || words[1][0] == '-')
        cf_die("usage: tool_twins OUT [--seed N] [--round] [--repeat] [--small] [--only NAMES] [--except NAMES] [--threads N]",
               "tool_twins: no file to write");
    parse(&t, count, words, &threads);
    cf_device_open(0);
    if (threads > 0) cf_device_threads((int)threads);
    t.stream = cf_stream_create();
    t.out = fopen(words[1], "wb");
    if (!t.out) cf_die("choose another file", "cannot write %s", words[1]);
    fprintf(t.out, "{\"twins\":1,\"device\":\"%s\",\"real\":\"%s\",\"seed\":%llu,\"round\":%s}\n", cf_device_name(),
            cf_dtype_name(REAL_DTYPE), (unsigned long long)t.seed, t.round ? "true" : "false");
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++) {
        t.case_number++;
        run_case(&t, &fixed[i]);
    }
    for (int i = 0; i < 24; i++) {
        t.case_number++;
        t.draws = 0;
        test_case c = drawn(&t, i);
        run_case(&t, &c);
    }
    if (fclose(t.out) != 0) cf_die("free space on its disk", "%s cannot be written", words[1]);
    if (t.cases == 0) cf_die("see the top of tests/layers/kernels/tool_twins.c", "--only %s names no case", t.only);
    if (t.others) printf("%d products by another algorithm than the library's first\n", t.others);
    printf("%s, %s: %d cases, %d faults\n", cf_device_name(), cf_dtype_name(REAL_DTYPE), t.cases, t.faults);
    cf_stream_free(t.stream);
    free(t.records);
    return t.faults > 0;
}
