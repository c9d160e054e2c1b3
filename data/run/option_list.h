// Every option: its field in struct options, name, default (parsed like a user's value), allowed values and help. Before each
// include define OPTION(C type, type of option, field, name, default, least, most, choices, help). GROUP is the heading in --help.
//
// The limits keep every product of sizes within 64 bits (micro-batch × heads × seq² × 4 bytes is at most 2^60), and integers below
// 2^53, so that doubles, and any JSON reader, hold them exactly.
#define INT(field, name, value, least, most, help)  OPTION(int64_t, OPTION_INT, field, name, value, least, most, NULL, help)
#define REAL(field, name, value, least, most, help) OPTION(double, OPTION_REAL, field, name, value, least, most, NULL, help)
#define TEXT(field, name, value, what, help)        OPTION(const char *, OPTION_TEXT, field, name, value, 0, 0, what, help)
#define CHOICE(field, name, value, choices, help)   OPTION(const char *, OPTION_CHOICE, field, name, value, 0, 0, choices, help)
#define FLAG(field, name, help)                     OPTION(bool, OPTION_FLAG, field, name, "", 0, 0, NULL, help)

// clang-format off
#define GROUP "model"
CHOICE(model, "model", "d12", "d6|d12|d24|d36|d48|smollm2-135m|smollm2-360m|smollm2-1.7b|llama3.2-1b",
    "GPT-2 by depth: 384, 768, 1024, 1280, 1600 channels in heads of 64; d12 is GPT-2 124M; or a known model of blocks of llama")
CHOICE(block, "block", "gpt2", &BLOCK_NAMES[1],
    "gpt2: layer norms, GELU, learned positions, biases; llama: RMS norms, SwiGLU, rotary positions, no biases, and the four "
    "options that follow")
REAL(norm_eps, "norm-eps", "1e-5", 1e-30, 1, "added to the mean square in norms")
REAL(rope_theta, "rope-theta", "10000", 1, 1e12, "base of the angles of rotary positions; of a known --model its own")
INT(ffn, "ffn", "0", 0, 1048576, "units of the MLP; 0: 8/3 of the channels, rounded up to a multiple of 128")
INT(kv_heads, "kv-heads", "0", 0, 1024, "heads of keys and values, which must divide the heads; 0: as many as heads")
INT(layers, "layers", "0", 0, 4096, "transformer blocks; 0: those of --model")
INT(channels, "channels", "0", 0, 131072, "width of the model; 0: that of --model")
INT(heads, "heads", "0", 0, 1024, "attention heads, which must divide the channels; 0: those of --model")
INT(seq, "seq", "1024", 1, 262144, "tokens per sequence")
INT(vocab, "vocab", "0", 0, 16777216,
    "size of the vocabulary; 0: the model file's or that of --model, else that of tokenizer.bin beside the tokens, else 256")
TEXT(init_from, "init-from", "", "FILE", "start from this model file (llm.c format); it sets the shape")
#undef GROUP
#define GROUP "data"
TEXT(train, "train", "", "GLOB",
    "token files to train on (llm.c format, made by data/prepare.py); of a directory its train_*.bin; quote a pattern")
TEXT(val, "val", "", "GLOB", "token files for the validation loss; of a directory its val_*.bin")
#undef GROUP
#define GROUP "parallel"
INT(tp, "tp", "0", 0, 65536, "ranks that share one replica (tensor parallel); 0: ranks / dp, and 1 if dp is 0 too")
INT(dp, "dp", "0", 0, 65536, "replicas (data parallel); 0: ranks / tp; tp x dp is the number of ranks")
CHOICE(strategy, "strategy", "tpsp", "tpsp|up",
    "tpsp: tensor and sequence parallel; up: Ulysses, whole weights and attention split by heads")
CHOICE(transport, "transport", "auto", "auto|mpi|nccl|ipc", "library that moves bytes between ranks")
INT(ranks_per_host, "ranks-per-host", "0", 0, 65536,
    "neighbouring ranks that schedules of two levels take for one host; 0: those of each host, of a prediction's machine, or all")
