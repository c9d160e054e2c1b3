// See accounts.h. Book-keeping never ends a run: a file that cannot be read is begun anew, one that cannot be
// written is left out.
#include "accounts.h"
#include "../commfuse/device.h"
#include "durable.h"
#include "input.h"
#include "json.h"
#include <stdlib.h>
#include <time.h>

enum { MAX_BYTES = 4096 };
static const double between_stores_ms = 200;
static const char *const purpose_name[TIMES] = {"start", "train", "redo", "save", "watch", "down"};

// Another start may have been before this machine was: only the calendar spans both.
static double wall_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

// 0 if it is no number that can be right.
static double number_in(const cJSON *object, const char *name) {
    double value = 0;
    json_number(object, name, 0, 1e15, &value);
    return value;
}

static void read_back(accounts *a, const char *text) {
    cJSON *object = cJSON_Parse(text);
    double written = number_in(object, "written_unix_s"), down = written > 0 ? (wall_s() - written) * 1e3 : 0;
    for (int i = 0; i < TIMES; i++) a->ms[i] = number_in(object, purpose_name[i]) * 1e3;
    a->starts = (int64_t)number_in(object, "starts");
    a->steps = (int64_t)number_in(object, "steps");
    bool ended = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(object, "ended"));
    if (!ended && down > 0) a->ms[TIME_DOWN] += down;
    cJSON_Delete(object);
}

void accounts_open(accounts *a, const char *out) {
    problem why;
    int64_t size;
    memset(a, 0, sizeof *a);
    if (*out && snprintf(a->path, sizeof a->path, "%s/accounts.json", out) >= (int)sizeof a->path) a->path[0] = 0;
    char *text = *a->path ? input_read_all("accounts", a->path, MAX_BYTES, &size, &why) : NULL;
    if (text) read_back(a, text);
    free(text);
    a->starts++;
}

void accounts_add(accounts *a, time_purpose purpose, double ms) {
    a->ms[purpose] += ms;
}

void accounts_step(accounts *a, int64_t step, double ms) {
    accounts_add(a, step < a->steps ? TIME_REDO : TIME_TRAIN, ms);
    if (a->steps <= step) a->steps = step + 1;
}

void accounts_store(accounts *a, bool ended) {
    problem why;
    double now = cf_now_ms();
    if (!*a->path || (!ended && a->stored_ms > 0 && now - a->stored_ms < between_stores_ms)) return;
    cJSON *object = cJSON_CreateObject();
    cJSON_AddNumberToObject(object, "starts", (double)a->starts);
    cJSON_AddNumberToObject(object, "steps", (double)a->steps);
    for (int i = 0; i < TIMES; i++) cJSON_AddNumberToObject(object, purpose_name[i], a->ms[i] * 1e-3);
    cJSON_AddNumberToObject(object, "written_unix_s", wall_s());
    cJSON_AddBoolToObject(object, "ended", ended);
    char *text = cJSON_Print(object);
    cJSON_Delete(object);
    if (text) durable_replace(a->path, text, (int64_t)strlen(text), true, &why);
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
    fprintf(file, "goodput   %.1f %% of %.1f s:", 100 * accounts_goodput(a), total_ms(a) * 1e-3);
    for (int i = 0; i < TIMES; i++) fprintf(file, "%s %s %.1f s", i > 0 ? "," : "", purpose_name[i], a->ms[i] * 1e-3);
    fprintf(file, "; %lld start%s\n", (long long)a->starts, a->starts == 1 ? "" : "s");
    fflush(file);
}

void accounts_log(const accounts *a, logfile *log) {
    char name[32];
    log_real(log, "goodput", accounts_goodput(a));
    log_int(log, "starts", a->starts);
    for (int i = 0; i < TIMES; i++) {
        snprintf(name, sizeof name, "%s_s", purpose_name[i]);
        log_real(log, name, a->ms[i] * 1e-3);
    }
}
