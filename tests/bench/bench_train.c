// Training steps in several overlap modes, which take turns: what a schedule, or a policy, does to the time of a whole step.
//
//     mpirun -np N bench_train [--modes none,slice:4,ring:4,auto,nowire,ideal] [--rounds R] [--json] [train_gpt's options]
//
// A mode is a schedule as of train_gpt's --overlap, and after it, joined by +, words of its policy (layers/overlap.h), as in
// ring:4+ready+table+ahead2: end, ready, owners or auto are --gradients, table or rows --embedding, aheadN is --prefetch N. These
// options themselves set what the modes leave open.
//
// Each mode trains a model of its own, from the same weights on the same random tokens, so that losses of the same
// step must agree (those of nowire and ideal are wrong by construction). All of them live in one process, and a round is one
// step of each, in an order drawn anew. So seconds lie between what is compared, not the minutes between one run and
// the next, and whatever slows the machine down for longer than a step slows all modes alike. That is fair because
// nothing is on its way between two steps: gradients have been reduced at the end of a step, and what is left of an
// update, and all that it sends, is done in the next forward of the same model.
//
// The step is train_gpt's: forward, backward, figures of the step before, norm, clip, update, and lasts by rank 0's clock
// until the next one begins, on all ranks; batch = micro-batch × dp. The first round is not counted. At the end
// a table of medians; --json prints besides a line of configuration, one for each step as it is done, and one at the end, for
// scripts/experiments to draw conclusions from. The table says which modes do not differ from the best: those half of whose steps, the middle ones, lie where half
// of its steps lie; and which are below `ideal`, which no schedule can be.
//
// Of train_gpt's other options those apply that shape the model, the mesh, the micro-batch and the update; and for auto --plan
// FILE, or --out DIR: DIR/plan.json is read if it is there, else written when trials, before the rounds, have found a plan.
#include "../../commfuse/base/die.h"
#include "../../data/run/options.h"
#include "../../data/run/plan.h"
#include "../../layers/model.h"
#include "../../layers/operations.h"
#include "../../layers/kernels/peak.h"
#include "../../layers/random.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ENTRANTS_MAX = 16, ROUNDS_MAX = 100000, LOSS_ROUNDS = 100, GPT2_VOCABULARY = 50257, ORDER_STREAM = 1, TOKEN_STREAM = 2 };
int64_t emulator_host_calls(void) __attribute__((weak)); // by the emulator's clock alone
enum { TELL_EXPOSED, TELL_COMM, TELLS };
static const char usage[] = "bench_train [--modes NAME[:SLICES][+end|+ready|+owners|+auto][+table|+rows][+aheadN],…] [--rounds R] "
                            "[--json]; train_gpt --help lists the names, under --overlap";
static const char *const applies[] = {
    "model",        "layers",       "channels",  "heads",       "seq",        "vocab",        "tp",
    "dp",           "strategy",     "transport", "micro-batch", "lr",         "weight-decay", "beta1",
    "beta2",        "eps",          "clip",      "seed",        "threads",    "peak-tflops",  "recompute",
    "timeout",      "plan",         "out",       "gradients",   "prefetch",   "embedding",    "ranks-per-host",
    "network-gbit", "reduce-dtype", "block",     "norm-eps",    "rope-theta", "ffn",          "kv-heads",
    "optimizer",    "momentum"};
static const char *const gradients_words[] = {"end", "ready", "owners", "auto"}, *const embedding_words[] = {"table", "rows"};

typedef struct step_row { // of one step; ms by rank 0's clock, exposed_ms and comm_ms the longest of all ranks
    double ms, exposed_ms, exposed_mean_ms, comm_ms, loss;
    int64_t bytes, calls;
} step_row;

typedef struct entrant {
    char name[64]; // as asked for
    overlap how;
    run_plan plan; // of mode auto
    int64_t trials;
    gpt model;
    gpt_step step;
    step_row *row;                                  // [1 + rounds]
    double p10, q1, median_ms, q3, p90, exposed_ms; // of the steps, and the median exposed time
} entrant;

