// See log.h. A line is built as a cJSON object and printed compactly when it ends. Numbers go in as raw text,
// because cJSON holds every number as a double and prints 15 digits where those seem near enough.
//
// Whoever writes a log holds PATH.lock meanwhile. A log is never written over: a run that begins where there is one gives
// it another name, as does one that goes on where there is another's.
#include "log.h"
#include "durable.h"
#include "json.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { KEPT_MAX = 9999 };

struct logfile {
    int fd, lock; // lock: -1 if there is none
    char path[PATH_MAX], lock_path[PATH_MAX];
    cJSON *line; // between log_begin and log_end
    int64_t missing;
    bool failing; // the last line could not be written
    atomic_bool unsynced;
};

CF_NORETURN static void die_unwritable(const char *path) {
    cf_die(errno == ENOSPC || errno == EDQUOT || errno == EFBIG ? "free space on its disk, or give another --log"
                                                                : "give another --log",
           "log %s cannot be written: %s", path, strerror(errno));
}

static void name_of(char name[PATH_MAX], const char *path, const char *suffix) {
    if (snprintf(name, PATH_MAX, "%s%s", path, suffix) >= PATH_MAX)
        cf_die("choose a shorter --log", "the name of log %s is too long", path);
}

static bool is_file(int fd) {
    struct stat status;
    return fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
}

static void open_name(logfile *log, const char *path) {
    if (log->fd >= 0) close(log->fd); // that of another name by now
    log->fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (log->fd < 0) die_unwritable(path);
}

bool log_empty(const logfile *log) {
    return !log || lseek(log->fd, 0, SEEK_END) <= 0;
}

// It becomes the first of FILE.1, FILE.2, … that is free.
static void set_aside(logfile *log, const char *whose) {
    char kept[PATH_MAX], suffix[16];
    for (int i = 1; i <= KEPT_MAX; i++) {
        snprintf(suffix, sizeof suffix, ".%d", i);
        name_of(kept, log->path, suffix);
        if (access(kept, F_OK) == 0) continue;
        if (rename(log->path, kept) != 0) die_unwritable(kept);
        printf("log       of %s run is kept as %s\n", whose, kept);
        open_name(log, log->path);
        return;
    }
    cf_die("remove old ones, or give another --log", "there are %d logs of the name %s already", KEPT_MAX, log->path);
}

// --- going on ---

// A line that is no object of ours is somebody's, and stays.
static bool stays(const cJSON *line, const log_past *past) {
    double at;
    if (json_is(line, "event", "end") || json_is(line, "event", "audit")) return false;
    if (!json_text(line, "event") || !json_number(line, "step", -INFINITY, INFINITY, &at)) return true;
    bool watched = json_is(line, "event", "val") || json_is(line, "event", "sample") || json_is(line, "event", "hellaswag");
    bool again = json_is(line, "event", "step") || json_is(line, "event", "skip") || (watched && !past->watched);
    return at < (double)past->step + !again;
}

// What is kept of the log takes its place. False if it is another run's: the first line that describes a run says whose it is.
static bool cut(const logfile *log, const log_past *past) {
    problem why;
    durable_file kept;
    char *text = NULL;
    size_t room = 0;
    bool ours = false, others = false;
    FILE *from = fopen(log->path, "r");
    if (!from) die_unwritable(log->path);
    bool well = durable_create(&kept, log->path, -1, &why);
    for (ssize_t length; well && !others && (length = getline(&text, &room, from)) > 0;) {
        if (text[length - 1] != '\n') break; // cut short
        cJSON *line = cJSON_Parse(text);
        if (!ours && json_is(line, "event", "config")) {
            ours = json_is(line, "run", past->run);
            others = !ours;
        }
        if (stays(line, past)) well = durable_append(&kept, text, length, &why);
        cJSON_Delete(line);
    }
    well = well && (!ferror(from) || durable_problem(&why, "cannot read", log->path, -1)) && (!ours || durable_commit(&kept, &why));
    durable_abandon(&kept);
    fclose(from);
    free(text);
    if (!well) cf_die(*why.hint ? why.hint : "give another --log", "log: %s", why.what);
    return ours;
}

