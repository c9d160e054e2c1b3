// See report.h.
#include "report.h"
#include "../../commfuse/base/limits.h"
#include "../../commfuse/base/streams.h"
#include "../../commfuse/launch/stop.h"
#include "../atomic_file.h"
#include "../json.h"
#include "derived.h"
#include <unistd.h>

enum { BEHIND = 2048 }; // bytes of output that wait to be read

static bool root(const run_report *r) {
    return r->mesh->world_group.rank == 0;
}

void report_line(const run_report *r, const char *format, ...) {
    va_list values;
    if (!root(r)) return;
    va_start(values, format);
    cf_print_list(stdout, format, values);
    va_end(values);
    fflush(stdout);
}

// Time since the last call, or since report_begin().
static double lap(run_report *r) {
    double before = r->lap_ms;
    r->lap_ms = cf_now_ms();
    return r->lap_ms - before;
}

double report_pause(run_report *r, pause_kind kind) {
    const double ms = lap(r);
    r->paused_ms[kind] += ms, r->pauses[kind]++;
    return ms;
}

// --- the beginning ---

void report_resume(run_report *r, const manifest *m) {
    r->first = m->step;
    report_line(r, "resume    from step %ld in %s, saved by %ld ranks (%s, tp %s x dp %s, version %s)\n", m->step, r->opt->out,
                m->ranks, json_text(m->options, "strategy"), json_text(m->options, "tp"), json_text(m->options, "dp"),
                json_text(m->options, "version"));
    if (startup_number(m, "threads") != r->opt->threads)
        report_line(r, "note      %ld threads a rank, %s until then: sums within products may round differently\n", r->opt->threads,
                    json_text(m->options, "threads"));
}

void report_open(run_report *r) {
    if (root(r)) r->log = log_open(r->opt->log, r->run, r->first);
}

void report_config(run_report *r) {
    char host[64] = "unknown";
    gethostname(host, sizeof host - 1);
    const bool resumed = r->first > 0 && !log_empty(r->log);
    log_begin(r->log, resumed ? "resume" : "config");
    LOG_ADD(r->log, FIELD(resumed ? "step" : NULL, r->first), FIELD("run", r->run), FIELD("version", r->version),
            FIELD("host", host), FIELD("ranks", r->mesh->world_group.size));
    for (const option_row *row = options_table; row < options_table + OPTIONS; row++) {
        const void *value = (const char *)r->opt + row->offset;
        if (row->type == OPTION_INT) LOG_ADD(r->log, FIELD(row->name, *(const int64_t *)value));
        if (row->type == OPTION_REAL) LOG_ADD(r->log, FIELD(row->name, *(const double *)value));
        if (row->type == OPTION_FLAG) LOG_ADD(r->log, FIELD(row->name, *(const bool *)value ? "yes" : "no"));
        if (row->type == OPTION_TEXT || row->type == OPTION_CHOICE) LOG_ADD(r->log, FIELD(row->name, *(const char *const *)value));
    }
    log_texts(r->log, "given", r->opt->typed, r->opt->typed_count);
    LOG_ADD(r->log, FIELD("parameters", r->parameters), FIELD("peak_tflops_all_ranks", r->peak * 1e-12),
            FIELD("peak_source", r->peak_source ? r->peak_source : "unknown"));
    log_end(r->log);
}

static void print_shared_cores(const run_report *r) {
    const int threads = (int)r->opt->threads, ranks = r->transport->local_size, cores = r->transport->local_cores;
    if (ranks * (threads + 1) <= cores) return;
    cf_print(stdout, "cores     %d for %d ranks of %d threads: %s\n", cores, ranks, threads,
             ranks * threads > cores ? "lower --threads" : "the threads that move bytes share them with those that compute");
}

