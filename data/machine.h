// MACHINE.json of --predict: rates, costs and links of a machine (commfuse/hardware.h).
//
//   { "name": "h100x8", "device": "gpu", "dtype": "bf16",
//     "peak_tflops": 989, "memory_gb": 80, "memory_gb_per_s": 2900,
//     "product_tflops": [[0.1, 90], [10, 520], …],   flops of one product in 10⁹ → its rate; so the next two
//     "attention_tflops": […], "attention_backward_tflops": […],
//     "multiprocessors": 132,                        of a CPU 1
//     "persistent": 1,                               a product is a block on each until it is done, else a block a tile
//     "tile_share": [[16384, 0.9], [32768, 1]],      elements of a tile → share of a product's rate that such tiles reach;
//     "tile_depth": 80,                              each takes as long as for so many more of the inner dimension. Whole waves of
//                                                    tiles; [[1, 1]] and 0: the rates are of whole products, whatever their shape
//     "kernel_us": 1.3, "moment_us": 2, "start_us": 3.5,    beside a kernel's work; noting a time; from a post until it goes
//     "call_us": 3,                                  host: start a kernel, post
//     "word_ns": 1.5, "message_us": 1, "native_us": 12, "native_share": [[0.1, 0.3], [100, 0.9]],    MB → share of the link
//     "links": [ {"name": "nvlink", "ranks": 8, "gb_per_s": 370, "block_gb_per_s": 0, "latency_us": 10, "step_us": 1,
//                 "taken": 0.1, "copied": 1},        copy engines move what is exchanged; else, and natively, taken multiprocessors
//                …the last joins all ranks: "ranks": 0 ] }
#ifndef MACHINE_H
#define MACHINE_H

#include "../commfuse/hardware.h"
#include "problem.h"

typedef struct machine {
    cf_hardware hardware;
    char dtype[8]; // of the rates: "bf16", "fp32"
} machine;

// False, see why: it cannot be read, or a field, which `why` names, is missing, unknown, or out of its range.
bool machine_read(machine *m, const char *path, problem *why);

#endif
