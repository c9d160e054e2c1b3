// Train a GPT: options → mesh → model → training loop.
//
//     ./train_gpt --train data.bin                              one process, all cores
//     mpirun -np 4 ./train_gpt --tp 2 --dp 2 --train data.bin   two replicas of two ranks each
//
// The common subset of C and C++: `cc -x c` builds it for CPUs, nvcc for GPUs, a program for each element type. It knows no
// kernel and no transport: commfuse/ moves data between ranks, layers/ computes, data/ reads, writes and prints. All ranks take the
// same path through this file, so they begin operations in the same order.
//
// A step ends when the next one begins. Its figures are then exchanged with the gradient norm of the next step, and reported. If a
// validation, a sample, a save or the end of the run follows, the step ends there and is reported at once.
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "commfuse/choice.h"
#include "commfuse/die.h"
#include "commfuse/limits.h"
#include "commfuse/streams.h"
#include "layers/adamw.h"
#include "layers/peak.h"
#ifdef __cplusplus
extern "C" { // these headers are for C
#endif
#include "commfuse/stop.h"
#include "data/origin.h"
#include "data/predict.h"
#include "data/recipe.h"
#include "data/report.h"
#include "layers/optimizer.h"
#ifdef __cplusplus
}
#endif

enum { VAL_SEQUENCES = 80 };      // of a validation, unless --val-batches is given
enum { EARLY_TIMEOUT_S = 60 };    // for ranks that meet only to report a wrong option
enum { PATIENCE = 10 };           // times --timeout: how long ranks wait for one that reads or writes files
enum { PREDICT_STEPS = 3 };       // the last one begins as every later step would
enum { STATUS_STOPPED = 75 };     // a signal ended the run after a save: the same command resumes it
enum { SAMPLE_STREAM = 1 << 20 }; // the first random stream of samples; those of the tensors have lower numbers

typedef struct trainer {
    options o;
    cf_transport *transport;
    cf_context context;
    cf_mesh mesh;
    cf_choice how;
    gpt model;
    zero_optimizer optimizer;
    tokens *train, *val;
    hellaswag *questions;
    vocabulary *words;
    model_file *start;
    int32_t *text; // a sample: the prompt, then the generated tokens
    int64_t prompt_tokens;
    int trace_from, trace_to; // steps [from, to); -1 without --trace
    saver *checkpoints;       // NULL without --out
    rank_state copy;          // of this rank's state, while it is being saved
    char run[RUN_NAME];       // only rank 0's is used
    run_report report;
    step_report last; // the step to be reported; its `step` is -1 if there is none
    int stop;         // the signal that ends the run, 0: none
} trainer;

static bool root(const trainer *t) {
    return t->mesh.world_group.rank == 0;
}

// --- options → mesh ---

static void meet_early(void) {
    cf_transport_create("auto", NULL, NULL, EARLY_TIMEOUT_S);
}

static void make_mesh(trainer *t) {
    options *o = &t->o;
    const int ranks = recipe_mesh(o, t->transport->size);
    cf_mesh_init(&t->mesh, ranks, t->transport->rank, (int)o->tp, (int)o->dp);
    t->report.accumulation = recipe_accumulation(o);
    if (t->transport->size < ranks && !*o->predict) return; // a dry run: one process, as rank 0 of the mesh
    t->transport->collectives = strcmp(o->overlap, "none") == 0 || strcmp(o->overlap, "slice") == 0;
    cf_mesh_bind(t->transport, &t->mesh);
}

