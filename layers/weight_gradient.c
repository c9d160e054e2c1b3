// See weight_gradient.h.
#include "weight_gradient.h"
#include "linear.h"

static int64_t min(int64_t a, int64_t b) {
    return a < b ? a : b;
}
static int64_t max(int64_t a, int64_t b) {
    return a > b ? a : b;
}

// Rows [first, first + rows) of the local matrix, which may lie in several parts; dw: the first of them. Rows
// behind the last part are padding.
static void some_rows(const weight_gradient *g, int64_t first, int64_t rows, precise *dw, bool add,
                      cf_stream *stream) {
    for (int part = 0; part < g->parts; part++) {
        int64_t begin = max(first, part * g->OC), end = min(first + rows, (part + 1) * g->OC);
        if (begin < end)
            linear_wgrad_rows(dw + (begin - first) * g->IC, g->dy[part] + begin - part * g->OC, g->OC,
                              g->x[part], g->R, g->IC, end - begin, add, stream);
    }
}

static void slice_of_rows(void *argument, const cf_span *span, cf_stream *stream) {
    const weight_gradient *g = (const weight_gradient *)argument;
    for (int i = 0; i < span->blocks; i++)
        some_rows(g, span->row + i * span->row_stride, span->rows,
                  (precise *)(span->data + i * span->data_stride), g->to.add, stream);
}

bool weight_gradient_fuses(const backward_pass *pass, const parameters *p, int tensor, int64_t layer) {
    int bucket = params_own_bucket(p, tensor, layer);
    return pass->last && bucket >= 0 && pass->hooks.fuses && pass->hooks.fuses(pass->hooks.argument, bucket);
}

bool weight_gradient_by_slices(const cf_fuse *arrive, int64_t rows) {
    const cf_fuse_plan *plan = cf_fuse_get_plan(arrive);
    if (plan->group->size == 1 || plan->mode == CF_MODE_NONE) return true; // there is one, which is all
    return rows / cf_fuse_schedule(arrive)->slices >= linear_wgrad_depth_min();
}

matrix_gradient weight_gradient_now(const backward_pass *pass, const parameters *p, int tensor,
                                    int64_t layer) {
    if (weight_gradient_fuses(pass, p, tensor, layer)) return (matrix_gradient){0};
    return params_matrix_grad(p, tensor, layer, pass->first);
}

void weight_gradient_take(const backward_pass *pass, const parameters *p, int tensor, int64_t layer,
                          weight_gradient g, cf_stream *stream) {
    g.to = params_matrix_grad(p, tensor, layer, pass->first);
    if (weight_gradient_fuses(pass, p, tensor, layer))
        pass->hooks.compute(pass->hooks.argument, params_own_bucket(p, tensor, layer), slice_of_rows, &g);
    else
        some_rows(&g, 0, g.parts * g.OC, g.to.at, g.to.add, stream);
}
