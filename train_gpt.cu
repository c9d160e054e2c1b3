// Train a GPT: options → mesh → model → training loop.
//
//     ./train_gpt --train data.bin                              one process, all cores
//     mpirun -np 4 ./train_gpt --tp 2 --dp 2 --train data.bin   two replicas of two ranks each
//
// The common subset of C and C++: `cc -x c` builds it for CPUs, nvcc for GPUs, a program for each element type. commfuse/ moves
// data between ranks, layers/ computes, data/ reads, writes and prints. All ranks take the same path and begin the same operations.
#include <signal.h>
#include "layers/kernels/peak.h"
#ifdef __cplusplus
extern "C" { // these headers are for C
#endif
#include "commfuse/base/limits.h"
#include "commfuse/base/streams.h"
#include "commfuse/launch/stop.h"
#include "data/json.h"
#include "data/run/predict.h"
#include "data/run/derived.h"
#include "data/run/report.h"
#include "layers/evaluate.h"
#include "layers/generate.h"
#include "layers/operations.h"
#include "layers/state.h"
#ifdef __cplusplus
}
#endif

enum { PREDICT_STEPS = 3 };       // the last one begins as every later step would
enum { SAMPLE_STREAM = 1 << 20 }; // the first random stream of samples; those of the tensors have lower numbers

typedef struct trainer {
    options opt;
    cf_transport *transport;
    cf_context context;
    cf_mesh mesh;
    overlap how;
    gpt model;
    gpt_step step;
    vocabulary *words;
    int32_t *prompt; // that samples continue
    int64_t prompt_length;
    model_file *start;
    manifest *from;     // the checkpoint from which the run resumes, or which it exports; NULL: none
    bool damage;        // on rank 0: newer ones are damaged
    bool keeps;         // the run keeps the checkpoint's choices (startup_keep)
    rank_state copy;    // of this rank's state, while it is being saved
    char run[RUN_NAME]; // only rank 0's is used
    run_report report;
    cf_hardware described; // for --predict
} trainer;

// --- options → mesh → model ---

// Reading and writing files takes longer on some ranks than on others.
static void allow_long_waits(trainer *t, bool patient) {
    *t->transport->timeout_s = (patient ? PATIENCE : 1) * t->opt.timeout;
}

// What the checkpoint says of a choice that the run keeps; NULL: nothing.
static const char *kept(const trainer *t, const char *name) {
    return t->keeps ? json_text(t->from->options, name) : NULL;
}

static void make_mesh(trainer *t) {
    options *opt = &t->opt;
    const int ranks = t->transport->size;
    allow_long_waits(t, true); // until the first step
    if (!opt->dry_run && !*opt->export_to && t->transport->rank == 0)
        startup_open_output(opt); // nobody else saves there from here on
    t->from = startup_checkpoint(opt, t->transport, &t->damage);
    t->keeps = startup_keep(opt, t->from, opt->dry_run && ranks == 1 && t->from ? (int)t->from->ranks : ranks);
    derived_mesh(opt, t->transport, &t->mesh);
    derived_context(opt, t->transport, &t->mesh, &t->context, kept(t, "costs"));
    overlap_parse(&t->how, t->opt.overlap, t->opt.gradients, t->opt.prefetch, t->opt.embedding);
    t->how.round_gradients = strcmp(t->opt.reduce_dtype, "bf16") == 0;
}

