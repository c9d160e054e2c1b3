// See predict.h.
#include "predict.h"
#include "derived.h"
#include "../../commfuse/predict/playback.h"
#include "../../commfuse/tune.h"
#include "../atomic_file.h"
#include "../input.h"
#include "../json.h"
#include <strings.h>
#include <unistd.h>

enum { TP_MOST = CF_PLAYERS_MAX, MACHINE_BYTES_MAX = 1 << 16 };
static const char *modes[] = {"ideal", "none", "slice", "ring", "levels", "auto"}; // --overlap NAME takes the place of ring
enum { IDEAL, NONE, SLICE, RING, LEVELS, AUTO, MODES };

typedef struct forecast {
    cf_played played;
    double tokens_per_s, mfu, gib;
    bool fits;
    int plan; // of auto: the best of the whole plans that trials compare
} forecast;

// --- MACHINE.json ---

typedef enum { NUMBER, WHOLE, CURVE } field_kind;
typedef struct field {
    const char *name;
    field_kind kind;
    double low, high, unit, unit_x; // value · unit is stored, and for a curve x · unit_x
    size_t offset;
    const char *otherwise[2]; // on CPUs, on GPUs; of TFLOP/s, as shares of the peak. NULL: the field is compulsory
} field;

#define AT(member)    offsetof(cf_hardware, member)
#define RATE(member)  CURVE, 1e-9, 1e6, 1e12, 1e9, AT(member)
#define SHARE(member) CURVE, 1e-6, 1, 1, 1e6, AT(member)
static const field fields[] = {
    {"peak_tflops", NUMBER, 1e-6, 1e6, 1e12, 0, AT(peak), {NULL, NULL}},
    {"memory_gb", NUMBER, 1e-3, 1e6, 1e9, 0, AT(memory_bytes), {NULL, NULL}},
    {"memory_gb_per_s", NUMBER, 1e-3, 1e6, 1e9, 0, AT(memory_bytes_per_s), {NULL, NULL}},
    {"product_tflops", RATE(product), {"[[0.001, 0.4], [0.1, 0.9]]", "[[0.1, 0.04], [1, 0.18], [16, 0.53], [40, 0.67]]"}},
    {"multiprocessors", WHOLE, 1, 1024, 1, 0, AT(multiprocessors), {"1", NULL}},
    {"persistent", WHOLE, 0, 1, 1, 0, AT(persistent), {"0", "0"}},
    {"tile_share", CURVE, 1e-3, 1, 1, 1, AT(tile), {"[[1, 1]]", "[[1, 1]]"}},
    {"tile_depth", NUMBER, 0, 1e4, 1, 0, AT(tile_depth), {"0", "0"}},
    {"attention_tflops", RATE(attention_forward), {"[[0.001, 0.2], [0.1, 0.4]]", "[[0.1, 0.02], [2, 0.15], [16, 0.28]]"}},
    {"attention_backward_tflops", RATE(attention_backward), {"[[0.001, 0.2], [0.1, 0.3]]", "[[0.1, 0.02], [4, 0.13], [32, 0.2]]"}},
    {"kernel_us", NUMBER, 0, 1e6, 1e-6, 0, AT(kernel_s), {"2", "0.7"}},
    {"event_us", NUMBER, 0, 1e6, 1e-6, 0, AT(event_s), {"0", "2"}},
    {"start_us", NUMBER, 0, 1e6, 1e-6, 0, AT(start_s), {"0", "3.5"}},
    {"call_us", NUMBER, 0, 1e6, 1e-6, 0, AT(call_s), {"0", "3"}},
    {"word_ns", NUMBER, 0, 1e6, 1e-9, 0, AT(word_s), {"2", "1.5"}},
    {"message_us", NUMBER, 0, 1e6, 1e-6, 0, AT(message_s), {"2", "1"}},
    {"native_us", NUMBER, 0, 1e6, 1e-6, 0, AT(native_s), {"20", "15"}},
};
#undef AT
#define AT(member) offsetof(cf_link, member)
static const field link_fields[] = {
    {"ranks", WHOLE, 0, 1 << 20, 1, 0, AT(ranks), {NULL, NULL}},
    {"gb_per_s", NUMBER, 1e-6, 1e6, 1e9, 0, AT(bytes_per_s), {NULL, NULL}},
    {"block_gb_per_s", NUMBER, 0, 1e6, 1e9, 0, AT(block_bytes_per_s), {"0", "0"}},
    {"latency_us", NUMBER, 0, 1e6, 1e-6, 0, AT(latency_s), {"100", "20"}},
    {"step_us", NUMBER, 0, 1e6, 1e-6, 0, AT(step_s), {"30", "5"}},
    {"taken", NUMBER, 0, 0.9, 1, 0, AT(taken), {"0.1", "0.1"}},
    {"native_share",
     SHARE(native),
     {"[[0.01, 0.2], [1, 0.8]]", "[[0.01, 0.1], [0.1, 0.25], [1, 0.5], [10, 0.8], [100, 0.95], [1000, 0.97]]"}},
    {"far_loss", NUMBER, 0, 0.2, 1, 0, AT(far_loss), {"0", "0.055"}},
    {"copied", WHOLE, 0, 1, 1, 0, AT(copied), {"0", "0"}},
};
enum { FIELDS = sizeof fields / sizeof *fields, LINK_FIELDS = sizeof link_fields / sizeof *link_fields };