static void make_context(trainer *t) {
    options *o = &t->o;
    // With three or more cores per rank, one is left to the thread that moves bytes.
    int share = t->transport->local_cores / t->transport->local_size, spare = t->mesh.world_group.size > 1 && share >= 3 ? 1 : 0;
    if (o->threads == 0) o->threads = cf_limits_threads(share > 1 ? share - spare : 1);
    cf_device_threads((int)o->threads);
    // A dry run of a mesh that is not here assumes hosts where one core is left to move bytes.
    const bool elsewhere = t->transport->size < t->mesh.world_group.size && o->threads > 1;
    cf_costs_agree(t->transport, (int)o->threads - elsewhere);
    t->context.transport = t->transport;
    t->context.stream = cf_stream_create(), t->context.second = cf_stream_create_second();
    t->context.trace = cf_trace_create();
    t->context.step = t->trace_from = t->trace_to = -1;
    if (*o->trace) sscanf(o->trace_steps, "%d:%d", &t->trace_from, &t->trace_to); // the parser has checked the form
    if (o->check_wire) t->context.check = cf_check_create();
    t->how.slices = (int)o->slices;
    if (!cf_mode_parse(o->overlap, &t->how.mode) || !cf_route_parse(o->route, &t->how.route))
        cf_die_together("a bug: options.c and schedule.c have different names", "--overlap %s --route %s", o->overlap, o->route);
}

// --- mesh → model ---

static void make_model(trainer *t) {
    options *o = &t->o;
    run_report *r = &t->report;
    const gpt_shape shape = origin_shape(o, t->words, t->transport, &t->start);
    if (o->dry_run) cf_device_plan_only(true);
    const parallel_strategy strategy = strcmp(o->strategy, "up") == 0 ? STRATEGY_UP : STRATEGY_TPSP;
    if (strcmp(o->recompute, "auto") == 0)
        o->recompute = gpt_may_keep(&t->context, &t->mesh, shape, strategy, o->seq, o->micro_batch, t->how) ? "0" : "1";
    gpt_create(&t->model, &t->context, &t->mesh, shape, strategy, o->seq, o->micro_batch, t->how, *o->recompute == '1');
    optimizer_create(&t->optimizer, &t->model, t->how);
    const bool choose = t->how.mode == CF_MODE_AUTO && t->mesh.world_group.size > 1 && !*o->export_to;
    plan_create(&r->plan, choose ? gpt_create_tuner(&t->model) : NULL, o, t->transport, VERSION);
    r->o = o, r->version = VERSION, r->run = t->run;
    r->mesh = &t->mesh, r->transport = t->transport, r->words = t->words;
    r->parameters = params_count(&shape), r->V = shape.V, r->flops = params_flops(&shape, o->seq);
    if (*o->export_to) return;
    r->train = t->train = origin_tokens(o, "train", o->train, shape.V, root(t));
    r->val = t->val = origin_tokens(o, "val", o->val, shape.V, root(t));
}

// --- where the run begins ---

// Waits until every rank is here and its device is idle.
static void meet(trainer *t) {
    cf_barrier(&t->context, &t->mesh.world_group);
    cf_stream_sync(t->context.stream);
}

// Reading and writing files takes longer on some ranks than on others.
static void allow_long_waits(trainer *t, bool patient) {
    *t->transport->timeout_s = (patient ? PATIENCE : 1) * t->o.timeout;
}

static void restore_state(trainer *t, const manifest *m) {
    saved_state *from = origin_open_state(&t->o, m);
    state_restore(&t->optimizer, origin_read_state, from);
    saved_state_close(from);
}

// From the newest sound checkpoint, else from --init-from, else random weights.
static void load_state(trainer *t) {
    const run_facts facts = {&t->model.params.shape, t->train, VERSION, t->run, NULL, 0, false};
    manifest *m = origin_checkpoint(&t->o, &facts, t->transport, t->start);
    origin_name(m, t->run);
    plan_start(&t->report.plan, m ? manifest_value(m, "found-plan") : NULL, t->o.steps - (m ? m->step : 0));
    if (m) {
        restore_state(t, m);
        t->last.skipped = origin_number(m, "skipped", 0);
        report_resume(&t->report, m);
        manifest_free(m);
        return;
    }
    if (t->start)
        params_read(&t->model.params, model_file_read, t->start, t->context.stream);
    else
        params_init(&t->model.params, (uint64_t)t->o.seed, t->context.stream);
    optimizer_start(&t->optimizer);
}

