// See predict.h.
#include "predict.h"
#include "../commfuse/die.h"
#include "../commfuse/playback.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { GPT2_WORDS = 50257, TP_MOST = CF_PLAYERS_MAX };
static const char *const modes[] = {"ideal", "none", "slice", "commfuse", "auto"};
enum { IDEAL, NONE, SLICE, COMMFUSE, AUTO, MODES };
static const double PAYS = 0.02; // the part of a step that overlap must save

typedef struct forecast {
    cf_played played;
    double tokens_per_s, mfu;
    double gib;
    bool fits;
} forecast;

void predict_options(options *o, machine *m) {
    problem why;
    if (!machine_read(m, o->predict, &why)) cf_die_together(why.hint, "%s", why.what);
    const char *other = *o->init_from   ? "init-from"
                        : *o->out       ? "out"
                        : *o->export_to ? "export"
                        : o->check_wire ? "check-wire"
                                        : NULL;
    if (other)
        cf_die_together("leave it out: --model, or --layers, --channels and --heads, give the shape",
                        "--predict reads and saves no model and has no data to check, but --%s is given", other);
    o->dry_run = true;
    if (strcmp(o->dtype, "auto") == 0) o->dtype = m->dtype;
    if (strcmp(o->dtype, m->dtype) != 0)
        cf_die_together("name another MACHINE.json, or leave out --dtype", "the rates in %s are of %s, not of --dtype %s",
                        o->predict, m->dtype, o->dtype);
    if (o->vocab == 0 && !*o->train) o->vocab = GPT2_WORDS;
}

// --- one mesh in one mode ---

static forecast foresee(const options *given, const machine *m, int mode, bool timeline, predict_record *record, void *trainer) {
    options o = *given;
    forecast f = {0};
    const int64_t world = o.tp * o.dp, players = o.predict_all ? world : o.tp;
    if (players > CF_PLAYERS_MAX)
        cf_die_together(o.predict_all ? "leave out --predict-all" : "lower --tp",
                        "%lld ranks that differ are more than the %d that --predict plays", (long long)players, CF_PLAYERS_MAX);
    predicted_rank rank[CF_PLAYERS_MAX] = {0};
    const cf_record *records[CF_PLAYERS_MAX];
    cf_trace_list events[CF_PLAYERS_MAX] = {{0}};
    o.overlap = modes[mode];
    for (int i = 0; i < players; i++) record(trainer, &o, i, (int)players, &rank[i]), records[i] = &rank[i].record;
    f.played = cf_playback(records, (int)players, timeline ? events : NULL);
    f.tokens_per_s = 1e3 * (double)(o.batch ? o.batch : o.micro_batch * o.dp) * (double)o.seq / f.played.step_ms;
    f.mfu = f.tokens_per_s * rank->flops / (m->hardware.peak * (double)world);
    f.gib = (double)rank->memory / (1 << 30);
    f.fits = (double)rank->memory <= m->hardware.memory_bytes;
    FILE *file = timeline ? fopen(o.trace, "w") : NULL;
    if (file) cf_trace_write(file, (int)players, events);
    if (timeline && (!file || fclose(file) != 0))
        cf_die("choose another --trace", "%s cannot be written: %s", o.trace, strerror(errno));
    for (int i = 0; i < players; i++) free(events[i].event), cf_record_free(&rank[i].record);
    return f;
}

// --- output ---

static const char *bound(const cf_played *p) {
    const char *names[] = {"products", "attention", "memory", "communication", "the host", "transfers that slow kernels"};
    const double ms[] = {p->work_ms[CF_WORK_PRODUCT],
                         p->work_ms[CF_WORK_ATTENTION],
                         p->work_ms[CF_WORK_MEMORY],
                         p->exposed_ms,
                         p->host_ms,
                         p->slowed_ms};
    int most = 0;
    for (int i = 1; i < 6; i++)
        if (ms[i] > ms[most]) most = i;
    return names[most];
}

static void print_modes(const forecast *f, FILE *out) {
    fprintf(out, "%-9s %10s %11s %7s | %9s %9s %9s %9s %9s %9s | %8s  %s\n", "overlap", "step ms", "tokens/s", "MFU", "products",
            "attention", "memory", "exposed", "slowed", "host", "GiB", "bound by");
    for (int mode = 0; mode < MODES; mode++) {
        const cf_played *p = &f[mode].played;
        fprintf(out, "%-9s %10.2f %11.0f %6.1f%% | %9.2f %9.2f %9.2f %9.2f %9.2f %9.2f | %8.1f  %s\n", modes[mode], p->step_ms,
                f[mode].tokens_per_s, 100 * f[mode].mfu, p->work_ms[CF_WORK_PRODUCT], p->work_ms[CF_WORK_ATTENTION],
                p->work_ms[CF_WORK_MEMORY], p->exposed_ms, p->slowed_ms, p->host_ms, f[mode].gib, bound(p));
    }
    for (int mode = NONE; mode < MODES; mode++) {
        const cf_played *p = &f[mode].played;
        fprintf(out, "exposed, %-9s", modes[mode]);
        for (int i = 0; i < p->places && i < 5; i++) fprintf(out, "%s %s %.2f ms", i ? "," : "", p->place[i].label, p->place[i].ms);
        fprintf(out, "%s\n", p->places ? "" : " nothing");
    }
}

