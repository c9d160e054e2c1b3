// See accounts.h. No error here ends a run: accounts that cannot be read begin at zero; a failed write is ignored.
#include "accounts.h"
#include "../../commfuse/device.h"
#include "../atomic_file.h"
#include "../input.h"
#include "../json.h"
#include "derived.h"
#include <time.h>

enum { MAX_BYTES = 4096 };
static const double between_stores_ms = 200;
static const char *const purpose_name[TIMES] = {"start", "train", "redo", "save", "watch", "down"};

// Calendar time goes on during a restart of the machine; the clock of cf_now_ms() does not.
static double calendar_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

// 0 if the number is missing or out of range.
static double number_in(const cJSON *object, const char *name) {
    double value = 0;
    json_number(object, name, 0, 1e15, &value);
    return value;
}

void accounts_open(accounts *a, const char *out) {
    int64_t size;
    memset(a, 0, sizeof *a);
    if (*out && snprintf(a->path, sizeof a->path, "%s/accounts.json", out) >= (int)sizeof a->path) a->path[0] = 0;
    char *text = *a->path ? input_read_all("accounts", a->path, MAX_BYTES, &size, NULL) : NULL;
    cJSON *object = text ? json_object(text, size, "accounts", NULL, NULL) : NULL;
    const double written = number_in(object, "written_unix_s"), down = written > 0 ? (calendar_s() - written) * 1e3 : 0;
    for (int i = 0; i < TIMES; i++) a->ms[i] = number_in(object, purpose_name[i]) * 1e3;
    a->starts = (int64_t)number_in(object, "starts");
    a->steps = (int64_t)number_in(object, "steps");
    if (down > 0 && !cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(object, "ended"))) a->ms[TIME_DOWN] += down;
    cJSON_Delete(object);
    free(text);
    a->starts++;
}

void accounts_step(accounts *a, int64_t step, double ms) {
    a->ms[step < a->steps ? TIME_REDO : TIME_TRAIN] += ms;
    if (a->steps <= step) a->steps = step + 1;
}

void accounts_store(accounts *a, bool ended) {
    double now = cf_now_ms();
    if (!*a->path || (!ended && a->stored_ms > 0 && now - a->stored_ms < between_stores_ms)) return;
    cJSON *object = cJSON_CreateObject();
    cJSON_AddNumberToObject(object, "starts", (double)a->starts);
    cJSON_AddNumberToObject(object, "steps", (double)a->steps);
    for (int i = 0; i < TIMES; i++) cJSON_AddNumberToObject(object, purpose_name[i], a->ms[i] * 1e-3);
    cJSON_AddNumberToObject(object, "written_unix_s", calendar_s());
    cJSON_AddBoolToObject(object, "ended", ended);
    char *text = cJSON_Print(object);
    cJSON_Delete(object);
    if (text) atomic_file_replace(a->path, text, (int64_t)strlen(text), true, NULL);
    cJSON_free(text);
    a->stored_ms = now;
}

static double total_ms(const accounts *a) {
    double total = 0;
    for (int i = 0; i < TIMES; i++) total += a->ms[i];
    return total;
}

double accounts_goodput(const accounts *a) {
    double total = total_ms(a);
    return total > 0 ? a->ms[TIME_TRAIN] / total : 0;
}

void accounts_print(const accounts *a, FILE *file) {
    cf_print(file, "goodput   %.1f %% of %.1f s:", 100 * accounts_goodput(a), total_ms(a) * 1e-3);
    for (int i = 0; i < TIMES; i++) cf_print(file, "%s %s %.1f s", i > 0 ? "," : "", purpose_name[i], a->ms[i] * 1e-3);
    cf_print(file, "; %ld start%s\n", a->starts, a->starts == 1 ? "" : "s");
    fflush(file);
}

void accounts_log(const accounts *a, logfile *log) {
    char name[32];
    LOG_ADD(log, FIELD("goodput", accounts_goodput(a)), FIELD("starts", a->starts));
    for (int i = 0; i < TIMES; i++) {
        snprintf(name, sizeof name, "%s_s", purpose_name[i]);
        LOG_ADD(log, FIELD(name, a->ms[i] * 1e-3));
    }
}

// --- the overlap audit --------------------------------------------------------------------------------------

enum { SHOWN = 8 };
static const double HIDDEN = 0.95;

typedef struct rank_totals {
    int count;
    int64_t steps;
    cf_trace_total total[CF_TRACE_TOTALS];
} rank_totals;

