// --predict: the time of a step of this command on the machine of MACHINE.json. The trainer records the steps of its ranks
// (commfuse/predict/record.h), commfuse/predict/playback.h replays them; this file reads the machine, chooses modes and meshes, and
// prints the results. MACHINE.json has exactly these fields, and perhaps a "comment":
//
//   { "name": "h100x8", "device": "gpu", "dtype": "bf16",
//     "peak_tflops": 989, "memory_gb": 80, "memory_gb_per_s": 2900,
//     "product_tflops": [[0.1, 90], [10, 520], …],   flops of one product in 10⁹ → its rate; the next two likewise
//     "attention_tflops": […], "attention_backward_tflops": […],
//     "multiprocessors": 132,                        1 for a CPU
//     "persistent": 1,                               a product runs one block on each multiprocessor; 0: one block per tile
//     "tile_share": [[16384, 0.9], [32768, 1]],      elements of a tile → share of a product's rate that such tiles reach
//     "tile_depth": 80,                              fixed cost of a tile, as a number of additional inner elements. Tiles run in
//                                                    whole waves; [[1, 1]] and 0: the rates are of whole products of any shape
//     "kernel_us": 1.3, "event_us": 2, "start_us": 3.5,    fixed cost of a kernel; recording a time; from a post to the transfer
//     "call_us": 3,                                  host time to start a kernel or to post
//     "word_ns": 1.5, "message_us": 1, "native_us": 12, "native_share": [[0.1, 0.3], [100, 0.9]],    MB → share of the link
//     "links": [ {"name": "nvlink", "ranks": 8, "gb_per_s": 370, "block_gb_per_s": 0, "latency_us": 10, "step_us": 1,
//                 "taken": 0.1,                      share of the multiprocessors that transfers take
//                 "copied": 1},                      1: copy engines do exchanges, and only native collectives take multiprocessors
//                …the last joins all ranks: "ranks": 0 ] }
#pragma once
#include "../../commfuse/predict/hardware.h"
#include "../../commfuse/predict/record.h"
#include "options.h"

typedef struct predicted_rank {
    int plan;      // given: of auto, one of those that trials compare (cf_tuner_take); 0: the predicted one
    bool left_out; // there is no such plan
    cf_record record;
    int64_t memory; // bytes
    double flops;   // of a token, as MFU counts them
} predicted_rank;
// Records steps of world rank `rank` of the mesh in opt, with a mark before each step and after the last.
typedef void predict_record(void *trainer, const options *opt, int rank, int players, predicted_rank *to);

// Reads MACHINE.json and sets the options that follow from it; call it before derived_choose_program(). Dies together, naming the
// field, if one is missing, unknown or out of range.
void predict_options(options *opt, cf_hardware *h);
// Dies together if the mesh is unsound.
void predict(const options *opt, const cf_hardware *h, predict_record *record, void *trainer, FILE *out);
