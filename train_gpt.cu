// Train a GPT: options → mesh → model → training loop.
//
//     ./train_gpt --train data.bin                              one process, all cores
//     mpirun -np 4 ./train_gpt --tp 2 --dp 2 --train data.bin   two replicas of two ranks each
//
// This file is the common subset of C and C++: `cc -x c` builds it for CPUs, nvcc for GPUs, a program for each element
// type (--dtype finds the right one). It knows no kernel and no transport; who talks to whom, and when, is decided in
// commfuse/, what is computed in layers/, what touches the disk in data/.
//
// Order of things in a step: micro-batches forward and backward (the last one sends gradients behind its
// backward), the figures of the step before to all ranks and to the log, optimizer (norm, non-finite check, clip,
// update, weights on their way). Every rank takes the same path, so operations are begun in the same order
// everywhere; only rank 0 prints.
//
// A step lasts until the next one begins, or what comes between: validation, samples, a save, the end. Then its
// figures are reported at once.
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
#include "commfuse/choice.h"
#include "commfuse/die.h"
#include "commfuse/fuse.h"
#include "commfuse/printable.h"
#include "commfuse/stop.h"
#include "commfuse/timeline.h"
#include "data/accounts.h"
#include "data/durable.h"
#include "data/vocabulary.h"
#include "data/log.h"
#include "data/model_file.h"
#include "data/options.h"
#include "data/progress.h"
#include "data/resume.h"
#include "data/saver.h"
#include "data/tokens.h"
#include "layers/generate.h"
#include "layers/model.h"
#include "layers/optimizer.h"
#include "layers/peak.h"
#include "layers/state.h"

#ifndef VERSION
#define VERSION "unknown"
#endif
#ifndef OTHER_PROGRAM // the same for the other element type: the Makefile says
#define OTHER_PROGRAM "train_gpt"
#endif

enum { VAL_SEQUENCES = 80 };
enum { SAMPLE_TOKENS = 256, PATH_LENGTH = 4096, RANKS_MAX = 1 << 20 };
enum { EARLY_TIMEOUT_S = 60 };    // of ranks that meet to tell what is wrong with their options
enum { PATIENCE = 10 };           // times --timeout: how long ranks wait for one that reads or writes files
enum { STATUS_STOPPED = 75 };     // a signal has ended the run, which is saved: the same command goes on
enum { WORDS_MIN = 1024 };        // a larger vocabulary is not of bytes
enum { SAMPLE_STREAM = 1 << 20 }; // of the random numbers, apart from those of the tensors

// What every rank tells the others after a step; the saver's word first.
enum { TELL_SAVER, TELL_STOP, TELL_STEP, TELL_MS, TELL_EXPOSED, TELL_COMM, TELLS };

typedef struct taken_step { // not reported yet
    int64_t step;           // -1: none
    step_result result;
    double lr, ms; // this rank's clock
} taken_step;

typedef struct trainer {
    options o;
    int ranks, accumulation;
    cf_transport *transport;
    cf_context context;
    cf_mesh mesh;
    gpt model;
    zero_optimizer optimizer;
    tokens *train, *val;
    vocabulary *words;
    model_file *start;
    logfile *log;
    int32_t *inputs, *targets; // (T, B) of one micro-batch, the host's
    double *loss; // (2) sums of losses of this rank's tokens, in the device's memory; the second is of no use
    double peak;  // flop/s of all ranks, 0: unknown
    const char *peak_source;
    int trace_from, trace_to; // steps [from, to)
    bool untraced;            // the timeline could not be written
    checkpoint_store *store;  // rank 0's, with --out
    saver *checkpoints;       // with --out
    rank_state copy;          // of this rank's state, while it is being saved
    int64_t first, skipped;   // step that the run begins or goes on with; steps left out in a row
    bool watched;             // validation and samples before step `first` are done
    char run[RUN_NAME];       // rank 0's counts
    taken_step last;
    int stop;          // signal that has asked for the end, 0: none
    accounts time;     // rank 0's
    double lap_ms;     // when the time began that belongs to nothing yet, on the cf_now_ms clock
    double stepped_ms; // of all steps reported
    double *busy;      // (ranks) scratch of find_slowest
} trainer;

static bool root(const trainer *t) {
    return t->mesh.world_group.rank == 0;
}

// --- options → mesh, shape, data ---

static void meet_early(void) {
    cf_transport_create("auto", NULL, NULL, EARLY_TIMEOUT_S);
}

// Element types are fixed when layers are compiled. The program for the other one lies beside this one.
static void choose_program(options *o, char **argv) {
    if (strcmp(o->dtype, "auto") == 0) o->dtype = cf_dtype_name(REAL_DTYPE);
    if (strcmp(o->dtype, cf_dtype_name(REAL_DTYPE)) == 0) return;
    char path[PATH_LENGTH];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - sizeof OTHER_PROGRAM);
    path[length > 0 ? length : 0] = 0;
    char *name = strrchr(path, '/');
    name = name ? name + 1 : path;
    if (strcmp(name, OTHER_PROGRAM) == 0)
        cf_die_together("give it back the name that it was built with",
                        "--dtype %s needs the program %s, but that is this one, for %s", o->dtype, path,
                        cf_dtype_name(REAL_DTYPE));
    strcpy(name, OTHER_PROGRAM);
    execv(path, argv);
    cf_die_together("build it with: make, for GPUs make cuda", "--dtype %s needs the program %s: %s",
                    o->dtype, path, strerror(errno));
}

static void refuse_what_cannot_be(const options *o) {
    if (strcmp(o->overlap, "nowire") == 0 && *o->out)
        cf_die_together("leave --out away, or choose another --overlap",
                        "--overlap nowire computes wrong results by construction and saves nothing, but "
                        "--out %s is given",
                        o->out);
    if ((o->save_every > 0 || *o->export_to) && !*o->out)
        cf_die_together("name a directory with --out DIR", "--%s needs --out",
                        *o->export_to ? "export" : "save-every");
    if (*o->export_to && (o->dry_run || *o->init_from))
        cf_die_together("leave one of them away",
                        "--export writes what --out DIR holds; --%s asks for something else",
                        o->dry_run ? "dry-run" : "init-from");
    if (o->export_step > 0 && !*o->export_to)
        cf_die_together("name a file with --export FILE", "--export-step needs --export");
    if (o->check_wire && strcmp(o->overlap, "commfuse") != 0 && strcmp(o->overlap, "auto") != 0)
        cf_die_together("use --overlap auto or commfuse, or leave --check-wire away",
                        "--check-wire looks at exchanges between ranks; with --overlap %s there are none",
                        o->overlap);
    if (options_given(o, "overlap") && strcmp(o->overlap, "auto") == 0 &&
        (options_given(o, "route") || options_given(o, "slices")))
        cf_die_together("add --overlap commfuse or slice, or leave it away",
                        "--%s fixes what --overlap auto chooses for each operation",
                        options_given(o, "route") ? "route" : "slices");
    if (o->decay_steps > 0 && o->decay_steps < o->warmup)
        cf_die_together("raise --decay-steps, which counts from the first step, or lower --warmup",
                        "--decay-steps %lld ends the schedule before --warmup %lld has",
                        (long long)o->decay_steps, (long long)o->warmup);
    if (o->min_lr > o->lr)
        cf_die_together("lower --min-lr", "--min-lr %g is above --lr %g", o->min_lr, o->lr);
    if (!*o->train && !o->dry_run && !*o->export_to && o->steps > 0)
        cf_die_together("make token files with data/prepare.py, then: --train 'DIR/train_*.bin'",
                        "--train is missing");
}

