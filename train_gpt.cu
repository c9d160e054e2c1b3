// Train a GPT: options → mesh → model → training loop.
//
//     ./train_gpt --train data.bin                              one process, all cores
//     mpirun -np 4 ./train_gpt --tp 2 --dp 2 --train data.bin   two replicas of two ranks each
//
// The common subset of C and C++: `cc -x c` builds it for CPUs, nvcc for GPUs, a program for each element type. It knows no
// kernel and no transport: commfuse/ moves data between ranks, layers/ computes, data/ reads, writes and prints. All ranks take the
// same path through this file, so they begin operations in the same order.
#include <signal.h>
#include <string.h>
#include "commfuse/base/die.h"
#include "commfuse/base/streams.h"
#include "layers/peak.h"
#ifdef __cplusplus
extern "C" { // these headers are for C
#endif
#include "commfuse/launch/stop.h"
#include "data/run/origin.h"
#include "data/run/predict.h"
#include "data/run/recipe.h"
#include "data/run/report.h"
#include "layers/step.h"
#ifdef __cplusplus
}
#endif

enum { PATIENCE = 10 };           // times --timeout: how long ranks wait for one that reads or writes files
enum { PREDICT_STEPS = 3 };       // the last one begins as every later step would
enum { SAMPLE_STREAM = 1 << 20 }; // the first random stream of samples; those of the tensors have lower numbers

typedef struct trainer {
    options o;
    cf_transport *transport;
    cf_context context;
    cf_mesh mesh;
    overlap how;
    gpt model;
    gpt_step step;
    hellaswag *questions;
    vocabulary *words;
    model_file *start;
    int32_t *text; // a sample: the prompt, then the generated tokens
    int64_t prompt_tokens;
    rank_state copy;    // of this rank's state, while it is being saved
    char run[RUN_NAME]; // only rank 0's is used
    run_report report;
    cf_hardware described; // for --predict
} trainer;

// --- options → mesh → model ---

static void make_mesh(trainer *t) {
    recipe_mesh(&t->o, t->transport, &t->mesh);
    recipe_context(&t->o, t->transport, &t->mesh, &t->context);
    overlap_parse(&t->how, t->o.overlap, t->o.gradients, t->o.prefetch, t->o.embedding);
}

static void make_model(trainer *t) {
    options *o = &t->o;
    run_report *r = &t->report;
    const gpt_shape shape = origin_shape(o, t->words, t->transport, &t->start); // may lower --seq
    const parallel_strategy strategy = strcmp(o->strategy, "up") == 0 ? STRATEGY_UP : STRATEGY_TPSP;
    gpt_setup setup = {shape, strategy, o->seq, o->micro_batch, t->how, false, false};
    if (o->dry_run) cf_device_plan_only(true);
    if (strcmp(o->recompute, "auto") == 0) o->recompute = gpt_may_keep(&t->context, &t->mesh, &setup) ? "0" : "1";
    setup.recompute = *o->recompute == '1';
    gpt_create(&t->model, &t->context, &t->mesh, &setup);
    gpt_step_create(&t->step, &t->model);
    const bool choose = !t->how.schedule.algorithm && t->mesh.world_group.size > 1 && !*o->export_to;
    plan_create(&r->plan, choose ? gpt_create_tuner(&t->model) : NULL, o, t->transport, VERSION);
    r->o = o, r->version = VERSION, r->run = t->run;
    r->context = &t->context, r->mesh = &t->mesh, r->transport = t->transport, r->words = t->words;
    r->last.step = -1, r->accumulation = (int)(o->batch / (o->micro_batch * o->dp));
    r->parameters = params_count(&shape), r->V = shape.V, r->flops = params_flops(&shape, o->seq);
    if (*o->export_to) return;
    r->train = origin_tokens(o, "train", o->train, shape.V, t->transport->rank == 0);
    r->val = origin_tokens(o, "val", o->val, shape.V, t->transport->rank == 0);
}

// Reading and writing files takes longer on some ranks than on others.
static void allow_long_waits(trainer *t, bool patient) {
    *t->transport->timeout_s = (patient ? PATIENCE : 1) * t->o.timeout;
}

static void restore_state(trainer *t, const manifest *m) {
    saved_state *from = origin_open_state(&t->o, m);
    state_restore(&t->model.zero, origin_read_state, from);
    saved_state_close(from);
}

// From the newest sound checkpoint, else from --init-from, else random weights.
static void load_state(trainer *t) {
    const run_facts facts = {&t->model.params.shape, t->report.train, VERSION, t->run, NULL, 0, false};
    manifest *m = origin_checkpoint(&t->o, &facts, t->transport, t->start);
    origin_name(m, t->run);
    plan_start(&t->report.plan, m ? manifest_value(m, "found-plan") : NULL, t->o.steps - (m ? m->step : 0));
    if (m) {
        restore_state(t, m);
        t->report.last.skipped = origin_number(m, "skipped", 0);
        report_resume(&t->report, m);
        manifest_free(m);
        return;
    }
    if (t->start)
        params_read(&t->model.params, model_file_read, t->start, t->context.stream);
    else
        params_init(&t->model.params, (uint64_t)t->o.seed, t->context.stream);
    zero_start(&t->model.zero);
}

