// See block.h.
#include "block.h"
#include "kernels/attention.h"
#include "kernels/embedding.h"
#include "kernels/layernorm.h"

// --- layer norms: of the halves of blocks, and the last one ---

// The weights of layer norm n, of layer n / 2.
static int norm_tensor(const gpt *g, int64_t n) {
    return n == 2 * g->params.shape.L ? LNFW : n % 2 ? LN2W : LN1W;
}

static accum *mean_of(const gpt *g, int64_t n) {
    return params_block(&g->params.shape)->norm == RMSNORM ? NULL : g->mean[n];
}

real *gpt_norm_forward(gpt *g, int64_t n) {
    const parameters *p = &g->params;
    const int64_t C = p->shape.C, rows = g->pass.Ts * g->pass.B;
    const int w = norm_tensor(g, n);
    layernorm_forward(g->norm[n] + g->split->rank * rows * C, mean_of(g, n), g->rstd[n], g->x[n], params_weight(p, w, n / 2),
                      params_weight(p, params_bias(&p->shape, w), n / 2), p->shape.norm_eps, rows, C, g->context->stream);
    return g->norm[n];
}

real *gpt_norm_again(gpt *g, int64_t n) {
    return g->setup.recompute ? gpt_norm_forward(g, n) : g->norm[n];
}

// The half before a norm has added a bias to the norm's input: the gradient of that bias is the sum of the rows of g->dx.
void gpt_norm_backward(void *argument, cf_sum dnorm, int64_t t0, int64_t steps, cf_stream *stream) {
    const norm_use *norm = (const norm_use *)argument;
    gpt *g = norm->g;
    const parameters *p = &g->params;
    const int64_t n = norm->n, C = p->shape.C, first = t0 * g->pass.B;
    const int w = norm_tensor(g, n);
    const accum *mean = mean_of(g, n);
    accum *bias = n > 0 ? params_grad(p, (n % 2 ? &g->attproj : &g->fcproj)->bias, (n - 1) / 2) : NULL;
    layernorm_backward(g->dx + first * C, params_grad(p, w, n / 2), params_grad(p, params_bias(&p->shape, w), n / 2), bias, dnorm,
                       g->x[n] + first * C, params_weight(p, w, n / 2), mean ? mean + first : NULL, g->rstd[n] + first,
                       g->norm_scratch, steps * g->pass.B, C, stream);
}

// --- rotary positions: queries and keys, side by side, of all time steps ---

void gpt_turn(gpt *g, real *qkv, bool back) {
    const gpt_shape *s = &g->params.shape;
    if (g->rotary)
        rotary_turn(qkv, g->rotary, back, g->mesh->tp * g->pass.Ts, g->pass.B, (s->H + s->KV) / g->mesh->tp, s->C / s->H, g->Ql,
                    g->context->stream);
}

// --- computed inside operations: time steps [t0, t0 + n) ---

void gpt_attend(void *model, int layer, real *attended, int64_t t0, int64_t n, cf_stream *stream) {
    gpt *g = (gpt *)model;
    const gpt_shape *s = &g->params.shape;
    const int N = g->mesh->tp;
    attention_forward(attended, g->acts.lse[layer], g->acts.qkv[layer], t0, n, N * g->pass.Ts, g->pass.B, s->H / N, s->KV / N,
                      s->C / s->H, stream);
}

void gpt_attend_backward(void *model, int layer, real *dattended, int64_t t0, int64_t n, cf_stream *stream) {
    gpt *g = (gpt *)model;
    const gpt_shape *s = &g->params.shape;
    const int N = g->mesh->tp;
    attention_backward(g->dqkv, dattended, g->acts.attended[layer], g->acts.lse[layer], g->acts.qkv[layer], g->attention_scratch,
                       t0, n, N * g->pass.Ts, g->pass.B, s->H / N, s->KV / N, s->C / s->H, !g->dqkv_begun, stream);
    g->dqkv_begun = true;
}

void gpt_attend_backward_whole(gpt *g, int layer) {
    if (!g->dqkv_begun) gpt_attend_backward(g, layer, g->dattended, 0, g->mesh->tp * g->pass.Ts, g->context->stream);
    gpt_turn(g, g->dqkv, true);
}