static const char examples[] = "scripts/machines/ has examples, scripts/README.md says what each field is";

CF_NORETURN static void refuse(const char *path, const char *name, const char *what) {
    cf_die_together(examples, "%s: \"%.100s\" %s", path, name, what);
}

static bool read_curve(cf_curve *c, const cJSON *list, const field *f, double unit, double high) {
    const cJSON *pair;
    c->points = 0;
    cJSON_ArrayForEach(pair, list) {
        const cJSON *x = cJSON_GetArrayItem(pair, 0), *y = cJSON_GetArrayItem(pair, 1);
        int i = c->points;
        if (i == CF_CURVE_POINTS || !cJSON_IsArray(pair) || cJSON_GetArraySize(pair) != 2 || !cJSON_IsNumber(x) ||
            !cJSON_IsNumber(y))
            return false;
        if (!(x->valuedouble > 0 && x->valuedouble <= 1e12 && y->valuedouble >= f->low && y->valuedouble <= high)) return false;
        c->x[i] = x->valuedouble * f->unit_x, c->y[i] = y->valuedouble * unit;
        if (i > 0 && c->x[i] <= c->x[i - 1]) return false;
        c->points++;
    }
    return cJSON_IsArray(list) && c->points > 0;
}

// Reads the fields of a table from an object. It has each at most once, and some of `others`: a misspelt name is an error. No rate
// is above the peak.
static void read_fields(void *to, cJSON *object, const field *table, int count, const char *const *others, const cf_hardware *h,
                        const char *path) {
    const cJSON *item;
    cJSON_ArrayForEach(item, object) {
        bool known = false;
        for (int i = 0; i < count; i++) known |= strcmp(table[i].name, item->string) == 0;
        for (int i = 0; others[i]; i++) known |= strcmp(others[i], item->string) == 0;
        if (!known) refuse(path, item->string, "is no field of a machine");
        if (json_repeated(object, item)) refuse(path, item->string, "appears twice");
    }
    for (const field *f = table; f < table + count; f++) {
        char what[112];
        double value = 0;
        const bool rate = f->kind == CURVE && f->unit == 1e12, given = cJSON_HasObjectItem(object, f->name);
        const double unit = rate && !given ? h->peak : f->unit, high = rate ? h->peak / unit : f->high;
        const char *otherwise = f->otherwise[h->gpu];
        if (otherwise && !given) cJSON_AddItemToObject(object, f->name, cJSON_Parse(otherwise));
        const cJSON *found = cJSON_GetObjectItemCaseSensitive(object, f->name);
        void *at = (char *)to + f->offset;
        bool right = f->kind == CURVE ? read_curve(at, found, f, unit, high) : json_number(object, f->name, f->low, high, &value);
        snprintf(what, sizeof what,
                 f->kind == CURVE ? "is no list of 1 to 32 pairs with ascending x, y from %g to %g%s"
                                  : "is no number from %g to %g",
                 f->low, high, rate ? ", the peak" : "");
        if (!right || (f->kind == WHOLE && value != floor(value))) refuse(path, f->name, found ? what : "is missing");
        if (f->kind == WHOLE) *(int *)at = (int)value;
        if (f->kind == NUMBER) *(double *)at = value * f->unit;
    }
}

