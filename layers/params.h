// The parameters of a model: the kind of its blocks, its tensors (in the order of llm.c's model files), how each is split over the
// tp group, the place of the local part, and the buckets in which gradients and weights are communicated.
//
// tensor      of one layer   TPSP: split over tp                                 UP: held by every rank
// wte         (Vp, C)        rows (vocabulary), padded with zeros to 8·n          whole, padded likewise
// qkvw        (Q, C)         by heads: the same rows of q, k and v               the tp parts, one after another
// qkvb        (Q)            likewise                                            likewise
// attprojw    (C, C)         columns                                             the tp parts, one after another
// fcprojw     (C, F)         columns                                             whole
// fcw         (P·F, C)       the same rows of each of the P products             whole
// fcb         (P·F)          likewise                                            whole
// all others                 whole on every rank                                 whole
//
// Q: the width of queries, keys and values, 3C in GPT-2; F: the units of the MLP, 4C; P: 2 in SwiGLU, else 1.
//
// A bucket is a run of local elements that is reduced and gathered as one. Tensors that are split over tp are communicated
// among the replicas (the dp group), all others among the whole world: their gradients are partial on every rank. A large matrix is a
// bucket by itself, owned by whole rows, so that its gradient can be computed owner by owner and sent while the next owner's is
// computed. Thin matrices of several layers share a bucket, so that the transfer of a shard takes longer than its latency; unless
// they are kept apart, so that each rank has an equal part of every matrix. The vectors of all layers (norms, biases) share one
// bucket for each group. Shards of several tensors are a multiple of 8 elements, those of a matrix whole rows; the remainder is
// padding. So, for the usual numbers of channels, everything is aligned to sixteen bytes on any mesh, as matrix products require.
#pragma once
#include "../commfuse/mesh.h"
#include "kernels/real.h"

enum { WTE, WPE, LN1W, LN1B, QKVW, QKVB, ATTPROJW, ATTPROJB, LN2W, LN2B, FCW, FCB, FCPROJW, FCPROJB, LNFW, LNFB, TENSORS };

// What blocks are made of, a row each: all that depends on the kind of block reads the row (README.md, "Add a block").
typedef struct block_row {
    const char *name;
    enum { LAYERNORM, RMSNORM } norm;   // RMSNORM does not subtract the mean, and has no bias
    enum { LEARNED, ROTARY } positions; // added to the embedding (wpe); or queries and keys are turned
    enum { GELU, SWIGLU } activation;   // SWIGLU: the MLP's first layer has two products, silu(first) · second
    bool biases;                        // linear layers have them
    int units;                          // of the MLP, in channels, unless the shape says; 0: 8/3, rounded up to a multiple of 128
    int32_t magic;                      // first number of its model files
} block_row;
#define BLOCKS(ROW)                                                                                                                \
    ROW(gpt2, LAYERNORM, LEARNED, GELU, true, 4, 20240326)                                                                         \
    ROW(llama, RMSNORM, ROTARY, SWIGLU, false, 0, 20261129)
extern const block_row block_rows[]; // the last one has no name
// Their names, each after a "|".
#define BLOCK_NAME(name, ...) "|" #name
#define BLOCK_NAMES           BLOCKS(BLOCK_NAME)

// The angle of pair i of D / 2 at position t is t / theta^(2 i / D). Llama 3 stretches slow ones, as transformers' "llama3" does.
typedef struct rotary_settings {
    double theta;
    double factor, low, high, original; // factor 0: not stretched; original: positions
} rotary_settings;

typedef struct gpt_shape {
    int64_t maxT, V, Vp, L, H, C; // positions, vocabulary, padded, layers, heads, channels
    int64_t KV, F;                // heads of keys and values; units of the MLP; 0: as many as heads; the block's
    const block_row *block;       // NULL: the first
    double norm_eps;              // 0: 1e-5
    rotary_settings rotary;       // unless positions are learned; theta 0: 10000
} gpt_shape;