typedef struct bench {
    options o;
    const char *modes;
    int64_t rounds;
    bool json;
    cf_transport *transport;
    cf_context context;
    cf_mesh mesh;
    gpt_shape shape;
    entrant entrant[ENTRANTS_MAX];
    int entrants;
    entrant *last; // whose step has not been reported yet
    int64_t last_round, sent, calls;
    double begun_ms;
    int32_t *tokens; // (T + 1, B): inputs, and targets a row later
    double peak;     // flop/s of all ranks
    const char *peak_source;
} bench;

// --- command line ---

static int64_t whole_number(const char *option, const char *text, int64_t most) {
    char *end;
    int64_t number = *text >= '0' && *text <= '9' ? strtoll(text, &end, 10) : 0;
    if (number < 1 || number > most || *end)
        cf_die_together(usage, "%s %s: not a whole number from 1 to %lld", option, text, (long long)most);
    return number;
}

static bool is_one_of(const char *name, const char *const *list, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (strcmp(name, list[i]) == 0) return true;
    return false;
}

static void refuse_what_does_not_apply(const options *o) {
    for (const option_row *row = options_table; row < options_table + OPTIONS; row++)
        if (o->given[row - options_table] && !is_one_of(row->name, applies, sizeof applies / sizeof *applies))
            cf_die_together(usage, "--%s says nothing here", row->name);
}

// What is left goes to train_gpt's parser.
static void parse(bench *b, int argc, char **argv) {
    int kept = 1;
    b->rounds = 10;
    b->modes = "none,slice,ring,auto,nowire,ideal";
    for (int i = 1; i < argc; i++) {
        bool modes = strcmp(argv[i], "--modes") == 0, rounds = strcmp(argv[i], "--rounds") == 0;
        if ((modes || rounds) && i + 1 == argc) cf_die_together(usage, "%s needs a value", argv[i]);
        if (modes)
            b->modes = argv[++i];
        else if (rounds)
            b->rounds = whole_number("--rounds", argv[++i], ROUNDS_MAX);
        else if (strcmp(argv[i], "--json") == 0)
            b->json = true;
        else
            argv[kept++] = argv[i];
    }
    options_parse(&b->o, kept, argv);
    refuse_what_does_not_apply(&b->o);
}

// false: no such word, or one of its kind was there.
static bool take_word(const char *word, const char **gradients, int64_t *prefetch, const char **embedding) {
    const char **kind = is_one_of(word, embedding_words, 2) ? embedding : is_one_of(word, gradients_words, 4) ? gradients : NULL;
    int ahead = -1, end = 0;
    if (sscanf(word, "ahead%4d%n", &ahead, &end) == 1 && !word[end] && ahead >= 0 && *prefetch < 0) return *prefetch = ahead, true;
    if (!kind || *kind) return false;
    return *kind = word, true;
}

static void add_entrant(bench *b, const char *text, size_t length) {
    if (b->entrants == ENTRANTS_MAX) cf_die_together(usage, "--modes: more than %d", ENTRANTS_MAX);
    entrant *e = &b->entrant[b->entrants++];
    char words[sizeof e->name], *rest = words;
    if (length >= sizeof e->name) cf_die_together(usage, "--modes: there is no mode %.*s", (int)length, text);
    snprintf(e->name, sizeof e->name, "%.*s", (int)length, text);
    memcpy(words, e->name, sizeof words);
    const char *schedule = strsep(&rest, "+"), *gradients = NULL, *embedding = NULL;
    int64_t prefetch = -1;
    while (rest) {
        const char *word = strsep(&rest, "+");
        if (!take_word(word, &gradients, &prefetch, &embedding))
            cf_die_together(usage, "--modes %s: there is no word %s, or another of its kind is before it", e->name, word);
    }
    if (!overlap_parse(&e->how, schedule, gradients ? gradients : b->o.gradients, prefetch < 0 ? b->o.prefetch : prefetch,
                       embedding ? embedding : b->o.embedding))
        cf_die_together(usage, "--modes: there is no mode %s", e->name);
    e->how.round_gradients = strcmp(b->o.reduce_dtype, "bf16") == 0;
}

static void choose_entrants(bench *b) {
    for (const char *at = b->modes;; at++) {
        size_t length = strcspn(at, ",");
        add_entrant(b, at, length);
        at += length;
        if (!*at) return;
    }
}

// --- setting up ---

