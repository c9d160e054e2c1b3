// The files that a run begins from, and where it writes: tokens, vocabulary, model file, checkpoint, --out. Everything is checked,
// and compared between ranks, before training begins. An error ends all ranks.
#pragma once
#include "../../commfuse/choice.h"
#include "../checkpoint.h"
#include "../model_file.h"
#include "options.h"
#include "../tokens.h"
#include "../vocabulary.h"

vocabulary *startup_vocabulary(const options *opt); // NULL: there is none, tokens are bytes
// For rank 0: says so if model, --train and --val seem to have different vocabularies, which would train nonsense without an error.
void startup_note_words(const options *opt);
// The tokens that samples continue: the prompt, or vocabulary_first(). Dies together if there are more than --seq.
int32_t *startup_prompt(const options *opt, const vocabulary *words, int64_t *count);
// Opens --train or --val; NULL if it is not given.
tokens *startup_tokens(const options *opt, const char *option, const char *pattern, int64_t V);

// The model's shape, from --init-from, the checkpoint m (NULL: none), or the options. Also stores it in *opt. Collective. *start:
// the model file, or NULL if it is not read. May lower opt->seq if it was not given. For an export it sets the smallest seq and
// micro_batch.
gpt_shape startup_shape(options *opt, const vocabulary *words, const manifest *m, cf_transport *transport, model_file **start);

#define ORIGIN_MODEL "model.bin" // in --out, at the end

// Called by rank 0: checks that --out and --trace can be written, and locks --out until the process ends.
void startup_open_output(const options *opt);

// Collective. Dies unless all ranks have the same version and options: launchers start each rank with a separate command line. A
// different --lr on one rank would train a wrong model without an error; a different --overlap would wait for messages that nobody
// sends. Only options of a host may differ: threads and paths of files.
void startup_compare_options(const options *opt, const char *version, cf_transport *transport);
// Collective, after rank 0 has called startup_open_output(). Dies unless all ranks have the same data and the same --out: each rank
// opens the files of its host, and training with different data would silently give a useless model.
void startup_compare_data(const options *opt, cf_transport *transport, const tokens *train, const tokens *val,
                          const int32_t *prompt, int64_t prompt_length, const model_file *start);

// --- checkpoints ---

// A manifest records this beside the options.
enum { RUN_NAME = 17 };
typedef struct run_facts {
    const gpt_shape *shape;
    const tokens *train; // NULL: none
    const char *version, *run;
    const cf_costs *costs; // NULL: none
} run_facts;
struct cJSON *startup_describe(const options *opt, const run_facts *facts); // the options of a manifest
int64_t startup_number(const manifest *m, const char *name);                // one of them; 0 if it is absent or no number
// The run's name, which its log records: that of the checkpoint, or a new one if m is NULL or has none.
void startup_name(const manifest *m, char name[RUN_NAME]);
// Is the checkpoint m (NULL: none) of these ranks, --tp, --dp and --strategy? Then the run keeps what decides bits: of the options
// that are not given, those of the mesh, the policy, --overlap and the like.
bool startup_keep(options *opt, const manifest *m, int ranks);
// Dies together, naming every option that would change the run, unless opt->force. A change of the weights' shape cannot be forced.
void startup_compare_run(const options *opt, const run_facts *facts, const manifest *m);

// Collective. The newest checkpoint in --out whose files all have the right hash: the run resumes from it. NULL: a new run begins.
// *damage, on rank 0: newer ones were damaged, which it has reported. With --export: that of --export-step, or dies together. Dies
// if one cannot be opened or read, on any rank: it may be sound.
manifest *startup_checkpoint(const options *opt, cf_transport *transport, bool *damage);
// Dies unless the run may begin from the checkpoint m, or anew if that is NULL. Calls startup_compare_run(). Renames the
// damaged checkpoints, so that they do not count when older ones are removed.
void startup_resume(const options *opt, const run_facts *facts, const manifest *m, bool damage);

// Opens a checkpoint's saved_state, and reads it for state_restore() of layers/state.h. Both die on an error. *kinds: how many of
// its values serve --optimizer: the weights alone if it is another one's.
saved_state *startup_open_state(const options *opt, const manifest *m, int *kinds);
void startup_read_state(void *state, int kind, int tensor, int64_t layer, int64_t first, int64_t count, float *out);
