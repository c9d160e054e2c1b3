// The parameters of a GPT: sixteen tensors (in the order of llm.c's model files), how each is split over
// the tp group, where the local part lies, and the buckets in which gradients and weights travel.
//
// tensor      of one layer   split over tp
// wte         (Vp, C)        rows (vocabulary), ceil(Vp / tp) per rank; missing rows are zero
// qkvw, qkvb  (3C, C)        by heads: the same rows of q, k and v
// attprojw    (C, C)         columns        fcprojw (C, 4C)  columns
// fcw, fcb    (4C, C)        rows           everything else  whole on every rank
//
// A bucket is a run of local elements that is reduced and gathered as one: for each layer the split
// tensors (over the dp group) and the whole ones (over the world: their gradients are partial on every
// tp rank), and the same for the embeddings. Buckets are padded to a multiple of their group.
#ifndef PARAMS_H
#define PARAMS_H

#include "../commfuse/mesh.h"
#include "real.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    WTE,
    WPE,
    LN1W,
    LN1B,
    QKVW,
    QKVB,
    ATTPROJW,
    ATTPROJB,
    LN2W,
    LN2B,
    FCW,
    FCB,
    FCPROJW,
    FCPROJB,
    LNFW,
    LNFB,
    TENSORS
};

typedef struct gpt_shape {
    int64_t maxT, V, Vp, L, H, C; // positions, vocabulary, padded, layers, heads, channels
} gpt_shape;

typedef struct param_bucket {
    const cf_group *group; // reduced and gathered over this
    int layer;             // -1: embeddings and final layer norm
    int64_t first, count;  // local elements, count a multiple of group->size
    int64_t shard;         // count / group->size; member i owns [first + i · shard, …+ shard)
} param_bucket;

typedef struct parameters {
    gpt_shape shape;
    int tp, tp_rank;
    int64_t elements;          // of this rank, padding included
    real *weight, *grad;       // (elements)
    int64_t first[TENSORS][2]; // offset of layer 0, distance between layers
    int buckets;
    param_bucket *bucket; // split(layer 0), whole(layer 0), …, split(embedding), whole(embedding)
} parameters;

// Dies (together) unless heads divide channels, and tp divides heads. Weights and gradients are zero.
void params_create(parameters *p, gpt_shape shape, const cf_mesh *mesh);
void params_free(parameters *p);

const char *params_name(int tensor);
int64_t params_layers(const gpt_shape *shape, int tensor);   // copies of it: L or 1
int64_t params_rows(const gpt_shape *shape, int tensor);     // whole tensor, one layer
int64_t params_columns(const gpt_shape *shape, int tensor);  // 1 for vectors
bool params_decays(int tensor);                              // weight decay: matrices and embeddings
int64_t params_count(const gpt_shape *shape);                // all tensors, whole
int64_t params_local_count(const parameters *p, int tensor); // local elements of one layer

// Local part of one layer's tensor.
real *params_weight(const parameters *p, int tensor, int64_t layer);
real *params_grad(const parameters *p, int tensor, int64_t layer);

// The local part as runs of consecutive elements of the whole tensor.
typedef struct param_run {
    int64_t whole, local, count; // whole elements [whole, whole + count) lie at local element `local`
} param_run;
int64_t params_runs(const parameters *p, int tensor);
param_run params_run(const parameters *p, int tensor, int tp_rank, int64_t run);

// Which tensor and layer a local element belongs to; false for padding.
bool params_find(const parameters *p, int64_t element, int *tensor, int64_t *layer, int64_t *remaining);

// Fill the local weights from a whole model: `read` gives `count` elements from element `first` of one
// layer's tensor.
typedef void params_reader(void *argument, int tensor, int64_t layer, int64_t first, int64_t count,
                           float *out);
void params_read(parameters *p, params_reader *read, void *argument);
// Put `count` local elements, from local element `first`, of a rank's part of one layer's tensor where they
// belong in the whole tensor.
void params_place(const parameters *p, int tensor, int tp_rank, int64_t first, int64_t count,
                  const real *piece, float *whole);

// GPT-2's initial weights, a function of (seed, tensor, layer, index) alone.
void params_init(parameters *p, uint64_t seed);

#ifdef __cplusplus
}
#endif
#endif
