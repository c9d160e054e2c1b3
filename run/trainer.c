// See trainer.h.
#include "trainer.h"
#include "../commfuse/die.h"
#include "resume.h"
#include <signal.h>
#include <stdlib.h>
#include <string.h>

enum { VOCABULARY_PADDING = 128, RANKS_MAX = 1 << 20 };
enum { PATIENCE = 10 }; // times --timeout: how long ranks wait for one that reads or writes files

// --- options → mesh, shape, data ---

static void refuse_what_cannot_be(const options *o) {
    if (strcmp(o->overlap, "nowire") == 0 && *o->out)
        cf_die_together("leave --out away, or choose another --overlap",
                        "--overlap nowire computes wrong results by construction and saves nothing, but "
                        "--out %s is given",
                        o->out);
    if ((o->save_every > 0 || *o->export_to) && !*o->out)
        cf_die_together("name a directory with --out DIR", "--%s needs --out",
                        *o->export_to ? "export" : "save-every");
    if (o->check_wire && strcmp(o->overlap, "commfuse") != 0)
        cf_die_together(
            "use --overlap commfuse, or leave --check-wire away",
            "--check-wire looks at what ranks exchange in mode commfuse; with --overlap %s there is "
            "nothing for it to look at",
            o->overlap);
    if (o->min_lr > o->lr)
        cf_die_together("lower --min-lr", "--min-lr %g is above --lr %g", o->min_lr, o->lr);
    if (!*o->train && !o->dry_run && !*o->export_to && o->steps > 0)
        cf_die_together("make token files with data/prepare.py, then: --train 'DIR/train_*.bin'",
                        "--train is missing");
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
    t->transport->bind(t->transport, &t->mesh.world_group);
    t->transport->bind(t->transport, &t->mesh.tp_group);
    t->transport->bind(t->transport, &t->mesh.dp_group);
}

static void make_context(trainer *t) {
    options *o = &t->o;
    // From three cores per rank on, one is worth giving to the thread that moves the bytes.
    int share = t->transport->local_cores / t->transport->local_size,
        spare = t->ranks > 1 && share >= 3 ? 1 : 0;
    if (o->threads == 0) o->threads = share > 1 ? share - spare : 1;
    cf_device_threads((int)o->threads);
    t->transport->configure(t->transport, (int)o->threads, o->timeout);
    t->context.transport = t->transport;
    t->context.stream = cf_stream_create();
    t->context.trace = cf_trace_create();
    t->context.step = -1;
}

static void make_batch(trainer *t) {
    options *o = &t->o;
    int64_t pass = o->micro_batch * o->dp;
    if (o->batch == 0) o->batch = pass;
    if (o->batch % pass != 0)
        cf_die_together("batch = micro-batch x dp x accumulation steps",
                        "--batch %lld is not a multiple of --micro-batch %lld x --dp %lld = %lld",
                        (long long)o->batch, (long long)o->micro_batch, (long long)o->dp, (long long)pass);
    t->accumulation = (int)(o->batch / pass);
}

static gpt_shape shape_of_file(trainer *t) {
    const char *fixed[] = {"model", "layers", "channels", "heads", "vocab"};
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
        if (options_given(&t->o, fixed[i]))
            cf_die_together("leave that option away", "--%s is set by the model file %s", fixed[i],
                            t->o.init_from);
    t->start = model_file_open(t->o.init_from);
    model_shape f = model_file_shape(t->start);
    if (!options_given(&t->o, "seq") && t->o.seq > f.maxT) t->o.seq = f.maxT;
    gpt_shape s = {f.maxT, f.V, f.Vp, f.L, f.heads, f.C};
    return s;
}

static gpt_shape shape_of_checkpoint(options *o) {
    problem why = {"", ""};
    manifest *m = o->export_step > 0 ? checkpoint_manifest(o->out, o->export_step, &why)
                                     : checkpoint_latest(o->out, INT64_MAX, &why);
    if (!m)
        cf_die_together("ls it; checkpoints are its directories step_*", "no checkpoint to export in %s%s%s",
                        o->out, *why.what ? ": " : "", why.what);
    gpt_shape s;
    memset(&s, 0, sizeof s);
    s.maxT = resume_number(m, "positions", 0), s.L = resume_number(m, "layers", 0);
    s.C = resume_number(m, "channels", 0), s.H = resume_number(m, "heads", 0),
    s.V = resume_number(m, "vocab", 0);
    s.Vp = (s.V + VOCABULARY_PADDING - 1) / VOCABULARY_PADDING * VOCABULARY_PADDING;
    if (s.maxT < 1 || s.L < 1 || s.C < 1 || s.H < 1 || s.V < 1)
        cf_die_together(NULL, "the checkpoint of step %lld in %s does not say which model it is of",
                        (long long)m->step, o->out);
    o->export_step = m->step, o->seq = s.maxT, o->micro_batch = 1;
    manifest_free(m);
    return s;
}

