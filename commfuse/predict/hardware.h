// A machine for predictions: rates, costs and links, read from a file (data/run/predict.c).
#pragma once
#include <math.h>
#include <stdbool.h>

enum { CF_LINKS = 4, CF_CURVE_POINTS = 32 };

// y at x: linear in log x between points, constant outside of them.
typedef struct cf_curve {
    int points;
    double x[CF_CURVE_POINTS], y[CF_CURVE_POINTS];
} cf_curve;

static inline double cf_curve_at(const cf_curve *c, double x) {
    int i = 1;
    if (c->points == 1 || x <= c->x[0]) return c->y[0];
    while (i < c->points - 1 && x > c->x[i]) i++;
    double part = fmin(1, log(x / c->x[i - 1]) / log(c->x[i] / c->x[i - 1]));
    return c->y[i - 1] + part * (c->y[i] - c->y[i - 1]);
}

// Joins blocks of `ranks` neighbouring world ranks: the first level those of a host, the last all of them (0).
typedef struct cf_link {
    char name[24];
    int ranks;
    double bytes_per_s;       // of a rank, each way
    double block_bytes_per_s; // of all ranks of a block of the level below together; 0: no such limit
    double latency_s;         // of an exchange, once both ends have posted it
    double step_s;            // of one step of a native collective's ring
    double taken;             // by transfers: share of the multiprocessors, or of the cores' time
    cf_curve native;          // bytes that a rank sends in a native collective → share of the rate that this link reaches
    double far_loss;          // share that native collectives lose with each doubling of the blocks that they join, beyond four
    int copied;               // 1: copy engines move exchanges and take no multiprocessors
} cf_link;

typedef struct cf_hardware {
    char name[48];
    bool gpu;
    double peak, memory_bytes;                               // flop/s and bytes of a rank
    cf_curve product, attention_forward, attention_backward; // flops of one kernel → flop/s
    int multiprocessors;                                     // a block stays on its multiprocessor to the end; CPU: 1
    cf_curve tile;                                           // elements of a tile of a product → share of the product's rate
    int persistent;    // 1: a product has one block for each multiprocessor, which computes many tiles; 0: one block for each tile
    double tile_depth; // start and end of a tile, as elements of the inner dimension
    double memory_bytes_per_s;
    double kernel_s;  // overhead of a kernel
    double event_s;   // time that an event with a time takes on the stream
    double start_s;   // from a post on a stream until its transfer asks for multiprocessors
    double call_s;    // host: start of a kernel, post or wait
    double word_s;    // host: reading and processing four bytes from the device
    double message_s; // each message of a unit but the first
    double native_s;  // a native collective, in addition to its steps
    int links;
    cf_link link[CF_LINKS];
} cf_hardware;