// --- one step ---

// Fills inputs and targets with this replica's sequences. first: position of the micro-batch in the training order.
static void load_sequences(trainer *t, int64_t first) {
    const int64_t B = t->o.micro_batch;
    for (int64_t b = 0; t->train && b < B; b++) { // a prediction has no tokens
        int64_t sample = tokens_shuffled(t->train, (uint64_t)t->o.seed, first + t->mesh.dp_group.rank * B + b);
        tokens_read(t->train, sample, t->model.params.shape.V, b, B, t->model.host_inputs, t->model.host_targets);
    }
}

// figures: of all ranks, for the last step.
static void report_last(trainer *t, const double *figures) {
    if (t->last.step < 0) return;
    int stop = report_step(&t->report, &t->last, figures, REPORT, t->checkpoints);
    if (stop) t->stop = stop;
    t->last.step = -1;
}

static void train_step(trainer *t, int64_t step) {
    const options *o = &t->o;
    const int64_t batch_tokens = o->batch * o->seq;
    double mine[FIGURES];
    cf_zero(t->model.loss, (int64_t)sizeof *t->model.loss, t->context.stream);
    for (int micro = 0; micro < t->report.accumulation; micro++) {
        load_sequences(t, step * o->batch + micro * o->micro_batch * t->mesh.dp);
        gpt_begin_forward(&t->model, t->model.host_inputs, t->model.host_targets, o->seq, o->micro_batch);
        optimizer_finish_update(&t->optimizer);
        gpt_forward(&t->model, 1 / (double)batch_tokens);
        gpt_backward(&t->model, micro == 0, micro == t->report.accumulation - 1);
    }
    report_figures(&t->last, t->context.trace, t->checkpoints, mine);
    report_last(t, optimizer_reduce(&t->optimizer, t->model.loss, mine, FIGURES));

    const adamw a = {recipe_learning_rate(o, step), o->beta1, o->beta2, o->eps, o->weight_decay, 1, step + 1};
    const bool may_skip = t->last.skipped < o->skip_nonfinite, trial = cf_tuner_trying(t->report.plan.tuner);
    const step_result *r = optimizer_begin_update(&t->optimizer, a, o->clip, batch_tokens, may_skip);
    const int64_t skipped = r->skipped ? t->last.skipped + 1 : 0;
    const step_report last = {step, r->loss, r->grad_norm, a.lr, 0, skipped, r->nonfinite_rank, r->nonfinite, trial};
    t->last = last;
}

// --- validation, samples, saving ---

static void load_validation(void *trainer_of, int64_t number, int64_t b, int64_t B, int32_t *inputs, int32_t *targets,
                            int64_t *first, int64_t *end) {
    const trainer *t = (const trainer *)trainer_of;
    tokens_read(t->val, number, t->model.params.shape.V, b, B, inputs, targets);
    (void)first, (void)end; // every token counts
}

// The same sequences for every batch and mesh.
static void validate(trainer *t, int64_t step) {
    const options *o = &t->o;
    const int64_t samples = t->val->samples, asked = o->val_batches > 0 ? o->val_batches * o->batch : (int64_t)VAL_SEQUENCES,
                  all = asked < samples ? asked : samples;
    double *losses = gpt_evaluate(&t->model, load_validation, t, all, o->seq, o->micro_batch), loss = 0;
    for (int64_t i = 0; i < all; i++) loss += losses[i];
    report_validation(&t->report, step, loss / (double)(all * o->seq), all);
    free(losses);
}

static void evaluate_hellaswag(trainer *t, int64_t step) {
    hellaswag *h = t->questions;
    double *losses = gpt_evaluate(&t->model, hellaswag_load, h, HELLASWAG_ENDINGS * h->count, h->longest, t->o.micro_batch);
    report_hellaswag(&t->report, step, hellaswag_correct(h, losses), h->count);
    free(losses);
}

