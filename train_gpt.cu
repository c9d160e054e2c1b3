// Train a GPT: options → mesh → model → training loop.
//
//     ./train_gpt --train data.bin                              one process, all cores
//     mpirun -np 4 ./train_gpt --tp 2 --dp 2 --train data.bin   two replicas of two ranks each
//
// This file is the common subset of C and C++: `cc -x c` builds it for CPUs, nvcc for GPUs, where there is one
// program for each element type (--dtype finds the right one). It knows no kernel and no transport; who talks to
// whom, and when, is decided in commfuse/, what is computed in layers/, what touches the disk in data/, and what
// else a run is made of (start, saving, resuming, reporting) in run/.
//
// Order of things in a step: micro-batches forward and backward (the last one sends gradients behind its
// backward), optimizer (norm, non-finite check, clip, update, weights on their way), what ranks tell each other, log.
// Every rank takes the same path, so operations are begun in the same order everywhere; only rank 0 prints.
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "commfuse/die.h"
#include "commfuse/stop.h"
#include "data/progress.h"
#include "layers/peak.h"
#include "run/evaluate.h"
#include "run/keep.h"
#include "run/report.h"
#include "run/timeline.h"

#ifndef VERSION
#define VERSION "unknown"
#endif

enum { STATUS_STOPPED = 75 }; // a signal has ended the run, which is saved: the same command goes on

// Element types are fixed when layers are compiled. The GPU program for the other one lies beside this one.
static void choose_program(options *o, char **argv) {
    if (strcmp(o->dtype, "auto") == 0) o->dtype = cf_dtype_name(REAL_DTYPE);
    if (strcmp(o->dtype, cf_dtype_name(REAL_DTYPE)) == 0) return;
#ifdef OTHER_PROGRAM
    char path[PATH_LENGTH];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - sizeof OTHER_PROGRAM);
    path[length > 0 ? length : 0] = 0;
    char *name = strrchr(path, '/');
    strcpy(name ? name + 1 : path, OTHER_PROGRAM);
    execv(path, argv);
    cf_die_together("build it with: make cuda", "--dtype %s needs the program %s: %s", o->dtype, path,
                    strerror(errno));
#else
    (void)argv;
    cf_die_together("use --dtype fp32", "--dtype %s needs a GPU; this is the CPU program", o->dtype);
#endif
}

// --- one step ---

static double learning_rate(const options *o, int64_t step) {
    if (step < o->warmup) return o->lr * (double)(step + 1) / (double)o->warmup;
    double span = (double)(o->steps - o->warmup), done = (double)(step - o->warmup) / (span > 1 ? span : 1);
    if (strcmp(o->schedule, "constant") == 0) return o->lr;
    if (strcmp(o->schedule, "linear") == 0) return o->lr + (o->min_lr - o->lr) * done;
    if (strcmp(o->schedule, "cosine") == 0)
        return o->min_lr + (o->lr - o->min_lr) * 0.5 * (1 + cos(M_PI * done));
    double hold = 0.8 * (double)o->steps; // wsd: hold, then fall by 1 − sqrt over the last fifth
    if ((double)step < hold) return o->lr;
    return o->min_lr + (o->lr - o->min_lr) * (1 - sqrt(((double)step - hold) / ((double)o->steps - hold)));
}

static step_result train_step(trainer *t, int64_t step, double lr) {
    const options *o = &t->o;
    double batch_tokens = (double)(o->batch * o->seq);
    optimizer_zero_grad(&t->optimizer);
    cf_zero(t->loss, (int64_t)sizeof *t->loss, t->context.stream);
    for (int micro = 0; micro < t->accumulation; micro++) {
        trainer_load(t, t->train, true, step * o->batch, micro);
        gpt_forward(&t->model, t->inputs, t->targets, o->seq, o->micro_batch, t->loss);
        gpt_backward(&t->model, 1 / batch_tokens, micro == t->accumulation - 1);
    }
    adamw a;
    memset(&a, 0, sizeof a);
    a.lr = lr, a.beta1 = o->beta1, a.beta2 = o->beta2, a.eps = o->eps, a.weight_decay = o->weight_decay;
    a.step = step + 1;
    step_result result =
        optimizer_step(&t->optimizer, a, o->clip, t->loss, o->batch * o->seq, t->skipped < o->skip_nonfinite);
    cf_stream_sync(t->context.stream); // the step's time ends when its work does
    return result;
}

// --- the run ---

static void measure_peak(trainer *t) {
    if (t->o.peak_tflops > 0) {
        t->peak = t->o.peak_tflops * 1e12 * t->ranks;
        t->peak_source = "--peak-tflops";
        return;
    }
    trainer_meet(t);
    double mine = peak_flops(&t->peak_source, t->context.stream);
    t->peak = optimizer_sum(&t->optimizer, mine); // ranks on slower hosts count with their own speed
}

static bool due(int64_t every, int64_t step) {
    return every > 0 && step % every == 0;
}

static void watch(trainer *t, int64_t step, bool last) {
    const options *o = &t->o;
    double begin = cf_now_ms();
    if (t->val && o->val_every > 0 && (due(o->val_every, step) || last)) evaluate_loss(t, step);
    if (o->sample_every > 0 && step > 0 && (due(o->sample_every, step) || last)) evaluate_sample(t, step);
    t->watch_ms += cf_now_ms() - begin;
}