static void read_links(cf_hardware *h, const cJSON *list, const char *path) {
    static const char *const others[] = {"name", NULL};
    cJSON *item;
    if (!cJSON_IsArray(list) || !list->child) refuse(path, "links", "is no list");
    cJSON_ArrayForEach(item, list) {
        cf_link *l = &h->link[h->links];
        const char *name = json_text(item, "name");
        if (h->links == CF_LINKS) refuse(path, "links", "are more than 4");
        if (!name || strlen(name) >= sizeof l->name) refuse(path, "links", "have a \"name\" of less than 24 characters each");
        snprintf(l->name, sizeof l->name, "%s", name);
        read_fields(l, item, link_fields, LINK_FIELDS, others, h, path);
        int below = h->links > 0 ? l[-1].ranks : 1;
        bool last = item->next == NULL;
        if (last ? l->ranks != 0 : l->ranks <= below || l->ranks % below != 0)
            refuse(path, "ranks", "of each link is a multiple of the one before, and 0 of the last, which joins all");
        h->links++;
    }
}

// A name without a path is that of a file of scripts/machines in a folder that the program is in.
static const char *machine_path(const char *name) {
    static char path[2 * PATH_MAX];
    char folder[PATH_MAX], *end;
    strcpy(folder, derived_own_path());
    for (snprintf(path, sizeof path, "%s", name); !strchr(name, '/') && access(path, F_OK) != 0 && (end = strrchr(folder, '/'));) {
        *end = 0;
        snprintf(path, sizeof path, "%s/scripts/machines/%.200s.json", folder, name);
    }
    return access(path, F_OK) == 0 ? path : name;
}

// Returns the type of the rates.
static const char *read_machine(cf_hardware *h, const char *path) {
    static const char *const others[] = {"name", "device", "dtype", "links", "comment", NULL};
    int64_t bytes;
    problem why;
    char *text = input_read_all("machine", path, MACHINE_BYTES_MAX, &bytes, &why);
    cJSON *object = text ? json_object(text, bytes, path, NULL, &why) : NULL;
    if (!object) cf_die_together(problem_hint(&why, examples), "%s", why.what);
    *h = (cf_hardware){.gpu = json_is(object, "device", "gpu")};
    if (!cJSON_HasObjectItem(object, "dtype")) cJSON_AddStringToObject(object, "dtype", h->gpu ? "bf16" : "fp32");
    const char *name = json_text(object, "name"), *dtype = json_is(object, "dtype", "bf16") ? "bf16" : "fp32";
    if (!name || strlen(name) >= sizeof h->name) refuse(path, "name", "is no text of less than 48 characters");
    if (!h->gpu && !json_is(object, "device", "cpu")) refuse(path, "device", "is neither gpu nor cpu");
    if (!json_is(object, "dtype", dtype)) refuse(path, "dtype", "is neither bf16 nor fp32");
    snprintf(h->name, sizeof h->name, "%s", name);
    read_fields(h, object, fields, FIELDS, others, h, path);
    read_links(h, cJSON_GetObjectItemCaseSensitive(object, "links"), path);
    cJSON_Delete(object);
    free(text);
    return dtype;
}