// Where groups span hosts.
static void print_hosts(const cf_mesh *mesh, int ranks_per_host) {
    const int R = ranks_per_host, tp = mesh->tp;
    if (R == 0 || (R % tp != 0 && tp % R != 0))
        cf_print(stdout, "hosts     %s schedules of two levels are direct\n",
                 R == 0 ? "have different numbers of ranks, or ranks that are not neighbours:"
                        : "hold parts of tp groups: in these and dp groups");
    else if (R < mesh->world_group.size)
        cf_print(stdout, "hosts     %d, of %d ranks each; a tp group is on %d of them, a dp group on %d\n", mesh->world_group.hosts,
                 R, mesh->tp_group.hosts, mesh->dp_group.hosts);
}

static void print_peak(const run_report *r) {
    char fp32[64] = "";
    if (r->peak > 0)
        cf_print(stdout, "peak      %.3f TFLOP/s over all ranks (%s)\n", r->peak * 1e-12, r->peak_source);
    else
        cf_print(stdout, "peak      unknown, no MFU (%s)\n", r->peak_source ? r->peak_source : "not measured by --dry-run");
    if (r->peak_fp32 > 0) snprintf(fp32, sizeof fp32, " (peak %.3f TFLOP/s)", r->peak_fp32 * 1e-12);
    if (*fp32 || r->peak_emulated)
        cf_print(stdout, "          this processor has no instructions for bf16: --dtype fp32%s is faster\n", fp32);
}

void report_banner(const run_report *r) {
    const options *opt = r->opt;
    const cf_choice schedule = derived_schedule(opt);
    if (!root(r)) return;
    char keys[64] = "";
    if (params_block_named(opt->block)->magic != LLM_C_MAGIC)
        snprintf(keys, sizeof keys, ", %ld of keys, %ld units of %s", opt->kv_heads, opt->ffn, opt->block);
    cf_print(stdout, "commfuse %s: GPT of %ld layers, %ld channels, %ld heads%s, %ld tokens of vocabulary: %.2f M parameters\n",
             r->version, opt->layers, opt->channels, opt->heads, keys, opt->vocab, (double)r->parameters * 1e-6);
    cf_print(stdout, "device    %s, %s; %ld thread%s of the host a rank%s\n", cf_device_name(), opt->dtype, opt->threads,
             opt->threads == 1 ? "" : "s", cf_limits_text());
    cf_print(stdout, "mesh      %d ranks = tp %d x dp %d, %s over %s\n", r->mesh->world_group.size, r->mesh->tp, r->mesh->dp,
             opt->strategy, r->transport->name);
    print_hosts(r->mesh, r->transport->ranks_per_host);
    if (r->mesh->world_group.size > 1 && r->transport->size == r->mesh->world_group.size && strcmp(cf_device_name(), "CPU") == 0)
        print_shared_cores(r);
    if (!schedule.algorithm)
        cf_print(stdout, "overlap   auto: --dry-run prints the schedule of each operation\n");
    else
        cf_print(stdout, "overlap   %s: %s; %d slice%s\n", schedule.algorithm->name, schedule.algorithm->help, schedule.slices,
                 schedule.slices == 1 ? "" : "s");
    cf_print(stdout, "batch     %ld sequences of %ld tokens = micro-batch %ld x dp %d x %d accumulation steps\n", opt->batch,
             opt->seq, opt->micro_batch, r->mesh->dp, r->accumulation);
    if (r->train)
        cf_print(stdout, "data      %ld tokens in %d files, %ld samples an epoch\n", r->train->count, r->train->files,
                 r->train->samples);
    startup_note_words(opt);
    print_peak(r);
    cf_print(stdout, "memory    %.1f MiB per rank, of %.1f MiB that are free%s\n", (double)cf_memory_bytes() / 1048576,
             (double)cf_device_memory(r->transport->local_size) / 1048576,
             strcmp(opt->recompute, "1") == 0 ? "; backward computes GELU and layer norms again" : "");
    if (schedule.algorithm && schedule.algorithm->bound)
        cf_print(stdout, "NO WIRE   transfers are left out: results are wrong by construction; this run only measures time\n");
    fflush(stdout);
}

