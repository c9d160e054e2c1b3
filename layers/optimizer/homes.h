// Muon (muon.h) across ranks: one home for each matrix of the layers, where it is orthogonalised whole. Momentum and weights stay
// with the owner of each shard (zero.h). README.md, "Muon", says what travels when, and why.
#pragma once
#include "../overlap.h"
#include "../params.h"
#include "muon.h"

typedef struct home_matrix {
    const param_bucket *bucket;
    int home;
    int64_t at; // its shards begin here in a slice of its home's
} home_matrix;
typedef struct home_piece { // `rows` rows of `columns` elements: from element `at` of a rank's shard, `whole` of the matrix on
    int64_t rank, whole, at, rows, columns;
} home_piece;
typedef struct home_round {                // a home has one matrix, or those of some layers, which are multiplied at once
    const home_matrix *first, *end, *mine; // mine: this rank's first; NULL: none
    int64_t count, slice;                  // how many are this rank's; elements of the largest shard of a home's
    cf_event began, ended;                 // its products
} home_round;

typedef struct homes {
    const cf_group *world;
    home_matrix *matrix;
    home_round *round;
    home_piece *piece[TENSORS];
    int64_t pieces[TENSORS], rounds;
    double *flops; // (world) of the products of each rank in a step
    cf_fuse *there, *back;
    real *leaving, *returning, *x; // (world, slice) that each of these carries; the matrix at home
    accum *scratch;
    int64_t sent, done, updated; // rounds of the update in progress
    bool timed;                  // it is not the first
    double ms;                   // of the products of the update before it
} homes;

typedef struct zero_shards zero_shards;
homes *homes_create(const zero_shards *z, const overlap *how);
void homes_free(homes *h);
void homes_begin(zero_shards *z);    // after the norm: the first round leaves
bool homes_continue(zero_shards *z); // one more round's products; false: there is none
void homes_finish(zero_shards *z);   // the update of what came back last, before weights or state are read
void homes_operations(const homes *h, visit_operation *visit, void *argument);
void homes_explain(const homes *h, FILE *out); // for --dry-run