void predict_options(options *opt, cf_hardware *h) {
    opt->predict = machine_path(opt->predict);
    const char *dtype = read_machine(h, opt->predict);
    const char *other = *opt->init_from ? "init-from" : *opt->out ? "out" : *opt->export_to ? "export" : NULL;
    if (other)
        cf_die_together("leave it out: --model, or --layers, --channels and --heads, give the shape",
                        "--predict reads and saves no model, but --%s is given", other);
    opt->dry_run = true;
    if (opt->ranks_per_host > 0 && h->link[1].ranks % opt->ranks_per_host != 0)
        cf_die_together("let it divide them", "--ranks-per-host %ld, but %s joins blocks of %d ranks in %s", opt->ranks_per_host,
                        h->link[1].name, h->link[1].ranks, opt->predict);
    if (opt->ranks_per_host > 0 && h->links > 1) h->link[0].ranks = (int)opt->ranks_per_host;
    if (opt->ranks_per_host == 0) opt->ranks_per_host = h->link[0].ranks;
    if (strcmp(opt->dtype, "auto") == 0) opt->dtype = dtype;
    if (strcmp(opt->dtype, dtype) != 0)
        cf_die_together("name another MACHINE.json, or leave out --dtype", "the rates in %s are of %s, not of --dtype %s",
                        opt->predict, dtype, opt->dtype);
}

// --- one mesh in one mode ---

// As a graph, if it is named so.
static void write_timeline(const char *path, int players, const cf_record *const *records, const cf_trace_list *events) {
    size_t size = 0, length = strlen(path);
    problem why;
    char *text = NULL;
    if (length > 4 && strcasecmp(path + length - 4, ".dot") == 0) {
        FILE *out = open_memstream(&text, &size);
        if (out) cf_record_graph(out, records, players);
        if (!out || fclose(out) != 0) cf_die("predict fewer ranks", "no memory for %s", path);
    } else
        text = cf_trace_text(players, events, &size);
    if (!atomic_file_replace(path, text, (int64_t)size, &why))
        cf_die(problem_hint(&why, "choose another --trace"), "--trace: %s", why.what);
    free(text);
}

static forecast play(const options *given, const cf_hardware *h, int mode, int plan, bool timeline, predict_record *record,
                     void *trainer) {
    options opt = *given;
    forecast f = {.plan = plan};
    const int64_t world = opt.tp * opt.dp, host = opt.ranks_per_host;
    const bool hosts_alike = host > 0 && opt.tp % host == 0; // the ranks of one host represent all hosts of a replica
    const int64_t players = opt.predict_all ? world : hosts_alike ? host : opt.tp;
    if (players > CF_PLAYERS_MAX)
        cf_die_together(opt.predict_all ? "leave out --predict-all" : "lower --tp",
                        "%ld ranks that differ are more than the %d that --predict plays", players, CF_PLAYERS_MAX);
    predicted_rank rank[CF_PLAYERS_MAX] = {{0}};
    const cf_record *records[CF_PLAYERS_MAX];
    cf_trace_list events[CF_PLAYERS_MAX] = {{0}};
    opt.overlap = modes[mode];
    for (int i = 0; i < players && !rank->left_out; i++) {
        rank[i].plan = plan, records[i] = &rank[i].record;
        record(trainer, &opt, i, (int)players, &rank[i]);
    }
    f.played.step_ms = INFINITY;
    if (!rank->left_out) f.played = cf_playback(records, (int)players, timeline ? events : NULL);
    f.tokens_per_s = 1e3 * (double)(opt.batch ? opt.batch : opt.micro_batch * opt.dp) * (double)opt.seq / f.played.step_ms;
    f.mfu = f.tokens_per_s * rank->flops / (h->peak * (double)world);
    f.gib = (double)rank->memory / (1 << 30);
    f.fits = !rank->left_out && (double)rank->memory <= h->memory_bytes;
    if (timeline) write_timeline(opt.trace, (int)players, records, events);
    for (int i = 0; i < players; i++) free(events[i].event), cf_record_free(&rank[i].record);
    return f;
}

static bool better(const forecast *f, const forecast *than) {
    return f->fits != than->fits ? f->fits : f->played.step_ms < than->played.step_ms;
}