// What comes between steps: before step `step`, unless a checkpoint has been made behind it already.
static void between_steps(trainer *t, int64_t step) {
    bool resumed = step == t->first && step > 0;
    if (!resumed || !t->watched) watch(t, step, false);
    if (t->checkpoints && step > 0 && !resumed && due(t->o.save_every, step)) keep_save(t, step, true);
    if (*t->o.trace && step == t->trace_from) timeline_start(t);
}

static void end_of_trace(trainer *t, int64_t step) {
    double begin = cf_now_ms();
    bool last = step + 1 == t->o.steps && step >= t->trace_from && step < t->trace_to;
    if (*t->o.trace && (step + 1 == t->trace_to || last)) timeline_write(t);
    t->watch_ms += cf_now_ms() - begin;
}

static void account(trainer *t, int64_t step, double step_ms) {
    accounts_add(&t->time, TIME_WATCH, t->watch_ms);
    accounts_add(&t->time, TIME_SAVE, t->save_ms);
    t->watch_ms = t->save_ms = 0;
    if (step >= 0) accounts_step(&t->time, step, step_ms);
    if (trainer_root(t)) accounts_store(&t->time, step < 0);
}

// Takes the steps that are left. Returns the one that the run has come to, before --steps if a signal has asked for
// the end.
static int64_t train(trainer *t, int *stop) {
    const options *o = &t->o;
    double spent = 0;
    if (t->first < o->steps) accounts_add(&t->time, TIME_START, cf_now_ms() - t->begun_ms);
    for (int64_t step = t->first; step < o->steps; step++) {
        t->context.step = (int)step;
        between_steps(t, step);
        trainer_meet(t); // what came before the step is not the step's time
        double lr = learning_rate(o, step), begin = cf_now_ms();
        cf_trace_step(t->context.trace, (int)step);
        step_result r = train_step(t, step, lr);
        t->skipped = r.skipped ? t->skipped + 1 : 0;
        step_times times = tell_step(t, step, begin);
        spent += times.ms;
        report_step(t, step, &r, lr, &times,
                    spent / (double)(step + 1 - t->first) * (double)(o->steps - step - 1) * 1e-3);
        end_of_trace(t, step);
        account(t, step, times.ms);
        *stop = times.stop;
        if (*stop && step + 1 < o->steps) return step + 1;
    }
    return o->steps;
}

// The whole run is done: what it has come to, and its model.
static bool finish(trainer *t) {
    int64_t steps = t->o.steps;
    char path[PATH_LENGTH];
    bool done_before = t->first == steps && t->watched;
    if (!done_before) watch(t, steps, true);
    if (!t->checkpoints) return true;
    if (t->first < steps) keep_save(t, steps, true);
    if (snprintf(path, sizeof path, "%s/model.bin", t->o.out) >= (int)sizeof path)
        cf_die_together("choose a shorter --out DIR", "--out is too long");
    keep_model(t, steps, path);
    return keep_wait(t);
}

static bool stop_early(trainer *t, int64_t step, int stop) {
    if (!t->checkpoints)
        cf_die_together("with --out DIR a signal saves the run, and the same command goes on",
                        "%s ends the run after %lld of %lld steps; nothing was saved", strsignal(stop),
                        (long long)step, (long long)t->o.steps);
    return keep_save(t, step, false) && keep_wait(t);
}

static int run(trainer *t) {
    double begin = cf_now_ms();
    int stop = 0;
    int64_t step = train(t, &stop);
    bool stopped = step < t->o.steps, saved = stopped ? stop_early(t, step, stop) : finish(t);
    optimizer_settle(&t->optimizer);
    account(t, -1, 0);
    report_end(t, step, begin, stopped ? stop : 0);
    if (trainer_root(t)) {
        progress_break();
        if (stopped && saved)
            printf(
                "stopped   by a signal (%s) after %lld of %lld steps; the same command goes on from there\n",
                strsignal(stop), (long long)step, (long long)t->o.steps);
        if (*t->o.out) accounts_print(&t->time, stdout);
        fflush(stdout);
    }
    if (!saved)
        cf_die_together(
            "see the warnings above; the same command goes on from the last checkpoint that is there",
            "the state after step %lld was not saved", (long long)step);
    return stopped ? STATUS_STOPPED : 0;
}

static int train_model(trainer *t) {
    keep_open(t);
    keep_begin(t);
    if (trainer_root(t)) t->log = t->first > 0 ? log_continue(t->o.log, t->first) : log_open(t->o.log);
    if (trainer_root(t)) accounts_open(&t->time, t->o.out);
    if (*t->o.out) {
        saver_plan plan = {t->o.out, t->store, t->o.keep, t->o.keep_every, t->log};
        t->checkpoints = saver_create(&t->optimizer, plan);
    }
    measure_peak(t);
    report_config(t);
    if (trainer_root(t)) report_banner(t);
    cf_stop_listen(); // from here on; before, every rank finds the same errors and rank 0 tells them
    return run(t);
}

int main(int argc, char **argv) {
    static trainer t;
    t.begun_ms = cf_now_ms();
    t.version = VERSION;
    options_parse(&t.o, argc, argv);
    if (t.o.help) {
        if (cf_die_rank() == 0) options_help(stdout);
        return 0;
    }
    choose_program(&t.o, argv);
    trainer_open(&t, &argc, &argv);
    int status = 0;
    if (t.o.dry_run)
        report_plan(&t);
    else if (*t.o.export_to)
        keep_export(&t);
    else
        status = train_model(&t);
    trainer_close(&t);
    return status;
}