// --- one step: gpt_train_step() of layers/step.c, on this replica's sequences ---

static void load_sequences(void *trainer_, int64_t micro, int32_t *inputs, int32_t *targets) {
    const trainer *t = (const trainer *)trainer_;
    const int64_t B = t->o.micro_batch, first = t->context.step * t->o.batch + (micro * t->mesh.dp + t->mesh.dp_group.rank) * B;
    tokens *data = t->report.train;
    for (int64_t b = 0; data && b < B; b++) // a prediction has no tokens
        tokens_load(data, tokens_shuffled(data, (uint64_t)t->o.seed, first + b), b, B, inputs, targets, NULL, NULL);
}

static void train_step(trainer *t) {
    const options *o = &t->o;
    run_report *report = &t->report;
    const int64_t step = t->context.step;
    const step_batch batch = {o->seq, o->micro_batch, report->accumulation, load_sequences, t, report_figures, report};
    const adamw a = {recipe_learning_rate(o, step), o->beta1, o->beta2, o->eps, o->weight_decay, 1, step + 1};
    const bool trial = cf_tuner_trying(report->plan.tuner);
    const step_result *r = gpt_train_step(&t->step, &batch, a, o->clip);
    report_step(report, r->values, REPORT); // the step before
    const int64_t skipped = r->skipped ? report->last.skipped + 1 : 0;
    if (skipped > o->skip_nonfinite) gpt_step_die(&t->step);
    const step_report last = {step, r->loss, r->grad_norm, a.lr, 0, skipped, r->nonfinite_rank, r->nonfinite, trial};
    report->last = last;
}

// --- before, between and after steps ---

// The same sequences for every batch and mesh.
static void validate(trainer *t, int64_t step) {
    const options *o = &t->o;
    const int64_t all = recipe_val_sequences(o, t->report.val->samples);
    double *losses = gpt_evaluate(&t->model, tokens_load, t->report.val, all, o->seq, o->micro_batch);
    report_validation(&t->report, step, losses, all);
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
    zero_finish_weights(&t->model.zero);
    allow_long_waits(t, true);
    model_writer *writer = t->transport->rank == 0 ? model_writer_open(path, shape, REAL_DTYPE == CF_BF16) : NULL;
    if (t->mesh.dp_group.rank == 0) gpt_collect(&t->model, model_writer_append, writer);
    if (writer) model_writer_commit(writer);
    report_meet(&t->report);
    allow_long_waits(t, false);
    report_line(&t->report, "step %5ld  saved %s\n", step, path);
    report_spent(&t->report, TIME_SAVE);
}

// Training pauses while the state is copied, and before that until the last checkpoint is written. wait: until this one is written.
static bool save(trainer *t, int64_t step, bool watched, bool wait) {
    char *plan = plan_text(&t->report.plan);
    const run_facts facts = {&t->model.params.shape, t->report.train, VERSION, t->run, plan, t->report.last.skipped, watched};
    allow_long_waits(t, true);
    bool saved = saver_begin(t->report.checkpoints, step, origin_describe(&t->o, &facts));
    free(plan);
    if (saved) {
        zero_finish_update(&t->model.zero);
        state_copy(&t->copy, &t->model.zero);
        saver_write(t->report.checkpoints, &t->copy);
        if (wait) saved = saver_finish(t->report.checkpoints);
    }
    allow_long_waits(t, false);
    report_spent(&t->report, TIME_SAVE);
    return saved;
}

// What a run does before step `step`, or after the last one. One that resumes here does not repeat what was done before its
// checkpoint.
static void evaluate_if_due(trainer *t, int64_t step) {
    const options *o = &t->o;
    const bool last = step == o->steps;
    if (step == t->report.first && step > 0 && t->report.watched) return;
    if (t->report.val && o->val_every > 0 && (recipe_due(o->val_every, step) || last)) validate(t, step);
    if (recipe_hellaswag_due(o, step, last)) evaluate_hellaswag(t, step);
    if (recipe_sample_due(o, step, last)) sample(t, step);
}

static int end(trainer *t, int64_t step, bool stopped, bool saved) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/" ORIGIN_MODEL, t->o.out);
    if (t->report.checkpoints && !stopped) write_model(t, step, path);
    zero_finish_weights(&t->model.zero);
    return report_end(&t->report, step, stopped, saved);
}