static void make_mesh(bench *b) {
    options *o = &b->o;
    int ranks = b->transport->size;
    if (o->tp == 0) o->tp = o->dp > 0 && ranks % o->dp == 0 ? ranks / o->dp : 1;
    if (o->dp == 0) o->dp = ranks % o->tp == 0 ? ranks / o->tp : 1;
    if (o->ranks_per_host > 0) b->transport->ranks_per_host = (int)o->ranks_per_host;
    b->transport->collectives = false; // of their own, as in train_gpt
    for (int i = 0; i < b->entrants; i++) {
        const cf_algorithm *algorithm = b->entrant[i].how.schedule.algorithm;
        b->transport->collectives |= algorithm && algorithm->native;
    }
    cf_mesh_init(&b->mesh, ranks, b->transport->rank, (int)o->tp, (int)o->dp);
    cf_mesh_bind(b->transport, &b->mesh);
}

static void make_context(bench *b) {
    if (b->o.threads == 0) b->o.threads = 1;
    cf_device_threads((int)b->o.threads);
    cf_context_start(&b->context, b->transport, (int)b->o.threads);
}

static void choose_shape(bench *b) {
    options *o = &b->o;
    gpt_shape *s = &b->shape;
    *s = params_named(o->model);
    if (!s->block) s->block = params_block_named(o->block);
    if (o->kv_heads > 0) s->KV = o->kv_heads;
    if (o->ffn > 0) s->F = o->ffn;
    if (o->given[OPTION_rope_theta]) s->rotary.theta = o->rope_theta;
    s->norm_eps = o->norm_eps;
    if (o->layers > 0) s->L = o->layers;
    if (o->channels > 0) s->C = o->channels;
    if (o->heads > 0) s->H = o->heads;
    s->maxT = o->seq;
    s->V = o->vocab > 0 ? o->vocab : s->V > 0 ? s->V : GPT2_VOCABULARY;
    s->Vp = (s->V + VOCABULARY_PADDING - 1) / VOCABULARY_PADDING * VOCABULARY_PADDING;
    o->layers = s->L, o->channels = s->C, o->heads = s->H, o->vocab = s->V;
    *s = params_filled(*s);
    o->block = s->block->name, o->kv_heads = s->KV, o->ffn = s->F; // for plans
}

// found: the choices of an earlier tuner; NULL: those of --plan or --out, or they are to be found.
static void make_model(bench *b, entrant *e, const cf_tuner *found) {
    const options *o = &b->o;
    gpt_setup setup = {
        .shape = b->shape, .optimizer = optimizer_find(o->optimizer), .T = o->seq, .B = o->micro_batch, .how = e->how};
    setup.strategy = strcmp(o->strategy, "up") == 0 ? STRATEGY_UP : STRATEGY_TPSP, setup.recompute = strcmp(o->recompute, "1") == 0;
    gpt_create(&e->model, &b->context, &b->mesh, &setup);
    gpt_step_create(&e->step, &e->model);
    if (!e->how.schedule.algorithm && b->transport->size > 1) {
        plan_create(&e->plan, gpt_create_tuner(&e->model), o, b->transport, "bench_train", NULL);
        for (int i = 0; found && i < cf_tuner_operations(found); i++)
            cf_tuner_set(e->plan.tuner, cf_tuner_operation(found, i).name, cf_tuner_operation(found, i).choice);
        const bool known = plan_start(&e->plan, false, e->plan.text || found ? 0 : PLAN_WORTH_STEPS);
        if (e->plan.text && !known)
            cf_die_together("remove it", "the plan in --out %s is not one of these modes, ranks and shapes", o->out);
    }
    params_init(&e->model.params, (uint64_t)o->seed, b->context.stream);
    zero_start(&e->model.zero);
}

static void free_model(entrant *e) {
    gpt_finish_step(&e->step);
    zero_finish_weights(&e->model.zero);
    plan_free(&e->plan);
    gpt_step_free(&e->step);
    gpt_free(&e->model);
}

static void make_models(bench *b) {
    const options *o = &b->o;
    for (int i = 0; i < b->entrants; i++) {
        entrant *e = &b->entrant[i];
        make_model(b, e, NULL);
        e->row = calloc((size_t)b->rounds + 1, sizeof *e->row);
        if (!e->row) cf_die(NULL, "out of memory for %lld steps", (long long)b->rounds);
    }
    b->tokens = calloc((size_t)((o->seq + 1) * o->micro_batch), sizeof *b->tokens);
    if (!b->tokens) cf_die(NULL, "out of memory for the tokens of a micro-batch");
}