static forecast foresee(const options *opt, const cf_hardware *h, int mode, predict_record *record, void *trainer) {
    forecast best = play(opt, h, mode, 0, false, record, trainer);
    for (int plan = 1; plan < CF_PLANS && mode == AUTO; plan++) {
        const forecast f = play(opt, h, mode, plan, false, record, trainer);
        if (better(&f, &best)) best = f;
    }
    return best;
}

// --- output ---

static const char *bound(const cf_played *p) {
    static const char *const names[CF_PARTS] = {"products", "attention", "memory", "communication", "transfers that slow kernels",
                                                "the host"};
    int most = 0;
    for (int part = 1; part < CF_PARTS; part++)
        if (p->part_ms[part] > p->part_ms[most]) most = part;
    return names[most];
}

static void print_modes(const forecast *f, FILE *out) {
    cf_print(out, "%-9s %10s %11s %7s | %9s %9s %9s %9s %9s %9s | %8s  %s\n", "overlap", "step ms", "tokens/s", "MFU", "products",
             "attention", "memory", "exposed", "slowed", "host", "GiB", "bound by");
    for (int mode = 0; mode < MODES; mode++) {
        const cf_played *p = &f[mode].played;
        cf_print(out, "%-9s %10.2f %11.0f %6.1f%% |", modes[mode], p->step_ms, f[mode].tokens_per_s, 100 * f[mode].mfu);
        for (int part = 0; part < CF_PARTS; part++) cf_print(out, " %9.2f", p->part_ms[part]);
        cf_print(out, " | %8.1f  %s\n", f[mode].gib, bound(p));
    }
    for (int mode = NONE; mode < MODES; mode++) {
        const cf_played *p = &f[mode].played;
        cf_print(out, "exposed, %-9s", modes[mode]);
        for (int i = 0; i < p->exposed.count && i < 5; i++)
            cf_print(out, "%s %s %.2f ms", i ? "," : "", p->exposed.total[i].name, p->exposed.total[i].exposed_ms);
        cf_print(out, "%s\n", p->exposed.count ? "" : " nothing");
    }
}

// --- meshes ---

// Each rank keeps its number of sequences, so a replica of tp ranks has tp times as many.
static bool set_mesh(options *opt, const options *given, int64_t ranks, int64_t tp) {
    *opt = *given;
    opt->tp = tp, opt->dp = ranks / tp, opt->micro_batch = given->micro_batch * tp;
    if (given->batch > 0 && opt->micro_batch * opt->dp > given->batch) opt->micro_batch = given->batch / opt->dp;
    const bool splits = ranks % tp == 0 && given->heads % tp == 0 && given->kv_heads % tp == 0 && given->seq % tp == 0 &&
                        (given->ffn % tp == 0 || strcmp(given->strategy, "up") == 0);
    return splits && opt->micro_batch >= 1 && opt->micro_batch <= 4096 &&
           (given->batch == 0 || given->batch % (opt->micro_batch * opt->dp) == 0);
}

static void predict_meshes(const options *given, const cf_hardware *h, int64_t from, int64_t to, predict_record *record,
                           void *trainer, FILE *out) {
    cf_print(out, "%6s %4s %6s", "ranks", "tp", "dp");
    for (int mode = 0; mode < MODES; mode++) cf_print(out, " %10s", modes[mode]);
    cf_print(out, "  %-9s %6s %7s  %s\n", "best", "MFU", "GiB", "bound by");
    for (int64_t ranks = from; ranks <= to; ranks *= 2) {
        double best_rate = 0, best_gain = 0;
        char best_line[96] = "no mesh fits";
        for (int64_t tp = 1; tp <= TP_MOST; tp++) {
            options opt;
            forecast f[MODES];
            int best = NONE;
            if (!set_mesh(&opt, given, ranks, tp)) continue;
            for (int mode = 0; mode < MODES; mode++) f[mode] = foresee(&opt, h, mode, record, trainer);
            for (int mode = NONE; mode < MODES; mode++)
                if (better(&f[mode], &f[best])) best = mode;
            cf_print(out, "%6ld %4ld %6ld", ranks, tp, opt.dp);
            for (int mode = 0; mode < MODES; mode++) cf_print(out, " %10.2f", f[mode].played.step_ms);
            cf_print(out, "  %-9s %5.1f%% %7.1f  %s\n", modes[best], 100 * f[best].mfu, f[best].gib,
                     f[best].fits ? bound(&f[best].played) : "does not fit");
            fflush(out);
            if (!f[best].fits || f[best].tokens_per_s <= best_rate) continue;
            best_rate = f[best].tokens_per_s, best_gain = 1 - f[best].played.step_ms / f[NONE].played.step_ms;
            snprintf(best_line, sizeof best_line, "tp %ld x dp %ld by %s: %.0f tokens/s, %.1f %% MFU", tp, opt.dp, modes[best],
                     best_rate, 100 * f[best].mfu);
        }
        cf_print(out, "%6ld best: %s; %.1f %% less than none\n", ranks, best_line, 100 * best_gain);
    }
}