static void make_model(trainer *t) {
    options *opt = &t->opt;
    run_report *r = &t->report;
    const optimizer_row *o = optimizer_find(opt->optimizer);
    const gpt_shape shape = startup_shape(opt, t->words, t->from, t->transport, &t->start); // may lower --seq
    const parallel_strategy strategy = strcmp(opt->strategy, "up") == 0 ? STRATEGY_UP : STRATEGY_TPSP;
    gpt_setup setup = {shape, strategy, o, opt->seq, opt->micro_batch, t->how, false, false, opt->z_loss};
    if (opt->dry_run) cf_device_reserve_only(true);
    if (strcmp(opt->recompute, "auto") == 0)
        opt->recompute = opt->reproducible || gpt_may_keep(&t->context, &t->mesh, &setup) ? "0" : "1";
    setup.recompute = *opt->recompute == '1';
    gpt_create(&t->model, &t->context, &t->mesh, &setup);
    gpt_step_create(&t->step, &t->model);
    const bool choose = !t->how.schedule.algorithm && t->mesh.world_group.size > 1 && !*opt->export_to;
    plan_create(&r->plan, choose ? gpt_create_tuner(&t->model) : NULL, opt, t->transport, VERSION, kept(t, "operations"));
    r->opt = opt, r->version = VERSION, r->run = t->run;
    r->context = &t->context, r->mesh = &t->mesh, r->transport = t->transport, r->words = t->words;
    r->peak_emulated = peak_emulated();
    r->last.step = -1, r->accumulation = (int)(opt->batch / (opt->micro_batch * opt->dp));
    if (t->model.zero.homes) r->muon_ms = &t->model.zero.homes->ms;
    r->parameters = params_count(&shape), r->flops = params_flops(&shape, opt->seq);
    if (*opt->export_to) return;
    r->train = startup_tokens(opt, "train", opt->train, shape.V);
    r->val = startup_tokens(opt, "val", opt->val, shape.V);
    if (!*opt->predict) t->prompt = startup_prompt(opt, t->words, &t->prompt_length);
}

static void restore_state(trainer *t) {
    int kinds;
    saved_state *from = startup_open_state(&t->opt, t->from, &kinds);
    state_restore(&t->model.zero, kinds, startup_read_state, from);
    saved_state_close(from);
}

// From the newest valid checkpoint, else from --init-from, else random weights.
static void load_state(trainer *t, const run_facts *facts) {
    const manifest *m = t->from;
    startup_resume(&t->opt, facts, m, t->damage);
    startup_name(m, t->run);
    plan_start(&t->report.plan, m != NULL, t->opt.steps - (m ? m->step : 0));
    if (m) {
        restore_state(t);
        report_resume(&t->report, m);
        return;
    }
    if (t->start)
        params_read(&t->model.params, model_file_read, t->start, t->context.stream);
    else
        params_init(&t->model.params, (uint64_t)t->opt.seed, t->context.stream);
    zero_start(&t->model.zero);
}

// --- one step: gpt_train_step() of layers/step.c, on this replica's sequences ---

static void load_sequences(void *trainer_, int64_t micro, int32_t *inputs, int32_t *targets) {
    const trainer *t = (const trainer *)trainer_;
    const int64_t B = t->opt.micro_batch, step = derived_data_step(t->opt.skip_steps, t->context.step),
                  first = step * t->opt.batch + (micro * t->mesh.dp + t->mesh.dp_group.rank) * B;
    tokens *data = t->report.train;
    for (int64_t b = 0; data && b < B; b++) // a prediction has no tokens
        tokens_load(data, tokens_shuffled(data, (uint64_t)t->opt.seed, first + b), b, B, inputs, targets);
}

// A resumed run has the same bits, so the same command ends at the same step.
static void die_nonfinite(trainer *t) {
    const char *skipped = t->opt.skip_steps;
    const int64_t data = derived_data_step(skipped, t->context.step);
    const char *rest = skipped; // ranges of later data
    int64_t from, to;
    char hint[PATH_MAX];
    for (int n = 0; sscanf(rest, "%ld:%ld%n", &from, &to, &n) == 2 && from < data; rest += n + (rest[n] == ',')) {}
    snprintf(
        hint, sizeof hint,
        "--skip-steps %.*s%s%ld:%ld%s%s leaves out the data of this step (a resume without it ends here again); or lower --lr, or "
        "raise --warmup (a resume then needs --force); nothing was written by this step",
        (int)(rest - skipped), skipped, *skipped && !*rest ? "," : "", data, data + 1, *rest ? "," : "", rest);
    gpt_step_die(&t->step, hint);
}