REAL(network_gbit, "network-gbit", "0", 0, 1e6,
    "rate of a host's network, all its cards together, that auto reckons with; 0: 10, or less where ranks share cores, with GPUs "
    "370 for each; a prediction's machine's")
TEXT(overlap, "overlap", "auto", "NAME[:SLICES]",
    "schedule of every operation, and slices of each rank's part; auto: the best for each, found in the first steps")
CHOICE(gradients, "gradients", "preset", "preset|end|ready|owners|auto",
    "weight gradients are reduced after backward; each when backward has completed it; or owner by owner, while they are computed; "
    "auto: by owners where nothing else hides them. preset: end for none, ready for slice and ideal, auto for auto and levels, "
    "else owners")
INT(prefetch, "prefetch", "-1", -1, 4096,
    "layers ahead of their use that weights are gathered; as many as --layers: all at once; -1: all for none, slice and ideal, "
    "else 4; auto and levels: all by a native collective, 4 by exchanges")
CHOICE(embedding, "embedding", "preset", "preset|table|rows|auto",
    "replicas exchange the token table, or the rows that their tokens name; preset: table for none, slice and "
    "ideal, auto for auto and levels, else rows")
TEXT(plan, "plan", "", "FILE",
    "for --overlap auto: the schedule of each operation (--dry-run prints it, --out keeps what trials found as plan.json); new: "
    "search again")
INT(reproducible, "reproducible", "0", 0, 1,
    "1: the same bits on the same mesh of any machine of one kind, whatever its load: no trials, one order of sums, as if each "
    "thread had a core; --recompute auto is 0")
#undef GROUP
#define GROUP "training"
INT(batch, "batch", "0", 0, 1e9, "sequences per step over all ranks, a multiple of micro-batch x dp; 0: micro-batch x dp")
INT(micro_batch, "micro-batch", "4", 1, 4096, "sequences per replica per pass; larger batches accumulate gradients")
INT(steps, "steps", "40", 0, 1e9, "optimizer steps")
CHOICE(optimizer, "optimizer", "adamw", &OPTIMIZER_NAMES[1],
    "update of the weights; muon: matrices of the layers are orthogonalised, AdamW for all else, with the same --lr")
REAL(lr, "lr", "3e-4", 0, 100, "highest learning rate")
REAL(min_lr, "min-lr", "0", 0, 100, "learning rate at the end of the schedule")
INT(warmup, "warmup", "0", 0, 1e9, "steps over which the learning rate rises linearly from 0")
CHOICE(schedule, "schedule", "cosine", "cosine|linear|constant|wsd",
    "learning rate after the warm-up; wsd: constant, then down over the last fifth")
INT(decay_steps, "decay-steps", "0", 0, 1e9,
    "step from which the learning rate is --min-lr, independent of --steps; 0: --steps")
REAL(weight_decay, "weight-decay", "0.1", 0, 100, "AdamW's decoupled decay, of matrices and embeddings only")
REAL(beta1, "beta1", "0.9", 0, 0.999999, "AdamW's decay of the first moment")
REAL(beta2, "beta2", "0.95", 0, 0.999999, "AdamW's decay of the second moment")
REAL(eps, "eps", "1e-8", 1e-30, 1, "AdamW's epsilon")
REAL(momentum, "momentum", "0.95", 0, 0.999999, "Muon's decay of the momentum of matrices (Nesterov's)")
REAL(clip, "clip", "1.0", 0, 1e9, "largest global gradient norm; 0: no clipping")
REAL(z_loss, "z-loss", "0", 0, 1000, "gradients have a part that keeps logits small: of X times their log-sum-exp squared")
INT(seed, "seed", "1337", 0, 9007199254740991.0, "seed of the initial weights and of the data order")
TEXT(skip_steps, "skip-steps", "", "A:B,C:D",
    "leaves out the data of steps A up to, but not including, B: later steps take what comes after it; several in order: 5:6,9:12")
CHOICE(recompute, "recompute", "auto", "auto|0|1",
    "0: keep GELUs and layer norms for the backward pass: faster; 1: compute, and gather, them again: less memory; auto: 0 if that "
    "takes at most three quarters of the free memory")