const block_row *params_block_named(const char *name); // NULL: none has that name
// llm.c's model files cannot say KV, F, norm_eps and rotary: their block has the usual ones, and no option sets them.
enum { LLM_C_MAGIC = 20240326 };
gpt_shape params_filled(gpt_shape shape);                  // KV, F, norm_eps and theta, where 0, become what that stands for
double params_angle(const gpt_shape *shape, int64_t pair); // of rotary positions, from one to the next

enum { VOCABULARY_PADDING = 128 }; // Vp is a multiple of it

// The next multiple of 8 elements, which fill at least sixteen bytes.
static inline int64_t params_aligned(int64_t elements) {
    return ceil_div(elements, 8) * 8;
}

// Layers, heads and channels of GPT-2 by depth, d6 to d48, all else 0; or the whole shape of a known model. An unknown name: all is
// 0.
gpt_shape params_named(const char *model);

typedef enum { STRATEGY_TPSP, STRATEGY_UP } parallel_strategy;

// A matrix of a layer; thin matrices of one or more layers; the token table; vectors (and positions), over dp or the world. The
// first three have matrices.
typedef enum { BUCKET_MATRIX, BUCKET_THIN, BUCKET_TABLE, BUCKET_VECTORS_DP, BUCKET_VECTORS } bucket_kind;

// In place of a layer: the token table; positions and the vectors of all layers.
enum { LAYER_TABLE = -1, LAYER_VECTORS = -2 };

typedef struct param_bucket {
    bucket_kind kind;
    const cf_group *group; // reduced and gathered over this
    int layer;             // the first layer that has a matrix in it, or one of the two above
    int tensor;            // its only matrix; -1: several tensors
    int64_t first, count;  // local elements, count a multiple of group->size
    int64_t shard;         // count / group->size; member i owns [first + i · shard, …+ shard)
    int64_t row;           // elements of a row; the shard is a multiple of it. 1: several tensors
    int64_t decayed, used; // elements, from the first on, of tensors that decay, of all tensors; the others are padding
    int64_t owned_before;  // elements that this rank owns in the buckets before
} param_bucket;

typedef struct param_tensor { // the local part of one layer's tensor, padding of its rows included
    int tensor, bucket;
    int64_t layer, first, count;
} param_tensor;

typedef struct parameters {
    gpt_shape shape;
    parallel_strategy strategy;
    int tp_rank;
    int splits;           // ranks over which matrices and vocabulary are split: tp or, in UP, 1
    int parts;            // local parts of the attention's matrices, one after another: 1 or, in UP, tp
    bool no_thin;         // no thin matrices: each has a bucket alone
    int64_t elements;     // of this rank, padding included
    int64_t owned;        // elements of all shards that this rank owns
    real *weight;         // (elements)
    accum *grad;          // (elements)
    param_tensor *placed; // all tensors of all layers, in memory order
    int tensors;          // how many
    int *place;           // (L, TENSORS) index in `placed`
    // In this order: matrices by layer, wte, vectors that are split over tp (if they have a bucket of their own), and last
    // wpe, lnfw, lnfb and all other vectors.
    int buckets, table; // how many; which one is wte's
    param_bucket *bucket;
} parameters;

// Dies (together), before memory is taken, unless heads divide channels, and tp divides heads, those of keys, and the MLP's units.
// Weights and gradients are zero.
// shard_bytes: of the gradients of a bucket of thin matrices, at least; 0: 64 KiB, within a host and on CPUs; NO_THIN: there are
// none, each matrix has a bucket alone.
enum { NO_THIN = -1 };
void params_create(parameters *p, gpt_shape shape, const cf_mesh *mesh, parallel_strategy strategy, double shard_bytes);
void params_free(parameters *p);