static void gather(void *transport, const void *mine, void *all, int64_t bytes) {
    ((cf_transport *)transport)->gather((cf_transport *)transport, mine, all, bytes);
}

static void make_mesh(trainer *t) {
    options *o = &t->o;
    int world = t->transport->size, rank = t->transport->rank;
    if (o->tp == 0) o->tp = o->dp > 0 && world % o->dp == 0 ? world / o->dp : 1;
    if (o->dp == 0) o->dp = world % o->tp == 0 ? world / o->tp : 1;
    if (o->tp * o->dp > RANKS_MAX)
        cf_die_together("lower --tp or --dp", "--tp %lld x --dp %lld is more than %d ranks", (long long)o->tp,
                        (long long)o->dp, RANKS_MAX);
    if (o->dry_run && world == 1) world = (int)(o->tp * o->dp); // rank 0 of the mesh asked for
    cf_mesh_init(&t->mesh, world, rank, (int)o->tp, (int)o->dp);
    t->ranks = world;
    if (t->transport->size < world) return;
    t->transport->collectives = strcmp(o->overlap, "none") == 0 || strcmp(o->overlap, "slice") == 0;
    t->transport->bind(t->transport, &t->mesh.tp_group); // first what moves most, should queues run short
    t->transport->bind(t->transport, &t->mesh.dp_group);
    t->transport->bind(t->transport, &t->mesh.world_group);
}

static void make_context(trainer *t) {
    options *o = &t->o;
    // From three cores per rank on, one is worth giving to the thread that moves the bytes.
    int share = t->transport->local_cores / t->transport->local_size,
        spare = t->ranks > 1 && share >= 3 ? 1 : 0;
    if (o->threads == 0) o->threads = share > 1 ? share - spare : 1;
    cf_device_threads((int)o->threads);
    t->transport->configure(t->transport, (int)o->threads, o->timeout);
    // A dry run of a mesh that is not here is about hosts where a core is left to move bytes.
    const bool elsewhere = t->transport->size < t->ranks && o->threads > 1;
    cf_costs_agree(t->transport, (int)o->threads - elsewhere);
    t->context.transport = t->transport;
    t->context.stream = cf_stream_create();
    t->context.trace = cf_trace_create();
    t->context.step = -1;
    if (o->check_wire) t->context.check = cf_check_create();
}

static void make_batch(trainer *t) {
    options *o = &t->o;
    int64_t pass = o->micro_batch * o->dp;
    if (o->batch == 0) o->batch = pass;
    if (o->batch % pass != 0)
        cf_die_together(
            "batch = micro-batch x dp x accumulation steps: lower --micro-batch, or change --batch",
            "--batch %lld is not a multiple of --micro-batch %lld x --dp %lld = %lld", (long long)o->batch,
            (long long)o->micro_batch, (long long)o->dp, (long long)pass);
    t->accumulation = (int)(o->batch / pass);
}

static gpt_shape shape_of_file(trainer *t) {
    const char *fixed[] = {"model", "layers", "channels", "heads", "vocab"};
    t->start = model_file_open(t->o.init_from);
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
        if (options_given(&t->o, fixed[i]))
            cf_die_together("leave that option away", "--%s is set by the model file %s", fixed[i],
                            t->o.init_from);
    gpt_shape s = model_file_shape(t->start);
    if (!options_given(&t->o, "seq") && t->o.seq > s.maxT) t->o.seq = s.maxT;
    return s;
}

static gpt_shape shape_in(const manifest *m, const char *out) {
    gpt_shape s;
    memset(&s, 0, sizeof s);
    s.maxT = resume_number(m, "positions", 0), s.L = resume_number(m, "layers", 0);
    s.C = resume_number(m, "channels", 0), s.H = resume_number(m, "heads", 0);
    s.V = resume_number(m, "vocab", 0), s.Vp = resume_number(m, "padded-vocab", 0);
    model_shape_check(&s, "checkpoint in", out);
    return s;
}

static gpt_shape shape_to_export(options *o) {
    problem why = {"", ""};
    manifest *m = o->export_step > 0 ? checkpoint_manifest(o->out, o->export_step, &why)
                                     : checkpoint_latest(o->out, INT64_MAX, &why);
    if (!m)
        cf_die_together("ls it; checkpoints are its directories step_*", "no checkpoint to export in %s%s%s",
                        o->out, *why.what ? ": " : "", why.what);
    gpt_shape s = shape_in(m, o->out);
    o->export_step = m->step;
    o->seq = o->tp < s.maxT ? o->tp : s.maxT;
    o->micro_batch = 1; // nothing is computed: the least there can be
    manifest_free(m);
    return s;
}

// A checkpoint has all that a run goes on with: what is not given is as it is there.
static gpt_shape shape_of_options(trainer *t, const gpt_shape *saved) {
    options *o = &t->o;
    gpt_shape s = saved->L > 0 && !options_given(o, "model") ? *saved : params_named(o->model);
    if (o->layers > 0) s.L = o->layers;
    if (o->channels > 0) s.C = o->channels;
    if (o->heads > 0) s.H = o->heads;
    s.V = o->vocab > 0 ? o->vocab : saved->L > 0 ? saved->V : vocabulary_size(t->words);
    s.Vp = (s.V + VOCABULARY_PADDING - 1) / VOCABULARY_PADDING * VOCABULARY_PADDING;
    if (s.V == saved->V) s.Vp = saved->Vp;
    if (saved->L > 0 && !options_given(o, "seq") && o->seq > saved->maxT) o->seq = saved->maxT;
    s.maxT = saved->L > 0 ? saved->maxT : o->seq;
    return s;
}

// Does every rank see the file? Rank 0 says what shape the checkpoint in --out has; L = 0: there is none.
static bool all_can_read(const trainer *t, const char *file, gpt_shape *saved) {
    typedef struct sight {
        gpt_shape saved;
        int64_t readable;
    } sight;
    sight mine = {*saved, access(file, R_OK) == 0};
    sight *all = (sight *)calloc((size_t)t->transport->size, sizeof *all);
    if (!all) cf_die(NULL, "out of memory for what %d ranks see", t->transport->size);
    gather(t->transport, &mine, all, (int64_t)sizeof mine);
    for (int rank = 0; rank < t->transport->size; rank++) mine.readable &= all[rank].readable;
    *saved = all[0].saved;
    free(all);
    return mine.readable;
}

static gpt_shape shape_of_run(trainer *t) {
    const options *o = &t->o;
    gpt_shape saved;
    problem skipped;
    memset(&saved, 0, sizeof saved);
    manifest *m = t->transport->rank == 0 && *o->out ? checkpoint_latest(o->out, INT64_MAX, &skipped) : NULL;
    if (m) saved = shape_in(m, o->out);
    manifest_free(m);
    const bool readable = all_can_read(t, o->init_from, &saved);
    return *o->init_from && (readable || saved.L == 0) ? shape_of_file(t) : shape_of_options(t, &saved);
}