static void train_step(trainer *t) {
    const options *opt = &t->opt;
    run_report *report = &t->report;
    const int64_t step = t->context.step;
    const step_batch batch = {opt->seq, opt->micro_batch, report->accumulation, load_sequences, t, report_figures, report};
    const double lr = derived_learning_rate(opt, step);
    optimizer_settings settings;
    settings.lr = lr, settings.scale = 1, settings.step = step + 1;
    settings.beta1 = opt->beta1, settings.beta2 = opt->beta2, settings.eps = opt->eps;
    settings.weight_decay = opt->weight_decay, settings.momentum = opt->momentum;
    const bool trial = cf_tuner_trying(report->plan.tuner);
    const step_result *r = gpt_train_step(&t->step, &batch, settings, opt->clip);
    report_step(report, r->values, REPORT); // prints the step before, whose timings came with this step's norm
    if (!r->finite) die_nonfinite(t);
    const step_report last = {step, r->loss, r->grad_norm, lr, 0, trial};
    report->last = last;
}

// --- before, between and after steps ---

// The same sequences for every batch and mesh.
static void validate(trainer *t, int64_t step) {
    const options *opt = &t->opt;
    const int64_t all = derived_val_sequences(opt, t->report.val->samples);
    const double loss = gpt_evaluate(&t->model, tokens_load, t->report.val, all, opt->micro_batch);
    report_validation(&t->report, step, loss, all);
}

// Every replica generates the same text, because the others would only wait for the first.
static void sample(trainer *t, int64_t step) {
    const options *opt = &t->opt;
    const sampling how = {opt->temperature, opt->top_k, (uint64_t)opt->seed, SAMPLE_STREAM + (uint64_t)step};
    const int64_t prompt = t->prompt_length, unseen = *opt->prompt || *opt->prompt_tokens ? 0 : prompt;
    int32_t *text = (int32_t *)cf_host_alloc(prompt + opt->sample_tokens, sizeof *text, "a sample");
    memcpy(text, t->prompt, (size_t)prompt * sizeof *text);
    gpt_generate(&t->model, how, text, prompt, opt->sample_tokens);
    report_sample(&t->report, step, text + unseen, prompt + opt->sample_tokens - unseen);
    free(text);
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
}

// Training pauses while the state is copied, and before that until the last checkpoint is written. wait: until this one is written.
static bool save(trainer *t, int64_t step, bool wait) {
    allow_long_waits(t, true);
    gpt_finish_step(&t->step); // if it is not yet: a signal may come after run() has looked for one
    char *plan = plan_text(&t->report.plan);
    bool saved = saver_begin(t->report.checkpoints, step, plan);
    free(plan);
    if (saved) {
        state_copy(&t->copy, &t->model.zero);
        saver_write(t->report.checkpoints, &t->copy);
        if (wait) saved = saver_finish(t->report.checkpoints);
    }
    allow_long_waits(t, false);
    return saved;
}

// What a run does before step `step`, or after the last one. One that resumes here does it again.
static void evaluate_if_due(trainer *t, int64_t step) {
    const options *opt = &t->opt;
    const bool last = step == opt->steps;
    if (t->report.val && opt->val_every > 0 && (derived_due(opt->val_every, step) || last)) validate(t, step);
    if (opt->sample_every > 0 && (last || (step > 0 && derived_due(opt->sample_every, step)))) sample(t, step);
}

static int end(trainer *t, int64_t step, bool stopped, bool saved) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/" ORIGIN_MODEL, t->opt.out);
    if (t->report.checkpoints && !stopped) write_model(t, step, path);
    zero_finish_weights(&t->model.zero);
    return report_end(&t->report, step, stopped, saved);
}

// Evaluates and saves if due, takes a step, reports it: until the last step, or until a signal ends the run.
static int run(trainer *t) {
    const options *opt = &t->opt;
    run_report *r = &t->report;
    report_begin(r);
    for (int64_t step = r->first;; step++) {
        const bool stopped = r->stop && step < opt->steps, ends = stopped || step == opt->steps;
        bool saved = true;
        t->context.step = (int)step;
        if (stopped && !r->checkpoints)
            cf_die_together("with --out DIR a signal saves the run, and the same command resumes it",
                            "%s ends the run after %ld of %ld steps; nothing was saved", strsignal(r->stop), step, opt->steps);
        if (!stopped) evaluate_if_due(t, step);
        const bool due = ends || derived_due(opt->save_every, step);
        if (r->checkpoints && step > r->first && due) saved = save(t, step, ends), report_pause(r, SAVE);
        if (ends) return end(t, step, stopped, saved);
        report_begin_step(r);
        train_step(t);
        const bool pause = r->stop || derived_pause_due(opt, step);
        if (pause) gpt_finish_step(&t->step);
        if (pause || report_trace_due(r, step + 1)) report_end_step(r); // else the next step ends this one
    }
}