// Once before the steps and once after them, the better one counts: a slow moment would flatter every MFU.
static void measure_peak(bench *b) {
    b->peak_source = "--peak-tflops";
    if (b->o.peak_tflops > 0) {
        b->peak = b->o.peak_tflops * 1e12 * b->transport->size;
        return;
    }
    double cores = (double)b->transport->local_cores / b->transport->local_size;
    b->peak = fmax(b->peak, peak_flops(false, &b->peak_source, cores, b->transport, b->context.stream));
}

// --- measuring ---

// The same for all modes, other ones for every round and replica.
static void draw_tokens(bench *b, int64_t round) {
    int64_t count = (b->o.seq + 1) * b->o.micro_batch;
    uint64_t stream = TOKEN_STREAM + (uint64_t)(round * b->mesh.dp + b->mesh.dp_group.rank);
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits[4];
        random_bits((uint64_t)b->o.seed, stream, (uint64_t)i, bits);
        b->tokens[i] = (int32_t)(bits[0] % (uint64_t)b->shape.V);
    }
}

static void print_step(const entrant *e, int64_t round) {
    const step_row *r = &e->row[round];
    printf("{\"event\":\"step\",\"mode\":\"%s\",\"round\":%lld,\"step_ms\":%.4f,\"exposed_comm_ms\":%.4f,"
           "\"exposed_mean_ms\":%.4f,\"comm_ms\":%.4f,\"loss\":%.9g,\"bytes_sent_rank0\":%lld,\"host_calls\":%lld}\n",
           e->name, (long long)round, r->ms, r->exposed_ms, r->exposed_mean_ms, r->comm_ms, r->loss, (long long)r->bytes,
           (long long)r->calls);
    fflush(stdout);
}

// Of the step before, which travel with the figures of the step in progress.
static void tell(void *bench_, double *values) {
    const bench *b = bench_;
    const cf_trace_figures figures = cf_trace_last(b->context.trace);
    values[TELL_EXPOSED] = figures.exposed_ms, values[TELL_COMM] = figures.comm_ms;
}

// told: of all ranks, rank r's at r · stride.
static void report_last(bench *b, const double *told, int stride) {
    if (!b->last) return;
    step_row *row = &b->last->row[b->last_round];
    for (int rank = 0; rank < b->transport->size; rank++) {
        const double *r = told + rank * stride;
        row->exposed_ms = fmax(row->exposed_ms, r[TELL_EXPOSED]);
        row->exposed_mean_ms += r[TELL_EXPOSED] / b->transport->size;
        row->comm_ms = fmax(row->comm_ms, r[TELL_COMM]);
    }
    if (b->json && b->transport->rank == 0 && !b->last->plan.trying) print_step(b->last, b->last_round);
    b->last = NULL;
}

// One step ends where the next one begins: when all ranks have come so far, so that modes do not wait for each other.
static void turn(bench *b, int64_t round) {
    cf_barrier(&b->context, &b->mesh.world_group);
    const double now_ms = cf_now_ms();
    const int64_t sent = b->transport->bytes_sent, calls = emulator_host_calls ? emulator_host_calls() : 0;
    if (b->last) b->last->row[b->last_round].ms = now_ms - b->begun_ms;
    if (b->last) b->last->row[b->last_round].bytes = sent - b->sent, b->last->row[b->last_round].calls = calls - b->calls;
    b->begun_ms = now_ms;
    b->sent = sent, b->calls = calls;
    b->context.step = (int)round;
    cf_trace_step(b->context.trace, (int)round, b->context.stream);
}

static void load_tokens(void *bench_, int64_t micro, int32_t *inputs, int32_t *targets) {
    const bench *b = bench_;
    const size_t bytes = (size_t)(b->o.seq * b->o.micro_batch) * sizeof *inputs;
    (void)micro;
    memcpy(inputs, b->tokens, bytes);
    memcpy(targets, b->tokens + b->o.micro_batch, bytes);
}