// What such predictions were off by, as results/predict/predict.md says; checked by T=predict_check.
static const char *expected(const cf_hardware *h, int64_t ranks) {
    return !h->gpu     ? "two CPU ranks were predicted 9 % too short to 4 % too long"
           : ranks > 1 ? "no step of several GPUs has been measured with this program; an emulator's clock with the same "
                         "assumptions: -1 to +2 %, llm.c's steps on eight GPUs: -17 to -14 %"
                       : "steps on an H100 and an H200, measured with more passes over memory than now, were predicted -11 to -4 %";
}

void predict(const options *opt, const cf_hardware *h, predict_record *record, void *trainer, FILE *out) {
    static char name[CF_CHOICE_NAME];
    const cf_choice given = derived_schedule(opt);
    if (given.algorithm) cf_choice_print(given, name), modes[RING] = name;
    int64_t from = 0, to = 0;
    char rest;
    const int numbers = sscanf(opt->predict_ranks, "%9ld:%9ld%c", &from, &to, &rest);
    if (*opt->predict_ranks) {
        if (numbers == 1 && !strchr(opt->predict_ranks, ':')) to = from;
        if (numbers > 2 || from < 1 || to < from)
            cf_die_together("write N or A:B, as in 8:512", "--predict-ranks '%.64s' is no number of ranks", opt->predict_ranks);
        predict_meshes(opt, h, from, to, record, trainer, out);
    } else {
        forecast f[MODES];
        options mesh = *opt;
        const int shown = given.algorithm ? RING : AUTO; // in the timeline
        if (mesh.tp == 0) mesh.tp = 1;
        if (mesh.dp == 0) mesh.dp = 1;
        for (int mode = 0; mode < MODES; mode++) f[mode] = foresee(&mesh, h, mode, record, trainer);
        if (*opt->trace) play(&mesh, h, shown, f[shown].plan, true, record, trainer);
        cf_print(out, "%ld ranks (tp %ld x dp %ld) of %s\n", mesh.tp * mesh.dp, mesh.tp, mesh.dp, h->name);
        print_modes(f, out);
        const int host = h->links > 1 ? h->link[0].ranks : 0;
        if (host > 0 && host % mesh.tp != 0 && mesh.tp % host != 0)
            cf_print(out,
                     "Hosts of %d: some replicas of tp %ld are on two; a tp that divides %d, or is a multiple, keeps them apart\n",
                     host, mesh.tp, host);
        if (!f[AUTO].fits) cf_print(out, "This does not fit: a rank has %.1f GiB\n", h->memory_bytes / (1 << 30));
    }
    cf_print(out,
             "To expect: %s.\nThe rates are from %s. Not modelled: how kernels and transfers disturb each other beyond \"taken\", "
             "clock rates under load, other users, input, saving. auto: the best of the plans that trials compare; they may find a "
             "better one.\n",
             expected(h, to > 0 ? to : opt->tp * opt->dp), opt->predict);
    if (h->gpu) cf_print(out, "Copy engines, not kernels, do the exchanges over %s.\n", h->link[0].name);
}