static overlap overlap_of(const options *o) {
    overlap how;
    memset(&how, 0, sizeof how);
    if (!cf_mode_of(o->overlap, &how.mode) || !cf_route_of(o->route, &how.route))
        cf_die_together("a bug: options.c and schedule.c have different names", "--overlap %s --route %s",
                        o->overlap, o->route);
    how.slices = o->slices > 0 ? (int)o->slices : how.mode == CF_MODE_SLICE ? 4 : 1;
    if (how.mode == CF_MODE_NONE) how.slices = 1;
    return how;
}

static void read_weights(void *file, int tensor, int64_t layer, int64_t first, int64_t count, float *out) {
    model_file_read((const model_file *)file, tensor, layer, first, count, out);
}

static void make_model(trainer *t) {
    gpt_shape shape = *t->o.export_to ? shape_to_export(&t->o) : shape_of_run(t);
    options *o = &t->o; // from here on the options say what is run, wherever it came from
    o->layers = shape.L, o->channels = shape.C, o->heads = shape.H, o->vocab = shape.V;
    o->slices = overlap_of(o).slices;
    if (t->o.dry_run) cf_device_plan_only(true);
    parallel_strategy strategy = strcmp(o->strategy, "up") == 0 ? STRATEGY_UP : STRATEGY_TPSP;
    gpt_create(&t->model, &t->context, &t->mesh, shape, strategy, o->seq, o->micro_batch, overlap_of(o),
               o->recompute != 0);
    optimizer_create(&t->optimizer, &t->model, overlap_of(o));
    if (t->o.dry_run) return;
    t->loss = (double *)cf_alloc(2 * (int64_t)sizeof(double), "tokens");
    t->inputs = (int32_t *)calloc((size_t)(t->o.seq * t->o.micro_batch), sizeof *t->inputs);
    t->targets = (int32_t *)calloc((size_t)(t->o.seq * t->o.micro_batch), sizeof *t->targets);
    t->busy = (double *)calloc((size_t)t->ranks, sizeof *t->busy);
    if (!t->inputs || !t->targets || !t->busy) cf_die(NULL, "out of memory for the tokens of a micro-batch");
}

static tokens *open_tokens(trainer *t, const char *option, const char *pattern) {
    if (!*pattern) return NULL;
    tokens *data = tokens_open(pattern, t->o.seq);
    if (t->o.verify_data && root(t))
        printf("verify    --%s: all %.3f GB are read and hashed\n", option,
               2e-9 * (double)tokens_count(data));
    fflush(stdout);
    if (t->o.verify_data) tokens_verify(data);
    tokens_check(data, t->model.params.shape.V);
    return data;
}

static void open_data(trainer *t) {
    const options *o = &t->o;
    t->train = open_tokens(t, "train", o->train);
    t->val = open_tokens(t, "val", o->val);
}

// Said before any work is done, not after it.
static void check_output(trainer *t) {
    const char *out = t->o.out, *trace = t->o.trace, *hint = "choose another --out DIR that can be written";
    if (!root(t)) return;
    problem why;
    if (*out && !(t->store = checkpoint_store_open(out, &why)))
        cf_die(*why.hint ? why.hint : hint, "--out: %s", why.what);
    if (*out && access(out, W_OK) != 0) cf_die(hint, "--out %s cannot be written: %s", out, strerror(errno));
    if (!*trace) return;
    durable_file file;
    if (!durable_create(&file, trace, -1, &why))
        cf_die("choose another --trace FILE", "--trace: %s", why.what);
    durable_abandon(&file); // a run that goes on behind its steps leaves it as it is
}

// The parser has seen to the form A:B, A < B.
static void set_trace_steps(trainer *t) {
    sscanf(t->o.trace_steps, "%d:%d", &t->trace_from, &t->trace_to);
    if (*t->o.trace && t->trace_from >= t->o.steps)
        cf_die_together(
            "choose steps that the run takes with --trace-steps A:B, counted from 0, or raise --steps",
            "--trace-steps %s: the run ends after %lld steps and would leave --trace %s empty",
            t->o.trace_steps, (long long)t->o.steps, t->o.trace);
}

// --- where the run begins ---

static const double *exchange(void *argument, const double *values, int count) {
    return figures_exchange((rank_figures *)argument, values, count);
}

static rank_exchange all_ranks(trainer *t) {
    rank_exchange all = {t->mesh.world_group.rank, t->ranks, REPORT, exchange, &t->optimizer.figures};
    return all;
}

// Every rank is here, and its device has nothing left to do.
static void meet(trainer *t) {
    cf_barrier(&t->context, &t->mesh.world_group);
    cf_stream_sync(t->context.stream);
}

static double data_print(const tokens *data) {
    return !data ? 0 : (double)(tokens_hash(data) ? tokens_hash(data) : tokens_fingerprint(data));
}

// Rank 0's lock is a file of this moment: whoever reads the same there has the same directory.
static void check_shared_output(trainer *t) {
    if (!*t->o.out) return;
    meet(t); // rank 0 has it now
    const double mine = (double)checkpoint_store_mark(t->o.out);
    const double *told = figures_exchange(&t->optimizer.figures, &mine, 1);
    for (int rank = 1; rank < t->ranks; rank++)
        if (told[rank * REPORT] == 0 || told[rank * REPORT] != told[0])
            cf_die_together(
                "give --out a directory of a file system that all hosts share, where all may write",
                "rank %d cannot save to --out %s: it %s", rank, t->o.out,
                told[rank * REPORT] == 0 ? "may not write there, or has no such directory"
                                         : "has another directory of that name than rank 0");
}

// Each rank has opened what lies on its own host. Ranks of a replica share each sample and the weights, replicas share out
// the epoch: on other files the run would go on, and learn nonsense.
static void compare_data(trainer *t) {
    static const char *const what[] = {"samples of --train",      "the fingerprint of --train",
                                       "samples of --val",        "the fingerprint of --val",
                                       "words of the vocabulary", "the fingerprint of --init-from"};
    const tokens *train = t->train, *val = t->val;
    const double facts[] = {train ? (double)tokens_samples(train) : 0,
                            data_print(train),
                            val ? (double)tokens_samples(val) : 0,
                            data_print(val),
                            (double)t->model.params.shape.V,
                            t->start ? (double)model_file_fingerprint(t->start, t->o.verify_data) : 0};
    const int count = (int)(sizeof facts / sizeof *facts);
    const double *told = figures_exchange(&t->optimizer.figures, facts, count);
    for (int rank = 1; rank < t->ranks; rank++)
        for (int i = 0; i < count; i++)
            if (told[rank * REPORT + i] != told[i])
                cf_die_together("give every host the same token and model files; compare: ls -l, sha256sum",
                                "rank %d has other data than rank 0: %s: %.0f, on rank 0 %.0f", rank, what[i],
                                told[rank * REPORT + i], told[i]);
}

