// A machine as a prediction knows it: rates, costs and links, given (data/machine.c), not measured here.
#ifndef CF_HARDWARE_H
#define CF_HARDWARE_H

#include <math.h>
#include <stdbool.h>
#include "extern_c.h"

CF_EXTERN_C_BEGIN

enum { CF_LINKS = 4, CF_CURVE_POINTS = 32 };

// y at x: linear in log x between points, as at the nearest one outside of them.
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

// Joins blocks of `ranks` neighbouring ranks of the world: the first level those of a host, the last all of them (0).
typedef struct cf_link {
    char name[24];
    int ranks;
    double bytes_per_s;       // of a rank, each way
    double block_bytes_per_s; // of all ranks of a block of the level below together; 0: no limit but that of each
    double latency_s;         // of an exchange, when both ends have come to it
    double step_s;            // of one step of a native collective's ring
    double taken;             // share of a device that transfers keep from computing: of its multiprocessors, or of its cores' time
    int copied;               // 1: copy engines move what is exchanged, and take no multiprocessors
} cf_link;

typedef struct cf_hardware {
    char name[48];
    bool gpu;
    double peak, memory_bytes;                               // flop/s and bytes of a rank
    cf_curve product, attention_forward, attention_backward; // flops of one kernel → flop/s
    int multiprocessors;                                     // each computes what it has begun to its end; of a CPU 1
    cf_curve tile;     // elements of a tile that a product may be cut into → share of its rate
    int persistent;    // 1: a product is a block on each multiprocessor until all its tiles are done, else a block a tile
    double tile_depth; // what a tile's begin and end take, as elements of the inner dimension
    double memory_bytes_per_s;
    double kernel_s;  // what every kernel takes beside its work
    double moment_s;  // of the stream: noting a time
    double start_s;   // from where a stream posts something until its transfer asks for multiprocessors
    double call_s;    // host: starting a kernel, posting or waiting
    double word_s;    // host: a word of four bytes that it reads from the device and works on
    double message_s; // each message of a unit but the first
    double native_s;  // a native collective, beside its steps
    cf_curve native;  // bytes that a rank sends in it → share of the link's rate
    int links;
    cf_link link[CF_LINKS];
} cf_hardware;

CF_EXTERN_C_END
#endif