// --- a step ---

void report_figures(void *run, double *mine) {
    const run_report *r = run;
    const cf_trace_figures figures = cf_trace_last(r->context->trace);
    if (r->last.step >= 0 && !r->last.trial) cf_trace_add_totals(r->context->trace);
    mine[FIGURE_UNWRITTEN] = r->checkpoints && !saver_written(r->checkpoints);
    mine[FIGURE_STOP] = (double)cf_stop_asked();
    mine[FIGURE_STEP] = (double)r->last.step;
    mine[FIGURE_MS] = r->last.ms;
    mine[FIGURE_EXPOSED] = figures.exposed_ms;
    mine[FIGURE_COMM] = figures.comm_ms;
    mine[FIGURE_OPTIMIZER] = r->muon_ms ? *r->muon_ms : 0;
}

typedef struct step_times {
    double most[FIGURES];   // over ranks
    double exposed_mean_ms; // over ranks
    double lag_ms;          // how much longer the slowest rank computes than the median
    int slowest;            // rank
} step_times;

// Checks that all ranks are in the same step: if one missed a step, nothing would hang, but all results would be wrong. The slowest
// rank is the one that waits least.
static step_times times_of(const double *all, int stride, int ranks, int64_t step) {
    step_times times = {.slowest = 0};
    double *lead = cf_host_alloc(ranks, sizeof *lead, "the times of the ranks"); // minus the time of computing
    for (int rank = 0; rank < ranks; rank++) {
        const double *r = all + rank * stride;
        if ((int64_t)r[FIGURE_STEP] != step)
            cf_die("internal error, or a bug in a library: please report it; the checkpoints are sound",
                   "the ranks are out of step: rank %d is in step %.0f, this rank in step %ld", rank, r[FIGURE_STEP], step);
        for (int i = 0; i < FIGURES; i++) times.most[i] = fmax(times.most[i], r[i]);
        times.exposed_mean_ms += r[FIGURE_EXPOSED] / ranks;
        lead[rank] = r[FIGURE_EXPOSED] - r[FIGURE_MS];
        if (lead[rank] < lead[times.slowest]) times.slowest = rank;
    }
    const double least = lead[times.slowest];
    times.lag_ms = cf_median(lead, ranks) - least;
    free(lead);
    return times;
}

// Steps and pauses from step `done` to the end, each pause as long as those of its kind so far. Before the first, validations and
// samples take a third of a step's time for their sequences: a forward pass. Every replica has the whole sample, whose text grows.
static double left_ms(const run_report *r, int64_t done) {
    const options *opt = r->opt;
    const int64_t steps = opt->steps, saves = opt->save_every > 0 ? opt->save_every : steps,
                  every[PAUSES] = {r->val ? opt->val_every : 0, opt->sample_every, r->checkpoints ? saves : 0};
    const double step = r->stepped_ms / (double)(done - r->first), words = (double)opt->sample_tokens * (double)opt->dp,
                 sequences[PAUSES] = {r->val ? (double)derived_val_sequences(opt, r->val->samples) : 0,
                                      words * fmin(1, (double)opt->sample_tokens / 2 / (double)opt->seq), 0};
    double left = step * (double)(steps - done);
    for (int i = 0; i < PAUSES; i++) {
        if (every[i] <= 0) continue;
        const int64_t times = steps / every[i] - (done - 1) / every[i] + (steps % every[i] != 0);
        left += (double)times *
                (r->pauses[i] > 0 ? r->paused_ms[i] / (double)r->pauses[i] : step / 3 * sequences[i] / (double)opt->batch);
    }
    return left;
}