CHOICE(dtype, "dtype", "auto", "auto|fp32|bf16",
    "type of weights and activations, in memory and on the wire; auto: fp32 on a CPU, bf16 on a GPU")
CHOICE(reduce_dtype, "reduce-dtype", "fp32", "fp32|bf16",
    "type in which gradients of weights are sent and summed over ranks; bf16, with --dtype bf16: half the bytes, rounded sums")
#undef GROUP
#define GROUP "watching"
INT(val_every, "val-every", "20", 0, 1e9, "steps between validation losses; 0: never")
INT(val_batches, "val-batches", "0", 0, 1e9,
    "batches of --batch sequences in a validation loss, from the start of the set, fewer if it is short; 0: 80 sequences")
INT(sample_every, "sample-every", "0", 0, 1e9,
    "steps between samples of generated text, and one at the end; 0: never, or with a prompt only at the end")
TEXT(prompt, "prompt", "", "TEXT",
    "samples continue this text; its tokens are bytes, or words of tokenizer.bin, always the longest that fits")
TEXT(prompt_tokens, "prompt-tokens", "", "FILE", "samples continue the tokens whose numbers this file has, as text")
INT(sample_tokens, "sample-tokens", "256", 1, 1e6, "tokens of a sample")
REAL(temperature, "temperature", "1.0", 0, 1000, "divides the logits of samples; 0: always the most likely token")
INT(top_k, "top-k", "0", 0, 65536, "sample among the K most likely tokens only; 0: among all")
TEXT(log, "log", "", "FILE", "log, one JSON object a line")
TEXT(trace, "trace", "", "FILE", "timeline of some steps, for ui.perfetto.dev; --predict: FILE.dot for a graph of what waits for what")
TEXT(trace_steps, "trace-steps", "1:3", "A:B", "steps of the timeline: A up to, but not including, B")
#undef GROUP
#define GROUP "output"
TEXT(out, "out", "", "DIR", "directory of checkpoints, from whose newest valid one a run resumes, and of the trained model")
INT(save_every, "save-every", "0", 0, 1e9, "steps between checkpoints; 0: only at the end, or when a signal ends the run")
INT(keep, "keep", "2", 0, 1e6, "checkpoints to keep, the newest; 0: all")
INT(keep_every, "keep-every", "0", 0, 1e9, "also keep the checkpoints of steps that are multiples of this; 0: none")
FLAG(force, "force", "resume although options would change the run, or begin a new run if no checkpoint is valid")
TEXT(export_to, "export", "", "FILE", "write the model of a checkpoint in --out as a model file (llm.c format), then stop")
INT(export_step, "export-step", "0", 0, 1e9, "step of that checkpoint; 0: the newest")
#undef GROUP
#define GROUP "machine"
INT(threads, "threads", "0", 0, 4096,
    "compute threads per rank; 0: an equal share of the host's cores that are allowed, at most OMP_NUM_THREADS; with several "
    "ranks one of three or more is left to transfers")
REAL(peak_tflops, "peak-tflops", "0", 0, 1e6,
    "peak of one rank's device, for the MFU; 0: known for GPUs, measured with a GEMM on CPUs")
REAL(timeout, "timeout", "60", 0, 604800, "seconds a rank waits for another before it gives up; 0: no limit")
FLAG(dry_run, "dry-run",
     "check options, tokens and model; print mesh, memory by purpose, how gradients are communicated, all schedules; then stop")
TEXT(predict, "predict", "", "FILE",
    "predict the time of a step on the machine of this file, or of this name (scripts/machines/); trains nothing")
TEXT(predict_ranks, "predict-ranks", "", "N or A:B",
    "predict all meshes of N ranks, or of A, 2A, 4A … B; --micro-batch then counts the sequences of a rank, not of a replica")
FLAG(predict_all, "predict-all", "replay all ranks, at most 64, instead of one replica")
FLAG(help, "help", "this list")
#undef GROUP
// clang-format on

#undef INT
#undef REAL
#undef TEXT
#undef CHOICE
#undef FLAG
#undef OPTION
