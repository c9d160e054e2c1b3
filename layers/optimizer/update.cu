// The optimizers on the GPU, and the sum of squares of the gradients that comes before.
//
// The update is one pass over memory: it reads master weights, gradient and state, and writes all but the gradient, and
// the rounded weights. All loads of a thread's pack are in flight together.
#include "../kernels/kernel.h"
#include "update.h"

template <class Element> struct update_map {
    real *w;
    accum *master, *first, *last; // last: first again where there is one value of state
    const accum *g;
    Element element;

    template <int W> __device__ void at(int64_t i) const {
        values<W> weight = master ? load<W>(master + i) : load<W>(w + i);
        values<W> g1 = load<W>(g + i), s1 = load<W>(first + i), s2 = Element::states > 1 ? load<W>(last + i) : s1;
#pragma unroll
        for (int k = 0; k < W; k++) element(&weight.at[k], g1.at[k], &s1.at[k], &s2.at[k]);
        store<W>(first + i, s1);
        if (Element::states > 1) store<W>(last + i, s2);
        if (master) store<W>(master + i, weight);
        store<W>(w + i, weight);
    }
};

#define ELEMENT(NAME, STATES, ...)                                                                                                 \
    struct NAME##_of_element {                                                                                                     \
        enum { states = STATES };                                                                                                  \
        NAME##_factors f;                                                                                                          \
        __device__ void operator()(accum *w, accum g, accum *first, accum *last) const { NAME##_element(f, w, g, first, last); }   \
    };
OPTIMIZERS(ELEMENT)

void optimizer_update(const optimizer_row *o, real *w, accum *master, accum *const *state, const accum *g, int64_t n,
                      optimizer_settings s, cf_stream *stream) {
    accum *first = state[0], *last = state[o->states - 1];
    const bool packed = packable(0, w, master, first, last, g);
#define APPLY(NAME, ...)                                                                                                           \
    if (strcmp(o->name, #NAME) == 0)                                                                                               \
        each(update_map<NAME##_of_element>{w, master, first, last, g, {NAME##_factors_of(s)}}, n, packed, stream);
    OPTIMIZERS(APPLY)
}

void sum_of_squares(double *sum, double *scratch, const accum *x, int64_t n, cf_stream *stream) {
    add_squares(sum, scratch, SQUARES_SCRATCH, x, 1, n, stream);
}