static void show_step(const run_report *r, const step_report *s, const step_times *times, double tokens_per_s, double mfu) {
    char share[32] = "n/a", eta[32];
    const long left = (long)(left_ms(r, s->step + 1) * 1e-3), minutes = left / 60;
    if (s->step + 1 < r->opt->steps && cf_streams_waiting() > BEHIND) return; // a pager may not read for a while
    if (r->peak > 0) snprintf(share, sizeof share, "%.1f %%", 100 * mfu);
    snprintf(eta, sizeof eta, "%ld:%02ld", minutes, left % 60);
    if (minutes >= 60) snprintf(eta, sizeof eta, "%ld:%02ld:%02ld", minutes / 60, minutes % 60, left % 60);
    report_line(r, "step %5ld/%ld  loss %.4f  MFU %s  exposed %.2f ms  ETA %s  %.1f ms  %.0f tok/s  norm %.3f  lr %.2e%s\n",
                s->step + 1, r->opt->steps, s->loss, share, times->most[FIGURE_EXPOSED], eta, s->ms, tokens_per_s, s->grad_norm,
                s->lr, s->trial ? "  (trial)" : "");
}

void report_step(run_report *r, const double *all, int stride) {
    const step_report *s = &r->last;
    if (s->step < 0) return;
    const step_times times = times_of(all, stride, r->mesh->world_group.size, s->step);
    // It may exchange more, which overwrites `all`.
    if (r->checkpoints) saver_advance(r->checkpoints, times.most[FIGURE_UNWRITTEN] == 0);
    double tokens_per_s = (double)(r->opt->batch * r->opt->seq) / (s->ms * 1e-3);
    double mfu = r->peak > 0 ? tokens_per_s * r->flops / r->peak : NAN;
    r->stepped_ms += s->ms;
    show_step(r, s, &times, tokens_per_s, mfu);
    LOG_LINE(r->log, "step", FIELD("step", s->step), FIELD("loss", s->loss), FIELD("grad_norm", s->grad_norm), FIELD("lr", s->lr),
             FIELD("step_ms", s->ms), FIELD("tokens_per_s", tokens_per_s), FIELD("mfu", mfu),
             FIELD("comm_ms", times.most[FIGURE_COMM]), FIELD("exposed_comm_ms", times.most[FIGURE_EXPOSED]),
             FIELD("exposed_mean_ms", times.exposed_mean_ms), FIELD("slowest_rank", times.slowest), FIELD("lag_ms", times.lag_ms),
             FIELD(r->muon_ms ? "optimizer_ms" : NULL, times.most[FIGURE_OPTIMIZER]), FIELD(s->trial ? "trial" : NULL, 1));
    plan_step(&r->plan, r->log, s->step);
    if (times.most[FIGURE_STOP] > 0) r->stop = (int)times.most[FIGURE_STOP];
    r->last.step = -1;
}

void report_meet(run_report *r) {
    cf_barrier(r->context, &r->mesh->world_group);
    cf_stream_sync(r->context->stream);
}

void report_begin(run_report *r) {
    r->begin_ms = r->lap_ms = cf_now_ms(), r->trace_from = r->trace_to = -1;
    if (*r->opt->trace) sscanf(r->opt->trace_steps, "%d:%d", &r->trace_from, &r->trace_to); // the parser has checked the form
    if (r->first > r->trace_from && r->first < r->trace_to && r->first > 0) r->trace_from = (int)r->first;
}

bool report_trace_due(const run_report *r, int64_t step) {
    return step == r->trace_from || step == r->trace_to;
}

void report_begin_step(run_report *r) {
    cf_context *c = r->context;
    const bool follows = r->last.step >= 0;
    if (c->step == r->trace_from) report_meet(r), cf_trace_start(c->trace, r->transport);
    if (!follows) report_meet(r), lap(r);
    cf_trace_step(c->trace, c->step, c->stream);
    if (follows) r->last.ms = lap(r);
    cf_tuner_begin_step(r->plan.tuner);
}