// Evaluates and saves if due, takes a step, reports it: until the last step, or until a signal ends the run.
static int run(trainer *t) {
    const options *o = &t->o;
    run_report *r = &t->report;
    report_begin(r);
    for (int64_t step = r->first;; step++) {
        const bool stopped = r->stop && step < o->steps, ends = stopped || step == o->steps;
        bool saved = true;
        t->context.step = (int)step;
        if (stopped && !r->checkpoints)
            cf_die_together("with --out DIR a signal saves the run, and the same command resumes it",
                            "%s ends the run after %ld of %ld steps; nothing was saved", strsignal(r->stop), step, o->steps);
        if (!stopped) evaluate_if_due(t, step);
        if (r->checkpoints && step > r->first && (ends || recipe_due(o->save_every, step))) saved = save(t, step, !stopped, ends);
        if (ends) return end(t, step, stopped, saved);
        report_begin_step(r);
        train_step(t);
        const bool pause = r->stop || recipe_pause_due(o, step);
        if (pause) zero_finish_update(&t->model.zero);
        if (pause || report_trace_due(r, step + 1)) report_end_step(r); // else the next step ends this one
    }
}

static int export_model(trainer *t) {
    allow_long_waits(t, true);
    manifest *m = origin_checkpoint(&t->o, NULL, t->transport, NULL);
    restore_state(t, m);
    write_model(t, m->step, t->o.export_to);
    manifest_free(m);
    return 0;
}

static int train_model(trainer *t) {
    const options *o = &t->o;
    run_report *r = &t->report;
    allow_long_waits(t, true);
    if (t->transport->rank == 0) origin_open_output(o);
    if (*o->hellaswag) t->questions = hellaswag_open(o->hellaswag, o->seq, r->V);
    t->text = prompt_encode(o, t->words, r->V, &t->prompt_tokens);
    origin_compare_data(o, t->transport, r->train, r->val, r->V, t->start, t->questions, t->text, t->prompt_tokens);
    load_state(t);
    report_meet(r); // with the long time limit, because some ranks read faster
    allow_long_waits(t, false);
    report_open(r);
    if (*o->out) r->checkpoints = saver_create(t->transport, o, r->log);
    const double cores = (double)t->transport->local_cores / t->transport->local_size;
    r->peak = o->peak_tflops * 1e12 * t->mesh.world_group.size, r->peak_source = "--peak-tflops";
    if (o->peak_tflops <= 0) r->peak = peak_flops(&r->peak_source, cores, t->transport, t->context.stream);
    report_config(r);
    report_banner(r);
    cf_stop_listen(); // not earlier: until here every rank finds the same errors, and rank 0 reports them
    return run(t);
}

static int print_dry_run(trainer *t) {
    plan_start(&t->report.plan, NULL, t->o.steps);
    report_banner(&t->report);
    if (t->transport->rank == 0) dry_run(&t->step, stdout), plan_explain(&t->report.plan, stdout);
    return 0;
}

static void close_model(trainer *t) {
    plan_free(&t->report.plan);
    gpt_step_free(&t->step);
    gpt_free(&t->model);
    cf_context_stop(&t->context);
    cf_mesh_free(&t->mesh);
}

static void close_trainer(trainer *t) {
    report_close(&t->report);
    state_free(&t->copy);
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
    make_model(t);
    to->left_out = !plan_start_whole(&t->report.plan, to->plan);
    for (int64_t step = 0; step < PREDICT_STEPS && !to->left_out; step++) {
        cf_record_add(record, CF_DO_STEP);
        t->context.step = (int)step;
        train_step(t);
        t->report.last.step = -1;
    }
    cf_record_add(record, CF_DO_STEP);
    to->record = cf_record_finish(record), to->memory = cf_memory_bytes(), to->flops = t->report.flops;
    close_model(t);
}

static int print_prediction(trainer *t) {
    options asked = t->o; // record_rank() overwrites t->o
    origin_shape(&asked, t->words, t->transport, &t->start);
    ((cf_record *)t->transport->state)->hardware = &t->described;
    predict(&asked, &t->described, record_rank, t, stdout);
    close_trainer(t);
    return 0;
}

int main(int argc, char **argv) {
    static trainer t;
    options *o = &t.o;
    cf_streams_open();
    t.report.lap_ms = cf_now_ms();
    cf_die_meet_by(cf_transport_meet);
    options_parse(o, argc, argv);
    if (o->help) return options_help(stdout);
    if (*o->predict) predict_options(o, &t.described);
    recipe_choose_program(o, cf_dtype_name(REAL_DTYPE), OTHER_PROGRAM, argv);
    recipe_check(o);
    cf_die_meet_by(NULL); // cf_transport_create() makes them meet
    t.transport = cf_transport_create(o->transport, &argc, &argv, o->timeout);
    origin_compare_options(o, VERSION, t.transport);
    signal(SIGXFSZ, SIG_IGN); // makes a limit on file sizes a write error, which is reported and cleaned up
    signal(SIGPIPE, SIG_IGN); // Ctrl-C ends `| tee` first: this run must still save, although nobody reads its output
    t.words = origin_vocabulary(o);
    if (*o->predict) return print_prediction(&t);
    make_mesh(&t);
    make_model(&t);
    const int status = *o->export_to ? export_model(&t) : o->dry_run ? print_dry_run(&t) : train_model(&t);
    close_model(&t);
    close_trainer(&t);
    return status;
}