// --- meshes ---

// Each rank keeps its number of sequences, so a replica of tp ranks has tp times as many.
static bool set_mesh(options *o, const options *given, int64_t ranks, int64_t tp) {
    *o = *given;
    o->tp = tp, o->dp = ranks / tp, o->micro_batch = given->micro_batch * tp;
    if (given->batch > 0 && o->micro_batch * o->dp > given->batch) o->micro_batch = given->batch / o->dp;
    return ranks % tp == 0 && given->heads % tp == 0 && given->seq % tp == 0 && o->micro_batch >= 1 && o->micro_batch <= 4096 &&
           (given->batch == 0 || given->batch % (o->micro_batch * o->dp) == 0);
}

static void predict_meshes(const options *given, const machine *m, int64_t from, int64_t to, predict_record *record, void *trainer,
                           FILE *out) {
    int64_t pays_from = 0, pays_to = 0;
    fprintf(out, "%6s %4s %6s %10s %10s %10s %10s %10s  %-9s %6s %7s  %s\n", "ranks", "tp", "dp", modes[0], modes[1], modes[2],
            modes[3], modes[4], "best", "MFU", "GiB", "bound by");
    for (int64_t ranks = from; ranks <= to; ranks *= 2) {
        double best_rate = 0, best_gain = 0;
        char best_line[96] = "no mesh fits";
        for (int64_t tp = 1; tp <= TP_MOST; tp++) {
            options o;
            forecast f[MODES];
            int best = NONE;
            if (!set_mesh(&o, given, ranks, tp)) continue;
            for (int mode = 0; mode < MODES; mode++) f[mode] = foresee(&o, m, mode, false, record, trainer);
            for (int mode = NONE; mode < MODES; mode++)
                if (f[mode].played.step_ms < f[best].played.step_ms) best = mode;
            fprintf(out, "%6lld %4lld %6lld", (long long)ranks, (long long)tp, (long long)o.dp);
            for (int mode = 0; mode < MODES; mode++) fprintf(out, " %10.2f", f[mode].played.step_ms);
            fprintf(out, "  %-9s %5.1f%% %7.1f  %s\n", modes[best], 100 * f[best].mfu, f[best].gib,
                    f[best].fits ? bound(&f[best].played) : "does not fit");
            fflush(out);
            if (!f[best].fits || f[best].tokens_per_s <= best_rate) continue;
            best_rate = f[best].tokens_per_s, best_gain = 1 - f[best].played.step_ms / f[NONE].played.step_ms;
            snprintf(best_line, sizeof best_line, "tp %lld x dp %lld by %s: %.0f tokens/s, %.1f %% MFU", (long long)tp,
                     (long long)o.dp, modes[best], best_rate, 100 * f[best].mfu);
        }
        fprintf(out, "%6lld best: %s; %.1f %% less than none\n", (long long)ranks, best_line, 100 * best_gain);
        if (best_gain >= PAYS && pays_from == 0) pays_from = ranks;
        if (best_gain >= PAYS) pays_to = ranks;
    }
    if (pays_from == 0)
        fprintf(out, "Overlap saves less than %.0f %% of a step everywhere\n", 100 * PAYS);
    else
        fprintf(out, "Overlap saves %.0f %% of a step or more from %lld to %lld ranks\n", 100 * PAYS, (long long)pays_from,
                (long long)pays_to);
}

void predict(const options *o, const machine *m, predict_record *record, void *trainer, FILE *out) {
    long long from = 0, to = 0;
    if (sscanf(o->predict_ranks, "%lld:%lld", &from, &to) == 2) {
        if (from < 1) cf_die_together("count ranks from 1", "--predict-ranks %s", o->predict_ranks);
        predict_meshes(o, m, from, to, record, trainer, out);
    } else {
        forecast f[MODES];
        options mesh = *o;
        if (mesh.tp == 0) mesh.tp = 1;
        if (mesh.dp == 0) mesh.dp = 1;
        for (int mode = 0; mode < MODES; mode++) f[mode] = foresee(&mesh, m, mode, *o->trace && mode == AUTO, record, trainer);
        fprintf(out, "%lld ranks (tp %lld x dp %lld) of %s\n", (long long)(mesh.tp * mesh.dp), (long long)mesh.tp,
                (long long)mesh.dp, m->hardware.name);
        print_modes(f, out);
        if (!f[AUTO].fits) fprintf(out, "This does not fit: a rank has %.1f GiB\n", m->hardware.memory_bytes / (1 << 30));
    }
    fprintf(out,
            "The rates are from %s. Not modelled: how kernels and transfers disturb each other beyond \"taken\", clock rates under "
            "load, other users, input, saving. auto: the predicted plan; trials may find a better one.\n",
            o->predict);
    if (m->hardware.gpu) fprintf(out, "Copy engines, not kernels, do the exchanges over %s.\n", m->hardware.link[0].name);
}