// Every replica generates the same text, because the others would only wait for the first.
static void sample(trainer *t, int64_t step) {
    const options *o = &t->o;
    const sampling how = {o->temperature, o->top_k, (uint64_t)o->seed, SAMPLE_STREAM + (uint64_t)step};
    if (o->seq < 2) return;
    gpt_generate(&t->model, how, t->text, t->prompt_tokens, o->sample_tokens, o->seq);
    const int64_t hidden = *o->prompt ? 0 : t->prompt_tokens;
    report_sample(&t->report, step, t->text + hidden, t->prompt_tokens + o->sample_tokens - hidden);
}

// The first replica sends its weights to rank 0, which writes them; all other ranks wait.
static void write_model(trainer *t, int64_t step, const char *path) {
    const gpt_shape *shape = &t->model.params.shape;
    optimizer_wait_for_weights(&t->optimizer);
    allow_long_waits(t, true);
    model_writer *writer = root(t) ? model_writer_open(path, shape, REAL_DTYPE == CF_BF16) : NULL;
    if (t->mesh.dp_group.rank == 0) gpt_collect(&t->model, model_writer_append, writer);
    if (writer) model_writer_commit(writer);
    meet(t);
    allow_long_waits(t, false);
    report_line(&t->report, "step %5ld  saved %s\n", step, path);
}

// Training pauses while the state is copied, and before that until the last checkpoint is written. wait: until this one is written.
static bool save(trainer *t, int64_t step, bool watched, bool wait) {
    char *plan = plan_text(&t->report.plan);
    const run_facts facts = {&t->model.params.shape, t->train, VERSION, t->run, plan, t->last.skipped, watched};
    allow_long_waits(t, true);
    bool saved = saver_begin(t->checkpoints, step, origin_describe(&t->o, &facts));
    free(plan);
    if (saved) {
        if (!t->copy.run) state_create(&t->copy, &t->optimizer);
        optimizer_finish_update(&t->optimizer);
        state_copy(&t->copy, &t->optimizer);
        saver_write(t->checkpoints, &t->copy);
    }
    if (saved && wait) saved = saver_finish(t->checkpoints);
    allow_long_waits(t, false);
    report_spent(&t->report, TIME_SAVE);
    return saved;
}

// --- the run ---

static void validate_and_sample(trainer *t, int64_t step, bool last) {
    const options *o = &t->o;
    if (t->val && o->val_every > 0 && (recipe_due(o->val_every, step) || last)) validate(t, step);
    if (recipe_hellaswag_due(o, step, last)) evaluate_hellaswag(t, step);
    if (recipe_sample_due(o, step, last)) sample(t, step);
}

// Validation, samples and a save before step `step`. A run that resumes here does not repeat what it did before the checkpoint.
static void between_steps(trainer *t, int64_t step) {
    bool resumed = step == t->report.first && step > 0;
    if (!resumed || !t->report.watched) validate_and_sample(t, step, false);
    if (t->checkpoints && step > 0 && !resumed && recipe_due(t->o.save_every, step)) save(t, step, true, false);
    if (resumed && step > t->trace_from && step < t->trace_to) t->trace_from = (int)step;
    if (step == t->trace_from) meet(t), cf_trace_start(t->context.trace, t->transport);
}

// A step begins where the one before ends, or, after other work, when all ranks are ready.
static void begin_step(trainer *t) {
    const bool follows = t->last.step >= 0;
    if (!follows) {
        meet(t);
        report_spent(&t->report, TIME_WATCH);
    }
    cf_trace_step(t->context.trace, t->context.step, t->context.stream);
    if (follows) t->last.ms = report_lap(&t->report);
    cf_tuner_begin_step(t->report.plan.tuner);
}