// Reading and writing files takes one rank longer than another.
static void be_patient(trainer *t, bool patient) {
    t->transport->configure(t->transport, (int)t->o.threads, (patient ? PATIENCE : 1) * t->o.timeout);
}

static run_facts facts_of(const trainer *t, bool watched) {
    run_facts facts = {&t->model.params.shape, t->train, VERSION, t->run, t->skipped, watched};
    return facts;
}

typedef struct source {
    const saved_state *state;
    const char *out;
    int64_t step;
} source;

static void read_state(void *argument, state_kind kind, int tensor, int64_t layer, int64_t first,
                       int64_t count, precise *out) {
    const source *from = (const source *)argument;
    problem why;
    if (!saved_state_read(from->state, kind, tensor, layer, first, count, out, &why))
        cf_die(why.hint, "the checkpoint of step %lld in %s is not that of this model: %s",
               (long long)from->step, from->out, why.what);
}

static void take_state(trainer *t, const manifest *m) {
    problem why;
    saved_state *state = saved_state_open(t->o.out, m, &why);
    if (!state) cf_die(why.hint, "%s", why.what);
    source from = {state, t->o.out, m->step};
    state_give(&t->optimizer, read_state, &from);
    saved_state_close(state);
}

static void begin_anew(trainer *t) {
    resume_name(NULL, t->run);
    if (*t->o.init_from && !t->start)
        cf_die_together("bring it back, or choose another --out",
                        "--init-from %s is not to be read on every host", t->o.init_from);
    if (t->start)
        params_read(&t->model.params, read_weights, t->start, t->context.stream);
    else
        params_init(&t->model.params, (uint64_t)t->o.seed, t->context.stream);
    optimizer_start(&t->optimizer);
}

static void go_on(trainer *t, const manifest *m) {
    const options *o = &t->o;
    run_facts facts = facts_of(t, false);
    if (strcmp(o->resume, "no") == 0)
        cf_die_together("choose another --out, or leave --resume away to go on",
                        "--resume no, but %s holds a checkpoint of step %lld", o->out, (long long)m->step);
    resume_compare(o, &facts, m);
    if (m->step > o->steps)
        cf_die_together("raise --steps", "the run in %s has taken %lld steps already, more than --steps %lld",
                        o->out, (long long)m->step, (long long)o->steps);
    take_state(t, m);
    t->first = m->step;
    t->skipped = resume_number(m, "skipped", 0);
    t->watched = resume_number(m, "watched", 0) == 1;
    resume_name(m, t->run);
    if (root(t))
        printf("resume    from step %lld in %s, saved by %lld ranks (%s, tp %s x dp %s, version %s)\n",
               (long long)m->step, o->out, (long long)m->ranks, manifest_value(m, "strategy"),
               manifest_value(m, "tp"), manifest_value(m, "dp"), manifest_value(m, "version"));
}

// They must not pass for checkpoints when older ones are removed.
static void set_aside(trainer *t, const manifest *sound) {
    problem why;
    if (!checkpoint_set_aside(t->store, sound ? sound->step : -1, &why)) cf_die(why.hint, "%s", why.what);
}

// The newest sound checkpoint, or else the beginning.
static void load_state(trainer *t) {
    rank_exchange all = all_ranks(t);
    bool passed_over = false;
    manifest *m = *t->o.out ? resume_find(&all, t->o.out, INT64_MAX, &passed_over) : NULL;
    if (!m && passed_over) resume_nothing_sound(t->o.out, t->o.force);
    if (m)
        go_on(t, m);
    else
        begin_anew(t);
    if (passed_over) set_aside(t, m);
    manifest_free(m);
}

// --- banner and dry run ---