const block_row *params_block(const gpt_shape *shape);
const char *params_name(int tensor);
int64_t params_layers(const gpt_shape *shape, int tensor);   // copies of it: L or 1; 0: such blocks have none
int64_t params_rows(const gpt_shape *shape, int tensor);     // whole tensor, one layer
int64_t params_columns(const gpt_shape *shape, int tensor);  // 1 for vectors
bool params_decays(int tensor);                              // weight decay: matrices and embeddings
bool params_is_split(int tensor);                            // over tp, in TPSP
int params_bias(const gpt_shape *shape, int tensor);         // added to the product with these weights; −1: none
int64_t params_count(const gpt_shape *shape);                // all tensors, whole, without the vocabulary's padding
int64_t params_local_count(const parameters *p, int tensor); // local elements of one layer
// Floating-point operations of a token in a sequence of T, forward and backward, as MFU counts them: 6 · P + 6 · L · C · T, P
// without the position embedding, attention causal.
double params_flops(const gpt_shape *shape, int64_t T);
// Of the matrices of a tensor, which lie one upon another: queries, keys, values; products of the MLP. 0: it has fewer.
int64_t params_section_rows(const gpt_shape *shape, int tensor, int section);

// Rows and columns of all local parts together.
int64_t params_local_rows(const parameters *p, int tensor);
int64_t params_local_columns(const parameters *p, int tensor);

// The place of a layer's tensor, one of p->placed. wte, wpe and the final norm have one layer, whatever is asked for.
const param_tensor *params_find(const parameters *p, int tensor, int64_t layer);

// Local part of one layer's tensor, in device memory; NULL: tensor is −1, which is none.
real *params_weight(const parameters *p, int tensor, int64_t layer);
accum *params_grad(const parameters *p, int tensor, int64_t layer);

// At the start of a step: zeroes the gradients of positions and vectors. Those of the layers' matrices and of the token table are
// large, and writing their first product moves a third of the bytes of zeroing and adding.
void params_zero_grad(const parameters *p, cf_stream *stream);

// The local part as runs of consecutive elements of the whole tensor.
typedef struct param_run {
    int64_t whole, local, count; // whole elements [whole, whole + count) are at local element `local`
} param_run;
int64_t params_runs(const parameters *p, int tensor);
param_run params_run(const parameters *p, int tensor, int tp_rank, int64_t run);

// First local element of the shard of a bucket that this rank owns. Each element of the whole model is owned by one rank of the
// world.
int64_t params_first_owned(const param_bucket *b);
// Limits local elements [*first, *end) of a bucket to those that this rank owns. False: none.
bool params_owned(const param_bucket *b, int64_t *first, int64_t *end);

// Fills the local weights from a whole model: `read` returns `count` elements from element `first` of one layer's tensor. kind: of the
// state of training (below), here STATE_WEIGHT.
typedef void params_reader(void *argument, int kind, int tensor, int64_t layer, int64_t first, int64_t count, float *out);
void params_read(parameters *p, params_reader *read, void *argument, cf_stream *stream);
// Copies `count` local elements, from local element `first`, of a rank's part of one layer's tensor to their place in the whole
// tensor. Both are host memory.
void params_place(const parameters *p, int tensor, int tp_rank, int64_t first, int64_t count, const real *piece, float *whole);

// The state of training: of each element its weight (or the master of which that is the rounded copy) and the optimizer's values.
enum { STATE_WEIGHT, STATE_KINDS_MAX = 3 };
typedef struct state_kinds {
    int count;
    const char *name[STATE_KINDS_MAX]; // in files; "weight" is the first
} state_kinds;

// Elements [at, at + count) of a rank's values are elements [whole, whole + count) of one layer of a tensor, in memory and in
// the files of a checkpoint.
typedef struct state_run {
    int64_t tensor, layer, whole, count, at;
} state_run;

// The state that one rank owns, in host memory.
typedef struct rank_state {
    int64_t elements, runs;
    state_run *run;                // (runs)
    accum *value[STATE_KINDS_MAX]; // (elements) padding, which belongs to no run, is zero
    state_kinds kinds;
} rank_state;

// GPT-2's initial weights, a function of (seed, tensor, layer, index) alone.
void params_init(parameters *p, uint64_t seed, cf_stream *stream);
