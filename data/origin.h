// What a run begins from, and where it writes: token files, vocabulary, model file, checkpoint, --out. All of it is checked,
// and compared between ranks, before any work is done. What is wrong ends all ranks.
#ifndef ORIGIN_H
#define ORIGIN_H

#include "../commfuse/transport.h"
#include "../layers/params.h"
#include "checkpoint.h"
#include "hellaswag.h"
#include "model_file.h"
#include "options.h"
#include "saved_state.h"
#include "tokens.h"
#include "vocabulary.h"

CF_EXTERN_C_BEGIN

vocabulary *origin_words(const options *o); // NULL: none, tokens are bytes
// --train or --val, NULL if it is not given; all of it is read with --verify-data, which `root` prints.
tokens *origin_tokens(const options *o, const char *option, const char *pattern, int64_t V, bool root);

// Shapes of the model: of a run, which --init-from, the checkpoint in --out or options say. Collective. *start: the model
// file if it is read, else NULL. Then o->seq may be lower, if it was not given.
gpt_shape origin_shape(options *o, const vocabulary *words, cf_transport *transport, model_file **start);
// Of the checkpoint that --export-step says, or the newest; o gets its step, and as little as can be computed.
gpt_shape origin_shape_to_export(options *o);

#define ORIGIN_MODEL "model.bin" // in --out, at the end

// Rank 0's: --out and --trace can be written. NULL without --out.
checkpoint_store *origin_open_output(const options *o);
// Collective, after rank 0 has opened its output: all ranks have the same data, and the same --out.
void origin_compare(const options *o, cf_transport *transport, const tokens *train, const tokens *val, int64_t V,
                    const model_file *start, const hellaswag *questions, const int32_t *prompt, int64_t given);

// --- checkpoints ---

// What a manifest records of a run beside its options. Its tokens are NULL if it has none.
enum { RUN_NAME = 17 };
typedef struct run_facts {
    const gpt_shape *shape;
    const tokens *train;
    const char *version, *run;
    const char *plan; // as data/plan.h prints it; NULL: none has been found yet
    int64_t skipped;
    bool watched; // validation and samples of this step are done
} run_facts;
struct cJSON *origin_describe(const options *o, const run_facts *facts);     // a manifest's options
int64_t origin_number(const manifest *m, const char *name, int64_t missing); // one of them; `missing` if it is not there
// A run's name, by which its log is known: that of the checkpoint; or a new one, if it has none or is NULL.
void origin_name(const manifest *m, char name[RUN_NAME]);
// Dies together, naming every option that would change the run, unless o->force; what gives weights another shape cannot
// be forced.
void origin_compare_run(const options *o, const run_facts *facts, const manifest *m);

// Collective. The newest checkpoint in --out whose files are all true to their hashes, each read by one of the ranks: the run
// may go on with it. NULL: it begins anew, from the model file `start` if that is not NULL. Newer ones, which are damaged, are
// named and get another name: they must not pass for checkpoints when older ones are removed.
manifest *origin_checkpoint(const options *o, const run_facts *facts, cf_transport *transport, checkpoint_store *store,
                            const model_file *start);
// Collective. The checkpoint that --export-step says.
manifest *origin_checkpoint_to_export(options *o, cf_transport *transport);

// A reader for layers/optimizer.h. The argument: a checkpoint's saved_state.
saved_state *origin_open_state(const options *o, const manifest *m);
void origin_read_state(void *state, state_kind kind, int tensor, int64_t layer, int64_t first, int64_t count, float *out);

CF_EXTERN_C_END
#endif