// Ends a step before other work begins. The rest of its update counts as its time. A run that ends before trace_to writes the
// timeline of the steps until then.
static void close_step(trainer *t, int64_t step, bool interrupted) {
    double mine[FIGURES];
    if (interrupted) optimizer_finish_update(&t->optimizer);
    cf_stream_sync(t->context.stream);
    cf_trace_step(t->context.trace, t->context.step, t->context.stream);
    t->last.ms = report_lap(&t->report);
    cf_tuner_end_step(t->report.plan.tuner);
    report_figures(&t->last, t->context.trace, t->checkpoints, mine);
    report_last(t, optimizer_exchange(&t->optimizer, mine, FIGURES));
    const bool ends = step + 1 == t->trace_to || step + 1 == t->o.steps || t->stop;
    if (ends && step >= t->trace_from && step < t->trace_to) report_trace(&t->report, &t->context, t->trace_from, step);
}

// After the last step: validation, checkpoint and model.
static bool finish(trainer *t) {
    const int64_t steps = t->o.steps;
    char path[PATH_MAX];
    if (t->report.first < steps || !t->report.watched) validate_and_sample(t, steps, true);
    if (!t->checkpoints) return true;
    bool saved = t->report.first == steps || save(t, steps, true, true);
    snprintf(path, sizeof path, "%s/" ORIGIN_MODEL, t->o.out);
    write_model(t, steps, path);
    report_spent(&t->report, TIME_SAVE);
    return saved;
}

// Takes the remaining steps, or fewer if a signal ends the run.
static int run(trainer *t) {
    const options *o = &t->o;
    double start_ms = report_lap(&t->report), begin_ms = t->report.lap_ms;
    int64_t step = t->report.first;
    if (step < o->steps) t->report.time.ms[TIME_START] += start_ms;
    t->last.step = -1;
    for (; step < o->steps && !t->stop; step++) {
        t->context.step = (int)step;
        between_steps(t, step);
        begin_step(t);
        train_step(t, step);
        const bool traced = step + 1 == t->trace_from || step + 1 == t->trace_to; // tracing begins or ends
        const bool interrupted = t->stop || recipe_pause_due(o, step);
        if (traced || interrupted) close_step(t, step, interrupted);
    }
    const bool stopped = step < o->steps;
    if (stopped && !t->checkpoints)
        cf_die_together("with --out DIR a signal saves the run, and the same command resumes it",
                        "%s ends the run after %ld of %ld steps; nothing was saved", strsignal(t->stop), step, o->steps);
    bool saved = stopped ? save(t, step, false, true) : finish(t);
    optimizer_wait_for_weights(&t->optimizer);
    report_end(&t->report, &t->context, step, stopped ? t->stop : 0, saved, begin_ms);
    return stopped ? STATUS_STOPPED : 0;
}

static void export_model(trainer *t) {
    allow_long_waits(t, true);
    manifest *m = origin_checkpoint(&t->o, NULL, t->transport, NULL);
    restore_state(t, m);
    write_model(t, m->step, t->o.export_to);
    manifest_free(m);
}

static int train_model(trainer *t) {
    const options *o = &t->o;
    run_report *r = &t->report;
    allow_long_waits(t, true);
    if (root(t)) origin_open_output(o);
    if (*o->hellaswag) t->questions = hellaswag_open(o->hellaswag, o->seq, r->V);
    t->text = vocabulary_prompt(o, t->words, r->V, &t->prompt_tokens);
    origin_compare_data(o, t->transport, t->train, t->val, r->V, t->start, t->questions, t->text, t->prompt_tokens);
    load_state(t);
    meet(t); // with the long time limit, because some ranks read faster
    allow_long_waits(t, false);
    report_open(r);
    if (*o->out) t->checkpoints = saver_create(t->transport, o, r->log);
    r->peak = o->peak_tflops * 1e12 * t->mesh.world_group.size, r->peak_source = "--peak-tflops";
    if (o->peak_tflops <= 0)
        r->peak = peak_flops(&r->peak_source, (double)t->transport->local_cores / t->transport->local_size, t->transport,
                             t->context.stream);
    report_config(r);
    report_banner(r);
    cf_stop_listen(); // not earlier: until here every rank finds the same errors, and rank 0 reports them
    int status = run(t);
    // A log or timeline that could not be written does not end a run, but makes its exit status 1.
    return status == 0 && !report_complete(r) ? EXIT_FAILURE : status;
}