static gpt_shape shape_of_options(trainer *t) {
    static const struct {
        const char *name;
        int64_t layers, channels, heads;
    } named[] = {{"d6", 6, 384, 6},
                 {"d12", 12, 768, 12},
                 {"d24", 24, 1024, 16},
                 {"d36", 36, 1280, 20},
                 {"d48", 48, 1600, 25}};
    const options *o = &t->o;
    gpt_shape s;
    memset(&s, 0, sizeof s);
    for (size_t i = 0; i < sizeof named / sizeof *named; i++)
        if (strcmp(o->model, named[i].name) == 0)
            s.L = named[i].layers, s.C = named[i].channels, s.H = named[i].heads;
    if (o->layers > 0) s.L = o->layers;
    if (o->channels > 0) s.C = o->channels;
    if (o->heads > 0) s.H = o->heads;
    s.maxT = o->seq;
    s.V = o->vocab > 0 ? o->vocab : vocabulary_size(t->words);
    s.Vp = (s.V + VOCABULARY_PADDING - 1) / VOCABULARY_PADDING * VOCABULARY_PADDING;
    return s;
}

overlap trainer_overlap(const options *o) {
    overlap how;
    memset(&how, 0, sizeof how);
    for (int mode = CF_MODE_NONE; mode <= CF_MODE_NOWIRE; mode++)
        if (strcmp(o->overlap, cf_mode_name((cf_mode)mode)) == 0) how.mode = (cf_mode)mode;
    how.route = strcmp(o->route, "direct") == 0 ? CF_DIRECT : CF_RING;
    how.slices = o->slices > 0 ? (int)o->slices : how.mode == CF_MODE_SLICE ? 4 : 1;
    return how;
}

static void make_model(trainer *t) {
    gpt_shape shape = *t->o.export_to   ? shape_of_checkpoint(&t->o)
                      : *t->o.init_from ? shape_of_file(t)
                                        : shape_of_options(t);
    options *o = &t->o; // from here on the options say what is run, wherever it came from
    o->layers = shape.L, o->channels = shape.C, o->heads = shape.H, o->vocab = shape.V;
    o->slices = trainer_overlap(o).slices;
    if (t->o.dry_run) cf_device_plan_only(true);
    parallel_strategy strategy = strcmp(o->strategy, "up") == 0 ? STRATEGY_UP : STRATEGY_TPSP;
    gpt_create(&t->model, &t->context, &t->mesh, shape, strategy, o->seq, o->micro_batch, trainer_overlap(o));
    optimizer_create(&t->optimizer, &t->model, trainer_overlap(o));
    if (t->o.dry_run) return;
    t->loss = (double *)cf_alloc((int64_t)sizeof(double), "tokens");
    t->inputs = (int32_t *)calloc((size_t)(t->o.seq * t->o.micro_batch), sizeof *t->inputs);
    t->targets = (int32_t *)calloc((size_t)(t->o.seq * t->o.micro_batch), sizeof *t->targets);
    if (!t->inputs || !t->targets) cf_die(NULL, "out of memory for the tokens of a micro-batch");
}

static void open_data(trainer *t) {
    const options *o = &t->o;
    if (*o->train) t->train = tokens_open(o->train, o->seq);
    if (*o->val) t->val = tokens_open(o->val, o->seq);
    if (t->val && o->val_every > 0 && tokens_samples(t->val) < o->batch)
        cf_die_together("use a larger validation set, or a smaller --batch or --seq",
                        "validation set %s has %lld samples of %lld tokens, fewer than one batch of %lld",
                        o->val, (long long)tokens_samples(t->val), (long long)o->seq, (long long)o->batch);
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

void trainer_open(trainer *t, int *argc, char ***argv) {
    refuse_what_cannot_be(&t->o);
    t->transport = cf_transport_create(t->o.transport, argc, argv, t->o.timeout);
    signal(SIGXFSZ, SIG_IGN); // a file size limit is then a write error, which is reported and cleaned up
    make_mesh(t);
    make_context(t);
    make_batch(t);
    set_trace_steps(t);
    t->words = *t->o.train ? vocabulary_beside(t->o.train) : NULL;
    make_model(t);
    if (!*t->o.export_to) open_data(t);
}

void trainer_close(trainer *t) {
    saver_free(t->checkpoints);
    checkpoint_store_close(t->store);
    log_close(t->log);
    optimizer_free(&t->optimizer);
    gpt_free(&t->model);
    if (t->train) tokens_close(t->train);
    if (t->val) tokens_close(t->val);
    if (t->start) model_file_close(t->start);
    if (t->words) vocabulary_close(t->words);
    cf_free(t->loss);
    free(t->inputs);
    free(t->targets);
    cf_trace_free(t->context.trace);
    cf_stream_free(t->context.stream);
    t->transport->close(t->transport);
    cf_mesh_free(&t->mesh);
}

// --- what all parts of a run need ---

bool trainer_root(const trainer *t) {
    return t->mesh.world_group.rank == 0;
}

void trainer_meet(trainer *t) {
    cf_barrier(&t->context, &t->mesh.world_group);
    cf_stream_sync(t->context.stream);
}

void trainer_patient(trainer *t, bool patient) {
    t->transport->configure(t->transport, (int)t->o.threads, (patient ? PATIENCE : 1) * t->o.timeout);
}

void trainer_load(trainer *t, const tokens *data, bool shuffled, int64_t first, int micro) {
    int64_t B = t->o.micro_batch;
    for (int64_t b = 0; b < B; b++) {
        int64_t sample = first + (micro * t->mesh.dp + t->mesh.dp_group.rank) * B + b;
        if (shuffled) sample = tokens_shuffled(data, (uint64_t)t->o.seed, sample);
        tokens_read(data, sample, t->model.params.shape.V, b, B, t->inputs, t->targets);
    }
}