static int by_exposed(const void *a, const void *b) {
    const double x = ((const cf_trace_total *)a)->exposed_ms, y = ((const cf_trace_total *)b)->exposed_ms;
    return (x < y) - (x > y);
}

// Sums operations over ranks by name: the lists differ, because a rank that has nothing to send lacks an operation.
static rank_totals merge(const rank_totals *all, int ranks) {
    rank_totals sum = {.steps = all->steps};
    for (int rank = 0; rank < ranks; rank++)
        for (int i = 0; i < all[rank].count; i++) {
            const cf_trace_total *from = &all[rank].total[i];
            int at = 0;
            while (at < sum.count && strcmp(sum.total[at].name, from->name) != 0) at++;
            if (at == CF_TRACE_TOTALS) continue;
            cf_trace_total *to = &sum.total[at];
            if (at == sum.count) memcpy(sum.total[sum.count++].name, from->name, sizeof from->name);
            to->comm_ms += from->comm_ms, to->exposed_ms += from->exposed_ms;
            to->bytes += from->bytes, to->transfers += from->transfers;
        }
    qsort(sum.total, (size_t)sum.count, sizeof *sum.total, by_exposed);
    return sum;
}

// The first limit that applies, by the costs of a transfer on this machine. option: what to try.
static const char *bound_of(const cf_trace_total *t, double hidden, const cf_costs *costs, const options *opt, char *option,
                            size_t room) {
    const cf_choice schedule = derived_schedule(opt);
    const bool blocking = schedule.algorithm && schedule.algorithm->blocking,
               cut = schedule.algorithm && schedule.algorithm->native;
    const double latency_s = (double)t->transfers * costs->latency_s, wire_s = (double)t->bytes / costs->bytes_per_s;
    *option = 0;
    if (hidden >= HIDDEN) return "nothing";
    if (blocking) {
        snprintf(option, room, "--overlap auto");
        return "blocking";
    }
    if (!costs->spare && opt->threads > 1) snprintf(option, room, "--threads %ld", opt->threads - 1);
    if (!costs->spare && opt->threads <= 1) snprintf(option, room, "fewer ranks on a host");
    if (!costs->spare) return "no core to spare";
    snprintf(option, room, "--micro-batch %ld", 2 * opt->micro_batch);
    if (latency_s > wire_s && schedule.algorithm && schedule.slices > 1)
        snprintf(option, room, "--overlap %s:%d", schedule.algorithm->name, schedule.slices / 2);
    if (latency_s > wire_s) return "latency";
    if (cut) snprintf(option, room, "--overlap auto"); // nothing hides its first or last slice
    return cut ? "chunking" : "bandwidth";
}

void accounts_audit(const cf_trace *trace, cf_transport *transport, const options *opt, logfile *log) {
    rank_totals mine = {0};
    const cf_trace_total *totals = cf_trace_totals(trace, &mine.count, &mine.steps);
    memcpy(mine.total, totals, (size_t)mine.count * sizeof *totals);
    rank_totals *all = cf_allgather_alloc(transport, &mine, sizeof mine);
    const rank_totals sum = merge(all, transport->size);
    free(all);
    if (transport->rank != 0 || sum.steps == 0 || sum.count == 0) return;
    const double share = 1 / ((double)sum.steps * transport->size);
    cf_print(stdout, "overlap   %-27s %11s  %10s  %7s  %-16s %s\n", "operation, per step and rank", "transfer ms", "exposed ms",
             "hidden", "bound", "option to try");
    for (int i = 0; i < sum.count; i++) {
        const cf_trace_total *t = &sum.total[i];
        const double hidden = t->comm_ms > t->exposed_ms ? 1 - t->exposed_ms / t->comm_ms : 0;
        char option[64];
        const char *bound = bound_of(t, hidden, &transport->costs, opt, option, sizeof option);
        if (i < SHOWN)
            cf_print(stdout, "  %-35s %11.3f  %10.3f  %5.1f %%  %-16s %s\n", t->name, t->comm_ms * share, t->exposed_ms * share,
                     100 * hidden, bound, option);
        LOG_LINE(log, "audit", FIELD("operation", t->name), FIELD("comm_ms", t->comm_ms * share),
                 FIELD("exposed_ms", t->exposed_ms * share), FIELD("hidden", hidden), FIELD("transfers", t->transfers * share),
                 FIELD("bytes", t->bytes * share), FIELD("bound", bound), FIELD("try", option));
    }
}