static void take_step(bench *b, entrant *e, int64_t round) {
    const options *o = &b->o;
    const step_batch batch = {
        .T = o->seq, .B = o->micro_batch, .micro_batches = 1, .load = load_tokens, .loader = b, .report = tell, .reporter = b};
    optimizer_settings s = {.lr = o->lr,
                            .beta1 = o->beta1,
                            .beta2 = o->beta2,
                            .eps = o->eps,
                            .weight_decay = o->weight_decay,
                            .step = round + 1,
                            .momentum = o->momentum};
    turn(b, round);
    const step_result *r = gpt_train_step(&e->step, &batch, s, o->clip);
    report_last(b, r->values, REPORT);
    if (!r->finite) gpt_step_die(&e->step, "lower --lr");
    e->row[round].loss = r->loss;
    cf_stream_sync(b->context.stream);
    b->last = e, b->last_round = round;
}

// A permutation, the same on all ranks.
static void draw_order(const bench *b, int64_t round, int *order) {
    for (int i = 0; i < b->entrants; i++) order[i] = i;
    for (int i = b->entrants - 1; i > 0; i--) {
        double drawn = random_uniform(ORDER_STREAM, (uint64_t)round, (uint64_t)i);
        int other = (int)(drawn * (i + 1)), swapped = order[i];
        order[i] = order[other];
        order[other] = swapped;
    }
}

// --- printing ---

static double flops_per_step(const bench *b) {
    return (double)(b->o.micro_batch * b->mesh.dp * b->o.seq) * params_flops(&b->shape, b->o.seq);
}

static void print_config(const bench *b) {
    double memory = (double)cf_memory_bytes() / 1048576;
    if (b->json)
        printf("{\"event\":\"config\",\"ranks\":%d,\"parameters\":%lld,\"flops\":%.17g,\"memory_mib\":%.1f,\"free_mib\":%.1f}\n",
               b->transport->size, (long long)params_count(&b->shape), flops_per_step(b), memory,
               (double)cf_device_memory(1) / 1048576);
    printf("%d ranks = tp %d x dp %d, %s over %s: %lld layers, %lld channels, ", b->transport->size, b->mesh.tp, b->mesh.dp,
           b->o.strategy, b->transport->name, (long long)b->shape.L, (long long)b->shape.C);
    printf("%lld sequences of %lld tokens a step; %.0f MiB a rank\n", (long long)(b->o.micro_batch * b->mesh.dp),
           (long long)b->o.seq, memory);
    const int threads = b->transport->local_size * ((int)b->o.threads + 1), cores = b->transport->local_cores;
    if (threads > cores)
        printf("cores are shared (threads that compute or move bytes on a host: %d, cores: %d): steps with transfers take longer "
               "than on "
               "separate cores\n",
               threads, cores);
    fflush(stdout);
}

static int ascending(const void *x, const void *y) {
    double a = *(const double *)x, b = *(const double *)y;
    return (a > b) - (a < b);
}

// The column "apart": the largest relative difference to the first mode's losses, in the first rounds only, since rounding drives
// two trainings apart, after a thousand steps within a few.
static double loss_difference(const bench *b, const entrant *e) {
    double most = 0;
    for (int64_t i = 0; i <= b->rounds && i <= LOSS_ROUNDS; i++)
        most = fmax(most, fabs(e->row[i].loss / b->entrant[0].row[i].loss - 1));
    return most;
}

static void summarize(const bench *b, entrant *e, double *sorted) {
    const int64_t n = b->rounds;
    for (int64_t k = 0; k < n; k++) sorted[k] = e->row[1 + k].exposed_ms;
    qsort(sorted, (size_t)n, sizeof *sorted, ascending);
    e->exposed_ms = sorted[n / 2];
    for (int64_t k = 0; k < n; k++) sorted[k] = e->row[1 + k].ms;
    qsort(sorted, (size_t)n, sizeof *sorted, ascending);
    e->p10 = sorted[n / 10], e->q1 = sorted[n / 4], e->median_ms = sorted[n / 2];
    e->q3 = sorted[(3 * n - 1) / 4], e->p90 = sorted[(n - 1) * 9 / 10];
}

static bool is_bound(const entrant *e) {
    return e->how.schedule.algorithm && e->how.schedule.algorithm->bound;
}