// A run that goes on keeps the first line of its log, and says in another one with what it does.
static void log_config(trainer *t) {
    int rows = 0;
    const option_row *table = options_table(&rows);
    char host[64] = "unknown", text[PATH_LENGTH];
    gethostname(host, sizeof host - 1);
    bool goes_on = t->first > 0 && !log_empty(t->log);
    log_begin(t->log, goes_on ? "resume" : "config");
    if (goes_on) log_int(t->log, "step", t->first);
    log_text(t->log, "run", t->run);
    log_text(t->log, "version", VERSION);
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

// OpenMP's threads keep their cores while they wait, unless they are told not to before the program starts: where they are
// too many, each wait lasts as long as others' time slices.
static void tell_of_crowd(const trainer *t) {
    int cores = t->transport->local_cores, ranks = t->transport->local_size, threads = (int)t->o.threads;
    if (ranks * threads > cores && threads > 1 && !getenv("OMP_WAIT_POLICY"))
        printf("cores     %d for %d ranks of %d threads: lower --threads, or set OMP_WAIT_POLICY=passive: "
               "threads that "
               "wait for each other hold up those that work\n",
               cores, ranks, threads);
    else if (ranks * (threads + 1) > cores)
        printf(
            "cores     %d for %d ranks: the threads that move the bytes share them with those that compute\n",
            cores, ranks);
}

// A model of words takes bytes without complaint, and its losses mean nothing.
static void tell_of_bytes(const trainer *t, const tokens *data, const char *option, const char *files) {
    if (data && t->model.params.shape.V > WORDS_MIN && tokens_look_like_bytes(data))
        printf("note      --%s %s: these tokens seem to be bytes, the model has %lld words; data/prepare.py "
               "--encoding gpt2 makes GPT-2's tokens\n",
               option, files, (long long)t->model.params.shape.V);
}

static void banner(const trainer *t) {
    const options *o = &t->o;
    const gpt_shape *s = &t->model.params.shape;
    overlap how = overlap_of(o);
    printf("commfuse %s: GPT of %lld layers, %lld channels, %lld heads, %lld tokens of vocabulary: %.2f M "
           "parameters\n",
           VERSION, (long long)s->L, (long long)s->C, (long long)s->H, (long long)s->V,
           (double)params_count(s) * 1e-6);
    printf("device    %s, %s; %lld thread%s of the host a rank\n", cf_device_name(), o->dtype,
           (long long)o->threads, o->threads == 1 ? "" : "s");
    printf("mesh      %d ranks = tp %d x dp %d, %s over %s\n", t->ranks, t->mesh.tp, t->mesh.dp, o->strategy,
           t->transport->name);
    const bool all_here = t->transport->size == t->ranks; // a dry run need not be
    if (t->ranks > 1 && all_here && strcmp(cf_device_name(), "CPU") == 0) tell_of_crowd(t);
    if (how.mode == CF_MODE_AUTO)
        printf("overlap   auto: --dry-run prints what is chosen for each operation\n");
    else
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
    options_print_repeated(o, stdout);
    tell_of_bytes(t, t->train, "train", o->train);
    tell_of_bytes(t, t->val, "val", o->val);
    if (t->peak > 0)
        printf("peak      %.3f TFLOP/s over all ranks (%s)\n", t->peak * 1e-12, t->peak_source);
    else if (t->peak_source)
        printf("peak      unknown, no MFU (%s)\n", t->peak_source);
    else
        printf("peak      not measured by --dry-run\n");
    printf("memory    %.1f MiB per rank\n", (double)cf_memory_bytes() / 1048576);
    if (how.mode == CF_MODE_NOWIRE)
        printf("NOWIRE    transfers are left out: results are wrong by construction, this run only measures "
               "time\n");
    fflush(stdout);
}

typedef struct tally { // what rank 0 posts in a step of one micro-batch
    int64_t exchanges, units, collectives;
} tally;

static void count_operation(void *argument, const char *place, const cf_fuse *fuse, int64_t times) {
    (void)place;
    tally *sum = (tally *)argument;
    const cf_schedule *s = cf_fuse_schedule(fuse);
    for (int i = 0; i < s->count; i++) {
        sum->exchanges += times * (s->step[i].kind == CF_EXCHANGE);
        sum->units += times * (s->step[i].kind == CF_EXCHANGE && !s->step[i].joined);
        sum->collectives += times * (s->step[i].kind == CF_COLLECTIVE);
    }
}

static void print_operation(void *argument, const char *place, const cf_fuse *fuse, int64_t times) {
    (void)argument, (void)times;
    const cf_fuse_plan *plan = cf_fuse_get_plan(fuse);
    if (strcmp(plan->group->name, "self") == 0) return; // this rank alone: nothing ever travels
    char *text = cf_schedule_print(cf_fuse_schedule(fuse));
    printf("\n%s (%s, over %s, %.2f MiB per shard)\n%s", plan->name, place, plan->group->name,
           (double)(plan->capacity * cf_dtype_size(plan->dtype)) / 1048576, text);
    free(text);
}

static void dry_run(trainer *t) {
    if (!root(t)) return;
    banner(t);
    printf("\n");
    cf_memory_report(stdout);
    if (strcmp(cf_device_name(), "CPU") != 0)
        printf("more is taken when the run begins: for matrix products 32 MiB a stream, for attention's "
               "backward 2 "
               "bytes for each query, key and head of a micro-batch at most, for exchanges by ipc 32 MiB for "
               "each "
               "other member of a group, for connections by nccl what it says\n");
    printf("\n");
    gpt_explain(&t->model, stdout);
    tally sum = {0, 0, 0};
    gpt_operations(&t->model, count_operation, &sum);
    count_operation(&sum, "", t->optimizer.figures.gather, 1);
    printf("\nA step of one micro-batch: %lld exchanges of rank 0 in %lld units, %lld native collectives\n",
           (long long)sum.exchanges, (long long)sum.units, (long long)sum.collectives);
    printf("\nSchedules of rank 0; steps marked ' are taken when the operation is finished\n");
    gpt_operations(&t->model, print_operation, NULL);
    print_operation(NULL, "figures of all ranks", t->optimizer.figures.gather, 1);
}

// --- one step ---

static double learning_rate(const options *o, int64_t step) {
    if (step < o->warmup) return o->lr * (double)(step + 1) / (double)o->warmup;
    if (strcmp(o->schedule, "constant") == 0) return o->lr;
    int64_t end = o->decay_steps > 0 ? o->decay_steps : o->steps;
    if (step >= end) return o->min_lr;
    double span = (double)(end - o->warmup), done = (double)(step - o->warmup) / (span > 1 ? span : 1);
    if (strcmp(o->schedule, "linear") == 0) return o->lr + (o->min_lr - o->lr) * done;
    if (strcmp(o->schedule, "cosine") == 0)
        return o->min_lr + (o->lr - o->min_lr) * 0.5 * (1 + cos(M_PI * done));
    double hold = 0.8 * (double)end; // wsd: hold, then fall by 1 − sqrt over the last fifth
    if ((double)step < hold) return o->lr;
    return o->min_lr + (o->lr - o->min_lr) * (1 - sqrt(((double)step - hold) / ((double)end - hold)));
}

// Fill inputs and targets with this replica's B of the sequences that start at number `first` of an order: training order
// (shuffled) or as they stand in the file (validation).
static void load_sequences(trainer *t, tokens *data, bool shuffled, int64_t first, int64_t B) {
    for (int64_t b = 0; b < B; b++) {
        int64_t sample = first + t->mesh.dp_group.rank * B + b;
        sample =
            shuffled ? tokens_shuffled(data, (uint64_t)t->o.seed, sample) : sample % tokens_samples(data);
        tokens_read(data, sample, t->model.params.shape.V, b, B, t->inputs, t->targets);
    }
}

static bool due(int64_t every, int64_t step) {
    return every > 0 && step % every == 0;
}

// Does a validation, a sample, a save or the end come before the next step?
static bool something_follows(const trainer *t, int64_t step) {
    const options *o = &t->o;
    return due(o->val_every, step + 1) || due(o->sample_every, step + 1) || due(o->save_every, step + 1) ||
           t->stop || step + 1 == o->steps;
}

// The time since the last call.
static double lap(trainer *t) {
    double before = t->lap_ms;
    t->lap_ms = cf_now_ms();
    return t->lap_ms - before;
}

static void end_step(trainer *t) {
    cf_trace_step(t->context.trace, t->context.step, t->context.stream);
    t->last.ms = lap(t);
}

// What a step took, as all ranks have told.
typedef struct step_times {
    double ms;                  // by rank 0's clock: of all steps, it adds up to the time of the run
    double exposed_ms, comm_ms; // the longest
    double exposed_mean_ms;     // over the ranks
    double lag_ms;              // how much longer the slowest rank computes than the median
    int slowest;                // rank
} step_times;

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Time in which a rank does not wait for others tells which one the others wait for.
static void find_slowest(step_times *times, const double *told, double *busy, int ranks) {
    double most = -1;
    for (int rank = 0; rank < ranks; rank++) {
        busy[rank] = told[rank * REPORT + TELL_MS] - told[rank * REPORT + TELL_EXPOSED];
        if (busy[rank] > most) most = busy[rank], times->slowest = rank;
    }
    qsort(busy, (size_t)ranks, sizeof *busy, ascending);
    times->lag_ms = most - busy[(ranks - 1) / 2];
}

// A rank that has left out a step sends what looks like another step's: nothing hangs, and all is wrong.
static void check_steps(const trainer *t, const double *told, int64_t step) {
    for (int rank = 0; rank < t->ranks; rank++)
        if ((int64_t)told[rank * REPORT + TELL_STEP] != step)
            cf_die("internal error, or a bug in a library: please report it; the checkpoints are "
                   "sound",
                   "the ranks are out of step: rank %d is in step %.0f, this rank in step %lld", rank,
                   told[rank * REPORT + TELL_STEP], (long long)step);
}

static void fill_figures(trainer *t, double *mine) {
    const cf_trace_figures figures = cf_trace_last(t->context.trace);
    mine[TELL_SAVER] = t->checkpoints ? saver_word(t->checkpoints) : 0;
    mine[TELL_STOP] = (double)cf_stop_asked();
    mine[TELL_STEP] = (double)t->last.step;
    mine[TELL_MS] = t->last.ms;
    mine[TELL_EXPOSED] = figures.exposed_ms;
    mine[TELL_COMM] = figures.comm_ms;
}

static step_times read_figures(trainer *t, const double *told) {
    step_times times;
    memset(&times, 0, sizeof times);
    check_steps(t, told, t->last.step);
    times.ms = told[TELL_MS];
    for (int rank = 0; rank < t->ranks; rank++) {
        const double *r = told + rank * REPORT;
        times.exposed_ms = fmax(times.exposed_ms, r[TELL_EXPOSED]);
        times.exposed_mean_ms += r[TELL_EXPOSED] / t->ranks;
        times.comm_ms = fmax(times.comm_ms, r[TELL_COMM]);
        if (r[TELL_STOP] > 0) t->stop = (int)r[TELL_STOP];
    }
    find_slowest(&times, told, t->busy, t->ranks);
    if (t->checkpoints) saver_look(t->checkpoints, told); // it may exchange more, so it comes last
    return times;
}

static void report_skip(trainer *t, int64_t step, const step_result *r) {
    if (root(t)) {
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
    char line[256], share[32] = "n/a", eta[32];
    const long long left = (long long)eta_s, minutes = left / 60;
    if (t->peak > 0) snprintf(share, sizeof share, "%.1f %%", 100 * mfu);
    snprintf(eta, sizeof eta, "%lld:%02lld", minutes, left % 60);
    if (minutes >= 60) snprintf(eta, sizeof eta, "%lld:%02lld:%02lld", minutes / 60, minutes % 60, left % 60);
    snprintf(line, sizeof line,
             "step %5lld/%lld\tloss %.4f\tnorm %.3f\tlr %.2e\t%.1f ms\t%.0f tok/s\tMFU %s\texposed %.2f "
             "ms\tETA %s",
             (long long)step + 1, (long long)o->steps, r->loss, r->grad_norm, lr, times->ms, tokens_per_s,
             share, times->exposed_ms, eta);
    progress_show(line, step + 1 == o->steps);
}

static void report_step(trainer *t, const step_times *times) {
    const options *o = &t->o;
    const step_result *r = &t->last.result;
    const int64_t step = t->last.step;
    t->stepped_ms += times->ms;
    double left = (double)(o->steps - step - 1) / (double)(step + 1 - t->first), lr = t->last.lr;
    double tokens_per_s = (double)(o->batch * o->seq) / (times->ms * 1e-3);
    double mfu = t->peak > 0 ? tokens_per_s * params_flops(&t->model.params.shape, o->seq) / t->peak : NAN;
    if (root(t)) show_step(t, step, r, lr, times, tokens_per_s, mfu, t->stepped_ms * left * 1e-3);
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
    log_real(t->log, "exposed_mean_ms", times->exposed_mean_ms);
    log_int(t->log, "slowest_rank", times->slowest);
    log_real(t->log, "lag_ms", times->lag_ms);
    log_end(t->log);
    if (r->skipped) report_skip(t, step, r);
}

// figures: of all ranks, about the last step.
static void report_last(trainer *t, const double *figures) {
    if (t->last.step < 0) return;
    step_times times = read_figures(t, figures);
    report_step(t, &times);
    accounts_step(&t->time, t->last.step, times.ms);
    if (root(t)) accounts_store(&t->time, false);
    t->last.step = -1;
}

static void train_step(trainer *t, int64_t step) {
    const options *o = &t->o;
    double batch_tokens = (double)(o->batch * o->seq), lr = learning_rate(o, step);
    cf_zero(t->loss, (int64_t)sizeof *t->loss, t->context.stream);
    for (int micro = 0; micro < t->accumulation; micro++) {
        load_sequences(t, t->train, true, step * o->batch + micro * o->micro_batch * t->mesh.dp,
                       o->micro_batch);
        gpt_begin_forward(&t->model, t->inputs, t->targets, o->seq, o->micro_batch);
        optimizer_finish_update(&t->optimizer);
        gpt_forward(&t->model, 1 / batch_tokens, t->loss);
        gpt_backward(&t->model, micro == 0, micro == t->accumulation - 1);
    }
    double mine[TELLS];
    fill_figures(t, mine);
    const double *figures = optimizer_reduce(&t->optimizer, t->loss, mine, TELLS);
    adamw a;
    memset(&a, 0, sizeof a);
    a.lr = lr, a.beta1 = o->beta1, a.beta2 = o->beta2, a.eps = o->eps, a.weight_decay = o->weight_decay;
    a.step = step + 1;
    report_last(t, figures);
    t->last.result =
        optimizer_begin_update(&t->optimizer, a, o->clip, o->batch * o->seq, t->skipped < o->skip_nonfinite);
    t->skipped = t->last.result.skipped ? t->skipped + 1 : 0;
    t->last.step = step, t->last.lr = lr;
}

// --- validation, samples, saving ---

// What was done since the last lap counts as watching.
static double watched(trainer *t) {
    double ms = lap(t);
    accounts_add(&t->time, TIME_WATCH, ms);
    return ms;
}

// The same sequences whatever the batch and the mesh. Where fewer are left than a micro-batch of each replica, passes are
// smaller; in the last some replicas repeat sequences, which count for nothing.
static void validate(trainer *t, int64_t step) {
    const options *o = &t->o;
    const int64_t dp = t->mesh.dp,
                  asked = o->val_batches > 0 ? o->val_batches * o->batch : (int64_t)VAL_SEQUENCES;
    const int64_t all = asked < tokens_samples(t->val) ? asked : tokens_samples(t->val);
    double sum = 0;
    cf_zero(t->loss, (int64_t)sizeof *t->loss, t->context.stream);
    for (int64_t done = 0, B; done < all; done += B * dp) {
        B = (all - done) / dp;
        B = B < 1 ? 1 : B > o->micro_batch ? o->micro_batch : B;
        load_sequences(t, t->val, false, done, B);
        bool counts = done + t->mesh.dp_group.rank * B < all;
        gpt_begin_forward(&t->model, t->inputs, t->targets, o->seq, B);
        gpt_forward(&t->model, 0, t->loss + (counts ? 0 : 1));
    }
    cf_copy(&sum, t->loss, (int64_t)sizeof sum, t->context.stream);
    cf_stream_sync(t->context.stream);
    double loss = figures_sum(&t->optimizer.figures, sum) / (double)(all * o->seq), ms = watched(t);
    if (root(t)) {
        progress_break();
        printf("step %5lld  validation loss %.4f  %lld sequences\n", (long long)step, loss, (long long)all);
        fflush(stdout);
    }
    log_begin(t->log, "val");
    log_int(t->log, "step", step);
    log_real(t->log, "loss", loss);
    log_real(t->log, "ms", ms);
    log_int(t->log, "sequences", all);
    log_end(t->log);
}

static void tell_of_missing_words(int64_t V) {
    static bool told;
    if (!told)
        fprintf(stderr,
                "note: samples are no text: there is no tokenizer.bin for the %lld tokens beside --train, "
                "--val or "
                "--init-from (data/prepare.py writes one)\n",
                (long long)V);
    told = true;
}

// Every replica writes the same text: the others would only wait for the first.
static void sample(trainer *t, int64_t step) {
    static char text[SAMPLE_TOKENS * 256];
    int32_t token[SAMPLE_TOKENS];
    if (t->o.seq < 2) return;
    int64_t V = t->model.params.shape.V, end_of_text = vocabulary_end_of_text(t->words);
    int32_t first = end_of_text >= 0 && end_of_text < V ? (int32_t)end_of_text : V > '\n' ? '\n' : 0;
    gpt_generate(&t->model, first, (uint64_t)t->o.seed, SAMPLE_STREAM + (uint64_t)step, t->o.seq, t->inputs,
                 token, SAMPLE_TOKENS);
    double ms = watched(t);
    if (!root(t)) return;
    if (!t->words && V > vocabulary_size(NULL)) tell_of_missing_words(V);
    char *end = text;
    for (int i = 0; i < SAMPLE_TOKENS; i++) end += vocabulary_bytes(t->words, token[i], end);
    *end = 0;
    for (char *at = text; at < end; at++)
        if (!*at) *at = ' '; // bytes of a model without words
    cf_printable(text);
    progress_break();
    printf("step %5lld  sample\n%s\n---\n", (long long)step, text);
    fflush(stdout);
    log_begin(t->log, "sample");
    log_int(t->log, "step", step);
    log_text(t->log, "text", text);
    log_real(t->log, "ms", ms);
    log_end(t->log);
}

static void append_values(void *writer, const float *values, int64_t count) {
    model_writer_append((model_writer *)writer, values, count);
}

static model_writer *open_writer(const trainer *t, const char *path) {
    return model_writer_open(path, &t->model.params.shape, REAL_DTYPE == CF_BF16 ? 5 : 3);
}

// The first replica collects, its first rank writes, the others wait, longer than for anything else.
static void write_model(trainer *t, int64_t step, const char *path) {
    optimizer_settle(&t->optimizer);
    be_patient(t, true);
    model_writer *writer = root(t) ? open_writer(t, path) : NULL;
    if (t->mesh.dp_group.rank == 0) gpt_collect(&t->model, append_values, writer);
    if (writer) model_writer_commit(writer);
    meet(t);
    be_patient(t, false);
    if (!writer) return;
    progress_break();
    printf("step %5lld  saved %s\n", (long long)step, path);
    fflush(stdout);
}

static void copy_state(trainer *t) {
    if (!t->copy.run) state_create(&t->copy, &t->optimizer);
    optimizer_finish_update(&t->optimizer);
    state_take(&t->copy, &t->optimizer);
}

// The run stands while the state is copied, and as long as an earlier checkpoint is still being written.
static bool save(trainer *t, int64_t step, bool watched) {
    run_facts facts = facts_of(t, watched);
    be_patient(t, true);
    bool begun = saver_begin(t->checkpoints, step, resume_describe(&t->o, &facts));
    if (begun) {
        copy_state(t);
        saver_write(t->checkpoints, &t->copy);
    }
    be_patient(t, false);
    accounts_add(&t->time, TIME_SAVE, lap(t));
    return begun;
}

static bool wait_until_saved(trainer *t) {
    be_patient(t, true);
    bool saved = saver_finish(t->checkpoints);
    be_patient(t, false);
    accounts_add(&t->time, TIME_SAVE, lap(t));
    return saved;
}

// --- trace ---

// On one host the clocks are one; otherwise zero is the moment every rank left a barrier.
static void start_trace(trainer *t) {
    meet(t);
    double zero = cf_now_ms();
    if (t->transport->local_size == t->ranks) figures_maximum(&t->optimizer.figures, &zero, 1);
    cf_timeline_start(&t->context, zero);
}

static void write_trace(trainer *t, int64_t last) {
    size_t size = 0;
    problem why;
    char *text = cf_timeline_end(&t->context, &t->mesh.world_group, overlap_of(&t->o).mode, &size);
    if (!root(t)) return;
    t->untraced = !durable_replace(t->o.trace, text, (int64_t)size, false, &why);
    free(text);
    progress_break();
    if (t->untraced)
        fprintf(stderr, "warning: %s; the run goes on\n", why.what);
    else
        printf("trace of steps %d to %lld: %s (open it in https://ui.perfetto.dev)\n", t->trace_from,
               (long long)last, t->o.trace);
    fflush(stdout);
}

// --- the run ---

static double sum(void *all, double mine) {
    return figures_sum((rank_figures *)all, mine);
}

static void measure_peak(trainer *t) {
    if (t->o.peak_tflops > 0) {
        t->peak = t->o.peak_tflops * 1e12 * t->ranks;
        t->peak_source = "--peak-tflops";
        return;
    }
    double cores = (double)t->transport->local_cores / t->transport->local_size;
    t->peak = peak_flops(&t->peak_source, cores, sum, &t->optimizer.figures, t->context.stream);
}

static void watch(trainer *t, int64_t step, bool last) {
    const options *o = &t->o;
    if (t->val && o->val_every > 0 && (due(o->val_every, step) || last)) validate(t, step);
    if (o->sample_every > 0 && (step > 0 || last) && (due(o->sample_every, step) || last)) sample(t, step);
}

// What comes between steps: before step `step`, unless a checkpoint has been made behind it already.
static void between_steps(trainer *t, int64_t step) {
    bool resumed = step == t->first && step > 0;
    if (!resumed || !t->watched) watch(t, step, false);
    if (t->checkpoints && step > 0 && !resumed && due(t->o.save_every, step)) save(t, step, true);
    if (resumed && step > t->trace_from && step < t->trace_to) t->trace_from = (int)step;
    if (*t->o.trace && step == t->trace_from) start_trace(t);
}

// A step begins where the one before ends, or behind what has come between, on all ranks.
static void begin_step(trainer *t) {
    if (t->last.step >= 0) {
        end_step(t);
        return;
    }
    meet(t);
    watched(t);
    cf_trace_step(t->context.trace, t->context.step, t->context.stream);
}

// What comes next is not the step's time, but what is left of its update is. A run that ends, or is ended, before the last
// of the steps to be traced has a timeline of the first.
static void close_step(trainer *t, int64_t step, bool traced) {
    if (something_follows(t, step)) optimizer_finish_update(&t->optimizer);
    cf_stream_sync(t->context.stream);
    end_step(t);
    double mine[TELLS];
    fill_figures(t, mine);
    report_last(t, figures_exchange(&t->optimizer.figures, mine, TELLS));
    if (traced && (step + 1 == t->trace_to || step + 1 == t->o.steps || t->stop)) write_trace(t, step);
}

// Takes the steps that are left. Returns the one that the run has come to, before --steps if a signal has asked for
// the end.
static int64_t train(trainer *t) {
    const options *o = &t->o;
    t->last.step = -1;
    for (int64_t step = t->first; step < o->steps; step++) {
        t->context.step = (int)step;
        between_steps(t, step);
        begin_step(t);
        train_step(t, step);
        const bool traced = *o->trace && step >= t->trace_from && step < t->trace_to;
        const bool turns = *o->trace && (step + 1 == t->trace_from || step + 1 == t->trace_to);
        if (turns || something_follows(t, step)) close_step(t, step, traced);
        if (t->stop && step + 1 < o->steps) return step + 1;
    }
    return o->steps;
}

static void log_the_end(trainer *t, int64_t step, double begin_ms, bool stopped) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    log_begin(t->log, "end");
    log_int(t->log, "steps", step);
    if (stopped) log_text(t->log, "stopped_by", strsignal(t->stop));
    log_real(t->log, "total_s", (cf_now_ms() - begin_ms) * 1e-3);
    log_real(t->log, "peak_rss_mib", (double)usage.ru_maxrss / 1024);
    log_int(t->log, "bytes_sent_rank0", t->transport->bytes_sent(t->transport));
    accounts_log(&t->time, t->log);
    log_end(t->log);
}

// The whole run is done: what it has come to, and its model.
static bool finish(trainer *t) {
    int64_t steps = t->o.steps;
    char path[PATH_LENGTH];
    bool done_before = t->first == steps && t->watched;
    if (!done_before) watch(t, steps, true);
    if (!t->checkpoints) return true;
    bool saved = t->first == steps || (save(t, steps, true) && wait_until_saved(t));
    if (snprintf(path, sizeof path, "%s/model.bin", t->o.out) >= (int)sizeof path)
        cf_die_together("choose a shorter --out DIR", "--out is too long");
    write_model(t, steps, path);
    accounts_add(&t->time, TIME_SAVE, lap(t));
    return saved;
}

static bool stop_early(trainer *t, int64_t step) {
    if (!t->checkpoints)
        cf_die_together("with --out DIR a signal saves the run, and the same command goes on",
                        "%s ends the run after %lld of %lld steps; nothing was saved", strsignal(t->stop),
                        (long long)step, (long long)t->o.steps);
    return save(t, step, false) && wait_until_saved(t);
}

static int run(trainer *t) {
    double start_ms = lap(t), begin_ms = t->lap_ms;
    if (t->first < t->o.steps) accounts_add(&t->time, TIME_START, start_ms);
    int64_t step = train(t);
    bool stopped = step < t->o.steps, saved = stopped ? stop_early(t, step) : finish(t);
    optimizer_settle(&t->optimizer);
    watched(t);
    if (root(t)) accounts_store(&t->time, true);
    log_the_end(t, step, begin_ms, stopped);
    if (root(t)) {
        progress_break();
        if (stopped && saved)
            printf(
                "stopped   by a signal (%s) after %lld of %lld steps; the same command goes on from there\n",
                strsignal(t->stop), (long long)step, (long long)t->o.steps);
        if (*t->o.out) accounts_print(&t->time, stdout);
        fflush(stdout);
    }
    if (!saved)
        cf_die_together(
            "see the warnings above; the same command goes on from the last checkpoint, if there is one",
            "the state after step %lld was not saved", (long long)step);
    return stopped ? STATUS_STOPPED : 0;
}

// What the disk had no room for did not end the run; but a run that lacks it is not done.
static int check_log_and_trace(const trainer *t, int status) {
    const bool whole = log_whole(t->log) && !t->untraced;
    return status == 0 && !whole ? EXIT_FAILURE : status;
}

static void close_trainer(trainer *t) {
    saver_free(t->checkpoints);
    checkpoint_store_close(t->store);
    state_free(&t->copy);
    log_close(t->log);
    optimizer_free(&t->optimizer);
    gpt_free(&t->model);
    cf_check_free(t->context.check);
    if (t->train) tokens_close(t->train);
    if (t->val) tokens_close(t->val);
    if (t->start) model_file_close(t->start);
    if (t->words) vocabulary_close(t->words);
    cf_free(t->loss);
    free(t->inputs);
    free(t->targets);
    free(t->busy);
    cf_trace_free(t->context.trace);
    cf_stream_free(t->context.stream);
    be_patient(t, true); // a log or a trace may take rank 0 longer than the others
    t->transport->close(t->transport);
    cf_mesh_free(&t->mesh);
}

static int export_model(trainer *t) {
    rank_exchange all = all_ranks(t);
    be_patient(t, true);
    // The newest, perhaps, and a run may go on there: what rank 0 has seen counts.
    const double found = (double)t->o.export_step;
    t->o.export_step = (int64_t)figures_exchange(&t->optimizer.figures, &found, 1)[0];
    bool passed_over = false;
    manifest *m = resume_find(&all, t->o.out, t->o.export_step + 1, &passed_over);
    if (!m || m->step != t->o.export_step)
        cf_die_together("choose another with --export-step",
                        "the checkpoint of step %lld in %s cannot be exported", (long long)t->o.export_step,
                        t->o.out);
    take_state(t, m);
    be_patient(t, false);
    write_model(t, m->step, t->o.export_to);
    manifest_free(m);
    return 0;
}

static int train_model(trainer *t) {
    be_patient(t, true);
    check_output(t);
    check_shared_output(t);
    compare_data(t);
    load_state(t);
    meet(t); // whoever has read faster waits here
    be_patient(t, false);
    const log_past past = {t->run, t->first, t->watched};
    if (root(t)) t->log = t->first > 0 ? log_continue(t->o.log, &past) : log_open(t->o.log);
    if (root(t)) accounts_open(&t->time, t->o.out);
    if (*t->o.out) {
        saver_plan plan = {all_ranks(t), t->o.out, t->store, t->o.keep, t->o.keep_every, t->log};
        t->checkpoints = saver_create(plan);
    }
    measure_peak(t);
    log_config(t);
    if (root(t)) banner(t);
    cf_stop_listen(); // from here on; before, every rank finds the same errors and rank 0 tells them
    return check_log_and_trace(t, run(t));
}

// Beside the tokens, or else beside the model file.
static vocabulary *find_words(const options *o) {
    char *first = tokens_first_file(*o->train ? o->train : o->val);
    vocabulary *words = vocabulary_beside(first);
    free(first);
    return words ? words : vocabulary_beside(o->init_from);
}

int main(int argc, char **argv) {
    static trainer t;
    t.lap_ms = cf_now_ms();
    cf_die_meet_by(meet_early);
    options_parse(&t.o, argc, argv);
    if (t.o.help) {
        if (cf_die_rank() == 0) options_help(stdout);
        return 0;
    }
    choose_program(&t.o, argv);
    refuse_what_cannot_be(&t.o);
    bool fixed = options_given(&t.o, "route") || options_given(&t.o, "slices");
    if (fixed && !options_given(&t.o, "overlap")) t.o.overlap = "commfuse";
    cf_die_meet_by(NULL); // they do now
    t.transport = cf_transport_create(t.o.transport, &argc, &argv, t.o.timeout);
    options_agree(&t.o, VERSION, t.transport->size, gather, t.transport);
    signal(SIGXFSZ, SIG_IGN); // a file size limit is then a write error, which is reported and cleaned up
    signal(SIGPIPE, SIG_IGN); // Ctrl-C ends `| tee` first: what is printed then is lost, not what is saved
    make_mesh(&t);
    make_context(&t);
    make_batch(&t);
    set_trace_steps(&t);
    t.words = find_words(&t.o);
    make_model(&t);
    int status = 0;
    if (*t.o.export_to) {
        status = export_model(&t);
    } else {
        open_data(&t);
        if (t.o.dry_run)
            dry_run(&t);
        else
            status = train_model(&t);
    }
    close_trainer(&t);
    return status;
}