static void close_model(trainer *t) {
    plan_free(&t->report.plan);
    optimizer_free(&t->optimizer);
    gpt_free(&t->model);
    cf_check_free(t->context.check);
    cf_trace_free(t->context.trace);
    cf_stream_free(t->context.stream), cf_stream_free(t->context.second);
    cf_mesh_free(&t->mesh);
}

static void close_trainer(trainer *t) {
    saver_free(t->checkpoints);
    state_free(&t->copy);
    log_close(t->report.log);
    tokens_close(t->train);
    tokens_close(t->val);
    model_file_close(t->start);
    vocabulary_close(t->words);
    hellaswag_close(t->questions);
    free(t->text);
    allow_long_waits(t, true); // rank 0 may take longer, with a log or a timeline
    t->transport->close(t->transport);
}

// --- a prediction: this program is linked with a device, a transport and kernels that only record ---

static void record_rank(void *trainer_, const options *o, int rank, int players, predicted_rank *to) {
    trainer *t = (trainer *)trainer_;
    cf_record *record = (cf_record *)t->transport->state;
    t->o = *o;
    t->transport->rank = record->rank = rank;
    record->world = (int)(o->tp * o->dp), record->players = players, record->words = o->vocab;
    make_mesh(t);
    make_context(t);
    make_model(t);
    plan_start(&t->report.plan, NULL, 0);
    t->last.step = -1;
    for (int64_t step = 0; step < PREDICT_STEPS; step++) {
        cf_record_add(record, CF_DO_STEP);
        train_step(t, step);
        t->last.step = -1;
    }
    cf_record_add(record, CF_DO_STEP);
    const predicted_rank found = {cf_record_finish(record), cf_memory_bytes(), t->report.flops};
    *to = found;
    close_model(t);
}

int main(int argc, char **argv) {
    static trainer t;
    static cf_hardware described;
    options *o = &t.o;
    int status = 0;
    cf_streams_open();
    t.report.lap_ms = cf_now_ms();
    cf_die_meet_by(meet_early);
    options_parse(o, argc, argv);
    if (o->help) {
        if (cf_die_rank() == 0) options_help(stdout);
        return 0;
    }
    if (*o->predict) predict_options(o, &described);
    recipe_choose_program(o, cf_dtype_name(REAL_DTYPE), OTHER_PROGRAM, argv);
    recipe_check(o);
    cf_die_meet_by(NULL); // cf_transport_create() makes them meet
    t.transport = cf_transport_create(o->transport, &argc, &argv, o->timeout);
    origin_compare_options(o, VERSION, t.transport);
    signal(SIGXFSZ, SIG_IGN); // makes a limit on file sizes a write error, which is reported and cleaned up
    signal(SIGPIPE, SIG_IGN); // Ctrl-C ends `| tee` first: this run must still save, although nobody reads its output
    t.words = origin_vocabulary(o);
    if (*o->predict) {
        options asked = *o; // record_rank() overwrites t.o
        origin_shape(&asked, t.words, t.transport, &t.start);
        ((cf_record *)t.transport->state)->hardware = &described;
        predict(&asked, &described, record_rank, &t, stdout);
        close_trainer(&t);
        return 0;
    }
    make_mesh(&t);
    make_context(&t);
    make_model(&t);
    if (*o->export_to)
        export_model(&t);
    else if (!o->dry_run)
        status = train_model(&t);
    else
        plan_start(&t.report.plan, NULL, o->steps);
    if (o->dry_run && root(&t)) {
        report_banner(&t.report);
        dry_run(&t.model, &t.optimizer, stdout);
        plan_explain(&t.report.plan, stdout);
    }
    close_model(&t);
    close_trainer(&t);
    return status;
}