// ideal: NULL if it did not take part. best: of those whose results are right.
static void print_row(const bench *b, const entrant *e, const entrant *ideal, const entrant *best) {
    const double of_ideal = ideal ? e->median_ms / ideal->median_ms : NAN;
    printf("%-28s %10.1f %10.1f - %8.1f %10.3f %7.1f%% %12.1f %10.6f %10.0e", e->name, e->median_ms, e->p10, e->p90, of_ideal,
           100 * flops_per_step(b) / (e->median_ms * 1e-3) / b->peak, e->exposed_ms, e->row[b->rounds].loss, loss_difference(b, e));
    if (of_ideal < 0.9995) printf("  below ideal: noise, or a wrong measurement");
    if (!is_bound(e) && e != best && e->q1 <= best->q3 && best->q1 <= e->q3) printf("  does not differ from %s", best->name);
    printf("\n");
}

static void print_table(bench *b) {
    double *sorted = calloc((size_t)b->rounds, sizeof *sorted);
    const entrant *ideal = NULL, *best = NULL;
    if (!sorted) cf_die(NULL, "out of memory for a table");
    for (entrant *e = b->entrant; e < b->entrant + b->entrants; e++) {
        summarize(b, e, sorted);
        if (!ideal && is_bound(e) && strcmp(e->how.schedule.algorithm->name, "ideal") == 0) ideal = e;
        if (!is_bound(e) && (!best || e->median_ms < best->median_ms)) best = e;
    }
    printf("\n%-28s %10s %21s %10s %8s %12s %10s %10s\n", "mode", "step, ms", "p10 - p90", "of ideal", "MFU", "exposed, ms",
           "last loss", "apart");
    for (int i = 0; i < b->entrants; i++) print_row(b, &b->entrant[i], ideal, best);
    printf("MFU: of %.3f TFLOP/s (%s)\n", b->peak * 1e-12, b->peak_source);
    free(sorted);
}

static void print_end(bench *b) {
    print_table(b);
    if (b->json)
        printf("{\"event\":\"end\",\"peak_tflops_all_ranks\":%.6g,\"peak_source\":\"%s\"}\n", b->peak * 1e-12, b->peak_source);
}

// Trials come before the rounds; the plan that they find then starts from the same weights as all.
static void tune(bench *b, entrant *e) {
    while (cf_tuner_trying(e->plan.tuner)) {
        cf_barrier(&b->context, &b->mesh.world_group);
        cf_tuner_begin_step(e->plan.tuner);
        if (cf_tuner_trying(e->plan.tuner)) take_step(b, e, 0);
        plan_step(&e->plan, NULL, e->trials++);
    }
    b->last = NULL;
    cf_tuner *found = e->plan.tuner;
    e->plan.tuner = NULL;
    free_model(e);
    make_model(b, e, found);
    cf_tuner_free(found);
}

static void run(bench *b) {
    int order[ENTRANTS_MAX];
    draw_tokens(b, 0);
    for (int i = 0; i < b->entrants; i++)
        if (b->entrant[i].plan.trying) tune(b, &b->entrant[i]);
    for (int64_t round = 0; round <= b->rounds; round++) {
        draw_tokens(b, round);
        draw_order(b, round, order);
        for (int i = 0; i < b->entrants; i++) take_step(b, &b->entrant[order[i]], round);
    }
    turn(b, b->rounds);
    double mine[REPORT_VALUES];
    tell(b, mine);
    double *told = cf_allgather_alloc(b->transport, mine, (int64_t)sizeof mine);
    report_last(b, told, REPORT_VALUES);
    free(told);
}

static void close_bench(bench *b) {
    for (int i = 0; i < b->entrants; i++) {
        free_model(&b->entrant[i]);
        free(b->entrant[i].row);
    }
    free(b->tokens);
    cf_context_stop(&b->context);
    b->transport->close(b->transport);
    cf_mesh_free(&b->mesh);
}

int main(int argc, char **argv) {
    static bench b;
    parse(&b, argc, argv);
    choose_entrants(&b);
    b.transport = cf_transport_create(b.o.transport, &argc, &argv, b.o.timeout);
    make_mesh(&b);
    make_context(&b);
    choose_shape(&b);
    make_models(&b);
    measure_peak(&b);
    if (b.transport->rank == 0) print_config(&b);
    run(&b);
    measure_peak(&b);
    if (b.transport->rank == 0) print_end(&b);
    close_bench(&b);
    return 0;
}