logfile *log_open(const char *path, const log_past *past) {
    char in_use[PATH_MAX + 32];
    problem why;
    if (!path || !*path) return NULL;
    logfile *log = cf_host_alloc(1, sizeof *log, path);
    log->fd = log->lock = -1;
    open_name(log, path);
    if (!is_file(log->fd)) { // it has no lock, and nothing in it that could be lost
        name_of(log->path, path, "");
        return log;
    }
    if (!realpath(path, log->path)) die_unwritable(path); // a link stays one
    name_of(log->lock_path, log->path, ".lock");
    snprintf(in_use, sizeof in_use, "another run writes log %s", path);
    log->lock = durable_lock(log->lock_path, in_use, &why);
    if (log->lock < 0 && errno == EWOULDBLOCK) cf_die("wait for it, end it, or give another --log", "%s", why.what);
    if (log->lock < 0) // a log without is better than none
        fprintf(stderr, "note: %s: see to it that no other run writes log %s\n", why.what, path);
    if (log_empty(log)) return log;
    if (past && cut(log, past))
        open_name(log, log->path);
    else
        set_aside(log, past ? "another" : "an earlier");
    return log;
}

// --- writing ---

// Every addition comes through here: the object is there, and cJSON had memory.
static void check(const logfile *log, const void *added, const char *name) {
    if (!log->line) cf_die(NULL, "log %s: %s outside log_begin and log_end", log->path, name);
    if (!added) cf_die(NULL, "log %s: out of memory for %s", log->path, name);
}

void log_begin(logfile *log, const char *event) {
    if (!log) return;
    if (log->line) cf_die(NULL, "log %s: %s begins within another line", log->path, event);
    log->line = cJSON_CreateObject();
    log_text(log, "event", event);
}

void log_int(logfile *log, const char *name, int64_t value) {
    if (!log) return;
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)value);
    check(log, cJSON_AddRawToObject(log->line, name, text), name);
}

void log_real(logfile *log, const char *name, double value) {
    if (!log) return;
    char text[40] = "null"; // JSON has no NaN and no infinity
    for (int digits = 15; digits <= 17 && isfinite(value); digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;
    }
    check(log, cJSON_AddRawToObject(log->line, name, text), name);
}

void log_true(logfile *log, const char *name) {
    if (log) check(log, cJSON_AddTrueToObject(log->line, name), name);
}

void log_text(logfile *log, const char *name, const char *value) {
    if (!log) return;
    char *clean = cf_host_alloc(3 * (int64_t)strlen(value) + 1, 1, log->path), *to = clean;
    while (*value) {
        int length = cf_utf8_bytes(value);
        memcpy(to, length ? value : "\xEF\xBF\xBD", length ? (size_t)length : 3);
        to += length ? length : 3;
        value += length ? length : 1;
    }
    check(log, cJSON_AddStringToObject(log->line, name, clean), name);
    free(clean);
}

// A line is there whole or not at all.
void log_end(logfile *log) {
    if (!log) return;
    check(log, log->line, "log_end");
    char *text = cJSON_PrintUnformatted(log->line);
    check(log, text, "the line");
    const int64_t length = (int64_t)strlen(text), whole = lseek(log->fd, 0, SEEK_END);
    text[length] = '\n'; // in place of the terminator
    const bool written = durable_write(log->fd, text, length + 1);
    if (!written && !log->failing)
        fprintf(stderr, "\nwarning: log %s cannot be written: %s; the run goes on without these lines\n", log->path,
                strerror(errno));
    if (!written && whole >= 0 && is_file(log->fd) && ftruncate(log->fd, whole) != 0) log->missing++; // and one is cut short
    log->missing += !written;
    log->failing = !written;
    cJSON_free(text);
    cJSON_Delete(log->line);
    log->line = NULL;
}

bool log_whole(const logfile *log) {
    if (!log) return true;
    const bool unsynced = atomic_load(&log->unsynced);
    if (log->missing > 0)
        fprintf(stderr, "error: log %s lacks %lld lines, which could not be written\n", log->path, (long long)log->missing);
    if (unsynced) fprintf(stderr, "error: log %s could not be synced: its disk may have lost lines\n", log->path);
    return log->missing == 0 && !unsynced;
}

void log_sync(logfile *log) {
    if (!log || !is_file(log->fd) || fsync(log->fd) == 0 || atomic_exchange(&log->unsynced, true)) return;
    fprintf(stderr, "\nwarning: log %s cannot be synced: %s; the run goes on\n", log->path, strerror(errno));
}

void log_close(logfile *log) {
    if (!log) return;
    cJSON_Delete(log->line);
    close(log->fd);
    durable_unlock(log->lock, log->lock_path);
    free(log);
}