static int export_model(trainer *t) {
    restore_state(t);
    write_model(t, t->from->step, t->opt.export_to);
    return 0;
}

static int train_model(trainer *t) {
    const options *opt = &t->opt;
    run_report *r = &t->report;
    const run_facts facts = {&t->model.params.shape, r->train, VERSION, t->run, &t->transport->costs};
    startup_compare_data(opt, t->transport, r->train, r->val, t->prompt, t->prompt_length, t->start);
    load_state(t, &facts);
    report_meet(r); // with the long time limit, because some ranks read faster
    allow_long_waits(t, false);
    report_open(r);
    if (*opt->out) r->checkpoints = saver_create(t->transport, opt, r->log, startup_describe(opt, &facts));
    const double cores = (double)t->transport->local_cores / t->transport->local_size;
    r->peak = opt->peak_tflops * 1e12 * t->mesh.world_group.size, r->peak_source = "--peak-tflops";
    if (opt->peak_tflops <= 0) { // the source is that of the second
        r->peak_fp32 = peak_flops(true, &r->peak_source, cores, t->transport, t->context.stream);
        r->peak = peak_flops(false, &r->peak_source, cores, t->transport, t->context.stream);
    }
    report_config(r);
    report_banner(r);
    cf_stop_listen(); // not earlier: until here every rank finds the same errors, and rank 0 reports them
    return run(t);
}

static int print_dry_run(trainer *t) {
    plan_start(&t->report.plan, t->from != NULL, t->opt.steps - (t->from ? t->from->step : 0));
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
    manifest_free(t->from);
    model_file_close(t->start);
    vocabulary_close(t->words);
    free(t->prompt);
    allow_long_waits(t, true); // rank 0 may take longer, with a log or a timeline
    t->transport->close(t->transport);
}

// --- a prediction: this program is linked with a device, a transport and kernels that only record ---

static void record_rank(void *trainer_, const options *opt, int rank, int players, predicted_rank *to) {
    trainer *t = (trainer *)trainer_;
    cf_record *record = (cf_record *)t->transport->state;
    t->opt = *opt;
    t->transport->rank = record->rank = rank;
    record->world = (int)(opt->tp * opt->dp), record->players = players, record->words = opt->vocab;
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
    const int64_t entries = record->entries, units = record->units; // what muon has begun ends outside of the record
    gpt_finish_step(&t->step), zero_finish_weights(&t->model.zero);
    record->entries = entries, record->units = units;
    to->record = cf_record_finish(record), to->memory = cf_memory_bytes(), to->flops = t->report.flops;
    close_model(t);
}

static int print_prediction(trainer *t) {
    options asked = t->opt; // record_rank() overwrites t->opt
    startup_shape(&asked, t->words, NULL, t->transport, &t->start);
    ((cf_record *)t->transport->state)->hardware = &t->described;
    predict(&asked, &t->described, record_rank, t, stdout);
    close_trainer(t);
    return 0;
}

int main(int argc, char **argv) {
    static trainer t;
    options *opt = &t.opt;
    cf_limits_prepare();
    cf_streams_open();
    options_parse(opt, argc, argv);
    if (opt->help) return options_help(stdout);
    if (*opt->predict) predict_options(opt, &t.described);
    derived_choose_program(opt, cf_dtype_name(REAL_DTYPE), OTHER_PROGRAM, argv);
    derived_check(opt);
    t.transport = cf_transport_create(opt->transport, &argc, &argv, opt->timeout);
    startup_compare_options(opt, VERSION, t.transport);
    signal(SIGXFSZ, SIG_IGN); // makes a limit on file sizes a write error, which is reported and cleaned up
    signal(SIGPIPE, SIG_IGN); // Ctrl-C ends `| tee` first: this run must still save, although nobody reads its output
    t.words = startup_vocabulary(opt);
    if (*opt->predict) return print_prediction(&t);
    make_mesh(&t);
    make_model(&t);
    const int status = *opt->export_to ? export_model(&t) : opt->dry_run ? print_dry_run(&t) : train_model(&t);
    close_model(&t);
    close_trainer(&t);
    return status;
}
