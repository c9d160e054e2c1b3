// See report.h.
#include "report.h"
#include "../commfuse/die.h"
#include "../data/progress.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

// --- at the start ---

// A run that goes on keeps the first line of its log.
static void log_resume(trainer *t, const char *host) {
    log_begin(t->log, "resume");
    log_int(t->log, "step", t->first);
    log_text(t->log, "version", t->version);
    log_text(t->log, "host", host);
    log_int(t->log, "ranks", t->ranks);
    log_text(t->log, "strategy", t->o.strategy);
    log_int(t->log, "tp", t->o.tp);
    log_int(t->log, "dp", t->o.dp);
    log_end(t->log);
}

void report_config(trainer *t) {
    int rows = 0;
    const option_row *table = options_table(&rows);
    char host[64] = "unknown", text[PATH_LENGTH];
    gethostname(host, sizeof host - 1);
    if (t->first > 0 && !log_empty(t->log)) {
        log_resume(t, host);
        return;
    }
    log_begin(t->log, "config");
    log_text(t->log, "version", t->version);
    log_text(t->log, "host", host);
    log_int(t->log, "ranks", t->ranks);
    for (int i = 0; i < rows; i++) {
        options_value(&t->o, &table[i], text, sizeof text);
        const char *field = (const char *)&t->o + table[i].offset;
        if (table[i].type == OPTION_INT)
            log_int(t->log, table[i].name, *(const int64_t *)field);
        else if (table[i].type == OPTION_REAL)
            log_real(t->log, table[i].name, *(const double *)field);
        else
            log_text(t->log, table[i].name, text);
    }
    log_int(t->log, "parameters", params_count(&t->model.params.shape));
    log_real(t->log, "peak_tflops_all_ranks", t->peak * 1e-12);
    log_text(t->log, "peak_source", t->peak_source ? t->peak_source : "unknown");
    log_end(t->log);
}

void report_banner(const trainer *t) {
    const options *o = &t->o;
    const gpt_shape *s = &t->model.params.shape;
    overlap how = trainer_overlap(o);
    printf("commfuse %s: GPT of %lld layers, %lld channels, %lld heads, %lld tokens of vocabulary: %.2f M "
           "parameters\n",
           t->version, (long long)s->L, (long long)s->C, (long long)s->H, (long long)s->V,
           (double)params_count(s) * 1e-6);
    printf("device    %s, %s; %lld threads of the host a rank\n", cf_device_name(), o->dtype,
           (long long)o->threads);
    printf("mesh      %d ranks = tp %d x dp %d, %s over %s\n", t->ranks, t->mesh.tp, t->mesh.dp, o->strategy,
           t->transport->name);
    if (t->ranks > 1 && strcmp(cf_device_name(), "CPU") == 0 &&
        t->transport->local_size * (o->threads + 1) > t->transport->local_cores)
        printf(
            "cores     %d for %d ranks: the threads that move the bytes share them with those that compute\n",
            t->transport->local_cores, t->transport->local_size);
    printf("overlap   %s%s%s, %d slice%s\n", cf_mode_name(how.mode),
           how.mode == CF_MODE_COMMFUSE ? " by " : "",
           how.mode == CF_MODE_COMMFUSE ? cf_route_name(how.route) : "", how.slices,
           how.slices == 1 ? "" : "s");
    printf("batch     %lld sequences of %lld tokens = micro-batch %lld x dp %d x %d accumulation steps\n",
           (long long)o->batch, (long long)o->seq, (long long)o->micro_batch, t->mesh.dp, t->accumulation);
    if (t->train)
        printf("data      %lld tokens in %d files, %lld samples an epoch\n",
               (long long)tokens_count(t->train), tokens_files(t->train),
               (long long)tokens_samples(t->train));
    if (t->peak > 0)
        printf("peak      %.3f TFLOP/s over all ranks (%s)\n", t->peak * 1e-12, t->peak_source);
    else
        printf("peak      unknown, no MFU (%s)\n", t->peak_source);
    printf("memory    %.1f MiB per rank\n", (double)cf_memory_bytes() / 1048576);
    if (how.mode == CF_MODE_NOWIRE)
        printf("NOWIRE    transfers are left out: results are wrong by construction, this run only measures "
               "time\n");
    fflush(stdout);
}

