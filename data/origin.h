// What a run begins from, and where it writes: token files, vocabulary, model file, checkpoint, --out. All of it is checked, and
// compared between ranks, before any work is done. An error ends all ranks.
#ifndef ORIGIN_H
#define ORIGIN_H

#include "../commfuse/transport.h"
#include "checkpoint.h"
#include "hellaswag.h"
#include "model_file.h"
#include "options.h"
#include "tokens.h"
#include "vocabulary.h"

CF_EXTERN_C_BEGIN

vocabulary *origin_vocabulary(const options *o); // NULL: none, tokens are bytes
// --train or --val, NULL if it is not given. With --verify-data all of it is read, and `root` prints that.
tokens *origin_tokens(const options *o, const char *option, const char *pattern, int64_t V, bool root);

// The model's shape, from --init-from, the checkpoint in --out, or the options; with --export that of --export-step or of the
// newest checkpoint. Collective. *start: the model file if it is read, or NULL. May lower o->seq if it was not given; for an
// export sets the step, and options for as little computation as there can be.
gpt_shape origin_shape(options *o, const vocabulary *words, cf_transport *transport, model_file **start);

#define ORIGIN_MODEL "model.bin" // in --out, at the end

// On rank 0: --out and --trace can be written. NULL without --out.
checkpoint_store *origin_open_output(const options *o);

// Collective: launchers start ranks one by one, each with its own command line. With another --lr a rank would train another model
// without an error, with another --overlap it would wait for messages that nobody sends. Only the options of a host may differ:
// its threads, and where files are.
void origin_compare_options(const options *o, const char *version, cf_transport *transport);
// Collective, after rank 0 has opened its output: all ranks have the same data, and the same --out. Each rank has opened the files
// of its own host, and ranks with other data would train on, to a useless model.
void origin_compare_data(const options *o, cf_transport *transport, const tokens *train, const tokens *val, int64_t V,
                         const model_file *start, const hellaswag *questions, const int32_t *prompt, int64_t prompt_tokens);

// --- checkpoints ---

// What a manifest records of a run beside its options.
enum { RUN_NAME = 17 };
typedef struct run_facts {
    const gpt_shape *shape;
    const tokens *train; // NULL: none
    const char *version, *run;
    const char *plan; // as data/plan.h prints it; NULL: none has been found yet
    int64_t skipped;
    bool watched; // validation and samples of this step are done
} run_facts;
struct cJSON *origin_describe(const options *o, const run_facts *facts);     // a manifest's options
int64_t origin_number(const manifest *m, const char *name, int64_t missing); // one of them; `missing` if it is not there
// The run's name, by which its log is known: that of the checkpoint; or a new one, if it has none or is NULL.
void origin_name(const manifest *m, char name[RUN_NAME]);
// Dies together, naming every option that would change the run, unless o->force. A change of the weights' shape cannot be forced.
void origin_compare_run(const options *o, const run_facts *facts, const manifest *m);

// Collective. The newest checkpoint in --out whose files all have the right hash: the run may resume from it. NULL: it begins anew,
// from the model file `start` if that is not NULL. Newer ones, which are damaged, are named and get another name: they must not
// count as checkpoints when older ones are removed.
manifest *origin_checkpoint(const options *o, const run_facts *facts, cf_transport *transport, checkpoint_store *store,
                            const model_file *start);
// Collective. The checkpoint that --export-step names.
manifest *origin_checkpoint_to_export(const options *o, cf_transport *transport);

// A reader for layers/optimizer.h. The argument: a checkpoint's saved_state.
saved_state *origin_open_state(const options *o, const manifest *m);
void origin_read_state(void *state, state_kind kind, int tensor, int64_t layer, int64_t first, int64_t count, float *out);

CF_EXTERN_C_END
#endif
