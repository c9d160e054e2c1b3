// See weight_gradient.h.
#include "weight_gradient.h"
#include "buffers.h"
#include "linear.h"

const char *gradient_place_name(gradient_place place) {
    static const char *const names[] = {"when both factors are here", "as slices arrive", "at the end of the layer",
                                        "owner by owner, inside its reduce-scatter"};
    return names[place];
}

// Are the arriving slices large enough to add to a gradient one by one?
static bool slices_pay(const cf_fuse *arrive, int64_t rows) {
    const cf_fuse_plan *plan = cf_fuse_get_plan(arrive);
    if (plan->group->size == 1 || plan->mode == CF_MODE_NONE) return true; // there is one, which is all
    return rows / cf_fuse_schedule(arrive)->slices >= linear_wgrad_depth_min();
}

gradient_place weight_gradient_place(const zero_shards *z, int tensor, int64_t layer, bool last, const cf_fuse *arrive,
                                     int64_t rows, bool may_wait) {
    const parameters *p = z->params;
    bool others_wait = params_own_bucket(p, tensor, layer) < 0 &&
                       p->bucket[params_bucket_of(p, tensor, layer)].group->size > 1; // to travel with it
    if (last && zero_fuses(z, tensor, layer)) return GRADIENT_OWNERS;
    if (may_wait && !others_wait) return GRADIENT_LATER;
    return arrive && slices_pay(arrive, rows) ? GRADIENT_BY_SLICES : GRADIENT_NOW;
}

// Rows [first, first + rows) of the local matrix may be in several parts; those after the last part are padding.
void weight_gradient_rows(void *argument, const cf_span *span, cf_stream *stream) {
    const weight_gradient *g = (const weight_gradient *)argument;
    for (int i = 0; i < span->blocks; i++) {
        int64_t first = span->row + i * span->row_stride;
        precise *dw = (precise *)(span->data + i * span->data_stride);
        for (int part = 0; part < g->parts; part++) {
            int64_t begin = larger(first, part * g->OC), end = smaller(first + span->rows, (part + 1) * g->OC);
            if (begin < end)
                linear_wgrad_rows(dw + (begin - first) * g->IC, g->dy[part] + begin - part * g->OC, g->OC, g->x[part], g->R, g->IC,
                                  end - begin, g->to.add, stream);
        }
    }
}

void weight_gradient_compute(const backward_pass *pass, int tensor, int64_t layer, gradient_place place, weight_gradient g) {
    zero_shards *z = pass->zero;
    g.to = params_matrix_grad(z->params, tensor, layer, pass->first);
    cf_span all = {.rows = g.parts * g.OC, .blocks = 1, .data = (char *)g.to.at};
    if (place == GRADIENT_OWNERS)
        zero_compute(z, tensor, layer, weight_gradient_rows, &g);
    else
        weight_gradient_rows(&g, &all, z->context->stream);
}