static void print_operation(void *argument, const char *place, const cf_fuse *fuse) {
    (void)argument;
    const cf_fuse_plan *plan = cf_fuse_get_plan(fuse);
    if (strcmp(plan->group->name, "self") == 0) return; // this rank alone: nothing ever travels
    char *text = cf_schedule_print(cf_fuse_schedule(fuse));
    printf("\n%s (%s, over %s, %.2f MiB per shard)\n%s", plan->name, place, plan->group->name,
           (double)(plan->capacity * cf_dtype_size(plan->dtype)) / 1048576, text);
    free(text);
}

void report_plan(trainer *t) {
    if (!trainer_root(t)) return;
    report_banner(t);
    printf("\n");
    cf_memory_report(stdout);
    printf("\n");
    optimizer_explain(&t->optimizer, stdout);
    printf("\nSchedules of rank 0; steps marked ' are taken when the operation is finished\n");
    gpt_operations(&t->model, print_operation, NULL);
    optimizer_operations(&t->optimizer, print_operation, NULL);
}

// --- a step ---

static double flops_per_token(const trainer *t) {
    const gpt_shape *s = &t->model.params.shape;
    double P = (double)(params_count(s) - s->maxT * s->C);
    return 6 * P + 6 * (double)(s->L * s->C * t->o.seq);
}

static void report_skip(trainer *t, int64_t step, const step_result *r) {
    if (trainer_root(t)) {
        progress_break();
        printf("step %5lld  left out: loss %g, gradient norm %g: not finite: %s, rank %d; %lld in a row, at "
               "most %lld\n",
               (long long)step + 1, r->loss, r->grad_norm, r->nonfinite, r->nonfinite_rank,
               (long long)t->skipped, (long long)t->o.skip_nonfinite);
        fflush(stdout);
    }
    log_begin(t->log, "skip");
    log_int(t->log, "step", step);
    log_text(t->log, "tensor", r->nonfinite);
    log_int(t->log, "rank", r->nonfinite_rank);
    log_int(t->log, "in_a_row", t->skipped);
    log_end(t->log);
}

static void show_step(const trainer *t, int64_t step, const step_result *r, double lr,
                      const step_times *times, double tokens_per_s, double mfu, double eta_s) {
    const options *o = &t->o;
    char line[256], share[32] = "n/a";
    if (t->peak > 0) snprintf(share, sizeof share, "%.1f %%", 100 * mfu);
    snprintf(line, sizeof line,
             "step %5lld/%lld  loss %.4f  norm %.3f  lr %.2e  %.1f ms  %.0f tok/s  MFU %s  exposed %.2f ms  "
             "ETA %d:%02d",
             (long long)step + 1, (long long)o->steps, r->loss, r->grad_norm, lr, times->ms, tokens_per_s,
             share, times->exposed_ms, (int)eta_s / 60, (int)eta_s % 60);
    progress_show(line, step + 1 == o->steps);
}

void report_step(trainer *t, int64_t step, const step_result *r, double lr, const step_times *times,
                 double eta_s) {
    const options *o = &t->o;
    double tokens_per_s = (double)(o->batch * o->seq) / (times->ms * 1e-3);
    double mfu = t->peak > 0 ? tokens_per_s * flops_per_token(t) / t->peak : NAN;
    if (trainer_root(t)) show_step(t, step, r, lr, times, tokens_per_s, mfu, eta_s);
    log_begin(t->log, "step");
    log_int(t->log, "step", step);
    log_real(t->log, "loss", r->loss);
    log_real(t->log, "grad_norm", r->grad_norm);
    log_real(t->log, "lr", lr);
    log_real(t->log, "step_ms", times->ms);
    log_real(t->log, "tokens_per_s", tokens_per_s);
    log_real(t->log, "mfu", mfu);
    log_real(t->log, "comm_ms", times->comm_ms);
    log_real(t->log, "exposed_comm_ms", times->exposed_ms);
    log_int(t->log, "slowest_rank", times->slowest);
    log_real(t->log, "lag_ms", times->lag_ms);
    log_end(t->log);
    if (r->skipped) report_skip(t, step, r);
}

// --- the end ---

void report_end(trainer *t, int64_t step, double begin_ms, int stop) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    log_begin(t->log, "end");
    log_int(t->log, "steps", step);
    if (stop) log_text(t->log, "stopped_by", strsignal(stop));
    log_real(t->log, "total_s", (cf_now_ms() - begin_ms) * 1e-3);
    log_real(t->log, "peak_rss_mib", (double)usage.ru_maxrss / 1024);
    log_int(t->log, "bytes_sent_rank0", t->transport->bytes_sent(t->transport));
    accounts_log(&t->time, t->log);
    log_end(t->log);
}