static void write_trace(run_report *r, int64_t last) {
    size_t size = 0;
    problem why = {.what = "there is no memory for the timeline"};
    *r->transport->timeout_s = PATIENCE * r->opt->timeout;
    char *text = cf_trace_gather(r->context->trace, r->transport, &size);
    if (root(r)) r->untraced = !text || !atomic_file_replace(r->opt->trace, text, (int64_t)size, &why);
    free(text);
    if (r->untraced)
        cf_print(stderr, "warning: %s; training continues\n", why.what);
    else
        report_line(r, "trace of steps %d to %ld: %s (open it in https://ui.perfetto.dev)\n", r->trace_from, last, r->opt->trace);
    report_meet(r); // rank 0 may have written for long
    *r->transport->timeout_s = r->opt->timeout;
}

void report_end_step(run_report *r) {
    cf_context *c = r->context;
    const int64_t step = c->step;
    double mine[FIGURES];
    cf_stream_sync(c->stream);
    cf_trace_step(c->trace, c->step, c->stream);
    r->last.ms = lap(r);
    cf_tuner_end_step(r->plan.tuner);
    report_figures(r, mine);
    double *all = cf_allgather_alloc(r->transport, mine, (int64_t)sizeof mine);
    report_step(r, all, FIGURES);
    free(all);
    const bool ends = step + 1 == r->trace_to || step + 1 == r->opt->steps || r->stop;
    if (ends && step >= r->trace_from && step < r->trace_to) write_trace(r, step);
}

// --- between steps ---

void report_validation(run_report *r, int64_t step, double loss, int64_t sequences) {
    const double ms = report_pause(r, VALIDATION);
    LOG_LINE(r->log, "val", FIELD("step", step), FIELD("ms", ms), FIELD("loss", loss), FIELD("sequences", sequences));
    report_line(r, "step %5ld  validation loss %.4f  %ld sequences\n", step, loss, sequences);
}

void report_sample(run_report *r, int64_t step, const int32_t *token, int64_t count) {
    const double ms = report_pause(r, SAMPLE);
    if (!root(r)) return;
    char *text = cf_host_alloc(count * 256 + 1, 1, "a sample"), *end = text;
    for (int64_t i = 0; i < count; i++) end += vocabulary_bytes(r->words, token[i], end);
    for (char *at = text; at < end; at++)
        if (!*at) *at = ' '; // a zero byte is a token of a model without words
    cf_sanitize(text);
    report_line(r, "step %5ld  sample\n%s\n---\n", step, text);
    LOG_LINE(r->log, "sample", FIELD("step", step), FIELD("ms", ms), FIELD("text", text));
    free(text);
}

// --- the end ---

int report_end(run_report *r, int64_t step, bool stopped, bool saved) {
    const int stop = stopped ? r->stop : 0;
    const int64_t peak = cf_limits_peak_memory();
    audit(r->context->trace, r->transport, r->opt, r->log);
    LOG_LINE(r->log, "end", FIELD("steps", step), FIELD(stop ? "stopped_by" : NULL, stop ? strsignal(stop) : ""),
             FIELD("total_s", (cf_now_ms() - r->begin_ms) * 1e-3), FIELD(peak > 0 ? "peak_rss_mib" : NULL, (double)peak / 1048576),
             FIELD("bytes_sent_rank0", r->transport->bytes_sent));
    if (stop && saved)
        report_line(r, "stopped   by a signal (%s) after %ld of %ld steps; the same command resumes from there\n", strsignal(stop),
                    step, r->opt->steps);
    fflush(stdout);
    if (!saved)
        cf_die_together("see the warnings above; the same command resumes from the last checkpoint, if there is one",
                        "the state after step %ld was not saved", step);
    return stopped ? STATUS_STOPPED : log_complete(r->log) && !r->untraced ? 0 : EXIT_FAILURE;
}

void report_close(run_report *r) {
    saver_free(r->checkpoints);
    log_close(r->log);
    tokens_close(r->train);
    tokens_close(r->val);
}
